"""A mixture of experts: a router gives each token to a few experts, which are gated feed-forward maps.

No token is dropped and no expert is padded. The (token, expert) pairs are sorted by expert, so that each expert's
tokens are adjacent rows, and one grouped product (`jax.lax.ragged_dot`) multiplies every row by its own expert's
matrix alone. What that costs is up to the compiler: for a TPU as much as the chosen experts (libtpu 0.0.50; with 0.0.42
the gradient of the experts' matrices still costs as much as all of them), for a CPU as much as all of them.

Two routers, differing in what a score is: `sigmoid` (DeepSeek-V3, https://arxiv.org/abs/2412.19437) scores each expert
by itself, `softmax` (Switch, Mixtral, Qwen) against the others. Scores are float32.
"""
from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from linen_stack import sharding
from linen_stack.models.layers import DType, Projection, SwiGLU, require_count
from linen_stack.specs import nearest

Array = jax.Array

# Router -> the logarithms of its scores. Shares of scores are made from these, so that no sum of scores can be zero.
SCORES = {"softmax": nn.log_softmax, "sigmoid": nn.log_sigmoid}


class Router(nn.Module):
  """Chooses `top_k` of `num_experts` for each token: `[tokens, embed]` to (experts, weights), both `[tokens, top_k]`.

  The arguments are those of `MoE`.
  """

  num_experts: int
  top_k: int
  router: str
  normalize: bool
  scale: float
  groups: int
  top_groups: int
  score_bias: bool
  balance_weight: float
  param_dtype: DType

  @nn.compact
  def __call__(self, x: Array) -> tuple[Array, Array]:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "expert"))
    kernel = self.param("kernel", init, (x.shape[-1], self.num_experts), self.param_dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # Scores that lie close together decide which expert a token gets, so they are not left to a TPU's bfloat16 passes.
    logits = jnp.matmul(x.astype(wide), kernel.astype(wide), precision=lax.Precision.HIGHEST)
    log_scores = SCORES[self.router](logits)  # [tokens, experts]
    ranked = jnp.exp(log_scores)
    if self.score_bias:
      zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("expert",))
      # In less than float32 the small steps by which this bias is balanced would be lost.
      ranked += self.param("bias", zeros, (self.num_experts,), jnp.promote_types(self.param_dtype, jnp.float32))
    if self.top_groups < self.groups:
      ranked = self._only_top_groups(ranked)
    # Saved products of experts are in the order that this choice gave them. A backward pass that recomputed the choice,
    # and rounded two close scores the other way, would read them as other tokens' rows: so it can be saved as well.
    experts = checkpoint_name(lax.top_k(ranked, self.top_k)[1], "moe_routing")
    chosen = jnp.take_along_axis(log_scores, experts, axis=-1)
    weights = nn.softmax(chosen) if self.normalize else jnp.exp(chosen)
    if not self.is_initializing():
      self.sow("losses", "load_balance", self._load_balance(nn.softmax(log_scores), experts))
    return experts, weights * self.scale

  @nn.nowrap
  def _only_top_groups(self, ranked: Array) -> Array:
    """Minus infinity for experts outside the best groups. A group is worth the sum of its two best experts."""
    grouped = ranked.reshape(-1, self.groups, self.num_experts // self.groups)
    worth = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)  # [tokens, groups]
    best = lax.top_k(worth, self.top_groups)[1]
    chosen = nn.one_hot(best, self.groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(ranked.shape)

  @nn.nowrap
  def _load_balance(self, probabilities: Array, experts: Array) -> Array:
    """weight * experts * sum over experts of (share of all choices * mean share of a token's scores)."""
    share = jnp.bincount(experts.ravel(), length=self.num_experts) / experts.size
    return self.balance_weight * self.num_experts * jnp.sum(share * probabilities.mean(axis=0))


class Experts(nn.Module):
  """The experts' own maps of `tokens` `[tokens, embed]`, each by its `experts` `[tokens, top_k]`: `[tokens, top_k, embed]`.

  Under a mesh over which rules split the batch, every device sorts its own tokens: no token travels, and what a device
  lacks of the experts' matrices comes to it.
  """

  num_experts: int
  hidden: int
  dtype: DType
  param_dtype: DType

  @nn.compact
  def __call__(self, tokens: Array, experts: Array) -> Array:
    embed = tokens.shape[-1]
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0)
    names = {"wi_0": ("embed", "mlp"), "wi_1": ("embed", "mlp"), "wo": ("mlp", "embed")}
    sizes = {"embed": embed, "mlp": self.hidden}
    kernels = {name: self.param(name, nn.with_logical_partitioning(init, ("expert", *axes)),
                                (self.num_experts, *(sizes[axis] for axis in axes)), self.param_dtype).astype(self.dtype)
               for name, axes in names.items()}
    over = _batch_axes(tokens.shape[0])
    if not over:
      return self._apply(tokens, experts, kernels)
    # Of the kernels' own axes, those that the batch is split over are gathered inside, so that gradients are scattered.
    specs = {name: P(*(_among(axis, over) for axis in nn.logical_to_mesh_axes(("expert", *axes))))
             for name, axes in names.items()}

    def by_shard(tokens, experts, kernels):
      for name, spec in specs.items():
        for dim, axes in enumerate(spec):
          if axes:
            kernels[name] = lax.all_gather(kernels[name], axes, axis=dim, tiled=True)
      return self._apply(tokens, experts, kernels)

    return jax.shard_map(by_shard, in_specs=(P(over), P(over), specs), out_specs=P(over), axis_names=set(over),
                         check_vma=False)(tokens, experts, kernels)

  @nn.nowrap
  def _apply(self, tokens: Array, experts: Array, kernels: dict[str, Array]) -> Array:
    of_pair = experts.ravel()  # pair p is of token p // top_k
    order = jnp.argsort(of_pair, stable=True)
    sizes = jnp.bincount(of_pair, length=self.num_experts).astype(jnp.int32)
    project = lambda y, name: checkpoint_name(lax.ragged_dot(y, kernels[name], sizes), f"moe_mlp{name}")
    x = tokens[order // experts.shape[-1]].astype(self.dtype)
    y = project(nn.silu(project(x, "wi_0")) * project(x, "wi_1"), "wo")
    return y[jnp.argsort(order)].reshape(*experts.shape, -1)


def _batch_axes(count: int) -> tuple[str, ...]:
  """The axes of the mesh around that rules split a batch over, where they divide `count` tokens; () of none."""
  mesh, over = jax.sharding.get_abstract_mesh(), sharding.over("batch")
  return over if count % math.prod(mesh.shape[axis] for axis in over) == 0 else ()


def _among(axes: Any, over: tuple[str, ...]) -> tuple[str, ...] | None:
  return tuple(axis for axis in sharding.as_tuple(axes) if axis in over) or None


class MoE(nn.Module):
  """The mixture of experts in place of a dense feed-forward part: `[..., embed]` to the same shape.

  Variables: `router/kernel` `[embed, experts]`, `router/bias` `[experts]`; `experts/wi_0` and `experts/wi_1` `[experts,
  embed, hidden]`, `experts/wo` `[experts, hidden, embed]`; `shared/...` as `SwiGLU`, `shared_gate/kernel` `[embed, 1]`.

  Where the collection `losses` is mutable, the router sows `load_balance` into it: a scalar, `balance_weight` where
  experts are used evenly, `num_experts` times that where one is used alone. It is to be added to the loss; `total_loss`
  adds up those of a model. `init` does not sow.

  Values that a policy can name: `moe_mlpwi_0`, `moe_mlpwi_1`, `moe_mlpwo` (the experts' products, `[tokens * top_k,
  hidden or embed]`, sorted by expert), `moe_routing` (the choice of experts; a policy that saves one of the products
  should save it too, as presets do), and `mlpwi_0`, `mlpwi_1`, `mlpwo` of the shared expert. Under `jax.vmap`, JAX's
  grouped product needs the parameters to be mapped too: pass a batch instead.

  Args:
    num_experts: how many experts there are to choose from.
    hidden: width of an expert.
    top_k: how many experts a token gets.
    router: "softmax" or "sigmoid": what the scores are.
    normalize: the weights of a token's experts are scaled to the sum 1.
    scale: what the weights are multiplied by in the end.
    groups: the experts form this many groups of neighbours; a token's experts come from
    top_groups: so many of them.
    score_bias: a bias per expert that counts in the choice but not in the weights, so that no gradient reaches it:
      what trains it adds a little to experts that were used too seldom.
    shared_hidden: width of a further expert that every token gets. None: there is none.
    shared_gate: the shared expert is multiplied by a sigmoid of the token.
    balance_weight: what the load-balance loss is multiplied by. Without effect on the result.
    dtype: of the computation, but for the router.
    param_dtype: of the stored parameters; the score bias has float32 at least.

  Raises:
    TypeError, ValueError: on construction, for sizes that do not fit together.
  """

  num_experts: int
  hidden: int
  top_k: int
  router: str = "softmax"
  normalize: bool = True
  scale: float = 1.0
  groups: int = 1
  top_groups: int = 1
  score_bias: bool = False
  shared_hidden: int | None = None
  shared_gate: bool = False
  balance_weight: float = 0.01
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32

  def __post_init__(self):
    for argument in ("num_experts", "hidden", "top_k", "groups", "top_groups", "shared_hidden"):
      if argument != "shared_hidden" or self.shared_hidden is not None:
        require_count(f"MoE: {argument}", getattr(self, argument))
    if self.router not in SCORES:
      raise ValueError(f"MoE: unknown router {self.router!r}; {nearest(str(self.router), SCORES)}")
    if self.num_experts % self.groups:
      raise ValueError(f"MoE: num_experts {self.num_experts} is not a multiple of groups {self.groups}")
    if self.top_groups > self.groups:
      raise ValueError(f"MoE: top_groups {self.top_groups} is more than there are groups, {self.groups}")
    choice = self.num_experts // self.groups * self.top_groups
    if self.top_k > choice:
      raise ValueError(f"MoE: top_k {self.top_k} is more than the {choice} experts that a token can choose from "
                       f"({self.num_experts} experts, {self.top_groups} of {self.groups} groups)")
    if self.shared_gate and self.shared_hidden is None:
      raise ValueError("MoE: shared_gate=True gates a shared expert; give its width, shared_hidden")
    if not 0 <= self.balance_weight < math.inf:
      raise ValueError(f"MoE: balance_weight must be a finite number of at least 0, not {self.balance_weight}")
    super().__post_init__()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    dtypes = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    tokens = x.reshape(-1, x.shape[-1])
    router = Router(self.num_experts, self.top_k, self.router, self.normalize, self.scale, self.groups, self.top_groups,
                    self.score_bias, self.balance_weight, self.param_dtype, name="router")
    experts, weights = router(tokens)

    y = Experts(self.num_experts, self.hidden, name="experts", **dtypes)(tokens, experts)
    y = jnp.einsum("tke,tk->te", y.astype(weights.dtype), weights).astype(self.dtype)

    if self.shared_hidden is not None:
      shared = SwiGLU(self.shared_hidden, name="shared", **dtypes)(tokens)
      if self.shared_gate:
        shared *= nn.sigmoid(Projection((1,), ("embed", None), name="shared_gate", **dtypes)(tokens))
      y += shared
    return y.reshape(x.shape)


def total_loss(losses: Mapping[str, Any]) -> Array:
  """The sum of all values in a collection `losses`, over every layer of a stack: `[]`, float32 at least."""
  return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(losses)), jnp.zeros((), jnp.float32))
