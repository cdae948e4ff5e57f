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
  """One picture per benchmark and case with seconds at several depths, `<benchmark>-<case>.svg`; returns their paths."""
  import matplotlib  # pylint: disable=g-import-not-at-top  # optional
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # pylint: disable=g-import-not-at-top

  matplotlib.rcParams["svg.hashsalt"] = "linen_stack"  # equal figures give equal files
  folder.mkdir(exist_ok=True)
  # benchmark and case -> measure -> contender -> (depth, seconds)
  cases: dict[tuple[str, str], dict[str, dict[str, list[tuple[int, float]]]]] = {}
  for figure in figures:
    if figure.depth and figure.unit == "s":
      measures = cases.setdefault((figure.benchmark, figure.case), {})
      measures.setdefault(figure.measure, {}).setdefault(figure.contender, []).append((figure.depth, figure.value))
  paths = []
  for (benchmark, case), measures in cases.items():
    measures = {name: of for name, of in measures.items() if max(map(len, of.values())) > 2}
    if not measures:
      continue
    plot, panels = plt.subplots(1, len(measures), figsize=(3.2 * len(measures), 3), layout="constrained", squeeze=False)
    for axes, (measure, by_contender) in zip(panels[0], measures.items()):
      for name, points in by_contender.items():
        own = dict(marker="o", markersize=3, linewidth=2.5 if name == "linen_stack" else 1)
        axes.plot(*zip(*sorted(points)), label=name, **own)
      axes.set(xscale="log", yscale="log", xlabel="layers", title=measure)
      ticks = [2**i for i in range(1, 8)]
      axes.set_xticks(ticks, map(str, ticks), minor=False)
      axes.minorticks_off()
    panels[0][0].set_ylabel("seconds")
    panels[0][0].legend(frameon=False, fontsize="small")
    path = folder / f"{benchmark}-{case}.svg".replace(" ", "-")
    plot.savefig(path, metadata={"Date": None})
    plt.close(plot)
    paths.append(path)
  return paths
