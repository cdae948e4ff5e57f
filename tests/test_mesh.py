"""Stacks on a mesh of several devices, with automatic and with explicit axes."""
from flax import linen as nn
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pytest

import linen_stack as ls
from linen_stack.models.moe import MoE, total_loss
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


@pytest.mark.parametrize("rules", [
    {"batch": "data", "embed": "data"}, {"batch": ("data", "model"), "mlp": "model"}, {"batch": "data", "expert": "data"},
    {"mlp": "model"}], ids=str)
def test_experts_of_a_sharded_batch(rules):
  """Each device sorts its own tokens; the numbers are those of one device."""
  layer = MoE(num_experts=4, hidden=6, top_k=2, shared_hidden=4, router="sigmoid")
  x = jax.random.normal(jax.random.key(0), (8, 3, 8))
  boxed = layer.init(jax.random.key(1), x)

  def loss(variables, x):
    y, sown = layer.apply(variables, x, mutable=["losses"])
    return (y ** 2).sum() + total_loss(sown["losses"])

  variables = nn.unbox(boxed)
  want = jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, list(rules.items()))
  with jax.set_mesh(mesh), nn.logical_axis_rules(list(rules.items())):
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    args = jax.device_put(variables, specs), jax.device_put(x, NamedSharding(mesh, P(rules.get("batch"))))
    assert_close(jax.device_get(step(*args)), jax.device_get(want))
    text = str(step.trace(*args).jaxpr)
    assert ("shard_map" in text) == ("batch" in rules)
    # What a device gathers of the matrices, it scatters of their gradients.
    assert text.count("reduce_scatter[") == (3 if "batch" in rules else 0)
