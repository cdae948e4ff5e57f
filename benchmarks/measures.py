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

_OPERATION = re.compile(r"\b(?:stablehlo|chlo)\.\w+|\bcall @")


def sizes(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
  """Equations of the jaxpr, operations and bytes of the StableHLO."""
  traced = jax.jit(fn).trace(*args)
  text = traced.lower().as_text()
  return {"jaxpr equations": sum(1 for _ in tags.equations(traced.jaxpr.jaxpr)),
          "StableHLO operations": len(_OPERATION.findall(text)), "StableHLO bytes": len(text)}


def making(makers: Mapping[str, Callable[[], tuple[Callable[..., Any], Sequence[Any]]]], rounds: int,
           compiled: bool = True) -> dict[str, dict[str, list[float]]]:
  """Seconds that tracing, lowering and compiling take: a list per contender and phase, one entry a round.

  Each round builds every program anew, with JAX's caches cleared, the contenders in turn; the first round warms up the
  imports and is left out.
  """
  times: dict[str, dict[str, list[float]]] = {name: {} for name in makers}
  for round_ in range(rounds + 1):
    for name, make in makers.items():
      jax.clear_caches()
      fn, args = make()
      gc.collect()
      gc.disable()
      try:
        start = time.perf_counter()
        traced = jax.jit(fn).trace(*args)
        phases = {"trace": time.perf_counter() - start}
        start = time.perf_counter()
        lowered = traced.lower()
        phases["lowering"] = time.perf_counter() - start
        if compiled:
          start = time.perf_counter()
          lowered.compile()
          phases["compile"] = time.perf_counter() - start
      finally:
        gc.enable()
      if round_:
        for phase, seconds in phases.items():
          times[name].setdefault(phase, []).append(seconds)
  return times


def running(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Seconds per call of steps that are compiled already, a list per contender; in turn, and every other round backwards."""
  for step in steps.values():
    jax.block_until_ready(step())
  times: dict[str, list[float]] = {name: [] for name in steps}
  for round_ in range(rounds):
    for name in list(steps) if round_ % 2 else list(reversed(steps)):
      start = time.perf_counter()
      jax.block_until_ready(steps[name]())
      times[name].append(time.perf_counter() - start)
  return times


def ratios(times: Mapping[str, Sequence[float]], to: str) -> dict[str, float]:
  """Median over the rounds of each contender's time divided by that of `to` in the same round."""
  return {name: statistics.median(a / b for a, b in zip(own, times[to])) for name, own in times.items()}
