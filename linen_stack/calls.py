"""One call of a stack: the modules of its layers, which arguments are whole and which per layer, and whether they fit."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import inspect
from typing import Any

from flax import linen as nn
import jax

from linen_stack import lifts
from linen_stack.lifting import is_array
from linen_stack.per_layer import PerLayer, check, cut
from linen_stack.plan import Plan, Run, Segment
from linen_stack.specs import LayerSpec, nearest
from linen_stack.tags import tagged_names


class _Slot:
  """Stands in an argument where each layer's own part goes: part `index` of the per-layer arguments, or the layer index."""

  def __init__(self, index: int | None):
    self.index = index


@dataclasses.dataclass(frozen=True)
class Call:
  """The arguments of one call: `args` and `kwargs` with slots, and the per-layer values that fill the slots."""

  plan: Plan
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  per_layer: tuple[tuple[str, PerLayer], ...]
  has_index: bool
  as_list: bool
  listed: bool
  """Whether loops run in Python over lists: per-layer arguments came as a list of arrays, and nothing is to be stacked."""
  seen: dict[str, set[str]] = dataclasses.field(default_factory=dict)
  """Tags by segment, filled at initialisation."""
  fetched: list[str] = dataclasses.field(default_factory=list)
  """Parameters that loops fetch ahead."""
  asked: dict[str, bool] = dataclasses.field(default_factory=dict)
  """Of which parameters it was asked whether they belong in host memory, and the answer."""
  paths: dict[str, bool] = dataclasses.field(default_factory=dict)
  """Parameters of layers that may have adapters, and whether they are kernels of products."""

  @classmethod
  def of(cls, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], *, layer_index: str | None = None,
         static_argnames: Iterable[str] = (), decode: str = "scan") -> Call:
    """Raises TypeError or ValueError for arguments that a layer does not take, or that do not fit the plan."""
    found: list[tuple[str, PerLayer]] = []

    def slot(path, leaf):
      if not isinstance(leaf, PerLayer):
        return leaf
      name = jax.tree_util.keystr(path[1:])
      check(plan, leaf, name)
      found.append((name, leaf))
      return _Slot(len(found) - 1)

    args, kwargs = jax.tree_util.tree_map_with_path(slot, (args, kwargs), is_leaf=lambda x: isinstance(x, PerLayer))
    if layer_index is not None:
      if layer_index in kwargs:
        raise TypeError(f"argument {layer_index!r} is given by layer_index and was passed as well")
      kwargs = {**kwargs, layer_index: _Slot(None)}
    for spec in distinct_specs(plan):
      signature = layer_signature(spec)
      if signature is not None:
        _bind(signature, spec, args, kwargs)
      lifts.check_static(signature, tuple(static_argnames), (None, *args), kwargs)
    lists = [arg for _, arg in found if arg.is_list]
    arrays = any(map(is_array, jax.tree.leaves([arg.value for arg in lists])))
    return cls(plan, args, kwargs, tuple(found), layer_index is not None, bool(lists), arrays and decode == "unroll")

  def cut(self, segment: Segment, listed: bool) -> tuple[Any, Any]:
    """A segment's parts of the per-layer arguments, and its layer indices in the same form (none if not asked for)."""
    index = [("layer_index", PerLayer(list(range(self.plan.num_layers)), is_list=True))] if self.has_index else []
    return cut(self.plan, self.per_layer, segment, listed), cut(self.plan, index, segment, listed)

  def fill(self, parts: list[Any], index: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """One layer's arguments."""
    if not self.per_layer and not self.has_index:
      return args, kwargs
    put = lambda leaf: leaf if not isinstance(leaf, _Slot) else index[0] if leaf.index is None else parts[leaf.index]
    return jax.tree.map(put, (args, kwargs))

  def see(self, watch: Any, segment: Segment, run: Run, jaxpr: Any) -> None:
    """Notes the tags of a layer's program, and hands it on to `watch`."""
    self.seen.setdefault(segment.name, set()).update(tagged_names(jaxpr))
    if watch is not None:
      watch(segment, run, jaxpr)


def build(spec: LayerSpec, name: str) -> nn.Module:
  """The module of a spec, under `name`. Module templates among its arguments are copied: each layer owns its own.

  A module that already belongs to a parent is passed as it is: all layers share it.
  """
  layer = spec.cls(**{key: _own_copy(value) for key, value in spec.kwargs.items()}, name=name)
  if not isinstance(layer, nn.Module):
    raise TypeError(f"{spec!r} made {layer!r}, which is no flax.linen Module; nnx.bridge.to_linen bridges NNX layers, and "
                    "ls.nnx.ScannedLayers stacks them")
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


def layer_class(spec: LayerSpec) -> type | None:
  """The class of a spec's layers, also where it is partly applied (`func`); None: a function makes them."""
  cls = getattr(spec.cls, "func", spec.cls)
  return cls if isinstance(cls, type) else None


def layer_signature(spec: LayerSpec) -> inspect.Signature | None:
  """The signature of a layer's `__call__`; None where it is not known."""
  cls = layer_class(spec)
  return None if cls is None else lifts.call_signature(cls)


def class_name(spec: LayerSpec) -> str:
  """How messages call a layer."""
  return getattr(spec.cls, "__name__", spec.label)


def distinct_specs(plan: Plan) -> list[LayerSpec]:
  """One spec for every run."""
  return [run.spec for segment in plan for run in segment.runs]


def _bind(signature: inspect.Signature, spec: LayerSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
  try:
    signature.bind(None, None, *args, **kwargs)
  except TypeError as error:
    names = [p.name for p in list(signature.parameters.values())[2:]]
    wrong = [name for name in kwargs if name not in names]
    hint = nearest(wrong[0], names) if wrong else f"it takes {', '.join(names) or 'hidden states only'}"
    raise TypeError(f"layer {class_name(spec)}: {error}; {hint}") from None
