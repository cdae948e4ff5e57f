"""Random plans in every layout, against the loop: outputs, gradients, caches, sown losses, batch statistics, keys."""
import functools

from flax import linen as nn
import hypothesis
from hypothesis import HealthCheck, given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from tests import interpret
from tests.reference import A, PLANS, assert_close, layers_of, loop, make_variables

X = jax.random.normal(jax.random.key(0), (2, 4))


class Kind(nn.Module):
  """A layer with parameters, batch statistics, a cache and sown losses; `kind` changes structure and arithmetic."""

  kind: int = 0

  @nn.compact
  def __call__(self, x, state=None):
    gain = self.param("gain", nn.initializers.normal(1.0), ())
    kernel = self.param("kernel", nn.initializers.normal(0.3), (4, 4 + self.kind))
    h = jnp.tanh(x @ kernel)[:, :4] * (1 + gain)
    mean = self.variable("batch_stats", "mean", jnp.zeros, (4,))
    count = self.variable("cache", "count", jnp.zeros, (self.kind + 1,))
    h = h - 0.1 * mean.value
    if not self.is_initializing():
      if self.is_mutable_collection("batch_stats"):
        mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
      if self.is_mutable_collection("cache"):
        count.value = count.value + h.sum()
    self.sow("losses", "aux", (h ** 2).mean())
    if state is None:
      return x + h
    return x + h + state["s"], {"s": state["s"] * 2 + h.mean()}


KINDS = [ls.LayerSpec(Kind, name=f"k{i}", kind=i) for i in range(4)]


@st.composite
def segments(draw, name):
  block = []
  for kind in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
    block += [KINDS[kind]] * draw(st.integers(1, 3))
  if len(block) > 1 and len(set(block)) == 1:
    block = block[:1]
  return ls.Segment(name, tuple(block), draw(st.integers(1, max(1, min(4, 12 // len(block))))))


@st.composite
def plans(draw):
  parts = [draw(segments(f"s{i}")) for i in range(draw(st.integers(1, 3)))]
  plan = ls.Plan.of(*parts)
  while plan.num_layers > 24:
    parts.pop()
    plan = ls.Plan.of(*parts)
  return plan


LAYOUTS = [dict(), dict(scan=False), dict(inner="unroll"), dict(param_axis=1), dict(remat="none", param_axis=-1),
           dict(barrier="loop"), dict(remat=ls.RematPolicy(carry="offload")), dict(offload_params=0), dict(unroll=2)]


def check_plan(plan, layout):
  stack = ls.StackedDecoder(plan, **layout)
  axis, scan = layout.get("param_axis", 0), layout.get("scan", True)
  variables = make_variables(stack, X)
  layers = layers_of(jax.device_get(variables), plan, axis, scan)
  states = [{"s": jnp.full((), 0.1 * i)} for i in range(plan.num_layers)]
  mutable = ["batch_stats", "cache", "losses"]

  def of_stack(params):
    (y, new), out = stack.apply({**variables, "params": params}, X, ls.per_layer(states), mutable=mutable)
    return (y ** 2).sum() + sum(map(jnp.sum, jax.tree.leaves(out["losses"]))), (y, new, out)

  def of_loop(params):
    y, outs = loop(plan, [{**layer, "params": p} for layer, p in zip(layers, params)], X, mutable=mutable,
                   per_layer={"state": states})
    out = [dict(state) for _, state in outs]
    return (y ** 2).sum() + sum(sum(layer["losses"]["aux"]) for layer in out), (y, [new for new, _ in outs], out)

  (value, (y, new, out)), grads = jax.device_get(interpret.value_and_grad(of_stack, has_aux=True)(variables["params"]))
  want, want_grads = interpret.value_and_grad(of_loop, has_aux=True)([layer["params"] for layer in layers])
  assert_close((value, (y, new, layers_of(out, plan, axis, scan))), want)
  grads = [layer["params"] for layer in layers_of({"params": grads}, plan, axis, scan)]
  assert_close(grads, want_grads, rtol=1e-6)


@pytest.mark.parametrize("seed", range(8))  # parts, so that they spread over workers
def test_random_plans_in_all_layouts_equal_the_loop(seed):
  @hypothesis.seed(seed)
  @settings(max_examples=26, deadline=None, database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
  @given(plans(), st.sampled_from(LAYOUTS))
  def check(plan, layout):
    check_plan(plan, layout)

  check()


X8 = jax.random.normal(jax.random.key(0), (3, 8))


@functools.lru_cache(maxsize=None)
def initial(plan_name):
  return jax.jit(ls.StackedDecoder(PLANS[plan_name]).init)(jax.random.key(5), X8)


@pytest.mark.parametrize("layout", [dict(param_axis=1), dict(param_axis=-1), dict(scan=False), dict(inner="unroll"),
                                    dict(remat="none"), dict(remat="minimal_offloaded"), dict(barrier="loop")], ids=str)
@pytest.mark.parametrize("plan_name", ["homogeneous", "cycle and remainder"])
def test_one_key_gives_the_same_bits_in_every_layout(plan_name, layout):
  plan = PLANS[plan_name]
  stack = ls.StackedDecoder(plan, **layout)
  mine = jax.jit(stack.init)(jax.random.key(5), X8)
  axis, scan = layout.get("param_axis", 0), layout.get("scan", True)
  want = layers_of(initial(plan_name), plan)
  got = layers_of(mine, plan, axis, scan)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert [str(p) for p, _ in jax.tree_util.tree_leaves_with_path(got)] == [
      str(p) for p, _ in jax.tree_util.tree_leaves_with_path(want)]


class ShowKeys(nn.Module):
  """Sows the key of each stream that it is given, and draws one twice."""

  @nn.compact
  def __call__(self, x):
    for stream in ("dropout", "unheard_of"):
      self.sow("keys", stream, jnp.stack([jax.random.key_data(self.make_rng(stream)) for _ in range(2)]))
    return x


SHOW = ls.LayerSpec(ShowKeys, name="show")
OTHER = ls.LayerSpec(ShowKeys, name="other")
KEY_PLAN = ls.Plan.homogeneous(SHOW, 1, "first") + ls.Plan.cycle([SHOW, SHOW, OTHER], 8)


def keys_of(layout, shared=()):
  stack = ls.StackedDecoder(KEY_PLAN, shared_rngs=shared, **layout)
  rngs = {"dropout": jax.random.key(1), "unheard_of": jax.random.key(2)}
  out = stack.apply({}, X, rngs=rngs, mutable=["keys"])[1]
  return [{s: np.asarray(v[0]) for s, v in layer["keys"].items()}
          for layer in layers_of(out, KEY_PLAN, 0, layout.get("scan", True))]


@pytest.mark.parametrize("layout", [dict(), dict(scan=False), dict(inner="unroll"), dict(remat="none"),
                                    dict(barrier="loop")], ids=str)
def test_every_layer_has_keys_of_its_own_and_they_are_the_same_in_every_layout(layout):
  keys = keys_of(layout)
  for stream in ("dropout", "unheard_of"):
    drawn = {tuple(row) for layer in keys for row in layer[stream]}
    assert len(drawn) == 2 * KEY_PLAN.num_layers
  jax.tree.map(np.testing.assert_array_equal, keys, keys_of({}))


@pytest.mark.parametrize("layout", [dict(), dict(scan=False), dict(inner="unroll"), dict(remat="none")], ids=str)
def test_shared_streams_give_one_key_to_all_layers_of_all_segments(layout):
  keys = keys_of(layout, shared=("dropout",))
  assert len({layer["dropout"].tobytes() for layer in keys}) == 1
  assert len({layer["unheard_of"].tobytes() for layer in keys}) == KEY_PLAN.num_layers
  jax.tree.map(np.testing.assert_array_equal, [k["unheard_of"] for k in keys], [k["unheard_of"] for k in keys_of({})])


@pytest.mark.parametrize("remat", ["none", "full", "minimal", "minimal_offloaded"])
@pytest.mark.parametrize("scan", [True, False])
def test_dropout_masks_do_not_depend_on_the_policy(remat, scan):
  plan = ls.Plan.homogeneous(ls.LayerSpec(A.cls, dropout=0.5), 3)
  params = jax.jit(ls.StackedDecoder(plan).init)(jax.random.key(0), X8)["params"]

  def loss(params, stack):
    y = stack.apply({"params": params}, X8, deterministic=False, rngs={"dropout": jax.random.key(9)})
    return (y ** 2).sum()

  grad = lambda fn, params: interpret.value_and_grad(fn)(params)[1]
  want = grad(lambda p: loss(p, ls.StackedDecoder(plan, remat="none")), params)
  own = jax.jit(ls.StackedDecoder(plan, scan=scan).init)(jax.random.key(0), X8)["params"]
  got = grad(lambda p: loss(p, ls.StackedDecoder(plan, remat=remat, scan=scan)), own)
  assert_close([layer["params"] for layer in layers_of({"params": got}, plan, 0, scan)],
               [layer["params"] for layer in layers_of({"params": want}, plan)], rtol=1e-6)
