"""Counted operations against hand counts, XLA's own counts of straight-line code, and the stack's depth times a layer's."""
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import pytest

import linen_stack as ls
from linen_stack.inspect import chips, flops
from linen_stack.inspect.estimate import Estimator
from linen_stack.inspect.programs import as_mesh, as_rules, gradients
from linen_stack.inspect.recompute import Recompute
from linen_stack.models import DecoderLayer
from linen_stack.models.qwen3_next import Qwen3NextLayer
from tests.tagged import abstract, loss_of, plan

F32 = jnp.float32
S = jax.ShapeDtypeStruct
TOPOLOGY = chips.topology("v5p:2x2x1")


def matmul(x, w):
  return jnp.tanh(x @ w)


X, W = S((5, 8), F32), S((8, 8), F32)
ONE = 2 * 5 * 8 * 8


def looped(x, w, length=7):
  return lax.scan(lambda x, _: (matmul(x, w), None), x, length=length)[0]


@jax.custom_vjp
def kernel(x, w):
  return matmul(x, w)


kernel.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))


@pytest.mark.parametrize("fn, count", [
    (matmul, 1),
    (jax.jit(matmul), 1),
    (jax.checkpoint(matmul), 1),
    (kernel, 1),
    (looped, 7),
    (lambda x, w: looped(looped(x, w), w, 3), 10),
    (lambda x, w: lax.scan(lambda x, _: (looped(x, w), None), x, length=3)[0], 21),
    (lambda x, w: lax.cond(x[0, 0] > 0, matmul, lambda x, w: matmul(matmul(x, w), w), x, w), 2),
    (lambda x, w: lax.fori_loop(0, 4, lambda i, x: matmul(x, w), x), 4),
    (lambda x, w: jax.vmap(lambda row: matmul(row, w))(x), 1),
    (lambda x, w: (looped(x, w), matmul(x, w))[1], 1),
    (jax.grad(lambda x, w: matmul(x, w).sum(), (0, 1)), 3),
    (jax.grad(lambda x, w: jax.checkpoint(lambda x: matmul(jnp.sin(matmul(x, w)), w))(x).sum()), 4),
    (jax.value_and_grad(lambda x, w: kernel(x, w).sum(), (0, 1)), 3),
], ids=["product", "jit", "remat", "custom_vjp", "scan", "scans", "nested scan", "cond", "fori", "vmap", "dead code",
        "gradient", "gradient of remat", "gradient of custom_vjp"])
def test_products_through_control_flow(fn, count):
  assert flops.cost(fn, X, W).flops == count * ONE


def test_carries_that_only_later_steps_need_are_counted():
  def body(carry, _):
    a, b = carry
    return (matmul(a, jnp.eye(8)), a), None

  # Of the second carry alone, which is the first one a step before.
  assert flops.cost(lambda x: lax.scan(body, (x, x), length=6)[0][1], X).flops == 6 * ONE
  swap = lambda x: lax.scan(lambda c, _: ((c[1], jnp.sin(c[0])), matmul(c[0], jnp.eye(8))), (x, x), length=6)[0][0]
  assert flops.cost(swap, X).flops == 0


def test_loops_of_unknown_length_are_told():
  cost = flops.cost(lambda x, w: lax.while_loop(lambda x: x.sum() < 9, lambda x: matmul(x, w), x), X, W)
  assert (cost.flops, cost.open_loops) == (ONE, 1)


@pytest.mark.parametrize("spec, shapes", [
    ("abc,acd->abd", ((3, 4, 5), (3, 5, 6))), ("ab,cd->abcd", ((2, 3), (4, 5))), ("abcd,cd->ab", ((2, 3, 4, 5), (4, 5)))])
def test_general_products(spec, shapes):
  sizes = dict(zip(spec.split("->")[0].replace(",", ""), [size for shape in shapes for size in shape]))
  want = 2
  for size in sizes.values():
    want *= size
  assert flops.cost(functools.partial(jnp.einsum, spec), *(S(shape, F32) for shape in shapes)).flops == want


def test_grouped_products_and_their_gradients():
  def run(x, w, sizes):
    return lax.ragged_dot(x, w, sizes).sum()

  args = S((12, 8), F32), S((3, 8, 5), F32), S((3,), jnp.int32)
  one = 2 * 12 * 8 * 5  # each row meets one group
  assert flops.cost(run, *args).flops == one
  assert flops.cost(jax.value_and_grad(run, (0, 1)), *args).flops == 3 * one


def test_convolutions():
  conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="VALID",
                           dimension_numbers=("NWC", "WIO", "NWC"))
  x, w = S((2, 10, 6), F32), S((3, 6, 4), F32)
  assert flops.cost(conv, x, w).flops == 2 * (2 * 8 * 4) * (3 * 6)
  grouped = functools.partial(conv, feature_group_count=6)
  assert flops.cost(grouped, x, S((3, 1, 6), F32)).flops == 2 * (2 * 8 * 6) * 3


def test_each_shard_of_a_shard_map_counts():
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
  fn = jax.shard_map(matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
  assert flops.cost(fn, S((8, 8), F32), W).flops == 2 * 8 * 8 * 8


def test_straight_line_code_against_xla():
  def run(x, w):
    for _ in range(3):
      x = matmul(x, w)
    return (x ** 2).sum()

  x, w = S((64, 64), F32), S((64, 64), F32)
  counted = flops.cost(jax.grad(run, (0, 1)), x, w)
  analysis = jax.jit(jax.grad(run, (0, 1))).lower(x, w).compile().cost_analysis()
  analysis = analysis[0] if isinstance(analysis, list) else analysis
  assert counted.flops <= analysis["flops"] <= counted.flops + 2 * counted.vector


def test_seconds_go_by_whichever_takes_longer():
  chip = TOPOLOGY.chip
  wide = flops.cost(jnp.matmul, S((4096, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16), chip=chip)
  assert wide.seconds == pytest.approx(2 * 4096**3 / chip.peak)
  thin = flops.cost(jnp.matmul, S((1, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16), chip=chip, devices=2)
  assert thin.seconds == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / chip.bandwidth / 2)


def test_what_goes_to_the_host_and_back_is_moved():
  host, device = jax.memory.Space.Host, jax.memory.Space.Device
  cost = flops.cost(lambda x: jax.device_put(jax.device_put(x, host), device), X)
  assert (cost.flops, cost.vector, cost.bytes) == (0, 0, 2 * 5 * 8 * 4)


# Stacks --------------------------------------------------------------------------------------------------------------------

LAYER = dict(embed=32, mlp=64, num_heads=4, num_kv_heads=2)
LOCAL, WIDE = (ls.LayerSpec(DecoderLayer, name, window=window, **LAYER) for name, window in (("local", 4), ("wide", None)))
HIDDEN = S((2, 8, 32), F32)


@functools.cache
def stack_cost(layout, remat, depth=12, **options):
  layers = {
      "scan": ls.Plan.homogeneous(WIDE, depth), "cycle": ls.Plan.cycle([LOCAL, WIDE], depth),
      "nested": ls.Plan.cycle([LOCAL, LOCAL, WIDE], depth), "remainder": ls.Plan.cycle([LOCAL, LOCAL, WIDE], depth + 1),
  }[layout]
  stack = ls.StackedDecoder(layers, remat=remat, **options)
  variables = jax.eval_shape(stack.init, jax.random.key(0), HIDDEN)
  return flops.cost(jax.value_and_grad(lambda v, x: (stack.apply(v, x) ** 2).sum(), (0, 1)), variables, HIDDEN)


@pytest.mark.parametrize("remat", ["none", "full", "minimal"])
@pytest.mark.parametrize("layout, layers", [("scan", 12), ("cycle", 12), ("nested", 12), ("remainder", 13)])
def test_a_stack_costs_its_depth_times_a_layer(layout, layers, remat):
  layer = stack_cost("scan", remat, depth=1)
  assert stack_cost(layout, remat).flops == pytest.approx(layers * layer.flops, rel=0.01)


@pytest.mark.parametrize("options", [dict(unroll=2), dict(inner="unroll")], ids=str)
def test_how_a_stack_runs_does_not_change_what_it_costs(options):
  assert stack_cost("nested", "full", **options).flops == stack_cost("nested", "full").flops


# What policies recompute, from one trace -----------------------------------------------------------------------------------


@functools.cache
def subject(layout):
  stack = ls.StackedDecoder(plan(layout))
  x, _ = abstract(stack)
  mesh = as_mesh(None, chips.topology("v5p:1x1x1"))
  program = gradients(stack, (x,), {}, mesh, as_rules(None, mesh), None)
  return Recompute(program, TOPOLOGY.chip), Estimator(program, TOPOLOGY.chip)


@pytest.mark.parametrize("layout", ["flat", "cycle", "prefix"])
@pytest.mark.parametrize("preset", ["full", "minimal_with_context", "save_dot_except_mlp", "save_out_proj", "minimal_offloaded"])
def test_recomputation_from_one_trace_is_that_of_the_policys_own_program(preset, layout):
  recompute, estimator = subject(layout)
  policy = ls.RematPolicy(preset)
  traced, walked = estimator.estimate(policy), recompute.of(policy.names)
  assert walked.cost.flops == traced.recomputed
  names = {**traced.residuals.by_name("device"), **traced.residuals.by_name("host")}
  assert walked.kept == {name: size for name, size in names.items() if name in policy.names}


def test_experts_on_a_mesh_are_counted_over_all_devices():
  moe = dict(num_experts=4, hidden=8, top_k=2)
  attention = dict(num_heads=2, num_kv_heads=1, head_dim=8)
  layer = ls.LayerSpec(Qwen3NextLayer, embed=16, attention=attention, moe=moe)
  stack, x = ls.StackedDecoder(ls.Plan.homogeneous(layer, 3)), S((8, 4, 16), F32)
  mesh = as_mesh(None, TOPOLOGY)
  program = gradients(stack, (x,), {}, mesh, as_rules(None, mesh), None)
  recompute, estimator = Recompute(program, TOPOLOGY.chip), Estimator(program, TOPOLOGY.chip)
  policy = ls.RematPolicy("minimal")
  traced, walked = estimator.estimate(policy), recompute.of(policy.names)
  assert walked.cost.flops == traced.recomputed
  assert walked.kept == {name: size for name, size in traced.residuals.by_name().items() if name in policy.names}
  assert walked.kept["moe_mlpwi_0"] == 3 * 8 * 4 * 2 * 8 * 4


def test_sizes_without_remat():
  recompute, estimator = subject("flat")
  report = estimator.estimate("none").residuals
  assert recompute.everything == report.total() - report.by_segment().get(None, 0)


@pytest.mark.parametrize("options, regions, layers", [
    (dict(every=2), 1, 0), (dict(every=4), 1, 0), (dict(levels=(2, 2)), 1, 1)], ids=str)
@pytest.mark.parametrize("names", [(), ("query_proj", "mlpwi_0")], ids=str)
def test_recomputation_of_regions(options, regions, layers, names):
  recompute, estimator = subject("flat")
  traced = estimator.trace(ls.RematPolicy(save=names, **options)).flops - estimator.none.flops
  assert traced == regions * recompute.of(names, region=True).cost.flops + layers * recompute.of(names).cost.flops


def test_gradients_of_the_tagged_layer_are_counted_through_loss_of():
  stack = ls.StackedDecoder(plan("flat"))
  x, variables = abstract(stack)
  forward, both = flops.cost(loss_of(stack), variables, x), flops.cost(jax.value_and_grad(loss_of(stack)), variables, x)
  assert 2.5 * forward.flops < both.flops < 4.01 * forward.flops
