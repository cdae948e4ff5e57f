"""MaxText configs: what they say of the decoder stack, as a config of this library.

The fields that are read, with what they become. A field that is missing or null has MaxText's default.

which layers
    num_decoder_layers        how many; it and the sizes below also as base_..., with global_parameter_scale
    first_num_dense_layers    the first n layers are dense, the others have experts
    num_experts               more than 1: the layers have experts, every interleave_moe_layer_step-th of them
    inhomogeneous_layer_cycle_interval    layers differ by their place in a cycle of this length; decoder blocks with a
                              pattern of their own (`OWN_CYCLES`) have its length
    engram_layers             indices of layers with an Engram
    decoder_block             the family
how they are applied
    scan_layers, param_scan_axis    stack.scan, stack.param_axis
    parameter_memory_host_offload   stack.offload_params
    remat_policy              stack.remat: presets have the same names here. custom: the fields of `TENSORS` say of
                              each name that layers tag: device (save), offload or remat. What enters a layer is
                              always kept, so that remat for decoder_layer_input is the same as device
the language model around them
    emb_dim, vocab_size, normalization_layer_epsilon, dtype, weight_dtype, logits_via_embedding
the reference layer, where no function makes the layers
    mlp_dim, num_query_heads, num_kv_heads, head_dim, rope_max_timescale, use_qk_norm, and with enable_dropout also
    dropout_rate (at the places where the reference layer has dropout)

Every other field is ignored, and `Translation.ignored` lists it. But a field whose name is nearly one of these, that
asks for another stack (pipelining), or that asks of the reference layer what it does not do is an error.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from linen_stack import config_reader as reader
from linen_stack.maxtext_fields import Fields
from linen_stack.plan import Plan
from linen_stack.specs import LayerSpec, nearest
from linen_stack.policies import CARRY_NAME, PRESETS

TENSORS = (CARRY_NAME, "context", "query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj", "out_proj", "mlpwi",
           "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "mla_q", "mla_kv", "query_wa_proj",
           "kv_wa_proj", "attention_out", "engram", "indexer_cutoff_threshold")
OWN_CYCLES = {"gemma3": 6, "gemma4": 6, "gpt_oss": 2, "olmo3": 4}

_PLACES = ("device", "offload", "remat")
_OLD_PRESETS = {"minimal_flash": "minimal_with_context"}
# Blocks whose layers have experts whatever num_experts says.
_EXPERT_BLOCKS = ("deepseek", "deepseek4")
# Blocks that the reference layer is.
_REFERENCE = ("llama2", "mistral", "qwen3")
_PASS_LAYER = "pass layer=, a function of a layer's index and kind that returns its LayerSpec"

# Other ways to run a stack: the field, and the value that does not ask for it.
_OTHER_STACKS = {"dcn_pipeline_parallelism": 1, "ici_pipeline_parallelism": 1, "use_batch_split_schedule": False}
# The same for what the reference layer and the language model do not do, with all such values.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "activations_in_float32", "attention_bias", "attention_sink", "fused_mlp", "fused_qkv", "mlp_bias", "moba",
        "quantize_kvcache", "share_kv_projections", "temperature_tuning", "use_indexer", "use_mrope",
        "use_post_attn_norm", "use_post_ffw_norm", "use_qk_clip", "use_untrainable_positional_embedding"), (False,)),
    **dict.fromkeys(("attn_logits_soft_cap", "final_logits_soft_cap", "hidden_size_per_layer_input", "mtp_num_layers",
                     "num_kv_shared_layers"), (0,)),
    **dict.fromkeys(("mhc_expansion_rate", "partial_rotary_factor", "rope_linear_scaling_factor", "rope_min_timescale"),
                    (1,)),
    **dict.fromkeys(("attention_output_dim", "mlp_activations_limit", "nope_layer_interval", "trainable_position_size"),
                    (-1, 0)),
    "attention_type": ("global",),
    "mlp_activations": (["silu", "linear"], ("silu", "linear")),
    "quantization": ("",),
    "rope_type": ("default",),
}


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What a config says of one layer.

  Args:
    mlp: "dense", or "moe" for a mixture of experts.
    position: the layer's place in the cycle, with layer 0 of the decoder at 0. None: there is no cycle.
    engram: whether the layer has an Engram.
  """

  mlp: str = "dense"
  position: int | None = None
  engram: bool = False

  @property
  def label(self) -> str:
    """A short name: "dense", "moe_3", "moe_engram"."""
    return self.mlp + ("" if self.position is None else f"_{self.position}") + ("_engram" if self.engram else "")


@dataclasses.dataclass(frozen=True)
class Translation:
  """A MaxText config in the words of this library."""

  config: dict[str, Any]
  """What `StackConfig.from_dict` reads."""
  ignored: tuple[str, ...]
  """The fields of the MaxText config that have no part in it."""


def translate(config: Mapping[str, Any], layer: Callable[[int, LayerKind], LayerSpec] | None = None) -> Translation:
  """Translates a MaxText config.

  Args:
    config: fields and values, flat, as MaxText's YAML files have them.
    layer: called with a layer's index and kind, returns its spec. A config names classes by module, so the class must
      be importable, and its arguments must be plain values or dtypes. What is read of MaxText's sizes beyond those of
      the language model is up to this function. Without it all layers are the reference layer.

  Raises:
    TypeError: a value has the wrong type, or `layer` returned no LayerSpec.
    ValueError: a field is missing, out of range, or cannot be honoured; without `layer`, also layers of kinds that the
      reference layer is not.
  """
  fields = Fields(config)
  for name, off in _OTHER_STACKS.items():
    if fields.get(name, off) != off:
      raise ValueError(f"{name} is {fields.get(name)!r}, which no stack here does; set it to {off!r}")
  model = {
      "vocab": fields.count("vocab_size"),
      "embed": fields.size("emb_dim"),
      "tie_embeddings": fields.flag("logits_via_embedding", False),
      "norm_eps": fields.number("normalization_layer_epsilon", 1e-5),
      "dtype": fields.dtype("dtype", "bfloat16"),
      "param_dtype": fields.dtype("weight_dtype", "float32"),
  }
  kinds = _kinds(fields)
  model |= _reference_layers(fields, kinds) if layer is None else _made_layers(kinds, layer)
  stack = _stack(fields)
  return Translation({"model": {key: value for key, value in model.items() if value is not None}, "stack": stack},
                     fields.rest())


def _kinds(fields: Fields) -> list[LayerKind]:
  """The kind of each layer."""
  num_layers = fields.needed_size("num_decoder_layers")
  cycle = _cycle(fields, num_layers)
  dense, step = fields.count("first_num_dense_layers", 0, least=0), fields.count("interleave_moe_layer_step", 1)
  if dense > num_layers:
    raise ValueError(f"first_num_dense_layers is {dense}, but there are {num_layers} layers")
  moe = fields.word("decoder_block", "llama2") in _EXPERT_BLOCKS
  placed = ["first_num_dense_layers"] * (dense > 0) + ["interleave_moe_layer_step"] * (step > 1)
  if placed and fields.get("num_experts") == 1 and not moe:
    raise ValueError(f"{placed[0]} says which layers have experts, but num_experts is 1")
  moe = moe or bool(placed) or fields.count("num_experts", 1) > 1
  engrams = fields.get("engram_layers", ())
  if not isinstance(engrams, Sequence) or isinstance(engrams, str):
    raise TypeError(f"engram_layers must be a list of layer indices, not {engrams!r}")
  for index in engrams:
    if isinstance(index, bool) or not isinstance(index, int):
      raise TypeError(f"engram_layers must be a list of layer indices; {index!r} is none")
    if not 0 <= index < num_layers:
      raise ValueError(f"engram_layers has layer {index}, but the layers are 0 to {num_layers - 1}")
  return [LayerKind("moe" if moe and i >= dense and (i + 1) % step == 0 else "dense",
                    i % cycle if cycle > 1 else None, i in engrams) for i in range(num_layers)]


def _cycle(fields: Fields, num_layers: int) -> int:
  name = "inhomogeneous_layer_cycle_interval"
  cycle, block = fields.count(name, 1), fields.word("decoder_block", "llama2")
  if cycle > num_layers:
    raise ValueError(f"{name} is {cycle}, but there are {num_layers} layers")
  own = OWN_CYCLES.get(block)
  if own is not None and cycle > 1 and cycle % own:
    raise ValueError(f"{name} is {cycle}, but the layers of decoder_block {block!r} repeat every {own}; leave it out")
  return own or cycle


def _reference_layers(fields: Fields, kinds: list[LayerKind]) -> dict[str, Any]:
  """The part of the section `model` that says which layers: all the reference layer."""
  block, embed = fields.word("decoder_block", "llama2"), fields.needed_size("emb_dim")
  labels = [kind.label for kind in kinds]
  others = {label: labels.index(label) for label in labels if label != "dense"}
  if others:
    missing = " or ".join(f"{label!r} (layer {first}{', ...' if labels.count(label) > 1 else ''})"
                          for label, first in others.items())
    raise ValueError(f"the reference layer is not of kind {missing}; {_PASS_LAYER}")
  if block not in _REFERENCE:
    raise ValueError(f"the reference layer is not of decoder_block {block!r} ({nearest(block, _REFERENCE)}); "
                     f"{_PASS_LAYER}")
  qk_norm = fields.flag("use_qk_norm", False)
  for name, off in {**_NOT_DONE, **({} if block == "qwen3" else {"use_qk_norm": (False,)})}.items():
    if fields.get(name, off[0]) not in off:
      raise ValueError(f"{name} is {fields.get(name)!r}, which the reference layer does not do; "
                       f"set it to {off[0]!r}, or {_PASS_LAYER}")
  if fields.flag("normalize_embedding_logits", True) and fields.flag("logits_via_embedding", False):
    raise ValueError("normalize_embedding_logits is true (MaxText's default) beside logits_via_embedding: it divides "
                     "the logits by the root of emb_dim, which LanguageModel does not; set it to false")
  dropout = fields.number("dropout_rate", 0.0)
  return {
      "embed": embed,
      "family": "decoder",
      "args": {
          "mlp": fields.needed_size("mlp_dim"),
          "num_heads": fields.needed_size("num_query_heads"),
          "num_kv_heads": fields.needed_size("num_kv_heads"),
          "head_dim": fields.count("head_dim", 128),
          "qk_norm": qk_norm,
          "rope_theta": fields.number("rope_max_timescale", 10000.0),
          "dropout": dropout if fields.flag("enable_dropout", True) else 0.0,
      },
      "num_layers": len(kinds),
  }


def _made_layers(kinds: list[LayerKind], layer: Callable[[int, LayerKind], LayerSpec]) -> dict[str, Any]:
  """The same: layers that a function made, as segments of named specs."""
  specs = []
  for i, kind in enumerate(kinds):
    specs.append(layer(i, kind))
    if not isinstance(specs[i], LayerSpec):
      raise TypeError(f"layer({i}, {kind}) must return a LayerSpec, not {specs[i]!r}")
  names: dict[LayerSpec, str] = {}
  for spec in specs:
    if spec not in names:
      taken = [other.label for other in names].count(spec.label)
      names[spec] = f"{spec.label}_{taken}" if taken else spec.label
  if len(set(names.values())) < len(names):
    raise ValueError(f"layer= gave different specs one name ({', '.join(names.values())}); name them apart")
  segments = [{"name": segment.name, "block": [names[spec] for spec in segment.block], "repeats": segment.length}
              for segment in Plan.from_layers(specs)]
  return {"specs": {name: _importable(spec) for spec, name in names.items()}, "segments": segments}


def _importable(spec: LayerSpec) -> dict[str, Any]:
  """A spec as a config writes it."""
  path = f"{getattr(spec.cls, '__module__', None)}:{getattr(spec.cls, '__qualname__', None)}"
  if "<" in path or path.endswith(":None") or reader.import_object(path, f"layer= gave {spec}") is not spec.cls:
    raise ValueError(f"layer= gave {spec}, whose class cannot be imported, and a config names classes; define it at "
                     "the top of a module")
  return {"layer": path, "args": {name: _plain(value, name, spec) for name, value in spec.kwargs.items()}}


def _plain(value: Any, name: str, spec: LayerSpec) -> Any:
  if name == "dtype" or name.endswith("_dtype"):
    return jnp.dtype(value).name
  if isinstance(value, Mapping):
    return {key: _plain(entry, "", spec) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(entry, "", spec) for entry in value]
  if value is not None and not isinstance(value, (bool, int, float, str)):
    raise ValueError(f"layer= gave {spec}, whose argument {name or value!r} is no plain value, as a config needs; let "
                     "the layer make it from one")
  return value


def _stack(fields: Fields) -> dict[str, Any]:
  """The section `stack`."""
  axis = fields.get("param_scan_axis", 1)
  if isinstance(axis, bool) or not isinstance(axis, int):
    raise TypeError(f"param_scan_axis must be an int, not {axis!r}")
  scan, offload = fields.flag("scan_layers", True), fields.flag("parameter_memory_host_offload", False)
  if offload and not scan:
    raise ValueError("parameter_memory_host_offload saves nothing with scan_layers false: outside of a loop the compiler "
                     "fetches the parameters of many layers at once; set scan_layers true")
  if offload and axis != 0:
    raise ValueError(f"parameter_memory_host_offload needs param_scan_axis 0, not {axis} (MaxText's default is 1): "
                     "along another axis the whole stack would be copied to take one layer out of it")
  return {"remat": _remat(fields), "scan": scan, "param_axis": axis, "offload_params": offload}


def _remat(fields: Fields) -> str | dict[str, Any]:
  name = fields.word("remat_policy", "full")
  name = _OLD_PRESETS.get(name, name)
  if name in PRESETS:
    return name
  if name != "custom":
    raise ValueError(f"remat_policy: unknown policy {name!r}; {nearest(name, [*PRESETS, 'custom'])}")
  places: dict[str, list[str]] = {place: [] for place in _PLACES}
  # Tensors that are not in the list are taken at their word: the stack checks that its layers tag them.
  said = [key for key, value in fields.values.items() if isinstance(value, str) and value in ("device", "offload")]
  for tensor in dict.fromkeys([*(name for name in TENSORS if name in fields.values), *said]):
    place = fields.get(tensor, "remat")
    if place not in _PLACES:
      raise ValueError(f"{tensor} must be one of {', '.join(map(repr, _PLACES))}, not {place!r}")
    places[place].append(tensor)
  save = [tensor for tensor in places["device"] if tensor != CARRY_NAME]
  offload = [tensor for tensor in places["offload"] if tensor != CARRY_NAME]
  return {"save": save, "offload": offload, "carry": "offload" if CARRY_NAME in places["offload"] else "save"}
