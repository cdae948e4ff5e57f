"""The policies that `tune` weighs, and what a model of memory and time says of each.

They are all sets of the names that the layers tag, saved or offloaded, with the layers' inputs saved or offloaded; several
layers to a region; and two levels of regions. The time of a step is that of full remat, as `estimate` counts it, less what a
set saves of the recomputation, and what is then read and written. One trace answers for all of them (`recompute`).
"""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

from linen_stack.inspect import chips
from linen_stack.inspect.estimate import Estimator
from linen_stack.inspect.programs import Program
from linen_stack.inspect.recompute import Recompute
from linen_stack.policies import RematPolicy
from linen_stack.presets import PRESETS

# More names than that are not told apart: three ways for each of them are weighed.
_MOST_NAMES = 8
# Estimates closer than this are equal; the simpler policy is then taken.
SAME = 0.002


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A policy and what the model says of it. Bytes are those of one device."""

  policy: RematPolicy
  seconds: float
  recomputed: float
  """FLOPs over all devices."""
  device: int
  """What the backward pass finds on the device, with the buffers that bring it there."""
  host: int
  presets: tuple[str, ...] = ()
  """Presets that do the same."""

  @property
  def name(self) -> str:
    """A preset's name, or the policy in words."""
    return self.presets[0] if self.presets else str(self.policy)


def plain(candidate: Candidate) -> Any:
  """What stands in a config."""
  if candidate.presets:
    return candidate.presets[0]
  policy = candidate.policy
  values = {"save": list(policy.save), "offload": list(policy.offload), "carry": policy.carry,
            "levels": list(policy.levels or ()), "every": policy.every}
  defaults = {"carry": "save", "every": 1}
  return {key: value for key, value in values.items() if value and value != defaults.get(key)}


def candidates(program: Program, chip: chips.Chip) -> list[Candidate]:
  """Every policy that is weighed, the fastest first; of equally fast ones, that with the least on the host first."""
  recompute, estimator = Recompute(program, chip), Estimator(program, chip)
  model = _Model(recompute, estimator, estimator.trace(RematPolicy("full")).seconds)
  found: dict[RematPolicy, Candidate] = {}
  presets = {preset: model.effective(RematPolicy(preset)) for preset in PRESETS}
  for policy in itertools.chain(presets.values(), _sets(recompute), _regions(recompute, program)):
    if policy not in found:
      same = tuple(name for name, effective in presets.items() if effective == policy)
      found[policy] = model.candidate(policy, same)
  step = SAME * min(candidate.seconds for candidate in found.values())
  return sorted(found.values(), key=lambda c: (round(c.seconds / step), c.host, c.device, not c.presets, str(c.policy)))


def _sets(recompute: Recompute) -> Iterator[RematPolicy]:
  """Names saved or offloaded, with the layers' inputs saved or offloaded."""
  names = recompute.useful(_MOST_NAMES)
  for size in range(len(names) + 1):
    for kept in itertools.combinations(names, size):
      if len(recompute.of(kept).kept) < size:
        continue  # some are kept in vain
      for offloaded in itertools.chain.from_iterable(itertools.combinations(kept, n) for n in range(size + 1)):
        for carry in ("save", "offload"):
          yield RematPolicy(save=set(kept) - set(offloaded), offload=offloaded, carry=carry)


def _regions(recompute: Recompute, program: Program) -> Iterator[RematPolicy]:
  """Several layers to a region, and two levels of regions, where the plans divide."""
  shapes: list[dict[str, Any]] = []
  longest = max((segment.length * len(segment.block) for stack in program.stacks for segment in stack.plan), default=1)
  for count in range(2, longest + 1):
    shapes.append({"every": count})
    if longest % count == 0 and 1 < longest // count:
      shapes.append({"levels": (longest // count, count)})
  names = recompute.useful(3)
  for shape in shapes:
    if not all(_takes(stack, RematPolicy(**shape)) for stack in program.stacks):
      continue
    for size in range(len(names) + 1):
      for kept in itertools.combinations(names, size):
        for carry in ("save", "offload"):
          yield RematPolicy(save=kept, carry=carry, **shape)


def _takes(stack: Any, policy: RematPolicy) -> bool:
  try:
    stack.clone(remat=policy)
  except ValueError:
    return False
  return True


@dataclasses.dataclass(frozen=True)
class _Model:
  """Memory and time of a policy."""

  recompute: Recompute
  estimator: Estimator
  full: float
  """Seconds of a step under full remat."""

  def effective(self, policy: RematPolicy) -> RematPolicy:
    """The policy with only those names that the backward pass then reads."""
    if not policy.remat:
      return policy
    kept = self.recompute.of(policy.names).kept
    return RematPolicy(save=set(policy.save) & set(kept), offload=set(policy.offload) & set(kept), carry=policy.carry,
                       levels=policy.levels, every=policy.every)

  def candidate(self, policy: RematPolicy, presets: tuple[str, ...]) -> Candidate:
    recompute, shards = self.recompute, self.estimator.shards
    if not policy.remat:
      device, seconds, flops = recompute.everything, self.estimator.none.seconds, 0.0
      return Candidate(policy, seconds, flops, round(device / shards), 0, presets)
    layers = sum(stack.plan.num_layers for stack in self.estimator.program.stacks)
    alone = recompute.of(policy.names)
    region = recompute.of(policy.names, region=True)
    saved, offloaded = (sum(alone.kept.get(name, 0) for name in names) for names in (policy.save, policy.offload))
    carries, working, inside, cost = recompute.carry, 0.0, 0.0, alone.cost
    if policy.every > 1:
      # Inside a region nothing is rematerialised: all that its layers compute waits, one region at a time.
      cost, inside = region.cost, recompute.everything
      carries /= policy.every
      working = policy.every * inside / layers
    elif policy.levels:
      cost, inside = alone.cost + region.cost, recompute.carry
      carries *= policy.levels[0] / layers
      working = policy.levels[1] * recompute.carry / layers
    # What is on its way to the host or back has two buffers: one travels while the other is computed with. Runs inside a
    # cycle are straight-line code then, so that all layers of a repeat are on their way together.
    on_the_way = 2 * sum(alone.in_step.get(name, 0) for name in policy.offload)
    if policy.carry == "offload":
      on_the_way += 2 * recompute.carry_in_step
      offloaded += carries
      carries = 0.0
    moved = saved + 2 * offloaded + carries + inside  # what is on its way passes a buffer on the device
    base = recompute.of(())
    seconds = (self.full + cost.seconds - base.cost.seconds
               + 2 * (moved - recompute.carry) / self.estimator.chip.bandwidth / self.estimator.program.mesh.size)
    seconds = self.estimator.seconds(seconds, offloaded)
    return Candidate(policy, seconds, cost.flops, round((saved + carries + working + on_the_way) / shards),
                     round(offloaded / shards), presets)
