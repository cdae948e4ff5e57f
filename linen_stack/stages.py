"""Stacked parameters of which each device holds some of the layers: the axis that counts layers lies over the mesh.

A compiler that meets a loop over such an axis gathers the whole stack on every device. So a loop of `length` layers over
`count` parts runs as two:

    for stage in range(count):
      for i in range(length // count):
        rows = parameters[:, i]                  # [stages, ...]: row s is with the devices of part s, nothing moves
        layer(sum(where(stage == s, rows, 0)))   # one layer's parameters go to all devices

Regions of remat take rows themselves (`lifting.Row`), so that no layer's parameters are kept for the backward pass. Where a
policy offloads, the loop over stages is a Python loop: compilers offload from one loop, not from two.
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import linear_call
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from linen_stack import sharding
from linen_stack.lifting import Row, Slice, take_slices
from linen_stack.stacked import take_row


@dataclasses.dataclass(frozen=True)
class Stages:
  """How the axis of a loop lies over a mesh."""

  axes: tuple[str, ...]
  count: int

  @classmethod
  def of(cls, name: str | None, params: Any) -> Stages | None:
    """Of a loop over parameters [length, ...] whose first axis has that name; None where each device has all layers.

    Rules say it, or with explicit axes the arrays. Raises ValueError where the layers do not come out even.
    """
    leaves, mesh = jax.tree.leaves(params), jax.sharding.get_abstract_mesh()
    if mesh.empty or not leaves:
      return None
    axes = () if name is None else tuple(axis for axis in sharding.over(name) if axis in mesh.auto_axes)
    if not axes:
      axes = next((found for leaf in leaves if (found := sharding.as_tuple(jax.typeof(leaf).sharding.spec[0]))), ())
    if not axes:
      return None
    count, length = math.prod(mesh.shape[axis] for axis in axes), leaves[0].shape[0]
    if length % count:
      raise ValueError(sharding.uneven(name, length, " x ".join(axes), count))
    return cls(axes, count)

  def split(self, x: Any) -> Any:
    """[length, ...] as [length // stages, stages, ...]."""
    return self._lay_out(x.reshape(self.count, -1, *x.shape[1:])).swapaxes(0, 1)

  def take(self, rows: Any, stage: Any) -> Any:
    """[stages, ...] and which of them: that one, on all devices."""
    zero = np.zeros((), rows.dtype)  # no value of a trace: the two functions below outlive it

    def all_but_one_zero(stage, x):
      mine = lax.iota("int32", self.count).reshape(-1, *[1] * (rows.ndim - 1)) == stage
      return self._lay_out(jnp.where(mine, x, zero))

    one = lambda stage, rows: lax.reduce(all_but_one_zero(stage, rows), zero, lax.add, (0,))
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
      return one(stage, rows)
    # By the name of this primitive, policies tell a row from what the layer computes.
    return linear_call(one, lambda stage, row: all_but_one_zero(stage, row[None]), jnp.asarray(stage), rows)

  def _lay_out(self, x: Any) -> Any:
    """[stages, ...], each device with its own."""
    if self.axes[0] in jax.sharding.get_abstract_mesh().explicit_axes:
      return jax.sharding.reshard(x, PartitionSpec(self.axes, *jax.typeof(x).sharding.spec[1:]))
    return lax.with_sharding_constraint(x, PartitionSpec(self.axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)))


def drive(stages: Stages, loop: Any, own: int, body: Callable[..., Any], state: Any, xs: Any) -> tuple[Any, Any]:
  """What `loop.drive(body, state, xs)` gives, where `xs[1][own]["params"]` lie as `stages` says.

  Raises ValueError where the outermost of the loop's levels does not come out even.
  """
  index, stacked, split_keys, scanned = xs
  rows = jax.tree.map(stages.split, stacked[own]["params"])
  taken = (lambda tree: tree) if loop.lazy else take_slices

  is_slice = lambda x: isinstance(x, Slice)

  def with_params(stacked, params):
    return tuple({**cols, "params": params} if i == own else cols for i, cols in enumerate(stacked))

  def with_rows(stacked, part, stage):
    return with_params(stacked, taken(jax.tree.map(lambda x: Row(x, stage, stages), part, is_leaf=is_slice)))

  others = (index, with_params(stacked, {}), split_keys, scanned)
  if not loop.rolled:
    size = loop.length // stages.count

    def step(state, xs):
      i, stacked, *others = xs
      part = jax.tree.map(lambda x: Slice(x, i % size), rows)
      return body(state, (i, with_rows(stacked, part, i // size), *others))

    return loop.drive(step, state, others)
  first, *rest = loop.levels or (loop.length,)
  if first % stages.count:
    raise ValueError(f"levels={loop.levels}: the outermost must be a multiple of {stages.count}, among so many devices are the "
                     f"layers split ({' x '.join(stages.axes)})")
  of_one = dataclasses.replace(loop, length=loop.length // stages.count, levels=(first // stages.count, *rest))

  def of_stage(state, xs):
    stage, others = xs

    def one(state, xs):
      part, (index, stacked, *others) = xs
      return body(state, (index, with_rows(stacked, part, stage), *others))

    return of_one.drive(one, state, (rows, others))

  others = jax.tree.map(lambda x: x.reshape(stages.count, -1, *x.shape[1:]), others)
  if not loop.unroll_stages:
    state, ys = lax.scan(of_stage, state, (jnp.arange(stages.count), others), reverse=loop.reverse)
    return state, jax.tree.map(lambda y: y.reshape(loop.length, *y.shape[2:]), ys)
  of_stages: list[Any] = [None] * stages.count
  for stage in reversed(range(stages.count)) if loop.reverse else range(stages.count):
    state, of_stages[stage] = of_stage(state, (stage, take_row(others, stage)))
  return state, jax.tree.map(lambda *ys: jnp.concatenate(ys), *of_stages)
