"""Loops that fetch the next layer's parameters while a layer computes, forward and backward.

`scan` is `jax.lax.scan` over layers of which some inputs, `weights`, are elsewhere: in host memory, or split over devices.
In pseudo-code:

    w = fetch(weights[0])                                 w = fetch(weights[last])
    for i in range(last):                                 for i in range(last, 0, -1):
      ahead = fetch(weights[i + 1])                         ahead = fetch(weights[i - 1])
      state, ys[i], kept[i] = body(state, xs[i], w)         cts, grads[i] = transpose(body)(cts, kept[i], xs[i], w)
      w = ahead                                             w = ahead
    state, ys[last], kept[last] = body(state, ..., w)     cts, grads[0] = transpose(body)(cts, kept[0], xs[0], w)

By itself JAX would keep what a loop carries for the backward pass: a copy of every weight. So the loop as a whole has a
derivative of its own. What is `kept` is for the remat policy inside of `body` to say; but weights, constants of the loop
and what is made of these alone never are: the backward loop has them at hand.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from linen_stack.stacked import on_host, put_row, strong, take_row


@dataclasses.dataclass(frozen=True)
class Source:
  """How rows of a weight come to where layers compute, and their gradients back.

  For weights that are split over devices these are sharding constraints: whole, and split again. What is in host memory is
  fetched without being told here.
  """

  gather: Callable[[Any], Any] = lambda row: row
  scatter: Callable[[Any], Any] = lambda gradient: gradient


def scan(body: Callable[..., Any], state: Any, xs: Any, source: Callable[[Any, Any], Source | None], *, length: int,
         unroll: int = 1) -> tuple[Any, Any]:
  """`jax.lax.scan`, but rows of those leaves of `xs` that have a `source(path, leaf)` are fetched one step ahead.

  Derivatives are those of reverse mode alone. `body` is traced once.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(xs)
  found = [source(path, leaf) for path, leaf in leaves]
  if not any(found):
    return jax.lax.scan(body, state, xs, length=length, unroll=unroll)
  sources = list(filter(None, found))
  plain = [leaf for (_, leaf), at in zip(leaves, found) if at is None]
  weights = [leaf for (_, leaf), at in zip(leaves, found) if at is not None]
  state, states = jax.tree.flatten(strong(state))

  def flat(*values):
    state, plain, weights = _cut(values, sizes)
    plain, weights = iter(plain), iter(weights)
    x = jax.tree.unflatten(treedef, [next(plain if at is None else weights) for at in found])
    return strong(body(jax.tree.unflatten(states, state), x))

  sizes = len(state), len(plain), len(weights)
  rows = jax.eval_shape(lambda plain, weights: (take_row(plain, 0), _fetch(sources, weights, 0)), plain, weights)
  closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*state, *rows[0], *rows[1])
  state, ys = _loop(_Layer(closed, len(state)), rows, sources, length, unroll)(list(closed.consts), state, plain, weights)
  return jax.tree.unflatten(jax.tree.structure(shapes), [*state, *ys])


def _fetch(sources: Sequence[Source], weights: Sequence[Any], i: Any) -> list[Any]:
  rows = [jax.device_put(take_row(x, i), jax.memory.Space.Device) if on_host(x) else take_row(x, i) for x in weights]
  return [source.gather(row) for source, row in zip(sources, rows)]


def _pipeline(compute: Callable[..., Any], fetch: Callable[[Any], Any], carry: Any, stacks: list[Any], indices: range,
              unroll: int, apart: bool, copied: Sequence[bool]) -> tuple[Any, list[Any]]:
  """For each of `indices`: `carry, rows = compute(carry, i, fetch(i))`, rows `i` of `stacks`. Returns (carry, stacks).

  Each step fetches for the next one, and the last nothing. `apart`: see `_apart`; `compute` gives no rows in host memory then.
  `copied`: which of what is fetched has a buffer of its own, see `_copied`.
  """
  away = list(map(on_host, stacks))

  def layer(carry, i, w):
    carry, here = carry
    carry, rows = compute(carry, i, w)
    here = put_row(here, [row for row, host in zip(rows, away) if not host], i)
    return (carry, here), [row for row, host in zip(rows, away) if host]

  def send(there, rows, i):
    return put_row(there, [jax.device_put(row, jax.memory.Space.Host) for row in rows], i)

  def step(loop, i):
    carry, there, w = loop
    ahead = fetch(i + indices.step)
    carry, rows = (_apart(layer) if apart else layer)(carry, i, w)
    carry, ahead = jax.lax.optimization_barrier((carry, ahead))
    w = [_copied(new, old, i) if own else new for new, old, own in zip(ahead, w, copied)]
    return (carry, send(there, rows, i), w), None

  here, there = ([x for x, host in zip(stacks, away) if host == where] for where in (False, True))
  # Not before the carry is there: the backward pass's first weights would be on the device all through the forward pass.
  first, carry = jax.lax.optimization_barrier((jnp.int32(indices[0]), carry))
  loop = (carry, here), there, fetch(first)
  steps = jnp.arange(indices[0], indices[-1], indices.step)
  (carry, there, w), _ = jax.lax.scan(step, loop, steps, unroll=unroll)
  (carry, here), rows = layer(carry, indices[-1], w)
  here, there = iter(here), iter(send(there, rows, indices[-1]))
  return carry, [next(there if host else here) for host in away]


def _apart(fn: Callable[..., Any]) -> Callable[..., Any]:
  """`fn(carry, *args) -> (carry, output)` in a loop of one trip, which is one operation to what schedules those around it.

  Schedulers take a copy from the host to be short and start it late; but before or after the layer as a whole, it is before.
  Not for a backward pass: its gradients would have to stay until the layer as a whole is done, and take room. Nor for what is
  gathered from other devices: compilers hide that inside of the layer's products, which must be where they find them.
  """

  def run(carry, *args):
    with set_xla_metadata(**{"skip-simplify-while-loops_trip-count-one": "true"}):
      carry, output = jax.lax.scan(lambda carry, _: fn(carry, *args), carry, None, length=1)
    return carry, jax.tree.map(lambda x: x[0], output)

  return run


def _copied(new: Any, old: Any, i: Any) -> Any:
  """`new`, in the buffer of `old`.

  What a loop carries has one buffer. Weights that were fetched straight into it would have to wait until the layer is done
  with its own. A choice that the compiler cannot foresee is a copy that it cannot leave out, so the fetch gets a buffer of
  its own. Unrolled loops need none: their steps take turns with two buffers. Nor do backward loops: a layer's last products
  need none of its weights, so that the next one's come meanwhile, and the copy would take room. Nor does what is gathered
  from other devices: its buffer is one that products take along.
  """
  return jax.lax.select(jnp.broadcast_to(i >= 0, new.shape), new, old)


@dataclasses.dataclass(frozen=True)
class _Layer:
  """One layer's program over flat lists (state, xs, weights); its constants are given anew in each call."""

  closed: Any
  num_state: int

  @property
  def state(self) -> list[Any]:
    return self.closed.in_avals[:self.num_state]

  @property
  def outputs(self) -> list[Any]:
    return [var.aval for var in self.closed.jaxpr.outvars[self.num_state:]]

  def __call__(self, consts: Sequence[Any], *parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    out = core.jaxpr_as_fun(core.ClosedJaxpr(self.closed.jaxpr, list(consts)))(*itertools.chain(*parts))
    return out[:self.num_state], out[self.num_state:]


def _loop(layer: _Layer, rows: Sequence[Any], sources: Sequence[Source], length: int, unroll: int) -> Callable[..., Any]:
  """The loop over flat lists (consts, state, xs, weights) -> (state, ys), with its derivative."""

  def run(compute, weights, carry, stacks, indices, apart=False):
    hosts = list(map(on_host, weights))
    copied = [host and unroll == 1 and indices.step > 0 for host in hosts]
    apart = apart and any(hosts)
    return _pipeline(compute, lambda i: _fetch(sources, weights, i), carry, stacks, indices, unroll, apart, copied)

  @jax.custom_vjp
  def loop(consts, state, xs, weights):
    compute = lambda state, i, w: layer(consts, state, take_row(xs, i), w)
    return run(compute, weights, state, [_buffer(aval, length) for aval in layer.outputs], range(length), True)

  def forward(consts, state, xs, weights):
    linear = _Linear(layer, consts, state, *rows)
    compute = lambda state, i, w: linear.forward(consts, state, take_row(xs, i), w)
    stacks = [_buffer(aval, length) for aval in (*layer.outputs, *(var.aval for var in linear.kept))]
    last, stacks = run(compute, weights, state, stacks, range(length), not any(map(on_host, stacks)))
    ys, kept = _cut(stacks, [len(layer.outputs), len(linear.kept)])
    return (last, ys), (linear, consts, xs, weights, kept)

  def backward(residuals, cts):
    linear, consts, xs, weights, kept = residuals
    to_state, to_ys = map(_floats, cts)
    scatters = [source.scatter for source, x in zip(sources, weights) if _is_float(x)]

    def compute(carry, i, w):
      into = linear.backward(consts, take_row(xs, i), w, take_row(kept, i), (carry[1], take_row(to_ys, i)))
      to_consts = [a + b for a, b in zip(carry[0], into[0])]
      return (to_consts, into[1]), [*into[2], *(scatter(x) for scatter, x in zip(scatters, into[3]))]

    carry = [jnp.zeros_like(x) for x in consts if _is_float(x)], to_state
    stacks = [_buffer(jax.typeof(x)) for x in _floats([*xs, *weights])]
    (to_consts, to_state), stacks = run(compute, weights, carry, stacks, range(length)[::-1])
    to_xs, to_weights = _cut(stacks, [len(_floats(xs)), len(scatters)])
    given, found = (consts, layer.state, xs, weights), (to_consts, to_state, to_xs, to_weights)
    return tuple(_merged(values, floats, itertools.repeat(None)) for values, floats in zip(given, found))

  loop.defvjp(forward, backward)
  return loop


@jax.tree_util.register_static
class _Linear:
  """One layer, linearised. Flat lists (consts, state, xs, weights) go in, as into the layer itself."""

  def __init__(self, layer: _Layer, *parts: Sequence[Any]):

    def run(*parts):
      values = list(itertools.chain(*parts))

      def of_floats(floats):
        state, ys = layer(*_cut(_merged(values, floats, values), sizes))
        return (_floats(state), _floats(ys)), (state, ys)

      _, transpose, out = jax.vjp(of_floats, _floats(values), has_aux=True)
      return out, transpose

    sizes = list(map(len, parts))
    self.program, (self.out, transpose) = jax.make_jaxpr(run, return_shape=True)(*parts)
    self.transpose = jax.tree.structure(transpose)
    self.float_sizes = [len(_floats(part)) for part in parts]
    jaxpr = self.program.jaxpr
    consts, _, xs, weights = _cut(jaxpr.invars, sizes)
    self.given = [*consts, *xs, *weights]
    self.leaves = jaxpr.outvars[len(jaxpr.outvars) - self.transpose.num_leaves:]
    self.remade, self.remake = _made_of(self.program, [*consts, *weights], self.leaves)
    at_hand = {*self.given, *self.remade}
    self.kept = list(dict.fromkeys(x for x in self.leaves if not isinstance(x, core.Literal) and x not in at_hand))

  def forward(self, *parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The layer's state, and its results with what its backward pass needs: ys, kept."""
    out = core.jaxpr_as_fun(self.program)(*itertools.chain(*parts))
    state, ys, leaves = _cut(out, [*map(len, self.out), len(self.leaves)])
    values = dict(zip(self.leaves, leaves))
    return state, [*ys, *(values[var] for var in self.kept)]

  def backward(self, consts: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any], kept: Sequence[Any],
               cts: tuple[list[Any], list[Any]]) -> list[list[Any]]:
    """Cotangents of the floats among (consts, state, xs, weights) from those of (state, ys)."""
    values = dict(zip([*self.given, *self.kept], [*consts, *xs, *weights, *kept]))
    values.update(zip(self.remade, core.jaxpr_as_fun(self.remake)(*consts, *weights)))
    leaves = [x.val if isinstance(x, core.Literal) else values[x] for x in self.leaves]
    (into,) = jax.tree.unflatten(self.transpose, leaves)(cts)
    return _cut(into, self.float_sizes)


def _made_of(program: Any, given: list[Any], wanted: Sequence[Any]) -> tuple[list[Any], Any]:
  """Those of the `wanted` values of a program that are made of nothing but the `given` inputs, and a program for them."""
  jaxpr = program.jaxpr
  known = {*jaxpr.constvars, *given}
  eqns = []
  for eqn in jaxpr.eqns:
    if not eqn.effects and all(isinstance(x, core.Literal) or x in known for x in eqn.invars):
      known.update(eqn.outvars)
      eqns.append(eqn)
  found = list(dict.fromkeys(x for x in wanted if not isinstance(x, core.Literal) and x in known and x not in given))
  return found, core.ClosedJaxpr(jaxpr.replace(invars=given, outvars=found, eqns=eqns), program.consts)


def _is_float(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(values: Sequence[Any]) -> list[Any]:
  return [x for x in values if _is_float(x)]


def _merged(values: Sequence[Any], floats: Sequence[Any], others: Iterable[Any]) -> list[Any]:
  """`floats` in the places of those `values` that are such, and what `others` has in the remaining places."""
  floats = iter(floats)
  return [next(floats) if _is_float(x) else other for x, other in zip(values, others)]


def _cut(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
  values = iter(values)
  return [list(itertools.islice(values, size)) for size in sizes]


def _buffer(aval: Any, *length: int) -> Any:
  """A stack [*length, ...] to be filled with such values, in their memory."""
  if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
    return jax.lax.empty((*length, *aval.shape), aval.dtype)
  zero = jax.device_put(jnp.zeros((), aval.dtype), aval.memory_space)
  split = [*(None for _ in length), *aval.sharding.spec]  # over explicit axes of a mesh
  sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*split)) if any(split) else None
  return jax.lax.broadcast(zero, (*length, *aval.shape), out_sharding=sharding)
