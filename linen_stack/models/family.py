"""What a family of published models is: its layers, its tensors' names, and how its config is read and written.

A family is data and a few functions; `linen_stack.hf` does the work. One tensor of a checkpoint corresponds to one leaf
of a layer, or to one expert's slice of a leaf that stacks experts on its first axis.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

from linen_stack.hf_plan import LayerKind
from linen_stack.specs import LayerSpec

Shape = tuple[int, ...]
Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Transform:
  """A reversible change of form between a tensor of a checkpoint and a leaf. Loading and saving are exact inverses.

  The functions work on numpy arrays and should return views where they can.
  """

  name: str
  shape: Callable[[Shape], Shape]
  """The tensor's shape, from the leaf's."""
  load: Callable[[Any, Shape], Any]
  """The leaf, from the tensor and the leaf's shape."""
  save: Callable[[Any], Any]
  """The tensor, from the leaf."""


identity = Transform("identity", lambda shape: shape, lambda tensor, shape: tensor, lambda leaf: leaf)


def linear(inputs: int = 1) -> Transform:
  """A weight `[out, in]` for a kernel `[*in, *out]` whose first `inputs` axes are those that are summed over."""

  def shape(leaf: Shape) -> Shape:
    return math.prod(leaf[inputs:]), math.prod(leaf[:inputs])

  return Transform(f"linear({inputs})", shape, lambda tensor, leaf: tensor.T.reshape(leaf),
                   lambda leaf: leaf.reshape(shape(leaf.shape)[::-1]).T)


# A vector `[out]` for a bias `[*out]`, such as `[heads, head_dim]`.
flat = Transform("flat", lambda shape: (math.prod(shape),), lambda tensor, shape: tensor.reshape(shape),
                 lambda leaf: leaf.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One leaf and the tensor, or tensors, that it is stored as.

  Args:
    name: the tensor's name. With `{layer}`: one per layer, the global index in its place; without: outside the stack.
      With `{expert}` as well: one per expert, and the leaf stacks them on its first axis.
    path: the leaf in the layer's own tree, such as "feed_forward/wi_0/kernel"; outside the stack in the model's.
    transform: from tensor to leaf and back; with `{expert}`, of each expert's slice.
  """

  name: str
  path: str
  transform: Transform = identity

  @property
  def per_layer(self) -> bool:
    return "{layer}" in self.name

  @property
  def per_expert(self) -> bool:
    return "{expert}" in self.name


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of published models.

  Args:
    name: what errors and reports call it.
    model_types: the values of `model_type` in a config that are this family.
    layer: of a config, the function (index, kind) -> LayerSpec that `plan_from_hf_config` calls. dtype and param_dtype
      are added to the specs by the caller.
    options: of a config, the arguments of `LanguageModel` other than the stack and dtypes.
    tensors: all tensors of all kinds of layers. Those whose path is in a layer's tree are that layer's.
    config_of: of a `LanguageModel`, the config.json that describes it, without dtype. Raises ValueError, saying why,
      for a model that is not of this family.
    defaults: what the published code takes for fields that a config leaves out.
    fixed: fields of a config with the values for which the layers are written; any other value is refused by name. A
      field that is missing or null passes.
    ignored: of a config, patterns (`re.fullmatch`) of tensors in published files that are no part of the model, with
      the reason.
    within: model types for more than text whose `text_config` is this family, with the prefix of its tensors there.
  """

  name: str
  model_types: tuple[str, ...]
  layer: Callable[[Config], Callable[[int, LayerKind], LayerSpec]]
  options: Callable[[Config], dict[str, Any]]
  tensors: tuple[Tensor, ...]
  config_of: Callable[[Any], dict[str, Any]]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  ignored: Callable[[Config], Mapping[str, str]] = lambda config: {}
  within: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    paths = [tensor.path for tensor in self.tensors]
    if twice := {path for path in paths if paths.count(path) > 1}:
      raise ValueError(f"family {self.name}: two tensors for {', '.join(sorted(twice))}")


# Tensors that most families name alike.
OUTSIDE = (
    Tensor("model.embed_tokens.weight", "token_embed/embedding"),
    Tensor("model.norm.weight", "final_norm/scale"),
    Tensor("lm_head.weight", "lm_head/kernel", linear()),
)
ATTENTION = tuple(
    Tensor(f"model.layers.{{layer}}.self_attn.{theirs}", f"attention/{ours}", form) for theirs, ours, form in (
        ("q_proj.weight", "query/kernel", linear()),
        ("k_proj.weight", "key/kernel", linear()),
        ("v_proj.weight", "value/kernel", linear()),
        ("o_proj.weight", "out/kernel", linear(2)),
        ("q_proj.bias", "query/bias", flat),
        ("k_proj.bias", "key/bias", flat),
        ("v_proj.bias", "value/bias", flat),
        ("o_proj.bias", "out/bias", identity),
        ("q_norm.weight", "query_norm/scale", identity),
        ("k_norm.weight", "key_norm/scale", identity),
    ))
FEED_FORWARD = tuple(
    Tensor(f"model.layers.{{layer}}.mlp.{theirs}", f"feed_forward/{ours}", form) for theirs, ours, form in (
        ("gate_proj.weight", "wi_0/kernel", linear()),
        ("up_proj.weight", "wi_1/kernel", linear()),
        ("down_proj.weight", "wo/kernel", linear()),
        ("gate_proj.bias", "wi_0/bias", identity),
        ("up_proj.bias", "wi_1/bias", identity),
        ("down_proj.bias", "wo/bias", identity),
    ))


def layer_modules(model: Any) -> list[Any]:
  """The layers of a language model as modules, one per layer; equal specs share one."""
  made: dict[LayerSpec, Any] = {}
  for spec in model.stack.plan.layers:
    if spec not in made:
      made[spec] = spec.cls(**spec.kwargs)
  return [made[spec] for spec in model.stack.plan.layers]


def shared(objects: list[Any], *names: str) -> dict[str, Any]:
  """The values of attributes that all of these have in common. Raises ValueError where they differ."""
  values = {name: getattr(objects[0], name) for name in names}
  for i, other in enumerate(objects):
    for name, value in values.items():
      if getattr(other, name) != value:
        raise ValueError(f"layers 0 and {i} differ in {name}: {value!r} and {getattr(other, name)!r}")
  return values


def require(owner: str, actual: Mapping[str, Any], **expected: Any) -> None:
  """Raises ValueError for the first value that is not the expected one."""
  for name, value in expected.items():
    if actual[name] != value:
      raise ValueError(f"{name} of {owner} is {actual[name]!r}, not {value!r}")


def field(config: Config, name: str, kind: type | tuple[type, ...] = int, default: Any = None,
          required: bool = False) -> Any:
  """A field of a config; null counts as missing. Raises ValueError where it must not be, TypeError for its type."""
  value = config.get(name)
  if value is None:
    if required:
      raise ValueError(f"the field {name!r} is missing from the config")
    return default
  kinds = kind if isinstance(kind, tuple) else (kind,)
  if float in kinds:
    kinds += (int,)
  if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
    raise TypeError(f"the field {name!r} of the config must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")
  return value
