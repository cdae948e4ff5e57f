"""Per-layer arguments and results, caches, and layer indices, over every kind of segment."""
from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack.tags import equations
from tests.reference import assert_close, layers_of, make_variables

X = jnp.ones((2, 4))
KEY = jax.random.key(0)


class Counter(nn.Module):
  """Adds its index to its cache, given as an argument or kept in the collection `cache`."""

  wide: bool = False

  @nn.compact
  def __call__(self, x, cache=None, *, index):
    size = 6 if self.wide else 3
    own = self.variable("cache", "count", jnp.zeros, (size,))
    if self.is_mutable_collection("cache") and not self.is_initializing():
      own.value += index
    x = x * self.param("gain", nn.initializers.ones, ())
    return x if cache is None else (x, jax.tree.map(lambda c: c + index, cache))


LOCAL, GLOBAL = ls.LayerSpec(Counter, "local"), ls.LayerSpec(Counter, "global", wide=True)
PLANS = {
    "flat": ls.Plan.homogeneous(LOCAL, 14),
    "cycle 6, remainder 2": ls.Plan.cycle([LOCAL] * 5 + [GLOBAL], 14),
    "prefix, cycle 6, remainder 3": ls.Plan.homogeneous(GLOBAL, 2, "dense") + ls.Plan.cycle([LOCAL] * 5 + [GLOBAL], 15),
    "single layers": ls.Plan.of(ls.Segment("a", LOCAL), ls.Segment("b", GLOBAL), ls.Segment("c", (LOCAL, GLOBAL, LOCAL))),
}
MODES = [dict(), dict(decode="scan"), dict(scan=False), dict(inner="unroll"), dict(remat="none"), dict(barrier="loop")]


def stack_of(plan, **mode):
  return ls.StackedDecoder(plan, layer_index="index", **mode)


@pytest.mark.parametrize("form", ["list", "stacked", "collection"])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_each_layer_updates_its_own_cache(name, mode, form):
  plan = PLANS[name]
  stack = stack_of(plan, **mode)
  variables = make_variables(stack, X)
  wanted = [2 * i for i in range(plan.num_layers)]
  if form == "collection":
    step = jax.jit(lambda v: stack.apply(v, X, mutable=["cache"])[1])
    state = variables
    for _ in range(2):
      state = {**state, **step(state)}
    assert [int(layer["cache"]["count"][0]) for layer in layers_of(state, plan, scan=mode.get("scan", True))] == wanted
    return
  zeros = lambda *lead: {"k": jnp.zeros((*lead, 3)), "v": [jnp.zeros(lead)]}
  caches = zeros(plan.num_layers) if form == "stacked" else [zeros() for _ in range(plan.num_layers)]
  step = jax.jit(lambda v, c: stack.apply(v, X, cache=ls.per_layer(c)))
  for _ in range(2):
    y, new = step(variables, caches)
    assert jax.tree.structure(new) == jax.tree.structure(caches)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, caches)
    caches = new
  counts = [int(c["k"][0]) for c in caches] if form == "list" else [int(k) for k in caches["k"][:, 0]]
  assert counts == wanted and y.shape == X.shape


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_caches_of_different_structure_in_different_kinds_of_layer(mode):
  class Either(nn.Module):
    recurrent: bool = False

    @nn.compact
    def __call__(self, x, cache):
      assert sorted(cache) == (["state"] if self.recurrent else ["key", "value"])
      return x, jax.tree.map(lambda c: c + 1, cache)

  linear, full = ls.LayerSpec(Either, "linear", recurrent=True), ls.LayerSpec(Either, "full")
  plan = ls.Plan.cycle([linear] * 3 + [full], 10)
  caches = [{"key": jnp.zeros((4, 2)), "value": jnp.zeros((4, 2))} if i % 4 == 3 else {"state": jnp.zeros((2, 3, 3))}
            for i in range(10)]
  _, new = ls.StackedDecoder(plan, **mode).apply({}, X, ls.per_layer(caches))
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, caches)
  assert all((leaf == 1).all() for leaf in jax.tree.leaves(new))


class Reads(nn.Module):
  @nn.compact
  def __call__(self, x, scale, shift=None):
    y = x * scale + (0 if shift is None else shift["by"])
    return (y, (scale + 1, {"by": y.sum()})) if shift is not None else (y, None)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("plan", [ls.Plan.homogeneous(ls.LayerSpec(Reads), 5),
                                  ls.Plan.cycle([ls.LayerSpec(Reads, n) for n in "aab"], 5)], ids=["flat", "cycle"])
def test_read_only_and_several_per_layer_arguments(plan, mode):
  stack = ls.StackedDecoder(plan, **mode)
  scales, shifts = jnp.linspace(0.5, 1.5, 5), jnp.arange(5.0)
  assert_close(stack.apply({}, X, ls.per_layer(scales)), X * jnp.prod(scales))
  want, outs = X, []
  for i in range(5):
    want = want * scales[i] + shifts[i]
    outs.append((scales[i] + 1, {"by": want.sum()}))
  y, got = stack.apply({}, X, ls.per_layer(list(scales)), shift=ls.per_layer([{"by": s} for s in shifts]))
  assert_close((y, got), (want, outs))
  y, got = stack.apply({}, X, ls.per_layer(scales), ls.per_layer({"by": shifts}))
  assert_close((y, got), (want, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)))


@pytest.mark.parametrize("mode", [dict(), dict(scan=False), dict(inner="unroll")], ids=str)
def test_outputs_are_stacked_in_layer_order_over_all_segments(mode):
  plan = PLANS["prefix, cycle 6, remainder 3"]

  class Tells(nn.Module):
    wide: bool = False

    @nn.compact
    def __call__(self, x, *, index):
      return x, {"index": index * jnp.ones((2,)), "sum": x.sum()}

  retold = ls.Plan(tuple(ls.Segment(s.name, tuple(ls.LayerSpec(Tells, b.name, **b.kwargs) for b in s.block), s.length)
                         for s in plan))
  stack = ls.StackedDecoder(retold, collect_outputs=True, layer_index="index", **mode)
  y, out = stack.apply({}, X)
  assert out["index"].shape == (17, 2) and (out["index"][:, 0] == jnp.arange(17)).all()
  assert stack.clone(collect_outputs=False).apply({}, X).shape == X.shape
  with pytest.raises(ValueError, match="no layer returns"):
    ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(nn.Dense, features=4), 2), collect_outputs=True).init(KEY, X)


def test_layer_index_is_a_python_int_outside_loops():
  seen = []

  class Index(nn.Module):
    @nn.compact
    def __call__(self, x, index):
      seen.append(index)
      return x

  plan = ls.Plan.homogeneous(ls.LayerSpec(Index), 1, "first") + ls.Plan.homogeneous(ls.LayerSpec(Index), 3)
  ls.StackedDecoder(plan, layer_index="index").apply({}, X)
  assert seen[0] == 0 and isinstance(seen[0], int) and isinstance(seen[1], jax.Array)
  seen.clear()
  ls.StackedDecoder(plan, layer_index="index", scan=False).apply({}, X)
  assert seen == [0, 1, 2, 3] and all(isinstance(index, int) for index in seen)


@pytest.mark.parametrize("value, message", [
    ([jnp.zeros(3)] * 13, r"13 elements for 14 layers"),
    ([jnp.zeros(3)] * 15, r"15 elements for 14 layers"),
    (jnp.zeros((13, 3)), r"\[14, \.\.\.\] for 14 layers, found shape \(13, 3\)"),
    ({"k": jnp.zeros((14, 3)), "v": jnp.zeros(())}, r"\['v'\].*found shape \(\)"),
])
@pytest.mark.parametrize("name", ["flat", "cycle 6, remainder 2"])
def test_wrong_lengths_are_told_with_both_lengths(name, value, message):
  stack = stack_of(PLANS[name])
  with pytest.raises(ValueError, match=message):
    stack.apply({}, X, cache=ls.per_layer(value))


def test_other_bad_per_layer_arguments():
  with pytest.raises(TypeError, match="pass a list, or say stacked=True"):
    ls.per_layer((jnp.zeros((14, 3)), jnp.zeros((14, 3))))
  assert not ls.per_layer((jnp.zeros((14, 3)),), stacked=True).is_list
  stack = stack_of(PLANS["flat"], decode="scan")
  variables = make_variables(stack, X)
  for odd, what in (({"q": jnp.zeros(3)}, "structure"), ({"k": jnp.zeros(4)}, "shape"), ({"k": jnp.zeros(3, int)}, "dtype")):
    caches = [{"k": jnp.zeros(3)}] * 13 + [odd]
    with pytest.raises(ValueError, match=f"segment 'layers' need elements of one {what}.*layer 0 has .* layer 13 has"):
      stack.apply(variables, X, cache=ls.per_layer(caches))
  with pytest.raises(TypeError, match="stacked must be True, False or None, not 'yes'"):
    ls.per_layer(caches, stacked="yes")
  with pytest.raises(TypeError, match="given by layer_index and was passed as well"):
    stack.apply(variables, X, index=3)

  class Odd(nn.Module):
    wide: bool = False

    @nn.compact
    def __call__(self, x, cache):
      return x, cache if self.wide else {"other": cache}

  plan = ls.Plan.homogeneous(ls.LayerSpec(Odd), 2, "odd") + ls.Plan.homogeneous(ls.LayerSpec(Odd, wide=True), 2)
  with pytest.raises(ValueError, match=r"cannot be stacked: layer 0 \(segment 'odd'\).*layer 2 \(segment 'layers'\)"):
    ls.StackedDecoder(plan).apply({}, X, ls.per_layer(jnp.zeros((4, 2))))


@pytest.mark.parametrize("form", ["stacked", "collection"])
def test_a_stacked_cache_exists_once(form):
  """The loop carries the cache and writes it in place: donated, a step needs no second copy."""

  class KeyValue(nn.Module):
    @nn.compact
    def __call__(self, x, cache=None):
      own = self.variable("cache", "kv", jnp.zeros, (256, 64)) if cache is None else None
      old = own.value if cache is None else cache
      row = jnp.tanh(nn.Dense(64)(x))[0]
      new = jax.lax.dynamic_update_index_in_dim(old, row, 3, 0)
      x = x + (new * row).sum() * 1e-3
      if cache is None:
        own.value = new
        return x
      return x, new

  plan = ls.Plan.homogeneous(ls.LayerSpec(KeyValue), 8)
  stack, x = ls.StackedDecoder(plan, remat="none"), jnp.ones((1, 4))
  cache = jnp.zeros((8, 256, 64))
  if form == "collection":
    variables = stack.init(KEY, x)
    params, cache = variables["params"], variables["cache"]
    step = lambda params, cache: stack.apply({"params": params, "cache": cache}, x, mutable=["cache"])
  else:
    params = stack.init(KEY, x, cache=ls.per_layer(cache))["params"]
    step = lambda params, cache: stack.apply({"params": params}, x, cache=ls.per_layer(cache))
  jitted = jax.jit(step, donate_argnums=1)
  memory = jitted.lower(params, cache).compile().memory_analysis()
  extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert extra < 0.3 * 8 * 256 * 64 * 4  # a layer's slice and its update; a second copy would be 1.0
  loops = [eqn for eqn in equations(jax.make_jaxpr(step)(params, cache).jaxpr) if eqn.primitive.name == "scan"]
  stacked = [var.aval.shape for eqn in loops for var in eqn.outvars if var.aval.shape == (8, 256, 64)]
  assert len(loops) == 1 and len(stacked) == 1


def test_a_list_of_caches_is_neither_stacked_nor_copied():
  stack = stack_of(PLANS["cycle 6, remainder 2"])
  variables = make_variables(stack, X)
  caches = [jnp.zeros((7, 5)) for _ in range(14)]
  jaxpr = jax.make_jaxpr(lambda c: stack.apply(variables, X, cache=ls.per_layer(c)))(caches).jaxpr
  assert all(var.aval.shape in ((), (7, 5)) or 7 not in var.aval.shape for eqn in equations(jaxpr) for var in eqn.outvars)
  _, new = stack.apply(variables, X, cache=ls.per_layer(caches))
  assert [int(c[0, 0]) for c in new] == list(range(14))
