"""Rotary position embeddings: frequencies with their published scalings, and the rotation itself.

A head of `dim` features is `dim / 2` planes; plane i turns by `position * rate_i`, with `rate_i = theta^(-2 i / dim)`
before any scaling. The scalings, by the names that Hugging Face configs give them:

    linear   every rate divided by `factor`
    llama3   long wavelengths divided by `factor`, short ones kept, those between blended (Llama 3.1)
    yarn     the same by number of turns within the original context (arXiv:2309.00071), and an attention factor
"""
from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linen_stack.specs import nearest

Array = jax.Array

# Scaling type -> the keys that it needs, and those that it may have.
_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
               frozenset()),
    "yarn": (frozenset({"factor", "original_max_position_embeddings"}),
             frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})),
}


def frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> tuple[np.ndarray, float]:
  """The rates `[dim / 2]` in radians per position, float64, and the attention factor, which scales sine and cosine.

  Args:
    dim: features that are rotated, even.
    theta: the base.
    scaling: `rope_type` (or `type`) and the numbers that it needs; None: "default", no scaling.

  Raises:
    ValueError: for an odd dim, a base that is not above 0, an unknown type, missing or unknown keys, bad numbers.
  """
  if dim < 2 or dim % 2:
    raise ValueError(f"the rotary embedding needs an even number of features, not {dim}")
  if not theta > 0:
    raise ValueError(f"rope_theta must be above 0, not {theta}")
  kind, numbers = _checked(scaling)
  rates = theta ** (-np.arange(0, dim, 2) / dim)
  if kind == "default":
    return rates, 1.0
  factor = numbers["factor"]
  if kind == "linear":
    return rates / factor, 1.0
  if kind == "llama3":
    turns = numbers["original_max_position_embeddings"] * rates / (2 * math.pi)  # within the original context
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (kept + (1 - kept) / factor), 1.0
  kept = _kept_by_yarn(dim, theta, numbers)
  return rates * (kept + (1 - kept) / factor), _yarn_attention_factor(numbers)


def rotate(x: Array, positions: Array, rates: np.ndarray | Array, interleaved: bool = False,
           scale: float = 1.0) -> Array:
  """Rotates the first `2 * len(rates)` features of each head of x `[batch, seq, heads, dim]` by its position.

  Args:
    positions: `[batch or 1, seq]`.
    rates: radians per position, one per plane, as `frequencies` gives them.
    interleaved: a plane is the features (2 i, 2 i + 1); otherwise (i, i + half of the rotated ones).
    scale: the attention factor, which the rotated features are multiplied by.

  Angles are float32 at least; the result has x's dtype.
  """
  half, wide = len(rates), jnp.promote_types(x.dtype, jnp.float32)
  angle = positions.astype(wide)[..., None, None] * jnp.asarray(rates, wide)  # [batch, seq, 1, planes]
  sin, cos = jnp.sin(angle) * scale, jnp.cos(angle) * scale
  turned, rest = x[..., :2 * half].astype(wide), x[..., 2 * half:]
  if interleaved:
    first, second = turned[..., 0::2], turned[..., 1::2]
  else:
    first, second = turned[..., :half], turned[..., half:]
  planes = (first * cos - second * sin, second * cos + first * sin)
  turned = jnp.stack(planes, -1).reshape(turned.shape) if interleaved else jnp.concatenate(planes, -1)
  return jnp.concatenate([turned.astype(x.dtype), rest], -1) if rest.shape[-1] else turned.astype(x.dtype)


class Rope(NamedTuple):
  """What a config says of rotary embeddings: the base, the scaling for `frequencies`, the part of a head that turns."""

  theta: float
  scaling: dict[str, Any] | None = None
  fraction: float = 1.0


def from_config(config: Mapping[str, Any], layer_type: str | None = None, default_theta: float = 10000.0) -> Rope:
  """Reads `rope_parameters` (newer files) or `rope_theta`, `rope_scaling` and `partial_rotary_factor` of a config.

  Args:
    config: the content of `config.json`.
    layer_type: the entry to take where `rope_parameters` has one per kind of layer, such as "full_attention".
    default_theta: the base where the config says none.

  Raises:
    TypeError, ValueError: as `frequencies`, and for entries that are missing or no mappings.
  """
  nested = config.get("rope_parameters")
  if nested and config.get("rope_scaling"):
    raise ValueError("rope_parameters and rope_scaling are both given; keep one of them")
  field, found = ("rope_scaling", config.get("rope_scaling")) if nested is None else ("rope_parameters", nested)
  found = {} if found is None else found
  if isinstance(found, Mapping) and found and all(isinstance(value, (Mapping, type(None))) for value in found.values()):
    if found.get(layer_type) is None:
      raise ValueError(f"{field} has no entry for {layer_type!r}; {nearest(str(layer_type), found)}")
    field, found = f"{field}.{layer_type}", found[layer_type]
  if not isinstance(found, Mapping):
    raise TypeError(f"{field} must be a dict, not {found!r}")
  scaling = dict(found)
  said = config.get("rope_theta")
  theta = scaling.pop("rope_theta", default_theta if said is None else said)
  fraction = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  if kind in ("llama3", "yarn"):  # where the original length is not said, it is the longest that the config is for
    scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if (length := config.get("original_max_position_embeddings")) is not None:  # beside the scaling, it goes before
      scaling["original_max_position_embeddings"] = length
  try:
    frequencies(2, theta, scaling)
  except (TypeError, ValueError) as error:
    raise type(error)(f"{field}: {error}") from None
  return Rope(float(theta), None if kind == "default" else scaling, 1.0 if fraction is None else float(fraction))


def _checked(scaling: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
  """The type of a scaling and its numbers."""
  numbers = {key: value for key, value in (scaling or {}).items() if value is not None}
  kinds = {numbers.pop(key) for key in ("rope_type", "type") if key in numbers} or {"default"}
  if len(kinds) > 1:
    raise ValueError(f"rope_type and type differ: {' and '.join(sorted(map(repr, kinds)))}")
  kind, = kinds
  if kind not in _KEYS:
    raise ValueError(f"rope_type {kind!r} is not available; {nearest(str(kind), _KEYS)}")
  needed, optional = _KEYS[kind]
  if missing := needed - numbers.keys():
    raise ValueError(f"rope_type {kind!r} needs {', '.join(sorted(missing))}")
  if unknown := numbers.keys() - needed - optional:
    name = min(unknown)
    raise ValueError(f"rope_type {kind!r} has no key {name!r}; {nearest(name, sorted(needed | optional))}")
  for key, value in numbers.items():
    if key != "truncate" and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0
                              or not (value or key.startswith("mscale"))):
      raise ValueError(f"{key} of rope_type {kind!r} must be a number above 0, not {value!r}")
  if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
    raise ValueError(f"high_freq_factor {numbers['high_freq_factor']} must be above low_freq_factor "
                     f"{numbers['low_freq_factor']}")
  return kind, numbers


def _kept_by_yarn(dim: int, theta: float, numbers: Mapping[str, Any]) -> np.ndarray:
  """How much of each plane's own rate YaRN keeps: 1 for fast planes, 0 for slow ones, a ramp between."""
  context = numbers["original_max_position_embeddings"]

  def plane(turns: float) -> float:  # which plane turns so often within the original context
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = plane(numbers.get("beta_fast", 32)), plane(numbers.get("beta_slow", 1))
  if numbers.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  # A ramp of no width is a step; the published code widens it by this much.
  return 1 - np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)


def _yarn_attention_factor(numbers: Mapping[str, Any]) -> float:
  """What sine and cosine are scaled by: given, or made from `factor`, `mscale` and `mscale_all_dim`."""
  if "attention_factor" in numbers:
    return float(numbers["attention_factor"])
  over, under = numbers.get("mscale"), numbers.get("mscale_all_dim")
  if over and under:
    return yarn_mscale(numbers["factor"], over) / yarn_mscale(numbers["factor"], under)
  return yarn_mscale(numbers["factor"])


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
  """YaRN's correction of attention logits for a context that is `factor` times as long."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
