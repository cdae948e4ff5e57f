"""Logical axes on a mesh: where rules lay them, what has to hold for that, and constraints of activations by name.

A rule maps a logical axis to an axis of the mesh, to several, or to None: whole on every device. An axis that counts
layers has the name of its segment or run, and is whole unless a rule names it. Where it is split, each device holds some
of the layers (`linen_stack.stages`).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import PartitionSpec

from linen_stack.plan import Plan
from linen_stack.specs import nearest
from linen_stack.stacked import is_box, names_of, value

Rules = Sequence[tuple[str, Any]]

# The logical axes of the parameters in `linen_stack.models`, beside those that count layers.
AXES = ("embed", "mlp", "vocab", "norm", "q_heads", "kv_heads", "head_dim", "q_rank", "kv_rank", "expert", "channels", "conv")
# Fully sharded data parallelism: every device holds a part of each matrix and of the batch.
FSDP: Mapping[str, Any] = {"batch": "fsdp", "hidden": None, **{name: "fsdp" if name == "embed" else None for name in AXES}}


def as_tuple(axes: Any) -> tuple[str, ...]:
  """The mesh axes of a rule or of an entry of a `PartitionSpec`."""
  return (axes,) if isinstance(axes, str) else tuple(axes or ())


def layer_axes(plan: Plan) -> frozenset[str]:
  """The names of a plan's axes that count layers."""
  return frozenset(name for segment in plan for run in segment.runs for name, _ in segment.axes(run))


def check_rules(rules: Rules, mesh: Any) -> None:
  """Raises TypeError for rules that are no pairs, ValueError for one over an axis that the mesh does not have."""
  for rule in rules:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[0], str):
      raise TypeError(f"rules must be pairs (logical axis, mesh axes or None), not {rule!r}; of a dict, its items()")
    name, axes = rule
    for axis in as_tuple(axes):
      if axis not in mesh.axis_names:
        raise ValueError(f"rules: {name!r} goes over {axis!r}, which is no axis of the mesh; "
                         f"its axes are {', '.join(mesh.axis_names)}")


def lay_out(boxed: Any, mesh: Any, rules: Any, plans: Iterable[Plan] = (), what: str = "") -> Any:
  """The `PartitionSpec` of each leaf or box of a tree, by the names in its box.

  Args:
    rules: pairs (logical axis, mesh axes or None). None: those of `nn.logical_axis_rules` around the call.
    plans: whose axes that count layers need no rule.
    what: for messages, what stands before the paths.

  Raises ValueError for a rule over an axis that the mesh does not have, logical axes without a rule, and dimensions that do
  not divide among the devices of their mesh axes.
  """
  rules = tuple(nn.get_logical_axis_rules() if rules is None else rules)
  check_rules(rules, mesh)
  counted = frozenset().union(*map(layer_axes, plans))
  missing: dict[str, str] = {}

  def spec_of(path, leaf):
    path = what + jax.tree_util.keystr(path, simple=True, separator="/")
    names = names_of(leaf) if is_box(leaf) else None
    if names is None:
      return PartitionSpec()
    own = _rules_of(leaf, mesh, rules)
    for name in names:
      if isinstance(name, str) and name not in counted and name not in dict(own):
        missing.setdefault(name, path)
    spec = nn.logical_to_mesh_axes(names, own)
    check_divides(value(leaf).shape, spec, mesh, path, names, counted)
    return spec

  specs = jax.tree_util.tree_map_with_path(spec_of, boxed, is_leaf=is_box)
  if missing:
    raise ValueError(_no_rule(missing, dict(rules)))
  return specs


def _rules_of(box: Any, mesh: Any, rules: Rules) -> Rules:
  own = tuple(rules or getattr(box, "rules", None) or ())
  # Boxes of other kinds may name axes of the mesh itself.
  return own if isinstance(box, nn.LogicallyPartitioned) else (*own, *((axis, axis) for axis in mesh.axis_names))


def _no_rule(missing: Mapping[str, str], known: Iterable[str]) -> str:
  listed = ", ".join(f"{name!r} (of {path})" for name, path in missing.items())
  near = [nearest(name, known) for name in missing]
  hint = next((f" {text}" for text in near if text.startswith("did")), "")
  return (f"rules: no rule for logical ax{'is' if len(missing) == 1 else 'es'} {listed};{hint and f'{hint};'} map each to an "
          "axis of the mesh, or to None (null in a config) for whole copies on every device")


def check_divides(shape: Sequence[int], spec: PartitionSpec, mesh: Any, path: str, names: Sequence[Any] = (),
                  counted: Iterable[str] = ()) -> None:
  """Raises ValueError for a dimension that does not divide among the devices of its mesh axes.

  `names`: of the dimensions, where they have any; `counted`: those of axes that count layers.
  """
  for dim, entry in enumerate(spec):
    count, over = math.prod(mesh.shape[axis] for axis in as_tuple(entry)), " x ".join(as_tuple(entry))
    if shape[dim] % count:
      if names and names[dim] in counted:
        raise ValueError(f"{path}: {uneven(names[dim], shape[dim], over, count)}")
      other = f"map {names[dim]!r} to other axes or to None" if names else "other rules"
      raise ValueError(f"{path} of shape {list(shape)}: dimension {dim} of {shape[dim]} does not divide among {count} "
                       f"devices ({over}); take a multiple of {count}, or {other}")


def uneven(name: str, length: int, over: str, count: int) -> str:
  """What is wrong where the repeats of a loop do not divide among devices, and what to do."""
  divisors = ", ".join(str(d) for d in range(1, length + 1) if length % d == 0)
  return (f"the {length} repeats of {name!r} do not divide among {count} devices ({over}); give that mesh axis a size of "
          f"{divisors}, map {name!r} to None, or put the repeats that are too many into a segment of their own")


# Inside of programs -----------------------------------------------------------------------------------------------------


def over(name: str) -> tuple[str, ...]:
  """The mesh axes of several devices over which the rules around the call lay an axis; () of none.

  Axes that `jax.shard_map` has taken are not among them: inside, arrays are one device's parts.
  """
  return several(dict(reversed(nn.get_logical_axis_rules())).get(name))


def batch_axes() -> tuple[str, ...]:
  """The mesh axes of several devices that split the batch."""
  return over("batch") or over("activation_batch")


def several(axes: Any) -> tuple[str, ...]:
  """Those of some mesh axes that have several devices, and that `jax.shard_map` has not taken."""
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(axis for axis in as_tuple(axes) if axis not in mesh.manual_axes and mesh.shape.get(axis, 1) > 1)


def spec_of_box(box: Any) -> PartitionSpec:
  """How the rules around the call lay what is in a box over the mesh; axes without a rule are whole."""
  mesh = jax.sharding.get_abstract_mesh()
  return nn.logical_to_mesh_axes(names_of(box) or (), _rules_of(box, mesh, nn.get_logical_axis_rules()))


def constrain(x: Any, names: Sequence[str]) -> Any:
  """Lays an activation over the mesh by logical names of its axes.

  Of several rules for a name the first holds whose mesh axes no earlier rule has taken, as in Flax. Nothing happens without
  a mesh or rules, outside of a trace, and to arrays of another rank. Axes without a rule, and those that do not divide, are
  left to the compiler, or with explicit axes as they are.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not isinstance(x, jax.core.Tracer) or x.ndim != len(names):
    return x
  explicit, taken, known, entries = mesh.explicit_axes, set(), set(), [PartitionSpec.UNCONSTRAINED] * x.ndim
  for name, rule in nn.get_logical_axis_rules():
    axes = tuple(axis for axis in several(rule) if axis in explicit or not explicit)
    if name not in names or name in known or not taken.isdisjoint(axes):
      continue
    known.add(name)
    at = names.index(name)
    if not rule:
      entries[at] = None
    elif axes and x.shape[at] % math.prod(mesh.shape[axis] for axis in axes) == 0:
      entries[at] = axes
      taken.update(axes)
  if not taken:
    return x
  if not explicit:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
  before = (*map(as_tuple, jax.typeof(x).sharding.spec), *[()] * x.ndim)
  kept = [tuple(axis for axis in own if axis not in taken) or None if entry is PartitionSpec.UNCONSTRAINED else entry
          for entry, own in zip(entries, before)]
  return jax.sharding.reshard(x, PartitionSpec(*kept))
