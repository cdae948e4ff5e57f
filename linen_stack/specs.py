"""Layer specs: which layer, with which arguments. Pure Python, like the plans that are made of them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import difflib
import functools
import inspect
import re
import types
from typing import Any


def nearest(word: str, known: Iterable[str]) -> str:
  """The end of an error message about `word`: its nearest match in `known`, or all of `known`."""
  known = list(known)
  match = difflib.get_close_matches(word, known, n=1)
  return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(map(repr, known)) or 'none'}"


def checked_count(value: Any, argument: str, least: int = 1) -> int:
  if isinstance(value, bool) or not hasattr(value, "__index__"):
    raise TypeError(f"{argument} must be an int, not {value!r}")
  if value.__index__() < least:
    raise ValueError(f"{argument} must be at least {least}, not {value}")
  return value.__index__()


def checked_name(value: Any, argument: str) -> str:
  if not isinstance(value, str) or not value or "/" in value:
    raise ValueError(f"{argument} must be a non-empty string without '/', not {value!r}")
  return value


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
  """The parameters of a callable; None where it has no signature."""
  cls = target.func if isinstance(target, functools.partial) else target
  # Classes whose metaclass takes any argument, such as those of NNX modules, have the signature of that.
  past = isinstance(cls, type) and type(cls).__call__ is not type.__call__
  try:
    parameters = inspect.signature(cls.__init__ if past else target).parameters
  except (TypeError, ValueError):
    return None
  return dict(list(parameters.items())[1:]) if past else parameters  # without self


def check_keywords(target: Callable[..., Any], given: Iterable[str], hidden: Iterable[str] = ()) -> None:
  """Raises TypeError for keyword arguments that `target` does not take. `hidden`: names that are not for users."""
  parameters = parameters_of(target)
  if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
    return
  known = [name for name in parameters if name not in hidden]
  for name in given:
    if name not in known:
      called = getattr(getattr(target, "func", target), "__name__", target)
      raise TypeError(f"{called} has no argument {name!r}; {nearest(name, known)}")


def keywords_checked(cls: type) -> type:
  """Gives a class an error with the nearest match for keyword arguments that its constructor does not take."""
  init = cls.__init__

  @functools.wraps(init)
  def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
    try:
      init(self, *args, **kwargs)
    except TypeError:
      check_keywords(cls, kwargs)
      raise

  cls.__init__ = checked_init
  return cls


def _same(a: Any, b: Any) -> bool:
  """Equality that never calls two arguments equal that could trace to different computations (1, 1.0 and True)."""
  if a is b:
    return True
  if type(a) is not type(b):
    return False
  if isinstance(a, (list, tuple)):
    return len(a) == len(b) and all(map(_same, a, b))
  if isinstance(a, Mapping):
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
  if isinstance(a, functools.partial):
    return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
  if dataclasses.is_dataclass(a) and not isinstance(a, type):
    # Covers module templates too. Two modules that already belong to a parent are the same only if they are one object.
    if getattr(a, "parent", None) is not None or getattr(b, "parent", None) is not None:
      return False
    names = [f.name for f in dataclasses.fields(a) if f.init and f.compare]
    return all(_same(getattr(a, name, None), getattr(b, name, None)) for name in names)
  if hasattr(a, "dtype") and hasattr(a, "shape") and (a.dtype != b.dtype or a.shape != b.shape):
    return False
  try:
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal)
  except Exception:  # pylint: disable=broad-exception-caught
    return False  # a type that refuses to be compared is not known to be equal


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class LayerSpec:
  """One layer of a decoder: a layer class, the arguments of its constructor, and a name.

  Args:
    cls: a Flax Linen module class, or a callable that takes `name=` and `**kwargs` and returns such a module.
    name: what a run of this layer is called inside a cycle, and what reports call it. Default: the class name in
      snake case.
    **kwargs: constructor arguments of the layer.

  Two specs are equal when class, name and arguments are: equal specs trace to the same computation.
  """

  cls: Callable[..., Any]
  name: str | None
  kwargs: Mapping[str, Any]

  def __init__(self, cls: Callable[..., Any], name: str | None = None, **kwargs: Any):
    if not callable(cls):
      raise TypeError(f"cls must be a layer class or a callable that returns a layer, not {cls!r}")
    if not isinstance(cls, type) and hasattr(cls, "init") and hasattr(cls, "apply"):
      raise TypeError(f"cls is a layer that is already made; write LayerSpec({type(cls).__name__}, ...), "
                      "with the arguments of its constructor")
    if name is not None:
      checked_name(name, "name")
    check_keywords(cls, kwargs, hidden=("self", "parent", "name"))
    object.__setattr__(self, "cls", cls)
    object.__setattr__(self, "name", name)
    object.__setattr__(self, "kwargs", kwargs)

  @property
  def label(self) -> str:
    """The name, or the class name in snake case."""
    if self.name is not None:
      return self.name
    cls = self.cls.func if isinstance(self.cls, functools.partial) else self.cls
    words = getattr(cls, "__name__", "layer").strip("<>")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()

  def __eq__(self, other: Any) -> bool:
    if not isinstance(other, LayerSpec):
      return NotImplemented
    return _same((self.cls, self.name, self.kwargs), (other.cls, other.name, other.kwargs))

  def __hash__(self) -> int:
    cls = self.cls.func if isinstance(self.cls, functools.partial) else self.cls
    cls = cls if isinstance(cls, (type, types.FunctionType)) else type(cls)
    # Plain values tell apart specs that differ in a size alone; what may not be hashable counts by its type.
    plain = (bool, int, float, str, type(None))
    arguments = frozenset((key, arg if isinstance(arg, plain) else type(arg)) for key, arg in self.kwargs.items())
    return hash((cls, self.name, arguments))

  def __repr__(self) -> str:
    cls = getattr(self.cls, "__name__", repr(self.cls))
    parts = [cls] + ([f"name={self.name!r}"] if self.name else []) + [f"{k}={v!r}" for k, v in self.kwargs.items()]
    return f"LayerSpec({', '.join(parts)})"
