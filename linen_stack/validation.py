"""Checks of a stack's options, before anything is traced."""
from __future__ import annotations

from collections.abc import Collection, Mapping
import difflib
import functools
import math
import sys
from typing import Any
import warnings

from flax import linen as nn
import jax
import numpy as np

from linen_stack import sharding
from linen_stack.calls import class_name, distinct_specs, layer_class, layer_signature
from linen_stack.lifting import is_array
from linen_stack.plan import Plan, Segment
from linen_stack.specs import nearest
from linen_stack.policies import RematPolicy
from linen_stack.stacked import on_host

HOST = "pinned_host"  # the memory that `jax.memory.Space.Host` is

_CHOICES = {"inner": ("auto", "scan", "unroll"), "barrier": ("cse", "loop"), "decode": ("unroll", "scan")}


def check_stack(stack: Any) -> None:
  """Raises TypeError or ValueError for options of a `StackedDecoder` that cannot be."""
  if not isinstance(stack.plan, Plan):
    raise TypeError(f"plan must be a Plan or a Segment, not {stack.plan!r}; Plan.homogeneous(spec, num_layers) makes one")
  for name in ("scan", "collect_outputs"):
    if not isinstance(getattr(stack, name), bool):
      raise TypeError(f"{name} must be True or False, not {getattr(stack, name)!r}")
  for name in ("param_axis", "unroll"):
    value = getattr(stack, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
      raise TypeError(f"{name} must be an int, not {value!r}")
  if stack.unroll < 1:
    raise ValueError(f"unroll must be at least 1, not {stack.unroll}")
  for name, choices in _CHOICES.items():
    value = getattr(stack, name)
    if value not in choices:
      raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}; {nearest(str(value), choices)}")
  _check_layers(stack)
  _check_policies(stack)
  _check_offload(stack)
  _check_prefetch(stack)
  _check_names(stack)
  _check_arguments(stack)


def _check_layers(stack: Any) -> None:
  nnx = sys.modules.get("flax.nnx")  # which nobody has to have imported who stacks Linen layers
  for spec in distinct_specs(stack.plan) if nnx is not None else ():
    cls = layer_class(spec)
    if cls is not None and issubclass(cls, nnx.Module) and not hasattr(spec.cls, "hosts_nnx"):
      raise TypeError(f"layer {class_name(spec)} is a flax.nnx Module; write LayerSpec(functools.partial(nnx.bridge.to_linen, "
                      f"{class_name(spec)}), ...), or stack it with ls.nnx.ScannedLayers")


def _check_policies(stack: Any) -> None:
  names = [segment.name for segment in stack.plan]
  if isinstance(stack.remat, Mapping):
    for name in stack.remat:
      if name not in names:
        raise ValueError(f"remat names segment {name!r}, which the plan does not have; {nearest(str(name), names)}")
    missing = [name for name in names if name not in stack.remat]
    if missing:
      raise ValueError(f"remat gives no policy for segment {missing[0]!r}; name one for each of {', '.join(names)}")
  for segment in stack.plan:
    policy = stack.policy(segment.name)
    if policy.offloads:
      check_memory_kind(policy.offload_dst, "the policy offloads to",
                        remedy="policy.saved keeps those values on the device")
    if policy.levels is not None or policy.every > 1:
      if not stack.scan or stack.unroll > 1:
        raise ValueError(f"segment {segment.name!r}: {'levels' if policy.levels else 'every'} shapes the loop over layers and "
                         "needs scan=True and unroll=1")
      levels(segment, policy)


def levels(segment: Segment, policy: RematPolicy) -> tuple[int, ...]:
  """The nested loops over a segment's repeats that a policy asks for; () for one plain loop.

  Raises ValueError where they do not come out even, with the sizes that would.
  """
  at, size = f"segment {segment.name!r} of {segment.length} repeats", len(segment.block)
  divisors = [d for d in range(1, segment.length + 1) if segment.length % d == 0]
  if policy.levels is not None:
    if math.prod(policy.levels) != segment.length:
      raise ValueError(f"levels={policy.levels} multiply to {math.prod(policy.levels)}, but {at} needs {segment.length}; its "
                       f"divisors are {', '.join(map(str, divisors))}. remat={{segment: policy}} gives each its own")
    if policy.offload and len(policy.levels) > 2:
      raise ValueError(f"levels={policy.levels}: values can be offloaded from two nested loops, not from {len(policy.levels)}")
    return policy.levels
  if policy.every == 1 or (segment.length == 1 and size <= policy.every):
    return ()
  if policy.every % size or segment.length % (policy.every // size):
    raise ValueError(f"every={policy.every} layers do not divide {at} of {size} layer{'s' if size > 1 else ''}; possible are "
                     f"{', '.join(str(d * size) for d in divisors)}. remat={{segment: policy}} gives each its own")
  return (segment.length // (policy.every // size), policy.every // size)


def _check_offload(stack: Any) -> None:
  offload = stack.offload_params
  if not isinstance(offload, (bool, int)) and not callable(offload):
    raise TypeError(f"offload_params must be a bool, a number of bytes or select(path, leaf), not {offload!r}")
  if isinstance(offload, int) and offload < 0:
    raise ValueError(f"offload_params={offload}: a number of bytes cannot be negative; True, False or select(path, leaf) will "
                     "do")
  if offload is False:
    return
  if not stack.scan:
    raise ValueError("offload_params saves nothing with scan=False: outside of a loop the compiler fetches the parameters "
                     "of many layers at once; set scan=True, or offload_params=False")
  check_memory_kind(HOST, "offload_params keeps parameters in")
  if stack.param_axis != 0:
    raise ValueError(f"offload_params needs param_axis=0, not {stack.param_axis}: along another axis the whole stack would be "
                     "copied to take one layer out of it; restack the checkpoint, or keep the parameters on device")


def _check_prefetch(stack: Any) -> None:
  if not isinstance(stack.prefetch, bool):
    raise TypeError(f"prefetch must be True or False, not {stack.prefetch!r}")
  if not stack.prefetch:
    return
  if not stack.scan:
    raise ValueError("prefetch=True fetches for the next step of a loop over layers, and with scan=False there is none; set "
                     "scan=True, or prefetch=False")
  for segment in stack.plan:
    policy = stack.policy(segment.name)
    if policy.levels is not None or policy.every > 1:
      option = f"levels={policy.levels}" if policy.levels else f"every={policy.every}"
      raise ValueError(f"prefetch=True goes from layer to layer in one plain loop, but segment {segment.name!r} has {option}, "
                       "which makes loops of loops; take a policy without it, or prefetch=False")
  runs = [(segment, run) for segment in stack.plan for run in segment.runs]
  if not any(segment.length > 1 or (run.count > 1 and stack.inner != "unroll") for segment, run in runs):
    raise ValueError("prefetch=True fetches for the next step of a loop over layers, and no segment of the plan is one ("
                     f"{', '.join(segment.name for segment in stack.plan)}); set prefetch=False")


def check_placed(stack: Any, fetched: Collection[str]) -> None:
  """Raises ValueError where a call with `prefetch` found no parameters to fetch, and warns where one with `offload_params`
  found none in host memory: results are right, but nothing is saved."""
  place = "jax.device_put(params, ls.host_shardings(stack, params))"
  if stack.prefetch and not fetched:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
      sharding.check_rules(nn.get_logical_axis_rules(), mesh)
    raise ValueError(f"prefetch=True has nothing to fetch: no parameter of a loop is in host memory (offload_params=True, and "
                     f"{place}), and none is split over a mesh axis of several devices that splits the batch as well "
                     "(jax.set_mesh and nn.logical_axis_rules around the call, with rules for 'batch' and for the names of "
                     "the parameters' axes); place them in one of these ways, or set prefetch=False")
  if stack.offload_params is False:
    return
  params = stack.variables.get("params", {})
  if not any(on_host(leaf) for segment in stack.plan for leaf in jax.tree.leaves(params.get(segment.name))):
    warnings.warn(f"offload_params={stack.offload_params}, but the parameters are on the device, and stay there: {place} "
                  "brings them to host memory; shapes without values need those shardings as well", stacklevel=_callers_level())


def _callers_level() -> int:
  """For warnings of the function that asks: how many frames up is what is neither JAX nor Flax nor this library."""
  frame, level = sys._getframe(1), 1  # pylint: disable=protected-access
  while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "flax", "linen_stack"):
    frame, level = frame.f_back, level + 1
  return level


def _check_names(stack: Any) -> None:
  for name in ("shared_rngs", "static_argnames"):
    value = getattr(stack, name)
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
      raise TypeError(f"{name} must be a tuple of names, not {value!r}")
  if not stack.scan:
    apart = [f"{segment.name}_{i}" for segment in stack.plan for i in range(segment.num_layers)]
    if len(set(apart)) < len(apart):
      twice = next(name for name in apart if apart.count(name) > 1)
      raise ValueError(f"scan=False: two layers would be named {twice!r}; rename a segment of "
                       f"{', '.join(segment.name for segment in stack.plan)}")


def _check_arguments(stack: Any) -> None:
  if stack.layer_index is not None and not isinstance(stack.layer_index, str):
    raise TypeError(f"layer_index must be the name of an argument, not {stack.layer_index!r}")
  index = () if stack.layer_index is None else (stack.layer_index,)
  for spec in distinct_specs(stack.plan):
    signature = layer_signature(spec)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
      continue
    known = list(signature.parameters)[1:]
    for option, names in (("static_argnames", stack.static_argnames), ("layer_index", index)):
      for name in names:
        if name not in known:
          raise ValueError(f"{option}: layer {class_name(spec)} has no argument {name!r}; {nearest(name, known[1:])}")


def check_memory_kind(kind: str, what: str, device: Any = None, remedy: str = "keep them on the device") -> None:
  """Raises ValueError where a device (default: the first) lacks a memory."""
  device = jax.local_devices()[0] if device is None else device
  kinds = sorted({memory.kind for memory in device.addressable_memories()})
  if kind not in kinds:
    raise ValueError(f"{what} {kind!r}, which {device.platform} devices do not have; they have {', '.join(kinds)}; "
                     f"{remedy}")


def check_selection(stack: Any, asked: Mapping[str, bool]) -> None:
  """Raises ValueError where `offload_params` selects none of the parameters that it was asked about."""
  if stack.offload_params is False or any(asked.values()):
    return
  which = "True, matrices of at least 16 KiB a layer" if stack.offload_params is True else stack.offload_params
  raise ValueError(f"offload_params ({which}) selects none of the layers' parameters: {', '.join(list(asked)[:8])}; "
                   "give a number of bytes from which on they go to the host, select(path, leaf), or False")


def check_layout(stack: Any) -> None:
  """Raises where variables are there, but in the layout of the other value of `scan`, for another depth, or split over a mesh
  though they are in host memory."""
  if stack.is_initializing():
    return
  for name in sharding.layer_axes(stack.plan) if stack.offload_params is not False else ():
    if sharding.over(name):
      raise ValueError(f"offload_params: the layers along {name!r} are split over mesh axis {' x '.join(sharding.over(name))}, "
                       "but they are fetched from host memory one by one, by all devices; let the rules map that axis to None")
  given, names = stack.scope.root.variables(), [segment.name for segment in stack.plan]
  top = {*stack.scope.path[:1]} or {*names, *(f"{name}_0" for name in names)}
  if "params" not in given and not top.isdisjoint(given):
    raise ValueError(f"there is no collection 'params' among the variables, but {', '.join(map(repr, given))}: they are the "
                     'parameters themselves; pass {"params": params}')
  check_axis(stack)
  has = functools.partial(stack.has_variable, "params")
  for segment in stack.plan:
    stacked, names = has(segment.name), [f"{segment.name}_{i}" for i in range(segment.num_layers)]
    there = [name for name in names if has(name)]
    if stack.scan and there and not stacked:
      raise ValueError(f"parameters of segment {segment.name!r} are missing, but {there[0]!r} is there: they were "
                       "made with scan=False, and this stack has scan=True; stack them first, or set scan=False")
    if not stack.scan and stacked and not there:
      raise ValueError(f"parameters of layer {names[0]!r} are missing, but {segment.name!r} is there: they were "
                       "made with scan=True, and this stack has scan=False; unstack them first, or set scan=True")
    surplus = f"{segment.name}_{segment.num_layers}"
    if not stack.scan and there and has(surplus) and all(surplus != other.name for other in stack.plan):
      raise ValueError(f"parameters of {surplus!r} are there, but segment {segment.name!r} has only {segment.num_layers} "
                       "layers: they were made for a deeper decoder")


def check_call(stack: Any, x: Any) -> None:
  """Raises for hidden states that are no arrays, and for a shared stream that was meant for another name."""
  leaves = jax.tree.leaves(x)
  for leaf in leaves or [x]:
    if not leaves or not (is_array(leaf) or isinstance(leaf, (int, float, complex))):
      raise TypeError(f"the hidden states must be an array or a tree of arrays, found {leaf!r}")
  for stream in stack.shared_rngs:
    near = difflib.get_close_matches(stream, [s for s in stack.scope.rngs if s not in stack.shared_rngs], n=1)
    if stream not in stack.scope.rngs and near:
      raise ValueError(f"shared_rngs names {stream!r}, which is not among the streams given; did you mean {near[0]!r}?")


def check_axis(stack: Any) -> None:
  """Raises ValueError where no stacked parameter has the axis `param_axis`; those of fewer axes have their layers last."""
  there = [segment.name for segment in stack.plan if any(map(segment.axes, segment.runs)) and
           stack.has_variable("params", segment.name)]
  most = max((len(leaf.shape) for name in there for leaf in jax.tree.leaves(stack.get_variable("params", name))), default=0)
  if most and stack.scan and not -most <= stack.param_axis < most:
    raise ValueError(f"param_axis={stack.param_axis} is an axis that no parameter has: stacked, they have {most} at most; "
                     f"give 0 to {most - 1}, or -1 to -{most}")
