"""Operations and bytes of a program, read from its jaxpr: loop bodies count as often as they run, dead code not at all.

What counts:

    flops     two for each multiplication and addition of a matrix product, grouped (ragged) product or convolution
    vector    one for each element that anything else computes; moving and reshaping values is no operation
    bytes     operands and results of products, reductions, sorts, gathers and scatters; what loops slice off and stack up;
              what goes to the host and comes back. Elementwise work costs none: it is assumed to be fused into the
              operation that it feeds or follows
    seconds   the sum of what each operation takes on a chip, by whichever of flops and bytes takes longer

XLA's own analysis, `compiled.cost_analysis()`, counts the body of a loop once.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.extend import core

from linen_stack.inspect.arrays import of_arrays
from linen_stack.inspect.chips import Chip
from linen_stack.inspect.origins import call_body, loop_counts
from linen_stack.tags import tag_name

_FREE = {
    "name", "copy", "copy_p", "optimization_barrier", "reduce_precision", "sharding_constraint", "reshard",
    "stop_gradient", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "convert_element_type",
    "bitcast_convert_type", "iota", "slice", "rev", "pvary", "mesh_cast", "random_wrap", "random_unwrap", "split",
    "empty", "create_token", "get", "swap", "layout_constraint", "axis_index",
}
# Operations that read as much as they write, and not more of their operands.
_PARTS = {"gather", "dynamic_slice"}
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2, "scatter-mul": 2}
_WHOLE = {"sort", "concatenate", "pad", "top_k", "argsort"}


@dataclasses.dataclass(frozen=True)
class Cost:
  """What running a program takes."""

  flops: float = 0.0
  vector: float = 0.0
  bytes: float = 0.0
  seconds: float = 0.0
  """On the chips that were named; 0 without."""
  open_loops: int = 0
  """Loops of which nobody knows how often they run: their bodies count once."""

  def __add__(self, other: Cost) -> Cost:
    return Cost(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))

  def times(self, count: float) -> Cost:
    """The cost of running it `count` times."""
    return Cost(self.flops * count, self.vector * count, self.bytes * count, self.seconds * count, self.open_loops)


_FIELDS = tuple(field.name for field in dataclasses.fields(Cost))


def cost(fn: Callable[..., Any], *args: Any, chip: Chip | None = None, devices: int = 1, **kwargs: Any) -> Cost:
  """What `fn(*args, **kwargs)` costs, over all devices. Computes nothing.

  Args:
    fn: a function of arrays.
    *args, **kwargs: trees of arrays or of `jax.ShapeDtypeStruct`. Other leaves stay the Python values that they are.
    chip, devices: what it runs on, evenly spread, for `seconds`.
  """
  call, arrays = of_arrays(fn, args, kwargs)
  return program_cost(jax.make_jaxpr(call)(arrays).jaxpr, chip=chip, devices=devices)


def program_cost(jaxpr: Any, live: Sequence[bool] | None = None, *, chip: Chip | None = None, devices: int = 1) -> Cost:
  """The same of a traced program. `live`: which of its results are wanted."""
  return Walk(chip, devices).run(jaxpr, [True] * len(jaxpr.outvars) if live is None else live)[0]


class Walk:
  """Adds up what is needed for the live results of a program.

  Args:
    chip, devices: for the seconds.
    kept: names of tagged values that are at hand: what led to them is not run for their sake.
  """

  def __init__(self, chip: Chip | None = None, devices: int = 1, kept: Collection[str] = ()):
    self._chip, self._devices, self._kept = chip, devices, frozenset(kept)
    self._shards = 1  # how many devices run what is walked, each on its own part
    self.used: dict[tuple[int, ...], tuple[str, int, tuple[int, ...]]] = {}
    """Name, bytes, and lengths of the loops around it, outermost first, of each kept value that was needed."""

  def run(self, jaxpr: Any, live: Sequence[bool], trips: tuple[int, ...] = (),
          path: tuple[int, ...] = ()) -> tuple[Cost, list[bool]]:
    """The cost of a program's live results, and which of its inputs they need."""
    wanted = {var for var, wants in zip(jaxpr.outvars, live) if wants and not isinstance(var, core.Literal)}
    total = Cost()
    for at in range(len(jaxpr.eqns) - 1, -1, -1):
      eqn = jaxpr.eqns[at]
      outs = [var in wanted for var in eqn.outvars]
      if not any(outs) and not eqn.effects:
        continue
      if tag_name(eqn) in self._kept:
        aval = eqn.outvars[0].aval
        self.used[(*path, at)] = (tag_name(eqn), _bytes(aval) * self._shards, trips)
        continue
      spent, ins = self._equation(eqn, outs, trips, (*path, at))
      total += spent
      wanted |= {var for var, needs in zip(eqn.invars, ins) if needs and not isinstance(var, core.Literal)}
    return total, [var in wanted for var in jaxpr.invars]

  def _equation(self, eqn: Any, outs: list[bool], trips: tuple[int, ...],
                path: tuple[int, ...]) -> tuple[Cost, list[bool]]:
    name, every = eqn.primitive.name, [True] * len(eqn.invars)
    if name == "scan":
      return self._scan(eqn, outs, trips, path)
    if name == "while":
      spent = Cost(open_loops=1)
      for key in ("cond_jaxpr", "body_jaxpr"):
        body = eqn.params[key].jaxpr
        spent += self.run(body, [True] * len(body.outvars), trips, (*path, len(key)))[0]
      return spent, every
    if name == "cond":
      # What differs from step to step is not known here: the costliest branch counts.
      results = [self.run(branch.jaxpr, outs, trips, (*path, i)) for i, branch in enumerate(eqn.params["branches"])]
      return max((r[0] for r in results), key=lambda c: (c.flops, c.vector)), [
          True, *(any(needs) for needs in zip(*(r[1] for r in results)))]
    if name == "pallas_call":
      return self._kernel(eqn, trips, path), every
    body = call_body(eqn)
    if body is not None:
      count = _shards(eqn) if name == "shard_map" else 1
      self._shards *= count
      spent, ins = self.run(body, outs, trips, path)
      self._shards //= count
      return spent.times(count), ins
    if name == "optimization_barrier":
      return Cost(), outs
    return self._priced(*_operation(eqn)), every

  def _scan(self, eqn: Any, outs: list[bool], trips: tuple[int, ...], path: tuple[int, ...]) -> tuple[Cost, list[bool]]:
    consts, carry = loop_counts(eqn)
    body, length = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]), eqn.params["length"]
    live = list(outs)
    while True:  # a carry that a later step needs is needed from every step
      spent, ins = self.run(body, live, (*trips, length), path)
      more = [old or new for old, new in zip(live[:carry], ins[consts:consts + carry])]
      if more == live[:carry]:
        break
      live[:carry] = more
    # What the loop slices off and stacks up is read and written, apart from what the body does with it.
    slices = [var for var, needs in zip(eqn.invars[consts + carry:], ins[consts + carry:]) if needs]
    stacked = [var for var, wants in zip(eqn.outvars[carry:], live[carry:]) if wants]
    moved = sum(_bytes(var.aval) for var in (*slices, *stacked))
    return spent.times(length) + self._priced(0, 0, moved), ins

  def _kernel(self, eqn: Any, trips: tuple[int, ...], path: tuple[int, ...]) -> Cost:
    told = eqn.params.get("cost_estimate")
    if told is not None:
      return self._priced(told.flops, told.transcendentals, told.bytes_accessed)
    body = eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    whole = Walk().run_all(body)
    steps = math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return self._priced(whole.flops * steps, whole.vector * steps, sum(map(_bytes, _avals(eqn))))

  def run_all(self, jaxpr: Any) -> Cost:
    """The cost of a program whose results are effects."""
    total = Cost()
    for eqn in jaxpr.eqns:
      total += self._equation(eqn, [True] * len(eqn.outvars), (), ())[0]
    return total

  def _priced(self, flops: float, vector: float, count: float) -> Cost:
    seconds = 0.0
    if self._chip is not None:
      seconds = max(flops / self._chip.peak, count / self._chip.bandwidth) / self._devices
    return Cost(flops, vector, count, seconds)


def _operation(eqn: Any) -> tuple[float, float, float]:
  """flops, vector operations and bytes of an equation without a body."""
  name, ins, outs = eqn.primitive.name, [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]
  if name == "device_put":  # between memories: the device's own is read or written
    places = zip(ins, outs)
    return 0, 0, sum(_bytes(one) for one, other in places if one.memory_space != other.memory_space)
  if name in _FREE:
    return 0, 0, 0
  moved = sum(map(_bytes, _avals(eqn)))
  if name == "dot_general":
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(outs[0]) * math.prod(ins[0].shape[i] for i in contract), 0, moved
  if name.startswith("ragged_dot"):
    return 2 * _size(ins[0]) * _ragged_columns(eqn), 0, moved
  if name == "conv_general_dilated":
    features = eqn.params["dimension_numbers"].rhs_spec[0]
    return 2 * _size(outs[0]) * _size(ins[1]) / ins[1].shape[features], 0, moved
  if name == "triangular_solve":
    return _size(outs[0]) * ins[0].shape[-1], 0, moved
  if name in _PARTS:
    return 0, 0, 2 * sum(map(_bytes, outs))
  if name in _UPDATES:
    return 0, 0, 2 * _bytes(ins[_UPDATES[name]])
  if name in _WHOLE:
    return 0, 0, moved
  if name.startswith(("reduce_", "arg", "cum")):
    return 0, _size(ins[0]), moved
  return 0, sum(map(_size, outs)), 0


def _ragged_columns(eqn: Any) -> int:
  """With what each element of a grouped product's left side is multiplied: the right side's own columns."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  (_, contract), (_, batch) = numbers.dot_dimension_numbers
  taken = {*contract, *batch, *numbers.rhs_group_dimensions}
  return math.prod(size for i, size in enumerate(eqn.invars[1].aval.shape) if i not in taken)


def _shards(eqn: Any) -> int:
  """How many devices run the body of a shard_map, each on its own part."""
  sizes = dict(eqn.params["mesh"].shape)
  manual = eqn.params.get("manual_axes") or sizes
  return math.prod(sizes[axis] for axis in manual)


def _avals(eqn: Any) -> list[Any]:
  return [var.aval for var in (*eqn.invars, *eqn.outvars)]


def _size(aval: Any) -> int:
  return math.prod(getattr(aval, "shape", ()))


def _bytes(aval: Any) -> int:
  dtype = getattr(aval, "dtype", None)
  return _size(aval) * getattr(dtype, "itemsize", 0)
