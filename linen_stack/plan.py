"""Plans: which layers a decoder has, in which order, and which of them share one traced body.

A plan is data. It imports neither jax nor flax, so it can be built, printed and compared anywhere, and it is the one
source for variable names, checkpoint conversion and reports.

    LayerSpec    one layer: class, constructor arguments, name
    Run          adjacent equal specs inside a block (traced once, whatever its count)
    Segment      `length` repeats of a block of specs
    Plan         segments in order

Where variables stand (`<tree>` is the layer's own tree):

    block of one spec       <segment>/<tree>           stacked over `length` if it is more than 1
    block of several specs  <segment>/<run>/<tree>     stacked over `length` and `count`, each if it is more than 1
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from linen_stack.specs import LayerSpec, checked_count, checked_name, nearest


@dataclasses.dataclass(frozen=True)
class Run:
  """`count` adjacent equal layers of a block. `offset` is the position of the first in the block."""

  name: str
  spec: LayerSpec
  count: int
  offset: int


@dataclasses.dataclass(frozen=True)
class Segment:
  """`length` repeats of `block`, applied one way.

  Args:
    name: the key of the segment's variables and the name of its stacked axis.
    block: the specs of one repeat. A single spec: a homogeneous segment. Several: a cycle.
    length: the number of repeats. One repeat is not scanned and its variables have no stacked axis.
  """

  name: str
  block: tuple[LayerSpec, ...]
  length: int = 1

  def __post_init__(self):
    checked_name(self.name, "a segment's name")
    block = (self.block,) if isinstance(self.block, LayerSpec) else tuple(self.block)
    for spec in block:
      if not isinstance(spec, LayerSpec):
        raise TypeError(f"segment {self.name!r}: a block holds LayerSpecs, not {spec!r}; write ls.LayerSpec(...)")
    if not block:
      raise ValueError(f"segment {self.name!r}: a block needs at least one layer")
    object.__setattr__(self, "block", block)
    object.__setattr__(self, "length", checked_count(self.length, f"segment {self.name!r}: length"))
    names = [run.name for run in self.runs]
    if len(set(names)) < len(names):
      raise ValueError(f"segment {self.name!r}: two runs of the block get one name ({', '.join(names)}); "
                       "give the specs distinct names")

  @property
  def num_layers(self) -> int:
    return self.length * len(self.block)

  @property
  def is_cycle(self) -> bool:
    """Whether the variables stand one level deeper, under run names."""
    return len(self.block) > 1

  @functools.cached_property
  def runs(self) -> tuple[Run, ...]:
    """The block as runs of adjacent equal specs, with their names."""
    groups: list[list[Any]] = []
    for offset, spec in enumerate(self.block):
      if groups and groups[-1][0] == spec:
        groups[-1][1] += 1
      else:
        groups.append([spec, 1, offset])
    labels = [spec.label for spec, _, _ in groups]
    names = [label if labels.count(label) == 1 else f"{label}_{labels[:i].count(label)}"
             for i, label in enumerate(labels)]
    return tuple(Run(name, *group) for name, group in zip(names, groups))

  def axes(self, run: Run) -> tuple[tuple[str, int], ...]:
    """The stacked axes of a run's variables, outermost first, as (axis name, size)."""
    outer = ((self.name, self.length),) if self.length > 1 else ()
    return outer + (((run.name, run.count),) if run.count > 1 else ())

  def path(self, run: Run) -> tuple[str, ...]:
    """The keys under which a run's variables stand."""
    return (self.name, run.name) if self.is_cycle else (self.name,)


class Location(NamedTuple):
  """Where a layer is: the segment's name, which repeat of its block, and the position in the block."""

  segment: str
  step: int
  position: int


@dataclasses.dataclass(frozen=True)
class Plan:
  """The segments of a decoder, in order. Frozen, comparable, printable; `plan_a + plan_b` joins two."""

  segments: tuple[Segment, ...]

  def __post_init__(self):
    segments = tuple(self.segments)
    for segment in segments:
      if not isinstance(segment, Segment):
        raise TypeError(f"a plan holds segments, not {segment!r}; Plan.of takes segments and plans")
    if not segments:
      raise ValueError("a plan needs at least one layer")
    names = [segment.name for segment in segments]
    for name in names:
      if names.count(name) > 1:
        raise ValueError(f"two segments are named {name!r}; names in this plan: {', '.join(names)}. "
                         "Pass name= (and remainder=) to tell them apart")
    object.__setattr__(self, "segments", segments)

  @classmethod
  def homogeneous(cls, spec: LayerSpec, num_layers: int, name: str = "layers") -> Plan:
    """`num_layers` equal layers."""
    return cls((Segment(name, (spec,), checked_count(num_layers, "num_layers")),))

  @classmethod
  def cycle(cls, specs: Sequence[LayerSpec], num_layers: int, name: str = "layers",
            remainder: str = "layers_remainder") -> Plan:
    """`num_layers` layers that repeat `specs` over and over; what does not fill a whole repeat is the remainder."""
    specs = (specs,) if isinstance(specs, LayerSpec) else tuple(specs)
    if not specs:
      raise ValueError("specs must hold at least one LayerSpec")
    repeats, rest = split_cycle(num_layers, len(specs))
    segments = [Segment(name, specs, repeats)] if repeats else []
    if rest:
      segments.append(Segment(remainder, specs[:rest]))
    return cls(tuple(segments))

  @classmethod
  def of(cls, *parts: Segment | Plan) -> Plan:
    """Segments and plans, in order."""
    segments: list[Segment] = []
    for part in parts:
      if isinstance(part, LayerSpec):
        raise TypeError(f"{part!r} has no number of layers; write Plan.homogeneous(spec, num_layers, name)")
      segments.extend(part.segments if isinstance(part, Plan) else [part])
    return cls(tuple(segments))

  @classmethod
  def from_layers(cls, specs: Sequence[LayerSpec], name: str = "layers",
                  names: Sequence[str] | None = None) -> Plan:
    """The plan with the fewest traced layer bodies for one spec per layer. Ties and names: see `linen_stack.planner`.

    Args:
      specs: one `LayerSpec` per layer, in order.
      name: what the names of the segments are made from.
      names: the names of the segments, in order, in place of those.
    """
    from linen_stack.planner import plan_layers  # pylint: disable=g-import-not-at-top
    return plan_layers(specs, name, names)

  def __add__(self, other: Segment | Plan) -> Plan:
    if not isinstance(other, (Segment, Plan)):
      return NotImplemented
    return Plan.of(self, other)

  @property
  def num_layers(self) -> int:
    return sum(segment.num_layers for segment in self.segments)

  @property
  def traced_layers(self) -> int:
    """How many layer bodies one program traces."""
    return sum(len(segment.runs) for segment in self.segments)

  @property
  def layers(self) -> tuple[LayerSpec, ...]:
    """One spec per layer, in order."""
    return tuple(spec for segment in self.segments for spec in segment.block * segment.length)

  def __iter__(self) -> Iterator[Segment]:
    return iter(self.segments)

  def __getitem__(self, name: str) -> Segment:
    for segment in self.segments:
      if segment.name == name:
        return segment
    raise KeyError(f"no segment {name!r}; {nearest(name, [s.name for s in self.segments])}")

  def offset(self, name: str) -> int:
    """The global index of a segment's first layer."""
    self[name]  # raises on an unknown name
    before = [segment.name for segment in self.segments].index(name)
    return sum(segment.num_layers for segment in self.segments[:before])

  def locate(self, index: int) -> Location:
    """Where layer `index` is: (segment name, step, position in the block)."""
    if isinstance(index, bool) or not hasattr(index, "__index__"):
      raise TypeError(f"index must be an int, not {index!r}")
    if not 0 <= index < self.num_layers:
      raise IndexError(f"layer {index} of a plan with layers 0 to {self.num_layers - 1}")
    rest = index
    for segment in self.segments:
      if rest < segment.num_layers:
        return Location(segment.name, *divmod(rest, len(segment.block)))
      rest -= segment.num_layers
    raise AssertionError("unreachable")

  def table(self) -> str:
    """The plan as text: a row per run, with layers, repeats and the stacked axes of its variables."""
    rows = [("segment", "layers", "repeats", "run", "layer", "stacked axes")]
    for segment in self.segments:
      first = self.offset(segment.name)
      span = f"{first}-{first + segment.num_layers - 1}" if segment.num_layers > 1 else f"{first}"
      for i, run in enumerate(segment.runs):
        where = (segment.name, span, str(segment.length)) if i == 0 else ("", "", "")
        axes = " ".join(f"{name}:{size}" for name, size in segment.axes(run)) or "-"
        label = f"{run.name} x{run.count}" if segment.is_cycle else "-"
        rows.append((*where, label, getattr(run.spec.cls, "__name__", run.spec.label), axes))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append(f"{self.num_layers} layers, {self.traced_layers} traced")
    return "\n".join(lines)


def split_prefix(num_layers: int, prefix: int) -> tuple[int, int]:
  """`(prefix, rest)`. Raises ValueError where the prefix is longer than the decoder."""
  num_layers, prefix = checked_count(num_layers, "num_layers"), checked_count(prefix, "prefix", 0)
  if prefix > num_layers:
    raise ValueError(f"prefix {prefix} is longer than the decoder of {num_layers} layers")
  return prefix, num_layers - prefix


def split_cycle(num_layers: int, cycle: int) -> tuple[int, int]:
  """`(repeats, remainder)` of a cycle of `cycle` layers: `repeats * cycle + remainder == num_layers`."""
  return divmod(checked_count(num_layers, "num_layers"), checked_count(cycle, "cycle"))


def split_at(num_layers: int, *indices: int) -> tuple[int, ...]:
  """Lengths of the pieces that `num_layers` layers fall into when cut before each of `indices` (increasing)."""
  num_layers = checked_count(num_layers, "num_layers")
  bounds = [0, *(checked_count(i, "an index of split_at", 0) for i in indices), num_layers]
  for low, high in zip(bounds, bounds[1:]):
    if low > high:
      raise ValueError(f"split_at: {high if high != num_layers else low} is out of order or out of range; "
                       f"indices must increase from 0 to {num_layers}, got {indices}")
  return tuple(high - low for low, high in zip(bounds, bounds[1:]))
