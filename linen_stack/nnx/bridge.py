"""Linen layers as NNX layers: what `ScannedLayers` needs to stack the plan of a `StackedDecoder`."""
from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from linen_stack.lifting import is_array
from linen_stack.plan import Plan, Segment
from linen_stack.specs import LayerSpec


def bridged(plan: Plan | Segment, x: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Plan:
  """The plan of NNX layers for a plan of Linen layers: each a `nnx.bridge.ToNNX`, with the same tree of variables.

  Example::

    plan = ls.Plan.homogeneous(ls.LayerSpec(ls.models.DecoderLayer, embed=64, mlp=256, num_heads=4), 12)
    model = ls.nnx.ScannedLayers(ls.nnx.bridged(plan, jnp.zeros((1, 8, 64))), rngs=nnx.Rngs(0))

  Args:
    plan: the plan of Linen layers.
    x, *args, **kwargs: arguments of a layer's call, from which it learns the shapes of its variables; only shapes and
      dtypes of arrays count.
    mutable: the collections that layers change when they are called, as in `nn.Module.apply`: caches, batch statistics.
  """
  plan = Plan.of(plan) if isinstance(plan, Segment) else plan
  leaves, treedef = jax.tree.flatten(((x, *args), kwargs))
  sample = _Sample(treedef, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
                                  for leaf in leaves))
  mutable = tuple(mutable) if isinstance(mutable, (list, set)) else mutable
  bridge = lambda spec: LayerSpec(Bridged(spec.cls, sample, mutable), spec.label, **spec.kwargs)
  return Plan(tuple(Segment(s.name, tuple(map(bridge, s.block)), s.length) for s in plan))


@dataclasses.dataclass(frozen=True)
class _Sample:
  """Arguments of a call, by their shapes."""

  treedef: Any
  leaves: tuple[Any, ...]

  def arrays(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    return self.treedef.unflatten([jnp.zeros(leaf.shape, leaf.dtype) if is_shape(leaf) else leaf for leaf in self.leaves])


@dataclasses.dataclass(frozen=True)
class Bridged:
  """Makes the NNX layers of a Linen class, `func`."""

  func: Callable[..., Any]
  sample: _Sample
  mutable: Any

  @property
  def __name__(self) -> str:
    return getattr(self.func, "__name__", type(self.func).__name__)

  def __call__(self, *, rngs: nnx.Rngs, **kwargs: Any) -> nnx.Module:
    args, options = self.sample.arrays()
    # The names of axes are those of the layers; which axes of a mesh they are is for rules to say, and later.
    with nnx.use_eager_sharding(False):
      return LinenLayer(self.func(**kwargs), rngs=rngs, mutable=self.mutable).lazy_init(*args, **options)


class LinenLayer(nnx.bridge.ToNNX):
  """`nnx.bridge.ToNNX` that knows which collections its calls may change."""

  def __init__(self, module: Any, rngs: nnx.Rngs, mutable: Any):
    super().__init__(module, rngs=rngs)
    self.to_nnx__mutable = mutable

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    with nnx.use_eager_sharding(False):
      return super().__call__(*args, **{"mutable": self.to_nnx__mutable, **kwargs})
