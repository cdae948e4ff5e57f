"""Plans from Hugging Face configs: what `config.json` says about which layer is of which kind.

A layer's kind has three parts: how it attends, whether its MLP is dense or a mixture of experts, and whether it
rotates queries and keys. Layers are counted from 0. The fields that are read, with what they mean:

attention
    layer_types               one word per layer: the rule where it is given
    full_attention_interval   every n-th layer is full, the others linear (Qwen3-Next)
    sliding_window_pattern    every n-th layer is full, the others slide (Gemma 3, Cohere 2);
                              `_sliding_window_pattern` is how newer files keep it beside layer_types
    sliding_window            the width of the window; alone, it is for all layers (Mistral)
    use_sliding_window        false turns the window off; true starts it at layer max_window_layers (Qwen 2 and 3), or
                              for the layers without rotary embedding (SmolLM3)
    attention_chunk_size      the width of chunks: in Llama 4 the layers with rotary embedding are chunked
MLP
    num_experts, n_routed_experts, num_local_experts    three names for the number of experts; none or 0: all dense
    first_k_dense_replace     the first k layers are dense (DeepSeek); after them moe_layer_freq, normally 1, says that
                              the layers with an index that it divides have experts
    decoder_sparse_step       every n-th layer has experts (Qwen), but the layers of mlp_only_layers are dense
    interleave_moe_layer_step every n-th layer has experts (Llama 4); moe_layers, a list of layers, goes before it
    mlp_layer_types           one word per layer, "dense" or "sparse"
rotary embedding
    no_rope_layers            one number per layer; in spite of the name, 1: the layer uses it, 0: it does not
    no_rope_layer_interval    every n-th layer goes without, where no_rope_layers is missing or empty

A field that is null counts as missing. What a family leaves out because it is the default is filled in by `model_type`.
A config of a model for more than text has these fields in its `text_config`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NoReturn

from linen_stack.plan import Plan
from linen_stack.specs import LayerSpec, nearest

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
MLP_KINDS = ("dense", "moe")

# The fields that count experts, and those that place them.
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_EXPERT_PLACES = ("first_k_dense_replace", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layers",
                  "moe_layer_freq")

# Families that do not write the value of a field which stands at its default.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3": {"sliding_window_pattern": 6},
    "gemma3_text": {"sliding_window_pattern": 6},
    "gpt_oss": {"sliding_window_pattern": 2},
    "llama4_text": {"no_rope_layer_interval": 4, "interleave_moe_layer_step": 1},
    "qwen3_next": {"full_attention_interval": 4},
    "smollm3": {"no_rope_layer_interval": 4},
}

# Fields of other families that choose between kinds of layers. Reading such a config without them would be wrong.
_NOT_READ = ("attn_layer_period", "block_types", "cross_attention_layers", "expert_layer_period", "full_attn_idxs",
             "global_attn_every_n_layers", "hybrid_override_pattern", "layer_group_size", "layers_block_type",
             "linear_attn_config", "moe_layer_interval", "num_kv_shared_layers")


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What a config says of one layer.

  Args:
    attention: one of ATTENTION_KINDS.
    mlp: "dense", or "moe" for a mixture of experts.
    rope: whether queries and keys are rotated. Linear attention has none.
  """

  attention: str
  mlp: str = "dense"
  rope: bool = True

  def __post_init__(self):
    for value, field, known in ((self.attention, "attention", ATTENTION_KINDS), (self.mlp, "mlp", MLP_KINDS)):
      if value not in known:
        raise ValueError(f"{field} {value!r} is not a kind of layer; {nearest(str(value), known)}")

  @property
  def label(self) -> str:
    """A short name: "full", "sliding_moe", "full_nope"."""
    nope = "" if self.rope or self.attention == "linear_attention" else "_nope"
    return self.attention.removesuffix("_attention") + ("_moe" if self.mlp == "moe" else "") + nope


def plan_from_hf_config(config: Mapping[str, Any], layer: Callable[[int, LayerKind], LayerSpec] | None = None) -> Plan:
  """The plan of a Hugging Face config, with the fewest traced layer bodies.

  Args:
    config: the content of `config.json`.
    layer: called with a layer's index and kind, returns its spec. Layers with equal specs share a traced body, so the
      index is for what really differs by layer. Without it the plan has specs that can be looked at but not built.

  Raises:
    TypeError: `config` is not a mapping, a field has a value of the wrong type, or `layer` returned no LayerSpec.
    ValueError: a field is missing, out of range, unknown to this function, or contradicts another (names the field).
  """
  specs = []
  for i, kind in enumerate(layer_kinds(config)):
    spec = LayerSpec(unspecified_layer, kind.label, kind=kind) if layer is None else layer(i, kind)
    if not isinstance(spec, LayerSpec):
      raise TypeError(f"layer({i}, {kind}) must return a LayerSpec, not {spec!r}")
    specs.append(spec)
  return Plan.from_layers(specs)


def layer_kinds(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
  """The kind of each layer of a Hugging Face config. Raises as `plan_from_hf_config` does."""
  fields = _Fields(config)
  rope = _rope(fields)
  attention = _attention(fields, rope)
  if fields.model_type == "cohere2":
    rope = [kind == "sliding_attention" for kind in attention]
  return tuple(LayerKind(kind, mlp, rotated and kind != "linear_attention")
               for kind, mlp, rotated in zip(attention, _mlp(fields), rope))


def unspecified_layer(name: str | None = None, *, kind: LayerKind) -> NoReturn:
  raise TypeError(f"layer {name!r} ({kind}) has no class: the plan was read without layers. "
                  "Pass plan_from_hf_config(config, layer=...), a function of index and kind that returns a LayerSpec")


class _Fields:
  """The fields of a config, read with checks that name the field. Null, missing and the family's default are one."""

  def __init__(self, config: Mapping[str, Any]):
    if not isinstance(config, Mapping):
      raise TypeError(f"config must be a dict, the content of config.json, not {config!r}")
    text = config.get("text_config")
    self.prefix = "" if text is None else "text_config."
    if text is not None and not isinstance(text, Mapping):
      raise TypeError(f"text_config must be a dict, not {text!r}")
    self.values = config if text is None else text
    self.model_type = self.values.get("model_type")
    self.defaults = _DEFAULTS.get(self.model_type, {})
    if self.get("num_hidden_layers") is None:
      raise ValueError(f"{self.prefix}num_hidden_layers is missing; {nearest('num_hidden_layers', self.values)}")
    self.num_layers = self.count("num_hidden_layers")
    if text is not None and config.get("num_hidden_layers", self.num_layers) != self.num_layers:
      self.fail("num_hidden_layers", f"is {self.num_layers}, but the config around it says "
                                     f"{config['num_hidden_layers']}")
    for field in _NOT_READ:
      if self.values.get(field):
        self.fail(field, "chooses between kinds of layers in a way that is not known here; make the list of specs "
                         "yourself and use Plan.from_layers")

  def fail(self, field: str, problem: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{self.prefix}{field} {problem}")

  def get(self, field: str) -> Any:
    value = self.values.get(field)
    return self.defaults.get(field) if value is None else value

  def count(self, field: str, least: int = 1) -> int | None:
    value = self.get(field)
    if value is None:
      return None
    if isinstance(value, bool) or not isinstance(value, int):
      self.fail(field, f"must be an int, not {value!r}", TypeError)
    if value < least:
      self.fail(field, f"must be at least {least}, not {value}")
    return value

  def every(self, field: str) -> list[bool] | None:
    """For each layer whether it is an n-th one, where the field says n: layers n - 1, 2 n - 1, ..."""
    step = self.count(field)
    return step and [(i + 1) % step == 0 for i in range(self.num_layers)]

  def per_layer(self, field: str, words: Mapping[Any, Any]) -> list[Any] | None:
    """A list with one of `words` per layer, translated."""
    value = self.get(field)
    if value is None:
      return None
    if isinstance(value, str) or not isinstance(value, Sequence):
      self.fail(field, f"must be a list with one entry per layer, not {value!r}", TypeError)
    if len(value) != self.num_layers:
      self.fail(field, f"has {len(value)} entries, but num_hidden_layers is {self.num_layers}")
    for i, word in enumerate(value):
      if not isinstance(word, (str, int)) or word not in words:
        self.fail(f"{field}[{i}]", f"is {word!r}; {nearest(str(word), map(str, words))}")
    return [words[word] for word in value]

  def layers(self, field: str) -> list[int] | None:
    """A list of layer indices."""
    value = self.get(field)
    if value is None:
      return None
    if isinstance(value, str) or not isinstance(value, Sequence):
      self.fail(field, f"must be a list of layer indices, not {value!r}", TypeError)
    for i in value:
      if isinstance(i, bool) or not isinstance(i, int):
        self.fail(field, f"must be a list of layer indices; {i!r} is none", TypeError)
      if not 0 <= i < self.num_layers:
        self.fail(field, f"has layer {i}, but the layers are 0 to {self.num_layers - 1}")
    return list(value)


def _rope(fields: _Fields) -> list[bool]:
  """Whether each layer rotates queries and keys."""
  without = fields.every("no_rope_layer_interval")
  if fields.get("no_rope_layers") == []:  # as good as missing: Llama 4 files have it
    return [not skip for skip in without] if without else fields.fail(
        "no_rope_layers", "is empty and there is no no_rope_layer_interval; give one number per layer")
  listed = fields.per_layer("no_rope_layers", {0: False, 1: True})
  if listed is not None:
    return listed
  return [not skip for skip in without] if without else [True] * fields.num_layers


def _attention(fields: _Fields, rope: list[bool]) -> list[str]:
  listed = fields.per_layer("layer_types", {kind: kind for kind in ATTENTION_KINDS})
  if listed is None:
    return _unlisted_attention(fields, rope)
  # Newer files have the list and the step that it was made from.
  steps = {"full_attention_interval": "linear_attention", "sliding_window_pattern": "sliding_attention"}
  for field, others in steps.items():
    if fields.values.get(field) is not None:
      for i, full in enumerate(fields.every(field)):
        if listed[i] != ("full_attention" if full else others):
          fields.fail(field, f"= {fields.get(field)} contradicts layer_types: layer {i} is {listed[i]!r} there")
  for kind, field in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
    if kind in listed and field in fields.values and fields.get(field) is None:
      fields.fail(field, f"is null, but layer_types has {kind!r} at layer {listed.index(kind)}; give the width")
  if "sliding_attention" in listed and fields.get("use_sliding_window") is False:
    fields.fail("use_sliding_window", f"is false, but layer_types has 'sliding_attention' at layer "
                                      f"{listed.index('sliding_attention')}")
  return listed


def _unlisted_attention(fields: _Fields, rope: list[bool]) -> list[str]:
  """The kinds of attention where there are no layer_types."""
  every_full = fields.every("full_attention_interval")
  if every_full:
    return ["full_attention" if full else "linear_attention" for full in every_full]
  if fields.count("attention_chunk_size") or fields.model_type == "llama4_text":
    return ["chunked_attention" if rotated else "full_attention" for rotated in rope]
  window = fields.count("sliding_window", 0)
  private = "_sliding_window_pattern"
  every_full = fields.every("sliding_window_pattern" if fields.values.get(private) is None else private)
  if every_full:
    if "sliding_window" in fields.values and not window:
      fields.fail("sliding_window", f"is {fields.values['sliding_window']!r}, but some layers have one; give the width")
    return ["full_attention" if full else "sliding_attention" for full in every_full]
  qwen = str(fields.model_type).startswith("qwen")
  switch = fields.get("use_sliding_window")
  if not isinstance(switch, (bool, type(None))):
    fields.fail("use_sliding_window", f"must be true or false, not {switch!r}", TypeError)
  # Qwen and SmolLM3 leave it off by default; the others that have a window use it in every layer.
  on = bool(window) and (switch if switch is not None else not qwen and fields.model_type != "smollm3")
  first = fields.count("max_window_layers", 0)
  if on and qwen and first is None:
    fields.fail("max_window_layers", "is missing; it says from which layer on use_sliding_window counts")
  slides = [on and i >= (first or 0) for i in range(fields.num_layers)]
  if fields.model_type == "smollm3":
    slides = [on and not rotated for rotated in rope]
  return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _mlp(fields: _Fields) -> list[str]:
  counts = {field: fields.count(field, 0) for field in _EXPERTS if fields.get(field) is not None}
  if len(set(counts.values())) > 1:
    fields.fail(" and ".join(counts), f"differ: {counts}")
  placed = _placed_experts(fields)
  listed = fields.per_layer("mlp_layer_types", {"dense": False, "sparse": True})
  given = [field for field in (*_EXPERT_PLACES, "mlp_layer_types") if fields.values.get(field)]
  if not any(field in fields.values for field in _EXPERTS) and given and any(placed if listed is None else listed):
    fields.fail(given[0], f"gives layers experts, but their number is missing; give one of {', '.join(_EXPERTS)}")
  if not any(counts.values()):
    placed = [False] * fields.num_layers
  if listed is not None and listed != placed and (given != ["mlp_layer_types"] or not any(counts.values())):
    i = next(i for i in range(fields.num_layers) if listed[i] != placed[i])
    fields.fail(f"mlp_layer_types[{i}]", "contradicts the other fields: by them the layer "
                                         f"{'has experts' if placed[i] else 'is dense'}")
  return ["moe" if experts else "dense" for experts in (placed if listed is None else listed)]


def _placed_experts(fields: _Fields) -> list[bool]:
  """Which layers have experts, by every field but their number and mlp_layer_types."""
  everywhere = [True] * fields.num_layers
  num_dense, frequency = fields.count("first_k_dense_replace", 0) or 0, fields.count("moe_layer_freq") or 1
  if num_dense > fields.num_layers:
    fields.fail("first_k_dense_replace", f"is {num_dense}, but there are {fields.num_layers} layers")
  dense = fields.layers("mlp_only_layers") or []
  sparse = fields.every("decoder_sparse_step") or everywhere
  interleaved = fields.every("interleave_moe_layer_step") or everywhere
  moe_layers = fields.layers("moe_layers")
  if moe_layers is not None:
    interleaved = [i in moe_layers for i in range(fields.num_layers)]
  return [i >= num_dense and i % frequency == 0 and i not in dense and sparse[i] and interleaved[i]
          for i in range(fields.num_layers)]
