"""Runs programs in which matrices have low-rank adapters: products with them are split.

    x W   becomes   x W + scale * (x A) B

so that W + scale * A B does not exist, and the gradient of W is not computed. Casts of W are followed, and functions that
are jitted. Where W is used in another way, W + scale * A B is made there.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.extend import core

_CALLS = frozenset("jit pjit closed_call core_call".split())


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A matrix W [*in, *out] with adapters `a` [*in, rank] and `b` [rank, *out], as it is or cast."""

  base: Any
  a: Any
  b: Any
  scale: float


def whole(x: Any) -> Any:
  """A value without adapters."""
  if not isinstance(x, Kernel):
    return x
  return x.base + (x.scale * lax.dot_general(x.a, x.b, (((x.a.ndim - 1,), (0,)), ((), ())))).astype(x.base.dtype)


def _called(eqn: Any) -> core.ClosedJaxpr | None:
  """The program that an equation only calls, as that of a jitted function does."""
  inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in _CALLS else None
  return core.ClosedJaxpr(inner, []) if isinstance(inner, core.Jaxpr) else inner


def summed_axes(jaxpr: Any, var: Any) -> int:
  """How many first axes of an input a program's first product with it sums over; 0: none does."""
  same = {var}
  for eqn in jaxpr.eqns:
    at = [i for i, x in enumerate(eqn.invars) if not isinstance(x, core.Literal) and x in same]
    if not at:
      continue
    if eqn.primitive.name == "convert_element_type":
      same.add(eqn.outvars[0])
    elif inner := _called(eqn):
      if count := summed_axes(inner.jaxpr, inner.jaxpr.invars[at[0]]):
        return count
    elif eqn.primitive.name == "dot_general":
      contract, batch = eqn.params["dimension_numbers"]
      if not batch[0] and sorted(contract[at[0]]) == list(range(len(contract[at[0]]))):
        return len(contract[at[0]])
  return 0


def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  """Runs a program of which some inputs are `Kernel`s."""
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
  for eqn in jaxpr.eqns:
    values.update(zip(eqn.outvars, _step(jaxpr, eqn, list(map(read, eqn.invars)))))
  return list(map(read, jaxpr.outvars))


def _step(jaxpr: Any, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
  kernels = [i for i, x in enumerate(inputs) if isinstance(x, Kernel)]
  if not kernels:
    return _evaluate(jaxpr, eqn, inputs)
  kernel, name = inputs[kernels[0]], eqn.primitive.name
  if name == "convert_element_type":
    cast = lambda x: x.astype(eqn.params["new_dtype"])
    return [Kernel(*map(cast, (kernel.base, kernel.a, kernel.b)), kernel.scale)]
  if inner := _called(eqn):
    return run(inner.jaxpr, inner.consts, inputs)
  if name == "dot_general" and len(kernels) == 1:
    contract, batch = eqn.params["dimension_numbers"]
    if not batch[0] and sorted(contract[kernels[0]]) == list(range(kernel.a.ndim - 1)):
      (base,) = _evaluate(jaxpr, eqn, [kernel.base if i == kernels[0] else x for i, x in enumerate(inputs)])
      with jax.named_scope("lora"):
        return [base + kernel.scale * _product(eqn, inputs, kernel, kernels[0]).astype(base.dtype)]
  return _evaluate(jaxpr, eqn, list(map(whole, inputs)))


def _product(eqn: Any, inputs: Sequence[Any], kernel: Kernel, at: int) -> Any:
  """The product with A and then B, where the kernel is operand `at`."""
  options = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
  sides = lambda x, factor: (factor, x) if at == 0 else (x, factor)
  inner = lax.dot_general(*sides(inputs[1 - at], kernel.a), eqn.params["dimension_numbers"], **options)
  inner = inner.astype(kernel.b.dtype)
  contract = ((0,), (0,)) if at == 0 else ((inner.ndim - 1,), (0,))
  return lax.dot_general(*sides(inner, kernel.b), (contract, ((), ())), **options)


def _evaluate(jaxpr: Any, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  """One equation as it is, with its derivative rules and its name stack."""
  given = {var: x for var, x in zip(eqn.invars, inputs) if not isinstance(var, core.Literal)}
  alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn])
  return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*given.values())
