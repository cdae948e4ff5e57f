"""Lifted wrappers around a layer: parameters fetched from the host, remat, and loops over stacked variables.

    offload_params   `nn.map_variables` that copies parameters to the device
    remat            `nn.remat` with a policy object and arguments that stay Python values
    scan             `nn.scan` with a param axis, one trace, and parameters that go in and never out
    static_unroll    `scan` as a Python loop over the same stacked variables

All are built on one step, `_lift`: the target becomes a pure function of (variables, rngs, arguments), a JAX
transformation is applied to it, and *the variables that it changed* come out. That last point is why Flax's own lifts
do not serve: they return a collection whole or not at all, so that a mutable `params` sends every weight through
remat and out of the loop. Also theirs: a param axis above a leaf's rank fails, a module that is shared by all layers
cannot be told from one that is stacked, and there is no Python loop over stacked variables.

In pseudo-code, with `i` running over the layers:

    carry, outputs = x, []
    for i in range(length):
      variables_i, rngs_i, args_i = stacked variables[i], split(rngs)[i], per-layer args[i]
      (carry, output), changed = target(variables_i, rngs_i, carry, *args_i, *broadcast args)
      outputs.append(output); changes.append(changed)
    return carry, stack(outputs), stack(changes)
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn
# Linen's transforms are all made by these two; neither has a public name. `pack` makes a module's call pure.
from flax.core.lift import pack
from flax.core.scope import LazyRng, in_filter
from flax.linen.transforms import lift_transform
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from linen_stack.plan import nearest
from linen_stack.policies import CARRY_TAG, RematPolicy

broadcast = nn.broadcast


def not_a_method(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Marks a function over a module as no method of it, so that interceptors and tabulate see the layer's calls alone."""
  fn.method_handler_wrapped = True  # the mark by which Flax knows functions that it need not wrap
  return fn


# What every lift shares ------------------------------------------------------------------------------------------------


def _lift(fn: Callable[..., Any], stage: Callable[..., Any], name: str) -> Callable[..., Any]:
  """Lifts `fn(scopes, *args, **kwargs)`.

  `stage(pure, scopes, variables, rngs, *args, **kwargs)` gets `pure(variables, rngs, *args, **kwargs) -> (result,
  changed variables)` and returns the same pair. `variables` and `rngs` hold one dict per entry of `scopes`.
  """

  def lifted(scopes, *args, **kwargs):
    roots = _roots(scopes)
    counters = [_copy_counters(scope.rng_counters) for scope in roots]

    def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
      def pure(variables, rngs, *args, **kwargs):
        inside = scope_fn((variables,), (rngs,))
        # However often this runs (a Python loop, a second trace), every run draws the keys of the first.
        for scope, counts in zip(_roots(inside), counters):
          scope.rng_counters.clear()
          scope.rng_counters.update(_copy_counters(counts))
        result = fn(inside, *args, **kwargs)
        (out,) = repack_fn(inside)
        return result, tuple(_changed(new, old) for new, old in zip(out, variables))

      result, out = stage(pure, roots, variable_groups[0], rng_groups[0], *args, **kwargs)
      return result, (out,)

    return pack(inner, (True,), (True,), (True,), name=name, enable_kwargs=True)(scopes, *args, **kwargs)

  return lifted


def _roots(scopes: Sequence[Any]) -> list[Any]:
  """The scopes that none of the others contains, in Flax's order."""
  roots = list(dict.fromkeys(scopes))

  def inside_another(scope):
    while (scope := scope.parent) is not None:
      if scope in roots:
        return True
    return False

  return [scope for scope in roots if not inside_another(scope)]


def _copy_counters(counters: Mapping[Any, Any]) -> dict[Any, Any]:
  return {key: _copy_counters(value) if isinstance(value, dict) else value for key, value in counters.items()}


def _changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
  """The part of a nested dict of variables that is not, object for object, in `old`."""
  out = {}
  for key, value in new.items():
    if key not in old:
      out[key] = value
    elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
      part = _changed(value, old[key])
      if part:
        out[key] = part
    elif not _identical(value, old[key]):
      out[key] = value
  return out


def _identical(a: Any, b: Any) -> bool:
  (leaves_a, tree_a), (leaves_b, tree_b) = jax.tree.flatten(a), jax.tree.flatten(b)
  return tree_a == tree_b and all(map(lambda x, y: x is y, leaves_a, leaves_b))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  out = dict(old)
  for key, value in new.items():
    out[key] = _merged(old[key], value) if isinstance(value, Mapping) and isinstance(old.get(key), Mapping) else value
  return out


def is_array(x: Any) -> bool:
  """Whether a leaf of an argument is data; every other leaf stays the Python value that it is."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _split_static(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
  """The array leaves of `tree`, and a function that puts (traced) arrays back among its Python values."""
  leaves, treedef = jax.tree.flatten(tree)
  arrays = [leaf for leaf in leaves if is_array(leaf)]

  def rebuild(arrays):
    values = iter(arrays)
    return treedef.unflatten([next(values) if is_array(leaf) else leaf for leaf in leaves])

  return arrays, rebuild


# Parameters in host memory ----------------------------------------------------------------------------------------------


def offload_params(target: Any, select: Callable[[str, Any], bool] | None = None, *, methods: Any = None) -> Any:
  """Lets a layer compute with parameters that are stored in host memory: copies them to the device when it runs.

  Args:
    target: a module class, or a function whose first argument is a module.
    select: `select(path, leaf) -> bool`, which parameters are fetched; `path` as in "attention/query/kernel". Default:
      all. Parameters that are on the device already are left alone.
    methods: as in `nn.map_variables`.

  Returns:
    The class or function, wrapped. Variables and names are unchanged; other collections pass through.
  """

  def lift(fn, select):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      fetched = tuple({**cols, "params": _fetch(cols["params"], select)} if "params" in cols else cols for cols in variables)
      return pure(fetched, rngs, *args, **kwargs)

    return _lift(fn, stage, "offload_params")

  return lift_transform(lift, target, select=select, methods=methods)


def _fetch(params: Any, select: Callable[[str, Any], bool] | None) -> Any:
  def fetch(path, leaf):
    # Boxed parameters end in the box's own key.
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return jax.device_put(leaf, jax.memory.Space.Device) if select is None or select("/".join(keys), leaf) else leaf

  return jax.tree_util.tree_map_with_path(fetch, params)


# Remat --------------------------------------------------------------------------------------------------------------------


def remat(target: Any, policy: Any = "full", *, prevent_cse: bool | tuple[bool, bool] = True,
          static_argnames: str | Iterable[str] = (), static_argnums: int | Sequence[int] = (), methods: Any = None) -> Any:
  """Recomputes a layer's values in the backward pass, but for those that `policy` keeps.

  Arguments that are not arrays (bool, str, None, enums, configs, also inside containers) always stay Python values.
  `static_argnames` and `static_argnums` only insist on it: an array given for one of them is an error.

  Args:
    target: a module class, or a function whose first argument is a module.
    policy: the name of a preset, a `RematPolicy` or a JAX checkpoint policy. `"none"` returns `target` as it is.
    prevent_cse: keep the compiler from merging the recomputation with the forward pass: True for straight-line code,
      False directly inside a rolled loop. A pair says it for variables and for arguments. A policy's own value wins.
    static_argnames: names of arguments that must not be arrays.
    static_argnums: the same by position, counted as Flax does: 0 is the module itself.
    methods: as in `nn.remat`.

  Raises:
    ValueError: a static argument that the target does not have.
    TypeError: an array given for a static argument, when called.
  """
  policy = RematPolicy.of(policy)
  signature = call_signature(target)
  static = _static_names(signature, static_argnames, static_argnums, getattr(target, "__name__", str(target)))
  if not policy.remat:
    return target
  cse = prevent_cse if policy.prevent_cse is None else policy.prevent_cse

  def lift(fn):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      if static:
        check_static(signature, static, args, kwargs)
      arrays, rebuild = _split_static((args, kwargs))

      def region(variables, rngs, arrays):
        args, kwargs = rebuild(arrays)
        if policy.carry == "offload" and args:
          args = (jax.tree.map(lambda x: jax.ad_checkpoint.checkpoint_name(x, CARRY_TAG), args[0]), *args[1:])
        return pure(variables, rngs, *args, **kwargs)

      flags = (cse[0], cse[1], cse[1]) if isinstance(cse, tuple) else cse
      return jax.checkpoint(region, policy=policy.resolve(), prevent_cse=flags)(variables, rngs, arrays)

    return _lift(fn, stage, "remat")

  return lift_transform(lift, target, methods=methods)


def observe(target: Any, see: Callable[[Any], None]) -> Any:
  """Hands the target's program to `see(jaxpr)` each time that it is traced, and runs that very program."""

  def lift(fn):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      arrays, rebuild = _split_static((args, kwargs))

      def call(variables, rngs, arrays):
        args, kwargs = rebuild(arrays)
        return pure(variables, rngs, *args, **kwargs)

      program, out = jax.make_jaxpr(call, return_shape=True)(variables, rngs, arrays)
      see(program.jaxpr)
      results = core.jaxpr_as_fun(program)(*jax.tree.leaves((variables, rngs, arrays)))
      return jax.tree.unflatten(jax.tree.structure(out), results)

    return _lift(fn, stage, "observe")

  return lift_transform(lift, target)


def call_signature(target: Any) -> inspect.Signature | None:
  """The signature of a module class's `__call__` or of a function over a module; None where it has none."""
  target = getattr(target, "func", target)
  try:
    return inspect.signature(target.__call__ if isinstance(target, type) else target)
  except (TypeError, ValueError):
    return None


def _static_names(signature: inspect.Signature | None, names: str | Iterable[str], nums: int | Sequence[int],
                  who: str) -> tuple[str, ...]:
  names = (names,) if isinstance(names, str) else tuple(names)
  nums = (nums,) if isinstance(nums, int) else tuple(nums)
  if signature is None:
    return names
  parameters = list(signature.parameters)
  open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
  for name in names:
    if name not in parameters[1:] and not open_ended:
      raise ValueError(f"static_argnames: {who} has no argument {name!r}; {nearest(str(name), parameters[1:])}")
  for num in nums:
    if not isinstance(num, int) or not 0 < num < len(parameters):
      raise ValueError(f"static_argnums: {num!r} is not the position of an argument of {who}; 0 is the module itself, "
                       f"arguments are {', '.join(f'{i} {name}' for i, name in enumerate(parameters) if i)}")
  return (*names, *(parameters[num] for num in nums))


def check_static(signature: inspect.Signature | None, static: Iterable[str], args: Sequence[Any],
                 kwargs: Mapping[str, Any]) -> None:
  """Raises TypeError where an array was given for a static argument."""
  given = dict(kwargs) if signature is None else signature.bind_partial(None, *args, **kwargs).arguments
  for name in static:
    value = given.get(name, kwargs.get(name))
    if any(map(is_array, jax.tree.leaves(value))):
      raise TypeError(f"argument {name!r} is static and must stay a Python value, but an array was passed: {value}; "
                      "pass a Python value, or take the name out of static_argnames")


# Loops --------------------------------------------------------------------------------------------------------------------


def scan(target: Any, length: int, param_axis: int = 0, *, variable_axes: Mapping[Any, int] | None = None,
         variable_broadcast: Any = False, variable_carry: Any = False, split_rngs: Mapping[Any, bool] | None = None,
         in_axes: Any = broadcast, out_axes: Any = 0, reverse: bool = False, unroll: int = 1,
         metadata_params: Mapping[Any, Any] | None = None, methods: Any = None, rolled: bool = True) -> Any:
  """Applies a layer `length` times over stacked variables, tracing it once: `nn.scan` with `params` at `param_axis`.

  The target is called as `(module, carry, *args, **kwargs)` and returns `(carry, output)`.

  Args:
    target: a module class, or a function whose first argument is a module.
    length: the number of layers.
    param_axis: axis of the layers in `params`. A leaf of lower rank is stacked at its last axis. Negative values count
      from the end of the stacked leaf.
    variable_axes: collection filter -> axis, for collections other than `params`. Default: all on axis 0.
    variable_broadcast, variable_carry: collection filters, as in `nn.scan`. Variables of modules that do not belong to
      the target (passed as attribute or argument) are always shared by all layers.
    split_rngs: stream filter -> whether each layer gets a key of its own. Default: every stream is split.
    in_axes: as in `nn.scan`; default: every layer sees all of an argument. Keyword arguments always are seen whole.
    out_axes: as in `nn.scan`.
    reverse, unroll: as in `jax.lax.scan`.
    metadata_params: as in `nn.scan`; default: the stacked axis is named "layers".
    methods: as in `nn.scan`.
    rolled: False runs the same as a Python loop, see `static_unroll`.

  Raises:
    ValueError: stacked variables whose layer axis does not have the size `length`; a carry that changes.
  """
  axes = [(key, value) for key, value in ({True: 0} if variable_axes is None else variable_axes).items()]
  splits = [(key, value) for key, value in ({True: True} if split_rngs is None else split_rngs).items()]
  metadata = {nn.PARTITION_NAME: "layers"} if metadata_params is None else dict(metadata_params)

  def kind(collection: str) -> Any:
    """"carry", "broadcast", or the axis of a collection of the target's own."""
    if in_filter(variable_carry, collection):
      return "carry"
    if in_filter(variable_broadcast, collection):
      return "broadcast"
    if collection == "params":
      return param_axis
    for key, axis in axes:
      if in_filter(key, collection):
        return axis
    raise ValueError(f"collection {collection!r} has no place in variable_axes, variable_broadcast or variable_carry")

  def lift(fn):
    def stage(pure, scopes, variables, rngs, carry, *args, own, **kwargs):
      where = "/".join(own.path) or "the stack"
      initial = [not cols.get("params") for cols in variables]

      def place(i, collection):
        if scopes[i] is own:
          return kind(collection)
        exists = collection in variables[i]
        return "carry" if exists and scopes[i].is_mutable_collection(collection) and collection != "params" else "broadcast"

      def pick(wanted):
        return tuple({c: v for c, v in cols.items() if wanted(place(i, c))} for i, cols in enumerate(variables))

      stacked = tuple({c: _to_front(v, place(i, c), length, metadata, f"{where}: {c}") for c, v in cols.items()}
                      for i, cols in enumerate(pick(lambda at: isinstance(at, int))))
      split = lambda i, stream: scopes[i] is own and next((on for f, on in splits if in_filter(f, stream)), False)
      split_keys = tuple({s: _split(key, length) for s, key in keys.items() if split(i, s)} for i, keys in enumerate(rngs))
      whole_keys = tuple({s: key for s, key in keys.items() if not split(i, s)} for i, keys in enumerate(rngs))
      whole, carried = pick(lambda at: at == "broadcast"), pick(lambda at: at == "carry")
      sliced_args = jax.tree.map(lambda axis, arg: None if axis is broadcast else
                                 jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), arg), in_axes, args)

      def body(state, xs):
        carried, carry = state
        stacked, split_keys, sliced = xs
        args_i = jax.tree.map(lambda axis, arg, part: arg if axis is broadcast else part, in_axes, args, sliced)
        variables_i = tuple(a | b | c for a, b, c in zip(whole, carried, stacked))
        result, out = pure(variables_i, tuple(a | b for a, b in zip(whole_keys, split_keys)), carry, *args_i, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
          raise ValueError(f"{where}: a scanned layer must return (carry, output), not {_describe(result)}")
        new_carry = check_carry(carry, result[0], where)
        ys: tuple[list[dict[str, Any]], ...] = ([], [])
        states = []
        for i, cols in enumerate(out):
          places = {c: place(i, c) for c in cols}
          late = [c for c, p in places.items() if p == "carry" and c not in variables[i]]
          if late:
            raise ValueError(f"{where}: variable_carry collection {late[0]!r} must exist before the loop")
          states.append(_merged(carried[i], {c: v for c, v in cols.items() if places[c] == "carry"}))
          ys[0].append({c: v for c, v in cols.items() if isinstance(places[c], int)})
          ys[1].append({c: v for c, v in cols.items() if places[c] == "broadcast"})
        return (tuple(states), new_carry), (result[1], *ys)

      loop = functools.partial(jax.lax.scan, reverse=reverse, unroll=unroll) if rolled else \
          functools.partial(_python_loop, reverse=reverse)
      (carried, carry), (output, per_layer, shared) = loop(
          body, (carried, strong(carry)), (stacked, split_keys, sliced_args), length=length)
      output = jax.tree.map(lambda axis, y: jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), y), out_axes, output)
      changed = []
      for i, (state, stack, same) in enumerate(zip(carried, per_layer, shared)):
        stack = {c: _from_front(v, place(i, c), metadata) for c, v in stack.items()}
        # A shared module's variables are created alike by every layer: the first one's are kept.
        same = {c: jax.tree.map(lambda x: x[0], v) if initial[i] else v for c, v in same.items()}
        changed.append(_changed(state, variables[i]) | stack | same)
      return (carry, output), tuple(changed)

    def with_own_scope(scopes, *args, **kwargs):
      return _lift(fn, functools.partial(stage, own=scopes[-1]), "scan")(scopes, *args, **kwargs)

    return with_own_scope

  return lift_transform(lift, target, methods=methods)


def static_unroll(target: Any, length: int, param_axis: int = 0, **options: Any) -> Any:
  """`scan` run as a Python loop over the same stacked variables: same tree, keys, metadata and results.

  Each layer is traced on its own, so a program grows with `length`; what it gains is straight-line code, which the
  compiler can offload from under an outer loop. Takes the arguments of `scan`, but for `unroll`.
  """
  if "unroll" in options or "rolled" in options:
    raise TypeError("static_unroll is fully unrolled; it takes neither unroll nor rolled")
  return scan(target, length, param_axis, rolled=False, **options)


def with_rngs(target: Any, rngs: Mapping[str, Any]) -> Any:
  """Gives a module other keys: `rngs` maps a stream to the `LazyRng` that replaces it."""

  def lift(fn):
    def stage(pure, scopes, variables, keys, *args, own, **kwargs):
      keys = tuple({**k, **{s: v for s, v in rngs.items() if s in k}} if scope is own else k
                   for scope, k in zip(scopes, keys))
      return pure(variables, keys, *args, **kwargs)

    def with_own_scope(scopes, *args, **kwargs):
      return _lift(fn, functools.partial(stage, own=scopes[-1]), "rngs")(scopes, *args, **kwargs)

    return with_own_scope

  return lift_transform(lift, target)


def _python_loop(body, state, xs, length, reverse):
  outputs = [None] * length
  for i in reversed(range(length)) if reverse else range(length):
    state, outputs[i] = body(state, jax.tree.map(lambda x: jax.lax.index_in_dim(x, i, keepdims=False), xs))
  return state, jax.tree.map(lambda *ys: jnp.stack(ys), *outputs)


def split_key(lazy: LazyRng, length: int) -> LazyRng:
  """One key per layer, stacked; names that are still to be folded in stay so."""
  return jax.tree.map(lambda key: jax.random.split(jax.random.clone(key), length), lazy)


_split = split_key


def strong(tree: Any) -> Any:
  """Gives every leaf a dtype of its own, so that a weakly typed carry does not make the loop trace its body twice."""
  return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)) if not _is_key(x) else x, tree)


def _is_key(x: Any) -> bool:
  return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def check_carry(before: Any, after: Any, layer: str) -> Any:
  """`after` with strong types. Raises ValueError where it is not, leaf for leaf, what `before` was."""
  (old, old_tree), (new, new_tree) = jax.tree_util.tree_flatten_with_path(before), jax.tree_util.tree_flatten_with_path(after)
  if old_tree != new_tree:
    raise ValueError(f"{layer} changed the structure of the hidden states from {old_tree} to {new_tree}; "
                     "a layer must return what it was given, and may return (hidden states, output)")
  for (path, a), (_, b) in zip(old, new):
    at = f" at {jax.tree_util.keystr(path)}" if path else ""
    if jnp.shape(a) != jnp.shape(b):
      raise ValueError(f"{layer} changed the shape of the hidden states{at} from {jnp.shape(a)} to {jnp.shape(b)}")
    if jnp.result_type(a) != jnp.result_type(b):
      raise ValueError(f"{layer} changed the dtype of the hidden states{at} from {jnp.result_type(a)} to {jnp.result_type(b)}"
                       f"; usually its parameters promoted them: give its modules dtype={jnp.result_type(a)}, or end the "
                       "layer with x.astype(inputs.dtype)")
  return strong(after)


def _describe(x: Any) -> str:
  return f"a tuple of {len(x)}" if isinstance(x, tuple) else type(x).__name__


# Stacked leaves -----------------------------------------------------------------------------------------------------------


def stacked_axis(axis: int, rank: int) -> int:
  """Where the layer axis of a stacked leaf of `rank` dimensions is: `axis`, or its last where it has fewer."""
  return max(rank + axis, 0) if axis < 0 else min(axis, rank - 1)


def _is_box(x: Any) -> bool:
  return isinstance(x, nn.meta.AxisMetadata)


def _value(x: Any) -> Any:
  return x.unbox(apply_constraint=False) if isinstance(x, nn.meta.Partitioned) else x.unbox() if _is_box(x) else x


def _to_front(tree: Any, axis: int, length: int, metadata: Mapping[Any, Any], where: str) -> Any:
  """Stacked leaves with their layer axis first, and its name taken out of their boxes."""

  def move(path, leaf):
    value = _value(leaf)
    shape = jnp.shape(value)
    at = stacked_axis(axis, len(shape)) if shape else 0
    if not shape or shape[at] != length:
      others = [i for i, size in enumerate(shape) if size == length]
      hint = f"; a size of {length} is on axis {others[0]}: was it stacked along another axis?" if others else \
          "; it looks like the variables of a single layer: was it saved with scan=False?"
      raise ValueError(f"{where}{jax.tree_util.keystr(path)}: expected {length} layers on axis {at}, "
                       f"found shape {shape}{hint}")
    if not _is_box(leaf):
      return jnp.moveaxis(value, at, 0) if at else value
    names = getattr(leaf, "names", None)
    if names is not None and (len(names) <= at or names[at] != metadata.get(nn.PARTITION_NAME)):
      raise ValueError(f"{where}{jax.tree_util.keystr(path)}: axis {at} should be named "
                       f"{metadata.get(nn.PARTITION_NAME)!r} in the partition metadata, found {names}")
    return leaf.remove_axis(at, metadata).replace_boxed(jnp.moveaxis(value, at, 0) if at else value)

  return jax.tree_util.tree_map_with_path(move, tree, is_leaf=_is_box)


def _from_front(tree: Any, axis: int, metadata: Mapping[Any, Any]) -> Any:
  """The inverse of `_to_front`."""

  def move(leaf):
    value = _value(leaf)
    at = stacked_axis(axis, jnp.ndim(value))
    value = jnp.moveaxis(value, 0, at) if at else value
    return leaf.replace_boxed(value).add_axis(at, metadata) if _is_box(leaf) else value

  return jax.tree.map(move, tree, is_leaf=_is_box)
