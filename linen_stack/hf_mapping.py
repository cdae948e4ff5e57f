"""Which tensors of a Hugging Face checkpoint each leaf of a model's parameters is made of.

The plan says where a layer's parameters stand, the family says what they are called. A leaf may be stacked over the
repeats of a segment, over the layers of a run and over experts, at any param axis: each is one more index of a tensor's
place.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import re
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from linen_stack.hf_tensors import Entry
from linen_stack.models.family import Family, Shape, Tensor, Transform
from linen_stack.plan import Run, Segment
from linen_stack.specs import LayerSpec
from linen_stack.stacked import is_box, stacked_axis, value

SHOWN = 10  # how many tensors an error lists


@dataclasses.dataclass(frozen=True)
class Row:
  """A tensor of a checkpoint and its place in a leaf.

  Args:
    tensor: its name.
    index: the index, as numpy takes it, of its slice of the leaf; the tensor is `transform.save(leaf[index])`.
    layer: the global index of its layer; None outside the stack.
    expert: the index of its expert; None where there is none.
  """

  tensor: str
  index: tuple[int | slice, ...]
  layer: int | None = None
  expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A leaf of a model's parameters, as the tensors that it is made of.

  Args:
    path: its keys joined by "/".
    shape: with all of its stacked axes.
    dtype: the one that `init` gives it.
    row_shape: the shape of one row's slice.
    transform: of each row.
    rows: its tensors; together they fill the leaf.
  """

  path: str
  shape: Shape
  dtype: np.dtype
  row_shape: Shape
  transform: Transform
  rows: tuple[Row, ...]

  @property
  def tensor_shape(self) -> Shape:
    """The shape of each of its tensors."""
    return self.transform.shape(self.row_shape)


def leaves_of(model: Any, family: Family) -> dict[str, Leaf]:
  """The leaves of a language model's parameters by path, in layer order. Nothing is computed but shapes.

  Raises ValueError where the family has no tensor for a parameter.
  """
  inside = {tensor.path: tensor for tensor in family.tensors if tensor.per_layer}
  outside = {tensor.path: tensor for tensor in family.tensors if not tensor.per_layer}
  trees: dict[LayerSpec, dict[str, jax.ShapeDtypeStruct]] = {}

  def tensor_for(path: str, tensors: Mapping[str, Tensor], owner: str) -> Tensor:
    if path not in tensors:
      raise ValueError(f"{family.name} has no tensor for the parameter {path!r} of {owner}")
    return tensors[path]

  def around(path: str, shape: Shape) -> Leaf:
    tensor = tensor_for(path, outside, "the language model")
    whole = (slice(None),) * len(shape)
    return Leaf(path, shape, np.dtype(model.param_dtype), shape, tensor.transform, (Row(tensor.name, whole),))

  leaves = [around("token_embed/embedding", (model.vocab, model.embed))]
  for segment, run, prefix, layers in _places(model.stack):
    if run.spec not in trees:
      trees[run.spec] = _parameters(run.spec, model)
    for path, leaf in trees[run.spec].items():
      tensor = tensor_for(path, inside, f"layer {layers[0][0]} ({run.spec.label})")
      axes = segment.axes(run) if model.stack.scan else ()
      leaves.append(_stacked(f"{prefix}/{path}", leaf, tensor, axes, layers, model.stack.param_axis))
  leaves.append(around("final_norm/scale", (model.embed,)))
  if not model.tie_embeddings:
    leaves.append(around("lm_head/kernel", (model.embed, model.vocab)))
  return {leaf.path: leaf for leaf in leaves}


def _places(stack: Any) -> Iterator[tuple[Segment, Run, str, list[tuple[int, tuple[int, ...]]]]]:
  """Where parameters stand: (segment, run, path, layers), a layer being its global index and those of its axes."""
  for segment in stack.plan:
    first, size = stack.plan.offset(segment.name), len(segment.block)
    for run in segment.runs:
      layers = []
      for step in range(segment.length):
        for i in range(run.count):
          index = step * size + run.offset + i
          steps = ((step,) if segment.length > 1 else ()) + ((i,) if run.count > 1 else ())
          if stack.scan:
            layers.append((first + index, steps))
          else:
            yield segment, run, f"{segment.name}_{index}", [(first + index, ())]
      if stack.scan:
        yield segment, run, "/".join(segment.path(run)), layers


def _parameters(spec: LayerSpec, model: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """The shapes and dtypes of one layer's parameters, by path."""
  layer = spec.cls(**spec.kwargs)
  x = jax.ShapeDtypeStruct((1, 1, model.embed), model.dtype)
  tree = jax.eval_shape(lambda x: layer.init(jax.random.key(0), x), x)["params"]
  return traverse_util.flatten_dict(jax.tree.map(value, tree, is_leaf=is_box), sep="/")


def _stacked(path: str, leaf: Any, tensor: Tensor, axes: tuple[tuple[str, int], ...],
             layers: Iterable[tuple[int, tuple[int, ...]]], param_axis: int) -> Leaf:
  """A leaf of a layer as it is stacked, with a row for each layer and expert."""
  # Axes are named by what runs along them: a stacked axis by its number, outermost 0, the layer's own by None.
  names: list[int | str | None] = [None] * len(leaf.shape)
  sizes = list(leaf.shape)
  experts = range(sizes[0]) if tensor.per_expert else (None,)
  if tensor.per_expert:
    names[0] = "expert"
  for number in reversed(range(len(axes))):  # the innermost was added first
    at = stacked_axis(param_axis, len(sizes) + 1)
    names.insert(at, number)
    sizes.insert(at, axes[number][1])
  rows = []
  for layer, steps in layers:
    for expert in experts:
      place = {None: slice(None), "expert": expert, **dict(enumerate(steps))}
      name = tensor.name.format(layer=layer, expert=expert)
      rows.append(Row(name, tuple(place[name] for name in names), layer, expert))
  row_shape = tuple(leaf.shape[tensor.per_expert:])
  return Leaf(path, tuple(sizes), np.dtype(leaf.dtype), row_shape, tensor.transform, tuple(rows))


def check_tensors(entries: Mapping[str, Entry], leaves: Mapping[str, Leaf], family: Family, ignored: Iterable[str],
                  num_layers: int, where: str) -> None:
  """Raises ValueError unless the stored tensors are those of the leaves, by name and shape, and nothing else.

  Args:
    ignored: names of stored tensors that are known to be no part of the model.
    where: what the checkpoint is called in the error.
  """
  expected = {row.tensor: leaf.tensor_shape for leaf in leaves.values() for row in leaf.rows}
  stored = {name: entry.shape for name, entry in entries.items() if name not in set(ignored)}
  missing = [name for name in expected if name not in stored]
  extra = [name for name in stored if name not in expected]
  misshapen = [name for name in expected if name in stored and stored[name] != expected[name]]
  if not missing and not extra and not misshapen:
    return
  layer_of = _layer_reader(family)
  lines = []
  for title, names, detail in (
      ("missing", missing, lambda name: f" {list(expected[name])}"),
      ("not expected", extra, lambda name: f" {list(stored[name])}"),
      ("of another shape", misshapen, lambda name: f" {list(stored[name])}, should be {list(expected[name])}")):
    if names:
      layers = sorted({layer_of(name) for name in names} - {None})
      of_layers = f" (layers {_ranges(layers)})" if layers else ""
      plural = "tensor is" if len(names) == 1 else "tensors are"
      lines.append(f"  {len(names)} {plural} {title}{of_layers}:")
      lines += [f"    {name}{detail(name)}" for name in names[:SHOWN]]
      lines += [f"    and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
  depth = 1 + max((layer for layer in map(layer_of, stored) if layer is not None), default=-1)
  other_depth = f", and its tensors are of {depth} layers where num_hidden_layers is {num_layers}"
  raise ValueError(f"{where} does not hold the {family.name} model that its config.json describes"
                   f"{other_depth if depth != num_layers else ''}:\n" + "\n".join(lines))


def _layer_reader(family: Family) -> Any:
  """A function from a tensor's name to the index of its layer, or None."""
  prefixes = sorted({tensor.name.split("{layer}")[0] for tensor in family.tensors if tensor.per_layer})
  pattern = re.compile(f"(?:{'|'.join(map(re.escape, prefixes))})([0-9]+)\\.")

  def layer_of(name: str) -> int | None:
    match = pattern.match(name)
    return int(match[1]) if match else None

  return layer_of


def _ranges(numbers: list[int]) -> str:
  """Increasing numbers as "0-3, 5"."""
  spans: list[list[int]] = []
  for number in numbers:
    if spans and spans[-1][1] == number - 1:
      spans[-1][1] = number
    else:
      spans.append([number, number])
  return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in spans)
