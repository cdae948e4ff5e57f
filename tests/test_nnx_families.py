"""The five families of reference layers on the NNX side: one tree, the same numbers, and a layer that is NNX all through."""
import collections
import functools
import json
import pathlib

from flax import linen as nn
from flax import nnx, serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack.models import DecoderLayer, nnx_decoder
from linen_stack.tags import equations
from tests import interpret
from tests.nnx_reference import abstract, filled, loss_of, params_of
from tests.reference import assert_close, loop

GOLDEN = pathlib.Path(__file__).parent / "golden"
pytestmark = pytest.mark.usefixtures("float64")  # rounding would hide what differs, the more in layers that amplify it
FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "qwen3_next"]


@functools.lru_cache(maxsize=None)
def linen(family):
  """The plan of a family's small model, and its hidden states: [batch, seq, embed]."""
  model = ls.hf.model_from_config(json.loads((GOLDEN / family / "config.json").read_text()), param_dtype=jnp.float64)
  return model.stack.plan, jax.ShapeDtypeStruct((2, 4, model.embed), jnp.float64)


def native(plan):
  """The plan with the reference layer that is NNX itself."""
  spec = lambda spec: ls.LayerSpec(nnx_decoder.DecoderLayer, spec.label, **spec.kwargs)
  return ls.Plan(tuple(ls.Segment(s.name, tuple(map(spec, s.block)), s.length) for s in plan))


def shapes(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def check_tree(model, plan, x, **options):
  want, got = jax.eval_shape(ls.StackedDecoder(plan, **options).init, jax.random.key(0), x), ls.nnx.variables(model)
  assert jax.tree.structure(got) == jax.tree.structure(want)  # paths, and in the boxes the names of axes
  assert shapes(got) == shapes(want)


@pytest.mark.parametrize("family, options", [
    *((family, {"param_axis": 1}) for family in FAMILIES), ("llama", {"scan": False})], ids=str)
def test_trees_of_other_layouts(family, options):
  plan, x = linen(family)
  check_tree(abstract(ls.nnx.bridged(plan, x), **options), plan, x, **options)


def primitives(fn, *args):
  """How often each operation is in a program; remat with the flag that keeps it apart from the code around it."""
  name = lambda eqn: f"{eqn.primitive.name} {eqn.params['prevent_cse']}" if "prevent_cse" in eqn.params else eqn.primitive.name
  return collections.Counter(map(name, equations(jax.make_jaxpr(fn)(*args).jaxpr)))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_have_one_tree_and_one_program(family):
  plan, x = linen(family)
  model, stack = abstract(ls.nnx.bridged(plan, x), remat="minimal"), ls.StackedDecoder(plan, remat="minimal")
  check_tree(model, plan, x)
  x, params = numbers(x), params_of(filled(model))
  linen_loss = lambda params: (stack.apply({"params": params}, x) ** 2).sum()
  theirs, ours = primitives(linen_loss, params), primitives(loss_of(model, x), params)
  # What is more is the rng stream of each traced layer: a key that nobody uses, and its counter.
  assert ours - theirs == dict.fromkeys(("add", "random_fold_in"), plan.traced_layers) and not theirs - ours


def numbers(x):
  return jnp.asarray(np.random.default_rng(1).normal(size=x.shape), x.dtype)


def unstacked(params, stack):
  params = jax.tree.map(np.asarray, params)
  return [layer["params"] for layer in ls.convert.unstack({"params": params}, stack)]


def step(params, grads):
  """The first of Adam's, with an epsilon that does not blow up rounding errors of gradients near zero."""
  return jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * np.asarray(g) / (np.abs(g) + 1), params, grads)


def check(plan, nnx_plan, x, rtol, **options):
  """NNX side, Linen side and a loop over layers: outputs, gradients, parameters after a step."""
  model, stack = filled(abstract(nnx_plan, **options)), ls.StackedDecoder(plan, **options)
  x, params = numbers(x), params_of(model)
  layers = lambda tree: unstacked(tree, stack)
  linen_loss = lambda params: (stack.apply({"params": params}, x) ** 2).sum()
  loop_loss = lambda layers: (loop(plan, [{"params": p} for p in layers], x)[0] ** 2).sum()
  value, grads = interpret.value_and_grad(loss_of(model, x))(params)
  linen_value, linen_grads = interpret.value_and_grad(linen_loss)(params)
  loop_value, loop_grads = interpret.value_and_grad(loop_loss)(layers(params))
  assert_close((value, grads), (linen_value, linen_grads), rtol)
  assert_close(step(params, grads), step(params, linen_grads), rtol)
  assert_close((value, layers(grads)), (loop_value, loop_grads), rtol)
  assert_close(layers(step(params, grads)), step(layers(params), loop_grads), rtol)


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(family, marks=pytest.mark.slow)
                                                  for family in ("deepseek_v3", "qwen3_next"))])
def test_values_gradients_and_a_step_of_bridged_layers(family):
  plan, x = linen(family)
  check(plan, ls.nnx.bridged(plan, x), x, 1e-11, remat="minimal")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_native_layer_is_its_linen_twin(family):
  plan, x = linen(family)
  check_tree(abstract(native(plan)), plan, x)
  check(plan, native(plan), x, 1e-11, remat="minimal_with_context")


def test_the_native_layer_takes_all_that_its_twin_does():
  arguments = dict(embed=8, mlp=16, num_heads=4, num_kv_heads=2, window=3, qk_norm=True, qkv_bias=True, out_bias=True,
                   mlp_bias=True, dropout=0.5)
  twin, layer = DecoderLayer(**arguments), nnx_decoder.DecoderLayer(**arguments, rngs=nnx.Rngs(0))
  filled(layer)
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  mask, positions = jnp.tri(5, dtype=bool)[::-1][None, None], jnp.arange(5)[None] + 3
  variables = nn.unbox(ls.nnx.variables(layer))
  def both(call):
    ours = interpret.run(lambda x: call(nnx.merge(*nnx.split(layer), copy=True), x), x)
    assert_close(ours, interpret.run(lambda x: call(twin.bind(variables, rngs={"dropout": jax.random.key(0)}), x), x), 1e-5)

  both(lambda layer, x: layer(x, mask, positions))
  both(lambda layer, x: layer(x, kv_cache=layer.init_cache(2, 6)))
  drops = lambda x: [nnx.merge(*nnx.split(layer), copy=True)(x, deterministic=flag) for flag in (True, False)]
  assert not jnp.allclose(*interpret.run(drops, x))
  with pytest.raises(TypeError, match="no argument 'decode'.*kv_cache"):
    nnx_decoder.DecoderLayer(**arguments, decode=True, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="not a multiple"):
    nnx_decoder.DecoderLayer(embed=8, mlp=16, num_heads=3, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="embed=8"):
    layer(x[..., :4])


def test_a_checkpoint_of_one_side_loads_into_the_other():
  plan, x = linen("llama")
  model, other, x = filled(abstract(native(plan))), filled(abstract(native(plan)), seed=1), numbers(x)
  stored = serialization.msgpack_serialize(nn.unbox(ls.nnx.variables(model)))
  variables = serialization.msgpack_restore(stored)
  ls.nnx.update(other, variables)
  assert_close(params_of(other), params_of(model), 0)
  run = lambda fn: interpret.run(fn, variables["params"])
  assert_close(run(loss_of(other, x)), run(lambda params: (ls.StackedDecoder(plan).apply({"params": params}, x) ** 2).sum()))
