"""The residual report: names, places, extents and sums, against what the programs themselves hold."""
import collections
import io
import math

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest
from rich.console import Console

import linen_stack as ls
from linen_stack.inspect import residuals
from linen_stack.models import DecoderLayer, LanguageModel
from linen_stack.placement import with_shardings
from tests.tagged import BATCH, EMBED, SEQ, SHAPES, TaggedLayer, abstract, loss_of, plan, spec

F32 = jnp.float32
QUERY = math.prod(SHAPES["query_proj"]) * 4
ENTERING = math.prod(SHAPES["decoder_layer_input"]) * 4


def report_of(stack, *args):
  x, variables = abstract(stack, *args)
  return residuals(loss_of(stack), variables, x, *args)


def tags_of(jaxpr):
  """For each result of a program the tag that it has, followed through loops and calls and onto the host."""
  tags = {}
  for eqn in jaxpr.eqns:
    bodies = [param for param in eqn.params.values() if hasattr(getattr(param, "jaxpr", param), "eqns")]
    if eqn.primitive.name == "name":
      tags[eqn.outvars[0]] = eqn.params["name"]
    elif eqn.primitive.name in ("device_put", "reduce_precision"):  # what remat puts around values that it keeps
      tags |= {out: tags[var] for var, out in zip(eqn.invars, eqn.outvars) if not hasattr(var, "val") and var in tags}
    elif len(bodies) == 1:
      tags |= zip(eqn.outvars, tags_of(getattr(bodies[0], "jaxpr", bodies[0])))
  return [None if hasattr(var, "val") else tags.get(var) for var in jaxpr.outvars]


@pytest.mark.parametrize("layout", ["flat", "cycle", "prefix"])
@pytest.mark.parametrize("preset", ls.RematPolicy.presets())
def test_bytes_equal_the_buffers_of_the_program(preset, layout):
  stack = ls.StackedDecoder(plan(layout), remat=preset)
  x, variables = abstract(stack)
  report = residuals(loss_of(stack), variables, x)
  program = jax.make_jaxpr(lambda v, x: jax.vjp(loss_of(stack), v, x)[1])(variables, x).jaxpr
  buffers = collections.Counter(var.aval.shape for var in set(program.outvars) - set(program.invars))
  reported = collections.Counter()
  for row in report.rows:
    reported[row.stacked] += row.buffers
  assert reported == buffers
  assert report.total() == sum(math.prod(shape) * 4 * count for shape, count in buffers.items())
  named = collections.Counter()
  for var, tag in dict(zip(program.outvars, tags_of(program))).items():
    if tag is not None:
      named[tag] += math.prod(var.aval.shape) * 4
  assert named == collections.Counter({name: size for name, size in report.by_name().items() if any(
      row.kind == "tag" and row.name == name for row in report.rows)})
  assert preset in ("none", "full") or len(named) >= 1
  for sums in (report.by_name(), report.by_place(), report.by_segment()):
    assert report.total() == sum(sums.values())


@pytest.mark.parametrize("options, stacked, buffers", [
    ({}, {"local": (2, 2), "global": (2,)}, {"local": 1, "global": 1}),
    ({"inner": "unroll"}, {"local": (2,), "global": (2,)}, {"local": 2, "global": 1}),
    ({"scan": False}, {"local": (), "global": ()}, {"local": 4, "global": 2}),
], ids=["nested loops", "inner run unrolled", "no loop"])
def test_rows_of_a_cycle(options, stacked, buffers):
  report = report_of(ls.StackedDecoder(plan("cycle"), remat="save_qkv_proj", **options))
  for run in ("local", "global"):
    of_run = [row for row in report.rows if (row.segment, row.run) == ("layers", run)]
    rows = {row.name: row for row in of_run if row.kind in ("tag", "carry")}
    named = {"query_proj", "key_proj", "value_proj"}
    # Without a loop, the hidden states that enter the first layer are the function's own argument.
    entering = buffers[run] - (options == {"scan": False} and run == "local")
    assert set(rows) == named | {"carry"}
    for name, row in rows.items():
      shape = SHAPES.get(name, SHAPES["decoder_layer_input"])
      assert (row.shape, row.stacked) == (shape, (*stacked[run], *shape))
      assert row.buffers == (entering if name == "carry" else buffers[run])
      assert (row.place, row.extent, row.dtype) == ("device", "per layer", "float32")
      assert row.bytes == row.buffers * math.prod(row.stacked) * 4
  (remainder,) = [row for row in report.rows if row.segment == "layers_remainder" and row.name == "carry"]
  assert remainder.stacked == SHAPES["decoder_layer_input"]


@pytest.mark.parametrize("layout", ["flat", "cycle", "prefix"])
def test_offloaded_values_are_on_the_host(layout):
  stack = ls.StackedDecoder(plan(layout), remat=ls.RematPolicy(offload=["query_proj"], carry="offload"))
  report = report_of(stack)
  layers = stack.plan.num_layers
  assert report.by_name("host") == {"query_proj": layers * QUERY, "layer_carry": layers * ENTERING}
  assert report.total("host") == layers * (QUERY + ENTERING)
  assert "query_proj" not in report.by_name("device")
  assert {row.segment for row in report.rows if row.name == "layer_carry"} == {segment.name for segment in stack.plan}


@pytest.mark.parametrize("levels, kept", [({"levels": (3, 4)}, 3), ({"every": 2}, 6)])
def test_nested_regions_keep_one_carry_each(levels, kept):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(spec(), 12), remat=ls.RematPolicy(**levels))
  report = report_of(stack)
  (row,) = report.rows
  assert (row.name, row.stacked, row.extent) == ("carry", (kept, *SHAPES["decoder_layer_input"]), "per repeat")


def test_value_of_the_mask_alone_is_kept_once():
  mask = jax.ShapeDtypeStruct((BATCH, 1, 1, SEQ), F32)
  stack = ls.StackedDecoder(plan("flat"), remat="none")
  x, variables = abstract(stack, jnp.ones(mask.shape))
  report = residuals(loss_of(stack), variables, x, mask)
  (once,) = [row for row in report.rows if row.extent == "once"]
  assert (once.name, once.segment, once.stacked) == ("exp", "layers", mask.shape)
  assert "no layer" in once.why
  assert all(row.stacked[0] == 4 for row in report.rows if row.segment and row.extent == "per layer")


def test_arguments_are_listed_apart():
  report = report_of(ls.StackedDecoder(plan("flat"), remat="full"))
  names = {row.name for row in report.arguments}
  assert "variables/params/layers/query/kernel" in names and "x" not in names
  assert {row.segment for row in report.arguments} == {"layers"}
  assert set(report.by_name()) == {"carry"}
  assert "read again from arguments" in str(report)


def test_argnums_and_other_leaves():
  stack = ls.StackedDecoder(plan("flat"), remat="full")
  x, variables = abstract(stack)
  fn = lambda v, x, flag, tokens: jnp.sum(stack.apply(v, x, deterministic=flag)) + jnp.sum(tokens)
  tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
  whole = residuals(fn, variables, x, True, tokens)
  assert residuals(fn, variables, x, True, tokens, argnums=(0, 1)).rows == whole.rows
  assert residuals(fn, variables, x, True, tokens, argnums=1).total() > 0
  with pytest.raises(ValueError, match="no argument 7"):
    residuals(fn, variables, x, True, tokens, argnums=7)
  with pytest.raises(TypeError, match="argnums"):
    residuals(fn, variables, x, True, tokens, argnums="x")
  with pytest.raises(ValueError, match="floating dtype"):
    residuals(jnp.sum, tokens)
  with pytest.raises(ValueError, match="place"):
    whole.total("pinned_host")


def test_functions_traced_before_are_read_again_and_not_changed():
  stack = ls.StackedDecoder(plan("flat"), remat="save_qkv_proj")
  x, variables = abstract(stack)
  fn = jax.jit(loss_of(stack))
  before = str(fn.trace(variables, x).jaxpr)
  first, second = residuals(fn, variables, x), residuals(fn, variables, x)
  assert first == second and first.by_name()["query_proj"] == 4 * QUERY and "carry" in first.by_name()
  assert str(fn.trace(variables, x).jaxpr) == before


@nn.jit
class Jitted(TaggedLayer):
  pass


def test_layers_under_jit():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Jitted), 4), remat="save_qkv_proj")
  assert report_of(stack).by_name() == {"query_proj": 4 * QUERY, "carry": 4 * ENTERING,
                                        "key_proj": 2 * QUERY, "value_proj": 2 * QUERY}


@jax.custom_vjp
def kernel(x):
  return jnp.sin(x)


def kernel_forward(x):
  out = checkpoint_name(jnp.sin(x), "context")
  return out, (x, out)


kernel.defvjp(kernel_forward, lambda res, g: (g * jnp.cos(res[0]) + 0 * res[1],))


class KernelLayer(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(EMBED)(kernel(nn.Dense(EMBED)(x)))


def test_kernel_that_tags_in_its_forward_rule():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(KernelLayer), 4), remat=ls.RematPolicy(save=["context"]))
  assert report_of(stack).by_name() == {"context": 4 * ENTERING, "carry": 4 * ENTERING}


def test_whole_model_of_real_size():
  layer = ls.LayerSpec(DecoderLayer, embed=4096, mlp=14336, num_heads=32, num_kv_heads=8, dtype=jnp.bfloat16)
  stack = ls.StackedDecoder(ls.Plan.homogeneous(layer, 32), remat="save_qkv_proj")
  model = LanguageModel(stack=stack, vocab=128256, embed=4096, dtype=jnp.bfloat16)
  tokens = jax.ShapeDtypeStruct((8, 8192), jnp.int32)
  variables = jax.eval_shape(lambda t: model.init(jax.random.key(0), t), tokens)
  report = residuals(lambda v, t: jnp.sum(model.apply(v, t)), variables, tokens)
  names = report.by_name()
  width = jnp.dtype([row.dtype for row in report.rows if row.name == "carry"][0]).itemsize
  assert names["carry"] == 32 * 8 * 8192 * 4096 * width
  assert names["query_proj"] == 32 * 8 * 8192 * 32 * 128 * 2
  assert names["key_proj"] == names["value_proj"] == 32 * 8 * 8192 * 8 * 128 * 2
  outside = [row for row in report.rows if row.segment is None]
  assert any(row.scope.endswith("final_norm") for row in outside)


def test_report_prints():
  report = report_of(ls.StackedDecoder(plan("cycle"), remat="minimal"))
  text = str(report)
  for word in ("layers_remainder", "global", "query_proj", "carry", "per layer", "[2, 2, 3, 5, 8]", "kept:"):
    assert word in text
  console = Console(width=200, record=True, file=io.StringIO())
  console.print(report)
  assert "query_proj" in console.export_text()


@pytest.mark.parametrize("policy, name, place", [
    (ls.RematPolicy(), "carry", "device"),
    (ls.RematPolicy(save=["decoder_layer_input"]), "decoder_layer_input", "device"),
    (ls.RematPolicy(offload=["decoder_layer_input"]), "layer_carry", "host")], ids=["remat", "device", "offload"])
def test_a_layers_input_is_kept_once_where_and_as_the_policy_says(policy, name, place):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(DecoderLayer, embed=16, mlp=32, num_heads=2), 4), remat=policy)
  x = jax.ShapeDtypeStruct((2, 4, 16), F32)
  variables = jax.eval_shape(stack.init, jax.random.key(0), x)
  report = residuals(lambda v, x: stack.apply(v, x).sum(), variables, x)
  rows = [row for row in report.rows if row.name != "constant"]  # the rates of the rotary embedding, four numbers
  assert [(row.name, row.place, row.stacked) for row in rows] == [(name, place, (4, 2, 4, 16))]


@pytest.mark.parametrize("options", [dict(), dict(inner="unroll"), dict(remat="minimal_offloaded"), dict(remat="none"),
                                     dict(remat="none", offload_params=0), dict(remat="minimal", offload_params=0)], ids=str)
def test_no_copy_of_a_weight_is_kept(options):
  sizes = dict(embed=16, mlp=32, num_heads=2)
  local, wide = ls.LayerSpec(DecoderLayer, "local", window=4, **sizes), ls.LayerSpec(DecoderLayer, "wide", **sizes)
  stack = ls.StackedDecoder(ls.Plan.cycle([local, local, wide], 8), **options)
  x = jax.ShapeDtypeStruct((2, 4, 16), F32)
  params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), x)["params"])
  if "offload_params" in options:
    params = with_shardings(params, ls.host_shardings(stack, params))
  report = residuals(lambda v, x: stack.apply(v, x).sum(), {"params": params}, x)
  assert report.rows and not [row.name for row in report.rows if row.kind == "copy" and math.prod(row.shape) >= 16 * 16]
