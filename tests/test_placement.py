"""Parameters in host memory: where they are placed and made, and that nothing but the place changes."""
import functools
import types

from flax import linen as nn
import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import linen_stack as ls
from linen_stack.placement import with_shardings
from tests.reference import A, B, PLANS, assert_close, make_variables

X = jax.random.normal(jax.random.key(0), (3, 8))
DEVICE = jax.memory.Space.Device


def on_host(tree):
  """The paths of what is in host memory, of arrays or shardings. Programs must know of arrays what their shardings say."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  for path, leaf in leaves:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and leaf.sharding is not None:
      known = jax.typeof(leaf).memory_space == jax.memory.Space.Host
      assert known == (leaf.sharding.memory_kind == "pinned_host"), path
  return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves
          if getattr(leaf, "sharding", leaf).memory_kind == "pinned_host"}


def stack_of(plan_name, **options):
  return ls.StackedDecoder(PLANS[plan_name], **{"offload_params": 0, **options})


@functools.lru_cache(maxsize=None)
def params_of(plan_name):
  return nn.unbox(make_variables(ls.StackedDecoder(PLANS[plan_name]), X))["params"]


def placed(stack, params):
  return jax.device_put(params, ls.host_shardings(stack, params))


def programs_in(params):
  inner = jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr)))
  return [getattr(x, "jaxpr", x) for x in inner if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]


def device_shapes(program):
  """The shapes of all values on the device in a program and the programs in it."""
  found = set()
  for eqn in program.eqns:
    found |= {var.aval.shape for var in eqn.outvars if var.aval.memory_space == DEVICE}
    found = found.union(*map(device_shapes, programs_in(eqn.params)))
  return found


def products(program):
  """How many matrix products a program makes."""
  times = lambda eqn: eqn.params["length"] if eqn.primitive.name == "scan" else 1
  return sum((eqn.primitive.name == "dot_general") + times(eqn) * sum(map(products, programs_in(eqn.params)))
             for eqn in program.eqns)


# Which leaves -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
  """A stack between other modules, flat or under a name of its own."""

  stack: nn.Module
  flat: bool = True

  def setup(self):
    self.into, self.out = nn.Dense(8), nn.Dense(1000)
    if self.flat:
      nn.share_scope(self, self.stack)

  def __call__(self, x):
    return self.out(self.stack(self.into(x)))


RUNS = ("first", "layers/a_0", "layers/b", "layers/a_1", "layers_remainder/a", "layers_remainder/b")


@pytest.mark.parametrize("prefix, flat", [("", True), ("stack/", False)])
@pytest.mark.parametrize("offload, dense", [
    (0, range(4)), (4 * 8 * 12, (2, 3)), (lambda path, leaf: path == "Dense_1/kernel" and leaf.shape == (8, 8), (1,))])
def test_what_the_stack_selects_goes_to_the_host(offload, dense, prefix, flat):
  stack = stack_of("cycle and remainder", offload_params=offload)
  variables = jax.eval_shape(Model(stack, flat).init, jax.random.key(0), X)
  want = {f"{prefix}{run}/Dense_{i}/kernel" for run in RUNS for i in dense}
  for tree in (variables["params"], nn.unbox(variables["params"])):
    shardings = ls.host_shardings(stack, tree)
    assert on_host(shardings) == want
    assert jax.tree.structure(shardings) == jax.tree.structure(nn.unbox(tree))
  assert on_host(ls.host_shardings(stack, variables)) == {f"params/{path}" for path in want}


def test_trees_like_parameters_and_leaves_outside_of_the_plan():
  stack = stack_of("cycle and remainder")
  params = nn.unbox(jax.eval_shape(Model(stack).init, jax.random.key(0), X))["params"]
  want = on_host(ls.host_shardings(stack, params))
  mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=mask))
  state = on_host(ls.host_shardings(stack, jax.eval_shape(tx.init, params)))
  assert state == {f"1/0/{moment}/{path}" for moment in ("mu", "nu") for path in want}
  # Statistics of other shapes stay where they are.
  factored = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=4).init, params)
  assert not on_host(ls.host_shardings(stack, factored))
  outside = on_host(ls.host_shardings(stack, params, select=lambda path, leaf: leaf.size > 1000))
  assert outside - want == {"out/kernel"}
  assert not on_host(ls.host_shardings(stack_of("cycle and remainder", offload_params=False), params))


def test_a_plan_stands_for_matrices_of_some_size():
  plan = ls.Plan.homogeneous(ls.LayerSpec(A.cls, width=64), 3)
  params = jax.eval_shape(ls.StackedDecoder(plan).init, jax.random.key(0), jnp.zeros((1, 64)))["params"]
  assert on_host(ls.host_shardings(plan, params)) == {"layers/Dense_0/kernel", "layers/Dense_1/kernel"}


def test_names_in_boxes_say_how_leaves_are_split():
  stack = stack_of("cycle")
  boxed = jax.eval_shape(stack.init, jax.random.key(0), X)
  mesh = jax.make_mesh((2, 2), ("data", "model"))
  rules = [("mlp", "model"), ("embed", None), ("layers", None)]
  shardings = ls.host_shardings(stack, boxed, mesh, rules=rules)["params"]["layers"]["a"]
  assert shardings["Dense_2"]["kernel"] == NamedSharding(mesh, P(None, None, None, "model"), memory_kind="pinned_host")
  assert shardings["Dense_1"]["kernel"] == NamedSharding(mesh, P(), memory_kind="pinned_host")  # without names
  assert shardings["gain"] == NamedSharding(mesh, P())
  with nn.logical_axis_rules(rules):
    assert ls.host_shardings(stack, boxed, mesh)["params"]["layers"]["a"] == shardings
  with pytest.raises(ValueError, match="its layers are split over mesh axis 'data', .* map the layer axis to None"):
    ls.host_shardings(stack, boxed, mesh, rules=[("layers", "data"), ("embed", None), ("mlp", None)])


# Values -----------------------------------------------------------------------------------------------------------------


POLICIES = {"none": "none", "full": "full", "minimal": "minimal", "minimal_offloaded": "minimal_offloaded",
            "carry": ls.RematPolicy(carry="offload"), "both": ls.RematPolicy("minimal_offloaded", carry="offload")}
CASES = {
    **{name: ("cycle and remainder", dict(remat=policy)) for name, policy in POLICIES.items()},
    "inner unrolled": ("cycle and remainder", dict(inner="unroll")),
    "inner rolled": ("cycle", dict(inner="scan", remat="minimal_offloaded")),
    "every": ("cycle", dict(remat=ls.RematPolicy(every=3))),
    "levels": ("homogeneous", dict(remat=ls.RematPolicy("minimal", levels=(2, 2)))),
    "unroll": ("homogeneous", dict(unroll=2)),
    "segments differ": ("prefix", dict(remat={"dense": "full", "layers": "none"})),
    "one layer": ("one layer", dict()),
}


def loss_of(stack):
  return lambda params: (stack.apply({"params": params}, X) ** 2).sum()


@functools.lru_cache(maxsize=None)
def wanted(plan_name):
  return jax.jit(jax.value_and_grad(loss_of(stack_of(plan_name, offload_params=False))))(params_of(plan_name))


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("minimal", "both", "inner unrolled")])
def test_values_and_gradients_are_those_of_parameters_on_the_device(case):
  plan_name, options = CASES[case]
  stack = stack_of(plan_name, **options)
  params = placed(stack, params_of(plan_name))
  loss, grads = jax.jit(jax.value_and_grad(loss_of(stack)))(params)
  assert on_host(grads) == on_host(params) != set()  # gradients come back to where the parameters are
  assert_close((loss, grads), wanted(plan_name))


def test_gradients_go_where_they_are_asked_for():
  stack = stack_of("homogeneous")
  params = placed(stack, params_of("homogeneous"))
  device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), params)
  grads = jax.jit(jax.grad(loss_of(stack)), out_shardings=device)(params)
  assert not on_host(grads)
  assert_close(grads, wanted("homogeneous")[1])


@pytest.mark.parametrize("case", CASES)
def test_fetching_costs_no_product_and_keeps_nothing_for_the_backward_pass(case):
  plan_name, options = CASES[case]
  kept, made = [], []
  for offload in (False, 0):
    stack = stack_of(plan_name, **options, offload_params=offload)
    params = placed(stack, params_of(plan_name))
    kept.append(sum(row.bytes for row in ls.inspect.residuals(loss_of(stack), params).rows))
    made.append(products(jax.make_jaxpr(jax.grad(loss_of(stack)))(params).jaxpr))
  assert kept[0] == kept[1] > 0 and made[0] == made[1] > 0


DEEP = ls.Plan.homogeneous(A, 7, "first") + ls.Plan.cycle([A, A, B], 15)  # no size of a layer is 5 or 7


@pytest.mark.parametrize("program", ["init", "gradient", "optimiser's state", "update"])
def test_no_program_has_all_layers_of_a_parameter_on_the_device(program):
  stack = ls.StackedDecoder(DEEP, offload_params=0)
  abstract = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), X))["params"]
  shardings = ls.host_shardings(stack, abstract)
  params = jax.tree.map(lambda x, sharding: jax.device_put(jnp.zeros(x.shape, x.dtype), sharding), abstract, shardings)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  state_shardings = ls.host_shardings(stack, jax.eval_shape(tx.init, abstract))
  init = ls.on_device(tx.init, stack, out_shardings=state_shardings)
  make, args = {
      "init": (stack.init, (jax.random.key(0), X)),
      "gradient": (jax.grad(loss_of(stack)), (params,)),
      "optimiser's state": (init, (params,)),
      "update": (lambda params: ls.on_device(tx.update, stack)(params, init(params), params), (params,)),
  }[program]
  stacked = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.sharding.memory_kind != "device"}
  assert stacked == {(7, 8, 8), (7, 8, 16), (7, 16, 8), (5, 2, 8, 8), (5, 2, 8, 16), (5, 2, 16, 8), (5, 8, 8), (5, 8, 12),
                     (5, 12, 8)}
  assert not stacked & device_shapes(jax.make_jaxpr(make)(*args).jaxpr)


# Making and storing -----------------------------------------------------------------------------------------------------


def test_parameters_are_made_in_host_memory():
  stacks = [stack_of("cycle and remainder", offload_params=offload) for offload in (0, False)]
  params, on_device = (nn.unbox(jax.jit(stack.init)(jax.random.key(0), X))["params"] for stack in stacks)
  assert on_host(params) == on_host(ls.host_shardings(stacks[0], params)) != set() == on_host(on_device)
  jax.tree.map(np.testing.assert_array_equal, params, on_device)


def test_parameters_are_made_split_over_a_mesh():
  stack, rules = stack_of("cycle"), [("mlp", "model"), ("embed", None), ("layers", None)]
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    boxed = jax.eval_shape(stack.init, jax.random.key(0), X)["params"]
    shardings = ls.host_shardings(stack, boxed, mesh)
    params = jax.jit(lambda key: nn.unbox(stack.init(key, X)["params"]), out_shardings=shardings)(jax.random.key(0))
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    y = jax.jit(stack.apply)({"params": params}, jax.device_put(X, NamedSharding(mesh, P())))
  one = jax.device_put(jax.device_get(params), ls.host_shardings(stack, params))
  assert_close(jax.device_get(y), jax.jit(stack.apply)({"params": one}, X))


@pytest.mark.parametrize("saved, restored", [(0, 0), (0, False), (False, 0), (0, 4 * 8 * 16)], ids=str)
def test_checkpoints_restore_into_any_placement(saved, restored, tmp_path):
  stacks = [stack_of("cycle", offload_params=offload) for offload in (saved, restored)]
  params = placed(stacks[0], params_of("cycle"))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  template = with_shardings(abstract, ls.host_shardings(stacks[1], abstract))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "it", params)
    checkpointer.wait_until_finished()
    back = checkpointer.restore(tmp_path / "it", template)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  assert on_host(back) == on_host(template) and (restored is False) == (not on_host(back))


# Mutable collections ----------------------------------------------------------------------------------------------------


class Busy(nn.Module):
  """Statistics, a cache, sown values, and a count of how often it is traced."""

  traces = 0

  @nn.compact
  def __call__(self, x):
    type(self).traces += 1
    x = x + nn.Dense(8)(nn.BatchNorm(use_running_average=False)(x))
    cache = self.variable("cache", "last", jnp.zeros, x.shape)
    cache.value = cache.value + x
    self.sow("intermediates", "mean", x.mean())
    return x


@pytest.mark.parametrize("remat", ["none", "full"])
def test_mutable_collections_are_those_of_parameters_on_the_device_from_one_trace(remat):
  busy = ls.LayerSpec(Busy, "busy")
  plan = ls.Plan.homogeneous(busy, 1, "first") + ls.Plan.cycle([busy, busy, ls.LayerSpec(Busy, "other")], 7)
  outs = []
  for offload in (False, 0):
    stack = ls.StackedDecoder(plan, remat=remat, offload_params=offload)
    variables = make_variables(stack, X)
    variables["params"] = placed(stack, variables["params"])
    apply = jax.jit(functools.partial(stack.apply, mutable=["batch_stats", "cache", "intermediates"]))
    Busy.traces = 0
    outs.append(apply(variables, X))
    assert Busy.traces == plan.traced_layers
  assert_close(outs[1], outs[0])
  sown = jax.tree.leaves(outs[1][1]["intermediates"], is_leaf=lambda x: isinstance(x, tuple))
  assert len(sown) == plan.traced_layers and all(len(values) == 1 for values in sown)


def test_lists_of_arrays_take_the_loop():
  """Layer by layer in straight-line code, the compiler would fetch the parameters of many layers at once."""

  class Counting(nn.Module):
    @nn.compact
    def __call__(self, x, count):
      return x + nn.Dense(8)(x) * count, count + 1

  counting = ls.LayerSpec(Counting, "counting")
  plan = ls.Plan.cycle([counting, counting, ls.LayerSpec(Counting, "other")], 7)
  counts = [jnp.full((), float(i)) for i in range(7)]
  results = []
  for offload in (False, 0):
    stack = ls.StackedDecoder(plan, offload_params=offload)
    apply = lambda params: stack.apply({"params": params}, X, ls.per_layer(counts))
    params = placed(stack, nn.unbox(make_variables(stack, X, ls.per_layer(counts)))["params"])
    results.append(jax.jit(apply)(params))
    program = str(jax.make_jaxpr(apply)(params))
    assert ("scan[" in program) == (offload is not False)
  assert isinstance(results[1][1], list)
  assert_close(results[1], results[0])


# What cannot be ---------------------------------------------------------------------------------------------------------


def stack_with(**options):
  return ls.StackedDecoder(PLANS["homogeneous"], **options)


@pytest.mark.parametrize("make, error, words", [
    (lambda: stack_with(offload_params=True, param_axis=1), ValueError, "needs param_axis=0, not 1.*restack"),
    (lambda: stack_with(offload_params=True, scan=False), ValueError, "saves nothing with scan=False.*set scan=True"),
    (lambda: ls.host_shardings(Model(stack_of("cycle")), {}), TypeError, "or a Plan, not Model.*model.stack"),
    (lambda: ls.host_shardings(stack_of("cycle"), {}, AbstractMesh((2,), ("x",))), TypeError, "mesh must be a jax"),
    (lambda: ls.host_shardings(stack_of("cycle"), {}, select="kernel"), TypeError, "select must be a function"),
    (lambda: ls.on_device(len, Model(stack_of("cycle"))), TypeError, "a StackedDecoder or a Plan, not Model"),
])
def test_wrong_arguments(make, error, words):
  with pytest.raises(error, match=words):
    make()


@pytest.mark.parametrize("offload, words", [
    (True, "True, matrices of at least 16 KiB a layer"), (10**6, "1000000"), (lambda path, leaf: False, "<function")])
def test_a_selection_of_nothing(offload, words):
  stack = stack_with(offload_params=offload)
  params = params_of("homogeneous")
  message = f"offload_params .{words}.* selects none of the layers' parameters: .*Dense_0/kernel.*give a number of bytes"
  for use in (lambda: ls.host_shardings(stack, params), lambda: stack.init(jax.random.key(0), X),
              lambda: stack.apply({"params": params}, X)):
    with pytest.raises(ValueError, match=message):
      use()


def test_short_vectors_that_a_tpu_cannot_fetch():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(nn.Dense, features=8, param_dtype=jnp.bfloat16), 3),
                            offload_params=lambda path, leaf: True)
  with pytest.raises(ValueError, match=r"selects 'bias', bfloat16 \[8\]: a TPU cannot .* of two axes and more"):
    stack.init(jax.random.key(0), X)


def test_a_tree_in_which_the_segments_stand_twice():
  params = params_of("homogeneous")
  with pytest.raises(ValueError, match="segments of the plan stand at encoder and at the top: which of them"):
    ls.host_shardings(stack_of("homogeneous"), {"encoder": params, **params})


def test_per_layer_arguments_in_host_memory():
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  masks, stack = jax.device_put(jnp.zeros((4, 3)), here), stack_of("homogeneous")
  for mask in (masks, [masks] * 4):
    with pytest.raises(ValueError, match="per-layer argument .*mask.* is in host memory, .* with jax.device_put"):
      stack.apply({"params": params_of("homogeneous")}, X, mask=ls.per_layer(mask))


class _Device:
  """A device without host memory."""

  platform, id, process_index, device_kind, client = "tpu", 0, 0, "none", None

  def addressable_memories(self):
    return [types.SimpleNamespace(kind="device")]


def test_devices_without_host_memory(monkeypatch):
  stack, params = stack_of("homogeneous"), params_of("homogeneous")
  mesh = jax.sharding.Mesh(np.array([_Device()]), ("data",))
  lacking = "in 'pinned_host', which tpu devices do not have; they have device; keep them on the device"
  with pytest.raises(ValueError, match=f"parameters are to be {lacking}"):
    ls.host_shardings(stack, params, mesh)
  monkeypatch.setattr(jax, "local_devices", lambda: [_Device()])
  with pytest.raises(ValueError, match=f"offload_params keeps parameters {lacking}"):
    stack_with(offload_params=True)
  policy = ls.RematPolicy("minimal_offloaded", carry="offload")
  with pytest.raises(ValueError, match="the policy offloads to .* policy.saved keeps those values on the device"):
    stack_with(remat=policy)
  assert stack_with(remat=policy.saved).policy("layers") == ls.RematPolicy("minimal")
