"""Text to train on, as bytes: reading, a held-out tenth, batches, and the entropy of single bytes."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import os
import pathlib
import sysconfig

import numpy as np

# Of the standard library: enough for a small model, and read in a moment.
STDLIB_BYTES = 2_500_000
# Folders of the standard library that are no part of it, or hold tables and generated text rather than programs.
_NOT_SOURCE = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
_HOLD_OUT_ONE_IN = 10


@dataclasses.dataclass(frozen=True)
class Text:
  """A text in two parts that do not overlap."""

  train: np.ndarray
  """[bytes] uint8."""
  held_out: np.ndarray
  """[bytes] uint8, about a tenth of the text."""
  origin: str
  """Where it came from, in words."""

  def fingerprint(self) -> dict[str, int | str]:
    """What tells this text from another."""
    return {"bytes": self.train.size + self.held_out.size, "sha256": hashlib.sha256(self.train.tobytes()).hexdigest()}


def read(path: str | None) -> Text:
  """The text of a file, of all files below a folder, or (None) of the Python standard library.

  Raises OSError for a path that does not exist or cannot be read, ValueError for one that holds no text.
  """
  if path is None:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _files(root, _NOT_SOURCE) if file.suffix == ".py"]
    pieces, origin = _read_until(files, STDLIB_BYTES), "source of the Python standard library"
  else:
    root = pathlib.Path(path)
    files = _files(root) if root.is_dir() else [root]
    pieces, origin = [file.read_bytes() for file in files], str(path)
  texts = [piece for piece in pieces if _is_text(piece)]
  if not any(texts):
    what = f"none of its {len(files)} files is text in UTF-8" if any(pieces) else "it is empty"
    raise ValueError(f"no text in {origin}: {what}")
  skipped = len(pieces) - len(texts)
  origin += f", {len(texts)} file{'s' * (len(texts) > 1)}"
  origin += f" ({skipped} that {'are' if skipped > 1 else 'is'} not text in UTF-8 left out)" if skipped else ""
  return split(texts, origin)


def _files(root: pathlib.Path, skip: Sequence[str] = ()) -> list[pathlib.Path]:
  """All files below `root`, in the order of their paths; without hidden ones and folders named in `skip`."""
  found = []
  for folder, folders, names in os.walk(root):
    folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
    found += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
  return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _read_until(files: Sequence[pathlib.Path], size: int) -> list[bytes]:
  """The contents of the first files that together do not exceed `size`."""
  pieces, total = [], 0
  for file in files:
    pieces.append(file.read_bytes())
    total += len(pieces[-1])
    if total > size:
      return pieces[:-1]
  return pieces


def _is_text(piece: bytes) -> bool:
  try:
    return "\0" not in piece.decode("utf-8")
  except UnicodeDecodeError:
    return False


def split(texts: Sequence[bytes], origin: str) -> Text:
  """Holds out about a tenth: whole files spread over the text, or where files are few, blocks of the joined text."""
  texts = [text for text in texts if text]
  held = _spread([len(text) for text in texts])
  total = sum(map(len, texts))
  if sum(len(text) for text, out in zip(texts, held) if out) * 2 * _HOLD_OUT_ONE_IN < total:
    joined = b"".join(texts)
    # Ten blocks, or a hundred where they are still long enough to hold whole sequences.
    bounds = np.linspace(0, total, (100 if total >= 1 << 20 else 10) + 1).astype(int)
    texts = [joined[low:high] for low, high in zip(bounds, bounds[1:])]
    held = _spread([len(text) for text in texts])
    held = held if any(held) else [False] * (len(texts) - 1) + [True]
  parts = [b"".join(text for text, out in zip(texts, held) if out == which) for which in (False, True)]
  return Text(*(np.frombuffer(part, np.uint8) for part in parts), origin)


def _spread(sizes: Sequence[int]) -> list[bool]:
  """Which pieces are held out: each that keeps the held-out part at a tenth of what came so far, at most."""
  held, seen, out = 0, 0, []
  for size in sizes:
    seen += size
    out.append((held + size) * _HOLD_OUT_ONE_IN <= seen)
    held += size * out[-1]
  return out


def batch(text: np.ndarray, size: int, seq: int, seed: int, step: int) -> np.ndarray:
  """The batch of a step, [size, seq + 1] int32: a pure function of its arguments."""
  starts = np.random.default_rng([seed, step]).integers(0, text.size - seq, size)
  return text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)


def windows(text: np.ndarray, size: int, seq: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """All of a text as batches ([size, seq + 1] int32, [size, seq] float32 weights).

  The weights are 1 where a byte is to be predicted: each but the first once; and 0 where the last batch is padded.
  """
  count = -(-(text.size - 1) // seq)
  count += -count % size
  padded = np.zeros(count * seq + 1, np.int32)
  padded[:text.size] = text
  weights = (np.arange(count * seq) < text.size - 1).astype(np.float32).reshape(-1, size, seq)
  tokens = np.lib.stride_tricks.sliding_window_view(padded, seq + 1)[::seq].reshape(-1, size, seq + 1)
  yield from zip(tokens, weights)


def byte_entropy(text: np.ndarray) -> float:
  """Bits per byte of a code that knows how often each byte occurs in this very text."""
  counts = np.bincount(text, minlength=256)
  shares = counts[counts > 0] / text.size
  return float(-(shares * np.log2(shares)).sum())
