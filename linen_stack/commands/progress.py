"""Progress of a long command: a rich progress bar on a terminal, plain lines elsewhere."""
from __future__ import annotations

import sys
import time
from typing import Any

from rich import progress as rich_progress

_PLAIN_LINES = 20


class Progress:
  """A context in which `step` says how far the work is.

  Args:
    what: a word for the work.
    start, total: the step that it goes on from, and the last one.
    units_per_step: for the rate.
    unit: what the rate counts.
  """

  def __init__(self, what: str, start: int, total: int, units_per_step: int, unit: str = "tokens"):
    self._what, self._total, self._units, self._unit = what, total, units_per_step, unit
    self._mark, self._shown = (start, time.perf_counter()), start
    self._every = max(1, total // _PLAIN_LINES)
    self._bar: Any = None
    if sys.stdout.isatty():
      self._bar = rich_progress.Progress(
          rich_progress.TextColumn("{task.description}"), rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(),
          rich_progress.TextColumn("{task.fields[note]}"), rich_progress.TimeRemainingColumn())
      self._task = self._bar.add_task(what, total=total, completed=start, note="")

  def __enter__(self) -> Progress:
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *exc: Any) -> None:
    if self._bar is not None:
      self._bar.stop()

  def step(self, done: int, note: str = "") -> None:
    """`done` steps are done; `note` says something about the last one."""
    if self._bar is not None:
      self._bar.update(self._task, completed=done, note=f"{note} {self._rate(done)}".strip())
    elif done // self._every > self._shown // self._every or done == self._total > self._shown:
      print("  ".join(filter(None, [f"{self._what} {done}/{self._total}", note, self._rate(done)])), flush=True)
      self._mark, self._shown = (done, time.perf_counter()), done

  def _rate(self, done: int) -> str:
    since, when = self._mark
    return f"{(done - since) * self._units / max(time.perf_counter() - when, 1e-9):,.0f} {self._unit}/s"
