"""What is wrong with a checkpoint, a config or variables is said before anything is read or written."""
import json
import pathlib
import shutil

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import linen_stack as ls
from linen_stack import hf
from linen_stack.models import DecoderLayer, LanguageModel, families

GOLDEN = pathlib.Path(__file__).parent / "golden"
MORE = pathlib.Path(__file__).parent / "golden_more"


@pytest.fixture(name="changed")
def changed_fixture(tmp_path):
  """A function that copies a folder with other fields in its config and other tensors; None takes one out."""

  def change(folder, fields=None, **tensors):
    target = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
    shutil.copytree(folder, target)
    config = {**json.loads((target / "config.json").read_text()), **(fields or {})}
    (target / "config.json").write_text(json.dumps(config))
    if tensors:
      arrays = {**load_file(target / "model.safetensors"), **tensors}
      save_file({name: array for name, array in arrays.items() if array is not None}, target / "model.safetensors")
    return target

  return change


# Folders


def test_folders_without_config_or_tensors(tmp_path):
  with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
    hf.load_model(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="has no config.json; a Hugging Face checkpoint has one"):
    hf.load_model(tmp_path)
  for text, match in (("{", "is not JSON"), ("[1]", "must hold a JSON object, not a list")):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
      hf.load_model(tmp_path)
  shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
    hf.load_model(tmp_path)


def test_a_truncated_file(changed):
  folder = changed(GOLDEN / "llama")
  data = (folder / "model.safetensors").read_bytes()
  (folder / "model.safetensors").write_bytes(data[:-100])
  with pytest.raises(ValueError, match="is not a whole safetensors file"):
    hf.load_model(folder)


@pytest.mark.parametrize("model_type, match", [
    ("gpt2", "has the model_type 'gpt2', of no family known here; known: 'llama', .*'deepseek_v3'"),
    ("lama", "did you mean 'llama'[?]; known: 'llama', "),
    (None, "the config has no model_type; known: 'llama', "),
])
def test_unknown_families(changed, model_type, match):
  with pytest.raises(ValueError, match=match):
    hf.load_model(changed(GOLDEN / "llama", {"model_type": model_type}))


@pytest.mark.parametrize("options, match", [
    ({"scann": False}, "no option 'scann' of StackedDecoder can be given; did you mean 'scan'"),
    ({"plan": None}, "no option 'plan' of StackedDecoder"),
    ({"device": "cpu"}, "device must be a jax.Device, .* not 'cpu'"),
])
def test_options_of_loading(options, match):
  with pytest.raises(TypeError, match=match):
    hf.load_model(GOLDEN / "llama", **options)


def test_folders_that_are_none():
  with pytest.raises(TypeError, match="folder must be a path, not None"):
    hf.load_model(None)
  with pytest.raises(NotADirectoryError, match="is a file; pass the folder"):
    hf.load_model(GOLDEN / "llama" / "config.json")


def test_offloaded_parameters_are_loaded_into_host_memory():
  _, variables = hf.load_model(GOLDEN / "llama", offload_params=4096)
  kinds = {path: leaf.sharding.memory_kind for path, leaf in traverse_util.flatten_dict(variables, sep="/").items()}
  assert {path for path, kind in kinds.items() if kind == "pinned_host"} == {
      path for path in kinds if path.startswith("params/layers/") and path.endswith("kernel")
      and not path.endswith(("key/kernel", "value/kernel"))}
  with pytest.raises(ValueError, match="selects none of the layers' parameters"):
    hf.load_model(GOLDEN / "llama", offload_params=2**30)


# Tensors


def test_missing_extra_and_misshapen_tensors_are_listed_with_their_layers(changed):
  layer = "model.layers.{}.self_attn.q_proj.{}"
  folder = changed(GOLDEN / "llama", **{
      layer.format(0, "weight"): None, layer.format(2, "weight"): None, "model.norm.weight": np.ones(16, np.float32),
      layer.format(1, "bias"): np.zeros(32, np.float32), "adapter": np.zeros(1, np.float32)})
  with pytest.raises(ValueError) as error:
    hf.load_model(folder)
  assert str(error.value) == f"""{folder} does not hold the llama model that its config.json describes:
  2 tensors are missing (layers 0, 2):
    model.layers.0.self_attn.q_proj.weight [32, 32]
    model.layers.2.self_attn.q_proj.weight [32, 32]
  2 tensors are not expected (layers 1):
    adapter [1]
    model.layers.1.self_attn.q_proj.bias [32]
  1 tensor is of another shape:
    model.norm.weight [16], should be [32]"""


@pytest.mark.parametrize("layers, match", [
    (6, "of 4 layers where num_hidden_layers is 6:\n  18 tensors are missing .layers 4-5.:"),
    (3, "of 4 layers where num_hidden_layers is 3:\n  9 tensors are not expected .layers 3.:"),
])
def test_another_number_of_layers(changed, layers, match):
  with pytest.raises(ValueError, match=match) as error:
    hf.load_model(changed(GOLDEN / "llama", {"num_hidden_layers": layers}))
  assert ("and 8 more" in str(error.value)) == (layers == 6)


@pytest.mark.parametrize("family, key", [
    ("deepseek_v3", "model.layers.3.mlp.experts.5.up_proj.weight"), ("qwen3_next", "model.layers.6.linear_attn.A_log"),
    ("gemma3", "model.layers.7.pre_feedforward_layernorm.weight"), ("qwen3", "model.layers.1.self_attn.k_norm.weight")])
def test_nothing_is_made_up_in_place_of_a_tensor(changed, family, key):
  with pytest.raises(ValueError, match=rf"1 tensor is missing \(layers \d\):\n    {key}"):
    hf.load_model(changed(GOLDEN / family, **{key: None}))


def test_doubles_are_not_rounded_in_silence(changed):
  folder = changed(GOLDEN / "llama", **{"model.norm.weight": np.ones(32)})
  with pytest.raises(ValueError, match="final_norm/scale is stored as float64.*param_dtype"):
    hf.load_model(folder)


# Configs

CONFIGS = [
    ("llama", {"hidden_act": "gelu"},
     "hidden_act is 'gelu', which the llama layers here cannot follow; it can be 'silu'"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised checkpoints"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
     "rope_parameters: rope_type 'dynamic' is not available"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: rope_type 'linear' needs factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor is 0.5"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     "rope_parameters and rope_scaling are both given"),
    ("llama", {"sliding_window": 4}, "layer 0 has a window by the config; llama has none"),
    ("llama", {"num_local_experts": 4}, "layer 0 is 'full_moe' by the config; llama has no such layers"),
    ("llama", {"hidden_size": None}, "the field 'hidden_size' is missing"),
    ("llama", {"vocab_size": "many"}, "the field 'vocab_size' of the config must be int, not 'many'"),
    ("llama", {"num_attention_heads": 5}, "num_heads 5 is not a multiple of num_kv_heads 2"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True},
     "sliding_window is null, but layer_types has 'sliding_attention' at layer 0"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer 1 has no window by layer_types"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, .* it can be null"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, .* it can be False"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', .* it can be 'gelu_pytorch_tanh'"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}},
     "rope_parameters must have entries full_attention and sliding_attention"),
    ("gemma3", {"model_type": "paligemma", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 1}},
     "a gemma3 model inside one of model_type 'paligemma' is not known here; known: 'gemma3'"),
]


@pytest.mark.parametrize("folder, fields, match", CONFIGS, ids=lambda x: x if isinstance(x, str) else ", ".join(x))
def test_fields_that_the_layers_cannot_follow(folder, fields, match):
  config = hf.read_config((MORE if folder == "mistral" else GOLDEN) / folder)
  with pytest.raises((TypeError, ValueError), match=match):
    hf.model_from_config({**config, **fields})


@pytest.mark.parametrize("options, error, match", [
    (dict(dtype="int8"), TypeError, "dtype must be a floating dtype, not int8"),
    (dict(param_dtype="floaty"), TypeError, "param_dtype must be a dtype, not 'floaty'"),
    (dict(scam=False), TypeError, "scam"),
    (dict(remat="fulll"), ValueError, "fulll"),
])
def test_options(options, error, match):
  with pytest.raises(error, match=match):
    hf.load_model(GOLDEN / "llama", **options)


def test_older_configs_mean_the_same():
  config = hf.read_config(MORE / "llama_biases")
  scaling = config.pop("rope_parameters")
  theta = scaling.pop("rope_theta")
  new = hf.model_from_config({**config, "rope_parameters": {**scaling, "rope_theta": theta}})
  scaling["type"] = scaling["rope_type"]
  old = hf.model_from_config({**config, "rope_theta": theta, "rope_scaling": scaling})
  a, b = (model.stack.plan.layers[0].kwargs for model in (new, old))
  assert a["rope_theta"] == b["rope_theta"] and b["rope_scaling"].pop("type") == "llama3"
  assert a == b


# Saving


@pytest.fixture(name="llama", scope="module")
def llama_fixture():
  return hf.load_model(GOLDEN / "llama")


def test_saving_replaces_nothing_and_leaves_nothing_half_written(llama, tmp_path, monkeypatch):
  (tmp_path / "there").mkdir()
  (tmp_path / "there" / "notes").touch()
  with pytest.raises(FileExistsError, match="is there already"):
    hf.save_model(tmp_path / "there", *llama)

  def fail(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr("linen_stack.hf.Writer.write", fail)
  with pytest.raises(KeyboardInterrupt):
    hf.save_model(tmp_path / "new", *llama)
  assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_several_files_and_boxed_variables(llama, tmp_path):
  model, variables = llama
  boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  boxed = jax.tree.map(lambda box, array: box.replace_boxed(array), boxed, variables,
                       is_leaf=lambda x: hasattr(x, "replace_boxed"))
  hf.save_model(tmp_path / "out", model, boxed, max_shard_bytes=30_000)
  assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
  _, again = hf.load_model(tmp_path / "out")
  jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_variables_of_another_form(llama, tmp_path):
  model, variables = llama
  params = variables["params"]
  _, unrolled = hf.load_model(GOLDEN / "llama", scan=False)
  _, turned = hf.load_model(GOLDEN / "llama", param_axis=1)
  for wrong, match in (
      (params, "leave out the collections"),
      ({}, "token_embed/embedding is missing"),
      ({"params": params, "cache": {"index": jnp.zeros(())}}, "leave out the collections cache"),
      ({"params": {**params, "adapter": jnp.zeros(1)}}, "adapter is not a parameter of the model"),
      (unrolled, "layers/attention/query/kernel is missing(.|\n)*and 35 more"),
      (turned, r"layers/attention/query/kernel has the shape \(32, 4, 4, 8\), not \(4, 32, 4, 8\)")):
    with pytest.raises(ValueError, match=match):
      hf.save_model(tmp_path / "out", model, wrong)
  assert not list(tmp_path.iterdir())


def language_model(layer=None, **model):
  sizes = dict(embed=8, mlp=8, num_heads=2)
  plan = ls.Plan.homogeneous(ls.LayerSpec(DecoderLayer, **{**sizes, **(layer or {})}), 2)
  return LanguageModel(stack=ls.StackedDecoder(plan), vocab=16, embed=8, **model)


@pytest.mark.parametrize("layer, model, reason", [
    ({"rope_theta": None}, {}, "llama: its layers have no rotary embedding"),
    ({"qk_norm": True, "mlp_bias": True}, {}, "qwen3: mlp_bias of its layers is True, not False"),
    ({"norm_eps": 1e-5}, {}, "llama: norm_eps of its layers is 1e-05, not 1e-06"),
    ({}, {"logit_softcap": 30.0}, "llama: logit_softcap of the model is 30.0, not None"),
    ({}, {}, None),
    ({"out_bias": True}, {}, "llama: out_bias of its layers is True, not False"),
])
def test_models_of_no_published_family(tmp_path, layer, model, reason):
  model = language_model(layer, **model)
  variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                           jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
  if reason is None:
    hf.save_model(tmp_path / "out", model, variables)
    assert hf.read_config(tmp_path / "out")["model_type"] == "llama"
    return
  with pytest.raises(ValueError, match=f"the model is of no published family:(.|\n)*{reason}"):
    hf.save_model(tmp_path / "out", model, variables)
  with pytest.raises(ValueError) as error:
    hf.mapping(model)
  assert all(f"\n  {family.name}: " in str(error.value) for family in families.published())


def test_a_model_that_was_changed_gets_a_config_of_its_own(llama, tmp_path):
  model, variables = llama
  spec = model.stack.plan.layers[0]
  shallow = model.clone(stack=ls.StackedDecoder(ls.Plan.homogeneous(spec, 2)))
  params = {**variables["params"], "layers": jax.tree.map(lambda x: x[:2], variables["params"]["layers"])}
  hf.save_model(tmp_path / "out", shallow, {"params": params})
  assert hf.read_config(tmp_path / "out")["num_hidden_layers"] == 2
  again, _ = hf.load_model(tmp_path / "out")
  assert again.stack == shallow.stack


def test_what_is_no_language_model(llama, tmp_path):
  model, variables = llama
  with pytest.raises(TypeError, match="model must be a LanguageModel, not a StackedDecoder"):
    hf.save_model(tmp_path / "out", model.stack, variables)
