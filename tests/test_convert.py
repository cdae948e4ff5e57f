"""Conversion between layouts: random plans, real variables, optimiser states, kinds of leaves, axes, and mistakes."""
import functools
from typing import Any, NamedTuple

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
from tests.reference import A, B, PLANS, Layer, layers_of, make_variables

AXES = (0, 1, -1, 2, -2)
KINDS = [ls.LayerSpec(nn.Dense, name=name, features=i) for i, name in enumerate("abc")]


def assert_same(a, b):
  """Structure, boxes and all, types of leaves, dtypes, and every bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
    where = jax.tree_util.keystr(path)
    assert isinstance(x, jax.Array) == isinstance(y, jax.Array), where
    assert (x.shape, x.dtype) == (y.shape, y.dtype), where
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), where


# Trees made by plan arithmetic ----------------------------------------------------------------------------------------


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
  axes = st.sampled_from(AXES)
  return plan, draw(plans(kinds_of(plan))), draw(axes), draw(axes), *(draw(st.booleans()) for _ in range(3))


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
  options = {"param_axis": axis, "to_param_axis": to_axis, "scan": scan, "to_scan": to_scan}
  back = {"param_axis": to_axis, "to_param_axis": axis, "scan": to_scan, "to_scan": scan}
  there = convert.restack(tree, plan, other, **options)
  assert_same(there, variables_of(layers, other, to_axis, to_scan))
  assert_same(convert.restack(there, other, plan, **back), tree)
  lazy = convert.restack(tree, plan, other, **options, lazy=True)
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
  layers = [jax.tree.map(lambda x, i=i: np.full_like(x, i), own_tree(rng, kind))
            for i, kind in enumerate(kinds_of(plan))]
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
  names = [f"layers_{i}" for i in range(24)] + ["layers_remainder_0", "layers_remainder_1"]
  assert [place.path for place in apart] == [(name,) for name in names]
  assert [int(place.layers) for place in apart] == list(range(26))
  kernels = {name: {"kernel": np.full((2, 2), i)} for i, name in enumerate(names)}
  stacked = convert.restack(kernels, plan, plan, scan=False, to_scan=True)
  np.testing.assert_array_equal(stacked["layers"]["a"]["kernel"][:, :, 0, 0], np.arange(24).reshape(4, 6)[:, :5])
  assert_same(convert.restack(stacked, plan, plan, to_scan=False), kernels)


# Real variables -------------------------------------------------------------------------------------------------------

X = np.ones((2, 8), np.float32)


@functools.cache
def real(name, axis, scan):
  """A stack and its variables."""
  stack = ls.StackedDecoder(PLANS[name], param_axis=axis, scan=scan)
  return stack, jax.tree.map(np.asarray, make_variables(stack, X))


@pytest.mark.parametrize("axis, scan", [(0, True), (1, True), (-1, True), (0, False)])
@pytest.mark.parametrize("name", ["prefix", "one layer", "cycle and remainder"])
def test_the_arithmetic_is_the_real_layout(name, axis, scan):
  """A stack's own variables, against the simple converter that all tests of stacks use."""
  plan, (stack, variables) = PLANS[name], real(name, axis, scan)
  own = convert.unstack(variables, stack)
  for mine, theirs in zip(own, layers_of(variables, plan, axis, scan), strict=True):
    assert_same(nn.unbox(mine), jax.tree.map(np.asarray, theirs))
  assert_same(convert.stack(own, stack), variables)
  for other, shapes in (real(name, 1, True), real(name, 0, False)):
    there = convert.restack(variables, stack, other)
    assert jax.tree.structure(there) == jax.tree.structure(shapes)  # with the boxes, and the names in them
    assert jax.tree.map(np.shape, there) == jax.tree.map(np.shape, shapes)
    assert_same(convert.restack(there, other, stack), variables)


class Sowing(nn.Module):
  """A layer with statistics, a cache and sown values."""

  @nn.compact
  def __call__(self, x):
    self.variable("batch_stats", "mean", jnp.zeros, ()).value += 1.0
    self.variable("cache", "last", jnp.zeros, (2, 8)).value = x
    self.sow("losses", "balance", x.sum())
    self.sow("intermediates", "norm", jnp.linalg.norm(x, axis=-1))
    return x + nn.Dense(8)(x)


def test_what_layers_leave_in_other_collections():
  """Statistics, a cache, sown values and captured outputs, of a cycle under a loop and of layers one by one."""
  spec, last = ls.LayerSpec(Sowing, name="a"), ls.LayerSpec(Sowing, name="b")
  plan = ls.Plan.homogeneous(last, 1, "first") + ls.Plan.cycle([spec, spec, last], 7)
  scanned = ls.StackedDecoder(plan, remat="none", param_axis=1)
  apart = ls.StackedDecoder(plan, remat="none", scan=False)
  variables = nn.unbox(make_variables(scanned, X))
  collections = ["batch_stats", "cache", "losses", "intermediates"]
  layers, layers_apart = [], []
  for stack, own in ((scanned, layers), (apart, layers_apart)):
    run = jax.jit(lambda v, s=stack: s.apply(v, X, mutable=collections, capture_intermediates=True)[1])
    state = jax.tree.map(np.asarray, run(convert.restack(variables, scanned, stack)))
    own.append(convert.unstack(state, stack))
    assert_same(convert.stack(own[0], stack), state)
    assert_same(convert.restack(state, stack, stack), state)
    if stack is scanned:
      # What Flax captures of a block as a whole is no layer's: it is kept beside them, without a place in other plans.
      assert "__call__" in own[0].rest["intermediates"]["layers"]
      with pytest.raises(ValueError, match="intermediates/layers/__call__: belongs to a block as a whole"):
        convert.restack(state, scanned, apart)
  for layer, of_apart in zip(layers[0], layers_apart[0], strict=True):
    assert jax.tree.structure(layer) == jax.tree.structure(of_apart)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), layer, of_apart)
    assert {*layer} == {*collections} and isinstance(layer["losses"]["balance"], tuple)
  assert layers[0][3]["batch_stats"]["mean"] == 1.0


def test_language_models_and_modules_that_hold_a_stack():
  plan = PLANS["cycle"]
  rng = np.random.default_rng(0)
  layers = [own_tree(rng, 0)["params"] for _ in range(plan.num_layers)]
  encoder, decoder = laid_out(layers, plan, 1), laid_out(layers[::-1], plan, 1)
  tree = {"params": {"encoder": {**encoder, "norm": np.zeros(3)}, "decoder": decoder},
          "cache": {"decoder": laid_out(layers, plan)}}
  both = convert.unstack(tree, plan, 1)
  assert_same(both[0], {"params": {"encoder": layers[0], "decoder": layers[-1]}, "cache": {"decoder": layers[0]}})
  assert_same(convert.stack(both, plan, 1), tree)
  one = convert.unstack(tree, plan, 1, within="decoder")
  assert_same(one[0]["params"]["decoder"], layers[-1])
  assert one[0]["params"]["encoder"]["norm"] is None
  assert_same(one.rest["params"]["encoder"], tree["params"]["encoder"])
  assert_same(convert.stack(one, plan, 1), tree)
  frozen = FrozenDict(tree)
  assert_same(convert.stack(convert.unstack(frozen, plan, 1), plan, 1), frozen)
  apart = convert.restack(frozen, plan, plan, param_axis=1, to_scan=False)
  assert isinstance(apart["params"], FrozenDict) and isinstance(apart["params"]["encoder"], FrozenDict)
  # Without the key `params`, a key above the layers may be a module's or a collection's.
  with pytest.raises(ValueError, match="is 'decoder' a collection or a module.*within='decoder'"):
    convert.unstack(tree["params"], plan, 1)
  assert_same(convert.unstack({"encoder": encoder}, plan, 1, within="encoder")[2], {"encoder": layers[2]})
  assert_same(convert.unstack({"encoder": encoder}, plan, collection_axes={"encoder": 1})[2], {"encoder": layers[2]})
  assert_same(convert.unstack({"cache": laid_out(layers, plan)}, plan, 1)[2], {"cache": layers[2]})


def test_a_training_state_with_an_average_of_the_params():
  plan = PLANS["cycle and remainder"]
  rng = np.random.default_rng(0)
  layers = [own_tree(rng, 0, boxed=False)["params"] for _ in range(plan.num_layers)]
  params = laid_out(layers, plan, 1)
  adam = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(optax.adam(0.1).init, params))
  state = {"params": params, "ema": jax.tree.map(lambda x: x + 1, params), "opt": adam, "step": np.int32(3)}
  own = convert.unstack(state, plan, 1)
  assert_same(own[4]["ema"], jax.tree.map(lambda x: x + 1, layers[4]))
  assert own[4]["step"] is None and own[4]["opt"][0].count is None and own.rest["step"] == 3
  assert_same(own[4]["opt"][0].mu, jax.tree.map(np.zeros_like, layers[4]))
  assert_same(convert.stack(own, plan, 1), state)
  doubled = jax.tree.map(lambda x: x * 2, own)
  assert_same(convert.stack(doubled, plan, 1), jax.tree.map(lambda x: x * 2, state))


@struct.dataclass
class TrainState:
  """As in `flax.training`: collections are fields."""

  params: Any
  batch_stats: Any
  opt_state: Any
  ema_params: Any


def test_states_whose_collections_are_fields():
  plan = PLANS["cycle"]
  rng = np.random.default_rng(0)
  layers = [own_tree(rng, 0, boxed=False) for _ in range(plan.num_layers)]
  params = laid_out([layer["params"] for layer in layers], plan, 1)
  stats = laid_out([layer["cache"] for layer in layers], plan)
  del stats["layers"]["b"]  # of a layer without statistics
  state = TrainState(params, stats, optax.trace(0.9).init(params), params)
  own = convert.unstack(jax.tree.map(np.asarray, state), plan, 1)
  assert_same(own[3].batch_stats, layers[3]["cache"])
  assert own[2].batch_stats == {}
  assert_same(own[3].ema_params, layers[3]["params"])
  assert_same(convert.stack(own, plan, 1), jax.tree.map(np.asarray, state))
  assert_same(convert.restack(state, plan, plan, param_axis=1, to_param_axis=0).batch_stats, stats)


class Cache(NamedTuple):
  keys: Any
  values: Any


def test_own_trees_that_are_tuples():
  """Such as the caches of layers; a list of layers is something else."""
  plan = ls.Plan.cycle([A, A, B], 7)
  for make in (Cache, lambda k, v: (k, v), lambda k, v: [k, v]):
    caches = [make(np.full((2, 3), i), np.full((2,), -i)) for i in range(7)]
    stacked = convert.stack(caches, plan)
    assert jax.tree.leaves(stacked)[0].shape == (2, 2, 2, 3)
    assert_same(convert.unstack(stacked, plan)[4], caches[4])


# Optimisers -----------------------------------------------------------------------------------------------------------

MATRIX = lambda params: jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key == "kernel", params)
OPTIMISERS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10), mask=MATRIX),
    "masked": optax.masked(optax.adam(0.1), MATRIX),
    "masked by prefix": optax.masked(
        optax.adam(0.1), {"first": False, "layers": True, "layers_remainder": True, "norm": True}),
    "multi_transform": optax.multi_transform(
        {"layers": optax.adam(0.1), "others": optax.sgd(0.1, momentum=0.9), "first": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, x: {"kernel": "layers", "norm": "first"}.get(path[-1].key, "others"), params)),
    "labels of segments": optax.multi_transform(
        {"layers": optax.sgd(optax.linear_schedule(0.1, 0.0, 10)), "layers_remainder": optax.set_to_zero(),
         "others": optax.adam(0.1)},
        lambda params: {key: key if key in ("layers", "layers_remainder") else "others" for key in params}),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.lion)(learning_rate=0.1),
    "sgd": optax.sgd(0.1),
}


def some_params(plan, axis=0, scan=True, start=0):
  """A tree with the same numbers for the same layer in each layout."""
  def layer(i):
    rng = np.random.default_rng(i + start)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in
            {"kernel": (2, 3), "bias": (3,), "gain": ()}.items()}

  return {**laid_out([layer(i) for i in range(plan.num_layers)], plan, axis, scan), "norm": np.ones(3, np.float32)}


def state_of(tx, *layout):
  """A state of an optimiser in which each copy of the params has numbers of its own, by field and layer."""
  def fill(keys, leaf):
    path = jax.tree_util.keystr(keys)
    for i, field in enumerate(("trace", "mu", "nu", "acc_grads")):
      for params_keys, numbers in jax.tree_util.tree_leaves_with_path(some_params(*layout, start=100 * i)):
        if path.endswith(f".{field}{jax.tree_util.keystr(params_keys)}"):
          assert numbers.shape == leaf.shape
          return numbers
    assert not leaf.shape, path
    return np.full((), 7, leaf.dtype)

  return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(tx.init, some_params(*layout)))


FIRST = ls.Plan.homogeneous(B, 1, "first") + ls.Plan.cycle([A, A, B, A], 11)
LAYOUTS = {"scan": (FIRST, 0, True), "axis 1": (FIRST, 1, True), "apart": (FIRST, 0, False),
           "planned": (ls.Plan.from_layers(FIRST.layers, "blocks"), -1, True)}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser_states(name):
  """A state in one layout, converted, is the state that the optimiser has in the other."""
  tx = OPTIMISERS[name]
  by_segment = name in ("masked by prefix", "labels of segments")
  layouts = {key: layout for key, layout in LAYOUTS.items() if not by_segment or key in ("scan", "axis 1")}
  states = {key: state_of(tx, *options) for key, options in layouts.items()}
  for key, (plan, axis, scan) in layouts.items():
    own = convert.unstack(states[key], plan, axis, scan)
    assert_same(convert.stack(own, plan, axis, scan), states[key])
    for other, (to_plan, to_axis, to_scan) in layouts.items():
      options = {"param_axis": axis, "to_param_axis": to_axis, "scan": scan, "to_scan": to_scan}
      assert_same(convert.restack(states[key], plan, to_plan, **options), states[other])


def test_masks_by_prefix_stand_for_whole_segments():
  params = some_params(FIRST)
  mask = {"first": True, "layers": False, "layers_remainder": False, "norm": True}
  state = optax.masked(optax.adam(0.1), mask).init(params)
  own = convert.unstack(state, FIRST)
  assert own[0].inner_state[0].mu["kernel"].shape == (2, 3)
  assert own[1].inner_state[0].mu == optax.MaskedNode()
  assert_same(convert.stack(own, FIRST), state)
  apart = convert.restack(state, FIRST, FIRST, to_scan=False)
  assert apart.inner_state[0].mu["layers_3"] == optax.MaskedNode()
  assert_same(convert.restack(apart, FIRST, FIRST, scan=False, to_scan=True), state)
  with pytest.raises(ValueError, match="layers of one run must be alike"):
    convert.restack(state, FIRST, ls.Plan.of(
        ls.Segment("one", (B, A, A), 2), ls.Segment("two", (A, B, A, A, A, B))))


def test_masked_values_keep_their_boxes():
  kernel = nn.Partitioned(jnp.ones((2, 3, 4)), names=("in", "layers", "out"))
  params = {"layers": {"kernel": kernel, "bias": jnp.ones((4, 3))}}
  plan = ls.Plan.homogeneous(A, 3)
  state = optax.masked(optax.adam(0.1), jax.tree.map(lambda x: x.ndim == 2, params)).init(params)
  own = convert.unstack(state, plan, 1)
  assert own[0].inner_state[0].mu["kernel"] == nn.Partitioned(optax.MaskedNode(), names=("in", "out"))
  assert_same(convert.stack(own, plan, 1), state)
  at_0 = convert.restack(state, plan, plan, param_axis=1, to_param_axis=0)
  assert at_0.inner_state[0].nu["layers"]["kernel"].names == ("layers", "in", "out")


def factored(plan, axis, scan):
  """A state of Adafactor: rows and columns of `kernel`, whole moments of the others."""
  def layer(i):
    rng = np.random.default_rng(i)
    kernel = rng.normal(size=(16, 20))
    others = {"one": rng.normal(size=1), "gain": rng.normal(), "bias": rng.normal(size=3)}
    nothing = {name: np.zeros(1) for name in others}
    return {"params": {"kernel": kernel, **others}, "v_row": {"kernel": kernel.sum(1), **nothing},
            "v_col": {"kernel": kernel.sum(0), **nothing}, "v": {"kernel": np.zeros(1), **others}}

  layers = [jax.tree.map(np.float32, layer(i)) for i in range(plan.num_layers)]
  laid = {name: laid_out([layer[name] for layer in layers], plan, axis, scan) for name in layers[0]}
  shapes = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=15).init, laid.pop("params"))
  state = type(shapes)(count=np.int32(3), **laid)
  return jax.tree.map(
      lambda leaf, like: leaf if leaf.shape == like.shape else np.zeros(like.shape, np.float32), state, shapes)


def test_factored_moments():
  """Adafactor keeps single zeros in place of moments, and rows and columns in place of others."""
  states = {layout: factored(*options) for layout, options in LAYOUTS.items()}
  for layout, (plan, axis, scan) in LAYOUTS.items():
    if layout == "axis 1":
      continue
    own = convert.unstack(states[layout], plan, axis, scan)
    assert own[2].v_row["kernel"].shape == (16,) and own[2].v["kernel"].shape == (1,) and own[2].v["one"].shape == (1,)
    assert_same(convert.stack(own, plan, axis, scan), states[layout])
    there = convert.restack(states["scan"], FIRST, plan, to_param_axis=axis, to_scan=scan)
    assert_same(there, states[layout])
  with pytest.raises(ValueError, match="factored moments do not follow the params to axis 1"):
    convert.unstack(states["axis 1"], FIRST, 1)
  with pytest.raises(ValueError, match="factored moments do not follow the params to axis 1"):
    convert.restack(states["scan"], FIRST, FIRST, to_param_axis=1)


# Kinds of leaves ------------------------------------------------------------------------------------------------------

CYCLE = ls.Plan.cycle([A, A, B], 7)
OTHER = ls.Plan.of(ls.Segment("one", (A,), 2), ls.Segment("two", (B, A, A)), ls.Segment("three", (B, A)))
assert OTHER.layers == CYCLE.layers
THREE = ls.Plan.homogeneous(A, 3)


class Reader:
  """What is stored elsewhere: knows its shape, and counts what is read of it."""

  def __init__(self, array):
    self._array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, []

  def __getitem__(self, index):
    part = self._array[index]
    self.read.append(part.nbytes)
    return part


def matrices(plan=CYCLE, axis=0, scan=True, dtype=np.float32):
  """[4, 8] per layer, with zeros and numbers of either sign and with bits that only a copy keeps."""
  layers = []
  for i in range(plan.num_layers):
    kernel = np.random.default_rng(i).normal(size=(4, 8)).astype(dtype)
    kernel[0, :2] = -0.0
    if dtype == np.float32:
      kernel[1, 1:2] = np.array([0x7f800001 + i], np.uint32).view(np.float32)  # a signalling NaN
    layers.append({"kernel": kernel})
  return laid_out(layers, plan, axis, scan)


@pytest.mark.parametrize("dtype, axis, to_axis, to_scan", [
    (np.float32, 0, 0, True), (np.float32, 0, 1, True), (np.float32, 1, 0, False), (jnp.bfloat16, 1, -1, True),
    (np.int32, 0, -1, True)])
def test_jax_arrays(dtype, axis, to_axis, to_scan):
  tree = matrices(CYCLE, axis, dtype=dtype)
  there = convert.restack(jax.tree.map(jnp.asarray, tree), CYCLE, OTHER, param_axis=axis, to_param_axis=to_axis,
                          to_scan=to_scan)
  assert_same(jax.tree.map(np.asarray, there), matrices(OTHER, to_axis, to_scan, dtype))
  back = convert.restack(there, OTHER, CYCLE, param_axis=to_axis, to_param_axis=axis, scan=to_scan, to_scan=True)
  assert_same(back, jax.tree.map(jnp.asarray, tree))
  # The layers of two runs take turns in one.
  turns = ls.Plan.cycle([ls.LayerSpec(Layer, name="x"), ls.LayerSpec(Layer, name="y")], 7)
  flat = ls.Plan.homogeneous(A, 7)
  one = convert.restack(jax.tree.map(jnp.asarray, matrices(turns, axis, dtype=dtype)), turns, flat, param_axis=axis,
                        to_param_axis=to_axis)
  assert_same(jax.tree.map(np.asarray, one), matrices(flat, to_axis, dtype=dtype))
  own = convert.unstack(back, CYCLE, axis)
  assert all(not layer["kernel"].committed for layer in own)
  assert_same(convert.stack(own, CYCLE, axis), back)


def test_keys_of_random_generators():
  keys = jax.random.split(jax.random.key(0), (2, 2))
  tree = {"layers": {"a": {"rng": keys}, "b": {"rng": keys[:, 0]}}, "layers_remainder": {"rng": keys[0, 0]}}
  own = convert.unstack(tree, CYCLE)
  assert (own[4]["rng"] == keys[1, 1]).all() and own[4]["rng"].dtype == keys.dtype
  there = convert.restack(tree, CYCLE, OTHER)
  assert (there["one"]["rng"] == keys[0]).all()
  # A key that all layers of a run share, beside stacked leaves.
  tree = matrices()
  tree["layers"]["a"]["rng"] = jax.random.key(3)
  shared = lambda path, leaf: path == "rng"
  own = convert.unstack(tree, CYCLE, shared=shared)
  assert own[1]["rng"] is tree["layers"]["a"]["rng"]
  back = convert.stack(jax.tree.map(lambda x: x, own), CYCLE, shared=shared)
  assert back["layers"]["a"]["rng"] is tree["layers"]["a"]["rng"]
  assert convert.layer_axes(CYCLE, tree, shared=shared)["layers"]["a"]["rng"].layers is None
  own[1]["rng"] = jax.random.key(4)
  with pytest.raises(ValueError, match="should be one value for all layers, and differ"):
    convert.stack(own, CYCLE, shared=shared)
  with pytest.raises(ValueError, match=r"a/rng: shape \(\), expected it to be stacked, \[layers: 2, a: 2, ...\]"):
    convert.unstack(tree, CYCLE)


def test_a_matrix_a_count_and_what_is_not_stacked():
  """Stacked along axis 1, as far as they have one."""
  tree = {"layers": {"kernel": np.arange(96.0).reshape(4, 3, 8), "count": np.arange(3), "seed": np.int32(7)}}
  shared = lambda path, leaf: path == "seed"
  own = convert.unstack(tree, THREE, 1, shared=shared)
  assert_same(own[2], {"kernel": tree["layers"]["kernel"][:, 2], "count": np.array(2), "seed": np.int32(7)})
  assert_same(convert.stack(own, THREE, 1, shared=shared), tree)
  assert_same(convert.stack(list(own), THREE, 1, shared=shared), tree)
  split = ls.Plan.homogeneous(A, 1, "first") + ls.Plan.homogeneous(A, 2)
  there = convert.restack(tree, THREE, split, param_axis=1, to_param_axis=0, shared=shared)
  assert there["first"]["seed"] == there["layers"]["seed"] == 7 and there["layers"]["count"].tolist() == [1, 2]
  assert_same(convert.restack(there, split, THREE, param_axis=0, to_param_axis=1, shared=shared), tree)
  axes = convert.layer_axes(THREE, tree, 1, shared=shared)["layers"]
  assert (axes["kernel"].axes, axes["count"].axes, axes["seed"].axes) == ((1,), (0,), ())


SPECS = {
    "own axes": P(None, None, "x", "y"), "layers": P("x", None, None, "y"), "positions": P(None, "x"), "whole": P()}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_sharded_arrays(name, axis_type, monkeypatch):
  """A layer's own axes stay where they are; nothing is gathered; every bit is kept, of layers on other devices too."""
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
  texts, program = [], convert.arrays._program
  def watched(*args):
    run = program(*args)
    return lambda *arrays: (texts.append(run.lower(*arrays).compile().as_text()), run(*arrays))[1]
  monkeypatch.setattr(convert.arrays, "_program", watched)
  spec = SPECS[name]
  kernel = jax.device_put(matrices()["layers"]["a"]["kernel"], NamedSharding(mesh, spec))
  host = np.asarray(kernel)
  tree = {"layers": {"a": {"kernel": kernel}}}
  plan = ls.Plan.cycle([A, A], 4)
  own = convert.unstack(tree, plan)
  for i, layer in enumerate(own):
    assert np.asarray(layer["kernel"]).tobytes() == host[i // 2, i % 2].tobytes()
    assert layer["kernel"].sharding == NamedSharding(mesh, P(*[*spec, None, None, None, None][2:4]))
  flat = convert.restack(tree, plan, ls.Plan.homogeneous(A, 4), to_param_axis=1)["layers"]["kernel"]
  of_layers, *own_axes = {"own axes": (None, "x", "y"), "layers": ("x", None, "y"), "positions": ("x", None, None),
                          "whole": (None, None, None)}[name]
  assert flat.sharding == NamedSharding(mesh, P(own_axes[0], of_layers, own_axes[1]))
  assert np.asarray(flat).tobytes() == np.moveaxis(host.reshape(4, 4, 8), 0, 1).tobytes()
  assert texts and (name == "positions" or not any("all-gather" in text for text in texts))
  assert ("all-reduce" in "".join(texts)) == (name in ("layers", "positions"))
  back = convert.restack({"layers": {"kernel": flat}}, ls.Plan.homogeneous(A, 4), plan, param_axis=1, to_param_axis=0)
  assert_same(back, tree)
  same = kernel.sharding if name != "positions" else NamedSharding(mesh, P("x"))
  assert back["layers"]["a"]["kernel"].sharding.is_equivalent_to(same, 4)


@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_in_host_memory_stay_there(sharded, monkeypatch):
  """JAX cannot index what is in pinned host memory; nothing here asks it to."""
  monkeypatch.setattr(convert.arrays, "_on_devices", lambda *args: pytest.fail("it was put on a device"))
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  own = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
  def place(x):
    spec = P(*[None] * (x.ndim - 1), "y")
    return jax.device_put(x, NamedSharding(mesh, spec, memory_kind="pinned_host") if sharded else own)
  tree = jax.tree.map(place, matrices(CYCLE, 0))
  for made, want in ((convert.unstack(tree, CYCLE), convert.unstack(matrices(CYCLE), CYCLE)),
                     (convert.restack(tree, CYCLE, OTHER, to_param_axis=1), matrices(OTHER, 1)),
                     (convert.stack(convert.unstack(tree, CYCLE), CYCLE), matrices(CYCLE))):
    assert_same(jax.tree.map(np.asarray, made), want)
    for leaf in jax.tree.leaves(made):
      assert leaf.sharding.memory_kind == "pinned_host"
      assert leaf.sharding == own or leaf.sharding.mesh == mesh
      assert sharded == (leaf.sharding.shard_shape(leaf.shape) != leaf.shape)


def test_shapes_without_values():
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  sharding = lambda ndim: NamedSharding(mesh, P(*[None] * (ndim - 1), "y"))
  tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.ndim)), matrices())
  there = convert.restack(tree, CYCLE, OTHER, to_param_axis=1)
  for leaf, want in zip(jax.tree.leaves(there), jax.tree.leaves(matrices(OTHER, 1)), strict=True):
    assert isinstance(leaf, jax.ShapeDtypeStruct) and (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
    assert leaf.sharding == sharding(want.ndim)
  assert convert.restack(there, OTHER, CYCLE, param_axis=1, to_param_axis=0) == tree
  plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), matrices())
  assert convert.unstack(plain, CYCLE)[3] == {"kernel": jax.ShapeDtypeStruct((4, 8), np.float32)}
  assert convert.stack(convert.unstack(plain, CYCLE), CYCLE) == plain
  assert jax.eval_shape(lambda t: convert.restack(t, CYCLE, OTHER, to_scan=False), matrices()) == convert.restack(
      plain, CYCLE, OTHER, to_scan=False)
  mixed = convert.unstack(matrices(), CYCLE)
  mixed[0] = {"kernel": jax.ShapeDtypeStruct((4, 8), np.float32)}
  with pytest.raises(ValueError, match="one of them is a mere shape"):
    convert.stack(mixed, CYCLE)


def test_under_jit_and_grad():
  tree = jax.tree.map(lambda x: jnp.nan_to_num(jnp.asarray(x)), matrices())

  @jax.jit
  def loss(tree):
    return sum(i * jnp.sum(layer["kernel"] ** 2) for i, layer in enumerate(convert.unstack(tree, CYCLE)))

  grads = jax.grad(loss)(tree)
  for i, (grad, layer) in enumerate(zip(convert.unstack(grads, CYCLE), convert.unstack(tree, CYCLE))):
    np.testing.assert_allclose(grad["kernel"], 2 * i * layer["kernel"], rtol=1e-6)


def test_memory_maps_and_readers_are_read_when_they_are_needed(tmp_path):
  arrays = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(matrices()):
    name = jax.tree_util.keystr(keys, simple=True, separator="_")
    arrays[name] = np.memmap(tmp_path / name, leaf.dtype, "w+", shape=leaf.shape)
    arrays[name][...] = leaf
  maps = iter(arrays.values())
  tree = jax.tree.map(lambda _: next(maps), matrices())
  own = convert.unstack(tree, CYCLE)
  assert all(isinstance(layer["kernel"], np.memmap) for layer in own)  # views: nothing was read
  assert_same(convert.stack(own, CYCLE), matrices())
  readers = jax.tree.map(Reader, matrices())
  lazy = convert.restack(readers, CYCLE, OTHER, to_param_axis=1, lazy=True)
  assert not any(reader.read for reader in jax.tree.leaves(readers))
  for leaf, want in zip(jax.tree.leaves(lazy), jax.tree.leaves(matrices(OTHER, 1)), strict=True):
    if isinstance(leaf, Reader):
      continue  # laid out as it was: nothing is done to it
    assert isinstance(leaf, convert.Lazy)
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == (want.shape, want.dtype, want.nbytes)
    assert_same(by_blocks(leaf), want)
    assert_same(leaf.read(), want)
    assert_same(np.asarray(leaf), want)
  read = [size for reader in jax.tree.leaves(readers) for size in reader.read]
  assert {*read} == {4 * 8 * 4} and len(read) == 3 * 6  # layer by layer, and no more than is asked for
  again = convert.restack(lazy, OTHER, CYCLE, param_axis=1, to_param_axis=0, lazy=True)
  assert_same(jax.tree.map(lambda leaf: leaf[(slice(None),) * len(leaf.shape)], again), matrices())
  assert_same(convert.restack(readers, CYCLE, OTHER), matrices(OTHER))


def test_what_is_laid_out_alike_is_not_copied():
  tree = matrices()
  same = convert.restack(tree, CYCLE, CYCLE)
  assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(tree)))
  renamed = ls.Plan.of(ls.Segment("blocks", (A, A, B), 2), ls.Segment("last", (A,)))
  there = convert.restack(tree, CYCLE, renamed)
  assert there["blocks"]["a"]["kernel"] is tree["layers"]["a"]["kernel"]
  assert all(np.shares_memory(layer["kernel"], tree["layers"][run]["kernel"])
             for layer, run in zip(convert.unstack(tree, CYCLE), "aabaab"))


# Axes of layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_layer_axes_of_boxed_params(axis):
  plan = PLANS["cycle and remainder"]
  params = variables_of([own_tree(np.random.default_rng(0), 0) for _ in range(plan.num_layers)], plan, axis)["params"]
  axes = convert.layer_axes(plan, params, axis)
  kernel = value(axes["layers"]["a_0"]["kernel"])
  where = {0: (0, 1), 1: (1, 2), -1: (3, 2), 2: (2, 3), -2: (2, 1)}[axis]
  assert kernel.axes == where and kernel.names == ("layers", "a_0") and bool(kernel)
  np.testing.assert_array_equal(kernel.layers, [[1, 2], [5, 6]])
  gain = axes["layers"]["a_0"]["gain"]  # a scalar: its own axis is at the end, and the outer one is put in after it
  assert gain.axes == {0: (0, 1), 1: (1, 0), -1: (1, 0), 2: (1, 0), -2: (0, 1)}[axis]
  np.testing.assert_array_equal(gain.index(2), gain.layers if axis in (0, -2) else gain.layers.T)
  assert axes["first"]["gain"].layers == 0 and not axes["first"]["gain"]
  with pytest.raises(ValueError, match="the leaf is no layer's"):
    axes["token_embed"]["embedding"].index(2)
  scaled = jax.tree.map(
      lambda p, a: p * (a.index(p.ndim) + 1).astype(p.dtype) if a.layers is not None else p, params, axes)
  for i, (mine, theirs) in enumerate(zip(convert.unstack(scaled, plan, axis), convert.unstack(params, plan, axis))):
    assert_same(mine, jax.tree.map(lambda x, i=i: x * np.asarray(i + 1, x.dtype), theirs))


def test_layer_axes_make_an_optimiser_of_matrices_see_layers():
  """Muon takes matrices: with the stacked axes as batch axes, it does to each layer what it does to the layer alone."""
  plan = ls.Plan.cycle([A, A, B], 3)
  params = {**some_params(plan, 1), "norm": np.ones((2, 3), np.float32)}
  axes = convert.layer_axes(plan, params, 1)
  assert axes["norm"].layers is None and axes["layers"]["a"]["kernel"].axes == (1,)

  def numbers(leaf, mark):
    own = [axis for axis in range(leaf.ndim) if axis not in mark.axes]
    return optax.contrib.MuonDimensionNumbers(own[0], own[1]) if mark.layers is not None and len(own) == 2 else None

  def step(params, dims):
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=dims)
    return jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params)

  stacked = step(params, jax.tree.map(numbers, params, axes))
  for update, own in zip(convert.unstack(stacked, plan, 1), convert.unstack(params, plan, 1)):
    alone = step(own, {"kernel": optax.contrib.MuonDimensionNumbers(0, 1), "bias": None, "gain": None})
    np.testing.assert_allclose(update["kernel"], alone["kernel"], rtol=1e-4, atol=1e-6)


# Mistakes -------------------------------------------------------------------------------------------------------------


def broken(change, plan=CYCLE, axis=0, scan=True):
  tree = {"params": {**matrices(plan, axis, scan), "norm": np.ones(3)}}
  change(tree["params"])
  return tree


def renamed(tree, old, new):
  tree[new] = tree.pop(old)


MISTAKES = {
    "another axis": (broken(lambda t: None, axis=1), CYCLE, [
        "the tree does not fit the plan; this tree is stacked along axis 1; the plan says 0",
        "params/layers/a/kernel: shape (4, 2, 2, 8), expected 2 (layers) on axis 0 and 2 (a) on axis 1",
        "params/layers/b/kernel: shape (4, 2, 8), expected 2 (layers) on axis 0"]),
    "scan=False": (broken(lambda t: None, scan=False), CYCLE, ["these are the layers of scan=False"]),
    "scan=False, of which a name is a segment's": (
        broken(lambda t: None, plan=ls.Plan.homogeneous(A, 2) + ls.Plan.homogeneous(B, 2, "layers_0"), scan=False),
        ls.Plan.homogeneous(A, 2) + ls.Plan.homogeneous(B, 2, "layers_0"), [
            "these are the layers of scan=False", "params/layers: missing, with layers 0, 1"]),
    "a renamed segment": (broken(lambda t: renamed(t, "layers", "blocks")), CYCLE, [
        "params/layers/a: missing, with layers 0, 1, 3, 4", "params/layers/b: missing, with layers 2, 5"]),
    "all segments renamed": (broken(lambda t: (renamed(t, "layers", "layer"), t.pop("layers_remainder"))), CYCLE, [
        "none of the plan's layers (layers, layers_remainder) is in the tree; its keys: params, layer",
        "did you mean 'layer'?"]),
    "a renamed run": (broken(lambda t: renamed(t["layers"], "b", "c")), CYCLE, [
        "params/layers/c: left over", "params/layers/b: missing, with layers 2, 5"]),
    "a layer too many": (broken(lambda t: t.update(layers_7=t["layers_1"]), scan=False), (CYCLE, {"scan": False}), [
        "params/layers_7: left over, no layer of the plan stands there"]),
    "layers of both layouts": (broken(lambda t: t.update(layers_0=t["layers_remainder"])), CYCLE, [
        "params/layers_0: left over"]),
    "one stack of all layers": (broken(lambda t: t.update(layers={"kernel": np.ones((7, 4, 8))})), CYCLE, [
        "'layers' holds one stack of 7 layers, not the runs a, b of a cycle: they were made for another plan"]),
    "another number of layers": ({"params": {"layers": {"kernel": np.ones((4, 2)), "bias": np.ones((4,))}}}, THREE, [
        "'layers' holds 4 layers; the plan has 3",
        "params/layers/kernel: shape (4, 2), expected 3 (layers) on axis 0"]),
    "a list of layers": ({"params": {"layers": [{"kernel": np.ones(2)}] * 3}}, THREE, [
        "params/layers: a list of 3 trees, expected one tree of stacked variables; convert.stack takes a list"]),
    "layers under numbers": ({"params": {"layers": {str(i): {"kernel": np.ones((2, 2))} for i in range(3)}}}, THREE, [
        "'layers' has one tree for each of 3 layers, under '0', '1', ...: pass the list of them to convert.stack"]),
    "a leaf that is not stacked": ({"params": {"layers": {"kernel": np.ones((3, 2)), "count": np.ones(())}}}, THREE, [
        "params/layers/count: shape (), expected it to be stacked, [layers: 3, ...]"]),
    "a leaf that is no array": ({"params": {"layers": {"kernel": 3.0}}}, THREE, [
        "params/layers/kernel: 3.0 is not an array"]),
    "names in a box": ({"layers": {"kernel": nn.Partitioned(np.ones((3, 2)), names=("blocks", "in"))}}, THREE, [
        "layers/kernel: axis 0 should be named 'layers' in the partition metadata, found ('blocks', 'in')"]),
    "a box without a name": ({"params": {"layers": {"kernel": nn.Partitioned(np.ones((3, 2)), names=())}}}, THREE, [
        "axis 0 should be named 'layers' in the partition metadata, found ()"]),
    "a box of another kind": ({"params": {"layers": {"kernel": Odd(np.ones((3, 2)), axes=((1, "layers"),))}}}, THREE, [
        "params/layers/kernel: Odd has no axis 'layers' at 0 to take out"]),
    "a misnamed segment in a collection": ({**broken(lambda t: None), "cache": {
        "layers": matrices()["layers"], "rest": {"x": np.ones(2)}}}, CYCLE, [
            "cache/layers_remainder: missing, with layer 6"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_trees_that_do_not_fit(name):
  tree, plan, words = MISTAKES[name]
  plan, options = plan if isinstance(plan, tuple) else (plan, {})
  for convert_it in (lambda: convert.unstack(tree, plan, **options), lambda: convert.layer_axes(plan, tree, **options),
                     lambda: convert.restack(tree, plan, plan, **options)):
    with pytest.raises(ValueError) as error:
      convert_it()
    for word in words:
      assert word in str(error.value), str(error.value)


def test_long_lists_of_problems_are_cut_and_counted():
  tree = {"layers": {f"w{i}": np.ones((4, 2)) for i in range(13)}}
  with pytest.raises(ValueError, match=r"(?s)w0.*and 3 more$"):
    convert.unstack(tree, THREE)


def test_a_collection_may_lack_layers_and_params_may_not():
  tree = {**broken(lambda t: None), "losses": {"layers": {"b": {"aux": (np.ones(2),)}}}}
  own = convert.unstack(tree, CYCLE)
  assert own[0]["losses"] == {} and own[2]["losses"] == {"aux": (1.0,)}
  assert_same(convert.stack(own, CYCLE), tree)
  assert_same(convert.restack(tree, CYCLE, CYCLE, to_scan=False)["losses"], {"layers_2": {"aux": (np.ones(()),)},
                                                                             "layers_5": {"aux": (np.ones(()),)}})
  some = {**tree, "losses": {"layers_remainder": {"aux": np.ones(())}}}
  with pytest.raises(ValueError, match="two/a_1: layer 3 has no variables here, layer 6 has"):
    convert.restack(some, CYCLE, ls.Plan.of(ls.Segment("one", (A,)), ls.Segment("two", (A, B, A), 2)))
  del tree["params"]["layers_remainder"]
  with pytest.raises(ValueError, match="params/layers_remainder: missing, with layer 6"):
    convert.unstack(tree, CYCLE)
  own = convert.unstack(tree, CYCLE, allow_missing=True)
  assert own[6]["params"] == {}
  assert_same(convert.stack(own, CYCLE, allow_missing=True), tree)
  with pytest.raises(ValueError, match="layer 6: nothing in params"):
    convert.stack(own, CYCLE)


def test_lists_of_layers_that_cannot_be_stacked():
  layers = [{"kernel": np.ones((2, 3), np.float32)} for _ in range(3)]
  with pytest.raises(ValueError, match=r"4 trees for the 3 layers of the plan \(layers: 3\)"):
    convert.stack(layers + layers[:1], THREE)
  with pytest.raises(TypeError, match="trees must be a list with one tree per layer, not a dict"):
    convert.stack({"0": layers[0]}, THREE)
  with pytest.raises(ValueError, match=r"layers: kernel \(layer 0\) and kernel \(layer 2\) cannot be stacked: "
                     r"float32 \(2, 3\) and float32 \(3, 2\)"):
    convert.stack([*layers[:2], {"kernel": np.ones((3, 2), np.float32)}], THREE)
  with pytest.raises(ValueError, match=r"cannot be stacked: float32 \(2, 3\) and float64"):
    convert.stack([*layers[:2], {"kernel": np.ones((2, 3))}], THREE)
  with pytest.raises(ValueError, match="layers 0 and 1 have trees of different structure"):
    convert.stack([layers[0], {"kernel": layers[1]["kernel"], "bias": np.ones(3)}, layers[2]], THREE)
  boxed = [{"kernel": nn.Partitioned(layer["kernel"], names=names)} for layer, names in zip(layers, ["ab", "ab", "ba"])]
  with pytest.raises(ValueError, match="have different partition metadata"):
    convert.stack(boxed, THREE)
  with pytest.raises(ValueError, match="stands where the plan puts layers, and is none of them"):
    convert.stack(layers, THREE, rest={"layers": {"kernel": np.ones((3, 2))}})
  own = convert.unstack({"params": {"layers": {"kernel": np.ones((3, 2))}}, "step": np.int32(0)}, THREE)
  own[1] = {"params": own[1]["params"]}
  with pytest.raises(ValueError, match="tree 1 does not have the structure that unstack gave it"):
    convert.stack(own, THREE)
  assert_same(convert.stack(layers, THREE, 1), {"layers": {"kernel": np.ones((2, 3, 3), np.float32)}})
  with_cache = [{"params": layer, "cache": {"k": np.full(2, i)}} for i, layer in enumerate(layers)]
  assert_same(convert.stack(with_cache, THREE, 1, rest={"params": {"norm": np.ones(3)}}), {
      "params": {"layers": {"kernel": np.ones((2, 3, 3), np.float32)}, "norm": np.ones(3)},
      "cache": {"layers": {"k": np.repeat(np.arange(3)[:, None], 2, 1)}}})


def test_arguments_of_a_wrong_kind():
  tree = matrices()
  with pytest.raises(TypeError, match="plan must be a plan, a segment, a StackedDecoder or a model around one, not 3"):
    convert.unstack(tree, 3)
  with pytest.raises(TypeError, match="tree must be a tree with the layers of the plan, not None"):
    convert.unstack(None, CYCLE)
  with pytest.raises(TypeError, match="param_axis must be an int, not '1'"):
    convert.unstack(tree, CYCLE, "1")
  with pytest.raises(TypeError, match="scan must be True or False, not 1"):
    convert.unstack(tree, CYCLE, scan=1)
  with pytest.raises(ValueError, match="param_axis=0, but the stack given as to_plan has param_axis=1; leave it out"):
    convert.restack(tree, CYCLE, ls.StackedDecoder(CYCLE, param_axis=1), to_param_axis=0)
  with pytest.raises(ValueError, match="from_plan has 7 layers and to_plan has 3"):
    convert.restack(tree, CYCLE, THREE)
  with pytest.raises(TypeError, match="shared must be a function"):
    convert.unstack(tree, CYCLE, shared="rng")
  with pytest.raises(ValueError, match="one: stands where the plan puts layers"):
    convert.restack({**tree, "one": {"kernel": np.ones(2)}}, CYCLE, OTHER)
  assert convert.restack(optax.sgd(0.1).init(tree), CYCLE, OTHER) == optax.sgd(0.1).init(tree)


class Gain(nn.Module):
  """A layer of which kinds differ in what they compute, and not in what they store."""

  gain: float = 1.0

  @nn.compact
  def __call__(self, x):
    return x + self.gain * nn.Dense(3)(x)


def test_a_layer_does_not_become_one_of_another_kind():
  low, high, other = ls.LayerSpec(Gain, "low", gain=0.1), ls.LayerSpec(Gain, "high", gain=9.0), ls.LayerSpec(Gain, "o", gain=3.0)
  one, two = ls.Plan.cycle([low, high], 4), ls.Plan.cycle([high, low], 4)
  tree = jax.jit(ls.StackedDecoder(one).init)(jax.random.key(0), jnp.ones((1, 3)))
  with pytest.raises(ValueError, match=r"layer 0 is low \(gain=0.1\) in from_plan and high \(gain=9.0\) in to_plan"):
    convert.restack(tree, one, two)
  for differs in ([low, high, low, low], [low, high, other, high], [other, other, other, other]):
    with pytest.raises(ValueError, match=r"layer \d is .* in from_plan and .* in to_plan"):
      convert.restack(tree, one, ls.Plan.from_layers(differs))
  # Names are a matter of layout, and all layers of a kind may change together, in a dtype for example.
  named = ls.Plan.from_layers([ls.LayerSpec(Gain, f"n{i}", gain=[0.1, 9.0][i % 2]) for i in range(4)])
  changed = ls.Plan.cycle([ls.LayerSpec(Gain, "x", gain=0.2), ls.LayerSpec(Gain, "y", gain=8.0)], 4)
  assert jax.tree.leaves(convert.restack(tree, one, named)) and jax.tree.leaves(convert.restack(tree, one, changed))
