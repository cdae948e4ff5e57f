"""NNX layers that Flax's bridge brought to Linen, in `StackedDecoder`; Linen layers on the NNX side; meshes."""
import functools

from flax import linen as nn
from flax import nnx
from flax.nnx.bridge.wrappers import to_linen_class
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack.stacked import is_box
from tests import interpret
from tests.nnx_reference import WIDTH, Layer, abstract, called, filled, linear, loss_of, params_of, plan_of
from tests.reference import assert_close, layers_of, loop

X = jax.random.normal(jax.random.key(0), (8, WIDTH))


class Named(nnx.Module):
  """Logical axes on leaves of every rank, batch statistics and dropout."""

  def __init__(self, rate=0.0, *, rngs):
    names = lambda *axes: {"out_sharding": axes, "eager_sharding": False}
    self.linear = linear(WIDTH, WIDTH, rngs, ("embed", "mlp"))
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, scale_metadata=names("norm"))
    self.gain = nnx.Param(jnp.ones(()), **names())
    self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)

  def __call__(self, x):
    return x + self.gain[...] * self.dropout(self.norm(jnp.tanh(self.linear(x))))


class NamedInLinen(to_linen_class(Named)):
  """Flax makes the class; its subclasses take the layer's arguments."""


BRIDGES = {"to_linen": functools.partial(nnx.bridge.to_linen, Named), "to_linen_class": NamedInLinen}


def boxes(variables):
  leaves = jax.tree_util.tree_leaves_with_path(variables, is_leaf=is_box)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves if is_box(leaf)}


@pytest.mark.parametrize("axis, kernel, gain", [
    (0, ("layers", "a", "embed", "mlp"), ("layers", "a")), (1, ("embed", "layers", "a", "mlp"), ("a", "layers")),
    (-1, ("embed", "mlp", "a", "layers"), ("a", "layers"))])
@pytest.mark.parametrize("bridge", BRIDGES)
def test_stacked_axes_of_bridged_layers_have_names(bridge, axis, kernel, gain):
  spec = ls.LayerSpec(BRIDGES[bridge], "a")
  plan = ls.Plan.cycle([spec, spec, ls.LayerSpec(BRIDGES[bridge], "b", rate=0.0)], 7)
  stack = ls.StackedDecoder(plan, param_axis=axis)
  variables = jax.eval_shape(lambda key: stack.init(key, X), jax.random.key(0))
  made = boxes(variables)
  assert made["params/layers/a/linear/kernel"].metadata["out_sharding"] == kernel
  assert made["params/layers/a/gain"].metadata["out_sharding"] == gain
  assert made["params/layers_remainder/linear/kernel"].metadata["out_sharding"] == ("embed", "mlp")
  assert all(len(box.metadata["out_sharding"]) == box.value.ndim for box in made.values())
  # They survive a call that may change all variables, and that leaves parameters in.
  _, after = jax.eval_shape(lambda variables: stack.apply(variables, X, mutable=True), variables)
  assert jax.tree.structure(after) == jax.tree.structure(variables)
  program = jax.make_jaxpr(lambda variables: stack.apply(variables, X, mutable=["batch_stats"])[0])(variables)
  shapes = {box.value.shape for path, box in made.items() if path.endswith("kernel")}
  assert not shapes & {var.aval.shape for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
  one, flat = ls.convert.unstack(variables, stack)[0], ls.convert.restack(variables, stack, stack.clone(param_axis=0))
  assert boxes(one)["params/linear/kernel"].metadata["out_sharding"] == ("embed", "mlp")
  assert boxes(flat)["params/layers/a/linear/kernel"].metadata["out_sharding"] == ("layers", "a", "embed", "mlp")
  wrong = jax.tree.map(lambda leaf: leaf.replace(metadata={**leaf.metadata, "out_sharding": ("x",) * leaf.value.ndim})
                       if is_box(leaf) else leaf, variables, is_leaf=is_box)
  with pytest.raises(ValueError, match="should be named 'layers'"):
    jax.eval_shape(lambda variables: stack.apply(variables, X), wrong)


def test_bridged_layers_compute_what_the_loop_and_the_nnx_side_do():
  plan = ls.Plan.homogeneous(ls.LayerSpec(BRIDGES["to_linen"], "a"), 3)
  stack, model = ls.StackedDecoder(plan), filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Named, "a"), 3)))
  variables = nn.unbox(ls.nnx.variables(model))
  want, outputs = interpret.run(lambda x: loop(plan, layers_of(variables, plan), x, mutable=["batch_stats"]), X)
  y, changed = interpret.run(lambda variables: stack.apply(variables, X, mutable=["batch_stats"]), variables)
  ours, model = called(model, X)
  assert_close(y, want)
  assert_close(ours, want)
  assert_close(model.layers.norm.mean[...], changed["batch_stats"]["layers"]["norm"]["mean"])
  assert_close(model.layers.norm.mean[...], jnp.stack([state["batch_stats"]["norm"]["mean"] for _, state in outputs]))
  value, grads = interpret.value_and_grad(loss_of(model, X))(params_of(model))
  linen = lambda params: (stack.apply({**variables, "params": params}, X, mutable=["batch_stats"])[0] ** 2).sum()
  # `model` has seen a batch more, but statistics of earlier batches do not count in training.
  assert_close((value, grads), interpret.value_and_grad(linen)(params_of(model)))


class Counting(nn.Module):
  """A Linen layer with state in collections and with dropout."""

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    count = self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
    if self.is_mutable_collection("cache") and not self.is_initializing():
      count.value += 1
    x = nn.BatchNorm(use_running_average=False)(nn.Dense(x.shape[-1])(x))
    return nn.Dropout(0.5)(x, deterministic=deterministic)


@pytest.mark.parametrize("mutable", [["batch_stats"], ["cache", "batch_stats"]], ids=str)
def test_linen_layers_on_the_nnx_side_change_what_they_may(mutable):
  model = filled(abstract(ls.nnx.bridged(ls.Plan.homogeneous(ls.LayerSpec(Counting), 3), X, mutable=mutable)))
  (first, second), model = called(model, X, run=lambda model, x: [model(x, deterministic=False) for _ in range(2)])
  assert not jnp.allclose(first, second)
  assert (model.layers.count[...] == (2 if "cache" in mutable else 0)).all()
  assert not (model.layers.BatchNorm_0["mean"][...] == 0).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(axis_type):
  """Layers that constrain their values, on a batch that is split: made, called and differentiated."""
  model = filled(abstract(plan_of("aa")))
  want = interpret.value_and_grad(loss_of(model, X))(params_of(model))
  mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))

  class Constrained(Layer):
    def __call__(self, x):
      place = jax.sharding.reshard if axis_type is AxisType.Explicit else jax.lax.with_sharding_constraint
      return place(super().__call__(x), P("data"))

  with jax.set_mesh(mesh), nn.logical_axis_rules([(name, None) for name in ("layers", "embed", "mlp")]):
    made = filled(abstract(plan_of("aa", Constrained)))
    params = jax.device_put(params_of(made), NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
      copy = nnx.merge(*nnx.split(made), copy=True)
      ls.nnx.update(copy, {"params": params})
      y = copy(x)
      return (y ** 2).sum(), y

    (value, y), grads = loss(params)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert_close(jax.device_get((value, grads)), jax.device_get(want), 1e-5)


def test_one_stream_of_keys_for_dropout_in_linen_and_nnx_alike():
  """NNX layers in Linen get keys from Linen's streams, split per layer."""
  layer = functools.partial(nnx.bridge.to_linen, Named)
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(layer, "a", rate=0.5), 3))
  shapes = nn.unbox(jax.eval_shape(stack.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X))
  variables = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
  call = lambda seed: interpret.run(lambda key: stack.apply(
      variables, X, mutable=["batch_stats"], rngs={"dropout": key})[0], jax.random.key(seed))
  assert_close(call(1), call(1), 0)
  assert not jnp.allclose(call(1), call(2))
