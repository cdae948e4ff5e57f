"""The sections of a config as dataclasses: which keys there are, of which types, with which defaults and bounds."""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import typing
from typing import Any

from linen_stack import config_reader as reader
from linen_stack.sharding import FSDP, as_tuple
from linen_stack.specs import nearest
from linen_stack.stack import StackedDecoder


def _require(holds: bool, message: str) -> None:
  if not holds:
    raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class SpecConfig:
  """One kind of layer. What it does not say it takes from the model section: the class, and with it the arguments."""

  family: str | None = None
  """A family of `linen_stack.models`."""
  layer: str | None = None
  """A layer class of one's own, `my_package.module:MyLayer`."""
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Constructor arguments. dtypes are written by name."""


@dataclasses.dataclass(frozen=True)
class SegmentConfig:
  """`repeats` repeats of a block of specs."""

  name: str
  block: tuple[str | SpecConfig, ...]
  """Names of `model.specs`, or specs."""
  repeats: int = 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The layers, in one of three forms, and the language model around them; or all of it from a published model's config."""

  hf: Mapping[str, Any] | None = None
  """The content of a Hugging Face `config.json`. It says everything but `dtype` and `param_dtype`."""
  vocab: int | None = None
  embed: int | None = None
  tie_embeddings: bool = False
  norm_eps: float | None = None
  dtype: str | None = None
  param_dtype: str | None = None
  family: str | None = None
  layer: str | None = None
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  num_layers: int | None = None
  specs: Mapping[str, SpecConfig] = dataclasses.field(default_factory=dict)
  """Kinds of layers, by name."""
  segments: tuple[SegmentConfig, ...] | None = None
  pattern: tuple[str, ...] | None = None
  """Names of specs: with num_layers, repeated up to it; without, one per layer, for `Plan.from_layers` to arrange."""

  def __post_init__(self):
    for name in ("dtype", "param_dtype"):
      if getattr(self, name) is not None:
        reader.dtype(getattr(self, name), f"model.{name}")
    if self.hf is not None:
      for field in dataclasses.fields(self):
        _require(field.name in ("hf", "dtype", "param_dtype") or not getattr(self, field.name),
                 f"model.{field.name}: model.hf says it already; leave one of them out")
      return
    _require(self.segments is None or self.pattern is None, "model.segments and model.pattern exclude each other")
    for form in ("segments", "pattern"):
      _require(getattr(self, form) != (), f"model.{form} is empty; it needs at least one entry")
    if self.segments is not None:
      _require(self.num_layers is None, "model.num_layers: the segments say how many layers there are; leave it out")
    elif self.pattern is None:
      _require(self.num_layers is not None, "model.num_layers is missing (or model.segments, or model.pattern)")
      _require(not self.specs, "model.specs: nothing uses them; add model.pattern or model.segments")
    self._check_use()
    for name in ("vocab", "embed", "num_layers"):
      value = getattr(self, name)
      _require(value is None or value >= 1, f"model.{name} must be at least 1, not {value}")

  def _check_use(self):
    """Raises for names that are no spec, and where something is said that no layer would take."""
    if self.segments is None and self.pattern is None:
      return
    if self.pattern is not None:
      keyed = {f"model.pattern.{i}": entry for i, entry in enumerate(self.pattern)}
    else:
      keyed = {f"model.segments.{i}.block.{j}": entry
               for i, segment in enumerate(self.segments) for j, entry in enumerate(segment.block)}
    for key, entry in keyed.items():
      _require(isinstance(entry, SpecConfig) or entry in self.specs,
               f"{key}: no spec {entry!r} in model.specs; {nearest(str(entry), self.specs)}")
    entries = list(keyed.values())
    for name in self.specs:
      _require(name in entries, f"model.specs.{name}: no layer is of this kind; leave it out")
    specs = [*self.specs.values(), *(entry for entry in entries if isinstance(entry, SpecConfig))]
    if specs and all(spec.family or spec.layer for spec in specs):
      for key in ("family", "layer", "args"):
        _require(not getattr(self, key),
                 f"model.{key}: every spec names a class of its own, so that no layer takes this")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """How `python -m linen_stack train` trains."""

  batch: int = 16
  """Sequences per step."""
  seq: int = 256
  """Tokens per sequence."""
  steps: int = 500
  learning_rate: float = 3e-3
  """At the top of the schedule: linear warm-up, then a half cosine down to `final_learning_rate` of it at `steps`."""
  warmup: float = 0.05
  """Share of the steps that warm up."""
  final_learning_rate: float = 0.1
  weight_decay: float = 0.1
  """Of matrices; norm scales and biases are left alone."""
  beta1: float = 0.9
  beta2: float = 0.95
  clip_norm: float = 1.0
  """Largest global norm of the gradient."""
  seed: int = 0
  checkpoint_every: int | None = None
  """Steps between checkpoints. None: one, at the end."""

  def __post_init__(self):
    for name in ("batch", "seq", "steps", "checkpoint_every"):
      value = getattr(self, name)
      _require(value is None or value >= 1, f"train.{name} must be at least 1, not {value}")
    _require(self.seed >= 0, f"train.seed must not be negative, not {self.seed}")
    for name in ("learning_rate", "clip_norm"):
      value = getattr(self, name)
      _require(math.isfinite(value) and value > 0, f"train.{name} must be a finite number above 0, not {value}")
    _require(math.isfinite(self.weight_decay) and self.weight_decay >= 0,
             f"train.weight_decay must be a finite number of at least 0, not {self.weight_decay}")
    for name in ("warmup", "beta1", "beta2"):
      value = getattr(self, name)
      _require(0 <= value < 1, f"train.{name} must be at least 0 and below 1, not {value}")
    _require(0 <= self.final_learning_rate <= 1,
             f"train.final_learning_rate is a share of learning_rate, from 0 to 1, not {self.final_learning_rate}")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How a model lies on many devices, for the commands `memory` and `tune`: fully sharded, unless something else is said."""

  axes: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
  """Sizes of the mesh's axes; -1, for one of them: as many devices as are left."""
  rules: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=lambda: dict(FSDP))
  """Which axes of the mesh a logical axis of the parameters, or "batch", is split over; null: it is whole. Every logical
  axis has a rule, but for those that count layers (the names of segments and runs), which are whole without one."""

  def __post_init__(self):
    _require(bool(self.axes), "mesh.axes is empty; it needs at least one axis, such as {fsdp: -1}")
    for name, size in self.axes.items():
      _require(size >= 1 or size == -1, f"mesh.axes.{name} must be at least 1, or -1 for what is left, not {size}")
    _require(list(self.axes.values()).count(-1) <= 1, "mesh.axes: only one axis can be -1")
    for name, over in self.rules.items():
      for axis in as_tuple(over):
        _require(axis in self.axes, f"mesh.rules.{name}: {axis!r} is no axis of mesh.axes; {nearest(axis, self.axes)}")


def _stack_fields() -> list[tuple[str, Any, Any]]:
  hints = typing.get_type_hints(StackedDecoder)
  # `offload_params` may be a function, which a config names.
  hints["offload_params"] = bool | int | str
  return [(field.name, hints[field.name], dataclasses.field(default=field.default))
          for field in dataclasses.fields(StackedDecoder) if field.name not in ("plan", "parent", "name")]


StackOptions = dataclasses.make_dataclass("StackOptions", _stack_fields(), frozen=True)
StackOptions.__module__ = __name__
StackOptions.__doc__ = "The options of `StackedDecoder`, all but the plan; `remat` as a name or a mapping of arguments."
