"""Where parameters stand: shardings, memory kinds included, for parameters and for trees shaped like them.

What a stack's `offload_params` selects belongs in host memory, everything else on the device. One tree of shardings
serves `jax.device_put(params, shardings)`, `jax.jit(..., out_shardings=shardings)` and, in templates, orbax.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from linen_stack.plan import Plan, Run, Segment
from linen_stack.sharding import lay_out
from linen_stack.stack import StackedDecoder
from linen_stack.stacked import is_box, value
from linen_stack.validation import HOST, check_memory_kind, check_selection


def host_shardings(stack: StackedDecoder | Plan, abstract: Any, mesh: Mesh | None = None, *,
                   select: Callable[[str, Any], bool] | None = None,
                   rules: Iterable[tuple[str, Any]] | None = None) -> Any:
  """The sharding of each leaf: in host memory where `stack.offload_params` says so, else on the device.

  Example::

    abstract = nn.unbox(jax.eval_shape(model.init, key, tokens))["params"]
    shardings = ls.host_shardings(model.stack, abstract)
    params = jax.jit(lambda key: nn.unbox(model.init(key, tokens))["params"], out_shardings=shardings)(key)

  Args:
    stack: whose parameters they are. A plan stands for `StackedDecoder(plan, offload_params=True)`.
    abstract: parameters, as shapes or arrays, boxed or not; variables, of which only `params` moves; or a tree with
      parts like parameters: gradients, averages, an optimiser's state. Leaves without the layers' axes stay on device.
    mesh: the devices. Leaves are split over it by the names in their boxes; without a box they are whole everywhere.
      None: the first device alone.
    select: `select(path, leaf) -> bool`, which leaves outside of the plan's layers (an embedding, a head) go to the
      host as well; `path` as it is in the tree. Their modules must fetch them, as with `ls.offload_params`.
    rules: pairs (logical axis, mesh axis or None), one for each logical axis; axes that count layers are whole without.
      Default: those of `nn.logical_axis_rules` around the call.

  Returns:
    A tree of shardings, one in the place of each leaf or box.

  Raises:
    TypeError, ValueError: arguments that cannot be; nothing is selected; a logical axis without a rule, or that does not
      divide among devices; layers in host memory that are split over the mesh; devices without host memory.
  """
  if isinstance(stack, Plan):
    stack = StackedDecoder(stack, offload_params=True)
  if not isinstance(stack, StackedDecoder):
    raise TypeError(f"stack must be a StackedDecoder or a Plan, not {type(stack).__name__}; of a model it is "
                    "model.stack")
  if mesh is not None and not isinstance(mesh, Mesh):
    raise TypeError(f"mesh must be a jax.sharding.Mesh, which has devices, not {mesh!r}")
  if select is not None and not callable(select):
    raise TypeError(f"select must be a function select(path, leaf) -> bool, not {select!r}")
  leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=is_box)
  paths = [keys(path) for path, _ in leaves]
  variables = isinstance(abstract, Mapping) and "params" in abstract
  # Optimisers keep other things under the paths of parameters as well, and some have a dict with a state for each group of
  # parameters; where all is dicts, it is the parameters.
  parameters = all(isinstance(key, jax.tree_util.DictKey) for path, _ in leaves for key in path)
  if parameters:
    _check_one_place(stack.plan, [path for path in paths if not variables or path[0] == "params"])
  asked: dict[str, bool] = {}
  hosts = []
  for path, (_, leaf) in zip(paths, leaves):
    array, place, name = value(leaf), find(stack.plan, path), "/".join(path)
    if variables and path[0] != "params":
      hosts.append(False)
    elif place is None:
      hosts.append(select is not None and bool(select(name, array)))
    else:
      asked[name] = place.fits(array) and stack.selects("/".join(place.own), place.one(array))
      hosts.append(asked[name])
  if parameters and asked:
    check_selection(stack, asked)
  # JAX learns from named shardings alone in which memory the arrays are that jit or orbax makes.
  over = mesh if mesh is not None else jax.make_mesh(
      (1,), ("device",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])
  for device in over.devices.flat if any(hosts) else ():
    check_memory_kind(HOST, "parameters are to be in", device)
  specs = [PartitionSpec()] * len(leaves) if mesh is None else jax.tree.leaves(
      lay_out(abstract, mesh, rules, [stack.plan]), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
  shardings = []
  for path, spec, host in zip(paths, specs, hosts):
    sharding, place = NamedSharding(over, spec), find(stack.plan, path)
    if host and place is not None:
      check_layers_whole("/".join(path), spec[:len(place.sizes)])
    shardings.append(sharding.with_memory_kind(HOST) if host else sharding)
  return treedef.unflatten(shardings)


def with_shardings(abstract: Any, shardings: Any) -> Any:
  """Shapes that know where they belong: templates for `jit(...).lower` and for orbax to restore into."""
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings)


@dataclasses.dataclass(frozen=True)
class Place:
  """Where in a plan a variable belongs."""

  prefix: tuple[str, ...]
  """What stands before the segment's name."""
  own: tuple[str, ...]
  """The path in the layer's own tree."""
  sizes: tuple[int, ...]
  """Sizes of the axes that count layers."""

  def fits(self, leaf: Any) -> bool:
    return tuple(leaf.shape[:len(self.sizes)]) == self.sizes

  def one(self, leaf: Any) -> jax.ShapeDtypeStruct:
    """One layer's part."""
    return jax.ShapeDtypeStruct(leaf.shape[len(self.sizes):], leaf.dtype)


def find(plan: Plan, path: tuple[str, ...]) -> Place | None:
  """The place of the variable at `path`, as `keys` gives it; None: it is in no segment of the plan."""
  for start in range(len(path)):
    for segment, run in _runs(plan):
      where = segment.path(run)
      if path[start:start + len(where)] == where:
        return Place(path[:start], path[start + len(where):], tuple(size for _, size in segment.axes(run)))
  return None


def _runs(plan: Plan) -> list[tuple[Segment, Run]]:
  return [(segment, run) for segment in plan for run in segment.runs]


def keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  """The keys of the dicts on a path; what optimisers put around parameters is left out."""
  return tuple(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))


def _check_one_place(plan: Plan, paths: Iterable[tuple[str, ...]]) -> None:
  prefixes = list(dict.fromkeys(place.prefix for path in paths if (place := find(plan, path)) is not None))
  if len(prefixes) > 1:
    first, second = ("/".join(prefix) or "the top" for prefix in prefixes[:2])
    raise ValueError(f"segments of the plan stand at {first} and at {second}: which of them are the stack's? "
                     "Call host_shardings with the part of the tree that holds this stack's parameters")


def check_layers_whole(path: str, axes: Iterable[Any]) -> None:
  """Raises ValueError where one of the mesh axes over which a leaf's layers lie is not None."""
  for axis in axes:
    if axis is not None:
      raise ValueError(f"{path}: its layers are split over mesh axis {axis!r}, but they are fetched from host memory one "
                       "by one, by all devices; let the rules map the layer axis to None, or keep it on the device")
