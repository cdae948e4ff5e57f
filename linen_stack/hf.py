"""Hugging Face checkpoints: models that load, run and save back.

    model, variables = ls.hf.load_model("path/to/folder")
    logits = model.apply(variables, tokens)
    ls.hf.save_model("path/to/new/folder", model, variables)

A folder holds `config.json` and safetensors files. The config's `model_type` chooses the family (`models/families.py`),
which knows the layers and what their tensors are called; the plan says where each tensor goes. Loading and saving are
exact: every tensor lands in one place, bit for bit, and whatever is missing, too much or of another shape is an error.

Tensors of published files that are no part of the model are left out by name, never by accident: rotary frequencies,
which follow from the config; an output projection that equals the embedding it is tied to; what a family lists as
`ignored`; and of a model for more than text, all but its text model. They are not written back.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

from absl import logging
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from linen_stack.config_sections import StackOptions
from linen_stack.hf_mapping import SHOWN, Leaf, check_tensors, leaves_of
from linen_stack.hf_plan import plan_from_hf_config
from linen_stack.hf_tensors import Folder, Writer
from linen_stack.models.families import family_of, published
from linen_stack.models.family import Config, Family, layer_modules
from linen_stack.models.language_model import LanguageModel
from linen_stack.placement import host_shardings
from linen_stack.specs import LayerSpec, nearest
from linen_stack.stack import StackedDecoder
from linen_stack.stacked import is_box, value

DType = Any

# Tensors of older files that follow from the config.
_DERIVED = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "the config says the rotary frequencies"}


class Checkpoint(NamedTuple):
  """A folder whose tensors are known to be the model's, to be read leaf by leaf.

  Args:
    model: the language model, without parameters.
    leaves: what each leaf of its parameters is made of, by path.
    dtypes: the dtype of each leaf.
    folder: the tensors.
  """

  model: LanguageModel
  leaves: dict[str, Leaf]
  dtypes: dict[str, np.dtype]
  folder: Folder

  def read(self, path: str) -> np.ndarray:
    """A leaf. It is allocated once, and the tensors are read into it one at a time."""
    leaf = self.leaves[path]
    out = np.empty(leaf.shape, self.dtypes[path])
    for row in leaf.rows:
      out[row.index] = leaf.transform.load(self.folder.read(row.tensor), leaf.row_shape)
    return out


def load_model(folder: str | os.PathLike[str], *, dtype: DType = None, param_dtype: DType = None, device: Any = None,
               **stack: Any) -> tuple[LanguageModel, dict[str, Any]]:
  """The model of a folder and its variables: `model.apply(variables, tokens)` gives logits `[batch, seq, vocab]`.

  Args:
    folder: `config.json` and safetensors files.
    dtype: of the computation. Default: that of the parameters.
    param_dtype: of the parameters. Default: each as it is stored.
    device: where the parameters go: a device or sharding, or a function (path, leaf) -> device or sharding, path being
      "layers/attention/query/kernel" and leaf of numpy. Default: JAX's default device; with `offload_params`, its host
      memory for the parameters that it selects.
    **stack: options of `StackedDecoder`: scan, param_axis, remat, ...

  Raises:
    FileNotFoundError: for a folder without config or tensors.
    TypeError, ValueError: for a family that is not known, a config that its layers cannot follow, a file that is cut
      short, and tensors that are not the model's (lists them).
  """
  if not (device is None or callable(device) or isinstance(device, (jax.Device, jax.sharding.Sharding))):
    raise TypeError('device must be a jax.Device, as jax.devices("cpu")[0] is, a sharding, or a function (path, leaf) that '
                    f"returns one, not {device!r}")
  checkpoint = open_checkpoint(folder, dtype=dtype, param_dtype=param_dtype, **stack)
  if device is None and checkpoint.model.stack.offload_params is not False:
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, checkpoint.dtypes[path]) for path, leaf in checkpoint.leaves.items()}
    tree = host_shardings(checkpoint.model.stack, traverse_util.unflatten_dict(shapes, sep="/"))
    shardings = traverse_util.flatten_dict(tree, sep="/")
    device = lambda path, leaf: shardings[path]
  leaves = {}
  for path in checkpoint.leaves:
    leaf = checkpoint.read(path)
    leaves[path] = jax.device_put(leaf, device(path, leaf) if callable(device) else device)
  return checkpoint.model, {"params": traverse_util.unflatten_dict(leaves, sep="/")}


def open_checkpoint(folder: str | os.PathLike[str], *, dtype: DType = None, param_dtype: DType = None,
                    **stack: Any) -> Checkpoint:
  """What `load_model` loads, checked and not yet read. Arguments and errors are those of `load_model`."""
  config = read_config(folder)
  family, text, prefix = _text_model(config)
  tensors = Folder(folder, prefix)
  usual = _usual_dtype((entry.shape, entry.dtype) for entry in tensors.entries.values())
  model = model_from_config(config, dtype=dtype, param_dtype=usual if param_dtype is None else param_dtype, **stack)
  leaves = leaves_of(model, family)
  ignored = _ignored(tensors, family, text, model)
  check_tensors(tensors.entries, leaves, family, ignored, model.stack.plan.num_layers, str(folder))
  ignored |= dict.fromkeys(tensors.others, f"no part of the {family.name} text model")
  if ignored:
    logging.info("%s: %d tensors are no part of the model: %s", folder, len(ignored),
                 "; ".join(f"{name} ({reason})" for name, reason in list(ignored.items())[:SHOWN]))
  dtypes = {path: _stored_dtype(tensors, leaf) if param_dtype is None else leaf.dtype for path, leaf in leaves.items()}
  for path, leaf_dtype in dtypes.items():
    if jax.dtypes.canonicalize_dtype(leaf_dtype) != leaf_dtype:
      raise ValueError(f"{path} is stored as {leaf_dtype}, which JAX holds only with jax_enable_x64; set that, or pass "
                       "param_dtype")
  return Checkpoint(model, leaves, dtypes, tensors)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """The content of a folder's `config.json`. Raises FileNotFoundError or ValueError where there is none."""
  if not isinstance(folder, (str, os.PathLike)):
    raise TypeError(f"folder must be a path, not {folder!r}")
  path = Path(folder) / "config.json"
  if Path(folder).is_file():
    raise NotADirectoryError(f"{folder} is a file; pass the folder that it is in")
  if not Path(folder).is_dir():
    raise FileNotFoundError(f"there is no folder {folder}; models are read from disk, none is downloaded")
  if not path.is_file():
    raise FileNotFoundError(f"{folder} has no config.json; a Hugging Face checkpoint has one beside its tensors")
  try:
    config = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from None
  if not isinstance(config, dict):
    raise ValueError(f"{path} must hold a JSON object, not a {type(config).__name__}")
  return config


def model_from_config(config: Config, *, dtype: DType = None, param_dtype: DType = None, **stack: Any) -> LanguageModel:
  """The model that a `config.json` describes, without parameters.

  Args:
    config: the content of `config.json`. Of a model for more than text, its text model is made.
    dtype: of the computation. Default: that of the parameters.
    param_dtype: of the parameters. Default: the config's `dtype` or `torch_dtype`, or float32.
    **stack: options of `StackedDecoder`.

  Raises TypeError or ValueError for a family that is not known, and for fields that its layers cannot follow.
  """
  options = [field.name for field in dataclasses.fields(StackOptions)]
  for name in stack:
    if name not in options:
      raise TypeError(f"no option {name!r} of StackedDecoder can be given; {nearest(name, options)}")
  family, text, _ = _text_model(config)
  if config.get("quantization_config") or text.get("quantization_config"):
    raise ValueError("quantization_config: quantised checkpoints are not read; use the unquantised one")
  full = {**family.defaults, **text}
  for name, values in family.fixed.items():
    if full.get(name) is not None and full[name] not in values:
      raise ValueError(f"{name} is {full[name]!r}, which the {family.name} layers here cannot follow; it can be "
                       f"{' or '.join(map(repr, values)) or 'null'}")
  said = [fields.get(name) for fields in (text, config) for name in ("dtype", "torch_dtype")]
  param_dtype = _dtype("param_dtype", next(filter(None, said), "float32") if param_dtype is None else param_dtype)
  dtype = param_dtype if dtype is None else _dtype("dtype", dtype)
  layer = family.layer(full)

  def spec(index: int, kind: Any) -> LayerSpec:
    made = layer(index, kind)
    return LayerSpec(made.cls, made.name, **made.kwargs, dtype=dtype, param_dtype=param_dtype)

  plan = plan_from_hf_config(full, spec)
  model = LanguageModel(stack=StackedDecoder(plan, **stack), **family.options(full), dtype=dtype,
                        param_dtype=param_dtype, hf_config=dict(text))
  layer_modules(model)  # raises for sizes that do not fit together
  return model


def _text_model(config: Config) -> tuple[Family, Config, str]:
  """The family of a config's text model, that model's own config, and the prefix of its tensors."""
  text, model_type = config.get("text_config"), config.get("model_type")
  if text is None:
    return family_of(model_type), config, ""
  if not isinstance(text, Mapping):
    raise TypeError(f"text_config must be a dict, not {text!r}")
  family = family_of(text.get("model_type"))
  if model_type not in family.within:
    raise ValueError(f"a {family.name} model inside one of model_type {model_type!r} is not known here; "
                     f"known: {', '.join(map(repr, family.within)) or 'none'}")
  return family, text, family.within[model_type]


def mapping(model: LanguageModel) -> dict[str, Leaf]:
  """For each leaf of a model's parameters, by path: the tensors that it is made of. Raises as `save_model` does."""
  return leaves_of(model, _describe(model)[0])


def save_model(folder: str | os.PathLike[str], model: LanguageModel, variables: Mapping[str, Any], *,
               max_shard_bytes: int = 5_000_000_000) -> None:
  """Writes a folder that the reference implementation of the model's family reads.

  A model that was loaded keeps its `config.json`, unless it was changed since; otherwise the config is made from the
  model. The folder appears under its name when all of it is written.

  Args:
    folder: what to make. It must not exist, or be empty.
    variables: the model's. A leaf may be anything with `shape`, `dtype` and either `__array__` (each is held in
      memory alone) or basic indexing (a tensor is read at a time).
    max_shard_bytes: a larger model is written as several files with an index.

  Raises:
    FileExistsError: for a folder that has something in it.
    ValueError: for a model of no published family (says why), and variables that are not the model's (lists them).
  """
  family, config = _describe(model)
  leaves = leaves_of(model, family)
  others = [name for name, tree in variables.items() if name != "params" and jax.tree.leaves(tree)]
  if others:
    raise ValueError(f"a checkpoint holds parameters alone; leave out the collections {', '.join(others)}")
  values = traverse_util.flatten_dict(jax.tree.map(value, variables.get("params", {}), is_leaf=is_box), sep="/")
  _check_variables(values, leaves)
  announced = {row.tensor: (leaf.tensor_shape, values[path].dtype)
               for path, leaf in leaves.items() for row in leaf.rows}
  config["dtype" if "dtype" in config else "torch_dtype"] = np.dtype(_usual_dtype(announced.values())).name
  with Writer(folder, announced, max_shard_bytes) as writer:
    writer.write_json("config.json", config)
    for path, leaf in leaves.items():
      array = values[path]
      if isinstance(array, jax.Array) or not hasattr(array, "__getitem__"):
        array = np.asarray(array)  # JAX cannot index what is in host memory
      for row in leaf.rows:
        writer.write(row.tensor, leaf.transform.save(np.asarray(array[row.index])))


def _describe(model: LanguageModel) -> tuple[Family, dict[str, Any]]:
  """The family of a model and its config.json. Raises ValueError, with the reasons, where no family fits."""
  if not isinstance(model, LanguageModel):
    raise TypeError(f"model must be a LanguageModel, not a {type(model).__name__}")
  source = _thaw(model.hf_config)
  # What the model was made from is kept, other fields and all, as long as it still describes the model.
  if source is not None:
    family = family_of(source["model_type"])
    try:
      derived = family.config_of(model)
      if derived == family.config_of(model_from_config(source)):
        return family, {"architectures": derived["architectures"], **source}
    except ValueError:
      pass  # it was made into something else
  reasons = []
  for family in published():
    try:
      return family, family.config_of(model)
    except ValueError as error:
      reasons.append(f"{family.name}: {error}")
  raise ValueError("the model is of no published family:\n  " + "\n  ".join(reasons))


def _thaw(tree: Any) -> Any:
  """Plain dicts and lists, where a module's attributes were frozen."""
  if isinstance(tree, Mapping):
    return {key: _thaw(entry) for key, entry in tree.items()}
  return [_thaw(entry) for entry in tree] if isinstance(tree, (list, tuple)) else tree


def _usual_dtype(tensors: Iterable[tuple[Any, Any]]) -> np.dtype | None:
  """The floating dtype that most values have, of tensors as (shape, dtype)."""
  sizes = Counter()
  for shape, dtype in tensors:
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
      sizes[np.dtype(dtype)] += math.prod(shape)
  return max(sizes, key=sizes.get, default=None)


def _dtype(argument: str, given: Any) -> np.dtype:
  try:
    dtype = jnp.dtype(given)
  except TypeError:
    raise TypeError(f"{argument} must be a dtype, not {given!r}") from None
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"{argument} must be a floating dtype, not {dtype}")
  return dtype


def _stored_dtype(tensors: Folder, leaf: Leaf) -> np.dtype:
  """The dtype that all tensors of a leaf are stored in."""
  stored = {}
  for row in leaf.rows:
    stored.setdefault(tensors.entries[row.tensor].dtype, row.tensor)
  if len(stored) > 1 or None in stored:
    found = ", ".join(f"{name} as {tensors.entries[name].dtype_name}" for name in stored.values())
    raise ValueError(f"{leaf.path} cannot keep the dtypes that its tensors are stored in: {found}; pass param_dtype")
  return next(iter(stored))


def _ignored(tensors: Folder, family: Family, config: Config, model: LanguageModel) -> dict[str, str]:
  """Stored tensors that are no part of the model, with the reasons."""
  patterns = {**_DERIVED, **family.ignored({**family.defaults, **config})}
  found = {name: reason for name in tensors.entries
           for pattern, reason in patterns.items() if re.fullmatch(pattern, name)}
  names = {tensor.path: tensor.name for tensor in family.tensors if not tensor.per_layer}
  head, table = names["lm_head/kernel"], names["token_embed/embedding"]
  if model.tie_embeddings and head in tensors.entries and table in tensors.entries:
    if not np.array_equal(tensors.read(head), tensors.read(table)):
      raise ValueError(f"{head} differs from {table}, though tie_word_embeddings says that they are one; set it to "
                       "false")
    found[head] = f"equal to {table}, which it is tied to"
  return found


def _check_variables(values: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> None:
  """Raises ValueError where parameters are not the model's."""
  problems = [f"{path} is missing" for path in leaves if path not in values]
  problems += [f"{path} is not a parameter of the model" for path in values if path not in leaves]
  problems += [f"{path} has the shape {tuple(values[path].shape)}, not {leaf.shape}" for path, leaf in leaves.items()
               if path in values and tuple(values[path].shape) != leaf.shape]
  if problems:
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    raise ValueError("variables are not those of the model:\n  " + "\n  ".join(problems[:SHOWN]) + more)
