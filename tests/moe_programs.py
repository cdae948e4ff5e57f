"""Compiles a mixture of experts for a TPU that is not there; prints the operations of its programs as one JSON line.

Run by test_moe.py in a process of its own: the environment must be set before jax is imported.
"""
import importlib.metadata
import json
import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from linen_stack.models.moe import MoE  # noqa: E402

TOKENS, EMBED = 1024, 256


def operations(num_experts):
  """Operations of the forward pass, and of the gradients by the tokens and by the experts' kernels."""
  devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
  place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), ("data",)), jax.P())
  module = MoE(num_experts, hidden=512, top_k=2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  x = jax.ShapeDtypeStruct((TOKENS, EMBED), jnp.bfloat16)
  shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                        (jax.eval_shape(module.init, jax.random.key(0), x)["params"], x))
  value = lambda params, x: jnp.square(module.apply({"params": params}, x).astype(jnp.float32)).sum()
  kernels = lambda params, x: jax.grad(lambda experts: value({**params, "experts": experts}, x))(params["experts"])
  programs = {"forward": value, "tokens": jax.grad(value, 1)}
  if tuple(map(int, importlib.metadata.version("libtpu").split(".")[:3])) >= (0, 0, 50):
    programs["kernels"] = kernels  # older compilers compute this gradient densely
  compiled = {name: jax.jit(program).lower(*shapes).compile() for name, program in programs.items()}
  return {name: program.cost_analysis()["flops"] for name, program in compiled.items()}


if __name__ == "__main__":
  print("RESULT " + json.dumps([operations(num_experts) for num_experts in (8, 64)]))
