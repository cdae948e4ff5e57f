"""What stands in a site: the layers' own trees, taken out and put in; what is beside them; guesses."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax.core import FrozenDict
import jax

from linen_stack.convert import leaves
from linen_stack.convert.layout import Layout, Place
from linen_stack.convert.sites import Found, Options, Site, of_scan, report, shapes_of
from linen_stack.stacked import stacked_axis


def take(found: Found, layout: Layout, options: Options) -> dict[Any, list[leaves.Tree]]:
  """For each site, by its path, the own tree of each layer, in layer order. Raises ValueError for what does not fit."""
  problems: list[str] = []
  taken = {site.keys: _take(site, found.sites, layout, options, problems) for site in found.sites}
  if problems:
    raise ValueError(report("the tree does not fit the plan", problems, _guess(found.sites, layout, options)))
  return taken


def _take(site: Site, all_sites: Sequence[Site], layout: Layout, options: Options,
          problems: list[str]) -> list[leaves.Tree]:
  trees, missing, axis = [leaves.ABSENT] * layout.plan.num_layers, [], site.axis_in(layout)
  for place in layout.places:
    where, subtree = site.at(place.path), at(site.holder, place)
    if type(subtree) in (list, tuple) and subtree and all(isinstance(tree, Mapping) for tree in subtree):
      problems.append(f"{where}: a {type(subtree).__name__} of {len(subtree)} trees, expected one tree of stacked "
                      "variables; convert.stack takes a list with one tree per layer")
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
  """Rows and columns of a param are leaves of a lower rank: where the layers' axis is in them depends on the param's
  shape, unless it is the first or the last."""
  if site.moment and axis not in (0, -1) and place.axes and any(part.row for part in own[0].parts):
    problems.append(f"{site.at(place.path)}: factored moments do not follow the params to axis {axis}; convert such a "
                    "state at param axis 0 or -1, or begin a new one")


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
    return shapes_of(rows).get(path) != (1,)

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
  out = {key: dict(entry) if key in layout.roots and isinstance(entry, Mapping) else entry
         for key, entry in beside.items()}
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


# Guesses --------------------------------------------------------------------------------------------------------------


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
          return of_scan(other.scan)
        return f"this tree is stacked along axis {other.param_axis}; the plan says {site.axis_in(layout)}"
    counts = _counts(site, layout)
    if counts:
      return counts
  return ""


def _counts(site: Site, layout: Layout) -> str:
  """Where a segment is one stack of another number of layers, a word about it."""
  for segment in layout.plan if layout.scan else ():
    tree = site.holder.get(segment.name)
    shapes = [shape for shape in shapes_of(tree).values() if shape] if isinstance(tree, Mapping) else []
    known = [run.name for run in segment.runs]
    if segment.is_cycle and isinstance(tree, Mapping) and not {*known} & {*tree}:
      alike = len({shape[0] for shape in shapes}) == 1
      stacked = f"one stack of {shapes[0][0]} layers" if alike else "other keys"
      return (f"{segment.name!r} holds {stacked}, not the runs {', '.join(known)} of a cycle: they were made for "
              "another plan")
    if isinstance(tree, Mapping) and all(str(key).isdecimal() for key in tree) and len(tree) == segment.num_layers:
      return (f"{segment.name!r} has one tree for each of {len(tree)} layers, under '0', '1', ...: pass the list of "
              "them to convert.stack")
    sizes = {shape[stacked_axis(site.axis_in(layout), len(shape))] for shape in shapes}
    if not segment.is_cycle and len(sizes) == 1 and sizes != {segment.length}:
      return f"{segment.name!r} holds {sizes.pop()} layers; the plan has {segment.length}"
  return ""
