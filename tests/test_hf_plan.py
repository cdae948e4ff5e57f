"""Plans from Hugging Face configs: the published models, what each field means, and bad input."""
import functools

import pytest

from linen_stack.hf_plan import LayerKind, layer_kinds, plan_from_hf_config
from linen_stack.plan import LayerSpec


def shape(plan):
  """The plan as [(segment, [(run, layers)], repeats)]."""
  return [(s.name, [(run.name, run.count) for run in s.runs], s.length) for s in plan]


def labels(config):
  return [kind.label for kind in layer_kinds(config)]


def indices(config, **wanted):
  """The layers whose kind has these values."""
  return [i for i, kind in enumerate(layer_kinds(config))
          if all(getattr(kind, part) == value for part, value in wanted.items())]


# The fields of the published files that say something about layers, and some that do not.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
}
MISTRAL_7B = {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096}
MIXTRAL_8X7B = {
    "model_type": "mixtral", "num_hidden_layers": 32, "num_experts_per_tok": 2, "num_local_experts": 8,
    "sliding_window": None,
}
QWEN3_4B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "max_window_layers": 36, "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2_5_7B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "max_window_layers": 28, "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "sliding_window": None, "use_sliding_window": False,
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "mlp_only_layers": [],
    "linear_num_key_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
}
GEMMA_2_2B = {"model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}
GEMMA_3_1B = {
    "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6,
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
}
LLAMA_4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "no_rope_layers": [],
        "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_local_experts": 16,
    },
    "vision_config": {"num_hidden_layers": 34},
}
LLAMA_4_MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "interleave_moe_layer_step": 2,
        "moe_layers": list(range(1, 48, 2)), "no_rope_layers": [1, 1, 1, 0] * 12, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_local_experts": 128,
    },
}
SMOLLM3_3B = {
    "model_type": "smollm3", "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_hidden_layers": 36, "sliding_window": None,
    "use_sliding_window": False,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
    "num_local_experts": 32, "sliding_window": 128,
}
COMMAND_R7B = {"model_type": "cohere2", "num_hidden_layers": 32, "sliding_window": 4096, "sliding_window_pattern": 4}


@pytest.mark.parametrize("config, expected", [
    (LLAMA_3_8B, [("layers", [("full", 32)], 1)]),
    (MISTRAL_7B, [("layers", [("sliding", 32)], 1)]),
    (MIXTRAL_8X7B, [("layers", [("full_moe", 32)], 1)]),
    (QWEN3_4B, [("layers", [("full", 36)], 1)]),
    (QWEN2_5_7B, [("layers", [("full", 28)], 1)]),
    (QWEN3_30B_A3B, [("layers", [("full_moe", 48)], 1)]),
    (QWEN3_NEXT_80B, [("layers", [("linear_moe", 3), ("full_moe", 1)], 12)]),
    (GEMMA_2_2B, [("layers", [("sliding", 1), ("full", 1)], 13)]),
    (GEMMA_3_1B, [("layers", [("sliding", 5), ("full", 1)], 4), ("layers_remainder", [("sliding", 2)], 1)]),
    (GEMMA_3_27B, [("layers", [("sliding", 5), ("full", 1)], 10), ("layers_remainder", [("sliding", 2)], 1)]),
    (DEEPSEEK_V3, [("layers_prefix", [("full", 3)], 1), ("layers", [("full_moe", 58)], 1)]),
    (LLAMA_4_SCOUT, [("layers", [("chunked_moe", 3), ("full_moe_nope", 1)], 12)]),
    (LLAMA_4_MAVERICK,
     [("layers", [("chunked_0", 1), ("chunked_moe", 1), ("chunked_1", 1), ("full_moe_nope", 1)], 12)]),
    (SMOLLM3_3B, [("layers", [("full", 3), ("full_nope", 1)], 9)]),
    (GPT_OSS_20B, [("layers", [("sliding_moe", 1), ("full_moe", 1)], 12)]),
    (COMMAND_R7B, [("layers", [("sliding", 3), ("full_nope", 1)], 8)]),
], ids=["llama 3", "mistral", "mixtral", "qwen 3", "qwen 2.5", "qwen 3 moe", "qwen 3 next", "gemma 2", "gemma 3 1b",
        "gemma 3 27b", "deepseek v3", "llama 4 scout", "llama 4 maverick", "smollm3", "gpt-oss", "command r7b"])
def test_published_models(config, expected):
  plan = plan_from_hf_config(config)
  # A homogeneous segment's repeats are its layers.
  found = [(name, [(runs[0][0], length)], 1) if len(runs) == 1 else (name, runs, length)
           for name, runs, length in shape(plan)]
  assert found == expected
  text = config.get("text_config", config)
  assert plan.num_layers == text["num_hidden_layers"]


# Fields, one at a time.


def test_layer_types_are_the_rule_and_any_cycle_position_will_do():
  types = ["full_attention", "linear_attention", "linear_attention"] * 3 + ["full_attention"]
  config = {**QWEN3_NEXT_80B, "num_hidden_layers": 10, "full_attention_interval": None, "layer_types": types}
  assert [kind.attention for kind in layer_kinds(config)] == types
  assert {kind.mlp for kind in layer_kinds(config)} == {"moe"}


def test_layer_types_go_before_the_step_that_newer_files_keep_in_private():
  types = ["full_attention", "sliding_attention"] * 2
  config = {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 8, "layer_types": types,
            "_sliding_window_pattern": 6}
  assert [kind.attention for kind in layer_kinds(config)] == types


@pytest.mark.parametrize("field", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_every_nth_layer_is_full(field):
  assert indices({"num_hidden_layers": 11, field: 3}, attention="full_attention") == [2, 5, 8]
  assert indices({"num_hidden_layers": 11, field: 3}, attention="sliding_attention") == [0, 1, 3, 4, 6, 7, 9, 10]


def test_full_attention_interval():
  config = {**QWEN3_NEXT_80B, "num_hidden_layers": 10}
  assert indices(config, attention="full_attention") == [3, 7]
  assert shape(plan_from_hf_config(config)) == [
      ("layers", [("linear_moe", 3), ("full_moe", 1)], 2), ("layers_remainder", [("linear_moe", 1)], 2)]
  assert indices({**config, "full_attention_interval": 5}, attention="full_attention") == [4, 9]
  del config["full_attention_interval"]
  assert indices(config, attention="full_attention") == [3, 7]


def test_linear_attention_has_no_rotary_embedding():
  assert indices({**QWEN3_NEXT_80B, "num_hidden_layers": 8}, rope=True) == [3, 7]


def test_qwen_windows_start_at_max_window_layers():
  config = {**QWEN2_5_7B, "use_sliding_window": True, "max_window_layers": 21}
  assert indices(config, attention="sliding_attention") == list(range(21, 28))
  assert indices({**config, "use_sliding_window": None}, attention="sliding_attention") == []


def test_smollm3_windows_are_for_layers_without_rotary_embedding():
  config = {"model_type": "smollm3", "num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 64,
            "max_window_layers": 6}
  assert indices(config, attention="sliding_attention") == indices(config, rope=False) == [3, 7]
  assert indices({**config, "use_sliding_window": None}, attention="sliding_attention") == []


def test_no_rope_layers_has_a_one_where_rope_is_used():
  config = {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}
  assert indices(config, rope=True) == [0, 3]
  assert indices({**config, "no_rope_layer_interval": 4}, rope=True) == [0, 3]  # the list is the rule
  assert indices({**config, "no_rope_layers": [], "no_rope_layer_interval": 2}, rope=True) == [0, 2]
  assert indices({**config, "no_rope_layers": None, "no_rope_layer_interval": 2}, rope=True) == [0, 2]
  assert indices({"num_hidden_layers": 4}, rope=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("fields, moe", [
    ({}, []),
    ({"num_experts": 0}, []),
    ({"num_experts": None}, []),
    ({"num_experts": 4}, range(8)),
    ({"n_routed_experts": 4}, range(8)),
    ({"num_local_experts": 4, "num_experts": 4}, range(8)),
    ({"n_routed_experts": 4, "first_k_dense_replace": 3}, [3, 4, 5, 6, 7]),
    ({"n_routed_experts": 4, "first_k_dense_replace": 0}, range(8)),
    ({"n_routed_experts": 4, "first_k_dense_replace": 8}, []),
    ({"n_routed_experts": 4, "first_k_dense_replace": 3, "moe_layer_freq": 2}, [4, 6]),
    ({"n_routed_experts": None, "first_k_dense_replace": 3}, []),
    ({"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}, range(8)),
    ({"num_experts": 4, "decoder_sparse_step": 2}, [1, 3, 5, 7]),
    ({"num_experts": 4, "decoder_sparse_step": 3, "mlp_only_layers": [5]}, [2]),
    ({"num_experts": 4, "mlp_only_layers": [0, 7]}, [1, 2, 3, 4, 5, 6]),
    ({"num_experts": 0, "decoder_sparse_step": 1}, []),
    ({"mlp_only_layers": []}, []),
    ({"num_local_experts": 4, "interleave_moe_layer_step": 2}, [1, 3, 5, 7]),
    ({"num_local_experts": 4, "interleave_moe_layer_step": 1, "moe_layers": [2, 6]}, [2, 6]),
    ({"n_routed_experts": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}, [2, 3, 4, 5, 6, 7]),
    ({"n_routed_experts": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6, "first_k_dense_replace": 2},
     [2, 3, 4, 5, 6, 7]),
    ({"mlp_layer_types": ["dense"] * 8}, []),
])
def test_layers_with_experts(fields, moe):
  assert indices({"num_hidden_layers": 8, **fields}, mlp="moe") == list(moe)


def test_text_config_is_read_and_the_rest_is_not():
  config = {"num_hidden_layers": 4, "text_config": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
            "vision_config": {"num_hidden_layers": 27}, "first_k_dense_replace": 3}
  assert labels(config) == ["sliding", "full"] * 2


# Layers.


class Layer:
  """Stands in for a module class."""

  def __init__(self, name=None, window=None, scale=1.0):
    raise AssertionError("a plan makes no layers")


def test_layer_is_called_with_index_and_kind():
  calls = []

  def layer(index, kind):
    calls.append((index, kind))
    return LayerSpec(Layer, name=kind.mlp, window=64 if kind.attention == "sliding_attention" else None)

  plan = plan_from_hf_config({**GEMMA_3_1B, "num_hidden_layers": 8}, layer)
  assert calls == list(enumerate(layer_kinds({**GEMMA_3_1B, "num_hidden_layers": 8})))
  assert [spec.kwargs["window"] for spec in plan.layers] == [64] * 5 + [None] + [64] * 2
  assert plan.traced_layers == 3


def test_a_layer_that_uses_its_index_is_its_own_kind():
  plan = plan_from_hf_config({"num_hidden_layers": 4}, lambda i, kind: LayerSpec(Layer, scale=1 / (i // 2 + 1)))
  assert plan.traced_layers == 2


def test_without_layer_a_plan_can_be_shown_but_not_built():
  plan = plan_from_hf_config(DEEPSEEK_V3)
  assert "layers:58" in plan.table() and "61 layers, 2 traced" in plan.table()
  spec = plan.layers[-1]
  with pytest.raises(TypeError, match=r"layer 'full_moe' \(LayerKind.*'moe'.*Pass plan_from_hf_config\(config, layer="):
    spec.cls(name=spec.name, **spec.kwargs)


@pytest.mark.parametrize("kind, label", [
    (LayerKind("full_attention"), "full"),
    (LayerKind("sliding_attention", "moe"), "sliding_moe"),
    (LayerKind("chunked_attention", "dense", False), "chunked_nope"),
    (LayerKind("linear_attention", "moe", False), "linear_moe"),
])
def test_labels(kind, label):
  assert kind.label == label and len({kind, LayerKind(kind.attention, kind.mlp, kind.rope)}) == 1


# Bad input.


FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize("config, error, message", [
    ("config.json", TypeError, "config must be a dict, the content of config.json, not 'config.json'"),
    ({}, ValueError, "num_hidden_layers is missing"),
    ({"num_hidden_layer": 4}, ValueError, "num_hidden_layers is missing; did you mean 'num_hidden_layer'?"),
    ({"num_hidden_layers": "4"}, TypeError, "num_hidden_layers must be an int, not '4'"),
    ({"num_hidden_layers": True}, TypeError, "num_hidden_layers must be an int"),
    ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers must be at least 1, not 0"),
    ({"text_config": {"hidden_size": 3}}, ValueError, "text_config.num_hidden_layers is missing"),
    ({"text_config": "llama"}, TypeError, "text_config must be a dict, not 'llama'"),
    ({"num_hidden_layers": 5, "text_config": FOUR}, ValueError,
     "text_config.num_hidden_layers is 4, but the config around it says 5"),
    ({**FOUR, "layer_types": ["full_attention"] * 5}, ValueError,
     "layer_types has 5 entries, but num_hidden_layers is 4"),
    ({**FOUR, "layer_types": ["full_attention"] * 3 + ["slide_attention"]}, ValueError,
     r"layer_types\[3\] is 'slide_attention'; did you mean 'sliding_attention'\?"),
    ({**FOUR, "layer_types": ["full_attention"] * 3 + [None]}, ValueError, r"layer_types\[3\] is None"),
    ({**FOUR, "layer_types": "full_attention"}, TypeError, "layer_types must be a list with one entry per layer"),
    ({**FOUR, "layer_types": ["full_attention"] * 4, "full_attention_interval": 2}, ValueError,
     "full_attention_interval = 2 contradicts layer_types: layer 0 is 'full_attention' there"),
    ({**FOUR, "layer_types": ["sliding_attention"] * 4, "sliding_window_pattern": 4}, ValueError,
     "sliding_window_pattern = 4 contradicts layer_types: layer 3 is 'sliding_attention' there"),
    ({**FOUR, "layer_types": ["full_attention"] * 4, "sliding_window_pattern": "LLLG"}, TypeError,
     "sliding_window_pattern must be an int, not 'LLLG'"),
    ({**FOUR, "layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": None}, ValueError,
     "sliding_window is null, but layer_types has 'sliding_attention' at layer 3"),
    ({**FOUR, "layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None}, ValueError,
     "attention_chunk_size is null"),
    ({**FOUR, "layer_types": ["sliding_attention"] * 4, "sliding_window": 8, "use_sliding_window": False}, ValueError,
     "use_sliding_window is false, but layer_types has 'sliding_attention' at layer 0"),
    ({**FOUR, "sliding_window_pattern": 0}, ValueError, "sliding_window_pattern must be at least 1, not 0"),
    ({**FOUR, "sliding_window_pattern": 2, "sliding_window": None}, ValueError,
     "sliding_window is None, but some layers"),
    ({**FOUR, "full_attention_interval": 2.0}, TypeError, "full_attention_interval must be an int, not 2.0"),
    ({**QWEN2_5_7B, "use_sliding_window": True, "max_window_layers": None}, ValueError, "max_window_layers is missing"),
    ({**QWEN2_5_7B, "use_sliding_window": "yes"}, TypeError, "use_sliding_window must be true or false, not 'yes'"),
    ({**FOUR, "num_experts": 4, "mlp_only_layers": [0, 4]}, ValueError,
     "mlp_only_layers has layer 4, but the layers are 0 to 3"),
    ({**FOUR, "num_experts": 4, "mlp_only_layers": [-1]}, ValueError, "mlp_only_layers has layer -1"),
    ({**FOUR, "num_experts": 4, "mlp_only_layers": 2}, TypeError, "mlp_only_layers must be a list of layer indices"),
    ({**FOUR, "num_experts": 4, "mlp_only_layers": ["0"]}, TypeError, "mlp_only_layers must be .*'0' is none"),
    ({**FOUR, "num_experts": 4, "decoder_sparse_step": 0}, ValueError, "decoder_sparse_step must be at least 1, not 0"),
    ({**FOUR, "num_experts": -1}, ValueError, "num_experts must be at least 0, not -1"),
    ({**FOUR, "num_experts": 4, "num_local_experts": 8}, ValueError, "num_experts and num_local_experts differ"),
    ({**FOUR, "n_routed_experts": 4, "first_k_dense_replace": 5}, ValueError,
     "first_k_dense_replace is 5, but there are 4 layers"),
    ({**FOUR, "n_routed_experts": 4, "moe_layer_freq": [0, 1, 1, 1]}, TypeError, "moe_layer_freq must be an int"),
    ({**FOUR, "first_k_dense_replace": 2}, ValueError,
     "first_k_dense_replace gives layers experts, but their number is missing; give one of num_experts, n_routed_exp"),
    ({**FOUR, "decoder_sparse_step": 1}, ValueError, "decoder_sparse_step gives layers experts"),
    ({**FOUR, "mlp_layer_types": ["sparse"] * 4}, ValueError, "mlp_layer_types gives layers experts"),
    ({**FOUR, "num_experts": 0, "mlp_layer_types": ["sparse"] * 4}, ValueError,
     r"mlp_layer_types\[0\] contradicts the other fields: by them the layer is dense"),
    ({**FOUR, "num_experts": 4, "mlp_layer_types": ["dense"] * 4, "first_k_dense_replace": 3}, ValueError,
     r"mlp_layer_types\[3\] contradicts the other fields: by them the layer has experts"),
    ({**FOUR, "num_local_experts": 4, "moe_layers": [1, 9]}, ValueError, "moe_layers has layer 9"),
    ({**FOUR, "num_local_experts": 4, "interleave_moe_layer_step": 0}, ValueError,
     "interleave_moe_layer_step must be at least 1"),
    ({**FOUR, "no_rope_layers": [1, 1, 0]}, ValueError, "no_rope_layers has 3 entries, but num_hidden_layers is 4"),
    ({**FOUR, "no_rope_layers": [1, 1, 0, 2]}, ValueError, r"no_rope_layers\[3\] is 2; known: '0', '1'"),
    ({**FOUR, "no_rope_layers": []}, ValueError, "no_rope_layers is empty and there is no no_rope_layer_interval"),
    ({**FOUR, "no_rope_layer_interval": 0}, ValueError, "no_rope_layer_interval must be at least 1"),
    ({**FOUR, "hybrid_override_pattern": "M-M*"}, ValueError,
     "hybrid_override_pattern chooses .* use Plan.from_layers"),
    ({"text_config": {**FOUR, "attn_layer_period": 2}}, ValueError, "text_config.attn_layer_period chooses"),
])
def test_bad_configs(config, error, message):
  with pytest.raises(error, match=message):
    plan_from_hf_config(config)


def test_bad_layer_functions():
  with pytest.raises(TypeError, match=r"layer\(0, LayerKind.*\) must return a LayerSpec, not <class.*Layer"):
    plan_from_hf_config(FOUR, lambda index, kind: Layer)


@pytest.mark.parametrize("make, message", [
    (functools.partial(LayerKind, "full"), "attention 'full' is not a kind of layer"),
    (functools.partial(LayerKind, "full_attention", "sparse"),
     "mlp 'sparse' is not a kind of layer; known: 'dense', 'moe'"),
])
def test_bad_kinds(make, message):
  with pytest.raises(ValueError, match=message):
    make()
