"""Conversion between layouts: round trips of random plans, real variables, optimiser states, kinds of leaves, and mistakes."""
import dataclasses
import math
import re
from typing import Any

from flax import linen as nn
from flax import struct
from flax.core import FrozenDict
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np
import optax
import pytest

import linen_stack as ls
from linen_stack import convert
from linen_stack.stacked import is_box, stacked_axis, value
from tests.reference import A, B, PLANS, layers_of, make_variables

AXES = (0, 1, -1, 2)
KINDS = [ls.LayerSpec(nn.Dense, name=name, features=i) for i, name in enumerate("abc")]


def assert_same(a, b):
  """Structure, boxes and all, types of leaves, dtypes, and every bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
    where = jax.tree_util.keystr(path)
    assert isinstance(x, jax.Array) == isinstance(y, jax.Array), where
    assert (x.shape, x.dtype) == (y.shape, y.dtype), where
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), where


# Trees made by plan arithmetic ------------------------------------------------------------------------------------------


@struct.dataclass
class Odd(nn.meta.AxisMetadata):
  """A box of another kind, which counts its axes in its own way."""

  value: Any
  axes: tuple = struct.field(pytree_node=False, default=())

  def unbox(self):
    return self.value

  def replace_boxed(self, val):
    return self.replace(value=val)

  def add_axis(self, index, params):
    return self.replace(axes=(*self.axes, (index, params[nn.PARTITION_NAME])))

  def remove_axis(self, index, params):
    assert self.axes[-1] == (index, params[nn.PARTITION_NAME])
    return self.replace(axes=self.axes[:-1])


def own_tree(rng, kind, boxed=True):
  """The variables of a layer of this kind: leaves of ranks 0 to 3 and several dtypes, in boxes of several kinds."""
  box = (lambda cls, x, **kw: cls(x, **kw)) if boxed else (lambda cls, x, **kw: x)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {
      "gain": normal(),
      "norm": {"scale": box(nn.Partitioned, normal(3), names=("embed",))},
      "kernel": box(nn.LogicallyPartitioned, normal(3, 2 + kind).astype(jnp.bfloat16), names=("embed", None)),
      "experts": box(Odd, normal(2, 3, 2)),
  }
  if kind == 1:
    params["bias"] = normal(2, 2)
  return {
      "params": params,
      "cache": {"index": rng.integers(0, 99, (), np.int32), "keys": normal(2, 4)},
      "losses": {"load_balance": (normal(),), "z": (normal(), normal(2))},
  }


def pile(trees, axis, name):
  """Stacks trees, and puts the axis into their boxes."""

  def stack(*leaves):
    arrays = [value(leaf) for leaf in leaves]
    at = stacked_axis(axis, arrays[0].ndim + 1)
    stacked = np.stack(arrays, at)
    first = leaves[0]
    return first.replace_boxed(stacked).add_axis(at, {nn.PARTITION_NAME: name}) if is_box(first) else stacked

  return jax.tree.map(stack, *trees, is_leaf=is_box)


def laid_out(layers, plan, axis=0, scan=True):
  """One collection of all layers' own trees, in the layout of a plan."""
  out, i = {}, 0
  for segment in plan:
    names = iter(range(segment.num_layers))
    steps = []
    for _ in range(segment.length):
      runs = {}
      for run in segment.runs:
        own = layers[i:i + run.count]
        i += run.count
        if scan:
          runs[run.name] = pile(own, axis, run.name) if run.count > 1 else own[0]
        else:
          out.update({f"{segment.name}_{next(names)}": tree for tree in own})
      steps.append(runs if segment.is_cycle else next(iter(runs.values()), None))
    if scan:
      out[segment.name] = pile(steps, axis, segment.name) if segment.length > 1 else steps[0]
  return out


def variables_of(layers, plan, axis=0, scan=True):
  rest = {"token_embed": {"embedding": np.arange(6, dtype=np.float32).reshape(3, 2)}}
  return {c: {**laid_out([layer[c] for layer in layers], plan, axis if c == "params" else 0, scan),
              **(rest if c == "params" else {})} for c in layers[0]}


def kinds_of(plan):
  return [spec.kwargs["features"] for spec in plan.layers]


@st.composite
def plans(draw, kinds=None):
  """A plan of up to a dozen layers. With `kinds`, one of the many that have these layers."""
  if kinds is None:
    segments = []
    for name in draw(st.sampled_from([["layers"], ["dense", "moe"], ["layers_0", "layers", "layers_2"]])):
      block = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
      segments.append(ls.Segment(name, tuple(block), draw(st.integers(1, 3))))
    return ls.Plan(tuple(segments))
  if draw(st.booleans()):
    return ls.Plan.from_layers([KINDS[k] for k in kinds], draw(st.sampled_from(["layers", "blocks"])))
  segments, i = [], 0
  while i < len(kinds):
    size = draw(st.integers(1, len(kinds) - i))
    block, most = kinds[i:i + size], 1
    while kinds[i:i + size * (most + 1)] == block * (most + 1):
      most += 1
    length = draw(st.integers(1, most))
    segments.append(ls.Segment(f"part{len(segments)}", tuple(KINDS[k] for k in block), length))
    i += size * length
  return ls.Plan(tuple(segments))


@st.composite
def cases(draw):
  plan = draw(plans())
  return (plan, draw(plans(kinds_of(plan))), draw(st.sampled_from(AXES)), draw(st.sampled_from(AXES)), draw(st.booleans()),
          draw(st.booleans()), draw(st.booleans()))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(cases())
def test_random_plans(case):
  plan, other, axis, to_axis, scan, to_scan, boxed = case
  rng = np.random.default_rng(0)
  layers = [own_tree(rng, kind, boxed) for kind in kinds_of(plan)]
  tree = variables_of(layers, plan, axis, scan)
  own = convert.unstack(tree, plan, axis, scan)
  assert len(own) == plan.num_layers and {*own.rest} == {*tree}
  for mine, theirs in zip(own, layers):
    assert_same(mine, theirs)
  assert_same(convert.stack(own, plan, axis, scan), tree)
  assert_same(convert.stack(list(layers), plan, axis, scan, rest=own.rest), tree)
  there = convert.restack(tree, plan, other, param_axis=axis, to_param_axis=to_axis, scan=scan, to_scan=to_scan)
  assert_same(there, variables_of(layers, other, to_axis, to_scan))
  assert_same(convert.restack(there, other, plan, param_axis=to_axis, to_param_axis=axis, scan=to_scan, to_scan=scan), tree)
  lazy = convert.restack(tree, plan, other, param_axis=axis, to_param_axis=to_axis, scan=scan, to_scan=to_scan, lazy=True)
  assert_same(jax.tree.map(by_blocks, lazy), there)
  check_axes(convert.layer_axes(plan, tree, axis, scan), tree, own, plan)


def by_blocks(leaf):
  """A lazy leaf as a writer makes it."""
  if not isinstance(leaf, convert.Lazy):
    return leaf
  out = np.zeros(leaf.shape, leaf.dtype)
  written = np.zeros(leaf.shape, int)
  for where, block in leaf.blocks():
    out[where] = block
    written[where] += 1
  assert (written == 1).all()
  return out


def check_axes(axes, tree, own, plan):
  """`layer_axes` says where each layer's leaf is: taken from there, it is the one that `unstack` gives."""
  assert jax.tree.structure(axes) == jax.tree.structure(tree)
  seen = []
  for (keys, leaf), mark in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(axes)):
    assert isinstance(mark, convert.LayerAxes)
    if mark.layers is None:
      assert not mark and "token_embed" in jax.tree_util.keystr(keys)
      continue
    assert mark.names == tuple(name for name, _ in plan_axes(plan, mark)) if mark else mark.layers.ndim == 0
    index = mark.index(leaf.ndim)
    assert np.broadcast_shapes(index.shape, leaf.shape) == leaf.shape
    front = np.moveaxis(leaf, mark.axes, range(len(mark.axes)))
    marks = np.moveaxis(np.broadcast_to(index, leaf.shape), mark.axes, range(len(mark.axes)))
    for at, layer in np.ndenumerate(mark.layers):
      seen.append((int(layer), front[at].dtype, front[at].tobytes()))
      assert (marks[at] == layer).all()
  expected = [(i, leaf.dtype, leaf.tobytes()) for i, layer in enumerate(own) for leaf in jax.tree.leaves(layer)]
  assert sorted(seen, key=repr) == sorted(expected, key=repr)


def plan_axes(plan, mark):
  """The stacked axes of the run with these layers."""
  for segment in plan:
    for run in segment.runs:
      first = plan.offset(segment.name) + run.offset
      if first == mark.layers.flat[0]:
        return segment.axes(run)
  raise AssertionError(mark)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(plans(), st.sampled_from(AXES), st.booleans())
def test_each_layer_comes_back_under_its_index(plan, axis, scan):
  rng = np.random.default_rng(0)
  layers = [jax.tree.map(lambda x, i=i: np.full_like(x, i), own_tree(rng, kind)) for i, kind in enumerate(kinds_of(plan))]
  params = laid_out([layer["params"] for layer in layers], plan, axis, scan)
  for i, layer in enumerate(convert.unstack(params, plan, axis, scan)):
    assert all((leaf == i).all() for leaf in jax.tree.leaves(layer))


def test_index_map_is_a_list_of_strided_runs():
  """A cycle of six with two layers left over, as in Gemma 3: none of the runs is consecutive in the decoder."""
  plan = ls.Plan.cycle([KINDS[0]] * 5 + [KINDS[1]], 26)
  places = convert.index_map(plan)
  assert [place.path for place in places] == [("layers", "a"), ("layers", "b"), ("layers_remainder", "a")]
  assert [place.axes for place in places] == [(("layers", 4), ("a", 5)), (("layers", 4),), (("a", 2),)]
  np.testing.assert_array_equal(places[0].layers, np.arange(24).reshape(4, 6)[:, :5])
  np.testing.assert_array_equal(places[1].layers, [5, 11, 17, 23])
  np.testing.assert_array_equal(places[2].layers, [24, 25])
  apart = convert.index_map(plan, scan=False)
  assert [place.path[0] for place in apart] == [f"layers_{i}" for i in range(24)] + ["layers_remainder_0", "layers_remainder_1"]
  assert [int(place.layers) for place in apart] == list(range(26))
  kernels = {f"layers_{i}" if i < 24 else f"layers_remainder_{i - 24}": {"kernel": np.full((2, 2), i)} for i in range(26)}
  stacked = convert.restack(kernels, plan, plan, scan=False, to_scan=True)
  np.testing.assert_array_equal(stacked["layers"]["a"]["kernel"][:, :, 0, 0], np.arange(24).reshape(4, 6)[:, :5])
  assert_same(convert.restack(stacked, plan, plan, to_scan=False), kernels)
