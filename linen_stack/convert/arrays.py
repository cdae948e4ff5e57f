"""Values: rows of stacked leaves put together in another order, on the host, on devices, or as mere shapes.

    numpy, memory maps, readers    on the host: views where one row is taken, else one allocation of the result
    jax arrays                     under jit, with the result's sharding asked for, so that nothing is gathered
    jax arrays in host memory      on the host, never indexed by JAX, and put back into the memory that they came from
    ShapeDtypeStruct               the shape, with the sharding that an array would have

A reader is whatever has `shape`, `dtype` and basic indexing: it is asked for one layer at a time.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

Index = tuple[Any, ...]


class Stored(NamedTuple):
  """A leaf as it is stored: its value, the sizes of its stacked axes, and the order of its axes (`layout.order`)."""

  value: Any
  sizes: tuple[int, ...]
  dims: tuple[int, ...]

  @property
  def own_shape(self) -> tuple[int, ...]:
    """The shape of one layer's value."""
    return tuple(size for size, dim in zip(self.value.shape, self.dims) if dim >= len(self.sizes))

  def index(self, at: tuple[int, ...]) -> Index:
    """The basic index of one layer's value."""
    return tuple(at[dim] if dim < len(self.sizes) else slice(None) for dim in self.dims)


class Row(NamedTuple):
  """One layer's value in a stored leaf: `at` is its place on each stacked axis."""

  stored: Stored
  at: tuple[int, ...]


class Lazy:
  """A leaf of a converted tree, made when it is asked for.

  It has `shape` and `dtype`. `read()` makes the leaf; `blocks()` gives it layer by layer, for a writer that never holds
  more; `np.asarray` works as well.
  """

  def __init__(self, rows: Sequence[Row], axes: tuple[tuple[str, int], ...], dims: tuple[int, ...]):
    self.rows, self.axes, self.dims = tuple(rows), axes, dims
    sizes = tuple(size for _, size in axes)
    front = (*sizes, *rows[0].stored.own_shape)
    self.shape = tuple(front[dim] for dim in dims)
    self.dtype = rows[0].stored.value.dtype
    self._target = Stored(self, sizes, dims)

  @property
  def block_shape(self) -> tuple[int, ...]:
    """The extent of one layer's value in the leaf."""
    return tuple(1 if dim < len(self.axes) else size for size, dim in zip(self.shape, self.dims))

  @property
  def is_as_stored(self) -> bool:
    """Whether the leaf is one that is stored already, as it is."""
    first = self.rows[0].stored
    return _is_whole(self.rows) and (first.sizes, first.dims) == (self._target.sizes, self.dims)

  ndim = property(lambda self: len(self.shape))
  size = property(lambda self: math.prod(self.shape))
  nbytes = property(lambda self: self.size * self.dtype.itemsize)

  def __repr__(self) -> str:
    return f"Lazy(shape={self.shape}, dtype={np.dtype(self.dtype).name})"

  def read(self) -> Any:
    """The leaf: of the kind that its sources are."""
    return _assemble(self.rows, self.axes, self.dims)

  def blocks(self) -> Iterator[tuple[Index, np.ndarray]]:
    """(where, value) of one layer after the other: `leaf[where] = value` for all of them makes the leaf."""
    whole: dict[int, np.ndarray] = {}
    for at, row in zip(np.ndindex(*self._target.sizes), self.rows):
      source = row.stored.value
      if isinstance(source, jax.Array):
        source = whole.setdefault(id(source), np.asarray(source))
      yield self._target.index(at), np.asarray(source[row.stored.index(row.at)], self.dtype)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del copy
    return np.asarray(self.read(), dtype)

  def __getitem__(self, index: Any) -> np.ndarray:
    return np.asarray(self)[index]


def is_abstract(value: Any) -> bool:
  """Whether a leaf is a shape without values."""
  if isinstance(value, jax.Array):
    return False
  return isinstance(value, jax.ShapeDtypeStruct) or not hasattr(value, "__getitem__")


def same_bits(a: Any, b: Any) -> bool:
  """Whether two values are one and the same, bit for bit."""
  if a is b:
    return True
  if not hasattr(a, "shape") or not hasattr(b, "shape"):
    return type(a) is type(b) and a == b
  if a.shape != b.shape or a.dtype != b.dtype or is_abstract(a) != is_abstract(b):
    return False
  if any(isinstance(x, jax.core.Tracer) for x in (a, b)):
    return False
  if is_abstract(a):
    return True
  if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
    a, b = jax.random.key_data(a), jax.random.key_data(b)
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _assemble(rows: Sequence[Row], axes: tuple[tuple[str, int], ...], dims: tuple[int, ...]) -> Any:
  """The leaf with these stacked axes whose layers, in order, are `rows`."""
  sizes = tuple(size for _, size in axes)
  first = rows[0].stored
  values = [row.stored.value for row in rows]
  is_array = isinstance(first.value, (np.ndarray, jax.Array)) or is_abstract(first.value)
  if is_array and _is_whole(rows) and (first.sizes, first.dims) == (sizes, dims):
    return first.value
  sharding = _sharding(first, sizes, dims)
  if is_abstract(first.value):
    front = (*sizes, *first.own_shape)
    return jax.ShapeDtypeStruct(tuple(front[dim] for dim in dims), first.value.dtype, sharding=sharding)
  if any(isinstance(value, jax.Array) for value in values) and not any(map(_in_host_memory, values)):
    return _on_devices(rows, sizes, dims, sharding)
  made = _on_host(rows, sizes, dims)
  return jax.device_put(made, sharding) if isinstance(first.value, jax.Array) else made


def _is_whole(rows: Sequence[Row]) -> bool:
  """Whether the rows are all of one leaf's, in order."""
  stored = rows[0].stored
  return (len(rows) == math.prod(stored.sizes) and all(row.stored is stored for row in rows)
          and [row.at for row in rows] == list(np.ndindex(*stored.sizes)))


def _to_front(value: Any, stored: Stored) -> Any:
  """[*stacked axes, *own axes]."""
  return value.transpose([stored.dims.index(k) for k in range(len(stored.dims))])


# On the host ----------------------------------------------------------------------------------------------------------


def _on_host(rows: Sequence[Row], sizes: tuple[int, ...], dims: tuple[int, ...]) -> np.ndarray:
  first, host = rows[0].stored, {}
  for row in rows:
    value = row.stored.value
    if id(value) not in host:
      if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise ValueError(f"an array {value.shape} in {value.sharding.memory_kind} memory is spread over several "
                         "processes; move it to device memory before it is converted")
      host[id(value)] = np.asarray(value) if isinstance(value, jax.Array) else value
  if _is_whole(rows) and isinstance(host[id(first.value)], np.ndarray):
    front = _to_front(host[id(first.value)], first)
    return front.reshape(*sizes, *first.own_shape).transpose(dims)

  def take(row: Row) -> np.ndarray:
    value, index = host[id(row.stored.value)], row.stored.index(row.at)
    return value[(*index, ...)] if isinstance(value, np.ndarray) else np.asarray(value[index])

  if not sizes:
    return take(rows[0])
  front_shape = (*sizes, *first.own_shape)
  out = np.empty([front_shape[dim] for dim in dims], first.value.dtype)
  front = _to_front(out, Stored(out, sizes, dims))
  for at, row in zip(np.ndindex(*sizes), rows):
    front[at] = take(row)
  return out


def _in_host_memory(value: Any) -> bool:
  if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
    return False  # what is traced is converted where it is
  kind, devices = value.sharding.memory_kind, value.sharding.addressable_devices or value.sharding.device_set
  return kind is not None and kind != next(iter(devices)).default_memory().kind


# On devices -----------------------------------------------------------------------------------------------------------


def _on_devices(rows: Sequence[Row], sizes: tuple[int, ...], dims: tuple[int, ...], sharding: Any) -> jax.Array:
  sources = list({id(row.stored): row.stored for row in rows}.values())
  slots = {id(stored): slot for slot, stored in enumerate(sources)}
  wanted: list[list[tuple[int, ...]]] = [[] for _ in sources]
  for row in rows:
    wanted[slots[id(row.stored)]].append(row.at)
  takes = tuple(None if want == list(np.ndindex(*stored.sizes)) else tuple(np.array(want, np.int32).T)
                for want, stored in zip(wanted, sources))
  # The pieces stand source by source; where the rows alternate between sources they are put in order once more.
  starts, order = np.cumsum([0, *map(len, wanted)]), []
  for row in rows:
    slot = slots[id(row.stored)]
    order.append(int(starts[slot]))
    starts[slot] += 1
  order = None if order == list(range(len(rows))) else np.array(order, np.int32)
  shapes = tuple((stored.sizes, stored.dims) for stored in sources)
  values = [stored.value for stored in sources]
  if any(isinstance(value, jax.core.Tracer) for value in values):
    return _gather(shapes, sizes, dims, False, values, takes, order)
  mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
  if mesh is None or all(kind is AxisType.Auto for kind in mesh.axis_types):
    return _program(shapes, sizes, dims, sharding)(values, takes, order)
  # With explicit axes, indexing has to be told its sharding at every step; the compiler is asked to find them instead.
  auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
  with jax.set_mesh(auto):
    out = _program(shapes, sizes, dims, _in_mesh(sharding, auto))(
        [_rewrapped(value, auto) for value in values], takes, order)
  return _rewrapped(out, mesh)


@functools.lru_cache(maxsize=1024)
def _program(shapes: Any, sizes: tuple[int, ...], dims: tuple[int, ...], sharding: Any) -> Any:
  """The jitted conversion; which layers are taken is an argument, so that all layers of a leaf share a program."""
  # An array on one device stays there without being told, and stays uncommitted if it was.
  out = sharding if isinstance(sharding, NamedSharding) else None
  return jax.jit(functools.partial(_gather, shapes, sizes, dims, True), out_shardings=out)


def _gather(shapes: Any, sizes: tuple[int, ...], dims: tuple[int, ...], as_bits: bool, values: Sequence[jax.Array],
            takes: Sequence[Any], order: Any) -> jax.Array:
  pieces, dtype = [], values[0].dtype
  # Along a sharded layer axis the compiler adds up what each device has, with zeros elsewhere: integers keep every bit.
  bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}.get(dtype.itemsize)
  as_bits = as_bits and bits is not None and jnp.issubdtype(dtype, jnp.floating)
  for value, take, (of, stored_dims) in zip(values, takes, shapes):
    value = jax.lax.bitcast_convert_type(value, bits) if as_bits else jnp.asarray(value)
    front = _to_front(value, Stored(value, of, stored_dims))
    pieces.append(front.reshape(-1, *front.shape[len(of):]) if take is None else
                  front.at[take].get(mode="promise_in_bounds"))
  rows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
  rows = rows if order is None else rows.at[order].get(mode="promise_in_bounds")
  out = rows.reshape(*sizes, *rows.shape[1:]).transpose(dims)
  return jax.lax.bitcast_convert_type(out, dtype) if as_bits else out


def _in_mesh(sharding: NamedSharding, mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _rewrapped(value: Any, mesh: jax.sharding.Mesh) -> Any:
  """The same buffers as an array of a mesh of the same devices."""
  if not isinstance(value, jax.Array) or not isinstance(value.sharding, NamedSharding):
    return value
  return jax.make_array_from_single_device_arrays(
      value.shape, _in_mesh(value.sharding, mesh), [shard.data for shard in value.addressable_shards])


def _sharding(stored: Stored, sizes: tuple[int, ...], dims: tuple[int, ...]) -> Any:
  """The sharding of a converted leaf, or None where there is none to keep.

  A layer's own axes keep theirs; what the layers were spread over, they are spread over still, along the outermost axis
  whose size allows it.
  """
  if isinstance(stored.value, jax.core.Tracer):
    return None
  sharding = getattr(stored.value, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return sharding if isinstance(sharding, SingleDeviceSharding) else None
  parts = dict(zip(stored.dims, [*sharding.spec, *[None] * (len(stored.dims) - len(sharding.spec))]))
  front = [None] * len(sizes) + [parts[dim] for dim in range(len(stored.sizes), len(stored.dims))]
  of_layers = next((parts[k] for k in range(len(stored.sizes)) if parts[k] is not None), None)
  if of_layers is not None:
    names = of_layers if isinstance(of_layers, tuple) else (of_layers,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    k = next((k for k, size in enumerate(sizes) if size % devices == 0), None)
    front[:len(sizes)] = [of_layers if i == k else None for i in range(len(sizes))]
  return NamedSharding(sharding.mesh, PartitionSpec(*[front[dim] for dim in dims]), memory_kind=sharding.memory_kind)
