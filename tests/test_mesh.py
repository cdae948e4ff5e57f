"""Stacks on a mesh of several devices, with automatic and with explicit axes."""
import functools
import json
import pathlib

from flax import linen as nn, nnx
from flax.nnx import bridge
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import linen_stack as ls
from linen_stack import sharding
from linen_stack.models import DecoderLayer, LanguageModel
from linen_stack.models.moe import MoE, total_loss
from tests import test_mesh_layouts as layouts
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


# Explicit axes and shard_map ------------------------------------------------------------------------------------------------


class Constrained(nn.Module):
  """Lays its hidden values over the mesh by name. x: [batch, embed]."""

  @nn.compact
  def __call__(self, x):
    hidden = sharding.constrain(nn.Dense(16, use_bias=False)(x), ("batch", "mlp"))
    return x + sharding.constrain(nn.Dense(8, use_bias=False)(jnp.tanh(hidden)), ("batch", "hidden"))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_constraints_by_name_inside_of_layers(axis_type, remat):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Constrained), 3), remat=remat)
  variables = make_variables(stack, X)
  loss = lambda v, x: (stack.apply(v, x) ** 2).sum()
  want = jax.jit(jax.value_and_grad(loss))(variables, X)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules([("batch", "data"), ("mlp", "model"), ("hidden", None)]):
    args = jax.device_put(variables, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))
    step = jax.jit(jax.value_and_grad(loss))
    assert_close(jax.device_get(step(*args)), jax.device_get(want))
    assert str(step.trace(*args).jaxpr).count("reshard" if axis_type is AxisType.Explicit else "sharding_constraint") >= 2
    assert jax.eval_shape(stack.init, jax.random.key(0), X).keys() == variables.keys()
  assert "sharding_constraint" not in str(jax.make_jaxpr(loss)(variables, X))


@pytest.mark.parametrize("rules", [
    [("batch", "data"), ("batch", "model"), ("mlp", "model")],
    [("mlp", "data"), ("batch", "data"), ("batch", "model")],
    [("batch", ("data", "model")), ("mlp", "model"), ("mlp", None)],
    [("batch", None), ("batch", "data"), ("mlp", "model")],
    [("mlp", "model"), ("batch", ("data", "model")), ("batch", "data")],
], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_of_several_rules_for_a_name_the_first_that_fits_holds(axis_type, rules):
  names, mesh = ("batch", "mlp"), jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    x = jax.device_put(X, NamedSharding(mesh, P()))
    y = jax.jit(lambda x: sharding.constrain(x, names))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, nn.logical_to_mesh_axes(names, rules)), 2)
    assert sharding.over("batch") == sharding.as_tuple(next(axes for name, axes in rules if name == "batch"))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_that_explicit_axes_split(remat):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Constrained), 4), remat=remat)
  variables = nn.unbox(make_variables(stack, X))
  loss = lambda v, x: (stack.apply(v, x) ** 2).sum()
  want = jax.jit(jax.value_and_grad(loss))(variables, X)
  mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    args = jax.device_put(variables, NamedSharding(mesh, P("stage"))), jax.device_put(X, NamedSharding(mesh, P("data")))
    value, grads = jax.jit(jax.value_and_grad(loss))(*args)
    assert_close(jax.device_get((value, grads)), jax.device_get(want))
    assert all(leaf.sharding.spec[0] == "stage" for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("names", [("data", "model"), ("data",)], ids=str)
def test_a_stack_inside_shard_map(names):
  """Each device has its part of the batch; rules over axes that it has taken do nothing."""
  stack = ls.StackedDecoder(PLAN)
  variables = nn.unbox(make_variables(stack, X))
  want = jax.jit(stack.apply)(variables, X)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules([("batch", "data"), ("layers", "data"), ("mlp", "model"), ("embed", None)]):
    mapped = jax.shard_map(stack.apply, in_specs=(P(), P("data")), out_specs=P("data"), axis_names=set(names), check_vma=False)
    args = jax.device_put(variables, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))
    assert_close(jax.device_get(jax.jit(mapped)(*args)), want)


def test_models_lay_activations_out_by_name():
  layer = ls.LayerSpec(DecoderLayer, embed=16, mlp=32, num_heads=4)
  model = LanguageModel(ls.StackedDecoder(ls.Plan.homogeneous(layer, 2)), vocab=32, embed=16)
  tokens = jnp.zeros((8, 4), int)
  boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)
  variables, rules = nn.unbox(boxed), {**sharding.FSDP, "batch": ("data", "fsdp"), "mlp": "tensor", "q_heads": "tensor"}
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules(tuple(rules.items())):
    text = str(jax.make_jaxpr(model.apply)(variables, tokens))
  for last in ("'tensor'", "None"):
    spec = f"PartitionSpec(('data', 'fsdp'), UNCONSTRAINED, {last})"
    assert spec.replace("PartitionSpec", "P") in text.replace("PartitionSpec", "P")
  assert "sharding_constraint" not in str(jax.make_jaxpr(model.apply)(variables, tokens))


@pytest.mark.usefixtures("float64")
def test_whole_models_on_explicit_axes():
  """Inside of `jax.sharding.auto_axes` they need no sharding of their own for lookups and products."""
  dtypes = dict(dtype=jnp.float64, param_dtype=jnp.float64)
  layer = ls.LayerSpec(DecoderLayer, embed=8, mlp=16, num_heads=2, **dtypes)
  model = LanguageModel(ls.StackedDecoder(ls.Plan.homogeneous(layer, 2)), vocab=16, embed=8, **dtypes)
  tokens = jnp.arange(16).reshape(4, 4)
  boxed = make_variables(model, tokens)
  variables, rules = nn.unbox(boxed), {**sharding.FSDP, "batch": "data", "embed": "data", "mlp": "model", "vocab": "model"}
  want = jax.jit(model.apply)(variables, tokens)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules(tuple(rules.items())):
    placed = jax.device_put(variables, ls.host_shardings(model.stack, boxed, mesh))
    apply = jax.jit(jax.sharding.auto_axes(model.apply, out_sharding=P("data", None, "model")))
    got = apply(placed, jax.device_put(tokens, NamedSharding(mesh, P("data"))))
  assert got.sharding.spec == P("data", None, "model")
  assert_close(jax.device_get(got), jax.device_get(want), rtol=1e-13)


# Gradients on a mesh and on one device --------------------------------------------------------------------------------------


RULES = {**sharding.FSDP, "batch": ("data", "fsdp"), "mlp": "tensor", "q_heads": "tensor", "vocab": "tensor"}


def check_model(family, **rules):
  """Gradients of a small model of a family; its tables of rotary positions have 32 bits."""
  config = json.loads((pathlib.Path(__file__).parent / "golden" / family / "config.json").read_text())
  model = ls.hf.model_from_config(config, param_dtype=jnp.float64)
  tokens = np.arange(32).reshape(8, 4) % config["vocab_size"]
  return ls.inspect.check_gradients(model, tokens, mesh=layouts.mesh(), rules={**RULES, **rules}.items(), rtol=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", *(pytest.param(family, marks=pytest.mark.slow)
                                                for family in ("qwen3", "gemma3", "deepseek_v3", "qwen3_next"))])
def test_models_split_three_ways(family):
  assert check_model(family).ok


class Gated(nn.Module):
  """A value goes into a product and into its gate. x: [batch, embed]."""

  laid_out: bool

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm(use_bias=False)(x)
    h = sharding.constrain(h, ("batch", "hidden")) if self.laid_out else h
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    return x + nn.Dense(8)(jnp.tanh(nn.Dense(8, kernel_init=init)(h)) * h)


@pytest.mark.parametrize("options", [{}, dict(offload_params=0, prefetch=True), dict(scan=False)], ids=str)
@pytest.mark.parametrize("laid_out", [True, False])
def test_what_a_compiler_splits_wrong_is_found(laid_out, options):
  """When it fails for what is not laid out, compilers have learnt it, and the README need not warn any longer."""
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Gated, laid_out=laid_out), 3), **options)
  report = ls.inspect.check_gradients(stack, jnp.tile(X, (2, 1)) + 1, mesh=layouts.mesh(), rules=RULES.items())
  assert report.ok == (laid_out or options.get("prefetch", False)) and (report.ok or report.largest > 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("batch, right", [(("data", "fsdp"), False), (("fsdp", "data"), True)])
def test_hidden_states_that_tensor_parallelism_splits(batch, right):
  """As above: of the one order of axes values are wrong."""
  assert check_model("llama", hidden="tensor", batch=batch).ok == right


def test_gradients_on_a_mesh_that_cannot_be():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Gated, laid_out=True), 3))
  check = functools.partial(ls.inspect.check_gradients, stack)
  with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh.*not None"):
    check(X, rules=RULES.items())
  with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh.*not 8"):
    check(X, mesh=8)
  with pytest.raises(ValueError, match="no rule for logical axes 'embed'.*, 'mlp'"):
    check(X, mesh=layouts.mesh())
  with pytest.raises(ValueError, match="argument 0 of shape .3, 8.: dimension 0 of 3 does not divide among 4 devices"):
    check(X[:3], mesh=layouts.mesh(), rules=RULES.items())
  with pytest.raises(TypeError, match=r"rules must be pairs .*, not 'batch'; of a dict, its items\(\)"):
    check(X, mesh=layouts.mesh(), rules=RULES)
  with pytest.raises(ValueError, match="outside of jax.set_mesh"), jax.set_mesh(layouts.mesh()):
    check(X, mesh=layouts.mesh(), rules=RULES.items())
  with pytest.raises(ValueError, match="the rules split no parameter and not the first argument"):
    check(x=X, mesh=layouts.mesh(), rules={name: None for name in RULES}.items())


@pytest.mark.parametrize("call", [
    lambda check, x, split: check(x), lambda check, x, split: check(split), lambda check, x, split: check(x=split)])
def test_arguments_that_are_laid_out_already_stay_so(call):
  """Whatever the name of the rule for the batch; what is wrong on the mesh is found."""
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Gated, laid_out=False), 3))
  rules, x = {**RULES, "activation_batch": RULES["batch"]}, jnp.tile(X, (2, 1)) + 1
  del rules["batch"]
  split = jax.device_put(x, NamedSharding(layouts.mesh(), P(("data", "fsdp"))))
  report = call(functools.partial(ls.inspect.check_gradients, stack, mesh=layouts.mesh(), rules=rules.items()), x, split)
  assert not report.ok and "on a mesh (data 2, fsdp 2, tensor 2) and under full remat on one device" in str(report)
  assert "layers/Dense_0/kernel" in dict(report.differences)  # without the box around it


def test_gradients_of_layers_with_statistics():
  class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
      init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
      return nn.BatchNorm(use_running_average=False)(nn.Dense(8, use_bias=False, kernel_init=init)(x))

  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Normed), 3))
  rules = {**RULES, "batch": ("fsdp", "data")}
  assert ls.inspect.check_gradients(stack, jnp.tile(X, (2, 1)), mesh=layouts.mesh(), rules=rules.items(), rtol=1e-4).ok


# Boxes of layers from NNX ---------------------------------------------------------------------------------------------------


class FromNNX(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nnx.with_metadata(nnx.initializers.normal(), out_sharding=("embed", "mlp"))
    return x + bridge.to_linen(nnx.Linear, 8, 8, kernel_init=init, name="linear")(x)


@pytest.mark.parametrize("axis, want", [(0, ("layers", "embed", "mlp")), (1, ("embed", "layers", "mlp"))])
def test_boxes_of_layers_from_nnx_name_every_axis(axis, want):
  """Flax itself leaves them without a name for the new axis."""
  with nnx.use_eager_sharding(False):
    stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(FromNNX), 4), param_axis=axis)
    variables = stack.init(jax.random.key(0), X)
    box = variables["params"]["layers"]["linear"]["kernel"]
    assert box.metadata["out_sharding"] == want and box.value.ndim == len(want)
    y, changed = stack.apply(variables, X, mutable=True)
    assert_close(y, stack.apply(nn.unbox(variables), X))
    assert changed["params"]["layers"]["linear"]["kernel"].metadata["out_sharding"] == want
    layers = ls.convert.unstack(variables, stack)
    assert layers[0]["params"]["linear"]["kernel"].metadata["out_sharding"] == ("embed", "mlp")
    assert ls.convert.stack(layers, stack)["params"]["layers"]["linear"]["kernel"].metadata == box.metadata
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  rules = [("embed", None), ("mlp", "model")]
  spec = ls.host_shardings(stack, variables["params"], mesh, rules=rules)["layers"]["linear"]["kernel"].spec
  assert spec == P(*(dict(rules).get(name) for name in want))
