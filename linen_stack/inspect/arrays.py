"""Arguments of calls that are only traced: what of them are arrays, of which the shape will do, and what is not."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from linen_stack import lifting


def is_array(leaf: Any) -> bool:
  """Whether a leaf is an array or stands for one; every other leaf stays the Python value that it is."""
  return lifting.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def take_arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """The arrays of a tree, and a function that puts others in their places."""
  return lifting.split_static(tree, is_array)


def of_arrays(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
  """The call `fn(*args, **kwargs)` as a function of its arrays, and the arrays."""
  arrays, rebuild = take_arrays((args, kwargs))

  def call(arrays: Sequence[Any]) -> Any:
    args, kwargs = rebuild(arrays)
    return fn(*args, **kwargs)

  return call, arrays
