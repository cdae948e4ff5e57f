"""A small layer with every tag of the reference layer, and plans of it, for tests of policies and reports."""
from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

import linen_stack as ls

BATCH, SEQ, EMBED, HEADS, DIM, MLP = 3, 5, 8, 2, 6, 7

# Shape of each tagged value in one layer.
SHAPES = {
    "decoder_layer_input": (BATCH, SEQ, EMBED),
    "query_proj": (BATCH, SEQ, HEADS, DIM),
    "key_proj": (BATCH, SEQ, 1, DIM),
    "value_proj": (BATCH, SEQ, 1, DIM),
    "context": (BATCH, SEQ, HEADS, DIM),
    "out_proj": (BATCH, SEQ, EMBED),
    "attention_out": (BATCH, SEQ, EMBED),
    "quantization": (BATCH, SEQ, EMBED),
    "mlpwi_0": (BATCH, SEQ, MLP),
    "mlpwi_1": (BATCH, SEQ, MLP),
    "mlpwo": (BATCH, SEQ, EMBED),
}


class TaggedLayer(nn.Module):
  """Attention and a gated MLP. `tag_input`: whether the layer tags the hidden states that enter it."""

  tag_input: bool = True
  prefix: str = ""

  def tag(self, x, name):
    return checkpoint_name(x, self.prefix + name)

  @nn.compact
  def __call__(self, x, mask=None, *, deterministic=True):
    dense = lambda features, name: nn.DenseGeneral(features, use_bias=False, name=name)
    x = self.tag(x, "decoder_layer_input") if self.tag_input else x
    h = x * self.param("scale", nn.initializers.ones, (EMBED,))
    query = self.tag(dense((HEADS, DIM), "query")(h), "query_proj")
    key = self.tag(dense((1, DIM), "key")(h), "key_proj")
    value = self.tag(dense((1, DIM), "value")(h), "value_proj")
    scores = jnp.einsum("bqhd,bkgd->bhqk", query, key)
    if mask is not None:
      scores = scores - jnp.exp(-mask)
    context = self.tag(jnp.einsum("bhqk,bkgd->bqhd", nn.softmax(scores), value), "context")
    out = self.tag(nn.DenseGeneral(EMBED, axis=(-2, -1), use_bias=False, name="out")(context), "out_proj")
    x = self.tag(x + out, "attention_out")
    h = self.tag(jnp.sin(x), "quantization")
    gate = self.tag(dense(MLP, "wi_0")(h), "mlpwi_0")
    up = self.tag(dense(MLP, "wi_1")(h), "mlpwi_1")
    down = self.tag(dense(EMBED, "wo")(nn.silu(gate) * up), "mlpwo")
    return x + jnp.tanh(down)  # what is only added would not be read by the backward pass, and so never be kept


def spec(name="layer", **kwargs):
  return ls.LayerSpec(TaggedLayer, name=name, **kwargs)


def plan(layout, **kwargs):
  """"flat": 4 layers; "cycle": (2 local + 1 global) twice and a remainder of 1; "prefix": 1 + 3."""
  local, other = spec("local", **kwargs), spec("global", **kwargs)
  return {
      "flat": lambda: ls.Plan.homogeneous(local, 4),
      "cycle": lambda: ls.Plan.cycle([local, local, other], 7),
      "prefix": lambda: ls.Plan.homogeneous(other, 1, "prefix") + ls.Plan.homogeneous(local, 3),
  }[layout]()


def abstract(stack, *args):
  """(x, variables) of a stack, as shapes."""
  x = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32)
  return x, jax.eval_shape(lambda x: stack.init(jax.random.key(0), x, *args), x)


def loss_of(stack):
  return lambda variables, x, *args: jnp.sum(stack.apply(variables, x, *args))
