"""Compiles programs with host memory in them for a TPU that is not there; prints one JSON line of sizes per case.

Run by test_tpu_host.py in a process of its own: the environment must be set before jax is imported.
"""
import json
import os
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")

from flax import linen as nn  # noqa: E402
import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import linen_stack as ls  # noqa: E402
from linen_stack import sharding  # noqa: E402
from linen_stack.inspect.overlap import overlap  # noqa: E402
from linen_stack.models.decoder import DecoderLayer  # noqa: E402
from linen_stack.placement import with_shardings  # noqa: E402

GATHERS = ("xla_enable_async_all_gather", "xla_tpu_enable_async_collective_fusion",
           "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "xla_latency_hiding_scheduler_enable_selective_resources",
           "xla_lhs_make_all_gather_selective")
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))


def make_plan(kind, width):
  """The reference layer in bfloat16: 12 alike; 4 or 8 repeats of a run of three and another; the same with two left over."""
  layer = dict(embed=width, mlp=4 * width, num_heads=width // 64, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  a, b = ls.LayerSpec(DecoderLayer, "a", **layer), ls.LayerSpec(DecoderLayer, "b", window=64, **layer)
  return {"flat": lambda: ls.Plan.homogeneous(a, 12), "cycle": lambda: ls.Plan.cycle([a, a, a, b], 16),
          "deep cycle": lambda: ls.Plan.cycle([a, a, a, b], 32), "remainder": lambda: ls.Plan.cycle([a, a, a, b], 14),
          "prefix": lambda: ls.Plan.homogeneous(b, 1, "first") + ls.Plan.homogeneous(a, 12)}[kind]()


def make_policy(text):
  return eval(text, {"P": ls.RematPolicy}) if "P(" in text else text  # pylint: disable=eval-used


def size_of(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class Vectors:
  """A stack of layers whose vectors, of 16 bits an element, are in host memory: composed by hand, since a stack refuses."""

  def __init__(self, topology="v5p:2x2x1"):
    chip = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
    here = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(chip), ("data",)), jax.sharding.PartitionSpec())
    step = nn.RMSNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    body = ls.offload_params(lambda layer, x: (layer(x), None))
    self.apply = nn.apply(lambda layer, x: ls.scan(body, 12)(layer, x)[0], step)
    scale = jax.ShapeDtypeStruct((12, 256), jnp.bfloat16, sharding=here.with_memory_kind("pinned_host"))
    self.args = {"params": {"scale": scale}}, jax.ShapeDtypeStruct((8, 256), jnp.bfloat16, sharding=here)

  def forward(self):
    return jax.jit(self.apply).lower(*self.args)


class Program:
  """Shapes and shardings of a stack, its input and its optimiser, on one device of a topology, or split over all of it."""

  def __init__(self, plan="flat", topology="v5p:2x2x1", width=256, batch=1, seq=128, devices=1, remat="full", **options):
    self.stack = ls.StackedDecoder(make_plan(plan, width), remat=make_policy(remat), **options)
    chips = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:devices])
    mesh = jax.sharding.Mesh(chips, ("data",))
    self.here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batched = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    self.example = jnp.zeros((1, 8, width), jnp.bfloat16)
    boxed = jax.eval_shape(self.stack.init, jax.random.key(0), self.example)["params"]
    self.rules = rules = [(axis, "data" if devices > 1 and axis in ("embed", "batch") else None)
                          for axis in (*sharding.AXES, "batch", "hidden")]
    self.shardings = ls.host_shardings(self.stack, boxed, mesh, rules=rules)
    self.params = with_shardings(nn.unbox(boxed), self.shardings)
    self.opt_shardings = ls.host_shardings(self.stack, jax.eval_shape(TX.init, boxed), mesh, rules=rules)
    self.opt_state = with_shardings(jax.eval_shape(TX.init, self.params), self.opt_shardings)
    self.x = jax.ShapeDtypeStruct((batch, seq, width), jnp.bfloat16, sharding=batched)
    self.key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=self.here)

  def loss(self, params, x):
    return jnp.mean(self.stack.apply({"params": params}, x).astype(jnp.float32) ** 2)

  def grad(self):
    out = (None, self.shardings)
    return jax.jit(jax.value_and_grad(self.loss), out_shardings=out).lower(self.params, self.x)

  def gathered(self):
    """Gradients, with activations laid out by the rules as well."""
    with jax.sharding.use_abstract_mesh(self.here.mesh.abstract_mesh), nn.logical_axis_rules(self.rules):
      return self.grad()

  def init(self):
    """Parameters and the optimiser's state."""

    def init(key):
      params = nn.unbox(self.stack.init(key, self.example))["params"]
      return params, ls.on_device(TX.init, self.stack, out_shardings=self.opt_shardings)(params)

    return jax.jit(init, out_shardings=(self.shardings, self.opt_shardings)).lower(self.key)

  def decode(self):
    """One token with a list of caches of 64 tokens."""
    cache = lambda: [spec.cls(**spec.kwargs).init_cache(1, 64, jnp.bfloat16) for spec in self.stack.plan.layers]
    caches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.here), jax.eval_shape(cache))
    token = jax.ShapeDtypeStruct((1, 1, self.x.shape[-1]), jnp.bfloat16, sharding=self.here)
    apply = lambda params, x, caches: self.stack.apply({"params": params}, x, kv_cache=ls.per_layer(caches))
    return jax.jit(apply, donate_argnums=2).lower(self.params, token, caches)

  def step(self):
    """A whole train step: gradients, clipping, AdamW."""

    def update(params, opt_state, grads):
      updates, opt_state = TX.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    def step(params, opt_state, x):
      loss, grads = jax.value_and_grad(self.loss)(params, x)
      return (*ls.on_device(update, self.stack)(params, opt_state, grads), loss)

    out = (self.shardings, self.opt_shardings, None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(self.params, self.opt_state, self.x)


def sizes(program="grad", **options):
  if program == "vectors":
    return {"temp": Vectors(**options).forward().compile().memory_analysis().temp_size_in_bytes}
  made = Program(**options)
  compiled = getattr(made, program)().compile(dict.fromkeys(GATHERS, True) if program == "gathered" else None)
  memory, bodies = compiled.memory_analysis(), overlap(compiled.as_text()) if options.get("prefetch") else ()
  device, host = ({name: getattr(memory, f"{where}{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
                  for where in ("", "host_"))
  peak = device["argument"] + device["output"] - device["alias"] + device["temp"]
  return {"temp": device["temp"], "args": device["argument"], "peak": peak, "host_temp": host["temp"],
          "host_args": host["argument"], "host_out": host["output"], "host_alias": host["alias"],
          "hidden": [body.hidden for body in bodies], "params": size_of(made.params),
          "layer": size_of(made.params) // made.stack.plan.num_layers}


if __name__ == "__main__":
  for case in json.loads(sys.argv[1]):
    try:
      result = sizes(**case)
    except Exception as error:  # pylint: disable=broad-exception-caught
      result = {"error": str(error)[:2000]}
    print("RESULT " + json.dumps({"case": case, **result}), flush=True)
