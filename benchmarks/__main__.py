"""`python -m benchmarks [NAME ...]`: runs benchmarks, shows their figures, compares them with earlier ones."""
from __future__ import annotations

import difflib
import pathlib
import sys
import time

from absl import app, flags
from rich.console import Console

from benchmarks import plots, results, suites

_QUICK = flags.DEFINE_bool("quick", False, "Fewer depths, layouts and rounds: under three minutes.")
_JSON = flags.DEFINE_string("json", None, "File that the figures are written to.")
_COMPARE = flags.DEFINE_string("compare", None, "File of earlier figures: status 1 where an exact one got worse by over 1 %.")
_PLOT = flags.DEFINE_string("plot", None, "Folder that pictures are drawn into.")


def main(argv: list[str]) -> int:
  names = argv[1:] or list(suites.SUITES)
  for name in names:
    if name not in suites.SUITES:
      near = difflib.get_close_matches(name, suites.SUITES, n=1)
      raise app.UsageError(f"no benchmark {name!r}; " + (f"did you mean {near[0]!r}?" if near else
                                                         f"there are {', '.join(suites.SUITES)}"))
  for path in filter(None, (_JSON.value, _PLOT.value)):
    if not pathlib.Path(path).absolute().parent.is_dir():
      raise app.UsageError(f"cannot write {path}: there is no folder {pathlib.Path(path).absolute().parent}")
  try:
    before = results.load(pathlib.Path(_COMPARE.value)) if _COMPARE.value else []
  except (OSError, ValueError) as error:
    raise app.UsageError(f"--compare: {error}") from None
  if _PLOT.value:
    plots.require()
  log, figures = Console(stderr=True), []
  for name in names:
    start = time.perf_counter()
    for figure in suites.SUITES[name](_QUICK.value):
      figures.append(figure)
      if log.is_terminal:
        log.print(f"{name}: {figure.case} {figure.contender} {figure.measure}", end="\r", overflow="crop", no_wrap=True)
    log.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)
    if _JSON.value:  # after each, so that an interrupted run has what it measured
      results.save(pathlib.Path(_JSON.value), figures)
  results.show([*figures, *results.exponents(figures)])
  if _PLOT.value:
    plots.draw(figures, pathlib.Path(_PLOT.value))
  lines = results.worse(figures, before)
  for line in lines:
    print(f"worse: {line}")
  if _COMPARE.value and not lines:
    print(f"no exact figure is worse than in {_COMPARE.value}")
  return 1 if lines else 0


def run() -> None:
  app.run(main, flags_parser=lambda argv: flags.FLAGS(argv))


if __name__ == "__main__":
  sys.exit(run())
