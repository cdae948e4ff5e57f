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
    tokens_per_step: for the rate.
  """

  def __init__(self, what: str, start: int, total: int, tokens_per_step: int):
    self._what, self._total, self._tokens = what, total, tokens_per_step
    self._mark = (start, time.perf_counter())
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
    elif done % self._every == 0 or done == self._total:
      print("  ".join(filter(None, [f"{self._what} {done}/{self._total}", note, self._rate(done)])), flush=True)
      self._mark = (done, time.perf_counter())

  def _rate(self, done: int) -> str:
    since, when = self._mark
    return f"{(done - since) * self._tokens / max(time.perf_counter() - when, 1e-9):,.0f} tokens/s"
