"""Qwen3-Next: plans and trees of its configs, policies, caches, padding, bad input. Checkpoints are in test_hf.py."""
import functools
import pathlib
import re

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack import hf
from linen_stack.models import DecoderLayer, LanguageModel, Qwen3NextLayer, generate, init_cache
from linen_stack.models.families import family_of
from linen_stack.models.family import layer_modules
from linen_stack.models.moe import total_loss
from linen_stack.presets import PRESETS
from linen_stack.stacked import is_box, value
from linen_stack.tags import tagged_names
from tests import interpret
from tests.reference import assert_close, layers_of, loop

MIDDLE_OF_CYCLE = pathlib.Path(__file__).parent / "golden_more" / "qwen3_next_middle"
NET = dict(key_heads=1, heads=2, key_dim=4, value_dim=2)
ATTENTION = dict(num_heads=2, num_kv_heads=1, head_dim=8, rope_fraction=0.5)
MOE = dict(num_experts=3, hidden=6, top_k=2, shared_hidden=4, shared_gate=True)
# With a small norm_eps, what rounding leaves of short vectors grows beyond what tests compare.
LINEAR = ls.LayerSpec(Qwen3NextLayer, "linear", embed=8, delta_net=NET, moe=MOE, norm_eps=1e-2)
FULL = ls.LayerSpec(Qwen3NextLayer, "full", embed=8, attention=ATTENTION, moe=MOE, norm_eps=1e-2)
DENSE = ls.LayerSpec(Qwen3NextLayer, "dense", embed=8, delta_net=NET, mlp=12, norm_eps=1e-2)
L, F = "linear_attention", "full_attention"


def config(**fields):
  """A tiny config."""
  return {**dict(
      model_type="qwen3_next", vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=4,
      num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
      linear_key_head_dim=4, linear_value_head_dim=2, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6,
      shared_expert_intermediate_size=4), **fields}


def changed(spec, **kwargs):
  return ls.LayerSpec(spec.cls, spec.name, **{**spec.kwargs, **kwargs})


def shapes(module, *args):
  return jax.eval_shape(module.init, jax.random.key(0), *args)["params"]


@functools.partial(jax.jit, static_argnums=0, static_argnames="mutable")
def run(module, variables, *args, **kwargs):
  return module.apply(variables, *args, **kwargs)


def filled(module, *args, seed=0):
  """Unboxed parameters with numbers in them."""
  rng = np.random.default_rng(seed)
  return {"params": jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype),
                                 nn.unbox(shapes(module, *args)))}


# Plans and trees


# Fields of a config; the kinds of attention that follow; and, where it matters, the segments: name, layers, repeats.
CYCLE, MIDDLE = [L, L, L, F], [L, F, *[L, L, L, F] * 2, L]
CONFIGS = {
    "interval": (dict(num_hidden_layers=10), CYCLE * 2 + [L, L], [("layers", 8, 2), ("layers_remainder", 2, 2)]),
    "mid cycle": (dict(num_hidden_layers=11, layer_types=MIDDLE), MIDDLE, [
        ("layers_prefix", 1, 1), ("layers", 8, 2), ("layers_remainder", 2, 1)]),
    "starts full": (dict(num_hidden_layers=9, layer_types=[F, L, L, L] * 2 + [F]), [F, L, L, L] * 2 + [F], [
        ("layers", 8, 2), ("layers_remainder", 1, 1)]),
    "sparse step": (dict(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3]), CYCLE * 2, None),
    "dense": (dict(num_experts=0), CYCLE, None),
}
OF_LINEAR = {"qkvz/kernel": (8, 1, 16), "ba/kernel": (8, 1, 4), "conv": (4, 12), "A_log": (2,), "dt_bias": (2,),
             "norm/scale": (2,), "out/kernel": (2, 2, 8)}
OF_FULL = {"query/kernel": (8, 2, 16), "key/kernel": (8, 1, 8), "value/kernel": (8, 1, 8), "query_norm/scale": (8,),
           "key_norm/scale": (8,), "out/kernel": (2, 8, 8)}
OF_DENSE = {"wi_0/kernel": (8, 12), "wi_1/kernel": (8, 12), "wo/kernel": (12, 8)}
OF_EXPERTS = {"router/kernel": (8, 3), "experts/wi_0": (3, 8, 6), "experts/wi_1": (3, 8, 6), "experts/wo": (3, 6, 8),
              "shared/wi_0/kernel": (8, 4), "shared/wi_1/kernel": (8, 4), "shared/wo/kernel": (4, 8),
              "shared_gate/kernel": (8, 1)}


def under(name, tree):
  return {f"{name}/{path}": shape for path, shape in tree.items()}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("fields, kinds, segments", CONFIGS.values(), ids=CONFIGS.keys())
def test_no_layer_is_dropped_and_trees_are_as_the_plan_says(fields, kinds, segments, scan):
  fields = config(**fields)
  model = hf.model_from_config(fields, scan=scan)
  plan = model.stack.plan
  if segments is not None:
    assert [(s.name, s.num_layers, s.length) for s in plan] == segments
  params = shapes(model, jnp.zeros((1, 2), jnp.int32))
  for leaf in jax.tree.leaves(params, is_leaf=is_box):
    assert is_box(leaf) and len(leaf.names) == len(value(leaf).shape)
  numbered = jax.tree.map(lambda leaf: np.zeros(value(leaf).shape), params, is_leaf=is_box)
  layers = layers_of({"params": numbered}, plan, scan=scan)
  assert len(layers) == plan.num_layers == len(kinds)
  for i, (layer, kind) in enumerate(zip(layers, kinds)):
    experts = (bool(fields["num_experts"]) and (i + 1) % fields.get("decoder_sparse_step", 1) == 0
               and i not in fields.get("mlp_only_layers", []))
    paths = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(layer["params"], sep="/").items()}
    assert paths == {
        "attention_norm/scale": (8,), "feed_forward_norm/scale": (8,),
        **(under("delta_net", OF_LINEAR) if kind == L else under("attention", OF_FULL)),
        **under("feed_forward", OF_EXPERTS if experts else OF_DENSE)}, i
  tensors = [row.tensor for leaf in hf.mapping(model).values() for row in leaf.rows]
  assert len(tensors) == len(set(tensors))
  for i, kind in enumerate(kinds):
    assert f"model.layers.{i}.{'linear_attn.A_log' if kind == L else 'self_attn.q_norm.weight'}" in tensors


def test_published_sizes():
  # Qwen3-Next-80B-A3B: 80 billion parameters in 48 layers, of which two kinds are traced.
  model = hf.model_from_config(dict(
      model_type="qwen3_next", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, rope_theta=10_000_000,
      full_attention_interval=4, dtype="bfloat16"))
  assert model.stack.plan.traced_layers == 2
  leaves = jax.tree.leaves(nn.unbox(shapes(model, jnp.zeros((1, 2), jnp.int32))))
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
  assert sum(leaf.size for leaf in leaves) == 79_674_391_296


# Numbers beside those of the checkpoints


def test_padding_and_longer_sequences_are_those_of_the_reference():
  expected = np.load(MIDDLE_OF_CYCLE / "expected.npz")
  model, variables = hf.load_model(MIDDLE_OF_CYCLE)
  keep = ~expected["padding"]
  with jax.default_matmul_precision("highest"):
    logits = run(model, variables, expected["input_ids"], mask=jnp.asarray(keep)[:, None, None])
  assert not keep.all(axis=1).any()
  np.testing.assert_allclose(np.asarray(logits)[keep], expected["padded_logits"][keep], rtol=0, atol=2e-4)


def test_logits_with_caches_are_those_without():
  ids = np.load(MIDDLE_OF_CYCLE / "expected.npz")["input_ids"][:, :12]
  model, variables = hf.load_model(MIDDLE_OF_CYCLE, decode="scan")
  expected = run(model, variables, ids)
  caches, logits = init_cache(model, 2, 12), []
  assert {tuple(sorted(cache)) for cache in caches} == {("conv", "index", "recurrent"), ("index", "key", "value")}
  form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), caches)
  for start, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
    part, caches = run(model, variables, ids[:, start:end], kv_cache=caches)
    logits.append(part)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), caches) == form
  assert_close(jnp.concatenate(logits, 1), expected, 1e-4)
  assert {int(cache["index"]) for cache in caches} == {12}


PLAN = ls.Plan.cycle([DENSE, DENSE, FULL], 6)


@functools.cache
def tiny(seq=7):
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, seq, 8)), jnp.float32)
  return filled(ls.StackedDecoder(PLAN), x), x


def results(remat, variables, x):
  """The output, the load-balance loss, and the gradients of parameters and input of a scalar of both."""
  stack = ls.StackedDecoder(PLAN, remat=remat)

  def loss(variables, x):
    y, state = stack.apply(variables, x, mutable=["losses"])
    balance = total_loss(state["losses"])
    return jnp.sum(jnp.sin(y)) + balance, (y, balance)

  gradients, values = interpret.run(jax.grad(loss, argnums=(0, 1), has_aux=True), variables, x)
  return values, gradients


@functools.cache
def without_remat():
  return results("none", *tiny())


@pytest.mark.xdist_group("qwen3_next")  # one worker computes what they are compared with
@pytest.mark.parametrize("remat", ["full", "minimal"])
def test_policies_agree(remat):
  assert_close(results(remat, *tiny()), without_remat(), 1e-6)


@pytest.mark.xdist_group("qwen3_next")
def test_stack_is_a_loop_over_its_layers():
  variables, x = tiny()
  layers = layers_of(variables, PLAN)
  y, outputs = interpret.run(functools.partial(loop, PLAN, mutable=["losses"]), layers, x)
  balance = sum(total_loss(state["losses"]) for (_, state) in outputs if "losses" in state)
  assert_close((y, balance), without_remat()[0], 1e-6)
  assert ["losses" in state for _, state in outputs] == [False, False, True] * 2  # of experts alone


TAGS = ("decoder_layer_input", "context", "out_proj", "attention_out")
OF_MOE = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_routing", "mlpwi_0", "mlpwi_1", "mlpwo")


def tags_of(spec):
  layer = spec.cls(**spec.kwargs)
  return tagged_names(jax.make_jaxpr(lambda x: layer.init(jax.random.key(0), x))(jnp.zeros((1, 2, 8))).jaxpr)


@pytest.mark.parametrize("spec, tags", [
    (LINEAR, (*TAGS, *OF_MOE, "qkv_proj")),
    (FULL, (*TAGS, *OF_MOE, "query_proj", "key_proj", "value_proj")),
    (DENSE, (*TAGS, "qkv_proj", "mlpwi_0", "mlpwi_1", "mlpwo")),
], ids=["linear", "full", "dense"])
def test_tags(spec, tags):
  assert tags_of(spec) == {*tags}


def test_every_preset_saves_values_of_both_kinds_of_layers():
  tags = [tags_of(LINEAR), tags_of(FULL)]
  for name, preset in PRESETS.items():
    if preset.save or preset.offload:
      assert all(own & {*preset.save, *preset.offload} for own in tags), name


def test_initial_values():
  x = tiny()[1]  # outside of what is traced, whose values must not stay in the cache
  for spec in (DENSE, FULL):
    layer = spec.cls(**spec.kwargs)

    @jax.jit
    def start(layer=layer):
      variables = nn.unbox(layer.init(jax.random.key(0), x))
      return variables, layer.apply(variables, x)

    variables, y = start()
    for path, leaf in traverse_util.flatten_dict(variables["params"], sep="/").items():
      if path.endswith("scale"):
        assert (leaf == ("delta_net/norm" in path)).all(), path
    assert 0.1 < np.abs(y - x).mean() < 3


def test_low_precision():
  x = tiny()[1]
  for spec in (changed(LINEAR, moe=None, mlp=12), changed(FULL, moe=None, mlp=12)):  # without choices to round over
    exact = spec.cls(**spec.kwargs)
    low = exact.clone(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    variables = filled(low, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
    y = jax.jit(low.apply)(variables, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables)
    assert_close(y.astype(jnp.float32), jax.jit(exact.apply)(variables, x), 0.05)


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_gradients_compile_for_a_tpu():
  sizes = dict(embed=256, moe=dict(num_experts=4, hidden=128, top_k=2, shared_hidden=128, shared_gate=True))
  net = dict(key_heads=1, heads=2, key_dim=128, value_dim=128)
  linear = ls.LayerSpec(Qwen3NextLayer, "linear", **sizes, delta_net=net)
  full = ls.LayerSpec(Qwen3NextLayer, "full", **sizes, attention=dict(num_heads=2, num_kv_heads=1, head_dim=128))
  stack = ls.StackedDecoder(ls.Plan.cycle([linear, linear, full], 6), remat="minimal_offloaded")
  x = jax.ShapeDtypeStruct((4, 500, 256), jnp.float32)
  report = ls.inspect.memory(stack, (x,), topology="v5p:2x2x1", cache=False)
  assert report.fits and report.host > 0


# Bad input


@pytest.mark.parametrize("fields, error, message", [
    (dict(hidden_act="gelu"), ValueError, "hidden_act is 'gelu', which the qwen3_next layers here cannot follow"),
    (dict(layer_types=[L, L, "sliding_attention", F], sliding_window=4), ValueError,
     "layer 2 is 'sliding_moe' by the config; qwen3_next has no such layers"),
    (dict(layer_types=[L, F]), ValueError, "layer_types has 2 entries, but num_hidden_layers is 4"),
    (dict(full_attention_interval=2, layer_types=[L, L, L, F]), ValueError, "full_attention_interval = 2 contradicts"),
    (dict(linear_num_value_heads=3, linear_num_key_heads=2), ValueError, "heads 3 is not a multiple of key_heads 2"),
    (dict(linear_conv_kernel_dim=0), ValueError, "conv_width must be at least 1, not 0"),
    (dict(linear_key_head_dim="4"), TypeError, "'linear_key_head_dim' of the config must be int, not '4'"),
    (dict(norm_topk_prob=1), TypeError, "'norm_topk_prob' of the config must be bool, not 1"),
    (dict(num_experts_per_tok=4), ValueError, "top_k 4 is more than the 3 experts"),
    (dict(partial_rotary_factor=0.4), ValueError, "rotary embedding needs an even number of features, not 3"),
    (dict(partial_rotary_factor=1.5), ValueError, "rope_fraction must be above 0 and at most 1, not 1.5"),
    (dict(num_key_value_heads=3), ValueError, "num_heads 2 is not a multiple of num_kv_heads 3"),
    (dict(hidden_size=None), ValueError, "the field 'hidden_size' is missing"),
    (dict(mlp_only_layers=[4]), ValueError, "mlp_only_layers has layer 4, but the layers are 0 to 3"),
])
def test_configs_are_checked(fields, error, message):
  with pytest.raises(error, match=re.escape(message)):
    shapes(hf.model_from_config(config(**fields)), jnp.zeros((1, 2), jnp.int32))


@pytest.mark.parametrize("options, error, message", [
    (dict(embed=0), ValueError, "embed must be at least 1, not 0"),
    (dict(attention=ATTENTION), ValueError, "give either delta_net or attention, not delta_net="),
    (dict(delta_net=None), ValueError, "give either delta_net or attention, not delta_net=None and attention=None"),
    (dict(mlp=3), ValueError, "give either mlp or moe, not mlp=3 and moe="),
    (dict(moe=None, mlp=0.5), TypeError, "mlp must be an int, not 0.5"),
    (dict(delta_net={**NET, "key_dimm": 3}), TypeError, "key_dimm"),
    (dict(delta_net=None, attention={**ATTENTION, "head_dim": 0}), ValueError, "head_dim must be at least 1, not 0"),
])
def test_layers_are_checked_on_construction(options, error, message):
  with pytest.raises(error, match=re.escape(message)):
    Qwen3NextLayer(**{**LINEAR.kwargs, **options})


@pytest.mark.parametrize("call, error, message", [
    (dict(mask=jnp.ones((7, 7), bool)), ValueError, "mask has shape (7, 7); a gated delta net keeps no single tokens"),
    (dict(kv_cache=Qwen3NextLayer(**FULL.kwargs).init_cache(2, 7)), TypeError,
     "kv_cache must be a dict of conv, recurrent and index (see init_cache), not ['index', 'key', 'value']"),
    (dict(x=jnp.zeros((2, 7, 9))), ValueError, "takes [batch, seq, embed=8], not (2, 7, 9)"),
])
def test_arguments_are_checked(call, error, message):
  layer, x = Qwen3NextLayer(**LINEAR.kwargs), jnp.zeros((2, 7, 8))
  with pytest.raises(error, match=re.escape(message)):
    jax.eval_shape(lambda: layer.init(jax.random.key(0), **{"x": x, **call}))


def language_model(plan=ls.Plan.cycle([LINEAR, LINEAR, FULL], 6), **options):
  return LanguageModel(ls.StackedDecoder(plan), vocab=11, **{
      "embed": 8, "zero_centered_norm": True, "norm_eps": 1e-2, **options})


@pytest.mark.parametrize("plan", [
    ls.Plan.cycle([LINEAR, LINEAR, FULL], 6), ls.Plan.homogeneous(DENSE, 3), PLAN,
    ls.Plan.homogeneous(changed(LINEAR, delta_net={**NET, "chunk": 16}), 2),
    ls.Plan.homogeneous(changed(FULL, attention={**ATTENTION, "qkv_bias": True, "out_bias": True}), 2),
], ids=["cycle", "dense", "both", "chunk", "biases"])
def test_models_made_by_hand_have_a_config(plan):
  model = language_model(plan)
  fields = family_of("qwen3_next").config_of(model)
  again = hf.model_from_config(fields)
  for layer, given in zip(layer_modules(again), layer_modules(model), strict=True):
    mixer, feed_forward = given.parts()
    if given.delta_net is not None:
      mixer = mixer.clone(chunk=64)  # no part of what a config says
    assert layer.parts() == (mixer, feed_forward)
  assert family_of("qwen3_next").config_of(again) == fields


@pytest.mark.parametrize("model, message", [
    (language_model(zero_centered_norm=False), "zero_centered_norm of the model is False, not True"),
    (language_model(norm_eps=1e-5), "norm_eps of its layers is 0.01, not 1e-05"),
    (language_model(ls.Plan.from_layers([LINEAR, changed(LINEAR, delta_net={**NET, "heads": 4})])),
     "layer 0 has a part that no qwen3_next config has beside those of the other layers"),
    (language_model(ls.Plan.homogeneous(changed(FULL, attention={**ATTENTION, "window": 3}), 2)), "layer 0 has a part"),
    (language_model(ls.Plan.homogeneous(changed(FULL, moe={**MOE, "router": "sigmoid"}), 2)), "layer 0 has a part"),
    (language_model(ls.Plan.homogeneous(ls.LayerSpec(DecoderLayer, embed=8, mlp=8, num_heads=2), 2)),
     "layer 0 is a DecoderLayer, not a Qwen3NextLayer"),
])
def test_models_of_other_kinds_have_none(model, message):
  with pytest.raises(ValueError, match=message):
    family_of("qwen3_next").config_of(model)


def test_generation_goes_on_from_a_long_prompt():
  # Longer than a chunk, so that the state that goes on is that of several.
  model = hf.model_from_config(config(num_hidden_layers=2, full_attention_interval=2, num_experts=0))
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 70)))
  variables = filled(model, tokens[:, :2])
  made = generate(model, variables, tokens[:, :66], 4)
  whole = jnp.concatenate([tokens[:, :66], made], 1)
  assert (run(model, variables, whole)[:, 65:69].argmax(-1) == made).all()
