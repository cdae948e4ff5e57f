"""Finding the layers of a plan in a tree: in variables, optimiser states and whatever holds several such trees.

A site is a mapping in which the layers stand: it has keys of the layout, with layers under them. Beside those there may
be other parts of the model, which are no layer's. The key above a site tells how it is stacked:

    none, or `params` anywhere above it     at the param axis; every layer of the plan has to be there
    another key (`cache`, `losses`, ...)    a collection of variables, at axis 0; layers may have nothing in it
    another key, and shapes as in params    a copy of the params, such as an average of them: stacked as they are

An optimiser's copies of the params stand in fields of its state, so that no key is above them. A field that is called
as a collection of Flax is one (`batch_stats` of a TrainState).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax

from linen_stack.convert import leaves
from linen_stack.convert.layout import Layout
from linen_stack.specs import nearest
from linen_stack.stacked import is_box, value

SHOWN = 10
# The collections of Flax and of this library, whose names say that they are no params.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "perturbations")
# The fields of optax's factored second moments (Adafactor). A moment that is not kept is one zero, whatever the params.
_FACTORED = ("v_row", "v_col", "v")


@dataclasses.dataclass(frozen=True)
class Site:
  """A mapping in which layers stand."""

  keys: tuple[Any, ...]
  """The path in the whole tree."""
  holder: Any
  axis: int | None = None
  """Where a collection is stacked; None for params and what is laid out as they are."""

  @property
  def is_params(self) -> bool:
    return self.axis is None

  @property
  def path(self) -> str:
    return jax.tree_util.keystr(self.keys, simple=True, separator="/")

  @property
  def moment(self) -> str | None:
    """The field of a state of factored second moments in which this is."""
    field = getattr(self.keys[-1] if self.keys else None, "name", None)
    return field if field in _FACTORED else None

  def at(self, path: Sequence[str]) -> str:
    return "/".join(filter(None, [self.path, *path]))

  def axis_in(self, layout: Layout) -> int:
    return layout.param_axis if self.axis is None else self.axis

  def outline(self) -> Site:
    return dataclasses.replace(self, holder=None)


@dataclasses.dataclass(frozen=True)
class Options:
  """What callers may say about a tree."""

  within: tuple[str, ...] = ()
  """Keys of the module that holds the layers, where several do."""
  collection_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  shared: leaves.Shared | None = None
  allow_missing: bool = False

  def __post_init__(self):
    within = self.within.split("/") if isinstance(self.within, str) else self.within
    object.__setattr__(self, "within", tuple(key for key in within if key))
    object.__setattr__(self, "collection_axes", dict(self.collection_axes or {}))
    if self.shared is not None and not callable(self.shared):
      raise TypeError(f"shared must be a function (path in the layer's tree, leaf) -> bool, not {self.shared!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
  """A tree as its outer structure and what is in it: sites, and leaves that are no layer's."""

  structure: Any
  items: tuple[Any, ...]

  @property
  def sites(self) -> list[Site]:
    return [item for item in self.items if isinstance(item, Site)]

  def map(self, of_site: Callable[[Site], Any]) -> Any:
    """The tree with sites replaced."""
    return self.structure.unflatten([of_site(item) if isinstance(item, Site) else item for item in self.items])


def find(tree: Any, layout: Layout, options: Options) -> Found:
  """The sites of a tree.

  Raises ValueError where it has none, and yet something that could be layers, and where it cannot be known whether a
  site is one of params.
  """
  found = _find(tree, layout, options)
  if layout.param_axis != 0 and not any(site.is_params for site in found.sites):
    for site in found.sites:
      key = next((key for key in _keys_above(site.keys) if key not in options.within), None)
      if key not in _COLLECTIONS and key not in options.collection_axes:
        raise ValueError(f"is {key!r} a collection or a module with params? For a collection, pass collection_axes="
                         f"{{{key!r}: its axis}}; for params, pass {{'params': the tree}}, or within={key!r} where it "
                         "is the module")
  if not found.sites and any(len(getattr(value(leaf), "shape", ())) for leaf in found.items):
    raise ValueError(_nothing_found(tree, layout, options))
  return found


def _find(tree: Any, layout: Layout, options: Options) -> Found:
  def stop(keys: tuple[Any, ...], node: Any) -> bool:
    return leaves.is_leaf(node) or (_holds_layers(node, layout) and _ends_with(_keys_above(keys), options.within))

  items, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop, is_leaf_takes_path=True)
  found = {keys: node for keys, node in items if not leaves.is_leaf(node) and _holds_layers(node, layout)}
  known = {*_COLLECTIONS, *options.collection_axes}
  above = {}
  for keys in found:
    names, field = _keys_above(keys), _field_above(keys, _keys_above(keys))
    above[keys] = (field,) * (field in known) + names[:len(names) - len(options.within)]
  params = [keys for keys, names in above.items() if not names or "params" in names]
  shapes = [shapes_of(found[keys]) for keys in params]
  below = {names[names.index("params") + 1:] for names in above.values() if "params" in names}

  def site(keys: tuple[Any, ...], node: Mapping[str, Any]) -> Site:
    names = above[keys]
    like = keys in params or names in below or (bool(shapes) and shapes_of(node) in shapes)
    given = [options.collection_axes[name] for name in names if name in options.collection_axes]
    return Site(keys, node, given[0] if given else None if like else 0)

  return Found(structure, tuple(site(keys, node) if keys in found else node for keys, node in items))


def _keys_above(keys: tuple[Any, ...]) -> tuple[str, ...]:
  """The mapping keys right above a node."""
  names: list[str] = []
  for entry in reversed(keys):
    if not isinstance(entry, jax.tree_util.DictKey):
      break
    names.insert(0, str(entry.key))
  return tuple(names)


def _field_above(keys: tuple[Any, ...], names: tuple[str, ...]) -> str | None:
  """The field of a container that the mapping keys right above a node begin in."""
  return getattr(keys[-len(names) - 1], "name", None) if len(keys) > len(names) else None


def _ends_with(names: tuple[str, ...], end: tuple[str, ...]) -> bool:
  return not end or names[-len(end):] == end


def _holds_layers(node: Any, layout: Layout) -> bool:
  return isinstance(node, Mapping) and any(_may_be_layers(node[key], layout) for key in layout.roots if key in node)


def _may_be_layers(entry: Any, layout: Layout) -> bool:
  """Whether what stands under a name of the layout is the variables of layers, and not something else of that name."""
  if isinstance(entry, Mapping) or leaves.is_leaf(entry) or hasattr(entry, "shape"):
    return True
  # Optimisers have states under labels that users choose, with params inside; but a layer's tree may be a tuple too.
  found = _find(entry, layout, Options())
  return not found.sites and any(len(getattr(value(leaf), "shape", ())) for leaf in found.items)


def shapes_of(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(keys, simple=True, separator="/"): getattr(value(leaf), "shape", None)
          for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)}


# Words ----------------------------------------------------------------------------------------------------------------


def report(what: str, problems: Sequence[str], guess: str = "") -> str:
  """An error about several things: the first of them, and how many more there are."""
  more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
  return f"{what}{guess and '; ' + guess}:\n  " + "\n  ".join(problems[:SHOWN]) + more


def of_scan(scan: bool) -> str:
  """A guess about a tree."""
  return f"these are the layers of scan={scan}; the plan's are laid out as scan={not scan} says"


def _nothing_found(tree: Any, layout: Layout, options: Options) -> str:
  names = sorted(layout.roots)
  shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
  other = dataclasses.replace(layout, scan=not layout.scan)
  if _find(tree, other, options).sites:
    return f"none of the plan's layers ({shown}) is in the tree: {of_scan(other.scan)}"
  keys = list(dict.fromkeys(
      str(entry.key) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
      for entry in path if isinstance(entry, jax.tree_util.DictKey)))
  near = next((f"; {nearest(name, keys)}" for name in names if nearest(name, keys).startswith("did")), "")
  inside = f" under {'/'.join(options.within)!r}" if options.within else ""
  keys = f"its keys: {', '.join(keys[:SHOWN]) or 'none'}"
  return f"none of the plan's layers ({shown}) is in the tree{inside}; {keys}{near}"
