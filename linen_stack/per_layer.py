"""Per-layer arguments and results: what layer i alone sees, cut along a plan and put together again in layer order.

A value for all layers comes in one of two forms, and results go back in the form that came in:

    list      one tree per layer, in layer order; layers of different kinds may have trees of different structure
    stacked   one tree whose leaves are [layers, ...]

Between the two stands the form that a plan's loops want, a value per segment: for a homogeneous segment a list with one
tree per argument, for a cycle a dict of such lists by run, with the run's stacked axes in front of every leaf
([length, ...], [count, ...], [length, count, ...] or none). A loop that is run in Python gets nested lists in their place.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
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
  if stacked not in (None, True, False):
    raise TypeError(f"per_layer: stacked must be True, False or None, not {stacked!r}")
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
  """Raises ValueError where a per-layer argument does not have one element per layer, or is in host memory."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(arg.value):
    if isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host:
      raise ValueError(f"per-layer argument {name}{jax.tree_util.keystr(path)} is in host memory, where layers can neither "
                       "compute with it nor write to it; bring it over with jax.device_put(value, jax.memory.Space.Device)")
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


def cut(plan: Plan, args: Sequence[tuple[str, PerLayer]], segment: Segment, listed: bool) -> Any:
  """What of `args` belongs to a segment: `[part of each argument]`, in a cycle a dict of these by run.

  `listed`: instead of stacked axes, lists nested as the loops are, so that nothing is stacked.
  """
  if not listed:
    parts = {run.name: [_cut_run(plan, arg, segment, run, name) for name, arg in args] for run in segment.runs}
    return parts if segment.is_cycle else parts[segment.runs[0].name]

  def of_step(step):
    parts = {}
    for run in segment.runs:
      first = plan.offset(segment.name) + step * len(segment.block) + run.offset
      each = [[element(arg, first + i) for _, arg in args] for i in range(run.count)]
      parts[run.name] = each if run.count > 1 else each[0]
    return parts if segment.is_cycle else parts[segment.runs[0].name]

  return [of_step(step) for step in range(segment.length)] if segment.length > 1 else of_step(0)


def element(arg: PerLayer, layer: int) -> Any:
  """What one layer sees of a per-layer argument."""
  return arg.value[layer] if arg.is_list else jax.tree.map(lambda x: x[layer], arg.value)


def _cut_run(plan: Plan, arg: PerLayer, segment: Segment, run: Run, name: str) -> Any:
  where = indices(plan, segment, run)
  if where.ndim == 0:
    return element(arg, int(where))
  if arg.is_list:
    layers = list(map(int, where.flat))

    def check_alike(what, found):
      known = [(i, kind) for i, kind in zip(layers, found) if kind is not None]
      for i, kind in known:
        if kind != known[0][1]:
          raise ValueError(f"per-layer argument {name}: layers of run {run.name!r} in segment {segment.name!r} need elements of "
                           f"one {what}; layer {known[0][0]} has {known[0][1]}, layer {i} has {kind}")

    def stack(*leaves):
      odd = next((leaf for leaf in leaves if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))),
                 None)
      if odd is not None:
        raise TypeError(f"per-layer argument {name}: values in a loop over layers must be arrays or numbers, not {odd!r}; "
                        "scan=False hands each layer its own Python value")
      check_alike("shape", map(jnp.shape, leaves))
      check_alike("dtype", [getattr(leaf, "dtype", None) for leaf in leaves])  # plain numbers take on that of the others
      stacked = jnp.stack(leaves) if any(isinstance(leaf, jax.Array) for leaf in leaves) else np.stack(leaves)
      return jnp.asarray(stacked).reshape(*where.shape, *stacked.shape[1:])

    check_alike("structure", (jax.tree.structure(arg.value[i]) for i in layers))
    return jax.tree.map(stack, *(arg.value[i] for i in layers))
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


def join(plan: Plan, parts: Mapping[str, Any], as_list: bool, listed: bool) -> Any:
  """Puts the results of all segments together in layer order: a list of trees, or one tree of leaves [layers, ...].

  `parts` are in the form that `cut` gives. Raises ValueError for the stacked form where layers returned different
  structures.
  """
  if as_list or listed:
    layers = _layers(plan, parts, listed)
    if as_list:
      return layers
    _check_alike(plan, layers)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
  pieces = []
  for segment in plan:
    of_runs = []
    for run in segment.runs:
      tree = unwrap(parts[segment.name][run.name] if segment.is_cycle else parts[segment.name])
      rank = len(segment.axes(run))
      grid = (segment.length, run.count)
      of_runs.append(jax.tree.map(lambda x: jnp.reshape(x, (*grid, *jnp.shape(x)[rank:])), tree))
    pieces.append((segment, of_runs))
  _check_alike(plan, [tree for segment, trees in pieces for _ in range(segment.length)
                      for run, tree in zip(segment.runs, trees) for _ in range(run.count)])
  whole = [jax.tree.map(lambda *xs: _concatenate(xs, 1).reshape(-1, *xs[0].shape[2:]), *trees) for _, trees in pieces]
  return jax.tree.map(lambda *xs: _concatenate(xs, 0), *whole)


def wrap(output: Any, num_args: int) -> Any:
  """A layer's output in the form of its per-layer arguments: one entry for each, where the output has as many."""
  if output is None:
    return None
  return list(output) if num_args > 1 and isinstance(output, tuple) and len(output) == num_args else [output]


def unwrap(item: Any) -> Any:
  """The inverse of `wrap`."""
  return item if item is None else item[0] if len(item) == 1 else tuple(item)


def _layers(plan: Plan, parts: Mapping[str, Any], listed: bool) -> list[Any]:
  out: list[Any] = []
  for segment in plan:
    part = parts[segment.name]
    for step in range(segment.length):
      for run in segment.runs:
        for i in range(run.count):
          at = ([step] if segment.length > 1 else []) + ([i] if run.count > 1 else [])
          if listed:
            item = part[step] if segment.length > 1 else part
            item = item[run.name] if segment.is_cycle else item
            out.append(unwrap(item[i] if run.count > 1 else item))
          else:
            item = part[run.name] if segment.is_cycle else part
            out.append(unwrap(jax.tree.map(lambda x: x[tuple(at)], item) if at else item))
  return out


def _check_alike(plan: Plan, layers: Sequence[Any]) -> None:
  first = jax.tree.structure(layers[0])
  for i, tree in enumerate(layers):
    if jax.tree.structure(tree) != first:
      raise ValueError(f"layers return outputs of different structures, which cannot be stacked: layer 0 (segment "
                       f"{plan.locate(0).segment!r}) returns {first}, layer {i} (segment {plan.locate(i).segment!r}) returns "
                       f"{jax.tree.structure(tree)}; pass the per-layer argument as a list to get a list back")


def _concatenate(xs: tuple[Any, ...], axis: int) -> Any:
  return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis)
