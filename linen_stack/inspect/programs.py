"""Programs to be compiled elsewhere: a function, its arguments as shapes, and how both lie on a mesh that is only named."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from linen_stack import placement, sharding
from linen_stack.inspect import flops
from linen_stack.inspect.arrays import is_array, take_arrays
from linen_stack.inspect.chips import Chip, Topology
from linen_stack.inspect.residuals import ResidualReport, residuals
from linen_stack.inspect.watch import Watch, watching
from linen_stack.sharding import Rules
from linen_stack.stack import StackedDecoder
from linen_stack.validation import HOST


@dataclasses.dataclass(frozen=True)
class Program:
  """A function of arrays on a mesh."""

  fn: Callable[..., Any]
  args: tuple[Any, ...]
  """Trees of `jax.ShapeDtypeStruct`, each with its sharding."""
  mesh: AbstractMesh
  rules: Rules = ()
  """Which mesh axis each logical axis goes over, for `nn.with_logical_constraint` in the function."""
  out_shardings: Any = None
  """A prefix of the result's tree; None: the compiler chooses."""
  donate: tuple[int, ...] = ()
  """Arguments whose memory the results may take."""
  loss: Callable[..., Any] | None = None
  """A function of the same arguments to what the program differentiates: the forward pass alone."""
  remat: Any = None
  """Replaces the remat of every stack in it."""
  stacks: tuple[StackedDecoder, ...] = ()
  """The stacks in it."""

  def trace(self) -> Any:
    """The traced function, as `jax.jit(...).trace` gives it."""
    options = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
    with self.around():
      return jax.jit(self.fn, donate_argnums=self.donate, **options).trace(*self.args)

  def residuals(self) -> ResidualReport:
    """What its backward pass keeps, over all devices."""
    with self.around():
      return residuals(self.loss, *self.args)

  def forward(self, chip: Chip) -> tuple[flops.Cost, int, int]:
    """What its forward pass costs; bytes of one device's arguments in host memory that it reads; those that it does not."""
    with self.around():
      jaxpr = jax.make_jaxpr(self.loss)(*self.args).jaxpr
    cost, used = flops.Walk(chip, self.mesh.size).run(jaxpr, [True] * len(jaxpr.outvars))
    host = {True: 0, False: 0}
    for leaf, wanted in zip(jax.tree.leaves(self.args), used):
      if leaf.sharding.memory_kind == HOST:
        host[wanted] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return cost, host[True], host[False]

  def batch_shards(self) -> int:
    """Among how many devices the batch, and with it what the backward pass keeps, is spread."""
    axes = batch_spec(self.rules)[0] or ()
    return math.prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

  @contextlib.contextmanager
  def around(self) -> Iterator[None]:
    """What holds while it is traced: its mesh, its rules, its remat."""
    with contextlib.ExitStack() as contexts:
      contexts.enter_context(jax.sharding.use_abstract_mesh(self.mesh))
      contexts.enter_context(nn.logical_axis_rules(self.rules))
      if self.remat is not None:
        contexts.enter_context(watching(remat=self.remat))
      yield

  def open_results(self, traced: Any) -> list[bool]:
    """For each result, whether the compiler chooses where it lies."""
    count = len(traced.jaxpr.out_avals)
    if self.out_shardings is None:
      return [True] * count
    placed = jax.tree.broadcast(self.out_shardings, traced.out_info, is_leaf=lambda leaf: leaf is None)
    return [leaf is None for leaf in jax.tree.leaves(placed, is_leaf=lambda leaf: leaf is None)]

  def cost(self, traced: Any, chip: Chip) -> flops.Cost:
    """What it costs, over all devices, dead code left out."""
    return flops.program_cost(traced.jaxpr.jaxpr, chip=chip, devices=self.mesh.size)


def as_mesh(mesh: Any, topology: Topology) -> AbstractMesh:
  """The mesh over all devices of a topology: None for one axis, "fsdp"; a mapping from axis names to sizes, of which one may
  be -1 for what is left; or a mesh.

  Raises TypeError for what is no mesh, ValueError where the number of devices is another.
  """
  if mesh is None:
    mesh = {"fsdp": -1}
  if isinstance(mesh, Mesh):
    mesh = mesh.abstract_mesh
  if isinstance(mesh, Mapping):
    for name, size in mesh.items():
      if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise TypeError(f"mesh must map names of axes to sizes of at least 1, or -1, not {name!r} to {size!r}")
    left = topology.num_devices // math.prod(size for size in mesh.values() if size != -1)
    mesh = {name: max(left, 1) if size == -1 else size for name, size in mesh.items()}
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
  if not isinstance(mesh, AbstractMesh):
    raise TypeError(f"mesh must be a mapping from axis names to sizes or a jax.sharding mesh, not {mesh!r}")
  if mesh.size != topology.num_devices:
    sizes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    raise ValueError(f"mesh ({sizes}) has {mesh.size} devices, but {topology} has {topology.num_devices}")
  return mesh


def as_rules(rules: Any, mesh: AbstractMesh) -> Rules:
  """Rules as flax takes them, from a mapping or pairs; None: `sharding.FSDP`, over all axes of the mesh.

  Raises ValueError for a mesh axis that does not exist.
  """
  if rules is None:
    rules = {name: axes and mesh.axis_names for name, axes in sharding.FSDP.items()}
  pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules)
  sharding.check_rules(pairs, mesh)
  return tuple((logical, tuple(axes) if isinstance(axes, list) else axes) for logical, axes in pairs)


def batch_spec(rules: Rules) -> PartitionSpec:
  """How the rules spread a batch: over its leading axis."""
  return PartitionSpec(dict(reversed(rules)).get("batch"))


def placed(tree: Any, specs: Any, mesh: AbstractMesh, what: str) -> Any:
  """The arrays of a tree as shapes with shardings.

  Args:
    specs: a prefix of the tree: `PartitionSpec`, a sharding, or None for whole copies on all devices. An array that has
      a sharding over such a mesh keeps it where nothing is said.
    what: for messages.

  Raises ValueError where a dimension cannot be divided among the devices that a spec names, TypeError for no spec.
  """
  is_leaf = lambda leaf: leaf is None or isinstance(leaf, (PartitionSpec, NamedSharding))
  specs = jax.tree.broadcast(specs, tree, is_leaf=is_leaf)
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  flat = jax.tree.leaves(specs, is_leaf=is_leaf)
  return treedef.unflatten([_place(leaf, spec, mesh, f"{what}{jax.tree_util.keystr(path)}")
                            for (path, leaf), spec in zip(leaves, flat)])


def _place(leaf: Any, spec: Any, mesh: AbstractMesh, what: str) -> Any:
  if not is_array(leaf):
    return leaf
  memory_kind = None
  if spec is None:
    own = getattr(leaf, "sharding", None)
    spec = own if isinstance(own, NamedSharding) and own.mesh.size == mesh.size else PartitionSpec()
  if isinstance(spec, NamedSharding):
    memory_kind, spec = spec.memory_kind, spec.spec
  if not isinstance(spec, PartitionSpec):
    raise TypeError(f"shardings: {what} needs a jax.sharding.PartitionSpec, not {spec!r}")
  if len(spec) > len(leaf.shape):
    raise ValueError(f"shardings: {what} of shape {list(leaf.shape)} has fewer dimensions than {spec}")
  for axis in (axis for axes in spec for axis in sharding.as_tuple(axes)):
    if axis not in mesh.axis_names:
      raise ValueError(f"shardings: {what}: {axis!r} is no axis of the mesh; its axes are {', '.join(mesh.axis_names)}")
  sharding.check_divides(leaf.shape, spec, mesh, what)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec, memory_kind=memory_kind))


def variables_of(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Watch]:
  """The variables of a module as shapes, boxed with their logical axes, and the stacks in it. Allocates nothing."""
  arrays, rebuild = take_arrays((args, kwargs))

  def init(key, arrays):
    args, kwargs = rebuild(arrays)
    return module.init({"params": key, "dropout": key}, *args, **kwargs)

  with watching() as watch:
    boxed = jax.eval_shape(init, jax.random.key(0), arrays)
  # What layers sow anew in every call is no variable of theirs.
  return {name: tree for name, tree in boxed.items() if name not in ("losses", "intermediates")}, watch


def place_variables(boxed: Any, watch: Watch, mesh: AbstractMesh, rules: Rules, what: str = "variables") -> Any:
  """Unboxed variables, or a tree with parts like parameters such as an optimiser's state, with shardings.

  They lie as rules say of their logical axes, on the device or, where stacks fetch them from there, on the host. Raises
  ValueError for logical axes without a rule, and for dimensions that do not divide among devices.
  """
  specs = sharding.lay_out(boxed, mesh, rules, [stack.plan for stack in watch.stacks.values()], f"{what} ")
  collections = isinstance(boxed, Mapping) and "params" in boxed
  offloading = [stack for stack in watch.stacks.values() if stack.offload_params is not False]

  def where(path: Any, leaf: Any) -> Any:
    keys = tuple(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
    if collections and keys[0] != "params":
      return leaf
    for stack in offloading:
      place = placement.find(stack.plan, keys)
      if place is not None and place.fits(leaf) and stack.selects("/".join(place.own), place.one(leaf)):
        placement.check_layers_whole("/".join(keys), leaf.sharding.spec[:len(place.sizes)])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind(HOST))
    return leaf

  return jax.tree_util.tree_map_with_path(where, placed(nn.unbox(boxed), specs, mesh, what))


def shardings(tree: Any) -> Any:
  """The shardings of a tree of placed arrays."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def gradients(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: AbstractMesh, rules: Rules,
              specs: Any) -> Program:
  """The loss and gradients of a module: of the mean square of its results, and of what it sows in `losses`.

  Args:
    args, kwargs: of its call, arrays as shapes.
    specs: a prefix of (args, kwargs) as in `placed`. None: arrays whose leading axis is as long as that of the first
      are spread over it as the rule for "batch" says.
  """
  boxed, watch = variables_of(module, *args, **kwargs)
  variables = place_variables(boxed, watch, mesh, rules)
  call = (args, dict(kwargs))
  arrays, rebuild = take_arrays(call)
  if specs is None:
    batch = next((leaf.shape[:1] for leaf in arrays if leaf.shape), None)
    specs = jax.tree.map(lambda leaf: batch_spec(rules) if is_array(leaf) and leaf.shape[:1] == batch else
                         PartitionSpec(), call)
  arrays, _ = take_arrays(placed(call, specs, mesh, "args"))

  def loss(params, others, arrays):
    args, kwargs = rebuild(arrays)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    out, changed = module.apply({"params": params, **others}, *args, rngs=rngs, mutable=[*others, "losses"], **kwargs)
    squares = [jnp.mean(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(out)
               if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    sown = [jnp.sum(leaf) for leaf in jax.tree.leaves(changed.pop("losses", {}))]
    return sum(squares) + sum(sown), changed

  def step(params, others, arrays):
    return jax.value_and_grad(loss, has_aux=True)(params, others, arrays)

  params = variables.pop("params")
  return Program(step, (params, variables, arrays), mesh, rules, ((None, shardings(variables)), shardings(params)),
                 loss=lambda *args: loss(*args)[0], stacks=tuple(watch.stacks.values()))


def of_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: AbstractMesh, rules: Rules,
                specs: Any, donate: tuple[int, ...]) -> Program:
  """A function as it is. `specs`: a prefix of args, as in `placed`; `donate`: positions in args."""
  for position in donate:
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(args):
      raise ValueError(f"donate_argnums: there is no argument {position!r}; {len(args)} were given")
  _, rebuild = take_arrays((args, dict(kwargs)))
  parts = (*placed(args, specs, mesh, "args"), placed(dict(kwargs), None, mesh, "kwargs"))

  def call(*parts):
    args, kwargs = rebuild([leaf for part in parts for leaf in part])
    return fn(*args, **kwargs)

  return Program(call, tuple(take_arrays(part)[0] for part in parts), mesh, rules, donate=donate)
