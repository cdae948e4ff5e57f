"""Where a value of a program comes from: back through loops, calls, copies and tags to the equation that made it."""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any

from jax.extend import core

from linen_stack.inspect.watch import CARRY_MARK
from linen_stack.tags import tag_name

# These hand on the value that they get. remat rounds what it saves with reduce_precision, to the same precision.
_SAME_VALUE = ("name", "device_put", "reduce_precision", "copy", "copy_p", "optimization_barrier")
# These hand on all of it in another shape, which costs nothing, or a part or another form of it, which is a copy.
_RESHAPES = ("squeeze", "reshape", "expand_dims")
_COPIES = ("slice", "dynamic_slice", "transpose", "broadcast_in_dim", "convert_element_type")


@dataclasses.dataclass(frozen=True)
class Origin:
  """What made a value."""

  name: str | None
  """The innermost tag on it."""

  primitive: str
  """The equation that computed it; "argument" or "constant" for what came in; "loop state" for a loop's own carry."""

  name_stack: str
  """Scopes around that equation, those of the loops around it included."""

  trips: tuple[int, ...]
  """Lengths of the loops that stack it, outermost first."""

  argument: int | None = None
  """Index of the program's input that the value is, or is a part or copy of."""

  is_input: bool = False
  """Whether it is that input itself, and no copy."""

  enters: str | None = None
  """Name stack of the layer whose incoming hidden states it is."""

  source: str | None = None
  """The tag of the value that it is a view of."""


def loop_counts(eqn: Any) -> tuple[int, int]:
  """How many of a scan's inputs are constants, and how many its carry."""
  if "num_carry" in eqn.params:
    return eqn.params["num_consts"], eqn.params["num_carry"]
  consts, carry, _ = eqn.params["ft_in"].unpack()
  return len(consts), len(carry)


def call_body(eqn: Any) -> Any | None:
  """The program of an equation that calls it once with its own inputs and outputs, such as jit and remat."""
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    body = eqn.params.get(key)
    if body is not None and eqn.primitive.name not in ("scan", "while", "cond"):
      body = getattr(body, "jaxpr", body)
      if len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars):
        return body
  return None


class Frame:
  """A program, and the equation that runs it inside another one."""

  def __init__(self, jaxpr: Any, parent: Frame | None = None, eqn: Any = None):
    self.jaxpr, self.parent, self.eqn = jaxpr, parent, eqn
    self.made_by = {var: (e, i) for e in jaxpr.eqns for i, var in enumerate(e.outvars)}
    self.inputs = {var: i for i, var in enumerate(jaxpr.invars)}
    self.used_by: dict[Any, list[tuple[Any, int]]] = {}
    for e in jaxpr.eqns:
      for i, var in enumerate(e.invars):
        if not isinstance(var, core.Literal):
          self.used_by.setdefault(var, []).append((e, i))
    self._inside: dict[tuple[int, int], Frame] = {}

  def inside(self, eqn: Any, body: Any) -> Frame:
    """The frame of a program inside `eqn`, which is one of this program's equations."""
    key = (id(eqn), id(body))  # one body may belong to several calls
    if key not in self._inside:
      self._inside[key] = Frame(body, self, eqn)
    return self._inside[key]

  def name_stack(self, eqn: Any = None) -> str:
    parts = [self.parent.name_stack(self.eqn)] if self.parent is not None else []
    parts += [str(eqn.source_info.name_stack)] if eqn is not None else []
    return "/".join(part for part in parts if part)

  def _bodies(self, eqn: Any, at: int) -> Iterator[tuple[Frame, Any]]:
    """The programs inside an equation, with the variable that its input number `at` is there."""
    name, body = eqn.primitive.name, call_body(eqn)
    if body is not None:
      yield self.inside(eqn, body), body.invars[at]
    elif name == "scan":
      body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
      yield self.inside(eqn, body), body.invars[at]
    elif name == "cond" and at > 0:
      for branch in eqn.params["branches"]:
        branch = getattr(branch, "jaxpr", branch)
        yield self.inside(eqn, branch), branch.invars[at - 1]

  def enters_layer(self, var: Any) -> str | None:
    """The name stack of the layer that takes `var`, or a copy of it, as its hidden states."""
    for eqn, at in self.used_by.get(var, ()):
      if tag_name(eqn) == CARRY_MARK:
        return self.name_stack(eqn)
      if eqn.primitive.name in _SAME_VALUE or tag_name(eqn) is not None:
        found = self.enters_layer(eqn.outvars[at])
      else:
        found = next(filter(None, (frame.enters_layer(inner) for frame, inner in self._bodies(eqn, at))), None)
      if found is not None:
        return found
    return None

  def origin(self, var: Any) -> Origin:
    """What made `var`."""
    return self._origin(var, _Way())

  def _origin(self, var: Any, way: _Way) -> Origin:
    if isinstance(var, core.Literal):
      return way.end("constant", self.name_stack())
    if way.enters is None and not way.moved:
      way = dataclasses.replace(way, enters=self.enters_layer(var))
    if var in self.made_by:
      return self._made(*self.made_by[var], way)
    if var not in self.inputs:
      return way.end("constant", self.name_stack())
    at = self.inputs[var]
    if self.parent is None:
      return way.end("argument", "", argument=at)
    eqn, outer = self.eqn, self.parent
    if eqn.primitive.name == "scan":
      consts, carry = loop_counts(eqn)
      if consts <= at < consts + carry:
        return way.end("loop state", self.name_stack())
      return outer._origin(eqn.invars[at], dataclasses.replace(way, moved=True))
    if eqn.primitive.name == "cond":
      return outer._origin(eqn.invars[at + 1], way) if at + 1 < len(eqn.invars) else way.end("cond", self.name_stack())
    if call_body(eqn) is self.jaxpr:
      return outer._origin(eqn.invars[at], way)
    return way.end("loop state", self.name_stack())

  def _made(self, eqn: Any, at: int, way: _Way) -> Origin:
    primitive, here = eqn.primitive.name, self.name_stack(eqn)
    name = tag_name(eqn)
    if name is not None:
      if name == CARRY_MARK:
        return dataclasses.replace(way, enters=way.enters if way.moved else here).end(primitive, here)
      if way.moved:
        return way.end(way.primitive, way.name_stack, source=name)
      return way.end(primitive, here, name=name)
    if primitive in _SAME_VALUE:
      way = dataclasses.replace(way, copied=way.copied or primitive in ("device_put", "copy", "copy_p"))
      return self._origin(eqn.invars[at], way)
    if primitive == "scan":
      _, carry = loop_counts(eqn)
      body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
      if at >= carry:
        way = dataclasses.replace(way, trips=(*way.trips, eqn.params["length"]))
        return self.inside(eqn, body)._origin(body.outvars[at], way)
      return way.end(primitive, here)
    body = call_body(eqn)
    if body is not None:
      return self.inside(eqn, body)._origin(body.outvars[at], way)
    if primitive == "cond":
      branches = [getattr(branch, "jaxpr", branch) for branch in eqn.params["branches"]]
      found = [self.inside(eqn, branch)._origin(branch.outvars[at], way) for branch in branches]
      return next((origin for origin in found if origin.name), way.end(primitive, here))
    if primitive in (*_RESHAPES, *_COPIES) and not isinstance(eqn.invars[0], core.Literal):
      seen = dataclasses.replace(way, moved=True, copied=way.copied or primitive in _COPIES,
                                 primitive=way.primitive or primitive, name_stack=way.name_stack or here)
      further = self._origin(eqn.invars[0], seen)
      if further.argument is not None or further.source is not None:
        return further
    return way.end(way.primitive or primitive, way.name_stack or here)


@dataclasses.dataclass(frozen=True)
class _Way:
  """What was met on the way back from a value."""

  trips: tuple[int, ...] = ()
  copied: bool = False
  moved: bool = False  # past a view: what comes before is another value
  primitive: str = ""  # the first view
  name_stack: str = ""
  enters: str | None = None

  def end(self, primitive: str, name_stack: str, **found: Any) -> Origin:
    # What a loop stacks slice by slice is a copy, wherever the slices come from.
    is_input = found.get("argument") is not None and not self.copied and not self.trips
    return Origin(found.pop("name", None), primitive, self.name_stack or name_stack, self.trips, is_input=is_input,
                  enters=self.enters, **found)


def carry_marks(frame: Frame, trips: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Name stack of each layer's mark in a program, with the lengths of the loops around it."""
  for eqn in frame.jaxpr.eqns:
    if tag_name(eqn) == CARRY_MARK:
      yield frame.name_stack(eqn), trips
    for inner in _bodies_of(eqn):
      around = (*trips, eqn.params["length"]) if eqn.primitive.name == "scan" else trips
      yield from carry_marks(frame.inside(eqn, inner), around)


def _bodies_of(eqn: Any) -> Iterator[Any]:
  body = call_body(eqn)
  if body is not None:
    yield body
  elif eqn.primitive.name == "scan":
    yield getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
  elif eqn.primitive.name == "cond":
    yield from (getattr(branch, "jaxpr", branch) for branch in eqn.params["branches"])
