"""Whether weights travel while matrix products run, read from the text of a program that a TPU compiler has scheduled.

In a scheduled program the order of a computation's lines is the order in which they run. What is brought from host
memory, or gathered from other devices, starts at one line and is done at another; products between the two hide it. Some
compilers have the products take a gather along, as one more part of their fusions: these are between its start and its end.
"""
from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import re

_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_BODY = re.compile(r" while\(.*body=%?([\w.\-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_HOST = "S(5)"  # how layouts mark host memory
_PRODUCTS = ("convolution", "dot")


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One array on its way to where a loop body computes."""

  name: str
  """Of the operation that starts it."""
  kind: str
  """"host": copied from host memory; "all-gather": gathered from other devices."""
  products: int
  """Matrix products between its start and its end; those of a loop inside of the body count once."""
  ahead: bool
  """Whether no product of this body needs it: it is for the next step."""


@dataclasses.dataclass(frozen=True)
class LoopBody:
  """The body of a loop into which something is brought."""

  name: str
  products: int
  """All of its matrix products."""
  transfers: tuple[Transfer, ...]

  @property
  def hidden(self) -> bool:
    """Whether all that is brought is for the next step, and starts before and ends after products of this one."""
    return all(transfer.ahead and transfer.products for transfer in self.transfers)

  def __str__(self) -> str:
    rows = [f"  {t.name}: {t.kind}, {'next' if t.ahead else 'this'} step, {t.products} of {self.products} products meanwhile"
            for t in self.transfers]
    return "\n".join([f"{self.name}: {'hidden' if self.hidden else 'not hidden'}", *rows])


@dataclasses.dataclass(frozen=True)
class _Operation:
  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  called: tuple[str, ...]
  channel: str
  """By which parts of one operation between devices find each other."""


def overlap(text: str) -> tuple[LoopBody, ...]:
  """The loop bodies of a compiled and scheduled program (`compiled.as_text()`) into which arrays are brought.

  Raises ValueError for the text of a program that is not scheduled: its lines are in no order of time.
  """
  if "is_scheduled=true" not in text.partition("\n")[0]:
    raise ValueError("overlap reads compiled programs, whose first line says is_scheduled=true; of a jitted function that is "
                     "fn.lower(*args).compile().as_text()")
  computations = _parse(text)
  bodies = dict.fromkeys(_BODY.findall(text))
  found = (_body(name, computations) for name in bodies if name in computations)
  return tuple(body for body in found if body.transfers)


def _parse(text: str) -> dict[str, list[_Operation]]:
  computations: dict[str, list[_Operation]] = {}
  current: list[_Operation] = []
  for line in text.splitlines():
    if line and not line[0].isspace():
      if head := _HEAD.match(line):
        current = computations.setdefault(head[1], [])
    elif found := _LINE.match(line):
      name, kind, opcode, rest = found.groups()
      called = [one or several for one, several in _CALLED.findall(rest)]
      names = tuple(name.strip().lstrip("%") for entry in called for name in entry.split(","))
      in_text = _CHANNEL.search(rest)
      current.append(_Operation(name, kind, opcode, tuple(_NAME.findall(_inside(rest))), names,
                                in_text[1] if in_text else name))
  return computations


def _inside(rest: str) -> str:
  """What stands before the parenthesis that closes one already open."""
  depth = 1
  for i, char in enumerate(rest):
    depth += (char == "(") - (char == ")")
    if depth == 0:
      return rest[:i]
  return rest


def _body(name: str, computations: dict[str, list[_Operation]]) -> LoopBody:
  operations = computations[name]
  counts = [_products(operation, computations) for operation in operations]
  transfers = []
  for start, end, kind in _spans(operations, computations):
    if kind == "host" and _HOST in operations[end].type:
      continue  # it stays in host memory
    if end > start and counts[start]:
      continue  # a gather of the loop around, which products take along
    users = _users(operations, operations[end].name)
    ahead = not any(count for op, count in zip(operations, counts) if op.name in users)
    transfers.append(Transfer(operations[start].name, kind, sum(counts[start:end]), ahead))
  return LoopBody(name, sum(counts), tuple(transfers))


def _spans(operations: list[_Operation], computations: dict[str, list[_Operation]]) -> Iterator[tuple[int, int, str]]:
  """Where something starts to be brought and where it is there, and what kind it is of."""
  types = {operation.name: operation.type for operation in operations}
  done = {name: i for i, op in enumerate(operations) if op.opcode.endswith("-done") for name in op.operands}
  gathers: dict[str, list[int]] = {}
  for i, operation in enumerate(operations):
    for channel in _gathered(operation, computations):
      gathers.setdefault(channel, []).append(i)
    if operation.opcode.endswith("-start") and operation.operands and "update" not in operation.opcode:
      if _HOST in types.get(operation.operands[0], ""):
        yield i, done.get(operation.name, i), "host"
  for parts in gathers.values():
    yield parts[0], done.get(operations[parts[0]].name, parts[-1]), "all-gather"


def _gathered(operation: _Operation, computations: dict[str, list[_Operation]]) -> Iterator[str]:
  """The channels of the gathers of which an operation, a fusion or one that starts asynchronously, is a part."""
  inner = (op for called in operation.called for op in computations.get(called, ()))
  parts = inner if operation.opcode == "fusion" or operation.opcode.endswith("-start") else ()
  return (op.channel for op in (operation, *parts) if op.opcode.startswith("all-gather") and not op.opcode.endswith("-done"))


def _products(operation: _Operation, computations: dict[str, list[_Operation]]) -> int:
  """Matrix products in an operation and in what it calls. A fusion counts once, however many it is made of."""
  if operation.opcode in _PRODUCTS:
    return 1
  count = sum(_products(inner, computations) for called in operation.called for inner in computations.get(called, ()))
  return min(count, 1) if operation.opcode == "fusion" else count


def _users(operations: list[_Operation], name: str) -> set[str]:
  """The operations that need a value, at first or second hand."""
  users = {name}
  for operation in operations:
    if not users.isdisjoint(operation.operands):
      users.add(operation.name)
  return users - {name}
