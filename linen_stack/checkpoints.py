"""Checkpoints of training: folders `<out>/<step>`, written by orbax, each whole or not there at all.

    <out>/<step>/variables     the model's variables
    <out>/<step>/optimizer     the optimiser's state
    <out>/<step>/config        the config that made the model, as JSON
    <out>/<step>/text          what tells the text that it was trained on from another, as JSON

Orbax writes a step into a temporary folder and renames it when all of it is there.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import json
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from linen_stack import convert
from linen_stack.config import StackConfig

KEEP = 2


class CheckpointError(Exception):
  """A checkpoint that cannot be read or written, in words for the user."""


def steps(folder: str | pathlib.Path) -> list[int]:
  """The steps of which `folder` holds a checkpoint, in order."""
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    return []
  return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def find(path: str | pathlib.Path) -> pathlib.Path:
  """The folder of one step: `path` itself, or the last step in it. Raises CheckpointError where there is none."""
  path = pathlib.Path(path).absolute()
  if not path.exists():
    raise CheckpointError(f"no checkpoint at {path}: there is no such file or folder")
  if path.is_dir() and (path / "variables").is_dir():
    return path
  found = steps(path)
  if not found and (path / "config.json").is_file():
    raise CheckpointError(f"no checkpoint in {path}: it is a Hugging Face folder; "
                          f"`python -m linen_stack convert {path} NEW` makes a checkpoint of it")
  if not found:
    raise CheckpointError(f"no checkpoint in {path}: it holds no step that was written to the end")
  return path / str(found[-1])


def check_writable(folder: str | pathlib.Path) -> None:
  """Raises CheckpointError where the folder of a run cannot be made or written into. Leaves nothing behind."""
  folder = pathlib.Path(folder).absolute()
  there = next(path for path in (folder, *folder.parents) if path.exists())
  try:
    tempfile.TemporaryFile(dir=there).close()
  except OSError as error:
    raise CheckpointError(f"cannot write checkpoints to {folder}: {reason(error)}") from error


def save(folder: str | pathlib.Path, state: Mapping[str, Any], config: StackConfig,
         text: Mapping[str, Any]) -> pathlib.Path:
  """Writes a checkpoint of the state's step, and then removes all but the last `KEEP`.

  Raises CheckpointError where it cannot be written; earlier checkpoints are as they were.
  """
  folder = pathlib.Path(folder).absolute()
  step = int(state["step"])
  try:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    check_space(folder, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    with _interrupts_wait(), quiet(after_failure=True), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
      writer.save(folder / str(step), ocp.args.Composite(
          variables=ocp.args.StandardSave(state["variables"]), optimizer=ocp.args.StandardSave(state["optimizer"]),
          config=ocp.args.JsonSave(config.to_dict()), text=ocp.args.JsonSave(dict(text))), force=True)
  except (OSError, ValueError) as error:  # tensorstore says ValueError where a disk is full
    last = steps(folder)
    kept = f"the last whole checkpoint is {folder / str(last[-1])}" if last else "there is no earlier one"
    raise CheckpointError(f"cannot write a checkpoint to {folder / str(step)}: {reason(error)}; {kept}") from error
  for old in steps(folder)[:-KEEP]:
    shutil.rmtree(folder / str(old), ignore_errors=True)
  return folder / str(step)


def load_config(path: pathlib.Path) -> StackConfig:
  """The config of a checkpoint. Raises CheckpointError where it has none, or one that cannot be used."""
  return _as_config(_load_json(path, "config"), path)


def load_text(path: pathlib.Path) -> dict[str, Any]:
  """The fingerprint of the text of a checkpoint."""
  return _load_json(path, "text")


def load(path: pathlib.Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
  """The variables, and where `abstract` has it the optimiser's state, of the shapes in `abstract`.

  Leaves go where their sharding in `abstract` says, wherever they were when they were written; without one, to the first
  device. Raises CheckpointError where the checkpoint holds something else.
  """
  wanted = {name: abstract[name] for name in ("variables", "optimizer") if name in abstract}
  stored = _check_shapes(path, wanted)
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), wanted)
  # A model that came from elsewhere may have leaves of other dtypes than `init` gives; they are not cast.
  wanted["variables"] = jax.tree_util.tree_map_with_path(
      lambda keys, x: jax.ShapeDtypeStruct(x.shape, stored[_path(keys)], sharding=x.sharding), wanted["variables"])
  with reading(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
    restored = reader.restore(path, ocp.args.Composite(**{k: ocp.args.StandardRestore(v) for k, v in wanted.items()}))
  step = int(path.name) if path.name.isdecimal() else 0  # a copy under another name serves to generate
  return {**{name: restored[name] for name in wanted}, "step": jnp.asarray(step, jnp.int32)}


def _check_shapes(path: pathlib.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
  """The dtypes of the stored variables, by path. Raises CheckpointError where they are not those of the model."""
  for name in wanted:
    if not (path / name).is_dir():
      raise CheckpointError(f"the checkpoint {path} is not whole: it has no {name}")
  with reading(path), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
    stored = reader.metadata(path / "variables").item_metadata.tree
  check_same_shapes(path, stored, wanted["variables"])
  return {_path(keys): leaf.dtype for keys, leaf in jax.tree_util.tree_leaves_with_path(stored)}


def check_same_shapes(path: pathlib.Path, stored: Any, expected: Any) -> None:
  """Raises CheckpointError, with a guess of the layout, where the leaves of a checkpoint are not those of a model."""
  ours, theirs = ({_path(keys): tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
                  for tree in (expected, stored))
  wrong = [f"{key} is {theirs.get(key, 'missing')} and should be {ours.get(key, 'absent')}"
           for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
  if wrong:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise CheckpointError(f"the checkpoint {path} does not fit this model: {'; '.join(wrong[:3])}{more}"
                          f"{_layout(path, stored)}")


def _layout(path: pathlib.Path, stored: Any) -> str:
  """What the variables of a checkpoint look like, where they are laid out in another way than its config says."""
  try:
    _, stack = load_config(path).build()
  except (ValueError, TypeError, CheckpointError):
    return ""  # without a config that can be built there is nothing to compare with
  try:
    convert.layer_axes(stack, stored)
  except ValueError as error:
    return f". {str(error).splitlines()[0].rstrip(':')}"
  return ""


def _path(keys: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def _load_json(path: pathlib.Path, item: str) -> dict[str, Any]:
  file = path / item / "metadata"
  try:
    return json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise CheckpointError(f"the checkpoint {path} has no {item} ({file} is missing)") from None
  except ValueError as error:
    raise CheckpointError(f"the checkpoint {path} has a broken {item}: {file}: {error}") from None


def _as_config(config: Any, path: pathlib.Path) -> StackConfig:
  try:
    return StackConfig.from_dict(config)
  except (TypeError, ValueError) as error:
    raise CheckpointError(f"the config of the checkpoint {path} cannot be used: {error}") from error


def check_space(folder: pathlib.Path, needed: int) -> None:
  """Raises OSError where the disk is too full for so many bytes: sooner and in clearer words than a write half done."""
  free = shutil.disk_usage(folder).free
  if needed > free:
    raise OSError(errno.ENOSPC, f"no space left on device: it takes {needed / 2**20:,.1f} MiB "
                                f"and {free / 2**20:,.1f} MiB are free")


def _remove_unfinished(folder: pathlib.Path) -> None:
  """Removes what interrupted writes have left behind."""
  for entry in folder.iterdir():
    if ".orbax-checkpoint-tmp" in entry.name:
      shutil.rmtree(entry)


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
  """Turns what goes wrong in reading a checkpoint into CheckpointErrors."""
  try:
    with quiet():
      yield
  except (OSError, ValueError, KeyError) as error:
    raise CheckpointError(f"cannot read the checkpoint {path}: {reason(error)}") from error


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
  """Lets a write come to its end before Ctrl-C is heeded; a second Ctrl-C ends it at once."""
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread is interrupted
    return
  interrupted = False

  def remember(signum, frame):
    del signum, frame
    nonlocal interrupted
    if interrupted:
      raise KeyboardInterrupt
    interrupted = True

  handler = signal.signal(signal.SIGINT, remember)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
  if interrupted:
    raise KeyboardInterrupt


@contextlib.contextmanager
def quiet(after_failure: bool = False) -> Iterator[None]:
  """Leaves it to the caller to report errors, once: orbax logs what it raises, with tracebacks.

  Of a write that failed, threads are still under way. They report to an event loop that is gone and to executors that
  are shut down, each with a traceback; hence `after_failure`, with which the filters stay in that case.
  """
  level, hook = logging.get_verbosity(), sys.unraisablehook

  def restore():
    logging.set_verbosity(level)
    sys.unraisablehook = hook

  def without_late_reports(unraisable):
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
      hook(unraisable)

  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = without_late_reports
  try:
    yield
  except BaseException:
    if not after_failure:
      restore()
    raise
  restore()


def reason(error: BaseException) -> str:
  """An error as one line."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror[:1].lower() + error.strerror[1:]
  text = str(error).strip() or type(error).__name__
  if "No space left on device" in text:
    return "no space left on device"
  return text.splitlines()[0][:300]
