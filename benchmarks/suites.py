"""The benchmarks: each a function of `quick` that yields figures."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import contenders as c
from benchmarks import measures
from benchmarks.results import Figure
import linen_stack as ls
from linen_stack.models import init_cache

SMALL = c.Size()
# The sizes of the memory table: 8 layers in bfloat16 on one TPU.
TPU = c.Size(batch=8, seq=2048, embed=1024, mlp=4096, heads=8, dtype=jnp.bfloat16)
TPU_QUICK = dataclasses.replace(TPU, seq=256, embed=256, mlp=1024, heads=2)
TOPOLOGY = "v5p:2x2x1"
OPTIMIZER = optax.adam(1e-3)


def _programs(contender: c.Contender, size: c.Size) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
  params = c.shapes(contender, size)
  state = jax.eval_shape(OPTIMIZER.init, params)
  return {"forward": (c.forward(contender), (params, size.x)), "gradient": (c.gradient(contender), (params, size.x)),
          "train step": (c.train_step(contender, OPTIMIZER), (params, state, size.x))}


def programs(quick: bool) -> Iterator[Figure]:
  """Sizes of the programs, as JAX traces and lowers them, for every layout."""
  for layout in ("flat", "nested") if quick else ("flat", "prefixed", "cyclic", "nested"):
    for name in c.BUILDERS:
      contender = c.build(name, layout, 8, SMALL)
      if contender is None:
        continue
      for program, (fn, args) in _programs(contender, SMALL).items():
        for measure, value in measures.sizes(fn, args).items():
          yield Figure("programs", f"{layout} {program}", name, measure, value, "", exact=True)


def depth(quick: bool) -> Iterator[Figure]:
  """What making a train step takes, against the depth: seconds, the first of them alone also as a ratio at one depth."""
  depths, rounds = ((2, 8, 32), 2) if quick else ((2, 4, 8, 16, 32, 64, 128), 5)
  for layers in depths:
    names = [name for name in c.BUILDERS if name != "loop" or layers <= (8 if quick else 48)]
    yield from _making("flat", layers, names, rounds)
  if not quick:
    yield from _making("flat", 48, ["linen_stack", "loop"], 2)


def nested(quick: bool) -> Iterator[Figure]:
  """What making a train step takes where a loop stands in a loop."""
  yield from _making("nested", 32, ["linen_stack", "expert", "expert_defaults"], 2 if quick else 7)


def _making(layout: str, layers: int, names: list[str], rounds: int) -> Iterator[Figure]:
  def make(name, program):
    contender = c.build(name, layout, layers, SMALL)
    if program == "init":
      return contender.init, (jax.random.key(0), jnp.zeros(SMALL.x.shape))
    params = jax.eval_shape(contender.init, jax.random.key(0), SMALL.x)
    return c.train_step(contender, OPTIMIZER), (params, jax.eval_shape(OPTIMIZER.init, params), SMALL.x)

  names = [name for name in names if c.build(name, layout, layers, SMALL) is not None]
  for program in ("train step", "init"):
    makers = {name: functools.partial(make, name, program) for name in names}
    times = measures.making(makers, rounds, compiled=program == "train step")
    for phase in times["linen_stack"]:
      of_phase = {name: phases[phase] for name, phases in times.items()}
      for name, seconds in of_phase.items():
        yield Figure(layout, program, name, f"{phase} seconds", statistics.median(seconds), "s", layers)
      for name, ratio in measures.ratios(of_phase, "linen_stack").items():
        yield Figure(layout, program, name, f"{phase}, times linen_stack's", ratio, "", layers)


def steps(quick: bool) -> Iterator[Figure]:
  """Time of a train step on this machine's CPU, as a ratio to linen_stack's."""
  for layout in ("flat",) if quick else ("flat", "prefixed", "nested"):
    running = {}
    for name in c.BUILDERS:
      contender = c.build(name, layout, 8, SMALL)
      if contender is not None:
        x = jax.random.normal(jax.random.key(1), SMALL.x.shape)
        params = jax.jit(contender.init)(jax.random.key(0), x)
        step = jax.jit(c.train_step(contender, OPTIMIZER))
        running[name] = functools.partial(step, params, OPTIMIZER.init(params), x)
    times = measures.running(running, 15 if quick else 60)
    for name, ratio in measures.ratios(times, "linen_stack").items():
      yield Figure("steps", f"{layout} train step", name, "time, times linen_stack's", ratio, "", 8)


def decode(quick: bool) -> Iterator[Figure]:
  """Time of a token with caches, as a ratio to linen_stack's."""
  layers, length = 8, 128
  plan = c.plan("flat", layers, SMALL)
  stack = ls.StackedDecoder(plan)
  x = jax.random.normal(jax.random.key(1), (SMALL.batch, 1, SMALL.embed))
  params = jax.jit(stack.init)(jax.random.key(0), x)["params"]
  caches = init_cache(plan, SMALL.batch, length)
  layer = plan.layers[0].cls(**plan.layers[0].kwargs)
  apart = ls.convert.unstack({"params": params}, plan)

  @functools.partial(jax.jit, donate_argnums=2)
  def of_stack(params, x, caches):
    return stack.apply({"params": params}, x, kv_cache=ls.per_layer(caches))

  @functools.partial(jax.jit, donate_argnums=2)
  def of_loop(layers, x, caches):
    out = []
    for variables, cache in zip(layers, caches):
      x, cache = layer.apply(variables, x, kv_cache=cache)
      out.append(cache)
    return x, out

  running = {"linen_stack": functools.partial(_token, of_stack, params, x, caches),
             "loop": functools.partial(_token, of_loop, apart, x, caches)}
  times = measures.running(running, 20 if quick else 100)
  for name, ratio in measures.ratios(times, "linen_stack").items():
    yield Figure("decode", "one token", name, "time, times linen_stack's", ratio, "", layers)


def _token(step: Callable[..., Any], params: Any, x: Any, caches: Any) -> Any:
  return step(params, x, jax.tree.map(jnp.copy, caches))


# A TPU that is not there --------------------------------------------------------------------------------------------------


def _on_tpu(fn: Callable[..., Any], args: tuple[Any, ...]) -> ls.inspect.MemoryReport:
  return ls.inspect.memory(fn, args, topology=TOPOLOGY, limit=900)


def _tpu_figures(benchmark: str, case: str, name: str, report: ls.inspect.MemoryReport) -> Iterator[Figure]:
  for measure, value in (("temp", report.temp), ("peak", report.peak), ("code", report.code), ("host temp", report.host_temp)):
    yield Figure(benchmark, case, name, measure, value / 2**20, "MiB", exact=True)
  yield Figure(benchmark, case, name, "compile seconds", report.seconds, "s")


def tpu(quick: bool) -> Iterator[Figure]:
  """Memory of the gradient on a TPU, for every layout."""
  size = TPU_QUICK if quick else TPU
  for layout in ("flat",) if quick else ("flat", "nested"):
    for name in ("linen_stack", "expert") if quick else ("linen_stack", "expert", "expert_defaults", "lax_scan",
                                                         "remat_scan", "haliax", "loop"):
      contender = c.build(name, layout, 8, size)
      if contender is not None:
        fn, args = _programs(contender, size)["gradient"]
        yield from _tpu_figures("tpu", f"{layout} gradient", name, _on_tpu(fn, args))


POLICIES = {
    "scan, no remat": dict(remat="none"),
    "scan, full remat": dict(remat="full"),
    "scan, projections saved": dict(remat="minimal"),
    "scan, projections offloaded": dict(remat="minimal_offloaded"),
    "layers apart, full remat, prevent_cse=False": dict(scan=False, remat=ls.RematPolicy(prevent_cse=False)),
    "layers apart, full remat": dict(scan=False),
    "scan, full remat, param axis 1": dict(param_axis=1),
}


def policies(quick: bool) -> Iterator[Figure]:
  """Memory of the gradient on a TPU, by policy and layout of the parameters."""
  size = TPU_QUICK if quick else TPU
  for case, options in POLICIES.items():
    if quick and "apart" in case:
      continue
    stack = ls.StackedDecoder(c.plan("flat", 8, size), **options)
    contender = c.Contender("linen_stack", lambda key, x, stack=stack: c.nn.unbox(stack.init(key, x)["params"]),
                            lambda params, x, stack=stack: stack.apply({"params": params}, x))
    fn, args = _programs(contender, size)["gradient"]
    yield from _tpu_figures("policies", case, "linen_stack", _on_tpu(fn, args))


SUITES: dict[str, Callable[[bool], Iterator[Figure]]] = {
    suite.__name__: suite for suite in (programs, depth, nested, steps, decode, tpu, policies)}
