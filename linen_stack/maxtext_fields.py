"""Reading single values of a MaxText config, with MaxText's defaults and ways to write them."""
from __future__ import annotations

from collections.abc import Mapping
import difflib
import enum
from typing import Any

import jax.numpy as jnp

from linen_stack import config_reader as reader


class Fields:
  """The values of a config. Remembers which were asked for."""

  # Each size doubles once while global_parameter_scale doubles three times: at the first, second or third of them.
  _DOUBLES_AT = {"num_query_heads": 1, "num_kv_heads": 1, "mlp_dim": 1, "emb_dim": 2, "num_decoder_layers": 3}

  def __init__(self, config: Mapping[str, Any]):
    if not isinstance(config, Mapping):
      raise TypeError(f"config must be a dict of MaxText's fields, not {config!r}")
    # A config that MaxText has resolved holds enums.
    self.values = {key: value.value if isinstance(value, enum.Enum) else value for key, value in config.items()}
    self.asked: set[str] = set()

  def get(self, name: str, default: Any = None) -> Any:
    self.asked.add(name)
    value = self.values.get(name)
    return default if value is None else value

  def rest(self) -> tuple[str, ...]:
    """What nobody asked for. Raises ValueError on what looks like a misspelling of a field that somebody asked for."""
    rest = tuple(name for name in self.values if name not in self.asked)
    for name in rest:
      # No closer: MaxText has names as near to each other as `head_dim` and `v_head_dim`.
      close = difflib.get_close_matches(str(name), self.asked, n=1, cutoff=0.9)
      if close:
        raise ValueError(f"unknown field {name!r}; did you mean {close[0]!r}?")
    return rest

  def flag(self, name: str, default: bool) -> bool:
    value = self.get(name, default)
    if not isinstance(value, bool):
      raise TypeError(f"{name} must be true or false, not {value!r}")
    return value

  def count(self, name: str, default: int | None = None, least: int = 1) -> int | None:
    value = self.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
      raise TypeError(f"{name} must be an int, not {value!r}")
    if value is not None and value < least:
      raise ValueError(f"{name} must be at least {least}, not {value}")
    return value

  def number(self, name: str, default: float) -> float:
    value = self.get(name, default)
    try:
      number = None if isinstance(value, bool) else float(value)  # PyYAML reads 1e-6 as a string
    except (TypeError, ValueError):
      number = None
    if number is None:
      raise TypeError(f"{name} must be a number, not {value!r}")
    return number

  def word(self, name: str, default: str) -> str:
    value = self.get(name, default)
    if not isinstance(value, str):
      raise TypeError(f"{name} must be a string, not {value!r}")
    return value

  def dtype(self, name: str, default: str) -> str:
    value = self.get(name, default)
    return (reader.dtype(value, name) if isinstance(value, str) else jnp.dtype(value)).name

  def size(self, name: str) -> int | None:
    """A size by its own name, or made from base_<name>; None where there is neither. Raises where the two differ."""
    own, base, scale = self.count(name), self.count(f"base_{name}"), self.count("global_parameter_scale", 1)
    if scale & (scale - 1):
      raise ValueError(f"global_parameter_scale must be a power of 2, not {scale}")
    if base is None:
      return own
    exponent = scale.bit_length() - 1
    made = base * 2 ** ((exponent + 3 - self._DOUBLES_AT[name]) // 3)
    if own not in (None, made):
      raise ValueError(f"{name} is {own}, but base_{name} {base} at global_parameter_scale {scale} makes it {made}; "
                       "leave one out")
    return made

  def needed_size(self, name: str) -> int:
    """The same. Raises where there is none."""
    value = self.size(name)
    if value is None:
      given = [str(other) for other, value in self.values.items() if value is not None]
      close = difflib.get_close_matches(name, given, n=1, cutoff=0.9)
      raise ValueError(f"{name} is missing (or base_{name})" + (f"; did you mean {close[0]!r}?" if close else ""))
    return value
