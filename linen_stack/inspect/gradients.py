"""`check_gradients`: whether a policy leaves the gradients alone, on the device at hand or on a mesh."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from linen_stack import sharding
from linen_stack.inspect import render
from linen_stack.inspect.watch import Place, Watch, watching
from linen_stack.per_layer import indices
from linen_stack.stacked import on_host

# Gradients that are zero but for rounding are not compared with themselves: no scale is below this part of the largest.
_LEAST_SCALE = 1e-3


@dataclasses.dataclass(frozen=True)
class GradientReport:
  """How far gradients under a policy are from those under full remat. Prints as a few lines."""

  rtol: float
  largest: float
  """The largest relative difference of all; inf where a gradient is not finite."""

  leaf: str | None
  """Path of the first gradient that differs by more than `rtol`; None: none does."""

  layer: int | None
  """Index in the decoder of the first layer for which it does; None for a leaf that belongs to no layer."""

  differences: tuple[tuple[str, float], ...]
  """The largest relative difference of each gradient, by path."""

  mesh: str | None = None
  """The devices on which the policy ran, full remat on one; None: both on one."""

  @property
  def ok(self) -> bool:
    return self.leaf is None

  def __str__(self) -> str:
    here, there = ("", "") if self.mesh is None else (f" on a mesh ({self.mesh})", " on one device")
    lines = [f"gradients under the policy{here} and under full remat{there}: largest relative difference {self.largest:.3g}, "
             f"allowed {self.rtol:.3g}, {render.plural(len(self.differences), 'array')}"]
    if not self.ok:
      layer = "" if self.layer is None else f", in layer {self.layer}"
      lines.append(f"first that differs: {self.leaf}{layer}")
    return "\n".join(lines)


def check_gradients(stack: nn.Module, *args: Any, rtol: float = 1e-5, seed: int = 0, mesh: Mesh | None = None,
                    rules: Iterable[tuple[str, Any]] | None = None, **kwargs: Any) -> GradientReport:
  """Compares gradients of all parameters and floating arguments under the stack's policy with those under full remat.

  Runs on the default device; with a mesh, the policy (and `prefetch`) runs there, and full remat on one device as before, so
  that it also shows whether the compiler splits the layers right. Every layer gets weights of its own, so that mixed-up
  layers show: parameters are initialised and then disturbed. Differences are relative to the largest gradient in a layer's
  part of an array.

  Args:
    stack: a `StackedDecoder`, or a module that contains one or several.
    *args, **kwargs: arguments of its call, arrays with values. With a mesh, those that are laid out over it stay so; if
      none is, the arrays of the first one are split along their first axis by the rule for "batch".
    rtol: the largest relative difference allowed.
    seed: of parameters, dropout and the cotangent of the output.
    mesh: the devices, over which parameters lie by the names in their boxes. Not the one of `jax.set_mesh` around the call.
    rules: pairs (logical axis, mesh axes or None), by default those of `nn.logical_axis_rules` around the call.

  Raises:
    TypeError: no module, no mesh, rules without one, or arguments without values.
    ValueError: the module calls no `StackedDecoder`; a policy that does not fit its layers, as `init` raises it; rules that
      do not fit, as `host_shardings` raises it, or that split nothing.
  """
  if not isinstance(stack, nn.Module):
    raise TypeError("stack must be a StackedDecoder or a Linen module that contains one (of NNX layers, their Linen twin), not "
                    f"of {type(stack)}")
  if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
    raise TypeError("check_gradients computes gradients and needs arrays with values, not jax.ShapeDtypeStruct")
  rules = _checked(mesh, rules)
  # Of some generators the numbers depend on how arrays are split.
  key = jax.random.key(seed, impl=None if mesh is None else "threefry2x32")
  rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
  given = args, kwargs
  if mesh is not None:  # to one device
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)) if _mesh_of(x) == mesh else x, given)
  with watching() as watch:
    variables = jax.jit(lambda: stack.init(rngs, *args, **kwargs))()
  if not watch.stacks:
    raise ValueError(f"{type(stack).__name__} calls no StackedDecoder when it is initialised")
  boxed = _disturbed(variables.pop("params", {}), seed)
  inputs = nn.unbox(boxed), args, kwargs
  leaves, tree = jax.tree.flatten(inputs)
  arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
  floats = [i for i, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, np.inexact)]

  def gradients(arrays):
    def call(floats):
      values = {**arrays, **floats}
      params, args, kwargs = tree.unflatten([values.get(i, leaf) for i, leaf in enumerate(leaves)])
      out, _ = stack.apply({**variables, "params": params}, *args, rngs=rngs, mutable=list(variables), **kwargs)
      return [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, np.inexact)]

    out, back = jax.vjp(call, {i: arrays[i] for i in floats})
    keys = jax.random.split(jax.random.fold_in(key, 2), len(out))
    return back([jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, out)])[0]

  def run(arrays, **options):
    with watching(**options):
      # A function of its own, as jax would take two equal ones for one.
      return jax.device_get(jax.jit(lambda arrays: gradients(arrays))(arrays))  # pylint: disable=unnecessary-lambda

  if mesh is None:
    found = run(arrays)
  else:
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
      specs = sharding.lay_out(boxed, mesh, None, [stack.plan for stack in watch.stacks.values()])
      placed = jax.tree.leaves(_placed(inputs, specs, given, mesh))
      found = run({i: placed[i] for i in arrays})
  wanted = run(arrays, remat="full", prefetch=False)
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(inputs)]
  report = _compare({_label(paths[i]): (found[i], wanted[i]) for i in floats}, watch, rtol)
  return report if mesh is None else dataclasses.replace(report, mesh=", ".join(f"{k} {n}" for k, n in mesh.shape.items()))


def _checked(mesh: Any, rules: Any) -> sharding.Rules:
  if mesh is None and rules is not None or not isinstance(mesh, Mesh | None):
    raise TypeError(f"mesh must be a jax.sharding.Mesh, over whose devices the rules lay arrays, not {mesh!r}")
  if mesh is None:
    return ()
  if not jax.sharding.get_abstract_mesh().empty:
    raise ValueError("check_gradients compares its mesh with one device; call it outside of jax.set_mesh")
  rules = tuple(nn.get_logical_axis_rules() if rules is None else rules)
  sharding.check_rules(rules, mesh)
  return rules


def _is_array(leaf: Any) -> bool:
  """Whether it is traced; flags of NumPy's stay what they are."""
  return isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, np.generic) and np.issubdtype(leaf.dtype, np.inexact)


def _mesh_of(leaf: Any) -> Any:
  return getattr(leaf.sharding, "mesh", None) if isinstance(leaf, jax.Array) else None


def _placed(inputs: Any, specs: Any, given: Any, mesh: Mesh) -> Any:
  """(params, args, kwargs) on a mesh, as the rules around say; `given`: (args, kwargs) as they were given."""
  params, *arguments = inputs
  batch = PartitionSpec(sharding.batch_axes() or None)
  laid_out = any(_mesh_of(leaf) == mesh for leaf in jax.tree.leaves(given))

  def put(spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec, memory_kind="pinned_host" if on_host(x) else None))

  def put_argument(path, x, as_given):
    if not _is_array(x) or _mesh_of(as_given) == mesh:
      return as_given
    first = path[:2] == (jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(0))
    spec = batch if first and jnp.ndim(x) and not laid_out else PartitionSpec()
    sharding.check_divides(jnp.shape(x), spec, mesh, f"argument {jax.tree_util.keystr(path[1:], simple=True, separator='/')}")
    return put(spec, x)

  placed = jax.tree.map(put, specs, params), jax.tree_util.tree_map_with_path(put_argument, tuple(arguments), given)
  if all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed) if isinstance(leaf, jax.Array)):
    raise ValueError("the rules split no parameter and not the first argument over the mesh; give them by names that "
                     "parameters have in their boxes, and one for \"batch\"")
  return placed


def _disturbed(params: Any, seed: int) -> Any:
  """Parameters with a tenth of their size added at random, also to those that start as ones or zeros."""
  random = np.random.default_rng(seed)

  def disturb(leaf):
    if not jnp.issubdtype(leaf.dtype, np.floating):
      return leaf
    wide = np.asarray(leaf, np.float32)
    scale = np.sqrt(np.mean(np.square(wide))) or 1.0
    moved = (wide + 0.1 * scale * random.standard_normal(wide.shape, np.float32)).astype(leaf.dtype)
    return jax.device_put(moved, leaf.sharding)  # in host memory, if it was made there

  return jax.tree.map(disturb, params)


def _label(path: Any) -> str:
  words = jax.tree_util.keystr(path[1:], simple=True, separator="/")
  return words if path[0].idx == 0 else f"argument {words}"


def _compare(pairs: dict[str, tuple[Any, Any]], watch: Watch, rtol: float) -> GradientReport:
  wide = {label: tuple(np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in pair)
          for label, pair in pairs.items()}
  least = _LEAST_SCALE * max((np.max(np.abs(b), initial=0.0) for _, b in wide.values()), default=0.0)
  first: tuple[str, int | None] | None = None
  differences = []
  for label, (a, b) in wide.items():
    worst = 0.0
    for layer, part_a, part_b in _layers(label, a, b, watch):
      scale = max(np.max(np.abs(part_b), initial=0.0), least)
      apart = float(np.max(np.abs(part_a - part_b), initial=0.0) / scale) if scale else 0.0
      apart = apart if np.isfinite(apart) else float("inf")
      worst = max(worst, apart)
      if apart > rtol and first is None:
        first = (label, layer)
    differences.append((label, worst))
  leaf, layer = first if first is not None else (None, None)
  return GradientReport(rtol, max((worst for _, worst in differences), default=0.0), leaf, layer, tuple(differences))


def _layers(label: str, a: np.ndarray, b: np.ndarray,
            watch: Watch) -> Iterator[tuple[int | None, np.ndarray, np.ndarray]]:
  """Two gradients cut into layers, with the layers' indices in the decoder."""
  keys = tuple(label.split("/"))
  for path, index in watch.layers.items():
    if keys[:len(path)] != path:
      continue
    place = watch.places[index]
    stack = watch.stacks[place.stack]
    if not stack.scan:
      yield stack.plan.offset(place.segment.name) + int(path[-1].rsplit("_", 1)[1]), a, b
      return
    where = indices(stack.plan, place.segment, place.run)
    a, b = (_layers_first(x, place, stack.param_axis) for x in (a, b))
    for at in np.ndindex(where.shape):
      yield int(where[at]), a[at], b[at]
    return
  yield None, a, b


def _layers_first(x: np.ndarray, place: Place, param_axis: int) -> np.ndarray:
  for front, _ in enumerate(place.segment.axes(place.run)):
    rank = x.ndim - front
    at = max(rank + param_axis, 0) if param_axis < 0 else min(param_axis, rank - 1)
    x = np.moveaxis(x, front + at, front)
  return x
