"""`memory`: what each remat policy takes on a TPU that is not there, compiled ahead of time, and what it costs."""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import sys
from typing import Any

from absl import flags
from flax.errors import FlaxError

from linen_stack.commands import CommandError, UsageError, compiled, plain_errors
from linen_stack.commands.compiled import Subject
from linen_stack.inspect import render
from linen_stack.inspect.estimate import Estimate, Estimator
from linen_stack.inspect.memory import MemoryReport, compile_report
from linen_stack.policies import RematPolicy
from linen_stack.presets import PRESETS
from linen_stack.specs import nearest


@dataclasses.dataclass(frozen=True)
class Row:
  """A policy: what it comes to before compiling, and what the compiler says."""

  name: str
  estimate: Estimate
  memory: MemoryReport

  def to_dict(self) -> dict[str, Any]:
    estimate = self.estimate
    return {"policy": self.name, "seconds": estimate.seconds, "flops": estimate.cost.flops,
            "recomputed_flops": estimate.recomputed, "kept_device": estimate.device, "kept_host": estimate.host,
            "compiled": self.memory.to_dict()}


def define_flags(values: flags.FlagValues) -> None:
  compiled.define_flags(values)
  flags.DEFINE_string("policies", None, "presets, separated by commas, or `all`; by default the config's own policy",
                      flag_values=values)
  flags.DEFINE_boolean("json", False, "print the figures as JSON", flag_values=values)
  flags.DEFINE_string("plot", None, "draw memory against estimated time into this .svg or .png", flag_values=values)
  flags.DEFINE_string("html", None, "write a page with plan, residuals and table into this .html", flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  compiled.check_writable(values.plot, "plot", (".svg", ".png"))
  compiled.check_writable(values.html, "html", (".html", ".htm"))
  if values.plot and values.plot.endswith(".png"):
    _matplotlib()
  asked = policies(values.policies)
  subject = compiled.subject(values, args[0], "memory")
  chosen = asked or {"as configured": None}
  rows = measure(subject, chosen, skip=values.policies == "all", limit=values.limit, cache=values.cache)
  if values.json:
    print(json.dumps(document(subject, rows), indent=1))
  else:
    print(describe(subject, rows))
  # Written last, so that no failure of theirs costs what was compiled.
  if values.plot:
    _plot(values.plot, subject, rows)
  if values.html:
    from linen_stack.inspect import html  # pylint: disable=g-import-not-at-top
    with compiled.replacing(values.html) as part, open(part, "w", encoding="utf-8") as file:
      file.write(html.page(subject.model.stack.plan, _title(args[0], subject), subject.topology, rows))


def policies(text: str | None) -> dict[str, RematPolicy] | None:
  """The presets that --policies names, in order. Raises UsageError for one that is unknown."""
  if text is None:
    return None
  if text == "all":
    return {name: RematPolicy(name) for name in PRESETS}
  names = [name.strip() for name in text.split(",")]
  for name in names:
    if name not in PRESETS:
      raise UsageError(f"--policies: no preset {name!r}; {nearest(name, [*PRESETS, 'all'])}")
  return {name: RematPolicy(name) for name in dict.fromkeys(names)}


def measure(subject: Subject, chosen: dict[str, RematPolicy | None], *, skip: bool = False, limit: float = 1800.0,
            cache: bool = True) -> list[Row]:
  """Compiles the program under each policy; says on stderr how far it is. None: the policies of the config.

  Args:
    skip: leave out policies that do not go with the model, with a note, instead of raising.

  Raises CommandError.
  """
  fits = {}
  for name, policy in chosen.items():  # all of them, before the first is compiled
    wrong = subject.check(policy)
    if wrong is None:
      fits[name] = policy
    elif skip:
      _say(f"left out: {name}: {wrong}")
    else:
      raise CommandError(f"policy {name}: {wrong}")
  rows = []
  with plain_errors(ValueError, TypeError, FlaxError, ImportError, RuntimeError, TimeoutError):
    estimator = Estimator(subject.program, subject.topology.chip)
    for i, (name, policy) in enumerate(fits.items(), 1):
      _say(f"{i}/{len(fits)} {name}: compiling")
      program = dataclasses.replace(subject.program, remat=policy)
      memory = compile_report(program, subject.topology, limit=limit, cache=cache)
      rows.append(Row(name, estimator.estimate(policy, memory.cost), memory))
      _say(f"{i}/{len(fits)} {name}: {'' if memory.fits else 'does not fit, '}{render.size(memory.hbm)} of HBM, "
           f"{memory.seconds:.0f} s{' (kept from before)' if memory.cached else ''}")
  return rows


def describe(subject: Subject, rows: Sequence[Row]) -> str:
  """The table."""
  chip = subject.topology.chip
  head = ("policy", "HBM", "of device", "arguments", "temp", "host", "recomputed FLOPs", "est. step", "compiled in")
  cells = []
  for row in rows:
    memory, estimate = row.memory, row.estimate
    fits = memory.out_of_memory is None
    cells.append((
        row.name, ("" if fits else ">= ") + render.size(memory.hbm),
        f"{memory.hbm / chip.hbm:.0%}" + ("" if memory.fits else ", too much"),
        render.size(memory.argument) if fits else "-", render.size(memory.temp) if fits else "-",
        render.size(memory.host if fits else estimate.host), f"{estimate.recomputed / estimate.cost.flops:.1%}",
        render.duration(estimate.seconds), f"{memory.seconds:.0f} s"))
  table = render.Table(head, tuple(cells), right=head[1:])
  flops = rows[0].estimate.cost.flops - rows[0].estimate.recomputed if rows else 0.0
  return render.joined([
      f"{subject.topology}: {render.plural(subject.topology.num_devices, 'device')} of {render.size(chip.hbm)}; batch "
      f"{subject.batch}, seq {subject.seq}; {flops:.3g} FLOPs a step, without what is recomputed", table,
      "Memory is that of one device, for the whole train step: arguments are parameters, optimiser state and batch. The "
      "estimate leaves out transfers between devices."])


def document(subject: Subject, rows: Sequence[Row]) -> dict[str, Any]:
  """The same as JSON takes it."""
  topology = subject.topology
  return {"topology": topology.name, "slices": topology.slices, "devices": topology.num_devices,
          "capacity": topology.chip.hbm, "batch": subject.batch, "seq": subject.seq,
          "policies": [row.to_dict() for row in rows]}


def _title(name: str, subject: Subject) -> str:
  return f"{name} on {subject.topology}, batch {subject.batch}, seq {subject.seq}"


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _plot(path: str, subject: Subject, rows: Sequence[Row]) -> None:
  from linen_stack.inspect import html  # pylint: disable=g-import-not-at-top
  points = [(row.name, row.memory.hbm, row.estimate.seconds, row.memory.fits) for row in rows]
  with compiled.replacing(path) as part:
    if path.endswith(".svg"):
      with open(part, "w", encoding="utf-8") as file:
        file.write(html.chart(points, subject.topology.chip.hbm))
    else:
      html.png(part, points, subject.topology.chip.hbm)


def _matplotlib() -> None:
  try:
    import matplotlib  # pylint: disable=g-import-not-at-top,unused-import
  except ImportError:
    raise CommandError("--plot FILE.png needs matplotlib: pip install 'linen_stack[plot]'; FILE.svg needs nothing") from None
