"""Gemma 3: local and global attention, a norm before and after each part, two rotary bases, scaled embeddings.

Every norm multiplies by 1 + scale. Local layers have a window and a rotary base of their own; only global ones may have
a rotary scaling.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.hf_plan import LayerKind
from linen_stack.models import rope
from linen_stack.models.family import (
    ATTENTION, FEED_FORWARD, OUTSIDE, Config, Family, Tensor, field, layer_modules, require, shared)
from linen_stack.models.layers import Attention, DType, KVCache, RMSNorm, SwiGLU, empty_cache, require_count
from linen_stack.models.llama import attention_sizes, options, window
from linen_stack.specs import LayerSpec

Array = jax.Array

# Rotary bases of global and local layers where a config says none.
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3Layer(nn.Module, kw_only=True):
  """One layer of Gemma 3.

  The residual stream keeps the dtype that it comes in with. Tags are those of `DecoderLayer`.

  Args:
    embed: width of the residual stream.
    mlp: width of the feed-forward part.
    num_heads: query heads.
    num_kv_heads: key and value heads, a divisor of num_heads.
    head_dim: width of a head, even.
    window: how many tokens a token sees, itself among them. None: all before it (a global layer).
    query_pre_attn_scalar: query times key is divided by its square root. Default: head_dim.
    rope_theta, rope_scaling: as in `rope.frequencies`.
    attention_bias: biases on attention's four projections.
    norm_eps: what the norms add to the mean square.
    dtype: of the computation.
    param_dtype: of the stored parameters.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  embed: int
  mlp: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int | None = None
  query_pre_attn_scalar: float | None = None
  rope_theta: float = GLOBAL_THETA
  rope_scaling: Mapping[str, Any] | None = None
  attention_bias: bool = False
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    for argument in ("embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "window"):
      if argument != "window" or self.window is not None:
        require_count(f"Gemma3Layer: {argument}", getattr(self, argument))
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"Gemma3Layer: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
    if self.query_pre_attn_scalar is not None and not self.query_pre_attn_scalar > 0:
      raise ValueError(f"Gemma3Layer: query_pre_attn_scalar must be above 0, not {self.query_pre_attn_scalar}")
    try:
      rope.frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
    except ValueError as error:
      raise ValueError(f"Gemma3Layer: {error}") from None
    super().__post_init__()

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache for this layer: key and value `[batch, length, kv_heads, head_dim]`, index `[]`."""
    return empty_cache(batch, length, self.num_kv_heads, self.head_dim, dtype)

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None, *, deterministic: bool = True) -> Array | tuple[Array, KVCache]:
    """x `[batch, seq, embed]` to x, or to (x, extended cache) where kv_cache is given. Arguments: see `DecoderLayer`.

    There is nothing random in this layer: `deterministic` is accepted because all layers of a stack are called alike.
    """
    if x.ndim != 3 or x.shape[-1] != self.embed:
      raise ValueError(f"Gemma3Layer takes [batch, seq, embed={self.embed}], not {x.shape}")
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    norm = functools.partial(RMSNorm, eps=self.norm_eps, zero_centered=True, **dtypes)
    scalar = self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar
    x = checkpoint_name(x, "decoder_layer_input")

    y = norm(name="attention_norm")(x)
    y, kv_cache = Attention(
        num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window,
        qk_norm=True, zero_centered_norm=True, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling,
        scale=scalar**-0.5, qkv_bias=self.attention_bias, out_bias=self.attention_bias, norm_eps=self.norm_eps,
        name="attention", **dtypes)(y, mask, positions, kv_cache)
    y = norm(name="attention_post_norm")(y)
    x = checkpoint_name(x + y.astype(x.dtype), "attention_out")

    y = norm(name="feed_forward_norm")(x)
    y = SwiGLU(self.mlp, activation=functools.partial(nn.gelu, approximate=True), name="feed_forward", **dtypes)(y)
    y = norm(name="feed_forward_post_norm")(y)
    x = x + y.astype(x.dtype)
    return x if kv_cache is None else (x, kv_cache)


def _rope(config: Config, is_global: bool) -> rope.Rope:
  """The rotary embedding of global or of local layers. Newer configs have an entry for each; older ones fields."""
  kind, field_name, theta = (("full_attention", "rope_theta", GLOBAL_THETA) if is_global else
                             ("sliding_attention", "rope_local_base_freq", LOCAL_THETA))
  own = {"rope_theta": config.get(field_name), "max_position_embeddings": config.get("max_position_embeddings")}
  entries = config.get("rope_parameters")
  if entries is None:
    own["rope_scaling"] = config.get("rope_scaling") if is_global else None
  elif not isinstance(entries, Mapping) or entries.keys() - {"full_attention", "sliding_attention"}:
    raise ValueError(f"rope_parameters must have entries full_attention and sliding_attention, not {entries!r}")
  else:
    own.update(rope_parameters=entries.get(kind) or {}, rope_scaling=config.get("rope_scaling"))
  found = rope.from_config(own, default_theta=theta)
  if found.fraction != 1:
    raise ValueError(f"partial_rotary_factor is {found.fraction}; gemma3 rotates whole heads")
  return found


def _layer(config: Config) -> Callable[[int, LayerKind], LayerSpec]:
  kwargs = dict(
      embed=field(config, "hidden_size", required=True), mlp=field(config, "intermediate_size", required=True),
      **attention_sizes(config), query_pre_attn_scalar=field(config, "query_pre_attn_scalar", float, 256),
      attention_bias=field(config, "attention_bias", bool, False), norm_eps=field(config, "rms_norm_eps", float, 1e-6))
  of_global, of_local = _rope(config, True), _rope(config, False)

  def layer(index: int, kind: LayerKind) -> LayerSpec:
    width = window(config, index, kind, "gemma3")
    rotary = of_global if width is None else of_local
    return LayerSpec(Gemma3Layer, kind.label, **kwargs, window=width, rope_theta=rotary.theta,
                     rope_scaling=rotary.scaling)

  return layer


def _options(config: Config) -> dict[str, Any]:
  return {**options(config), "embed_scale": field(config, "hidden_size", required=True) ** 0.5,
          "zero_centered_norm": True, "tie_embeddings": field(config, "tie_word_embeddings", bool, True),
          "logit_softcap": field(config, "final_logit_softcapping", float)}


def _config_of(model: Any) -> dict[str, Any]:
  layers = layer_modules(model)
  for i, layer in enumerate(layers):
    if type(layer) is not Gemma3Layer:  # pylint: disable=unidiomatic-typecheck  # a subclass may compute anything
      raise ValueError(f"layer {i} is a {type(layer).__name__}, not a Gemma3Layer")
  same = shared(layers, "embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "query_pre_attn_scalar",
                "attention_bias", "norm_eps")
  require("its layers", same, embed=model.embed, norm_eps=model.norm_eps)
  require("the model", vars(model), embed_scale=model.embed**0.5, zero_centered_norm=True)
  of_kind = {}
  for kind, group in (("full_attention", [layer for layer in layers if layer.window is None]),
                      ("sliding_attention", [layer for layer in layers if layer.window is not None])):
    theta = GLOBAL_THETA if kind == "full_attention" else LOCAL_THETA
    of_kind[kind] = shared(group, "window", "rope_theta", "rope_scaling") if group else {
        "window": None, "rope_theta": theta, "rope_scaling": None}
  config = dict(
      architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=model.vocab, hidden_size=model.embed,
      intermediate_size=same["mlp"], num_hidden_layers=len(layers), num_attention_heads=same["num_heads"],
      num_key_value_heads=same["num_kv_heads"], head_dim=same["head_dim"], hidden_activation="gelu_pytorch_tanh",
      query_pre_attn_scalar=same["query_pre_attn_scalar"] or same["head_dim"],
      attention_bias=same["attention_bias"], rms_norm_eps=model.norm_eps, tie_word_embeddings=model.tie_embeddings,
      final_logit_softcapping=model.logit_softcap,
      layer_types=["full_attention" if layer.window is None else "sliding_attention" for layer in layers])
  if of_kind["sliding_attention"]["window"] is not None:
    config["sliding_window"] = of_kind["sliding_attention"]["window"]
  of_global, of_local = of_kind["full_attention"], of_kind["sliding_attention"]
  if of_local["rope_scaling"] is None:  # fields that older readers know as well
    config.update(rope_theta=of_global["rope_theta"], rope_local_base_freq=of_local["rope_theta"],
                  rope_scaling=of_global["rope_scaling"] and dict(of_global["rope_scaling"]))
  else:
    config["rope_parameters"] = {
        kind: {"rope_type": "default", **(values["rope_scaling"] or {}), "rope_theta": values["rope_theta"]}
        for kind, values in of_kind.items()}
  return config


NORMS = tuple(Tensor(f"model.layers.{{layer}}.{theirs}.weight", f"{ours}/scale") for theirs, ours in (
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "attention_post_norm"),
    ("pre_feedforward_layernorm", "feed_forward_norm"),
    ("post_feedforward_layernorm", "feed_forward_post_norm"),
))

GEMMA3 = Family(
    name="gemma3", model_types=("gemma3_text",), layer=_layer, options=_options,
    tensors=OUTSIDE + ATTENTION + FEED_FORWARD + NORMS, config_of=_config_of,
    # Files of models for text and images leave out what these are.
    defaults=dict(vocab_size=262_208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
                  num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096,
                  max_position_embeddings=131_072),
    fixed={"hidden_activation": ("gelu_pytorch_tanh",), "attention_dropout": (0,), "attn_logit_softcapping": (),
           "use_bidirectional_attention": (False,)},
    within={"gemma3": "language_model."})
