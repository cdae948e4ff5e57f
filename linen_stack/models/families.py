"""What a config can name: families of layers, and the language model around a config's stack."""
from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from linen_stack.models.language_model import LanguageModel

if TYPE_CHECKING:
  from linen_stack.config import StackConfig

# Family -> its layer class, imported when a config asks for it.
FAMILIES: dict[str, str] = {
    "decoder": "linen_stack.models.decoder:DecoderLayer",
}


def language_model(config: StackConfig) -> LanguageModel:
  """The language model of a config: its stack between a token embedding and logits.

  Raises ValueError or TypeError, with the key, for what is missing or does not fit.
  """
  for key in ("vocab", "embed"):
    if getattr(config.model, key) is None:
      raise ValueError(f"the key 'model.{key}' is missing: a language model needs it")
  _, stack = config.build()
  said = {key: getattr(config.model, key) for key in ("norm_eps", "dtype", "param_dtype")}
  said = {key: value if key == "norm_eps" else jnp.dtype(value) for key, value in said.items() if value is not None}
  return LanguageModel(stack=stack, vocab=config.model.vocab, embed=config.model.embed,
                       tie_embeddings=config.model.tie_embeddings, **said)
