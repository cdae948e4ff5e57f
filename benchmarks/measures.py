"""How programs are measured: their sizes, the time that making them takes, and paired times of running them."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import gc
import re
import statistics
import time
from typing import Any

import jax

from linen_stack import tags

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)
_OPERATION = re.compile(r"\b(?:stablehlo|chlo)\.\w+|\bcall @")


def sizes(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
  """Equations of the jaxpr, operations and bytes of the StableHLO."""
  traced = jax.jit(fn).trace(*args)
  text = traced.lower().as_text()
  return {"jaxpr equations": sum(1 for _ in tags.equations(traced.jaxpr.jaxpr)),
          "StableHLO operations": len(_OPERATION.findall(text)), "StableHLO bytes": len(text)}


def instructions(compiled: jax.stages.Compiled) -> int:
  """Instructions of a compiled program, each once."""
  return len(_INSTRUCTION.findall(compiled.as_text()))


def making(makers: Mapping[Any, Callable[[], tuple[Callable[..., Any], Sequence[Any]]]], rounds: int,
           phases: Sequence[str] = ("trace", "lowering", "compile")) -> dict[Any, dict[str, list[float]]]:
  """Seconds that making programs takes: a list per contender and phase, one entry a round.

  Each round makes every program anew, with JAX's caches cleared, the contenders in turn, every other round backwards. Seconds
  are those that this process had a processor: what else the machine does disturbs them less. The very first program warms up
  and is left out. Each round stands deeper in Python's stack: a call that happens to cross from one chunk of it to the next
  pays for new memory each time, a tenth of the whole by chance, which would else be the same contender's in all rounds.
  """
  times: dict[Any, dict[str, list[float]]] = {name: {phase: [] for phase in phases} for name in makers}
  _make_once(next(iter(makers.values())), phases)
  for round_ in range(rounds):
    for name in list(makers) if round_ % 2 else list(reversed(makers)):
      for phase, seconds in _deeper(4 * round_, lambda: _make_once(makers[name], phases)).items():
        times[name][phase].append(seconds)
  return times


def _deeper(frames: int, fn: Callable[[], Any]) -> Any:
  return _deeper(frames - 1, fn) if frames else fn()


def _make_once(make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], phases: Sequence[str]) -> dict[str, float]:
  jax.clear_caches()
  fn, args = make()
  work = {"trace": lambda fn: fn.trace(*args), "lowering": lambda traced: traced.lower(), "compile": lambda low: low.compile()}
  gc.collect()
  gc.disable()
  try:
    made, seconds = jax.jit(fn), {}
    for phase in phases:
      start = time.process_time()
      made = work[phase](made)
      seconds[phase] = time.process_time() - start
  finally:
    gc.enable()
  return seconds


_CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}


def running(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
  """Seconds per call of steps that are compiled already: by clock, a list per contender.

  The contenders run in turn, every other round backwards. On a machine that does other work as well, processor time says more.
  """
  for step in steps.values():
    jax.block_until_ready(step())
  times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in steps} for clock in _CLOCKS}
  for round_ in range(rounds):
    for name in list(steps) if round_ % 2 else list(reversed(steps)):
      start = {clock: now() for clock, now in _CLOCKS.items()}
      jax.block_until_ready(steps[name]())
      for clock, now in _CLOCKS.items():
        times[clock][name].append(now() - start[clock])
  return times


def ratios(times: Mapping[Any, Sequence[float]], to: Any) -> dict[Any, float]:
  """Median over the rounds of each contender's time divided by that of `to` in the same round."""
  return {name: statistics.median(a / b for a, b in zip(own, times[to])) for name, own in times.items()}
