"""The audit: what policies do with tags, and every way in which the two can miss each other."""
import io
import math

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import linen_stack as ls
from linen_stack import tags
from linen_stack.inspect import audit, check_gradients
from linen_stack.inspect.gradients import _compare
from linen_stack.inspect.watch import Watch, watching
from tests.tagged import BATCH, EMBED, SEQ, SHAPES, TaggedLayer, plan, spec

X = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32)


def of_kind(report, severity):
  return [finding.text for finding in report.findings if finding.severity == severity]


def flat(layer, **kwargs):
  return ls.Plan.homogeneous(ls.LayerSpec(layer, **kwargs), 4)


def test_rows_tell_shape_size_and_action():
  report = audit(ls.StackedDecoder(plan("cycle"), remat=ls.RematPolicy(save=["query_proj"], offload=["mlpwo"])), X)
  assert report.ok
  rows = {(row.segment, row.run, row.name): row for row in report.rows}
  actions = {"query_proj": "saved", "mlpwo": "offloaded", "context": "recomputed"}
  places = {("layers", "local"): 4, ("layers", "global"): 2, ("layers_remainder", "local"): 1}
  for (segment, run), layers in places.items():
    for name, action in actions.items():
      row = rows[segment, run, name]
      assert (row.shape, row.dtype, row.action, row.layers) == (SHAPES[name], "float32", action, layers)
      assert row.bytes_per_layer == 4 * math.prod(SHAPES[name]) and row.bytes == layers * row.bytes_per_layer
    assert rows[segment, run, "carry"].action == "saved"
  assert report.total("offloaded") == 7 * 4 * math.prod(SHAPES["mlpwo"])


@pytest.mark.parametrize("options", [{}, {"scan": False}, {"inner": "unroll"}])
def test_layout_does_not_change_the_audit(options):
  assert audit(ls.StackedDecoder(plan("cycle"), remat="minimal", **options), X).rows == \
      audit(ls.StackedDecoder(plan("cycle"), remat="minimal"), X).rows


def test_no_remat_keeps_everything():
  report = audit(ls.StackedDecoder(plan("flat"), remat="none"), X)
  assert {row.action for row in report.rows} == {"kept (no remat)"} and not report.findings


@pytest.mark.parametrize("carry, action", [("save", "saved"), ("offload", "offloaded")])
@pytest.mark.parametrize("tag_input", [True, False])
def test_carry_is_one_row_with_and_without_its_tag(tag_input, carry, action):
  report = audit(ls.StackedDecoder(plan("flat", tag_input=tag_input), remat=ls.RematPolicy(carry=carry)), X)
  assert [row.action for row in report.rows if row.name in ("carry", "decoder_layer_input")] == [action]


@pytest.mark.parametrize("levels, regions", [({"levels": (2, 2)}, 2), ({"every": 4}, 1)])
def test_nested_regions_hold_fewer_carries(levels, regions):
  report = audit(ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(**levels)), X)
  assert [row.layers for row in report.rows if row.name == "carry"] == [regions]


def test_mistyped_name_is_an_error_with_the_nearest_tag():
  report = audit(ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(save=["querry_proj"])), X)
  assert not report.ok
  assert any("'querry_proj'" in text and "did you mean 'query_proj'" in text for text in of_kind(report, "error"))


def test_policies_by_segment():
  both = ls.Plan.homogeneous(spec("plain"), 2, "first") + ls.Plan.homogeneous(spec("other", prefix="moe_"), 2, "second")
  assert audit(ls.StackedDecoder(both, remat=ls.RematPolicy(save=["moe_mlpwo"])), X).ok
  report = audit(ls.StackedDecoder(both, remat={"first": ls.RematPolicy(save=["moe_mlpwo"]), "second": "none"}), X)
  (error,) = of_kind(report, "error")
  assert "segment 'first'" in error
  assert {row.action for row in report.rows if row.segment == "second"} == {"kept (no remat)"}


def test_preset_needs_one_of_its_names():
  partly = audit(ls.StackedDecoder(plan("flat"), remat="save_qkv_proj"), X)
  assert partly.ok and any("qkv_proj" in text and "alternatives" in text for text in of_kind(partly, "info"))
  none_of_them = audit(ls.StackedDecoder(flat(TaggedLayer, prefix="my_"), remat="save_qkv_proj"), X)
  assert any("none of its names" in text and "my_query_proj" in text for text in of_kind(none_of_them, "error"))


def test_unused_tags_are_told():
  report = audit(ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(save=["query_proj"])), X)
  (text,) = [text for text in of_kind(report, "info") if text.startswith("tags that")]
  assert "mlpwo" in text and "query_proj" not in text.split(":")[-1]


class Twice(nn.Module):
  apart: bool = False

  @nn.compact
  def __call__(self, x):
    y = checkpoint_name(nn.Dense(EMBED)(x), "one")
    if self.apart:  # two tags on one value, one of them in a call
      jax.jit(lambda z: checkpoint_name(z, "two"))(y)
      return x + jax.jit(lambda z: checkpoint_name(z, "two"))(y)
    return x + checkpoint_name(y, "two")


@pytest.mark.parametrize("apart", [False, True])
def test_value_tagged_twice(apart):
  report = audit(ls.StackedDecoder(flat(Twice, apart=apart), remat=ls.RematPolicy(save=["one"], offload=["two"])), X)
  (text,) = [text for text in of_kind(report, "warning") if "tagged" in text]
  assert "'one'" in text and "'two'" in text and "buffers for one value" in text


def test_values_that_share_a_name_are_no_fault():
  class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
      return x + sum(checkpoint_name(nn.Dense(EMBED)(x), "proj") for _ in range(2))

  report = audit(ls.StackedDecoder(flat(Pair), remat=ls.RematPolicy(save=["proj"])), X)
  (row,) = [row for row in report.rows if row.name == "proj"]
  assert row.count == 2 and row.bytes_per_layer == 2 * 4 * math.prod(X.shape)
  assert not of_kind(report, "warning")


class Inner(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + nn.remat(TaggedLayer)()(x)


def test_remat_inside_of_the_layer():
  report = audit(ls.StackedDecoder(flat(Inner), remat="full"), X)
  (text,) = of_kind(report, "warning")
  assert "1 remat of its own" in text and "9 of its 9 matrix products" in text
  assert not of_kind(audit(ls.StackedDecoder(flat(Inner), remat="none"), X), "warning")


class Model(nn.Module):
  rematted: bool = False

  @nn.compact
  def __call__(self, x):
    decoder = nn.remat(ls.StackedDecoder) if self.rematted else ls.StackedDecoder
    x = nn.Dense(EMBED)(decoder(plan("flat"), remat="minimal", name="encoder")(x))
    return ls.StackedDecoder(plan("cycle"), remat=ls.RematPolicy(save=["typo"]), name="decoder")(x)


def test_stacks_inside_of_a_model():
  report = audit(Model(), X)
  assert {row.stack for row in report.rows} == {"encoder", "decoder"}
  assert [text for text in of_kind(report, "error") if "'typo'" in text]
  assert "encoder/layers" in str(report)
  assert not [text for text in of_kind(report, "warning") if "another remat" in text]


def test_remat_around_a_stack():
  assert [text for text in of_kind(audit(Model(rematted=True), X), "warning") if "another remat" in text]


def test_stacking_under_scan_is_told_with_bytes():
  layers = 4
  size = layers * 4 * math.prod(SHAPES["quantization"])
  report = audit(ls.StackedDecoder(plan("flat"), remat="minimal_with_quantization"), X)
  (text,) = of_kind(report, "warning")
  assert "'quantization' is stacked over 4 layers" in text and f"{size / 1024:.1f} KiB" in text
  saved_carry = audit(ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(save=["decoder_layer_input"])), X)
  assert "carry='offload'" in of_kind(saved_carry, "warning")[0]
  no_loop = ls.StackedDecoder(plan("flat"), remat="minimal_with_quantization", scan=False)
  assert not of_kind(audit(no_loop, X), "warning")


def test_small_offloaded_values_are_told():
  stack = ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(offload=["key_proj"]))
  report = audit(stack, X)
  assert any("'key_proj'" in text and "tile" in text for text in of_kind(report, "warning"))
  wide = jax.ShapeDtypeStruct((64, 128, EMBED), jnp.float32)
  assert not of_kind(audit(stack, wide), "warning")


@jax.custom_vjp
def kernel(x):
  return jnp.sin(x)


kernel.defvjp(lambda x: (checkpoint_name(jnp.sin(x), "context"), x), lambda x, g: (g * jnp.cos(x),))


class Busy(nn.Module):
  """Tags inside a kernel, a kernel over traced values, a loop, a branch and a jitted call."""

  @nn.compact
  def __call__(self, x, scale):
    def scaled(y):
      inner = jax.custom_vjp(lambda y: y * scale)
      inner.defvjp(lambda y: (checkpoint_name(y * scale, "scaled"), y), lambda res, g: (g,))
      return inner(y)

    y = kernel(nn.Dense(EMBED)(x))
    y = jax.jit(scaled)(y)
    y, _ = jax.lax.scan(lambda y, _: (checkpoint_name(jnp.sin(y), "step"), None), y, None, length=3)
    y = jax.lax.cond(y[0, 0, 0] > 0, lambda y: checkpoint_name(y + 1, "branch"), lambda y: y, y)
    return x + nn.jit(TaggedLayer)()(y)


def test_tags_inside_of_everything():
  stack = ls.StackedDecoder(flat(Busy), remat=ls.RematPolicy(save=["context", "scaled"], offload=["step"]))
  report = audit(stack, X, jax.ShapeDtypeStruct((), jnp.float32))
  rows = {row.name: row for row in report.rows}
  assert report.ok
  assert rows["context"].action == rows["scaled"].action == "saved"
  assert (rows["step"].action, rows["step"].shape) == ("offloaded", (3, *X.shape))
  assert rows["branch"].action == rows["query_proj"].action == "recomputed"


def test_jax_policy_is_asked():
  report = audit(ls.StackedDecoder(plan("flat"), remat=jax.checkpoint_policies.save_only_these_names("context")), X)
  assert {row.action for row in report.rows if row.name == "context"} == {"saved"}
  assert {row.action for row in report.rows if row.name == "mlpwo"} == {"recomputed"}


def test_audit_leaves_the_stack_as_it_was():
  stack = ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(save=["typo"]))
  audit(stack, X)
  assert stack.remat == ls.RematPolicy(save=["typo"])
  with pytest.raises(ValueError, match="typo"):
    jax.eval_shape(lambda x: stack.init(jax.random.key(0), x), X)


def test_bad_input():
  with pytest.raises(TypeError, match="module"):
    audit(plan("flat"), X)
  with pytest.raises(ValueError, match="no StackedDecoder"):
    audit(nn.Dense(3), X)


def test_report_prints():
  report = audit(ls.StackedDecoder(plan("cycle"), remat="minimal_offloaded"), X)
  console = Console(width=200, record=True, file=io.StringIO())
  console.print(report)
  for text in (str(report), console.export_text()):
    assert "layers_remainder" in text and "offloaded" in text and "info: " in text


def test_tags_of_one_value_share_its_number():
  def program(x):
    a = checkpoint_name(x * 2, "a")
    b = jax.jit(lambda z: checkpoint_name(z, "b"))(a)
    return checkpoint_name(jax.jit(lambda z: z)(b), "c") + checkpoint_name(x, "d")

  found = {tag.name: tag.value for tag in tags.tags(jax.make_jaxpr(program)(1.0).jaxpr)}
  assert found["a"] == found["b"] == found["c"] != found["d"]


# Gradients ------------------------------------------------------------------------------------------------------------


def values():
  return jax.random.normal(jax.random.key(1), X.shape)


@pytest.mark.parametrize("remat", ["minimal_offloaded", ls.RematPolicy(save=["context"], carry="offload")])
def test_gradients_under_offload_agree(remat):
  pair = ls.Segment("layers", (spec("local"), spec("local"), spec("global")), 2)
  report = check_gradients(ls.StackedDecoder(pair, remat=remat, param_axis=1), values())
  assert report.ok and report.leaf is None and report.largest <= 1e-5
  assert "layers/local/query/kernel" in dict(report.differences) and "argument 0" in dict(report.differences)


def test_gradients_of_a_model():
  class Small(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(3)(ls.StackedDecoder(plan("flat"), remat="minimal", name="decoder")(x))  # [batch, seq, 3]

  assert check_gradients(Small(), values()).ok


@pytest.mark.parametrize("options, leaf, at, layer", [
    ({}, "layers/local/scale", (1, 0), 3),
    ({"param_axis": 1}, "layers/local/scale", (slice(None), 1, 1), 4),
    ({"scan": False}, "layers_4/scale", (), 4),
])
def test_first_difference_is_named(options, leaf, at, layer):
  stack = ls.StackedDecoder(plan("cycle"), **options)
  with watching() as watch:
    params = jax.eval_shape(lambda x: stack.init(jax.random.key(0), x), X)["params"]
  pairs = {jax.tree_util.keystr(path, simple=True, separator="/"): (np.ones(x.shape), np.ones(x.shape))
           for path, x in jax.tree_util.tree_leaves_with_path(params)}
  pairs[leaf][0][at] = 2
  report = _compare(pairs, watch, 1e-5)
  assert (report.leaf, report.layer, report.largest) == (leaf, layer, 1.0)
  assert f"{leaf}, in layer {layer}" in str(report)


def test_gradients_that_are_not_finite_differ():
  report = _compare({"a": (np.array([np.nan]), np.array([1.0]))}, Watch(), 1e-5)
  assert not report.ok and report.largest == float("inf")


def test_gradients_bad_input():
  with pytest.raises(TypeError, match="values"):
    check_gradients(ls.StackedDecoder(plan("flat")), X)
  with pytest.raises(ValueError, match="typo"):
    check_gradients(ls.StackedDecoder(plan("flat"), remat=ls.RematPolicy(save=["typo"])), values())
  with pytest.raises(ValueError, match="no StackedDecoder"):
    check_gradients(nn.Dense(3), values())
  with pytest.raises(TypeError, match="module"):
    check_gradients(plan("flat"), values())
