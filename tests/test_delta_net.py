"""The gated delta rule in its two forms, and the gated delta net, against explicit formulas in float64 numpy."""
import functools
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linen_stack.models.delta_net import GatedDeltaNet, causal_convolution, l2_normalized
from linen_stack.models.delta_rule import chunked_delta_rule, recurrent_delta_rule
from tests.reference import assert_close

SIZES = dict(key_heads=2, heads=4, key_dim=3, value_dim=5)
EMBED, BATCH = 6, 2


def rule_arguments(seq, batch=2, key_heads=2, heads=4, key_dim=5, value_dim=3, decay=1.0, seed=0):
  """Queries, keys, values, logarithms of decays, betas and a state. `decay`: the size of the strongest log decays."""
  rng = np.random.default_rng(seed)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  query, key = (unit(rng.normal(size=(batch, seq, key_heads, key_dim))) for _ in range(2))
  value = rng.normal(size=(batch, seq, heads, value_dim))
  log_decay = -decay * rng.uniform(size=(batch, seq, heads))**4  # mostly weak, some strong
  beta = rng.uniform(size=(batch, seq, heads))
  state = rng.normal(size=(batch, heads, key_dim, value_dim))
  return [jnp.asarray(x, jnp.float32) for x in (query, key, value, log_decay, beta, state)]


def rule_formula(query, key, value, log_decay, beta, state):
  """The recurrence as it is written, one token and head at a time, in float64."""
  query, key, value, log_decay, beta, state = (np.asarray(x, np.float64) for x in
                                               (query, key, value, log_decay, beta, state))
  state, out, group = state.copy(), np.zeros_like(value), value.shape[2] // key.shape[2]
  for b, t, h in np.ndindex(value.shape[:3]):
    q, k, s = query[b, t, h // group], key[b, t, h // group], state[b, h]
    s *= np.exp(log_decay[b, t, h])
    s += np.outer(k, beta[b, t, h] * (value[b, t, h] - k @ s))
    out[b, t, h] = q @ s
  return out, state


@functools.partial(jax.jit, static_argnums=0)
def results(rule, args):
  """What a rule returns, and the gradients of a scalar of all of it."""

  def scalar(args):
    out, state = rule(*args)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + jnp.sum(jnp.sin(state)), (out, state)

  gradients, values = jax.grad(scalar, has_aux=True)(args)
  return values, gradients


@functools.cache
def chunks_of(chunk):
  return functools.partial(chunked_delta_rule, chunk=chunk)


def check_forms(args, chunk, tolerance=2e-6):
  """Both forms are the formula, and the gradients of the chunked one those of the recurrence."""
  values, gradients = results(recurrent_delta_rule, args)
  expected = rule_formula(*args)
  assert_close(values, expected, tolerance)
  assert all(np.isfinite(leaf).all() for leaf in gradients)
  of_chunks = results(chunks_of(chunk), args)
  assert_close(of_chunks[0], expected, tolerance)
  assert_close(of_chunks[1], gradients, 1e-5)


# Lengths below, at, and not a multiple of the chunk.
@pytest.mark.parametrize("decay", [0.0, 2.0, 3e3])
@pytest.mark.parametrize("seq, chunk", [(1, 8), (3, 1), (8, 8), (13, 5), (70, 64)])
def test_lengths_and_decays(seq, chunk, decay):
  check_forms(rule_arguments(seq, decay=decay, seed=seq), chunk)


@pytest.mark.parametrize("heads", [(1, 1, 4, 4), (3, 3, 2, 6), (1, 4, 1, 2)], ids=str)
def test_numbers_of_heads_and_widths(heads):
  key_heads, heads, key_dim, value_dim = heads
  check_forms(rule_arguments(6, 1, key_heads, heads, key_dim, value_dim), 4)


def test_one_key_over_and_over():
  # Every token overwrites what the one before it wrote: the system within a chunk has ones everywhere.
  query, key, value, log_decay, beta, state = rule_arguments(70)
  check_forms([query, jnp.broadcast_to(key[:, :1], key.shape), value, 0 * log_decay, 0 * beta + 1, state], 64, 5e-6)


@functools.partial(jax.jit, static_argnums=0)
def compiled(rule, *args):
  return rule(*args)


@pytest.mark.parametrize("first", [recurrent_delta_rule, chunks_of(4)], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("second", [recurrent_delta_rule, chunks_of(4)], ids=["recurrent", "chunked"])
def test_a_state_goes_on_where_it_was_left(first, second):
  *tokens, state = rule_arguments(11)
  whole = rule_formula(*tokens, state)
  start, state = compiled(first, *(x[:, :6] for x in tokens), state)
  end, state = compiled(second, *(x[:, 6:] for x in tokens), state)
  assert_close((jnp.concatenate([start, end], 1), state), whole, 2e-6)


@pytest.mark.parametrize("rule", [recurrent_delta_rule, chunked_delta_rule])
def test_no_state_is_zeros_and_low_precision_is_widened(rule):
  *tokens, state = rule_arguments(9)
  rule = functools.partial(compiled, rule)
  assert_close(rule(*tokens), rule(*tokens, 0 * state), 0)
  tokens = [x.astype(jnp.bfloat16) for x in tokens]
  out, state = rule(*tokens)
  assert out.dtype == state.dtype == jnp.float32
  assert_close((out, state), rule(*(x.astype(jnp.float32) for x in tokens)), 0)


@pytest.mark.parametrize("change, message", [
    (dict(query=jnp.zeros((2, 9, 2))), "query (2, 9, 2) and value (2, 9, 4, 3) must be [batch, seq, key_heads, key_"),
    (dict(value=jnp.zeros((2, 9, 3, 3))), "heads a multiple of key_heads"),
    (dict(value=jnp.zeros((2, 9, 12))), "query (2, 9, 2, 5) and value (2, 9, 12) must be"),
    (dict(key=jnp.zeros((2, 9, 2, 4))), "key must have the shape (2, 9, 2, 5), not (2, 9, 2, 4)"),
    (dict(beta=jnp.zeros((2, 9, 2))), "beta must have the shape (2, 9, 4), not (2, 9, 2)"),
    (dict(log_decay=jnp.zeros((2, 4, 9))), "log_decay must have the shape (2, 9, 4)"),
    (dict(state=jnp.zeros((2, 4, 3, 5))), "state must have the shape (2, 4, 5, 3)"),
    (dict(chunk=0), "chunk must be at least 1, not 0"),
])
def test_shapes_of_a_rule_are_checked(change, message):
  names = ("query", "key", "value", "log_decay", "beta", "state")
  with pytest.raises(ValueError, match=re.escape(message)):
    chunked_delta_rule(**{**dict(zip(names, rule_arguments(9))), **change})


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution(width):
  rng = np.random.default_rng(0)
  x, kernel, before = rng.normal(size=(2, 5, 3)), rng.normal(size=(width, 3)), rng.normal(size=(2, width - 1, 3))
  for start in (before, None):
    padded = np.concatenate([np.zeros_like(before) if start is None else start, x], axis=1)
    expected = [[[padded[b, t:t + width, c] @ kernel[:, c] for c in range(3)] for t in range(5)] for b in range(2)]
    given = [None if a is None else jnp.asarray(a, jnp.float32) for a in (x, kernel, start)]
    y, last = causal_convolution(*given)
    assert_close(y, np.array(expected), 1e-6)
    assert_close(last, padded[:, 5:], 1e-6)
    # One token at a time, and two.
    parts, state = [], given[2]
    for part in (given[0][:, :1], given[0][:, 1:3], given[0][:, 3:]):
      y, state = causal_convolution(part, given[1], state)
      parts.append(y)
    assert_close((jnp.concatenate(parts, 1), state), (np.array(expected), padded[:, 5:]), 1e-6)


# The module


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def make(seq=9, **options):
  """A module, its parameters and an input."""
  net, x = GatedDeltaNet(**{**SIZES, **options}), normal(1, BATCH, seq, EMBED)
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    values = rng.uniform(0.5, 1.5, leaf.shape) if path[-1].key == "scale" else 0.5 * rng.normal(size=leaf.shape)
    return jnp.asarray(values, leaf.dtype)

  return net, jax.tree_util.tree_map_with_path(fill, nn.unbox(jax.eval_shape(net.init, jax.random.key(0), x))), x


@functools.partial(jax.jit, static_argnums=0)
def run(net, variables, *args, **kwargs):
  return net.apply(variables, *args, **kwargs)


def formula(params, x, *, key_heads, heads, key_dim, value_dim, norm_eps=1e-6, **_):
  """The module in float64 numpy, with each part of the fused projections taken out by its place."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x, group = np.asarray(x, np.float64), heads // key_heads
  sigmoid = lambda y: 1 / (1 + np.exp(-y))
  silu = lambda y: y * sigmoid(y)
  mixed, rates = (np.einsum("bse,ehd->bshd", x, p[name]["kernel"]) for name in ("qkvz", "ba"))
  of_key_head = lambda first, width: mixed[..., first:first + width].reshape(*x.shape[:2], -1)
  query, key = of_key_head(0, key_dim), of_key_head(key_dim, key_dim)
  values = group * value_dim
  value, gate = of_key_head(2 * key_dim, values), of_key_head(2 * key_dim + values, values)
  channels, width = np.concatenate([query, key, value], -1), len(p["conv"])
  padded = np.pad(channels, ((0, 0), (width - 1, 0), (0, 0)))
  channels = silu(sum(padded[:, i:i + x.shape[1]] * p["conv"][i] for i in range(width)))
  keys = key_heads * key_dim
  query, key = channels[..., :2 * keys].reshape(*x.shape[:2], 2, key_heads, key_dim).swapaxes(0, 2).swapaxes(1, 2)
  unit = lambda y: y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)
  value = channels[..., 2 * keys:].reshape(*x.shape[:2], heads, value_dim)
  beta = sigmoid(rates[..., :group].reshape(*x.shape[:2], heads))
  rate = rates[..., group:].reshape(*x.shape[:2], heads)
  log_decay = -np.exp(p["A_log"]) * np.log1p(np.exp(rate + p["dt_bias"]))
  state = np.zeros((x.shape[0], heads, key_dim, value_dim))
  y, _ = rule_formula(unit(query) / np.sqrt(key_dim), unit(key), value, log_decay, beta, state)
  y = y / np.sqrt((y**2).mean(-1, keepdims=True) + norm_eps) * p["norm"]["scale"]
  return np.einsum("bshd,hde->bse", y * silu(gate.reshape(y.shape)), p["out"]["kernel"])


VARIANTS = {
    "plain": {},
    "one key head": dict(key_heads=1, heads=3),
    "no groups": dict(key_heads=2, heads=2, key_dim=4, value_dim=2),
    "wide convolution": dict(conv_width=7, norm_eps=1e-2),
    "no convolution": dict(conv_width=1),
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_module_is_its_formula(options):
  net, variables, x = make(**options, chunk=4)
  y, cache = run(net, variables, x)
  assert cache is None
  assert_close(y, formula(variables["params"], x, **{**SIZES, **options}), 1e-5)


@pytest.mark.parametrize("options, parts", [
    ({}, [1] * 9), ({}, [5, 1, 1, 2]), ({}, [9]), (VARIANTS["no convolution"], [2, 6, 1]),
    (VARIANTS["wide convolution"], [1, 1, 4, 3])], ids=str)
def test_a_cache_goes_on_where_it_was_left(options, parts):
  net, variables, x = make(**options, chunk=4)
  expected, _ = run(net, variables, x)
  cache, outputs = net.init_cache(BATCH, 9), []
  for start, size in zip(np.cumsum([0, *parts]), parts):
    y, cache = run(net, variables, x[:, start:start + size], kv_cache=cache)
    outputs.append(y)
  assert_close(jnp.concatenate(outputs, 1), expected, 1e-5)
  assert int(cache["index"]) == 9


def test_cache_keeps_its_form():
  net, variables, x = make()
  for dtype in (jnp.float32, jnp.bfloat16):
    cache = net.init_cache(BATCH, 100, dtype)
    assert cache["conv"].dtype == dtype and cache["recurrent"].dtype == jnp.float32
    assert {name: leaf.shape for name, leaf in cache.items()} == {
        "conv": (BATCH, 3, 2 * 6 + 20), "recurrent": (BATCH, 4, 3, 5), "index": ()}
    _, new = jax.eval_shape(net.apply, variables, x, kv_cache=cache)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache)


def test_padding_is_as_good_as_zeros():
  net, variables, x = make(chunk=4)
  keep = np.ones((BATCH, 9), bool)
  keep[0, :3] = False
  keep[1, 5] = False
  expected, _ = run(net, variables, x * keep[..., None])
  mask = jnp.asarray(keep)[:, None, None]
  y, _ = run(net, variables, x, mask)
  assert_close(y, expected)
  # On the left, padding leaves no trace at all.
  assert_close(y[:1, 3:], formula(variables["params"], x[:1, 3:], **SIZES), 1e-5)
  # With a cache the mask is that of all tokens.
  cache, outputs = net.init_cache(BATCH, 12), []
  longer = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 3)))
  for start, end in ((0, 4), (4, 5), (5, 9)):
    y, cache = run(net, variables, x[:, start:end], longer, cache)
    outputs.append(y)
  assert_close(jnp.concatenate(outputs, 1), expected, 1e-6)
  assert np.isnan(run(net, variables, x, mask, cache)[0]).all()  # a mask for 9 tokens, and 18 are there
  for everything in (jnp.array(True), jnp.ones(9, bool)):
    assert_close(run(net, variables, x, everything)[0], run(net, variables, x)[0])


@pytest.mark.parametrize("call, error, message", [
    (dict(mask=jnp.ones((9, 9), bool)), ValueError, "mask has shape (9, 9); a gated delta net"),
    (dict(mask=jnp.ones((BATCH, 2, 1, 9), bool)), ValueError, "leave out padding, by a mask [batch or 1, 1, 1, keys]"),
    (dict(mask=jnp.ones((3, 1, 1, 9), bool)), ValueError, "such as (2, 1, 1, 9)"),
    (dict(mask=jnp.ones((1,) * 4 + (9,), bool)), ValueError, "mask has shape (1, 1, 1, 1, 9)"),
    (dict(mask=jnp.ones(8, bool)), ValueError, "mask (8,) is for 8 tokens; there are 9"),
    (dict(mask=jnp.ones(10, bool)), ValueError, "mask (10,) is for 10 tokens; there are 9"),
    (dict(mask=jnp.zeros(9)), TypeError, "mask must be boolean (False: padding), not float32"),
    (dict(kv_cache=[1]), TypeError, "kv_cache must be a dict of conv, recurrent and index (see init_cache), not list"),
    (dict(kv_cache={"key": 1, "value": 1}), TypeError, "not ['key', 'value']"),
    (dict(kv_cache=GatedDeltaNet(**SIZES).init_cache(3, 9)), ValueError, "kv_cache['conv'] has shape (3, 3, 32)"),
    (dict(kv_cache=GatedDeltaNet(**{**SIZES, "key_dim": 8, "value_dim": 1}).init_cache(2, 9)), ValueError,
     "kv_cache['conv'] has shape (2, 3, 36); this layer and batch need (2, 3, 32)"),
    (dict(kv_cache={**GatedDeltaNet(**SIZES).init_cache(2, 9), "index": jnp.array(3)}, mask=jnp.ones(9, bool)),
     ValueError, "is for 9 tokens; there are 12"),
])
def test_arguments_are_checked(call, error, message):
  net, variables, x = make()
  with pytest.raises(error, match=re.escape(message)):
    net.apply(variables, x, **call)


@pytest.mark.parametrize("options, error, message", [
    (dict(heads=3), ValueError, "heads 3 is not a multiple of key_heads 2"),
    (dict(key_dim=0), ValueError, "key_dim must be at least 1, not 0"),
    (dict(conv_width=None), TypeError, "conv_width must be an int, not None"),
    (dict(chunk=0), ValueError, "chunk must be at least 1, not 0"),
])
def test_sizes_are_checked_on_construction(options, error, message):
  with pytest.raises(error, match=f"GatedDeltaNet: {message}"):
    GatedDeltaNet(**{**SIZES, **options})


def test_low_precision():
  net, variables, x = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
  y, _ = run(net, variables, x.astype(jnp.bfloat16))
  assert y.dtype == jnp.bfloat16
  assert_close(y.astype(jnp.float32), formula(variables["params"], x, **SIZES), 0.05)


def test_initial_values_and_logical_axes():
  net, _, x = make()
  boxed = nn.meta.get_partition_spec(jax.eval_shape(net.init, jax.random.key(0), x))["params"]
  assert jax.tree.map(tuple, boxed, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)) == {
      "qkvz": {"kernel": ("embed", "kv_heads", "head_dim")}, "ba": {"kernel": ("embed", "kv_heads", "head_dim")},
      "conv": ("conv", "channels"), "A_log": ("q_heads",), "dt_bias": ("q_heads",), "norm": {"scale": ("norm",)},
      "out": {"kernel": ("q_heads", "head_dim", "embed")}}
  init = GatedDeltaNet(**{**SIZES, "heads": 400}).init
  params = jax.jit(lambda key: {name: nn.unbox(init(key, x))["params"][name] for name in ("A_log", "dt_bias", "norm")})(
      jax.random.key(0))
  assert (params["dt_bias"] == 1).all() and (params["norm"]["scale"] == 1).all()
  rates = np.exp(params["A_log"])
  assert 0 < rates.min() and 14 < rates.max() <= 16 and abs(rates.mean() - 8) < 1


def test_normalized_zero_has_a_gradient():
  gradient = jax.grad(lambda x: l2_normalized(x).sum())(jnp.zeros(3))
  assert np.isfinite(gradient).all()
