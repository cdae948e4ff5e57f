"""Variables of NNX modules as trees: the names of their stacked axes, and the form that Linen has them in.

The tree of a `ScannedLayers` is that of a `StackedDecoder` over the same plan: same paths, shapes, dtypes and names of
axes. Names stand in the metadata `out_sharding` of an NNX variable, and in the box of a Linen one.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict
import jax.numpy as jnp

from linen_stack.lifting import changed
from linen_stack.specs import nearest
from linen_stack.stacked import axis_names, named, stacked_axis, unnamed, value

_NAMES = "out_sharding"


def stack_names(variable: nnx.Variable, axes: Sequence[tuple[str, int]], axis: int) -> None:
  """Names the stacked `axes` (outermost first, at `axis`) in the metadata of a stacked variable."""
  rank = getattr(variable.get_raw_value(), "ndim", len(axes)) - len(axes)
  for name, _ in reversed(axes):
    rank += 1
    at = stacked_axis(axis, rank)
    names = axis_names(variable.get_metadata(_NAMES, None))
    if names is not None:
      variable.set_metadata(_NAMES, named(names, at, name))
    variable.add_axis(at, name)  # hooks of the variable's own


def unstack_names(variable: nnx.Variable, axes: Sequence[tuple[str, int]], axis: int, rank: int, path: str) -> None:
  """The inverse of `stack_names`; `rank` with the stacked axes. Raises ValueError where an axis has another name."""
  for name, _ in axes:
    at = stacked_axis(axis, rank)
    names = axis_names(variable.get_metadata(_NAMES, None))
    if names is not None:
      variable.set_metadata(_NAMES, unnamed(names, at, name, path))
    variable.remove_axis(at, name)
    rank -= 1


def graft(old: nnx.Module, new: nnx.Module, kept: dict[int, Any]) -> None:
  """Makes of `old` what `new` is. Modules and variables that stay at their place remain the same objects, also for those
  who hold on to them. `kept`: what became of the objects of `new`, by id."""
  kept[id(new)] = old
  for name in [name for name in vars(old) if name not in vars(new)]:
    delattr(old, name)
  for name, theirs in vars(new).items():
    if name.startswith("_pytree__"):  # Flax's own
      continue
    ours = before = vars(old).get(name)
    if id(theirs) in kept:
      ours = kept[id(theirs)]
    elif type(ours) is type(theirs) and isinstance(ours, nnx.Module):
      graft(ours, theirs, kept)
    elif type(ours) is type(theirs) and isinstance(ours, nnx.Variable):
      if changed({"": theirs.get_raw_value()}, {"": ours.get_raw_value()}):
        ours.set_raw_value(theirs.get_raw_value())
      if ours.get_metadata() != theirs.get_metadata():
        ours.set_metadata(theirs.get_metadata())
      kept[id(theirs)] = ours
    else:
      ours = theirs
    if ours is not before:
      setattr(old, name, nnx.data(ours) if nnx.has_data(ours) and not nnx.is_data(ours) else ours)


def variables(module: nnx.Module) -> dict[str, Any]:
  """The variables of an NNX module as Linen has them: `{collection: tree}`, boxed where their axes have names.

  Those of a `ScannedLayers` are what `StackedDecoder.init` over the same plan gives, so that
  `StackedDecoder(plan).apply(ls.nnx.variables(model), x)` computes what `model(x)` does; `nn.unbox` gives plain arrays.
  Keys and counters of rng streams, which Linen does not store, are left out.
  """
  out: dict[str, Any] = {}
  for path, variable in _leaves(module):
    tree = out.setdefault(_collection(variable), {})
    for key in path[:-1]:
      tree = tree.setdefault(key, {})
    tree[path[-1]] = boxed(variable)
  return out


def update(module: nnx.Module, variables: Mapping[str, Any]) -> None:  # pylint: disable=redefined-outer-name
  """Sets the variables of an NNX module from those of Linen: a checkpoint of a `StackedDecoder` into a `ScannedLayers`.

  Args:
    module: the module that is changed.
    variables: `{collection: tree}`, boxed or not, as `ls.nnx.variables` gives it. Collections that are not there stay as
      they are; those that are must be whole.

  Raises:
    ValueError: variables that are missing or left over, or of another shape or dtype; nothing is changed then.
  """
  if not isinstance(variables, Mapping) or not all(isinstance(tree, Mapping) for tree in variables.values()):
    raise TypeError("variables must be a dict of collections, such as {'params': {...}}, not "
                    f"{type(variables).__name__}")
  given = {"/".join(map(str, path)): value(leaf) for path, leaf in flatten_dict(variables).items()}
  there = {"/".join((_collection(variable), *path)): variable for path, variable in _leaves(module)}
  wanted = {path: variable for path, variable in there.items() if path.split("/")[0] in variables}
  for path in given:
    if path not in there:
      raise ValueError(f"{path} is no variable of this {type(module).__name__}; {nearest(path, there)}")
  for path, variable in wanted.items():
    if path not in given:
      raise ValueError(f"{path} is missing; {nearest(path, given)}")
    new, old = given[path], variable.get_value()
    if hasattr(old, "shape") and (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
      raise ValueError(f"{path} is {jnp.result_type(new)} {list(jnp.shape(new))}, but this {type(module).__name__} has "
                       f"{old.dtype} {list(old.shape)}")
  for path, variable in wanted.items():
    variable.set_value(given[path])


def _leaves(module: nnx.Module) -> Iterator[tuple[tuple[str, ...], nnx.Variable]]:
  for path, leaf in nnx.to_flat_state(nnx.state(module)):
    if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState):
      yield tuple(map(str, path)), leaf


def _collection(variable: nnx.Variable) -> str:
  return nnx.variable_name_from_type(type(variable), allow_register=True)


def boxed(variable: nnx.Variable) -> Any:
  """The value of a variable, in a box where its axes have names."""
  array, names = variable.get_value(), axis_names(variable.get_metadata(_NAMES, None))
  if names is None:
    return array
  kind = variable.get_metadata("linen_meta_type", None)  # of variables that come from Linen
  if kind is None:
    return nn.LogicallyPartitioned(array, names)
  return kind.from_nnx_metadata({**variable.get_metadata(), "value": array})
