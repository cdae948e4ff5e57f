"""`tune`: the remat policy with the least estimated step time whose compiled program fits the memory that you name."""
from __future__ import annotations

from collections.abc import Sequence
import json
import sys

from absl import flags
from flax.errors import FlaxError

from linen_stack.commands import CommandError, compiled, plain_errors
from linen_stack.inspect import chips
from linen_stack.inspect.tune import search


def define_flags(values: flags.FlagValues) -> None:
  compiled.define_flags(values)
  flags.DEFINE_string("hbm", None, "device memory to stay below, such as 15GiB; by default what a device has",
                      flag_values=values)
  flags.DEFINE_string("host", None, "host memory for each device to stay below, such as 64GiB; by default no bound",
                      flag_values=values)
  flags.DEFINE_boolean("json", False, "print the result as JSON", flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  with plain_errors(ValueError):
    hbm, host = (text and chips.parse_bytes(text, f"--{flag}") for flag, text in (("hbm", values.hbm), ("host", values.host)))
  subject = compiled.subject(values, args[0], "tune")
  wrong = subject.check(None)
  if wrong is not None:
    raise CommandError(f"the policy of {args[0]}: {wrong}")
  with plain_errors(ValueError, TypeError, FlaxError, ImportError, RuntimeError, TimeoutError):
    report = search(subject.program, subject.topology, hbm or subject.topology.chip.hbm, host, limit=values.limit,
                    cache=values.cache, say=lambda line: print(line, file=sys.stderr, flush=True))
  print(json.dumps(report.to_dict(), indent=1) if values.json else report)
  if report.winner is None:
    raise CommandError("no policy fits")
