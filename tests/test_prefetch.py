"""Layers whose parameters are fetched while the layer before computes: the numbers, what is kept, and what is fetched when."""
import functools
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pytest

import linen_stack as ls
from linen_stack import prefetch
from linen_stack.models.moe import MoE
from linen_stack.tags import equations
from tests import interpret, test_mesh_layouts as layouts
from tests.reference import A, B, PLANS, assert_close, make_variables
from tests.test_placement import Busy, loss_of, on_host, params_of, placed, products, programs_in, stack_of

X = jax.random.normal(jax.random.key(0), (3, 8))
CASES = {
    "none": ("cycle", dict(remat="none")),
    "full": ("cycle and remainder", dict(remat="full")),
    "minimal": ("cycle", dict(remat="minimal")),
    "offloaded": ("homogeneous", dict(remat=ls.RematPolicy("minimal_offloaded", carry="offload"))),
    "prefix": ("prefix", dict(remat={"dense": "full", "layers": "none"})),
    "unrolled": ("homogeneous", dict(unroll=2)),
    "inner unrolled": ("cycle", dict(inner="unroll")),
}


def count(program, name):
  """How often a program runs an operation on a matrix or more."""
  times = lambda eqn: eqn.params["length"] if eqn.primitive.name == "scan" else 1
  of_name = lambda eqn: eqn.primitive.name == name and eqn.outvars[0].aval.ndim > 1
  return sum(of_name(eqn) + times(eqn) * sum(count(inner, name) for inner in programs_in(eqn.params))
             for eqn in program.eqns)


@pytest.mark.parametrize("case", CASES)
def test_gradients_residuals_and_products_are_those_without(case):
  plan_name, options = CASES[case]
  params, results = placed(stack_of(plan_name), params_of(plan_name)), []
  for ahead in (False, True):
    loss = loss_of(stack_of(plan_name, **options, prefetch=ahead))
    values = interpret.value_and_grad(loss)(params)
    kept = sum(row.bytes for row in ls.inspect.residuals(loss, params).rows)
    results.append((jax.device_get(values), kept, products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)))
  assert_close(results[1][0], results[0][0])
  assert results[1][1] <= results[0][1] and results[1][2] == results[0][2]


def test_a_compiled_program_gives_the_same_numbers():
  params = placed(stack_of("prefix"), params_of("prefix"))
  results = [jax.jit(jax.value_and_grad(loss_of(stack_of("prefix", prefetch=ahead))))(params) for ahead in (False, True)]
  assert on_host(results[1][1]) == on_host(params) != set()  # gradients come back to where the parameters are
  assert_close(*map(jax.device_get, results))


@pytest.mark.parametrize("remat", ["none", "full", "minimal"])
@pytest.mark.parametrize("length", [2, 5])
def test_each_layer_is_fetched_once_forward_and_once_backward(length, remat):
  stack = ls.StackedDecoder(ls.Plan.homogeneous(B, length), remat=remat, offload_params=0, prefetch=True)
  params = nn.unbox(make_variables(stack, X))["params"]
  matrices = sum(x.ndim > 2 for x in jax.tree.leaves(params))
  params = placed(stack, params)
  loss = loss_of(stack)
  fetched = lambda fn: count(jax.make_jaxpr(fn)(params).jaxpr, "device_put")
  # Its gradient goes to the host once.
  assert (fetched(loss), fetched(jax.grad(loss))) == (matrices * length, 3 * matrices * length)


def test_dropout_arguments_and_collections():
  plan = ls.Plan.homogeneous(ls.LayerSpec(Busy, "busy"), 1, "first") + ls.Plan.homogeneous(ls.LayerSpec(Busy, "busy"), 3)
  mutable = ["batch_stats", "cache", "intermediates"]
  results = []
  for ahead in (False, True):
    stack = ls.StackedDecoder(plan, offload_params=0, prefetch=ahead)
    variables = make_variables(stack, X)
    params = placed(stack, nn.unbox(variables.pop("params")))

    def loss(params, x, stack=stack, variables=variables):
      y, changed = stack.apply({"params": params, **variables}, x, mutable=mutable)
      return (y ** 2).sum() + sum(map(jnp.sum, jax.tree.leaves(changed["intermediates"]))), changed

    results.append(interpret.run(jax.value_and_grad(loss, (0, 1), has_aux=True), params, X))
    Busy.traces = 0
    jax.make_jaxpr(lambda x: stack.apply({"params": params, **variables}, x, mutable=mutable))(X)
    assert Busy.traces == 2
  assert_close(*map(jax.device_get, results))


def test_keys_masks_and_shared_arguments():
  """Dropout draws the same masks; a mask that all layers see gets the sum of its gradients."""
  dropped = ls.LayerSpec(A.cls, "dropped", **{**A.kwargs, "dropout": 0.5})
  mask, results = jnp.linspace(0.5, 1.5, 8), []
  for ahead in (False, True):
    stack = ls.StackedDecoder(ls.Plan.homogeneous(dropped, 3), remat="full", offload_params=0, prefetch=ahead)
    params = placed(stack, nn.unbox(make_variables(stack, X))["params"])

    def loss(params, x, mask, stack=stack):
      keys = {"dropout": jax.random.key(1)}
      return (stack.apply({"params": params}, x, mask, deterministic=False, rngs=keys) ** 2).sum()

    results.append(interpret.run(jax.value_and_grad(loss, (0, 1, 2)), params, X, mask))
  assert_close(*map(jax.device_get, results))


def test_weights_and_what_is_made_of_them_alone_are_not_kept():
  """Not even in another dtype, under a policy that keeps everything."""
  weights = placed_matrices(4, 6)
  body = lambda x, w: (jnp.sin(x @ w.astype(jnp.bfloat16) * jnp.cos(jnp.arange(6.))), None)
  scan = lambda weights, x: prefetch.scan(body, x, weights, prefetch_all, length=4)[0].sum()
  x = jnp.ones((3, 6))
  program = jax.make_jaxpr(jax.grad(scan))(weights, x).jaxpr
  stacked = {var.aval.shape for eqn in program.eqns if eqn.primitive.name == "scan" for var in eqn.outvars}
  assert (4, 3, 6) in stacked  # what the sine needs
  of_weights = [(eqn, var) for eqn in program.eqns if eqn.primitive.name == "scan" for var in eqn.outvars
                if var.aval.shape == (4, 6, 6)]
  assert len(of_weights) == 1  # the gradient


def placed_matrices(length, width):
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  return jax.device_put(jax.random.normal(jax.random.key(0), (length, width, width)), host)


def prefetch_all(path, leaf):
  return prefetch.Source()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_states_that_are_no_floats_and_results_of_each_layer(length):
  weights = placed_matrices(length, 4)
  scale = jnp.float32(1.5)

  def body(state, x):
    (i, y), (w, b) = state, x
    y = jnp.tanh(y @ w + b) * scale
    return (i + 1, y), {"index": i, "sum": y.sum()}

  def loss(scan, weights, b, x):
    (i, y), ys = scan(body, (jnp.int32(0), x), (weights, b), length)
    return (y ** 2).sum() + (ys["sum"] ** 2).sum(), (i, ys["index"])

  one_of = lambda path, leaf: prefetch.Source() if path[0].idx == 0 else None
  ahead = lambda body, state, xs, length: prefetch.scan(body, state, xs, one_of, length=length)
  moved = lambda x: jax.device_put(x, jax.memory.Space.Device)
  plain = lambda body, state, xs, length: jax.lax.scan(lambda s, x: body(s, (moved(x[0]), x[1])), state, xs, length=length)
  args = weights, jnp.linspace(-1.0, 1.0, length * 4).reshape(length, 4), jnp.ones((2, 4))
  results = [interpret.value_and_grad(functools.partial(loss, scan), has_aux=True)(*args) for scan in (plain, ahead)]
  assert_close(*map(jax.device_get, results))


def test_weights_that_are_split_over_devices_are_gathered_ahead():
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  at = lambda *axes: NamedSharding(mesh, P(*axes))
  whole, own = at(), at("data")
  constrain = jax.lax.with_sharding_constraint
  source = prefetch.Source(lambda row: constrain(row, whole), lambda gradient: constrain(gradient, own))
  weights = jax.device_put(jax.random.normal(jax.random.key(0), (3, 8, 8)), at(None, "data"))
  x = jax.device_put(jnp.ones((4, 8)), at("data"))
  loops = {"plain": functools.partial(jax.lax.scan, length=3),
           "ahead": functools.partial(prefetch.scan, source=lambda path, leaf: source, length=3)}
  results = {}
  for name, loop in loops.items():
    loss = lambda weights, x, loop=loop: (loop(lambda x, w: (jnp.tanh(x @ w), None), x, xs=weights)[0] ** 2).sum()
    results[name] = jax.jit(jax.value_and_grad(loss))(weights, x)
  assert results["ahead"][1].sharding.is_equivalent_to(weights.sharding, 3)
  assert_close(*map(jax.device_get, results.values()))


def stack_with(plan="homogeneous", **options):
  return ls.StackedDecoder(PLANS[plan], **{"prefetch": True, "offload_params": True, **options})


@pytest.mark.parametrize("make, error, words", [
    (lambda: stack_with(offload_params=False, scan=False), ValueError, "with scan=False there is none"),
    (lambda: stack_with(prefetch="yes"), TypeError, "prefetch must be True or False, not 'yes'"),
    (lambda: stack_with(remat=ls.RematPolicy(every=2)), ValueError, "segment 'layers' has every=2"),
    (lambda: stack_with(remat=ls.RematPolicy(levels=(2, 2))), ValueError, r"segment 'layers' has levels=\(2, 2\)"),
    (lambda: stack_with("one layer"), ValueError, "no segment of the plan is one .*set prefetch=False"),
    (lambda: ls.scan(lambda layer, x: (x, None), 4, source=prefetch_all, reverse=True), ValueError, "not with reverse"),
    (lambda: ls.static_unroll(lambda layer, x: (x, None), 4, source=prefetch_all), TypeError, "takes no source"),
])
def test_what_cannot_be(make, error, words):
  with pytest.raises(error, match=words):
    make()


# Split over devices -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_layers_that_are_split_as_the_batch_are_gathered_ahead():
  """Without `prefetch` some are gathered in the step that needs them."""
  bodies, others = (ls.inspect.overlap(layouts.check("flat", layouts.RULES, prefetch=ahead)) for ahead in (True, False))
  assert len(bodies) == 2 and all(transfer.ahead for body in bodies for transfer in body.transfers)
  assert not all(transfer.ahead for body in others for transfer in body.transfers)


@pytest.mark.parametrize("length", [2, 5])
def test_each_layer_is_gathered_once_forward_and_once_backward(length):
  """And gathered layers are not kept. Of a layer alone there is no loop."""
  stack = ls.StackedDecoder(ls.Plan.homogeneous(layouts.A, length), prefetch=True)
  boxed = make_variables(stack, layouts.X)["params"]
  params = nn.unbox(boxed)
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules(layouts.RULES):
    programs = [jax.make_jaxpr(fn(layouts.loss(stack)))(params, layouts.X).jaxpr for fn in (lambda fn: fn, jax.grad)]
    of_boxes = jax.make_jaxpr(layouts.loss(stack))(boxed, layouts.X).jaxpr
  # Three parameters, and one constraint of the layer's own that its recomputation and its transpose repeat.
  assert [count(program, "sharding_constraint") for program in programs] == [4 * length, (3 + 1 + 3 + 2 + 3) * length]
  assert count(of_boxes, "sharding_constraint") == 4 * length  # boxes do not split again what was gathered
  stacked = [var.aval.shape for eqn in programs[1].eqns if eqn.primitive.name == "scan" for var in eqn.outvars]
  assert stacked.count((length, layouts.EMBED, layouts.HIDDEN)) == 1  # the gradient


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_runs_of_a_repeat_are_laid_out_by_the_names_of_their_axes(axis):
  """Wherever the axis that counts their layers is: two of them at once, whole but for tensor parallelism."""
  stack = ls.StackedDecoder(layouts.PLANS["nested"], prefetch=True, param_axis=axis)
  params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), layouts.X))["params"]
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules(layouts.RULES):
    program = jax.make_jaxpr(lambda params: stack.apply({"params": params}, layouts.X))(params).jaxpr
  laid_out = {(eqn.outvars[0].aval.shape, tuple(eqn.params["sharding"].spec)) for eqn in equations(program)
              if eqn.primitive.name == "sharding_constraint"}
  for shape, spec in (((layouts.EMBED, layouts.HIDDEN), (None, "tensor")), ((layouts.HIDDEN, layouts.EMBED), ("tensor", None))):
    at = axis % 3
    assert ((*shape[:at], 2, *shape[at:]), (*spec[:at], None, *spec[at:])) in laid_out


def test_layers_on_explicit_axes_are_gathered_ahead():
  """By what arrays say of themselves; axes of the batch are those of the hidden states. The layer has no constraints."""
  stack = ls.StackedDecoder(ls.Plan.homogeneous(A, 3), prefetch=True)
  params = nn.unbox(make_variables(stack, X))["params"]
  want = jax.jit(jax.value_and_grad(lambda params: layouts.loss(stack.clone(prefetch=False))(params, layouts.X)))(params)
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    split = lambda x: NamedSharding(mesh, P(None, "data") if x.ndim == 3 else P())
    placed_params = jax.device_put(params, jax.tree.map(split, params))
    x = jax.device_put(layouts.X, NamedSharding(mesh, P("data")))
    got = jax.jit(jax.value_and_grad(layouts.loss(stack)))(placed_params, x)
  assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), got[1], placed_params))
  assert_close(jax.device_get(got), jax.device_get(want))


def test_nothing_to_fetch():
  """Parameters on the device, whatever they were meant to be, without a mesh, and on one whose rules split no parameter."""
  params, tiny = params_of("homogeneous"), ls.StackedDecoder(layouts.PLANS["flat"], prefetch=True)
  words = "prefetch=True has nothing to fetch: .*ls.host_shardings.*nn.logical_axis_rules.* or set prefetch=False"
  for offload in (0, False):
    with pytest.raises(ValueError, match=words):
      jax.eval_shape(stack_with(offload_params=offload).apply, {"params": params}, X)
  shapes = nn.unbox(jax.eval_shape(tiny.init, jax.random.key(0), layouts.X))  # which only makes what there will be to fetch
  for rules in ((), (("batch", "data"), ("embed", "fsdp"), ("mlp", "tensor")), (("embed", "fsdp"),)):
    with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules(rules), pytest.raises(ValueError, match=words):
      jax.eval_shape(tiny.apply, shapes, layouts.X)
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules([("batch", "dta"), *layouts.RULES[1:]]):
    with pytest.raises(ValueError, match="'batch' goes over 'dta', which is no axis of the mesh"):
      jax.eval_shape(tiny.apply, shapes, layouts.X)
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules((*layouts.RULES, ("layers", "data"))):
    words = "layers are split over mesh axis data.*cannot be fetched ahead.*map that axis to None"
    with pytest.raises(ValueError, match=words):
      jax.eval_shape(tiny.apply, shapes, layouts.X)
  host = placed(stack_with(offload_params=0), params)
  assert jax.eval_shape(stack_with(offload_params=0).apply, {"params": host}, X).shape == X.shape


def test_gradients_are_checked_with_parameters_where_they_are_made():
  assert ls.inspect.check_gradients(stack_with(offload_params=0), X).ok


def test_parameters_on_the_device_that_were_to_be_in_host_memory():
  """Results are right, so that it is a warning."""
  stack, params = ls.StackedDecoder(PLANS["homogeneous"], offload_params=0), params_of("homogeneous")
  with pytest.warns(UserWarning, match="offload_params=0, but the parameters are on the device.*host_shardings") as told:
    jax.eval_shape(lambda params: stack.apply({"params": params}, X), params)
  assert [warning.filename for warning in told] == [__file__]  # the caller's
  gathers = ls.StackedDecoder(layouts.PLANS["flat"], offload_params=0, prefetch=True)
  shapes = nn.unbox(jax.eval_shape(gathers.clone(offload_params=False).init, jax.random.key(0), layouts.X))
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules(layouts.RULES), pytest.warns(UserWarning, match="stay there"):
    jax.eval_shape(gathers.apply, shapes, layouts.X)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.eval_shape(stack.apply, {"params": placed(stack, params)}, X)
    jax.eval_shape(stack.init, jax.random.key(0), X)


def test_experts_are_left_to_their_layer():
  """It gathers them itself; what all tokens share is gathered ahead."""
  moe = ls.LayerSpec(MoE, num_experts=4, hidden=8, top_k=2, shared_hidden=4)
  stack, x = ls.StackedDecoder(ls.Plan.homogeneous(moe, 3), prefetch=True), jnp.ones((8, 3, 8))
  params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), x))["params"]
  with jax.set_mesh(layouts.mesh()), nn.logical_axis_rules((*layouts.RULES, ("expert", None))):
    program = jax.make_jaxpr(lambda params: stack.apply({"params": params}, x))(params).jaxpr
  assert count(program, "all_gather") == 3 * 3 and count(program, "sharding_constraint") >= 3 * 3
  laid_out = [eqn.invars[0].aval.shape for eqn in equations(program) if eqn.primitive.name == "sharding_constraint"]
  assert not [shape for shape in laid_out if len(shape) == 3 and shape[0] == 4]
