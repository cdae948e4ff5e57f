"""Which values a traced program tags with `jax.ad_checkpoint.checkpoint_name`, through every kind of inner program."""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

from jax.extend import core

# Equations whose outputs are their inputs, one by one.
_SAME_VALUE = ("name", "copy", "copy_p", "optimization_barrier", "reduce_precision")


def tag_name(eqn: Any) -> str | None:
  """The name that an equation tags a value with; None where it is no tag."""
  if eqn.primitive.name == "name":
    return eqn.params["name"]
  # Under `jax_remat3` a tag is an instance of JAX's class for it, not a primitive of its own.
  tag = eqn.params.get("_prim")
  return tag.name if type(tag).__name__.startswith("CheckpointName") else None


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
  """The programs inside an equation: bodies of loops, calls, branches, and the forward rule of a custom_vjp."""
  for name, value in eqn.params.items():
    if name == "fwd_jaxpr_thunk":
      # A kernel often tags its residuals only in the forward rule, which no other parameter holds.
      yield _forward_rule(eqn)
      continue
    for item in value if isinstance(value, (tuple, list)) else (value,):
      item = getattr(item, "jaxpr", item)
      if isinstance(item, core.Jaxpr):
        yield item


def _forward_rule(eqn: Any) -> Any:
  """The forward rule of a custom_vjp, differentiated by all its inputs."""
  thunk = eqn.params["fwd_jaxpr_thunk"]
  run = getattr(thunk, "call_wrapped", thunk)
  # What the rule closes over comes first among the equation's inputs, and is no input of the rule.
  return run(*[True] * (len(eqn.invars) - eqn.params.get("num_consts", 0)))[0]


def equations(jaxpr: Any) -> Iterator[Any]:
  """Every equation of a program, those of inner programs included, in order."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in inner_jaxprs(eqn):
      yield from equations(inner)


def tagged_names(jaxpr: Any) -> set[str]:
  """The names that a program tags values with."""
  return {name for eqn in equations(jaxpr) if (name := tag_name(eqn)) is not None}


@dataclasses.dataclass(frozen=True)
class Tag:
  """A tag in a program: `eqn` tags the value number `value`, inside loops of `trips` steps, outermost first."""

  eqn: Any
  value: int
  trips: tuple[int, ...]

  @property
  def name(self) -> str:
    return tag_name(self.eqn) or ""

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape over all steps of the loops around the tag."""
    return (*self.trips, *self.eqn.outvars[0].aval.shape)

  @property
  def dtype(self) -> Any:
    return self.eqn.outvars[0].aval.dtype


def tags(jaxpr: Any) -> list[Tag]:
  """The tags of a program, in order. Tags of one value, also across calls and copies, have the same `value`.

  A custom_vjp counts with its forward rule, which is what differentiation runs.
  """
  found: list[Tag] = []
  _walk(jaxpr, {}, (), itertools.count(), found)
  return found


def _walk(jaxpr: Any, values: dict[Any, int], trips: tuple[int, ...], fresh: Iterator[int],
          found: list[Tag]) -> list[int]:
  """Adds a program's tags to `found`; returns the values of its results. `values` holds what is known of its inputs."""

  def value(var: Any) -> int:
    if isinstance(var, core.Literal):
      return next(fresh)
    return values[var] if var in values else values.setdefault(var, next(fresh))

  for eqn in jaxpr.eqns:
    given, name = [value(var) for var in eqn.invars], eqn.primitive.name
    if tag_name(eqn) is not None:
      found.append(Tag(eqn, given[0], trips))
    if name in _SAME_VALUE or tag_name(eqn) is not None:
      values.update(zip(eqn.outvars, given))
      continue
    if name == "custom_vjp_call":
      body = _forward_rule(eqn)
      # Which of the rule's outputs are results and which residuals is not told, so results count as new values.
      _walk(body, dict(zip(body.invars, given[eqn.params.get("num_consts", 0):])), trips, fresh, found)
      continue
    loop = (*trips, eqn.params["length"]) if name == "scan" else trips
    for body in inner_jaxprs(eqn):
      called_once = name not in ("scan", "while", "cond") and len(body.invars) == len(given)
      results = _walk(body, dict(zip(body.invars, given)) if called_once else {}, loop, fresh, found)
      if called_once and len(results) == len(eqn.outvars):
        values.update(zip(eqn.outvars, results))
  return [value(var) for var in jaxpr.outvars]
