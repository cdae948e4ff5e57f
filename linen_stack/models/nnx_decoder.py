"""The reference decoder layer as an NNX module: the tree, the numbers and the tags of `linen_stack.models.DecoderLayer`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models import decoder, layers, rope
from linen_stack.models.layers import DType, KVCache

Array = jax.Array


def _param(rngs: nnx.Rngs, init: Callable[..., Any], shape: tuple[int, ...], axes: tuple[str, ...], dtype: DType) -> nnx.Param:
  # The axes are logical; where they go on a mesh is for rules to say, not for the moment in which the layer is made.
  return nnx.Param(init(rngs.params(), shape, dtype), out_sharding=axes, eager_sharding=False)


class RMSNorm(nnx.Module):
  """Divides `[..., features]` by its root mean square and scales it; the result has `dtype`."""

  def __init__(self, features: int, eps: float, *, dtype: DType, param_dtype: DType, rngs: nnx.Rngs):
    self.eps, self.dtype = eps, dtype
    self.scale = _param(rngs, nnx.initializers.ones_init(), (features,), ("norm",), param_dtype)

  def __call__(self, x: Array) -> Array:
    return layers.rms_norm(x, self.scale[...], self.eps).astype(self.dtype)


class Projection(nnx.Module):
  """A linear map of the last dimensions, `inputs`, onto `features`; `axes` are the logical names of the kernel's axes."""

  def __init__(self, inputs: tuple[int, ...], features: tuple[int, ...], axes: tuple[str, ...], *, use_bias: bool,
               dtype: DType, param_dtype: DType, rngs: nnx.Rngs):
    self.summed, self.dtype = len(inputs), dtype
    init = layers.kernel_init(len(inputs), len(axes))
    self.kernel = _param(rngs, init, (*inputs, *features), axes, param_dtype)
    if use_bias:
      self.bias = _param(rngs, nnx.initializers.zeros_init(), features, axes[len(inputs):], param_dtype)

  def __call__(self, x: Array) -> Array:
    y = layers.linear_map(x.astype(self.dtype), self.kernel[...].astype(self.dtype), self.summed)
    return y + self.bias[...].astype(y.dtype) if hasattr(self, "bias") else y


class Attention(nnx.Module):
  """Causal grouped-query attention with rotary embedding, over a sequence or over a cache and new tokens."""

  def __init__(self, like: decoder.DecoderLayer, heads: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs):
    self.window, self.rope_theta, self.rope_scaling, self.head_dim = like.window, like.rope_theta, like.rope_scaling, head_dim
    dtypes = dict(dtype=like.dtype, param_dtype=like.param_dtype, rngs=rngs)

    def projection(count, axis):
      return Projection((like.embed,), (count, head_dim), ("embed", axis, "head_dim"), use_bias=like.qkv_bias, **dtypes)

    self.query, self.key = projection(heads, "q_heads"), projection(kv_heads, "kv_heads")
    self.value = projection(kv_heads, "kv_heads")
    if like.qk_norm:
      self.query_norm = RMSNorm(head_dim, like.norm_eps, **dtypes)
      self.key_norm = RMSNorm(head_dim, like.norm_eps, **dtypes)
    self.out = Projection((heads, head_dim), (like.embed,), ("q_heads", "head_dim", "embed"), use_bias=like.out_bias,
                          **dtypes)

  def __call__(self, x: Array, mask: Array | None, positions: Array | None,
               kv_cache: KVCache | None) -> tuple[Array, KVCache | None]:
    query, key, value = (checkpoint_name(getattr(self, name)(x), f"{name}_proj") for name in ("query", "key", "value"))
    if kv_cache is not None:
      layers.check_cache(kv_cache, {"key": key, "value": value})
    if hasattr(self, "query_norm"):
      query, key = self.query_norm(query), self.key_norm(key)
    if self.rope_theta is not None:
      positions = layers.token_positions(x, positions, kv_cache)
      rates, factor = rope.frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
      query, key = (rope.rotate(y, positions, rates, scale=factor) for y in (query, key))
    if kv_cache is None:
      context = layers.attend(query, key, value, mask, self.window, None)
    else:
      context, kv_cache = layers.attend_cached(query, key, value, mask, kv_cache, self.window, None)
    return checkpoint_name(self.out(checkpoint_name(context, "context")), "out_proj"), kv_cache


class SwiGLU(nnx.Module):
  """The gated feed-forward map of `[..., embed]`: wo(silu(wi_0(x)) * wi_1(x)), `hidden` wide."""

  def __init__(self, embed: int, hidden: int, **options: Any):
    self.wi_0 = Projection((embed,), (hidden,), ("embed", "mlp"), **options)
    self.wi_1 = Projection((embed,), (hidden,), ("embed", "mlp"), **options)
    self.wo = Projection((hidden,), (embed,), ("mlp", "embed"), **options)

  def __call__(self, x: Array) -> Array:
    gate, up = checkpoint_name(self.wi_0(x), "mlpwi_0"), checkpoint_name(self.wi_1(x), "mlpwi_1")
    return checkpoint_name(self.wo(nnx.silu(gate) * up), "mlpwo")


class DecoderLayer(nnx.Module):
  """One layer of a decoder, as an NNX module.

  Args:
    rngs: the streams `params`, and `dropout` where there is any.
    **arguments: those of `linen_stack.models.DecoderLayer`, but for `decode` and `cache_length`: the NNX layer keeps no
      cache of its own, and takes `kv_cache` as the Linen one does.

  Raises:
    TypeError, ValueError: as the Linen layer does.
  """

  def __init__(self, *, rngs: nnx.Rngs, **arguments: Any):
    for name in ("decode", "cache_length"):
      if name in arguments:
        raise TypeError(f"the NNX DecoderLayer has no argument {name!r}; pass kv_cache=layer.init_cache(...) to its calls")
    self.like = like = decoder.DecoderLayer(**arguments, parent=None)  # which checks them, and knows the defaults
    heads, kv_heads = like.num_heads, like.num_kv_heads or like.num_heads
    dtypes = dict(dtype=like.dtype, param_dtype=like.param_dtype, rngs=rngs)
    self.attention_norm = RMSNorm(like.embed, like.norm_eps, **dtypes)
    self.attention = Attention(like, heads, kv_heads, like.head_dim or like.embed // heads, rngs=rngs)
    self.feed_forward_norm = RMSNorm(like.embed, like.norm_eps, **dtypes)
    self.feed_forward = SwiGLU(like.embed, like.mlp, use_bias=like.mlp_bias, **dtypes)
    self.attention_dropout, self.feed_forward_dropout = (
        nnx.Dropout(like.dropout, rngs=rngs if like.dropout else None) for _ in range(2))

  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache for this layer: key and value `[batch, length, kv_heads, head_dim]`, index `[]`."""
    return self.like.init_cache(batch, length, dtype)

  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None, *, deterministic: bool = True) -> Array | tuple[Array, KVCache]:
    """x `[batch, seq, embed]` to x, or to (x, extended cache) where kv_cache is given; arguments as of the Linen layer."""
    if x.ndim != 3 or x.shape[-1] != self.like.embed:
      raise ValueError(f"DecoderLayer takes [batch, seq, embed={self.like.embed}], not {x.shape}")
    x = checkpoint_name(x, "decoder_layer_input")
    y, new_cache = self.attention(self.attention_norm(x), mask, positions, kv_cache)
    y = self.attention_dropout(y, deterministic=deterministic)
    x = checkpoint_name(x + y.astype(x.dtype), "attention_out")
    y = self.feed_forward(self.feed_forward_norm(x))
    y = self.feed_forward_dropout(y, deterministic=deterministic)
    x = x + y.astype(x.dtype)
    return x if kv_cache is None else (x, new_cache)
