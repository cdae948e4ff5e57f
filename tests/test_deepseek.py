"""Latent attention and the DeepSeek-V3 layer: numbers against a formula, caches of latents, policies, its family."""
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack import hf
from linen_stack.models import rope
from linen_stack.models.deepseek import DEEPSEEK_V3, DeepseekLayer
from linen_stack.models.mla import MLA
from linen_stack.models.moe import total_loss
from linen_stack.tags import equations, tagged_names

from tests import interpret
from tests.reference import assert_close

EMBED, HEADS, BATCH, SEQ = 10, 3, 2, 7
SIZES = dict(num_heads=HEADS, kv_rank=8, nope_dim=5, rope_dim=4, value_dim=6)
YARN = dict(rope_type="yarn", factor=6.0, original_max_position_embeddings=8, beta_fast=4, mscale=0.8,
            mscale_all_dim=1.4)
VARIANTS = {
    "direct": {},
    "low_rank": dict(q_rank=7),
    "halves": dict(rope_interleaved=False, rope_theta=50.0),
    "yarn": dict(rope_scaling=YARN, q_rank=3),
    "yarn_without_mscale": dict(rope_scaling={k: v for k, v in YARN.items() if "mscale" not in k}),
    "wide_latent": dict(kv_rank=40),
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
LAYER = dict(embed=EMBED, q_rank=7, **SIZES)
EXPERTS = dict(num_experts=6, hidden=8, top_k=2, router="sigmoid", score_bias=True, groups=3, top_groups=2, scale=1.5,
               shared_hidden=8)


@functools.partial(jax.jit, static_argnums=0, static_argnames="mutable")
def run(static, variables, *args, mutable=False, **kwargs):
  return static.module.apply(variables, *args, mutable=mutable, **kwargs)


class Static:
  """A module that has dicts among its attributes, as a static argument."""

  def __init__(self, module):
    self.module = module


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def variables_of(module, *args):
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), *args))
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    values = rng.uniform(0.5, 1.5, leaf.shape) if path[-1].key == "scale" else 0.4 * rng.normal(size=leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree_util.tree_map_with_path(fill, {"params": shapes["params"]})


def make(**options):
  module, x = MLA(**{**SIZES, **options}), normal(1, BATCH, SEQ, EMBED)
  return module, variables_of(module, x), x


def formula(params, x, *, num_heads, kv_rank, nope_dim, rope_dim, value_dim, q_rank=None, rope_theta=10000.0,
            rope_scaling=None, rope_interleaved=True, positions=None, mask=None):
  """Latent attention in float64 numpy, one query and head at a time, keys and values made for each of them."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = np.asarray(x, np.float64)
  batch, seq, _ = x.shape
  norm = lambda y, scale: y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale
  positions = np.broadcast_to(np.arange(seq) if positions is None else positions, (batch, seq))
  mask = np.broadcast_to(True if mask is None else mask, (batch, num_heads, seq, seq))
  rates, factor = rope.frequencies(rope_dim, rope_theta, rope_scaling)

  def turn(y, position):  # planes as complex numbers
    z = y[0::2] + 1j * y[1::2] if rope_interleaved else y[:rope_dim // 2] + 1j * y[rope_dim // 2:]
    z = z * np.exp(1j * position * rates) * factor
    return np.concatenate([z.real, z.imag])

  scale = (nope_dim + rope_dim) ** -0.5
  if (rope_scaling or {}).get("mscale_all_dim"):
    scale *= (0.1 * rope_scaling["mscale_all_dim"] * np.log(rope_scaling["factor"]) + 1) ** 2
  out = np.zeros((batch, seq, num_heads, value_dim))
  for b, n, t in np.ndindex(batch, num_heads, seq):
    h = x[b, t]
    if q_rank:
      h = norm(h @ p["query_a"]["kernel"], p["query_norm"]["scale"])
    query = h @ p["query_b" if q_rank else "query"]["kernel"][:, n]
    seen = [s for s in range(t + 1) if mask[b, n, t, s]]
    scores, values = [], []
    for s in seen:
      kv = x[b, s] @ p["kv_a"]["kernel"]
      expanded = norm(kv[:kv_rank], p["kv_norm"]["scale"]) @ p["kv_b"]["kernel"][:, n]
      score = query[:nope_dim] @ expanded[:nope_dim]
      score += turn(query[nope_dim:], positions[b, t]) @ turn(kv[kv_rank:], positions[b, s])
      scores.append(score * scale)
      values.append(expanded[nope_dim:])
    weights = np.exp(np.array(scores) - max(scores))
    out[b, t, n] = weights / weights.sum() @ np.array(values)
  return np.einsum("bshd,hde->bse", out, p["out"]["kernel"])


def close(a, b, tolerance=1e-5):
  np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Latent attention


@variants
def test_attention_is_its_formula_and_steps_with_a_cache_equal_the_whole(options):
  module, variables, x = make(**options)
  static, expected = Static(module), formula(variables["params"], x, **{**SIZES, **options})
  y, no_cache = run(static, variables, x)
  close(y, expected)
  assert no_cache is None
  cache, outputs = module.init_cache(BATCH, SEQ + 2), []
  assert {name: part.shape for name, part in cache.items()} == {
      "latent": (BATCH, SEQ + 2, module.kv_rank), "rotary_key": (BATCH, SEQ + 2, 4), "index": ()}
  for part in (slice(0, 4), slice(4, 5), slice(5, 7)):
    y, cache = run(static, variables, x[:, part], kv_cache=cache)
    outputs.append(y)
    assert cache["index"] == part.stop and cache["index"].dtype == jnp.int32
  close(jnp.concatenate(outputs, 1), expected)
  assert not cache["latent"][:, SEQ:].any()


def test_mask_and_positions():
  module, variables, x = make(q_rank=7)
  mask = (normal(2, BATCH, HEADS, SEQ, SEQ) > 0) | jnp.eye(SEQ, dtype=bool)
  positions = jnp.array([[3, 4, 5, 0, 1, 2, 9], [0, 1, 2, 3, 4, 5, 6]])
  expected = formula(variables["params"], x, **SIZES, q_rank=7, mask=mask, positions=positions)
  close(run(Static(module), variables, x, mask, positions)[0], expected)
  cache, outputs = module.init_cache(BATCH, SEQ), []
  for part in (slice(0, 6), slice(6, 7)):
    y, cache = run(Static(module), variables, x[:, part], mask[:, :, part], positions[:, part], cache)
    outputs.append(y)
  close(jnp.concatenate(outputs, 1), expected)


@pytest.mark.parametrize("kv_rank, absorbed", [(8, True), (40, False)])
def test_few_new_tokens_expand_no_cached_ones(kv_rank, absorbed):
  """Above some number of tokens, products with latents, which are wide, cost more than expanding them."""
  module, variables, x = make(kv_rank=kv_rank)
  length = 50

  def shapes(seq):
    call = lambda x, cache: module.apply(variables, x, kv_cache=cache)
    jaxpr = jax.make_jaxpr(call)(jnp.zeros((BATCH, seq, EMBED)), module.init_cache(BATCH, length)).jaxpr
    return {var.aval.shape for eqn in equations(jaxpr) for var in eqn.outvars}

  expanded = (BATCH, length, HEADS, 5 + 6)
  assert expanded not in shapes(1)
  assert (expanded in shapes(7)) != absorbed


def test_overflow_of_a_cache():
  module, variables, x = make()
  cache = module.init_cache(BATCH, SEQ - 1)
  with pytest.raises(ValueError, match="room for 6 tokens and holds 0; 7 more do not fit"):
    jax.eval_shape(lambda x: module.apply(variables, x, kv_cache=cache), x)
  cache["index"] = jnp.array(5, jnp.int32)
  y, _ = run(Static(module), variables, x[:, 5:], kv_cache=cache)  # the index is not known while tracing
  assert np.isnan(y).all()


def test_a_cache_of_another_kind():
  module, variables, x = make()
  for cache, error, message in (
      ({"key": 1, "value": 2, "index": 0}, TypeError, "must be a dict of latent, rotary_key and index"),
      (MLA(**{**SIZES, "kv_rank": 9}).init_cache(BATCH, SEQ), ValueError, "this layer and batch need [2, length, 8]")):
    with pytest.raises(error, match=re.escape(message)):
      jax.eval_shape(lambda x, cache=cache: module.apply(variables, x, kv_cache=cache), x)


def test_low_precision():
  module, _, x = make(dtype=jnp.bfloat16, q_rank=7)
  variables = variables_of(module, x)
  y, _ = run(Static(module), variables, x)
  cached, cache = run(Static(module), variables, x, kv_cache=module.init_cache(BATCH, SEQ, jnp.bfloat16))
  assert y.dtype == cached.dtype == cache["latent"].dtype == jnp.bfloat16
  expected = formula(variables["params"], x, **SIZES, q_rank=7)
  assert np.abs(np.asarray(y, np.float32) - expected).max() < 0.05 * np.abs(expected).max()
  assert np.abs(np.asarray(cached, np.float32) - expected).max() < 0.05 * np.abs(expected).max()


# The layer


def layer_and_variables(**options):
  layer, x = DeepseekLayer(**LAYER, **options), normal(3, BATCH, SEQ, EMBED)
  return layer, variables_of(layer, x), x


ATTENTION_TAGS = {"decoder_layer_input", "query_wa_proj", "mla_q", "query_proj", "kv_wa_proj", "mla_kv", "key_proj",
                  "value_proj", "context", "out_proj", "attention_out"}


@pytest.mark.parametrize("options, tags", [
    (dict(mlp=8), ("mlpwi_0", "mlpwi_1", "mlpwo")),
    (dict(moe={**EXPERTS, "shared_hidden": None}), ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_routing")),
], ids=["dense", "moe"])
def test_tags_and_logical_axes(options, tags):
  layer, variables, x = layer_and_variables(**options)
  jaxpr = jax.make_jaxpr(layer.apply)(variables, x).jaxpr
  names = [eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name"]
  assert sorted(names) == sorted([*ATTENTION_TAGS, *tags]) and tagged_names(jaxpr) == {*ATTENTION_TAGS, *tags}
  boxed = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
  for leaf in jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)):
    assert isinstance(leaf, nn.LogicallyPartitioned) and len(leaf.names) == leaf.value.ndim and all(leaf.names)


def test_dropout_is_on_both_parts_and_off_when_deterministic():
  layer, variables, x = layer_and_variables(mlp=8, dropout=0.5)
  np.testing.assert_array_equal(run(Static(layer), variables, x),
                                run(Static(DeepseekLayer(**LAYER, mlp=8)), variables, x))
  drop = jax.jit(lambda variables: layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(0)}))
  for silent in ("attention", "feed_forward"):
    params = {**variables["params"], silent: jax.tree.map(jnp.zeros_like, variables["params"][silent])}
    added = drop({"params": params}) - x
    assert 0.2 < float((added == 0).mean()) < 0.8


def tiny(remat="full", **fields):
  config = dict(
      model_type="deepseek_v3", vocab_size=13, hidden_size=EMBED, intermediate_size=12, moe_intermediate_size=6,
      num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
      n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3,
      first_k_dense_replace=1, aux_loss_alpha=0.1)
  return hf.model_from_config({**config, **fields}, remat=remat)


TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 13, (BATCH, 5)), jnp.int32)


@pytest.mark.parametrize("preset", ls.RematPolicy.presets())
def test_every_preset_finds_its_names(preset):
  for fields in ({}, dict(q_lora_rank=None, first_k_dense_replace=0), dict(first_k_dense_replace=4)):
    model = tiny(preset, **fields)
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)  # raises where none of a preset's names is tagged


def test_a_name_that_only_other_layers_tag():
  model = tiny(ls.RematPolicy(save=["kv_proj"]))
  with pytest.raises(ValueError, match="'kv_proj'"):
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)


def test_gradients_with_losses_are_equal_under_all_policies():
  variables = variables_of(tiny(), TOKENS)

  def of(remat):
    model = tiny(remat)

    def loss(params):
      logits, state = model.apply({"params": params}, TOKENS, mutable=["losses"])
      balance = total_loss(state["losses"])
      return -jax.nn.log_softmax(logits)[..., 0].mean() + balance, balance

    return interpret.value_and_grad(loss, has_aux=True)(variables["params"])

  none = of("none")
  (_, balance), grads = none
  assert 3 * 0.5 < balance / 0.1 < 3 * 4  # three layers with four experts
  assert jnp.abs(grads["layers"]["feed_forward"]["router"]["kernel"]).max() > 1e-3
  assert not grads["layers"]["feed_forward"]["router"]["bias"].any()
  for remat in ("full", "minimal", "minimal_offloaded"):
    assert_close(of(remat), none)


# The family


def test_plan_of_the_published_model():
  model = hf.model_from_config({"model_type": "deepseek_v3"})
  dense, moe = model.stack.plan
  assert (dense.length, moe.length, model.vocab, model.embed) == (3, 58, 129_280, 7168)
  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 671_026_419_200
  assert shapes[moe.name]["feed_forward"]["experts"]["wo"].value.shape == (58, 256, 2048, 7168)


def test_tensors_of_experts_and_of_further_layers():
  leaves = hf.mapping(tiny())
  leaf = leaves["layers/feed_forward/experts/wi_1"]
  assert leaf.shape == (3, 4, EMBED, 6) and leaf.tensor_shape == (6, EMBED)
  assert [(row.tensor, row.index[:2]) for row in leaf.rows[4:6]] == [
      ("model.layers.2.mlp.experts.0.up_proj.weight", (1, 0)), ("model.layers.2.mlp.experts.1.up_proj.weight", (1, 1))]
  ignored = DEEPSEEK_V3.ignored({"num_hidden_layers": 61, "num_nextn_predict_layers": 2})
  matches = [name for name in (f"model.layers.{i}.shared_head.norm.weight" for i in (6, 60, 61, 62, 63, 610))
             if any(re.fullmatch(pattern, name) for pattern in ignored)]
  assert matches == ["model.layers.61.shared_head.norm.weight", "model.layers.62.shared_head.norm.weight"]


@pytest.mark.parametrize("fields, message", [
    (dict(num_key_value_heads=1), "num_key_value_heads is 1 and num_attention_heads 2; latent attention has as many"),
    (dict(attention_bias=True), "attention_bias is True, which the deepseek_v3 layers here cannot follow"),
    (dict(scoring_func="softmax"), "scoring_func is 'softmax'"),
    (dict(topk_method="group_limited_greedy"), "topk_method is 'group_limited_greedy'"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config: quantised checkpoints are not read"),
    (dict(sliding_window=4), "layer 0 is 'sliding' by the config; deepseek_v3 has no such layers"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; what deepseek_v3 rotates is qk_rope_head_dim"),
    (dict(first_k_dense_replace=5), "first_k_dense_replace is 5, but there are 4 layers"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not available"),
    (dict(n_group=3), "num_experts 4 is not a multiple of groups 3"),
])
def test_configs_that_the_layers_cannot_follow(fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    hf.mapping(tiny(**fields))


def model_of(*specs, **options):
  plan = ls.Plan.from_layers(specs)
  return ls.models.LanguageModel(ls.StackedDecoder(plan), vocab=11, embed=EMBED, **options)


DENSE = ls.LayerSpec(DeepseekLayer, "dense", **LAYER, mlp=8)
MOE = ls.LayerSpec(DeepseekLayer, "moe", **LAYER, moe=EXPERTS)


def changed(spec, **kwargs):
  return ls.LayerSpec(spec.cls, spec.name, **{**spec.kwargs, **kwargs})


@pytest.mark.parametrize("model, message", [
    (lambda: model_of(MOE, DENSE), "layer 0 has mlp=None"),
    (lambda: model_of(DENSE, changed(DENSE, mlp=9)), "layer 1 has mlp=9"),
    (lambda: model_of(MOE, changed(MOE, moe={**EXPERTS, "top_k": 1})), "layer 1 has moe=MoE"),
    (lambda: model_of(changed(MOE, moe={**EXPERTS, "router": "softmax"})), "layer 0 has moe=MoE"),
    (lambda: model_of(changed(MOE, moe={**EXPERTS, "shared_hidden": 9})), "layer 0 has moe=MoE"),
    (lambda: model_of(DENSE, changed(MOE, kv_rank=9)), "layer 1 has kv_rank=9"),
    (lambda: model_of(DENSE, norm_eps=1e-5), "norm_eps of its layers is 1e-06, not 1e-05"),
])
def test_models_that_no_config_describes(model, message):
  with pytest.raises(ValueError, match=f"deepseek_v3: {re.escape(message)}"):
    hf.mapping(model())


def test_a_model_made_by_hand_is_described():
  moe = {key: value for key, value in EXPERTS.items() if key != "scale"}  # at its default
  model = model_of(DENSE, DENSE, changed(MOE, moe=moe, dropout=0.1), changed(MOE, moe={**moe, "normalize": True}))
  config = DEEPSEEK_V3.config_of(model)
  expected = dict(
      num_hidden_layers=4, first_k_dense_replace=2, intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2,
      moe_intermediate_size=8, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.0, n_group=3,
      topk_group=2, q_lora_rank=7, kv_lora_rank=8, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6)
  assert {key: config[key] for key in expected} == expected
  again = hf.model_from_config(config)
  assert DEEPSEEK_V3.config_of(again) == config
  assert {path: leaf.tensor_shape for path, leaf in hf.mapping(again).items()}.items() >= {
      "final_norm/scale": (EMBED,), "lm_head/kernel": (11, EMBED)}.items()


# Bad input


@pytest.mark.parametrize("options, error, message", [
    (dict(embed=0), ValueError, "DeepseekLayer: embed must be at least 1, not 0"),
    (dict(mlp=None), ValueError, "DeepseekLayer: give mlp, a width, or moe"),
    (dict(moe=EXPERTS), ValueError, "and not both"),
    (dict(mlp=0), ValueError, "DeepseekLayer: mlp must be at least 1, not 0"),
    (dict(mlp=None, moe={**EXPERTS, "top_k": 7}), ValueError, "MoE: top_k 7 is more than"),
    (dict(mlp=None, moe={**EXPERTS, "experts": 7}), TypeError, "experts"),
    (dict(kv_rank=0), ValueError, "MLA: kv_rank must be at least 1, not 0"),
    (dict(q_rank=1.5), TypeError, "MLA: q_rank must be an int, not 1.5"),
    (dict(rope_dim=3), ValueError, "MLA: the rotary embedding needs an even number of features, not 3"),
    (dict(rope_scaling={"rope_type": "yarm"}), ValueError, "MLA: rope_type 'yarm' is not available; did you mean"),
    (dict(rope_theta=0), ValueError, "MLA: rope_theta must be above 0, not 0"),
    (dict(dropout=1.0), ValueError, "DeepseekLayer: dropout must be at least 0 and below 1, not 1.0"),
])
def test_sizes_are_checked_on_construction(options, error, message):
  with pytest.raises(error, match=re.escape(message)):
    DeepseekLayer(**{**LAYER, "mlp": 8, **options})


def test_input_of_another_width():
  layer, variables, _ = layer_and_variables(mlp=8)
  with pytest.raises(ValueError, match=re.escape("DeepseekLayer takes [batch, seq, embed=10], not (2, 3, 8)")):
    jax.eval_shape(lambda: layer.apply(variables, jnp.zeros((2, 3, 8))))
