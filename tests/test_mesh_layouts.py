"""Every layout on a mesh of eight devices: the numbers of one device, and no program that gathers a whole stack.

Sums are in another order on several devices; in float64 what else differs shows.
"""
import functools
import math
import re

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pytest

import linen_stack as ls
from linen_stack import sharding
from tests import reference
from tests.reference import assert_close, make_variables, wide

pytestmark = pytest.mark.usefixtures("float64")
EMBED, HIDDEN = 8, 16
X = np.asarray(jax.random.normal(jax.random.key(0), (8, EMBED)), np.float64)


class Tiny(nn.Module):
  """A tagged MLP. x: [batch, embed]."""

  scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    boxed = lambda *names: nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    wi = self.param("wi", boxed("embed", "mlp"), (EMBED, HIDDEN))
    wo = self.param("wo", boxed("mlp", "embed"), (HIDDEN, EMBED))
    gain = self.param("gain", boxed("embed", "one"), (EMBED, 1))[:, 0]
    hidden = checkpoint_name(sharding.constrain(x @ wi, ("batch", "mlp")), "mlpwi_0")
    return x + self.scale * gain * checkpoint_name(jnp.tanh(hidden) @ wo, "mlpwo")


A, B = ls.LayerSpec(Tiny, "a"), ls.LayerSpec(Tiny, "b", scale=0.5)
PLANS = {
    "flat": ls.Plan.homogeneous(A, 4),
    "prefix": ls.Plan.homogeneous(B, 1, "first") + ls.Plan.homogeneous(A, 4),
    "cycle": ls.Plan.cycle([A, B], 8),
    "nested": ls.Plan.cycle([A, A, B], 12),
    "remainder": ls.Plan.cycle([A, A, B], 14),
}
ALL = {**PLANS, "tagged": reference.PLANS["cycle"]}  # the last by layers with values for all presets
RULES = (("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor"), ("one", None))


@functools.cache
def mesh():
  return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def loss(stack):
  return lambda params, x: (stack.apply({"params": params}, x) ** 2).sum()


def gathered(text):
  """The numbers of elements of what a compiled program gathers."""
  shapes = [shape for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)
            for shape in re.findall(r"\w\[([\d,]*)\]", line.split(" all-gather")[0])]
  return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


@functools.cache
def boxed_params(plan, scan, axis):
  return wide(make_variables(ls.StackedDecoder(ALL[plan], scan=scan, param_axis=axis), X)["params"])


@functools.cache
def wanted(plan, scan, axis):
  stack = ls.StackedDecoder(ALL[plan], remat="none", scan=scan, param_axis=axis)
  return jax.device_get(jax.jit(jax.value_and_grad(loss(stack)))(nn.unbox(boxed_params(plan, scan, axis)), X))


def check(plan, rules, split=True, **options):
  """Values and gradients; returns the compiled program's text. `split`: all matrices are, and none is gathered as a stack."""
  stack = ls.StackedDecoder(ALL[plan], **options)
  boxed = boxed_params(plan, stack.scan, stack.param_axis)
  params = nn.unbox(boxed)
  with jax.set_mesh(mesh()), nn.logical_axis_rules(rules):
    shardings = ls.host_shardings(stack, boxed, mesh())
    args = jax.device_put(params, shardings), jax.device_put(X, NamedSharding(mesh(), P(dict(rules)["batch"])))
    step = jax.jit(jax.value_and_grad(loss(stack)), out_shardings=(None, shardings)).lower(*args).compile()
    got = step(*args)
  assert_close(jax.device_get(got), wanted(plan, stack.scan, stack.param_axis), rtol=1e-13)
  assert jax.tree.leaves(got[1])[0].sharding == jax.tree.leaves(shardings)[0]
  sizes = gathered(step.as_text())
  if stack.prefetch:
    assert 0 < max(sizes) <= max(len(segment.block) for segment in ALL[plan]) * EMBED * HIDDEN
  elif split:
    assert max(sizes, default=0) < 4 * EMBED * HIDDEN
  return step.as_text()


POLICIES = {"none": "none", "full": "full", "saving": ls.RematPolicy(save=["mlpwi_0"]),
            "offloading": ls.RematPolicy(offload=["mlpwi_0"]), "carry": ls.RematPolicy(save=["mlpwi_0"], carry="offload")}
HOST, AHEAD = dict(offload_params=0), dict(prefetch=True)
PLACES = {"device": {}, "host": HOST, "ahead": AHEAD, "host, ahead": {**HOST, **AHEAD}, "apart": dict(scan=False)}
OTHERS = {
    "two a step": ("flat", dict(unroll=2)), "two a step, host": ("prefix", dict(unroll=2, **HOST)),
    "two a step, ahead": ("flat", dict(unroll=2, **AHEAD)),
    "inner unrolled": ("nested", dict(inner="unroll")), "inner unrolled, ahead": ("remainder", dict(inner="unroll", **AHEAD)),
    "axis 1": ("nested", dict(param_axis=1)), "axis -1": ("prefix", dict(param_axis=-1, remat="none")),
    "axis 1, ahead": ("nested", dict(param_axis=1, **AHEAD)), "loop": ("cycle", dict(barrier="loop")),
    "every": ("flat", dict(remat=ls.RematPolicy(every=2))), "levels": ("flat", dict(remat=ls.RematPolicy(levels=(2, 2)))),
    "carry": ("cycle", dict(remat=ls.RematPolicy(carry="offload"))),
    "every, host": ("flat", dict(remat=ls.RematPolicy(every=2), **HOST)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
def test_layouts_policies_and_where_parameters_are(plan, policy, place):
  check(plan, RULES, remat=POLICIES[policy], **PLACES[place])


@pytest.mark.parametrize("preset", ls.RematPolicy.presets())
def test_presets(preset):
  """Of layers that lay nothing out, for which XLA splits a batch in the other order wrong, see test_mesh.py."""
  check("tagged", (("batch", ("fsdp", "data")), *RULES[1:]), split=False, remat=preset)


@pytest.mark.parametrize("case", OTHERS)
def test_other_options(case):
  plan, options = OTHERS[case]
  check(plan, RULES, **options)


SPLIT = {
    **{f"flat {name}": ("flat", dict(remat=policy), "layers") for name, policy in POLICIES.items()},
    **{f"nested {name}": ("nested", dict(remat=policy), "layers") for name, policy in POLICIES.items()},
    "remainder": ("remainder", {}, "layers"), "axis 1": ("prefix", dict(param_axis=1), "layers"),
    "two a step": ("flat", dict(unroll=2), "layers"), "every": ("flat", dict(remat=ls.RematPolicy(every=2)), "layers"),
    "runs": ("nested", {}, "a"), "runs kept": ("nested", dict(remat="none"), "a"),
    "runs unrolled": ("nested", dict(inner="unroll"), "a"),
    "carry": ("cycle", dict(remat=ls.RematPolicy(carry="offload")), "layers"),
}


@pytest.mark.parametrize("case", SPLIT)
def test_layers_split_over_the_mesh(case):
  plan, options, axis = SPLIT[case]
  check(plan, (*RULES, (axis, "data")), **options)


def test_layers_that_do_not_divide_are_named_with_what_would():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(A, 6, "deep"))
  boxed = jax.eval_shape(stack.init, jax.random.key(0), X)["params"]
  mesh = jax.make_mesh((4, 2), ("stage", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  rules = [("embed", "fsdp"), ("mlp", None), ("one", None), ("deep", "stage")]
  words = r"6 repeats of 'deep' do not divide among 4 devices \(stage\); give that mesh axis a size of 1, 2, 3, 6, map 'deep'"
  with pytest.raises(ValueError, match=f"deep/gain: the {words}"):
    ls.host_shardings(stack, boxed, mesh, rules=rules)
  params = jax.tree.map(lambda x: jnp.zeros(x.shape), nn.unbox(boxed))
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules), pytest.raises(ValueError, match=words):
    jax.eval_shape(loss(stack), params, X)
  levels = ls.StackedDecoder(PLANS["flat"], remat=ls.RematPolicy(levels=(2, 2)))
  params = nn.unbox(boxed_params("flat", True, 0))  # made outside of the mesh, whoever asks for them first
  with jax.set_mesh(mesh), nn.logical_axis_rules([("layers", "stage")]):
    with pytest.raises(ValueError, match=r"levels=\(2, 2\): the outermost must be a multiple of 4.*\(stage\)"):
      jax.eval_shape(loss(levels), params, X)


def test_layers_in_host_memory_are_not_split():
  stack, params = ls.StackedDecoder(PLANS["nested"], offload_params=0), nn.unbox(boxed_params("nested", True, 0))
  with jax.set_mesh(mesh()), nn.logical_axis_rules([("a", "data")]):
    with pytest.raises(ValueError, match="layers along 'a' are split over mesh axis data, .* map that axis to None"):
      jax.eval_shape(loss(stack), params, X)


@pytest.mark.parametrize("rules, words", [
    ([("embed", "fsdp"), ("one", None)], r"no rule for logical axis 'mlp' \(of layers/wi\); map each to an axis"),
    ([("embed", "fsdp"), ("mpl", None), ("one", None)], r"logical axis 'mlp' \(of layers/wi\); did you mean 'mpl'\?; map each"),
    ([("mlp", None)], r"no rule for logical axes 'embed' \(of layers/gain\), 'one' \(of layers/gain\)"),
    ([("embed", "fspd"), ("mlp", None), ("one", None)],
     r"'embed' goes over 'fspd', which is no axis of the mesh; its axes are data"),
    ([("embed", None), ("mlp", None), ("one", "fsdp")], r"gain of shape \[4, 8, 1\]: dimension 2 of 1 does not divide among 2"),
])
def test_rules_that_do_not_fit(rules, words):
  stack = ls.StackedDecoder(PLANS["flat"])
  with pytest.raises(ValueError, match=words):
    ls.host_shardings(stack, boxed_params("flat", True, 0), mesh(), rules=rules)
