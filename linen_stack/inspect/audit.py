"""`audit`: what a remat policy does with each tagged value of each layer, and what in the two does not meet."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import math
from typing import Any, Literal

from flax import linen as nn
import jax
import numpy as np

from linen_stack import stack as stack_lib
from linen_stack.inspect import render
from linen_stack.inspect.watch import STACK_SCOPE, Place, Watch, watching
from linen_stack.plan import nearest
from linen_stack.policies import CARRY_NAME, RematPolicy
from linen_stack.stack import StackedDecoder
from linen_stack.tags import Tag, equations, inner_jaxprs, tags
from linen_stack.validation import levels

Action = Literal["saved", "offloaded", "recomputed", "kept (no remat)"]
Severity = Literal["error", "warning", "info"]

# Smaller than a TPU tile of 8 x 128: some compilers cannot slice such a value out of host memory.
_TILE = 8 * 128


@dataclasses.dataclass(frozen=True)
class Tagged:
  """A tagged value of the layers of one run, or their carry."""

  stack: str
  """Path of the stack in the model; "" for the model itself."""

  segment: str
  run: str
  layers: int
  name: str
  shape: tuple[int, ...]
  dtype: str
  count: int
  """How many values of a layer have this name, shape and dtype."""

  bytes_per_layer: int
  action: Action

  @property
  def bytes(self) -> int:
    """Over all layers of the run."""
    return self.bytes_per_layer * self.layers


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something to know about a policy and its layers. An error is what `init` would raise."""

  severity: Severity
  text: str

  def __str__(self) -> str:
    return f"{self.severity}: {self.text}"


@dataclasses.dataclass(frozen=True)
class AuditReport:
  """What the policies of a model's stacks do. Prints as a table, findings after it."""

  rows: tuple[Tagged, ...]
  findings: tuple[Finding, ...]

  @property
  def ok(self) -> bool:
    """Whether there is no error among the findings."""
    return not any(finding.severity == "error" for finding in self.findings)

  def total(self, action: Action) -> int:
    """Bytes over all layers of the values that are "saved", "offloaded" and so on."""
    return sum(row.bytes for row in self.rows if row.action == action)

  def __str__(self) -> str:
    return render.joined(self._parts())

  def __rich__(self) -> Any:
    return render.rich(self._parts())

  def _parts(self) -> list[Any]:
    head = ("segment", "run", "layers", "value", "per layer", "dtype", "x", "bytes per layer", "bytes", "policy")
    named = len({row.stack for row in self.rows}) > 1
    cells = tuple((f"{row.stack}/{row.segment}" if named else row.segment, row.run, str(row.layers), row.name,
                   render.shape(row.shape), row.dtype, str(row.count), render.size(row.bytes_per_layer),
                   render.size(row.bytes), row.action) for row in self.rows)
    sums = ", ".join(f"{render.size(self.total(action))} {action}"
                     for action in ("saved", "offloaded", "recomputed", "kept (no remat)") if self.total(action))
    table = render.Table(head, cells, right=("layers", "x", "bytes per layer", "bytes"))
    return [table, sums, "\n".join(map(str, self.findings)) or "no findings"]


def audit(stack: nn.Module, *args: Any, **kwargs: Any) -> AuditReport:
  """What the remat policy of a stack does with each value that its layers tag. Traces `init`; computes nothing.

  Args:
    stack: a `StackedDecoder`, or a module that contains one or several.
    *args, **kwargs: arguments of its call; arrays may be `jax.ShapeDtypeStruct`.

  Raises:
    TypeError: no module.
    ValueError: the module calls no `StackedDecoder`. What is wrong with a policy is told as a finding.
  """
  if not isinstance(stack, nn.Module):
    raise TypeError(f"stack must be a StackedDecoder or a module that contains one, not {stack!r}")
  seen: dict[Place, Any] = {}

  # Traced under full remat: what the policies themselves would do, or raise, is worked out below.
  with watching(remat="full") as watch:
    def see(segment, run, jaxpr):
      seen[Place(watch.open_stacks[-1], segment, run)] = jaxpr

    token = stack_lib.observer.set(see)
    try:
      program = _program(stack, args, kwargs)
    finally:
      stack_lib.observer.reset(token)
  if not watch.stacks:
    raise ValueError(f"{type(stack).__name__} calls no StackedDecoder when it is initialised")
  rows, findings = [], list(_outer_remat(program))
  for path, found in watch.stacks.items():
    layers = {place: (jaxpr, tags(jaxpr)) for place, jaxpr in seen.items() if place.stack == path}
    findings += _names(found, layers)
    for place, (jaxpr, tagged) in layers.items():
      policy = found.policy(place.segment.name)
      of_run = [*_carry(place, policy, found, watch), *_tagged(place, policy, tagged)]
      findings += [*_layer(place, policy, jaxpr, tagged), *_stacking(place, policy, found, of_run), *_small(place, of_run)]
      rows += of_run
  order = {"error": 0, "warning": 1, "info": 2}
  return AuditReport(tuple(rows), tuple(sorted(dict.fromkeys(findings), key=lambda finding: order[finding.severity])))


def _program(stack: nn.Module, args: Any, kwargs: Any) -> Any:
  """The program of `init`. Arrays are traced, all else stays what it is."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  is_array = [isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) for leaf in leaves]

  def init(key, arrays):
    values = iter(arrays)
    args, kwargs = tree.unflatten([next(values) if array else leaf for array, leaf in zip(is_array, leaves)])
    # Streams that are not given draw from `params`.
    return stack.init({"params": key, "dropout": key}, *args, **kwargs)

  return jax.make_jaxpr(init)(jax.random.key(0), [leaf for array, leaf in zip(is_array, leaves) if array]).jaxpr


def _where(place: Place) -> str:
  stack = f"stack {'/'.join(place.stack)!r}, " if place.stack else ""
  run = f", run {place.run.name!r}" if place.segment.is_cycle else ""
  return f"{stack}segment {place.segment.name!r}{run}"


def _carry(place: Place, policy: RematPolicy, stack: StackedDecoder, watch: Watch) -> list[Tagged]:
  """The hidden states that enter the layers, once for each region that is rematerialised by itself."""
  if not policy.remat or CARRY_NAME in policy.save:
    return []  # the layer's own tag tells it, or nothing does
  regions, action = place.num_layers, "saved"
  if policy.carry == "offload":
    action = "offloaded"
  if stack.scan and (policy.levels or policy.every > 1):
    nested = levels(place.segment, policy)
    regions = nested[0] if nested else place.segment.length
    if place.run.offset:
      action = "recomputed"
  return [Tagged("/".join(place.stack), place.segment.name, place.run.name, regions, "carry", tuple(leaf.shape),
                 str(leaf.dtype), 1, math.prod(leaf.shape) * leaf.dtype.itemsize, action)
          for leaf in jax.tree.leaves(watch.hidden[place.stack])]


def _tagged(place: Place, policy: RematPolicy, tagged: list[Tag]) -> list[Tagged]:
  groups: dict[Tagged, list[int]] = {}
  for tag in tagged:
    if tag.name == CARRY_NAME and policy.remat and CARRY_NAME not in policy.save:
      continue  # the carry, which has a row of its own
    row = Tagged("/".join(place.stack), place.segment.name, place.run.name, place.num_layers, tag.name, tag.shape,
                 str(tag.dtype), 0, 0, _action(policy, tag))
    groups.setdefault(row, []).append(math.prod(tag.shape) * tag.dtype.itemsize)
  return [dataclasses.replace(row, count=len(sizes), bytes_per_layer=sum(sizes)) for row, sizes in groups.items()]


def _action(policy: RematPolicy, tag: Tag) -> Action:
  """What the policy itself says when JAX asks it about this tag."""
  if not policy.remat:
    return "kept (no remat)"
  answer = policy.resolve()(tag.eqn.primitive, *(var.aval for var in tag.eqn.invars), **tag.eqn.params)
  if type(answer).__name__ == "Offloadable":
    return "offloaded"
  return "saved" if answer is True or type(answer).__name__.startswith("Saveable") else "recomputed"


def _names(stack: StackedDecoder, layers: Mapping[Place, tuple[Any, list[Tag]]]) -> Iterator[Finding]:
  """Policy names that match no tag, and tags that no policy names."""
  by_segment: dict[str, set[str]] = {}
  for place, (_, tagged) in layers.items():
    by_segment.setdefault(place.segment.name, set()).update(tag.name for tag in tagged)
  if isinstance(stack.remat, Mapping):
    scopes = [(stack.policy(name), names, f"the layers of segment {name!r}") for name, names in by_segment.items()]
  else:
    scopes = [(stack.policy(stack.plan.segments[0].name), set().union(*by_segment.values()), "any layer of the plan")]
  for policy, names, where in scopes:
    yield from _meet(policy, names, where)


def _meet(policy: RematPolicy, names: set[str], where: str) -> Iterator[Finding]:
  for name in policy.names:
    if name not in names and name not in policy.optional and name != CARRY_NAME:
      yield Finding("error", f"the policy names {name!r}, which is not tagged by {where}; {nearest(name, sorted(names))}")
  missing = sorted(policy.optional - names)
  if policy.optional and not policy.optional & names:
    yield Finding("error", f"preset {policy.preset or policy}: none of its names ({', '.join(sorted(policy.optional))}) is "
                           f"tagged by {where}; tags there: {', '.join(sorted(names)) or 'none'}")
  elif missing:
    yield Finding("info", f"preset {policy.preset or policy}: alternatives that are not tagged by {where}: {', '.join(missing)}")
  unused = sorted(name for name in names if name not in policy.names and name != CARRY_NAME)
  if unused and policy.remat and policy.base is None:
    yield Finding("info", f"tags that policy {policy} does not use, in {where}: {', '.join(unused)}")


def _layer(place: Place, policy: RematPolicy, jaxpr: Any, tagged: list[Tag]) -> Iterator[Finding]:
  """The same value tagged twice, and remat inside of the layer."""
  by_value: dict[int, list[Tag]] = {}
  for tag in tagged:
    by_value.setdefault(tag.value, []).append(tag)
  for twice in by_value.values():
    if len(twice) > 1:
      kept = [tag.name for tag in twice if _action(policy, tag) in ("saved", "offloaded")]
      cost = f"; the policy keeps it as {' and '.join(map(repr, kept))}, {len(kept)} buffers for one value" \
          if len(kept) > 1 else ""
      yield Finding("warning", f"{_where(place)}: one value is tagged {len(twice)} times, as "
                               f"{', '.join(repr(tag.name) for tag in twice)}{cost}")
  inner = list(_remats(jaxpr))
  if inner and policy.remat:
    products, again = _products([jaxpr]), _products([eqn.params["jaxpr"] for eqn in inner])
    yield Finding("warning", f"{_where(place)}: the layer has {render.plural(len(inner), 'remat')} of its own around {again} of "
                             f"its {render.plural(products, 'matrix product')}, inside of the stack's: these run once more in "
                             "the backward pass. Take it out of the layer, or give the segment the policy 'none'")


def _remats(jaxpr: Any) -> Iterator[Any]:
  """The outermost remat equations of a program."""
  for eqn in jaxpr.eqns:
    if _is_remat(eqn):
      yield eqn
    else:
      for inner in inner_jaxprs(eqn):
        yield from _remats(inner)


def _is_remat(eqn: Any) -> bool:
  return "prevent_cse" in eqn.params and "policy" in eqn.params


def _products(programs: Iterable[Any]) -> int:
  return sum(eqn.primitive.name == "dot_general" for jaxpr in programs for eqn in equations(getattr(jaxpr, "jaxpr", jaxpr)))


def _outer_remat(program: Any, name_stack: str = "") -> Iterator[Finding]:
  """Remat around a whole stack, by the module that calls it."""
  for eqn in program.eqns:
    here = f"{name_stack}/{eqn.source_info.name_stack}"
    if STACK_SCOPE in here:
      continue
    for inner in inner_jaxprs(eqn):
      if _is_remat(eqn) and any(STACK_SCOPE in str(e.source_info.name_stack) for e in equations(inner)):
        yield Finding("warning", "the stack is called inside of another remat: every layer runs twice more in the backward pass. "
                                 "Take that remat away; the stack's policy does its work")
      else:
        yield from _outer_remat(inner, here)


def _stacking(place: Place, policy: RematPolicy, stack: StackedDecoder, rows: list[Tagged]) -> Iterator[Finding]:
  """What a loop stacks, one buffer with a slice per layer."""
  if not policy.remat or not stack.scan or place.num_layers == 1:
    return
  for row in rows:
    if row.action != "saved":
      continue
    stacked = f"{_where(place)}: under scan, {row.name!r} is stacked over {row.layers} layers, {render.size(row.bytes)} on device"
    if row.name == "quantization":
      yield Finding("warning", f"{stacked}; quantised operands are cheap to make again: prefer a policy without them")
    elif row.name == CARRY_NAME and CARRY_NAME in policy.save:
      yield Finding("warning", f"{stacked}, where it waits under every policy: there is no need to name it; "
                               "carry='offload' moves it to the host")
    elif row.name in ("carry", CARRY_NAME):
      yield Finding("info", f"{stacked}; carry='offload' moves it to the host")


def _small(place: Place, rows: list[Tagged]) -> Iterator[Finding]:
  for row in rows:
    if row.action == "offloaded" and (len(row.shape) < 2 or math.prod(row.shape) < _TILE):
      yield Finding("warning", f"{_where(place)}: {row.name!r} {render.shape(row.shape)} is smaller than a TPU tile; TPU compilers "
                               "fail on slices of such values in host memory, and it is cheaper saved")
