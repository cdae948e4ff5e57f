"""The gated delta rule: linear attention with a state of fixed size instead of the keys and values of all tokens.

Each head keeps a matrix S `[key_dim, value_dim]` that maps keys to values. A token lets it decay, corrects what it
holds for the token's key by the share beta of the error, and reads it with the query (Yang et al., arXiv:2412.06464):

    S_t = a_t S_(t-1) + k_t d_t^T        d_t = beta_t (v_t - a_t S_(t-1)^T k_t)        o_t = S_t^T q_t

`recurrent_delta_rule` does this token by token. `chunked_delta_rule` does the same with products of matrices: within a
chunk that starts from S, and with c_t the product of the decays a up to t, the corrections D solve a triangular system

    (I + L) D = beta (V - c K S)         L_tj = beta_t (c_t / c_j) k_t.k_j  for j < t

whose inverse does not depend on S and is made for all chunks at once; only S goes from chunk to chunk.
"""
from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from linen_stack.models.layers import require_count

Array = jax.Array

# Errors in a state stay in it, and a product of float32 is by default one of bfloat16 on a TPU.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def recurrent_delta_rule(query: Array, key: Array, value: Array, log_decay: Array, beta: Array,
                         state: Array | None = None) -> tuple[Array, Array]:
  """The gated delta rule, token by token. Heads share a key head in groups of neighbours.

  Args:
    query, key: `[batch, seq, key_heads, key_dim]`, normalised and scaled by the caller.
    value: `[batch, seq, heads, value_dim]`, heads a multiple of key_heads.
    log_decay: `[batch, seq, heads]`, logarithms of the decays, so not above 0.
    beta: `[batch, seq, heads]`, the share of an error that is corrected.
    state: `[batch, heads, key_dim, value_dim]` before the first token; None: zeros.

  Returns:
    What the queries read `[batch, seq, heads, value_dim]` and the state after the last token, both float32 at least.

  Raises:
    ValueError: for shapes that do not fit together.
  """
  tokens, state = _grouped(query, key, value, log_decay, beta, state)

  def step(state, token):
    query, key, value, log_decay, beta = token  # [batch, key_heads, (group,) ...]
    state = state * jnp.exp(log_decay)[..., None, None]
    correction = beta[..., None] * (value - _einsum("bgrkv,bgk->bgrv", state, key))
    state = state + key[:, :, None, :, None] * correction[..., None, :]
    return state, _einsum("bgrkv,bgk->bgrv", state, query)

  state, out = lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in tokens])
  batch, _, heads, _ = value.shape
  return jnp.moveaxis(out, 0, 1).reshape(value.shape), state.reshape(batch, heads, *state.shape[3:])


def chunked_delta_rule(query: Array, key: Array, value: Array, log_decay: Array, beta: Array,
                       state: Array | None = None, chunk: int = 64) -> tuple[Array, Array]:
  """`recurrent_delta_rule` as a few products per chunk of tokens, for training and for reading a prompt.

  Args:
    chunk: tokens per chunk. The sequence need not be a multiple of it. The others: as there.

  Raises:
    TypeError, ValueError: for shapes that do not fit together, and a chunk below 1.
  """
  require_count("chunk", chunk)
  tokens, state = _grouped(query, key, value, log_decay, beta, state)
  batch, seq, heads, value_dim = value.shape
  chunk = min(chunk, seq)

  def split(x):  # [batch, seq, key_heads, ...] to [chunks, batch, key_heads, chunk, ...]
    # Zeros behind the last token leave the state as it is: no decay and no correction.
    x = jnp.pad(x, [(0, 0), (0, -seq % chunk), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(batch, -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))

  query, key, value, log_decay, beta = map(split, tokens)
  # Behind the key heads comes the group, of size 1 for queries and keys: [chunks, batch, key_heads, group, chunk, ...].
  query, key = query[:, :, :, None], key[:, :, :, None]
  value, log_decay, beta = (jnp.moveaxis(x, 4, 3) for x in (value, log_decay, beta))

  earlier = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
  # The decay from one token to a later one has a sum of its own, of numbers not above 0: nothing can overflow.
  # Differences of one running sum would be cheaper, but after a strong decay they have lost the weak ones.
  between = jnp.tril(jnp.exp(jnp.cumsum(jnp.where(earlier, log_decay[..., None], 0), axis=-2)))
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]

  overlap = _einsum("...ik,...jk->...ij", key, key)
  inverse = _unit_lower_inverse(jnp.where(earlier, beta[..., None] * between * overlap, 0))
  written = _einsum("...ij,...jv->...iv", inverse, beta[..., None] * value)
  erased = _einsum("...ij,...jk->...ik", inverse, beta[..., None] * from_start * key)
  within = between * _einsum("...ik,...jk->...ij", query, key)
  to_end = between[..., -1, :, None] * key

  def step(state, of_chunk):
    query, written, erased, within, to_end, decay = of_chunk
    correction = written - _einsum("...ik,...kv->...iv", erased, state)
    out = _einsum("...ik,...kv->...iv", query, state) + _einsum("...ij,...jv->...iv", within, correction)
    return decay * state + _einsum("...ik,...iv->...kv", to_end, correction), out

  state, out = lax.scan(step, state, (from_start * query, written, erased, within, to_end, from_start[..., -1:, :]))
  out = jnp.moveaxis(out, (0, 4), (1, 2))  # [batch, chunks, chunk, key_heads, group, value_dim]
  return out.reshape(batch, -1, heads, value_dim)[:, :seq], state.reshape(batch, heads, *state.shape[3:])


def _grouped(query: Array, key: Array, value: Array, log_decay: Array, beta: Array,
             state: Array | None) -> tuple[list[Array], Array]:
  """The arguments in float32 at least, heads taken apart into [key_heads, group], and the state, zeros where None."""
  if query.ndim != 4 or value.ndim != 4 or not query.shape[1] or value.shape[2] % query.shape[2]:
    raise ValueError(f"query {query.shape} and value {value.shape} must be [batch, seq, key_heads, key_dim] and "
                     "[batch, seq, heads, value_dim], heads a multiple of key_heads and seq at least 1")
  (batch, seq, key_heads, key_dim), (heads, value_dim) = query.shape, value.shape[2:]
  if state is None:
    state = jnp.zeros((batch, heads, key_dim, value_dim))
  expected = {"key": (key, query.shape), "value": (value, (batch, seq, heads, value_dim)),
              "log_decay": (log_decay, (batch, seq, heads)), "beta": (beta, (batch, seq, heads)),
              "state": (state, (batch, heads, key_dim, value_dim))}
  for name, (array, shape) in expected.items():
    if array.shape != shape:
      raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
  arrays = (query, key, value, log_decay, beta, state)
  query, key, *grouped, state = (x.astype(jnp.promote_types(jnp.result_type(*arrays), jnp.float32)) for x in arrays)
  grouped = [x.reshape(batch, seq, key_heads, heads // key_heads, *x.shape[3:]) for x in grouped]
  return [query, key, *grouped], state.reshape(batch, key_heads, heads // key_heads, key_dim, value_dim)


@jax.custom_jvp
def _unit_lower_inverse(strict: Array) -> Array:
  """The inverse of I + strict, for strictly lower triangles `[..., n, n]`.

  Joins inverses of blocks on the diagonal, two by two: [[A, 0], [C, B]] has the inverse [[a, 0], [-b C a, b]], which is
  D - D C D with D of the blocks a and b. These are a few large products, where a triangular solve goes row by row. (The
  product of I - strict, I + strict^2, I + strict^4, ... would be as short, but where keys repeat, its factors outgrow
  float32.)
  """
  size, width = strict.shape[-1], 1
  inverse, place = jnp.eye(size, dtype=strict.dtype), np.arange(size)
  while width < size:
    block, pair = place // width, place // (2 * width)
    corners = jnp.where((block[:, None] != block) & (pair[:, None] == pair), strict, 0)
    inverse = inverse - (corners if width == 1 else _einsum("...ij,...jk,...kl->...il", inverse, corners, inverse))
    width *= 2
  return jnp.broadcast_to(inverse, strict.shape)


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
  inverse = _unit_lower_inverse(*primals)
  return inverse, -_einsum("...ij,...jk,...kl->...il", inverse, *tangents, inverse)
