"""Reports as pictures: memory against time as SVG or PNG, and one self-contained page on the policies of a model."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
import html
import math
from typing import Any

from linen_stack.inspect import render
from linen_stack.inspect.chips import Topology
from linen_stack.plan import Plan

Point = tuple[str, int, float, bool]
"""A policy: its name, bytes of device memory, seconds a step, and whether it fits."""

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#5b6770",
           "#0b9fc4", "#2f7f86", "#b5446e", "#7d8c1f", "#8a8fd6", "#c96f3b")
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #566070; --paper: #fff; --faint: #eceef1; --line: #9aa3ad; --bad: #b3261e;
  --dot: #4269d0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ee; --dim: #a3adba; --paper: #14181f; --faint: #2a303a; --line: #6b7480; --bad: #ff8a80; --dot: #8aa8ff; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1240px; padding: 0 1.5rem; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; color: var(--dim); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { font-weight: 600; border-color: var(--line); }
tr.over td { color: var(--bad); } .scroll { overflow-x: auto; }
.plan { display: flex; gap: 3px; height: 40px; } .segment { display: flex; min-width: 2px; }
.layer { flex: 1; min-width: 0; } .layer + .layer { border-left: 1px solid #fff8; }
.bars { display: grid; grid-template-columns: max-content minmax(6rem, 1fr) max-content; gap: .2rem .75rem; align-items: center; }
.bar { display: contents; } .name { text-align: right; } .track { display: flex; height: 20px; background: var(--faint); }
.host { background-image: repeating-linear-gradient(45deg, #fffb 0 3px, #fff0 3px 6px); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .5rem 0; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: .35rem; vertical-align: -1px; }
svg { fill: var(--ink); } .paper { fill: var(--paper); } .grid { stroke: var(--faint); }
.fits { color: var(--dot); } .over { color: var(--bad); }
@media (max-width: 800px) {
  .bars { display: block; } .name { text-align: left; } .track { grid-row: 2; grid-column: 1 / -1; height: 14px; }
  .bar { display: grid; grid-template-columns: 1fr max-content; column-gap: 1rem; margin-bottom: .4rem; } }
"""


def page(plan: Plan, title: str, topology: Topology, rows: Sequence[Any]) -> str:
  """The page.

  Args:
    plan: the layers, drawn to scale.
    title: what was compiled.
    rows: for each policy its `name`, its `estimate` with residuals, and its `memory`.
  """
  points = [(row.name, row.memory.hbm, row.estimate.seconds, row.memory.fits) for row in rows]
  return "\n".join([
      "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">', f"<title>{_text(title)}</title>",
      '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<style>{_STYLE}</style></head><body>",
      f"<h1>{_text(title)}</h1>",
      f"<p>{topology.num_devices} devices of {render.size(topology.chip.hbm)}. Sizes are those of one device.</p>",
      "<h2>Layers</h2>", *_plan(plan), "<h2>What the backward pass finds, by name and place</h2>",
      "<p>Hatched: waits in host memory. All other bytes wait on the device.</p>", *_bars(rows),
      "<h2>Memory against time</h2>", f'<div class="scroll">{chart(points, topology.chip.hbm)}</div>',
      "<h2>Policies</h2>", *_table(rows, topology), "</body></html>", ""])


def _text(value: Any) -> str:
  return html.escape(str(value))


def _plan(plan: Plan) -> Iterable[str]:
  """Segments as boxes as wide as they have layers, a stripe for each layer, a colour for each kind."""
  colors: dict[Any, str] = {}
  for segment in plan:
    for run in segment.runs:
      colors.setdefault(run.spec, _COLORS[len(colors) % len(_COLORS)])
  told = [f"{segment.name}: {render.plural(segment.num_layers, 'layer')}"
          + (f", {segment.length} x {len(segment.block)}" if segment.is_cycle and segment.length > 1 else "")
          for segment in plan]
  # Above the boxes, of which some are too narrow for words.
  yield f"<p>{_text('; '.join(told))}</p>"
  yield '<div class="plan">'
  for segment, words in zip(plan, told):
    block = "".join(f'<div class="layer" style="background:{colors[spec]}" title="{_text(f"{words}: {_kind(spec)}")}"></div>'
                    for spec in segment.block)
    yield f'<div class="segment" style="flex:{segment.num_layers} 1 0">{block * segment.length}</div>'
  yield "</div>"
  yield _legend((color, _kind(spec)) for spec, color in colors.items())


def _kind(spec: Any) -> str:
  cls = getattr(spec.cls, "__name__", str(spec.cls))
  return f"{spec.name} ({cls})" if spec.name else cls


def _legend(entries: Iterable[tuple[str, str]]) -> str:
  return ('<div class="legend">' + "".join(f'<span><i style="background:{color}"></i>{_text(name)}</span>'
                                           for color, name in entries) + "</div>")


def _bars(rows: Sequence[Any]) -> Iterable[str]:
  """A bar for each policy, as long as what it keeps, a part for each name and place."""
  kept = {row.name: _kept(row.estimate) for row in rows}
  sums: dict[str, float] = {}
  for parts in kept.values():
    for (name, _), size in parts.items():
      sums[name] = sums.get(name, 0.0) + size
  # The names that matter have a colour; what is left is one part.
  named = sorted(sums, key=lambda name: -sums[name])[:len(_COLORS) - 1]
  colors = {name: _COLORS[i] for i, name in enumerate(named)}
  order = {name: i for i, name in enumerate([*named, "other"])}
  longest = max((sum(parts.values()) for parts in kept.values()), default=0.0) or 1.0
  yield '<div class="bars">'
  for row in rows:
    parts: dict[tuple[str, str], float] = {}
    for (name, place), size in kept[row.name].items():
      key = (name if name in colors else "other", place)
      parts[key] = parts.get(key, 0.0) + size
    cells = "".join(
        f'<div class="{place}" style="width:{100 * size / longest:.3f}%;background-color:{colors.get(name, "#b9bec6")}" '
        f'title="{_text(f"{name}: {render.size(size)} on {place}")}"></div>'
        for (name, place), size in sorted(parts.items(), key=lambda item: (item[0][1], order[item[0][0]])))
    device, host = (sum(size for (_, place), size in parts.items() if place == at) for at in ("device", "host"))
    told = render.size(device) + (f" + {render.size(host)} host" if host else "")
    yield (f'<div class="bar"><div class="name">{_text(row.name)}</div><div class="track">{cells}</div>'
           f'<div class="told">{_text(told)}</div></div>')
  yield "</div>"
  other = [("#b9bec6", "other")] if len(sums) > len(named) else []
  yield _legend([*((colors[name], name) for name in named), *other])


def _kept(estimate: Any) -> dict[tuple[str, str], float]:
  """Bytes on one device by name and place."""
  report = estimate.residuals
  shards = max(1.0, report.total() / max(1, estimate.device + estimate.host))
  return {(name, place): size / shards for place in ("device", "host") for name, size in report.by_name(place).items()}


def _table(rows: Sequence[Any], topology: Topology) -> Iterable[str]:
  head = ("policy", "HBM", "of device", "arguments", "temp", "host", "kept", "recomputed FLOPs", "est. step", "compiled in")
  yield f'<div class="scroll"><table><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>'
  for row in rows:
    memory, estimate = row.memory, row.estimate
    known = memory.out_of_memory is None
    cells = (row.name, ("" if known else "at least ") + render.size(memory.hbm), f"{memory.hbm / topology.chip.hbm:.1%}",
             render.size(memory.argument) if known else "-", render.size(memory.temp) if known else "-",
             render.size(memory.host if known else estimate.host), render.size(estimate.device),
             f"{estimate.recomputed / estimate.cost.flops:.1%}", render.duration(estimate.seconds),
             f"{memory.seconds:.0f} s")
    yield (f'<tr{"" if memory.fits else " class=over"}>' + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
  yield "</table></div>"


# Memory against time ------------------------------------------------------------------------------------------------------


def chart(points: Sequence[Point], limit: int) -> str:
  """An SVG: a dot for each policy, across its memory, up its time on a logarithmic scale; a line where the device ends."""
  # Six and a half units for a letter: as wide as they are on average at this size.
  right = max(160, 40 + round(6.5 * max((len(name) for name, *_ in points), default=0)))
  width, height, left, top, bottom = 640 + right, 428, 64, 24, 46
  most = max([limit, *(size for _, size, _, _ in points)]) * 1.04
  times = [seconds * 1e3 for _, _, seconds, _ in points] or [1.0]
  fast, slow = math.log(min(times) * 0.96), math.log(max(times) * 1.04)
  x = lambda size: left + (width - left - right) * size / most
  y = lambda ms: height - bottom - (height - top - bottom) * (math.log(ms) - fast) / (slow - fast)
  out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
         'font-family="system-ui, sans-serif" font-size="12" fill="#1d2430">',
         f'<rect class="paper" width="{width}" height="{height}" fill="#fff"/>']
  for value in _ticks(0, most / 2**30):
    out.append(f'<path d="M{x(value * 2**30):.1f} {top}V{height - bottom}" class="grid" stroke="#eceef1"/>'
               f'<text x="{x(value * 2**30):.1f}" y="{height - bottom + 16}" text-anchor="middle">{value:g}</text>')
  for value in _ticks(math.exp(fast), math.exp(slow)):
    out.append(f'<path d="M{left} {y(value):.1f}H{width - right}" class="grid" stroke="#eceef1"/>'
               f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
  out += [f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">device memory, GiB</text>',
          f'<text transform="translate(14 {(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">'
          "estimated step, ms</text>",
          f'<g class="over" color="#b3261e"><path d="M{x(limit):.1f} {top}V{height - bottom}" stroke="currentColor" '
          f'stroke-dasharray="5 4"/><text x="{x(limit):.1f}" y="{top - 6}" text-anchor="middle" fill="currentColor">'
          f"{render.size(limit)}</text></g>"]
  dots = sorted(((y(seconds * 1e3), x(size), name, fits) for name, size, seconds, fits in points))
  for (py, px, name, fits), at in zip(dots, _spread([dot[0] for dot in dots], 14, height - bottom - 4)):
    group = 'class="fits" color="#4269d0"' if fits else 'class="over" color="#b3261e"'
    out.append(f'<g {group} fill="currentColor"><path d="M{px:.1f} {py:.1f}L{width - right + 8} {at:.1f}H{width - right + 22}" '
               f'fill="none" stroke="currentColor" stroke-opacity=".4"/><circle cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
               f'<text x="{width - right + 26}" y="{at + 4:.1f}">{_text(name)}</text></g>')
  return "\n".join([*out, "</svg>"])


def _spread(wanted: Sequence[float], least: float, end: float) -> list[float]:
  """Rising positions near the wanted ones, at least `least` apart, none beyond `end`."""
  at: list[float] = []
  for position in wanted:
    at.append(max(position, at[-1] + least) if at else position)
  for i in range(len(at) - 1, -1, -1):
    at[i] = min(at[i], end if i == len(at) - 1 else at[i + 1] - least)
  return at


def _ticks(start: float, end: float) -> list[float]:
  """Round numbers between two: about six of them evenly, or 1, 2 and 5 of each power where they span several."""
  if start > 0 and end / start > 4:
    powers = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5) if start <= factor * 10.0**power <= end]
  step = 10.0 ** math.floor(math.log10((end - start) / 6))
  step *= next(factor for factor in (1, 2, 5, 10) if (end - start) / (step * factor) <= 7)
  return [round(i * step, 10) for i in range(math.ceil(start / step), math.floor(end / step) + 1)]


def png(path: str, points: Sequence[Point], limit: int) -> None:
  """The same as a PNG. Raises ImportError without matplotlib."""
  from matplotlib.figure import Figure  # pylint: disable=g-import-not-at-top  # only for this
  figure = Figure(figsize=(9, 4.6), layout="constrained")
  axes = figure.subplots()
  for name, size, seconds, fits in points:
    color = _COLORS[0] if fits else "#b3261e"
    axes.plot(size / 2**30, seconds * 1e3, "o", color=color)
    axes.annotate(name, (size / 2**30, seconds * 1e3), (6, 3), textcoords="offset points", fontsize=8, color=color)
  axes.axvline(limit / 2**30, color="#b3261e", linestyle="--", label=f"device: {render.size(limit)}")
  axes.set(xlabel="device memory, GiB", ylabel="estimated step, ms", yscale="log", xlim=(0, None))
  axes.legend(loc="lower right")
  figure.savefig(path, format="png", dpi=150)
