"""Strict reading of nested configs into dataclasses: YAML, types, dotted keys, imports. Knows nothing of decoders."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import importlib
import pathlib
import pkgutil
import re
import types
import typing
from typing import Any

import jax.numpy as jnp
import yaml

from linen_stack.specs import nearest

_WORDS = {bool: "true or false", int: "an int", float: "a number", str: "a string", type(None): "null"}


# YAML -----------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
  """YAML that reads `1e-3` as the number that it looks like, and refuses a key that is given twice."""

  def construct_mapping(self, node, deep=False):
    seen = set()
    for key_node, _ in node.value:
      key = self.construct_object(key_node, deep=True)
      if not isinstance(key, str):
        raise yaml.constructor.ConstructorError(None, None, f"a key must be a string, not {_shown(key)}", key_node.start_mark)
      if key in seen:
        raise yaml.constructor.ConstructorError(
            None, None, f"the key {_shown(key, word=True)} is given twice", key_node.start_mark)
      seen.add(key)
    return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789."))


def load_yaml(path: pathlib.Path) -> Any:
  """The content of a YAML file. Raises ValueError, with line and column, where it is no YAML."""
  try:
    return _parse(path.read_text(encoding="utf-8"), str(path))
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not a text file in UTF-8: {error}") from None


def _parse(text: str, where: str) -> Any:
  try:
    return yaml.load(text, Loader=_Loader)
  except yaml.MarkedYAMLError as error:
    mark = error.problem_mark or error.context_mark
    at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    raise ValueError(f"{where} is not valid YAML: {error.problem or error.context}{at}") from None
  except yaml.YAMLError as error:
    raise ValueError(f"{where} is not valid YAML: {error}") from None


# Dataclasses ----------------------------------------------------------------------------------------------------------


def read(cls: type, value: Any, where: str) -> Any:
  """Makes the dataclass `cls` from a mapping; `where` is the mapping's own key in full.

  Raises ValueError for unknown or missing keys, TypeError for values of a wrong type.
  """
  fields = {field.name: field for field in dataclasses.fields(cls)}
  if not isinstance(value, Mapping):
    found = _shown(value) if where else f"a {type(value).__name__}"
    raise TypeError(f"{where or 'a config'} must be a mapping of {', '.join(fields)}, not {found}")
  for key in value:
    if key not in fields:
      raise ValueError(f"unknown key {_shown(_join(where, key), word=True)}; {nearest(str(key), fields)}")
  for name, field in fields.items():
    if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
      raise ValueError(f"the key {_join(where, name)!r} is missing")
  hints = typing.get_type_hints(cls)
  return cls(**{key: checked(entry, hints[key], _join(where, key)) for key, entry in value.items()})


def _shown(value: Any, word: bool = False) -> str:
  """A value in messages. Of what may be the content of a file that is no config, only what it is.

  `word`: texts are shown that are words, such as keys.
  """
  if isinstance(value, str) and (len(value) > 40 or "\n" in value or (word and not re.fullmatch(r"[\w.-]+", value))):
    return f"a text of {len(value)} characters"
  return repr(value) if isinstance(value, (str, bool, int, float, type(None))) else f"a {type(value).__name__}"


def checked(value: Any, hint: Any, where: str) -> Any:
  """`value` as a value of the type `hint`; only what loses nothing is converted (int to float, list to tuple).

  Raises TypeError. Hints that say nothing about plain values pass.
  """
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return _one_of(value, inner, where)
  if dataclasses.is_dataclass(hint):
    return read(hint, value, where)
  if hint in _WORDS:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
      return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
      raise TypeError(f"{where} must be {_WORDS[hint]}, not {_shown(value)}")
  elif origin is tuple and inner[-1:] == (...,):
    if not isinstance(value, (list, tuple)):
      raise TypeError(f"{where} must be a list, not {_shown(value)}")
    return tuple(checked(entry, inner[0], _join(where, i)) for i, entry in enumerate(value))
  elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
    if not isinstance(value, Mapping):
      raise TypeError(f"{where} must be a mapping, not {_shown(value)}")
    return {key: checked(entry, inner[1], _join(where, key)) for key, entry in value.items()}
  return value


def _one_of(value: Any, hints: tuple[Any, ...], where: str) -> Any:
  if value is None and type(None) in hints:
    return None
  structured = [hint for hint in hints if hint not in _WORDS]
  if structured and not isinstance(value, (str, bool, int, float, type(None))):
    return checked(value, structured[0], where)  # its error is about the part that is wrong
  for hint in hints:
    try:
      return checked(value, hint, where)
    except TypeError:
      continue
  words = [_WORDS.get(hint, "a mapping" if dataclasses.is_dataclass(hint) else "a list") for hint in hints]
  raise TypeError(f"{where} must be {' or '.join(words)}, not {_shown(value)}")


def check_arguments(cls: Any, args: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Constructor arguments of a layer class, checked against its annotations; dtypes by name become dtypes."""
  try:
    hints = typing.get_type_hints(cls)
  except NameError:
    hints = {}  # annotations that only a type checker can resolve; the layer itself will have to tell
  out = {}
  for key, value in args.items():
    if (key == "dtype" or key.endswith("_dtype")) and isinstance(value, str):
      out[key] = dtype(value, f"{where}.{key}")
    else:
      out[key] = checked(value, hints.get(key, Any), f"{where}.{key}")
  return out


def plain(value: Any) -> Any:
  """A tree of dataclasses as dicts and lists, without the fields that are None."""
  if dataclasses.is_dataclass(value):
    named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {key: plain(entry) for key, entry in named.items() if entry is not None}
  if isinstance(value, Mapping):
    return {key: plain(entry) for key, entry in value.items()}
  return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def assign(config: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
  """`config` with `a.b.c=value` carried out, values in YAML, positions of lists by number."""
  if isinstance(assignments, str):
    raise TypeError(f"assignments must be a list, not the string {assignments!r}; write [{assignments!r}]")
  for assignment in assignments:
    dotted, equals, text = assignment.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
      raise ValueError(f"{assignment!r} is no assignment; write KEY=VALUE, as in stack.remat=minimal")
    at: Any = config
    for depth, key in enumerate(keys):
      where = ".".join(keys[:depth])
      if isinstance(at, list):
        if not key.isdecimal() or int(key) >= len(at):
          raise ValueError(f"{dotted}: {where} has entries 0 to {len(at) - 1}, not {key!r}")
        key = int(key)
      elif not isinstance(at, dict):
        raise ValueError(f"{dotted}: {where} is {_shown(at)}, which has no keys; set {where} to a mapping, as in "
                         f"{where}={{{key}: ...}}")
      if depth == len(keys) - 1:
        at[key] = _parse(text, dotted)
      else:
        at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
  return config


@contextlib.contextmanager
def errors_about(where: str) -> Iterator[None]:
  """Puts `where` in front of errors that are not yet about it."""
  try:
    yield
  except (TypeError, ValueError) as error:
    message = str(error)
    if message.startswith(where):
      raise
    kind = TypeError if isinstance(error, TypeError) else ValueError
    raise kind(f"{where}: {message}") from error


def _join(where: str, key: Any) -> str:
  return f"{where}.{key}" if where else str(key)


# Names of things ------------------------------------------------------------------------------------------------------


def dtype(name: str, where: str) -> Any:
  """The dtype of that name. Raises ValueError with the nearest match."""
  known = ["bfloat16", "float16", "float32", "float64", "int8", "int32", "float8_e4m3fn", "float8_e5m2"]
  try:
    return jnp.dtype(name)
  except TypeError:
    raise ValueError(f"{where}: no dtype {name!r}; {nearest(name, known)}") from None


def import_object(path: str, where: str) -> Any:
  """The object at `package.module:name`. Raises ValueError that says which part does not exist."""
  module_path, colon, name = path.partition(":")
  if not colon or not module_path or not name:
    raise ValueError(f"{where}: {path!r} is no path to an object; write package.module:Name")
  parts = module_path.split(".")
  module = None
  for i in range(1, len(parts) + 1):
    part = ".".join(parts[:i])
    try:
      module = importlib.import_module(part)
    except ModuleNotFoundError as error:
      if error.name != part:
        raise ValueError(f"{where}: importing {part} failed: {error}") from error
      inside = getattr(module, "__path__", None)
      if module is not None and inside is None:
        raise ValueError(f"{where}: {module.__name__} is a module, not a package, "
                         f"and has no part {parts[i - 1]!r}") from None
      hint = nearest(parts[i - 1], [found.name for found in pkgutil.iter_modules(inside)])
      if module is None and not hint.startswith("did you mean"):
        hint = "is its folder on sys.path (PYTHONPATH)?"
      raise ValueError(f"{where}: no module {part!r}; {hint}") from None
    except ImportError as error:
      raise ValueError(f"{where}: importing {part} failed: {error}") from error
  found: Any = module
  for attribute in name.split("."):
    if not hasattr(found, attribute):
      owner = getattr(found, "__qualname__", module_path) if found is not module else module_path
      raise ValueError(f"{where}: {owner} has no {attribute!r}; "
                       f"{nearest(attribute, [word for word in dir(found) if not word.startswith('_')])}")
    found = getattr(found, attribute)
  return found
