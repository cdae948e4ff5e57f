"""Compiles gradient programs of stacks for a TPU that is not there; prints one JSON line of sizes per case.

Run by test_tpu.py in a process of its own: the environment must be set before jax is imported.
"""
import json
import os
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen as nn  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import numpy as np  # noqa: E402

import linen_stack as ls  # noqa: E402

BATCH, SEQ, WIDTH = 8, 512, 256


class Layer(nn.Module):
  """A tagged pre-norm MLP layer in bfloat16. x: [batch, seq, width]."""

  act: str = "gelu"

  @nn.compact
  def __call__(self, x):
    dense = lambda features: nn.Dense(features, use_bias=False, dtype=x.dtype, param_dtype=x.dtype)
    h = nn.RMSNorm(dtype=x.dtype, param_dtype=x.dtype)(x)
    h = checkpoint_name(dense(WIDTH)(h), "query_proj") * h
    h = checkpoint_name(dense(4 * WIDTH)(h), "mlpwi_0")
    return x + checkpoint_name(dense(WIDTH)(getattr(nn, self.act)(h)), "mlpwo")


A, B = ls.LayerSpec(Layer, "a"), ls.LayerSpec(Layer, "b", act="silu")


def policy(text):
  return eval(text, {"P": ls.RematPolicy}) if text.startswith("P(") else text  # pylint: disable=eval-used


def sizes(plan, topology="v5p:2x2x1", remat="full", **options):
  stack = ls.StackedDecoder(plan, remat=policy(remat), **options)
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  mesh = jax.sharding.Mesh(np.array(devices[:1]), ("data",))
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  params = jax.eval_shape(stack.init, jax.random.key(0), jnp.zeros((1, 8, WIDTH), jnp.bfloat16))
  params, x = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
                           (params, jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)))
  loss = lambda params, x: jnp.mean(stack.apply(params, x).astype(jnp.float32) ** 2)
  memory = jax.jit(jax.value_and_grad(loss)).lower(params, x).compile().memory_analysis()
  return {"temp": memory.temp_size_in_bytes, "host": memory.host_temp_size_in_bytes}


PLANS = {
    "flat": ls.Plan.homogeneous(A, 8),
    "apart": ls.Plan.homogeneous(A, 8),
    "cycle": ls.Plan.cycle([A, A, A, B], 16),
    "remainder": ls.Plan.cycle([A, A, A, B], 14),
}

if __name__ == "__main__":
  for case in json.loads(sys.argv[1]):
    options = dict(case)
    name = options.pop("plan")
    try:
      result = sizes(PLANS[name], scan=name != "apart", **options)
    except Exception as error:  # pylint: disable=broad-exception-caught
      result = {"error": str(error)[:2000]}
    print("RESULT " + json.dumps({"case": case, **result}), flush=True)
