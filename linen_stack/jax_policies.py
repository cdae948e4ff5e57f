"""JAX's own checkpoint policies, combined: functions that are asked about each equation of a program."""
from __future__ import annotations

from collections.abc import Callable, Collection
import dataclasses
import functools
from typing import Any

import jax

Policy = Callable[..., Any]


def names_first(named: Policy, names: Collection[str], base: Policy) -> Policy:
  """`named` decides about values tagged with `names`, `base` about all else."""

  def policy(prim, *args, **params):
    decide = named if prim.name == "name" and params.get("name") in names else base
    return decide(prim, *args, **params)

  return policy


def either(a: Policy | None, b: Policy | None, overlap: str) -> Policy | None:
  """Keeps what one of two policies keeps. `overlap`, of what one saves and the other offloads: "error" (raised when
  asked about such a value), or which of "save" and "offload" wins."""
  policies: set[Policy] = set()
  for policy in (a, b):
    if policy is not None:
      policies |= policy.policies if isinstance(policy, _Either) and policy.overlap == overlap else {policy}
  return _Either(frozenset(policies), overlap) if len(policies) > 1 else next(iter(policies), None)


def called(policy: Policy) -> str:
  """What to call a policy: JAX's public name for it, or its own, after that of the function that made it."""
  public = [name for name, value in vars(jax.checkpoint_policies).items() if value is policy]
  if public:
    return max(public)  # `dots_saveable` has the alias `checkpoint_dots`
  if isinstance(policy, functools.partial):
    return called(policy.func)
  own = str(policy) if dataclasses.is_dataclass(policy) else type(policy).__name__
  return getattr(policy, "__qualname__", own).replace(".<locals>", "")


@dataclasses.dataclass(frozen=True)
class _Either:
  """A class, so that the same policies make an equal one."""

  policies: frozenset[Policy]
  overlap: str

  def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
    answers = [policy(prim, *args, **params) for policy in self.policies]
    offloaded = [answer for answer in answers if type(answer).__name__ == "Offloadable"]
    saved = [answer for answer in answers if answer is True or type(answer).__name__.startswith("Saveable")]
    if len(set(offloaded)) > 1 or (saved and offloaded and self.overlap == "error"):
      what = f"the value named {params['name']!r}" if prim.name == "name" else f"{prim.name} values"
      raise ValueError(f"both saved and offloaded, or offloaded to two places: {what}, by the JAX policies {self}; "
                       "a.join(b, overlap='save') or overlap='offload' says which of saved and offloaded wins")
    kept = [*offloaded, *saved] if self.overlap == "offload" else [*saved, *offloaded]
    return kept[0] if kept else answers[0]

  def __str__(self) -> str:
    return " | ".join(sorted(map(called, self.policies)))
