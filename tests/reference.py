"""What the stack is compared with: the same layers called in a plain Python loop over unstacked variables."""
import dataclasses

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import linen_stack as ls
from linen_stack.stacked import is_box, stacked_axis, value


class Layer(nn.Module):
  """A tagged pre-norm MLP layer with dropout, a scalar parameter and logical axes. x: [batch, width]."""

  width: int = 8
  hidden: int = 16
  scale: float = 1.0
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x, mask=None, *, deterministic=True):
    assert isinstance(deterministic, bool)
    x = checkpoint_name(x, "decoder_layer_input")
    h = nn.LayerNorm(use_bias=False)(x)
    partitioned = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    query = checkpoint_name(nn.Dense(self.width, kernel_init=partitioned)(h), "query_proj")
    context = checkpoint_name(jnp.tanh(query) * h, "context")
    out = checkpoint_name(nn.Dense(self.width)(context), "out_proj")
    h = checkpoint_name(nn.Dense(self.hidden, kernel_init=partitioned)(out), "mlpwi_0")
    h = nn.Dropout(self.dropout, deterministic=deterministic)(nn.gelu(h))
    h = checkpoint_name(nn.Dense(self.width)(h), "mlpwo")
    h = checkpoint_name(h * self.param("gain", nn.initializers.normal(), ()) + h, "quantization")
    return x + self.scale * (h if mask is None else h * mask)


def make_variables(stack, *args, seed=0, **kwargs):
  """Variables of a stack filled with small random numbers; compiling `init` would take longer than most tests."""
  shapes = jax.eval_shape(lambda: stack.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *args, **kwargs))
  shapes = {c: tree for c, tree in shapes.items() if c in ("params", "batch_stats", "cache")}
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    if path[0].key != "params":
      return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.asarray(rng.normal(0.3 if leaf.ndim < 2 else 0.0, 0.3, leaf.shape), leaf.dtype)

  variables = jax.tree_util.tree_map_with_path(fill, shapes)
  if isinstance(stack, ls.StackedDecoder) and stack.offload_params is not False and "params" in shapes:
    variables["params"] = jax.device_put(variables["params"], ls.host_shardings(stack, variables["params"]))
  return variables


def wide(tree):
  """The same numbers in float64, for tests with the fixture of that name."""
  return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


@dataclasses.dataclass
class Where:
  """Where a layer's variables stand in a stack's: path, and for each stacked axis (outermost last) its index."""

  path: tuple[str, ...]
  steps: list[int]


def where(plan, index):
  segment_name, step, position = plan.locate(index)
  segment = plan[segment_name]
  run = next(r for r in segment.runs if r.offset <= position < r.offset + r.count)
  steps = ([step] if segment.length > 1 else []) + ([position - run.offset] if run.count > 1 else [])
  return Where(segment.path(run), steps)


def take_layer(tree, plan, index, axis=0):
  """Variables of one layer, unboxed, from the collection tree of a stack (axis: the param axis, 0 for others)."""
  at = where(plan, index)
  for key in at.path:
    tree = tree.get(key, {}) if isinstance(tree, dict) else tree[key]

  def take(leaf):
    leaf = value(leaf)
    if jax.typeof(leaf).memory_space == jax.memory.Space.Host:  # JAX refuses to index those
      leaf = jax.device_put(leaf, jax.memory.Space.Device)
    for step in at.steps:  # the outer axis was added last, so it is taken out first
      # JAX would compile a program for each shape.
      leaf = (np if isinstance(leaf, np.ndarray) else jnp).take(leaf, step, axis=stacked_axis(axis, leaf.ndim))
    return leaf

  return jax.tree.map(take, tree, is_leaf=is_box)


def restacked(params, plan, axis):
  """Unboxed parameters of a stack with param axis 0, along another axis."""
  out = {}
  for segment in plan:
    for run in segment.runs:
      depth = len(segment.axes(run))

      def move(leaf):
        leaf = value(leaf)
        for outer in reversed(range(depth)):  # the innermost axis was added first
          leaf = jnp.moveaxis(leaf, outer, outer + stacked_axis(axis, leaf.ndim - outer))
        return leaf

      tree = params[segment.name][run.name] if segment.is_cycle else params[segment.name]
      moved = jax.tree.map(move, tree, is_leaf=is_box)
      if segment.is_cycle:
        out.setdefault(segment.name, {})[run.name] = moved
      else:
        out[segment.name] = moved
  return out


def layers_of(variables, plan, axis=0, scan=True):
  """One dict of variables per layer."""
  out = []
  for i in range(plan.num_layers):
    if scan:
      out.append({c: take_layer(tree, plan, i, axis if c == "params" else 0) for c, tree in variables.items()})
    else:
      segment = plan.locate(i).segment
      name = f"{segment}_{i - plan.offset(segment)}"
      out.append({c: jax.tree.map(value, tree[name], is_leaf=is_box) for c, tree in variables.items() if name in tree})
  return out


def module(spec):
  return spec.cls(**spec.kwargs)


def loop(plan, layers, x, *args, rngs=None, mutable=False, per_layer=None, **kwargs):
  """Calls each layer's module on its own variables; returns hidden states and a list of what each call returned beside."""
  outputs = []
  for i, (spec, variables) in enumerate(zip(plan.layers, layers)):
    own = {name: values[i] for name, values in (per_layer or {}).items()}
    result = module(spec).apply(variables, x, *args, **kwargs, **own, rngs=rngs[i] if rngs else None, mutable=mutable)
    state = None
    if mutable:
      result, state = result
    x, output = result if isinstance(result, tuple) else (result, None)
    outputs.append((output, state))
  return x, outputs


def assert_close(a, b, rtol=1e-6, atol=None):
  """Leaf for leaf, relative to the largest value of the leaf."""
  leaves_a, leaves_b = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
  assert [p for p, _ in leaves_a] == [p for p, _ in leaves_b]
  for (path, x), (_, y) in zip(leaves_a, leaves_b):
    x, y = np.asarray(x), np.asarray(y)
    assert x.shape == y.shape, (path, x.shape, y.shape)
    scale = max(np.abs(y).max(initial=0), np.abs(x).max(initial=0), 1e-3)
    assert np.abs(x - y).max(initial=0) <= (rtol * scale if atol is None else atol), (path, np.abs(x - y).max(), scale)


A = ls.LayerSpec(Layer, name="a")
B = ls.LayerSpec(Layer, name="b", scale=0.5, hidden=12)

PLANS = {
    "homogeneous": ls.Plan.homogeneous(A, 4),
    "prefix": ls.Plan.homogeneous(B, 2, "dense") + ls.Plan.homogeneous(A, 3),
    "one layer": ls.Plan.homogeneous(A, 1),
    "cycle": ls.Plan.cycle([A, A, B], 6),
    "cycle and remainder": ls.Plan.homogeneous(B, 1, "first") + ls.Plan.cycle([A, A, B, A], 11),
}
