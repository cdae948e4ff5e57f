"""Folders of safetensors files: one file, or several with an index. Read and written one tensor at a time.

A safetensors file is a header, which says of each tensor its dtype, shape and place, and the values after it. Reading
goes through the safetensors package. Its writer takes all tensors of a file at once; the one here writes them one by
one, so that what is in memory is never more than one of them.
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import math
import os
from pathlib import Path
import shutil
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# The names that safetensors gives to dtypes.
_DTYPES: Mapping[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
  """What is known of a stored tensor without reading it. `dtype` is None for one that numpy has no type for."""

  file: Path
  shape: tuple[int, ...]
  dtype: np.dtype | None
  dtype_name: str


class Folder:
  """The tensors of a folder: `entries` by name, their values by `read`.

  Args:
    path: the folder.
    prefix: of the tensors that are meant. It is left out of their names; `others` has the names of those without it.

  Raises:
    ImportError: without the safetensors package.
    FileNotFoundError: for a folder without safetensors files, or one that lacks files of its index.
    ValueError: for a file that is cut short or none of this kind, and an index that does not fit its files.
  """

  def __init__(self, path: str | os.PathLike[str], prefix: str = ""):
    self.path, self.prefix = Path(path), prefix
    single, index = self.path / SINGLE, self.path / INDEX
    self.entries: dict[str, Entry] = {}
    if single.exists():
      self.entries = _entries(single)
    elif index.exists():
      self._read_index(index)
    else:
      others = sorted(p.name for p in self.path.glob("*.*") if p.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
      found = f"; found {', '.join(others[:10])}" if others else ""
      raise FileNotFoundError(f"{self.path} has neither {SINGLE} nor {INDEX}{found}")
    self.others = [name for name in self.entries if not name.startswith(prefix)]
    self.entries = {name.removeprefix(prefix): entry for name, entry in self.entries.items() if name.startswith(prefix)}

  def _read_index(self, index: Path) -> None:
    try:
      placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
      files = {name: set() for name in placed.values()}
      for tensor, file in placed.items():
        files[file].add(tensor)
    except (ValueError, LookupError, TypeError, AttributeError):
      raise ValueError(f"{index} is not an index: it needs a weight_map from tensors to files") from None
    for file, tensors in sorted(files.items()):
      if Path(file).name != file or not (self.path / file).exists():
        raise FileNotFoundError(f"{self.path} lacks the file {file!r}, which {INDEX} names")
      entries = _entries(self.path / file)
      for lacking, holder in ((tensors - entries.keys(), "file"), (entries.keys() - tensors, "index")):
        if lacking:
          raise ValueError(f"{index} and {file} do not agree: the {holder} lacks {', '.join(sorted(lacking)[:10])}")
      self.entries.update(entries)

  def read(self, name: str) -> np.ndarray:
    """The values of a tensor."""
    entry = self.entries[name]
    if entry.dtype is None:
      raise ValueError(f"tensor {name} is stored as {entry.dtype_name}, which is not read here; "
                       f"these are: {', '.join(_DTYPES)}")
    # Opened anew each time: the pages of a file that stays mapped count as this process's memory.
    with _open(entry.file) as file:
      return file.get_tensor(self.prefix + name)


def _open(path: Path) -> Any:
  try:
    import safetensors  # pylint: disable=g-import-not-at-top  # of the extra `hf`
  except ImportError as error:
    raise ImportError("Hugging Face checkpoints need the safetensors package: pip install 'linen_stack[hf]'") from error
  try:
    return safetensors.safe_open(path, framework="np")
  except safetensors.SafetensorError as error:
    with open(path, "rb") as file:
      pointer = file.read(40).startswith(b"version https://git-lfs")
    hint = "it is a Git LFS pointer; fetch the file itself" if pointer else "it is cut short or not of this kind"
    size = path.stat().st_size
    raise ValueError(f"{path} ({size} bytes) is not a whole safetensors file: {hint} ({error})") from None


def _entries(path: Path) -> dict[str, Entry]:
  with _open(path) as file:
    slices = {name: file.get_slice(name) for name in file.keys()}
    return {name: Entry(path, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()), part.get_dtype())
            for name, part in slices.items()}


@dataclasses.dataclass
class _Shard:
  """A file that is being written: its tensors, and where their values go."""

  tensors: dict[str, tuple[tuple[int, ...], np.dtype]]
  places: dict[str, int] = dataclasses.field(default_factory=dict)
  file: BinaryIO | None = None

  def open(self, path: Path) -> None:
    """Writes the header, and makes the file as long as it is going to be."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide values first, so that each stands at a multiple of its own size, which readers that map the file rely on.
    for name in sorted(self.tensors, key=lambda name: (-self.tensors[name][1].itemsize, name)):
      shape, dtype = self.tensors[name]
      start, end = end, end + math.prod(shape) * dtype.itemsize
      header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
      self.places[name] = start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    self.places = {name: 8 + len(text) + start for name, start in self.places.items()}
    self.file = open(path, "wb")
    self.file.write(len(text).to_bytes(8, "little") + text)
    self.file.truncate(8 + len(text) + end)


class Writer:
  """Writes a folder of safetensors files, tensor by tensor in any order; the folder appears whole, at the end.

  Example::

    with Writer(folder, {"a": ((2, 3), np.float32)}) as writer:
      writer.write("a", values)
      writer.write_json("config.json", config)

  Args:
    folder: what to make. It must not exist, or be empty.
    tensors: shape and dtype of each tensor that is going to be written.
    max_shard_bytes: tensors that are larger together are put into several files, with an index.

  Raises:
    FileExistsError: for a folder that has something in it.
    ValueError: for a dtype that safetensors cannot hold; on leaving, where a tensor was not written.
  """

  def __init__(self, folder: str | os.PathLike[str], tensors: Mapping[str, tuple[tuple[int, ...], Any]],
               max_shard_bytes: int = 5_000_000_000):
    if max_shard_bytes < 1:
      raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    self.folder = Path(folder)
    if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
      raise FileExistsError(f"{self.folder} is there already; give a new folder, or an empty one")
    tensors = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in tensors.items()}
    for name, (_, dtype) in tensors.items():
      if dtype not in _NAMES:
        raise ValueError(f"tensor {name} has dtype {dtype}, which cannot be stored; these can: "
                         f"{', '.join(map(str, _NAMES))}")
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    self.total_bytes = sum(sizes.values())
    shards, room = [_Shard({})], max_shard_bytes
    for name, size in sizes.items():
      if size > room and shards[-1].tensors:
        shards.append(_Shard({}))
        room = max_shard_bytes
      shards[-1].tensors[name] = tensors[name]
      room -= size
    self._shards, self._of = shards, {name: shard for shard in shards for name in shard.tensors}
    self._left = set(tensors)

  def __enter__(self) -> Writer:
    self.folder.parent.mkdir(parents=True, exist_ok=True)
    self._partial = self.folder.parent / f".{self.folder.name}.partial-{os.getpid()}"
    self._partial.mkdir()
    count = len(self._shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    try:
      for shard, name in zip(self._shards, names):
        shard.open(self._partial / name)
      if count > 1:
        placed = {tensor: name for shard, name in zip(self._shards, names) for tensor in sorted(shard.tensors)}
        self.write_json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": placed})
    except BaseException as error:
      self.__exit__(type(error))
      raise
    return self

  def write(self, name: str, values: np.ndarray) -> None:
    """Writes a tensor. Raises where it is not one of those that were announced, or was written before."""
    shard = self._of[name]
    if name not in self._left:
      raise ValueError(f"tensor {name} is written twice")
    if (values.shape, values.dtype) != shard.tensors[name]:
      shape, dtype = shard.tensors[name]
      raise ValueError(f"tensor {name} was announced as {dtype} {shape}, not {values.dtype} {values.shape}")
    shard.file.seek(shard.places[name])
    shard.file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    self._left.discard(name)

  def write_json(self, name: str, content: Any) -> None:
    """Writes a file beside the tensors."""
    (self._partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

  def __exit__(self, kind: Any, *_: Any) -> None:
    for shard in self._shards:
      if shard.file is not None:
        shard.file.close()
    try:
      if kind is None:
        if self._left:
          raise ValueError(f"{len(self._left)} tensors were not written: {', '.join(sorted(self._left)[:10])}")
        self._partial.rename(self.folder)
    finally:
      shutil.rmtree(self._partial, ignore_errors=True)
