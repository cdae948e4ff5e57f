"""Stacks on a mesh of several devices, with automatic and with explicit axes."""
from flax import linen as nn
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pytest

import linen_stack as ls
from tests.reference import A, B, assert_close, make_variables

X = jax.random.normal(jax.random.key(0), (4, 8))
PLAN = ls.Plan.homogeneous(B, 1, "first") + ls.Plan.cycle([A, A, B], 7)


@pytest.mark.parametrize("remat", ["full", "minimal"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_batch_gives_the_numbers_of_one_device(axis_type, remat):
  stack = ls.StackedDecoder(PLAN, remat=remat)
  variables = nn.unbox(make_variables(stack, X))
  loss = lambda v, x: (stack.apply(v, x) ** 2).sum()
  want = jax.jit(jax.value_and_grad(loss))(variables, X)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  with jax.set_mesh(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    placed = jax.device_put(variables, NamedSharding(mesh, P()))
    assert_close(jax.device_get(jax.jit(jax.value_and_grad(loss))(placed, x)), jax.device_get(want))
    y = jax.jit(stack.apply)(placed, x)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert jax.tree.structure(jax.eval_shape(stack.init, jax.random.key(0), x)) is not None


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_stacked_parameters_sharded_by_their_logical_axes(axis_type):
  """`layers` stays whole, `mlp` is split over a mesh axis."""
  stack = ls.StackedDecoder(ls.Plan.homogeneous(A, 3))
  variables = make_variables(stack, X)
  want = jax.jit(stack.apply)(nn.unbox(variables), X)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  specs = nn.logical_to_mesh(nn.get_partition_spec(variables), [("mlp", "model"), ("embed", None), ("layers", None)])
  assert specs["params"]["layers"]["Dense_0"]["kernel"] == P(None, None, "model")
  if axis_type is AxisType.Explicit:
    specs = jax.tree.map(lambda spec: P(), specs)  # an explicit axis inside a layer needs the layer's own constraints
  with jax.set_mesh(mesh):
    placed = jax.device_put(nn.unbox(variables), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    assert_close(jax.device_get(jax.jit(stack.apply)(placed, x)), jax.device_get(want))
