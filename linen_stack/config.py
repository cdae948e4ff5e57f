"""`StackConfig`: a decoder, the options of its stack and how to train it, as a dict or a YAML file.

    model:                       # which layers; and the sizes of the language model around them
      vocab: 256
      embed: 128
      family: decoder            # a family of linen_stack.models, or  layer: my_package.module:MyLayer
      args: {mlp: 384, num_heads: 4}
      num_layers: 6              # one spec; instead of it, `segments` or `pattern` over named `specs`
    stack:                       # the options of StackedDecoder
      remat: minimal
    train:                       # see TrainConfig
      steps: 500
    mesh:                        # many devices, see MeshConfig
      axes: {fsdp: -1}

Reading is strict: an unknown key, a wrong type or a missing value raises with the key in full (`stack.remta`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import copy
import dataclasses
import inspect
import pathlib
from typing import Any

from absl import logging

from linen_stack import config_reader as reader
from linen_stack import maxtext
from linen_stack.config_sections import MeshConfig, ModelConfig, SpecConfig, StackOptions, TrainConfig
from linen_stack.plan import Plan, Segment
from linen_stack.specs import LayerSpec, nearest
from linen_stack.policies import RematPolicy
from linen_stack.stack import StackedDecoder

SHIPPED = pathlib.Path(__file__).parent / "configs"
# What the model section says of these goes to every layer that has an argument of that name and does not set it.
_SHARED_ARGS = ("embed", "norm_eps", "dtype", "param_dtype")
_POLICY_KEYS = ("preset", "save", "offload", "carry", "levels", "every", "prevent_cse", "offload_dst")


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """A decoder, the options of its stack, and how to train it. Frozen; equal when all values are.

  Raises, when read: ValueError for unknown keys and values that cannot be, TypeError for values of a wrong type.
  """

  model: ModelConfig
  stack: StackOptions = dataclasses.field(default_factory=StackOptions)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

  def __post_init__(self):
    _remat(self.stack.remat, "stack.remat")

  @classmethod
  def from_dict(cls, config: Mapping[str, Any]) -> StackConfig:
    """Reads nested dicts, as a YAML or JSON file holds them."""
    return reader.read(cls, copy.deepcopy(config), "")

  @classmethod
  def from_yaml(cls, path: str | pathlib.Path) -> StackConfig:
    """Reads a YAML file, or a shipped config by its name (`tiny`).

    Raises FileNotFoundError where there is neither.
    """
    return cls.from_dict(reader.load_yaml(find(path)))

  @classmethod
  def from_maxtext(cls, config: Mapping[str, Any],
                   layer: Callable[[int, maxtext.LayerKind], LayerSpec] | None = None) -> StackConfig:
    """Reads a MaxText config. `linen_stack.maxtext` says which fields, and which layers need `layer(index, kind)`.

    The names of the fields that are ignored are logged. Raises ValueError or TypeError, with the field, for what cannot be
    honoured.
    """
    translation = maxtext.translate(config, layer)
    if translation.ignored:
      logging.info("Not about the decoder stack, ignored: %s", ", ".join(map(str, translation.ignored)))
    return cls.from_dict(translation.config)

  def to_dict(self) -> dict[str, Any]:
    """The config as plain dicts, lists and values, defaults written out: `from_dict` makes an equal one of it."""
    return reader.plain(self)

  def override(self, assignments: Iterable[str]) -> StackConfig:
    """The config with keys replaced: `["stack.remat=minimal", "train.steps=20"]`, values in YAML."""
    return self.from_dict(reader.assign(self.to_dict(), assignments))

  def build(self) -> tuple[Plan, StackedDecoder]:
    """The plan and the stack.

    Raises ValueError or TypeError, with the key, for classes that do not exist and arguments that do not fit.
    """
    plan = self.plan()
    options = {field.name: getattr(self.stack, field.name) for field in dataclasses.fields(self.stack)}
    options["remat"] = _remat(self.stack.remat, "stack.remat")
    if isinstance(options["remat"], Mapping):
      names = [segment.name for segment in plan]
      for key in options["remat"]:
        if key not in names:
          raise ValueError(f"stack.remat.{key}: neither a segment of the plan nor an argument of a policy; "
                           f"{nearest(key, [*names, *_POLICY_KEYS])}")
    if isinstance(self.stack.offload_params, str):
      options["offload_params"] = reader.import_object(self.stack.offload_params, "stack.offload_params")
    with reader.errors_about("stack"):
      return plan, StackedDecoder(plan, **options)

  def plan(self) -> Plan:
    """The plan alone."""
    model = self.model
    if model.hf is not None:
      return self.published_model().stack.plan
    own = SpecConfig(model.family, model.layer, model.args)
    specs = {name: self._spec(spec, f"model.specs.{name}", name) for name, spec in model.specs.items()}

    def named(entry: str | SpecConfig, where: str) -> LayerSpec:
      return self._spec(entry, where) if isinstance(entry, SpecConfig) else specs[entry]

    with reader.errors_about("model"):
      if model.segments is not None:
        return Plan.of(*(
            Segment(segment.name, tuple(named(entry, f"model.segments.{i}.block.{j}")
                                        for j, entry in enumerate(segment.block)), segment.repeats)
            for i, segment in enumerate(model.segments)))
      if model.pattern is None:
        return Plan.homogeneous(self._spec(own, "model"), model.num_layers)
      pattern = [specs[entry] for entry in model.pattern]
      return Plan.from_layers(pattern) if model.num_layers is None else Plan.cycle(pattern, model.num_layers)

  def published_model(self) -> Any:
    """The language model of `model.hf`, with a stack of default options."""
    from linen_stack import hf  # pylint: disable=g-import-not-at-top  # the core knows no model by name
    with reader.errors_about("model.hf"):
      return hf.model_from_config(self.model.hf, dtype=self.model.dtype, param_dtype=self.model.param_dtype)

  def _spec(self, spec: SpecConfig, where: str, name: str | None = None) -> LayerSpec:
    model, args = self.model, dict(spec.args)
    if spec.family is None and spec.layer is None:
      spec, args = dataclasses.replace(spec, family=model.family, layer=model.layer), {**model.args, **args}
    if (spec.family is None) == (spec.layer is None):
      raise ValueError(f"{where}: name the layers' class by one of family and layer, not by "
                       f"{'both' if spec.layer else 'neither'}")
    cls = _layer_class(spec, where)
    if not callable(cls):
      raise TypeError(f"{where}.layer: {spec.layer} is no layer class, but {cls!r}")
    parameters = {name: p for name, p in inspect.signature(cls).parameters.items() if name not in ("parent", "name")}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in args:
      if key not in parameters and not open_ended:
        raise ValueError(f"{where}.args.{key}: {cls.__name__} has no argument {key!r}; {nearest(str(key), parameters)}")
    for key in _SHARED_ARGS:
      if key in parameters and key not in args and getattr(model, key) is not None:
        args[key] = getattr(model, key)
    for key, parameter in parameters.items():
      if parameter.default is parameter.empty and key not in args and parameter.kind is not parameter.VAR_KEYWORD:
        raise ValueError(f"{where}.args.{key} is missing: {cls.__name__} needs it")
    args = reader.check_arguments(cls, args, f"{where}.args")
    with reader.errors_about(f"{where}.args"):
      cls(**args)  # a layer's own checks, here where the key is known
    return LayerSpec(cls, name, **args)


def find(name: str | pathlib.Path) -> pathlib.Path:
  """The path of a config: a shipped one by name, or a file. Raises FileNotFoundError where there is neither."""
  shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yml"))}
  if str(name) in shipped:
    return shipped[str(name)]
  path = pathlib.Path(name)
  if not path.is_file():
    raise FileNotFoundError(f"no config {str(name)!r}: neither a file nor a shipped config; "
                            f"{nearest(path.stem, shipped)}")
  return path


def _layer_class(spec: SpecConfig, where: str) -> Any:
  if spec.layer is not None:
    return reader.import_object(spec.layer, f"{where}.layer")
  from linen_stack.models import families  # pylint: disable=g-import-not-at-top  # the core knows no model by name
  if spec.family not in families.FAMILIES:
    raise ValueError(f"{where}.family: no family {spec.family!r}; {nearest(spec.family, families.FAMILIES)}")
  return reader.import_object(families.FAMILIES[spec.family], f"{where}.family")


def _remat(value: Any, where: str) -> Any:
  """What `StackedDecoder` takes for remat: a policy, or a mapping from segment names to policies."""
  with reader.errors_about(where):
    if isinstance(value, str):
      return RematPolicy(value)
    if not isinstance(value, Mapping):
      raise TypeError(f"must be a preset's name, a mapping of {', '.join(_POLICY_KEYS)}, or one of these per segment, "
                      f"not {value!r}")
    if not any(key in _POLICY_KEYS for key in value):
      per_segment = {}
      for name, policy in value.items():
        if not isinstance(policy, (str, Mapping)):
          raise ValueError(f"neither a policy's argument nor a segment with its policy: {name}: {policy!r}; "
                           f"{nearest(str(name), _POLICY_KEYS)}")
        per_segment[name] = _one_policy(policy, f"segment {name}")
      return per_segment
    return _one_policy(value, "policy")


def _one_policy(value: str | Mapping[str, Any], who: str) -> RematPolicy:
  if isinstance(value, str):
    return RematPolicy(value)
  for key in value:
    if key not in _POLICY_KEYS:
      raise ValueError(f"{who}: unknown key {key!r}; {nearest(str(key), _POLICY_KEYS)}")
  return RematPolicy(**{key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()})
