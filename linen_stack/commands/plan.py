"""`plan`: the segments of a model and its parameters, from shapes alone."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import math
from typing import Any

from absl import flags
from flax import linen as nn
import jax
import numpy as np

from linen_stack.commands import options
from linen_stack.config import StackConfig


def define_flags(values: flags.FlagValues) -> None:
  options.define_set(values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  config = options.load_config(args[0], values.set)
  model, variables = options.build(config)
  print(describe(config, model, variables))


def describe(config: StackConfig, model: nn.Module, variables: Any) -> str:
  """The plan's table, and a row per variable: path, shape, dtype, logical axes, size."""
  stack = model.stack
  how = [f"{key} {value}" for key, value in config.to_dict()["stack"].items() if value not in ([], None)]
  lines = [stack.plan.table(), "", f"stack: {', '.join(how)}", "", *_rows(variables)]
  return "\n".join(lines)


def summary(variables: Any) -> str:
  """The number of parameters and their size."""
  leaves = jax.tree.leaves(nn.unbox(variables["params"]))
  count = sum(math.prod(leaf.shape) for leaf in leaves)
  size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
  return f"{count:,} parameters, {size / 2**30:,.3f} GiB"


def _rows(variables: Any) -> Iterator[str]:
  rows = [("parameter", "shape", "dtype", "logical axes", "number")]
  for collection, tree in sorted(variables.items(), key=lambda entry: entry[0] != "params"):
    prefix = "" if collection == "params" else f"({collection}) "
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)):
      names = getattr(leaf, "names", None)
      value = nn.unbox(leaf)
      axes = " ".join(str(name) if name is not None else "-" for name in names) if names else "-"
      keys = "/".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
      shape = f"[{', '.join(map(str, value.shape))}]"
      rows.append((prefix + keys, shape, np.dtype(value.dtype).name, axes, f"{math.prod(value.shape):,}"))
  widths = [max(map(len, column)) for column in zip(*rows)]
  for i, row in enumerate(rows):
    *cells, number = (cell.ljust(width) for cell, width in zip(row, widths))
    yield "  ".join([*cells, number.strip().rjust(widths[-1])])
    if i == 0:
      yield "  ".join("-" * width for width in widths)
  yield summary(variables)
