"""What the text of a program compiled for a TPU says of its time: cycles, with loop bodies as often as they run."""
from __future__ import annotations

import dataclasses
import re

_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'known_trip_count[^\d]*(\d+)')
_CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))")
_CONSTANT = re.compile(r"%([\w.\-]+) = s(?:32|64)\[\]\S* constant\((-?\d+)\)")
_COMPARE = re.compile(r" compare\([^)]*%([\w.\-]+)\).*direction=LT")


@dataclasses.dataclass
class _Computation:
  own: float = 0.0
  loops: list[tuple[str, str, int | None]] = dataclasses.field(default_factory=list)  # condition, body, trips if told
  calls: list[str] = dataclasses.field(default_factory=list)
  branches: list[list[str]] = dataclasses.field(default_factory=list)
  trips: int | None = None  # of the loop whose condition this is


def cycles(text: str) -> float:
  """Cycles of one run of a scheduled HLO module, as the compiler expects them.

  Loops count as often as their condition, `i < constant`, says, and once where it says nothing; of branches the longest
  counts. Transfers between devices and to the host have no cycles.
  """
  computations, entry = _parse(text)
  totals: dict[str, float] = {}

  def total(name: str) -> float:
    if name not in totals:
      found = computations.get(name, _Computation())
      totals[name] = found.own + sum(map(total, found.calls))
      totals[name] += sum(max(map(total, branches), default=0.0) for branches in found.branches)
      for condition, body, told in found.loops:
        trips = told or (computations[condition].trips if condition in computations else None) or 1
        totals[name] += trips * (total(body) + total(condition))
    return totals[name]

  return total(entry)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
  computations: dict[str, _Computation] = {}
  entry, current, constants = "", _Computation(), {}
  for line in text.splitlines():
    if line and not line[0].isspace():
      head = _HEAD.match(line)
      if head:
        current, constants = computations.setdefault(head[1], _Computation()), {}
        entry = head[1] if line.startswith("ENTRY") else entry
      continue
    for found in _CONSTANT.finditer(line):
      constants[found[1]] = int(found[2])
    if found := _COMPARE.search(line):
      current.trips = constants.get(found[1])
    if found := _LOOP.search(line):
      told = _KNOWN_TRIPS.search(line)
      current.loops.append((found[1], found[2], int(told[1]) if told else None))
    elif found := _CALL.search(line):
      current.calls.append(found[1])
    elif found := _BRANCHES.search(line):
      names = found[1].split(",") if found[1] else [found[2], found[3]]
      current.branches.append([name.strip().lstrip("%") for name in names])
    # Fusions carry the cycles of what they contain.
    current.own += sum(int(found[1]) for found in _CYCLES.finditer(line))
  return computations, entry
