"""`tune`: the remat policy with the least estimated step time whose compiled program fits.

Compiling only confirms what a model of memory and time says (`candidates`). Memory is that of full remat, compiled, and
what a policy keeps beyond it; each further compiled program corrects that.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

from flax import linen as nn
import yaml

from linen_stack.inspect import chips, programs, render
from linen_stack.inspect.candidates import SAME, Candidate, candidates, plain
from linen_stack.inspect.memory import MemoryReport, compile_report
from linen_stack.inspect.programs import Program
from linen_stack.presets import PRESETS

@dataclasses.dataclass(frozen=True)
class Confirmed:
  """A candidate and what compiling said."""

  candidate: Candidate
  memory: MemoryReport


@dataclasses.dataclass(frozen=True)
class TuneReport:
  """What tuning came to. Prints as text, with the winner as YAML."""

  topology: chips.Topology
  hbm: int
  """The budget of one device."""
  host: int | None
  winner: Confirmed | None
  """None: nothing fits."""
  runner_up: Candidate | None
  """The next fastest that should fit."""
  faster: Candidate | None
  """The next faster one than the winner, which does not fit."""
  faster_hbm: int | None
  """What it would take."""
  faster_compiled: bool
  """Whether compiling said so, and not the model."""
  compiled: tuple[Confirmed, ...]
  presets: tuple[Candidate, ...]
  """Every preset, the fastest first."""
  smallest: int | None = None
  """Where nothing fits: the least device memory with which something would; None: nothing, with that host memory."""

  def yaml(self) -> str:
    """The winner as a part of a config. Raises ValueError where nothing fits."""
    if self.winner is None:
      raise ValueError("nothing fits, so that there is no policy to write")
    return yaml.safe_dump({"stack": {"remat": plain(self.winner.candidate)}}, sort_keys=False, default_flow_style=None)

  def to_dict(self) -> dict[str, Any]:
    """The result as JSON takes it."""
    one = lambda c: None if c is None else {
        "policy": c.name, "remat": plain(c), "seconds": c.seconds, "recomputed_flops": c.recomputed}
    return {"topology": self.topology.name, "slices": self.topology.slices, "hbm": self.hbm, "host": self.host,
            "winner": one(self.winner and self.winner.candidate), "runner_up": one(self.runner_up),
            "next_faster": one(self.faster), "next_faster_hbm": self.faster_hbm, "smallest_hbm": self.smallest,
            "compiled": [{**one(done.candidate), "memory": done.memory.to_dict()} for done in self.compiled],
            "presets": [one(candidate) for candidate in self.presets]}

  def __str__(self) -> str:
    head = f"{self.topology}: {render.size(self.hbm)} of HBM"
    head += f" and {render.size(self.host)} of host memory" if self.host is not None else ""
    tried = f"compiled {render.plural(len(self.compiled), 'program')}; there are {len(PRESETS)} presets"
    if self.winner is None:
      why = ("the least that would do is " + render.size(self.smallest) if self.smallest is not None else
             "on the host, even parameters take more")
      return f"{head} for one device: nothing fits; {why}\n{tried}"
    chosen, memory = self.winner.candidate, self.winner.memory
    lines = [f"{head} for one device", f"winner: {chosen.name}, {_time(chosen)}; compiled, it takes {render.size(memory.hbm)}"
             + (f", and {render.size(memory.host)} on the host" if memory.host else ""), "", self.yaml().rstrip(), ""]
    if self.runner_up is not None:
      lines.append(f"runner-up: {self.runner_up.name}, {_time(self.runner_up)}")
    if self.faster is not None:
      what = f"it takes {render.size(self.faster_hbm)}, compiled" if self.faster_compiled else (
          f"it should take about {render.size(self.faster_hbm)}")
      what += f", and {render.size(self.faster.host)} on the host" if self.faster.host else ""
      lines.append(f"the next faster one does not fit: {self.faster.name}, {_time(self.faster)}; {what}")
    return "\n".join([*lines, tried])


def _time(candidate: Candidate) -> str:
  return f"estimated {render.duration(candidate.seconds)} a step"


def tune(stack: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, topology: str = "v5p:2x2x1",
         slices: int = 1, mesh: Any = None, rules: Any = None, shardings: Any = None, hbm: str | int | None = None,
         host: str | int | None = None, limit: float = 600.0, cache: str | os.PathLike[str] | bool = True,
         say: Callable[[str], None] = lambda line: None) -> TuneReport:
  """Finds the fastest remat policy whose loss and gradients fit a TPU, by estimate; compiles to confirm.

  Args:
    stack: a `StackedDecoder`, or a module that contains one or several. All get the same policy.
    args, kwargs, topology, slices, mesh, rules, shardings, limit, cache: as in `memory`.
    hbm: device memory to stay below, "15GiB" or a number of bytes. Default: what the device has.
    host: host memory for each device to stay below. Default: no bound.
    say: is told of each program before it is compiled.

  Raises:
    TypeError, ValueError: as `memory`; a module without tags to choose among; a budget without a unit.
    ImportError, TimeoutError, RuntimeError: as `memory`.
  """
  described = chips.topology(topology, slices)
  budget = _budget(hbm, "hbm") or described.chip.hbm
  mesh = programs.as_mesh(mesh, described)
  rules = programs.as_rules(rules, mesh)
  specs = None if shardings is None else (shardings, None)
  program = programs.gradients(stack, tuple(args), kwargs or {}, mesh, rules, specs)
  return search(program, described, budget, _budget(host, "host"), limit=limit, cache=cache, say=say)


def _budget(value: Any, what: str) -> int | None:
  if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
    return value
  return chips.parse_bytes(value, what)


def search(program: Program, topology: chips.Topology, hbm: int, host: int | None = None, *, limit: float = 600.0,
           cache: str | os.PathLike[str] | bool = True, say: Callable[[str], None] = lambda line: None) -> TuneReport:
  """The same for a program with a `loss`. `hbm`, `host`: bytes for one device."""
  if not program.stacks:
    raise ValueError("the module calls no StackedDecoder, so that there is no policy to choose")
  ranked = candidates(program, topology.chip)
  state = _Search(program, topology, hbm, host, ranked, limit=limit, cache=cache, say=say)
  state.run()
  return state.report()


class _Search:
  """Compiles candidates until the best that fits is known."""

  def __init__(self, program: Program, topology: chips.Topology, hbm: int, host: int | None, ranked: list[Candidate], *,
               limit: float, cache: Any, say: Callable[[str], None]):
    self._program, self._topology, self._hbm, self._host = program, topology, hbm, host
    self._ranked = [candidate for candidate in ranked if host is None or candidate.host <= host]
    self._options, self._say = dict(limit=limit, cache=cache), say
    self._left = max(2, len(PRESETS) // 3)  # programs that may still be compiled
    self._done: list[Confirmed] = []
    self._presets = tuple(sorted((c for c in ranked if c.presets), key=lambda c: c.seconds))
    self._full = next(c for c in ranked if "full" in c.presets)

  def run(self) -> None:
    self._compile(self._full)
    if not self._fits(self._done[0]):
      # Whether anything can: the one that takes least.
      least = min(self._ranked, key=lambda c: (c.device, c.seconds))
      if least is not self._full:
        self._compile(least)
      if not self._best():
        return
    while self._left > 0:
      best = self._best()
      tried = [done.candidate for done in self._done]
      most = self._most_device()
      faster = (c for c in self._ranked if c not in tried and c.device < most and self._predicted(c) <= self._hbm)
      choice = next(faster, None)
      if choice is None or (best and choice.seconds >= best.candidate.seconds * (1 - SAME)):
        return
      self._compile(choice)

  def _compile(self, candidate: Candidate) -> None:
    self._say(f"compiling {candidate.name}, {_time(candidate)}")
    self._left -= 1
    program = dataclasses.replace(self._program, remat=candidate.policy)
    try:
      memory = compile_report(program, self._topology, **self._options)
    except TimeoutError as error:
      if not self._done:
        raise  # what full remat takes is what all others are measured by
      self._ranked.remove(candidate)
      self._say(f"left out: {candidate.name}: {error}")
      return
    self._done.append(Confirmed(candidate, memory))
    self._say(f"{candidate.name}: {render.size(memory.hbm)} of HBM, compiled in {memory.seconds:.0f} s")

  def _fits(self, done: Confirmed) -> bool:
    return done.memory.fits and done.memory.hbm <= self._hbm and self._fits_host(done)

  def _fits_host(self, done: Confirmed) -> bool:
    return self._host is None or done.memory.host <= self._host

  def _best(self) -> Confirmed | None:
    return min(filter(self._fits, self._done), key=lambda done: done.candidate.seconds, default=None)

  def _predicted(self, candidate: Candidate) -> float:
    """Device memory of a candidate: that of the compiled program nearest to it, and what it keeps beyond that one."""
    known = [done for done in self._done if done.memory.out_of_memory is None] or self._done
    near = min(known, key=lambda done: abs(done.candidate.device - candidate.device))
    beyond = candidate.device - near.candidate.device
    # A program that took more than was expected of it makes the next ones of its kind more expensive as well.
    return near.memory.hbm + beyond * (self._slope() if beyond > 0 else 1.0)

  def _most_device(self) -> float:
    """What a candidate must keep less than on the device, by those that did not fit."""
    failed = min((done.candidate.device for done in self._done if not self._fits(done)), default=math.inf)
    if all(done.memory.out_of_memory is None for done in self._done):
      return failed
    # Of a program that does not compile nobody knows by how much it is too large: the middle is tried next.
    fitted = max((done.candidate.device for done in self._done if self._fits(done)), default=0)
    return (failed + fitted) / 2

  def _slope(self) -> float:
    """Device memory for each byte that is kept, from the compiled programs; 1 until there are two."""
    first, *others = [done for done in self._done if done.memory.out_of_memory is None] or self._done
    slopes = [(done.memory.hbm - first.memory.hbm) / (done.candidate.device - first.candidate.device) for done in others
              if done.candidate.device != first.candidate.device and done.memory.out_of_memory is None]
    return max([1.0, *slopes]) if slopes else 1.0

  def report(self) -> TuneReport:
    best = self._best()
    made = {done.candidate.policy: done for done in self._done}
    if best is None:
      smallest = min((done.memory.hbm for done in self._done if self._fits_host(done)), default=None)
      return TuneReport(self._topology, self._hbm, self._host, None, None, None, None, False, tuple(self._done),
                        self._presets, smallest)
    fails = lambda c: not self._fits(made[c.policy]) if c.policy in made else self._predicted(c) > self._hbm
    runner_up = next((c for c in self._ranked if c is not best.candidate and not fails(c)
                      and c.seconds >= best.candidate.seconds * (1 - SAME)), None)
    quicker = [c for c in self._ranked if c.seconds < best.candidate.seconds * (1 - SAME) and fails(c)]
    faster = max(quicker, key=lambda c: (c.seconds, -c.device), default=None)
    done = made.get(faster.policy) if faster else None
    size = None if faster is None else done.memory.hbm if done else round(self._predicted(faster))
    return TuneReport(self._topology, self._hbm, self._host, best, runner_up, faster, size, done is not None,
                      tuple(self._done), self._presets)
