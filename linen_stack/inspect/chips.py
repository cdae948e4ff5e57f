"""TPU generations: what a device of each holds and how fast it is, and the topologies to compile for.

Sources. `hbm` is what the compiler says is available when a program is too large for the device (libtpu 0.0.42.1): less
than the chip has, since a part is reserved. `peak` and `bandwidth` are those of the pages on each generation under
https://cloud.google.com/tpu/docs, divided by the devices of a chip. `link`, to the host, is PCIe: 16 GB/s for a chip of
the second and third generation (Norrie et al., "The Design Process for Google's Training Chips", IEEE Micro 2021) and
assumed to be that up to v5p; 32 GB/s with PCIe generation 5, which the page on v6e names.
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

from linen_stack.specs import nearest

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device of a TPU generation, as JAX counts devices: a chip, or one of its two cores."""

  name: str
  hbm: int
  """Bytes of memory that a program can use."""
  peak: float
  """bfloat16 operations per second."""
  bandwidth: float
  """Bytes per second between the device and its memory."""
  link: float
  """Bytes per second between the device and host memory, each way."""
  dims: int
  """Dimensions of its topologies."""
  pod: int
  """Chips of the largest slice."""
  cores: int = 1
  """Devices per chip."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  """What `jax.experimental.topologies` is told beside the name."""


_CHIPS = (
    Chip("v2", int(7.48 * GIB), 45e12 / 2, 700e9 / 2, 16e9 / 2, 2, 256, cores=2),
    Chip("v3", int(15.48 * GIB), 123e12 / 2, 900e9 / 2, 16e9 / 2, 2, 1024, cores=2),
    # The two cores of a v4 chip run as one device.
    Chip("v4", int(30.75 * GIB), 275e12, 1228e9, 16e9, 3, 4096, options={"chip_config_name": "megacore"}),
    Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 16e9, 2, 256),
    Chip("v5p", int(95.74 * GIB), 459e12, 2765e9, 16e9, 3, 8960),
    Chip("v6e", int(31.25 * GIB), 918e12, 1638e9, 32e9, 2, 256),
    Chip("tpu7x", int(94.75 * GIB), 2307e12 / 2, 7380e9 / 2, 32e9 / 2, 3, 9216, cores=2),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}

_EXAMPLES = {2: ("2x2", "4x4", "8x16", "16x16"), 3: ("2x2x1", "4x4x4", "4x4x8", "8x8x16")}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice of a TPU, or several that are joined by the data centre's network."""

  chip: Chip
  shape: tuple[int, ...]
  """Chips along each dimension of a slice."""
  slices: int = 1

  @property
  def name(self) -> str:
    """As it is written: "v5p:2x2x1"."""
    return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

  @property
  def num_devices(self) -> int:
    """Devices of all slices."""
    return math.prod(self.shape) * self.chip.cores * self.slices

  @property
  def options(self) -> dict[str, Any]:
    """Keyword arguments of `jax.experimental.topologies.get_topology_desc`."""
    # A host holds 2 x 2 chips, where the slice is no smaller than that.
    bounds = (*(min(2, size) for size in self.shape[:2]), 1)
    slices = {"num_slices": self.slices} if self.slices > 1 else {}
    return {**self.chip.options, **slices, "chips_per_host_bounds": bounds}

  def __str__(self) -> str:
    return self.name if self.slices == 1 else f"{self.slices} slices of {self.name}"


def topology(name: str, slices: int = 1) -> Topology:
  """The topology of that name: a generation and the chips along each dimension, as in "v5p:2x2x1" and "v6e:4x4".

  Raises:
    TypeError: a name that is no string, slices that are no int.
    ValueError: an unknown generation, a shape that it does not have, no slice.
  """
  if not isinstance(name, str):
    raise TypeError(f"topology must be a name such as 'v5p:2x2x1', not {name!r}")
  if isinstance(slices, bool) or not isinstance(slices, int):
    raise TypeError(f"slices must be an int, not {slices!r}")
  if slices < 1:
    raise ValueError(f"slices must be at least 1, not {slices}")
  generation, _, shape = name.partition(":")
  chip = CHIPS.get(generation.lower())
  if chip is None:
    raise ValueError(f"topology {name!r}: no TPU generation {generation!r}; {nearest(generation, CHIPS)} "
                     f"(some topologies: {', '.join(known())})")
  if not re.fullmatch(r"\d+(x\d+)*", shape):
    raise ValueError(f"topology {name!r}: the chips along each dimension are missing; some of {chip.name}: "
                     f"{', '.join(known(chip))}")
  sizes = tuple(map(int, shape.split("x")))
  if len(sizes) != chip.dims or 0 in sizes:
    raise ValueError(f"topology {name!r}: {chip.name} has {chip.dims} dimensions of at least one chip; some of "
                     f"{chip.name}: {', '.join(known(chip))}")
  if math.prod(sizes) > chip.pod:
    raise ValueError(f"topology {name!r}: a slice of {chip.name} has at most {chip.pod} chips, not {math.prod(sizes)}; "
                     "slices=... joins several")
  if any(size % 2 for size in sizes[:2] if size > 2):
    raise ValueError(f"topology {name!r}: a host has 2 x 2 chips, so that the first two dimensions are 1 or even; some of "
                     f"{chip.name}: {', '.join(known(chip))}")
  return Topology(chip, sizes, slices)


def known(chip: Chip | None = None) -> tuple[str, ...]:
  """Some topologies, of one generation or a small one of each."""
  if chip is None:
    return tuple(f"{each.name}:{_EXAMPLES[each.dims][0]}" for each in CHIPS.values())
  return tuple(f"{chip.name}:{shape}" for shape in _EXAMPLES[chip.dims])


_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: Any, what: str) -> int:
  """The number of bytes that "15GiB", "64 GB" or "512MiB" says.

  Raises ValueError, which begins with `what`, for a number without a unit and for what is no size.
  """
  match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
  if match is None:
    raise ValueError(f"{what} must be a size such as 15GiB, not {text!r}")
  number, unit = match.groups()
  if not unit:
    raise ValueError(f"{what}: {text!r} has no unit; write {number}GiB, {number}GB or {number}MiB")
  if unit.upper() not in _UNITS:
    raise ValueError(f"{what}: no unit {unit!r} in {text!r}; there are B, KB, MB, GB, TB and KiB, MiB, GiB, TiB")
  size = int(float(number) * _UNITS[unit.upper()])
  if size < 1:
    raise ValueError(f"{what} must be more than nothing, not {text!r}")
  return size
