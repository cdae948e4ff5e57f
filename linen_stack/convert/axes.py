"""`layer_axes`: which axes of each leaf count layers, and which layers."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from linen_stack.convert import contents, leaves, sites
from linen_stack.convert.layout import Layout, Place, positions
from linen_stack.stacked import is_box, value


@dataclasses.dataclass(frozen=True, eq=False)
class LayerAxes:
  """The stacked axes of one leaf. True where it has any."""

  axes: tuple[int, ...] = ()
  """Where they are in the leaf, the outermost first."""
  names: tuple[str, ...] = ()
  """What they are called: the segment's name, the run's name."""
  layers: np.ndarray | None = None
  """Global layer indices in the shape of these axes: [] for the leaf of one layer, None for the leaf of no layer."""

  def __bool__(self) -> bool:
    return bool(self.axes)

  def index(self, rank: int) -> np.ndarray:
    """The layer indices as an array that broadcasts with the leaf of that rank: `decay ** (last - axes.index(x.ndim))`.

    Raises ValueError for a leaf of no layer.
    """
    if self.layers is None:
      raise ValueError("the leaf is no layer's; ask `axes.layers is not None` first")
    shape = [1] * rank
    for axis, size in zip(self.axes, self.layers.shape):
      shape[axis] = size
    return self.layers.transpose(np.argsort(self.axes)).reshape(shape)


def layer_axes(plan: Any, tree: Any, param_axis: int | None = None, scan: bool | None = None, *, within: str = "",
               collection_axes: Mapping[str, int] | None = None, shared: Callable[[str, Any], bool] | None = None,
               allow_missing: bool = False) -> Any:
  """A tree like `tree`, with a `LayerAxes` for every leaf.

  Example: a learning rate that decays from the last layer to the first::

    axes = ls.convert.layer_axes(plan, params)
    scale = jax.tree.map(lambda p, a: 0.9 ** (last - a.index(p.ndim)) if a.layers is not None else 1.0, params, axes)

  Args: see `linen_stack.convert`.

  Raises:
    TypeError: for arguments of a wrong type.
    ValueError: where the tree is not laid out as the plan says (lists paths and shapes).
  """
  layout = Layout.of(plan, param_axis, scan)
  options = sites.Options(within, collection_axes, shared, allow_missing)
  found = sites.find(tree, layout, options)
  contents.take(found, layout, options)  # raises where leaves are not stacked as the plan says

  def of_site(site: sites.Site) -> Mapping[str, Any]:
    shared_in = {place.path: contents.shared_in(site, found.sites, place, options) for place in layout.places}

    def of_leaf(keys: tuple[Any, ...], leaf: Any) -> Any:
      path = tuple(getattr(entry, "key", entry) for entry in keys)
      place = next((place for place in layout.places if path[:len(place.path)] == place.path), None)
      if place is None:
        return _mark(leaf)
      own = jax.tree_util.keystr(keys[len(place.path):], simple=True, separator="/")
      return _mark(leaf, None if shared_in[place.path](own, value(leaf)) else place, site.axis_in(layout))

    return jax.tree_util.tree_map_with_path(of_leaf, site.holder, is_leaf=leaves.is_leaf)

  return found.structure.unflatten(
      [of_site(item) if isinstance(item, sites.Site) else _mark(item) for item in found.items])


def _mark(leaf: Any, place: Place | None = None, axis: int = 0) -> Any:
  array = value(leaf)
  if leaves.is_nothing(array):
    return leaf
  axes = LayerAxes()
  if place is not None:
    at = positions(axis, len(place.axes), len(array.shape) - len(place.axes))
    axes = LayerAxes(at, tuple(name for name, _ in place.axes), place.layers)
  return leaf.replace_boxed(axes) if is_box(leaf) else axes
