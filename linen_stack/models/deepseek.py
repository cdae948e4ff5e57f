"""The DeepSeek-V3 decoder layer (https://arxiv.org/abs/2412.19437): latent attention, then a dense map or experts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from linen_stack.models.layers import DType, KVCache, RMSNorm, SwiGLU, require_count
from linen_stack.models.mla import MLA
from linen_stack.models.moe import MoE

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
