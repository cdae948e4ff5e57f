"""`on_device`: the numbers of the plain function, results where they belong, one layer on the device at a time."""
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax
import pytest

import linen_stack as ls
from tests.reference import A, B
from tests.test_placement import device_shapes, on_host

PLAN = ls.Plan.homogeneous(B, 1, "first") + ls.Plan.cycle([A, A, B], 9)
SHAPES = {
    "first": {"kernel": (8, 6)},
    "layers": {"a": {"kernel": (3, 2, 8, 6), "scale": (3, 2, 8)}, "b": {"kernel": (3, 6, 4)}},
    "embedding": (20, 8),
}
HOST_PATHS = {"first/kernel", "layers/a/kernel", "layers/b/kernel", "embedding"}


def numbers(seed, dtype=np.float32):
  rng = np.random.default_rng(seed)
  is_shape = lambda x: isinstance(x, tuple)
  return jax.tree.map(lambda shape: rng.normal(size=shape).astype(dtype), SHAPES, is_leaf=is_shape)


def shardings_of(tree):
  select = lambda path, leaf: path.endswith("embedding") and leaf.ndim == 2
  return ls.host_shardings(ls.StackedDecoder(PLAN, offload_params=0), tree, select=select)


def placed(tree):
  return jax.device_put(tree, shardings_of(tree))


def close(a, b, rtol=1e-6):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    x, y = (jax.random.key_data(v) if is_key else np.asarray(v, np.float64) for v in (x, y))
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max(initial=0))


OPTIMIZERS = {
    "clip": optax.clip_by_global_norm(0.5),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(
        1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim >= 3, params))),
    "schedule": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-2),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), optax.rmsprop(1e-2)),
    "whole leaves": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "norms of leaves": optax.lamb(1e-2),
    "conditions": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "parts": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9), "c": optax.set_to_zero()},
                                   {"first": "a", "layers": {"a": "a", "b": "b"}, "embedding": "c"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_give_the_numbers_of_trees_on_the_device(name):
  tx, params = OPTIMIZERS[name], numbers(0)

  def update(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state_shardings = shardings_of(jax.eval_shape(tx.init, params))
  plain, plain_state = params, tx.init(params)
  ours = placed(params)
  state = jax.jit(ls.on_device(tx.init, PLAN, out_shardings=state_shardings))(ours)
  assert on_host(state) == on_host(state_shardings)
  close(state, plain_state)
  plain_step = jax.jit(update)
  step = jax.jit(ls.on_device(update, PLAN), out_shardings=(shardings_of(params), state_shardings))
  for seed in (1, 2, 3):
    plain, plain_state = plain_step(plain, plain_state, numbers(seed))
    ours, state = step(ours, state, placed(numbers(seed)))
  close((ours, state), (plain, plain_state), 2e-6)
  assert on_host(ours) == HOST_PATHS and on_host(state) == on_host(state_shardings)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_trees_that_mix_memories(dtype):
  """Without help JAX refuses them; a bare optax transformation works through `on_device`."""
  grads, params = placed(numbers(0, dtype)), placed(numbers(1, dtype))
  clip = optax.clip_by_global_norm(1.0)
  with pytest.raises(ValueError, match="memory_space of all inputs"):
    jax.jit(clip.update)(grads, clip.init(params))
  clipped, _ = jax.jit(ls.on_device(clip.update, PLAN))(grads, clip.init(params))
  want, _ = clip.update(numbers(0, dtype), clip.init(params))
  close(clipped, want, 1e-6 if dtype is np.float32 else 1e-2)
  assert on_host(clipped) == HOST_PATHS
  norm = jax.jit(ls.on_device(optax.global_norm, PLAN))(grads)
  assert norm.sharding.memory_kind == "device"
  close(norm, optax.global_norm(numbers(0, dtype)), 1e-6 if dtype is np.float32 else 1e-2)


FUNCTIONS = {
    "average": lambda ema, params, rate: optax.incremental_update(params, ema, rate),
    "sum": lambda a, b, _: jax.tree.map(jnp.add, a, b),
    "largest": lambda a, b, _: jax.tree.map(lambda x, y: jnp.maximum(jnp.abs(x).max(), y.min()), a, b),
    "casts": lambda a, b, _: jax.tree.map(lambda x, y: x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16), a, b),
    "some finite": lambda a, b, _: jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(x).all(), x, y), a, b),
    "products": lambda a, b, _: jax.tree.map(lambda x: jnp.einsum("...ij,...kj->...ik", x, x), a["layers"]),
    "along layers": lambda a, b, _: jax.tree.map(lambda x: x - x.mean(0), a),
    "crossed": lambda a, b, _: (b, a),
    "jitted inside": lambda a, b, rate: jax.tree.map(
        jax.jit(lambda x, y: jax.nn.softplus(x) * rate + jax.nn.relu(y)), a, b),
    "constants": lambda a, b, _: jax.tree.map(lambda x: jnp.full_like(x, 3.0), a),
    "keywords": lambda a, b, _: dict(sum=jax.tree.map(jnp.add, a, b), first=a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_trees(name):
  fn, a, b = FUNCTIONS[name], numbers(0), numbers(1)
  want = fn(a, b, 0.1)
  got = jax.jit(ls.on_device(fn, PLAN))(placed(a), placed(b), 0.1)
  close(got, want)
  if name in ("average", "sum", "casts", "some finite", "jitted inside"):
    assert on_host(got) == HOST_PATHS
  elif name in ("largest", "products", "constants"):
    assert not on_host(got)


def test_calls_outside_of_jit_of_other_arguments_and_of_enclosed_arrays():
  a, b = numbers(0), jax.tree.map(jnp.asarray, numbers(1))

  def scaled(a, how, *, scale):
    return jax.tree.map(lambda x, y: x * scale + y if how == "sum" else x, a, b)

  fn = ls.on_device(scaled, PLAN)
  close(fn(placed(a), "sum", scale=2.0), jax.tree.map(lambda x, y: 2 * x + y, a, numbers(1)))
  got = fn(placed(a), "same", scale=2.0)
  assert on_host(got) == HOST_PATHS
  close(got, a)


def test_without_host_memory_it_is_the_function_itself():
  given = []
  ls.on_device(lambda *args, **kwargs: given.append((args, kwargs)), PLAN)(1, x=[None, jnp.ones(2)])
  assert given[0][0] == (1,) and given[0][1]["x"][0] is None


def test_one_layer_is_on_the_device_at_a_time():
  tx = OPTIMIZERS["adamw"]
  params = placed(numbers(0))
  update = ls.on_device(tx.update, PLAN)
  state = ls.on_device(tx.init, PLAN, out_shardings=shardings_of(jax.eval_shape(tx.init, params)))(params)
  shapes = device_shapes(jax.make_jaxpr(update)(params, state, params).jaxpr)
  assert not shapes & {(3, 2, 8, 6), (6, 8, 6), (3, 6, 4)}
  assert {(1, 1, 8, 6), (1, 6, 4), (20, 8)} <= shapes
  # Without the plan nobody knows which axes count layers.
  assert (3, 2, 8, 6) in device_shapes(jax.make_jaxpr(ls.on_device(tx.update))(params, state, params).jaxpr)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_leaves_split_over_a_mesh(axis_type):
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  tree = numbers(0)
  split = jax.tree.map(lambda s, x: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(
      *[None] * (x.ndim - 2), "data", "model"), memory_kind=s.memory_kind), shardings_of(tree), tree)
  tx = OPTIMIZERS["clip"]
  with jax.set_mesh(mesh):
    clip = jax.jit(ls.on_device(tx.update, PLAN), out_shardings=(split, None))
    clipped, _ = clip(jax.device_put(tree, split), tx.init(tree))
  assert jax.tree.map(lambda x: x.sharding, clipped) == split
  close(clipped, tx.update(tree, tx.init(tree))[0])
