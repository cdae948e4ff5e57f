"""The reference decoder layer: pre-norm attention and SwiGLU around a residual stream, as in Llama and Qwen3."""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models import rope
from linen_stack.models.layers import Attention, DType, KVCache, RMSNorm, SwiGLU, empty_cache, require_count

Array = jax.Array


class DecoderLayer(nn.Module, kw_only=True):
  """One layer of a decoder.

  The residual stream keeps the dtype that it comes in with. Values that a policy can name: `decoder_layer_input` (x on
  entry), `query_proj`, `key_proj`, `value_proj` (projections, before norm and rotary embedding), `context` (what the
  attention kernel returns), `out_proj` (the output projection of that), `attention_out` (the residual stream after
  attention: x + dropout(out_proj)), `mlpwi_0`, `mlpwi_1` (gate and up projection), `mlpwo` (down projection).

  Args:
    embed: width of the residual stream.
    mlp: width of the feed-forward part.
    num_heads: query heads.
    num_kv_heads: key and value heads, a divisor of num_heads. Default: num_heads.
    head_dim: width of a head, even. Default: embed / num_heads.
    window: how many tokens a token sees, itself among them. None: all before it.
    qk_norm: RMS norm of each query and key head before the rotary embedding.
    rope_theta: base of the rotary embedding. None: no rotary embedding.
    rope_scaling: how its frequencies are scaled, as in `rope.frequencies`.
    qkv_bias, out_bias, mlp_bias: biases on the projections to query, key and value, on attention's output projection,
      and on all of the feed-forward part.
    dropout: rate of dropout on what attention and feed-forward add to the stream.
    norm_eps: what the norms add to the mean square.
    dtype: of the computation.
    param_dtype: of the stored parameters.
    decode: keep keys and values in the collection `cache` (`cached_key`, `cached_value`, `cache_index`) wherever no
      kv_cache is given. `init` fills it with zeros; `apply` reads it, and extends it where `cache` is mutable.
    cache_length: how many tokens that collection has room for; needed with decode.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  embed: int
  mlp: int
  num_heads: int
  num_kv_heads: int | None = None
  head_dim: int | None = None
  window: int | None = None
  qk_norm: bool = False
  rope_theta: float | None = 10000.0
  rope_scaling: Mapping[str, Any] | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  dropout: float = 0.0
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32
  decode: bool = False
  cache_length: int | None = None

  def __post_init__(self):
    owner = type(self).__name__
    optional = ("num_kv_heads", "head_dim", "window", "cache_length")
    for argument in ("embed", "mlp", "num_heads", *optional):
      value = getattr(self, argument)
      if value is not None or argument not in optional:
        require_count(f"{owner}: {argument}", value)
    if self.num_heads % self._kv_heads:
      raise ValueError(f"{owner}: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
    if self.head_dim is None and self.embed % self.num_heads:
      raise ValueError(f"{owner}: embed {self.embed} is not a multiple of num_heads {self.num_heads}; give head_dim")
    if self.rope_theta is not None and self._head_dim % 2:
      raise ValueError(f"{owner}: the rotary embedding needs an even head_dim, not {self._head_dim}")
    if self.rope_theta is not None and not self.rope_theta > 0:
      raise ValueError(f"{owner}: rope_theta must be above 0 (None: no rotary embedding), not {self.rope_theta}")
    if self.rope_scaling is not None:
      if self.rope_theta is None:
        raise ValueError(f"{owner}: rope_scaling without rope_theta; there is no rotary embedding to scale")
      try:
        rope.frequencies(self._head_dim, self.rope_theta, self.rope_scaling)
      except ValueError as error:
        raise ValueError(f"{owner}: rope_scaling: {error}") from None
    if not 0 <= self.dropout < 1:
      raise ValueError(f"{owner}: dropout must be at least 0 and below 1, not {self.dropout}")
    if self.decode and self.cache_length is None:
      raise ValueError(f"{owner}: decode=True needs cache_length, the number of tokens that the cache has room for")
    super().__post_init__()

  @property
  def _kv_heads(self) -> int:
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  @property
  def _head_dim(self) -> int:
    return self.embed // self.num_heads if self.head_dim is None else self.head_dim

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache for this layer: key and value `[batch, length, kv_heads, head_dim]`, index `[]`."""
    return empty_cache(batch, length, self._kv_heads, self._head_dim, dtype)

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None, *, deterministic: bool = True) -> Array | tuple[Array, KVCache]:
    """x `[batch, seq, embed]` to x, or to (x, extended cache) where kv_cache is given.

    Args:
      mask: boolean, broadcastable to `[batch, heads, seq, keys]`, True: attend. Narrows the causal mask and the window.
        keys is seq, or with a cache its length.
      positions: `[batch or 1, seq]`, for the rotary embedding. Default: 0, 1, ...; with a cache, from its index on.
      kv_cache: key and value `[batch, length, kv_heads, head_dim]` and index `[]`, as `init_cache` gives.
      deterministic: no dropout.
    """
    if x.ndim != 3 or x.shape[-1] != self.embed:
      raise ValueError(f"{type(self).__name__} takes [batch, seq, embed={self.embed}], not {x.shape}")
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = checkpoint_name(x, "decoder_layer_input")

    y = RMSNorm(eps=self.norm_eps, name="attention_norm", **dtypes)(x)
    attention = Attention(
        num_heads=self.num_heads, num_kv_heads=self._kv_heads, head_dim=self._head_dim, window=self.window,
        qk_norm=self.qk_norm, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling, qkv_bias=self.qkv_bias,
        out_bias=self.out_bias, norm_eps=self.norm_eps, name="attention", **dtypes)
    if kv_cache is None and self.decode:
      y, new_cache = self._attend_with_collection(attention, y, mask, positions), None
    else:
      y, new_cache = attention(y, mask, positions, kv_cache)
    y = nn.Dropout(self.dropout, name="attention_dropout")(y, deterministic=deterministic)
    x = checkpoint_name(x + y.astype(x.dtype), "attention_out")

    y = RMSNorm(eps=self.norm_eps, name="feed_forward_norm", **dtypes)(x)
    y = SwiGLU(self.mlp, use_bias=self.mlp_bias, name="feed_forward", **dtypes)(y)
    y = nn.Dropout(self.dropout, name="feed_forward_dropout")(y, deterministic=deterministic)
    x = x + y.astype(x.dtype)
    return x if kv_cache is None else (x, new_cache)

  @nn.nowrap
  def _attend_with_collection(self, attention: Attention, x: Array, mask: Array | None,
                              positions: Array | None) -> Array:
    """Attention over the cache of the collection `cache`."""
    names = {"key": "cached_key", "value": "cached_value", "index": "cache_index"}
    empty = functools.partial(self.init_cache, x.shape[0], self.cache_length, self.dtype)
    slots = {part: self.variable("cache", name, lambda part=part: empty()[part]) for part, name in names.items()}
    y, new_cache = attention(x, mask, positions, {part: slot.value for part, slot in slots.items()})
    if self.is_mutable_collection("cache") and not self.is_initializing():
      for part, slot in slots.items():
        slot.value = new_cache[part]
    return y
