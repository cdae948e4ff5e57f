"""Remat policies: which named values the backward pass finds saved, or fetches from the host, or recomputes.

A layer tags values with `jax.ad_checkpoint.checkpoint_name(value, name)`; a policy speaks of those names. JAX itself
never checks that the two meet, so a policy here knows which of its names must exist (`check`), and `StackedDecoder`
checks it once, when the stack is initialised.

Precedence: a name is saved, offloaded or recomputed. Saying two of these about one name is an error, also when two
policies are joined with `|`; `a.join(b, overlap="save")` (or `"offload"`) says which one wins. What one policy keeps and
the other does not mention is kept. A JAX policy (`base`) decides about values that no name of `save` and `offload` has.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax

from linen_stack import jax_policies
from linen_stack.presets import PRESETS, Preset
from linen_stack.specs import checked_count, keywords_checked, nearest

# The name by which layers tag the hidden states that enter them. A policy that offloads it is `carry="offload"`: the
# stack then tags the carry itself, as CARRY_TAG, so that it works with and without the layer's own tag, and once.
CARRY_NAME = "decoder_layer_input"
CARRY_TAG = "layer_carry"

_HOST = "pinned_host"


def _names(value: Any, argument: str) -> tuple[str, ...]:
  if isinstance(value, str):
    raise TypeError(f"{argument} must be a list of names, not the string {value!r}; write {argument}=[{value!r}]")
  if not isinstance(value, Iterable):
    raise TypeError(f"{argument} must be a list of names, not {value!r}")
  value = tuple(value)
  for name in value:
    if not isinstance(name, str) or not name:
      raise TypeError(f"{argument} must hold names (non-empty strings), not {name!r}")
  return tuple(sorted(set(value)))


@keywords_checked
@dataclasses.dataclass(frozen=True)
class RematPolicy:
  """What the backward pass of a layer finds, and where. Frozen, hashable; equal when it means the same.

  `RematPolicy("minimal")` is a preset; `RematPolicy(save=[...], offload=[...])` is a policy of one's own; a preset may
  be extended: `RematPolicy("minimal", offload=["context"])`.
  """

  preset: str | None = dataclasses.field(default=None, compare=False)
  """A preset (`RematPolicy.presets()`), whose names are added to `save` and `offload`. None: start from `full`."""

  save: tuple[str, ...] = ()
  """Names kept on device. Each must be tagged by a layer of the plan."""

  offload: tuple[str, ...] = ()
  """Names copied to host memory and fetched back by the backward pass. Each must be tagged by a layer of the plan. Values
  of rank 0 and 1 stay on device."""

  carry: Literal["save", "offload"] = "save"
  """Where the hidden states that enter each layer wait for the backward pass. Needs no tag in the layer."""

  levels: tuple[int, ...] | None = None
  """Nested remat, outermost first: `(8, 8)` saves 8 + 8 carries of 64 layers. Must multiply to the segment's length."""

  every: int = 1
  """Layers per rematerialised region: one carry is saved for every `every` layers."""

  prevent_cse: bool | tuple[bool, bool] | None = None
  """Whether the compiler is kept from merging the recomputation with the forward pass. None: decided per region.
  A pair says it for a layer's variables and for its arguments: `(False, True)` lets gathered weights be shared."""

  base: Callable[..., Any] | None = None
  """A JAX checkpoint policy that decides on everything that `save` and `offload` do not name. The names in one that
  JAX makes from names go into `save` and `offload`."""

  offload_dst: str = _HOST
  """Memory kind that offloaded values move to."""

  remat: bool = True
  """False only for the preset `none`: the layer is not rematerialised at all."""

  optional: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
  """Names that came from presets alone: the layers may lack them."""

  alternatives: frozenset[tuple[str, frozenset[str]]] = dataclasses.field(default=frozenset(), compare=False)
  """Each preset that went in, with its names: the layers need at least one of them."""

  def __post_init__(self):
    set_ = functools.partial(object.__setattr__, self)
    if self.carry not in ("save", "offload"):
      raise ValueError(f"carry must be 'save' or 'offload', not {self.carry!r}")
    save, offload = set(_names(self.save, "save")), set(_names(self.offload, "offload"))
    offload |= {CARRY_NAME} if self.carry == "offload" else set()
    if save & offload:
      raise ValueError(f"both saved and offloaded: {_listed(save & offload)} (save={sorted(save)}, "
                       f"offload={sorted(offload)}); name each value in one of the two")
    if not isinstance(self.remat, bool):
      raise TypeError(f"remat must be True or False, not {self.remat!r}")
    optional, alternatives = set(_names(self.optional, "optional")), set(self.alternatives)
    if self.preset is not None:
      if not isinstance(self.preset, str):
        raise TypeError(f"preset must be the name of a preset, not {self.preset!r}; names of values go into save=[...]")
      if self.preset not in PRESETS:
        raise ValueError(f"unknown remat preset {self.preset!r}; {nearest(str(self.preset), PRESETS)}")
      preset = PRESETS[self.preset]
      if preset.remat and not self.remat:
        raise ValueError(f"remat=False is the preset 'none', and goes with no other, such as {self.preset!r}")
      set_("remat", preset.remat)
      alternatives.add((self.preset, frozenset({*preset.save, *preset.offload})))
      optional |= {*preset.save, *preset.offload} - save - offload
      # What is said here about a name of the preset replaces what the preset says of it.
      save, offload = save | set(preset.save) - offload, offload | set(preset.offload) - save
    save, offload = self._with_told(set_, save, offload)
    set_("carry", "offload" if CARRY_NAME in offload else "save")
    offload -= {CARRY_NAME}
    set_("save", tuple(sorted(save)))
    set_("offload", tuple(sorted(offload)))
    set_("optional", frozenset(optional & (save | offload)))
    set_("alternatives", frozenset((name, group & (save | offload)) for name, group in alternatives
                                   if group & (save | offload)))
    self._check_options(set_)

  def _with_told(self, set_: Callable[[str, Any], None], save: set[str], offload: set[str]) -> tuple[set[str], set[str]]:
    """Takes the names out of `base`, where it is one of JAX's policies by name: they are names like any others."""
    told, said = jax_policies.told(self.base), save | offload
    set_("base", told.rest)
    if told.offload - said or jax_policies.offloads(told.rest):
      dst = told.offload_dst or self.offload_dst
      if dst != self.offload_dst and (offload or self.offload_dst != _HOST):
        raise ValueError(f"values would be offloaded to two places: {self.offload_dst!r} by this policy, {dst!r} by "
                         "its base")
      set_("offload_dst", dst)
    return save | told.save - said, offload | told.offload - said

  def _check_options(self, set_: Callable[[str, Any], None]) -> None:
    """Raises for options that cannot be, and brings those that mean the same into one form."""
    set_("every", checked_count(self.every, "every"))
    if self.levels is not None:
      if isinstance(self.levels, (str, int)) or not isinstance(self.levels, Iterable):
        raise TypeError(f"levels must be a tuple of ints such as (8, 8), not {self.levels!r}")
      set_("levels", tuple(checked_count(level, "each of levels") for level in self.levels))
      if len(self.levels) < 2:
        raise ValueError(f"levels must name at least two levels, not {self.levels}")
      if self.every != 1:
        raise ValueError(f"levels={self.levels} and every={self.every} exclude each other; "
                         "the last of levels says how many layers an inner region holds")
    if self.prevent_cse is not None and not isinstance(self.prevent_cse, bool):
      if not isinstance(self.prevent_cse, tuple) or [type(flag) for flag in self.prevent_cse] != [bool, bool]:
        raise TypeError("prevent_cse must be a bool, a pair of bools (variables, arguments) or None, "
                        f"not {self.prevent_cse!r}")
    if self.prevent_cse in ((True, True), (False, False)):
      set_("prevent_cse", self.prevent_cse[0])
    if not isinstance(self.offload_dst, str) or not self.offload_dst:
      raise TypeError(f"offload_dst must be the name of a memory kind, not {self.offload_dst!r}")
    if self.offload_dst == "device":
      raise ValueError("offload_dst must be a memory that values move to, not 'device', where they are")
    others = (*self.names, self.carry, self.levels, self.every, self.prevent_cse, self.base, self.offload_dst)
    if not self.remat and others != ("save", None, 1, None, None, _HOST):
      raise ValueError("the preset 'none' means no remat and takes no other option; 'full' is remat that saves nothing")
    if self.offload_dst != _HOST and not self.offloads:
      raise ValueError(f"offload_dst={self.offload_dst!r}, but the policy offloads nothing; name values in "
                       "offload=[...] or set carry='offload'")

  @staticmethod
  def of(value: Any) -> RematPolicy:
    """A policy from a preset's name, a policy, or a JAX checkpoint policy (a callable)."""
    if isinstance(value, RematPolicy):
      return value
    if isinstance(value, str):
      return RematPolicy(value)
    if callable(value):
      return RematPolicy(base=value)
    raise TypeError(f"remat must be the name of a preset, a RematPolicy or a JAX checkpoint policy, not {value!r}; "
                    "'none' is no remat, 'full' is remat that saves nothing")

  @staticmethod
  def presets() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(PRESETS)

  @staticmethod
  def register(name: str, *, save: Iterable[str] = (), offload: Iterable[str] = (), note: str = "") -> None:
    """Adds a preset of one's own. Raises ValueError on a name that is taken."""
    if not isinstance(name, str) or not name:
      raise TypeError(f"name must be a non-empty string, not {name!r}")
    if name in PRESETS:
      raise ValueError(f"a preset {name!r} exists already")
    policy = RematPolicy(save=save, offload=offload)
    PRESETS[name] = Preset(note, policy.save, tuple(sorted(policy._offloaded)))

  @property
  def offloads(self) -> bool:
    """Whether any value moves to the host."""
    return bool(self.offload) or self.carry == "offload" or jax_policies.offloads(self.base)

  @property
  def alone(self) -> RematPolicy:
    """The same policy with one layer to a region."""
    return dataclasses.replace(self, preset=None, levels=None, every=1)

  @property
  def saved(self) -> RematPolicy:
    """The same policy with all that it offloads saved on the device: for devices that lack the memory, and to compare."""
    if jax_policies.offloads(self.base):
      raise ValueError(f"base {jax_policies.called(self.base)} offloads by itself; give a base that saves, such as "
                       "dots_with_no_batch_dims_saveable")
    return dataclasses.replace(self, preset=None, save=self.names, offload=(), carry="save", offload_dst=_HOST)

  @property
  def within(self) -> RematPolicy:
    """The policy of a single layer inside the regions that `levels` and `every` make."""
    if self.every > 1:
      return RematPolicy("none")
    if self.levels is None:
      return self
    # The carries inside a region are recomputed with it: to name them would keep one for every layer after all.
    return dataclasses.replace(self, preset=None, carry="save", levels=None,
                               offload_dst=self.offload_dst if self.offload else _HOST)

  @property
  def names(self) -> tuple[str, ...]:
    """Every name that the policy speaks of."""
    return (*self.save, *self.offload)

  @property
  def _offloaded(self) -> set[str]:
    """What is offloaded, the carry by its name."""
    return {*self.offload, CARRY_NAME} if self.carry == "offload" else {*self.offload}

  def join(self, other: Any, overlap: Literal["error", "save", "offload"] = "error") -> RematPolicy:
    """Keeps what either policy keeps.

    Args:
      other: a preset's name, a policy or a JAX checkpoint policy.
      overlap: what happens to a name that one saves and the other offloads. JAX policies (`base`) are asked about each
        value only while gradients are traced, and "error" is raised then.

    Raises:
      ValueError: an overlap, unless it is settled here; options of which the two say different things.
    """
    other = RematPolicy.of(other)
    if overlap not in ("error", "save", "offload"):
      raise ValueError(f"overlap must be 'error', 'save' or 'offload', not {overlap!r}")
    if not (self.remat and other.remat):
      return _join_none(other if self.remat else self, self if self.remat else other, overlap)
    save, offload = {*self.save, *other.save}, self._offloaded | other._offloaded
    if overlap == "save":
      offload -= save
    elif overlap == "offload":
      save -= offload
    elif save & offload:
      raise ValueError(f"both saved and offloaded: {_listed(save & offload)}, by {self} | {other}; "
                       "a.join(b, overlap='save') or overlap='offload' says which of the two wins")
    merged = {field: _agreed(field, (getattr(self, field), getattr(other, field)), default)
              for field, default in (("levels", None), ("every", 1), ("prevent_cse", None))}
    if offload:
      merged["offload_dst"] = _agreed("offload_dst", [p.offload_dst for p in (self, other) if p.offloads], None)
    required = {*self.names} - self.optional | {*other.names} - other.optional
    return RematPolicy(
        save=save, offload=offload, base=jax_policies.either(self.base, other.base, overlap), **merged,
        optional=(self.optional | other.optional) - required, alternatives=self.alternatives | other.alternatives)

  def __or__(self, other: Any) -> RematPolicy:
    return self.join(other)

  def check(self, tags: Iterable[str], where: str = "any layer of the plan") -> None:
    """Raises ValueError where the policy's names and the `tags` that layers use do not meet.

    A name said by the user must be among the tags. Each preset needs at least one of its names.
    """
    tags = set(tags)
    for name in (*self.names, *sorted(jax_policies.excluded(self.base))):
      if name not in tags and name not in self.optional and name != CARRY_NAME:
        raise ValueError(f"remat policy names {name!r}, which is not tagged by {where}; {nearest(name, sorted(tags))}")
    for preset, names in sorted(self.alternatives, key=lambda entry: entry[0]):
      if not names & {*tags, CARRY_NAME}:
        raise ValueError(f"remat preset {preset}: none of its names ({_listed(names)}) is tagged by {where}; "
                         f"tags there: {_listed(tags) or 'none'}. "
                         "Tag values with jax.ad_checkpoint.checkpoint_name, or take 'full' or 'none'")

  def resolve(self) -> Callable[..., Any]:
    """The JAX checkpoint policy. `none` resolves to one that saves everything."""
    if not self.remat:
      return jax.checkpoint_policies.everything_saveable
    offload = (*self.offload, CARRY_TAG) if self.carry == "offload" else self.offload
    return jax_policies.resolved(self.save, offload, self.offload_dst, self.base)

  def __str__(self) -> str:
    if not self.remat:
      return "none"
    parts = [self.preset] if self.preset else []
    for word, names in (("save", self.save), ("offload", self.offload)):
      named = [name for name in names if not self.preset or name not in self.optional]
      parts += [f"{word} {' '.join(named)}"] if named else []
    parts += [f"base {jax_policies.called(self.base)}"] if self.base else []
    parts = parts or ["full"]
    parts += ["carry offload"] if self.carry == "offload" else []
    parts += [f"levels {'x'.join(map(str, self.levels))}"] if self.levels else []
    parts += [f"every {self.every}"] if self.every != 1 else []
    parts += [f"prevent_cse {self.prevent_cse}"] if self.prevent_cse is not None else []
    parts += [f"to {self.offload_dst}"] if self.offload_dst != _HOST else []
    return ", ".join(parts)


def _join_none(none: RematPolicy, other: RematPolicy, overlap: str) -> RematPolicy:
  """`none` keeps everything on device already, so that nothing is left for `other` to keep."""
  moved = other.offloads and overlap != "save"
  if moved or other.levels is not None or other.every != 1 or other.prevent_cse is not None:
    raise ValueError(f"cannot join 'none' and {other}: without remat every value stays on device; "
                     "overlap='save' says so of values that the other offloads")
  return none


def _agreed(field: str, values: Iterable[Any], default: Any) -> Any:
  """The one value that is not the default, or the default."""
  said = [value for value in dict.fromkeys(values) if value != default]
  if len(said) > 1:
    raise ValueError(f"cannot join policies with {field}={said[0]!r} and {field}={said[1]!r}")
  return said[0] if said else default


def _listed(names: Iterable[str]) -> str:
  return ", ".join(sorted(names))
