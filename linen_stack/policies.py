"""Remat policies: which named values the backward pass finds saved, which it fetches from the host, which it recomputes.

A layer tags values with `jax.ad_checkpoint.checkpoint_name(value, name)`; a policy speaks of those names. JAX itself
never checks that the two meet, so a policy here knows which of its names must exist (`check`), and `StackedDecoder`
checks it once, when the stack is initialised.

Precedence: a name is saved, offloaded or recomputed. Saying two of these about one name is an error, also when two
policies are joined with `|`; `a.join(b, overlap="save")` (or `"offload"`) says which one wins.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax

from linen_stack.plan import nearest

# The name by which layers tag the hidden states that enter them. A policy that offloads it is `carry="offload"`: the
# stack then tags the carry itself, as CARRY_TAG, so that it works with and without the layer's own tag, and once.
CARRY_NAME = "decoder_layer_input"
CARRY_TAG = "layer_carry"

# Separate, fused, low-rank (MLA) and expert spellings of one projection: a layer has the ones that it has.
_QUERY_KEY_VALUE = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj",
                    "mla_q", "mla_kv", "query_wa_proj", "kv_wa_proj")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
_MLP_OUT = ("mlpwo", "moe_mlpwo")
_PROJECTIONS = (*_QUERY_KEY_VALUE, "out_proj", *_MLP_IN, *_MLP_OUT)


@dataclasses.dataclass(frozen=True)
class Preset:
  """Names of a preset and a line that says what it costs and when to take it. A layer needs only some of the names."""

  note: str
  save: tuple[str, ...] = ()
  offload: tuple[str, ...] = ()
  remat: bool = True


PRESETS: dict[str, Preset] = {
    "none": Preset("No remat: every intermediate value stays on device. Fastest; for models that fit with room to spare.",
                   remat=False),
    "full": Preset("Saves only each layer's input and runs the layer again backward: least memory, a third more FLOPs."),
    "minimal": Preset("Saves every projection, recomputes attention and elementwise work: few extra FLOPs, much memory.",
                      _PROJECTIONS),
    "minimal_with_context": Preset("`minimal`, and the attention kernel's output, so that the kernel does not run again.",
                                   (*_PROJECTIONS, "context")),
    "minimal_with_quantization": Preset(
        "`minimal`, and quantised operands and scales; under scan each of them is a buffer per layer.",
        (*_PROJECTIONS, "quantization")),
    "minimal_with_context_and_quantization": Preset("Both of the above.", (*_PROJECTIONS, "context", "quantization")),
    "save_dot_with_context_except_mlp": Preset(
        "Saves the attention block's projections and context; recomputes the MLP: for long sequences.",
        (*_QUERY_KEY_VALUE, "out_proj", "context")),
    "save_dot_except_mlpwi": Preset("Saves all projections but the wide MLP ones: most of `minimal` at a third of the size.",
                                    (*_QUERY_KEY_VALUE, "out_proj", *_MLP_OUT)),
    "save_dot_except_mlp": Preset("Saves the attention block's projections; recomputes the MLP and the attention kernel.",
                                  (*_QUERY_KEY_VALUE, "out_proj")),
    "save_qkv_proj": Preset("Saves query, key and value: the smallest step up from `full`.", _QUERY_KEY_VALUE),
    "save_out_proj": Preset("Saves the attention block's result: the MLP's backward pass need not rerun attention.",
                            ("out_proj",)),
    "qkv_proj_offloaded": Preset("`save_qkv_proj` in host memory: device memory of `full`, traffic over the host link.",
                                 offload=_QUERY_KEY_VALUE),
    "minimal_offloaded": Preset("`minimal` in host memory: FLOPs of `minimal`, where the host link keeps up.",
                                offload=_PROJECTIONS),
}


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


def _positive(value: Any, argument: str) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"{argument} must be an int of at least 1, not {value!r}")
  return value


@dataclasses.dataclass(frozen=True)
class RematPolicy:
  """What the backward pass of a layer finds, and where. Frozen, hashable; equal when it means the same.

  `RematPolicy("minimal")` is a preset; `RematPolicy(save=[...], offload=[...])` is a policy of one's own; a preset may be
  extended: `RematPolicy("minimal", offload=["context"])`.
  """

  preset: str | None = dataclasses.field(default=None, compare=False)
  """Name of a preset (`RematPolicy.presets()`); its names are added to `save` and `offload`. None: start from `full`."""

  save: tuple[str, ...] = ()
  """Names kept on device. Each must be tagged by a layer of the plan."""

  offload: tuple[str, ...] = ()
  """Names copied to host memory and fetched back by the backward pass. Each must be tagged by a layer of the plan."""

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
  """A JAX checkpoint policy that decides on everything that `save` and `offload` do not name."""

  offload_dst: str = "pinned_host"
  """Memory kind that offloaded values move to."""

  remat: bool = True
  """False only for the preset `none`: the layer is not rematerialised at all."""

  optional: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
  """Names that came from a preset: a layer needs only some of them."""

  def __post_init__(self):
    set_ = functools.partial(object.__setattr__, self)
    save, offload = _names(self.save, "save"), _names(self.offload, "offload")
    if self.preset is not None:
      if not isinstance(self.preset, str) or self.preset not in PRESETS:
        raise ValueError(f"unknown remat preset {self.preset!r}; {nearest(str(self.preset), PRESETS)}")
      preset = PRESETS[self.preset]
      if not preset.remat:
        if save or offload or self.base or self.carry != "save" or self.levels or self.every != 1:
          raise ValueError("the preset 'none' means no remat and takes no other option; 'full' is remat that saves nothing")
        set_("remat", False)
      set_("optional", self.optional | (set(preset.save) | set(preset.offload)) - set(save) - set(offload))
      # What is said here about a name of the preset replaces what the preset says of it.
      save = tuple(sorted({*save, *preset.save} - set(offload)))
      offload = tuple(sorted({*offload, *preset.offload} - set(save)))
    both = set(save) & set(offload)
    if both:
      raise ValueError(f"both saved and offloaded: {', '.join(sorted(both))} (save={list(save)}, offload={list(offload)}); "
                       "name each value in one of the two")
    if self.carry not in ("save", "offload"):
      raise ValueError(f"carry must be 'save' or 'offload', not {self.carry!r}")
    if CARRY_NAME in offload:
      set_("carry", "offload")
      offload = tuple(name for name in offload if name != CARRY_NAME)
    set_("save", save)
    set_("offload", offload)
    set_("every", _positive(self.every, "every"))
    if self.levels is not None:
      if isinstance(self.levels, (str, int)) or not isinstance(self.levels, Iterable):
        raise TypeError(f"levels must be a tuple of ints such as (8, 8), not {self.levels!r}")
      set_("levels", tuple(_positive(level, "each of levels") for level in self.levels))
      if len(self.levels) < 2:
        raise ValueError(f"levels must name at least two levels, not {self.levels}")
      if self.every != 1:
        raise ValueError(f"levels={self.levels} and every={self.every} exclude each other; "
                         "the last of levels says how many layers an inner region holds")
    if self.prevent_cse is not None and not isinstance(self.prevent_cse, bool):
      if not isinstance(self.prevent_cse, tuple) or [type(flag) for flag in self.prevent_cse] != [bool, bool]:
        raise TypeError("prevent_cse must be a bool, a pair of bools (variables, arguments) or None, "
                        f"not {self.prevent_cse!r}")
    if self.base is not None and not callable(self.base):
      raise TypeError(f"base must be a JAX checkpoint policy, not {self.base!r}")
    if not isinstance(self.offload_dst, str) or not self.offload_dst:
      raise TypeError(f"offload_dst must be the name of a memory kind, not {self.offload_dst!r}")

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
    policy = RematPolicy(save=tuple(save), offload=tuple(offload))
    PRESETS[name] = Preset(note, policy.save, policy.offload)

  @property
  def offloads(self) -> bool:
    """Whether any value moves to the host."""
    return bool(self.offload) or self.carry == "offload"

  @property
  def alone(self) -> RematPolicy:
    """The same policy with one layer to a region."""
    return dataclasses.replace(self, preset=None, levels=None, every=1)

  @property
  def within(self) -> RematPolicy:
    """The policy of a single layer inside the regions that `levels` and `every` make."""
    if self.every > 1:
      return RematPolicy("none")
    if self.levels is None:
      return self
    # The carries inside a region are recomputed with it: to name them would keep one for every layer after all.
    return dataclasses.replace(self, preset=None, carry="save", levels=None)

  @property
  def names(self) -> tuple[str, ...]:
    """Every name that the policy speaks of."""
    return (*self.save, *self.offload)

  def join(self, other: Any, overlap: Literal["error", "save", "offload"] = "error") -> RematPolicy:
    """Keeps what either policy keeps. `overlap`: what happens to a name that one saves and the other offloads."""
    other = RematPolicy.of(other)
    if overlap not in ("error", "save", "offload"):
      raise ValueError(f"overlap must be 'error', 'save' or 'offload', not {overlap!r}")
    if not (self.remat and other.remat):
      return self if not self.remat else other  # `none` keeps everything already
    save, offload = {*self.save, *other.save}, {*self.offload, *other.offload}
    if overlap == "save":
      offload -= save
    elif overlap == "offload":
      save -= offload
    merged: dict[str, Any] = {}
    for field, default in (("levels", None), ("every", 1), ("prevent_cse", None), ("offload_dst", "pinned_host")):
      said = [value for value in (getattr(self, field), getattr(other, field)) if value != default]
      if len(said) == 2 and said[0] != said[1]:
        raise ValueError(f"cannot join policies with {field}={said[0]!r} and {field}={said[1]!r}")
      merged[field] = said[0] if said else default
    bases = [policy.base for policy in (self, other) if policy.base is not None]
    base = _either(*bases) if len(bases) == 2 and bases[0] != bases[1] else (bases[0] if bases else None)
    carry = "offload" if "offload" in (self.carry, other.carry) else "save"
    optional = (self.optional | other.optional) - (set(self.names) - self.optional) - (set(other.names) - other.optional)
    return RematPolicy(save=tuple(save), offload=tuple(offload), carry=carry, base=base, optional=optional, **merged)

  def __or__(self, other: Any) -> RematPolicy:
    return self.join(other)

  def check(self, tags: Iterable[str], where: str = "any layer of the plan") -> None:
    """Raises ValueError where the policy's names and the `tags` that layers use do not meet.

    A name said by the user must be among the tags. A preset needs at least one of its names.
    """
    tags = set(tags)
    for name in self.names:
      if name not in tags and name not in self.optional and name != CARRY_NAME:
        raise ValueError(f"remat policy names {name!r}, which is not tagged by {where}; {nearest(name, sorted(tags))}")
    if self.optional and not self.optional & tags:
      raise ValueError(f"remat preset {self.preset or self}: none of its names ({', '.join(sorted(self.optional))}) is tagged "
                       f"by {where}; tags there: {', '.join(sorted(tags)) or 'none'}. "
                       "Tag values with jax.ad_checkpoint.checkpoint_name, or take 'full' or 'none'")

  def resolve(self) -> Callable[..., Any]:
    """The JAX checkpoint policy. `none` resolves to one that saves everything."""
    return _resolve(self)

  def __str__(self) -> str:
    if not self.remat:
      return "none"
    parts = [self.preset] if self.preset else []
    for word, names in (("save", self.save), ("offload", self.offload)):
      named = [name for name in names if not self.preset or name not in self.optional]
      parts += [f"{word} {' '.join(named)}"] if named else []
    parts += [f"base {getattr(self.base, '__name__', self.base)}"] if self.base else []
    parts = parts or ["full"]
    parts += ["carry offload"] if self.carry == "offload" else []
    parts += [f"levels {'x'.join(map(str, self.levels))}"] if self.levels else []
    parts += [f"every {self.every}"] if self.every != 1 else []
    parts += [f"prevent_cse {self.prevent_cse}"] if self.prevent_cse is not None else []
    parts += [f"to {self.offload_dst}"] if self.offload_dst != "pinned_host" else []
    return ", ".join(parts)


@functools.lru_cache(maxsize=None)
def _resolve(policy: RematPolicy) -> Callable[..., Any]:
  """One callable per policy, so that JAX's own caches see equal policies as equal."""
  policies = jax.checkpoint_policies
  if not policy.remat:
    return policies.everything_saveable
  offload = (*policy.offload, CARRY_TAG) if policy.carry == "offload" else policy.offload
  if not policy.save and not offload:
    return policy.base or policies.nothing_saveable
  if offload:
    named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(policy.save), names_which_can_be_offloaded=list(offload),
        offload_src="device", offload_dst=policy.offload_dst)
  else:
    named = policies.save_only_these_names(*policy.save)
  if policy.base is None:
    return named
  known = {*policy.save, *offload}

  def names_first(prim, *args, **params):
    decide = named if prim.name == "name" and params.get("name") in known else policy.base
    return decide(prim, *args, **params)

  return names_first


def _either(a: Callable[..., Any], b: Callable[..., Any]) -> Callable[..., Any]:
  """A JAX policy that saves what `a` or `b` saves, and offloads what only one of them offloads."""

  def either(prim, *args, **params):
    first, second = a(prim, *args, **params), b(prim, *args, **params)
    for answer in (first, second):
      if answer is True or type(answer).__name__.startswith("Saveable"):
        return answer
    return first if type(first).__name__ == "Offloadable" else second

  return either
