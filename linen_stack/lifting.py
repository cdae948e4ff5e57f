"""How a call of a module is lifted: made pure, transformed by JAX, and its changed variables published.

`lift` is the one step that all wrappers of `linen_stack.lifts` and `linen_stack.loops` are built on.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

# Linen's transforms are all made by `pack` and `lift_transform`; neither has a public name.
from flax.core.lift import pack
from flax.linen.transforms import lift_transform  # pylint: disable=unused-import
# Nor is there one to say that what follows is no part of the module that is being called.
from flax.linen.module import _context
import jax
import numpy as np


def not_a_method(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Marks a function over a module as no method of it, so that interceptors and tabulate see the layer's calls alone."""
  fn.method_handler_wrapped = True  # the mark by which Flax knows functions that it need not wrap
  return fn


@contextlib.contextmanager
def outside_of_linen() -> Iterator[None]:
  """Hides the Linen modules around: they are no parents, nor do their mutable collections count, of what is made inside."""
  _context.module_stack.append(None)
  try:
    yield
  finally:
    _context.module_stack.pop()


def lift(fn: Callable[..., Any], stage: Callable[..., Any], name: str) -> Callable[..., Any]:
  """Lifts `fn(scopes, *args, **kwargs)`.

  `stage(pure, scopes, variables, rngs, *args, **kwargs)` gets `pure(variables, rngs, *args, **kwargs) -> (result,
  changed variables)` and returns the same pair. `variables` and `rngs` hold one dict per entry of `scopes`.
  """

  def lifted(scopes, *args, **kwargs):
    roots = _roots(scopes)
    counters = [_copy_counters(scope.rng_counters) for scope in roots]

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
      def pure(variables, rngs, *args, **kwargs):
        inside = scope_fn((variables,), (rngs,))
        # However often this runs (a Python loop, a second trace), every run draws the keys of the first.
        for scope, counts in zip(_roots(inside), counters):
          scope.rng_counters.clear()
          scope.rng_counters.update(_copy_counters(counts))
        result = fn(inside, *args, **kwargs)
        (out,) = repack_fn(inside)
        return result, tuple(changed(new, old) for new, old in zip(out, variables))

      result, out = stage(pure, roots, variable_groups[0], rng_groups[0], *args, **kwargs)
      return result, (out,)

    return pack(inner, (True,), (True,), (True,), name=name, enable_kwargs=True)(scopes, *args, **kwargs)

  return lifted


def lift_with_own_scope(fn: Callable[..., Any], stage: Callable[..., Any], name: str) -> Callable[..., Any]:
  """`lift` whose stage also learns, after `scopes`, which of them is the target module's own. The rest are shared."""

  def lifted(scopes, *args, **kwargs):
    own = _roots(scopes).index(scopes[-1])  # Linen lists a module's own scope last
    add = lambda pure, roots, *rest, **options: stage(pure, roots, own, *rest, **options)
    return lift(fn, add, name)(scopes, *args, **kwargs)

  return lifted


def _roots(scopes: Sequence[Any]) -> list[Any]:
  """The scopes that none of the others contains, in Flax's order."""
  roots = list(dict.fromkeys(scopes))

  def inside_another(scope):
    while (scope := scope.parent) is not None:
      if scope in roots:
        return True
    return False

  return [scope for scope in roots if not inside_another(scope)]


def _copy_counters(counters: Mapping[Any, Any]) -> dict[Any, Any]:
  return {key: _copy_counters(value) if isinstance(value, dict) else value for key, value in counters.items()}


def changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
  """The part of a nested dict of variables that is not, object for object, in `old`."""
  out = {}
  for key, value in new.items():
    if key not in old:
      out[key] = value
    elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
      part = changed(value, old[key])
      if part:
        out[key] = part
    elif not _identical(value, old[key]):
      out[key] = value
  return out


def _identical(a: Any, b: Any) -> bool:
  (leaves_a, tree_a), (leaves_b, tree_b) = jax.tree.flatten(a), jax.tree.flatten(b)
  return tree_a == tree_b and all(map(lambda x, y: x is y, leaves_a, leaves_b))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  out = dict(old)
  for key, value in new.items():
    out[key] = merged(old[key], value) if isinstance(value, Mapping) and isinstance(old.get(key), Mapping) else value
  return out


def is_array(x: Any) -> bool:
  """Whether a leaf of an argument is data; every other leaf stays the Python value that it is."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


# The mark of targets that start by rematerialising: they take parameters as `Slice`s.
TAKES_SLICES = "takes_slices"


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Slice:
  """Row `index` of a stacked leaf, not taken yet.

  In a Python loop under an outer loop, rows taken outside a rematerialised region are values that the backward pass
  keeps, a copy of every weight. Taken inside, only the stack is kept, which exists anyway.
  """

  stack: Any
  index: int

  def tree_flatten(self):
    return (self.stack,), self.index

  @classmethod
  def tree_unflatten(cls, index, children):
    return cls(children[0], index)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Row:
  """Row `stage` of `rows` [stages, ...], each of which is with other devices, not taken yet: see `linen_stack.stages`."""

  rows: Any
  stage: Any
  stages: Any

  def tree_flatten(self):
    return (self.rows, self.stage), self.stages

  @classmethod
  def tree_unflatten(cls, stages, children):
    return cls(*children, stages)


def take_slices(tree: Any) -> Any:
  def take(x):
    if isinstance(x, Row):
      return x.stages.take(take(x.rows), x.stage)
    return jax.lax.index_in_dim(x.stack, x.index, keepdims=False) if isinstance(x, Slice) else x

  return jax.tree.map(take, tree, is_leaf=lambda x: isinstance(x, (Row, Slice)))


def split_static(tree: Any, is_data: Callable[[Any], bool] = is_array) -> tuple[
    list[Any], Callable[[Sequence[Any]], Any]]:
  """The array leaves of `tree`, and a function that puts (traced) arrays back among its Python values."""
  leaves, treedef = jax.tree.flatten(tree)
  is_taken = list(map(is_data, leaves))

  def rebuild(arrays):
    values = iter(arrays)
    return treedef.unflatten([next(values) if taken else leaf for leaf, taken in zip(leaves, is_taken)])

  return [leaf for leaf, taken in zip(leaves, is_taken) if taken], rebuild
