"""Layouts: where the variables of each layer stand, as data. Both directions of every conversion read it from here."""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import numpy as np

from linen_stack.per_layer import indices
from linen_stack.plan import Plan, Segment
from linen_stack.stacked import stacked_axis


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
  """Where the variables of one run stand; with scan=False, of one layer."""

  path: tuple[str, ...]
  """The keys that lead to the layer's own tree."""
  axes: tuple[tuple[str, int], ...]
  """(name, size) of each stacked axis, outermost first."""
  layers: np.ndarray
  """Global indices of the layers, in the shape of the stacked axes."""
  segment: str

  @property
  def sizes(self) -> tuple[int, ...]:
    return tuple(size for _, size in self.axes)

  def __str__(self) -> str:
    return "/".join(self.path)


def index_map(plan: Plan | Segment, scan: bool = True) -> tuple[Place, ...]:
  """Where every layer of a plan stands: a `Place` per run, or with scan=False per layer, in layer order.

  Example::

    for place in index_map(plan):
      print(place.path, place.axes, place.layers)
    # ('layers', 'local') (('layers', 2), ('local', 3)) [[0 1 2] [4 5 6]]
    # ('layers', 'global') (('layers', 2),) [3 7]
  """
  plan = Plan.of(plan)
  places = []
  for segment in plan:
    first = plan.offset(segment.name)
    for run in segment.runs:
      layers = indices(plan, segment, run)
      if scan:
        places.append(Place(segment.path(run), segment.axes(run), layers, segment.name))
      else:
        places += [Place((f"{segment.name}_{i - first}",), (), np.array(i), segment.name) for i in layers.flat]
  return tuple(sorted(places, key=lambda place: int(place.layers.min())))


def order(axis: int, stacked: int, own: int) -> tuple[int, ...]:
  """The axes of a stored leaf in terms of its front form `[*stacked axes, outermost first, *the layer's own axes]`.

  Stacked axes are put in from the innermost to the outermost, each at `axis` of what is there by then.
  """
  dims = list(range(stacked, stacked + own))
  for k in reversed(range(stacked)):
    dims.insert(stacked_axis(axis, len(dims) + 1), k)
  return tuple(dims)


def positions(axis: int, stacked: int, own: int) -> tuple[int, ...]:
  """Where in a stored leaf its stacked axes are, outermost first."""
  dims = order(axis, stacked, own)
  return tuple(dims.index(k) for k in range(stacked))


@dataclasses.dataclass(frozen=True)
class Layout:
  """A plan and the two options of a stack that decide where its variables stand."""

  plan: Plan
  param_axis: int = 0
  scan: bool = True

  @classmethod
  def of(cls, plan: Any, param_axis: int | None = None, scan: bool | None = None, argument: str = "plan",
         default: Layout | None = None) -> Layout:
    """From a plan and options, or from a `StackedDecoder` or a model around one, which know their options.

    `default` has the options of a plan of which nothing is said.

    Raises TypeError for anything else, ValueError for options that contradict the stack's.
    """
    stack = getattr(plan, "stack", plan)
    own = {}
    if isinstance(getattr(stack, "plan", None), Plan):
      own = {"param_axis": stack.param_axis, "scan": stack.scan}
      plan = stack.plan
    if not isinstance(plan, (Plan, Segment)):
      raise TypeError(f"{argument} must be a plan, a segment, a StackedDecoder or a model around one, "
                      f"not {plan!r:.80}")
    for name, given in (("param_axis", param_axis), ("scan", scan)):
      if given is None:
        continue
      if name == "scan" and not isinstance(given, bool):
        raise TypeError(f"scan must be True or False, not {given!r}")
      if name == "param_axis" and (isinstance(given, bool) or not hasattr(given, "__index__")):
        raise TypeError(f"param_axis must be an int, not {given!r}")
      if own.get(name, given) != given:
        raise ValueError(f"{name}={given!r}, but the stack given as {argument} has {name}={own[name]!r}; leave it out")
      own[name] = given
    usual = {} if default is None else {"param_axis": default.param_axis, "scan": default.scan}
    return cls(Plan.of(plan), **{**usual, **own})

  @functools.cached_property
  def places(self) -> tuple[Place, ...]:
    return index_map(self.plan, self.scan)

  @functools.cached_property
  def roots(self) -> frozenset[str]:
    """The keys under which the layers stand, side by side with whatever else the model has."""
    return frozenset(place.path[0] for place in self.places)

  def unknown(self, key: Any) -> bool:
    """Whether a key looks like one of the layers', and is none of them."""
    name, _, number = str(key).rpartition("_")
    return key not in self.roots and number.isdecimal() and any(name == segment.name for segment in self.plan)

  def others(self) -> Iterator[Layout]:
    """Layouts of the same layers for which a tree may be mistaken, the nearest first."""
    for axis in (0, 1, -1, 2, -2):
      if axis != self.param_axis:
        yield dataclasses.replace(self, param_axis=axis)
    yield dataclasses.replace(self, scan=not self.scan)
