"""Lifted wrappers around a layer: parameters fetched from the host, remat, and what all lifts share.

    offload_params   `nn.map_variables` that copies parameters to the device
    remat            `nn.remat` with a policy object and arguments that stay Python values
    scan, static_unroll   `nn.scan`, rolled and as a Python loop: see `linen_stack.loops`

All are built on one step, `lift`: the target becomes a pure function of (variables, rngs, arguments), a JAX
transformation is applied to it, and *the variables that it changed* come out. That last point is why Flax's own lifts
do not serve: they return a collection whole or not at all, so that a mutable `params` sends every weight through
remat and out of the loop. Also theirs: a param axis above a leaf's rank fails, a module that all layers share cannot
be told from one that is stacked, and there is no Python loop over stacked variables.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import inspect
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

from linen_stack import loops
from linen_stack.lifting import (TAKES_SLICES, is_array, lift, lift_transform, lift_with_own_scope, split_static, take_slices)
from linen_stack.jax_policies import names_first
from linen_stack.specs import nearest
from linen_stack.policies import CARRY_TAG, RematPolicy
from linen_stack.stacked import on_host


# Parameters in host memory ----------------------------------------------------------------------------------------------


def offload_params(target: Any, select: Callable[[str, Any], bool] | None = None, *, store: bool = False,
                   methods: Any = None) -> Any:
  """Lets a layer compute with parameters that are stored in host memory: copies them to the device when it runs.

  Args:
    target: a module class, or a function whose first argument is a module.
    select: `select(path, leaf) -> bool`, which parameters are fetched; `path` as in "attention/query/kernel". Default:
      all. Parameters that are in host memory always are, and those on the device already are left alone.
    store: also move what `select` names to host memory when the layer makes it, as `init` does. Under a loop, no more
      than one layer's parameters are on the device then.
    methods: as in `nn.map_variables`.

  Returns:
    The class or function, wrapped. Variables and names are unchanged; other collections pass through.
  """
  if select is not None and not callable(select):
    raise TypeError(f"select must be a function select(path, leaf) -> bool, not {select!r}")

  def lifted(fn, select):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      move = lambda trees, to: tuple({**cols, "params": to(cols["params"], select)} if "params" in cols else cols
                                     for cols in trees)
      result, changed = pure(move(variables, _fetch), rngs, *args, **kwargs)
      return result, move(changed, _store) if store else changed

    return lift(fn, stage, "offload_params")

  return lift_transform(lifted, target, select=select, methods=methods)


def fetch_together(loop: Any, select: Callable[[str, Any], bool], policy: RematPolicy) -> Any:
  """`offload_params` around an inner loop, `(module, carry, ...) -> (carry, output)` over parameters [count, ...].

  Compilers take slices out of host memory, but no slices of slices. Inside another loop the parameters of all `count`
  layers are therefore fetched in one go, in a region of their own, so that no copy is kept for the backward pass. It
  keeps what `policy` says and each layer's carry, which the layers must tag (`tag` of `remat`): no layer runs once more.
  """
  of_one = lambda path, leaf: select(path, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
  return keep_around(offload_params(loop, of_one, store=True), policy)


def keep_around(layers: Any, policy: RematPolicy) -> Any:
  """A region around layers that are regions themselves: it keeps what they keep, and none of the parameters that it took."""
  base = all_but_fetched
  if policy.remat:
    base = names_first(jax.checkpoint_policies.save_only_these_names(CARRY_TAG), {CARRY_TAG}, policy.resolve())
  kept = policy.resolve() if policy.carry == "offload" else base
  return remat(layers, RematPolicy(base=kept), prevent_cse=False)


def fetched(tree: Any) -> Any:
  """A tree with all that is in host memory brought to the device."""
  move = lambda x: jax.device_put(x, jax.memory.Space.Device) if is_array(x) and on_host(x) else x
  return jax.tree.map(move, tree)


def all_but_fetched(prim: Any, *_: Any, **__: Any) -> bool:
  """A JAX checkpoint policy that saves everything but parameters from the host or from another stage: they come again."""
  return prim.name not in ("device_put", "linear_call")


def _fetch(params: Any, select: Callable[[str, Any], bool] | None) -> Any:
  # A leaf that is in host memory after all has to be fetched to be of any use.
  wanted = lambda path, leaf: select is None or select(path, leaf) or on_host(leaf)
  return _moved(params, wanted, jax.memory.Space.Device)


def _store(params: Any, select: Callable[[str, Any], bool] | None) -> Any:
  return _moved(params, lambda path, leaf: select is None or select(path, leaf), jax.memory.Space.Host)


def _moved(params: Any, wanted: Callable[[str, Any], bool], space: jax.memory.Space) -> Any:
  def move(path, leaf):
    # Boxed parameters end in the box's own key.
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return jax.device_put(leaf, space) if wanted("/".join(keys), leaf) else leaf

  return jax.tree_util.tree_map_with_path(move, params)


# Remat --------------------------------------------------------------------------------------------------------------------


def remat(target: Any, policy: Any = "full", *, prevent_cse: bool | tuple[bool, bool] = True,
          static_argnames: str | Iterable[str] = (), static_argnums: int | Sequence[int] = (), tag: bool = False,
          methods: Any = None) -> Any:
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
    tag: name the first argument as the layer's carry even where the policy leaves it on the device.
    methods: as in `nn.remat`.

  Raises:
    ValueError: a static argument that the target does not have.
    TypeError: an array given for a static argument, when called.
  """
  policy = RematPolicy.of(policy)
  if policy.every > 1 or policy.levels is not None:
    raise ValueError(f"remat wraps one layer; every and levels ({policy}) shape the loop of a StackedDecoder")
  if not isinstance(prevent_cse, bool) and [type(flag) for flag in prevent_cse] != [bool, bool]:
    raise TypeError(f"prevent_cse must be a bool or a pair of bools (variables, arguments), not {prevent_cse!r}")
  signature = call_signature(target)
  static = _static_names(signature, static_argnames, static_argnums, getattr(target, "__name__", str(target)))
  if not policy.remat:
    return target
  cse = prevent_cse if policy.prevent_cse is None else policy.prevent_cse

  def lifted(fn):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      if static:
        check_static(signature, static, args, kwargs)
      arrays, rebuild = split_static((args, kwargs))

      def region(variables, rngs, arrays):
        (carry, *args), kwargs = rebuild(arrays)
        variables = take_slices(variables)
        return pure(variables, rngs, tag_carry(policy, carry, tag), *args, **kwargs)

      flags = (cse[0], cse[1], cse[1]) if isinstance(cse, tuple) else cse
      return jax.checkpoint(region, policy=policy.resolve(), prevent_cse=flags)(variables, rngs, arrays)

    return lift(fn, stage, "remat")

  wrapped = lift_transform(lifted, target, methods=methods)
  setattr(getattr(wrapped, "func", wrapped), TAKES_SLICES, True)
  return wrapped


def tag_carry(policy: RematPolicy, carry: Any, always: bool = False) -> Any:
  """Names the hidden states that enter a rematerialised region, where the policy moves them."""
  if policy.carry == "save" and not always:
    return carry
  return jax.tree.map(lambda x: checkpoint_name(x, CARRY_TAG) if is_array(x) else x, carry)


def region(policy: RematPolicy, loop: Callable[..., Any]) -> Callable[..., Any]:
  """Several layers rematerialised together: what `levels` and `every` make of the body of an outer loop."""

  def together(state, xs):
    *others, carry = state
    return loop((*others, tag_carry(policy, carry)), fetched(xs))

  cse = policy.prevent_cse
  flags = loops.over_parts(*cse) if isinstance(cse, tuple) else bool(cse)
  return jax.checkpoint(together, policy=policy.resolve(), prevent_cse=flags)


def observe(target: Any, see: Callable[[Any], None]) -> Any:
  """Hands the target's program to `see(jaxpr)` each time that it is traced, and runs that very program."""

  def lifted(fn):
    def stage(pure, scopes, variables, rngs, *args, **kwargs):
      arrays, rebuild = split_static((args, kwargs))

      def call(variables, rngs, arrays):
        args, kwargs = rebuild(arrays)
        return pure(variables, rngs, *args, **kwargs)

      program, out = jax.make_jaxpr(call, return_shape=True)(variables, rngs, arrays)
      see(program.jaxpr)
      results = core.jaxpr_as_fun(program)(*jax.tree.leaves((variables, rngs, arrays)))
      return jax.tree.unflatten(jax.tree.structure(out), results)

    return lift(fn, stage, "observe")

  return lift_transform(lifted, target)


def call_signature(target: Any) -> inspect.Signature | None:
  """The signature of a module class's `__call__` or of a function over a module; None where it has none."""
  target = getattr(target, "func", target)
  try:
    return inspect.signature(target.__call__ if isinstance(target, type) else target)
  except (TypeError, ValueError):
    return None


def _static_names(signature: inspect.Signature | None, names: str | Iterable[str], nums: int | Sequence[int],
                  who: str) -> tuple[str, ...]:
  names = (names,) if isinstance(names, str) else tuple(names or ())
  nums = tuple(nums or ()) if isinstance(nums, (Iterable, type(None))) else (nums,)
  if signature is None:
    return names
  parameters = list(signature.parameters)
  open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
  for name in names:
    if name not in parameters[1:] and not open_ended:
      raise ValueError(f"static_argnames: {who} has no argument {name!r}; {nearest(str(name), parameters[1:])}")
  for num in nums:
    if not hasattr(num, "__index__") or not 0 < num < len(parameters):
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


def with_rngs(target: Any, rngs: Mapping[str, Any]) -> Any:
  """Gives a module other keys: `rngs` maps a stream to the `LazyRng` that replaces it."""

  def lifted(fn):
    def stage(pure, scopes, own, variables, keys, *args, **kwargs):
      keys = tuple({**k, **{s: v for s, v in rngs.items() if s in k}} if i == own else k for i, k in enumerate(keys))
      return pure(variables, keys, *args, **kwargs)

    return lift_with_own_scope(fn, stage, "rngs")

  return lift_transform(lifted, target)


def one_trip(target: Any) -> Any:
  """Runs `(module, carry, *args) -> (carry, output)` in a loop of one trip that the compiler is told to keep.

  What is rematerialised inside is then apart from the code around it, as in any loop.
  """

  def lifted(fn):
    def stage(pure, scopes, variables, rngs, carry, *args, **kwargs):
      def body(carry, _):
        (carry, output), out = pure(variables, rngs, carry, *args, **kwargs)
        return carry, (output, out)

      with set_xla_metadata(**{"skip-simplify-while-loops_trip-count-one": "true"}):
        carry, ys = jax.lax.scan(body, carry, None, length=1)
      output, out = jax.tree.map(lambda y: y[0], ys)
      return (carry, output), out

    return lift(fn, stage, "one_trip")

  return lift_transform(lifted, target)
