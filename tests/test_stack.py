"""`StackedDecoder` against a plain Python loop over the same variables."""
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import linen_stack as ls
from tests.reference import PLANS, assert_close, layers_of, loop, make_variables, restacked

BATCH = 4  # as many as the layers of the homogeneous plan: a mask sliced by mistake would still have a shape that fits
X = jax.random.normal(jax.random.key(0), (BATCH, 8))
MASK = (jax.random.uniform(jax.random.key(1), (BATCH, 8)) > 0.3).astype(jnp.float32)
PRESETS = ls.RematPolicy.presets()


@functools.lru_cache(maxsize=None)
def variables_of(plan_name, axis=0):
  """The same numbers along every axis."""
  plan = PLANS[plan_name]
  return {"params": restacked(make_variables(ls.StackedDecoder(plan), X)["params"], plan, axis)}


@functools.lru_cache(maxsize=None)
def expected(plan_name):
  """Loss, gradients and parameters after one Adam step of the loop."""
  plan = PLANS[plan_name]
  layers = [layer["params"] for layer in layers_of(variables_of(plan_name), plan)]

  def loss(layers):
    y, _ = loop(plan, [{"params": p} for p in layers], X, MASK)
    return (y ** 2).sum()

  value, grads = jax.value_and_grad(loss)(layers)
  return value, grads, adam(layers, grads)


def adam(params, grads):
  optimizer = optax.adam(1e-2)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, updates)


@pytest.mark.parametrize("offload", [False, 0])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("plan_name", PLANS)
def test_value_gradients_and_adam_step_equal_the_loop(plan_name, axis, preset, offload):
  if axis == 1 and offload is not False:
    with pytest.raises(ValueError, match="param_axis=0"):
      ls.StackedDecoder(PLANS[plan_name], param_axis=axis, offload_params=offload)
    return
  plan = PLANS[plan_name]
  stack = ls.StackedDecoder(plan, remat=preset, param_axis=axis, offload_params=offload)
  params = variables_of(plan_name, axis)["params"]
  if offload is not False:
    on_host = lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim > 2 else leaf
    params = jax.tree.map(on_host, params)
  loss = lambda params: (stack.apply({"params": params}, X, MASK) ** 2).sum()
  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  params, grads = jax.device_put((params, grads), jax.memory.Space.Device)
  unstacked = lambda tree: [layer["params"] for layer in layers_of({"params": tree}, plan, axis)]
  want_value, want_grads, want_params = expected(plan_name)
  assert_close(value, want_value)
  assert_close(unstacked(grads), want_grads)
  assert_close(unstacked(adam(params, grads)), want_params, rtol=1e-5)
