"""What newcomers get wrong with the wrappers on their own and with a stack: each is an error that says what would be right."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from tests.reference import A, Layer, make_variables

X = jnp.ones((2, 8))
KEY = jax.random.key(0)


class Step(nn.Module):
  """A layer for a loop of one's own: returns (carry, output)."""

  @nn.compact
  def __call__(self, x, scale=1.0):
    return jnp.tanh(nn.Dense(8)(x) * scale), x.sum()


def test_scan_has_the_keys_and_numbers_of_flax():
  flax = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0, length=3,
                 check_constancy_invariants=False)()
  variables = jax.jit(flax.init)(KEY, X, jnp.arange(3.0))
  loops = ls.scan(Step, 3, in_axes=0), ls.static_unroll(ls.remat(Step), 3, in_axes=0), ls.scan(Step, np.int64(3), in_axes=0)
  for mine in [loop() for loop in loops]:
    # Bit for bit as compiled programs; one by one, operations round by themselves.
    jax.tree.map(np.testing.assert_array_equal, jax.jit(mine.init)(KEY, X, jnp.arange(3.0)), variables)
    for got, want in zip(mine.apply(variables, X, jnp.arange(3.0)), flax.apply(variables, X, jnp.arange(3.0))):
      np.testing.assert_allclose(got, want, rtol=1e-6)
  composed = ls.scan(ls.remat(ls.offload_params(Step)), 3, param_axis=1, in_axes=0)()
  assert composed.init(KEY, X, jnp.arange(3.0))["params"]["Dense_0"]["kernel"].shape == (8, 3, 8)
  backwards = ls.scan(Step, 3, in_axes=0, reverse=True)().apply(variables, X, jnp.arange(3.0))
  unrolled = ls.static_unroll(Step, 3, in_axes=0, reverse=True)().apply(variables, X, jnp.arange(3.0))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), backwards, unrolled)


@pytest.mark.parametrize("loop", [ls.scan, ls.static_unroll])
@pytest.mark.parametrize("length", [2, 4])
def test_scanned_arguments_of_another_length(loop, length):
  with pytest.raises(ValueError, match=rf"must have 3 layers on axis 0, found shape \({length},\)"):
    loop(Step, 3, in_axes=0)().init(KEY, X, jnp.ones(length))


@pytest.mark.parametrize("options, error, message", [
    (dict(variable_axes={"params": 1}), ValueError, "the axis of 'params' is param_axis=0"),
    (dict(variable_axes="cache"), TypeError, "variable_axes must map filters"),
    (dict(split_rngs="params"), TypeError, "split_rngs must map filters"),
    (dict(param_axis="0"), TypeError, "param_axis must be an int"),
    (dict(reverse="yes"), TypeError, "reverse must be True or False"),
    (dict(unroll=0), ValueError, "unroll must be at least 1"),
    (dict(levels=(2, 2)), ValueError, "multiply to 4, not to length=3"),
    (dict(update=True), ValueError, "update needs a first argument that is scanned"),
])
def test_options_of_scan(options, error, message):
  with pytest.raises(error, match=message):
    ls.scan(Step, 3, **options)


@pytest.mark.parametrize("make, error, message", [
    (lambda: ls.static_unroll(Step, 3, reverze=True), TypeError, "no argument 'reverze'; did you mean 'reverse'"),
    (lambda: ls.static_unroll(Step, 3, unroll=2), TypeError, "takes no unroll"),
    (lambda: ls.scan(Step, 0), ValueError, "length must be at least 1"),
    (lambda: ls.remat(Layer, ls.RematPolicy(every=2)), ValueError, "remat wraps one layer"),
    (lambda: ls.remat(Layer, prevent_cse="no"), TypeError, "prevent_cse must be a bool"),
    (lambda: ls.remat(Layer, static_argnames="deterministc"), ValueError, "did you mean 'deterministic'"),
    (lambda: ls.remat(Layer, static_argnums=0), ValueError, "0 is the module itself"),
    (lambda: ls.remat(Layer, static_argnums=9), ValueError, "static_argnums: 9 is not the position"),
    (lambda: ls.offload_params(Layer, select="kernel"), TypeError, "select must be a function"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(A, 2), remat=ls.RematPolicy), TypeError, "makes policies and is none"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(A, 2), remat=jax.checkpoint_policies.save_only_these_names), TypeError,
     "call it, as in save_only_these_names"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(A, 2), offload_params=-5), ValueError, "cannot be negative"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(A, 2), barrier="lop"), ValueError, "did you mean 'loop'"),
    (lambda: ls.StackedDecoder(ls.Plan.homogeneous(A, 2), unrol=2), TypeError, "has no argument 'unrol'; did you mean 'unroll'"),
    (lambda: ls.RematPolicy(saves=["mlpwo"]), TypeError, "has no argument 'saves'; did you mean 'save'"),
    (lambda: ls.LayerSpec(Layer, widht=2), TypeError, "Layer has no argument 'widht'; did you mean 'width'"),
    (lambda: ls.RematPolicy(["mlpwo"]), TypeError, "names of values go into save="),
])
def test_wrong_construction(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_numpy_ints_are_ints():
  assert ls.RematPolicy(every=np.int64(2)) == ls.RematPolicy(every=2)
  assert ls.StackedDecoder(ls.Plan.homogeneous(A, np.int64(2)), param_axis=np.int64(1)).param_axis == 1


def test_variables_of_another_depth():
  deep = make_variables(ls.StackedDecoder(ls.Plan.homogeneous(A, 5), scan=False), X)
  with pytest.raises(ValueError, match="'layers_3' are there, but segment 'layers' has only 3 layers"):
    ls.StackedDecoder(ls.Plan.homogeneous(A, 3), scan=False).apply(deep, X)
  with pytest.raises(ValueError, match="expected 4 layers on axis 0, found shape .3.*another number of layers"):
    ls.StackedDecoder(ls.Plan.homogeneous(A, 4)).apply(make_variables(ls.StackedDecoder(ls.Plan.homogeneous(A, 3)), X), X)


@pytest.mark.parametrize("hidden", [None, "a", {"x": X, "y": "b"}], ids=["none", "text", "mixed"])
def test_hidden_states_that_are_no_arrays(hidden):
  with pytest.raises(TypeError, match="hidden states must be an array or a tree of arrays"):
    ls.StackedDecoder(ls.Plan.homogeneous(A, 2)).init(KEY, hidden)


class Around(nn.Module):
  @nn.compact
  def __call__(self, x):
    return ls.StackedDecoder(ls.Plan.homogeneous(A, 3), name="stack")(x)


@pytest.mark.parametrize("model", [
    Around(), ls.StackedDecoder(ls.Plan.homogeneous(A, 3)), ls.StackedDecoder(ls.Plan.homogeneous(A, 3), scan=False),
], ids=["inside", "scan", "apart"])
def test_parameters_without_their_collection(model):
  variables = make_variables(model, X)
  with pytest.raises(ValueError, match="no collection 'params' .*, but '(stack|layers|layers_0)'.*pass {\"params\": params}"):
    model.apply(variables["params"], X)
  assert model.apply(variables, X).shape == X.shape


@pytest.mark.parametrize("axis", [3, 5, -4])
def test_an_axis_that_no_parameter_has(axis):
  """Stacked kernels have three axes; biases of fewer axes have their layers last. In a loop in a loop there are four."""
  plan, message = ls.Plan.homogeneous(A, 3), rf"param_axis={axis} is an axis that no parameter has: .*give 0 to 2, or -1 to -3"
  stack = ls.StackedDecoder(plan, param_axis=axis)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(stack.init, KEY, X)
  with pytest.raises(ValueError, match=message):
    stack.apply(make_variables(ls.StackedDecoder(plan), X), X)
  assert jax.eval_shape(ls.StackedDecoder(plan, param_axis=2).init, KEY, X)["params"]["layers"]["gain"].shape == (3,)


def test_mistyped_shared_stream():
  stack = ls.StackedDecoder(ls.Plan.homogeneous(A, 2), shared_rngs=("dropuot",))
  variables = make_variables(ls.StackedDecoder(ls.Plan.homogeneous(A, 2)), X)
  with pytest.raises(ValueError, match="did you mean 'dropout'"):
    stack.apply(variables, X, rngs={"dropout": KEY})
  assert stack.apply(variables, X).shape == X.shape


def test_python_values_per_layer_need_layers_apart():
  class Moded(nn.Module):
    @nn.compact
    def __call__(self, x, mode):
      assert isinstance(mode, str)
      return x + (1 if mode == "a" else 2)

  plan = ls.Plan.homogeneous(ls.LayerSpec(Moded), 3)
  with pytest.raises(TypeError, match="must be arrays or numbers, not 'a'; scan=False"):
    ls.StackedDecoder(plan).apply({}, X, mode=ls.per_layer(["a", "b", "a"]))
  np.testing.assert_array_equal(ls.StackedDecoder(plan, scan=False).apply({}, X, mode=ls.per_layer(["a", "b", "a"])), X + 4)
