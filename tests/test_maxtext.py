"""MaxText configs: the fields of published ones, what each field becomes, and bad input."""
import enum

from absl import logging
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from linen_stack.config import StackConfig
from linen_stack.maxtext import LayerKind, TENSORS, translate
from linen_stack.models import families
from linen_stack.plan import LayerSpec
from linen_stack.policies import RematPolicy

# What the published model files say, without comments.
LLAMA3_8B = {
    "base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 8, "base_num_decoder_layers": 32,
    "base_mlp_dim": 14336, "head_dim": 128, "mlp_activations": ["silu", "linear"], "vocab_size": 128256,
    "enable_dropout": False, "logits_via_embedding": False, "normalization_layer_epsilon": 1.0e-5,
    "rope_max_timescale": 500_000, "decoder_block": "llama2",
}
QWEN3_4B = {
    "base_emb_dim": 2560, "base_num_query_heads": 32, "base_num_kv_heads": 8, "base_mlp_dim": 9728,
    "base_num_decoder_layers": 36, "head_dim": 128, "mlp_activations": ["silu", "linear"], "vocab_size": 151936,
    "decoder_block": "qwen3", "normalization_layer_epsilon": 1.0e-6, "rope_max_timescale": 1000000, "use_qk_norm": True,
    "logits_via_embedding": True, "normalize_embedding_logits": False, "enable_dropout": False,
    "tokenizer_type": "huggingface",
}
GEMMA3_27B = {
    "base_num_decoder_layers": 62, "base_emb_dim": 5376, "base_num_query_heads": 32, "base_num_kv_heads": 16,
    "base_mlp_dim": 21504, "head_dim": 128, "mlp_activations": ["gelu", "linear"], "vocab_size": 262_144,
    "decoder_block": "gemma3", "normalization_layer_epsilon": "1e-6", "logits_via_embedding": True,
    "sliding_window_size": 1024, "use_post_attn_norm": True, "use_post_ffw_norm": True,
    "local_rope_max_timescale": 10_000, "rope_max_timescale": 1_000_000,
}
DEEPSEEK3 = {
    "base_emb_dim": 7168, "base_num_query_heads": 128, "base_num_kv_heads": 128, "base_mlp_dim": 18432,
    "base_moe_mlp_dim": 2048, "base_num_decoder_layers": 61, "first_num_dense_layers": 3, "vocab_size": 129280,
    "num_experts": 256, "num_experts_per_tok": 8, "shared_experts": 1, "decoder_block": "deepseek",
    "attention_type": "mla", "q_lora_rank": 1536, "v_head_dim": 128, "rope_type": "yarn",
}
DEEPSEEK_CUSTOM = {
    **DEEPSEEK3, "base_num_decoder_layers": 6, "first_num_dense_layers": 1, "engram_layers": [1, 4],
    "engram_num_heads": 8,
}
LLAMA4_MAVERICK = {
    "base_num_decoder_layers": 48, "base_emb_dim": 5120, "decoder_block": "llama4", "num_experts": 128,
    "interleave_moe_layer_step": 2, "nope_layer_interval": 4, "inhomogeneous_layer_cycle_interval": 4,
}
TINY = {"num_decoder_layers": 4, "emb_dim": 32, "mlp_dim": 64, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 64}


class Layer(nn.Module):
  """A layer of a user's own."""

  embed: int
  kind: str = "dense"
  widths: tuple[int, ...] = ()
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(self.embed, dtype=self.dtype)(x)


def by_kind(index, kind):
  del index
  return LayerSpec(Layer, name=kind.label, kind=kind.label)


def shape(config):
  """The plan as [(segment, [(run, layers)], repeats)]."""
  return [(s.name, [(run.name, run.count) for run in s.runs], s.length) for s in config.plan()]


def kinds_of(config):
  """The kinds that `layer` is called with, in order."""
  kinds = []

  def layer(index, kind):
    assert index == len(kinds)
    kinds.append(kind)
    return by_kind(index, kind)

  translate(config, layer)
  return kinds


def labels_of(config):
  return [kind.label for kind in kinds_of(config)]


# Published models.


def test_llama3_8b_is_the_reference_layer():
  config = StackConfig.from_maxtext(LLAMA3_8B)
  plan, stack = config.build()
  assert [(s.name, s.length) for s in plan] == [("layers", 32)] and plan.traced_layers == 1
  args = plan.layers[0].kwargs
  assert {name: args[name] for name in ("embed", "mlp", "num_heads", "num_kv_heads", "head_dim", "rope_theta")} == {
      "embed": 4096, "mlp": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 500_000.0}
  assert (args["norm_eps"], args["dropout"], args["qk_norm"]) == (1e-5, 0.0, False)
  assert (args["dtype"], args["param_dtype"]) == (jnp.bfloat16, jnp.float32)
  assert (config.model.vocab, config.model.embed, config.model.tie_embeddings) == (128256, 4096, False)
  # What MaxText does where its config is silent.
  assert (stack.remat, stack.scan, stack.param_axis, stack.offload_params) == (RematPolicy("full"), True, 1, False)


def test_qwen3_4b_has_norms_of_queries_and_keys_and_tied_embeddings():
  config = StackConfig.from_maxtext(QWEN3_4B)
  assert config.plan().layers[0].kwargs["qk_norm"] and config.model.tie_embeddings
  assert translate(QWEN3_4B).ignored == ("tokenizer_type",)


@pytest.mark.parametrize("config, expected", [
    (DEEPSEEK3, [("layers_prefix", [("dense", 3)], 1), ("layers", [("moe", 58)], 1)]),
    (DEEPSEEK_CUSTOM, [("layers_0", [("dense", 1)], 1), ("layers_1", [("moe_engram", 1)], 1),
                       ("layers", [("moe", 2)], 1), ("layers_3", [("moe_engram", 1)], 1),
                       ("layers_4", [("moe", 1)], 1)]),
    (LLAMA4_MAVERICK, [("layers", [("dense_0", 1), ("moe_1", 1), ("dense_2", 1), ("moe_3", 1)], 12)]),
], ids=["deepseek 3", "engrams", "llama 4 maverick"])
def test_published_models_with_layers_of_many_kinds(config, expected):
  found = [(name, [(runs[0][0], length)], 1) if len(runs) == 1 else (name, runs, length)
           for name, runs, length in shape(StackConfig.from_maxtext(config, by_kind))]
  assert found == expected


def test_gemma3_27b_has_a_cycle_of_its_own_and_a_remainder():
  def layer(index, kind):
    assert kind.position == index % 6
    return LayerSpec(Layer, "full" if kind.position == 5 else "sliding")

  config = StackConfig.from_maxtext(GEMMA3_27B, layer)
  assert shape(config) == [("layers", [("sliding", 5), ("full", 1)], 10), ("layers_remainder", [("sliding", 1)], 2)]
  assert config.model.norm_eps == 1e-6 and config.plan().num_layers == 62


# Kinds.


@pytest.mark.parametrize("config, labels", [
    ({"num_decoder_layers": 3}, ["dense"] * 3),
    ({"num_decoder_layers": 3, "num_experts": 1}, ["dense"] * 3),
    ({"num_decoder_layers": 3, "num_experts": 8}, ["moe"] * 3),
    ({"num_decoder_layers": 3, "decoder_block": "deepseek"}, ["moe"] * 3),
    ({"num_decoder_layers": 3, "first_num_dense_layers": 1}, ["dense", "moe", "moe"]),
    ({"num_decoder_layers": 2, "first_num_dense_layers": 2}, ["dense"] * 2),
    ({"num_decoder_layers": 4, "num_experts": 8, "interleave_moe_layer_step": 2}, ["dense", "moe"] * 2),
    ({"num_decoder_layers": 4, "inhomogeneous_layer_cycle_interval": 2}, ["dense_0", "dense_1"] * 2),
    ({"num_decoder_layers": 5, "inhomogeneous_layer_cycle_interval": 2, "num_experts": 8, "first_num_dense_layers": 1},
     ["dense_0", "moe_1", "moe_0", "moe_1", "moe_0"]),
    ({"num_decoder_layers": 4, "decoder_block": "gpt_oss"}, ["dense_0", "dense_1"] * 2),
    ({"num_decoder_layers": 4, "decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": 4},
     ["dense_0", "dense_1"] * 2),
    ({"num_decoder_layers": 3, "engram_layers": [0, 2]}, ["dense_engram", "dense", "dense_engram"]),
    ({"num_decoder_layers": 3, "engram_layers": None}, ["dense"] * 3),
    ({"num_decoder_layers": 2, "decoder_block": "block_of_a_fork"}, ["dense"] * 2),
])
def test_kinds(config, labels):
  assert labels_of(config) == labels


def test_a_kind_can_be_taken_apart():
  assert kinds_of({**LLAMA4_MAVERICK, "engram_layers": [5]})[5] == LayerKind("moe", 1, True)


# Fields of the stack.


def stack_of(**fields):
  return StackConfig.from_maxtext({**TINY, **fields}).stack


@pytest.mark.parametrize("name", [name for name in RematPolicy.presets()])
def test_presets_have_the_same_names(name):
  assert stack_of(remat_policy=name).remat == name


def test_an_older_name_of_a_preset():
  assert stack_of(remat_policy="minimal_flash").remat == "minimal_with_context"


@pytest.mark.parametrize("fields, policy", [
    ({}, RematPolicy("full")),
    ({"context": "remat", "mlpwo": "remat"}, RematPolicy("full")),
    ({"query_proj": "device", "key_proj": "device"}, RematPolicy(save=["query_proj", "key_proj"])),
    ({"query_proj": "offload", "out_proj": "device"}, RematPolicy(save=["out_proj"], offload=["query_proj"])),
    ({"decoder_layer_input": "device"}, RematPolicy(carry="save")),
    ({"decoder_layer_input": "remat"}, RematPolicy(carry="save")),
    ({"decoder_layer_input": "offload"}, RematPolicy(carry="offload")),
    ({"decoder_layer_input": "offload", "context": "device"}, RematPolicy(save=["context"], carry="offload")),
    ({"a_new_tensor": "offload"}, RematPolicy(offload=["a_new_tensor"])),
    ({"context": enum.Enum("Place", {"DEVICE": "device"}).DEVICE}, RematPolicy(save=["context"])),
])
def test_custom_policies(fields, policy):
  _, stack = StackConfig.from_maxtext({**TINY, "remat_policy": "custom", **fields}).build()
  assert stack.remat == policy


@pytest.mark.parametrize("tensor", [tensor for tensor in TENSORS if tensor != "decoder_layer_input"])
@pytest.mark.parametrize("place, option", [("device", "save"), ("offload", "offload")])
def test_every_tensor_can_be_placed(tensor, place, option):
  remat = stack_of(remat_policy="custom", **{tensor: place}).remat
  assert [remat[name] for name in ("save", "offload")] == [[tensor], []] if option == "save" else [[], [tensor]]


def test_tensors_are_placed_by_custom_alone_as_in_maxtext():
  translation = translate({**TINY, "remat_policy": "minimal", "context": "offload"})
  assert translation.config["stack"]["remat"] == "minimal" and translation.ignored == ("context",)


def test_scan_and_parameters():
  stack = stack_of(scan_layers=False, param_scan_axis=0)
  assert (stack.scan, stack.param_axis, stack.offload_params) == (False, 0, False)
  assert stack_of(param_scan_axis=0, parameter_memory_host_offload=True).offload_params is True


@pytest.mark.parametrize("fields, rate", [
    ({}, 0.0), ({"dropout_rate": 0.1}, 0.1), ({"dropout_rate": 0.1, "enable_dropout": True}, 0.1),
    ({"dropout_rate": 0.1, "enable_dropout": False}, 0.0), ({"dropout_rate": "1e-1"}, 0.1),
])
def test_dropout(fields, rate):
  assert StackConfig.from_maxtext({**TINY, **fields}).model.args["dropout"] == rate


@pytest.mark.parametrize("scale, layers, heads, mlp, embed", [
    (1, 2, 4, 64, 32), (2, 2, 8, 128, 32), (4, 2, 8, 128, 64), (8, 4, 8, 128, 64), (16, 4, 16, 256, 64),
])
def test_sizes_grow_with_the_scale_as_in_maxtext(scale, layers, heads, mlp, embed):
  config = {"base_num_decoder_layers": 2, "base_emb_dim": 32, "base_mlp_dim": 64, "base_num_query_heads": 4,
            "base_num_kv_heads": 4, "head_dim": 8, "global_parameter_scale": scale}
  model = StackConfig.from_maxtext(config).model
  assert (model.num_layers, model.embed, model.args["mlp"]) == (layers, embed, mlp)
  assert model.args["num_heads"] == model.args["num_kv_heads"] == heads
  # A resolved config has both.
  assert StackConfig.from_maxtext({**config, "emb_dim": embed, "num_decoder_layers": layers}).model == model


@pytest.mark.parametrize("value", ["float16", jnp.float16, jnp.dtype("float16"), enum.Enum("D", {"X": "float16"}).X])
def test_dtypes(value):
  model = StackConfig.from_maxtext({**TINY, "dtype": value, "weight_dtype": value}).model
  assert model.dtype == model.param_dtype == "float16"


# The result.


def test_ignored_fields_are_listed_and_logged(monkeypatch):
  lines = []
  monkeypatch.setattr(logging, "info", lambda text, *args: lines.append(text % args))
  other = {"run_name": "a", "dataset_type": "tfds", "enable_checkpointing": True, "learning_rate": 3e-5,
           "optimizer_memory_host_offload": True, "hardware": "tpu"}
  config = {**other, **TINY}
  assert translate(config).ignored == tuple(other)
  assert StackConfig.from_maxtext(config) == StackConfig.from_maxtext(TINY)
  assert lines == ["Not about the decoder stack, ignored: " + ", ".join(other)]


def test_names_of_maxtext_that_are_near_to_those_that_are_read_are_no_misspellings():
  names = ("base_moe_mlp_dim", "compressed_rope_max_timescale", "first_num_hash_layers", "global_head_dim",
           "global_num_kv_heads", "grad_dtype", "local_rope_max_timescale", "moe_mlp_dim", "mu_dtype",
           "num_experts_per_tok", "qk_rope_head_dim", "remat_policy_for_vit",
           "scan_layers_per_stage", "use_qk_norm_in_gdn", "v_head_dim", "vocab_size_per_layer_input")
  assert translate({**TINY, **dict.fromkeys(names, 1)}).ignored == names


def test_a_translated_config_runs():
  model = families.language_model(StackConfig.from_maxtext({**TINY, "remat_policy": "save_qkv_proj"}))
  tokens = jnp.arange(10).reshape(2, 5)
  logits, variables = model.init_with_output(jax.random.key(0), tokens)
  assert logits.shape == (2, 5, 64)
  kernel = nn.unbox(variables)["params"]["layers"]["feed_forward"]["wo"]["kernel"]
  assert kernel.shape == (64, 4, 32)  # [mlp, layers, embed], as param_scan_axis 1 has it


@pytest.mark.parametrize("config, layer", [(TINY, None), (DEEPSEEK3, by_kind), (GEMMA3_27B, by_kind)])
def test_the_config_is_plain_and_reads_back(config, layer):
  config = StackConfig.from_maxtext({**config, "remat_policy": "custom", "out_proj": "device"}, layer)
  assert StackConfig.from_dict(config.to_dict()) == config


def test_layers_of_a_users_own_get_what_they_do_not_say_from_the_model():
  def layer(index, kind):
    return LayerSpec(Layer, kind=kind.label, widths=(1, 2), **({"dtype": jnp.float32} if index else {}))

  layers = StackConfig.from_maxtext({**TINY, "num_decoder_layers": 2}, layer).plan().layers
  assert layers[0].cls is layers[1].cls is Layer
  assert [spec.kwargs["dtype"] for spec in layers] == [jnp.bfloat16, jnp.float32]
  assert layers[0].kwargs["embed"] == 32 and layers[0].kwargs["widths"] == (1, 2)
  assert [spec.name for spec in layers] == ["layer", "layer_1"]


# Bad input.


def local_layer(index, kind):
  class Local(Layer):
    pass
  return LayerSpec(Local)


@pytest.mark.parametrize("fields, error, message", [
    ({"num_decoder_layers": None}, ValueError, r"num_decoder_layers is missing \(or base_num_decoder_layers\)$"),
    ({"num_decoder_layers": None, "num_decoder_layer": 4}, ValueError,
     "is missing .*did you mean 'num_decoder_layer'?"),
    ({"num_decoder_layers": "4"}, TypeError, "num_decoder_layers must be an int, not '4'"),
    ({"num_decoder_layers": True}, TypeError, "num_decoder_layers must be an int"),
    ({"num_decoder_layers": 0}, ValueError, "num_decoder_layers must be at least 1, not 0"),
    ({"base_num_decoder_layers": 5}, ValueError,
     "num_decoder_layers is 4, but base_num_decoder_layers 5 at .* makes it 5"),
    ({"global_parameter_scale": 3, "base_emb_dim": 32}, ValueError,
     "global_parameter_scale must be a power of 2, not 3"),
    ({"mlp_dim": None}, ValueError, r"mlp_dim is missing \(or base_mlp_dim\)"),
    ({"remat_policy": "minimal_offload"}, ValueError,
     "remat_policy: unknown policy .*did you mean 'minimal_offloaded'?"),
    ({"remat_policy": "costom"}, ValueError, "remat_policy: unknown policy 'costom'; did you mean 'custom'?"),
    ({"remat_policy": 3}, TypeError, "remat_policy must be a string, not 3"),
    ({"remat_policy": "custom", "context": "host"}, ValueError,
     "context must be one of 'device', 'offload', 'remat', not 'host'"),
    ({"remat_policy": "custom", "context": ["device"]}, ValueError, "context must be one of"),
    ({"scan_layers": "false"}, TypeError, "scan_layers must be true or false, not 'false'"),
    ({"scan_layer": False}, ValueError, "unknown field 'scan_layer'; did you mean 'scan_layers'?"),
    ({"param_scan_axis": "1"}, TypeError, "param_scan_axis must be an int, not '1'"),
    ({"parameter_memory_host_offload": True}, ValueError,
     r"parameter_memory_host_offload needs param_scan_axis 0, not 1 \(MaxText's default is 1\)"),
    ({"parameter_memory_host_offload": True, "param_scan_axis": 0, "scan_layers": False}, ValueError,
     "parameter_memory_host_offload saves nothing with scan_layers false"),
    ({"parameter_memory_host_offload": 1}, TypeError, "parameter_memory_host_offload must be true or false, not 1"),
    ({"first_num_dense_layers": 5}, ValueError, "first_num_dense_layers is 5, but there are 4 layers"),
    ({"first_num_dense_layers": -1}, ValueError, "first_num_dense_layers must be at least 0"),
    ({"first_num_dense_layers": 2, "num_experts": 1}, ValueError,
     "first_num_dense_layers says .* but num_experts is 1"),
    ({"inhomogeneous_layer_cycle_interval": 5}, ValueError,
     "inhomogeneous_layer_cycle_interval is 5, but there are 4 layers"),
    ({"inhomogeneous_layer_cycle_interval": 3, "decoder_block": "gemma3"}, ValueError,
     "inhomogeneous_layer_cycle_interval is 3, but the layers of decoder_block 'gemma3' repeat every 6"),
    ({"interleave_moe_layer_step": 0}, ValueError, "interleave_moe_layer_step must be at least 1, not 0"),
    ({"engram_layers": [1, 4]}, ValueError, "engram_layers has layer 4, but the layers are 0 to 3"),
    ({"engram_layers": [-1]}, ValueError, "engram_layers has layer -1"),
    ({"engram_layers": 2}, TypeError, "engram_layers must be a list of layer indices, not 2"),
    ({"engram_layers": ["1"]}, TypeError, "engram_layers must be a list of layer indices; '1' is none"),
    ({"dropout_rate": "a"}, TypeError, "dropout_rate must be a number, not 'a'"),
    ({"normalization_layer_epsilon": True}, TypeError, "normalization_layer_epsilon must be a number, not True"),
    ({"dtype": "bfloat61"}, ValueError, "dtype: no dtype 'bfloat61'; did you mean 'bfloat16'?"),
    ({"ici_pipeline_parallelism": 4}, ValueError,
     "ici_pipeline_parallelism is 4, which no stack here does; set it to 1"),
    ({"attention_bias": True}, ValueError,
     "attention_bias is True, which the reference layer does not do; set it to False"),
    ({"rope_type": "llama3.1"}, ValueError,
     "rope_type is 'llama3.1', which the reference layer does not do.*pass layer="),
    ({"mlp_activations": ["gelu", "linear"]}, ValueError, "mlp_activations is .*pass layer="),
    ({"use_qk_norm": True}, ValueError, "use_qk_norm is True"),
    ({"logits_via_embedding": True}, ValueError, "normalize_embedding_logits is true .*set it to false"),
    ({"decoder_block": "gemma"}, ValueError, "the reference layer is not of decoder_block 'gemma'.*pass layer="),
    ({"decoder_block": "llama"}, ValueError, "decoder_block 'llama' .did you mean 'llama2'?"),
    ({"num_experts": 8, "first_num_dense_layers": 1, "engram_layers": [0]}, ValueError,
     r"the reference layer is not of kind 'dense_engram' \(layer 0\) or 'moe' \(layer 1, ...\); pass layer="),
    ({"inhomogeneous_layer_cycle_interval": 2}, ValueError, r"not of kind 'dense_0' \(layer 0, ...\) or 'dense_1'"),
])
def test_bad_fields(fields, error, message):
  with pytest.raises(error, match=message):
    StackConfig.from_maxtext({**TINY, **fields})


@pytest.mark.parametrize("layer, error, message", [
    (lambda index, kind: Layer, TypeError, r"layer\(0, LayerKind\(.*\)\) must return a LayerSpec, not <class.*Layer"),
    (local_layer, ValueError, "layer= gave LayerSpec.Local.*cannot be imported.*define it at the top of a module"),
    (lambda index, kind: LayerSpec(Layer, kind=jnp.tanh), ValueError,
     "layer= gave .*whose argument 'kind' is no plain value"),
    (lambda index, kind: LayerSpec(Layer, kinds="moe"), TypeError, "has no argument 'kinds'; did you mean 'kind'?"),
])
def test_bad_layer_functions(layer, error, message):
  with pytest.raises(error, match=message):
    StackConfig.from_maxtext(TINY, layer).build()


def test_a_config_must_be_a_mapping():
  with pytest.raises(TypeError, match="config must be a dict of MaxText's fields, not 'base.yml'"):
    StackConfig.from_maxtext("base.yml")
