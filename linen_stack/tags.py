"""Which values a traced program tags with `jax.ad_checkpoint.checkpoint_name`, through every kind of inner program."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
  """The programs inside an equation: bodies of loops, calls, branches, and the forward rule of a custom_vjp."""
  for name, value in eqn.params.items():
    if name == "fwd_jaxpr_thunk":
      # A kernel often tags its residuals only in the forward rule, which no other parameter holds.
      run = getattr(value, "call_wrapped", value)
      yield run(*[False] * len(eqn.invars))[0]
      continue
    for item in value if isinstance(value, (tuple, list)) else (value,):
      item = getattr(item, "jaxpr", item)
      if isinstance(item, core.Jaxpr):
        yield item


def equations(jaxpr: Any) -> Iterator[Any]:
  """Every equation of a program, those of inner programs included, in order."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in inner_jaxprs(eqn):
      yield from equations(inner)


def tagged_names(jaxpr: Any) -> set[str]:
  """The names that a program tags values with."""
  return {eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name"}
