"""Leaves of checkpoints that are never whole in memory: read from orbax in pieces, written to orbax block by block.

A leaf to write has `shape`, `dtype` and `__array__`. If it is large and has `block_shape` and `blocks()`, pairs (index,
values) that together fill it, it is written block by block: of layers that are stacked, one layer after the other.

Orbax makes a checkpoint with its metadata and with arrays that are empty; the values are written into these afterwards.
All of that happens in a folder of another name, which is renamed when everything is there.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import functools
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from linen_stack import checkpoints
from linen_stack.checkpoints import CheckpointError

# Up to this size a leaf is put together in memory and written as one piece, of which fewer and larger files come.
SMALL = 8 * 2**20


def path_of(keys: tuple[Any, ...]) -> str:
  """The path of a leaf: the same in a tree with named tuples and in what orbax stores of it."""
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def nbytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


# Reading --------------------------------------------------------------------------------------------------------------


class Item:
  """The arrays of one item of a checkpoint (`variables`, `optimizer`). Raises CheckpointError where it is broken."""

  def __init__(self, checkpoint: pathlib.Path, name: str):
    self.checkpoint, self.folder = checkpoint, checkpoint / name
    if not self.folder.is_dir():
      raise CheckpointError(f"the checkpoint {checkpoint} is not whole: it has no {name}")
    with checkpoints.reading(checkpoint), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
      self.tree = reader.metadata(self.folder).item_metadata.tree
    self._leaves = {path_of(keys): StoredLeaf(self, metadata)
                    for keys, metadata in jax.tree_util.tree_leaves_with_path(self.tree)}
    self._kept: tuple[StoredLeaf, Any, np.ndarray] | None = None

  def like(self, abstract: Any) -> Any:
    """The leaves in the structure of `abstract`. Raises CheckpointError where the checkpoint holds something else."""
    checkpoints.check_same_shapes(self.checkpoint, self.tree, abstract)
    return jax.tree_util.tree_map_with_path(lambda keys, _: self._leaves[path_of(keys)], abstract)

  def read(self, leaf: StoredLeaf, region: tuple[slice, ...]) -> np.ndarray:
    """A part of a leaf. The last one is kept: what is stored in one piece has to be read whole for each layer."""
    if self._kept is None or self._kept[0] is not leaf or self._kept[1] != region:
      self._kept = None
      with checkpoints.reading(self.checkpoint):
        self._kept = (leaf, region, leaf.store[region].read().result())
    return self._kept[2]


class StoredLeaf:
  """A stored array, read when it is indexed."""

  def __init__(self, item: Item, metadata: Any):
    self._item, self._name = item, metadata.name
    self.shape, self.dtype = tuple(metadata.shape), np.dtype(metadata.dtype)
    chunk = metadata.storage.chunk_shape if metadata.storage is not None else None
    self.block_shape = self.shape if chunk is None else tuple(map(min, chunk, self.shape))

  @functools.cached_property
  def store(self) -> Any:
    """The array as tensorstore opens it."""
    folder, name = self._item.folder, f"{self._name}/"
    if (folder / "manifest.ocdbt").exists():
      place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": name}
    else:
      place = {"driver": "file", "path": f"{folder}/{name}"}
    return ts.open({"driver": "auto", "kvstore": place}, open=True, read=True).result()

  def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
    """A part of it, by an int or a slice for each axis."""
    # Where a layer is asked for, all of the pieces that hold it are read.
    starts = [i - i % block if isinstance(i, int) else 0 for i, block in zip(index, self.block_shape)]
    region = tuple(slice(start, min(start + block, size)) if isinstance(i, int) else i
                   for i, start, block, size in zip(index, starts, self.block_shape, self.shape))
    inside = tuple(i - start if isinstance(i, int) else slice(None) for i, start in zip(index, starts))
    return self._item.read(self, region)[inside]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del copy
    return np.asarray(self[(slice(None),) * len(self.shape)], dtype)

  def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
    """The pieces in which it is stored."""
    for at in np.ndindex(*(-(-size // block) for size, block in zip(self.shape, self.block_shape))):
      index = tuple(slice(i * block, min((i + 1) * block, size))
                    for i, block, size in zip(at, self.block_shape, self.shape))
      yield index, self[index]


# Writing --------------------------------------------------------------------------------------------------------------


class _Empty:
  """Stands for a leaf of which orbax makes an array without values."""

  def __init__(self, leaf: Any):
    self.leaf, self.shape, self.dtype = leaf, leaf.shape, np.dtype(leaf.dtype)


class _EmptyArrays(ocp.type_handlers.NumpyHandler):
  """Makes arrays without values, and remembers what they are called."""

  def __init__(self):
    super().__init__()
    self.made: list[tuple[Any, str]] = []

  async def serialize(self, values, infos, args=None):
    del args
    # What this returns is run when orbax has made the folder.
    return [ocp.future.CommitFutureAwaitingContractedSignals(self._make(values, infos), name="empty_arrays")]

  async def _make(self, values, infos):
    for empty, info in zip(values, infos):
      leaf = empty.leaf
      await info.await_path_creation()
      await ts.open(
          {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{info.parent_dir / info.name}/"},
           "metadata": {"compressor": None}}, create=True, dtype=ts.dtype(empty.dtype), shape=leaf.shape,
          chunk_layout=ts.ChunkLayout(chunk_shape=[max(size, 1) for size in _chunk(leaf)]))
      self.made.append((leaf, info.name))


def _at_once(leaf: Any) -> bool:
  return nbytes(leaf) <= SMALL or not hasattr(leaf, "blocks")


def _chunk(leaf: Any) -> tuple[int, ...]:
  """The shape of the pieces in which a leaf is written."""
  return tuple(leaf.shape) if _at_once(leaf) else leaf.block_shape


def save(folder: pathlib.Path, step: int, items: Mapping[str, Any], documents: Mapping[str, Any],
         progress: Callable[[int], None]) -> pathlib.Path:
  """Writes the checkpoint `folder/step`. `folder` must not exist; it is there when all of it is written.

  Args:
    items: trees of leaves, which are written one after the other.
    documents: items that are JSON.
    progress: is told how many bytes are written.

  Raises:
    CheckpointError: for a folder that exists, a disk that is too full, and for what goes wrong in writing.
  """
  folder = folder.absolute()
  if folder.exists():
    raise CheckpointError(f"{folder} is there already; give a new folder")
  partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    checkpoints.check_space(folder.parent, sum(map(nbytes, jax.tree.leaves(dict(items)))))
    made, done = _save_empty(partial / str(step), items, documents), 0
    for path, leaf in made:
      for size in _fill(path, leaf):
        done += size
        progress(done)
    partial.rename(folder)
  except (OSError, ValueError) as error:  # tensorstore says ValueError where a disk is full
    raise CheckpointError(f"cannot write {folder}: {checkpoints.reason(error)}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder / str(step)


def _remove_abandoned(folder: pathlib.Path) -> None:
  """Removes what is left of earlier attempts whose processes were killed."""
  for partial in folder.parent.glob(f".{folder.name}.partial-*"):
    try:
      os.kill(int(partial.name.rpartition("-")[2]), 0)  # signal 0: is it there?
    except ProcessLookupError:
      shutil.rmtree(partial, ignore_errors=True)
    except (ValueError, PermissionError):
      pass


def _save_empty(path: pathlib.Path, items: Mapping[str, Any],
                documents: Mapping[str, Any]) -> list[tuple[pathlib.Path, Any]]:
  """A checkpoint whose arrays have no values; returns those arrays, and the leaf of each."""
  handlers = {name: _EmptyArrays() for name in items}
  with checkpoints.quiet(after_failure=True):
    of_items = {name: ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=ocp.type_handlers.create_type_handler_registry((_Empty, handler)))
                for name, handler in handlers.items()}
    of_documents = {name: ocp.JsonCheckpointHandler() for name in documents}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**of_items, **of_documents)) as writer:
      writer.save(path, ocp.args.Composite(
          **{name: ocp.args.PyTreeSave(jax.tree.map(_Empty, tree)) for name, tree in items.items()},
          **{name: ocp.args.JsonSave(dict(content)) for name, content in documents.items()}))
  return [(path / item / name, leaf) for item, handler in handlers.items() for leaf, name in handler.made]


def _fill(folder: pathlib.Path, leaf: Any) -> Iterator[int]:
  """Writes the values of an array that is there; yields how many bytes each block has.

  An array without compression is a file per chunk, with its values in C order. Tensorstore would write them as well,
  with copies of each in the memory of its threads.

  Raises ValueError where the blocks do not make the leaf.
  """
  chunk, written = _chunk(leaf), 0
  blocks = iter([((slice(None),) * len(chunk), np.asarray(leaf))]) if _at_once(leaf) else leaf.blocks()
  for index, values in blocks:
    at = [i if isinstance(i, int) else (i.start or 0) // max(size, 1) for i, size in zip(index, chunk)]
    size, values = values.nbytes, np.expand_dims(values, tuple(k for k, i in enumerate(index) if isinstance(i, int)))
    if values.shape != chunk:  # at the end of an axis
      values = np.pad(values, [(0, full - part) for full, part in zip(chunk, values.shape)])
    with open(folder / (".".join(map(str, at)) or "0"), "xb") as file:
      file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    del values  # before the next block is read
    written += size
    yield size
  if written != nbytes(leaf):
    raise ValueError(f"{folder.name}: {written} of {nbytes(leaf)} bytes were written")

