"""The reference layer and the language model: numbers against explicit formulas, dtypes, caches, metadata and tags."""
import functools
import re

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linen_stack.models import DecoderLayer, LanguageModel, RMSNorm, init_cache, rope
from linen_stack.plan import LayerSpec, Plan
from linen_stack.stack import StackedDecoder
from linen_stack.tags import tagged_names

SIZES = dict(embed=16, mlp=24, num_heads=4)
BATCH, SEQ = 2, 7
AXES = {"embed", "q_heads", "kv_heads", "head_dim", "mlp", "vocab", "norm"}
TAGS = {"decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "attention_out", "out_proj",
        "mlpwi_0", "mlpwi_1", "mlpwo"}
VARIANTS = {
    "plain": {},
    "grouped": dict(num_kv_heads=2),
    "one_kv_head": dict(num_kv_heads=1, head_dim=6),
    "window": dict(window=3),
    "window_of_itself": dict(window=1),
    "qk_norm": dict(qk_norm=True),
    "no_rotary": dict(rope_theta=None),
    "all": dict(num_kv_heads=2, head_dim=6, window=2, qk_norm=True, rope_theta=100.0, norm_eps=1e-3),
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
some_variants = pytest.mark.parametrize("options", [VARIANTS["plain"], VARIANTS["all"]], ids=["plain", "all"])


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """Compiling takes nearly all the time here, and these programs are too small to gain from being optimised."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("deterministic", "mutable"))
def run(module, variables, *args, **kwargs):
  return module.apply(variables, *args, **kwargs)


def shapes(module, *args):
  """The boxed variables of a module as shapes."""
  return jax.eval_shape(module.init, jax.random.key(0), *args)


def variables_of(module, *args):
  """Unboxed variables with numbers in them: scales around 1, kernels that keep the size of what they multiply."""
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    values = rng.uniform(0.5, 1.5, leaf.shape) if path[-1].key == "scale" else 0.25 * rng.normal(size=leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree_util.tree_map_with_path(fill, nn.unbox({"params": shapes(module, *args)["params"]}))


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(x_dtype=jnp.float32, **options):
  """A layer, its parameters and an input."""
  layer, x = DecoderLayer(**{**SIZES, **options}), normal(1, BATCH, SEQ, SIZES["embed"]).astype(x_dtype)
  return layer, variables_of(layer, x), x


def formula(params, x, *, num_heads, num_kv_heads=None, window=None, qk_norm=False, rope_theta=10000.0, norm_eps=1e-6,
            mask=None, positions=None, **_):
  """The layer in float64 numpy, one query and head at a time."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = np.asarray(x, np.float64)
  batch, seq, _ = x.shape
  norm = lambda y, scale: y / np.sqrt((y**2).mean(-1, keepdims=True) + norm_eps) * scale
  positions = np.broadcast_to(np.arange(seq) if positions is None else positions, (batch, seq))
  mask = np.broadcast_to(True if mask is None else mask, (batch, num_heads, seq, seq))

  def turn(y):  # pairs of a head as complex numbers
    half = y.shape[-1] // 2
    angle = positions[:, :, None, None] * rope_theta ** (-np.arange(half) / half)
    z = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)

  att, ff = p["attention"], p["feed_forward"]
  h = norm(x, p["attention_norm"]["scale"])
  q, k, v = (np.einsum("bse,ehd->bshd", h, att[name]["kernel"]) for name in ("query", "key", "value"))
  if qk_norm:
    q, k = norm(q, att["query_norm"]["scale"]), norm(k, att["key_norm"]["scale"])
  if rope_theta is not None:
    q, k = turn(q), turn(k)
  context = np.zeros_like(q)
  for b, n, t in np.ndindex(batch, num_heads, seq):
    group = n // (num_heads // (num_kv_heads or num_heads))
    seen = [s for s in range(t + 1) if (window is None or t - s < window) and mask[b, n, t, s]]
    score = np.array([q[b, t, n] @ k[b, s, group] for s in seen]) / np.sqrt(q.shape[-1])
    weight = np.exp(score - score.max())
    context[b, t, n] = (weight / weight.sum()) @ v[b, seen, group]
  x = x + np.einsum("bshd,hde->bse", context, att["out"]["kernel"])
  h = norm(x, p["feed_forward_norm"]["scale"])
  gate, up = h @ ff["wi_0"]["kernel"], h @ ff["wi_1"]["kernel"]
  return x + (gate / (1 + np.exp(-gate)) * up) @ ff["wo"]["kernel"]


def close(a, b, tolerance=2e-5):
  np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


# Numbers


@variants
def test_layer_is_its_formula(options):
  layer, variables, x = make(**options)
  close(run(layer, variables, x), formula(variables["params"], x, **SIZES, **options))


@some_variants
def test_explicit_mask_and_positions(options):
  layer, variables, x = make(**options)
  mask = (normal(2, BATCH, 4, SEQ, SEQ) > 0) | jnp.eye(SEQ, dtype=bool)
  positions = jnp.array([[3, 4, 5, 0, 1, 2, 9], [0, 1, 2, 3, 4, 5, 6]])
  expected = formula(variables["params"], x, mask=mask, positions=positions, **SIZES, **options)
  close(run(layer, variables, x, mask, positions), expected)
  close(run(layer, variables, x, mask=mask, positions=positions), expected)


@pytest.mark.parametrize("shape", [(SEQ,), (SEQ, SEQ), (4, 1, SEQ), (BATCH, 1, 1, SEQ), (1, 1, 1, 1)])
def test_mask_broadcasts(shape):
  layer, variables, x = make(num_kv_heads=2)
  # Every token sees the first one, so that no row is empty.
  mask = jnp.ones(shape, bool) if shape[-1] == 1 else jnp.zeros(shape, bool).at[..., 0].set(True)
  full = jnp.broadcast_to(mask, (BATCH, 4, SEQ, SEQ))
  close(run(layer, variables, x, mask), run(layer, variables, x, full), 1e-7)


def test_only_earlier_tokens_are_seen():
  layer, variables, x = make()
  before = run(layer, variables, x)
  after = run(layer, variables, x.at[:, 4].add(1.0))
  np.testing.assert_array_equal(before[:, :4], after[:, :4])
  assert (jnp.abs(before[:, 4:] - after[:, 4:]).max((0, 2)) > 1e-4).all()


def test_rotary_depends_on_distance_alone():
  q, k = normal(0, 2, 1, 5, 3, 8)
  rates, _ = rope.frequencies(8, 10000.0)
  score = jax.jit(lambda start: jnp.einsum("bthd,bshd->bhts",
                                       *(rope.rotate(y, start + jnp.arange(5)[None], rates) for y in (q, k))))
  close(score(0), score(31), 1e-4)
  np.testing.assert_array_equal(rope.rotate(q, jnp.zeros((1, 5), jnp.int32), rates), q)


def test_rms_norm_of_large_low_precision_values_is_finite():
  x = jnp.full((1, 64), 3e4, jnp.float16)  # the square does not fit float16
  close(RMSNorm(dtype=jnp.float16).apply({"params": {"scale": jnp.ones(64)}}, x), np.ones((1, 64)), 1e-3)


# Dtypes and gradients


@pytest.mark.parametrize("dtype, param_dtype, x_dtype", [
    (jnp.bfloat16, jnp.float32, jnp.bfloat16),
    (jnp.float32, jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.float32),
])
def test_stream_keeps_its_dtype(dtype, param_dtype, x_dtype):
  layer, variables, x = make(x_dtype=x_dtype, dtype=dtype, param_dtype=param_dtype, num_kv_heads=2, qk_norm=True)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(param_dtype)}
  y = run(layer, variables, x)
  cached, cache = run(layer, variables, x, kv_cache=layer.init_cache(BATCH, SEQ, dtype))
  assert y.dtype == cached.dtype == x_dtype and cache["key"].dtype == dtype
  close(y, formula(variables["params"], x, num_kv_heads=2, qk_norm=True, **SIZES), 0.1)
  dots = [eqn.invars[0].aval.dtype for eqn in jax.make_jaxpr(layer.apply)(variables, x).eqns
          if eqn.primitive.name == "dot_general"]
  assert len(dots) >= 7 and set(dots) == {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@some_variants
def test_gradients_are_finite_and_reach_every_parameter(options, dtype):
  layer, variables, x = make(dtype=dtype, x_dtype=dtype, **options)
  loss = lambda params, x: jnp.square(layer.apply({"params": params}, x).astype(jnp.float32)).mean()
  for grad in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(variables["params"], x)):
    assert np.isfinite(grad).all() and np.abs(grad).max() > 0


def test_dropout():
  layer, variables, x = make(dropout=0.5)
  draw = lambda seed, **kwargs: run(layer, variables, x, rngs={"dropout": jax.random.key(seed)}, **kwargs)
  np.testing.assert_array_equal(run(layer, variables, x), draw(0, deterministic=True))
  np.testing.assert_array_equal(draw(0, deterministic=False), draw(0, deterministic=False))
  assert jnp.abs(draw(0, deterministic=False) - draw(1, deterministic=False)).max() > 0.1
  with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
    jax.eval_shape(lambda: layer.apply(variables, x, deterministic=False))


# Caches


def chunks(*sizes):
  ends = np.cumsum(sizes)
  return [slice(end - size, end) for end, size in zip(ends, sizes)]


@pytest.mark.parametrize("options, sizes", [*((options, (5, 1, 1)) for options in VARIANTS.values()),
                                            *(({}, sizes) for sizes in ((1,) * 7, (3, 4), (7,)))], ids=str)
def test_cached_steps_equal_the_whole_sequence(options, sizes):
  layer, variables, x = make(**options)
  cache, outputs = layer.init_cache(BATCH, SEQ + 2), []
  for part in chunks(*sizes):
    y, cache = run(layer, variables, x[:, part], kv_cache=cache)
    outputs.append(y)
    assert cache["index"] == part.stop and cache["index"].dtype == jnp.int32
  close(jnp.concatenate(outputs, 1), run(layer, variables, x), 1e-5)
  assert not cache["key"][:, SEQ:].any()


@some_variants
def test_cache_collection_equals_the_whole_sequence(options):
  plain, variables, x = make(**options)
  layer = plain.clone(decode=True, cache_length=SEQ)
  assert jax.tree.structure(nn.unbox(shapes(layer, x)["params"])) == jax.tree.structure(variables["params"])
  cache, outputs = jax.jit(lambda x: layer.init(jax.random.key(0), x)["cache"])(x), []
  assert set(cache) == {"cached_key", "cached_value", "cache_index"}
  assert not any(leaf.any() for leaf in jax.tree.leaves(cache))
  for part in chunks(4, 1, 2):
    y, new = run(layer, {**variables, "cache": cache}, x[:, part], mutable=("cache",))
    np.testing.assert_array_equal(y, run(layer, {**variables, "cache": cache}, x[:, part]))  # read, not written
    cache = new["cache"]
    outputs.append(y)
  assert cache["cache_index"] == SEQ
  close(jnp.concatenate(outputs, 1), run(plain, variables, x), 1e-5)


def test_given_cache_goes_before_the_collection():
  plain, variables, x = make()
  layer = plain.clone(decode=True, cache_length=SEQ)
  (_, cache), new = run(layer, variables, x, kv_cache=layer.init_cache(BATCH, SEQ), mutable=("cache",))
  assert cache["index"] == SEQ and not new


def test_mask_and_positions_with_a_cache():
  """Two sequences padded on the left: the padding is masked, and positions start after it."""
  layer, variables, x = make()
  cache = layer.init_cache(BATCH, SEQ)
  pad = jnp.array([0, 3])
  positions = jnp.maximum(jnp.arange(SEQ) - pad[:, None], 0)
  mask = (jnp.arange(SEQ) >= pad[:, None])[:, None, None]
  outputs = []
  for part in chunks(5, 1, 1):
    y, cache = run(layer, variables, x[:, part], mask, positions[:, part], cache)
    outputs.append(y)
  y = jnp.concatenate(outputs, 1)
  close(y[0], run(layer, variables, x[:1])[0], 1e-5)
  close(y[1, 3:], run(layer, variables, x[1:, 3:])[0], 1e-5)


def test_overflow_of_a_cache():
  layer, variables, x = make()
  cache = layer.init_cache(BATCH, SEQ - 1)
  with pytest.raises(ValueError, match="room for 6 tokens and holds 0; 7 more do not fit"):
    run(layer, variables, x, kv_cache=cache)
  cache["index"] = jnp.array(5, jnp.int32)
  with pytest.raises(ValueError, match="room for 6 tokens and holds 5; 2 more do not fit"):
    jax.eval_shape(lambda x: layer.apply(variables, x, kv_cache=cache), x[:, 5:])
  y, _ = run(layer, variables, x[:, 5:], kv_cache=cache)  # the index is not known here while tracing
  assert np.isnan(y).all()


# Metadata and tags


def check_axes(boxed):
  leaves = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
  assert leaves
  for leaf in leaves:
    assert isinstance(leaf, nn.LogicallyPartitioned) and len(leaf.names) == leaf.value.ndim
    yield from leaf.names


def test_every_parameter_of_the_layer_has_logical_axes():
  layer = DecoderLayer(**SIZES, num_kv_heads=2, qk_norm=True)
  params = shapes(layer, jnp.zeros((1, 2, 16)))["params"]
  assert set(check_axes(params)) == AXES - {"vocab"}
  spec = nn.get_partition_spec(params)["attention"]
  assert spec["query"]["kernel"] == jax.P("embed", "q_heads", "head_dim")
  assert spec["value"]["kernel"] == jax.P("embed", "kv_heads", "head_dim")
  assert spec["out"]["kernel"] == jax.P("q_heads", "head_dim", "embed")


def test_init_under_a_mesh_and_axis_rules():
  layer, _, x = make(num_kv_heads=2)
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.set_mesh(mesh), nn.logical_axis_rules([("embed", "data"), ("mlp", None)]):
    meshed = shapes(layer, x)
  assert jax.tree.map(jnp.shape, meshed) == jax.tree.map(jnp.shape, shapes(layer, x))


def test_every_tag_is_there_once_and_names_a_value_of_its_own():
  layer, variables, x = make(num_kv_heads=2, qk_norm=True)
  jaxpr = jax.make_jaxpr(layer.apply)(variables, x).jaxpr
  names = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "name"]
  assert sorted(eqn.params["name"] for eqn in names) == sorted(TAGS) and tagged_names(jaxpr) == TAGS
  tagged = {eqn.outvars[0] for eqn in names}
  for eqn in names:
    assert eqn.invars[0] not in tagged, f"{eqn.params['name']} tags a value that is already tagged"


# The language model


def model(tie_embeddings=False, scan=True, **options):
  plan = Plan.homogeneous(LayerSpec(DecoderLayer, **SIZES, **options), 3)
  return LanguageModel(StackedDecoder(plan, scan=scan), vocab=11, embed=16, tie_embeddings=tie_embeddings,
                       dtype=options.get("dtype", jnp.float32))


TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 11, (BATCH, SEQ)), jnp.int32)


@pytest.mark.parametrize("tie", [False, True])
def test_model_is_its_formula(tie):
  lm = model(tie, scan=False, num_kv_heads=2)
  params = variables_of(lm, TOKENS)["params"]
  layers = ["layers_0", "layers_1", "layers_2"]
  assert set(params) == {"token_embed", "final_norm", *layers} | (set() if tie else {"lm_head"})
  x = np.asarray(params["token_embed"]["embedding"], np.float64)[TOKENS]
  for name in layers:
    x = formula(params[name], x, **SIZES, num_kv_heads=2)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(params["final_norm"]["scale"], np.float64)
  head = params["token_embed"]["embedding"].T if tie else params["lm_head"]["kernel"]
  close(run(lm, {"params": params}, TOKENS), x @ np.asarray(head, np.float64), 1e-4)


@pytest.mark.parametrize("tie", [False, True])
def test_stacked_model(tie):
  lm = model(tie)
  boxed = shapes(lm, TOKENS)["params"]
  assert set(check_axes(boxed)) == AXES | {"layers"}
  params = variables_of(lm, TOKENS)["params"]
  layers = params.pop("layers")
  assert layers["attention"]["query"]["kernel"].shape == (3, 16, 4, 4)
  apart = {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(3)}
  assert set(params) == {"token_embed", "final_norm"} | (set() if tie else {"lm_head"})
  close(run(lm, {"params": {**params, "layers": layers}}, TOKENS),
        run(model(tie, scan=False), {"params": {**params, **apart}}, TOKENS), 1e-5)


def test_first_loss_is_that_of_a_guess():
  lm = model()
  logits = jax.jit(lambda: lm.apply(lm.init(jax.random.key(0), TOKENS), TOKENS))()
  assert logits.std() < 2
  loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[..., None], -1).mean()
  assert 0.5 * np.log(11) < loss < 2 * np.log(11)


@pytest.mark.parametrize("tie, dropout", [(False, 0.1), (True, 0.0)])
def test_low_precision_model_has_wide_logits_and_finite_gradients(tie, dropout):
  lm = model(tie, dtype=jnp.bfloat16, dropout=dropout)
  variables = variables_of(lm, TOKENS)

  def loss(params):
    logits = lm.apply({"params": params}, TOKENS, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert logits.dtype == jnp.float32
    return jax.nn.logsumexp(logits, -1).mean()

  for grad in jax.tree.leaves(jax.jit(jax.grad(loss))(variables["params"])):
    assert grad.dtype == jnp.float32 and np.isfinite(grad).all() and np.abs(grad).max() > 0


def test_model_with_mask_positions_and_caches():
  lm = model(num_kv_heads=2)
  variables = variables_of(lm, TOKENS)
  mask = jnp.arange(SEQ) != 2
  positions = jnp.arange(SEQ)[None] * 2
  whole = run(lm, variables, TOKENS, positions, mask)
  assert jnp.abs(whole - run(lm, variables, TOKENS)).max() > 1e-3
  caches, outputs = init_cache(lm, BATCH, SEQ), []
  for part in chunks(5, 1, 1):
    logits, caches = run(lm, variables, TOKENS[:, part], positions[:, part], mask, caches)
    outputs.append(logits)
  assert isinstance(caches, list) and [int(cache["index"]) for cache in caches] == [SEQ] * 3
  close(jnp.concatenate(outputs, 1), whole, 1e-5)


def test_cache_collection_through_a_cycle_with_a_remainder():
  def cycle(**options):
    specs = [LayerSpec(DecoderLayer, name, **SIZES, window=window, **options)
             for name, window in (("whole", None), ("near", 2))]
    return LanguageModel(StackedDecoder(Plan.cycle(specs, 5)), vocab=11, embed=16)

  lm = cycle(decode=True, cache_length=SEQ)
  params = variables_of(lm, TOKENS)
  cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(lm, TOKENS)["cache"])
  outputs = []
  for part in chunks(5, 1, 1):
    logits, new = run(lm, {**params, "cache": cache}, TOKENS[:, part], mutable=("cache",))
    cache = new["cache"]
    outputs.append(logits)
  assert cache["layers"]["near"]["cached_key"].shape == (2, BATCH, SEQ, 4, 4)
  assert cache["layers_remainder"]["cache_index"] == SEQ and (cache["layers"]["whole"]["cache_index"] == SEQ).all()
  close(jnp.concatenate(outputs, 1), run(cycle(), params, TOKENS), 1e-5)


class Plain(nn.Module):
  """A layer that takes no mask, positions or cache."""

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    return x + nn.Dense(x.shape[-1])(x)


def test_model_hands_on_only_what_is_given():
  lm = LanguageModel(StackedDecoder(Plan.homogeneous(LayerSpec(Plain), 2)), vocab=11, embed=4)
  assert run(lm, variables_of(lm, TOKENS), TOKENS).shape == (BATCH, SEQ, 11)
  with pytest.raises(TypeError, match="layer 0 .Plain. has no method init_cache"):
    init_cache(lm, 1, 4)


# Bad input


@pytest.mark.parametrize("options, error, message", [
    (dict(embed=0), ValueError, "embed must be at least 1, not 0"),
    (dict(mlp=2.5), TypeError, "mlp must be an int, not 2.5"),
    (dict(num_heads=None), TypeError, "num_heads must be an int, not None"),
    (dict(num_heads=True), TypeError, "num_heads must be an int, not True"),
    (dict(num_kv_heads=3), ValueError, "num_heads 4 is not a multiple of num_kv_heads 3"),
    (dict(num_heads=3), ValueError, "embed 16 is not a multiple of num_heads 3; give head_dim"),
    (dict(head_dim=3), ValueError, "even head_dim, not 3"),
    (dict(window=0), ValueError, "window must be at least 1, not 0"),
    (dict(dropout=1.0), ValueError, "dropout must be at least 0 and below 1, not 1.0"),
    (dict(rope_theta=0.0), ValueError, "rope_theta must be above 0"),
    (dict(decode=True), ValueError, "decode=True needs cache_length"),
    (dict(decode=True, cache_length=0), ValueError, "cache_length must be at least 1, not 0"),
])
def test_sizes_are_checked_on_construction(options, error, message):
  with pytest.raises(error, match=f"DecoderLayer: .*{re.escape(message)}"):
    DecoderLayer(**{**SIZES, **options})


@pytest.mark.parametrize("call, error, message", [
    (dict(mask=jnp.zeros((SEQ, SEQ))), TypeError, "mask must be boolean (True: attend), not float32"),
    (dict(mask=jnp.ones((SEQ, SEQ + 1), bool)), ValueError, "mask (7, 8) does not broadcast to (2, 4, 7, 7)"),
    (dict(mask=jnp.ones((1, 1, 1, 1, 1), bool)), ValueError, "does not broadcast to (2, 4, 7, 7)"),
    (dict(positions=jnp.arange(SEQ)), ValueError, "positions has shape (7,); it must be (2, 7) or (1, 7)"),
    (dict(kv_cache=[1, 2]), TypeError, "kv_cache must be a dict of key, value and index"),
    (dict(kv_cache={"key": 1}), TypeError, "not ['key']"),
    (dict(kv_cache=DecoderLayer(**SIZES).init_cache(3, SEQ)), ValueError, "need [2, length, 4, 4]"),
    (dict(kv_cache=DecoderLayer(**SIZES, num_kv_heads=2).init_cache(2, SEQ)), ValueError, "need [2, length, 4, 4]"),
    (dict(kv_cache={**DecoderLayer(**SIZES).init_cache(2, SEQ), "index": jnp.zeros(2, int)}), ValueError,
     "one integer, how many tokens the cache holds"),
    (dict(kv_cache={**DecoderLayer(**SIZES).init_cache(2, SEQ), "value": jnp.zeros((2, 9, 4, 4))}), ValueError,
     "differ in length"),
])
def test_arguments_are_checked(call, error, message):
  layer, variables, x = make()
  with pytest.raises(error, match=re.escape(message)):
    jax.eval_shape(lambda: layer.apply(variables, x, **call))


def test_input_of_another_width():
  layer, variables, _ = make()
  with pytest.raises(ValueError, match=re.escape("[batch, seq, embed=16], not (2, 3, 8)")):
    jax.eval_shape(lambda: layer.apply(variables, jnp.zeros((2, 3, 8))))


@pytest.mark.parametrize("options, message", [
    (dict(vocab=0), "vocab must be at least 1, not 0"),
    (dict(embed=-1), "embed must be at least 1, not -1"),
    (dict(stack=StackedDecoder(Plan.homogeneous(LayerSpec(DecoderLayer, **SIZES), 2, name="lm_head"))),
     "a segment is named 'lm_head'"),
])
def test_model_is_checked_on_construction(options, message):
  stack = StackedDecoder(Plan.homogeneous(LayerSpec(DecoderLayer, **SIZES), 2))
  with pytest.raises(ValueError, match=message):
    LanguageModel(**{**dict(stack=stack, vocab=11, embed=16), **options})


@pytest.mark.parametrize("tokens", [jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)])
def test_tokens_are_checked(tokens):
  with pytest.raises(TypeError, match="tokens must be integers .batch, seq."):
    shapes(model(), tokens)
