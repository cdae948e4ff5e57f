"""A language model around a stack: token embedding, the stack's layers, a last norm, and the projection to logits."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from linen_stack.models.layers import DType, Projection, RMSNorm, require_count
from linen_stack.per_layer import per_layer
from linen_stack.sharding import constrain
from linen_stack.specs import keywords_checked

Array = jax.Array


@keywords_checked
class LanguageModel(nn.Module):
  """Tokens `[batch, seq]` to logits `[batch, seq, vocab]`.

  Its variables: `token_embed/embedding` `[vocab, embed]`, the stack's segments beside it (no level for the stack),
  `final_norm/scale`, and `lm_head/kernel` `[embed, vocab]` unless the embeddings are tied. A token id outside the
  vocabulary gives NaN.

  Args:
    stack: the layers between embedding and last norm, a `StackedDecoder`.
    vocab: number of token ids.
    embed: width of the residual stream.
    tie_embeddings: the transposed token embedding makes the logits.
    embed_scale: what token embeddings are multiplied by, rounded to `dtype`. None: nothing. Tied logits are made from
      the embedding as it is stored.
    norm_eps: what the last norm adds to the mean square.
    zero_centered_norm: the last norm's factor is 1 + scale.
    logit_softcap: logits become cap * tanh(logits / cap). None: they stay.
    dtype: of the computation and of the residual stream. Logits are float32 at least.
    param_dtype: of the stored parameters outside the stack.
    hf_config: the content of the `config.json` that the model was made from, kept for saving it again. Two models that
      differ in it alone are equal.

  Raises:
    TypeError, ValueError: on construction, for sizes that are not ints of at least 1, and where a segment has the
      name of one of the model's own parts.
  """

  stack: nn.Module
  vocab: int
  embed: int
  tie_embeddings: bool = False
  embed_scale: float | None = None
  norm_eps: float = 1e-6
  zero_centered_norm: bool = False
  logit_softcap: float | None = None
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32
  hf_config: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

  def __post_init__(self):
    for argument in ("vocab", "embed"):
      require_count(f"LanguageModel: {argument}", getattr(self, argument))
    for argument in ("embed_scale", "logit_softcap"):
      value = getattr(self, argument)
      if value is not None and not value > 0:
        raise ValueError(f"LanguageModel: {argument} must be above 0 (None: without), not {value}")
    plan = getattr(self.stack, "plan", None)
    for segment in getattr(plan, "segments", () if plan is None else (plan,)):
      if segment.name in ("token_embed", "final_norm", "lm_head"):
        raise ValueError(f"LanguageModel: a segment is named {segment.name!r}, as a part of the model is; "
                         "its variables stand beside that part, so give the segment another name")
    super().__post_init__()

  def setup(self):
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    init = nn.with_logical_partitioning(nn.initializers.normal(self.embed**-0.5), ("vocab", "embed"))
    self.token_embed = nn.Embed(self.vocab, self.embed, embedding_init=init, **dtypes)
    nn.share_scope(self, self.stack)
    self.final_norm = RMSNorm(eps=self.norm_eps, zero_centered=self.zero_centered_norm, **dtypes)
    self.logits_dtype = jnp.promote_types(self.dtype, jnp.float32)
    if not self.tie_embeddings:
      self.lm_head = Projection((self.vocab,), ("embed", "vocab"), output_dtype=self.logits_dtype, **dtypes)

  def __call__(self, tokens: Array, positions: Array | None = None, mask: Array | None = None,
               kv_cache: Sequence[Any] | None = None, *, deterministic: bool = True):
    """tokens `[batch, seq]` to logits `[batch, seq, vocab]`, or (logits, extended caches) where kv_cache is given.

    Args:
      positions: `[batch or 1, seq]`, and
      mask: boolean, broadcastable to `[batch, heads, seq, keys]`: handed to every layer where given.
      kv_cache: one cache per layer, as `init_cache(model, batch, length)` gives.
      deterministic: no dropout.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise TypeError(f"tokens must be integers [batch, seq], not {tokens.dtype} {tokens.shape}")
    # Only what is given is handed on: layers without a mask, positions or a cache need not accept them.
    given = {"mask": mask, "positions": positions, "kv_cache": None if kv_cache is None else per_layer(kv_cache)}
    given = {name: value for name, value in given.items() if value is not None}
    x = self.token_embed(tokens)
    if self.embed_scale is not None:
      x = x * jnp.asarray(self.embed_scale, x.dtype)
    # Under a mesh with rules for "batch": split like the tokens, and not like the table that they were looked up in.
    x = constrain(x, ("batch", "seq", "hidden"))
    x = self.stack(x, **given, deterministic=deterministic)
    if kv_cache is not None:
      x, kv_cache = x
    x = self.final_norm(constrain(x, ("batch", "seq", "hidden")))
    if self.tie_embeddings:
      table = self.token_embed.embedding.astype(x.dtype)
      logits = lax.dot_general(x, table, (((2,), (1,)), ((), ())), preferred_element_type=self.logits_dtype)
    else:
      logits = self.lm_head(x)
    if self.logit_softcap is not None:
      logits = self.logit_softcap * jnp.tanh(logits / self.logit_softcap)
    return logits if kv_cache is None else (logits, kv_cache)
