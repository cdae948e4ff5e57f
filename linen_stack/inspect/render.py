"""Reports as text: plain tables for print and logs, the same tables for rich, and sizes that people can read."""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text


def size(count: float) -> str:
  """A number of bytes in words: "640 B", "1.5 KiB", "12.0 GiB"."""
  for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
    if abs(count) < 1024 or unit == "TiB":
      return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
    count /= 1024
  raise AssertionError("unreachable")


def duration(seconds: float) -> str:
  """A time in words: "850 us", "12.3 ms", "2.41 s"."""
  for factor, unit in ((1.0, "s"), (1e3, "ms")):
    if seconds * factor >= 1:
      return f"{seconds * factor:.{max(0, 2 - int(math.log10(seconds * factor)))}f} {unit}"
  return f"{seconds * 1e6:.3g} us"


def shape(dims: Sequence[int]) -> str:
  """A shape as it is written in docstrings: "[8, 128]"."""
  return f"[{', '.join(map(str, dims))}]"


def plural(count: int, word: str) -> str:
  """A count with its noun: "1 layer", "3 layers"."""
  return f"{count} {word}" if count == 1 else f"{count} {word}s"


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells under a head. Columns named in `right` are numbers."""

  head: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  title: str = ""
  right: tuple[str, ...] = ()

  def __str__(self) -> str:
    lines = [self.head, *self.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
    text = ["  ".join(cell.rjust(width) if name in self.right else cell.ljust(width)
                      for cell, width, name in zip(line, widths, self.head)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(([self.title] if self.title else []) + text)

  def __rich__(self) -> RichTable:
    table = RichTable(title=self.title or None, title_justify="left")
    for name in self.head:
      table.add_column(name, justify="right" if name in self.right else "left", overflow="fold")
    for row in self.rows:
      table.add_row(*(Text(cell) for cell in row))
    return table


def joined(parts: Sequence[Any]) -> str:
  """Tables and lines as one text, an empty line between them."""
  return "\n\n".join(str(part) for part in parts if str(part))


def rich(parts: Sequence[Any]) -> Group:
  """Tables and lines as one thing that rich prints."""
  return Group(*(Text(part) if isinstance(part, str) else part for part in parts if str(part)))
