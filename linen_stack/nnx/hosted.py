"""How NNX layers run in the loops of the library: each call of a layer is a Linen module that has its variables.

The core stacks, slices, rematerialises and fetches the variables of Linen scopes, and lets out of its loops those that
a layer changed. A `Host` takes one layer's variables out of its scope, makes the NNX layer of them, calls it, and puts
back what the call changed or made. What is no array (graph, types and metadata of the variables) goes by a `Record`.

Variables of NNX stand in three collections: `params` (`nnx.Param` itself), `cache` (`nnx.Cache`), and all others.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

from flax import linen as nn
from flax import nnx
import jax

from linen_stack.calls import class_name
from linen_stack.lifting import outside_of_linen, split_static
from linen_stack.nnx.trees import boxed
from linen_stack.plan import Plan, Segment
from linen_stack.specs import LayerSpec, parameters_of
from linen_stack.stacked import is_box
from linen_stack.tags import tagged_names

Path = tuple[Any, ...]


@dataclasses.dataclass
class Record:
  """What is known of a layer beside its arrays. Nothing in it belongs to a trace."""

  graph: nnx.GraphDef
  kinds: dict[Path, nnx.Variable | None]
  """For each leaf of the layer a variable without value, metadata as in one layer; None for a bare array."""

  @classmethod
  def of(cls, layer: nnx.Module) -> tuple[Record, dict[Path, Any]]:
    """A layer's record and the values of its leaves. Raises TypeError for variables that are references."""
    graph, leaves = _split(layer)
    hidden = [(module, name, value) for path, module in nnx.iter_modules(layer) for name, value in vars(module).items()
              if isinstance(value, jax.core.Tracer) and (*path, name) not in leaves]
    for module, name, value in hidden:  # Flax takes traced arrays, unlike others, for static attributes
      setattr(module, name, nnx.data(value))
    graph, leaves = _split(layer) if hidden else (graph, leaves)
    for path, leaf in leaves.items():
      if isinstance(leaf, nnx.Variable) and leaf.ref:
        raise TypeError(f"variable {'/'.join(map(str, path))} of {type(layer).__name__} is a reference (ref=True), which "
                        "cannot be stacked; make it with ref=False")
    kinds = {path: leaf.replace(None) if isinstance(leaf, nnx.Variable) else None for path, leaf in leaves.items()}
    values = {path: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in leaves.items()}
    return cls(graph, kinds), values

  def layer(self, values: Mapping[Path, Any]) -> nnx.Module:
    """The layer with these values."""
    leaves = {path: values[path] if kind is None else kind.replace(values[path]) for path, kind in self.kinds.items()}
    return nnx.merge(self.graph, nnx.from_flat_state(leaves))


def _split(layer: nnx.Module) -> tuple[nnx.GraphDef, dict[Path, Any]]:
  graph, state = nnx.split(layer)
  return graph, dict(nnx.to_flat_state(state))


@dataclasses.dataclass(eq=False)
class Session:
  """One call, or the making, of all layers. Keys of the records are the paths of Linen modules."""

  run: Callable[[Host, Any, tuple[Any, ...], dict[str, Any]], Any]
  records: dict[Path, Record] = dataclasses.field(default_factory=dict)
  """Of the layers before the call."""
  results: dict[Path, Record] = dataclasses.field(default_factory=dict)
  """Of those that were made, or that the call changed."""
  seen: dict[str, set[str]] | None = None
  """Where the tags of the layers go, by segment, if they are asked for."""


class Host(nn.Module):
  """The Linen module in whose place an NNX layer runs."""

  spec: LayerSpec
  session: Session

  def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
    return self.session.run(self, x, args, kwargs)


@dataclasses.dataclass(frozen=True)
class Hosted:
  """What stands in a plan in the place of an NNX layer's class."""

  called: str
  func: Any
  """The class whose signature counts, where it is one."""
  hosts_nnx = True

  @property
  def __name__(self) -> str:
    return self.called

  def __call__(self, *, spec: LayerSpec, session: Session, name: str) -> Host:
    return Host(spec=spec, session=session, name=name)

  def boxes(self, arguments: Mapping[str, Any], path: Path) -> dict[Path, Any]:
    """What boxes the parameters of one layer of the run at `path` would be in on the Linen side, as far as axes have names."""
    kinds = arguments["session"].records[path].kinds
    boxes = {tuple(map(str, leaf)): boxed(kind) for leaf, kind in kinds.items() if collection(kind) == "params"}
    return {leaf: box for leaf, box in boxes.items() if is_box(box)}


def hosted(plan: Plan, session: Session | None = None, called: bool = True) -> Plan:
  """The plan of Linen modules for a plan of NNX layers. `called`: with the layers' own arguments."""
  def host(spec):
    func = getattr(spec.cls, "func", spec.cls) if called else None
    return LayerSpec(Hosted(class_name(spec), func), spec.label, spec=spec, session=session)

  return Plan(tuple(Segment(s.name, tuple(map(host, s.block)), s.length) for s in plan))


# Making layers ------------------------------------------------------------------------------------------------------------


def make(host: Host, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Makes a layer of the host's spec, with the host's rng streams, and stores its variables."""
  del args, kwargs
  spec, rngs = host.spec, nnx.Rngs(**{stream: host.make_rng(stream) for stream in host.scope.rngs})
  with outside_of_linen():
    layer = spec.cls(**spec.kwargs, **({"rngs": rngs} if takes(parameters_of(spec.cls), "rngs") else {}))
  if not isinstance(layer, nnx.Module):
    raise TypeError(f"{spec!r} made {type(layer).__name__}, which is no flax.nnx Module; bridge Linen layers with "
                    "ls.nnx.bridged(plan, x)")
  _store(host, layer)
  return x


def takes(parameters: Mapping[str, inspect.Parameter] | None, name: str) -> bool:
  """Whether a callable takes a keyword argument; what is not known to refuse it does."""
  return parameters is None or name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# Calling layers -----------------------------------------------------------------------------------------------------------


def call(host: Host, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """Calls the layer that has the host's variables, with the host's rng streams."""
  if host.scope.rngs:
    kwargs = {**kwargs, "rngs": nnx.Rngs(**{stream: host.make_rng(stream) for stream in host.scope.rngs})}
  return _call(host, x, args, kwargs)


def make_and_call(host: Host, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  """What a Linen layer does when it is initialised."""
  make(host, x, args, kwargs)
  host.session.records[host.path] = host.session.results.pop(host.path)
  return _call(host, x, args, kwargs)


def _call(host: Host, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
  session, before = host.session, host.session.records[host.path]
  values = read(before, host.variables)
  layer = before.layer(values)
  graph = nnx.graphdef(layer)
  if session.seen is not None:
    session.seen.setdefault(host.path[0], set()).update(_tags(before, values, x, args, kwargs))
  with outside_of_linen():
    result = layer(x, *args, **kwargs)
  _store(host, layer, graph)
  return result


def _store(host: Host, layer: nnx.Module, before: nnx.GraphDef | None = None) -> None:
  """Puts a layer's variables into the host's scope, and its record into the session where it differs from `before`."""
  record, values = Record.of(layer)
  if record.graph != before:
    other = host.session.results.setdefault(host.path, record)
    if other.graph != record.graph:
      raise ValueError(f"layers of run {'/'.join(host.path)!r} came out with different graphs; layers of one run must be "
                       "alike, give them specs that differ")
  tree: dict[str, Any] = {}
  place(tree, record, values)
  for name, variables in tree.items():
    for key, variable in variables.items():
      host.scope.put_variable(name, key, variable)  # what is still the same array never leaves the loop


def _tags(record: Record, values: Mapping[Path, Any], *call: Any) -> set[str]:
  """The names that a layer tags values with."""
  arrays, rebuild = split_static((values, call))

  def program(arrays):
    values, (x, args, kwargs) = rebuild(arrays)
    with outside_of_linen():
      record.layer(values)(x, *args, **kwargs)

  return tagged_names(jax.make_jaxpr(program)(arrays).jaxpr)


# Variables in scopes ------------------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Whole:
  """The value of a variable that is a dict itself: no more levels of the tree."""

  value: Any

  def tree_flatten(self):
    return (self.value,), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


def collection(kind: nnx.Variable | None) -> str:
  """Where a variable stands on the Linen side. Subclasses of `nnx.Param` are no weights of the layer but additions."""
  if type(kind) is nnx.Param:  # pylint: disable=unidiomatic-typecheck
    return "params"
  return "cache" if isinstance(kind, nnx.Cache) else "state"


def place(tree: dict[str, Any], record: Record, values: Mapping[Path, Any], at: Path = ()) -> None:
  """Puts values into `tree`, `{collection: nested dicts}`, below the path `at`."""
  for path, value in values.items():
    *keys, last = map(str, (collection(record.kinds[path]), *at, *path))
    branch = tree
    for key in keys:
      branch = branch.setdefault(key, {})
    branch[last] = _Whole(value) if isinstance(value, Mapping) else value


def read(record: Record, tree: Mapping[str, Any], at: Path = ()) -> dict[Path, Any]:
  """The values of a record's leaves in `tree`: the inverse of `place`."""
  values = {}
  for path, kind in record.kinds.items():
    value = tree
    for key in map(str, (collection(kind), *at, *path)):
      value = value[key]
    values[path] = value.value if isinstance(value, _Whole) else value
  return values

