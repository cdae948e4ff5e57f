"""`StackedDecoder` against a plain Python loop over the same variables: every kind of plan, axis, preset and placement."""
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import linen_stack as ls
from tests import interpret
from tests.reference import A, B, PLANS, Layer, assert_close, layers_of, loop, make_variables, restacked

BATCH = 4  # as many as the layers of the homogeneous plan: a mask sliced by mistake would still have a shape that fits
X = jax.random.normal(jax.random.key(0), (BATCH, 8))
MASK = (jax.random.uniform(jax.random.key(1), (BATCH, 8)) > 0.3).astype(jnp.float32)
PRESETS = ls.RematPolicy.presets()
DROP_A, DROP_B = ls.LayerSpec(Layer, name="a", dropout=0.5), ls.LayerSpec(Layer, name="b", dropout=0.3, scale=0.5, hidden=12)


def plan_of(name, dropout):
  a, b = (DROP_A, DROP_B) if dropout else (A, B)
  return {
      "homogeneous": ls.Plan.homogeneous(a, 4),
      "prefix": ls.Plan.homogeneous(b, 2, "dense") + ls.Plan.homogeneous(a, 3),
      "cycle": ls.Plan.cycle([a, a, b], 6),
      "cycle and remainder": ls.Plan.cycle([a, a, b], 8),
  }[name]


def call_options(dropout):
  return dict(deterministic=False, rngs={"dropout": jax.random.key(7)}) if dropout else {}


@functools.lru_cache(maxsize=None)
def params_of(plan_name, axis=0):
  """The same numbers along every axis."""
  plan = plan_of(plan_name, False)
  return restacked(make_variables(ls.StackedDecoder(plan), X)["params"], plan, axis)


def unstacked(tree, plan, axis=0):
  return [layer["params"] for layer in layers_of({"params": tree}, plan, axis)]


@functools.lru_cache(maxsize=None)
def expected(plan_name, dropout):
  """Loss, gradients and parameters after one Adam step. With dropout the layers run apart, so as to draw the same keys."""
  plan = plan_of(plan_name, dropout)
  layers = unstacked(params_of(plan_name), plan)
  apart = ls.StackedDecoder(plan, scan=False, remat="none")
  names = [f"{s.name}_{i}" for s in plan for i in range(s.num_layers)]

  def loss(layers):
    if dropout:
      y = apart.apply({"params": dict(zip(names, layers))}, X, MASK, **call_options(True))
    else:
      y, _ = loop(plan, [{"params": p} for p in layers], X, MASK)
    return (y ** 2).sum()

  value, grads = interpret.value_and_grad(loss)(layers)
  return value, grads, adam(layers, grads)


@jax.jit
def adam(params, grads):
  optimizer = optax.adam(1e-2)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, updates)


def check(plan_name, axis, preset, dropout, offload, evaluate):
  plan = plan_of(plan_name, dropout)
  stack = ls.StackedDecoder(plan, remat=preset, param_axis=axis, offload_params=0 if offload else False)
  params = params_of(plan_name, axis)
  if offload:
    on_host = lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim > 2 else leaf
    params = jax.tree.map(on_host, params)
  loss = lambda params: (stack.apply({"params": params}, X, MASK, **call_options(dropout)) ** 2).sum()
  value, grads = evaluate(loss)(params)
  params, grads = jax.device_put((params, grads), jax.memory.Space.Device)
  want_value, want_grads, want_params = expected(plan_name, dropout)
  assert_close(value, want_value)
  assert_close(unstacked(grads, plan, axis), want_grads)
  assert_close(adam(unstacked(params, plan, axis), unstacked(grads, plan, axis)), want_params)


@pytest.mark.parametrize("axis, offload", [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("plan_name", ["homogeneous", "prefix", "cycle", "cycle and remainder"])
def test_value_gradients_and_adam_step_equal_the_loop(plan_name, preset, dropout, axis, offload):
  check(plan_name, axis, preset, dropout, offload, interpret.value_and_grad)


@pytest.mark.parametrize("plan_name, axis, preset, dropout, offload", [
    ("homogeneous", 0, "full", True, False), ("homogeneous", 1, "minimal", False, False),
    ("cycle and remainder", 0, "minimal_offloaded", True, True), ("cycle and remainder", 1, "none", True, False),
    ("prefix", 0, "qkv_proj_offloaded", False, True)])
def test_the_compiled_programs_do_too(plan_name, axis, preset, dropout, offload):
  check(plan_name, axis, preset, dropout, offload, lambda loss: jax.jit(jax.value_and_grad(loss)))


def test_offloaded_parameters_need_axis_0():
  with pytest.raises(ValueError, match="param_axis=0"):
    ls.StackedDecoder(PLANS["homogeneous"], param_axis=1, offload_params=True)
