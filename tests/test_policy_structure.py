"""What each policy keeps, proved from the programs: saved and offloaded values, matrix products, barriers."""
import collections

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack import tags
from linen_stack.inspect import residuals
from linen_stack.policies import CARRY_TAG
from tests.tagged import BATCH, EMBED, SEQ, SHAPES, abstract, loss_of, plan, spec

LAYOUTS = ("flat", "cycle", "prefix")
REMATS = [name for name in ls.RematPolicy.presets() if name != "none"]


def kept_by(stack):
  """(shape, memory) of each activation that the backward pass keeps, counted, read from the program itself."""
  x, variables = abstract(stack)
  program = jax.make_jaxpr(lambda v, x: jax.vjp(loss_of(stack), v, x)[1])(variables, x).jaxpr
  own = [var.aval for var in dict.fromkeys(program.outvars) if var not in program.invars]
  memory = lambda aval: "host" if "host" in str(aval.memory_space).lower() else "device"
  return collections.Counter((aval.shape, memory(aval)) for aval in own if is_activation(aval.shape))


def is_activation(shape):
  return any(shape[i:i + 2] == (BATCH, SEQ) for i in range(len(shape) - 1))


def said_by(stack, carry="decoder_layer_input"):
  """The same, as the policy says it: the carry, and each name that it saves or offloads."""
  expected = collections.Counter()
  entering = SHAPES["decoder_layer_input"]
  for index, segment in enumerate(stack.plan):
    policy = stack.policy(segment.name)
    for run in segment.runs:
      unrolled = run.count > 1 and segment.length > 1 and policy.offloads
      sizes = [size for _, size in segment.axes(run)]
      stacked, buffers = (sizes[:1], run.count) if unrolled else (sizes, 1)
      for name, shape in SHAPES.items():
        if name in policy.save or name in policy.offload:
          expected[(*stacked, *shape), "host" if name in policy.offload else "device"] += buffers
      if carry not in policy.save:
        # The very first hidden states are the caller's own argument, unless a loop stacks them or they go to the host.
        is_argument = index == 0 and segment.length == 1 and policy.carry == "save"
        expected[(*stacked, *entering), "host" if policy.carry == "offload" else "device"] += buffers - is_argument
  return +expected


def products(stack):
  x, variables = abstract(stack)
  program = jax.make_jaxpr(jax.grad(loss_of(stack)))(variables, x).jaxpr
  return sum(eqn.primitive.name == "dot_general" for eqn in tags.equations(program))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", REMATS)
def test_preset_keeps_what_it_says(preset, layout):
  stack = ls.StackedDecoder(plan(layout), remat=preset)
  assert kept_by(stack) == said_by(stack)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_none_has_no_remat(layout):
  stack = ls.StackedDecoder(plan(layout), remat="none")
  x, variables = abstract(stack)
  program = jax.make_jaxpr(jax.grad(loss_of(stack)))(variables, x).jaxpr
  assert not any("prevent_cse" in eqn.params for eqn in tags.equations(program))
  assert not any(memory == "host" for _, memory in kept_by(stack))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chain", [
    ("full", "save_qkv_proj", "save_dot_except_mlp", "save_dot_except_mlpwi", "minimal", "minimal_with_context",
     "none"),
    ("full", "save_out_proj", "save_dot_except_mlp", "save_dot_with_context_except_mlp", "none"),
    ("full", "qkv_proj_offloaded", "minimal_offloaded"),
], ids=lambda chain: chain[1])
def test_products_fall_as_names_are_added(chain, layout):
  # A run that offloads is unrolled in a cycle: compare layer bodies of one kind only.
  counts = [products(ls.StackedDecoder(plan(layout), remat=preset, inner="scan")) for preset in chain]
  assert counts == sorted(counts, reverse=True)
  assert counts[0] > counts[1] and counts[0] > counts[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_and_offloading_run_the_same_products(layout):
  counts = {preset: products(ls.StackedDecoder(plan(layout), remat=preset, inner="scan"))
            for preset in ("minimal", "minimal_offloaded", "save_qkv_proj", "qkv_proj_offloaded")}
  assert counts["minimal"] == counts["minimal_offloaded"]
  assert counts["save_qkv_proj"] == counts["qkv_proj_offloaded"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tag_input", [True, False])
@pytest.mark.parametrize("names", [(), ("query_proj", "mlpwo")])
def test_offloaded_carry_leaves_the_device(names, tag_input, layout):
  stack = ls.StackedDecoder(plan(layout, tag_input=tag_input), remat=ls.RematPolicy(save=names, carry="offload"))
  assert kept_by(stack) == said_by(stack)
  x, variables = abstract(stack)
  program = jax.make_jaxpr(lambda v, x: jax.vjp(loss_of(stack), v, x)[1])(variables, x).jaxpr
  # One copy to the host per layer body and kept name; what goes there is the stack's tag, and never the layer's own.
  made_by = {var: eqn for eqn in tags.equations(program) for var in eqn.outvars}
  moved = [made_by[eqn.invars[0]] for eqn in tags.equations(program)
           if eqn.primitive.name == "device_put" and "host" in str(eqn.outvars[0].aval.memory_space).lower()]
  assert moved and {eqn.params["name"] for eqn in moved} == {CARRY_TAG}


def test_layer_input_at_remat_device_and_offload_are_three_residual_sets():
  entering = (4, *SHAPES["decoder_layer_input"])
  kept = [kept_by(ls.StackedDecoder(plan("flat"), remat=remat)) for remat in (
      "full", ls.RematPolicy(save=["decoder_layer_input"]), ls.RematPolicy(offload=["decoder_layer_input"]))]
  assert kept[0] == kept[1] == {(entering, "device"): 1}
  assert kept[2] == {(entering, "host"): 1}


def test_saved_input_is_kept_once_and_by_its_name():
  for remat, name in (("full", "carry"), (ls.RematPolicy(save=["decoder_layer_input"]), "decoder_layer_input"),
                      (ls.RematPolicy(offload=["decoder_layer_input"]), CARRY_TAG)):
    stack = ls.StackedDecoder(plan("flat"), remat=remat)
    x, variables = abstract(stack)
    report = residuals(loss_of(stack), variables, x)
    assert set(report.by_name()) == {name}


def two_kinds():
  return ls.Plan.homogeneous(spec("plain"), 2, "first") + ls.Plan.homogeneous(spec("other", prefix="moe_"), 2, "second")


def test_name_of_one_segment_alone_is_fine():
  stack = ls.StackedDecoder(two_kinds(), remat=ls.RematPolicy(save=["moe_mlpwo"], offload=["query_proj"]))
  host, device = (2, *SHAPES["query_proj"]), (2, *SHAPES["mlpwo"])
  kept = kept_by(stack)
  assert kept[host, "host"] == 1
  assert kept[device, "device"] == 3  # the carries of both segments, and the saved name of one


@pytest.mark.parametrize("remat, words", [
    (ls.RematPolicy(save=["moe_mlpwx"]), "did you mean 'moe_mlpwo'"),
    ({"first": ls.RematPolicy(save=["moe_mlpwo"]), "second": "full"}, "segment 'first'"),
    ({"first": "full", "second": ls.RematPolicy(offload=["query_proj"])}, "segment 'second'"),
])
def test_name_that_no_layer_of_its_segments_tags_is_an_error(remat, words):
  with pytest.raises(ValueError, match=words):
    abstract(ls.StackedDecoder(two_kinds(), remat=remat))


def barriers(stack):
  x, variables = abstract(stack)
  return jax.jit(jax.grad(loss_of(stack))).lower(variables, x).as_text().count("optimization_barrier")


def test_no_barrier_in_rolled_loops():
  assert barriers(ls.StackedDecoder(plan("flat"))) == 0
  nested = ls.Segment("layers", (spec(), spec()), 3)
  assert barriers(ls.StackedDecoder(ls.Plan.of(nested), inner="scan")) == 0


@pytest.mark.parametrize("stack", [
    ls.StackedDecoder(plan("flat"), scan=False),
    ls.StackedDecoder(plan("flat"), unroll=2),
    ls.StackedDecoder(plan("prefix")),
    ls.StackedDecoder(ls.Plan.homogeneous(spec(), 1)),
    ls.StackedDecoder(ls.Plan.cycle([spec(), spec()], 5), inner="scan"),
    ls.StackedDecoder(ls.Plan.of(ls.Segment("layers", (spec(), spec()), 3)), inner="unroll"),
], ids=["scan=False", "unroll=2", "prefix", "one layer", "remainder", "inner run unrolled"])
def test_barriers_in_straight_line_code(stack):
  assert barriers(stack) > 0


@pytest.mark.parametrize("value, expected", [(True, True), (False, False)])
@pytest.mark.parametrize("scan", [True, False])
def test_explicit_prevent_cse_wins(scan, value, expected):
  stack = ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(prevent_cse=value), scan=scan)
  assert bool(barriers(stack)) == expected


@pytest.mark.parametrize("variables, arguments", [(False, True), (True, False)])
@pytest.mark.parametrize("layout, options, steps", [
    ("flat", dict(scan=False), {}), ("cycle", {}, {}), ("flat", {}, {}), ("flat", {}, {"every": 2}),
    ("flat", {}, {"levels": (2, 2)})], ids=str)
def test_prevent_cse_of_variables_and_of_arguments(layout, options, steps, variables, arguments):
  stack = ls.StackedDecoder(plan(layout), remat=ls.RematPolicy(prevent_cse=(variables, arguments), **steps), **options)
  x, params = abstract(stack)
  regions = [eqn for eqn in tags.equations(jax.make_jaxpr(loss_of(stack))(params, x).jaxpr) if "prevent_cse" in eqn.params]
  assert regions
  for eqn in regions:
    flags = dict(zip((var.aval.shape for var in eqn.invars), eqn.params["prevent_cse"]))
    assert any(is_activation(shape) for shape in flags) and len(flags) > 3
    assert all(flag == (arguments if is_activation(shape) else variables) for shape, flag in flags.items())


def attend(query, key, value):
  return jnp.tanh(query * key) * value


kernel = jax.custom_vjp(attend)


def kernel_forward(query, key, value):
  context = checkpoint_name(attend(query, key, value), "context")
  return context, (query, key, value, context)


def kernel_backward(kept, g):
  query, key, value, context = kept
  return g * key, g * query, g * context + 0 * value


kernel.defvjp(kernel_forward, kernel_backward)


class KernelLayer(nn.Module):
  """A layer around a kernel with a backward pass of its own, which tags its result where it is differentiated."""

  @nn.compact
  def __call__(self, x):
    query, key, value = (checkpoint_name(nn.Dense(EMBED, name=f"{name}_proj")(x), f"{name}_proj")
                         for name in ("query", "key", "value"))
    context = kernel(query, key, value)
    return x + checkpoint_name(nn.Dense(EMBED, name="out")(jnp.sin(context)), "out_proj")


KERNELS = {"flat": ls.Plan.homogeneous(ls.LayerSpec(KernelLayer), 4),
           "prefix": ls.Plan.homogeneous(ls.LayerSpec(KernelLayer), 1, "first") +
                     ls.Plan.homogeneous(ls.LayerSpec(KernelLayer), 3)}


@pytest.mark.parametrize("layout", KERNELS)
@pytest.mark.parametrize("remat, runs", [
    ("none", 1), ("minimal_with_context", 1), ("save_dot_with_context_except_mlp", 1),
    ("minimal_with_context_and_quantization", 1), (ls.RematPolicy(offload=["context"]), 1), ("full", 2), ("minimal", 2),
], ids=str)
def test_a_kernel_with_its_own_backward_pass_runs_again_only_where_its_result_is_not_kept(layout, remat, runs):
  plan = KERNELS[layout]
  stack = ls.StackedDecoder(plan, remat=remat)
  x, variables = abstract(stack)
  program = jax.make_jaxpr(jax.grad(loss_of(stack)))(variables, x).jaxpr
  # `tanh` is the kernel's alone.
  count = sum(eqn.primitive.name == "tanh" for eqn in tags.equations(program))
  assert count == runs * len(plan.segments)
