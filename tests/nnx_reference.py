"""NNX layers, their Linen twins, and models of them without the time that making numbers takes."""
from flax import linen as nn
from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

import linen_stack as ls
from tests import interpret

WIDTH = 4


class Twin(nn.Module):
  """x: [batch, width]. The Linen twin of `Layer`."""

  hidden: int = 3

  @nn.compact
  def __call__(self, x, mask=None, *, deterministic=True):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    h = checkpoint_name(nn.Dense(self.hidden, kernel_init=init, name="up")(x), "mlpwi_0")
    h = nn.Dense(x.shape[-1], name="down")(jnp.tanh(h)) * self.param("gain", nn.initializers.ones, ())
    h = checkpoint_name(h, "mlpwo")
    return x + (h if mask is None else h * mask)


def linear(features, out, rngs, axes=None):
  names = {} if axes is None else {"kernel_metadata": {"out_sharding": axes, "eager_sharding": False}}
  return nnx.Linear(features, out, rngs=rngs, param_dtype=jnp.result_type(float), **names)


class Layer(nnx.Module):
  """A tagged MLP layer with a scalar parameter and logical axes. x: [batch, width]."""

  def __init__(self, hidden=3, *, rngs):
    self.up, self.down = linear(WIDTH, hidden, rngs, ("embed", "mlp")), linear(hidden, WIDTH, rngs)
    self.gain = nnx.Param(jnp.ones(()))

  def __call__(self, x, mask=None, *, deterministic=True):
    assert isinstance(deterministic, bool)
    h = checkpoint_name(self.up(x), "mlpwi_0")
    h = checkpoint_name(self.down(jnp.tanh(h)) * self.gain[...], "mlpwo")
    return x + (h if mask is None else h * mask)


class Stateful(nnx.Module):
  """All kinds of state: batch statistics, dropout's keys and counters, a scalar counter, sown values, adapters."""

  def __init__(self, *, rngs, rank=0, rate=0.5):
    self.linear, self.norm = linear(WIDTH, WIDTH, rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout, self.rngs = nnx.Dropout(rate, rngs=rngs), rngs
    self.calls, self.rank = nnx.Variable(jnp.zeros((), jnp.int32)), rank

  def __call__(self, x):
    self.calls[...] += 1
    y = self.dropout(self.linear(self.norm(x)))
    if self.rank:
      if not hasattr(self, "adapter"):
        self.adapter = nnx.LoRA(WIDTH, self.rank, WIDTH, rngs=self.rngs)
      y = y + self.adapter(x)
    if hasattr(self, "__captures__"):
      self.sow(nnx.Intermediate, "total", y.sum())
    return x + y


SIZES = {"a": 3, "b": 5, "c": 3}


def plan_of(names, layer=Layer, **options):
  """The plan of one letter a layer; layers of other letters are of other sizes."""
  return ls.Plan.from_layers([ls.LayerSpec(layer, name, hidden=SIZES[name]) for name in names], **options)


def abstract(plan, **options):
  """The variables of a `ScannedLayers` as shapes: making numbers would take longer than most tests."""
  return nnx.eval_shape(lambda: ls.nnx.ScannedLayers(plan, rngs=nnx.Rngs(0), **options))


def filled(model, seed=0):
  """A model of shapes, filled with small random numbers and with keys."""
  rng = np.random.default_rng(seed)
  for _, leaf in nnx.to_flat_state(nnx.state(model)):
    shape = leaf.get_value().shape
    if isinstance(leaf, nnx.RngKey):
      leaf.set_value(jax.random.split(jax.random.key(seed), shape))
    elif isinstance(leaf, nnx.Param):
      leaf.set_value(jnp.asarray(rng.normal(0.0, 0.4, shape), leaf.get_value().dtype))
    else:
      leaf.set_value(jnp.zeros(shape, leaf.get_value().dtype))
  return model


def called(model, *args, run=lambda model, *args, **kwargs: model(*args, **kwargs), **kwargs):
  """What a call returns, and the model after it; `model` itself stays. `model` may be a function that makes one.

  Interpreted: to compile a program takes longer than most tests.
  """
  graph, state = (None, None) if callable(model) and not isinstance(model, nnx.Module) else nnx.split(model)
  graphs = []

  def program(state, args):
    own = model() if graph is None else nnx.merge(graph, state, copy=True)
    result = run(own, *args, **kwargs)
    graph_after, state = nnx.split(own)
    graphs.append(graph_after)
    return result, state

  result, state = interpret.run(program, state, args)
  return result, nnx.merge(graphs[-1], jax.tree.map(jnp.asarray, state))


def params_of(model):
  return nn.unbox(ls.nnx.variables(model))["params"]


def loss_of(model, x, *args, **kwargs):
  """The loss as a function of the parameters, `{"params": ...}` as Linen has them."""
  graph, state = nnx.split(model)

  def loss(params):
    copy = nnx.merge(graph, state, copy=True)
    ls.nnx.update(copy, {"params": params})
    return (copy(x, *args, **kwargs) ** 2).sum()

  return loss

