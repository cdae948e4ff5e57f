"""`ScannedLayers` against `StackedDecoder` and a plain loop: numbers, trees, state, what leaves the loop, errors."""
import subprocess
import sys

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import linen_stack as ls
from linen_stack.tags import equations
from tests import interpret
from tests.nnx_reference import (
    WIDTH, Layer, Stateful, Twin, abstract, called, filled, loss_of, params_of, plan_of)
from tests.reference import assert_close, loop

X = jax.random.normal(jax.random.key(0), (2, WIDTH))
MASK = (jax.random.uniform(jax.random.key(1), (2, WIDTH)) > 0.3).astype(jnp.float32)


def random_case(seed):
  """Up to six layers of three kinds, in cycles or not, and options that fit them."""
  rng = np.random.default_rng(seed)
  cycle = "".join(rng.choice(list("abc"), rng.integers(1, 4)))
  names = "".join(rng.choice(list("abc"), rng.integers(0, 3))) + cycle * rng.choice([1, 2])
  remat = rng.choice(["none", "full", "minimal", "minimal_offloaded"])
  options = {"remat": str(remat), "param_axis": int(rng.choice([0, 1, -1])), "inner": str(rng.choice(["auto", "unroll"])),
             "barrier": str(rng.choice(["cse", "loop"])), "unroll": int(rng.choice([1, 2]))}
  if options["param_axis"] == 0 and rng.random() < 0.3:
    options["offload_params"] = 0
  return names[:6], options


def sgd(params, grads):
  return jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * np.asarray(g), params, grads)


def unstacked(params, plan, options):
  """One tree for each layer, as NumPy arrays."""
  params = jax.tree.map(np.asarray, params)
  return [layer["params"] for layer in ls.convert.unstack(
      {"params": params}, ls.StackedDecoder(plan, param_axis=options["param_axis"]))]


@pytest.mark.filterwarnings("ignore:offload_params=:UserWarning")  # test_nnx_prefetch.py has parameters in host memory
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 50))])
def test_linen_nnx_and_the_loop_agree_on_random_plans(seed):
  names, options = random_case(seed)
  plan, twin = plan_of(names), plan_of(names, Twin)
  model, stack = filled(abstract(plan, **options), seed), ls.StackedDecoder(twin, **options)
  params = params_of(model)
  boxes = jax.eval_shape(stack.init, jax.random.key(0), X)
  assert jax.tree.structure(ls.nnx.variables(model)) == jax.tree.structure(boxes)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
      lambda x: (x.shape, x.dtype), nn.unbox(boxes)["params"])
  value, grads = interpret.value_and_grad(loss_of(model, X, MASK))(params)
  linen_value, linen_grads = interpret.value_and_grad(
      lambda params: (stack.apply({"params": params}, X, MASK) ** 2).sum())(params)
  assert_close((value, grads), (linen_value, linen_grads))
  layers = unstacked(params, twin, options)
  loop_loss = lambda layers: (loop(twin, [{"params": p} for p in layers], X, MASK)[0] ** 2).sum()
  loop_value, loop_grads = interpret.value_and_grad(loop_loss)(layers)
  assert_close(value, loop_value)
  assert_close(unstacked(sgd(params, grads), twin, options), sgd(layers, loop_grads))


STATEFUL = ls.LayerSpec(Stateful, "a")
CYCLE = [STATEFUL, STATEFUL, ls.LayerSpec(Stateful, "b", rate=0.1)]


def values(model):
  """What a model holds, keys as numbers, by path."""
  data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return {path: jax.tree.map(data, leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def layers_apart(model):
  """For each layer of a cycle of three and a remainder of one its values, in order."""
  whole = values(model)
  take = lambda name, *at: {path[2:]: leaf[at] for path, leaf in whole.items() if path[:2] == ("layers", name)}
  layers = [take(*at) for i in range(2) for at in (("a", i, 0), ("a", i, 1), ("b", i))]
  return [*layers, {path[1:]: leaf for path, leaf in whole.items() if path[0] == "layers_remainder"}]


def test_state_of_all_kinds_is_kept_in_loops_as_it_is_layer_by_layer():
  """Batch statistics, scalar counters, rng streams, adapters that are made on the way; also the numbers of creation."""
  cycle = [ls.LayerSpec(Stateful, spec.name, rank=2, **spec.kwargs) for spec in CYCLE]
  make = lambda scan: lambda: ls.nnx.ScannedLayers(ls.Plan.cycle(cycle, 7), rngs=nnx.Rngs(0), scan=scan)
  (y, looped), (want, apart) = (called(make(scan), X, run=lambda model, x: model(model(x))) for scan in (True, False))
  assert_close(y, want)
  assert (looped.layers.a.calls[...] == 2).all() and looped.layers_remainder.calls[...] == 2
  assert (looped.layers.b.dropout.rngs.count[...] == 2).all()
  assert type(looped.layers.a.adapter.lora_a) is nnx.LoRAParam and looped.layers.a.adapter.lora_a.shape == (2, 2, WIDTH, 2)
  for i, layer in enumerate(layers_apart(looped)):
    own = {path[1:]: leaf for path, leaf in values(apart).items()
           if path[0] == (f"layers_{i}" if i < 6 else "layers_remainder_0")}
    assert layer.keys() == own.keys()
    assert_close({str(path): leaf for path, leaf in layer.items()}, {str(path): leaf for path, leaf in own.items()})
  keys = looped.layers.a.dropout.rngs.key[...].ravel()
  assert len(np.unique(np.asarray(jax.random.key_data(keys)), axis=0)) == 4


def test_shared_streams_are_the_same_in_all_layers():
  plan, rngs = ls.Plan.homogeneous(ls.LayerSpec(Keyed), 3), lambda: nnx.Rngs(params=0, noise=1)
  _, model = called(lambda: ls.nnx.ScannedLayers(plan, rngs=rngs(), shared_rngs=("noise",)), run=lambda model: 0)
  keys = jax.random.key_data(model.layers.rngs.noise.key[...])
  assert (keys == keys[0]).all()
  assert not (model.layers.weight[...] == model.layers.weight[0]).all()


class Keyed(nnx.Module):
  """Takes keys when it is made, and others when it is called."""

  def __init__(self, *, rngs):
    self.rngs, self.weight = rngs, nnx.Param(rngs.params.normal((WIDTH,)))

  def __call__(self, x, *, rngs=None):
    return x * self.weight + (0 if rngs is None else rngs.noise.normal(x.shape[-1:]))


@pytest.mark.parametrize("scan", [True, False])
def test_streams_of_a_call_are_split_over_the_layers(scan):
  model = filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Keyed), 3), scan=scan))
  for _, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    weight.set_value(jnp.ones(weight.shape))
  (y, again, count), _ = called(model, run=noisy)
  assert count == 2 and not jnp.allclose(y, again)
  assert not jnp.allclose(y / 3, nnx.Rngs(noise=5).noise.normal((WIDTH,)))  # not one key three times


def noisy(model):
  x, rngs = jnp.zeros((1, WIDTH)), nnx.Rngs(noise=5)
  return model(x, rngs=rngs), model(x, rngs=rngs), rngs.noise.count[...]


class Table(nnx.Module):
  """Takes no keys, and holds arrays in no variable, of which it writes one."""

  def __init__(self):
    self.rates, self.parts = jnp.arange(3.0), nnx.List([nnx.Param(jnp.ones(())), nnx.Param(jnp.ones((2,)))])

  def __call__(self, x):
    self.rates = self.rates + x
    return x + self.rates.sum() * self.parts[0]


def test_bare_arrays_and_lists_of_variables():
  model = ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(Table), 2), rngs=0)
  y, after = called(model, jnp.ones(()))
  assert_close((y, after.layers.rates), (jnp.float32(31.0), jnp.array([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0]])))
  assert model.layers.parts[1].shape == (2, 2) and (model.layers.rates == jnp.arange(3.0)).all()


class Grown(nnx.Module):
  """Becomes another module when it is called first: attributes come and go."""

  def __init__(self, *, rngs):
    self.old, self.rngs, self.calls = nnx.Param(jnp.ones((2,))), rngs, 0
    self.kept = nnx.Variable(jnp.ones((2,)))

  def __call__(self, x):
    self.calls += 1
    self.kept.set_metadata(out_sharding=("norm",))
    if hasattr(self, "old"):
      del self.old
      self.parts = nnx.List([nnx.LoRA(WIDTH, 2, WIDTH, rngs=self.rngs)])
      self.table = nnx.data({"k": jnp.ones((3,))})
    return x + self.parts[0](x)


@pytest.mark.parametrize("options", [{}, {"unroll": 3}], ids=str)
def test_what_a_call_makes_of_a_layer_lasts(options):
  model = filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Grown), 3), **options))
  _, after = called(model, X, run=lambda model, x: model(model(x)))
  layers = after.layers
  assert not hasattr(layers, "old") and layers.table["k"].shape == (3, 3) and layers.calls == 2
  assert layers.parts[0].lora_a.shape == (3, WIDTH, 2) and hasattr(model.layers, "old")
  assert layers.kept.get_metadata("out_sharding") == ("layers", "norm")


class Outer(nnx.Module):
  """Holds layers of its own."""

  def __init__(self, *, rngs):
    self.inner = ls.nnx.ScannedLayers(plan_of("aa"), rngs=rngs)

  def __call__(self, x):
    return self.inner(x)


def test_inside_of_other_modules():
  """Of Linen's, of NNX's, and as a layer of another `ScannedLayers`."""
  linen = nnx.bridge.to_linen(ls.nnx.ScannedLayers, plan_of("aab"))
  variables = jax.eval_shape(lambda key: linen.init({"params": key}, X), jax.random.key(0))
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, nn.unbox(tree))
  assert shapes(variables) == shapes(jax.eval_shape(ls.StackedDecoder(plan_of("aab", Twin)).init, jax.random.key(0), X))
  assert jax.eval_shape(linen.apply, variables, X).shape == X.shape
  nested = filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Outer), 3)))
  kernel = nested.layers.inner.layers.up.kernel
  assert kernel.shape == (3, 2, WIDTH, 3) and kernel.get_metadata("out_sharding") == ("layers", "layers", "embed", "mlp")
  assert called(nested, X)[0].shape == X.shape


def test_captured_values_come_out_stacked():
  model = filled(abstract(ls.Plan.cycle(CYCLE, 7)))
  (y, found), model = called(model, X, run=lambda model, x: nnx.capture(model, nnx.Intermediate)(x))
  shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(found))
  assert shapes == {"layers": {"a": {"total": ((2, 2),)}, "b": {"total": ((2,),)}}, "layers_remainder": {"total": ((),)}}
  assert np.isfinite(y).all() and not hasattr(model.layers.a, "__captures__")


def outputs(rank):
  """Of a call and its loops: the shapes that loops give out, their bytes and the program's, the shapes of parameters."""
  model = filled(abstract(ls.Plan.cycle([ls.LayerSpec(Stateful, "a", rank=rank)] * 2 + [ls.LayerSpec(Stateful, "b")], 6)))
  graph, state = nnx.split(model)

  def call(state, x):
    model = nnx.merge(graph, state, copy=True)
    return model(x), nnx.state(model)

  program = jax.make_jaxpr(call)(state, X).jaxpr
  in_bytes = lambda variables: sum(var.aval.size * var.aval.dtype.itemsize for var in variables)
  shapes = {var.aval.shape for eqn in equations(program) if eqn.primitive.name == "scan" for var in eqn.outvars}
  outer = [var for eqn in program.eqns if eqn.primitive.name == "scan" for var in eqn.outvars]
  params = {leaf.get_value().shape for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  return shapes, in_bytes(outer), in_bytes(program.outvars), params


def test_no_parameter_leaves_the_loop_and_adapters_are_all_that_is_added():
  plain, from_loops, from_program, params = outputs(0)
  kernels = {shape for shape in params if shape[-2:] == (WIDTH, WIDTH)}
  assert kernels and not kernels & plain
  adapted, from_adapted_loops, from_adapted_program, _ = outputs(8)
  assert not kernels & adapted
  adapters = 4 * 4 * (WIDTH * 8 + 8 * WIDTH)  # of four layers, four bytes a number
  assert from_adapted_program - from_program == adapters
  assert from_adapted_loops - from_loops == adapters + 4 * 4  # and the counters of the streams that they were made from


def test_objects_and_arrays_that_no_layer_changes_stay_the_very_ones():
  model = filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Stateful, rank=2), 2)))
  kernel, dropout = model.layers.linear.kernel, model.layers.dropout
  array, mean = kernel.get_value(), model.layers.norm.mean.get_value()
  model(X)
  assert model.layers.linear.kernel is kernel and model.layers.dropout is dropout and hasattr(model.layers, "adapter")
  assert kernel.get_value() is array and model.layers.norm.mean.get_value() is not mean


def test_the_program_of_making_and_calling_does_not_grow_with_depth():
  def sizes(depth):
    plan = ls.Plan.homogeneous(STATEFUL, depth)
    graph, state = nnx.split(abstract(plan))
    make = jax.make_jaxpr(lambda: nnx.split(ls.nnx.ScannedLayers(plan, rngs=nnx.Rngs(0)))[1])()
    call = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state, copy=True)(x))(state, X)
    return [len(list(equations(program.jaxpr))) for program in (make, call)]

  assert sizes(3) == sizes(30)


class Cached(nnx.Module):
  """Adds its own cache, its argument and its index, and counts in both."""

  def __init__(self, *, rngs):
    self.cache = nnx.Cache(jnp.zeros((3,)))

  def __call__(self, x, cache, index):
    self.cache[...] += index
    return x + self.cache.sum() + cache["n"].sum(), {"n": cache["n"] + index}


@pytest.mark.parametrize("options", [{}, {"scan": False}, {"decode": "scan"}], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_caches_and_indices_go_to_their_layers(options, stacked):
  plan = ls.Plan.cycle([ls.LayerSpec(Cached, "a"), ls.LayerSpec(Cached, "b"), ls.LayerSpec(Cached, "b")], 7)
  model = filled(abstract(plan, layer_index="index", **options))
  caches = {"n": jnp.zeros((7, 2))} if stacked else [{"n": jnp.zeros(2)} for _ in range(7)]
  for _ in range(2):
    (_, caches), model = called(model, jnp.zeros(()), ls.per_layer(caches))
  want = 2.0 * np.arange(7)
  assert_close(caches["n"][:, 0] if stacked else jnp.stack([cache["n"][0] for cache in caches]), want)
  if options.get("scan", True):
    assert_close(model.layers.b.cache[..., 0], want[[[1, 2], [4, 5]]])
    assert_close(model.layers_remainder.cache[...], want[[6, 6, 6]])


def test_a_train_step_of_nnx_learns():
  model = filled(abstract(plan_of("aa"), remat=ls.RematPolicy(save=["mlpwi_0"])))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda model: ((model(X, MASK) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

  losses = [step(model, optimizer) for _ in range(3)]
  assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("remat, names", [
    ({"layers": "minimal", "first": "full"}, "baaa"), (ls.RematPolicy(every=2), "aaaa"),
    (ls.RematPolicy(levels=(2, 2), carry="offload"), "aaaa")], ids=str)
def test_policies_of_all_forms(remat, names):
  plan = ls.Plan.of(*(ls.Plan.homogeneous(ls.LayerSpec(Layer, hidden=5), 1, "first"),) * (names[0] == "b"),
                    ls.Plan.homogeneous(ls.LayerSpec(Layer), names.count("a")))
  model, plain = filled(abstract(plan, remat=remat)), filled(abstract(plan, remat="none"))
  hash(nnx.graphdef(model))  # or it could not be an argument of nnx.jit
  params = params_of(model)
  got, want = (interpret.value_and_grad(loss_of(each, X))(params) for each in (model, plain))
  assert_close(jax.device_get(got), jax.device_get(want))


def test_parameters_are_made_in_host_memory_and_their_gradients_come_back_there():
  model = ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(Layer), 2), rngs=nnx.Rngs(0), offload_params=0)
  kinds = lambda tree: {path[1:]: leaf.get_value().sharding.memory_kind for path, leaf in nnx.to_flat_state(tree)}
  want = {path: "pinned_host" if path[-1] == "kernel" else "device" for path in kinds(nnx.state(model))}
  assert kinds(nnx.state(model)) == want
  assert kinds(nnx.jit(nnx.grad(lambda model: model(X).sum()))(model)) == want
  assert jax.tree.leaves(ls.host_shardings(model.stack, params_of(model)))[1].memory_kind == "pinned_host"


def test_a_policy_that_misses_is_told_once():
  model = filled(abstract(plan_of("aa"), remat=ls.RematPolicy(save=["mlp_w0"])))
  with pytest.raises(ValueError, match="'mlp_w0'.*did you mean 'mlpwi_0'"):
    model(X)
  traced = []

  class Counting(Layer):
    def __call__(self, x):
      traced.append(x)
      return super().__call__(x)

  model = filled(abstract(ls.Plan.homogeneous(ls.LayerSpec(Counting), 3), remat=ls.RematPolicy(save=["mlpwo"])))
  model(X)
  first = len(traced)
  model(X)
  assert first <= 2 and len(traced) == first + 1  # the tags are looked for the first time alone


def test_variables_of_linen_load_and_what_does_not_fit_is_refused():
  parts = lambda layer: ls.Plan.homogeneous(ls.LayerSpec(layer), 2) + ls.Plan.homogeneous(ls.LayerSpec(layer), 1, "last")
  plan, twin = parts(Layer), parts(Twin)
  model, stack = filled(abstract(plan)), ls.StackedDecoder(twin)
  boxed = ls.nnx.variables(filled(abstract(plan), seed=3))
  ls.nnx.update(model, boxed)
  assert_close(called(model, X)[0], interpret.run(stack.apply, boxed, X))
  before = params_of(model)
  tree = lambda: jax.tree.map(lambda x: x + 1, before)
  missing, extra, wrong = tree(), tree(), tree()
  del missing["layers"]["up"]["kernel"]
  extra["layers"]["up"]["kernels"] = X
  wrong["layers"]["gain"] = jnp.zeros((3,))
  for params, message in ((missing, "params/layers/up/kernel is missing"), (extra, "up/kernels is no variable.*up/kernel'"),
                          (wrong, r"gain is float32 \[3\], but this ScannedLayers has float32 \[2\]")):
    with pytest.raises(ValueError, match=message):
      ls.nnx.update(model, {"params": params})
  assert_close(params_of(model), before)
  with pytest.raises(TypeError, match="dict of collections"):
    ls.nnx.update(model, X)


def test_axes_of_another_name_are_refused():
  model = filled(abstract(plan_of("aa")))
  model.layers.up.kernel.set_metadata(out_sharding=("embed", "mlp"))
  with pytest.raises(ValueError, match="layers/up/kernel: axis 0 should be named 'layers'"):
    model(X)


PLAN = ls.Plan.homogeneous(ls.LayerSpec(Layer), 2)


@pytest.mark.parametrize("make, error, message", [
    (lambda: ls.nnx.ScannedLayers(plan_of("aa", Twin), rngs=0), TypeError, "flax.linen Module.*ls.nnx.bridged"),
    (lambda: ls.StackedDecoder(PLAN), TypeError, "flax.nnx Module.*nnx.bridge.to_linen, Layer.*ScannedLayers"),
    (lambda: ls.nnx.ScannedLayers(ls.LayerSpec(Layer), rngs=0), TypeError, "plan must be a Plan or a Segment"),
    (lambda: ls.nnx.ScannedLayers(PLAN, rngs=0, rematt="full"), TypeError, "no argument 'rematt'.*'remat'"),
    (lambda: ls.nnx.ScannedLayers(PLAN, rngs=0, static_argnames=("maks",)), ValueError, "no argument 'maks'.*'mask'"),
    (lambda: ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(Layer), 2, "sow"), rngs=0), ValueError, "named 'sow'"),
    (lambda: ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(Layer, hiden=3), 2), rngs=0), TypeError,
     "Layer has no argument 'hiden'.*'hidden'"),
    (lambda: ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(Layer, hidden=nnx.Param(X)), 2), rngs=0), TypeError,
     "'hidden' holds an NNX module or variable"),
    (lambda: ls.nnx.ScannedLayers(ls.Plan.homogeneous(ls.LayerSpec(lambda *, rngs: nn.Dense(3), "made"), 2), rngs=0),
     TypeError, "made Dense, which is no flax.nnx Module.*bridged"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(lambda *, name: Layer(rngs=nnx.Rngs(0)), "made"), 2)).init(
        jax.random.key(0), X), TypeError, "no flax.linen Module; nnx.bridge.to_linen"),
    (lambda: abstract(PLAN)(X, masc=MASK), TypeError, "unexpected keyword argument 'masc'.*'mask'"),
    (lambda: filled(abstract(PLAN))(X, rngs=nnx.Rngs(0)), TypeError, "Layer takes no rngs"),
    (lambda: filled(abstract(PLAN))(X, nnx.Variable(MASK)), TypeError, "NNX module or variable among the arguments"),
])
def test_what_cannot_be_is_refused_in_words(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_linen_users_do_not_wait_for_nnx():
  code = "import linen_stack, sys; assert 'flax.nnx' not in sys.modules; linen_stack.nnx.ScannedLayers"
  subprocess.run([sys.executable, "-c", code], check=True)
