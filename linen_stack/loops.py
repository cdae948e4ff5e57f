"""Loops over stacked variables: `scan`, one traced body for many layers, and `static_unroll`, the same as a Python loop.

In pseudo-code, with `i` running over the layers:

    carry, outputs = x, []
    for i in range(length):
      variables_i, rngs_i, args_i = stacked variables[i], split(rngs)[i], scanned args[i]
      (carry, output), changed = target(variables_i, rngs_i, carry, *args_i, *broadcast args)
      outputs.append(output); changes.append(changed)
    return carry, stack(outputs), stack(changes)

A variable of the target is in one of four places:

    stacked    a slice goes into each step; what a step changed or made comes out, stacked. Parameters that nobody
               changed never come out
    in place   carried whole; each step takes its slice out and writes it back, so that one copy exists (caches)
    carry      carried from step to step (`variable_carry`, and state of modules that all layers share)
    whole      seen by every step (`variable_broadcast`, and parameters of modules that all layers share)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
from flax.core.scope import LazyRng, in_filter
import jax
import jax.numpy as jnp

from linen_stack import lifting, prefetch, stages
from linen_stack.specs import checked_count, nearest
from linen_stack.stacked import (argument_to_front, check_carry, fits, from_front, is_box, put_row, stack_rows, strong,
                                 take_row, to_front, value, write_rows)

broadcast = nn.broadcast
# An `in_axes` or `out_axes` of a Python loop: a list with one entry per step, not stacked.
listed = object()


def scan(target: Any, length: int, param_axis: int = 0, *, variable_axes: Mapping[Any, int] | None = None,
         variable_broadcast: Any = False, variable_carry: Any = False, variable_in_place: Any = "cache",
         split_rngs: Mapping[Any, bool] | None = None, in_axes: Any = broadcast, out_axes: Any = 0,
         reverse: bool = False, unroll: int = 1, metadata_params: Mapping[Any, Any] | None = None, methods: Any = None,
         update: bool = False, levels: Sequence[int] = (), region: Callable[..., Any] | None = None,
         unroll_inner: bool = False, source: Callable[[str, Any], Any] | None = None, unroll_stages: bool = False) -> Any:
  """Applies a layer `length` times over stacked variables, tracing it once: `nn.scan` with `params` at `param_axis`.

  The target is called as `(module, carry, *args, **kwargs)` and returns `(carry, output)`. Keys are those of `nn.scan`
  with `check_constancy_invariants=False`; with True, its second trace of the body draws others.

  Args:
    target: a module class, or a function whose first argument is a module.
    length: the number of layers.
    param_axis: axis of the layers in `params`. A leaf of lower rank is stacked at its last axis. Negative values count
      from the end of the stacked leaf.
    variable_axes: collection filter -> axis, for collections other than `params`. Default: all on axis 0.
    variable_broadcast, variable_carry: collection filters, as in `nn.scan`. Variables of modules that do not belong to
      the target (passed as attribute or argument) are always shared by all layers.
    variable_in_place: filter of collections that are updated in one buffer, where they are mutable and exist already.
    split_rngs: stream filter -> whether each layer gets a key of its own. Default: every stream is split.
    in_axes: as in `nn.scan`; default: every layer sees all of an argument. Keyword arguments always are seen whole.
    out_axes: as in `nn.scan`.
    reverse, unroll: as in `jax.lax.scan`.
    metadata_params: as in `nn.scan`; default: the stacked axis is named "layers".
    methods: as in `nn.scan`.
    update: each layer's output takes the place of its slice of the first argument (`in_axes` 0), in one buffer. Where
      the outputs do not fit that argument, they are stacked as usual, at the price of a second trace.
    levels: sizes of nested loops, outermost first, whose product is `length`. The stacked variables stay flat.
    region: applied to the body of every loop of `levels` but the innermost, e.g. a `jax.checkpoint`.
    unroll_inner: run the innermost loop of `levels` as a Python loop.
    source: `source(path, stacked leaf)`, which parameters are fetched one layer ahead, and how: a `prefetch.Source`, or None
      for those that the target finds where they are. Not with `reverse` or `levels`.
    unroll_stages: where layers are split over a mesh, run the loop over the parts (`linen_stack.stages`) as a Python loop.

  Raises:
    TypeError or ValueError: options that cannot be; stacked variables or scanned arguments whose layer axis does not have
      the size `length`; a carry that changes.
  """
  return _lift_loop(target, methods, _Loop(
      length, param_axis, variable_axes, variable_broadcast, variable_carry, variable_in_place, split_rngs, in_axes,
      out_axes, reverse, unroll, metadata_params, update, tuple(levels), region, unroll_inner, source,
      unroll_stages))


def static_unroll(target: Any, length: int, param_axis: int = 0, *, methods: Any = None, **options: Any) -> Any:
  """`scan` run as a Python loop over the same stacked variables: same tree, keys, metadata and results.

  Each layer is traced on its own, so a program grows with `length`; what it gains is straight-line code, which the
  compiler can offload from under an outer loop. Takes the arguments of `scan`, but for those that shape the loop
  (`unroll`, `levels`, `region`, `unroll_inner`, `source`, `unroll_stages`).
  """
  for option in ("unroll", "levels", "region", "unroll_inner", "source", "unroll_stages"):
    if option in options:
      raise TypeError(f"static_unroll is one fully unrolled loop; it takes no {option}")
  known = [field.name for field in dataclasses.fields(_Loop)]
  for option in options:
    if option not in known:
      raise TypeError(f"static_unroll has no argument {option!r}; {nearest(option, known)}")
  return _lift_loop(target, methods, _Loop(length, param_axis, **options, rolled=False))


def split_key(lazy: LazyRng, length: int) -> LazyRng:
  """One key per layer, stacked; names that are still to be folded in stay so."""
  return jax.tree.map(lambda key: jax.random.split(jax.random.clone(key), length), lazy)


def split_keys(keys: Mapping[str, LazyRng], count: int) -> list[Mapping[str, LazyRng]]:
  """The keys that a loop of `count` layers hands to each; one layer is no loop."""
  if count == 1:
    return [keys]
  split = {s: split_key(key, count) for s, key in keys.items()}
  return [jax.tree.map(lambda key: key[i], split) for i in range(count)]


def over_parts(variables: Any, arguments: Any) -> Any:
  """The two values, laid over what the body of a loop takes: (state, xs), as `_Loop._run` puts them together."""
  return (variables, variables, arguments, arguments), (arguments, variables, arguments, arguments)


def _lift_loop(target: Any, methods: Any, loop: _Loop) -> Any:
  loop.check()
  loop = dataclasses.replace(loop, lazy=getattr(target, lifting.TAKES_SLICES, False))

  def lift(fn):
    return lifting.lift_with_own_scope(fn, loop.stage, "scan")

  return lifting.lift_transform(lift, target, methods=methods)


class _NotAnUpdate(Exception):
  """Outputs do not fit the argument that they should replace."""


@dataclasses.dataclass(frozen=True)
class _Loop:
  """The options of `scan` and the loop itself."""

  length: int
  param_axis: int = 0
  variable_axes: Mapping[Any, int] | None = None
  variable_broadcast: Any = False
  variable_carry: Any = False
  variable_in_place: Any = "cache"
  split_rngs: Mapping[Any, bool] | None = None
  in_axes: Any = broadcast
  out_axes: Any = 0
  reverse: bool = False
  unroll: int = 1
  metadata_params: Mapping[Any, Any] | None = None
  update: bool = False
  levels: tuple[int, ...] = ()
  region: Callable[..., Any] | None = None
  unroll_inner: bool = False
  source: Callable[[str, Any], Any] | None = None
  unroll_stages: bool = False
  rolled: bool = True
  lazy: bool = False
  """The target takes parameters as `lifting.Slice`s and `Row`s."""

  def check(self) -> None:
    """Raises TypeError or ValueError for options that cannot be."""
    for name in ("length", "unroll"):
      checked_count(getattr(self, name), name)
    if isinstance(self.param_axis, bool) or not hasattr(self.param_axis, "__index__"):
      raise TypeError(f"param_axis must be an int, not {self.param_axis!r}")
    for name in ("variable_axes", "split_rngs"):
      if not isinstance(getattr(self, name), (Mapping, type(None))):
        raise TypeError(f"{name} must map filters, as in {{True: ...}}, not {getattr(self, name)!r}")
    for key in self.variable_axes or {}:
      if key is not True and not isinstance(key, nn.DenyList) and in_filter(key, "params"):
        raise ValueError(f"variable_axes: the axis of 'params' is param_axis={self.param_axis}, not an entry of variable_axes")
    if not isinstance(self.reverse, bool):
      raise TypeError(f"reverse must be True or False, not {self.reverse!r}")
    if self.levels and math.prod(self.levels) != self.length:
      raise ValueError(f"levels={self.levels} multiply to {math.prod(self.levels)}, not to length={self.length}")
    if self.source and (self.reverse or self.levels):
      raise ValueError("source: parameters are fetched ahead in one plain loop, not with reverse or levels")
    first = self.in_axes[0] if isinstance(self.in_axes, tuple) and self.in_axes else self.in_axes
    if self.update and first != 0:
      raise ValueError(f"update needs a first argument that is scanned along axis 0, not in_axes={self.in_axes!r}")

  @property
  def metadata(self) -> Mapping[Any, Any]:
    return {nn.PARTITION_NAME: "layers"} if self.metadata_params is None else self.metadata_params

  def axis(self, collection: str) -> int:
    if collection == "params":
      return self.param_axis
    for key, axis in ({True: 0} if self.variable_axes is None else self.variable_axes).items():
      if in_filter(key, collection):
        return axis
    raise ValueError(f"collection {collection!r} has no place in variable_axes, variable_broadcast or variable_carry")

  def place(self, collection: str, exists: bool, mutable: bool, own: bool) -> str:
    if not own:
      return "carry" if exists and mutable and collection != "params" else "whole"
    if in_filter(self.variable_carry, collection):
      return "carry"
    if in_filter(self.variable_broadcast, collection):
      return "whole"
    return "in place" if exists and mutable and in_filter(self.variable_in_place, collection) else "stacked"

  def splits(self, stream: str) -> bool:
    rules = {True: True} if self.split_rngs is None else self.split_rngs
    return next((split for key, split in rules.items() if in_filter(key, stream)), False)

  def stage(self, pure, scopes, own, variables, rngs, carry, *args, **kwargs):
    """What the lift does with the pure function of one layer; see `lifting.lift_with_own_scope`."""
    run = functools.partial(self._run, pure, scopes, own, variables, rngs, carry, args, kwargs)
    if self.update:
      try:
        return run(update=True)
      except _NotAnUpdate:
        pass
    return run(update=False)

  def _run(self, pure, scopes, own, variables, rngs, carry, args, kwargs, update):
    where = "/".join(scopes[own].path) or "the stack"

    def place(i, collection):
      return self.place(collection, collection in variables[i], scopes[i].is_mutable_collection(collection), i == own)

    def at(*places):
      return tuple({c: v for c, v in cols.items() if place(i, c) in places} for i, cols in enumerate(variables))

    def fronted(tree):
      return tuple({c: to_front(v, self.axis(c), self.length, self.metadata, f"{where}: {c}") for c, v in cols.items()}
                   for cols in tree)

    def unboxed(cols):
      # A box would have the layer lay out again, as it is stored, what a source has gathered.
      return {c: jax.tree.map(value, v, is_leaf=is_box) if c == "params" else v for c, v in cols.items()}

    whole, carried, stacked, in_place = at("whole"), at("carry"), fronted(at("stacked")), fronted(at("in place"))
    stacked = tuple(map(unboxed, stacked)) if self.source else stacked
    initial = [not cols.get("params") for cols in variables]
    split_keys = {s: split_key(key, self.length) for s, key in rngs[own].items() if self.splits(s)}
    items, scanned = None, jax.tree.map(functools.partial(self._scanned, where), self.in_axes, args)
    if update:
      items, scanned = scanned[0], (None, *scanned[1:])
    needs_index = update or any(in_place)

    def body(state, xs):
      carried, in_place, items, carry = state
      i, stacked, split_keys, scanned = xs
      if update:
        scanned = (take_row(items, i), *scanned[1:])
      args_i = jax.tree.map(lambda axis, arg, part: arg if axis is broadcast else part, self.in_axes, args, scanned)
      variables_i = tuple(a | b | c | d for a, b, c, d in zip(whole, carried, stacked, take_row(in_place, i)))
      keys_i = tuple({**keys, **split_keys} if j == own else keys for j, keys in enumerate(rngs))
      result, out = pure(variables_i, keys_i, carry, *args_i, **kwargs)
      if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{where}: a layer in a loop must return (carry, output), not {type(result).__name__}")
      carry, output = check_carry(carry, result[0], where), result[1]
      if update:
        if not fits(output, args_i[0]):
          raise _NotAnUpdate
        items, output = put_row(items, output, i), None
      states, places, made = [], [], ([], [])
      for j, cols in enumerate(out):
        of = {c: place(j, c) for c in cols}
        late = next((c for c in cols if of[c] == "carry" and c not in variables[j]), None)
        if late is not None:
          raise ValueError(f"{where}: variable_carry collection {late!r} must exist before the loop")
        states.append(lifting.merged(carried[j], {c: v for c, v in cols.items() if of[c] == "carry"}))
        updated, new = write_rows(in_place[j], {c: v for c, v in cols.items() if of[c] == "in place"}, i)
        places.append(updated)
        made[0].append({**new, **{c: v for c, v in cols.items() if of[c] == "stacked"}})
        made[1].append({c: v for c, v in cols.items() if of[c] == "whole"})
      return (tuple(states), tuple(places), items, carry), (output, *made)

    index = list(range(self.length)) if not self.rolled else jnp.arange(self.length) if needs_index else None
    state = (carried, in_place, items, strong(carry))
    split = stages.Stages.of(self.metadata.get(nn.PARTITION_NAME), stacked[own].get("params"))
    if split is not None and self.source:
      raise ValueError(f"{where}: its layers are split over mesh axis {' x '.join(split.axes)}, so that each goes to all "
                       "devices when it is its turn, and cannot be fetched ahead; let the rules map that axis to None, or set "
                       "prefetch=False")
    drive = self.drive if split is None else functools.partial(stages.drive, split, self, own)
    (carried, final, items, carry), (output, stacks, shared) = drive(body, state, (index, stacked, split_keys, scanned))
    if update:
      output = items
    elif self.out_axes is not listed:
      output = jax.tree.map(lambda axis, y: jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), y), self.out_axes, output)
    changed = []
    for j, cols in enumerate(variables):
      new = {c: from_front(v, self.axis(c), self.metadata) for c, v in stacks[j].items()}
      old = {c: from_front(v, self.axis(c), self.metadata) for c, v in final[j].items()}
      # A shared module's variables are made alike by every layer: the first one's are kept.
      same = {c: jax.tree.map(lambda x: x[0], v) if initial[j] else v for c, v in shared[j].items()}
      state_j = lifting.changed(carried[j], cols)
      changed.append(lifting.merged(lifting.merged(state_j, old), lifting.merged(new, same)))
    return (carry, output), tuple(changed)

  def _scanned(self, where: str, axis: Any, arg: Any) -> Any:
    if axis is broadcast:
      return None
    if axis is not listed:
      return argument_to_front(arg, axis, self.length, where)
    if len(arg) != self.length:
      raise ValueError(f"{where}: a list with one entry for each of {self.length} layers was expected, found {len(arg)}")
    return arg

  def drive(self, body, state, xs):
    """The loop itself: `body(state, xs of a step) -> (state, ys of a step)`."""
    if not self.rolled:
      return self._python_loop(body, state, xs, self.length)
    if self.source:
      return prefetch.scan(body, state, xs, self._source, length=self.length, unroll=self.unroll)
    *outer, size = self.levels or (self.length,)
    if self.unroll_inner:
      loop = lambda state, xs: self._python_loop(body, state, xs, size)
    else:
      loop = lambda state, xs: jax.lax.scan(body, state, xs, length=size, reverse=self.reverse, unroll=self.unroll)
    for length in reversed(outer):
      loop = functools.partial(jax.lax.scan, self.region(loop) if self.region else loop, length=length, reverse=self.reverse)
    if outer:
      xs = jax.tree.map(lambda x: x.reshape(*self.levels, *x.shape[1:]), xs)
    state, ys = loop(state, xs)
    if outer:
      ys = jax.tree.map(lambda y: y.reshape(self.length, *y.shape[len(self.levels):]), ys)
    return state, ys

  def _source(self, path: tuple[Any, ...], leaf: Any) -> Any:
    """The source of a part of a loop's xs: (index, stacked variables, keys, arguments)."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]  # boxed leaves end in the box's own key
    return self.source("/".join(keys[1:]), leaf) if path[0].idx == 1 and keys[0] == "params" else None

  def _python_loop(self, body, state, xs, length):
    index, stacked, split_keys, scanned = xs

    def part(i, axis, arg):
      return arg[i] if axis is listed else take_row(arg, i)

    def variables(i):
      lazy = self.lazy and not self.rolled
      return tuple({c: jax.tree.map(lambda x: lifting.Slice(x, i), v) if lazy and c == "params" else take_row(v, i)
                    for c, v in cols.items()} for cols in stacked)

    ys: list[Any] = [None] * length
    for i in reversed(range(length)) if self.reverse else range(length):
      parts = jax.tree.map(functools.partial(part, i), self.in_axes, scanned)
      state, ys[i] = body(state, (None if index is None else index[i], variables(i), take_row(split_keys, i), parts))
    outputs, *made = zip(*ys)
    outputs = list(outputs) if self.out_axes is listed else stack_rows(outputs, "return different outputs")
    return state, (outputs, *(stack_rows(trees, "make different variables") for trees in made))
