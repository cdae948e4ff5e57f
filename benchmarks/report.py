"""The table of the README, of the figures in a file: `python -m benchmarks.report [FILE]` prints it.

`python -m benchmarks.report --write` puts it between the lines "benchmarks" and "end of benchmarks" of the README, and
draws the picture there.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
import json
import pathlib
import re

from absl import app, flags

from benchmarks import plots, results
from benchmarks.results import Figure

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = ROOT / "benchmarks" / "results" / "reference.json"
_SECTION = re.compile(r"(<!-- benchmarks.*?-->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)

_WRITE = flags.DEFINE_bool("write", False, "Put the table into the README, and draw its picture (needs matplotlib).")

COLUMNS = {"linen_stack": "linen_stack", "expert": "expert", "expert_defaults": "expert, Flax's defaults",
           "lax_scan": "lax.scan", "remat_scan": "remat_scan", "haliax": "Haliax", "loop": "loop"}


def _count(value: float) -> str:
  return f"{value:,.0f}"


def _hundredths(value: float) -> str:
  return f"{value:,.2f}"


# What is shown: a title, then benchmark, case, measure and depth of the figures, and how they are written.
ROWS: tuple[tuple[str, tuple[str, str, str, int | None], Callable[[float], str]], ...] = (
    ("StableHLO operations, 8 layers", ("programs", "flat train step", "StableHLO operations", None), _count),
    ("the same, a loop in a loop", ("programs", "nested train step", "StableHLO operations", None), _count),
    ("tracing, 32 layers", ("trace", "flat train step", "trace, times linen_stack's", 32), _hundredths),
    ("the same, a loop in a loop", ("trace", "nested train step", "trace, times linen_stack's", 32), _hundredths),
    ("the same, forward", ("trace", "flat forward", "trace, times linen_stack's", 32), _hundredths),
    ("the same, init", ("trace", "flat init", "trace, times linen_stack's", 32), _hundredths),
    ("tracing, 48 layers", ("depth", "flat train step", "trace, times linen_stack's", 48), _hundredths),
    ("compiling, 48 layers", ("depth", "flat train step", "compile, times linen_stack's", 48), _hundredths),
    ("compiling, 64 layers", ("depth", "flat train step", "compile, times linen_stack's", 64), _hundredths),
    ("processor time of a step, 8 layers", ("steps", "flat train step", "processor time, times linen_stack's", 8), _hundredths),
    ("the same, a loop in a loop", ("steps", "nested train step", "processor time, times linen_stack's", 8), _hundredths),
    ("TPU memory in MiB, gradient, 8 layers", ("tpu", "flat gradient", "temp", 8), _hundredths),
    ("the same, a loop in a loop", ("tpu", "nested gradient", "temp", 8), _hundredths),
)


def table(figures: Iterable[Figure]) -> str:
  """The rows of which there are figures, in Markdown."""
  values = {figure.key: figure.value for figure in figures}
  lines = [f"| a train step | {' | '.join(COLUMNS.values())} |", "| --- |" + " --- |" * len(COLUMNS)]
  for title, (benchmark, case, measure, depth), write in ROWS:
    row = [values.get((benchmark, case, name, measure, depth)) for name in COLUMNS]
    if any(value is not None for value in row):
      cells = ("" if value is None else write(value) for value in row)
      lines.append("| " + " | ".join([title, *cells]) + " |")
  return "\n".join(lines) + "\n"


def section(path: pathlib.Path) -> str:
  """The table of a file of results and what it was measured on."""
  about = json.loads(path.read_text(encoding="utf-8"))["about"]
  machine = about.pop("machine")
  versions = ", ".join(f"{name} {version}" for name, version in about.items())
  return f"{table(results.load(path))}\nMeasured with {versions} on {machine}.\n"


def main(argv: list[str]) -> int:
  path = pathlib.Path(argv[1]) if len(argv) > 1 else REFERENCE
  text = section(path)
  if not _WRITE.value:
    print(text, end="")
    return 0
  readme = ROOT / "README.md"
  before = readme.read_text(encoding="utf-8")
  if not _SECTION.search(before):
    raise app.UsageError(f"{readme.name} has no lines <!-- benchmarks --> and <!-- end of benchmarks -->")
  plots.draw([figure for figure in results.load(path) if figure.benchmark == "depth"], path.parent)
  readme.write_text(_SECTION.sub(lambda found: found[1] + text + found[2], before), encoding="utf-8")
  return 0


if __name__ == "__main__":
  app.run(main)
