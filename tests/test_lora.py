"""Low-rank adapters: what they compute, where they stand, what they cost, and what is refused."""
import functools

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import linen_stack as ls
from linen_stack.models import DecoderLayer, LanguageModel
from tests import interpret
from tests.reference import assert_close, make_variables, wide

KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(KEY, (3, 8)), np.float64)


class Layer(nn.Module):
  """Kernels that are used as matrices, in a function of its own, cast, and in another way. x: [batch, 8]."""

  scale: float = 1.0

  @nn.compact
  def __call__(self, x, mask=None):
    boxed = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    h = nn.LayerNorm(use_bias=False, name="norm")(x)
    h = checkpoint_name(nn.Dense(16, kernel_init=boxed, dtype=jnp.result_type(float), name="wi")(h), "mlpwi_0")
    heads = nn.DenseGeneral((2, 4), use_bias=False, name="heads")(nn.gelu(h))
    odd = self.param("odd", nn.initializers.normal(), (8, 8))
    y = jax.jit(lambda x, w: jnp.einsum("bhd,hde->be", x, w))(heads, self.param("out", nn.initializers.normal(), (2, 4, 8)))
    y = self.scale * (y @ odd + jnp.tanh(odd).sum())
    return x + (y if mask is None else y * mask)


A, B = ls.LayerSpec(Layer, "a"), ls.LayerSpec(Layer, "b", scale=0.5)
PLANS = {
    "flat": ls.Plan.homogeneous(A, 4),
    "prefix, nested, remainder": ls.Plan.homogeneous(B, 1, "first") + ls.Plan.cycle([A, A, B], 8),
    "cycle": ls.Plan.cycle([A, B], 4),
}
TARGETS = ("wi", "heads/kernel", "out", "odd")
OPTIONS = [dict(remat="none"), dict(remat="full"), dict(remat=ls.RematPolicy(offload=["mlpwi_0"])), dict(param_axis=1),
           dict(scan=False), dict(offload_params=0), dict(unroll=2)]


def random_like(tree, seed=1):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), tree)


def with_adapters(plan, **options):
  """A stack with adapters, and variables for it that are not zero."""
  base = ls.StackedDecoder(PLANS[plan], **options)
  stack = ls.lora(base, 2, TARGETS, alpha=3)
  params = nn.unbox(make_variables(base.clone(offload_params=False), X)["params"])
  on_device = ls.lora(base.clone(offload_params=False), 2, TARGETS, alpha=3)
  made = jax.eval_shape(functools.partial(on_device.apply, mutable=["lora"]), {"params": params}, X, rngs={"lora": KEY})[1]
  return base, stack, {"params": params, "lora": random_like(nn.unbox(made["lora"]))}


CASES = [("flat", options) for options in OPTIONS] + [
    (plan, options) for plan in ("prefix, nested, remainder", "cycle") for options in (dict(remat="full"), dict(scan=False))] + [
        ("prefix, nested, remainder", options) for options in (dict(inner="unroll", remat="none"), dict(param_axis=1))]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("plan, options", CASES, ids=str)
def test_results_and_gradients_are_those_of_merged_parameters(plan, options):
  base, stack, variables = with_adapters(plan, **options)
  params, adapters = wide(variables["params"]), wide(variables["lora"])
  placed = params if stack.offload_params is False else jax.device_put(params, ls.host_shardings(stack, params))

  def loss(adapters):
    return (stack.apply({"params": placed, "lora": adapters}, X, mask=jnp.ones((8,))) ** 2).sum()

  def of_merged(adapters):
    merged = ls.merge_lora(stack, {"params": params, "lora": adapters})
    assert list(merged) == ["params"]
    return (base.clone(offload_params=False).apply(merged, X) ** 2).sum()

  assert_close(interpret.value_and_grad(loss)(adapters), interpret.value_and_grad(of_merged)(adapters), rtol=1e-13)


@pytest.mark.parametrize("plan", ["flat", "prefix, nested, remainder"])
def test_one_key_gives_the_same_adapters_in_every_layout_and_the_base_of_before(plan):
  made = {}
  for name, options in (("scan", {}), ("apart", dict(scan=False)), ("axis", dict(param_axis=1))):
    base = ls.StackedDecoder(PLANS[plan], **options)
    stack = ls.lora(base, 2, TARGETS)
    variables, params = (nn.unbox(interpret.run(made_by.init, KEY, X)) for made_by in (stack, base))
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params["params"])
    if name == "scan":
      np.testing.assert_array_equal(interpret.run(stack.apply, variables, X), interpret.run(base.apply, params, X))
    made[name] = ls.convert.unstack(variables, stack)
  for name in ("apart", "axis"):
    jax.tree.map(np.testing.assert_array_equal, [layer["lora"] for layer in made[name]], [layer["lora"] for layer in made["scan"]])
  first = [layer["lora"]["wi"]["kernel"]["a"] for layer in made["scan"]]
  assert len({float(a.sum()) for a in first}) == len(first) and not any(map(jnp.any, [layer["lora"]["odd"]["b"] for layer in made["scan"]]))


def test_shapes_and_names_of_adapters():
  made = jax.eval_shape(ls.lora(ls.StackedDecoder(PLANS["flat"]), 2, TARGETS).init, KEY, X)["lora"]["layers"]
  assert jax.tree.map(jnp.shape, nn.unbox(made)) == {
      "wi": {"kernel": {"a": (4, 8, 2), "b": (4, 2, 16)}}, "heads": {"kernel": {"a": (4, 16, 2), "b": (4, 2, 2, 4)}},
      "out": {"a": (4, 2, 4, 2), "b": (4, 2, 8)}, "odd": {"a": (4, 8, 2), "b": (4, 2, 8)}}
  assert made["wi"]["kernel"]["a"].names == ("layers", "embed", None)
  assert made["wi"]["kernel"]["b"].names == ("layers", None, "mlp")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_copy_of_a_kernel_and_no_gradient_of_one(remat):
  """Neither is a parameter among what a step keeps, nor is a gradient of one computed."""
  base = ls.StackedDecoder(PLANS["flat"], remat=remat)
  stack = ls.lora(base, 2, ["wi", "heads"])
  params = nn.unbox(make_variables(base, X)["params"])
  size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  outputs = jax.eval_shape(functools.partial(stack.apply, mutable=["lora"]), {"params": params}, X, rngs={"lora": KEY})
  assert size(outputs) == X.size + 4 * 2 * (8 + 16 + 16 + 8)

  def is_shared(params):
    _, changed = stack.apply({"params": params}, X, mutable=["params", "lora"], rngs={"lora": KEY})
    assert all(map(lambda a, b: a is b, jax.tree.leaves(changed["params"]), jax.tree.leaves(params)))

  jax.eval_shape(is_shared, params)

  def loss(adapters, params):
    return (stack.apply({"params": params, "lora": adapters}, X) ** 2).sum()

  program = jax.make_jaxpr(jax.grad(loss))(nn.unbox(outputs[1]["lora"]), params)
  inputs = {id(var) for var in program.jaxpr.invars}
  shapes = [var.aval.shape for eqn in program.jaxpr.eqns for var in eqn.outvars if id(var) not in inputs]
  assert not {(4, 8, 16), (4, 16, 2, 4), (4, 16, 8)} & set(shapes)
  products = [var.aval.shape for shape in ("dot_general",) for eqn in equations(program.jaxpr)
              if eqn.primitive.name == shape for var in eqn.outvars]
  assert products and not {(8, 16), (16, 8), (16, 2, 4)} & set(products)


def equations(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
        yield from equations(getattr(inner, "jaxpr", inner))


def test_an_optimiser_that_sees_the_adapters_alone_trains_a_model():
  import optax
  layer = ls.LayerSpec(DecoderLayer, embed=16, mlp=32, num_heads=2)
  stack = ls.StackedDecoder(ls.Plan.cycle([layer, ls.LayerSpec(DecoderLayer, "w", embed=16, mlp=32, num_heads=2, window=2)], 4))
  model = LanguageModel(ls.lora(stack, 2, ["attention/query", "wi_*"]), vocab=11, embed=16)
  tokens = jnp.arange(22).reshape(2, 11) % 11
  variables = nn.unbox(model.init(KEY, tokens))
  base, adapters, tx = variables["params"], variables["lora"], optax.adam(3e-2)

  @jax.jit
  def step(adapters, state):
    def loss(adapters):
      logits = model.apply({"params": base, "lora": adapters}, tokens)
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    value, grads = jax.value_and_grad(loss)(adapters)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(adapters, updates), state, value

  state, losses = tx.init(adapters), []
  for _ in range(4):
    adapters, state, value = step(adapters, state)
    losses.append(float(value))
  assert losses[-1] < losses[0] - 0.1
  merged = ls.merge_lora(model, {"params": base, "lora": adapters})
  plain = model.clone(stack=stack)
  assert_close(plain.apply(merged, tokens), model.apply({"params": base, "lora": adapters}, tokens), rtol=1e-5)
  assert merged["params"]["lm_head"]["kernel"] is base["lm_head"]["kernel"]


def test_adapters_lie_on_a_mesh_as_their_kernels_do():
  stack = ls.lora(ls.StackedDecoder(PLANS["flat"]), 2, ["wi", "odd"])
  boxed = jax.eval_shape(stack.init, KEY, X)
  mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
  rules = [("batch", "data"), ("embed", None), ("mlp", "tensor"), ("layers", "stage")]
  variables = random_like(nn.unbox(boxed))
  want = jax.jit(stack.apply)(variables, X[:2])
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    shardings = ls.host_shardings(stack, boxed, mesh)
    assert shardings["lora"]["layers"]["wi"]["kernel"]["b"].spec == P("stage", None, "tensor")
    placed = jax.device_put(variables, shardings)
    got = jax.jit(stack.apply)(placed, jax.device_put(X[:2], NamedSharding(mesh, P("data"))))
    merged = ls.merge_lora(stack, placed)["params"]["layers"]["wi"]["kernel"]
  assert_close(jax.device_get(got), want)
  assert merged.sharding == shardings["params"]["layers"]["wi"]["kernel"]


# Refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets, words", [
    (["wi", "heds"], "no parameter of the layers matches 'heds'; did you mean 'heads'"),
    (["wi/kernal"], "matches 'wi/kernal'; did you mean 'wi/kernel'"),
    (["norm"], "'norm' matches norm/scale, which no product of the layer sums over its first axes; kernels are .*wi/kernel"),
    (lambda path, leaf: path.endswith("bias"), r"it selects wi/bias \[16\], which no product"),
])
def test_targets_that_are_none(targets, words):
  base = ls.StackedDecoder(PLANS["cycle"])
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(ls.lora(base, 2, targets).init, KEY, X)
  params = nn.unbox(make_variables(base, X)["params"])
  with pytest.raises(ValueError, match=words):
    ls.lora(base, 2, targets).apply({"params": params}, X, mutable=["lora"], rngs={"lora": KEY})


def test_a_mistyped_target_is_found_before_a_layer_is_traced():
  class Untraceable(nn.Module):
    @nn.compact
    def __call__(self, x):
      raise AssertionError("traced")

  stack = ls.lora(ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Untraceable), 2)), 2, ["quary"])
  with pytest.raises(ValueError, match="did you mean 'query'"):
    stack.apply({"params": {"layers": {"query": {"kernel": jnp.ones((2, 8, 8))}}}}, X)


@pytest.mark.parametrize("make, error, words", [
    (lambda base: ls.lora(PLANS["flat"], 2, ["wi"]), TypeError, "takes a StackedDecoder, not Plan; of a model it is model.clone"),
    (lambda base: ls.lora(ls.lora(base, 2, ["wi"]), 2, ["wi"]), TypeError, "has adapters already"),
    (lambda base: ls.lora(base, 0, ["wi"]), ValueError, "rank must be at least 1"),
    (lambda base: ls.lora(base, 2.0, ["wi"]), TypeError, "rank must be an int"),
    (lambda base: ls.lora(base, 2, []), ValueError, "targets must be patterns"),
    (lambda base: ls.lora(base, 2, [3]), ValueError, "targets must be patterns"),
    (lambda base: ls.lora(base, 2, ["wi"], alpha="1"), TypeError, "alpha must be a finite number"),
    (lambda base: ls.merge_lora(base, {}), TypeError, "what ls.lora returned"),
    (lambda base: ls.merge_lora(ls.lora(base, 2, ["wi"]), {"params": {}}), ValueError, "no collection 'lora'; there are 'params'"),
    (lambda base: ls.merge_lora(ls.lora(base, 2, ["wi"]), {"params": {}, "lora": {"layers": {"w": {"a": X, "b": X}}}}), ValueError,
     "layers/w: there are adapters, but no such parameter"),
])
def test_arguments_that_cannot_be(make, error, words):
  with pytest.raises(error, match=words):
    make(ls.StackedDecoder(PLANS["flat"]))


def test_parameters_in_host_memory_are_merged_there():
  _, stack, variables = with_adapters("flat", offload_params=0)
  want = ls.merge_lora(stack, variables)
  placed = jax.device_put(variables, ls.host_shardings(stack, variables))
  merged = ls.merge_lora(stack, placed)["params"]["layers"]["wi"]["kernel"]
  assert merged.sharding.memory_kind == "pinned_host"
  np.testing.assert_array_equal(np.asarray(merged), want["params"]["layers"]["wi"]["kernel"])


def test_adapters_that_are_not_there():
  base, stack, variables = with_adapters("flat")
  with pytest.raises(ValueError, match="there are no adapters of heads/kernel: pass the collection 'lora' beside params"):
    stack.apply({"params": variables["params"]}, X)
  with pytest.raises(ValueError, match="which takes a key: rngs={'lora': key}"):
    stack.apply({"params": variables["params"]}, X, mutable=["lora"])
