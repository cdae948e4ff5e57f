"""The planner: from one spec per layer to the plan that traces the fewest layer bodies.

The layers are cut into consecutive segments of two kinds: equal layers, one or more (a block of one spec), and cycles,
two or more repeats of a block of several specs. Of all ways to cut them the best one is

    1. the one with the fewest traced bodies (`Plan.traced_layers`: the runs of adjacent equal specs in all blocks),
    2. then the fewest segments,
    3. then the largest number of repeats of any one segment,
    4. then the one in which the first segment with that many repeats starts at the earliest layer,
    5. then the one whose first segment has the most layers, then the second, and so on.

One plan is left after these. A last step then gives cycles their remainders:

    6. segments of equal layers right after a cycle that together are the first layers of its block, cut short, become
       one segment: one repeat of that shorter block. It takes in as many segments as it can.

So layers that never repeat are a segment for each group of equal ones, a block of several specs is applied once only
as a remainder, and no block is a repeat of a shorter block.

Names are made from the shape of the plan and `name` alone, so that they are the same on every machine:

    name              the only segment, or the one with the most layers (of equals, the first)
    name_prefix       the segment before that one, if there is exactly one
    name_remainder    the segment after it, if its layers are the first layers of the block, cut short
    name_<k>          any other; k is its place in the plan, counted from 0
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from linen_stack.plan import Plan, Segment
from linen_stack.specs import LayerSpec

# A cut: the first layer of a segment, the length of its block, the number of repeats.
Cut = tuple[int, int, int]


def plan_layers(specs: Iterable[LayerSpec], name: str = "layers", names: Sequence[str] | None = None) -> Plan:
  """The plan with the fewest traced layer bodies for one spec per layer; ties and names as in the module's text.

  Args:
    specs: one `LayerSpec` per layer, in order. `plan.layers` gives them back.
    name: what the segments' names are made from.
    names: the names of the segments, in order, in place of those made from `name`.

  Raises:
    TypeError: `specs` or `names` is not a sequence, or an entry of `specs` is not a LayerSpec (says which).
    ValueError: `specs` is empty, or `names` does not fit the plan (shows the plan's segments).
  """
  specs = _checked(specs)
  kinds: dict[LayerSpec, int] = {}
  ids = [kinds.setdefault(spec, len(kinds)) for spec in specs]
  cuts = _with_remainders(ids, _best_cuts(ids))
  blocks = [tuple(specs[start:start + size]) for start, size, _ in cuts]
  made = _names(ids, cuts, name)
  plan = Plan(tuple(Segment(n, block, cut[2]) for n, block, cut in zip(made, blocks, cuts)))
  if names is None:
    return plan
  if isinstance(names, str) or not isinstance(names, Sequence):
    raise TypeError(f"names must be a list of strings, one per segment, not {names!r}")
  if len(names) != len(cuts):
    raise ValueError(f"names has {len(names)} entries, but these layers make {len(cuts)} "
                     f"segment{'s' if len(cuts) > 1 else ''}; name each of them:\n{plan.table()}")
  return Plan(tuple(Segment(n, segment.block, segment.length) for n, segment in zip(names, plan.segments)))


def _checked(specs: Iterable[LayerSpec]) -> list[LayerSpec]:
  if isinstance(specs, LayerSpec) or not isinstance(specs, Iterable):
    raise TypeError(f"specs must be a list with one LayerSpec per layer, not {specs!r}")
  specs = list(specs)
  if not specs:
    raise ValueError("specs is empty; a plan needs at least one layer")
  for i, spec in enumerate(specs):
    if not isinstance(spec, LayerSpec):
      raise TypeError(f"specs[{i}] must be a LayerSpec, not {spec!r}; write ls.LayerSpec(layer class, ...)")
  return specs


def _repetitions(ids: list[int]) -> list[list[tuple[int, int]]]:
  """For each layer, the blocks that repeat from there: (block length, where the repetition ends).

  `ids[start:end]` has period `size`, spans at least two blocks (one if it is a block of one), and cannot be extended
  to the right. Only the smallest period counts: a block that is itself a repeat traces more bodies (or is a run) and is
  never wanted. Two periods of one stretch share its two ends, and periods come in increasing order here, so the ends
  tell.
  """
  n = len(ids)
  found: list[list[tuple[int, int]]] = [[] for _ in ids]
  stretches = set()
  for size in range(1, max(n // 2, 1) + 1):
    start = 0
    shortest = size * _least_repeats(size)
    # The last pair never matches, so that every stretch ends inside the loop.
    for i, (a, b) in enumerate(zip(ids, ids[size:] + [-1])):
      if a == b:
        continue
      end = i + size
      if end - start >= shortest and (start, end) not in stretches:
        stretches.add((start, end))
        for first in range(start, end - shortest + 1):
          found[first].append((size, end))
      start = i + 1
  return found


def _least_repeats(size: int) -> int:
  """How often a block of `size` layers is repeated at the least."""
  return 1 if size == 1 else 2


def _best_cuts(ids: list[int]) -> list[Cut]:
  """The best segments for layers of these kinds by rules 1 to 5: dynamic programming from the last layer to the first.

  Work is O(n^2) additions and comparisons of ints for n layers, nearly all of them inside builtins.
  """
  n = len(ids)
  changes = [0] * n  # changes[i]: how many of the layers 1 to i differ from the one before
  for i in range(1, n):
    changes[i] = changes[i - 1] + (ids[i] != ids[i - 1])
  body = n + 1  # one traced body outweighs any number of segments

  def block_cost(start: int, size: int) -> int:
    return (1 + changes[start + size - 1] - changes[start]) * body + 1

  found = _repetitions(ids)
  # For the layers from i on: rules 1 and 2 as one int, and rules 3 and 4 as (-most repeats, where these start). A
  # segment put in front of a plan makes `min` of its own pair and the plan's, so the best rest stays the best.
  cost = [0] * (n + 1)
  rank = [(0, n)] * (n + 1)
  for i in reversed(range(n)):
    best = (body * (n + 1), (0, n))  # worse than a segment for each layer
    for size, end in found[i]:
      least = _least_repeats(size)
      rests = cost[i + least * size:end + 1:size]
      lowest = min(rests)
      total = block_cost(i, size) + lowest
      if total <= best[0]:
        for repeats, rest in enumerate(rests, least):
          if rest == lowest:
            best = min(best, (total, min((-repeats, i), rank[i + repeats * size])))
    cost[i], rank[i] = best

  cuts: list[Cut] = []
  most, first = -rank[0][0], rank[0][1]
  i = 0
  while i < n:
    # The segments from here with which the rest can be the best by rules 1 and 2.
    options = [(i, size, repeats) for size, end in found[i]
               for repeats in range(_least_repeats(size), (end - i) // size + 1)
               if block_cost(i, size) + cost[i + size * repeats] == cost[i]]
    if i < first:  # rules 3 and 4: keep the segment with the most repeats within reach,
      options = [cut for cut in options if rank[_end(cut)] == rank[0]]
    elif i == first:  # and take it there
      options = [cut for cut in options if cut[2] == most]
    cuts.append(max(options, key=lambda cut: cut[1] * cut[2]))
    i = _end(cuts[-1])
  return cuts


def _with_remainders(ids: list[int], cuts: list[Cut]) -> list[Cut]:
  """The segments after rule 6."""
  out: list[Cut] = []
  k = 0
  while k < len(cuts):
    cut = cuts[k]
    out.append(cut)
    k += 1
    taken = k
    while taken < len(cuts) and cuts[taken][1] == 1 and _cut_short(ids, cut, _end(cuts[taken])):
      taken += 1
    if taken - k > 1:  # one segment is a remainder as it is
      out.append((_end(cut), _end(cuts[taken - 1]) - _end(cut), 1))
      k = taken
  return out


def _end(cut: Cut) -> int:
  start, size, repeats = cut
  return start + size * repeats


def _cut_short(ids: list[int], cut: Cut, end: int) -> bool:
  """Whether the layers after a segment, up to `end`, are the first layers of its block and not the whole block."""
  start, size, _ = cut
  layers = ids[_end(cut):end]
  return len(layers) < size and layers == ids[start:start + len(layers)]


def _names(ids: list[int], cuts: list[Cut], name: str) -> list[str]:
  main = max(range(len(cuts)), key=lambda k: cuts[k][1] * cuts[k][2])
  names = [f"{name}_{k}" for k in range(len(cuts))]
  names[main] = name
  if main == 1:
    names[0] = f"{name}_prefix"
  if main + 1 < len(cuts) and _cut_short(ids, cuts[main], _end(cuts[main + 1])):
    names[main + 1] = f"{name}_remainder"
  return names
