"""Finding the layers of a plan in a tree: in variables, optimiser states and whatever holds several such trees.

A site is a mapping in which the layers stand: it has keys of the layout, with layers under them. Beside those there may be
other parts of the model, which are no layer's. The key above a site tells how it is stacked:

    none, or `params` anywhere above it     at the param axis; every layer of the plan has to be there
    another key (`cache`, `losses`, ...)    a collection of variables, at axis 0; layers may have nothing in it
    another key, and shapes as in params    a copy of the params, such as an average of them: stacked as they are

An optimiser's copies of the params stand in fields of its state, so that no key is above them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from flax.core import FrozenDict
import jax

from linen_stack.convert import leaves
from linen_stack.convert.layout import Layout, Place
from linen_stack.specs import nearest
from linen_stack.stacked import is_box, stacked_axis, value

SHOWN = 10
# The collections of Flax and of this library, whose names say that they are no params.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "perturbations")
# The fields of optax's factored second moments (Adafactor). A moment that is not kept is a single zero, whatever the params.
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
  """The sites of a tree. Raises ValueError where it has none, and yet something that could be layers, and where it cannot be
  known whether a site is one of params."""
  found = _find(tree, layout, options)
  if layout.param_axis != 0 and not any(site.is_params for site in found.sites):
    for site in found.sites:
      key = next((key for key in _keys_above(site.keys) if key not in options.within), None)
      if key not in _COLLECTIONS and key not in options.collection_axes:
        raise ValueError(f"is {key!r} a collection or a module with params? For a collection, pass collection_axes={{{key!r}: "
                         f"its axis}}; for params, pass {{'params': the tree}}, or within={key!r} where it is the module")
  if not found.sites and any(len(getattr(value(leaf), "shape", ())) for leaf in found.items):
    raise ValueError(_nothing_found(tree, layout, options))
  return found


def _find(tree: Any, layout: Layout, options: Options) -> Found:
  def stop(keys: tuple[Any, ...], node: Any) -> bool:
    return leaves.is_leaf(node) or (_holds_layers(node, layout) and _ends_with(_keys_above(keys), options.within))

  items, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop, is_leaf_takes_path=True)
  found = {keys: node for keys, node in items if not leaves.is_leaf(node) and _holds_layers(node, layout)}
  above = {keys: _keys_above(keys)[:len(_keys_above(keys)) - len(options.within)] for keys in found}
  params = [keys for keys, names in above.items() if not names or "params" in names]
  shapes = [_shapes(found[keys]) for keys in params]
  below = {names[names.index("params") + 1:] for names in above.values() if "params" in names}

  def site(keys: tuple[Any, ...], node: Mapping[str, Any]) -> Site:
    names = above[keys]
    like = keys in params or names in below or (bool(shapes) and _shapes(node) in shapes)
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


def _ends_with(names: tuple[str, ...], end: tuple[str, ...]) -> bool:
  return not end or names[-len(end):] == end


def _holds_layers(node: Any, layout: Layout) -> bool:
  if not isinstance(node, Mapping):
    return False
  of_layers = [node[key] for key in layout.roots if key in node]
  return any(isinstance(entry, Mapping) or type(entry) in (list, tuple) or leaves.is_leaf(entry) or hasattr(entry, "shape")
             for entry in of_layers)


def _shapes(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(keys, simple=True, separator="/"): getattr(value(leaf), "shape", None)
          for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)}


# Sites as layers ------------------------------------------------------------------------------------------------------


def take(found: Found, layout: Layout, options: Options) -> dict[Any, list[leaves.Tree]]:
  """For each site, by its path, the own tree of each layer, in layer order. Raises ValueError for what does not fit."""
  problems: list[str] = []
  taken = {site.keys: _take(site, found.sites, layout, options, problems) for site in found.sites}
  if problems:
    raise ValueError(report("the tree does not fit the plan", problems, _guess(found.sites, layout, options)))
  return taken


def _take(site: Site, all_sites: Sequence[Site], layout: Layout, options: Options, problems: list[str]) -> list[leaves.Tree]:
  trees, missing, axis = [leaves.ABSENT] * layout.plan.num_layers, [], site.axis_in(layout)
  for place in layout.places:
    where, subtree = site.at(place.path), at(site.holder, place)
    if isinstance(subtree, (list, tuple)) and not leaves.is_nothing(subtree):
      problems.append(f"{where}: a {type(subtree).__name__} of {len(subtree)} trees, expected one tree of stacked variables; "
                      "convert.stack takes a list with one tree per layer")
    elif subtree is MISSING:
      missing.append(f"{where}: missing, with {_layers(place)}")
    else:
      own = leaves.take(subtree, place, axis, shared_in(site, all_sites, place, options), where, problems)
      for i, tree in zip(place.layers.flat, own):
        trees[i] = tree
      _check_moment(site, own, place, axis, problems)
  strange = [site.at([key]) for key in site.holder if layout.unknown(key)]
  strange += [site.at([segment.name, key]) for segment in layout.plan if layout.scan and segment.is_cycle
              for key in _strange_runs(site.holder.get(segment.name), segment, site.is_params)]
  problems += [f"{path}: left over, no layer of the plan stands there" for path in strange]
  if not options.allow_missing:
    # A collection may lack layers; where it also has keys that params lack, they are more likely misnamed.
    params = [other.holder for other in all_sites if other.is_params and other is not site]
    beside = [key for key in site.holder if key not in layout.roots and all(key not in holder for holder in params)]
    if site.is_params or (params and beside):
      problems += missing
  return trees


def _check_moment(site: Site, own: Sequence[leaves.Tree], place: Place, axis: int, problems: list[str]) -> None:
  """Rows and columns of a param are leaves of a lower rank: where the layers' axis goes in them depends on the param's shape,
  unless it is the first or the last."""
  if site.moment and axis not in (0, -1) and place.axes and any(part.row for part in own[0].parts):
    problems.append(f"{site.at(place.path)}: factored moments do not follow the params to axis {axis}; convert such a state at "
                    "param axis 0 or -1, or begin a new one")


MISSING = object()


def at(holder: Any, place: Place) -> Any:
  """What stands at a place, or MISSING."""
  for key in place.path:
    if leaves.is_nothing(holder):
      return holder  # it stands for all that would be below it
    if not isinstance(holder, Mapping) or key not in holder:
      return MISSING
    holder = holder[key]
  return holder


def _strange_runs(block: Any, segment: Any, is_params: bool) -> list[str]:
  """Keys of a cycle that are no run. What Flax captures of a block as a whole is no layer's."""
  runs = [run.name for run in segment.runs]
  keys = [key for key in block if key not in runs] if isinstance(block, Mapping) else []
  return [key for key in keys if is_params or key != "__call__"]


def _layers(place: Place) -> str:
  layers = [str(i) for i in place.layers.flat]
  return f"layer{'s' if len(layers) > 1 else ''} {', '.join(layers[:4] + ['...'] * (len(layers) > 4))}"


def shared_in(site: Site, all_sites: Sequence[Site], place: Place, options: Options) -> leaves.Shared:
  """Which leaves at a place are not stacked: those that the caller named, and moments that are not kept."""
  given = options.shared or (lambda path, leaf: False)
  if not site.moment:
    return given

  def placeholder(path: str, leaf: Any) -> bool:
    if getattr(leaf, "shape", None) != (1,):
      return False
    if site.moment != "v" or place.axes:
      return True
    # Of one layer by itself, a moment [1] may be kept, or not kept because it is factored: then there is one by rows.
    keys = (*site.keys[:-1], jax.tree_util.GetAttrKey("v_row"))
    rows = next((at(other.holder, place) for other in all_sites if other.keys == keys), {})
    return _shapes(rows).get(path) != (1,)

  return lambda path, leaf: given(path, leaf) or placeholder(path, leaf)


def rest(site: Site, layout: Layout) -> Mapping[str, Any]:
  """What stands in a site and is no layer's."""
  kept = {key: entry for key, entry in site.holder.items() if key not in layout.roots}
  for segment in layout.plan if layout.scan else ():
    if segment.is_cycle and segment.name in site.holder:
      own = {key: site.holder[segment.name][key]
             for key in _strange_runs(site.holder[segment.name], segment, is_params=True)}
      if own:
        kept[segment.name] = like(site.holder, own)
  return like(site.holder, kept)


def put(site: Site, beside: Mapping[str, Any], trees: Sequence[leaves.Tree], layout: Layout, lazy: bool,
        problems: list[str]) -> Mapping[str, Any]:
  """The inverse of `_take`: the mapping of a site, with the layers and with what stands beside them."""
  out = {key: dict(entry) if key in layout.roots and isinstance(entry, Mapping) else entry for key, entry in beside.items()}
  for key in out:
    if key in layout.roots and not (layout.scan and layout.plan[key].is_cycle):
      problems.append(f"{site.at([key])}: stands where the plan puts layers, and is none of them")
      return out
  for segment in layout.plan:
    places = [place for place in layout.places if place.segment == segment.name]
    of_places = [[trees[i] for i in place.layers.flat] for place in places]
    if segment.is_cycle and layout.scan and all(tree.is_bare_nothing for own in of_places for tree in own):
      out[segment.name] = of_places[0][0].parts[0].shared
      continue
    for place, own in zip(places, of_places):
      if all(tree.is_absent for tree in own):
        continue
      _check_moment(site, own, place, site.axis_in(layout), problems)
      *above, last = place.path
      holder = out
      for key in above:
        holder = holder.setdefault(key, {})
      holder[last] = leaves.put(own, place, site.axis_in(layout), lazy, problems)
  for segment in layout.plan:
    if isinstance(out.get(segment.name), dict) and segment.is_cycle:
      out[segment.name] = like(beside, out[segment.name])
  return like(beside, out)


def like(mapping: Mapping[str, Any], entries: dict[str, Any]) -> Mapping[str, Any]:
  """`entries` as a mapping of the same kind."""
  return FrozenDict(entries) if isinstance(mapping, FrozenDict) else entries


# Words for what does not fit --------------------------------------------------------------------------------------------


def report(what: str, problems: Sequence[str], guess: str = "") -> str:
  more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
  return f"{what}{guess and '; ' + guess}:\n  " + "\n  ".join(problems[:SHOWN]) + more


def _fits(site: Site, layout: Layout, options: Options) -> bool:
  problems: list[str] = []
  _take(site, [], layout, options, problems)
  return not problems


def _guess(found: Sequence[Site], layout: Layout, options: Options) -> str:
  """Which layout a tree may have instead."""
  for site in found:
    if _fits(site, layout, options):
      continue
    for other in layout.others():
      if _fits(dataclasses.replace(site, axis=None), other, options):
        if other.scan != layout.scan:
          return _of_scan(other.scan)
        return f"this tree is stacked along axis {other.param_axis}; the plan says {site.axis_in(layout)}"
    counts = _counts(site, layout)
    if counts:
      return counts
  return ""


def _of_scan(scan: bool) -> str:
  return f"these are the layers of scan={scan}; the plan's are laid out as scan={not scan} says"


def _counts(site: Site, layout: Layout) -> str:
  """Where a segment is one stack of another number of layers, a word about it."""
  for segment in layout.plan if layout.scan else ():
    tree = site.holder.get(segment.name)
    shapes = [shape for shape in _shapes(tree).values() if shape] if isinstance(tree, Mapping) else []
    known = [run.name for run in segment.runs]
    if segment.is_cycle and isinstance(tree, Mapping) and not {*known} & {*tree}:
      stacked = f"one stack of {shapes[0][0]} layers" if shapes and len({shape[0] for shape in shapes}) == 1 else "other keys"
      return f"{segment.name!r} holds {stacked}, not the runs {', '.join(known)} of a cycle: they were made for another plan"
    if isinstance(tree, Mapping) and all(key.isdecimal() for key in tree) and len(tree) == segment.num_layers:
      return (f"{segment.name!r} has one tree for each of {len(tree)} layers, under '0', '1', ...: pass the list of them to "
              "convert.stack")
    sizes = {shape[stacked_axis(site.axis_in(layout), len(shape))] for shape in shapes}
    if not segment.is_cycle and len(sizes) == 1 and sizes != {segment.length}:
      return f"{segment.name!r} holds {sizes.pop()} layers; the plan has {segment.length}"
  return ""


def _nothing_found(tree: Any, layout: Layout, options: Options) -> str:
  names = sorted(layout.roots)
  shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
  other = dataclasses.replace(layout, scan=not layout.scan)
  if _find(tree, other, options).sites:
    return f"none of the plan's layers ({shown}) is in the tree: {_of_scan(other.scan)}"
  keys = list(dict.fromkeys(
      str(entry.key) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
      for entry in path if isinstance(entry, jax.tree_util.DictKey)))
  near = next((f"; {nearest(name, keys)}" for name in names if nearest(name, keys).startswith("did")), "")
  inside = f" under {'/'.join(options.within)!r}" if options.within else ""
  return f"none of the plan's layers ({shown}) is in the tree{inside}; its keys: {', '.join(keys[:SHOWN]) or 'none'}{near}"
