"""Qwen3-Next: gated delta nets, every n-th layer gated attention instead, and a mixture of experts with a shared one.

Norms multiply by 1 + scale, but for the one inside a delta net. Attention rotates a part of each head.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.hf_plan import LayerKind, layer_kinds
from linen_stack.models import rope
from linen_stack.models.delta_net import GatedDeltaNet
from linen_stack.models.family import (
    ATTENTION, FEED_FORWARD, OUTSIDE, Config, Family, Tensor, Transform, field, layer_modules, linear, require, shared)
from linen_stack.models.layers import Attention, DType, RMSNorm, SwiGLU, empty_cache, require_count
from linen_stack.models.llama import NORMS, attention_sizes, options
from linen_stack.models.moe import MoE
from linen_stack.specs import LayerSpec

Array = jax.Array
Cache = Mapping[str, Array]


class Qwen3NextLayer(nn.Module, kw_only=True):
  """One layer of Qwen3-Next: x + mixer(norm(x)), then x + feed_forward(norm(x)).

  The residual stream keeps the dtype that it comes in with. Values that a policy can name, beside those of the parts:
  `decoder_layer_input` (x on entry) and `attention_out` (the residual stream after the mixer).

  Args:
    embed: width of the residual stream.
    delta_net: the arguments of `GatedDeltaNet`. Either this or
    attention: those of `Attention`, whose heads have norms and a gate; both without norm_eps and dtypes.
    mlp: width of a dense feed-forward part. Either this or
    moe: the arguments of `MoE` without dtypes.
    norm_eps: what all norms add to the mean square.
    dtype: of the computation.
    param_dtype: of the stored parameters.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  embed: int
  delta_net: Mapping[str, Any] | None = None
  attention: Mapping[str, Any] | None = None
  mlp: int | None = None
  moe: Mapping[str, Any] | None = None
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    require_count("Qwen3NextLayer: embed", self.embed)
    for one, other in (("delta_net", "attention"), ("mlp", "moe")):
      if (getattr(self, one) is None) == (getattr(self, other) is None):
        raise ValueError(f"Qwen3NextLayer: give either {one} or {other}, not {one}={getattr(self, one)!r} and "
                         f"{other}={getattr(self, other)!r}")
    if self.mlp is not None:
      require_count("Qwen3NextLayer: mlp", self.mlp)
    mixer, _ = self.parts()
    if self.attention is not None:
      for size in ("num_heads", "num_kv_heads", "head_dim"):
        require_count(f"Qwen3NextLayer: attention: {size}", getattr(mixer, size))
      if mixer.num_heads % mixer.num_kv_heads:
        raise ValueError(f"Qwen3NextLayer: attention: num_heads {mixer.num_heads} is not a multiple of num_kv_heads "
                         f"{mixer.num_kv_heads}")
      if not 0 < mixer.rope_fraction <= 1:
        raise ValueError("Qwen3NextLayer: attention: rope_fraction must be above 0 and at most 1, not "
                         f"{mixer.rope_fraction}")
      try:
        rope.frequencies(int(mixer.head_dim * mixer.rope_fraction), mixer.rope_theta, mixer.rope_scaling)
      except ValueError as error:
        raise ValueError(f"Qwen3NextLayer: attention: {error}") from None
    super().__post_init__()

  @nn.nowrap
  def _mixer(self, **given: Any) -> nn.Module:
    given.update(norm_eps=self.norm_eps, dtype=self.dtype, param_dtype=self.param_dtype)
    if self.attention is None:
      return GatedDeltaNet(**self.delta_net, **given)
    return Attention(**self.attention, qk_norm=True, zero_centered_norm=True, output_gate=True, **given)

  @nn.nowrap
  def _feed_forward(self, **given: Any) -> nn.Module:
    given.update(dtype=self.dtype, param_dtype=self.param_dtype)
    return SwiGLU(self.mlp, **given) if self.moe is None else MoE(**self.moe, **given)

  @nn.nowrap
  def parts(self) -> tuple[nn.Module, nn.Module]:
    """The layer's two parts, as modules on their own."""
    return self._mixer(parent=None), self._feed_forward(parent=None)

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> Cache:
    """An empty cache: of a delta net its state (see `GatedDeltaNet.init_cache`), of one size for any length; of
    attention key and value `[batch, length, kv_heads, head_dim]` and index `[]`.
    """
    mixer, _ = self.parts()
    if self.attention is None:
      return mixer.init_cache(batch, length, dtype)
    return empty_cache(batch, length, mixer.num_kv_heads, mixer.head_dim, dtype)

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: Cache | None = None, *, deterministic: bool = True) -> Array | tuple[Array, Cache]:
    """x `[batch, seq, embed]` to x, or to (x, extended cache) where kv_cache is given.

    Args:
      mask: as in `DecoderLayer`; with a delta net it can only leave out padding: `[batch or 1, 1, 1, keys]`.
      positions: `[batch or 1, seq]`, for the rotary embedding of attention. A delta net has none and goes by order.
      kv_cache: as `init_cache` gives.
      deterministic: of no effect, as nothing here is random; all layers of a stack are called alike.
    """
    if x.ndim != 3 or x.shape[-1] != self.embed:
      raise ValueError(f"Qwen3NextLayer takes [batch, seq, embed={self.embed}], not {x.shape}")
    norm = functools.partial(RMSNorm, eps=self.norm_eps, zero_centered=True, dtype=self.dtype,
                             param_dtype=self.param_dtype)
    x = checkpoint_name(x, "decoder_layer_input")
    y = norm(name="attention_norm")(x)
    if self.attention is None:
      y, kv_cache = self._mixer(name="delta_net")(y, mask, kv_cache)
    else:
      y, kv_cache = self._mixer(name="attention")(y, mask, positions, kv_cache)
    x = checkpoint_name(x + y.astype(x.dtype), "attention_out")
    y = norm(name="feed_forward_norm")(x)
    x = x + self._feed_forward(name="feed_forward")(y).astype(x.dtype)
    return x if kv_cache is None else (x, kv_cache)


def _layer(config: Config) -> Callable[[int, LayerKind], LayerSpec]:
  read = functools.partial(field, config, required=True)
  rotary, bias = rope.from_config(config), field(config, "attention_bias", bool, False)
  parts = {
      "linear_attention": dict(delta_net=dict(
          key_heads=read("linear_num_key_heads"), heads=read("linear_num_value_heads"),
          key_dim=read("linear_key_head_dim"), value_dim=read("linear_value_head_dim"),
          conv_width=read("linear_conv_kernel_dim"))),
      "full_attention": dict(attention=dict(
          **attention_sizes(config), rope_theta=rotary.theta, rope_scaling=rotary.scaling,
          rope_fraction=rotary.fraction, qkv_bias=bias, out_bias=bias)),
      "dense": dict(mlp=read("intermediate_size")),
      "moe": dict(moe=dict(
          num_experts=read("num_experts"), hidden=read("moe_intermediate_size"), top_k=read("num_experts_per_tok"),
          normalize=read("norm_topk_prob", bool), shared_hidden=read("shared_expert_intermediate_size"),
          shared_gate=True, balance_weight=field(config, "router_aux_loss_coef", float, 0.001))),
  }
  common = dict(embed=read("hidden_size"), norm_eps=field(config, "rms_norm_eps", float, 1e-6))

  def layer(index: int, kind: LayerKind) -> LayerSpec:
    if kind.attention not in parts or (kind.attention == "full_attention" and not kind.rope):
      raise ValueError(f"layer {index} is {kind.label!r} by the config; qwen3_next has no such layers")
    return LayerSpec(Qwen3NextLayer, kind.label, **common, **parts[kind.attention], **parts[kind.mlp])

  return layer


def _config_of(model: Any) -> dict[str, Any]:
  layers = layer_modules(model)
  for i, layer in enumerate(layers):
    if type(layer) is not Qwen3NextLayer:  # pylint: disable=unidiomatic-typecheck  # a subclass may compute anything
      raise ValueError(f"layer {i} is a {type(layer).__name__}, not a Qwen3NextLayer")
  require("its layers", shared(layers, "embed", "norm_eps"), embed=model.embed, norm_eps=model.norm_eps)
  require("the model", vars(model), embed_scale=None, zero_centered_norm=True, logit_softcap=None)
  config = dict(
      architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", vocab_size=model.vocab, hidden_size=model.embed,
      num_hidden_layers=len(layers), hidden_act="silu", rms_norm_eps=model.norm_eps,
      tie_word_embeddings=model.tie_embeddings, num_experts=0, decoder_sparse_step=1,
      mlp_only_layers=[i for i, layer in enumerate(layers) if layer.moe is None],
      layer_types=["linear_attention" if layer.attention is None else "full_attention" for layer in layers])
  # The last layer that has a part says its sizes; whether the others have the same ones is checked below.
  parts = {type(part): part for layer in layers for part in layer.parts()}
  if net := parts.get(GatedDeltaNet):
    config.update(linear_num_key_heads=net.key_heads, linear_num_value_heads=net.heads, linear_key_head_dim=net.key_dim,
                  linear_value_head_dim=net.value_dim, linear_conv_kernel_dim=net.conv_width)
  if attention := parts.get(Attention):
    scaling = attention.rope_scaling
    config.update(
        num_attention_heads=attention.num_heads, num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim, attention_bias=attention.qkv_bias, rope_theta=attention.rope_theta,
        rope_scaling=None if scaling is None else dict(scaling), partial_rotary_factor=attention.rope_fraction)
  if dense := parts.get(SwiGLU):
    config.update(intermediate_size=dense.hidden)
  if moe := parts.get(MoE):
    config.update(num_experts=moe.num_experts, num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.hidden,
                  norm_topk_prob=moe.normalize, shared_expert_intermediate_size=moe.shared_hidden,
                  router_aux_loss_coef=moe.balance_weight)
  full = {**DEFAULTS, **config}
  spec_of = _layer(full)
  for i, (layer, kind) in enumerate(zip(layers, layer_kinds(full))):
    spec = spec_of(i, kind)
    described = spec.cls(**spec.kwargs, dtype=layer.dtype, param_dtype=layer.param_dtype)
    for part, expected in zip(layer.parts(), described.parts()):
      if isinstance(part, GatedDeltaNet):
        part = part.clone(chunk=expected.chunk)  # says how to compute, not what
      if part != expected:
        raise ValueError(f"layer {i} has a part that no qwen3_next config has beside those of the other layers: {part}")
  return config


# A depthwise convolution, whose tensor is `[channels, 1, width]`.
_convolution = Transform("convolution", lambda shape: (shape[1], 1, shape[0]), lambda tensor, shape: tensor[:, 0].T,
                         lambda leaf: leaf.T[:, None])

DELTA_NET = tuple(
    Tensor(f"model.layers.{{layer}}.linear_attn.{theirs}", f"delta_net/{ours}", *transform)
    for theirs, ours, *transform in (
        ("in_proj_qkvz.weight", "qkvz/kernel", linear()),
        ("in_proj_ba.weight", "ba/kernel", linear()),
        ("conv1d.weight", "conv", _convolution),
        ("A_log", "A_log"),
        ("dt_bias", "dt_bias"),
        ("norm.weight", "norm/scale"),
        ("out_proj.weight", "out/kernel", linear(2)),
    ))
EXPERTS = tuple(
    Tensor(f"model.layers.{{layer}}.mlp.{theirs}.weight", f"feed_forward/{ours}", linear()) for theirs, ours in (
        ("gate", "router/kernel"),
        ("experts.{expert}.gate_proj", "experts/wi_0"),
        ("experts.{expert}.up_proj", "experts/wi_1"),
        ("experts.{expert}.down_proj", "experts/wo"),
        ("shared_expert.gate_proj", "shared/wi_0/kernel"),
        ("shared_expert.up_proj", "shared/wi_1/kernel"),
        ("shared_expert.down_proj", "shared/wo/kernel"),
        ("shared_expert_gate", "shared_gate/kernel"),
    ))

DEFAULTS = dict(
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, partial_rotary_factor=0.25, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    intermediate_size=5632, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, norm_topk_prob=True)

QWEN3_NEXT = Family(
    name="qwen3_next", model_types=("qwen3_next",), layer=_layer,
    options=lambda config: {**options(config), "zero_centered_norm": True},
    tensors=OUTSIDE + NORMS + ATTENTION + DELTA_NET + FEED_FORWARD + EXPERTS, config_of=_config_of, defaults=DEFAULTS,
    fixed={"hidden_act": ("silu",), "attention_dropout": (0,)},
    ignored=lambda config: {r"mtp\..*": "of the head that predicts further tokens, which the model goes without"})
