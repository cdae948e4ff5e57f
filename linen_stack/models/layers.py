"""The parts of the reference decoder layers: RMS norm, projection, cached attention and the gated feed-forward map.

Every parameter carries logical axis names (`embed`, `q_heads`, `kv_heads`, `head_dim`, `mlp`, `vocab`, `norm`), and the
values that rematerialisation policies choose among are tagged where they arise. Under a mesh with logical axis rules,
what projections return is laid out by name as well: `batch`, `seq`, and the parameter's own names, with `hidden` in the
place of `embed`. Parameters are stored in `param_dtype` and used in `dtype`; norms, rotary angles and the softmax are
computed in float32 at least.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models import rope
from linen_stack.sharding import constrain

Array = jax.Array
DType = Any
KVCache = Mapping[str, Array]


def require_count(argument: str, value: Any) -> None:
  """Raises unless `value` is an int of at least 1."""
  if isinstance(value, bool) or not hasattr(value, "__index__"):
    raise TypeError(f"{argument} must be an int, not {value!r}")
  if value.__index__() < 1:
    raise ValueError(f"{argument} must be at least 1, not {value}")


def rms_norm(x: Array, scale: Array, eps: float, zero_centered: bool = False) -> Array:
  """x `[..., features]` over its root mean square, times scale `[features]`, in float32 at least."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  x = x.astype(wide)
  x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  scale = scale.astype(wide)
  return x * (1 + scale if zero_centered else scale)


class RMSNorm(nn.Module):
  """Divides `[..., features]` by its root mean square and scales it; the result has `dtype`.

  Args:
    eps: what is added to the mean square.
    zero_centered: the factor is 1 + scale, and scale starts at 0 instead of 1.
  """

  eps: float = 1e-6
  zero_centered: bool = False
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    init = nn.initializers.zeros_init() if self.zero_centered else nn.initializers.ones_init()
    init = nn.with_logical_partitioning(init, ("norm",))
    scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
    return rms_norm(x, scale, self.eps, self.zero_centered).astype(self.dtype)


def kernel_init(summed: int, rank: int) -> nn.initializers.Initializer:
  """Of kernels of `rank` axes, of which the first `summed` are summed over."""
  return nn.initializers.variance_scaling(
      1.0, "fan_in", "truncated_normal", in_axis=range(summed), out_axis=range(summed, rank))


def linear_map(x: Array, kernel: Array, summed: int, output_dtype: DType | None = None) -> Array:
  """The product of x `[..., *in]` and kernel `[*in, *out]`, `[..., *out]`, where `in` are `summed` axes."""
  contract = (tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed)))
  return lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=output_dtype)


class Projection(nn.Module):
  """A linear map of the last `len(axes) - len(features)` dimensions onto `features`.

  Flax's `DenseGeneral` is not used because it initialises a flattened kernel: under a mesh and logical axis rules the
  names of a kernel with three axes do not fit that.

  Args:
    features: the sizes of the new dimensions.
    axes: the logical names of the kernel's axes, first those that are summed over.
    use_bias: adds a vector of the shape `features`.
    output_dtype: the dtype in which the product is accumulated and returned; None: `dtype`.
  """

  features: tuple[int, ...]
  axes: tuple[str, ...]
  use_bias: bool = False
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32
  output_dtype: DType | None = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    summed = len(self.axes) - len(self.features)
    shape = x.shape[x.ndim - summed:] + tuple(self.features)
    init = kernel_init(summed, len(shape))
    kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), shape, self.param_dtype)
    y = linear_map(x.astype(self.dtype), kernel.astype(self.dtype), summed, self.output_dtype)
    # Under a mesh with rules activations lie like the axes of parameters that they come from; their width has its own name.
    names = ("hidden" if axis == "embed" else axis for axis in self.axes[summed:])
    y = constrain(y, ("batch", "seq", *names))
    if not self.use_bias:
      return y
    init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[summed:])
    return y + self.param("bias", init, tuple(self.features), self.param_dtype).astype(y.dtype)


def empty_cache(batch: int, length: int, num_kv_heads: int, head_dim: int, dtype: DType = jnp.float32) -> KVCache:
  """An empty cache for `length` tokens: key and value `[batch, length, kv_heads, head_dim]`, index `[]`."""
  shape = (batch, length, num_kv_heads, head_dim)
  return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype), "index": jnp.zeros((), jnp.int32)}


def check_cache(cache: KVCache, new: Mapping[str, Array]) -> None:
  """Raises where `cache` cannot take the values of new tokens, each part `[batch, seq, ...]`."""
  names = [*new, "index"]
  if not isinstance(cache, Mapping) or set(cache) != set(names):
    got = sorted(cache) if isinstance(cache, Mapping) else type(cache).__name__
    raise TypeError(f"kv_cache must be a dict of {', '.join(names[:-1])} and index (see init_cache), not {got}")
  for name, part in new.items():
    (batch, seq, *rest), shape = part.shape, jnp.shape(cache[name])
    if len(shape) != part.ndim or (shape[0], *shape[2:]) != (batch, *rest):
      raise ValueError(f"kv_cache[{name!r}] has shape {shape}; this layer and batch need "
                       f"[{', '.join(map(str, (batch, 'length', *rest)))}]")
  lengths = {name: jnp.shape(cache[name])[1] for name in new}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"kv_cache: the parts differ in length: {lengths}")
  index, length = cache["index"], min(lengths.values())
  if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
    raise ValueError("kv_cache['index'] must be one integer, how many tokens the cache holds; it has shape "
                     f"{jnp.shape(index)} and dtype {jnp.result_type(index)}")
  used = 0 if isinstance(index, jax.core.Tracer) else int(index)
  if used + seq > length:
    raise ValueError(f"kv_cache has room for {length} tokens and holds {used}; {seq} more do not fit")


def extend_cache(cache: KVCache, new: Mapping[str, Array]) -> KVCache:
  """A cache with the values of new tokens, each part `[batch, seq, ...]`, written at its index, in its own dtypes."""
  extended = {name: lax.dynamic_update_slice_in_dim(cache[name], part.astype(cache[name].dtype), cache["index"], axis=1)
              for name, part in new.items()}
  seq = next(iter(new.values())).shape[1]
  return {**extended, "index": (cache["index"] + seq).astype(jnp.result_type(cache["index"]))}


def token_positions(x: Array, positions: Array | None, kv_cache: KVCache | None) -> Array:
  """The positions `[batch or 1, seq]` of x `[batch, seq, ...]`: from the cache's index on, if none are given.

  Raises ValueError for positions of another shape.
  """
  if positions is None:
    start = 0 if kv_cache is None else kv_cache["index"]
    return (start + jnp.arange(x.shape[1]))[None]
  shape = jnp.shape(positions)
  if shape not in (x.shape[:2], (1, x.shape[1])):
    raise ValueError(f"positions has shape {shape}; it must be {x.shape[:2]} or {(1, x.shape[1])} (batch, seq)")
  return jnp.asarray(positions)


def full_rank(mask: Array, shape: tuple[int, ...]) -> Array:
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

  Args:
    qk_norm: RMS norm of each query and key head before the rotary embedding; zero_centered_norm: as in `RMSNorm`.
    rope_theta, rope_scaling: as in `rope.frequencies`; rope_theta None: no rotary embedding.
    rope_fraction: which part of each head is rotated, from its start.
    output_gate: the query projection is twice as wide, and sigmoids of the second half of each head gate its context.
    scale: what query times key is multiplied by. None: 1 / sqrt(head_dim).
    qkv_bias, out_bias: a bias on the projections to query, key and value, and on the one of the output.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int | None = None
  qk_norm: bool = False
  zero_centered_norm: bool = False
  rope_theta: float | None = 10000.0
  rope_scaling: Mapping[str, Any] | None = None
  rope_fraction: float = 1.0
  output_gate: bool = False
  scale: float | None = None
  qkv_bias: bool = False
  out_bias: bool = False
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

    def project(name: str, heads: int, axis: str, width: int = self.head_dim) -> Array:
      axes = ("embed", axis, "head_dim")
      y = Projection((heads, width), axes, use_bias=self.qkv_bias, name=name, **dtypes)(x)
      return checkpoint_name(y, f"{name}_proj")

    if self.output_gate:
      query, gate = jnp.split(project("query", self.num_heads, "q_heads", 2 * self.head_dim), 2, axis=-1)
    else:
      query = project("query", self.num_heads, "q_heads")
    key = project("key", self.num_kv_heads, "kv_heads")
    value = project("value", self.num_kv_heads, "kv_heads")
    if kv_cache is not None:
      check_cache(kv_cache, {"key": key, "value": value})
    if self.qk_norm:
      norm = dict(eps=self.norm_eps, zero_centered=self.zero_centered_norm, **dtypes)
      query, key = RMSNorm(name="query_norm", **norm)(query), RMSNorm(name="key_norm", **norm)(key)
    if self.rope_theta is not None:
      positions = token_positions(x, positions, kv_cache)
      rates, factor = rope.frequencies(int(self.head_dim * self.rope_fraction), self.rope_theta, self.rope_scaling)
      query, key = (rope.rotate(y, positions, rates, scale=factor) for y in (query, key))

    if kv_cache is None:
      context = attend(query, key, value, mask, self.window, self.scale)
    else:
      context, kv_cache = attend_cached(query, key, value, mask, kv_cache, self.window, self.scale)
    context = checkpoint_name(context, "context")
    if self.output_gate:
      context *= nn.sigmoid(gate)
    out = Projection(x.shape[-1:], ("q_heads", "head_dim", "embed"), use_bias=self.out_bias, name="out",
                     **dtypes)(context)
    return checkpoint_name(out, "out_proj"), kv_cache


def attend(query: Array, key: Array, value: Array, mask: Array | None, window: int | None, scale: float | None) -> Array:
  """Causal attention over a sequence: query `[batch, seq, heads, head_dim]`, key and value `[batch, seq, kv_heads, ...]`."""
  if mask is not None:
    mask = full_rank(mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
  return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, is_causal=True,
                                      local_window_size=None if window is None else (window - 1, 0))


def attend_cached(query: Array, key: Array, value: Array, mask: Array | None, cache: KVCache, window: int | None,
                  scale: float | None) -> tuple[Array, KVCache]:
  """`attend` of new tokens over a cache and themselves; also gives the extended cache."""
  start, seq, length = cache["index"], query.shape[1], cache["key"].shape[1]
  cache = extend_cache(cache, {"key": key, "value": value})
  distance = (start + jnp.arange(seq))[:, None] - jnp.arange(length)  # [seq, length]
  seen = distance >= 0
  if window is not None:
    seen &= distance < window
  seen = seen[None, None]
  if mask is not None:
    seen &= full_rank(mask, (query.shape[0], query.shape[2], seq, length))
  context = jax.nn.dot_product_attention(
      query, cache["key"].astype(query.dtype), cache["value"].astype(query.dtype), mask=seen, scale=scale)
  # dynamic_update_slice moves a write that does not fit over older tokens; that must not look like a result.
  return jnp.where(start + seq <= length, context, jnp.nan), cache


class SwiGLU(nn.Module):
  """The gated feed-forward map of `[..., embed]`: wo(activation(wi_0(x)) * wi_1(x)), `hidden` wide."""

  hidden: int
  activation: Callable[[Array], Array] = nn.silu
  use_bias: bool = False
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    def project(y: Array, features: int, axes: tuple[str, str], name: str) -> Array:
      y = Projection((features,), axes, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype,
                     name=name)(y)
      return checkpoint_name(y, f"mlp{name}")

    gate = project(x, self.hidden, ("embed", "mlp"), "wi_0")
    up = project(x, self.hidden, ("embed", "mlp"), "wi_1")
    return project(self.activation(gate) * up, x.shape[-1], ("mlp", "embed"), "wo")
