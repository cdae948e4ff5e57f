"""NNX layers whose parameters are fetched while the layer before computes: from host memory, and from other devices."""
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import pytest

import linen_stack as ls
from tests import interpret
from tests.nnx_reference import WIDTH, Twin, abstract, filled, loss_of, params_of, plan_of
from tests.reference import assert_close, wide
from tests.test_placement import on_host
from tests.test_prefetch import count

X = jax.random.normal(jax.random.key(0), (8, WIDTH))


@pytest.mark.parametrize("names, remat", [("aaa", "full"), ("aabaab", "minimal")])
def test_gradients_from_host_memory_are_those_without(names, remat):
  results, fetched = [], []
  for ahead in (False, True):
    model = filled(abstract(plan_of(names), remat=remat, offload_params=0, prefetch=ahead))
    params = params_of(model)
    params = jax.device_put(params, ls.host_shardings(model.stack, params))
    assert len(on_host(params)) == 2 * len(set(names))
    results.append(interpret.value_and_grad(loss_of(model, X))(params))
    fetched.append(count(jax.make_jaxpr(loss_of(model, X))(params).jaxpr, "device_put"))
  assert_close(*map(jax.device_get, results))
  assert on_host(results[1][1]) == on_host(params) and fetched[1] >= 2 * model.plan[list(model.plan)[0].name].length


@pytest.mark.usefixtures("float64")
def test_layers_that_are_split_as_the_batch_are_gathered_ahead():
  """By the names in the metadata of their variables."""
  plain, model = (filled(abstract(plan_of("aaa"), prefetch=ahead)) for ahead in (False, True))
  params, x = params_of(plain), wide(X)
  want = jax.jit(jax.value_and_grad(loss_of(plain, x)))(params)
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  rules = [("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", None)]
  shardings = ls.host_shardings(model.stack, ls.nnx.variables(model)["params"], mesh, rules=rules)
  assert shardings["layers"]["up"]["kernel"].spec == P(None, "fsdp", None)
  x = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    placed = jax.device_put(params, shardings)
    assert count(jax.make_jaxpr(loss_of(model, x))(placed).jaxpr, "sharding_constraint") == 3  # one for each layer
    step = jax.jit(jax.value_and_grad(loss_of(model, x)), out_shardings=(None, shardings)).lower(placed).compile()
    assert_close(jax.device_get(step(placed)), jax.device_get(want), rtol=1e-13)
  gathers = [transfer for body in ls.inspect.overlap(step.as_text()) for transfer in body.transfers]
  assert len(gathers) == 2 and all(transfer.ahead for transfer in gathers)


def test_nothing_to_fetch():
  model = filled(abstract(plan_of("aaa"), offload_params=0, prefetch=True))
  with pytest.raises(ValueError, match="prefetch=True has nothing to fetch"):
    model(jnp.ones((2, WIDTH)))


def test_audits_of_nnx_layers_are_those_of_their_linen_twins():
  options = dict(remat=ls.RematPolicy(save=["mlpwi_0"], offload=["mlpwo"]))
  reports = [ls.inspect.audit(stack, X) for stack in (
      abstract(plan_of("aabaab"), **options), ls.StackedDecoder(plan_of("aabaab", Twin), **options))]
  assert reports[0].rows == reports[1].rows and reports[0].ok and len(reports[0].rows) == 6
  assert [finding.text for finding in reports[0].findings] == [finding.text for finding in reports[1].findings]
  mistyped = ls.inspect.audit(abstract(plan_of("aa"), remat=ls.RematPolicy(save=["mlpwi_1"])), X)
  assert not mistyped.ok and "mlpwi_0" in str(mistyped)
