"""The parts of the reference decoder layer: RMS norm, projection, rotary embedding, cached attention and SwiGLU.

Every parameter carries logical axis names (`embed`, `q_heads`, `kv_heads`, `head_dim`, `mlp`, `vocab`, `norm`), and the
values that rematerialisation policies choose among are tagged where they arise. Parameters are stored in `param_dtype`
and used in `dtype`; norms, rotary angles and the softmax are computed in float32 at least.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

Array = jax.Array
DType = Any
KVCache = Mapping[str, Array]


def require_count(argument: str, value: Any) -> None:
  """Raises unless `value` is an int of at least 1."""
  if isinstance(value, bool) or not hasattr(value, "__index__"):
    raise TypeError(f"{argument} must be an int, not {value!r}")
  if value.__index__() < 1:
    raise ValueError(f"{argument} must be at least 1, not {value}")


class RMSNorm(nn.Module):
  """Divides `[..., features]` by its root mean square and scales it; the result has `dtype`."""

  eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("norm",))
    scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(wide)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
    return (x * scale.astype(wide)).astype(self.dtype)


class Projection(nn.Module):
  """A linear map of the last `len(axes) - len(features)` dimensions onto `features`, without a bias.

  Flax's `DenseGeneral` is not used because it initialises a flattened kernel: under a mesh and logical axis rules the
  names of a kernel with three axes do not fit that.

  Args:
    features: the sizes of the new dimensions.
    axes: the logical names of the kernel's axes, first those that are summed over.
    output_dtype: the dtype in which the product is accumulated and returned; None: `dtype`.
  """

  features: tuple[int, ...]
  axes: tuple[str, ...]
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32
  output_dtype: DType | None = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    summed = len(self.axes) - len(self.features)
    shape = x.shape[x.ndim - summed:] + tuple(self.features)
    init = nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=range(summed), out_axis=range(summed, len(shape)))
    kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), shape, self.param_dtype)
    contract = (tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed)))
    return lax.dot_general(x.astype(self.dtype), kernel.astype(self.dtype), (contract, ((), ())),
                           preferred_element_type=self.output_dtype)


def rotary(x: Array, positions: Array, theta: float) -> Array:
  """Turns each pair (i, i + head_dim / 2) of x `[batch, seq, heads, head_dim]` by an angle that grows with positions.

  positions: `[batch or 1, seq]`. The result has x's dtype.
  """
  half = x.shape[-1] // 2
  wide = jnp.promote_types(x.dtype, jnp.float32)
  rate = theta ** (-jnp.arange(half, dtype=wide) / half)
  angle = positions.astype(wide)[..., None, None] * rate  # [batch, seq, 1, head_dim / 2]
  first, second = jnp.split(x.astype(wide), 2, axis=-1)
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def empty_cache(batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: DType = jnp.float32) -> KVCache:
  """An empty cache for `length` tokens: key and value `[batch, length, kv_heads, head_dim]`, index `[]`."""
  shape = (batch, length, num_kv_heads, head_dim)
  return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype), "index": jnp.zeros((), jnp.int32)}


def _check_cache(cache: KVCache, key: Array) -> None:
  """Raises where `cache` cannot take `key` `[batch, seq, kv_heads, head_dim]`."""
  if not isinstance(cache, Mapping) or set(cache) != {"key", "value", "index"}:
    got = sorted(cache) if isinstance(cache, Mapping) else type(cache).__name__
    raise TypeError(f"kv_cache must be a dict of key, value and index (see init_cache), not {got}")
  batch, seq, heads, head_dim = key.shape
  for name in ("key", "value"):
    shape = jnp.shape(cache[name])
    if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, heads, head_dim):
      raise ValueError(f"kv_cache[{name!r}] has shape {shape}; this layer and batch need "
                       f"[{batch}, length, {heads}, {head_dim}] (batch, length, kv_heads, head_dim)")
  if jnp.shape(cache["key"]) != jnp.shape(cache["value"]):
    raise ValueError(f"kv_cache: key {jnp.shape(cache['key'])} and value {jnp.shape(cache['value'])} differ in shape")
  index, length = cache["index"], cache["key"].shape[1]
  if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
    raise ValueError("kv_cache['index'] must be one integer, how many tokens the cache holds; it has shape "
                     f"{jnp.shape(index)} and dtype {jnp.result_type(index)}")
  used = 0 if isinstance(index, jax.core.Tracer) else int(index)
  if used + seq > length:
    raise ValueError(f"kv_cache has room for {length} tokens and holds {used}; {seq} more do not fit")


def extend_cache(cache: KVCache, key: Array, value: Array) -> KVCache:
  """A cache with the new key and value `[batch, seq, kv_heads, head_dim]` written at its index, in its own dtype."""
  at = (0, cache["index"], 0, 0)
  return {
      "key": lax.dynamic_update_slice(cache["key"], key.astype(cache["key"].dtype), at),
      "value": lax.dynamic_update_slice(cache["value"], value.astype(cache["value"].dtype), at),
      "index": (cache["index"] + key.shape[1]).astype(jnp.result_type(cache["index"])),
  }


def _full_rank(mask: Array, shape: tuple[int, ...]) -> Array:
  """The mask with four dimensions. Raises where it is not boolean or does not broadcast to `shape`."""
  if jnp.result_type(mask) != jnp.bool_:
    raise TypeError(f"mask must be boolean (True: attend), not {jnp.result_type(mask)}; "
                    "of an additive mask, pass mask == 0")
  mask = jnp.asarray(mask)
  try:
    fits = jnp.broadcast_shapes(mask.shape, shape) == shape
  except ValueError:
    fits = False
  if not fits:
    raise ValueError(f"mask {mask.shape} does not broadcast to {shape} (batch, heads, queries, keys)")
  return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


class Attention(nn.Module):
  """Causal grouped-query attention with rotary embedding, over a sequence or over a cache and new tokens.

  Masks go by the order of the tokens (in a cache: by slot); `positions` only turn the rotary embedding. A window of w
  lets a token see w tokens, itself among them.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int | None = None
  qk_norm: bool = False
  rope_theta: float | None = 10000.0
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, positions: Array | None = None,
               kv_cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
    """x `[batch, seq, embed]` to (result of the same shape, the extended cache or None).

    Raises:
      TypeError, ValueError: for a mask, positions or a cache of the wrong form. A compiled program cannot raise when a
        cache overflows: the result is then NaN.
    """
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)

    def project(name: str, heads: int, axis: str) -> Array:
      axes = ("embed", axis, "head_dim")
      y = Projection((heads, self.head_dim), axes, name=name, **dtypes)(x)
      return checkpoint_name(y, f"{name}_proj")

    query = project("query", self.num_heads, "q_heads")
    key = project("key", self.num_kv_heads, "kv_heads")
    value = project("value", self.num_kv_heads, "kv_heads")
    if kv_cache is not None:
      _check_cache(kv_cache, key)
    if self.qk_norm:
      query = RMSNorm(eps=self.norm_eps, name="query_norm", **dtypes)(query)
      key = RMSNorm(eps=self.norm_eps, name="key_norm", **dtypes)(key)
    if self.rope_theta is not None:
      positions = self._positions(x, positions, kv_cache)
      query, key = rotary(query, positions, self.rope_theta), rotary(key, positions, self.rope_theta)

    if kv_cache is None:
      context = self._attend(query, key, value, mask)
    else:
      context, kv_cache = self._attend_cached(query, key, value, mask, kv_cache)
    context = checkpoint_name(context, "context")
    out = Projection(x.shape[-1:], ("q_heads", "head_dim", "embed"), name="out", **dtypes)(context)
    return checkpoint_name(out, "out_proj"), kv_cache

  @nn.nowrap
  def _positions(self, x: Array, positions: Array | None, kv_cache: KVCache | None) -> Array:
    if positions is None:
      start = 0 if kv_cache is None else kv_cache["index"]
      return (start + jnp.arange(x.shape[1]))[None]
    shape = jnp.shape(positions)
    if shape not in (x.shape[:2], (1, x.shape[1])):
      raise ValueError(f"positions has shape {shape}; it must be {x.shape[:2]} or {(1, x.shape[1])} (batch, seq)")
    return jnp.asarray(positions)

  @nn.nowrap
  def _attend(self, query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    if mask is not None:
      mask = _full_rank(mask, (query.shape[0], self.num_heads, query.shape[1], key.shape[1]))
    window = None if self.window is None else (self.window - 1, 0)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, local_window_size=window)

  @nn.nowrap
  def _attend_cached(self, query: Array, key: Array, value: Array, mask: Array | None,
                     cache: KVCache) -> tuple[Array, KVCache]:
    start, seq, length = cache["index"], query.shape[1], cache["key"].shape[1]
    cache = extend_cache(cache, key, value)
    distance = (start + jnp.arange(seq))[:, None] - jnp.arange(length)  # [seq, length]
    seen = distance >= 0
    if self.window is not None:
      seen &= distance < self.window
    seen = seen[None, None]
    if mask is not None:
      seen &= _full_rank(mask, (query.shape[0], self.num_heads, seq, length))
    context = jax.nn.dot_product_attention(
        query, cache["key"].astype(query.dtype), cache["value"].astype(query.dtype), mask=seen)
    # dynamic_update_slice moves a write that does not fit over older tokens; that must not look like a result.
    return jnp.where(start + seq <= length, context, jnp.nan), cache


class SwiGLU(nn.Module):
  """The gated feed-forward map of `[..., embed]`: wo(silu(wi_0(x)) * wi_1(x)), `hidden` wide."""

  hidden: int
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    def project(y: Array, features: int, axes: tuple[str, str], name: str) -> Array:
      y = Projection((features,), axes, dtype=self.dtype, param_dtype=self.param_dtype, name=name)(y)
      return checkpoint_name(y, f"mlp{name}")

    gate = project(x, self.hidden, ("embed", "mlp"), "wi_0")
    up = project(x, self.hidden, ("embed", "mlp"), "wi_1")
    return project(nn.silu(gate) * up, x.shape[-1], ("mlp", "embed"), "wo")
