"""Llama, Mistral, Qwen 2 and Qwen 3: published models whose layers are `DecoderLayer`s.

They differ in little: Llama may have biases, Mistral a window in every layer, Qwen 2 biases on query, key and value,
Qwen 3 norms of query and key heads, and both Qwens a window from some layer on.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from linen_stack.hf_plan import LayerKind
from linen_stack.models import rope
from linen_stack.models.decoder import DecoderLayer
from linen_stack.models.family import (
    ATTENTION, FEED_FORWARD, OUTSIDE, Config, Family, Tensor, field, layer_modules, require, shared)
from linen_stack.specs import LayerSpec

NORMS = (
    Tensor("model.layers.{layer}.input_layernorm.weight", "attention_norm/scale"),
    Tensor("model.layers.{layer}.post_attention_layernorm.weight", "feed_forward_norm/scale"),
)


def options(config: Config) -> dict[str, Any]:
  """The arguments of `LanguageModel` that a config gives."""
  return dict(vocab=field(config, "vocab_size", required=True), embed=field(config, "hidden_size", required=True),
              tie_embeddings=field(config, "tie_word_embeddings", bool, False),
              norm_eps=field(config, "rms_norm_eps", float, 1e-6))


def attention_sizes(config: Config) -> dict[str, int]:
  """The numbers of heads and their width."""
  embed, heads = field(config, "hidden_size", required=True), field(config, "num_attention_heads", required=True)
  return dict(num_heads=heads, num_kv_heads=field(config, "num_key_value_heads", default=heads),
              head_dim=field(config, "head_dim", default=embed // heads))


def window(config: Config, index: int, kind: LayerKind, family: str, windows: bool = True) -> int | None:
  """The window of a layer. Raises ValueError for a kind of layer that the family's published code does not have."""
  if kind.mlp != "dense" or not kind.rope or kind.attention not in ("full_attention", "sliding_attention"):
    raise ValueError(f"layer {index} is {kind.label!r} by the config; {family} has no such layers")
  if kind.attention == "full_attention":
    return None
  if not windows:
    raise ValueError(f"layer {index} has a window by the config; {family} has none, and its published code reads no "
                     "such field")
  return field(config, "sliding_window", required=True)


def _layer(family: str, config: Config) -> Callable[[int, LayerKind], LayerSpec]:
  rotary = rope.from_config(config)
  if rotary.fraction != 1:
    raise ValueError(f"partial_rotary_factor is {rotary.fraction}; {family} rotates whole heads")
  bias = field(config, "attention_bias", bool, False)
  kwargs = dict(
      embed=field(config, "hidden_size", required=True), mlp=field(config, "intermediate_size", required=True),
      **attention_sizes(config), qk_norm=family == "qwen3", rope_theta=rotary.theta, rope_scaling=rotary.scaling,
      qkv_bias=family == "qwen2" or bias, out_bias=family != "qwen2" and bias,
      mlp_bias=family == "llama" and field(config, "mlp_bias", bool, False),
      norm_eps=field(config, "rms_norm_eps", float, 1e-6))

  def layer(index: int, kind: LayerKind) -> LayerSpec:
    width = window(config, index, kind, family, family != "llama")
    if family == "mistral" and width != config.get("sliding_window"):
      raise ValueError(f"layer {index} has no window by layer_types; {family} has sliding_window in every layer")
    return LayerSpec(DecoderLayer, kind.label, **kwargs, window=width)

  return layer


def _config_of(family: str, architecture: str, model: Any) -> dict[str, Any]:
  layers = layer_modules(model)
  for i, layer in enumerate(layers):
    if type(layer) is not DecoderLayer:  # pylint: disable=unidiomatic-typecheck  # a subclass may compute anything
      raise ValueError(f"layer {i} is a {type(layer).__name__}, not a DecoderLayer")
  same = shared(layers, "embed", "mlp", "num_heads", "qk_norm", "rope_theta", "rope_scaling", "qkv_bias", "out_bias",
                "mlp_bias", "norm_eps", "num_kv_heads", "head_dim")
  require("its layers", same, embed=model.embed, qk_norm=family == "qwen3", norm_eps=model.norm_eps)
  require("the model", vars(model), embed_scale=None, zero_centered_norm=False, logit_softcap=None)
  if same["rope_theta"] is None:
    raise ValueError("its layers have no rotary embedding")
  if family == "qwen2":
    require("its layers", same, qkv_bias=True, out_bias=False)
  else:
    require("its layers", same, out_bias=same["qkv_bias"])
  if family != "llama":
    require("its layers", same, mlp_bias=False)
  config = dict(
      architectures=[architecture], model_type=family, vocab_size=model.vocab, hidden_size=model.embed,
      intermediate_size=same["mlp"], num_hidden_layers=len(layers), num_attention_heads=same["num_heads"],
      num_key_value_heads=same["num_kv_heads"] or same["num_heads"],
      head_dim=same["head_dim"] or model.embed // same["num_heads"], hidden_act="silu",
      rms_norm_eps=model.norm_eps, rope_theta=same["rope_theta"],
      rope_scaling=same["rope_scaling"] and dict(same["rope_scaling"]), tie_word_embeddings=model.tie_embeddings)
  if family in ("llama", "qwen3"):
    config["attention_bias"] = same["qkv_bias"]
  if family == "llama":
    config["mlp_bias"] = same["mlp_bias"]
  return {**config, **_windows(family, [layer.window for layer in layers])}


def _windows(family: str, windows: list[int | None]) -> dict[str, Any]:
  """The fields of a config that say which layers have which window."""
  widths = sorted({width for width in windows if width is not None})
  if family == "llama" and widths:
    raise ValueError(f"layer {windows.index(widths[0])} has a window")
  if family == "llama":
    return {}
  if len(widths) > 1:
    raise ValueError(f"its windows differ: {', '.join(map(str, widths))}")
  if family == "mistral":
    if widths and None in windows:
      raise ValueError(f"layer {windows.index(None)} has no window, others have")
    return {"sliding_window": widths[0] if widths else None}
  kinds = ["full_attention" if width is None else "sliding_attention" for width in windows]
  first = kinds.index("sliding_attention") if widths else len(kinds)
  return {"use_sliding_window": bool(widths), "sliding_window": widths[0] if widths else None,
          "max_window_layers": first, "layer_types": kinds}


def _family(name: str, architecture: str, **defaults: Any) -> Family:
  return Family(
      name=name, model_types=(name,), layer=functools.partial(_layer, name), options=options,
      tensors=OUTSIDE + ATTENTION + FEED_FORWARD + NORMS, config_of=functools.partial(_config_of, name, architecture),
      defaults=defaults, fixed={"hidden_act": ("silu",), "attention_dropout": (0,)})


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM", num_key_value_heads=8, sliding_window=4096)
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", num_key_value_heads=32, sliding_window=4096, max_window_layers=28)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", num_key_value_heads=32, head_dim=128, sliding_window=4096,
                max_window_layers=28)
