"""Estimates of a remat policy, without compiling: what it keeps and where, what it recomputes, and how long a step takes.

The time of a step is that of its operations (`flops.Cost.seconds`), unless what travels between device and host takes
longer: the forward pass sends what the backward pass fetches, both fetch parameters that wait there, and each overlaps
with its own pass alone. An update of what waits there comes after. Transfers between devices are left out: they are the
same for every policy.
"""
from __future__ import annotations

import dataclasses
from typing import Any

from linen_stack.inspect import flops
from linen_stack.inspect.chips import Chip
from linen_stack.inspect.programs import Program
from linen_stack.inspect.residuals import ResidualReport
from linen_stack.policies import RematPolicy


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a policy comes to."""

  policy: Any
  device: int
  """Bytes that the backward pass finds on one device."""
  host: int
  """Bytes that it fetches from the host, for one device."""
  cost: flops.Cost
  """Of a whole step, over all devices."""
  recomputed: float
  """FLOPs of it that full residuals would save."""
  seconds: float
  residuals: ResidualReport

  def __str__(self) -> str:
    return str(self.policy)


class Estimator:
  """Estimates of one program under different policies. Traces; compiles nothing."""

  def __init__(self, program: Program, chip: Chip):
    self.program, self.chip = program, chip
    self.shards = program.batch_shards()
    self.forward, self._fetched, self._others = program.forward(chip)
    self.none = self.trace(RematPolicy("none"))

  def trace(self, policy: Any) -> flops.Cost:
    """The cost of a step under a policy."""
    program = dataclasses.replace(self.program, remat=policy)
    return program.cost(program.trace(), self.chip)

  def estimate(self, policy: Any, cost: flops.Cost | None = None) -> Estimate:
    """What a policy comes to, from the program itself; None: the policies that its stacks have. `cost`: if it is known."""
    report = dataclasses.replace(self.program, remat=policy).residuals()
    cost = self.trace(policy) if cost is None else cost
    host = report.total("host")
    return Estimate(policy, round(report.total("device") / self.shards), round(host / self.shards), cost,
                    max(cost.flops - self.none.flops, 0.0), self.seconds(cost.seconds, host), report)

  def seconds(self, working: float, host: float) -> float:
    """A step of `working` seconds of operations that sends `host` bytes, over all devices, to the host and back."""
    travels = (host / self.shards + self._fetched) / self.chip.link
    passes = max(self.forward.seconds, travels) + max(working - self.forward.seconds, travels)
    updated = self._fetched + self._others if self._others else 0
    return passes + updated / self.chip.link
