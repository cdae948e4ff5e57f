"""`convert`: a checkpoint in another layout, from a Hugging Face folder, or as one."""
from __future__ import annotations

from collections.abc import Sequence
import pathlib

from absl import flags
from flax.errors import FlaxError
import jax

from linen_stack import conversion, stored
from linen_stack.checkpoints import CheckpointError
from linen_stack.commands import CommandError, UsageError, options, plain_errors
from linen_stack.commands.progress import Progress
from linen_stack.config import StackConfig
from linen_stack.convert import index_map

CHECKPOINT, FOLDER = "checkpoint", "huggingface"


def define_flags(values: flags.FlagValues) -> None:
  options.define_set(values)
  flags.DEFINE_string("config", None, "the config of DST, a YAML file or the name of a shipped config; by default that "
                      "of SRC", flag_values=values)
  flags.DEFINE_enum("to", CHECKPOINT, [CHECKPOINT, FOLDER], "what DST is: a checkpoint of this library, or a Hugging "
                    "Face folder", flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  convert(args[0], args[1], config=values.config, assignments=values.set, to=values.to)


def convert(source: str, target: str, *, config: str | None = None, assignments: Sequence[str] = (),
            to: str = CHECKPOINT) -> pathlib.Path:
  """Writes what is at `source` to `target`, which must not exist. Returns its path.

  Raises CommandError for everything that the user can set right.
  """
  src, dst = pathlib.Path(source), pathlib.Path(target)
  if to == FOLDER and (config is not None or assignments):
    raise UsageError("--config and --set lay out a checkpoint; a Hugging Face folder has one layout, so leave them out")
  if dst.exists():
    raise CommandError(f"{dst} is there already; give a new folder")

  def change(of_source: StackConfig) -> StackConfig:
    with plain_errors(ValueError, TypeError, OSError):
      return (of_source if config is None else StackConfig.from_yaml(config)).override(assignments)

  with plain_errors(CheckpointError, ValueError, TypeError, OSError, ImportError, FlaxError):
    if not conversion.is_folder(src):
      found = conversion.read_checkpoint(src)
    elif to == FOLDER:
      raise CommandError(f"{src} is a Hugging Face folder, and so is DST; there is nothing to convert")
    else:
      found = conversion.read_folder(src, change)
    wanted = found.config if to == FOLDER else change(found.config)
    print(_describe(src, found, wanted))
    with Progress("MiB", 0, _mib(found.nbytes), 1, "MiB") as progress:
      tell = lambda done: progress.step(done // 2**20)
      if to == FOLDER:
        conversion.write_folder(found, dst, tell)
      else:
        dst = conversion.write_checkpoint(found, dst, wanted, tell)
      progress.step(_mib(found.nbytes))
  print(f"wrote {dst}")
  return dst


def _describe(src: pathlib.Path, found: conversion.Source, wanted: StackConfig) -> str:
  """What there is, and what becomes of its layout."""
  sizes = [f"{name} {sum(map(stored.nbytes, jax.tree.leaves(tree))) / 2**20:,.1f} MiB"
           for name, tree in found.items.items()]
  options = [(key, getattr(found.config.stack, key), getattr(wanted.stack, key)) for key in ("scan", "param_axis")]
  changes = [f"{key} {before} -> {after}" for key, before, after in options if before != after]
  plan = wanted.plan()
  ours, theirs = ([(place.path, place.axes) for place in index_map(of)] for of in (plan, found.model.stack.plan))
  changes += ["other segments"] * (ours != theirs)
  return f"{src}: {', '.join(sizes)}\nlayout: {', '.join(changes) or 'as it is'}\n\n{plan.table()}\n"


def _mib(size: int) -> int:
  return -(-size // 2**20)
