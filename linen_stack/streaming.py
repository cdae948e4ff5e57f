"""`on_device`: functions over trees that stand partly in host memory, computed on the device, a layer at a time.

JAX refuses arithmetic that mixes memories, and bringing everything over first is what does not fit.
`on_device(fn, stack)` traces `fn` as if all of its arguments were on the device, and then runs the program so that of
each parameter in host memory one layer is on the device at a time. Each operation is one of:

    elementwise   put off until it is known what needs it, then done layer by layer: in one loop for each parameter,
                      for i in range(layers): p[i], mu[i], nu[i] = what is wanted, from p[i], mu[i], nu[i], gradient[i]
    whole sums    (and maxima, ...) a loop of their own over the layers, at once, such as a global norm
    all others    done at once; what they need of the host comes over whole
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from linen_stack import placement
from linen_stack.lifting import is_array, split_static
from linen_stack.plan import Plan

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

_ELEMENTWISE = frozenset("""
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul name ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
""".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call".split())


def on_device(fn: Callable[..., Any], stack: Any = None, *, out_shardings: Any = None) -> Callable[..., Any]:
  """`fn` over trees of which any leaf may be in host memory; for optimisers' updates, norms, averages.

  Example, for the inside of a jitted train step::

    def update(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    update = ls.on_device(update, stack)

  The numbers are those of `fn` with everything on the device; sums over a leaf are added up layer by layer. Without a
  leaf in host memory it is `fn` itself.

  A result that is computed elementwise from leaves in host memory comes back in host memory, all others on the device.
  A result that stands at the place of an argument, as `params` and `opt_state` do above, is written into that
  argument's buffer: where the surrounding `jit` donates it, no second copy exists.

  Args:
    fn: a pure function of trees. Arrays that it encloses stay where they are: pass them as arguments.
    stack: the `StackedDecoder`, or its plan, whose parameters are in host memory; it says which axes count layers.
      Leaves outside of it come over whole, one after the other, and without a stack all leaves do.
    out_shardings: a tree, or a prefix of one, of shardings for the results, such as `ls.host_shardings` gives: results
      are put in the memory that they name. For functions such as an optimiser's `init`, whose zeros come from nowhere.
  """
  plan = getattr(stack, "plan", stack)
  if plan is not None and not isinstance(plan, Plan):
    raise TypeError(f"stack must be a StackedDecoder or a Plan, not {type(stack).__name__}")

  @functools.wraps(fn)
  def streamed(*args: Any, **kwargs: Any) -> Any:
    arrays, rebuild = split_static((args, kwargs))
    if out_shardings is None and not any(map(_in_host, arrays)):
      return fn(*args, **kwargs)

    def call(*arrays):
      args, kwargs = rebuild([jax.device_put(x, _DEVICE) if _in_host(x) else x for x in arrays])
      return fn(*args, **kwargs)

    program, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
    given = jax.tree_util.tree_leaves_with_path((args, kwargs))
    fetched = {id(x): _fetch(x, _layers(plan, path, x)) for path, x in given if _in_host(x)}
    results = _run(program.jaxpr, program.consts, [fetched.get(id(x), x) for x in arrays])
    kinds = [None] * len(results)
    if out_shardings is not None:
      kinds = [sharding.memory_kind for sharding in jax.tree.leaves(jax.tree.broadcast(out_shardings, shapes))]
    to_host = [_is_late(x) and bool(x.hosts) if kind is None else "host" in kind for x, kind in zip(results, kinds)]
    for x, (path, shape) in zip(results, jax.tree_util.tree_leaves_with_path(shapes)):
      if _is_late(x) and not x.hosts:
        x.layers = _layers(plan, path, shape)
    placed = _place(results, to_host, _same_places(args, shapes))
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)

  return streamed


def _layers(plan: Plan | None, path: tuple[Any, ...], leaf: Any) -> tuple[int, ...]:
  """The sizes of a leaf's axes that count layers, if it can be taken layer by layer."""
  place = placement.find(plan, placement.keys(path)) if plan is not None else None
  # Compilers for TPU cannot take single vectors out of host memory.
  return place.sizes if place is not None and place.fits(leaf) and leaf.ndim - len(place.sizes) >= 2 else ()


@dataclasses.dataclass(eq=False)
class _Late:
  """A value not computed yet: an array in host memory that is to be fetched, or an elementwise operation."""

  aval: Any
  """Shape and dtype."""
  layers: tuple[int, ...] = ()
  """Sizes of the leading axes by which it is computed; none: as a whole."""
  fetched: Any = None
  """The array in host memory."""
  eqn: Any = None
  inputs: Sequence[Any] = ()
  hosts: tuple[_Late, ...] = ()
  """The fetched values that it is made of."""
  whole: Any = None
  """The value, once it was computed as a whole."""


def _in_host(x: Any) -> bool:
  return is_array(x) and jax.typeof(x).memory_space == _HOST


def _is_late(x: Any) -> bool:
  return isinstance(x, _Late)


def _shape(x: Any) -> tuple[int, ...]:
  return x.aval.shape if _is_late(x) else jnp.shape(x)


def _fetch(host: Any, layers: tuple[int, ...] = ()) -> _Late:
  late = _Late(jax.typeof(host), layers, fetched=host)
  late.hosts = (late,)
  return late


def _late(eqn: Any, inputs: Sequence[Any]) -> _Late:
  late = list(filter(_is_late, inputs))
  hosts = tuple(dict.fromkeys(host for x in late for host in x.hosts))
  # All have one shape, so that what is known of one holds for all.
  layers = max((x.layers for x in late), key=len, default=())
  return _Late(eqn.outvars[0].aval, layers, eqn=eqn, inputs=inputs, hosts=hosts)


# Tracing ----------------------------------------------------------------------------------------------------------------


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  """Runs a program; elementwise operations on values that are late stay late."""
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
  for eqn in jaxpr.eqns:
    values.update(zip(eqn.outvars, _step(eqn, [read(atom) for atom in eqn.invars])))
  return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
  name, params, late = eqn.primitive.name, eqn.params, list(filter(_is_late, inputs))
  if name == "device_put" and all(space == _DEVICE for space in params["devices"]):
    return [_fetch(x) if _in_host(x) else x for x in inputs]
  if name == "broadcast_in_dim" and not late and jnp.ndim(inputs[0]) == 0:
    return [_late(eqn, inputs)]
  if name in _CALLS:
    inner = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
    closed = isinstance(inner, core.ClosedJaxpr)
    return _run(inner.jaxpr if closed else inner, inner.consts if closed else (), inputs)
  # Axes of size 1 may still be broadcast in an operation.
  if late and name in _ELEMENTWISE and all(_shape(x) in ((), eqn.outvars[0].aval.shape) for x in inputs):
    return [_late(eqn, inputs)]
  if late and name in _REDUCTIONS and late[0].hosts and late[0].layers and eqn.outvars[0].aval.ndim == 0:
    return [_reduce(eqn, late[0])]
  return _bind(eqn, list(map(_whole, inputs)))


def _bind(eqn: Any, inputs: Sequence[Any], **changed: Any) -> Sequence[Any]:
  out = eqn.primitive.bind(*inputs, **{**eqn.params, **changed})
  return out if eqn.primitive.multiple_results else [out]


# Computing --------------------------------------------------------------------------------------------------------------


def _whole(x: Any) -> Any:
  if not _is_late(x):
    return x
  if x.whole is None:
    x.whole = jax.device_put(x.fetched, _DEVICE) if x.eqn is None else _bind(x.eqn, list(map(_whole, x.inputs)))[0]
  return x.whole


def _flat(x: Any, layers: tuple[int, ...]) -> Any:
  """[*layers, ...] with one axis of layers: compilers cannot slice host memory along two."""
  return x.reshape(math.prod(layers), *x.shape[len(layers):])


def _compute(x: Any, layers: tuple[int, ...], i: Any, known: dict[_Late, Any]) -> Any:
  """Layer `i` of a value, of the value's rank. `known` holds what was fetched of it, and remembers the rest."""
  ones = (1,) * len(layers)
  if not _is_late(x):
    if jnp.ndim(x) == 0:
      return x
    return jax.lax.dynamic_slice_in_dim(_flat(x, layers), i, 1).reshape(ones + x.shape[len(ones):])
  if x not in known:
    changed = {"shape": ones + x.aval.shape[len(ones):]} if x.eqn.primitive.name == "broadcast_in_dim" else {}
    (known[x],) = _bind(x.eqn, [_compute(y, layers, i, known) for y in x.inputs], **changed)
  return known[x]


def _fetch_layer(arrays: Mapping[_Late, Any], layers: tuple[int, ...], i: Any) -> dict[_Late, Any]:
  """Layer `i` of arrays [all layers, ...] in host memory, of the rank of [*layers, ...]."""
  take = lambda x: jax.device_put(jax.lax.dynamic_slice_in_dim(x, i, 1), _DEVICE)
  return {late: take(x).reshape((1,) * len(layers) + x.shape[1:]) for late, x in arrays.items()}


def _reduce(eqn: Any, x: _Late) -> Any:
  arrays = {host: _flat(host.fetched, x.layers) for host in x.hosts}

  def body(_, i):
    return None, _bind(eqn, [_compute(x, x.layers, i, _fetch_layer(arrays, x.layers, i))])[0]

  _, parts = jax.lax.scan(body, None, jnp.arange(math.prod(x.layers)))
  return _bind(eqn, [parts], axes=(0,))[0]


def _place(results: Sequence[Any], to_host: Sequence[bool], places: Sequence[Any]) -> list[Any]:
  """The results, leaf by leaf. `places`: for each the argument that stands at its place."""
  placed: list[Any] = list(results)
  groups: dict[_Late, list[int]] = {}
  for k, x in enumerate(results):
    if _is_late(x) and x.eqn is None and to_host[k]:
      placed[k] = x.fetched
    elif _is_late(x) and (x.hosts or to_host[k]):
      groups.setdefault(_first(x, results), []).append(k)
    else:
      placed[k] = jax.device_put(_whole(x), _HOST) if to_host[k] and not _in_host(x) else _whole(x)
  before: Any = ()
  for group in groups.values():
    by_layer = [k for k in group if results[k].layers and to_host[k]]
    for k, array in zip(by_layer, _compute_on_host([results[k] for k in by_layer], [places[k] for k in by_layer])):
      placed[k] = array
    rest = [k for k in group if k not in by_layer]
    # The next leaf comes over when this one is done.
    for host in dict.fromkeys(host for k in rest for host in results[k].hosts if host.whole is None):
      host.fetched, before = jax.lax.optimization_barrier((host.fetched, before))
    before = [_whole(results[k]) for k in rest] or before
    for k, whole in zip(rest, before):
      placed[k] = jax.device_put(whole, _HOST) if to_host[k] else whole
  return placed


def _first(x: _Late, results: Sequence[Any]) -> _Late:
  """One value for all results that are computed together: those that have fetched values in common."""
  hosts, before = dict.fromkeys(x.hosts), -1
  while len(hosts) != before:
    before = len(hosts)
    for other in results:
      if _is_late(other) and any(host in hosts for host in other.hosts):
        hosts.update(dict.fromkeys(other.hosts))
  return min(hosts, key=id) if hosts else x


def _compute_on_host(results: Sequence[_Late], places: Sequence[Any]) -> list[Any]:
  """Computes results of one shape layer by layer into host memory, in place where an argument has their place."""
  if not results:
    return []
  hosts = list(dict.fromkeys(host for x in results for host in x.hosts))
  # For each result the fetched value whose buffer it takes.
  target = [next((host for host in hosts if host.fetched is place and host.aval.dtype == x.aval.dtype), None)
            for x, place in zip(results, places)]
  layers = max((x.layers for x in results), key=len)
  arrays = {host: _flat(host.fetched, layers) for host in hosts}
  own = [host for host in target if host is not None]

  def body(buffers, i):
    known = _fetch_layer(arrays | dict(zip(own, buffers)), layers, i)
    out = [_flat(_compute(x, layers, i, known), (1,) * len(layers)) for x in results]
    out = jax.device_put(out, _HOST)
    new = {host: layer for host, layer in zip(target, out) if host is not None}
    written = [jax.lax.dynamic_update_slice_in_dim(buffer, new[host], i, 0) for host, buffer in zip(own, buffers)]
    return written, [layer[0] for host, layer in zip(target, out) if host is None]

  buffers, made = jax.lax.scan(body, [arrays[host] for host in own], jnp.arange(math.prod(layers)))
  buffers, made = iter(buffers), iter(made)
  return [next(made if host is None else buffers).reshape(x.aval.shape) for host, x in zip(target, results)]


def _same_places(args: tuple[Any, ...], shapes: Any) -> list[Any]:
  """For each leaf of the result the array that has its path among the arguments, or None."""
  result = shapes if type(shapes) is tuple else (shapes,)  # a named tuple is one result
  given = dict(jax.tree_util.tree_leaves_with_path(args))
  return [given.get(path) for path, _ in jax.tree_util.tree_leaves_with_path(result)]
