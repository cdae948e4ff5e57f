"""`audit`: what a remat policy does with each tagged value of each layer, and what in the two does not meet."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

from flax import linen as nn
import jax

from linen_stack import stack as stack_lib
from linen_stack.inspect import render
from linen_stack.inspect.arrays import take_arrays
from linen_stack.inspect.findings import (Action, Finding, Tagged, action_on, inside_layer, name_findings, outer_remat,
                                          stacking, too_small)
from linen_stack.inspect.watch import Place, Watch, watching
from linen_stack.jax_policies import MIN_OFFLOAD_RANK
from linen_stack.policies import CARRY_NAME, RematPolicy
from linen_stack.stack import StackedDecoder
from linen_stack.tags import Tag, tags
from linen_stack.validation import levels


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
    stack: a `StackedDecoder`, a module that contains one or several, or a `ls.nnx.ScannedLayers`.
    *args, **kwargs: arguments of its call; arrays may be `jax.ShapeDtypeStruct`.

  Raises:
    TypeError: no module.
    ValueError: the module calls no `StackedDecoder`. What is wrong with a policy is told as a finding.
  """
  if not isinstance(stack, nn.Module) and hasattr(stack, "initialised"):  # of NNX layers
    stack = stack.initialised()
  if not isinstance(stack, nn.Module):
    raise TypeError("stack must be a StackedDecoder, a Linen module that contains one or a ls.nnx.ScannedLayers, not of "
                    f"{type(stack)}")
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
  rows, findings = [], list(outer_remat(program))
  for path, found in watch.stacks.items():
    layers = {place: (jaxpr, tags(jaxpr)) for place, jaxpr in seen.items() if place.stack == path}
    findings += name_findings(found, layers)
    for place, (jaxpr, tagged) in layers.items():
      policy = found.policy(place.segment.name)
      of_run = [*_carry(place, policy, found, watch), *_tagged(place, policy, tagged)]
      findings += [*inside_layer(place, policy, jaxpr, tagged), *stacking(place, policy, found, of_run),
                   *too_small(place, policy, of_run)]
      rows += of_run
  order = {"error": 0, "warning": 1, "info": 2}
  return AuditReport(tuple(rows), tuple(sorted(dict.fromkeys(findings), key=lambda finding: order[finding.severity])))


def _program(stack: nn.Module, args: Any, kwargs: Any) -> Any:
  """The program of `init`. Arrays are traced, all else stays what it is."""
  arrays, rebuild = take_arrays((args, kwargs))

  def init(key, arrays):
    args, kwargs = rebuild(arrays)
    # Streams that are not given draw from `params`.
    return stack.init({"params": key, "dropout": key}, *args, **kwargs)

  return jax.make_jaxpr(init)(jax.random.key(0), arrays).jaxpr


def _carry(place: Place, policy: RematPolicy, stack: StackedDecoder, watch: Watch) -> list[Tagged]:
  """The hidden states that enter the layers, once for each region that is rematerialised by itself."""
  if not policy.remat or CARRY_NAME in policy.save:
    return []  # the layer's own tag tells it, or nothing does
  regions, recomputed = place.num_layers, False
  if stack.scan and (policy.levels or policy.every > 1):
    nested = levels(place.segment, policy)
    regions = nested[0] if nested else place.segment.length
    recomputed = bool(place.run.offset)

  def action(leaf: Any) -> str:
    if recomputed:
      return "recomputed"
    return "offloaded" if policy.carry == "offload" and len(leaf.shape) >= MIN_OFFLOAD_RANK else "saved"

  return [Tagged("/".join(place.stack), place.segment.name, place.run.name, regions, "carry", tuple(leaf.shape),
                 str(leaf.dtype), 1, math.prod(leaf.shape) * leaf.dtype.itemsize, action(leaf))
          for leaf in jax.tree.leaves(watch.hidden[place.stack])]


def _tagged(place: Place, policy: RematPolicy, tagged: list[Tag]) -> list[Tagged]:
  groups: dict[Tagged, list[int]] = {}
  for tag in tagged:
    if tag.name == CARRY_NAME and policy.remat and CARRY_NAME not in policy.save:
      continue  # the carry, which has a row of its own
    row = Tagged("/".join(place.stack), place.segment.name, place.run.name, place.num_layers, tag.name, tag.shape,
                 str(tag.dtype), 0, 0, action_on(policy, tag))
    groups.setdefault(row, []).append(math.prod(tag.shape) * tag.dtype.itemsize)
  return [dataclasses.replace(row, count=len(sizes), bytes_per_layer=sum(sizes)) for row, sizes in groups.items()]
