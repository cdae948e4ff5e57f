"""What a config can name: families of layers, published families of models, and the language model around a stack."""
from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import jax.numpy as jnp

from linen_stack.models.family import Family
from linen_stack.models.language_model import LanguageModel
from linen_stack.specs import nearest

if TYPE_CHECKING:
  from linen_stack.config import StackConfig

# Family -> its layer class, imported when a config asks for it.
FAMILIES: dict[str, str] = {
    "decoder": "linen_stack.models.decoder:DecoderLayer",
    "gemma3": "linen_stack.models.gemma3:Gemma3Layer",
    "deepseek": "linen_stack.models.deepseek:DeepseekLayer",
    "qwen3_next": "linen_stack.models.qwen3_next:Qwen3NextLayer",
}


# Families of published models -> the `Family`, imported when a checkpoint asks for one.
PUBLISHED: dict[str, str] = {
    "llama": "linen_stack.models.llama:LLAMA",
    "mistral": "linen_stack.models.llama:MISTRAL",
    "qwen2": "linen_stack.models.llama:QWEN2",
    "qwen3": "linen_stack.models.llama:QWEN3",
    "gemma3": "linen_stack.models.gemma3:GEMMA3",
    "deepseek_v3": "linen_stack.models.deepseek:DEEPSEEK_V3",
    "qwen3_next": "linen_stack.models.qwen3_next:QWEN3_NEXT",
}


@functools.cache
def published() -> tuple[Family, ...]:
  """All families of published models."""
  places = [place.split(":") for place in PUBLISHED.values()]
  return tuple(getattr(importlib.import_module(module), name) for module, name in places)


def family_of(model_type: str | None) -> Family:
  """The family of a config's `model_type`. Raises ValueError, with those known, where there is none."""
  known = {kind: family for family in published() for kind in family.model_types}
  if model_type not in known:
    problem = "has no model_type"
    if model_type is not None:
      problem = f"has the model_type {model_type!r}, of no family known here"
    near = nearest(str(model_type), known)
    known_types = "" if near.startswith("known") else f"; known: {', '.join(map(repr, known))}"
    raise ValueError(f"the config {problem}; {near}{known_types}")
  return known[model_type]


def language_model(config: StackConfig) -> LanguageModel:
  """The language model of a config: its stack between a token embedding and logits.

  Raises ValueError or TypeError, with the key, for what is missing or does not fit.
  """
  if config.model.hf is not None:
    return config.published_model().clone(stack=config.build()[1])
  for key in ("vocab", "embed"):
    if getattr(config.model, key) is None:
      raise ValueError(f"the key 'model.{key}' is missing: a language model needs it")
  _, stack = config.build()
  said = {key: getattr(config.model, key) for key in ("norm_eps", "dtype", "param_dtype")}
  said = {key: value if key == "norm_eps" else jnp.dtype(value) for key, value in said.items() if value is not None}
  return LanguageModel(stack=stack, vocab=config.model.vocab, embed=config.model.embed,
                       tie_embeddings=config.model.tie_embeddings, **said)
