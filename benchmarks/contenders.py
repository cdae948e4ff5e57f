"""The ways to stack layers that are compared, each over the same layer and plan, with full remat.

    loop             the layers in a Python loop, each under nn.remat
    expert           nn.scan(nn.remat(layer)) as an expert writes it: parameters go in and never out, no constancy check
    expert_defaults  the same with Flax's own defaults
    remat_scan       nn.remat_scan
    lax_scan         jax.lax.scan over jax.checkpoint of the layer as a pure function
    haliax           Stacked of Haliax, over an equivalent layer, where it is installed
    linen_stack      StackedDecoder
"""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import importlib.util
import sys
from typing import Any

from flax import linen as nn
from flax.linen import partitioning
import jax
import jax.numpy as jnp

import linen_stack as ls
from linen_stack.models import DecoderLayer


@dataclasses.dataclass(frozen=True)
class Size:
  """What the layer takes: x is [batch, seq, embed]."""

  batch: int = 2
  seq: int = 64
  embed: int = 64
  mlp: int = 256
  heads: int = 4
  dtype: Any = jnp.float32

  @property
  def x(self) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((self.batch, self.seq, self.embed), self.dtype)

  def spec(self, name: str = "a", **options: Any) -> ls.LayerSpec:
    return ls.LayerSpec(DecoderLayer, name, embed=self.embed, mlp=self.mlp, num_heads=self.heads, dtype=self.dtype,
                        param_dtype=self.dtype, **options)


@dataclasses.dataclass(frozen=True)
class Contender:
  """A stack as two functions: init(key, x) to parameters and apply(parameters, x) to x."""

  name: str
  init: Callable[[jax.Array, Any], Any]
  apply: Callable[[Any, Any], Any]


def plan(layout: str, depth: int, size: Size) -> ls.Plan:
  """"flat"; "prefixed", a layer of another kind and then the rest; "cyclic", two kinds in turn; "nested", three of one kind
  and one of another, so that a run stands inside the cycle."""
  a, b = size.spec("a"), size.spec("b", window=size.seq // 4)
  if layout == "flat":
    return ls.Plan.homogeneous(a, depth)
  if layout == "prefixed":
    return ls.Plan.homogeneous(b, 1, "first") + ls.Plan.homogeneous(a, depth - 1)
  block = {"cyclic": [a, b], "nested": [a, a, a, b]}[layout]
  if depth % len(block) or depth == len(block):
    raise ValueError(f"a {layout} decoder has a multiple of {len(block)} layers, at least two, not {depth}")
  return ls.Plan.cycle(block, depth)


# Hand-written -------------------------------------------------------------------------------------------------------------

_FULL = dict(policy=jax.checkpoint_policies.nothing_saveable)


def _module(spec: ls.LayerSpec, name: str | None = None) -> nn.Module:
  return spec.cls(**spec.kwargs, name=name)


def _step(layer: nn.Module, x: Any, _: None) -> tuple[Any, None]:
  return layer(x), None


def _scan(step: Callable[..., Any], length: int, defaults: bool, name: str, init: bool) -> Callable[..., Any]:
  axes = {"params": 0} if defaults or init else {"params": partitioning.ScanIn(0)}
  options = {} if defaults else {"check_constancy_invariants": False}
  return nn.scan(step, variable_axes=axes, split_rngs={"params": True}, length=length,
                 metadata_params={nn.PARTITION_NAME: name}, **options)


class _Block(nn.Module):
  """One repeat of a cycle, written by hand: a loop for the run of equal layers, then the other layer."""

  segment: ls.Segment
  defaults: bool = False

  @nn.compact
  def __call__(self, x):
    for run in self.segment.runs:
      layer = _module(run.spec, run.name)
      # A layer of its own stands in straight-line code, where the compiler would undo its remat.
      step = nn.remat(_step, prevent_cse=run.count == 1, **_FULL)
      if run.count > 1:
        step = _scan(step, run.count, self.defaults, run.name, self.is_initializing())
      x, _ = step(layer, x, None)
    return x


class Expert(nn.Module):
  """A decoder as an expert writes it by hand, for any of the layouts."""

  plan: ls.Plan
  defaults: bool = False

  @nn.compact
  def __call__(self, x):
    for segment in self.plan:
      if segment.length == 1:
        x, _ = nn.remat(_step, prevent_cse=True, **_FULL)(_module(segment.block[0], segment.name), x, None)
        continue
      if segment.is_cycle:
        target, step = _Block(segment, self.defaults, name=segment.name), _step
      else:
        target, step = _module(segment.block[0], segment.name), nn.remat(_step, prevent_cse=False, **_FULL)
      x, _ = _scan(step, segment.length, self.defaults, segment.name, self.is_initializing())(target, x, None)
    return x


class Loop(nn.Module):
  """The layers one by one."""

  plan: ls.Plan

  @nn.compact
  def __call__(self, x):
    for i, spec in enumerate(self.plan.layers):
      x, _ = nn.remat(_step, prevent_cse=True, **_FULL)(_module(spec, f"layer_{i}"), x, None)
    return x


def _of_module(name: str, module: nn.Module) -> Contender:
  return Contender(name, lambda key, x: nn.unbox(module.init(key, x)["params"]),
                   lambda params, x: module.apply({"params": params}, x))


def _remat_scan(plan: ls.Plan) -> Contender | None:
  if len(plan.segments) > 1 or plan.segments[0].is_cycle:
    return None
  layer = plan.layers[0]
  # It cannot name the new axis in partition metadata, so the metadata is taken off first.
  bare = nn.map_variables(layer.cls, "params", trans_out_fn=nn.unbox, init=True)
  return _of_module("remat_scan", nn.remat_scan(bare, lengths=(plan.num_layers,), **_FULL)(**layer.kwargs))


def _lax_scan(plan: ls.Plan) -> Contender | None:
  if len(plan.segments) > 1 or plan.segments[0].is_cycle:
    return None
  layer, depth = _module(plan.layers[0]), plan.num_layers
  body = jax.checkpoint(lambda params, x: layer.apply({"params": params}, x), prevent_cse=False, **_FULL)

  def init(key, x):
    return nn.unbox(jax.vmap(lambda key: layer.init(key, x)["params"])(jax.random.split(key, depth)))

  def apply(params, x):
    return jax.lax.scan(lambda x, params: (body(params, x), None), x, params)[0]

  return Contender("lax_scan", init, apply)


@functools.cache
def _haliax_layer() -> Any:
  """The module of the optional contender, or None; an installation that cannot be imported is told of, and the rest still runs."""
  if importlib.util.find_spec("haliax") is None:
    return None
  try:
    from benchmarks import haliax_layer  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    print(f"haliax is left out, since importing it fails: {error}", file=sys.stderr)
    return None
  return haliax_layer


def _haliax(plan: ls.Plan) -> Contender | None:
  haliax_layer = None if len(plan.segments) > 1 or plan.segments[0].is_cycle else _haliax_layer()
  return haliax_layer and Contender("haliax", *haliax_layer.functions(plan.num_layers, **plan.layers[0].kwargs))


BUILDERS: dict[str, Callable[[ls.Plan], Contender | None]] = {
    "linen_stack": lambda plan: _of_module("linen_stack", ls.StackedDecoder(plan)),
    "expert": lambda plan: _of_module("expert", Expert(plan)),
    "expert_defaults": lambda plan: _of_module("expert_defaults", Expert(plan, defaults=True)),
    "lax_scan": _lax_scan,
    "remat_scan": _remat_scan,
    "haliax": _haliax,
    "loop": lambda plan: _of_module("loop", Loop(plan)),
}


def build(name: str, layout: str, depth: int, size: Size) -> Contender | None:
  """A contender, or None where it has no such layout or is not installed."""
  return BUILDERS[name](plan(layout, depth, size))


# Programs -----------------------------------------------------------------------------------------------------------------


def forward(contender: Contender) -> Callable[..., Any]:
  return contender.apply


def loss(contender: Contender) -> Callable[..., Any]:
  return lambda params, x: jnp.mean(jnp.square(contender.apply(params, x).astype(jnp.float32)))


def gradient(contender: Contender) -> Callable[..., Any]:
  return jax.value_and_grad(loss(contender))


def train_step(contender: Contender, optimizer: Any) -> Callable[..., Any]:
  """(params, optimiser state, x) to (params, optimiser state, loss)."""

  def step(params, state, x):
    value, grads = gradient(contender)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state, value

  return step


@functools.lru_cache(maxsize=None)
def shapes(contender: Contender, size: Size) -> Any:
  """The parameters of a contender, as shapes."""
  return jax.eval_shape(contender.init, jax.random.key(0), size.x)
