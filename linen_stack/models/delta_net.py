"""The gated delta net of Qwen3-Next, in place of attention: projections, a short convolution, the gated delta rule and
a gated norm. For decoding it keeps the state of the rule and the last few tokens that the convolution saw.
"""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models.delta_rule import chunked_delta_rule, recurrent_delta_rule
from linen_stack.models.layers import DType, Projection, RMSNorm, require_count

Array = jax.Array
State = Mapping[str, Array]


def causal_convolution(x: Array, kernel: Array, before: Array | None = None) -> tuple[Array, Array]:
  """Weights each channel of a token and of the tokens before it: y_t = sum over i of kernel_i * x_(t - width + 1 + i).

  Args:
    x: `[batch, seq, channels]`.
    kernel: `[width, channels]`.
    before: the last `width - 1` tokens before x; None: zeros.

  Returns:
    y, of x's shape and float32 at least, and the last `width - 1` tokens, for the next call.
  """
  (batch, seq, channels), width = x.shape, kernel.shape[0]
  if before is None:
    before = jnp.zeros((batch, width - 1, channels), x.dtype)
  wide = jnp.promote_types(x.dtype, jnp.float32)
  x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
  y = sum(kernel[i].astype(wide) * x[:, i:i + seq].astype(wide) for i in range(width))
  return y, x[:, seq:]


def l2_normalized(x: Array) -> Array:
  """x over its length along the last axis, float32 at least."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class GatedDeltaNet(nn.Module, kw_only=True):
  """The gated delta rule between projections, in place of attention.

  Queries, keys and values pass a causal convolution, each of their channels by itself, and a SiLU. Heads share a key
  head in groups of neighbours. The result is normalised per head and gated. Values that a policy can name: `qkv_proj`
  (the two projections of x), `context` (what the delta rule returns), `out_proj`.

  Variables: `qkvz/kernel` `[embed, key_heads, 2 key_dim + 2 group value_dim]`, for each key head its query, key, values
  and output gates; `ba/kernel` `[embed, key_heads, 2 group]`, for each key head the betas and decays; `conv`
  `[conv_width, channels]`, first all queries, then all keys, then all values; `A_log`, `dt_bias` `[heads]`;
  `norm/scale` `[value_dim]`; `out/kernel` `[heads, value_dim, embed]`.

  Args:
    key_heads: heads of queries and keys.
    heads: heads of values and states, a multiple of key_heads.
    key_dim: width of a query or key.
    value_dim: width of a value.
    conv_width: how many tokens the convolution sees.
    chunk: tokens per chunk of the parallel form.
    norm_eps: what the norm adds to the mean square.
    dtype: of the projections. Between them everything is float32.
    param_dtype: of the stored parameters.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  key_heads: int
  heads: int
  key_dim: int
  value_dim: int
  conv_width: int = 4
  chunk: int = 64
  norm_eps: float = 1e-6
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    owner = type(self).__name__
    for argument in ("key_heads", "heads", "key_dim", "value_dim", "conv_width", "chunk"):
      require_count(f"{owner}: {argument}", getattr(self, argument))
    if self.heads % self.key_heads:
      raise ValueError(f"{owner}: heads {self.heads} is not a multiple of key_heads {self.key_heads}")
    super().__post_init__()

  @property
  def _channels(self) -> tuple[int, int, int]:
    """How many channels of the convolution are queries, keys and values."""
    keys = self.key_heads * self.key_dim
    return keys, keys, self.heads * self.value_dim

  @nn.nowrap
  def init_cache(self, batch: int, length: int, dtype: DType = jnp.float32) -> State:
    """An empty state: conv `[batch, conv_width - 1, channels]`, recurrent `[batch, heads, key_dim, value_dim]`, index
    `[]`. It is of one size for any length. The recurrent part is float32 at least: rounding errors would stay in it.
    """
    del length
    wide = jnp.promote_types(dtype, jnp.float32)
    return {"conv": jnp.zeros((batch, self.conv_width - 1, sum(self._channels)), dtype),
            "recurrent": jnp.zeros((batch, self.heads, self.key_dim, self.value_dim), wide),
            "index": jnp.zeros((), jnp.int32)}

  @nn.compact
  def __call__(self, x: Array, mask: Array | None = None, kv_cache: State | None = None) -> tuple[Array, State | None]:
    """x `[batch, seq, embed]` to (result of the same shape, the state after it or None).

    Args:
      mask: boolean, False for padding, which is as good as zeros: `[batch or 1, 1, 1, keys]`. keys is seq, or with a
        cache what the mask of an attention layer has: all tokens, those of the cache first.
      kv_cache: what `init_cache` or an earlier call returned.

    Raises:
      TypeError, ValueError: for a mask that is more than padding, and for a cache of the wrong form.
    """
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    batch, seq, embed = x.shape
    state = self._checked_state(kv_cache, batch)
    if mask is not None:
      x = _without_padding(x, mask, None if kv_cache is None else kv_cache["index"])
    group = self.heads // self.key_heads

    def project(width: int, name: str) -> Array:
      y = Projection((self.key_heads, width), ("embed", "kv_heads", "head_dim"), name=name, **dtypes)(x)
      return checkpoint_name(y, "qkv_proj")

    def flat(y: Array) -> Array:
      return y.reshape(batch, seq, -1)

    def per_head(name: str, init: Any) -> Array:
      init = nn.with_logical_partitioning(init, ("q_heads",))
      return self.param(name, init, (self.heads,), self.param_dtype).astype(jnp.promote_types(self.dtype, jnp.float32))

    key_dim, values = self.key_dim, group * self.value_dim
    query, key, value, gate = jnp.split(project(2 * key_dim + 2 * values, "qkvz"),
                                        (key_dim, 2 * key_dim, 2 * key_dim + values), axis=-1)
    beta, rate = jnp.split(project(2 * group, "ba"), 2, axis=-1)

    init = nn.with_logical_partitioning(nn.initializers.normal(self.conv_width**-0.5), ("conv", "channels"))
    kernel = self.param("conv", init, (self.conv_width, sum(self._channels)), self.param_dtype)
    mixed = jnp.concatenate([flat(query), flat(key), flat(value)], axis=-1)
    mixed, last = causal_convolution(mixed, kernel, state["conv"])
    keys = self._channels[0]
    query, key, value = (y.reshape(batch, seq, -1, width) for y, width in zip(
        jnp.split(nn.silu(mixed), (keys, 2 * keys), axis=-1), (key_dim, key_dim, self.value_dim)))

    wide = mixed.dtype
    decay = jnp.exp(per_head("A_log", _log_of_decay_rates))
    log_decay = -decay * nn.softplus(flat(rate).astype(wide) + per_head("dt_bias", nn.initializers.ones_init()))
    rule = recurrent_delta_rule if seq == 1 else functools.partial(chunked_delta_rule, chunk=self.chunk)
    context, recurrent = rule(l2_normalized(query) * key_dim**-0.5, l2_normalized(key), value, log_decay,
                              nn.sigmoid(flat(beta).astype(wide)), state["recurrent"])
    context = checkpoint_name(context.astype(self.dtype), "context")

    y = RMSNorm(eps=self.norm_eps, dtype=wide, param_dtype=self.param_dtype, name="norm")(context)
    y = y * nn.silu(gate.reshape(y.shape).astype(wide))
    y = Projection((embed,), ("q_heads", "head_dim", "embed"), name="out", **dtypes)(y)
    y = checkpoint_name(y, "out_proj")
    if kv_cache is None:
      return y, None
    new = {"conv": last, "recurrent": recurrent, "index": state["index"] + seq}
    return y, {name: new[name].astype(jnp.result_type(kv_cache[name])) for name in kv_cache}

  @nn.nowrap
  def _checked_state(self, cache: State | None, batch: int) -> State:
    """The cache, or an empty one. Raises where it is not one of this module for the batch."""
    empty = jax.eval_shape(lambda: self.init_cache(batch, 1))
    if cache is None:
      return self.init_cache(batch, 1, self.dtype)
    if not isinstance(cache, Mapping) or set(cache) != set(empty):
      got = sorted(cache) if isinstance(cache, Mapping) else type(cache).__name__
      raise TypeError(f"kv_cache must be a dict of conv, recurrent and index (see init_cache), not {got}")
    for name, leaf in empty.items():
      if jnp.shape(cache[name]) != leaf.shape:
        raise ValueError(f"kv_cache[{name!r}] has shape {jnp.shape(cache[name])}; this layer and batch need "
                         f"{leaf.shape}")
    return cache


def _log_of_decay_rates(key: Array, shape: tuple[int, ...], dtype: DType) -> Array:
  """Logarithms of rates that are uniform up to 16, as the published model starts from."""
  return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16)).astype(dtype)


def _without_padding(x: Array, mask: Array, index: Array | None) -> Array:
  """x `[batch, seq, embed]` with zeros for padding. `index`: how many tokens the cache holds, None without one."""
  if jnp.result_type(mask) != jnp.bool_:
    raise TypeError(f"mask must be boolean (False: padding), not {jnp.result_type(mask)}")
  (batch, seq, _), shape = x.shape, jnp.shape(mask)
  mask = jnp.reshape(mask, (1,) * (4 - len(shape)) + shape)
  if mask.ndim > 4 or mask.shape[1:3] != (1, 1) or mask.shape[0] not in (1, batch):
    raise ValueError(f"mask has shape {shape}; a gated delta net keeps no single tokens for a query to choose from and "
                     f"can only leave out padding, by a mask [batch or 1, 1, 1, keys] such as {(batch, 1, 1, seq)}")
  keys = mask.shape[3]
  mask = mask[:, 0, 0, :, None]  # [batch or 1, keys, 1]
  if keys == 1:
    return jnp.where(mask, x, 0)
  used = 0 if index is None or isinstance(index, jax.core.Tracer) else int(index)
  if keys < used + seq or (index is None and keys > seq):
    raise ValueError(f"mask {shape} is for {keys} tokens; there are {used + seq}")
  if index is None:
    return jnp.where(mask, x, 0)
  # A slice that reaches beyond the mask is moved to its end; that must not look like a result.
  return jnp.where(index + seq <= keys, jnp.where(lax.dynamic_slice_in_dim(mask, index, seq, axis=1), x, 0), jnp.nan)
