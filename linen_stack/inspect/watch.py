"""Finds the stacks in a traced call, and leaves marks in its program by which each layer can be found again.

    named scope   "place 3;" around each layer: equations keep it in their name stack, also those moved out of a loop
    tag           CARRY_MARK on the hidden states that enter a layer; no policy names it, so none acts on it
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import itertools
import re
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from linen_stack.plan import Run, Segment
from linen_stack.stack import StackedDecoder

CARRY_MARK = "linen_stack: carry"
STACK_SCOPE = "linen_stack stack;"
PLACE_SCOPE = re.compile(r"linen_stack place (\d+);")

# A part of the keys of jax's caches: what was traced before is traced again, and what has marks is not used again.
_watching = jax.make_user_context(None)
_calls = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Place:
  """A run of a stack: where a layer stands. `stack` is the path of the stack in the model."""

  stack: tuple[str, ...]
  segment: Segment
  run: Run

  @property
  def num_layers(self) -> int:
    return self.segment.length * self.run.count


@dataclasses.dataclass
class Watch:
  """What a call contained: its stacks by path, as they were built, and the places of their layers."""

  stacks: dict[tuple[str, ...], StackedDecoder] = dataclasses.field(default_factory=dict)
  hidden: dict[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)  # avals of the hidden states, by stack
  places: list[Place] = dataclasses.field(default_factory=list)
  open_stacks: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
  layers: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)  # index in `places`, by a layer's path
  open_layers: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

  def add(self, path: tuple[str, ...], stack: StackedDecoder) -> None:
    self.stacks[path] = stack.clone(parent=None, name=None)
    for segment in stack.plan:
      for run in segment.runs:
        self.places.append(Place(path, segment, run))
        if stack.scan:
          self.layers[path + segment.path(run)] = len(self.places) - 1
          continue
        for i in range(segment.num_layers):
          if run.offset <= i % len(segment.block) < run.offset + run.count:
            self.layers[path + (f"{segment.name}_{i}",)] = len(self.places) - 1

  def find(self, name_stack: str) -> Place | None:
    """The place whose layer an equation with this name stack belongs to."""
    found = PLACE_SCOPE.findall(name_stack)
    return self.places[int(found[-1])] if found else None


  def holder(self, keys: Sequence[str]) -> Place | None:
    """The place whose layer holds the variable to which `keys` lead, from the function's argument on."""
    for path, index in self.layers.items():
      if any(tuple(keys[i:i + len(path)]) == path for i in range(len(keys) - len(path) + 1)):
        return self.places[index]
    return None


@contextlib.contextmanager
def watching(mark: bool = False, **options: Any) -> Iterator[Watch]:
  """Watches the stacks that are called inside.

  Args:
    mark: leave marks in the program.
    **options: replace those of every stack, for the time of its call.
  """
  watch = Watch()

  def intercept(next_fun, args, kwargs, context):
    module = context.module
    if context.method_name != "__call__" or module.scope is None:
      return next_fun(*args, **kwargs)
    path = module.path
    if isinstance(module, StackedDecoder):
      if path not in watch.stacks:
        watch.add(path, module)
      watch.hidden[path] = jax.tree.map(jax.typeof, args[0]) if args else None
      watch.open_stacks.append(path)
      before = {name: getattr(module, name) for name in options}
      try:
        _set(module, options)
        with jax.named_scope(STACK_SCOPE):
          return next_fun(*args, **kwargs)
      finally:
        _set(module, before)
        watch.open_stacks.pop()
    if not mark or not args or path not in watch.layers or path in watch.open_layers:
      return next_fun(*args, **kwargs)
    watch.open_layers.append(path)
    try:
      with jax.named_scope(f"linen_stack place {watch.layers[path]};"):
        x = jax.tree.map(lambda leaf: checkpoint_name(leaf, CARRY_MARK), args[0])
        return next_fun(x, *args[1:], **kwargs)
    finally:
      watch.open_layers.pop()

  with _watching(next(_calls)), nn.intercept_methods(intercept):
    yield watch


def _set(module: nn.Module, options: dict[str, Any]) -> None:
  for name, value in options.items():
    object.__setattr__(module, name, value)  # a module is frozen once it is set up
