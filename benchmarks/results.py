"""Figures of a run: kept as JSON, shown as a table, compared with those of an earlier run."""
from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

# Exact figures may grow by this much before a comparison fails.
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Figure:
  """One number. Sizes and counts are exact and repeat; times are ratios to `linen_stack` in the same run, or seconds."""

  benchmark: str
  case: str
  """Layout, program and the like."""
  contender: str
  measure: str
  value: float
  unit: str = ""
  depth: int | None = None
  exact: bool = False

  @property
  def key(self) -> tuple[str, str, str, str, int | None]:
    return (self.benchmark, self.case, self.contender, self.measure, self.depth)


def about() -> dict[str, str]:
  """What the figures depend on."""
  versions = {}
  for name in ("jax", "jaxlib", "flax", "libtpu", "haliax", "numpy"):
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      pass
  return {"python": platform.python_version(), **versions, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


def save(path: pathlib.Path, figures: Iterable[Figure]) -> None:
  """Writes the figures, whole or not at all."""
  content = {"about": about(), "figures": [dataclasses.asdict(figure) for figure in figures]}
  unfinished = path.with_name(path.name + ".unfinished")
  unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
  unfinished.replace(path)


def load(path: pathlib.Path) -> list[Figure]:
  """Reads what `save` wrote. Raises ValueError for another file."""
  try:
    return [Figure(**figure) for figure in json.loads(path.read_text(encoding="utf-8"))["figures"]]
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is no file of benchmark results: {error}") from None


def worse(now: Iterable[Figure], before: Iterable[Figure]) -> list[str]:
  """Lines about exact figures that grew, and those that are not measured any more in a benchmark that ran."""
  now = {figure.key: figure for figure in now}
  ran, lines = {key[0] for key in now}, []
  for old in before:
    new = now.get(old.key)
    name = f"{old.benchmark}: {old.case} {old.contender} {old.measure}" + (f" at {old.depth} layers" if old.depth else "")
    if not old.exact or old.benchmark not in ran:
      continue
    if new is None:
      lines.append(f"{name}: {old.value:,.0f} {old.unit} before, not measured now")
    elif new.value > old.value * (1 + TOLERANCE):
      lines.append(f"{name}: {old.value:,.0f} {old.unit} before, {new.value:,.0f} now")
  return lines


def exponents(figures: Iterable[Figure]) -> list[Figure]:
  """For each measure at several depths, ratios left out, the exponent of its growth: 0 is flat, 1 as the depth grows."""
  series: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
  for figure in figures:
    if figure.depth and figure.value > 0 and (figure.exact or figure.unit):
      series.setdefault((figure.benchmark, figure.case, figure.contender, figure.measure), []).append(
          (figure.depth, figure.value))
  fitted = []
  for (benchmark, case, contender, measure), points in series.items():
    if len(points) > 2:
      depth, value = np.log(np.array(points, float)).T
      fitted.append(Figure(benchmark, case, contender, f"growth of {measure}", float(np.polyfit(depth, value, 1)[0]),
                           "exponent"))
  return fitted


def show(figures: Iterable[Figure], console: Console | None = None) -> None:
  """A table per benchmark and measure, contenders side by side."""
  # Where nobody looks, lines are not cut to the width of a screen.
  console = console or Console(width=None if sys.stdout.isatty() else 160)
  groups: dict[tuple[str, str], list[Figure]] = {}
  for figure in figures:
    groups.setdefault((figure.benchmark, figure.measure), []).append(figure)
  for (benchmark, measure), of_group in groups.items():
    names = list(dict.fromkeys(figure.contender for figure in of_group))
    unit = of_group[0].unit
    table = Table(title=f"{benchmark}: {measure}" + (f" [{unit}]" if unit else ""), title_justify="left")
    table.add_column("case")
    for name in names:
      table.add_column(name, justify="right")
    rows: dict[tuple[str, int | None], dict[str, float]] = {}
    for figure in of_group:
      rows.setdefault((figure.case, figure.depth), {})[figure.contender] = figure.value
    for (case, depth), values in rows.items():
      label = case + (f", {depth} layers" if depth else "")
      table.add_row(label, *(_number(values.get(name)) for name in names))
    console.print(table)


def _number(value: float | None) -> str:
  if value is None:
    return ""
  return f"{value:,.0f}" if value == int(value) and abs(value) >= 10 else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"
