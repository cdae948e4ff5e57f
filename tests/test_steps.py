"""Remat in larger steps: several layers per region (`every`), nested regions (`levels`), over one flat stored stack."""
import functools

import jax
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack.tags import equations
from tests import interpret
from tests.reference import A, B, assert_close, make_variables

X = jax.random.normal(jax.random.key(0), (4, 8))
KEY = jax.random.key(1)
FLAT = ls.Plan.homogeneous(A, 12)
CYCLE = ls.Plan.cycle([A, A, B], 14)


def grads(plan, remat, **options):
  stack = ls.StackedDecoder(plan, remat=remat, **options)
  variables = make_variables(ls.StackedDecoder(plan), X)
  return interpret.value_and_grad(lambda v: (stack.apply(v, X) ** 2).sum())(variables)


@functools.lru_cache(maxsize=None)
def wanted(plan):
  return grads(plan, "none")


@pytest.mark.parametrize("policy", [
    dict(every=3), dict(every=12), dict(levels=(3, 4)), dict(levels=(2, 3, 2)), dict(levels=(4, 3), carry="offload"),
    dict(levels=(3, 4), save=["mlpwo"]), dict(every=4, offload=["mlpwo"]), dict(levels=(3, 4), offload=["mlpwo"]),
    dict(every=2, carry="offload")], ids=str)
def test_flat_stacks(policy):
  assert_close(grads(FLAT, ls.RematPolicy(**policy)), wanted(FLAT), rtol=1e-6)


@pytest.mark.parametrize("policy", [dict(every=3), dict(every=6), dict(levels=(2, 2)), dict(levels=(2, 2), carry="offload"),
                                    dict(levels=(2, 2), offload=["mlpwo"])], ids=str)
def test_cycles(policy):
  remat = {"layers": ls.RematPolicy(**policy), "layers_remainder": ls.RematPolicy(every=policy.get("every", 1))}
  assert_close(grads(CYCLE, remat), wanted(CYCLE), rtol=1e-6)


def carries(plan, remat):
  """How many hidden states of a layer's input the backward pass of a stack finds saved."""
  stack = ls.StackedDecoder(plan, remat=remat)
  variables = jax.eval_shape(stack.init, KEY, X)
  x = jax.ShapeDtypeStruct((5, 8), jnp.float32)
  # The residuals of a vjp are the leaves of its function.
  program = jax.make_jaxpr(lambda v, x: jax.tree.leaves(jax.vjp(lambda v, x: stack.apply(v, x), v, x)[1]))(variables, x)
  return sum(var.aval.size // 40 for var in program.jaxpr.outvars if var.aval.shape[-2:] == (5, 8))


def test_levels_and_every_save_fewer_carries():
  plan = ls.Plan.homogeneous(A, 64)
  flat = carries(plan, "full")
  assert flat >= 64
  assert carries(plan, ls.RematPolicy(levels=(8, 8))) <= 8 + 2
  assert carries(plan, ls.RematPolicy(every=8)) <= 8 + 2
  assert carries(plan, ls.RematPolicy(levels=(4, 4, 4))) <= 4 + 2


@pytest.mark.parametrize("policy", [dict(every=4), dict(levels=(3, 4)), dict(levels=(2, 3, 2))], ids=str)
def test_the_stored_stack_stays_flat_and_the_body_is_traced_once(policy):
  stack = ls.StackedDecoder(FLAT, remat=ls.RematPolicy(**policy))
  variables = jax.eval_shape(stack.init, KEY, X)
  assert jax.tree.map(lambda a: a.shape, variables) == jax.tree.map(
      lambda a: a.shape, jax.eval_shape(ls.StackedDecoder(FLAT).init, KEY, X))
  jaxpr = jax.make_jaxpr(lambda v: stack.apply(v, X))(variables).jaxpr
  assert sum(eqn.primitive.name == "tanh" for eqn in equations(jaxpr)) <= 2  # tanh and gelu of one body


@pytest.mark.parametrize("plan, policy, message", [
    (FLAT, dict(levels=(3, 3)), r"multiply to 9, but segment 'layers' of 12 repeats needs 12; its divisors are 1, 2, 3, 4, 6, 12"),
    (FLAT, dict(every=5), r"every=5 layers do not divide segment 'layers' of 12 repeats.*1, 2, 3, 4, 6, 12"),
    (ls.Plan.cycle([A, A, B], 12), dict(every=4), r"every=4 layers do not divide segment 'layers' of 4 repeats of 3 layers.*3, 6, 12"),
    (FLAT, dict(levels=(2, 3, 2), offload=["mlpwo"]), "two nested loops, not from 3"),
])
def test_steps_that_do_not_come_out_even(plan, policy, message):
  with pytest.raises(ValueError, match=message):
    ls.StackedDecoder(plan, remat=ls.RematPolicy(**policy))


def test_steps_need_the_loop():
  with pytest.raises(ValueError, match="levels shapes the loop.*scan=True"):
    ls.StackedDecoder(FLAT, remat=ls.RematPolicy(levels=(3, 4)), scan=False)
  with pytest.raises(ValueError, match="exclude each other"):
    ls.RematPolicy(levels=(3, 4), every=2)
