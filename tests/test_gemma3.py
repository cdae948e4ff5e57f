"""The Gemma 3 layer against a plain formula, its tags, caches and bad arguments; the language model around it."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack.models import LanguageModel, rope
from linen_stack.models.gemma3 import Gemma3Layer
from linen_stack.stacked import is_box
from linen_stack.tags import equations, tag_name

SIZES = dict(embed=16, mlp=24, num_heads=4, num_kv_heads=2, head_dim=6)
TAGS = ["attention_out", "context", "decoder_layer_input", "key_proj", "mlpwi_0", "mlpwi_1", "mlpwo", "out_proj",
        "query_proj", "value_proj"]
SCALING = {"rope_type": "linear", "factor": 8.0}
VARIANTS = {
    "global": dict(rope_scaling=SCALING),
    "local": dict(window=3, rope_theta=10000.0),
    "biases and a scalar": dict(attention_bias=True, query_pre_attn_scalar=20, window=2, norm_eps=1e-3),
}


def variables_of(module, x):
  """Parameters with numbers in them; compiling `init` would take longer."""
  rng = np.random.default_rng(0)
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


def make(seq=7, **options):
  """A layer, its parameters and an input."""
  layer = Gemma3Layer(**{**SIZES, **options})
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, seq, 16)), jnp.float32)
  return layer, variables_of(layer, x), x


def formula(params, x, *, window=None, query_pre_attn_scalar=6, rope_theta=1e6, rope_scaling=None, norm_eps=1e-6,
            attention_bias=False):
  """The layer in numpy, token by token."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = np.asarray(x, np.float64)
  seq = x.shape[1]

  def norm(name, y):
    scale = p[name]["scale"] if isinstance(name, str) else name
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + norm_eps) * (1 + scale)

  def project(name, y):
    q = p["attention"][name]
    return np.einsum("bte,ehd->bthd", y, q["kernel"]) + (q["bias"] if attention_bias else 0)

  def turn(y):
    rates = rope_theta ** (-np.arange(3) / 3) / (rope_scaling or {"factor": 1})["factor"]
    z = (y[..., :3] + 1j * y[..., 3:]) * np.exp(1j * np.arange(seq)[:, None, None] * rates)
    return np.concatenate([z.real, z.imag], -1)

  y = norm("attention_norm", x)
  query, key, value = project("query", y), project("key", y), project("value", y)
  query = turn(norm(p["attention"]["query_norm"]["scale"], query))
  key = turn(norm(p["attention"]["key_norm"]["scale"], key))
  context = np.zeros_like(query)
  for t in range(seq):
    first = 0 if window is None else max(0, t - window + 1)
    for head in range(4):
      scores = np.einsum("bd,bsd->bs", query[:, t, head], key[:, first:t + 1, head // 2])
      scores /= np.sqrt(query_pre_attn_scalar)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      weights /= weights.sum(-1, keepdims=True)
      context[:, t, head] = np.einsum("bs,bsd->bd", weights, value[:, first:t + 1, head // 2])
  out = p["attention"]["out"]
  y = np.einsum("bthd,hde->bte", context, out["kernel"]) + (out["bias"] if attention_bias else 0)
  x = x + norm("attention_post_norm", y)
  y, wi = norm("feed_forward_norm", x), p["feed_forward"]
  gate = y @ wi["wi_0"]["kernel"]
  gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
  return x + norm("feed_forward_post_norm", (gelu * (y @ wi["wi_1"]["kernel"])) @ wi["wo"]["kernel"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_is_its_formula(variant):
  layer, variables, x = make(**VARIANTS[variant])
  with jax.default_matmul_precision("highest"):
    out = jax.jit(layer.apply)(variables, x)
  np.testing.assert_allclose(out, formula(variables["params"], x, **VARIANTS[variant]), atol=2e-5)


@pytest.mark.parametrize("sizes", [(7,), (3, 1, 1, 2), (1,) * 7], ids=str)
def test_cached_steps_equal_the_whole_sequence(sizes):
  layer, variables, x = make(**VARIANTS["local"])
  whole = jax.jit(layer.apply)(variables, x)
  step = jax.jit(lambda x, cache: layer.apply(variables, x, kv_cache=cache))
  cache, parts, start = layer.init_cache(2, 7), [], 0
  for size in sizes:
    part, cache = step(x[:, start:start + size], cache)
    parts.append(part)
    start += size
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)


def test_tags_and_logical_axes():
  layer, variables, x = make()
  jaxpr = jax.make_jaxpr(layer.apply)(variables, x).jaxpr
  assert sorted(name for eqn in equations(jaxpr) if (name := tag_name(eqn))) == TAGS
  boxed = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
  for leaf in jax.tree.leaves(boxed, is_leaf=is_box):
    assert is_box(leaf) and len(leaf.names) == len(leaf.value.shape)


def test_fresh_norms_multiply_by_one():
  layer, _, x = make()
  norms = lambda params: [params[name]["scale"] for name in params if name.endswith("norm")]  # the rest is not computed
  params = jax.jit(lambda key: (lambda p: norms(p) + norms(p["attention"]))(nn.unbox(layer.init(key, x))["params"]))
  scales = params(jax.random.key(0))
  assert len(scales) == 6 and not any(scale.any() for scale in scales)


def test_rematerialised_stack_has_the_same_gradients():
  local, whole = (ls.LayerSpec(Gemma3Layer, name, **SIZES, **VARIANTS[name]) for name in ("local", "global"))
  plan = ls.Plan.cycle([local, whole], 4)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 16)), jnp.float32)
  variables = variables_of(ls.StackedDecoder(plan), x)

  def gradients(policy):
    stack = ls.StackedDecoder(plan, remat=policy)
    return jax.jit(jax.grad(lambda v: jnp.square(stack.apply(v, x)).sum()))(variables)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()),
               gradients("minimal"), gradients("none"))


@pytest.mark.parametrize("options, error, message", [
    (dict(num_kv_heads=3), ValueError, "num_heads 4 is not a multiple of num_kv_heads 3"),
    (dict(head_dim=5), ValueError, "needs an even number of features, not 5"),
    (dict(window=0), ValueError, "Gemma3Layer: window must be at least 1, not 0"),
    (dict(mlp=2.5), TypeError, "Gemma3Layer: mlp must be an int, not 2.5"),
    (dict(query_pre_attn_scalar=0), ValueError, "query_pre_attn_scalar must be above 0, not 0"),
    (dict(rope_scaling={"rope_type": "yarn"}), ValueError, "Gemma3Layer: rope_type 'yarn' needs factor"),
])
def test_arguments_are_checked(options, error, message):
  with pytest.raises(error, match=message):
    Gemma3Layer(**{**SIZES, **options})


def test_input_of_another_width():
  layer, variables, _ = make()
  with pytest.raises(ValueError, match="takes .batch, seq, embed=16., not"):
    layer.apply(variables, jnp.zeros((1, 2, 8)))


# The language model


def language_model(**options):
  plan = ls.Plan.homogeneous(ls.LayerSpec(Gemma3Layer, **SIZES), 1)
  return LanguageModel(stack=ls.StackedDecoder(plan), vocab=11, embed=16, **options)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_embeddings_are_scaled_and_logits_capped(tie):
  tokens = jnp.array([[1, 5, 3]])
  plain = language_model(tie_embeddings=tie, zero_centered_norm=True)
  variables = variables_of(plain, tokens)
  params = variables["params"]
  x = params["token_embed"]["embedding"][tokens] * 4
  x = jax.jit(plain.stack.apply)({"params": {"layers": params["layers"]}}, x)
  x = np.asarray(x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)) * (1 + params["final_norm"]["scale"])
  logits = x @ (params["token_embed"]["embedding"].T if tie else params["lm_head"]["kernel"])
  model = plain.clone(embed_scale=4.0, logit_softcap=2.0)
  np.testing.assert_allclose(jax.jit(model.apply)(variables, tokens), 2 * np.tanh(logits / 2), atol=1e-4)


def test_the_scale_of_embeddings_is_rounded_to_the_dtype_of_the_computation():
  tokens = jnp.arange(11)[None]
  model = language_model(embed_scale=48**0.5, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  variables = variables_of(model, tokens)
  # A layer of zeros hands on what it is given. 48 ** 0.5 is 6.928, which rounds to 6.9375.
  empty = {**variables["params"], "layers": jax.tree.map(jnp.zeros_like, variables["params"]["layers"])}
  capture = dict(capture_intermediates=lambda module, _: module.name == "layers")
  _, state = jax.jit(lambda v: model.apply(v, tokens, **capture))({"params": empty})
  given = state["intermediates"]["layers"]["__call__"][0]
  table = variables["params"]["token_embed"]["embedding"]
  np.testing.assert_array_equal(given[0], table * jnp.asarray(6.9375, jnp.bfloat16))


@pytest.mark.parametrize("options, message", [
    (dict(embed_scale=0.0), "embed_scale must be above 0 .None: without., not 0.0"),
    (dict(logit_softcap=-1.0), "logit_softcap must be above 0"),
])
def test_the_model_is_checked_on_construction(options, message):
  with pytest.raises(ValueError, match=message):
    language_model(**options)


def test_rates_of_the_formula_are_those_of_the_library():
  np.testing.assert_allclose(rope.frequencies(6, 1e6, SCALING)[0], 1e6 ** (-np.arange(3) / 3) / 8)
