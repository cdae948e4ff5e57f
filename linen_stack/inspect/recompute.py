"""What the backward pass recomputes where names are kept, from one trace of a program that keeps everything.

A layer's backward pass needs certain values of its forward pass: those that are kept without remat. Under a policy they are
computed again from the layer's input, up to the values that the policy keeps. So one program serves all sets of names: it
is walked from those values back, and the walk ends at kept names and at layer inputs.
"""
from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import math
from typing import Any

from linen_stack.inspect import flops
from linen_stack.inspect.chips import Chip
from linen_stack.inspect.origins import Frame
from linen_stack.inspect.programs import Program
from linen_stack.inspect.residuals import kept_program
from linen_stack.inspect.watch import CARRY_MARK, Watch
from linen_stack.policies import CARRY_NAME, CARRY_TAG, RematPolicy
from linen_stack.tags import equations, tag_name


@dataclasses.dataclass(frozen=True)
class Recomputed:
  """What keeping a set of names comes to, over all devices and layers."""

  cost: flops.Cost
  """Of what is computed again."""
  kept: dict[str, int]
  """Bytes of each name that the backward pass then reads. A name that is not here would be kept in vain."""
  in_step: dict[str, int]
  """Of each of them, bytes in one step of the outermost loops."""


class Recompute:
  """Answers for one program. Traces once.

  Args:
    program: with a `loss`.
    chip: for seconds.
  """

  def __init__(self, program: Program, chip: Chip):
    none = dataclasses.replace(program, remat=RematPolicy("none"))
    with none.around():
      self._jaxpr, watch, _ = kept_program(none.loss, none.args)
    root = Frame(self._jaxpr)
    self._live = [_in_layer(root, var, watch) for var in self._jaxpr.outvars]
    self._chip, self._devices = chip, program.mesh.size
    self._known: dict[tuple[bool, frozenset[str]], Recomputed] = {}
    names = {name for eqn in equations(self._jaxpr) if (name := tag_name(eqn)) is not None}
    self.names: tuple[str, ...] = tuple(sorted(names - {CARRY_MARK, CARRY_NAME, CARRY_TAG}))
    """Tags that a policy can keep."""
    sizes = {id(var): math.prod(var.aval.shape) * var.aval.dtype.itemsize
             for var, wanted in zip(self._jaxpr.outvars, self._live) if wanted}
    self.everything = sum(sizes.values())
    """Bytes that are kept in layers without remat."""
    entering = self.of((CARRY_MARK,))
    self.carry, self.carry_in_step = entering.kept.get(CARRY_MARK, 0), entering.in_step.get(CARRY_MARK, 0)

  def of(self, names: Iterable[str], region: bool = False) -> Recomputed:
    """What is recomputed where `names` are kept. `region`: by layers that follow one another in a loop, of which only the
    first has its input; each then computes its output as well."""
    key = (region, frozenset(names))
    if key not in self._known:
      walk = flops.Walk(self._chip, self._devices, key[1] if region else {*key[1], CARRY_MARK})
      cost, _ = walk.run(self._jaxpr, self._live)
      # The program hands out what a layer that runs again uses at once.
      cost = dataclasses.replace(cost, bytes=cost.bytes - self.everything,
                                 seconds=cost.seconds - self.everything / self._chip.bandwidth / self._devices)
      kept: dict[str, int] = {}
      in_step: dict[str, int] = {}
      for name, size, trips in walk.used.values():
        if name in key[1]:
          kept[name] = kept.get(name, 0) + size * math.prod(trips)
          in_step[name] = in_step.get(name, 0) + size * math.prod(trips[1:])
      self._known[key] = Recomputed(cost, kept, in_step)
    return self._known[key]

  def useful(self, most: int) -> tuple[str, ...]:
    """The names whose keeping saves most time, `most` of them at the most."""
    everything = frozenset(self.names)
    saves = {}
    for name in self.names:
      alone = self.of(()).cost.seconds - self.of({name}).cost.seconds
      last = self.of(everything - {name}).cost.seconds - self.of(everything).cost.seconds
      saves[name] = max(alone, last)
    ranked = sorted(self.names, key=lambda name: -saves[name])
    return tuple(sorted(name for name in ranked[:most] if saves[name] > 0))


def _in_layer(root: Frame, var: Any, watch: Watch) -> bool:
  if type(var).__name__ == "Literal" or var in root.inputs:
    return False
  origin = root.origin(var)
  return watch.find(origin.name_stack) is not None or watch.find(origin.enters or "") is not None
