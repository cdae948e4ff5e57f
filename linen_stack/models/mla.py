"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): keys and values from one small latent.

Each token leaves a latent vector, from which every head makes its key and its value, and one rotated key that all heads
share. A cache holds the two, `kv_rank + rope_dim` numbers per token, whatever the number of heads. From there attention
can be computed in two ways, equal but for rounding:

    expanded   each head's keys and values are made of the latents first
    absorbed   the map to a head's keys goes into its query instead, so that queries meet latents, and the map to its
               values is applied to the weighted mean of the latents: nothing per head is made of a cached token
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models import rope
from linen_stack.models.layers import (
    DType, KVCache, Projection, RMSNorm, check_cache, extend_cache, full_rank, require_count, token_positions)

Array = jax.Array

# The norms of the low-rank vectors keep this value in published models, whatever the config says of the other norms.
_LATENT_NORM_EPS = 1e-6


class _Kernel(nn.Module):
  """A kernel `[inputs, *features]` by itself: `MLA` multiplies it in two ways."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  dtype: DType
  param_dtype: DType

  @nn.compact
  def __call__(self) -> Array:
    init = nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=range(1, len(self.shape)))
    kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), self.shape, self.param_dtype)
    return kernel.astype(self.dtype)


class MLA(nn.Module):
  """Causal multi-head latent attention over a sequence, or over a cache and new tokens.

  Variables: `query/kernel` `[embed, heads, nope_dim + rope_dim]`, or of low rank `query_a/kernel` `[embed, q_rank]`,
  `query_norm/scale`, `query_b/kernel`; `kv_a/kernel` `[embed, kv_rank + rope_dim]`, `kv_norm/scale`, `kv_b/kernel`
  `[kv_rank, heads, nope_dim + value_dim]`; `out/kernel` `[heads, value_dim, embed]`.

  Args:
    num_heads: heads of queries, and of the keys and values that are made of the latent.
    kv_rank: width of the latent.
    q_rank: width of the low-rank vector that queries are made of. None: they are made of the hidden states.
    nope_dim: features of a query or key that are not rotated.
    rope_dim: features that are, even. Of the key they are shared by all heads.
    value_dim: width of a head's value.
    rope_theta: base of the rotary embedding.
    rope_scaling: as in `rope.frequencies`. With `mscale_all_dim` it also sharpens the softmax.
    rope_interleaved: which features form a plane, as in `rope.rotate`.
    dtype: of the computation.
    param_dtype: of the stored parameters.

  Raises:
    TypeError, ValueError: on construction, for sizes that cannot be and scalings that are not known.
  """

  num_heads: int
  kv_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  q_rank: int | None = None
  rope_theta: float = 10000.0
  rope_scaling: Mapping[str, Any] | None = None
  rope_interleaved: bool = True
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    for argument in ("num_heads", "kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"):
      if argument != "q_rank" or self.q_rank is not None:
        require_count(f"MLA: {argument}", getattr(self, argument))
    try:
      rope.frequencies(self.rope_dim, self.rope_theta, self.rope_scaling)
    except (TypeError, ValueError) as error:
      raise type(error)(f"MLA: {error}") from None
    super().__post_init__()

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache: latent `[batch, length, kv_rank]`, rotary_key `[batch, length, rope_dim]`, index `[]`."""
    return {"latent": jnp.zeros((batch, length, self.kv_rank), dtype),
            "rotary_key": jnp.zeros((batch, length, self.rope_dim), dtype), "index": jnp.zeros((), jnp.int32)}

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
    """x `[batch, seq, embed]` to (result of the same shape, the extended cache or None).

    Raises:
      TypeError, ValueError: for a mask, positions or a cache of the wrong form. A compiled program cannot raise when a
        cache overflows: the result is then NaN.
    """
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    batch, seq, embed = x.shape
    query = self._query(x)
    kv = Projection((self.kv_rank + self.rope_dim,), ("embed", "kv_rank"), name="kv_a", **dtypes)(x)
    latent, rotary_key = jnp.split(checkpoint_name(kv, "kv_wa_proj"), [self.kv_rank], axis=-1)
    latent = checkpoint_name(RMSNorm(eps=_LATENT_NORM_EPS, name="kv_norm", **dtypes)(latent), "mla_kv")

    positions = token_positions(x, positions, kv_cache)
    rates, factor = rope.frequencies(self.rope_dim, self.rope_theta, self.rope_scaling)
    query, rotary_query = jnp.split(query, [self.nope_dim], axis=-1)
    rotary_query = rope.rotate(rotary_query, positions, rates, self.rope_interleaved, factor)
    rotary_key = rope.rotate(rotary_key[:, :, None], positions, rates, self.rope_interleaved, factor)[:, :, 0]

    start, length = 0, seq
    if kv_cache is not None:
      new = {"latent": latent, "rotary_key": rotary_key}
      check_cache(kv_cache, new)
      start, length, kv_cache = kv_cache["index"], kv_cache["latent"].shape[1], extend_cache(kv_cache, new)
      latent, rotary_key = (kv_cache[name].astype(self.dtype) for name in new)
    seen = ((start + jnp.arange(seq))[:, None] >= jnp.arange(length))[None, None]
    if mask is not None:
      seen &= full_rank(mask, (batch, self.num_heads, seq, length))

    kernel = _Kernel((self.kv_rank, self.num_heads, self.nope_dim + self.value_dim),
                     ("kv_rank", "q_heads", "head_dim"), name="kv_b", **dtypes)()
    attend = self._absorbed if kv_cache is not None and self._prefers_absorbed(seq) else self._expanded
    context = attend(query, rotary_query, latent, rotary_key, kernel, seen)
    if kv_cache is not None:  # a write that does not fit moves over older tokens, which must not look like a result
      context = jnp.where(start + seq <= length, context, jnp.nan)
    context = checkpoint_name(context, "context")
    out = Projection((embed,), ("q_heads", "head_dim", "embed"), name="out", **dtypes)(context)
    return checkpoint_name(out, "out_proj"), kv_cache

  @nn.nowrap
  def _query(self, x: Array) -> Array:
    """`[batch, seq, heads, nope_dim + rope_dim]`; called by the compact method, in whose scope its parts stand."""
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    features, axes, name = (self.num_heads, self.nope_dim + self.rope_dim), ("embed", "q_heads", "head_dim"), "query"
    if self.q_rank is not None:
      x = Projection((self.q_rank,), ("embed", "q_rank"), name="query_a", **dtypes)(x)
      x = RMSNorm(eps=_LATENT_NORM_EPS, name="query_norm", **dtypes)(checkpoint_name(x, "query_wa_proj"))
      x, axes, name = checkpoint_name(x, "mla_q"), ("q_rank", "q_heads", "head_dim"), "query_b"
    return checkpoint_name(Projection(features, axes, name=name, **dtypes)(x), "query_proj")

  @nn.nowrap
  def _prefers_absorbed(self, seq: int) -> bool:
    """Whether `seq` new tokens are few enough: latents are wider than keys and values, but need not be expanded."""
    per_head = self.nope_dim + self.value_dim
    # Multiplications per cached token and head, on the left those that the wider products add.
    return seq * (2 * self.kv_rank - per_head) < self.kv_rank * per_head

  @nn.nowrap
  def _expanded(self, query: Array, rotary_query: Array, latent: Array, rotary_key: Array, kernel: Array,
                seen: Array) -> Array:
    key, value = jnp.split(jnp.einsum("bkc,chd->bkhd", latent, kernel), [self.nope_dim], axis=-1)
    key, value = checkpoint_name(key, "key_proj"), checkpoint_name(value, "value_proj")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=self._wide)
    return jnp.einsum("bhqk,bkhd->bqhd", self._weights(scores, rotary_query, rotary_key, seen), value)

  @nn.nowrap
  def _absorbed(self, query: Array, rotary_query: Array, latent: Array, rotary_key: Array, kernel: Array,
                seen: Array) -> Array:
    to_key, to_value = jnp.split(kernel, [self.nope_dim], axis=-1)
    query = jnp.einsum("bqhd,chd->bqhc", query, to_key)
    scores = jnp.einsum("bqhc,bkc->bhqk", query, latent, preferred_element_type=self._wide)
    mean = jnp.einsum("bhqk,bkc->bqhc", self._weights(scores, rotary_query, rotary_key, seen), latent)
    return jnp.einsum("bqhc,chd->bqhd", mean, to_value)

  @nn.nowrap
  def _weights(self, scores: Array, rotary_query: Array, rotary_key: Array, seen: Array) -> Array:
    """The softmax `[batch, heads, queries, keys]` of the scores and what rotated features add to them, in `dtype`."""
    scores += jnp.einsum("bqhr,bkr->bhqk", rotary_query, rotary_key, preferred_element_type=self._wide)
    scale = (self.nope_dim + self.rope_dim) ** -0.5
    sharper = (self.rope_scaling or {}).get("mscale_all_dim")
    if sharper:
      scale *= rope.yarn_mscale(self.rope_scaling["factor"], sharper) ** 2
    scores = jnp.where(seen, scores * scale, jnp.finfo(scores.dtype).min)
    return nn.softmax(scores).astype(self.dtype)

  @property
  def _wide(self) -> DType:
    return jnp.promote_types(self.dtype, jnp.float32)
