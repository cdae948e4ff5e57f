"""Training a language model: state, optimiser, the one compiled step, and held-out bits per byte."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from linen_stack import placement
from linen_stack import text as text_lib
from linen_stack.config_sections import TrainConfig
from linen_stack.plan import Plan
from linen_stack.streaming import on_device

# State of training: {"variables": the model's variables, "optimizer": optax state, "step": [] int32, steps done}.
# With `offload_params`, parameters and what the optimiser keeps for them are in host memory; gradients come back there.
State = dict[str, Any]


def optimizer(config: TrainConfig, plan: Plan) -> optax.GradientTransformation:
  """AdamW with linear warm-up and a half cosine, gradients clipped by their global norm."""
  schedule = optax.warmup_cosine_decay_schedule(
      0.0, config.learning_rate, int(config.warmup * config.steps), config.steps,
      config.learning_rate * config.final_learning_rate)

  def is_matrix(params):
    def of_one_layer(path, leaf):
      place = placement.find(plan, placement.keys(path))
      return leaf.ndim - (0 if place is None else len(place.sizes)) >= 2

    return jax.tree_util.tree_map_with_path(of_one_layer, params)

  return optax.chain(
      optax.clip_by_global_norm(config.clip_norm),
      optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix))


def abstract_variables(model: nn.Module, seq: int = 8) -> Any:
  """The model's variables as shapes, boxed with their logical axes; nothing is allocated."""
  tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
  return jax.eval_shape(model.init, jax.random.key(0), tokens)


def abstract_state(model: nn.Module, tx: optax.GradientTransformation) -> State:
  """The shapes and dtypes of `init_state`, and the shardings where parameters are in host memory."""
  abstract = jax.eval_shape(lambda key: _init(model, tx.init, key), jax.random.key(0))
  if model.stack.offload_params is False:
    return abstract
  shardings = {name: placement.host_shardings(model.stack, tree) for name, tree in abstract.items()}
  return placement.with_shardings(abstract, shardings)


def init_state(model: nn.Module, tx: optax.GradientTransformation, seed: int) -> State:
  """A new model and optimiser. What belongs in host memory is made there, a layer at a time."""
  shardings = _shardings(model, tx)
  init = tx.init if shardings is None else on_device(tx.init, model.stack, out_shardings=shardings["optimizer"])
  return jax.jit(lambda key: _init(model, init, key), out_shardings=shardings)(jax.random.key(seed))


def host_bytes(state: State) -> int:
  """The size of what belongs in host memory."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
             if leaf.sharding is not None and leaf.sharding.memory_kind == placement.HOST)


def _shardings(model: nn.Module, tx: optax.GradientTransformation) -> State | None:
  """Where the state belongs; None: on the device, all of it."""
  if model.stack.offload_params is False:
    return None
  return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx))


def _init(model: nn.Module, init: Callable[[Any], Any], key: jax.Array) -> State:
  variables = nn.unbox(model.init(key, jnp.zeros((1, 8), jnp.int32)))
  # What layers sow anew in every call is no state.
  variables = {name: tree for name, tree in variables.items() if name != "losses"}
  return {"variables": variables, "optimizer": init(variables["params"]), "step": jnp.zeros((), jnp.int32)}


def train_step(model: nn.Module, tx: optax.GradientTransformation, seed: int) -> Callable[..., Any]:
  """The function (state, tokens [batch, seq + 1]) -> (state, loss in nats per byte), jitted; the state is donated.

  What layers sow in the collection `losses` is added to the loss that is trained on, not to the one that is returned.
  """

  def loss_fn(params, others, tokens, key):
    rngs = dict(zip(("dropout", "params"), jax.random.split(key)))  # `params` serves streams of other names
    logits, changed = model.apply({"params": params, **others}, tokens[:, :-1], deterministic=False, rngs=rngs,
                                  mutable=[*others, "losses"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    extra = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(changed.pop("losses", {})))
    return loss + extra, (loss, changed)

  def update(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  update = on_device(update, model.stack)

  def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    params = state["variables"]["params"]
    others = {name: tree for name, tree in state["variables"].items() if name != "params"}
    key = jax.random.fold_in(jax.random.key(seed), state["step"])
    grads, (loss, changed) = jax.grad(loss_fn, has_aux=True)(params, others, tokens, key)
    params, opt_state = update(params, state["optimizer"], grads)
    variables = {"params": params, **others, **changed}
    return {"variables": variables, "optimizer": opt_state, "step": state["step"] + 1}, loss

  shardings = _shardings(model, tx)
  return jax.jit(step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))


def held_out_bits(model: nn.Module, variables: Mapping[str, Any], held_out: np.ndarray, batch: int, seq: int,
                  progress: Callable[[int], None] = lambda done: None) -> float:
  """Bits per byte of `held_out` [bytes], every byte but the first predicted once from at most `seq` before it.

  `progress` is told how many bytes are done.
  """

  @jax.jit
  def nats(variables, tokens, weights):
    logits = model.apply(variables, tokens[:, :-1])
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

  total, done = 0.0, 0
  for tokens, weights in text_lib.windows(held_out, batch, seq):
    total += float(nats(variables, tokens, weights))
    done += int(weights.sum())
    progress(done)
  return total / (held_out.size - 1) / math.log(2)
