"""Faults that people met with hand-written stacks. Each test stands for a kind of fault."""
import enum
import functools
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack.tags import equations
from tests.reference import A, B, Layer, PLANS, assert_close, layers_of, loop, make_variables

X = jax.random.normal(jax.random.key(0), (4, 8))
KEY = jax.random.key(1)
MODES = [dict(), dict(scan=False), dict(remat="none"), dict(offload_params=0)]


class Mode(enum.Enum):
  TRAIN = 1
  TEST = 2


def scans(jaxpr):
  return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


# Arguments -----------------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
  """Arguments of every kind around an optional array; counts on Python values staying Python values."""

  rate: float = 0.5

  @nn.compact
  def __call__(self, x, flag, mode, scale=None, options=None, *, deterministic=True, name_tag="n"):
    for value, kind in ((flag, bool), (mode, Mode), (deterministic, bool), (name_tag, str)):
      assert isinstance(value, kind), (value, kind)
    assert options is None or isinstance(options["cap"], float)
    h = nn.Dense(8)(x)
    if flag:
      h = jnp.tanh(h)
    if options is not None:
      h = jnp.minimum(h, options["cap"]) + options["bias"]
    h = nn.Dropout(self.rate, deterministic=deterministic)(h)
    return x + (h if scale is None else h * scale)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("scale", [None, jnp.full((4, 8), 0.5)], ids=["none", "array"])
@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_python_values_stay_python_values_wherever_they_stand(mode, style, scale, rate):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Noisy, rate=rate), 4)
  stack = ls.StackedDecoder(plan, static_argnames=("flag", "mode", "deterministic"), **mode)
  options = {"cap": 0.3, "bias": jnp.ones((8,))}
  if style == "positional":
    args, kwargs = (True, Mode.TRAIN, scale, options), dict(deterministic=False)
  else:
    args, kwargs = (), dict(flag=True, mode=Mode.TRAIN, scale=scale, options=options, deterministic=False, name_tag="m")
  rngs = {"params": KEY, "dropout": jax.random.key(2)}
  variables = stack.init(rngs, X, *args, **kwargs)

  def loss(params):
    return (stack.apply({"params": params}, X, *args, **kwargs, rngs={"dropout": jax.random.key(2)}) ** 2).sum()

  grads = jax.grad(loss)(variables["params"])
  assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))
  if rate == 0.0:
    layers = layers_of(variables, plan, scan=mode.get("scan", True))
    want, _ = loop(plan, layers, X, *args, **kwargs, rngs=[{"dropout": KEY}] * 4)
    assert_close(stack.apply(variables, X, *args, **kwargs, rngs={"dropout": KEY}), want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_keyword_arguments_are_not_dropped(mode):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Layer, dropout=0.5), 3)
  stack = ls.StackedDecoder(plan, **mode)
  variables = make_variables(stack, X)
  mask = jnp.zeros((4, 8)).at[:, 0].set(1)
  placed = variables
  if "offload_params" in mode:
    placed = {"params": jax.device_put(variables["params"], ls.host_shardings(stack, variables["params"]))}
  noisy = stack.apply(placed, X, mask=mask, deterministic=False, rngs={"dropout": KEY})
  quiet = stack.apply(placed, X, mask=mask, deterministic=True)
  assert not np.allclose(noisy, quiet)
  want, _ = loop(plan, layers_of(variables, plan, scan=mode.get("scan", True)), X, mask=mask)
  assert_close(quiet, want)


@pytest.mark.parametrize("shape", [(4, 1), (4, 8)])
def test_an_argument_as_long_as_the_stack_is_still_seen_whole(shape):
  plan = ls.Plan.homogeneous(A, 4)
  stack = ls.StackedDecoder(plan)
  variables = make_variables(stack, X)
  mask = jnp.arange(float(np.prod(shape))).reshape(shape)
  assert_close(stack.apply(variables, X, mask), loop(plan, layers_of(variables, plan), X, mask)[0])


class Jitted(nn.Module):
  @functools.partial(nn.jit, static_argnames=("training",))
  @nn.compact
  def __call__(self, x, *, training=False):
    assert isinstance(training, bool)
    return x + nn.Dense(8)(x) * (2.0 if training else 1.0)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_layers_that_are_jitted_themselves(mode):
  whole = nn.jit(Layer)
  for plan, kwargs in ((ls.Plan.homogeneous(ls.LayerSpec(Jitted), 3), dict(training=True)),
                       (ls.Plan.homogeneous(ls.LayerSpec(whole), 3), {})):
    stack = ls.StackedDecoder(plan, **mode)
    variables = stack.init(KEY, X, **kwargs)
    got = jax.grad(lambda p: stack.apply({"params": p}, X, **kwargs).sum())(variables["params"])
    scan = mode.get("scan", True)

    def of_loop(layers):
      return loop(plan, [{"params": p} for p in layers], X, **kwargs)[0].sum()

    want = jax.grad(of_loop)([layer["params"] for layer in layers_of(variables, plan, scan=scan)])
    assert_close([layer["params"] for layer in layers_of({"params": got}, plan, scan=scan)], want)


# Names, keys, attributes -------------------------------------------------------------------------------------------------------


class Unnamed(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(self.features)(nn.Dense(self.features)(x))


class WithSetup(nn.Module, kw_only=True):
  features: int
  attention: nn.Module

  def setup(self):
    self.out = nn.Dense(self.features, name="projection")

  def __call__(self, x):
    return x + self.out(self.attention(x)), None


@pytest.mark.parametrize("mode", [dict(), dict(scan=False), dict(remat="none"), dict(offload_params=0), dict(unroll=2)], ids=str)
def test_names_do_not_depend_on_the_mode(mode):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Unnamed, features=8), 3)
  params = ls.StackedDecoder(plan, **mode).init(KEY, X)["params"]
  for layer in params.values():
    assert sorted(layer) == ["Dense_0", "Dense_1"]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_setup_layers_keyword_only_attributes_and_module_templates(mode):
  spec = ls.LayerSpec(WithSetup, features=8, attention=nn.Dense(8, name="attn"))
  plan = ls.Plan.cycle([spec, spec, ls.LayerSpec(Unnamed, features=8)], 4)
  stack = ls.StackedDecoder(plan, **mode)
  variables = make_variables(stack, X)
  layers = layers_of(variables, plan, scan=mode.get("scan", True))
  assert len(layers) == 4 and sorted(layers[0]["params"]) == ["attention", "projection"]
  kernels = np.stack([layer["params"]["attention"]["kernel"] for layer in (layers[0], layers[1], layers[3])])
  assert len(np.unique(kernels[:, 0, 0])) == 3  # each layer owns a copy of the template
  x = X
  for layer in layers:
    p = layer["params"]
    if "attention" in p:
      dense = lambda p, v: v @ p["kernel"] + p["bias"]
      x = x + dense(p["projection"], dense(p["attention"], x))
    else:
      x = Unnamed(features=8).apply(layer, x)
  assert_close(stack.apply(variables, X), x)


class Scaled(nn.Module):
  @nn.compact
  def __call__(self, x, *, depth):
    std = 10.0 ** -depth
    return x + x @ self.param("kernel", lambda key, shape: jax.random.normal(key, shape) * std, (8, 8))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_initialisation_may_depend_on_the_layer_index(mode):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Scaled), 4)
  stack = ls.StackedDecoder(plan, layer_index="depth", **mode)
  layers = layers_of(stack.init(KEY, X), plan, scan=mode.get("scan", True))
  std = np.array([layer["params"]["kernel"].std() for layer in layers]) * 10.0 ** np.arange(4)
  np.testing.assert_allclose(std, 1.0, atol=0.3)


def test_layer_factories_that_are_no_classes():
  factory = lambda features, name: Unnamed(features=features, name=name)
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(factory, features=8), 2))
  assert stack.apply(stack.init(KEY, X), X).shape == X.shape


# Collections ---------------------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
  """Batch statistics, a cache, two kinds of sown values; counts how often its body runs."""

  runs = []

  @nn.compact
  def __call__(self, x, train=True):
    Stateful.runs.append(1)
    h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
    steps = self.variable("cache", "steps", jnp.zeros, (), jnp.int32)
    if not self.is_initializing():
      steps.value += 1
    self.sow("intermediates", "h", h)
    self.sow("moe_stats", "load", (h > 0).sum())
    return x + h


@pytest.mark.parametrize("mode", MODES + [dict(param_axis=1), dict(remat="minimal_offloaded")], ids=str)
@pytest.mark.parametrize("plan", [ls.Plan.homogeneous(ls.LayerSpec(Stateful), 3),
                                  ls.Plan.cycle([ls.LayerSpec(Stateful, name=n) for n in "aab"], 8)], ids=["flat", "cycle"])
def test_mutable_collections_run_the_body_once_and_equal_the_loop(plan, mode):
  if mode.get("remat") == "minimal_offloaded":
    mode = dict(remat=ls.RematPolicy(carry="offload"))  # the layer tags nothing
  scan = mode.get("scan", True)
  stack = ls.StackedDecoder(plan, **mode)
  traces = plan.traced_layers if scan else plan.num_layers
  traces += "remat" in mode and mode["remat"] != "none" and plan.traced_layers > 1  # a run of two is unrolled to offload
  Stateful.runs.clear()
  variables = jax.eval_shape(stack.init, KEY, X)
  assert len(Stateful.runs) == traces
  variables = make_variables(stack, X)
  state = {c: v for c, v in variables.items() if c in ("params", "batch_stats", "cache")}
  want = layers_of(state, plan, mode.get("param_axis", 0), scan)
  for _ in range(2):
    Stateful.runs.clear()
    y, out = stack.apply(state, X, mutable=["batch_stats", "cache", "intermediates", "moe_stats"])
    assert len(Stateful.runs) == traces
    y_loop, outs = loop(plan, want, X, mutable=["batch_stats", "cache", "intermediates", "moe_stats"])
    assert_close(y, y_loop)
    got = layers_of(out, plan, scan=scan)
    assert_close(got, [dict(o) for _, o in outs], rtol=2e-6)  # means of values that cancel
    assert all(len(layer["intermediates"]["h"]) == 1 for layer in got)
    state = {**state, "batch_stats": out["batch_stats"], "cache": out["cache"]}
    want = [{"params": w["params"], "batch_stats": o["batch_stats"], "cache": o["cache"]} for w, (_, o) in zip(want, outs)]


@pytest.mark.parametrize("inside_parent", [False, True])
def test_tabulate_capture_and_interceptors_see_the_layers_own_paths(inside_parent):
  class Parent(nn.Module):
    @nn.compact
    def __call__(self, x):
      stack = ls.StackedDecoder(PLANS["cycle and remainder"], name="stack")
      return stack(x)

  module = Parent() if inside_parent else ls.StackedDecoder(PLANS["cycle and remainder"])
  prefix = ("stack",) if inside_parent else ()
  table = module.tabulate(KEY, X, console_kwargs={"width": 200})
  assert "layers/a" in table and "layers_remainder/a" in table and "one_layer" not in table
  variables = make_variables(module, X)
  out = module.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])[1]["intermediates"]
  out = out["stack"] if inside_parent else out
  assert out["layers"]["a_0"]["Dense_0"]["__call__"][0].shape == (2, 2, 4, 8)
  assert out["first"]["Dense_0"]["__call__"][0].shape == (4, 8)

  calls = []

  def interceptor(next_fun, args, kwargs, context):
    calls.append((context.module.path, context.method_name))
    return next_fun(*args, **kwargs)

  with nn.intercept_methods(interceptor):
    module.apply(variables, X)
  layer_calls = [path for path, method in calls if path[:-1] in [(*prefix, "layers")] and method == "__call__"]
  assert layer_calls == [(*prefix, "layers", run) for run in ("a_0", "b", "a_1")]
  # Without a path: how Flax itself looks at a module's `setup` when it lifts one.
  assert {method for path, method in calls if path} <= {"__call__", "setup"}


# Parameters go in, never out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutable", [["cache", "intermediates"], True, ["params", "cache"]], ids=str)
@pytest.mark.parametrize("plan_name", ["homogeneous", "cycle"])
def test_no_parameter_leaves_the_loop(plan_name, mutable):
  plan = PLANS[plan_name]
  stack = ls.StackedDecoder(plan)
  variables = make_variables(stack, X)
  jaxpr = jax.make_jaxpr(lambda v: stack.apply(v, X, mutable=mutable))(variables).jaxpr
  shapes = {leaf.shape for leaf in jax.tree.leaves(variables["params"])} - {X.shape}
  found = scans(jaxpr)
  assert found
  for eqn in equations(jaxpr):
    if eqn.primitive.name in ("scan", "checkpoint", "remat2", "remat"):
      inside = {shape[1:] for shape in shapes} | {shape[2:] for shape in shapes}
      out = {var.aval.shape for var in eqn.outvars}
      assert not out & (shapes if eqn.primitive.name == "scan" else inside - {(), (4, 8), (8,)}), eqn.primitive.name


class WithAdapter(nn.Module):
  """Adds a low-rank adapter at apply time, in `params` or a collection of its own."""

  collection: str = "lora"
  adapt: bool = False

  @nn.compact
  def __call__(self, x):
    y = x + nn.Dense(8, use_bias=False, name="base")(x)
    if not self.adapt:
      return y
    down = self.variable(self.collection, "down", nn.initializers.normal(), jax.random.key(0), (8, 2))
    up = self.variable(self.collection, "up", jnp.zeros, (2, 8))
    return y + x @ down.value @ up.value


@pytest.mark.parametrize("collection", ["lora", "params"])
@pytest.mark.parametrize("mode", [dict(), dict(remat="none"), dict(param_axis=1), dict(offload_params=0)], ids=str)
def test_adapters_made_at_apply_come_out_and_the_base_does_not(mode, collection):
  base = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(WithAdapter), 3), **mode)
  params = base.init(KEY, X)["params"]
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(WithAdapter, collection=collection, adapt=True), 3), **mode)
  y, out = stack.apply({"params": params}, X, mutable=[collection])
  axis = mode.get("param_axis", 0) if collection == "params" else 0
  made = out[collection]["layers"]
  assert made["down"].shape == ((8, 3, 2) if axis == 1 else (3, 8, 2))
  if collection == "params":
    assert made["base"]["kernel"] is params["layers"]["base"]["kernel"]
  else:
    assert sorted(out) == ["lora"]
  jaxpr = jax.make_jaxpr(lambda p: stack.apply({"params": p}, X, mutable=[collection]))(params).jaxpr
  (eqn,) = scans(jaxpr)
  assert sorted(var.aval.shape for var in eqn.outvars) == [(3, 2, 8), (3, 8, 2), (4, 8)]


# Stacked axes -------------------------------------------------------------------------------------------------------------------


class Ranks(nn.Module):
  @nn.compact
  def __call__(self, x):
    boxed = lambda *names: nn.with_partitioning(nn.initializers.normal(), names)
    kernel = self.param("kernel", boxed("embed", "mlp"), (8, 8))
    bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.normal(), ("mlp",)), (8,))
    return x + self.param("scalar", boxed(), ()) * (x @ kernel + bias)


@pytest.mark.parametrize("axis, kernel, bias, scalar", [
    (0, ("layers", "embed", "mlp"), ("layers", "mlp"), ("layers",)),
    (1, ("embed", "layers", "mlp"), ("mlp", "layers"), ("layers",)),
    (2, ("embed", "mlp", "layers"), ("mlp", "layers"), ("layers",)),
    (-1, ("embed", "mlp", "layers"), ("mlp", "layers"), ("layers",)),
    (-2, ("embed", "layers", "mlp"), ("layers", "mlp"), ("layers",)),
])
def test_axis_names_stand_where_the_axes_are_for_leaves_of_every_rank(axis, kernel, bias, scalar):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Ranks), 3)
  stack = ls.StackedDecoder(plan, param_axis=axis)
  variables = make_variables(stack, X)
  boxes = variables["params"]["layers"]
  assert (boxes["kernel"].names, boxes["bias"].names, boxes["scalar"].names) == (kernel, bias, scalar)
  assert all(box.value.ndim == len(box.names) for box in boxes.values())
  assert_close(stack.apply(variables, X), loop(plan, layers_of(variables, plan, axis), X)[0])
  assert_close(stack.apply(nn.unbox(variables), X), stack.apply(variables, X))


def test_nested_runs_and_segments_name_their_own_axes():
  spec, other = ls.LayerSpec(Ranks, name="inner"), ls.LayerSpec(Unnamed, features=8)
  plan = ls.Plan.homogeneous(spec, 2, "dense_layers") + ls.Plan.cycle([spec, spec, other], 6, "moe_layers")
  for axis, dense, nested in ((0, ("dense_layers", "embed", "mlp"), ("moe_layers", "inner", "embed", "mlp")),
                              (1, ("embed", "dense_layers", "mlp"), ("embed", "moe_layers", "inner", "mlp"))):
    stack = ls.StackedDecoder(plan, param_axis=axis)
    variables = make_variables(stack, X)
    names = lambda v: (v["params"]["dense_layers"]["kernel"].names, v["params"]["moe_layers"]["inner"]["kernel"].names)
    assert names(variables) == (dense, nested)
    assert names({"params": stack.apply(variables, X, mutable=True)[1]["params"]}) == (dense, nested)
    assert_close(stack.apply(variables, X), loop(plan, layers_of(variables, plan, axis), X)[0])


def test_an_axis_of_another_name_is_an_error():
  first = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Ranks), 3))
  params = first.init(KEY, X)["params"]
  boxes = jax.tree.map(lambda b: b.replace(names=("other", *b.names[1:])), params, is_leaf=lambda x: hasattr(x, "names"))
  with pytest.raises(ValueError, match="should be named 'layers'.*other"):
    first.apply({"params": boxes}, X)


@pytest.mark.parametrize("plan", [ls.Plan.homogeneous(A, 1), ls.Plan.cycle([A, B], 2), ls.Plan.homogeneous(A, 1, "p") + ls.Plan.cycle(
    [A, A, B], 3)], ids=["one", "one repeat", "prefix of one"])
def test_single_repeats_have_no_stacked_axis_and_nothing_of_size_zero(plan):
  stack = ls.StackedDecoder(plan)
  variables = make_variables(stack, X)
  assert all(leaf.shape == () or min(leaf.shape) > 0 for leaf in jax.tree.leaves(variables))
  for i, layer in enumerate(layers_of(variables, plan)):
    want = plan.layers[i].cls(**plan.layers[i].kwargs).init(KEY, X)
    assert jax.tree.map(jnp.shape, layer) == jax.tree.map(jnp.shape, nn.unbox(want))
  assert_close(stack.apply(variables, X), loop(plan, layers_of(variables, plan), X)[0])


# Traces, dtypes, meshes -----------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
  runs = []

  @nn.compact
  def __call__(self, x):
    Counted.runs.append(1)
    return x + nn.Dense(8)(x)


@pytest.mark.parametrize("depth", [2, 16])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_body_is_traced_once(depth, remat):
  nested = ls.Plan.cycle([ls.LayerSpec(Counted, name=n) for n in "aab"], 3 * depth)
  for plan in (ls.Plan.homogeneous(ls.LayerSpec(Counted), depth), nested):
    stack = ls.StackedDecoder(plan, remat=remat)
    Counted.runs.clear()
    variables = jax.eval_shape(stack.init, KEY, X)
    assert len(Counted.runs) == plan.traced_layers
    Counted.runs.clear()
    jax.make_jaxpr(jax.grad(lambda v: stack.apply(v, X).sum()))(variables)
    assert len(Counted.runs) == plan.traced_layers


def test_a_weakly_typed_input_does_not_cost_a_second_trace():
  class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
      Counted.runs.append(1)
      return x * self.param("scale", nn.initializers.ones, ())

  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Plain), 3))
  variables = stack.init(KEY, 2.0)
  Counted.runs.clear()
  y = stack.apply(variables, 2.0)
  assert len(Counted.runs) == 1 and y.dtype == jnp.float32 and not y.weak_type


@pytest.mark.parametrize("mode", [dict(), dict(scan=False)], ids=str)
@pytest.mark.parametrize("plan_name", ["homogeneous", "one layer", "cycle and remainder"])
def test_a_layer_that_promotes_the_hidden_states_is_named(plan_name, mode):
  stack = ls.StackedDecoder(PLANS[plan_name], **mode)
  with pytest.raises(ValueError, match=r"layer Layer in segment '\w+' changed the dtype .* from bfloat16 to float32.*dtype="):
    stack.init(KEY, X.astype(jnp.bfloat16))


class Pair(nn.Module):
  """Carries a dict: hidden states and integer positions, and returns the dict alone or with an output."""

  extra: bool = False

  @nn.compact
  def __call__(self, carry):
    hidden, positions = carry["hidden"], carry["positions"]
    out = {"hidden": hidden + nn.Dense(8)(hidden), "positions": positions + 1}
    return (out, hidden.sum()) if self.extra else out


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_carry_may_be_any_tree(mode, extra):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Pair, extra=extra), 3)
  stack = ls.StackedDecoder(plan, collect_outputs=extra, **mode)
  carry = {"hidden": X, "positions": jnp.arange(4)}
  variables = make_variables(stack, carry)
  result = stack.apply(variables, carry)
  got, outputs = result if extra else (result, None)
  assert got["positions"].dtype == jnp.int32 and (got["positions"] == jnp.arange(4) + 3).all()
  want, outs = loop(plan, layers_of(variables, plan, scan=mode.get("scan", True)), carry)
  assert_close(got, want)
  if extra:
    assert_close(outputs, jnp.stack([o for o, _ in outs]))


class Wrong(nn.Module):
  how: str

  @nn.compact
  def __call__(self, x):
    return {"longer": (x, None, None), "shape": x[:, :4], "structure": {"x": x}, "pair": (x[:2], None)}[self.how]


@pytest.mark.parametrize("how, message", [("longer", "tuple of 3"), ("shape", "shape.*from .4, 8. to .4, 4."),
                                          ("structure", "structure"), ("pair", "shape")])
@pytest.mark.parametrize("mode", [dict(), dict(scan=False)], ids=str)
def test_wrong_results_are_told_in_words_about_the_layer(how, message, mode):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(Wrong, how=how), 3), **mode)
  with pytest.raises(ValueError, match=f"layer Wrong in segment 'layers'.*{message}"):
    stack.init(KEY, X)


def test_layers_of_one_run_that_make_different_parameters():
  class Fickle(nn.Module):
    made = []

    @nn.compact
    def __call__(self, x):
      Fickle.made.append(1)
      return x + nn.Dense(8, name=f"dense_{len(Fickle.made)}")(x)

  plan = ls.Plan.cycle([ls.LayerSpec(Fickle), ls.LayerSpec(Fickle), A], 6)
  with pytest.raises(ValueError, match="layers 0 and 1 of one run make different variables.*dense_1.*dense_2"):
    ls.StackedDecoder(plan, inner="unroll").init(KEY, X)


# Inside other transformations ------------------------------------------------------------------------------------------------------


class Flat(nn.Module):
  """A parent that takes the stack's variables in flat."""

  plan: ls.Plan
  compact: bool = False

  def setup(self):
    self.embed = nn.Dense(8)
    self.stack = ls.StackedDecoder(self.plan)
    nn.share_scope(self, self.stack)

  def __call__(self, x):
    return self.stack(self.embed(x))


class FlatCompact(nn.Module):
  plan: ls.Plan

  @nn.compact
  def __call__(self, x):
    stack = ls.StackedDecoder(self.plan)
    nn.share_scope(self, stack)
    return stack(nn.Dense(8, name="embed")(x))


@pytest.mark.parametrize("parent", [Flat, FlatCompact])
@pytest.mark.parametrize("wrap", [None, nn.remat, nn.jit])
def test_parents_take_the_stack_in_flat_also_under_their_own_transforms(parent, wrap):
  plan = PLANS["cycle and remainder"]
  module = parent(plan)
  variables = make_variables(module, X)
  assert sorted(variables["params"]) == ["embed", "first", "layers", "layers_remainder"]
  wrapped = (wrap(parent) if wrap else parent)(plan)
  loss = lambda m: jax.grad(lambda v: (m.apply(v, X) ** 2).sum())(variables)
  assert_close(loss(wrapped), loss(module))
  x = X @ variables["params"]["embed"]["kernel"] + variables["params"]["embed"]["bias"]
  assert_close(module.apply(variables, X), loop(plan, layers_of(variables, plan), x)[0])


def test_vmap_and_gradient_accumulation():
  plan = PLANS["homogeneous"]
  stack = ls.StackedDecoder(plan)
  variables = make_variables(stack, X)
  batches = jax.random.normal(jax.random.key(3), (3, 4, 8))
  each = jnp.stack([stack.apply(variables, x) for x in batches])
  assert_close(jax.vmap(lambda x: stack.apply(variables, x))(batches), each)
  lifted = nn.vmap(ls.StackedDecoder, variable_axes={"params": 0}, split_rngs={"params": True},
                   metadata_params={nn.PARTITION_NAME: "replicas"})(plan)
  assert jax.tree.leaves(lifted.init(KEY, batches))[0].shape[0] == 3
  grad = jax.grad(lambda v, x: (stack.apply(v, x) ** 2).sum())

  def step(total, x):
    return jax.tree.map(jnp.add, total, grad(variables, x)), None

  total, _ = jax.jit(lambda: jax.lax.scan(step, jax.tree.map(jnp.zeros_like, variables), batches))()
  want = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), [grad(variables, x) for x in batches])
  assert_close(total, want, rtol=1e-5)


def test_a_stack_called_twice_shares_its_parameters():
  class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
      stack = ls.StackedDecoder(PLANS["cycle"], name="stack")
      return stack(stack(x))

  module = Twice()
  variables = make_variables(module, X)
  layers = layers_of({"params": variables["params"]["stack"]}, PLANS["cycle"])
  assert_close(module.apply(variables, X), loop(PLANS["cycle"], layers, loop(PLANS["cycle"], layers, X)[0])[0])


class UsesShared(nn.Module):
  shared: nn.Module

  @nn.compact
  def __call__(self, x):
    return x + 0.1 * self.shared(nn.Dense(8)(x))


@pytest.mark.parametrize("mode", [dict(), dict(scan=False), dict(remat="none"), dict(param_axis=1), dict(inner="unroll")], ids=str)
def test_a_module_of_the_parent_is_stored_once_and_gets_summed_gradients(mode):
  class Parent(nn.Module):
    @nn.compact
    def __call__(self, x):
      spec = ls.LayerSpec(UsesShared, shared=nn.Dense(8, name="shared"))
      plan = ls.Plan.cycle([spec, spec, ls.LayerSpec(Unnamed, features=8)], 7)
      return ls.StackedDecoder(plan, name="stack", **mode)(x)

  variables = make_variables(Parent(), X)
  assert variables["params"]["shared"]["kernel"].shape == (8, 8)
  got = jax.grad(lambda v: (Parent().apply(v, X) ** 2).sum())(variables)
  template = ls.LayerSpec(UsesShared, shared=nn.Dense(8))
  plan = ls.Plan.cycle([template, template, ls.LayerSpec(Unnamed, features=8)], 7)

  def of_loop(params):
    layers = layers_of({"params": params["stack"]}, plan, mode.get("param_axis", 0), mode.get("scan", True))
    x = X
    for i, layer in enumerate(layers):
      if i % 3 == 2:
        x = Unnamed(features=8).apply(layer, x)
      else:
        x = UsesShared(shared=nn.Dense(8)).apply({"params": {**layer["params"], "shared": params["shared"]}}, x)
    return (x ** 2).sum()

  assert_close(got["params"], jax.grad(of_loop)(variables["params"]), rtol=1e-6)


def test_the_program_does_not_grow_with_depth():
  def size(depth):
    stack = ls.StackedDecoder(ls.Plan.homogeneous(A, depth))
    variables = jax.eval_shape(stack.init, KEY, X)
    step = lambda v: jax.tree.map(lambda p, g: p - g, v, jax.grad(lambda v: stack.apply(v, X).sum())(v))
    return len(jax.jit(step).lower(variables).as_text())

  assert size(64) <= 1.02 * size(4)


def test_warnings_are_not_ours():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    stack = ls.StackedDecoder(PLANS["cycle and remainder"], remat="minimal")
    variables = stack.init(KEY, X, X)
    jax.grad(lambda v: stack.apply(v, X, mask=X).sum())(variables)
