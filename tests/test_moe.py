"""The mixture of experts: numbers and gradients against explicit formulas, programs, and sown losses."""
import json
import re
import subprocess
import sys

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack.models.layers import RMSNorm, SwiGLU
from linen_stack.models.moe import MoE, total_loss
from linen_stack.tags import equations, tagged_names

from tests.reference import assert_close, layers_of, loop, restacked

EMBED = 5
SIZES = dict(num_experts=8, hidden=6, top_k=2)
VARIANTS = {
    "softmax": {},
    "not_normalized": dict(normalize=False),
    "one_of_many": dict(top_k=1, scale=0.5, normalize=False),
    "all_of_them": dict(num_experts=3, top_k=3, normalize=False),
    "one_expert": dict(num_experts=1, top_k=1),
    "sigmoid": dict(router="sigmoid", normalize=False, scale=2.5),
    "biased": dict(router="sigmoid", score_bias=True),
    "groups": dict(router="sigmoid", score_bias=True, groups=4, top_groups=2, scale=1.5),
    "pairs": dict(router="sigmoid", groups=4, top_groups=1, top_k=2),
    "groups_of_one": dict(groups=8, top_groups=3, top_k=3),
    "softmax_groups": dict(groups=2, top_groups=1, score_bias=True, top_k=3),
    "shared": dict(shared_hidden=7, balance_weight=0.5),
    "all": dict(router="sigmoid", score_bias=True, groups=2, top_groups=1, scale=2.5, shared_hidden=7,
                shared_gate=True),
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def variables_of(module, x):
  shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
  assert set(shapes) == {"params"}  # init sows nothing
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: jnp.asarray(0.7 * rng.normal(size=leaf.shape), leaf.dtype), shapes)


def make(**options):
  layer, x = MoE(**{**SIZES, **options}), normal(1, 2, 7, EMBED)
  return layer, variables_of(layer, x), x


def run(layer, variables, x):
  return jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["losses"]))(variables, x)


def choices(ranked, top_k, groups, top_groups):
  """The experts of one token, best first, chosen one by one."""
  size = len(ranked) // groups
  worth = [sum(sorted(ranked[g * size:(g + 1) * size])[-2:]) for g in range(groups)]
  allowed = sorted(range(groups), key=lambda g: -worth[g])[:top_groups]
  experts = [e for e in range(len(ranked)) if e // size in allowed]
  return sorted(experts, key=lambda e: -ranked[e])[:top_k]


def formula(params, x, *, num_experts, top_k, router="softmax", normalize=True, scale=1.0, groups=1, top_groups=1,
            score_bias=False, shared_hidden=None, shared_gate=False, balance_weight=0.01, **_):
  """The layer in float64 numpy, token by token; returns the result, each token's experts and the load-balance loss."""
  p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  sigmoid = lambda y: 1 / (1 + np.exp(-y))
  swiglu = lambda y, wi_0, wi_1, wo: (y @ wi_0 * sigmoid(y @ wi_0) * (y @ wi_1)) @ wo
  x = np.asarray(x, np.float64)
  out, chosen, scores = np.zeros(x.shape), {}, []
  for at in np.ndindex(x.shape[:-1]):
    logits = x[at] @ p["router"]["kernel"]
    score = sigmoid(logits) if router == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    chosen[at] = choices(score + p["router"]["bias"] if score_bias else score, top_k, groups, top_groups)
    scores.append(score / score.sum())
    weight = score[chosen[at]] / (score[chosen[at]].sum() if normalize else 1) * scale
    for w, expert in zip(weight, chosen[at]):
      out[at] += w * swiglu(x[at], *(p["experts"][name][expert] for name in ("wi_0", "wi_1", "wo")))
    if shared_hidden:
      y = swiglu(x[at], *(p["shared"][name]["kernel"] for name in ("wi_0", "wi_1", "wo")))
      out[at] += y * sigmoid(x[at] @ p["shared_gate"]["kernel"]) if shared_gate else y
  share = np.bincount(np.ravel(list(chosen.values())), minlength=num_experts) / (len(chosen) * top_k)
  return out, chosen, balance_weight * num_experts * (share * np.mean(scores, axis=0)).sum()


def dense(params, x, chosen, *, num_experts, router="softmax", normalize=True, scale=1.0, shared_hidden=None,
          shared_gate=False, **_):
  """The layer with every expert computed for every token, for gradients; what is chosen is given."""
  swiglu = lambda y, wi_0, wi_1, wo: (nn.silu(y @ wi_0) * (y @ wi_1)) @ wo
  scores = (nn.sigmoid if router == "sigmoid" else nn.softmax)(x @ params["router"]["kernel"])
  weights = jnp.where(chosen, scores, 0)
  weights = scale * (weights / weights.sum(-1, keepdims=True) if normalize else weights)
  experts = [swiglu(x, *(params["experts"][n][e] for n in ("wi_0", "wi_1", "wo"))) for e in range(num_experts)]
  y = jnp.einsum("...e,e...d->...d", weights, jnp.stack(experts))
  if shared_hidden:
    shared = swiglu(x, *(params["shared"][n]["kernel"] for n in ("wi_0", "wi_1", "wo")))
    y += shared * nn.sigmoid(x @ params["shared_gate"]["kernel"]) if shared_gate else shared
  return y


# Numbers


@variants
def test_layer_and_gradients_are_the_formula(options):
  layer, variables, x = make(**options)
  sizes = {**SIZES, **options}
  expected, chosen, balance = formula(variables["params"], x, **sizes)
  weights = normal(2, *x.shape)

  def value(params, x):
    y, state = layer.apply({"params": params}, x, mutable=["losses"])
    return (weights * y).sum(), (y, state)

  got, (y, state) = jax.jit(jax.grad(value, (0, 1), has_aux=True))(variables["params"], x)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_allclose(state["losses"]["router"]["load_balance"], [balance], rtol=1e-5)
  np.testing.assert_allclose(total_loss(state["losses"]), balance, rtol=1e-5)

  mask = np.zeros((*x.shape[:-1], sizes["num_experts"]), bool)
  for at, experts in chosen.items():
    mask[at][experts] = True
  want = jax.jit(jax.grad(lambda p, x: (weights * dense(p, x, mask, **sizes)).sum(), (0, 1)))(variables["params"], x)
  assert_close(got, want, 2e-5)
  assert (jnp.abs(got[0]["router"]["kernel"]).max() > 1e-3) == (sizes["num_experts"] > 1)  # the router is trained
  if "bias" in got[0]["router"]:
    assert not got[0]["router"]["bias"].any()


def test_no_token_is_dropped_where_all_want_one_expert():
  options = dict(router="sigmoid", score_bias=True, top_k=1)
  layer, variables, x = make(**options)
  variables["params"]["router"]["bias"] = jnp.zeros(8).at[3].set(10.0)
  expected, chosen, balance = formula(variables["params"], x, **{**SIZES, **options})
  assert all(experts == [3] for experts in chosen.values())
  y, state = run(layer, variables, x)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_allclose(total_loss(state["losses"]), balance, rtol=1e-5)


def test_loss_is_one_where_experts_are_used_evenly_and_their_number_where_one_is_used_alone():
  layer, x = MoE(num_experts=4, hidden=2, top_k=1, balance_weight=1.0), 50 * jnp.eye(4)
  params = jax.tree.map(jnp.zeros_like, variables_of(layer, x)["params"])
  for kernel, loss in ((jnp.eye(4), 1.0), (jnp.ones((4, 1)) * jnp.eye(4)[:1], 4.0)):
    params["router"]["kernel"] = kernel
    _, state = run(layer, {"params": params}, x)
    np.testing.assert_allclose(total_loss(state["losses"]), loss, rtol=1e-6)


@pytest.mark.parametrize("shape", [(EMBED,), (4, EMBED), (2, 3, 2, EMBED)])
def test_any_leading_dimensions(shape):
  layer, variables, _ = make(shared_hidden=3, shared_gate=True)
  x = normal(3, *shape)
  expected, _, _ = formula(variables["params"], x.reshape(-1, EMBED), **SIZES, shared_hidden=3, shared_gate=True)
  np.testing.assert_allclose(run(layer, variables, x)[0], expected.reshape(shape), atol=1e-5)


def test_dtypes():
  layer, _, x = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, score_bias=True, shared_hidden=3, shared_gate=True)
  variables = variables_of(layer, x)
  dtypes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype
            for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])}
  assert dtypes.pop("router/bias") == jnp.float32 and set(dtypes.values()) == {jnp.dtype(jnp.bfloat16)}
  y, state = run(layer, variables, x)
  assert y.dtype == jnp.bfloat16 and total_loss(state["losses"]).dtype == jnp.float32
  wide = MoE(**SIZES, score_bias=True, shared_hidden=3, shared_gate=True)
  variables = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables)
  np.testing.assert_allclose(np.asarray(y, np.float32), run(wide, variables, x)[0], atol=0.1)


def test_mapped_over_parameters_and_tokens():
  layer, variables, x = make(shared_hidden=3)
  both = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), variables)
  value = jax.value_and_grad(lambda variables, x: jnp.square(layer.apply(variables, x)).sum())
  got, one = jax.jit(jax.vmap(value))(both, x), jax.jit(value)
  for i in range(2):
    at = lambda tree, i=i: jax.tree.map(lambda leaf: leaf[i], tree)
    assert_close(at(got), one(at(both), x[i]), 1e-5)


def test_scores_that_vanish_leave_gradients_finite():
  layer, variables, x = make(router="sigmoid")
  variables["params"]["router"]["kernel"] = jnp.full((EMBED, 8), -50.0)
  grads = jax.jit(jax.grad(lambda v: jnp.square(layer.apply(v, jnp.abs(x))).sum()))(variables)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# Programs


def primitives(jaxpr):
  return [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]


def test_only_the_chosen_experts_are_computed():
  layer, variables, x = make(num_experts=6, top_k=2, shared_hidden=3, shared_gate=True)
  jaxpr = jax.make_jaxpr(layer.apply)(variables, x)
  products = [eqn for eqn in equations(jaxpr.jaxpr) if "dot" in eqn.primitive.name]
  grouped = [eqn for eqn in products if eqn.primitive.name.startswith("ragged_dot")]
  assert [eqn.outvars[0].aval.shape for eqn in grouped] == [(28, 6), (28, 6), (28, EMBED)]  # 14 tokens, 2 experts each
  # Beside them: the router, the weighted sum of each token's two results, the shared expert and its gate.
  assert len(products) == len(grouped) + 1 + 1 + 3 + 1
  assert not any(6 in eqn.outvars[0].aval.shape[1:] for eqn in products[1:] if eqn not in grouped)


def test_tags():
  layer, variables, x = make(shared_hidden=3)
  tags = {"moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_routing", "mlpwi_0", "mlpwi_1", "mlpwo"}
  assert tagged_names(jax.make_jaxpr(layer.apply)(variables, x).jaxpr) == tags


@pytest.mark.parametrize("preset, choices_made, products", [
    ("full", 2, 3 + 3 + 4), ("minimal", 1, 3 + 4), ("save_dot_except_mlpwi", 1, 3 + 2 + 4), ("none", 1, 3 + 4)])
def test_a_policy_that_saves_experts_products_saves_what_they_are_sorted_by(preset, choices_made, products):
  """The backward pass reads the products row by row, so it must not choose experts once more."""
  layer, variables, x = make()
  policy = ls.RematPolicy(preset)
  function = layer.apply if not policy.remat else jax.checkpoint(layer.apply, policy=policy.resolve())
  names = primitives(jax.make_jaxpr(jax.grad(lambda v: jnp.sin(function(v, x)).sum()))(variables))
  assert names.count("top_k") == choices_made
  assert sum(name.startswith("ragged_dot") for name in names) == products


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_operations_on_a_tpu_do_not_grow_with_the_number_of_experts():
  done = subprocess.run([sys.executable, "-m", "tests.moe_programs"], capture_output=True, text=True, timeout=900,
                        check=False)
  lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
  assert lines, done.stderr[-3000:]
  few, many = json.loads(lines[0][7:])
  for name in few:  # what grows is the router's own product
    assert many[name] < 1.3 * few[name], (name, few, many)


def test_every_parameter_has_logical_axes():
  layer, _, x = make(score_bias=True, shared_hidden=3, shared_gate=True)
  boxed = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
  spec = nn.get_partition_spec(boxed)
  assert spec["experts"] == {"wi_0": jax.P("expert", "embed", "mlp"), "wi_1": jax.P("expert", "embed", "mlp"),
                             "wo": jax.P("expert", "mlp", "embed")}
  assert spec["router"] == {"kernel": jax.P("embed", "expert"), "bias": jax.P("expert")}
  assert spec["shared_gate"]["kernel"] == jax.P("embed", None)
  assert spec["shared"]["wo"]["kernel"] == jax.P("mlp", "embed")


# In a stack


class Layer(nn.Module):
  """A residual layer with a dense feed-forward part, or experts."""

  experts: bool = False
  router: str = "sigmoid"

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    x = checkpoint_name(x, "decoder_layer_input")
    y = RMSNorm(name="norm")(x)
    if self.experts:
      return x + MoE(**SIZES, router=self.router, score_bias=True, groups=4, top_groups=2, balance_weight=0.1,
                     name="feed_forward")(y)
    return x + SwiGLU(6, name="feed_forward")(y)


DENSE, SPARSE = ls.LayerSpec(Layer, "dense"), ls.LayerSpec(Layer, "moe", experts=True)
PLANS = {
    "prefix": ls.Plan.homogeneous(DENSE, 2, "prefix") + ls.Plan.homogeneous(SPARSE, 3),
    "cycle": ls.Plan.cycle([SPARSE, SPARSE, ls.LayerSpec(Layer, "soft", experts=True, router="softmax")], 6),
}


@pytest.mark.parametrize("name, remat, scan, param_axis", [
    ("prefix", "full", True, 0), ("prefix", "minimal", False, 0), ("cycle", "minimal", True, 0),
    ("cycle", "none", True, 1)])
def test_stacked_losses_and_gradients_are_those_of_a_loop(name, remat, scan, param_axis):
  plan = PLANS[name]
  x = normal(4, 3, 4, EMBED)
  params = jax.tree.map(lambda leaf: 0.5 * leaf, variables_of(ls.StackedDecoder(plan), x)["params"])
  layers = layers_of({"params": params}, plan)
  if not scan:
    names = [plan.locate(i).segment for i in range(plan.num_layers)]
    params = {f"{s}_{i - plan.offset(s)}": layers[i]["params"] for i, s in enumerate(names)}
  elif param_axis:
    params = restacked(params, plan, param_axis)
  stack = ls.StackedDecoder(plan, remat=remat, scan=scan, param_axis=param_axis)

  def value(params):
    y, state = stack.apply({"params": params}, x, mutable=["losses"])
    return jnp.square(y).mean() + total_loss(state["losses"]), state["losses"]

  def expected(layers):
    y, outputs = loop(plan, layers, x, mutable=["losses"])
    losses = [state["losses"]["feed_forward"]["router"]["load_balance"][0] for _, state in outputs if "losses" in state]
    return jnp.square(y).mean() + sum(losses), losses

  (got, losses), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
  (want, apart), per_layer = jax.jit(jax.value_and_grad(expected, has_aux=True))(layers)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_allclose(total_loss(losses), sum(apart), rtol=1e-6)
  assert len(apart) == sum(spec.kwargs.get("experts", False) for spec in plan.layers)
  assert sum(leaf.size for leaf in jax.tree.leaves(losses)) == len(apart)  # one scalar per layer
  if scan and name == "prefix":
    assert list(losses) == ["layers"]
    np.testing.assert_allclose(losses["layers"]["feed_forward"]["router"]["load_balance"][0], apart, rtol=1e-6)
  assert_close([tree["params"] for tree in layers_of({"params": grads}, plan, axis=param_axis, scan=scan)],
               [tree["params"] for tree in per_layer])


# Bad input


@pytest.mark.parametrize("options, error, message", [
    (dict(num_experts=0), ValueError, "num_experts must be at least 1, not 0"),
    (dict(hidden=1.5), TypeError, "hidden must be an int, not 1.5"),
    (dict(top_k=None), TypeError, "top_k must be an int, not None"),
    (dict(top_k=9), ValueError, "top_k 9 is more than the 8 experts"),
    (dict(groups=3), ValueError, "num_experts 8 is not a multiple of groups 3"),
    (dict(groups=2, top_groups=3), ValueError, "top_groups 3 is more than there are groups, 2"),
    (dict(groups=4, top_groups=1, top_k=3), ValueError, "top_k 3 is more than the 2 experts"),
    (dict(top_groups=0), ValueError, "top_groups must be at least 1, not 0"),
    (dict(shared_hidden=0), ValueError, "shared_hidden must be at least 1, not 0"),
    (dict(shared_gate=True), ValueError, "shared_gate=True gates a shared expert; give its width"),
    (dict(router="sigmoyd"), ValueError, "unknown router 'sigmoyd'; did you mean 'sigmoid'"),
    (dict(router=None), ValueError, "unknown router None"),
    (dict(balance_weight=-0.1), ValueError, "balance_weight must be a finite number of at least 0, not -0.1"),
])
def test_options_are_checked_on_construction(options, error, message):
  with pytest.raises(error, match=f"MoE: {re.escape(message)}"):
    MoE(**{**SIZES, **options})
