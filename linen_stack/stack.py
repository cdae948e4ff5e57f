"""`StackedDecoder`: the layers of a plan, composed as scan(remat(offload_params(layer))).

Where variables stand is told in `linen_stack.plan`. How each part of a plan runs:

    homogeneous segment       one loop, one traced body
    cycle                     one loop over repeats; inside, runs of several layers are loops of their own
    one repeat, one layer     straight-line code, no stacked axis
    scan=False                every layer straight-line, under `<segment>_<i>`

Each layer is rematerialised alone, never a block as well.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import contextvars
import dataclasses
import functools
from typing import Any

from flax import linen as nn
from flax.core.scope import LazyRng
import jax

from linen_stack import lifts, loops, sharding
from linen_stack.calls import Call, build, class_name
from linen_stack.lifting import not_a_method
from linen_stack.per_layer import join, wrap
from linen_stack.plan import Plan, Run, Segment
from linen_stack.policies import RematPolicy
from linen_stack.sources import Sources
from linen_stack.specs import keywords_checked
from linen_stack.stacked import hidden_and_output, strong
from linen_stack.validation import check_axis, check_call, check_layout, check_placed, check_selection, check_stack, levels

# What reports set to be handed each layer's program, as (segment, run, jaxpr), while a stack is initialised.
observer: contextvars.ContextVar[Callable[[Segment, Run, Any], None] | None] = contextvars.ContextVar("observer", default=None)

# Below this, fetching a parameter costs more than keeping it: a few TPU tiles.
MIN_OFFLOAD_BYTES = 16 * 1024


@keywords_checked
class StackedDecoder(nn.Module):
  """The layers of a plan, one after the other.

  Example::

    plan = ls.Plan.homogeneous(ls.LayerSpec(MyLayer, width=512), num_layers=32)
    stack = ls.StackedDecoder(plan, remat="minimal")
    variables = stack.init(key, x)
    y = stack.apply(variables, x, mask, deterministic=True)

  A layer takes the hidden states first and returns hidden states of the same structure, shapes and dtypes, or
  `(hidden states, output)`. Other arguments reach it as they were given: arrays whole (`ls.per_layer` marks those of
  which layer i sees element i), everything else as the Python value that it is.

  Raises, when built: ValueError or TypeError for options that cannot be.
  Raises, when called: TypeError for arguments that a layer does not take, ValueError for a layer that changes the hidden
  states' structure, shape or dtype, or variables of another layout.
  """

  plan: Plan
  """Which layers, in which order. A single `Segment` will do."""

  remat: Any = "full"
  """What the backward pass keeps: a preset's name, a `RematPolicy` or JAX policy, or one of these per segment name."""

  scan: bool = True
  """Loop over stacked layers. False: every layer on its own, unstacked, as `<segment>_<i>`; same numbers from one key.
  What says how to loop or to stack (`param_axis`, `inner`, `barrier`, `decode`, `unroll`) then changes nothing."""

  param_axis: int = 0
  """Axis of the layers in stacked parameters; those of fewer axes have it last. All other collections: axis 0."""

  offload_params: Any = False
  """Keep parameters in host memory, where `init` makes them, and fetch them layer by layer (a run inside a cycle at once):
  True (matrices of some size), a number of bytes from which on, or `select(path, leaf) -> bool`. Gradients come back to
  the host; `ls.host_shardings` places trees there, `ls.on_device` computes with them."""

  prefetch: bool = False
  """Fetch a layer's parameters (of a cycle: a repeat's) while its predecessor computes, backward its successor, at the price
  of the room for up to three and a half more: those in host memory, and those that are split over mesh axes over which the
  batch is split as well, which are gathered; see `linen_stack.sources`. Reverse-mode derivatives alone."""

  collect_outputs: bool = False
  """Also return what the layers return beside the hidden states, stacked in layer order [layers, ...]. False: such outputs
  are not computed, unless a per-layer argument was given."""

  shared_rngs: tuple[str, ...] = ()
  """Rng streams of which all layers get one key. Every other stream is split per layer."""

  static_argnames: tuple[str, ...] = ()
  """Arguments that must never be arrays. Python values stay Python values without being named here."""

  layer_index: str | None = None
  """Keyword argument by which each layer gets its index in the decoder: a Python int where it is not in a loop."""

  inner: str = "auto"
  """How runs inside a cycle repeat: "scan", "unroll" (a Python loop), or "auto": unrolled where the policy offloads."""

  barrier: str = "cse"
  """What keeps a single layer of a cycle's block apart from its neighbours, so that it is rematerialised alone:
  "cse" (an optimisation barrier) or "loop" (a loop of one trip)."""

  decode: str = "unroll"
  """How layers run whose per-layer arguments come as a list of arrays, such as caches: "unroll", layer by layer, nothing is
  stacked or copied; "scan", stacked for the loop and taken apart again. A stacked tree always takes the loop, and so do all
  with `offload_params` or `prefetch`: outside of a loop many layers' parameters would be fetched at once."""

  unroll: int = 1
  """Layers (of a cycle: repeats) per step of the outer loop, as in `jax.lax.scan`; in shorter segments all of them."""

  def __post_init__(self):
    if isinstance(self.plan, Segment):
      object.__setattr__(self, "plan", Plan.of(self.plan))
    check_stack(self)
    super().__post_init__()

  @nn.nowrap
  def policy(self, segment: str) -> RematPolicy:
    """The remat policy of a segment."""
    return RematPolicy.of(self.remat[segment] if isinstance(self.remat, Mapping) else self.remat)

  @nn.nowrap
  def selects(self, path: str, leaf: Any) -> bool:
    """Whether a layer's own (unstacked) parameter is one to keep in host memory."""
    if callable(self.offload_params):
      chosen = bool(self.offload_params(path, leaf))
      if chosen and len(leaf.shape) < 2 and leaf.dtype.itemsize < 4:
        raise ValueError(f"offload_params selects {path!r}, {leaf.dtype} {list(leaf.shape)}: a TPU cannot take vectors of less "
                         "than 32 bits an element out of host memory layer by layer; select leaves of two axes and more")
      return chosen
    if self.offload_params is False:
      return False
    least = MIN_OFFLOAD_BYTES if self.offload_params is True else self.offload_params
    return len(leaf.shape) >= 2 and leaf.size * leaf.dtype.itemsize >= least

  @nn.nowrap
  def _ask(self, call: Call, path: str, leaf: Any) -> bool:
    call.asked[path] = self.selects(path, leaf)
    return call.asked[path]

  @nn.compact
  def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Applies all layers.

    Args:
      x: the hidden states, an array or any pytree of arrays.
      *args, **kwargs: passed to every layer. `ls.per_layer(values)` hands layer i element i.

    Returns:
      The hidden states, or `(hidden states, outputs)` where `collect_outputs` is set or layers returned outputs beside
      a per-layer argument: in the form of that argument, in layer order.
    """
    call = Call.of(self.plan, args, kwargs, layer_index=self.layer_index, static_argnames=self.static_argnames,
                   decode="scan" if self.prefetch or self.offload_params is not False else self.decode)
    self._check_call(x)
    x = strong(x)
    outputs: dict[str, Any] = {}
    for segment in self.plan:
      x, outputs[segment.name] = self._segment(segment, x, call) if self.scan else self._apart(segment, x, call)
    if self.is_initializing():
      self._check_policies(call.seen)
      check_axis(self)
    self._traced(call)
    if call.asked:
      check_selection(self, call.asked)
    if not self.is_initializing():
      check_placed(self, call.fetched)
    if not self.collect_outputs and not (call.per_layer and jax.tree.leaves(outputs)):
      return x
    if not jax.tree.leaves(outputs):
      raise ValueError("collect_outputs=True, but no layer returns (hidden states, output)")
    return x, join(self.plan, outputs, as_list=call.as_list, listed=call.listed or not self.scan)

  @nn.nowrap
  def _segment(self, segment: Segment, x: Any, call: Call) -> tuple[Any, Any]:
    policy = self.policy(segment.name)
    ahead = self._ahead(segment, None, x, call) if segment.length > 1 else None
    if segment.is_cycle:
      target, body = _Block(functools.partial(self._runs, segment, call), name=segment.name), _call_block
      body = lifts.keep_around(body, policy) if self._is_split(segment.name) else body
    else:
      straight = call.listed or self.unroll > 1 or (policy.levels is not None and bool(policy.offload))
      rolled = segment.length > 1 and not straight
      body = self._layer(segment, segment.runs[0], call, rolled, ahead is not None)
      target = build(segment.block[0], segment.name)
    if segment.length > 1:
      body = self._loop(body, segment.length, segment.name, call, rolled=not call.listed, policy=policy, ahead=ahead)
    elif policy.every > 1 and not call.listed:
      body = lifts.remat(body, policy.alone)
    return body(target, x, *call.cut(segment, call.listed), call.args, call.kwargs)

  @nn.nowrap
  def _runs(self, segment: Segment, call: Call, x: Any, parts: Any, index: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """One repeat of a cycle; runs inside the block's own module."""
    in_a_loop = segment.length > 1 and not call.listed
    unrolled = call.listed or self.inner == "unroll" or (
        self.inner == "auto" and in_a_loop and self.policy(segment.name).within.offloads)
    policy, outputs = self.policy(segment.name), {}
    for run in segment.runs:
      alone = run.count == 1 and in_a_loop and self.barrier == "loop"
      looped = run.count > 1 and not unrolled
      source = self._ahead(segment, run, x, call) if looped and not in_a_loop else None
      ahead = source is not None or (in_a_loop and self.prefetch and not self.is_initializing())
      together = self.offload_params is not False and in_a_loop and run.count > 1 and not self._levels(segment) and not ahead
      body = self._layer(segment, run, call, alone or looped, ahead, together)
      if run.count > 1:
        body = self._loop(body, run.count, run.name, call, rolled=not unrolled, ahead=source)
        body = lifts.fetch_together(body, functools.partial(self._ask, call), policy) if together else body
      elif alone:
        body = lifts.one_trip(body)
      x, outputs[run.name] = body(build(run.spec, run.name), x, parts[run.name], index[run.name], args, kwargs)
    return x, outputs

  @nn.nowrap
  def _loop(self, body: Callable[..., Any], length: int, name: str, call: Call, rolled: bool,
            policy: RematPolicy | None = None, ahead: Sources | None = None) -> Callable[..., Any]:
    """A loop of `length` steps over (target, x, parts, index, args, kwargs). `policy`: of the outer loop of a segment."""
    per_step = loops.listed if call.listed else 0
    options: dict[str, Any] = dict(
        split_rngs={**{s: False for s in self.shared_rngs}, True: True}, metadata_params={nn.PARTITION_NAME: name},
        in_axes=(per_step, per_step, loops.broadcast, loops.broadcast), out_axes=per_step,
        update=bool(call.per_layer) and not call.listed)
    if not rolled:
      return loops.static_unroll(body, length, self.param_axis, **options)
    if policy is not None:
      nested = self._levels(self.plan[name])
      # Values cannot be offloaded from two nested loops, so the inner one is straight-line code then.
      options.update(unroll=self.unroll, levels=nested, region=functools.partial(lifts.region, policy) if nested else None,
                     unroll_inner=bool(nested and policy.offload))
    # Nor from two loops where layers are split over a mesh.
    offloads = any(self.policy(segment.name).offloads for segment in self.plan)
    return loops.scan(body, length, self.param_axis, source=ahead, unroll_stages=offloads, **options)

  @nn.nowrap
  def _ahead(self, segment: Segment, run: Run | None, x: Any, call: Call) -> Sources | None:
    """What a loop over a segment, or over a run of it, fetches ahead."""
    fetches = self.prefetch and not self.is_initializing()
    return Sources(segment, run, call, x, tuple(self.scope.rngs), self.param_axis) if fetches else None

  @nn.nowrap
  def _is_split(self, name: str) -> bool:
    """Whether each device has the parameters of some of the layers along an axis."""
    return not self.is_initializing() and bool(sharding.over(name))

  @nn.nowrap
  def _levels(self, segment: Segment) -> tuple[int, ...]:
    # They serve the backward pass; parameters are made in a plain loop, from which each layer's can go to the host.
    return () if self.is_initializing() else levels(segment, self.policy(segment.name))

  @nn.nowrap
  def _layer(self, segment: Segment, run: Run, call: Call, rolled: bool, ahead: bool = False,
             together: bool = False) -> Callable[..., Any]:
    """remat(offload_params(layer)), as a function (layer, x, parts, index, args, kwargs) -> (x, output).

    `ahead`, `together`: the parameters are fetched by a loop around it, or for the whole run around its loop, not here.
    """
    label = f"layer {class_name(run.spec)} in segment {segment.name!r}"
    keep = self.collect_outputs or bool(call.per_layer)

    @not_a_method
    def one_layer(layer, x, parts, index, args, kwargs):
      args, kwargs = call.fill(parts, index, args, kwargs)
      hidden, output = hidden_and_output(x, layer(x, *args, **kwargs), label)
      return hidden, wrap(output, len(call.per_layer)) if keep else None

    one_layer = self._inside(one_layer, call)
    if self.is_initializing():
      one_layer = lifts.observe(one_layer, functools.partial(call.see, observer.get(), segment, run))
    if self.offload_params is not False and not (ahead or together):
      one_layer = lifts.offload_params(one_layer, functools.partial(self._ask, call), store=True)
    policy = self.policy(segment.name)
    # Layer by layer over lists there is no loop that `levels` or `every` could shape: each layer is a region.
    policy = policy.alone if call.listed else policy.within
    split = any(self._is_split(name) for name, _ in segment.axes(run))
    fetched = split or (self.offload_params is not False and not ahead)
    if fetched and not policy.remat and self.policy(segment.name).every == 1:
      policy = RematPolicy(base=lifts.all_but_fetched)  # without any remat, the fetched copies would be kept as well
    one_layer = lifts.remat(one_layer, policy, prevent_cse=not rolled, tag=together or split)
    # The stack's own key, before any segment's or layer's name is folded in, is the same for all of them.
    shared = {s: self.scope.rngs[s] for s in self.shared_rngs if s in self.scope.rngs}
    return lifts.with_rngs(one_layer, shared) if shared else one_layer

  @nn.nowrap
  def _apart(self, segment: Segment, x: Any, call: Call) -> tuple[Any, Any]:
    """Every layer on its own. Keys are those that the loops would have handed out."""
    keys = {s: key for s, key in self.scope.rngs.items() if s not in self.shared_rngs}
    parts, index = call.cut(segment, listed=True)
    outputs = []
    for step, of_step in enumerate(loops.split_keys(keys, segment.length)):
      in_step = [tree[step] if segment.length > 1 else tree for tree in (parts, index)]
      of_runs = {}
      for run in segment.runs:
        in_run = [tree[run.name] if segment.is_cycle else tree for tree in in_step]
        results = []
        for i, own in enumerate(loops.split_keys(of_step, run.count)):
          own = {s: LazyRng.create(key, *segment.path(run)) for s, key in own.items()}
          body = lifts.with_rngs(self._layer(segment, run, call, rolled=False), own)
          layer = build(run.spec, f"{segment.name}_{step * len(segment.block) + run.offset + i}")
          x, output = body(layer, x, *(tree[i] if run.count > 1 else tree for tree in in_run), call.args, call.kwargs)
          results.append(output)
        of_runs[run.name] = results if run.count > 1 else results[0]
      outputs.append(of_runs if segment.is_cycle else of_runs[segment.runs[0].name])
    return x, outputs if segment.length > 1 else outputs[0]

  @nn.nowrap
  def _inside(self, layer: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """A layer as a function over its module, and what a subclass puts right around it."""
    del call
    return layer

  @nn.nowrap
  def _traced(self, call: Call) -> None:
    """What a subclass has to check when all layers are traced."""

  @nn.nowrap
  def _check_policies(self, seen: dict[str, set[str]]) -> None:
    """Raises where a policy names values that none of its layers tags."""
    if isinstance(self.remat, Mapping):
      for segment, tags in seen.items():
        self.policy(segment).check(tags, f"the layers of segment {segment!r}")
    else:
      RematPolicy.of(self.remat).check(set().union(*seen.values()))

  @nn.nowrap
  def _check_call(self, x: Any) -> None:
    """What is checked before layers are traced; a subclass may have more."""
    check_layout(self)
    check_call(self, x)


class _Block(nn.Module):
  """One repeat of a cycle: the scope in which its runs stand."""

  runs: Callable[..., Any] = dataclasses.field(repr=False)

  @nn.compact
  def __call__(self, *args: Any) -> tuple[Any, Any]:
    return self.runs(*args)


@not_a_method
def _call_block(block: _Block, *args: Any) -> tuple[Any, Any]:
  return block(*args)
