"""`ScannedLayers`: NNX layers of a plan, stacked and looped over as `StackedDecoder` does it with Linen layers."""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any
import weakref

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from linen_stack import lifting
from linen_stack.calls import class_name, distinct_specs, layer_signature
from linen_stack.nnx import hosted
from linen_stack.nnx.hosted import Path, Record, Session
from linen_stack.nnx.trees import graft, stack_names, unstack_names
from linen_stack.plan import Plan, Segment
from linen_stack.specs import LayerSpec
from linen_stack.stack import StackedDecoder

# Policies whose names were found among the tags of a plan's layers, so that calls need not look again.
_checked: weakref.WeakKeyDictionary[Plan, list[Any]] = weakref.WeakKeyDictionary()


Axes = tuple[tuple[str, int], ...]


class Block(nnx.Module):
  """One repeat of a cycle: its runs of layers, by name."""


class ScannedLayers(nnx.Module):
  """The layers of a plan, one after the other: the NNX twin of `StackedDecoder`.

  Example::

    plan = ls.Plan.homogeneous(ls.LayerSpec(MyLayer, width=512), num_layers=32)
    model = ls.nnx.ScannedLayers(plan, rngs=nnx.Rngs(0), remat="minimal")
    y = model(x, mask)
    model.layers.attention.query.kernel  # an nnx.Param [layers, ...]

  A layer is an `nnx.Module` class (or a function that returns one) that takes `rngs=` if it needs keys. It is called as a
  Linen layer is, and what it does to its variables lasts: counters of rng streams, batch statistics, caches, sown values,
  and variables or submodules that it makes when it is called, such as adapters, which appear in the module, stacked.
  Parameters that no layer wrote never leave the loop.

  Layers stand as attributes `<segment>`, in a cycle `<segment>.<run>`, with `scan=False` `<segment>_<i>`: one module each,
  whose variables are stacked, and so are their names in `out_sharding`. `nnx.Param` is stacked on `param_axis`, all else on
  axis 0.

  Args:
    plan: which layers, in which order. A single `Segment` will do.
    rngs: the streams that layers are made with: `nnx.Rngs`, a key or a seed. Each layer gets keys of its own.
    **options: those of `StackedDecoder`: remat, scan, param_axis, offload_params, layer_index and the others.

  Raises, when built: TypeError or ValueError for options that cannot be, and for layers that are no NNX modules.
  Raises, when called: TypeError for arguments that a layer does not take, ValueError for a layer that changes the hidden
  states' structure, shape or dtype, and, the first time, for a policy that names values that no layer tags.
  """

  def __init__(self, plan: Plan | Segment, *, rngs: nnx.Rngs | jax.Array | int, **options: Any):
    plan = Plan.of(plan) if isinstance(plan, Segment) else plan
    if not isinstance(plan, Plan):
      raise TypeError(f"plan must be a Plan or a Segment, not {plan!r}; Plan.homogeneous(spec, num_layers) makes one")
    for spec in distinct_specs(plan):
      _check_spec(spec)
    if isinstance(options.get("remat"), dict):
      options["remat"] = nn.FrozenDict(options["remat"])
    shared = tuple(options.pop("shared_rngs", ()))
    self.plan = plan
    self.stack = StackedDecoder(hosted.hosted(plan), **options, parent=None)  # whatever Linen module it is made in
    for path in self._paths():
      if hasattr(nnx.Module, path[-1]) or path[-1] in ("plan", "stack"):
        raise ValueError(f"a segment or run is named {path[-1]!r}, as an attribute of the module is; give it another name")
    self._make(rngs if isinstance(rngs, nnx.Rngs) else nnx.Rngs(rngs), shared)

  def _paths(self) -> dict[Path, Axes]:
    """Where the layers' modules are, with their stacked axes."""
    if not self.stack.scan:
      return {(f"{segment.name}_{i}",): () for segment in self.plan for i in range(segment.num_layers)}
    return {segment.path(run): segment.axes(run) for segment in self.plan for run in segment.runs}

  def _make(self, rngs: nnx.Rngs, shared: tuple[str, ...]) -> None:
    """Makes the layers in one loop for each run, as `StackedDecoder.init` does."""
    session = Session(hosted.make)
    maker = StackedDecoder(
        hosted.hosted(self.plan, session, called=False), remat="none", scan=self.stack.scan, param_axis=self.stack.param_axis,
        offload_params=self.stack.offload_params, shared_rngs=shared, parent=None)
    made = maker.init({stream: rngs[stream]() for stream in rngs}, jnp.zeros(()))
    for path, axes in self._paths().items():
      record = session.results[path]
      module, parent = self._stacked(record, hosted.read(record, made, path), axes), self
      for name in path[:-1]:
        if not hasattr(parent, name):
          setattr(parent, name, Block())
        parent = getattr(parent, name)
      setattr(parent, path[-1], module)

  def __call__(self, x: Any, *args: Any, rngs: nnx.Rngs | None = None, **kwargs: Any) -> Any:
    """Applies all layers.

    Args:
      x: the hidden states, an array or any pytree of arrays.
      *args, **kwargs: passed to every layer. `ls.per_layer(values)` hands layer i element i.
      rngs: handed on to layers that take keys when they are called; each layer gets keys of its own.

    Returns:
      As `StackedDecoder`: the hidden states, or `(hidden states, outputs)`.
    """
    _check_arguments((x, args, kwargs))
    if rngs is not None:
      self._check_takes_rngs()
    session, before, variables = Session(hosted.call), {}, {}
    for path, axes in self._paths().items():
      session.records[path], before[path] = self._unstacked(path, axes)
      hosted.place(variables, session.records[path], before[path], path)
    policies = [self.stack.policy(segment.name) for segment in self.plan]
    named = any(policy.names or policy.base is not None for policy in policies)
    session.seen = {} if named and policies not in _checked.get(self.plan, []) else None
    stack = self.stack.clone(plan=hosted.hosted(self.plan, session), parent=None)
    apply = nn.apply(lambda stack: stack(x, *args, **kwargs), stack, mutable=True)
    result, after = apply(variables, rngs=None if rngs is None else {stream: rngs[stream]() for stream in rngs})
    if session.seen is not None:
      stack._check_policies(session.seen)  # pylint: disable=protected-access
      _checked.setdefault(self.plan, []).append(policies)
    for path, axes in self._paths().items():
      self._keep(path, axes, session, before[path], after)
    return result

  def initialised(self) -> StackedDecoder:
    """The Linen module that makes and calls such layers when it is initialised: what reports trace."""
    return self.stack.clone(plan=hosted.hosted(self.plan, Session(hosted.make_and_call)), parent=None)

  def _check_takes_rngs(self) -> None:
    for spec in distinct_specs(self.stack.plan):
      if not hosted.takes(getattr(layer_signature(spec), "parameters", None), "rngs"):
        raise TypeError(f"layer {class_name(spec)} takes no rngs when it is called; those that it was made with are its own")

  def _module(self, path: Path) -> nnx.Module:
    return functools.reduce(getattr, path, self)

  def _stacked(self, record: Record, values: Mapping[Path, Any], axes: Axes) -> nnx.Module:
    """The module of a run, of stacked values and the record of one layer."""
    layer = record.layer(values)
    for _, leaf in nnx.to_flat_state(nnx.state(layer)):
      if isinstance(leaf, nnx.Variable):
        stack_names(leaf, axes, self._axis(leaf))
    return layer

  def _unstacked(self, path: Path, axes: Axes) -> tuple[Record, dict[Path, Any]]:
    """The record of one layer of a run, and the run's stacked values."""
    record, values = Record.of(self._module(path))
    for leaf, kind in record.kinds.items():
      if kind is not None:
        rank = getattr(values[leaf], "ndim", len(axes))
        unstack_names(kind, axes, self._axis(kind), rank, "/".join(map(str, (*path, *leaf))))
    return record, values

  def _axis(self, kind: nnx.Variable) -> int:
    return self.stack.param_axis if hosted.collection(kind) == "params" else 0

  def _keep(self, path: Path, axes: Axes, session: Session, before: Mapping[Path, Any], after: Mapping[str, Any]) -> None:
    """Brings what a call did to the variables of a run into its module."""
    record = session.results.get(path)
    if record is not None:
      graft(self._module(path), self._stacked(record, hosted.read(record, after, path), axes), {})
      return
    values = hosted.read(session.records[path], after, path)
    leaves = dict(nnx.to_flat_state(nnx.state(self._module(path))))
    for leaf in lifting.changed(values, before):
      if isinstance(leaves[leaf], nnx.Variable):
        leaves[leaf].set_raw_value(values[leaf])
      else:
        nnx.update(self._module(path), nnx.from_flat_state({leaf: values[leaf]}))


def _check_spec(spec: LayerSpec) -> None:
  """Raises TypeError for a spec that makes no NNX layers, or that would make a copy of a module for each layer."""
  cls = spec.cls.func if isinstance(spec.cls, functools.partial) else spec.cls
  if isinstance(cls, type) and issubclass(cls, nn.Module):
    raise TypeError(f"layer {class_name(spec)} is a flax.linen Module; StackedDecoder stacks those, and "
                    "ls.nnx.bridged(plan, x) makes NNX layers of them")
  if isinstance(cls, nnx.Module) or (isinstance(cls, type) and not issubclass(cls, nnx.Module)):
    raise TypeError(f"cls of {spec!r} must be an nnx.Module class, or a function that returns one")
  for name, value in spec.kwargs.items():
    if any(isinstance(leaf, (nnx.Pytree, nnx.Variable)) for leaf in _nodes(value)):
      raise TypeError(f"layer {class_name(spec)}: argument {name!r} holds an NNX module or variable, of which each layer "
                      "would get a copy; let the layer make its own, or pass arrays to the call, which all layers see")


def _check_arguments(arguments: Any) -> None:
  if any(isinstance(leaf, (nnx.Pytree, nnx.Variable)) for leaf in _nodes(arguments)):
    raise TypeError("an NNX module or variable among the arguments: what layers do to it would be lost; pass its arrays "
                    "(variable[...], nnx.split), or rngs=nnx.Rngs(...) for keys")


def _nodes(tree: Any) -> list[Any]:
  return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, (nnx.Pytree, nnx.Variable)))
