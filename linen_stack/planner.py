"""The planner: from one spec per layer to the plan that traces the fewest layer bodies.

Every way to cut the layers into consecutive segments, each some repeats of a block, is a candidate. The best one is

    1. the one with the fewest traced bodies (`Plan.traced_layers`: the runs of adjacent equal specs in all blocks),
    2. then the fewest segments,
    3. then the largest number of repeats of any one segment,
    4. then the one in which the first segment with that many repeats starts at the earliest layer,
    5. then the one whose first segment has the most layers, then the second, and so on.

One plan is left after these. Two consequences: a stretch of different layers that never repeats is one segment of one
repeat, with a run for each group of equal layers; and a block is never a repeat of a shorter block.

Names are made from the shape of the plan and `name` alone, so that they are the same on every machine:

    name              the only segment, or the one with the most layers (of equals, the first)
    name_prefix       the segment before that one, if there is exactly one
    name_remainder    the segment after it, if its layers are the first layers of the block, cut short
    name_<k>          any other; k is its place in the plan, counted from 0
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from linen_stack.plan import LayerSpec, Plan, Segment

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
  cuts = _best_cuts(ids)
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

  `ids[start:end]` has period `size`, spans at least two blocks, and cannot be extended to the right. Only the
  smallest period counts: a block that is itself a repeat traces more bodies (or is a run) and is never wanted. Two
  periods of one stretch share its two ends, and periods come in increasing order here, so the ends tell.
  """
  n = len(ids)
  found: list[list[tuple[int, int]]] = [[] for _ in ids]
  stretches = set()
  for size in range(1, n // 2 + 1):
    start = 0
    # The last pair never matches, so that every stretch ends inside the loop.
    for i, (a, b) in enumerate(zip(ids, ids[size:] + [-1])):
      if a == b:
        continue
      end = i + size
      if end - start >= 2 * size and (start, end) not in stretches:
        stretches.add((start, end))
        for first in range(start, end - 2 * size + 1):
          found[first].append((size, end))
      start = i + 1
  return found


def _best_cuts(ids: list[int]) -> list[Cut]:
  """The best segments for layers of these kinds, by dynamic programming from the last layer to the first.

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
  # A block applied once costs `changes[end - 1] - changes[start]` and a constant: the end to take does not depend on
  # the start. (A run seen as such a block is no better than the same run seen as repeats.)
  once = (body * n * n, (0, n))
  for i in reversed(range(n)):
    once = min(once, (changes[i] * body + cost[i + 1], rank[i + 1]))
    best = once[0] + (1 - changes[i]) * body + 1, min((-1, i), once[1])
    for size, end in found[i]:
      rests = cost[i + 2 * size:end + 1:size]
      lowest = min(rests)
      total = block_cost(i, size) + lowest
      if total <= best[0]:
        for repeats, rest in enumerate(rests, 2):
          if rest == lowest:
            best = min(best, (total, min((-repeats, i), rank[i + repeats * size])))
    cost[i], rank[i] = best

  def choices(i: int) -> list[Cut]:
    """The segments from layer i on with which the rest can be the best by rules 1 and 2."""
    spans = [(j - i, 1) for j in range(i + 1, n + 1) if j == i + 1 or changes[j - 1] > changes[i]]
    spans += [(size, repeats) for size, end in found[i] for repeats in range(2, (end - i) // size + 1)]
    return [(i, size, repeats) for size, repeats in spans
            if block_cost(i, size) + cost[i + size * repeats] == cost[i]]

  cuts: list[Cut] = []
  most, first = -rank[0][0], rank[0][1]
  i = 0
  while i < n:
    options = choices(i)
    if i < first:  # rules 3 and 4: keep the segment with the most repeats within reach,
      options = [cut for cut in options if rank[cut[0] + cut[1] * cut[2]] == rank[0]]
    elif i == first:  # and take it there
      options = [cut for cut in options if cut[2] == most]
    cuts.append(max(options, key=lambda cut: cut[1] * cut[2]))
    i += cuts[-1][1] * cuts[-1][2]
  return cuts


def _names(ids: list[int], cuts: list[Cut], name: str) -> list[str]:
  main = max(range(len(cuts)), key=lambda k: cuts[k][1] * cuts[k][2])
  names = [f"{name}_{k}" for k in range(len(cuts))]
  names[main] = name
  if main == 1:
    names[0] = f"{name}_prefix"
  if main + 1 < len(cuts):
    (start, size, _), (after, *shape) = cuts[main], cuts[main + 1]
    layers = shape[0] * shape[1]
    if layers < size and ids[after:after + layers] == ids[start:start + layers]:
      names[main + 1] = f"{name}_remainder"
  return names
