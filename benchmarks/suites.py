"""The benchmarks: each a function of `quick` that yields figures."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
import statistics
from typing import Any

from flax import linen as nn
import jax
from jax.experimental.layout import Format, Layout
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from benchmarks import contenders as c
from benchmarks import measures
from benchmarks.results import Figure
import linen_stack as ls
from linen_stack.inspect import aot, chips
from linen_stack.inspect import programs as programs_of
from linen_stack.models import init_cache
from linen_stack.sharding import AXES

SMALL = c.Size()
# On one TPU, in bfloat16: the sizes of the memory table, and those of comparisons, which take less time to compile.
TPU = c.Size(batch=8, seq=2048, embed=1024, mlp=4096, heads=8, dtype=jnp.bfloat16)
TPU_SMALL = dataclasses.replace(TPU, seq=256, embed=256, mlp=1024, heads=2)
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


def _making(layout: str, makers: list[tuple[str, int]], program: str, rounds: int, phases: tuple[str, ...],
            benchmark: str) -> Iterator[Figure]:
  """Seconds of each phase, and ratios to linen_stack's at the same depth and to that of its own at 4 layers.

  `makers`: contenders and numbers of layers.
  """
  def make(name, layers):
    contender = c.build(name, layout, layers, SMALL)
    if program == "init":
      return contender.init, (jax.random.key(0), jnp.zeros(SMALL.x.shape))
    return _programs(contender, SMALL)[program]

  makers = [(name, layers) for name, layers in makers if c.build(name, layout, layers, SMALL) is not None]
  times = measures.making({key: functools.partial(make, *key) for key in makers}, rounds, phases)
  for phase in phases:
    for (name, layers), of_phases in times.items():
      yield Figure(benchmark, f"{layout} {program}", name, phase, statistics.median(of_phases[phase]), "s", layers)
    for name, layers in makers:
      if layers > 4 and (name, 4) in times:
        against = {of: times[name, of][phase] for of in (4, layers)}
        yield Figure(benchmark, f"{layout} {program}", name, f"{phase}, times that of 4 layers",
                     measures.ratios(against, 4)[layers], "", layers)
    for layers in dict.fromkeys(layers for _, layers in makers):
      of_phase = {name: of_phases[phase] for (name, of), of_phases in times.items() if of == layers}
      if len(of_phase) > 1 and "linen_stack" in of_phase:
        for name, ratio in measures.ratios(of_phase, "linen_stack").items():
          yield Figure(benchmark, f"{layout} {program}", name, f"{phase}, times linen_stack's", ratio, "", layers)


PHASES = ("trace", "lowering", "compile")


def trace(quick: bool) -> Iterator[Figure]:
  """Seconds that tracing takes at 32 layers, in one loop and where a loop stands in a loop."""
  for layout in ("flat", "nested"):
    for program in ("train step",) if quick else ("forward", "train step", "init"):
      makers = [(name, 32) for name in c.BUILDERS if name != "loop"]
      yield from _making(layout, makers, program, 3 if quick else 15, ("trace",), "trace")


def depth(quick: bool) -> Iterator[Figure]:
  """Seconds that making a train step takes, against the depth."""
  depths = (2, 8, 32) if quick else (2, 4, 16, 64, 128)
  makers = [("linen_stack", layers) for layers in depths]
  makers += [(name, layers) for layers in (4, 64) if not quick for name in ("expert", "haliax")]
  yield from _making("flat", makers, "train step", 1 if quick else 2, PHASES, "depth")
  if not quick:
    makers = [("loop", 2), ("loop", 8), ("loop", 48), ("linen_stack", 48)]
    yield from _making("flat", makers, "train step", 1, PHASES, "depth")


def steps(quick: bool) -> Iterator[Figure]:
  """A train step on this machine's CPU: instructions of the compiled program, and its time as a ratio to linen_stack's."""
  for layout in ("flat",) if quick else ("flat", "prefixed", "nested"):
    running = {}
    for name in c.BUILDERS:
      contender = c.build(name, layout, 8, SMALL)
      if contender is not None:
        x = jax.random.normal(jax.random.key(1), SMALL.x.shape)
        params = jax.jit(contender.init)(jax.random.key(0), x)
        args = (params, OPTIMIZER.init(params), x)
        step = jax.jit(c.train_step(contender, OPTIMIZER)).lower(*args).compile()
        yield Figure("steps", f"{layout} train step", name, "compiled instructions", measures.instructions(step), "", 8, True)
        running[name] = functools.partial(step, *args)
    for clock, times in measures.running(running, 15 if quick else 100).items():
      for name, ratio in measures.ratios(times, "linen_stack").items():
        yield Figure("steps", f"{layout} train step", name, f"{clock}, times linen_stack's", ratio, "", 8)


def _token_steps(size: c.Size) -> tuple[dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]], ls.StackedDecoder]:
  """For each contender a function (parameters, x, caches) to (x, caches), and one from stacked parameters to its own."""
  stack = ls.StackedDecoder(c.plan("flat", 8, size))
  apart = stack.clone(scan=False)
  spec = stack.plan.layers[0]
  layer = spec.cls(**spec.kwargs)

  def of(stack):
    return lambda params, x, caches: stack.apply({"params": params}, x, kv_cache=ls.per_layer(caches))

  def loop(layers, x, caches):
    out = []
    for variables, cache in zip(layers, caches):
      x, cache = layer.apply(variables, x, kv_cache=cache)
      out.append(cache)
    return x, out

  unstack = lambda params: ls.convert.unstack({"params": params}, stack)
  restack = lambda params: ls.convert.restack({"params": params}, stack, apart)["params"]
  return {"linen_stack": (of(stack), lambda params: params), "scan=False": (of(apart), restack), "loop": (loop, unstack)}, stack


def decode(quick: bool) -> Iterator[Figure]:
  """Time of a token with caches, many of them in one program, as a ratio to that of a loop over separate parameters."""
  steps_of, stack = _token_steps(SMALL)
  x = jax.random.normal(jax.random.key(1), (SMALL.batch, 1, SMALL.embed))
  params = nn.unbox(jax.jit(stack.init)(jax.random.key(0), x)["params"])
  caches = init_cache(stack, SMALL.batch, 128)
  running = {}
  for name, (step, own) in steps_of.items():
    body = lambda carry, params, step=step: step(params, *carry)
    tokens = lambda params, *carry, body=body: jax.lax.fori_loop(0, 32, lambda _, carry: body(carry, params), carry)
    running[name] = functools.partial(jax.jit(tokens), own(params), x, caches)
  for clock, times in measures.running(running, 20 if quick else 100).items():
    for name, ratio in measures.ratios(times, "loop").items():
      yield Figure("decode", "a token of 32 on a CPU", name, f"{clock}, times the loop's", ratio, "", 8)
  if not quick:
    steps_of, stack = _token_steps(TPU_SMALL)
    x = jax.ShapeDtypeStruct((TPU_SMALL.batch, 1, TPU_SMALL.embed), TPU_SMALL.dtype)
    caches = jax.eval_shape(lambda: init_cache(stack, TPU_SMALL.batch, 256, TPU_SMALL.dtype))
    params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), x)["params"])
    for name, (step, own) in steps_of.items():
      report = _on_tpu(step, (jax.eval_shape(own, params), x, caches))
      for measure, value in (("temp", report.temp), ("cycles", report.cycles)):
        yield Figure("decode", "a token on a TPU", name, measure, value, "bytes" if measure == "temp" else "", 8, exact=True)


# A TPU that is not there --------------------------------------------------------------------------------------------------


def _on_tpu(fn: Callable[..., Any], args: tuple[Any, ...]) -> ls.inspect.MemoryReport:
  # Each device does all: the reference layer would lay its activations out by the default rules, the other layers would not.
  return ls.inspect.memory(fn, args, topology=TOPOLOGY, rules=dict.fromkeys(AXES), limit=1800)


def _tpu_figures(benchmark: str, case: str, name: str, report: ls.inspect.MemoryReport,
                 depth: int | None = None) -> Iterator[Figure]:
  for measure, value in (("temp", report.temp), ("peak", report.peak), ("code", report.code), ("host temp", report.host_temp)):
    yield Figure(benchmark, case, name, measure, value / 2**20, "MiB", depth, exact=True)
  yield Figure(benchmark, case, name, "compile seconds", report.seconds, "s", depth)


def tpu(quick: bool) -> Iterator[Figure]:
  """Memory of the gradient on a TPU, for contenders and depths."""
  cases = [("flat", 8, name) for name in (("linen_stack", "expert") if quick else c.BUILDERS)]
  if not quick:
    cases += [("flat", layers, "linen_stack") for layers in (2, 32)]
    cases += [(layout, 8, name) for layout in ("cyclic", "nested") for name in ("linen_stack", "expert")]
  for layout, layers, name in cases:
    contender = c.build(name, layout, layers, TPU_SMALL)
    if contender is not None:
      fn, args = _programs(contender, TPU_SMALL)["gradient"]
      yield from _tpu_figures("tpu", f"{layout} gradient", name, _on_tpu(fn, args), layers)


def axes(quick: bool) -> Iterator[Figure]:
  """Memory of the gradient on a TPU by the axis of the layers, also with arguments laid out as the compiler chooses."""
  for axis, chosen in ((1, True),) if quick else ((0, False), (1, False), (0, True), (1, True)):
    fn, args = _programs(_with_options(TPU_SMALL, param_axis=axis), TPU_SMALL)["gradient"]
    case = f"param axis {axis}" + (", layouts chosen by the compiler" if chosen else "")
    temp = _temp_of_chosen(fn, args) if chosen else _on_tpu(fn, args).temp
    yield Figure("axes", case, "linen_stack", "temp", temp / 2**20, "MiB", exact=True)


def _temp_of_chosen(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
  topology = chips.topology(TOPOLOGY)
  mesh = programs_of.as_mesh(None, topology)
  chosen = Format(Layout.AUTO, NamedSharding(mesh, PartitionSpec()))
  traced = jax.jit(fn, in_shardings=chosen, out_shardings=chosen).trace(*args)
  placed = [False] * len(jax.tree.leaves(traced.out_info))
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  return aot.compile_program(text, topology, list(mesh.shape.values()), placed, limit=1800).sizes["temp_size_in_bytes"]


def _with_options(size: c.Size, **options: Any) -> c.Contender:
  stack = ls.StackedDecoder(c.plan("flat", 8, size), **options)
  return c.Contender("linen_stack", lambda key, x: nn.unbox(stack.init(key, x)["params"]),
                     lambda params, x: stack.apply({"params": params}, x))


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
  size = TPU_SMALL if quick else TPU
  for case, options in POLICIES.items():
    if quick and case not in ("scan, full remat", "scan, projections offloaded"):
      continue
    fn, args = _programs(_with_options(size, **options), size)["gradient"]
    yield from _tpu_figures("policies", case, "linen_stack", _on_tpu(fn, args))


SUITES: dict[str, Callable[[bool], Iterator[Figure]]] = {
    suite.__name__: suite for suite in (programs, trace, depth, steps, decode, tpu, axes, policies)}
