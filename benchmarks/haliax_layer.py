"""The reference decoder layer (RMS norm, attention with rotary embedding, SwiGLU) written for Haliax, and a Stacked of it."""
from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from haliax.nn.attention import causal_mask, dot_product_attention_weights
import jax
import jax.numpy as jnp


def _rotary(x: hax.NamedArray, pos: hax.Axis, dim: hax.Axis, theta: float) -> hax.NamedArray:
  half = dim.resize(dim.size // 2)
  rate = theta ** -(hax.arange(half).astype(jnp.float32) / half.size)
  angle = hax.arange(pos).astype(jnp.float32).broadcast_axis(half) * rate
  first, second = x.astype(jnp.float32)[dim, :half.size], x.astype(jnp.float32)[dim, half.size:]
  sin, cos = hax.sin(angle), hax.cos(angle)
  return hax.concatenate(dim, [first * cos - second * sin, second * cos + first * sin]).astype(x.dtype)


class Layer(eqx.Module):
  """x [batch, seq, embed] to the same."""

  attention_norm: hnn.RmsNorm
  feed_forward_norm: hnn.RmsNorm
  query: hnn.Linear
  key: hnn.Linear
  value: hnn.Linear
  out: hnn.Linear
  wi_0: hnn.Linear
  wi_1: hnn.Linear
  wo: hnn.Linear

  @staticmethod
  def init(embed: hax.Axis, heads: hax.Axis, dim: hax.Axis, mlp: hax.Axis, dtype: Any, *, key: jax.Array) -> Layer:
    keys = iter(jax.random.split(key, 7))

    def linear(ins, outs):
      return jax.tree.map(lambda leaf: leaf.astype(dtype), hnn.Linear.init(ins, outs, key=next(keys), use_bias=False))

    def norm():
      return hnn.RmsNorm.init(embed, eps=1e-6, use_bias=False)

    return Layer(norm(), norm(), linear(embed, (heads, dim)), linear(embed, (heads, dim)), linear(embed, (heads, dim)),
                 linear((heads, dim), embed), linear(embed, mlp), linear(embed, mlp), linear(mlp, embed))

  def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
    pos, dim = x.resolve_axis("seq"), self.query.Out[-1]
    keys = pos.alias("keys")
    h = self.attention_norm(x).astype(x.dtype)
    query, key = _rotary(self.query(h), pos, dim, 10000.0), _rotary(self.key(h), pos, dim, 10000.0)
    key, value = key.rename({"seq": "keys"}), self.value(h).rename({"seq": "keys"})
    # Scores in float32, as in the reference layer.
    weights = dot_product_attention_weights(dim, keys, query, key, mask=causal_mask(pos, keys), attention_dtype=jnp.float32)
    x = x + self.out(hax.dot(weights.astype(x.dtype), value, axis=keys))
    h = self.feed_forward_norm(x).astype(x.dtype)
    return x + self.wo(hnn.silu(self.wi_0(h)) * self.wi_1(h))


def functions(depth: int, *, embed: int, mlp: int, num_heads: int, dtype: Any, **_: Any
              ) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """init(key, x) and apply(parameters, x) of a stack with full remat."""
  axes = (hax.Axis("embed", embed), hax.Axis("heads", num_heads), hax.Axis("head_dim", embed // num_heads),
          hax.Axis("mlp", mlp))
  layers = hax.Axis("layers", depth)
  stacked = hnn.Stacked.init(layers, Layer, gradient_checkpointing=True)
  make = functools.partial(stacked, *axes, dtype)

  def build(key):
    return make(key=jax.random.split(key, depth))

  structure = []  # of the static half of the module, made once

  def init(key, x):
    del x
    arrays, static = eqx.partition(build(key), eqx.is_array)
    structure[:] = [static]
    return arrays

  def apply(params, x):
    if not structure:
      jax.eval_shape(lambda key: init(key, x), jax.random.key(0))
    model = eqx.combine(params, structure[0])
    return model.fold(hax.named(x, ("batch", "seq", "embed"))).array

  return init, apply
