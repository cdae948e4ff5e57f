"""`memory`: what a program takes on a TPU that is not there, compiled ahead of time."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
from typing import Any

from flax import linen as nn

from linen_stack.inspect import aot, chips, flops, programs, render
from linen_stack.inspect.programs import Program


@dataclasses.dataclass(frozen=True)
class MemoryReport:
  """Sizes are bytes on one device. Prints as a table."""

  topology: chips.Topology
  argument: int
  output: int
  alias: int
  """Outputs that take the memory of arguments."""
  temp: int
  """Everything in between, at its largest."""
  code: int
  host_argument: int
  host_output: int
  host_alias: int
  host_temp: int
  host_code: int
  peak: int
  """XLA's own figure for the largest sum at any moment. Vector memory counts, so it may exceed `hbm`."""
  out_of_memory: str | None
  """The compiler's message where the program does not fit the device; None: it does."""
  seconds: float
  """What compiling took; of a cached result, when it was compiled."""
  cached: bool
  cost: flops.Cost
  """Operations and bytes over all devices, loop bodies counted as often as they run; seconds on the chips."""
  xla_flops: float
  """XLA's own count for one device: the body of each loop counts once."""
  xla_bytes: float
  xla_seconds: float
  """XLA's `optimal_seconds` for one device: the body of each loop counts once."""
  cycles: float
  """What the compiler expects of the operations of one device, loop bodies as often as they run, without transfers."""

  @property
  def hbm(self) -> int:
    """Device memory that the program takes; where it does not fit, what the compiler said that it needs, at least."""
    if self.out_of_memory is not None:
      return aot.needed(self.out_of_memory) or self.topology.chip.hbm
    return self.argument + self.output - self.alias + self.temp + self.code

  @property
  def host(self) -> int:
    """Host memory that it takes, for one device."""
    return self.host_argument + self.host_output - self.host_alias + self.host_temp + self.host_code

  @property
  def fits(self) -> bool:
    """Whether the device has room for it."""
    return self.out_of_memory is None and self.hbm <= self.topology.chip.hbm

  def to_dict(self) -> dict[str, Any]:
    """All figures, as JSON takes them."""
    return {"topology": self.topology.name, "slices": self.topology.slices, "devices": self.topology.num_devices,
            "capacity": self.topology.chip.hbm, "hbm": self.hbm, "host": self.host, "fits": self.fits,
            **{key: value for key, value in dataclasses.asdict(self).items() if key != "topology"}}

  def __str__(self) -> str:
    return render.joined(self._parts())

  def __rich__(self) -> Any:
    return render.rich(self._parts())

  def _parts(self) -> list[Any]:
    chip = self.topology.chip
    head = f"{self.topology}, {render.plural(self.topology.num_devices, 'device')} of {render.size(chip.hbm)}"
    took = f"compiled in {self.seconds:.1f} s{', before' if self.cached else ''}"
    if self.out_of_memory is not None:
      said = self.out_of_memory.strip().splitlines()[0]
      return [head, f"does not fit: at least {render.size(self.hbm)} needed. The compiler says: {said}", took]
    rows = tuple((name, render.size(getattr(self, name)), render.size(getattr(self, f"host_{name}")))
                 for name in ("argument", "output", "alias", "temp", "code"))
    rows += (("in all", render.size(self.hbm), render.size(self.host)),)
    share = f"{self.hbm / chip.hbm:.0%} of the device{'' if self.fits else ': does not fit'}"
    counted = (f"{self.cost.flops:.3g} FLOPs and {render.size(self.cost.bytes)} moved on all devices, loops counted out; XLA, "
               f"on one device and each loop body once: {self.xla_flops:.3g} and {render.size(self.xla_bytes)}")
    return [head, render.Table(("one device", "HBM", "host"), rows, right=("HBM", "host")), f"{share}\n{counted}\n{took}"]


def memory(stack_or_fn: nn.Module | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *,
           topology: str = "v5p:2x2x1", slices: int = 1, mesh: Any = None, rules: Any = None, shardings: Any = None,
           donate_argnums: Sequence[int] = (), limit: float = 600.0,
           cache: str | os.PathLike[str] | bool = True) -> MemoryReport:
  """Compiles a program for a TPU that is not there and says what it takes. Needs libtpu: `pip install 'linen_stack[aot]'`.

  Example::

    x = jax.ShapeDtypeStruct((8, 2048, 1024), jnp.bfloat16)
    print(ls.inspect.memory(stack, (x,), topology="v5p:2x2x1"))

  Args:
    stack_or_fn: a module, of which loss and gradients are compiled (of the mean square of its results); or a function
      of arrays, compiled as it is.
    args, kwargs: of the call; arrays may be `jax.ShapeDtypeStruct`. Other leaves stay the Python values that they are.
    topology: a TPU generation and the chips along each dimension, as in "v5p:2x2x1" and "v6e:4x4".
    slices: how many of them.
    mesh: a mapping from axis names to sizes, or a mesh; all of the topology's devices. Default: one axis, "fsdp".
    rules: which mesh axis each logical axis goes over, or None: whole copies. Axes that count layers are whole without a
      rule, all others need one. Default: "batch" and "embed" over all, so that parameters and
      batch are fully sharded.
    shardings: a prefix of args of `PartitionSpec`. Default, for a module: leading axes as long as that of the first array
      are the batch; for a function: every device holds all, but for arrays that have a sharding of their own. Activations
      that layers lay out by logical names follow `rules` in both.
    donate_argnums: arguments of the function whose memory the results may take.
    limit: seconds after which compiling is given up.
    cache: folder of results, by program; True: $LINEN_STACK_CACHE or `linen_stack` in the user's cache; False: none.

  Raises:
    TypeError, ValueError: for an unknown topology, a mesh of another size, dimensions that do not divide among devices.
    ImportError: libtpu is not installed.
    TimeoutError: the limit was hit.
    RuntimeError: the compiler failed. That a program does not fit is no error but told in the report.
  """
  described = chips.topology(topology, slices)
  mesh = programs.as_mesh(mesh, described)
  rules = programs.as_rules(rules, mesh)
  if not isinstance(args, (tuple, list)):
    raise TypeError(f"args must be a tuple of the call's arguments, not {args!r}")
  if isinstance(stack_or_fn, nn.Module):
    if donate_argnums:
      raise ValueError("donate_argnums are arguments of a function; of a module, gradients are compiled, which need all")
    specs = None if shardings is None else (shardings, None)
    program = programs.gradients(stack_or_fn, tuple(args), kwargs or {}, mesh, rules, specs)
  elif callable(stack_or_fn):
    program = programs.of_function(stack_or_fn, tuple(args), kwargs or {}, mesh, rules, shardings, tuple(donate_argnums))
  else:
    raise TypeError(f"stack_or_fn must be a module or a function, not {stack_or_fn!r}")
  return compile_report(program, described, limit=limit, cache=cache)


def compile_report(program: Program, topology: chips.Topology, *, limit: float = 600.0,
                   cache: str | os.PathLike[str] | bool = True) -> MemoryReport:
  """The same of a program that is placed on its mesh already."""
  traced = program.trace()
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  done = aot.compile_program(text, topology, list(program.mesh.shape.values()), program.open_results(traced),
                             limit=limit, cache=cache)
  size = lambda name: int(done.sizes.get(f"{name}_size_in_bytes", 0))
  sizes = {name: size(name) for name in ("argument", "output", "alias", "temp")}
  hosts = {f"host_{name}": size(f"host_{name}") for name in ("argument", "output", "alias", "temp")}
  return MemoryReport(
      topology=topology, **sizes, **hosts, code=size("generated_code"), host_code=size("host_generated_code"),
      peak=int(done.sizes.get("peak_memory_in_bytes", 0)), out_of_memory=done.out_of_memory, seconds=done.seconds,
      cached=done.cached, cost=program.cost(traced, topology.chip), xla_flops=done.cost.get("flops", 0.0),
      xla_bytes=done.cost.get("bytes accessed", 0.0), xla_seconds=done.cost.get("optimal_seconds", 0.0),
      cycles=done.cycles)
