"""`StackedDecoder`: the layers of a plan, composed as scan(remat(offload_params(layer))).

Where variables stand is told in `linen_stack.plan`. How each part of a plan runs:

    homogeneous segment       one loop, one traced body
    cycle                     one loop over repeats; inside, runs of several layers are loops of their own
    one repeat, one layer     straight-line code, no stacked axis
    scan=False                every layer straight-line, under `<segment>_<i>`

Each layer is rematerialised alone, never a block as well.
"""
from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import linen as nn
from flax.core.scope import LazyRng
import jax
import numpy as np

from linen_stack import lifts
from linen_stack import per_layer as per_layer_lib
from linen_stack.per_layer import PerLayer
from linen_stack.plan import LayerSpec, Plan, Run, Segment, nearest
from linen_stack.policies import RematPolicy
from linen_stack.tags import tagged_names

# What reports set to be handed each layer's program, as (segment, run, jaxpr), while a stack is initialised.
observer: contextvars.ContextVar[Callable[[Segment, Run, Any], None] | None] = contextvars.ContextVar("observer", default=None)

# Below this, fetching a parameter costs more than keeping it: a few TPU tiles.
MIN_OFFLOAD_BYTES = 16 * 1024


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
  """Loop over stacked layers. False: every layer on its own, unstacked, as `<segment>_<i>`; same numbers from one key."""

  param_axis: int = 0
  """Axis of the layers in stacked parameters. All other collections are stacked on axis 0."""

  offload_params: Any = False
  """Fetch parameters from host memory, layer by layer: True (matrices of some size), a number of bytes from which on, or
  `select(path, leaf) -> bool`."""

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

  unroll: int = 1
  """Layers per step of the outer loop, as in `jax.lax.scan`."""

  def __post_init__(self):
    if isinstance(self.plan, Segment):
      object.__setattr__(self, "plan", Plan.of(self.plan))
    for name in ("shared_rngs", "static_argnames"):
      value = getattr(self, name)
      if isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value):
        object.__setattr__(self, name, tuple(value))
      else:
        raise TypeError(f"{name} must be a tuple of names, not {value!r}")
    _validate(self)
    super().__post_init__()

  @nn.nowrap
  def policy(self, segment: str) -> RematPolicy:
    """The remat policy of a segment."""
    return RematPolicy.of(self.remat[segment] if isinstance(self.remat, Mapping) else self.remat)

  @nn.nowrap
  def selects(self, path: str, leaf: Any) -> bool:
    """Whether a layer's own (unstacked) parameter is one to keep in host memory."""
    if callable(self.offload_params):
      return bool(self.offload_params(path, leaf))
    if isinstance(self.offload_params, bool):
      if not self.offload_params:
        return False
      return len(leaf.shape) >= 2 and leaf.size * leaf.dtype.itemsize >= MIN_OFFLOAD_BYTES
    return len(leaf.shape) >= 2 and leaf.size * leaf.dtype.itemsize >= self.offload_params

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
    call = _Call.of(self, args, kwargs)
    self._check_layout()
    x = lifts.strong(x)
    outputs: dict[str, Any] = {}
    for segment in self.plan:
      x, outputs[segment.name] = self._segment(segment, x, call)
    if self.is_initializing():
      self._check_policies(call.seen)
    if not self.collect_outputs and not (call.collects and jax.tree.leaves(outputs)):
      return x
    if not jax.tree.leaves(outputs):
      raise ValueError("collect_outputs=True, but no layer returns (hidden states, output)")
    return x, per_layer_lib.join(self.plan, outputs, as_list=call.as_list)

  @nn.nowrap
  def _segment(self, segment: Segment, x: Any, call: _Call) -> tuple[Any, Any]:
    if not self.scan:
      return self._apart(segment, x, call)
    sliced = call.cut(segment)
    if not segment.is_cycle:
      layer = build(segment.block[0], segment.name)
      target, body = layer, self._layer(segment, segment.runs[0], call, rolled=segment.length > 1 and self.unroll == 1)
    else:
      target, body = _Block(functools.partial(self._runs, segment, call), name=segment.name), _call_block
    if segment.length == 1:
      return body(target, x, sliced, call.args, call.kwargs)
    return self._loop(body, segment.length, segment.name, unroll=self.unroll)(target, x, sliced, call.args, call.kwargs)

  @nn.nowrap
  def _runs(self, segment: Segment, call: _Call, x: Any, sliced: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """One repeat of a cycle; runs inside the block's own module."""
    offloads_in_a_loop = segment.length > 1 and self.policy(segment.name).offloads
    unrolled = self.inner == "unroll" or (self.inner == "auto" and offloads_in_a_loop)
    outputs = {}
    for run in segment.runs:
      body = self._layer(segment, run, call, rolled=run.count > 1 and not unrolled)
      if run.count > 1:
        body = self._loop(body, run.count, run.name, rolled=not unrolled)
      x, outputs[run.name] = body(build(run.spec, run.name), x, [part[run.name] for part in sliced], args, kwargs)
    return x, outputs

  @nn.nowrap
  def _loop(self, body: Callable[..., Any], length: int, name: str, **options: Any) -> Callable[..., Any]:
    return lifts.scan(body, length, self.param_axis, split_rngs={**{s: False for s in self.shared_rngs}, True: True},
                      in_axes=(0, lifts.broadcast, lifts.broadcast), metadata_params={nn.PARTITION_NAME: name}, **options)

  @nn.nowrap
  def _layer(self, segment: Segment, run: Run, call: _Call, rolled: bool) -> Callable[..., Any]:
    """remat(offload_params(layer)), as a function (layer, x, sliced, args, kwargs) -> (x, output)."""
    label = f"layer {_class_name(run.spec)} in segment {segment.name!r}"

    @lifts.not_a_method
    def one_layer(layer, x, sliced, args, kwargs):
      args, kwargs = call.fill(sliced, args, kwargs)
      return _hidden_and_output(x, layer(x, *args, **kwargs), label, call.collects or self.collect_outputs)

    if self.is_initializing():
      one_layer = lifts.observe(one_layer, functools.partial(call.see, segment, run))
    if self.offload_params is not False:
      one_layer = lifts.offload_params(one_layer, self.selects)
    one_layer = lifts.remat(one_layer, self.policy(segment.name), prevent_cse=not rolled)
    return lifts.with_rngs(one_layer, call.shared_keys) if call.shared_keys else one_layer

  @nn.nowrap
  def _apart(self, segment: Segment, x: Any, call: _Call) -> tuple[Any, Any]:
    """Every layer on its own. Keys are those that the loops would have handed out."""
    names = call.apart_names(segment)
    keys = {s: key for s, key in self.scope.rngs.items() if s not in self.shared_rngs}
    steps = _split(keys, segment.length)
    outputs: dict[str, list[Any]] = {run.name: [] for run in segment.runs}
    i = 0
    for step in range(segment.length):
      for run in segment.runs:
        for own in _split(steps[step], run.count):
          own = {s: LazyRng.create(key, *segment.path(run)) for s, key in own.items()}
          body = lifts.with_rngs(self._layer(segment, run, call, rolled=False), own)
          sliced = call.at(self.plan.offset(segment.name) + i)
          x, output = body(build(run.spec, names[i]), x, sliced, call.args, call.kwargs)
          outputs[run.name].append(output)
          i += 1
    shaped = {run.name: _stack_outputs(outputs[run.name], [n for _, n in segment.axes(run)]) for run in segment.runs}
    return x, shaped if segment.is_cycle else shaped[segment.runs[0].name]

  @nn.nowrap
  def _check_policies(self, seen: dict[str, set[str]]) -> None:
    """Raises where a policy names values that none of its layers tags."""
    if isinstance(self.remat, Mapping):
      for segment, tags in seen.items():
        self.policy(segment).check(tags, f"the layers of segment {segment!r}")
    else:
      RematPolicy.of(self.remat).check(set().union(*seen.values()))

  @nn.nowrap
  def _check_layout(self) -> None:
    """Raises where variables are there, but in the layout of the other value of `scan`."""
    if self.is_initializing():
      return
    for segment in self.plan:
      stacked, apart = self.has_variable("params", segment.name), self.has_variable("params", f"{segment.name}_0")
      if self.scan and apart and not stacked:
        raise ValueError(f"parameters of segment {segment.name!r} are missing, but {segment.name + '_0'!r} is there: they were "
                         "made with scan=False, and this stack has scan=True; stack them with ls.convert.stack")
      if not self.scan and stacked and not apart:
        raise ValueError(f"parameters of layer {segment.name + '_0'!r} are missing, but {segment.name!r} is there: they were "
                         "made with scan=True, and this stack has scan=False; unstack them with ls.convert.unstack")


class _Block(nn.Module):
  """One repeat of a cycle: the scope in which its runs stand."""

  runs: Callable[..., Any] = dataclasses.field(repr=False)

  @nn.compact
  def __call__(self, *args: Any) -> tuple[Any, Any]:
    return self.runs(*args)


@lifts.not_a_method
def _call_block(block: _Block, *args: Any) -> tuple[Any, Any]:
  return block(*args)


class _Slot:
  """Stands in an argument where each layer's own part goes."""

  def __init__(self, index: int):
    self.index = index


@dataclasses.dataclass(frozen=True)
class _Call:
  """The arguments of one call: `args` and `kwargs` with slots, and the per-layer values that fill the slots."""

  plan: Plan
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  per_layer: tuple[tuple[str, PerLayer], ...]
  collects: bool
  as_list: bool
  shared_keys: dict[str, Any]
  seen: dict[str, set[str]] = dataclasses.field(default_factory=dict)  # tags by segment, filled at initialisation

  def see(self, segment: Segment, run: Run, jaxpr: Any) -> None:
    self.seen.setdefault(segment.name, set()).update(tagged_names(jaxpr))
    watch = observer.get()
    if watch is not None:
      watch(segment, run, jaxpr)

  @staticmethod
  def of(stack: StackedDecoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    found: list[tuple[str, PerLayer]] = []

    def slot(path, leaf):
      if not isinstance(leaf, PerLayer):
        return leaf
      name = jax.tree_util.keystr(path[1:])
      per_layer_lib.check(stack.plan, leaf, name)
      found.append((name, leaf))
      return _Slot(len(found) - 1)

    args, kwargs = jax.tree_util.tree_map_with_path(slot, (args, kwargs), is_leaf=lambda x: isinstance(x, PerLayer))
    collects, as_list = bool(found), any(arg.is_list for _, arg in found)
    if stack.layer_index is not None:
      if stack.layer_index in kwargs:
        raise TypeError(f"argument {stack.layer_index!r} is given by layer_index and was passed as well")
      kwargs = {**kwargs, stack.layer_index: _Slot(len(found))}
      found.append((stack.layer_index, PerLayer(list(range(stack.plan.num_layers)), is_list=True)))
    for spec in _distinct(stack.plan):
      signature = lifts.call_signature(spec.cls) if isinstance(spec.cls, type) else None
      if signature is not None:
        _bind(signature, spec, args, kwargs)
      lifts.check_static(signature, stack.static_argnames, (None, *args), kwargs)
    # The stack's own key, before any segment's or layer's name is folded in, is the same for all of them.
    shared = {s: stack.scope.rngs[s] for s in stack.shared_rngs if s in stack.scope.rngs}
    return _Call(stack.plan, args, kwargs, tuple(found), collects, as_list, shared)

  def cut(self, segment: Segment) -> list[Any]:
    return [per_layer_lib.cut(self.plan, arg, segment, name) for name, arg in self.per_layer]

  def at(self, layer: int) -> list[Any]:
    return [arg.value[layer] if arg.is_list else jax.tree.map(lambda x: x[layer], arg.value) for _, arg in self.per_layer]

  def fill(self, sliced: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    put = lambda leaf: sliced[leaf.index] if isinstance(leaf, _Slot) else leaf
    return jax.tree.map(put, (args, kwargs)) if self.per_layer else (args, kwargs)

  def apart_names(self, segment: Segment) -> list[str]:
    return [f"{segment.name}_{i}" for i in range(segment.num_layers)]


def build(spec: LayerSpec, name: str) -> nn.Module:
  """The module of a spec, under `name`. Module templates among its arguments are copied: each layer owns its own.

  A module that already belongs to a parent is passed as it is: all layers share it.
  """
  layer = spec.cls(**{key: _own_copy(value) for key, value in spec.kwargs.items()}, name=name)
  if not isinstance(layer, nn.Module):
    raise TypeError(f"{spec!r} made {layer!r}, which is no flax.linen Module")
  return layer


def _own_copy(value: Any) -> Any:
  if isinstance(value, nn.Module):
    if value.parent is not None or value.scope is not None:
      return value
    fields = [f.name for f in dataclasses.fields(value) if f.init and f.name not in ("parent", "name")]
    return value.clone(**{field: _own_copy(getattr(value, field)) for field in fields})
  if any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(value)):
    return jax.tree.map(_own_copy, value)
  return value


def _hidden_and_output(x: Any, result: Any, label: str, keep_output: bool) -> tuple[Any, Any]:
  """Tells hidden states from `(hidden states, output)` by the structure of the hidden states that went in."""
  structure = jax.tree.structure(x)
  hidden, output = result, None
  if jax.tree.structure(result) != structure and isinstance(result, tuple):
    if len(result) != 2:
      raise ValueError(f"{label} returned a tuple of {len(result)}; a layer returns hidden states, or (hidden states, output)")
    hidden, output = result
  return lifts.check_carry(x, hidden, label), output if keep_output else None


def _split(keys: dict[str, Any], count: int) -> list[dict[str, Any]]:
  """The keys that a loop of `count` layers hands to each; one layer is no loop."""
  if count == 1:
    return [keys]
  split = {s: lifts.split_key(key, count) for s, key in keys.items()}
  return [jax.tree.map(lambda key: key[i], split) for i in range(count)]


def _stack_outputs(outputs: list[Any], shape: list[int]) -> Any:
  if not shape:
    return outputs[0]
  return jax.tree.map(lambda *ys: jax.numpy.stack(ys).reshape(*shape, *jax.numpy.shape(ys[0])), *outputs)


# Checks -------------------------------------------------------------------------------------------------------------------


def _class_name(spec: LayerSpec) -> str:
  return getattr(spec.cls, "__name__", spec.label)


def _distinct(plan: Plan) -> Iterable[LayerSpec]:
  return {id(run.spec): run.spec for segment in plan for run in segment.runs}.values()


def _bind(signature: inspect.Signature, spec: LayerSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
  try:
    signature.bind(None, None, *args, **kwargs)
  except TypeError as error:
    names = [p.name for p in list(signature.parameters.values())[2:]]
    wrong = [name for name in kwargs if name not in names]
    hint = f"; {nearest(wrong[0], names)}" if wrong else f"; it takes {', '.join(names) or 'hidden states only'}"
    raise TypeError(f"layer {_class_name(spec)}: {error}{hint}") from None


def _validate(stack: StackedDecoder) -> None:
  """Raises for options that cannot be, before anything is traced."""
  plan = stack.plan
  if not isinstance(plan, Plan):
    raise TypeError(f"plan must be a Plan or a Segment, not {plan!r}; Plan.homogeneous(spec, num_layers) makes one")
  names = [segment.name for segment in plan]
  if isinstance(stack.remat, Mapping):
    for name in stack.remat:
      if name not in names:
        raise ValueError(f"remat names segment {name!r}, which the plan does not have; {nearest(str(name), names)}")
    missing = [name for name in names if name not in stack.remat]
    if missing:
      raise ValueError(f"remat gives no policy for segment {missing[0]!r}; name one for each of {', '.join(names)}")
  for segment in plan:
    policy = stack.policy(segment.name)
    if policy.offloads and policy.remat:
      _check_memory_kind(policy.offload_dst)
  for name in ("scan", "collect_outputs"):
    if not isinstance(getattr(stack, name), bool):
      raise TypeError(f"{name} must be True or False, not {getattr(stack, name)!r}")
  for name in ("param_axis", "unroll"):
    value = getattr(stack, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
      raise TypeError(f"{name} must be an int, not {value!r}")
  if stack.unroll < 1:
    raise ValueError(f"unroll must be at least 1, not {stack.unroll}")
  if stack.inner not in ("auto", "scan", "unroll"):
    raise ValueError(f"inner must be 'auto', 'scan' or 'unroll', not {stack.inner!r}")
  offload = stack.offload_params
  if not isinstance(offload, (bool, int)) and not callable(offload):
    raise TypeError(f"offload_params must be a bool, a number of bytes or select(path, leaf), not {offload!r}")
  if offload is not False and stack.scan and stack.param_axis != 0:
    raise ValueError(f"offload_params needs param_axis=0, not {stack.param_axis}: along another axis the whole stack would be "
                     "copied to take one layer out of it; restack the checkpoint, or keep the parameters on device")
  if not stack.scan:
    apart = [f"{segment.name}_{i}" for segment in plan for i in range(segment.num_layers)]
    twice = next((name for name in apart if apart.count(name) > 1), None)
    if twice:
      raise ValueError(f"scan=False: two layers would be named {twice!r}; rename a segment of {', '.join(names)}")
  for spec in _distinct(plan):
    signature = lifts.call_signature(spec.cls) if isinstance(spec.cls, type) else None
    if signature is None:
      continue
    parameters = list(signature.parameters)[1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for option, wanted in (("static_argnames", stack.static_argnames),
                           ("layer_index", (stack.layer_index,) if stack.layer_index is not None else ())):
      for name in wanted:
        if name not in parameters and not open_ended:
          raise ValueError(f"{option}: layer {_class_name(spec)} has no argument {name!r}; {nearest(str(name), parameters[1:])}")


def _check_memory_kind(kind: str) -> None:
  kinds = sorted({memory.kind for memory in jax.local_devices()[0].addressable_memories()})
  if kind not in kinds:
    raise ValueError(f"the policy offloads to {kind!r}, which {jax.default_backend()} devices do not have; "
                     f"they have {', '.join(kinds)}")
