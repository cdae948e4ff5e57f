"""`residuals`: what the backward pass of a function keeps of the forward pass, read from its program, not compiled."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import inspect
import math
import re
from typing import Any, Literal

import jax
import numpy as np

from linen_stack.inspect import render
from linen_stack.inspect.arrays import is_array, of_arrays
from linen_stack.inspect.origins import Frame, Origin, carry_marks
from linen_stack.inspect.watch import PLACE_SCOPE, STACK_SCOPE, Place, Watch, watching

Kind = Literal["tag", "carry", "view", "value", "copy", "constant", "argument"]


@dataclasses.dataclass(frozen=True)
class Residual:
  """A value that waits for the backward pass; equal ones of a run are one row."""

  segment: str | None
  """Name of the segment; None: outside of the layers."""

  run: str | None
  """Name of the run inside the segment."""

  name: str
  """Its tag; "carry" for the hidden states that enter a layer; else what computed it."""

  kind: Kind
  """How `name` is to be read."""

  shape: tuple[int, ...]
  """Shape for one layer."""

  stacked: tuple[int, ...]
  """Shape of the buffer, the loops' axes in front."""

  dtype: str
  place: str
  """Where it waits: "device" or "host"."""

  extent: Literal["per layer", "per repeat", "once"]
  """Whether there is one for every layer, one for every repeat of a cycle, or a single one for all layers."""

  buffers: int
  """How many buffers of this shape there are."""

  bytes: int
  """Size of all of them, over all layers and all devices."""

  scope: str
  """The module inside the layer (or outside of the layers) that computed it."""

  @property
  def why(self) -> str:
    """Why it is kept, and why as often as it is."""
    kept = {
        "tag": f"tagged {self.name!r}, which the policy keeps" if self.segment else f"tagged {self.name!r}",
        "carry": "the hidden states that enter the layer",
        "view": "made from a tagged value without arithmetic",
        "value": "the backward pass needs it, and no remat recomputes it",
        "copy": "a copy of an argument",
        "constant": "a constant of the program",
        "argument": "an argument, held by the caller",
    }[self.kind]
    often = {
        "per layer": "differs from layer to layer",
        "per repeat": "depends on the repeat, but on no layer in it",
        "once": "depends on no layer and no hidden states",
    }[self.extent]
    return f"{kept}; {often}" if self.segment else kept


@dataclasses.dataclass(frozen=True)
class ResidualReport:
  """What the backward pass keeps. Prints as a table."""

  rows: tuple[Residual, ...]
  """Kept values, segment by segment, the largest first."""

  arguments: tuple[Residual, ...]
  """Arguments of the function that the backward pass reads again: held by the caller anyway, and part of no sum."""

  def total(self, place: str | None = None) -> int:
    """Bytes kept, over all layers; with `place`, "device" or "host", those that wait there."""
    if place not in (None, "device", "host"):
      raise ValueError(f"place must be 'device', 'host' or None, not {place!r}")
    return sum(row.bytes for row in self.rows if place in (None, row.place))

  def by_name(self, place: str | None = None) -> dict[str, int]:
    """Bytes by name, the largest first."""
    return _summed((row.name, row.bytes) for row in self.rows if place in (None, row.place))

  def by_place(self) -> dict[str, int]:
    """Bytes on "device" and on "host"."""
    return {"device": self.total("device"), "host": self.total("host")}

  def by_segment(self) -> dict[str | None, int]:
    """Bytes by segment, the largest first; None: outside of the layers."""
    return _summed((row.segment, row.bytes) for row in self.rows)

  def __str__(self) -> str:
    return render.joined(self._parts())

  def __rich__(self) -> Any:
    return render.rich(self._parts())

  def _parts(self) -> list[Any]:
    head = ("segment", "run", "value", "from", "per layer", "buffer", "dtype", "x", "place", "extent", "bytes")
    cells = tuple((row.segment or "-", row.run or "-", row.name, row.scope or "-", render.shape(row.shape),
                   render.shape(row.stacked), row.dtype, str(row.buffers), row.place,
                   row.extent if row.segment else "-", render.size(row.bytes)) for row in self.rows)
    total = f"kept: {render.size(self.total('device'))} on device, {render.size(self.total('host'))} on host"
    held = sum(row.bytes for row in self.arguments)
    arguments = f"read again from arguments: {render.plural(len(self.arguments), 'array')}, {render.size(held)}"
    return [render.Table(head, cells, right=("x", "bytes")), f"{total}\n{arguments}"]


def residuals(fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None,
              **kwargs: Any) -> ResidualReport:
  """What the backward pass of `fn(*args, **kwargs)` keeps. Computes and compiles nothing; sizes are of whole arrays.

  Example::

    report = ls.inspect.residuals(lambda params, x: stack.apply(params, x).sum(), params, x)
    print(report)
    report.total("device")

  Args:
    fn: a function of arrays; its stacks are found by themselves.
    *args, **kwargs: trees of arrays, or of `jax.ShapeDtypeStruct`. Other leaves stay the Python values that they are.
    argnums: positions of the arguments to differentiate by. Default: every array of a floating dtype.

  Raises:
    TypeError, ValueError: argnums that are no positions of arguments; no floating array to differentiate by.
  """
  return _report(*kept_program(fn, args, kwargs, argnums))


def kept_program(fn: Callable[..., Any], args: Any, kwargs: Any = None,
                 argnums: int | Sequence[int] | None = None) -> tuple[Any, Watch, list[str]]:
  """A program from arguments to what the backward pass keeps, with marks at its layers; what it contains; its inputs' names.

  Arguments and errors as in `residuals`.
  """
  wanted = _positions(argnums, len(args))
  call, arrays = of_arrays(fn, args, kwargs or {})
  paths = [path for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs or {})) if is_array(leaf)]
  chosen = [wanted is None or (path[0].idx == 0 and path[1].idx in wanted) for path in paths]
  by = [i for i, leaf in enumerate(arrays) if chosen[i] and jax.numpy.issubdtype(leaf.dtype, np.inexact)]
  if not by:
    raise ValueError("there is no array of a floating dtype to differentiate by among the arguments")

  def forward(arrays):
    # The function that jax.vjp returns is a tree, and its leaves are what it keeps.
    of_floats = lambda floats: call([floats.get(i, array) for i, array in enumerate(arrays)])
    return jax.vjp(of_floats, {i: arrays[i] for i in by})[1]

  with watching(mark=True) as watch:
    program = jax.make_jaxpr(forward)(arrays).jaxpr
  return program, watch, [_label(fn, path) for path in paths]


def _positions(argnums: Any, count: int) -> set[int] | None:
  if argnums is None:
    return None
  positions = (argnums,) if isinstance(argnums, int) and not isinstance(argnums, bool) else argnums
  if not isinstance(positions, (tuple, list)):
    raise TypeError(f"argnums must be an int or a tuple of ints, not {argnums!r}")
  for position in positions:
    if isinstance(position, bool) or not isinstance(position, int):
      raise TypeError(f"argnums must be an int or a tuple of ints, not {argnums!r}")
    if not -count <= position < count:
      raise ValueError(f"argnums: there is no argument {position}; {render.plural(count, 'positional argument')} given")
  return {position % count for position in positions}


def _label(fn: Callable[..., Any], path: Any) -> str:
  """An argument's name, with the keys that lead to an array in it."""
  first = path[1].key if path[0].idx else f"argument {path[1].idx}"
  if not path[0].idx:
    try:
      names = list(inspect.signature(fn).parameters)
      first = names[path[1].idx] if path[1].idx < len(names) else first
    except (TypeError, ValueError):
      pass  # a callable without a signature
  rest = jax.tree_util.keystr(path[2:], simple=True, separator="/")
  return f"{first}/{rest}" if rest else first


def _report(program: Any, watch: Watch, labels: list[str]) -> ResidualReport:
  root = Frame(program)
  loops: dict[Place, tuple[int, ...]] = {}
  for name_stack, trips in carry_marks(root):
    place = watch.find(name_stack)
    if place is not None:
      loops[place] = max(trips, loops.get(place, ()), key=len)
  kept: dict[Residual, list[int]] = {}
  for var in dict.fromkeys(var for var in program.outvars if type(var).__name__ != "Literal"):
    row, count = _row(var.aval, root.origin(var), watch, loops, labels)
    kept.setdefault(row, []).append(count)
  rows = [dataclasses.replace(row, buffers=len(counts), bytes=sum(counts)) for row, counts in kept.items()]
  order = {name: i for i, name in enumerate(dict.fromkeys((p.segment.name, p.run.name) for p in watch.places))}
  rows.sort(key=lambda row: (order.get((row.segment, row.run), len(order)), -row.bytes, row.name))
  return ResidualReport(tuple(row for row in rows if row.kind != "argument"),
                        tuple(row for row in rows if row.kind == "argument"))


def _row(aval: Any, origin: Origin, watch: Watch, loops: dict[Place, tuple[int, ...]],
         labels: list[str]) -> tuple[Residual, int]:
  """A row for one buffer, with its size apart so that equal rows are equal."""
  name, kind = _name(origin, labels)
  if origin.argument is not None:
    place = watch.holder(labels[origin.argument].split("/"))
  else:
    # The stack's own tag on the hidden states stands before the layer that they enter.
    place = None if kind == "carry" else watch.find(origin.name_stack)
    place = place or watch.find(origin.enters or "")
  over = loops.get(place, ()) if place is not None else ()
  trips, stacked = origin.trips, tuple(aval.shape)
  if kind == "argument":
    trips = over  # stacked by whoever made it
  extent = "per layer" if len(trips) >= len(over) else "per repeat" if trips else "once"
  shape = stacked[min(len(trips), len(over)):] if place is not None else stacked[len(trips):]
  count = math.prod(stacked) * aval.dtype.itemsize
  row = Residual(
      segment=place and place.segment.name, run=place and place.run.name, name=name, kind=kind, shape=shape,
      stacked=stacked, dtype=str(aval.dtype), place=str(aval.memory_space).rsplit(".", maxsplit=1)[-1].lower(),
      extent=extent, buffers=0, bytes=0, scope="" if kind in ("argument", "carry") else _scope(origin.name_stack))
  return row, count


def _name(origin: Origin, labels: list[str]) -> tuple[str, Kind]:
  if origin.name is not None:
    return origin.name, "tag"
  if origin.argument is not None:
    label = labels[origin.argument]
    return (label, "argument") if origin.is_input else (f"copy of {label}", "copy")
  if origin.enters is not None:
    return "carry", "carry"
  if origin.source is not None:
    return f"{origin.source} ({origin.primitive})", "view"
  if origin.primitive == "constant":
    return "constant", "constant"
  if origin.primitive == "scan" and origin.name_stack.endswith(STACK_SCOPE):
    return "output of the loop", "value"
  return origin.primitive, "value"


def _scope(name_stack: str) -> str:
  """The module path inside the layer, or outside of the stack, without transformations and methods."""
  if STACK_SCOPE in name_stack and not PLACE_SCOPE.search(name_stack):
    return ""
  words: list[str] = []
  start = 0
  for word in re.sub(r"\w*\(([^()]*)\)", r"\1", name_stack).split("/"):
    if PLACE_SCOPE.fullmatch(word):
      start = len(words)
    # A method other than __call__ has a scope of its own, "module.method", inside of the module's or in place of it.
    elif word and (word := word.split(".")[0]) != (words[-1] if words else None):
      words.append(word)
  return "/".join(words[start:])


def _summed(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
  sums: dict[Any, int] = {}
  for key, count in pairs:
    sums[key] = sums.get(key, 0) + count
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
