"""Rotary embeddings: published scalings, the rotation as complex numbers, and what configs say."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linen_stack.models import rope

# (features, base, scaling, rates, attention factor), the last two by the reference implementation, in float32.
SCALED = {
    "llama 3.1": (16, 500000.0, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192},
                  [1, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-05, 6.64787e-06, 1.289173e-06], 1),
    "gemma 3": (12, 1000000.0, {"rope_type": "linear", "factor": 8.0},
                [0.125, 0.0125, 0.00125, 0.000125, 1.25e-05, 1.25e-06], 1),
    "deepseek v3": (16, 10000.0, {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                  "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
                    [1, 0.3162278, 0.1, 0.02391472, 0.005125, 0.0008498622, 2.5e-05, 7.905694e-06], 1),
    "yarn": (16, 10000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
             [1, 0.2569351, 0.0625, 0.01383497, 0.0025, 0.0007905695, 0.00025, 7.905695e-05], 1.138629),
    "yarn, untruncated": (16, 100000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
                                         "truncate": False, "beta_fast": 16, "beta_slow": 2},
                          [1, 0.2371374, 0.03087386, 0.003333804, 0.0007905695, 0.0001874735, 4.445699e-05,
                           1.054241e-05], 1.138629),
    "yarn, given factor": (8, 10000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                                        "attention_factor": 1.3}, [1, 0.0625, 0.0025, 0.00025], 1.3),
    "yarn, two mscales": (8, 10000.0, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64,
                                       "mscale": 0.7, "mscale_all_dim": 1.2},
                          [1, 0.053125, 0.000625, 6.25e-05], 0.8959793),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_frequencies_are_the_published_ones(case):
  dim, theta, scaling, rates, factor = SCALED[case]
  ours, attention = rope.frequencies(dim, theta, scaling)
  np.testing.assert_allclose(ours, rates, rtol=2e-6)
  assert attention == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": None}], ids=str)
def test_unscaled_frequencies(scaling):
  rates, factor = rope.frequencies(8, 10000.0, scaling)
  np.testing.assert_allclose(rates, [1, 0.1, 0.01, 0.001])
  assert factor == 1


@pytest.mark.parametrize("arguments, match", [
    ((7, 1e4), "needs an even number of features, not 7"),
    ((8, 0.0), "rope_theta must be above 0, not 0.0"),
    ((8, 1e4, {"rope_type": "longrope"}), "rope_type 'longrope' is not available; known: 'default', 'linear'"),
    ((8, 1e4, {"rope_type": "lama3"}), "did you mean 'llama3'"),
    ((8, 1e4, {"rope_type": "linear", "type": "yarn"}), "rope_type and type differ: 'linear' and 'yarn'"),
    ((8, 1e4, {"factor": 2.0}), "rope_type 'default' has no key 'factor'"),
    ((8, 1e4, {"rope_type": "linear"}), "rope_type 'linear' needs factor"),
    ((8, 1e4, {"rope_type": "linear", "factor": 0}), "factor of rope_type 'linear' must be a number above 0, not 0"),
    ((8, 1e4, {"rope_type": "linear", "factor": "2"}), "must be a number above 0, not '2'"),
    ((8, 1e4, {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "beta_fats": 1}),
     "has no key 'beta_fats'; did you mean 'beta_fast'"),
    ((8, 1e4, {**SCALED["llama 3.1"][2], "high_freq_factor": 1.0}),
     "high_freq_factor 1.0 must be above low_freq_factor 1.0"),
])
def test_bad_scalings(arguments, match):
  with pytest.raises(ValueError, match=match):
    rope.frequencies(*arguments)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 12], ids=["whole heads", "a part of each head"])
def test_rotation_is_that_of_complex_numbers(dim, interleaved):
  x = jax.random.normal(jax.random.key(0), (2, 5, 3, dim))
  positions = jnp.array([[0, 1, 2, 3, 4], [7, 9, 3, 0, 1]])
  rates, _ = rope.frequencies(8, 100.0)
  out = np.asarray(rope.rotate(x, positions, rates, interleaved, scale=1.5))
  pairs = np.asarray(x)[..., :8].reshape(2, 5, 3, *((4, 2) if interleaved else (2, 4)))
  first, second = (pairs[..., 0], pairs[..., 1]) if interleaved else (pairs[..., 0, :], pairs[..., 1, :])
  turned = 1.5 * (first + 1j * second) * np.exp(1j * np.asarray(positions)[..., None, None] * rates)
  expected = np.stack([turned.real, turned.imag], -1 if interleaved else -2).reshape(2, 5, 3, 8)
  np.testing.assert_allclose(out[..., :8], expected, atol=1e-5)
  np.testing.assert_array_equal(out[..., 8:], x[..., 8:])


def test_angles_are_float32_and_the_result_has_the_dtype_of_x():
  x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  out = rope.rotate(x, jnp.array([[1001]]), np.array([1.0]))  # 1001 is no bfloat16
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32)[0, 0, 0],
                             [np.cos(1001) - np.sin(1001), np.sin(1001) + np.cos(1001)], atol=1e-2)


LLAMA3 = {key: value for key, value in SCALED["llama 3.1"][2].items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize("config, expected", [
    ({}, (10000.0, None, 1.0)),
    ({"rope_theta": 5, "rope_scaling": None, "partial_rotary_factor": 0.25}, (5.0, None, 0.25)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}}, (7.0, None, 0.5)),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 6.0}, (6.0, None, 1.0)),
    ({"rope_theta": 2.0, "rope_scaling": {"type": "linear", "factor": 4}}, (2.0, {"type": "linear", "factor": 4}, 1.0)),
    ({"rope_scaling": LLAMA3, "max_position_embeddings": 64},
     (10000.0, {**LLAMA3, "original_max_position_embeddings": 64}, 1.0)),
    ({"rope_scaling": LLAMA3, "max_position_embeddings": 64, "original_max_position_embeddings": 32},
     (10000.0, {**LLAMA3, "original_max_position_embeddings": 32}, 1.0)),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0}, "sliding_attention": None}},
     (3.0, None, 1.0)),
])
def test_what_configs_say(config, expected):
  assert rope.from_config(config, "full_attention") == expected


@pytest.mark.parametrize("config, error, match", [
    ({"rope_scaling": 3}, TypeError, "rope_scaling must be a dict, not 3"),
    ({"rope_scaling": {"rope_type": "linear"}}, ValueError, "rope_scaling: rope_type 'linear' needs factor"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, ValueError,
     "rope_parameters has no entry for 'full_attention'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, ValueError,
     "rope_parameters.full_attention: rope_type 'linear' needs factor"),
    ({"rope_scaling": LLAMA3}, ValueError, "needs original_max_position_embeddings"),
])
def test_what_configs_cannot_say(config, error, match):
  with pytest.raises(error, match=match):
    rope.from_config(config, "full_attention")
