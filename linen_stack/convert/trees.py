"""`unstack`, `stack` and `restack`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from linen_stack.convert import contents, leaves, sites
from linen_stack.convert.layout import Layout, Place
from linen_stack.convert.sites import Site
from linen_stack.plan import Plan
from linen_stack.specs import LayerSpec


@jax.tree_util.register_pytree_with_keys_class
class Layers(list):
  """One tree per layer, in layer order: a list that also has, as `rest`, what of the tree was no layer's.

  A pytree, so that `jax.tree.map` goes through the layers and the rest.
  """

  def __init__(self, layers: Iterable[Any] = (), rest: Any = None, outline: _Outline | None = None):
    super().__init__(layers)
    self.rest, self._outline = rest, outline

  def tree_flatten_with_keys(self):
    keyed = [(jax.tree_util.SequenceKey(i), layer) for i, layer in enumerate(self)]
    return [*keyed, (jax.tree_util.GetAttrKey("rest"), self.rest)], self._outline

  @classmethod
  def tree_unflatten(cls, outline, children):
    *layers, rest = children
    return cls(layers, rest, outline)


@dataclasses.dataclass(frozen=True)
class _Outline:
  """A tree without its layers and leaves: its structure, and for each leaf of that a site without a holder, or None."""

  structure: Any
  sites: tuple[Any, ...]

  def fill(self, tree: Any, what: str) -> list[Any]:
    """What `tree` has at the sites and leaves."""
    try:
      return self.structure.flatten_up_to(tree)
    except ValueError as error:
      raise ValueError(f"{what} does not have the structure that unstack gave it: {error}") from None


def unstack(tree: Any, plan: Any, param_axis: int | None = None, scan: bool | None = None, *, within: str = "",
            collection_axes: Mapping[str, int] | None = None, shared: Callable[[str, Any], bool] | None = None,
            allow_missing: bool = False, lazy: bool = False) -> Layers:
  """The layers of a tree, one by one.

  Of variables `{"params": {"layers": X, "final_norm": N}}`, layer i is `{"params": X_i}`, which the layer's own module
  takes, and the rest is `{"params": {"final_norm": N}}`. Of params alone, layer i is `X_i`. Of an optimiser's state it
  is that state with copies of the params replaced in this way, and with None for what is no layer's (counters), which
  is in the rest.

  Args: see `linen_stack.convert`; `lazy` makes `Lazy` leaves.

  Raises:
    TypeError: for arguments of a wrong type.
    ValueError: where the tree is not laid out as the plan says (lists paths and shapes).
  """
  if tree is None:
    raise TypeError("tree must be a tree with the layers of the plan, not None")
  layout = Layout.of(plan, param_axis, scan)
  options = sites.Options(within, collection_axes, shared, allow_missing)
  found = sites.find(tree, layout, options)
  taken = contents.take(found, layout, options)

  def own(item: Any, i: int) -> Any:
    return leaves.put([taken[item.keys][i]], _alone(i), 0, lazy, []) if isinstance(item, Site) else None

  def layer(i: int) -> Any:
    return found.structure.unflatten([own(item, i) for item in found.items])

  outline = _Outline(found.structure, tuple(item.outline() if isinstance(item, Site) else None for item in found.items))
  return Layers(map(layer, range(layout.plan.num_layers)), found.map(lambda site: contents.rest(site, layout)), outline)


def stack(trees: Sequence[Any], plan: Any, param_axis: int | None = None, scan: bool | None = None, *, rest: Any = None,
          collection_axes: Mapping[str, int] | None = None, shared: Callable[[str, Any], bool] | None = None,
          allow_missing: bool = False, lazy: bool = False) -> Any:
  """The inverse of `unstack`: one tree, laid out for the plan.

  Args:
    trees: one tree per layer, in layer order: what `unstack` gave, or any list of layers' variables (told by their key
      `params`) or of layers' own trees.
    rest: what is no layer's. Default: the rest of `unstack`, or nothing.
    Others: see `linen_stack.convert`; `lazy` makes `Lazy` leaves.

  Raises:
    TypeError: for arguments of a wrong type.
    ValueError: where there is not one tree for each layer, or layers of one run differ in structure, shape or dtype.
  """
  layout = Layout.of(plan, param_axis, scan)
  options = sites.Options((), collection_axes, shared, allow_missing)
  if isinstance(trees, Mapping) or not isinstance(trees, Iterable):
    raise TypeError(f"trees must be a list with one tree per layer, not a {type(trees).__name__}")
  outline = getattr(trees, "_outline", None)
  rest = getattr(trees, "rest", None) if rest is None else rest
  trees = list(trees)
  if len(trees) != layout.plan.num_layers:
    counts = ", ".join(f"{segment.name}: {segment.num_layers}" for segment in layout.plan)
    raise ValueError(f"{len(trees)} trees for the {layout.plan.num_layers} layers of the plan ({counts})")
  if outline is None:
    outline, trees, rest = _plain(trees, rest, options)
  of_layers = [outline.fill(tree, f"tree {i}") for i, tree in enumerate(trees)]
  items, problems = outline.fill(rest, "the rest"), []
  for k, site in enumerate(outline.sites):
    if site is None:
      continue
    own = [_own_tree(outline, of_layer, k, i, options, problems) for i, of_layer in enumerate(of_layers)]
    items[k] = contents.put(site, items[k], own, layout, lazy, problems)
    if site.is_params and not allow_missing:
      problems += [f"layer {i}: nothing in {site.path or 'its tree'}" for i, tree in enumerate(own) if tree.is_absent]
  if problems:
    raise ValueError(sites.report("the trees cannot be stacked as the plan says", problems))
  return outline.structure.unflatten(items)


def _plain(trees: list[Any], rest: Any, options: sites.Options) -> tuple[_Outline, list[Any], Any]:
  """For trees that `unstack` did not make: sites are the collections of variables, or the whole tree."""
  both = [*trees, {} if rest is None else rest]
  if not all(isinstance(tree, Mapping) for tree in both) or not any("params" in tree for tree in both):
    return _Outline(jax.tree.structure(0), (Site((), {}),)), trees, {} if rest is None else rest
  names = list(dict.fromkeys(name for tree in both for name in tree))
  whole = [{name: tree.get(name, {}) for name in names} for tree in both]
  structure = jax.tree.structure({name: 0 for name in names})
  axes = {name: None if name == "params" else options.collection_axes.get(name, 0) for name in sorted(names)}
  found = tuple(Site((jax.tree_util.DictKey(name),), {}, axis) for name, axis in axes.items())
  return _Outline(structure, found), whole[:-1], whole[-1]


def _own_tree(outline: _Outline, of_layer: Sequence[Any], k: int, i: int, options: sites.Options,
              problems: list[str]) -> leaves.Tree:
  """The tree that a layer has at site `k`."""
  here = [dataclasses.replace(site, holder=tree) if site else None for site, tree in zip(outline.sites, of_layer)]
  place = _alone(i)
  shared = contents.shared_in(here[k], [site for site in here if site], place, options)
  found: list[str] = []
  tree = leaves.take(of_layer[k], place, 0, shared, here[k].path, found)[0]
  problems += [f"layer {i}: {problem}" for problem in found]
  return tree


def _alone(i: int) -> Place:
  """The place of a layer that stands by itself."""
  return Place((), (), np.array(i), "")


def restack(tree: Any, from_plan: Any, to_plan: Any, *, param_axis: int | None = None, to_param_axis: int | None = None,
            scan: bool | None = None, to_scan: bool | None = None, within: str = "",
            collection_axes: Mapping[str, int] | None = None, shared: Callable[[str, Any], bool] | None = None,
            allow_missing: bool = False, lazy: bool = False) -> Any:
  """The layers of a tree, laid out for another plan with as many layers.

  Args:
    tree: any pytree with the layers of `from_plan` in it.
    param_axis, scan: of the tree.
    to_param_axis, to_scan: of the result. Default: the same, unless `to_plan` is a stack and says otherwise.
    Others: see `linen_stack.convert`; `lazy` makes `Lazy` leaves.

  Raises:
    TypeError: for arguments of a wrong type.
    ValueError: where the tree is not laid out as `from_plan` says (lists paths and shapes), where the plans do not have
      as many layers or have layers that they both know in other places, and where layers that are to share a run differ
      in structure, shape or dtype.
  """
  layout = Layout.of(from_plan, param_axis, scan, "from_plan")
  to = Layout.of(to_plan, to_param_axis, to_scan, "to_plan", default=layout)
  options = sites.Options(within, collection_axes, shared, allow_missing)
  if layout.plan.num_layers != to.plan.num_layers:
    raise ValueError(f"from_plan has {layout.plan.num_layers} layers and to_plan has {to.plan.num_layers}; "
                     "a conversion neither drops layers nor makes them up")
  _check_specs(layout.plan, to.plan)
  found = sites.find(tree, layout, options)
  taken = contents.take(found, layout, options)
  problems: list[str] = []

  def moved(site: Site) -> Mapping[str, Any]:
    beside = contents.rest(site, layout)
    if layout != to:
      problems.extend(f"{site.at([key])}/{name}: belongs to a block as a whole, and not to one of its layers"
                      for key in beside if key in layout.roots for name in beside[key])
    return contents.put(site, beside, taken[site.keys], to, lazy, problems)

  result = found.map(moved)
  if problems:
    raise ValueError(sites.report("the layers cannot be laid out as to_plan says", problems))
  return result


def _check_specs(before: Plan, after: Plan) -> None:
  """Raises where a layer would become one of another kind.

  Specs may all differ, in a dtype for example; but a spec that both plans have belongs to the same layers in both, and
  layers that are equal in one are equal in the other.
  """
  bare = lambda plan: [LayerSpec(spec.cls, **spec.kwargs) for spec in plan.layers]  # names are a matter of layout
  old, new = bare(before), bare(after)
  pairs: list[tuple[LayerSpec, LayerSpec]] = []
  for i, (a, b) in enumerate(zip(old, new)):
    if a == b or (a, b) in pairs:
      continue
    if a in new or b in old or any(a == x or b == y for x, y in pairs):
      raise ValueError(f"layer {i} is {_called(before.layers[i])} in from_plan and {_called(after.layers[i])} in to_plan: "
                       "it would compute something else; the plans must have the same layers in the same order")
    pairs.append((a, b))


def _called(spec: LayerSpec) -> str:
  arguments = ", ".join(f"{key}={value!r}" for key, value in spec.kwargs.items())
  return f"{spec.name or spec.cls.__name__} ({arguments})" if arguments else str(spec.name or spec.cls.__name__)
