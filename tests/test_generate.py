"""Generation with caches against a forward pass that is run again over each longer prefix."""
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linen_stack.models import DecoderLayer, LanguageModel, generate, init_cache
from linen_stack.plan import LayerSpec, Plan, Segment
from linen_stack.stack import StackedDecoder
from linen_stack.tags import equations

SIZES = dict(embed=16, mlp=24, num_heads=4, num_kv_heads=2)
GLOBAL = LayerSpec(DecoderLayer, "global", **SIZES)
LOCAL = LayerSpec(DecoderLayer, "local", **SIZES, window=3, qk_norm=True)
# Caches of another shape than the body's.
DENSE = LayerSpec(DecoderLayer, **{**SIZES, "num_kv_heads": 1}, head_dim=6)
PLANS = {
    "homogeneous": Plan.homogeneous(GLOBAL, 2),
    "one_layer": Plan.homogeneous(LOCAL, 1),
    "prefix": Plan.homogeneous(DENSE, 2, name="dense") + Plan.homogeneous(LOCAL, 2),
    "cycle_and_remainder": Plan.cycle([LOCAL, LOCAL, GLOBAL], 8),
}
VOCAB = 13
PROMPT = jnp.asarray(np.random.default_rng(5).integers(0, VOCAB, (2, 5)), jnp.int32)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """Compiling takes nearly all the time here, and these programs are too small to gain from being optimised."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@functools.partial(jax.jit, static_argnums=0)
def run(lm, variables, tokens):
  return lm.apply(variables, tokens)


@functools.cache
def model(plan=PLANS["homogeneous"], **options):
  """A language model and its variables, boxed as `init` gives them."""
  lm = LanguageModel(StackedDecoder(plan, **options), vocab=VOCAB, embed=16)
  rng = np.random.default_rng(0)
  fill = lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype)
  return lm, jax.tree.map(fill, jax.eval_shape(lm.init, jax.random.key(0), PROMPT))


@pytest.mark.parametrize("plan, scan", [*((plan, True) for plan in PLANS.values()), (PLANS["prefix"], False)],
                         ids=[*PLANS, "unrolled"])
def test_greedy_tokens_are_those_of_the_growing_prefix(plan, scan):
  lm, variables = model(plan, scan=scan)
  tokens = jnp.pad(PROMPT, ((0, 0), (0, 5)))  # zeros behind the prefix, which nothing before them sees
  for end in range(5, 10):
    tokens = tokens.at[:, end].set(run(lm, variables, tokens)[:, end - 1].argmax(-1))
  out = generate(lm, variables, PROMPT, 5)
  assert out.shape == (2, 5) and out.dtype == PROMPT.dtype
  np.testing.assert_array_equal(out, tokens[:, 5:])


def test_forms_of_variables_and_prompts():
  lm, variables = model()
  out = generate(lm, variables, np.asarray(PROMPT), 4)
  # The prompts of a batch do not see each other.
  np.testing.assert_array_equal(out[1:], generate(lm, nn.unbox(variables), PROMPT[1:].tolist(), 4))
  np.testing.assert_array_equal(out[:, :1], generate(lm, variables, PROMPT, 1))


def test_temperature():
  lm, variables = model()
  run = lambda seed, temperature: generate(lm, variables, PROMPT, 20, temperature=temperature, key=jax.random.key(seed))
  np.testing.assert_array_equal(run(0, 1.0), run(0, 1.0))
  assert (run(0, 1.0) != run(1, 1.0)).any()
  greedy = generate(lm, variables, PROMPT, 20)
  np.testing.assert_array_equal(run(0, 1e-6), greedy)
  assert (run(0, 100.0) != greedy).any()


def test_first_token_is_drawn_from_the_logits():
  lm, variables = model()
  prompt = jnp.repeat(PROMPT[:1], 4000, axis=0)
  drawn = generate(lm, variables, prompt, 1, temperature=0.7, key=jax.random.key(0))
  expected = jax.nn.softmax(run(lm, variables, PROMPT[:1])[0, -1] / 0.7)
  np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=VOCAB) / 4000, expected, atol=0.04)


def program(num_tokens):
  lm, variables = model()
  return jax.make_jaxpr(lambda v, p: generate(lm, v, p, num_tokens))(variables, PROMPT).jaxpr


def test_program_does_not_grow_with_the_number_of_tokens():
  assert sum(1 for _ in equations(program(4))) == sum(1 for _ in equations(program(40)))


def test_temperatures_keys_and_equal_models_share_a_program():
  # A dict of policies cannot be hashed; the model that has it can still be compared.
  models = [model.__wrapped__(remat={"layers": "full"}) for _ in range(2)]
  calls = []

  def count(next_fun, args, kwargs, context):
    if isinstance(context.module, LanguageModel) and context.method_name == "__call__":
      calls.append(args[0].shape)
    return next_fun(*args, **kwargs)

  with nn.intercept_methods(count):
    for (lm, variables), temperature in zip(models, (0.5, 0.9)):
      generate(lm, variables, PROMPT, 17, temperature=temperature, key=jax.random.key(1))
  assert calls == [PROMPT.shape, (2, 1)]  # traced once: the prompt, and a step


def test_init_cache_takes_models_stacks_plans_and_segments():
  plan = PLANS["prefix"]
  lm, _ = model(plan)
  caches = init_cache(plan, 2, 9, jnp.bfloat16)
  assert [cache["key"].shape for cache in caches] == [(2, 9, 1, 6)] * 2 + [(2, 9, 2, 4)] * 2
  assert {cache["value"].dtype for cache in caches} == {jnp.dtype(jnp.bfloat16)}
  shapes = jax.tree.map(jnp.shape, caches)
  assert shapes == jax.tree.map(jnp.shape, init_cache(lm, 2, 9)) == jax.tree.map(jnp.shape, init_cache(lm.stack, 2, 9))
  assert len(init_cache(Segment("layers", (GLOBAL,), 3), 1, 1)) == 3


class NoCache(nn.Module):

  def __call__(self, x):
    return x


@pytest.mark.parametrize("args, error, message", [
    ((Plan.of(Segment("a", (GLOBAL,)), Segment("b", (LayerSpec(NoCache),))), 1, 1), TypeError,
     "layer 1 (NoCache) has no method init_cache(batch, length, dtype)"),
    (("llama", 1, 1), TypeError, "takes a model, a stack, a plan or a segment, not str"),
    ((PLANS["prefix"], 0, 1), ValueError, "batch must be at least 1, not 0"),
    ((PLANS["prefix"], 1, 2.0), TypeError, "length must be an int, not 2.0"),
])
def test_init_cache_checks_its_arguments(args, error, message):
  with pytest.raises(error, match=re.escape(message)):
    init_cache(*args)


@pytest.mark.parametrize("change, error, message", [
    (dict(prompt=jnp.zeros((2, 0), jnp.int32)), ValueError, "prompt is empty ((2, 0))"),
    (dict(prompt=[[]]), ValueError, "prompt is empty"),
    (dict(prompt="def"), TypeError, "prompt must be token ids [batch, seq], each row of one length, not 'def'"),
    (dict(prompt=[[1, 2], [3]]), TypeError, "each row of one length, not [[1, 2], [3]]"),
    (dict(variables={"layers": {}}), TypeError, 'variables must be a dict with "params"'),
    (dict(prompt=PROMPT[0]), ValueError, "prompt must have the shape [batch, seq], not (5,)"),
    (dict(prompt=PROMPT * 0.5), TypeError, "prompt must be integer token ids, not float32"),
    (dict(prompt=PROMPT.at[0, 0].set(VOCAB)), ValueError, "to 13; the model's are 0 to 12"),
    (dict(prompt=PROMPT.at[0, 0].set(-1)), ValueError, "token ids from -1"),
    (dict(num_tokens=0), ValueError, "num_tokens must be at least 1, not 0"),
    (dict(num_tokens=1.5), TypeError, "num_tokens must be an int, not 1.5"),
    (dict(temperature=-1.0), ValueError, "temperature must be a finite number of at least 0, not -1.0"),
    (dict(temperature=float("nan")), ValueError, "temperature must be a finite number of at least 0, not nan"),
    (dict(temperature=0.7), ValueError, "pass key=jax.random.key(...)"),
])
def test_generate_checks_its_arguments(change, error, message):
  lm, variables = model()
  with pytest.raises(error, match=re.escape(message)):
    generate(**{**dict(model=lm, variables=variables, prompt=PROMPT, num_tokens=2), **change})
