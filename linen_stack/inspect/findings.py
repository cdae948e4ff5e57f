"""What in a policy and its layers does not meet, or costs more than it seems: the findings of an audit."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import math
from typing import Any, Literal

from linen_stack.inspect import render
from linen_stack.inspect.watch import STACK_SCOPE, Place
from linen_stack.jax_policies import MIN_OFFLOAD_RANK
from linen_stack.specs import nearest
from linen_stack.policies import CARRY_NAME, RematPolicy
from linen_stack.stack import StackedDecoder
from linen_stack.tags import Tag, equations, inner_jaxprs

Action = Literal["saved", "offloaded", "recomputed", "kept (no remat)"]
Severity = Literal["error", "warning", "info"]

# Values of a TPU tile.
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
  """What the policy says of the name. A value that the backward pass never reads is not kept for all that: `residuals`
  tells what is."""

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


def action_on(policy: RematPolicy, tag: Tag) -> Action:
  """What the policy itself says when JAX asks it about this tag."""
  if not policy.remat:
    return "kept (no remat)"
  answer = policy.resolve()(tag.eqn.primitive, *(var.aval for var in tag.eqn.invars), **tag.eqn.params)
  if type(answer).__name__ == "Offloadable":
    return "offloaded"
  return "saved" if answer is True or type(answer).__name__.startswith("Saveable") else "recomputed"


def at(place: Place) -> str:
  stack = f"stack {'/'.join(place.stack)!r}, " if place.stack else ""
  run = f", run {place.run.name!r}" if place.segment.is_cycle else ""
  return f"{stack}segment {place.segment.name!r}{run}"


def name_findings(stack: StackedDecoder, layers: Mapping[Place, tuple[Any, list[Tag]]]) -> Iterator[Finding]:
  """Policy names that match no tag, and tags that no policy names."""
  by_segment: dict[str, set[str]] = {}
  for place, (_, tagged) in layers.items():
    by_segment.setdefault(place.segment.name, set()).update(tag.name for tag in tagged)
  if isinstance(stack.remat, Mapping):
    scopes = [(stack.policy(name), names, f"the layers of segment {name!r}") for name, names in by_segment.items()]
  else:
    scopes = [(stack.policy(stack.plan.segments[0].name), set().union(*by_segment.values()), "any layer of the plan")]
  for policy, tagged, among in scopes:
    yield from _meet(policy, tagged, among)


def _meet(policy: RematPolicy, names: set[str], among: str) -> Iterator[Finding]:
  for name in policy.names:
    if name not in names and name not in policy.optional and name != CARRY_NAME:
      yield Finding("error", f"the policy names {name!r}, which is not tagged by {among}; "
                             f"{nearest(name, sorted(names))}")
  for preset, alternatives in sorted(policy.alternatives, key=lambda entry: entry[0]):
    if not alternatives & {*names, CARRY_NAME}:
      yield Finding("error", f"preset {preset}: none of its names ({', '.join(sorted(alternatives))}) is tagged by "
                             f"{among}; tags there: {', '.join(sorted(names)) or 'none'}")
    elif missing := sorted(alternatives & policy.optional - names):
      yield Finding("info", f"preset {preset}: alternatives that are not tagged by {among}: {', '.join(missing)}")
  unused = sorted(name for name in names if name not in policy.names and name != CARRY_NAME)
  if unused and policy.remat and policy.base is None:
    yield Finding("info", f"tags that policy {policy} does not use, in {among}: {', '.join(unused)}")


def inside_layer(place: Place, policy: RematPolicy, jaxpr: Any, tagged: list[Tag]) -> Iterator[Finding]:
  """The same value tagged twice, and remat inside of the layer."""
  by_value: dict[int, list[Tag]] = {}
  for tag in tagged:
    by_value.setdefault(tag.value, []).append(tag)
  for twice in by_value.values():
    if len(twice) > 1:
      kept = [tag.name for tag in twice if action_on(policy, tag) in ("saved", "offloaded")]
      cost = f"; the policy keeps it as {' and '.join(map(repr, kept))}, {len(kept)} buffers for one value" \
          if len(kept) > 1 else ""
      yield Finding("warning", f"{at(place)}: one value is tagged {len(twice)} times, as "
                               f"{', '.join(repr(tag.name) for tag in twice)}{cost}")
  inner = list(_remats(jaxpr))
  if inner and policy.remat:
    products, again = _products([jaxpr]), _products([eqn.params["jaxpr"] for eqn in inner])
    yield Finding("warning", f"{at(place)}: the layer has {render.plural(len(inner), 'remat')} of its own around "
                             f"{again} of its {render.plural(products, 'matrix product')}, inside of the stack's: "
                             "these run once more in the backward pass. Take it out of the layer, or give the segment "
                             "the policy 'none'")


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
  found = (eqn for jaxpr in programs for eqn in equations(getattr(jaxpr, "jaxpr", jaxpr)))
  return sum(eqn.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated") for eqn in found)


def outer_remat(program: Any, name_stack: str = "") -> Iterator[Finding]:
  """Remat around a whole stack, by the module that calls it."""
  for eqn in program.eqns:
    here = f"{name_stack}/{eqn.source_info.name_stack}"
    if STACK_SCOPE in here:
      continue
    for inner in inner_jaxprs(eqn):
      if _is_remat(eqn) and any(STACK_SCOPE in str(e.source_info.name_stack) for e in equations(inner)):
        yield Finding("warning", "the stack is called inside of another remat: every layer runs twice more in the "
                                 "backward pass. Take that remat away; the stack's policy does its work")
      else:
        yield from outer_remat(inner, here)


def stacking(place: Place, policy: RematPolicy, stack: StackedDecoder, rows: list[Tagged]) -> Iterator[Finding]:
  """What a loop stacks, one buffer with a slice per layer."""
  if not policy.remat or not stack.scan or place.num_layers == 1:
    return
  for row in rows:
    if row.action != "saved":
      continue
    stacked = (f"{at(place)}: under scan, {row.name!r} is stacked over {row.layers} layers, "
               f"{render.size(row.bytes)} on device")
    if row.name == "quantization":
      yield Finding("warning", f"{stacked}; quantised operands are cheap to make again: prefer a policy without them")
    elif row.name == CARRY_NAME and CARRY_NAME in policy.save:
      yield Finding("warning", f"{stacked}, where it waits under every policy: there is no need to name it; "
                               "carry='offload' moves it to the host")
    elif row.name in ("carry", CARRY_NAME):
      yield Finding("info", f"{stacked}; carry='offload' moves it to the host")


def too_small(place: Place, policy: RematPolicy, rows: list[Tagged]) -> Iterator[Finding]:
  """Values that the policy offloads and that stay on device, or are too small for it."""
  offloaded = {*policy.offload, *(("carry", CARRY_NAME) if policy.carry == "offload" else ())}
  for row in rows:
    if row.action == "saved" and row.name in offloaded:
      yield Finding("warning", f"{at(place)}: {row.name!r} {render.shape(row.shape)} stays on device although the policy "
                               f"offloads it: values of rank below {MIN_OFFLOAD_RANK} cannot be sliced in a TPU's host memory")
    elif row.action == "offloaded" and math.prod(row.shape) < _TILE:
      yield Finding("warning", f"{at(place)}: {row.name!r} {render.shape(row.shape)} is smaller than a TPU tile; "
                               "it is cheaper saved")
