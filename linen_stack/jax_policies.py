"""JAX's own checkpoint policies, combined: functions that are asked about each equation of a program."""
from __future__ import annotations

from collections.abc import Callable, Collection
import dataclasses
import functools
import inspect
from typing import Any

import jax

Policy = Callable[..., Any]

# A value of lower rank stays on device where a policy offloads it: TPU compilers stop at slices of such values in host
# memory, some with an error and some by aborting the process, and it is too small to matter.
MIN_OFFLOAD_RANK = 2

_OFFLOADS_PRODUCTS = "offload_dot_with_no_batch_dims"


@dataclasses.dataclass(frozen=True)
class Told:
  """What one of JAX's makers of policies was told, and what of the policy says more than that."""

  save: frozenset[str] = frozenset()
  offload: frozenset[str] = frozenset()
  offload_dst: str | None = None
  rest: Policy | None = None


def told(policy: Policy | None) -> Told:
  """Takes a policy of JAX's own makers apart, so that its names can be checked; any other is all `rest`.

  Raises TypeError for what is no policy, such as a maker of policies that was not called; ValueError for
  `save_anything_except_these_names`, which saves everything, whatever it was told.
  """
  if policy in (None, jax.checkpoint_policies.nothing_saveable):
    return Told()
  if not callable(policy):
    raise TypeError(f"base must be a JAX checkpoint policy, not {policy!r}")
  if isinstance(policy, type) or getattr(policy, "__name__", "").startswith(("save_", "offload_")):
    raise TypeError(f"{policy.__name__} makes policies and is none; call it, as in {policy.__name__}(...)")
  maker, values = _made(policy)
  if maker == "save_anything_except_these_names":
    raise ValueError("JAX's save_anything_except_these_names saves everything, also the names that it is given; "
                     "name what is kept in save=[...], or take 'none' or JAX's everything_saveable")
  if maker in ("save_only_these_names", "SaveOnlyTheseNames"):
    return Told(save=frozenset(values.get("saveable_names", values.get("names_which_can_be_saved", ()))))
  if maker == "save_and_offload_only_these_names":
    save, offload = (frozenset(values.get(f"names_which_can_be_{kept}", ())) for kept in ("saved", "offloaded"))
    return Told(save, offload, values["offload_dst"] if offload else None)
  if maker == "save_from_both_policies":
    one, two = told(values["policy_1"]), told(values["policy_2"])
    if not one.offload | two.offload:  # JAX refuses those where gradients are traced
      return Told(one.save | two.save, rest=either(one.rest, two.rest, "error"))
  return Told(offload_dst=values["offload_dst"] if maker == _OFFLOADS_PRODUCTS else None, rest=policy)


def excluded(policy: Policy | None) -> frozenset[str]:
  """The names that a policy does not save, of one that saves all other names."""
  if isinstance(policy, _Either):
    return frozenset().union(*map(excluded, policy.policies))
  maker, values = _made(policy)
  if maker in ("save_any_names_but_these", "SaveAnyNamesButThese"):
    return frozenset(values.get("names", values.get("names_not_to_save", ())))
  return frozenset()


def offloads(policy: Policy | None) -> bool:
  """Whether a policy of JAX's own makers moves values to the host. What other functions do is not known before a trace."""
  if isinstance(policy, _Either):
    return any(map(offloads, policy.policies))
  return _made(policy)[0] == _OFFLOADS_PRODUCTS


def _made(policy: Any) -> tuple[str, dict[str, Any]]:
  """The maker of a JAX policy and what it was told, which some versions keep as fields and others in a closure."""
  if getattr(policy, "__module__", None) != jax.checkpoint_policies.save_only_these_names.__module__:
    return "", {}
  if inspect.isfunction(policy):
    return policy.__qualname__.split(".")[0], dict(inspect.getclosurevars(policy).nonlocals)
  return type(policy).__name__, dict(getattr(policy, "__dict__", {}))


def names_first(named: Policy, names: Collection[str], base: Policy) -> Policy:
  """`named` decides about values tagged with `names`, `base` about all else."""

  def policy(prim, *args, **params):
    decide = named if prim.name == "name" and params.get("name") in names else base
    return decide(prim, *args, **params)

  return policy


@functools.lru_cache(maxsize=None)  # one callable for equal policies, so that JAX's own caches see them as equal
def resolved(save: tuple[str, ...], offload: tuple[str, ...], offload_dst: str, base: Policy | None) -> Policy:
  """Saves and offloads values of these names; `base` decides about all others."""
  policies = jax.checkpoint_policies
  if not save and not offload:
    return base or policies.nothing_saveable
  if offload:
    named = _low_ranks_saved(policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save), names_which_can_be_offloaded=list(offload), offload_src="device",
        offload_dst=offload_dst))
  else:
    named = policies.save_only_these_names(*save)
  return named if base is None else names_first(named, {*save, *offload}, base)


def _low_ranks_saved(policy: Policy) -> Policy:
  """`policy`, but values of less than `MIN_OFFLOAD_RANK` dimensions that it offloads are saved instead."""

  def decide(prim, *avals, **params):
    answer = policy(prim, *avals, **params)
    return True if type(answer).__name__ == "Offloadable" and avals[0].ndim < MIN_OFFLOAD_RANK else answer

  return decide


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
