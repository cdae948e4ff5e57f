"""Folders of safetensors files: what is written is what other readers read, and damage is told."""
import json
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from linen_stack import hf_tensors
from linen_stack.hf_tensors import INDEX, SINGLE, Folder, Writer

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "odd": np.arange(5).astype(jnp.bfloat16),
    "scalar": np.asarray(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "turned": np.arange(12, dtype=np.float16).reshape(3, 4).T,
    "wide": np.arange(3, dtype=np.float64),
    "flags": np.array([True, False, True]),
}


def announced(tensors):
  return {name: (array.shape, array.dtype) for name, array in tensors.items()}


def write(folder, tensors=None, order=None, **options):
  tensors = TENSORS if tensors is None else tensors
  with Writer(folder, announced(tensors), **options) as writer:
    for name in order or tensors:
      writer.write(name, tensors[name])
  return writer


def assert_same(a, b):
  assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("limit", [1, 10, 40, 10**6])
@pytest.mark.parametrize("order", [list(TENSORS), list(reversed(TENSORS))], ids=["in order", "reversed"])
def test_files_are_read_by_safetensors_and_by_us(tmp_path, limit, order):
  writer = write(tmp_path / "out", order=order, max_shard_bytes=limit)
  assert os.listdir(tmp_path) == ["out"]
  files = sorted((tmp_path / "out").glob("*.safetensors"))
  read = {}
  for file in files:
    part = load_file(file)
    assert sum(array.nbytes for array in part.values()) <= limit or len(part) == 1
    assert not part.keys() & read.keys()
    read.update(part)
  assert (SINGLE in [file.name for file in files]) == (len(files) == 1)
  folder = Folder(tmp_path / "out")
  assert read.keys() == folder.entries.keys() == TENSORS.keys()
  for name, array in TENSORS.items():
    assert_same(read[name], array)
    assert_same(folder.read(name), array)
    assert (folder.entries[name].shape, folder.entries[name].dtype) == (array.shape, array.dtype)
  assert writer.total_bytes == sum(array.nbytes for array in TENSORS.values())
  if len(files) > 1:
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == writer.total_bytes
    assert index["weight_map"].keys() == TENSORS.keys()


def test_values_stand_at_multiples_of_their_size_and_the_file_says_its_format(tmp_path):
  write(tmp_path / "out")
  data = (tmp_path / "out" / SINGLE).read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8:8 + length])
  assert header.pop("__metadata__") == {"format": "pt"}
  for name, entry in header.items():
    assert (8 + length + entry["data_offsets"][0]) % TENSORS[name].itemsize == 0


def test_an_empty_folder_may_be_given(tmp_path):
  (tmp_path / "out").mkdir()
  write(tmp_path / "out")
  assert Folder(tmp_path / "out").entries.keys() == TENSORS.keys()


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: (path.mkdir(), (path / "x").touch())],
                         ids=["file", "folder"])
def test_nothing_is_overwritten(tmp_path, make):
  make(tmp_path / "out")
  with pytest.raises(FileExistsError, match="is there already"):
    write(tmp_path / "out")


def test_an_interrupted_run_leaves_nothing(tmp_path):
  with pytest.raises(KeyboardInterrupt):
    with Writer(tmp_path / "out", announced(TENSORS), max_shard_bytes=10) as writer:
      writer.write("a", TENSORS["a"])
      raise KeyboardInterrupt
  assert not os.listdir(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(hf_tensors._Shard, "open", full)
  with pytest.raises(OSError, match="No space"):
    write(tmp_path / "out")
  assert not os.listdir(tmp_path)


def test_writing_is_checked(tmp_path):
  with pytest.raises(ValueError, match="2 tensors were not written: a, odd"):
    write(tmp_path / "out", {name: TENSORS[name] for name in ("a", "odd", "wide")}, ["wide"])
  assert not os.listdir(tmp_path)
  with pytest.raises(ValueError, match="tensor a is written twice"):
    write(tmp_path / "out", order=["a", "a"])
  with pytest.raises(ValueError, match=r"announced as float32 \(2, 3\), not float64 \(2, 3\)"):
    with Writer(tmp_path / "out", announced(TENSORS)) as writer:
      writer.write("a", TENSORS["a"].astype(np.float64))
  with pytest.raises(ValueError, match="dtype complex64, which cannot be stored"):
    Writer(tmp_path / "out", {"a": ((2,), np.complex64)})
  with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
    Writer(tmp_path / "out", {}, max_shard_bytes=0)


def test_a_prefix_is_left_out_of_names(tmp_path):
  save_file({"text.a": TENSORS["a"], "vision.a": TENSORS["odd"]}, tmp_path / SINGLE)
  folder = Folder(tmp_path, "text.")
  assert list(folder.entries) == ["a"] and folder.others == ["vision.a"]
  assert_same(folder.read("a"), TENSORS["a"])


# Damage


def test_folders_without_tensors(tmp_path):
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json$"):
    Folder(tmp_path)
  (tmp_path / "pytorch_model.bin").touch()
  with pytest.raises(FileNotFoundError, match="found pytorch_model.bin"):
    Folder(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 100, -1], ids=lambda cut: f"{cut} bytes")
def test_a_file_that_is_cut_short(tmp_path, cut):
  save_file(TENSORS, tmp_path / SINGLE)
  data = (tmp_path / SINGLE).read_bytes()
  (tmp_path / SINGLE).write_bytes(data[:cut])
  with pytest.raises(ValueError, match=f"model.safetensors .{len(data[:cut])} bytes. is not a whole safetensors file: "
                                       "it is cut short"):
    Folder(tmp_path)


def test_a_git_lfs_pointer(tmp_path):
  (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
  with pytest.raises(ValueError, match="is a Git LFS pointer"):
    Folder(tmp_path)


def test_indices_are_checked(tmp_path):
  write(tmp_path / "out", max_shard_bytes=24)
  folder, index = tmp_path / "out", tmp_path / "out" / INDEX
  right = json.loads(index.read_text())

  def raises(error, match, weight_map):
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=match):
      Folder(folder)

  raises(ValueError, "do not agree: the file lacks b", {**right["weight_map"], "b": right["weight_map"]["a"]})
  assert right["weight_map"]["odd"] == right["weight_map"]["scalar"]
  raises(ValueError, "do not agree: the index lacks odd",
         {name: file for name, file in right["weight_map"].items() if name != "odd"})
  raises(FileNotFoundError, "lacks the file 'gone.safetensors'", {**right["weight_map"], "b": "gone.safetensors"})
  raises(FileNotFoundError, "lacks the file '../out/",
         {**right["weight_map"], "a": "../out/" + right["weight_map"]["a"]})
  for text in ("", "[]", "{}", '{"weight_map": 3}'):
    index.write_text(text)
    with pytest.raises(ValueError, match="is not an index"):
      Folder(folder)


def test_a_dtype_that_is_not_read(tmp_path):
  header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
  (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
  folder = Folder(tmp_path)
  assert folder.entries["a"].dtype is None
  with pytest.raises(ValueError, match="tensor a is stored as F8_E4M3, which is not read here"):
    folder.read("a")


def test_without_the_safetensors_package(tmp_path, monkeypatch):
  save_file(TENSORS, tmp_path / SINGLE)
  monkeypatch.setitem(sys.modules, "safetensors", None)
  with pytest.raises(ImportError, match=r"pip install 'linen_stack\[hf\]'"):
    Folder(tmp_path)
