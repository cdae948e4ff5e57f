"""Pictures of the figures, drawn by matplotlib (extra `plot`)."""
from __future__ import annotations

from collections.abc import Iterable
import pathlib

from benchmarks.results import Figure


def require() -> None:
  """Raises ImportError, with what to install, where there is no matplotlib."""
  try:
    import matplotlib  # pylint: disable=g-import-not-at-top,unused-import  # optional
  except ImportError:
    raise ImportError("--plot needs matplotlib: pip install 'linen_stack[plot]'") from None


def draw(figures: Iterable[Figure], folder: pathlib.Path) -> list[pathlib.Path]:
  """One picture per measure that was taken at several depths, `<case>-<measure>.svg`; returns their paths."""
  import matplotlib  # pylint: disable=g-import-not-at-top  # optional
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # pylint: disable=g-import-not-at-top

  folder.mkdir(exist_ok=True)
  series: dict[tuple[str, str, str], dict[str, list[tuple[int, float]]]] = {}
  for figure in figures:
    if figure.depth and figure.unit == "s":
      by_contender = series.setdefault((figure.benchmark, figure.case, figure.measure), {})
      by_contender.setdefault(figure.contender, []).append((figure.depth, figure.value))
  paths = []
  for (benchmark, case, measure), by_contender in series.items():
    if max(map(len, by_contender.values())) < 3:
      continue
    plot, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, points in by_contender.items():
      own = dict(marker="o", markersize=3, linewidth=2.5 if name == "linen_stack" else 1)
      axes.plot(*zip(*sorted(points)), label=name, **own)
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel=measure, title=f"{benchmark}: {case}")
    ticks = sorted({depth for points in by_contender.values() for depth, _ in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    path = folder / f"{benchmark}-{case}-{measure}.svg".replace(" ", "-")
    plot.savefig(path)
    plt.close(plot)
    paths.append(path)
  return paths
