"""The commands of `python -m linen_stack`: a table, their flags and how their errors end.

A command is a module with `define_flags(flag_values)` and `run(flags, args)`, imported when it is asked for; `args` are
its positional arguments, `flags` holds the values of its flags. What a user can cause is raised as `CommandError`.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import importlib
import os
import sys

from absl import flags as absl_flags

from linen_stack.specs import nearest


@dataclasses.dataclass(frozen=True)
class Command:
  """A row of the table."""

  module: str
  arguments: tuple[str, ...]
  """Names of the positional arguments."""
  help: str
  traces: bool = False
  """Whether it only traces, so that the machine's accelerators are left alone: another program may hold them."""


COMMANDS: dict[str, Command] = {
    "plan": Command(
        "linen_stack.commands.plan", ("CONFIG",), "segments and parameters of a model, without allocating it",
        traces=True),
    "audit": Command(
        "linen_stack.commands.audit", ("CONFIG",), "what remat policies do with each tagged value; status 1 on errors",
        traces=True),
    "memory": Command(
        "linen_stack.commands.memory", ("CONFIG",), "what each policy takes on a TPU that you name, and costs; no TPU needed",
        traces=True),
    "tune": Command(
        "linen_stack.commands.tune", ("CONFIG",), "the fastest policy, by estimate, that fits the TPU memory that you name",
        traces=True),
    "train": Command(
        "linen_stack.commands.train", ("CONFIG",), "train a model on text, and measure it on held-out text"),
    "generate": Command(
        "linen_stack.commands.generate", ("CHECKPOINT",), "continue a text with a trained model"),
    "convert": Command(
        "linen_stack.commands.convert", ("SRC", "DST"), "a checkpoint in another layout, from a Hugging Face folder, or as one"),
}


class CommandError(Exception):
  """A message for the user; ends the program with `status`."""

  def __init__(self, message: str, status: int = 1):
    super().__init__(message)
    self.status = status


class UsageError(CommandError):
  """A command line that cannot be understood."""

  def __init__(self, message: str):
    super().__init__(message, status=2)


@contextlib.contextmanager
def plain_errors(*kinds: type[Exception]) -> Iterator[None]:
  """Turns errors of these kinds into messages: for code that raises them about what the user gave."""
  try:
    yield
  except kinds as error:
    raise CommandError(describe(error)) from error


def describe(error: BaseException) -> str:
  """An error in words."""
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
  return str(error) or type(error).__name__


def usage() -> str:
  """The help of the program."""
  calls = {" ".join([name, *command.arguments]): command.help for name, command in COMMANDS.items()}
  width = max(map(len, calls))
  rows = [f"  {call:<{width}}  {text}" for call, text in calls.items()]
  return "\n".join([
      "usage: python -m linen_stack COMMAND ...", "", *rows, "",
      "CONFIG is a YAML file or the name of a shipped config.",
      "`python -m linen_stack COMMAND --help` shows a command's flags."])


def main(argv: Sequence[str]) -> int:
  """Runs a command line (without the program's name). Returns the exit status."""
  debug = "--traceback" in argv
  try:
    _run([arg for arg in argv if arg != "--traceback"])
    sys.stdout.flush()
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has seen enough
    return 1
  except KeyboardInterrupt:
    print("linen_stack: interrupted", file=sys.stderr)
    return 130
  except (CommandError, OSError) as error:
    if debug:
      raise
    print(f"linen_stack: {describe(error)}", file=sys.stderr)
    return getattr(error, "status", 1)
  return 0


def _run(argv: Sequence[str]) -> None:
  if not argv or argv[0] in ("help", "--help", "-h"):
    print(usage())
    return
  name, *rest = argv
  if name not in COMMANDS:
    kind = "flag before the command" if name.startswith("-") else "command"
    raise UsageError(f"no {kind} {name!r}; {nearest(name, COMMANDS)}")
  command = COMMANDS[name]
  module = importlib.import_module(command.module)
  values = absl_flags.FlagValues()
  module.define_flags(values)
  if {"--help", "-h"} & {*rest}:
    print(f"usage: python -m linen_stack {name} {' '.join(command.arguments)} [flags]\n\n{command.help}\n\nflags:")
    print("\n".join(_flag_help(values)))
    return
  try:
    args = values([name, *rest])[1:]
  except absl_flags.UnrecognizedFlagError as error:
    raise UsageError(f"{name} has no flag --{error.flagname}; {nearest(error.flagname, _names(values))}") from None
  except absl_flags.Error as error:
    raise UsageError(f"{name}: {error}") from None
  if len(args) < len(command.arguments):
    raise UsageError(f"{name} needs {' '.join(command.arguments)}; "
                     f"`python -m linen_stack {name} --help` shows its flags")
  if len(args) > len(command.arguments):
    extra = args[len(command.arguments)]
    hint = f"write --set {extra}" if "=" in extra else f"it takes {' '.join(command.arguments)}"
    raise UsageError(f"{name}: unexpected argument {extra!r}; {hint}")
  if command.traces:
    import jax  # pylint: disable=g-import-not-at-top  # not for the help
    jax.config.update("jax_platforms", "cpu")
  module.run(values, args)


def _names(values: absl_flags.FlagValues) -> list[str]:
  return sorted(name for name in values if len(name) > 1)


def _flag_help(values: absl_flags.FlagValues) -> Iterator[str]:
  for name in _names(values):
    flag = values[name]
    default = "" if flag.default in (None, [], False) else f" (default {flag.default})"
    yield f"  --{name}: {' '.join(flag.help.split())}{default}"
  yield "  --traceback: show where an error arose"
