"""Low-rank adapters (LoRA): a chosen matrix W counts as W + scale * A B, and A and B alone are trained.

    stack = ls.lora(stack, rank=8, targets=["query", "value"])
    adapters = stack.apply({"params": base}, x, mutable=["lora"], rngs={"lora": key})[1]["lora"]
    y = stack.apply({"params": base, "lora": adapters}, x)
    base = ls.merge_lora(stack, {"params": base, "lora": adapters})["params"]

Adapters stand in the collection `lora`, at the path of their parameter: `a` [layers, *in, rank] and `b` [layers, rank, *out],
the layers first whatever the param axis. There is no changed copy of W, and its gradient is not computed: see
`linen_stack.low_rank`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import fnmatch
import math
from typing import Any

from flax import linen as nn
from flax.core.scope import LazyRng
import jax
from jax import lax
import jax.numpy as jnp

from linen_stack import lifting, low_rank, placement
from linen_stack.calls import Call
from linen_stack.convert.layout import index_map, order
from linen_stack.specs import checked_count, nearest
from linen_stack.stack import StackedDecoder
from linen_stack.stacked import is_box, value

COLLECTION = "lora"
_NO_KERNEL = "which no product of the layer sums over its first axes"


@dataclasses.dataclass(frozen=True)
class LoRA:
  """Which parameters have adapters, and of what size."""

  rank: int
  targets: tuple[str, ...] | Callable[[str, Any], bool]
  scale: float

  def selects(self, path: str, leaf: Any) -> bool:
    if callable(self.targets):
      return bool(self.targets(path, leaf))
    return any(_matches(pattern, path) for pattern in self.targets)

  def check(self, paths: Mapping[str, bool]) -> None:
    """Raises ValueError for a pattern that matches none of the layers' parameters, or only some whose value is False."""
    for pattern in () if callable(self.targets) else self.targets:
      matched = [path for path in paths if _matches(pattern, path)]
      if not matched:
        known = dict.fromkeys([*(key for path in paths for key in path.split("/")), *paths])
        raise ValueError(f"targets: no parameter of the layers matches {pattern!r}; {nearest(pattern, known)}")
      if not any(paths[path] for path in matched):
        kernels = [path for path, is_kernel in paths.items() if is_kernel]
        also = f"; kernels are {', '.join(kernels[:8])}" if kernels else ""
        raise ValueError(f"targets: {pattern!r} matches {', '.join(matched[:4])}, {_NO_KERNEL}{also}")


def _matches(pattern: str, path: str) -> bool:
  """Whether some keys of a path that follow each other are what a pattern says."""
  return fnmatch.fnmatchcase(f"/{path}/", f"*/{pattern}/*")


class LoraDecoder(StackedDecoder):
  """A `StackedDecoder` with adapters; made by `lora`."""

  adapters: LoRA | None = None

  @nn.nowrap
  def _inside(self, layer: Callable[..., Any], call: Call) -> Callable[..., Any]:
    return layer if self.adapters is None else _adapted(layer, self.adapters, call.paths)

  @nn.nowrap
  def _check_call(self, x: Any) -> None:
    super()._check_call(x)
    params = {} if self.is_initializing() else self.variables.get("params", {})
    places = index_map(self.plan, self.scan)
    paths = {"/".join(path): True for place in places for path, _ in _leaves(_at(params, place.path))}
    if paths:
      self.adapters.check(paths)

  @nn.nowrap
  def _traced(self, call: Call) -> None:
    self.adapters.check(call.paths)


def lora(stack: StackedDecoder, rank: int, targets: Sequence[str] | Callable[[str, Any], bool], *,
         alpha: float | None = None) -> StackedDecoder:
  """A stack whose chosen matrices W [*in, *out] count as W + alpha / rank * A B.

  Its parameters are those of `stack`, in their places. The adapters are `a` [layers, *in, rank] and `b` [layers, rank, *out] in
  the collection `lora`, made by `init`, or by `apply` where `lora` is mutable and not there yet; `b` is zero at first, so that
  results are those of `stack`. Differentiate with respect to that collection alone. Of a model,
  `model.clone(stack=ls.lora(model.stack, ...))`.

  Args:
    rank: columns of A and rows of B.
    targets: patterns of keys of a layer's own tree, in which * stands for anything ("query", "attention/*/kernel"), or
      `select(path, leaf) -> bool`. Each must be the kernel of a product, in at least one kind of layer.
    alpha: default: `rank`, a factor of 1.

  Raises:
    TypeError, ValueError: arguments that cannot be. When called, before layers are traced: a pattern that no parameter
      matches, with the nearest. A target that no product sums over its first axes; adapters that are not there.
  """
  if not isinstance(stack, StackedDecoder) or isinstance(stack, LoraDecoder):
    what = "one that has adapters already" if isinstance(stack, LoraDecoder) else type(stack).__name__
    raise TypeError(f"lora takes a StackedDecoder, not {what}; of a model it is model.clone(stack=ls.lora(model.stack, ...))")
  checked_count(rank, "rank")
  if isinstance(targets, str):
    targets = (targets,)
  if not callable(targets):
    targets = tuple(targets)
    if not targets or not all(isinstance(pattern, str) and pattern for pattern in targets):
      raise ValueError(f"targets must be patterns of parameters' paths or select(path, leaf), not {targets!r}")
  if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha)):
    raise TypeError(f"alpha must be a finite number, not {alpha!r}")
  options = {field.name: getattr(stack, field.name) for field in dataclasses.fields(stack) if field.name != "parent"}
  return LoraDecoder(**options, adapters=LoRA(rank, targets, 1.0 if alpha is None else alpha / rank))


def merge_lora(stack: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
  """Variables without adapters whose parameters give the same results: W + scale * A B in the place of W.

  Args:
    stack: what `lora` returned, or a model around it.
    variables: with the collections `params` and `lora`; leaves may be in boxes, in host memory and split over devices.

  Raises TypeError for a stack without adapters, ValueError for adapters that have no parameter, or are not there.
  """
  stack = stack if isinstance(stack, StackedDecoder) else getattr(stack, "stack", stack)
  if not isinstance(stack, LoraDecoder):
    raise TypeError(f"stack must be what ls.lora returned, or a model around it, not {type(stack).__name__}")
  for name in ("params", COLLECTION):
    if name not in variables:
      raise ValueError(f"variables have no collection {name!r}; there are {', '.join(map(repr, variables)) or 'none'}")
  merged, found = dict(variables["params"]), list(_pairs(variables[COLLECTION]))
  for path, a, b in found:
    kernel = _at(merged, path)
    if kernel is None:
      raise ValueError(f"{'/'.join(path)}: there are adapters, but no such parameter")
    place = placement.find(stack.plan, path)
    layers = len(place.sizes) if stack.scan and place is not None else 0
    dims = order(stack.param_axis, layers, jnp.ndim(value(kernel)) - layers)
    new = _merge(value(kernel), value(a), value(b), stack.adapters.scale, layers, dims)
    merged = _replaced(merged, path, kernel.replace_boxed(new) if is_box(kernel) else new)
  return {**{name: tree for name, tree in variables.items() if name != COLLECTION}, "params": merged}


def _merge(kernel: Any, a: Any, b: Any, scale: float, layers: int, dims: Sequence[int]) -> Any:
  of_layers = tuple(range(layers))
  change = lax.dot_general(a, b, (((a.ndim - 1,), (layers,)), (of_layers, of_layers))).transpose(dims)
  if change.shape != kernel.shape:
    raise ValueError(f"adapters {list(a.shape)} and {list(b.shape)} do not fit a parameter {list(kernel.shape)}")
  here = jax.device_put(kernel, jax.memory.Space.Device)
  new = (here + scale * change).astype(kernel.dtype)
  if isinstance(kernel, jax.core.Tracer):
    return jax.device_put(new, jax.typeof(kernel).memory_space)
  return jax.device_put(new, kernel.sharding) if isinstance(kernel, jax.Array) else new


# Trees ------------------------------------------------------------------------------------------------------------------


def _leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  """The paths and leaves, boxes whole, of a nested dict."""
  return [(tuple(str(getattr(key, "key", key)) for key in path), leaf)
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)]


def _pairs(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
  if set(tree) == {"a", "b"} and not isinstance(tree["a"], Mapping):
    yield path, tree["a"], tree["b"]
    return
  for key, inner in tree.items():
    yield from _pairs(inner, (*path, key))


def _at(tree: Any, path: Sequence[str]) -> Any:
  for key in path:
    tree = tree.get(key) if isinstance(tree, Mapping) else None
  return tree


def _replaced(tree: Mapping[str, Any], path: Sequence[str], leaf: Any) -> dict[str, Any]:
  key, *rest = path
  return {**tree, key: _replaced(tree.get(key, {}), rest, leaf) if rest else leaf}


# Layers -----------------------------------------------------------------------------------------------------------------


def _adapted(layer: Callable[..., Any], chosen: LoRA, paths: dict[str, bool]) -> Callable[..., Any]:
  """A function over a module, with adapters. Adds the module's parameters to `paths`, and whether they are kernels."""

  def lifted(fn):
    def stage(pure, scopes, own, variables, rngs, *args, **kwargs):
      arrays, rebuild = lifting.split_static((args, kwargs))

      def call(params, variables, rngs, arrays):
        args, kwargs = rebuild(arrays)
        return pure(_with(variables, own, {"params": params}), rngs, *args, **kwargs)

      made = "params" not in variables[own]
      result, changed = pure(variables, rngs, *args, **kwargs) if made else (None, ())
      params = (changed if made else variables)[own].get("params", {})
      leaves = _leaves(params)
      program, shapes = jax.make_jaxpr(call, return_shape=True)(params, variables, rngs, arrays)
      summed = [low_rank.summed_axes(program.jaxpr, program.jaxpr.invars[i]) for i in range(len(leaves))]
      targets, adapters, new = [], variables[own].get(COLLECTION, {}), {}
      for i, (path, leaf) in enumerate(leaves):
        name = "/".join(path)
        paths[name] = paths.get(name, False) or bool(summed[i])
        if not chosen.selects(name, value(leaf)):
          continue
        if not summed[i] and callable(chosen.targets):
          raise ValueError(f"targets: it selects {name} {list(value(leaf).shape)}, {_NO_KERNEL}")
        if summed[i]:
          targets.append(i)
          if _at(adapters, path) is None:
            new = _replaced(new, path, _make(chosen, leaf, summed[i], path, rngs[own], scopes[own]))
      if not made:
        values = jax.tree.leaves((params, variables, rngs, arrays))
        for i in targets:
          pair = _at(lifting.merged(adapters, new), leaves[i][0])
          values[i] = low_rank.Kernel(values[i], value(pair["a"]), value(pair["b"]), chosen.scale)
        results = low_rank.run(program.jaxpr, program.consts, values)
        result, changed = jax.tree.unflatten(jax.tree.structure(shapes), list(map(low_rank.whole, results)))
      return result, _with(changed, own, {COLLECTION: new}) if new else changed

    return lifting.lift_with_own_scope(fn, stage, "lora")

  return lifting.lift_transform(lifted, layer)


def _with(variables: Sequence[Any], own: int, collections: Mapping[str, Any]) -> tuple[Any, ...]:
  return tuple({**cols, **collections} if i == own else cols for i, cols in enumerate(variables))


def _make(chosen: LoRA, leaf: Any, summed: int, path: Sequence[str], rngs: Mapping[str, Any], scope: Any) -> dict[str, Any]:
  """New adapters of one layer's parameter. Raises ValueError where none can be made."""
  name = "/".join(path)
  if not scope.is_mutable_collection(COLLECTION):
    raise ValueError(f"there are no adapters of {name}: pass the collection {COLLECTION!r} beside params; init makes it, or "
                     f"apply with mutable=[{COLLECTION!r}]")
  rng = rngs.get(COLLECTION, rngs.get("params"))
  if rng is None:
    raise ValueError(f"adapters of {name} are to be made, which takes a key: rngs={{{COLLECTION!r}: key}}")
  kernel = value(leaf)
  dtype = jnp.promote_types(kernel.dtype, jnp.float32)
  init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=range(summed), out_axis=-1)
  a = init(LazyRng.create(rng, COLLECTION, *path).as_jax_rng(), (*kernel.shape[:summed], chosen.rank), dtype)
  b = jnp.zeros((chosen.rank, *kernel.shape[summed:]), dtype)
  if not isinstance(leaf, nn.meta.Partitioned):
    return {"a": a, "b": b}
  return {"a": leaf.replace(value=a, names=(*leaf.names[:summed], None)),
          "b": leaf.replace(value=b, names=(None, *leaf.names[summed:]))}
