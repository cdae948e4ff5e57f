"""Per-layer arguments and results: what layer i alone sees, cut along a plan and put together again in layer order.

A value for all layers comes in one of two forms, and results go back in the form that came in:

    list      one tree per layer, in layer order; layers of different kinds may have trees of different structure
    stacked   one tree whose leaves are [layers, ...]

Between the two stands the form that a plan's loops want, a value per segment: for a homogeneous segment one tree, for a
cycle one tree per run, with the run's stacked axes in front ([length, ...], [count, ...], [length, count, ...] or none).
"""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linen_stack.plan import Plan, Run, Segment


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class PerLayer:
  """A call argument of which layer i sees element i. Made by `per_layer`."""

  value: Any
  is_list: bool

  def tree_flatten(self):
    return (self.value,), self.is_list

  @classmethod
  def tree_unflatten(cls, is_list, children):
    return cls(children[0], is_list)


def per_layer(value: Any, stacked: bool | None = None) -> PerLayer:
  """Marks a call argument of `StackedDecoder` as one value per layer.

  Args:
    value: a list with one tree per layer of the whole decoder, or one tree of arrays [layers, ...].
    stacked: which of the two it is. Needed only for a tuple, which could be either.
  """
  if isinstance(value, PerLayer):
    return value
  if isinstance(value, tuple) and not hasattr(value, "_fields") and stacked is None:
    raise TypeError("per_layer: a tuple could be one tree per layer or a stacked tree; "
                    "pass a list, or say stacked=True")
  return PerLayer(value, is_list=isinstance(value, list) if stacked is None else not stacked)


def indices(plan: Plan, segment: Segment, run: Run) -> np.ndarray:
  """Global layer indices of a run, in the shape of its stacked axes."""
  first = plan.offset(segment.name) + run.offset
  grid = first + len(segment.block) * np.arange(segment.length)[:, None] + np.arange(run.count)[None, :]
  return grid.reshape([size for _, size in segment.axes(run)])


def check(plan: Plan, arg: PerLayer, name: str) -> None:
  """Raises ValueError where a per-layer argument does not have one element per layer."""
  expected = plan.num_layers
  if arg.is_list:
    if len(arg.value) != expected:
      raise ValueError(f"per-layer argument {name}: {len(arg.value)} elements for {expected} layers "
                       f"({', '.join(f'{s.name}: {s.num_layers}' for s in plan)})")
    return
  for path, leaf in jax.tree_util.tree_leaves_with_path(arg.value):
    shape = jnp.shape(leaf)
    if not shape or shape[0] != expected:
      raise ValueError(f"per-layer argument {name}{jax.tree_util.keystr(path)}: a stacked leaf must be [{expected}, ...] for "
                       f"{expected} layers, found shape {shape}; pass a list for one tree per layer")


def cut(plan: Plan, arg: PerLayer, segment: Segment, name: str) -> Any:
  """The part of `arg` that belongs to a segment: a tree, or for a cycle a dict from run names to trees."""
  parts = {run.name: _cut_run(plan, arg, segment, run, name) for run in segment.runs}
  return parts if segment.is_cycle else parts[segment.runs[0].name]


def _cut_run(plan: Plan, arg: PerLayer, segment: Segment, run: Run, name: str) -> Any:
  where = indices(plan, segment, run)
  if arg.is_list:
    if where.ndim == 0:
      return arg.value[int(where)]
    first = jax.tree.structure(arg.value[where.flat[0]])
    for i in where.flat:
      if jax.tree.structure(arg.value[i]) != first:
        raise ValueError(f"per-layer argument {name}: layers of run {run.name!r} in segment {segment.name!r} need elements of "
                         f"one structure; layer {where.flat[0]} has {first}, layer {i} has {jax.tree.structure(arg.value[i])}")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(*where.shape, *jnp.shape(leaves[0])),
                        *(arg.value[i] for i in where.flat))
  if where.ndim == 0:
    return jax.tree.map(lambda x: x[int(where)], arg.value)
  start, stop, step = int(where.flat[0]), int(where.flat[-1]) + 1, len(segment.block)

  def take(x):
    if stop - start == where.size:
      part = x if where.size == x.shape[0] else x[start:stop]
    elif where.ndim == 1:
      part = x[start:stop:step]  # one layer of each repeat
    else:
      part = x[where.reshape(-1)]
    return part.reshape(*where.shape, *x.shape[1:])

  return jax.tree.map(take, arg.value)


def join(plan: Plan, parts: dict[str, Any], as_list: bool) -> Any:
  """Puts per-segment results together in layer order: a list of trees, or one tree of leaves [layers, ...].

  Raises ValueError for the stacked form where layers returned different structures.
  """
  runs = [(segment, run, parts[segment.name][run.name] if segment.is_cycle else parts[segment.name])
          for segment in plan for run in segment.runs]
  if as_list:
    out: list[Any] = [None] * plan.num_layers
    for segment, run, tree in runs:
      where = indices(plan, segment, run)
      for at, layer in np.ndenumerate(where):
        out[layer] = jax.tree.map(lambda x: x[at] if at else x, tree)
    return out
  first_segment, first_run, first = runs[0]
  for segment, run, tree in runs:
    if jax.tree.structure(tree) != jax.tree.structure(first):
      raise ValueError(
          f"layers return outputs of different structures, which cannot be stacked: {first_run.name!r} in segment "
          f"{first_segment.name!r} returns {jax.tree.structure(first)}, {run.name!r} in {segment.name!r} returns "
          f"{jax.tree.structure(tree)}; pass the per-layer argument as a list to get a list back")

  pieces = []
  for segment in plan:
    of_runs = []
    for s, run, tree in runs:
      if s is segment:
        grid = (segment.length, run.count)
        of_runs.append(jax.tree.map(lambda x: jnp.reshape(x, (*grid, *jnp.shape(x)[len(segment.axes(run)):])), tree))
    pieces.append(jax.tree.map(lambda *xs: _concatenate(xs, 1).reshape(-1, *xs[0].shape[2:]), *of_runs))
  return jax.tree.map(lambda *xs: _concatenate(xs, 0), *pieces)


def _concatenate(xs: tuple[Any, ...], axis: int) -> Any:
  return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)
