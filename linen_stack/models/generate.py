"""Generation with caches: one prefill of the prompt, then a loop of one-token steps, in one compiled program."""
from __future__ import annotations

from collections.abc import Mapping
import functools
import math
from typing import Any

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from linen_stack.models.layers import DType, require_count
from linen_stack.plan import Plan, Segment

Array = jax.Array


def init_cache(model: Any, batch: int, length: int, dtype: DType = jnp.float32) -> list[Any]:
  """Empty caches for `length` tokens, one per layer in layer order: what each layer's own `init_cache` makes.

  Args:
    model: a `LanguageModel`, a `StackedDecoder`, a plan or a segment.

  Raises:
    TypeError: for anything else, and for a layer class without `init_cache(batch, length, dtype)`.
    ValueError: for a batch or length below 1.
  """
  require_count("batch", batch)
  require_count("length", length)
  plan = getattr(getattr(model, "stack", model), "plan", model)
  if not isinstance(plan, (Plan, Segment)):
    raise TypeError(f"init_cache takes a model, a stack, a plan or a segment, not {type(model).__name__}")
  caches = []
  for index, spec in enumerate(Plan.of(plan).layers):
    layer = spec.cls(**spec.kwargs)
    if not hasattr(layer, "init_cache"):
      raise TypeError(f"layer {index} ({type(layer).__name__}) has no method init_cache(batch, length, dtype); "
                      "without one it cannot be given a cache")
    caches.append(layer.init_cache(batch, length, dtype))
  return caches


class _Static:
  """A model as a static argument. Models need not be hashable (a policy per segment is a dict), only comparable."""

  def __init__(self, model: nn.Module):
    self.model = model

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, _Static) and (self.model is other.model or self.model == other.model)

  def __hash__(self) -> int:
    return hash((type(self.model), self.model.vocab))


def generate(model: nn.Module, variables: Any, prompt: Array, num_tokens: int, *, temperature: float = 0.0,
             key: Array | None = None) -> Array:
  """The tokens `[batch, num_tokens]` that follow prompt `[batch, seq]`.

  Each distinct prompt shape and num_tokens compiles once per model; the temperature and the key do not recompile.

  Args:
    model: a `LanguageModel` whose layers have `init_cache`.
    variables: its variables.
    temperature: 0 takes the likeliest token; above 0, tokens are drawn from the logits divided by it.
    key: for the draws; needed above temperature 0, without effect at 0.

  Raises:
    TypeError, ValueError: for an empty prompt or one that is not token ids of the model, num_tokens below 1, a
      temperature below 0, or one above 0 without a key.
  """
  try:
    prompt = jnp.asarray(prompt)
  except (TypeError, ValueError):
    raise TypeError(f"prompt must be token ids [batch, seq], each row of one length, not {prompt!r}") from None
  if not isinstance(variables, Mapping) or "params" not in variables:
    raise TypeError('variables must be a dict with "params"; of bare parameters, {"params": params} is one')
  if prompt.ndim != 2:
    raise ValueError(f"prompt must have the shape [batch, seq], not {prompt.shape}")
  if not prompt.size:
    raise ValueError(f"prompt is empty ({prompt.shape}); generation needs at least one token to go on from")
  if not jnp.issubdtype(prompt.dtype, jnp.integer):
    raise TypeError(f"prompt must be integer token ids, not {prompt.dtype}")
  if not isinstance(prompt, jax.core.Tracer) and not 0 <= prompt.min() <= prompt.max() < model.vocab:
    raise ValueError(f"prompt has token ids from {prompt.min()} to {prompt.max()}; the model's are 0 to "
                     f"{model.vocab - 1}")
  require_count("num_tokens", num_tokens)
  if not (math.isfinite(temperature) and temperature >= 0):
    raise ValueError(f"temperature must be a finite number of at least 0, not {temperature}")
  if temperature > 0 and key is None:
    raise ValueError(f"temperature {temperature} draws tokens at random: pass key=jax.random.key(...)")
  if temperature == 0:
    return _generate(_Static(model), variables, prompt, None, None, num_tokens)
  return _generate(_Static(model), variables, prompt, temperature, key, num_tokens)


@functools.partial(jax.jit, static_argnames=("static", "num_tokens"))
def _generate(static: _Static, variables: Any, prompt: Array, temperature: Array | None, key: Array | None,
              num_tokens: int) -> Array:
  """The compiled part of `generate`: prefill, then a loop that carries the caches. No temperature: the likeliest."""
  model, (batch, seq) = static.model, prompt.shape
  keys = None if key is None else jax.random.split(key, num_tokens)

  def choose(logits: Array, key: Array | None) -> Array:
    if key is None:
      return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(prompt.dtype)

  def step(carry: tuple[Array, Any], key: Array | None) -> tuple[tuple[Array, Any], Array]:
    token, caches = carry
    logits, caches = model.apply(variables, token[:, None], kv_cache=caches)
    token = choose(logits[:, -1], key)
    return (token, caches), token

  # The last token is never fed back, so that it needs no room.
  caches = init_cache(model, batch, seq + num_tokens - 1, model.dtype)
  logits, caches = model.apply(variables, prompt, kv_cache=caches)
  first = choose(logits[:, -1], None if keys is None else keys[0])
  _, rest = lax.scan(step, (first, caches), None if keys is None else keys[1:], length=num_tokens - 1)
  return jnp.concatenate([first[:, None], rest.T], axis=1)
