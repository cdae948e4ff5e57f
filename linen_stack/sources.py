"""Which parameters a stack's loops fetch one step ahead, and how: what `prefetch=True` finds out by itself.

    in host memory      copied to the device
    split as the batch  (fully sharded data parallelism) gathered over the mesh axes that split the batch as well; what else
                        splits them, as tensor parallelism does, stays. Gradients are split again, layer by layer
    both                copied, then gathered
    neither             left to the layer

The mesh axes of the batch are those of the rule for "batch" (or "activation_batch"), without one on explicit axes those of the
hidden states' first axis. How a row is split is said by arrays on explicit axes, and by rules for the logical names that the
layer gives its parameters elsewhere; of parameters without a box the names are those that a layer would be initialised with.
Parameters with an axis "expert" are left to the layer, which sends tokens to experts, or gathers these, as it likes.
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from linen_stack import lifting, sharding
from linen_stack.calls import Call, build
from linen_stack.plan import Run, Segment
from linen_stack.prefetch import Source
from linen_stack.stacked import is_box, named, names_of, on_host, stacked_axis, take_row

Axes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Sources:
  """The sources of a loop over a segment, or over a run alone."""

  segment: Segment
  run: Run | None
  """Whose loop it is; None: the segment's."""
  call: Call
  x: Any
  streams: tuple[str, ...]
  param_axis: int
  """Where the axes that count layers are."""

  def __call__(self, path: str, leaf: Any) -> Source | None:
    """The source of a stacked leaf [length, ...]; `path` from the loop's target on."""
    host, split = on_host(leaf), self._split(path, leaf)
    whole = tuple(tuple(axis for axis in axes if axis not in self._batch) for axes in split)
    if not host and whole == split:
      return None
    self.call.fetched.append(path)
    return Source() if whole == split else Source(_laid_out(whole), _laid_out(split))

  def _split(self, path: str, leaf: Any) -> Axes:
    """The mesh axes over which each axis of a row lies."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not self._batch:
      return ()
    if mesh.explicit_axes:
      return tuple(map(sharding.as_tuple, jax.typeof(leaf).sharding.spec[1:]))
    of_row = zip(self._named.get(path, ()), leaf.shape[1:])
    return tuple(axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else () for axes, size in of_row)

  @functools.cached_property
  def _batch(self) -> tuple[str, ...]:
    """The mesh axes that split the batch."""
    axes = sharding.batch_axes()
    if axes or not jax.sharding.get_abstract_mesh().explicit_axes:
      return axes
    firsts = [jax.typeof(leaf).sharding.spec[:1] for leaf in jax.tree.leaves(self.x)]
    return tuple(axis for first in firsts for entry in first for axis in sharding.as_tuple(entry))

  @functools.cached_property
  def _named(self) -> dict[str, Axes]:
    """How rules split the rows whose axes have names, by path."""
    found = {}
    in_block = self.segment.is_cycle and self.run is None
    for run in self.segment.runs if self.run is None else (self.run,):
      block = (run.name,) if in_block else ()
      for path, box in self._boxes(run).items():
        if "expert" in (names_of(box) or ()):
          continue
        axes = tuple(map(sharding.several, sharding.spec_of_box(box)))
        if in_block and run.count > 1:  # a row of the segment's loop is all of the run's layers
          axes = named(axes, stacked_axis(self.param_axis, len(axes) + 1), ())
        found["/".join((*block, *path))] = axes
    return found

  def _boxes(self, run: Run) -> Mapping[tuple[str, ...], Any]:
    """The boxes of one layer's parameters, by path."""
    if hasattr(run.spec.cls, "boxes"):  # of layers that are none of Linen's
      return run.spec.cls.boxes(run.spec.kwargs, self.segment.path(run))

    def init():
      parts, index = (self._one(tree, run) for tree in self.call.cut(self.segment, listed=False))
      args, kwargs = self.call.fill(parts, index, self.call.args, self.call.kwargs)
      keys = {stream: jax.random.key(0) for stream in ("params", *self.streams)}
      return build(run.spec, None).init(keys, self.x, *args, **kwargs)

    with lifting.outside_of_linen():
      params = jax.eval_shape(init).get("params", {})
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    return {tuple(entry.key for entry in path): leaf for path, leaf in leaves if is_box(leaf)}

  def _one(self, tree: Any, run: Run) -> Any:
    """One layer's part of what `Call.cut` gives."""
    tree = tree[run.name] if self.segment.is_cycle else tree
    for _ in self.segment.axes(run):
      tree = take_row(tree, 0)
    return tree


def _laid_out(axes: Axes) -> Any:
  # With its mesh: the loop's derivative may be traced where that is not around any more.
  mesh = jax.sharding.get_abstract_mesh()
  sharding_of_row = NamedSharding(mesh, PartitionSpec(*(entry or None for entry in axes)))
  lay_out = jax.sharding.reshard if mesh.explicit_axes else jax.lax.with_sharding_constraint
  return lambda row: lay_out(row, sharding_of_row)
