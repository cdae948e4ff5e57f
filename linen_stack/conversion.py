"""Converting whole models between checkpoints of any layout and Hugging Face folders, never held in memory.

A source is a tree of leaves that are read when they are asked for (`linen_stack.stored`), with the model that they
belong to. `linen_stack.convert` lays the tree out for the target's model, and what comes of it is written leaf by leaf.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import pathlib
from typing import Any

from flax import traverse_util
import jax
import numpy as np
import optax

from linen_stack import checkpoints, convert, hf, stored, training
from linen_stack.checkpoints import CheckpointError
from linen_stack.config import StackConfig
from linen_stack.convert.sites import report
from linen_stack.models import LanguageModel, families

ITEMS = ("variables", "optimizer")


@dataclasses.dataclass(frozen=True)
class Source:
  """A model's state to convert."""

  model: LanguageModel
  config: StackConfig
  items: Mapping[str, Any]
  """`variables` and perhaps `optimizer`: trees of leaves."""
  step: int = 0
  text: Mapping[str, Any] | None = None
  """What a training run's text is told by."""
  own_dtypes: bool = False
  """Whether leaves may have other dtypes than the model would give them."""

  @property
  def nbytes(self) -> int:
    return sum(stored.nbytes(leaf) for leaf in jax.tree.leaves(self.items))


def is_folder(path: pathlib.Path) -> bool:
  """Whether a path is a Hugging Face folder."""
  return (path / "config.json").is_file()


def read_checkpoint(path: pathlib.Path) -> Source:
  """A checkpoint of this library. Raises CheckpointError where it is none, or not whole."""
  path = checkpoints.find(path)
  config = checkpoints.load_config(path)
  model = families.language_model(config)
  names = [name for name in ITEMS if (path / name).is_dir() or name == "variables"]
  abstract = abstract_items(model, config, names)
  items = {name: stored.Item(path, name).like(abstract[name]) for name in names}
  text = checkpoints.load_text(path) if (path / "text").is_dir() else None
  return Source(model, config, items, int(path.name) if path.name.isdecimal() else 0, text)


def read_folder(path: pathlib.Path, change: Callable[[StackConfig], StackConfig]) -> Source:
  """A Hugging Face folder, laid out as the changed config of its model says.

  Its dtypes are those that the config says, or those that are stored. Raises what `hf.open_checkpoint` raises.
  """
  config = StackConfig.from_dict({"model": {"hf": hf.read_config(path)}})
  wanted = change(config)
  options = {"scan": wanted.stack.scan, "param_axis": wanted.stack.param_axis}
  checkpoint = hf.open_checkpoint(path, dtype=wanted.model.dtype, param_dtype=wanted.model.param_dtype, **options)
  dtypes = {name: np.dtype(getattr(checkpoint.model, name)).name for name in ("dtype", "param_dtype")}
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, **dtypes),
                               stack=dataclasses.replace(config.stack, **options))
  leaves = {name: TensorLeaf(checkpoint, name) for name in checkpoint.leaves}
  return Source(checkpoint.model, config, {"variables": {"params": traverse_util.unflatten_dict(leaves, sep="/")}},
                own_dtypes=True)


def abstract_items(model: LanguageModel, config: StackConfig, names: Iterable[str]) -> dict[str, Any]:
  """What a checkpoint of a model holds under these names, as shapes."""
  tx = training.optimizer(config.train, model.stack.plan) if "optimizer" in names else optax.identity()
  state = training.abstract_state(model, tx)
  return {name: state[name] for name in names}


def write_checkpoint(source: Source, folder: pathlib.Path, config: StackConfig,
                     progress: Callable[[int], None]) -> pathlib.Path:
  """Writes a checkpoint with the layers laid out as `config` says. Returns its path.

  Raises ValueError where the config is of another model, CheckpointError where it cannot be written.
  """
  model = families.language_model(config)
  items = convert.restack(dict(source.items), source.model, model, lazy=True)
  _check(items, abstract_items(model, config, items), source.own_dtypes)
  documents = {"config": config.to_dict(), **({} if source.text is None else {"text": source.text})}
  return stored.save(folder, source.step, items, documents, progress)


def write_folder(source: Source, folder: pathlib.Path, progress: Callable[[int], None]) -> None:
  """Writes a Hugging Face folder.

  Raises what `hf.save_model` raises, and CheckpointError where the disk is too full.
  """
  done = 0

  def tell(size: int) -> None:
    nonlocal done
    done += size
    progress(done)

  variables = source.items["variables"]
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.check_space(folder.parent, sum(map(stored.nbytes, jax.tree.leaves(variables))))
  except OSError as error:
    raise CheckpointError(f"cannot write {folder}: {checkpoints.reason(error)}") from error
  hf.save_model(folder, source.model, jax.tree.map(lambda leaf: _Told(leaf, tell), variables))


def _check(items: Mapping[str, Any], abstract: Mapping[str, Any], own_dtypes: bool) -> None:
  """Raises ValueError where converted leaves are not those of the model that they are for."""
  problems = []
  for name, tree in items.items():
    made, wanted = ({stored.path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(t)}
                    for t in (tree, abstract[name]))
    for path in sorted({*made, *wanted}):
      of_made, of_wanted = (_words(leaves.get(path), own_dtypes) for leaves in (made, wanted))
      if of_made != of_wanted:
        problems.append(f"{name}/{path}: {of_made} in SRC, {of_wanted} in the model of the config")
  if problems:
    raise ValueError(report("SRC is not the model of the config", problems))


def _words(leaf: Any, without_dtype: bool) -> str:
  return "nothing" if leaf is None else f"{'' if without_dtype else f'{np.dtype(leaf.dtype)} '}{tuple(leaf.shape)}"


class TensorLeaf:
  """A parameter as tensors of a Hugging Face folder, read when it is indexed."""

  def __init__(self, checkpoint: hf.Checkpoint, path: str):
    self._checkpoint, self._path = checkpoint, path
    leaf = checkpoint.leaves[path]
    self._leaf, self.shape, self.dtype = leaf, leaf.shape, np.dtype(checkpoint.dtypes[path])
    self.block_shape = tuple(1 if isinstance(i, int) else size for i, size in zip(leaf.rows[0].index, leaf.shape))

  def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
    """Tensor by tensor."""
    for row in self._leaf.rows:
      yield row.index, self._read(row)

  def _read(self, row: Any) -> np.ndarray:
    tensor = self._checkpoint.folder.read(row.tensor)
    return self._leaf.transform.load(tensor, self._leaf.row_shape).astype(self.dtype, copy=False)

  def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
    """The value of one layer, whose stacked axes have an int in `index`, or of all."""
    rest = [k for k, i in enumerate(index) if not isinstance(i, int)]
    out = np.empty([self.shape[k] for k in rest], self.dtype)
    for row in self._leaf.rows:
      if all(row.index[k] == i for k, i in enumerate(index) if isinstance(i, int)):
        out[tuple(row.index[k] for k in rest)] = self._read(row)
    return out

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del copy
    return np.asarray(self._checkpoint.read(self._path), dtype)


class _Told:
  """A leaf that tells how much of it is read."""

  def __init__(self, leaf: Any, tell: Callable[[int], None]):
    self._leaf, self._tell, self.shape, self.dtype = leaf, tell, leaf.shape, leaf.dtype

  def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
    values = self._leaf[index]
    self._tell(values.nbytes)
    return values
