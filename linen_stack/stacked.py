"""Stacked leaves and carries: where the layer axis of a leaf is, its name in partition metadata, and what may be carried."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp


def stacked_axis(axis: int, rank: int) -> int:
  """Where the layer axis of a stacked leaf of `rank` dimensions is: `axis`, or its last where it has fewer."""
  return max(rank + axis, 0) if axis < 0 else min(axis, rank - 1)


def is_box(x: Any) -> bool:
  """Whether a variable is wrapped in partition metadata."""
  return isinstance(x, nn.meta.AxisMetadata)


def value(x: Any) -> Any:
  """The array in a box, as it is: without a sharding constraint."""
  return x.unbox(apply_constraint=False) if isinstance(x, nn.meta.Partitioned) else x.unbox() if is_box(x) else x


def on_host(x: Any) -> bool:
  """Whether an array is in host memory."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_front(tree: Any, axis: int, length: int, metadata: Mapping[Any, Any], where: str) -> Any:
  """Stacked leaves with their layer axis first, and its name taken out of their boxes.

  Raises ValueError for a leaf whose layer axis does not have the size `length`, or not the name in `metadata`.
  """

  def move(path, leaf):
    array = value(leaf)
    shape = jnp.shape(array)
    at = stacked_axis(axis, len(shape)) if shape else 0
    path = where + jax.tree_util.keystr(path)
    if not shape or shape[at] != length:
      others = [i for i, size in enumerate(shape) if size == length]
      hint = f"a size of {length} is on axis {others[0]}: was it stacked along another axis?" if others else \
          "were they made for another number of layers, or for a single one (scan=False)?"
      raise ValueError(f"{path}: expected {length} layers on axis {at}, found shape {shape}; {hint}")
    leaf = remove_axis(leaf, at, metadata, path) if is_box(leaf) else leaf
    array = jnp.moveaxis(array, at, 0) if at else array
    return leaf.replace_boxed(array) if is_box(leaf) else array

  return jax.tree_util.tree_map_with_path(move, tree, is_leaf=is_box)


def from_front(tree: Any, axis: int, metadata: Mapping[Any, Any]) -> Any:
  """The inverse of `to_front`."""

  def move(leaf):
    array = value(leaf)
    at = stacked_axis(axis, jnp.ndim(array))
    array = jnp.moveaxis(array, 0, at) if at else array
    return add_axis(leaf.replace_boxed(array), at, metadata) if is_box(leaf) else array

  return jax.tree.map(move, tree, is_leaf=is_box)


def argument_to_front(tree: Any, axis: int, length: int, where: str) -> Any:
  """What a loop takes layer by layer, with the layers first. Raises ValueError for a leaf of another size along `axis`."""

  def move(path, x):
    shape = jnp.shape(x)
    if not -len(shape) <= axis < len(shape) or shape[axis] != length:
      raise ValueError(f"{where}: a scanned argument{jax.tree_util.keystr(path)} must have {length} layers on axis {axis}, "
                       f"found shape {shape}")
    return jnp.moveaxis(x, axis, 0)

  return jax.tree_util.tree_map_with_path(move, tree)


def named(names: Sequence[Any], at: int, name: Any) -> tuple[Any, ...]:
  """Names of axes, with one more axis at `at`."""
  names = [*names, *[None] * (at - len(names))]
  return (*names[:at], name, *names[at:])


def unnamed(names: Sequence[Any], at: int, name: Any, path: str) -> tuple[Any, ...]:
  """The inverse of `named`. Raises ValueError where the axis has another name."""
  if len(names) <= at or names[at] != name:
    raise ValueError(f"{path}: axis {at} should be named {name!r} in the partition metadata, found {tuple(names)}")
  return (*names[:at], *names[at + 1:])


def axis_names(names: Any) -> tuple[Any, ...] | None:
  """Names of axes as partition metadata holds them, one by one; None: it holds no such thing."""
  return tuple(names) if isinstance(names, (tuple, list, jax.sharding.PartitionSpec)) else None


def names_of(box: Any) -> tuple[Any, ...] | None:
  """The names of the axes of what is in a box; None: it has none."""
  # Boxes of NNX variables that were bridged to Linen have the variable's metadata.
  return axis_names(box.names if hasattr(box, "names") else getattr(box, "metadata", {}).get("out_sharding"))


def add_axis(box: Any, at: int, metadata: Mapping[Any, Any]) -> Any:
  """A box with the name in `metadata` for a new axis."""
  names, box = names_of(box), box.add_axis(at, metadata)
  return box if names is None else _renamed(box, named(names, at, metadata.get(nn.PARTITION_NAME)))


def remove_axis(box: Any, at: int, metadata: Mapping[Any, Any], path: str) -> Any:
  """The inverse of `add_axis`. Raises ValueError where there is no such axis, or it has another name."""
  names, name = names_of(box), metadata.get(nn.PARTITION_NAME)
  rest = None if names is None else unnamed(names, at, name, path)
  try:
    box = box.remove_axis(at, metadata)
  except (AssertionError, ValueError) as error:
    raise ValueError(f"{path}: {type(box).__name__} has no axis {name!r} at {at} to take out: {error}") from error
  return box if names is None else _renamed(box, rest)


def _renamed(box: Any, names: tuple[Any, ...]) -> Any:
  # Boxes of NNX variables leave their names as they are when an axis comes or goes.
  return box if hasattr(box, "names") else box.replace(metadata={**box.metadata, "out_sharding": names})


def strong(tree: Any) -> Any:
  """Gives every leaf a dtype of its own, so that a weakly typed carry does not make a loop trace its body twice."""

  def fix(x):
    is_key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    return x if is_key else jax.lax.convert_element_type(x, jnp.result_type(x))

  return jax.tree.map(fix, tree)


def check_carry(before: Any, after: Any, layer: str) -> Any:
  """`after` with strong types. Raises ValueError where it is not, leaf for leaf, what `before` was."""
  (old, old_tree), (new, new_tree) = jax.tree_util.tree_flatten_with_path(before), jax.tree_util.tree_flatten_with_path(after)
  if old_tree != new_tree:
    raise ValueError(f"{layer} changed the structure of the hidden states from {old_tree} to {new_tree}; "
                     "a layer must return what it was given, and may return (hidden states, output)")
  for (path, a), (_, b) in zip(old, new):
    at = f" at {jax.tree_util.keystr(path)}" if path else ""
    if jnp.shape(a) != jnp.shape(b):
      raise ValueError(f"{layer} changed the shape of the hidden states{at} from {jnp.shape(a)} to {jnp.shape(b)}")
    if jnp.result_type(a) != jnp.result_type(b):
      raise ValueError(f"{layer} changed the dtype of the hidden states{at} from {jnp.result_type(a)} to {jnp.result_type(b)}"
                       f"; usually its parameters promoted them: give its modules dtype={jnp.result_type(a)}, or end the "
                       "layer with x.astype(inputs.dtype)")
  return strong(after)


def hidden_and_output(x: Any, result: Any, label: str) -> tuple[Any, Any]:
  """Tells hidden states from `(hidden states, output)` by the structure of the hidden states that went in.

  Raises ValueError for hidden states that are not what went in.
  """
  hidden, output = result, None
  if jax.tree.structure(result) != jax.tree.structure(x) and isinstance(result, tuple):
    if len(result) != 2:
      raise ValueError(f"{label} returned a tuple of {len(result)}; a layer returns hidden states, or (hidden states, output)")
    hidden, output = result
  return check_carry(x, hidden, label), output


def stack_rows(trees: Sequence[Any], what: str) -> Any:
  """Stacks the trees that the steps of a loop gave. Raises ValueError where they differ in structure, shape or dtype."""
  shapes = [jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree) for tree in trees]
  for i, shape in enumerate(shapes):
    if shape != shapes[0]:
      raise ValueError(f"layers 0 and {i} of one run {what}, which cannot be stacked: {shapes[0]} and {shape}; "
                       "layers of one run must be alike, give them specs that differ")
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def take_row(tree: Any, i: Any) -> Any:
  """Row `i` (an int or a traced index) of every leaf."""
  if isinstance(i, int):
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, i, keepdims=False), tree)
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def put_row(tree: Any, part: Any, i: Any) -> Any:
  """`tree` with row `i` of every leaf replaced."""
  return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), tree, part)


def fits(new: Any, old: Any) -> bool:
  """Whether `new` can be written where `old` was taken from: same structure, shapes and dtypes."""
  if jax.tree.structure(new) != jax.tree.structure(old):
    return False
  return all(jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype
             for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old)))


def write_rows(old: Any, new: Mapping[str, Any], i: Any) -> tuple[dict[str, Any], dict[str, Any]]:
  """Writes a step's changes into the stacked variables; returns those, and what had no place in them."""
  updated, rest = dict(old), {}
  for key, value in new.items():
    if key not in old:
      rest[key] = value
    elif isinstance(value, Mapping):
      updated[key], inner = write_rows(old[key], value, i)
      if inner:
        rest[key] = inner
    else:
      slot = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), old[key])
      if not fits(value, slot):
        raise ValueError(f"variable {key!r} is updated in place and must keep its structure, shape and dtype, "
                         f"{jax.tree.map(jnp.shape, value)} does not fit {jax.tree.map(jnp.shape, old[key])}")
      updated[key] = put_row(old[key], value, i)
  return updated, rest
