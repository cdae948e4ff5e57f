"""Plans as data: equality of specs, names, places of layers, the splitting helpers, and what bad input says."""
import copy
import dataclasses
import enum
import functools
import pathlib
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack.plan as plan_module
from linen_stack.plan import LayerSpec, Location, Plan, Segment, nearest, split_at, split_cycle, split_prefix


class Layer(nn.Module):
  width: int = 4
  arg: Any = None
  a: Any = None
  b: Any = None

  def __call__(self, x):
    return x


class OtherLayer(nn.Module):
  """Has the fields of `Layer`, and is another layer."""

  width: int = 4
  arg: Any = None

  def __call__(self, x):
    return x + 1


class MLAttention2D(nn.Module):

  def __call__(self, x):
    return x


@dataclasses.dataclass
class Factory:
  """A layer factory that is not hashable."""

  width: int

  def __call__(self, name=None, **kwargs):
    return Layer(self.width, name=name, **kwargs)


class Window(enum.Enum):
  LOCAL = 1
  GLOBAL = 2


A, B, C = (LayerSpec(Layer, name=name) for name in "abc")


# Specs.


@pytest.mark.parametrize("cls, label", [
    (Layer, "layer"),
    (MLAttention2D, "ml_attention2_d"),
    (functools.partial(Layer, width=3), "layer"),
    (lambda name: Layer(name=name), "lambda"),
    (Factory(3), "layer"),
])
def test_label_is_the_class_name_in_snake_case(cls, label):
  assert LayerSpec(cls).label == label
  assert LayerSpec(cls, name="global").label == "global"


def test_repr_shows_class_name_and_arguments():
  assert repr(LayerSpec(Layer, width=8)) == "LayerSpec(Layer, width=8)"
  assert repr(LayerSpec(Layer, name="local", width=8)) == "LayerSpec(Layer, name='local', width=8)"


SAME = [
    (1, 1), ("a", "a"), (None, None), (1.5, 1.5), (float("inf"), float("inf")), (Window.LOCAL, Window.LOCAL),
    ([1, (2, 3)], [1, (2, 3)]), ({"a": [1], "b": 2}, {"b": 2, "a": [1]}),
    (np.arange(3), np.arange(3)), (np.float32(1), np.float32(1)),
    (np.array(["a"], dtype=object), np.array(["a"], dtype=object)),
    (jnp.arange(3), jnp.arange(3)), (jnp.float32, jnp.float32), (jnp.dtype("bfloat16"), jnp.dtype("bfloat16")),
    (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)),
    (functools.partial(max, key=1), functools.partial(max, key=1)),
    (Layer(4), Layer(4)), (Layer(4, name="x"), Layer(4, name="x")), (Factory(3), Factory(3)),
    ([Layer(4)], [Layer(4)]), (nn.Dense(4, use_bias=False), nn.Dense(4, use_bias=False)),
    (jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec("data")),
]
DIFFERENT = [
    (1, True), (1, 1.0), (0, False), (0, None), ("1", 1), ([1], [True]), ([1], (1,)), ([1], [1, 2]),
    ({"a": 1}, {"a": 1.0}), ({"a": 1}, {"b": 1}), (Window.LOCAL, Window.GLOBAL), (Window.LOCAL, 1),
    (np.arange(3), np.arange(4)), (np.arange(3), np.arange(3.0)), (np.arange(2), np.array([0, 2])),
    (np.ones((1, 3)), np.ones(3)), (np.float32(1), np.float64(1)), (np.arange(3), jnp.arange(3)),
    (jnp.float32, jnp.bfloat16),
    (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)),
    (functools.partial(max, key=1), functools.partial(max, key=True)),
    (functools.partial(max, 1), functools.partial(min, 1)), (functools.partial(max, 1), functools.partial(max, 1, 2)),
    (Layer(4), Layer(5)), (Layer(4), Layer(4.0)), (Layer(4, name="x"), Layer(4, name="y")), (Layer(4), MLAttention2D()),
    (Factory(3), Factory(4)), (Layer, OtherLayer),
    (lambda x: x, lambda x: x),
]


@pytest.mark.parametrize("a, b", SAME, ids=[str(i) for i in range(len(SAME))])
def test_specs_with_same_arguments_are_equal_and_hash_alike(a, b):
  assert LayerSpec(Layer, arg=a) == LayerSpec(Layer, arg=b)
  assert hash(LayerSpec(Layer, arg=a)) == hash(LayerSpec(Layer, arg=b))


@pytest.mark.parametrize("a, b", DIFFERENT, ids=[str(i) for i in range(len(DIFFERENT))])
def test_specs_that_could_trace_differently_are_not_equal(a, b):
  assert LayerSpec(Layer, arg=a) != LayerSpec(Layer, arg=b)
  assert LayerSpec(Layer, arg=b) != LayerSpec(Layer, arg=a)


def test_specs_compare_class_name_and_argument_names():
  assert LayerSpec(Layer, width=4) != LayerSpec(OtherLayer, width=4)
  assert LayerSpec(Layer) != LayerSpec(OtherLayer)
  assert LayerSpec(Layer, name="a") != LayerSpec(Layer, name="b")
  assert LayerSpec(Layer, name="a") != LayerSpec(Layer)
  assert LayerSpec(Layer, width=4) != LayerSpec(Layer, arg=4)
  assert LayerSpec(Layer, width=4) != LayerSpec(Layer, width=4, arg=None)
  assert LayerSpec(Layer, a=1, b=2) == LayerSpec(Layer, b=2, a=1)
  assert LayerSpec(functools.partial(Layer, width=4)) == LayerSpec(functools.partial(Layer, width=4))
  assert LayerSpec(functools.partial(Layer, width=4)) != LayerSpec(functools.partial(Layer, width=5))
  assert LayerSpec(Factory(4)) == LayerSpec(Factory(4)) != LayerSpec(Factory(5))
  assert hash(LayerSpec(Factory(4))) == hash(LayerSpec(Factory(4)))
  assert LayerSpec(Layer) != "layer"


def test_an_object_is_the_same_as_itself_even_where_it_is_not_equal_to_itself():
  nan, scale = float("nan"), np.array([np.nan])
  assert LayerSpec(Layer, a=nan, b=scale) == LayerSpec(Layer, a=nan, b=scale)
  assert LayerSpec(Layer, arg=scale) != LayerSpec(Layer, arg=scale.copy())


def test_a_value_that_refuses_comparison_is_not_equal():
  class Stubborn:
    def __eq__(self, other):
      raise RuntimeError("no")

    __hash__ = object.__hash__

  value = Stubborn()
  assert LayerSpec(Layer, arg=value) == LayerSpec(Layer, arg=value)
  assert LayerSpec(Layer, arg=value) != LayerSpec(Layer, arg=Stubborn())


def test_modules_that_belong_to_a_parent_are_the_same_only_if_they_are_one_object():
  class Parent(nn.Module):

    @nn.compact
    def __call__(self):
      inner, other = Layer(4), Layer(4)
      assert LayerSpec(Layer, arg=inner) == LayerSpec(Layer, arg=inner)
      assert LayerSpec(Layer, arg=inner) != LayerSpec(Layer, arg=other)

  Parent().apply({})


def test_specs_with_different_sizes_do_not_share_a_hash():
  assert len({hash(LayerSpec(Layer, width=i)) for i in range(100)}) > 90


@pytest.mark.parametrize("make", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_plans_survive_copy_and_pickle(make):
  plan = Plan.cycle([LayerSpec(Layer, width=3), LayerSpec(Layer, width=5)], 5)
  assert make(plan) == plan
  assert hash(make(plan)) == hash(plan)


def test_plans_and_segments_are_frozen_and_hashable():
  plan, other = Plan.homogeneous(A, 4), Plan.homogeneous(LayerSpec(Layer, name="a"), 4)
  assert plan == other and len({plan, other}) == 1
  assert plan != Plan.homogeneous(A, 5) and plan != Plan.homogeneous(B, 4) and plan != Plan.homogeneous(A, 4, "other")
  with pytest.raises(dataclasses.FrozenInstanceError):
    plan.segments = ()
  with pytest.raises(dataclasses.FrozenInstanceError):
    plan.segments[0].length = 3
  with pytest.raises(dataclasses.FrozenInstanceError):
    A.name = "b"


@pytest.mark.parametrize("make, error, message", [
    (lambda: LayerSpec(Layer(4)), TypeError, r"cls is a layer that is already made; write LayerSpec\(Layer, ...\)"),
    (lambda: LayerSpec("Layer"), TypeError, "cls must be a layer class.*not 'Layer'"),
    (lambda: LayerSpec(Layer, name=""), ValueError, "name must be a non-empty string without '/', not ''"),
    (lambda: LayerSpec(Layer, name="a/b"), ValueError, "without '/', not 'a/b'"),
    (lambda: LayerSpec(Layer, name=3), ValueError, "name must be a non-empty string"),
])
def test_bad_specs(make, error, message):
  with pytest.raises(error, match=message):
    make()


# Segments.


def test_runs_group_adjacent_equal_specs():
  segment = Segment("layers", (A, A, B, LayerSpec(Layer, name="a"), C, C, C), 3)
  assert [(run.name, run.spec, run.count, run.offset) for run in segment.runs] == [
      ("a_0", A, 2, 0), ("b", B, 1, 2), ("a_1", A, 1, 3), ("c", C, 3, 4)]
  assert segment.num_layers == 21 and segment.is_cycle
  assert [segment.path(run) for run in segment.runs] == [
      ("layers", "a_0"), ("layers", "b"), ("layers", "a_1"), ("layers", "c")]
  assert [segment.axes(run) for run in segment.runs] == [
      (("layers", 3), ("a_0", 2)), (("layers", 3),), (("layers", 3),), (("layers", 3), ("c", 3))]


@pytest.mark.parametrize("length, axes", [(1, ()), (2, (("layers", 2),))])
def test_a_block_of_one_spec_stands_without_a_run_name(length, axes):
  segment = Segment("layers", A, length)
  assert segment.block == (A,) and not segment.is_cycle and segment.num_layers == length
  (run,) = segment.runs
  assert segment.path(run) == ("layers",) and segment.axes(run) == axes


def test_a_block_of_equal_specs_is_a_cycle_of_one_run():
  segment = Segment("layers", [A, A])
  (run,) = segment.runs
  assert segment.is_cycle and segment.path(run) == ("layers", "a") and segment.axes(run) == (("a", 2),)


def test_different_specs_with_one_label_get_numbered_runs():
  segment = Segment("layers", [LayerSpec(Layer, width=1), LayerSpec(Layer, width=2), LayerSpec(MLAttention2D)])
  assert [run.name for run in segment.runs] == ["layer_0", "layer_1", "ml_attention2_d"]


@pytest.mark.parametrize("make, error, message", [
    (lambda: Segment("", A), ValueError, "segment's name must be a non-empty string"),
    (lambda: Segment("a/b", A), ValueError, "segment's name must be .* without '/'"),
    (lambda: Segment("layers", ()), ValueError, "segment 'layers': a block needs at least one layer"),
    (lambda: Segment("layers", (A, Layer)), TypeError, "segment 'layers': a block holds LayerSpecs.*ls.LayerSpec"),
    (lambda: Segment("layers", A, 0), ValueError, "segment 'layers': length must be at least 1, not 0"),
    (lambda: Segment("layers", A, True), TypeError, "segment 'layers': length must be an int, not True"),
    (lambda: Segment("layers", A, 2.0), TypeError, "segment 'layers': length must be an int, not 2.0"),
    (lambda: Segment("layers", (A, LayerSpec(Layer, name="a_0"), A)), ValueError,
     r"segment 'layers': two runs of the block get one name \(a_0, a_0, a_1\); give the specs distinct names"),
])
def test_bad_segments(make, error, message):
  with pytest.raises(error, match=message):
    make()


# Plans.


@pytest.mark.parametrize("num_layers", [1, 3, np.int64(3)])
def test_homogeneous(num_layers):
  plan = Plan.homogeneous(A, num_layers)
  assert plan.layers == (A,) * int(num_layers)
  assert [segment.name for segment in plan] == ["layers"]
  assert plan.num_layers == num_layers and type(plan.num_layers) is int and plan.traced_layers == 1


@pytest.mark.parametrize("num_layers, shape", [
    (6, [("layers", 3, 2)]),
    (7, [("layers", 3, 2), ("layers_remainder", 1, 1)]),
    (8, [("layers", 3, 2), ("layers_remainder", 2, 1)]),
    (3, [("layers", 3, 1)]),
    (2, [("layers_remainder", 2, 1)]),  # a cycle longer than the decoder: no layer is added
    (1, [("layers_remainder", 1, 1)]),
])
def test_cycle_keeps_every_layer(num_layers, shape):
  plan = Plan.cycle([A, A, B], num_layers)
  assert [(s.name, len(s.block), s.length) for s in plan] == shape
  assert plan.layers == ((A, A, B) * 3)[:num_layers]


def test_cycle_of_one_spec_and_names():
  assert Plan.cycle(A, 4) == Plan.homogeneous(A, 4)
  plan = Plan.cycle([A, B], 5, "blocks", remainder="tail")
  assert [segment.name for segment in plan] == ["blocks", "tail"]


def test_plans_join_in_order():
  prefix, body = Plan.homogeneous(A, 2, "dense"), Plan.cycle([B, B, C], 7)
  plan = prefix + body
  assert plan == Plan.of(prefix, body) == Plan.of(*prefix.segments, body) == Plan.of(Plan.of(prefix), *body)
  assert plan.layers == (A, A, B, B, C, B, B, C, B)
  assert [segment.name for segment in plan] == ["dense", "layers", "layers_remainder"]
  assert plan.num_layers == 9 and plan.traced_layers == 4
  assert prefix + Segment("end", C) == Plan.of(prefix, Segment("end", C))
  with pytest.raises(TypeError, match="unsupported operand"):
    prefix + A  # pylint: disable=pointless-statement


MIXED = Plan.homogeneous(A, 2, "dense") + Plan.cycle([B, B, C], 8) + Plan.homogeneous(C, 1, "last")


def test_locate_is_the_inverse_of_layers():
  seen = []
  for index, spec in enumerate(MIXED.layers):
    where = MIXED.locate(index)
    segment = MIXED[where.segment]
    assert segment.block[where.position] == spec
    assert MIXED.offset(segment.name) + where.step * len(segment.block) + where.position == index
    seen.append(where)
  assert len(set(seen)) == MIXED.num_layers == 11
  assert MIXED.locate(0) == Location("dense", 0, 0) == ("dense", 0, 0)
  assert MIXED.locate(6) == ("layers", 1, 1)
  assert MIXED.locate(np.int64(10)) == ("last", 0, 0)


@pytest.mark.parametrize("index", [-1, 11, 100])
def test_locate_out_of_range(index):
  with pytest.raises(IndexError, match=f"layer {index} of a plan with layers 0 to 10"):
    MIXED.locate(index)


@pytest.mark.parametrize("index", [True, 1.0, "1", None])
def test_locate_needs_an_int(index):
  with pytest.raises(TypeError, match="index must be an int"):
    MIXED.locate(index)


def test_segments_by_name():
  assert MIXED["layers"].length == 2
  assert [MIXED.offset(name) for name in ("dense", "layers", "layers_remainder", "last")] == [0, 2, 8, 10]
  for read in (MIXED.__getitem__, MIXED.offset):
    with pytest.raises(KeyError, match="no segment 'layer'; did you mean 'layers'?"):
      read("layer")


def test_table():
  assert MIXED.table() == textwrap.dedent("""\
      segment           layers  repeats  run   layer  stacked axes
      ----------------  ------  -------  ----  -----  ------------
      dense             0-1     2        -     Layer  dense:2
      layers            2-7     2        b x2  Layer  layers:2 b:2
                                         c x1  Layer  layers:2
      layers_remainder  8-9     1        b x2  Layer  b:2
      last              10      1        -     Layer  -
      11 layers, 5 traced""")


@pytest.mark.parametrize("make, error, message", [
    (lambda: Plan.homogeneous(A, 0), ValueError, "num_layers must be at least 1, not 0"),
    (lambda: Plan.homogeneous(A, 2.5), TypeError, "num_layers must be an int, not 2.5"),
    (lambda: Plan.homogeneous(Layer, 2), TypeError, "a block holds LayerSpecs"),
    (lambda: Plan.cycle([], 2), ValueError, "specs must hold at least one LayerSpec"),
    (lambda: Plan.cycle([A, B], 0), ValueError, "num_layers must be at least 1, not 0"),
    (lambda: Plan.cycle([A, B], 3, remainder="layers"), ValueError,
     r"two segments are named 'layers'; names in this plan: layers, layers. Pass name= \(and remainder=\)"),
    (lambda: Plan.homogeneous(A, 2) + Plan.homogeneous(B, 2), ValueError, "two segments are named 'layers'"),
    (lambda: Plan.of(), ValueError, "a plan needs at least one layer"),
    (lambda: Plan(()), ValueError, "a plan needs at least one layer"),
    (lambda: Plan((A,)), TypeError, "a plan holds segments, not LayerSpec"),
    (lambda: Plan.of(A), TypeError, "has no number of layers; write Plan.homogeneous"),
    (lambda: Plan.of("layers"), TypeError, "a plan holds segments, not 'layers'"),
])
def test_bad_plans(make, error, message):
  with pytest.raises(error, match=message):
    make()


# Helpers.


@pytest.mark.parametrize("word, known, end", [
    ("minimul", ["minimal", "full"], "did you mean 'minimal'?"),
    ("xyz", ["minimal", "full"], "known: 'minimal', 'full'"),
    ("xyz", [], "known: none"),
])
def test_nearest(word, known, end):
  assert nearest(word, iter(known)) == end


def test_splits_add_up():
  assert split_prefix(61, 3) == (3, 58) and split_prefix(4, 0) == (0, 4) and split_prefix(4, 4) == (4, 0)
  assert split_cycle(62, 6) == (10, 2) and split_cycle(6, 6) == (1, 0) and split_cycle(5, 6) == (0, 5)
  assert split_at(10) == (10,) and split_at(10, 3) == (3, 7) and split_at(10, 3, 4, 9) == (3, 1, 5, 1)
  assert split_at(10, np.int32(3)) == (3, 7)


@pytest.mark.parametrize("split, error, message", [
    (lambda: split_prefix(4, 5), ValueError, "prefix 5 is longer than the decoder of 4 layers"),
    (lambda: split_prefix(4, -1), ValueError, "prefix must be at least 0, not -1"),
    (lambda: split_prefix(0, 0), ValueError, "num_layers must be at least 1, not 0"),
    (lambda: split_prefix(4, True), TypeError, "prefix must be an int, not True"),
    (lambda: split_cycle(4, 0), ValueError, "cycle must be at least 1, not 0"),
    (lambda: split_cycle("4", 2), TypeError, "num_layers must be an int, not '4'"),
    (lambda: split_at(10, 11), ValueError, "split_at: 11 is out of order or out of range.*0 to 10"),
    (lambda: split_at(10, 5, 3), ValueError, "split_at: 3 is out of order or out of range"),
    (lambda: split_at(10, -1), ValueError, "an index of split_at must be at least 0, not -1"),
    (lambda: split_at(10, 2.0), TypeError, "an index of split_at must be an int, not 2.0"),
])
def test_bad_splits(split, error, message):
  with pytest.raises(error, match=message):
    split()


def test_planning_imports_neither_jax_nor_flax():
  """The package's own `__init__` is left out, so that this is about the modules alone."""
  script = f"""
import sys, types
package = types.ModuleType("linen_stack")
package.__path__ = [{str(pathlib.Path(plan_module.__file__).parent)!r}]
sys.modules["linen_stack"] = package
import linen_stack.plan, linen_stack.planner, linen_stack.hf_plan
plan = linen_stack.hf_plan.plan_from_hf_config({{"num_hidden_layers": 12, "sliding_window_pattern": 6}})
assert plan.traced_layers == 2, plan.table()
print(sorted({{"jax", "flax", "numpy", "absl", "yaml"}} & set(sys.modules)))
"""
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
