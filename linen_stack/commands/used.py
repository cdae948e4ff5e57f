"""Device memory that training took, beside what the compiler expected of a step."""
from __future__ import annotations

import resource
import sys
from typing import Any

import jax

from linen_stack.inspect import render


def expected(compiled: Any) -> int | None:
  """Device memory of a compiled program, as its compiler says: arguments, results and everything in between."""
  sizes = compiled.memory_analysis()
  if sizes is None:
    return None
  return (sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
          + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes)


def peak() -> tuple[int, str]:
  """The most memory that has been in use, and of what: of the device, or where it does not count, of the process."""
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"], f"on {device.device_kind}"
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return most * (1 if sys.platform == "darwin" else 1024), f"by the whole process, on {device.platform}"


def describe(compiled: Any) -> str:
  """Both in one line."""
  most, where = peak()
  told = expected(compiled)
  by_compiler = "" if told is None else f"; a step by itself takes {render.size(told)}, as the compiler says"
  return f"memory: at most {render.size(most)} were in use {where}{by_compiler}"
