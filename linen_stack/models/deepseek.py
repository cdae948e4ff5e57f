"""The DeepSeek-V3 decoder layer (https://arxiv.org/abs/2412.19437): latent attention, then a dense map or experts."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.hf_plan import LayerKind, layer_kinds
from linen_stack.models import rope
from linen_stack.models.family import (
    FEED_FORWARD, OUTSIDE, Config, Family, Tensor, field, layer_modules, linear, require)
from linen_stack.models.layers import DType, KVCache, RMSNorm, SwiGLU, require_count
from linen_stack.models.llama import NORMS, options
from linen_stack.models.mla import MLA
from linen_stack.models.moe import MoE
from linen_stack.specs import LayerSpec

Array = jax.Array


class DeepseekLayer(nn.Module, kw_only=True):
  """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

  Values that a policy can name, beside those of `MLA` and of `SwiGLU` or `MoE`: `decoder_layer_input` (x on entry) and
  `attention_out` (the residual stream after attention).

  Args:
    embed: width of the residual stream, which keeps the dtype that it comes in with.
    mlp: width of a dense feed-forward part. Either this or
    moe: the arguments of `MoE`, but for the dtypes.
    num_heads, kv_rank, q_rank, nope_dim, rope_dim, value_dim, rope_theta, rope_scaling, rope_interleaved: as in `MLA`.
    dropout: rate of dropout on what attention and feed-forward add to the stream.
    norm_eps: what the two norms of the stream add to the mean square.
    dtype: of the computation.
    param_dtype: of the stored parameters.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  embed: int
  mlp: int | None = None
  moe: Mapping[str, Any] | None = None
  num_heads: int
  kv_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  q_rank: int | None = None
  rope_theta: float = 10000.0
  rope_scaling: Mapping[str, Any] | None = None
  rope_interleaved: bool = True
  dropout: float = 0.0
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    require_count("DeepseekLayer: embed", self.embed)
    if (self.mlp is None) == (self.moe is None):
      raise ValueError(f"DeepseekLayer: give mlp, a width, or moe, the arguments of MoE, and not both; got "
                       f"mlp={self.mlp!r}, moe={self.moe!r}")
    if self.mlp is not None:
      require_count("DeepseekLayer: mlp", self.mlp)
    if not 0 <= self.dropout < 1:
      raise ValueError(f"DeepseekLayer: dropout must be at least 0 and below 1, not {self.dropout}")
    self._attention(parent=None)  # raises for sizes that cannot be
    self._feed_forward(parent=None)
    super().__post_init__()

  @nn.nowrap
  def _attention(self, **options: Any) -> MLA:
    sizes = ("num_heads", "kv_rank", "q_rank", "nope_dim", "rope_dim", "value_dim", "rope_theta", "rope_scaling",
             "rope_interleaved", "dtype", "param_dtype")
    return MLA(**{name: getattr(self, name) for name in sizes}, **options)

  @nn.nowrap
  def _feed_forward(self, **options: Any) -> nn.Module:
    options.update(dtype=self.dtype, param_dtype=self.param_dtype)
    return SwiGLU(self.mlp, **options) if self.moe is None else MoE(**self.moe, **options)

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache: latent `[batch, length, kv_rank]`, rotary_key `[batch, length, rope_dim]`, index `[]`."""
    return self._attention(parent=None).init_cache(batch, length, dtype)

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None, *, deterministic: bool = True) -> Array | tuple[Array, KVCache]:
    """x `[batch, seq, embed]` to x, or to (x, extended cache) where kv_cache is given.

    Args:
      mask: boolean, broadcastable to `[batch, heads, seq, keys]`, True: attend. Narrows the causal mask. keys is seq,
        or with a cache its length.
      positions: `[batch or 1, seq]`, for the rotary embedding. Default: 0, 1, ...; with a cache, from its index on.
      kv_cache: as `init_cache` gives, or this method returned it.
      deterministic: no dropout.
    """
    if x.ndim != 3 or x.shape[-1] != self.embed:
      raise ValueError(f"DeepseekLayer takes [batch, seq, embed={self.embed}], not {x.shape}")
    norm = dict(eps=self.norm_eps, dtype=self.dtype, param_dtype=self.param_dtype)
    x = checkpoint_name(x, "decoder_layer_input")
    y = RMSNorm(name="attention_norm", **norm)(x)
    y, new_cache = self._attention(name="attention")(y, mask, positions, kv_cache)
    y = nn.Dropout(self.dropout, name="attention_dropout")(y, deterministic=deterministic)
    x = checkpoint_name(x + y.astype(x.dtype), "attention_out")

    y = RMSNorm(name="feed_forward_norm", **norm)(x)
    y = self._feed_forward(name="feed_forward")(y)
    y = nn.Dropout(self.dropout, name="feed_forward_dropout")(y, deterministic=deterministic)
    x = x + y.astype(x.dtype)
    return x if kv_cache is None else (x, new_cache)


def _layer(config: Config) -> Callable[[int, LayerKind], LayerSpec]:
  required = functools.partial(field, config, required=True)
  heads, rotary = required("num_attention_heads"), rope.from_config(config)
  if field(config, "num_key_value_heads", default=heads) != heads:
    raise ValueError(f"num_key_value_heads is {config['num_key_value_heads']} and num_attention_heads {heads}; "
                     "latent attention has as many of both")
  if rotary.fraction != 1:
    raise ValueError(f"partial_rotary_factor is {rotary.fraction}; what deepseek_v3 rotates is qk_rope_head_dim")
  common = dict(
      embed=required("hidden_size"), num_heads=heads, kv_rank=required("kv_lora_rank"),
      q_rank=field(config, "q_lora_rank"), nope_dim=required("qk_nope_head_dim"), rope_dim=required("qk_rope_head_dim"),
      value_dim=required("v_head_dim"), rope_theta=rotary.theta, rope_scaling=rotary.scaling,
      rope_interleaved=field(config, "rope_interleave", bool, True),
      norm_eps=field(config, "rms_norm_eps", float, 1e-6))

  def layer(index: int, kind: LayerKind) -> LayerSpec:
    if kind.attention != "full_attention" or not kind.rope:
      raise ValueError(f"layer {index} is {kind.label!r} by the config; deepseek_v3 has no such layers")
    if kind.mlp == "dense":
      return LayerSpec(DeepseekLayer, kind.label, **common, mlp=required("intermediate_size"))
    hidden, shared_experts = required("moe_intermediate_size"), field(config, "n_shared_experts", default=0)
    return LayerSpec(DeepseekLayer, kind.label, **common, moe=dict(
        num_experts=required("n_routed_experts"), hidden=hidden, top_k=required("num_experts_per_tok"),
        router="sigmoid", normalize=field(config, "norm_topk_prob", bool, True),
        scale=field(config, "routed_scaling_factor", float, 1.0), groups=field(config, "n_group", default=1),
        top_groups=field(config, "topk_group", default=1), score_bias=True,
        shared_hidden=hidden * shared_experts if shared_experts else None,
        balance_weight=field(config, "aux_loss_alpha", float, 0.001)))

  return layer


def _config_of(model: Any) -> dict[str, Any]:
  layers = layer_modules(model)
  for i, layer in enumerate(layers):
    if type(layer) is not DeepseekLayer:  # pylint: disable=unidiomatic-typecheck  # a subclass may compute anything
      raise ValueError(f"layer {i} is a {type(layer).__name__}, not a DeepseekLayer")
  first = layers[0]
  require("its layers", vars(first), embed=model.embed, norm_eps=model.norm_eps)
  require("the model", vars(model), embed_scale=None, zero_centered_norm=False, logit_softcap=None)
  config = dict(
      architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=model.vocab,
      hidden_size=model.embed, num_hidden_layers=len(layers), num_attention_heads=first.num_heads,
      num_key_value_heads=first.num_heads,
      q_lora_rank=first.q_rank, kv_lora_rank=first.kv_rank, qk_nope_head_dim=first.nope_dim,
      qk_rope_head_dim=first.rope_dim, v_head_dim=first.value_dim, hidden_act="silu", attention_bias=False,
      rope_theta=first.rope_theta, rope_scaling=first.rope_scaling and dict(first.rope_scaling),
      rope_interleave=first.rope_interleaved, rms_norm_eps=model.norm_eps, tie_word_embeddings=model.tie_embeddings,
      first_k_dense_replace=sum(layer.moe is None for layer in layers), num_nextn_predict_layers=0)
  for layer in layers:
    part = layer._feed_forward(parent=None)
    if layer.mlp is not None:
      config.setdefault("intermediate_size", layer.mlp)
    elif "n_routed_experts" not in config:
      config.update(
          n_routed_experts=part.num_experts, num_experts_per_tok=part.top_k, moe_intermediate_size=part.hidden,
          n_shared_experts=(part.shared_hidden or 0) // part.hidden, norm_topk_prob=part.normalize,
          routed_scaling_factor=part.scale, n_group=part.groups, topk_group=part.top_groups,
          aux_loss_alpha=part.balance_weight)
  full = {**DEFAULTS, **config}
  read_back = _layer(full)
  for i, (layer, kind) in enumerate(zip(layers, layer_kinds(full))):
    spec = read_back(i, kind)
    said = spec.cls(**spec.kwargs, dropout=layer.dropout, dtype=layer.dtype, param_dtype=layer.param_dtype)
    for name in (part.name for part in dataclasses.fields(DeepseekLayer)):
      # The arguments of MoE may be given with or without those that stand at their defaults: its modules are compared.
      ours, theirs = (each._feed_forward(parent=None) if name == "moe" else getattr(each, name)
                      for each in (layer, said))
      if ours != theirs:
        raise ValueError(f"layer {i} has {name}={ours!r}, where a config that describes the layers before it gives "
                         f"{theirs!r}")
  return config


# Paths of layers with low-rank queries and of layers without are all here: a layer has those of its parameters.
TENSORS = tuple(
    Tensor(f"model.layers.{{layer}}.{theirs}", ours, *transform) for theirs, ours, *transform in (
        ("self_attn.q_proj.weight", "attention/query/kernel", linear()),
        ("self_attn.q_a_proj.weight", "attention/query_a/kernel", linear()),
        ("self_attn.q_a_layernorm.weight", "attention/query_norm/scale"),
        ("self_attn.q_b_proj.weight", "attention/query_b/kernel", linear()),
        ("self_attn.kv_a_proj_with_mqa.weight", "attention/kv_a/kernel", linear()),
        ("self_attn.kv_a_layernorm.weight", "attention/kv_norm/scale"),
        ("self_attn.kv_b_proj.weight", "attention/kv_b/kernel", linear()),
        ("self_attn.o_proj.weight", "attention/out/kernel", linear(2)),
        ("mlp.gate.weight", "feed_forward/router/kernel", linear()),
        ("mlp.gate.e_score_correction_bias", "feed_forward/router/bias"),
        ("mlp.experts.{expert}.gate_proj.weight", "feed_forward/experts/wi_0", linear()),
        ("mlp.experts.{expert}.up_proj.weight", "feed_forward/experts/wi_1", linear()),
        ("mlp.experts.{expert}.down_proj.weight", "feed_forward/experts/wo", linear()),
        ("mlp.shared_experts.gate_proj.weight", "feed_forward/shared/wi_0/kernel", linear()),
        ("mlp.shared_experts.up_proj.weight", "feed_forward/shared/wi_1/kernel", linear()),
        ("mlp.shared_experts.down_proj.weight", "feed_forward/shared/wo/kernel", linear()),
    ))

# What the published code takes for fields that a config leaves out. A null q_lora_rank is no such field.
DEFAULTS = dict(
    vocab_size=129_280, hidden_size=7168, intermediate_size=18_432, moe_intermediate_size=2048, num_hidden_layers=61,
    num_attention_heads=128, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512,
    q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4,
    num_experts_per_tok=8, first_k_dense_replace=3, max_position_embeddings=4096, num_nextn_predict_layers=1)


def _ignored(config: Config) -> dict[str, str]:
  first = field(config, "num_hidden_layers")
  return {rf"model\.layers\.{first + i}\..*": "of a layer that predicts further tokens, which comes after the decoder's"
          for i in range(field(config, "num_nextn_predict_layers", default=0))}


DEEPSEEK_V3 = Family(
    name="deepseek_v3", model_types=("deepseek_v3",), layer=_layer, options=options,
    tensors=OUTSIDE + NORMS + TENSORS + FEED_FORWARD, config_of=_config_of, defaults=DEFAULTS, ignored=_ignored,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "attention_dropout": (0,), "moe_layer_freq": (1,),
           "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
