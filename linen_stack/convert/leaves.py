"""The trees of layers: taken out of where their places store them, and put together for other places."""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from flax import linen as nn
import jax
import numpy as np

from linen_stack.convert import arrays
from linen_stack.convert.layout import Place, order, positions
from linen_stack.stacked import add_axis, is_box, names_of, remove_axis, stacked_axis, value

Shared = Callable[[str, Any], bool]


def is_nothing(x: Any) -> bool:
  """Whether something stands for a value that is not there: None, or an empty named tuple (`optax.MaskedNode`)."""
  return x is None or (isinstance(x, tuple) and hasattr(x, "_fields") and not x)


def is_leaf(x: Any) -> bool:
  return is_box(x) or is_nothing(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """One layer's own leaf: a row of a stored leaf, or a value without stacked axes that is the same for all layers."""

  path: str
  row: arrays.Row | None
  shared: Any = None
  box: Any = None
  """The layer's own box, without a value."""
  rank: int = 0
  """Of the layer's own value; -1: the box says nothing of axes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """One layer's own tree."""

  structure: Any
  parts: tuple[Part, ...] = ()

  @property
  def is_absent(self) -> bool:
    return self.structure == _ABSENT

  @property
  def is_bare_nothing(self) -> bool:
    return len(self.parts) == 1 and jax.tree_util.treedef_is_leaf(self.structure) and is_nothing(self.parts[0].shared)


_ABSENT = jax.tree.structure({})
ABSENT = Tree(_ABSENT)


def take(subtree: Any, place: Place, axis: int, shared: Shared, where: str, problems: list[str]) -> list[Tree]:
  """The layers' own trees of a place, in the order of its stacked axes.

  Args:
    subtree: what stands at the place.
    axis: of the stacked axes.
    shared: whether a leaf, by its path in the layer's tree, is one for all layers.
    where: the path of the place, for messages.
    problems: is told, in words, of leaves that are not stacked as the place says.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(subtree, is_leaf=is_leaf)
  if structure == _ABSENT:
    return [ABSENT] * math.prod(place.sizes)
  columns = []
  for keys, leaf in leaves:
    own = jax.tree_util.keystr(keys, simple=True, separator="/")
    columns.append(_column(leaf, place, axis, shared(own, value(leaf)), "/".join(filter(None, [where, own])), problems))
  return [Tree(structure, parts) for parts in zip(*columns)]


def _column(leaf: Any, place: Place, axis: int, shared: bool, path: str, problems: list[str]) -> list[Part]:
  """The parts of all layers of one leaf."""
  array, count, sizes = value(leaf), math.prod(place.sizes), place.sizes
  box = leaf.replace_boxed(None) if is_box(leaf) else None
  if is_nothing(array) or shared:
    names = names_of(leaf)
    rank = -1
    if is_nothing(array) and names is not None and len(names) >= len(sizes):
      rank = len(names) - len(sizes)
      box = _unnamed(box, place, axis, rank, path, problems)
    return [Part(path, None, array, box, rank)] * count
  if not hasattr(array, "shape") or not hasattr(array, "dtype"):
    problems.append(f"{path}: {array!r} is not an array")
    return [Part(path, None, array)] * count
  rank = len(array.shape) - len(sizes)
  at = positions(axis, len(sizes), rank) if rank >= 0 else ()
  if rank < 0 or any(array.shape[k] != size for k, size in zip(at, sizes)):
    expected = " and ".join(f"{size} ({name}) on axis {k}" for k, (name, size) in zip(at, place.axes)) or \
        f"it to be stacked, [{', '.join(f'{name}: {size}' for name, size in place.axes)}, ...]"
    problems.append(f"{path}: shape {tuple(array.shape)}, expected {expected}")
    return [Part(path, None, array)] * count
  stored = arrays.Stored(array, sizes, order(axis, len(sizes), rank))
  box = _unnamed(box, place, axis, rank, path, problems)
  return [Part(path, arrays.Row(stored, index), None, box, rank) for index in np.ndindex(*sizes)]


def _unnamed(box: Any, place: Place, axis: int, rank: int, path: str, problems: list[str]) -> Any:
  """A box without the names of the stacked axes: the outermost was added last, so it goes first."""
  for k, (name, _) in enumerate(place.axes if box is not None else ()):
    try:
      box = remove_axis(box, stacked_axis(axis, rank + len(place.axes) - k), {nn.PARTITION_NAME: name}, path)
    except ValueError as error:
      problems.append(str(error))
      return box
  return box


def put(trees: Sequence[Tree], place: Place, axis: int, lazy: bool, problems: list[str]) -> Any:
  """The inverse of `take`: what stands at a place whose layers have these trees."""
  first, layers = trees[0], [int(i) for i in place.layers.flat]
  for i, tree in zip(layers, trees):
    if tree.structure != first.structure:
      problems.append(f"{place}: {_difference(layers[0], first, i, tree)}; layers of one run must be alike")
      return None
  columns = zip(*(tree.parts for tree in trees))
  return first.structure.unflatten([_stacked(parts, layers, place, axis, lazy, problems) for parts in columns])


def _difference(i: int, a: Tree, j: int, b: Tree) -> str:
  if a.is_absent or b.is_absent:
    return f"layer {i if a.is_absent else j} has no variables here, layer {j if a.is_absent else i} has"
  return f"layers {i} and {j} have trees of different structure, {a.structure} and {b.structure}"


def _stacked(parts: Sequence[Part], layers: Sequence[int], place: Place, axis: int, lazy: bool,
             problems: list[str]) -> Any:
  first = parts[0]
  for i, part in zip(layers[1:], parts[1:]):
    why = _unlike(first, part)
    if why:
      problems.append(f"{place}: {first.path} (layer {layers[0]}) and {part.path} (layer {i}) {why}")
      return None
  if first.row is None:
    made = first.shared
  else:
    dims = order(axis, len(place.axes), first.rank)
    made = arrays.Lazy([part.row for part in parts], place.axes, dims)
    if lazy and made.is_as_stored:
      made = first.row.stored.value
    elif not lazy:
      made = made.read()
  if first.box is None:
    return made
  box = first.box
  if first.rank >= 0:
    for k, (name, _) in reversed(list(enumerate(place.axes))):
      box = add_axis(box, stacked_axis(axis, first.rank + len(place.axes) - k), {nn.PARTITION_NAME: name})
  return box.replace_boxed(made)


def _unlike(a: Part, b: Part) -> str | None:
  """Why two layers' leaves cannot be stacked, or None."""
  if a is b:
    return None
  if (a.row is None) != (b.row is None):
    return "cannot be stacked: one of them is the same for all layers, or not there"
  if a.row is None:
    return None if arrays.same_bits(a.shared, b.shared) else "should be one value for all layers, and differ"
  if a.row.stored is not b.row.stored:
    of_a, of_b = ((part.row.stored.value.dtype, part.row.stored.own_shape) for part in (a, b))
    if of_a != of_b:
      return f"cannot be stacked: {of_a[0]} {of_a[1]} and {of_b[0]} {of_b[1]}"
    if arrays.is_abstract(a.row.stored.value) != arrays.is_abstract(b.row.stored.value):
      return "cannot be stacked: one of them is a mere shape"
  return None if a.box == b.box else f"have different partition metadata: {a.box} and {b.box}"
