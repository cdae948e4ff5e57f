"""Checkpoints of every published family: logits and tokens of the reference implementation, saving back, bad input."""
import json
import pathlib
import shutil

from flax import traverse_util
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import linen_stack as ls
from linen_stack import hf
from linen_stack.stacked import is_box, value
from tests.reference import layers_of

HERE = pathlib.Path(__file__).parent
GOLDEN = sorted(path.parent for path in (HERE / "golden").glob("*/config.json"))
MORE = sorted(path.parent for path in (HERE / "golden_more").glob("*/config.json"))
# Decoding in a loop compiles faster; layer by layer it is the default, and what unrolled stacks do.
LAYOUTS = {"scan": {"decode": "scan"}, "unrolled": {"scan": False}, "axis 1": {"param_axis": 1, "decode": "scan"}}
LLAMA = HERE / "golden" / "llama"


def name(x):
  return x.name if isinstance(x, pathlib.Path) else str(x)


def stored(folder, prefix=""):
  """All tensors of a folder, read by the safetensors package alone."""
  tensors = {}
  for file in sorted(folder.glob("*.safetensors")):
    tensors.update(load_file(file))
  return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}


def assert_same_tensors(a, b):
  assert a.keys() == b.keys()
  for key in a:
    assert (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape), key
    assert a[key].tobytes() == b[key].tobytes(), key


def text_of(config):
  return config.get("text_config", config)


@pytest.fixture(name="copy")
def copy_fixture(tmp_path):
  """A function that copies a folder and changes its config and tensors."""

  def copy(folder=LLAMA, config=None, tensors=None):
    target = tmp_path / "copy"
    shutil.copytree(folder, target)
    if config is not None:
      fields = json.loads((target / "config.json").read_text())
      config(fields)
      (target / "config.json").write_text(json.dumps(fields))
    if tensors is not None:
      arrays = stored(target)
      tensors(arrays)
      save_file(arrays, target / "model.safetensors")
    return target

  return copy


# Against the reference implementation


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("folder", GOLDEN, ids=name)
def test_logits_tokens_and_saving_back(folder, layout, tmp_path):
  check(folder, LAYOUTS[layout], tmp_path)


# Other sizes, windows, cycles that start and end elsewhere: each in one layout.
OTHER_LAYOUTS = {"mistral": {}, "deepseek_direct": {}, "llama_biases": {"scan": False},
                 "qwen3_windows": {"scan": False}}


@pytest.mark.parametrize("folder", MORE, ids=name)
def test_other_checkpoints(folder, tmp_path):
  check(folder, OTHER_LAYOUTS.get(folder.name, {"param_axis": -1, "decode": "scan"}), tmp_path)


def check(folder, options, tmp_path):
  expected = np.load(folder / "expected.npz")
  prompt, tokens = expected["greedy_prompt"], expected["greedy_tokens"]
  model, variables = hf.load_model(folder, **options)
  with jax.default_matmul_precision("highest"):
    logits = jax.jit(model.apply)(variables, expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)
    made = ls.generate(model, variables, prompt, tokens.shape[1] - prompt.shape[1])
  np.testing.assert_array_equal(np.concatenate([prompt, made], 1), tokens)

  saved = tmp_path / "saved"
  hf.save_model(saved, model, variables)
  config = hf.read_config(folder)
  assert_same_tensors(stored(saved), stored(folder, "language_model." if "text_config" in config else ""))
  assert hf.read_config(saved).items() >= text_of(config).items()
  again, same = hf.load_model(saved, **options)
  assert again == model
  assert jax.tree.structure(same) == jax.tree.structure(variables)
  jax.tree.map(np.testing.assert_array_equal, same, variables)


@pytest.mark.parametrize("folder", GOLDEN + MORE, ids=name)
def test_a_model_that_was_not_loaded_is_saved_with_a_config_of_its_own(folder, tmp_path):
  model, variables = hf.load_model(folder)
  hf.save_model(tmp_path / "saved", model.clone(hf_config=None), variables)
  again, _ = hf.load_model(tmp_path / "saved")
  assert again == model
  config = hf.read_config(tmp_path / "saved")
  assert config["model_type"] == text_of(hf.read_config(folder))["model_type"] and config["architectures"]
  assert config["torch_dtype"] == "float32"


# Where tensors go


@pytest.mark.parametrize("options", [*({"param_axis": axis} for axis in (0, 1, 2, -1)), {"scan": False}], ids=str)
@pytest.mark.parametrize("folder", GOLDEN, ids=name)
def test_rows_fill_the_leaves_that_init_makes(folder, options):
  config = hf.read_config(folder)
  model = hf.model_from_config(config, **options)
  leaves = hf.mapping(model)
  made = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"]
  for leaf in jax.tree.leaves(made, is_leaf=is_box):
    assert is_box(leaf) and len(leaf.names) == len(leaf.value.shape)
  made = traverse_util.flatten_dict(jax.tree.map(value, made, is_leaf=is_box), sep="/")
  assert {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} == {
      path: (leaf.shape, leaf.dtype) for path, leaf in made.items()}
  tensors = []
  for leaf in leaves.values():
    filled = np.zeros(leaf.shape, np.int32)
    for row in leaf.rows:
      assert filled[row.index].shape == leaf.row_shape
      filled[row.index] += 1
      tensors.append(row.tensor)
      assert row.layer is None or f".{row.layer}." in row.tensor
    assert (filled == 1).all(), leaf.path
  assert sorted(tensors) == sorted(stored(folder))


def test_experts_of_a_nested_run_are_indexed_by_cycle_layer_and_expert():
  model = hf.model_from_config(hf.read_config(HERE / "golden" / "qwen3_next"))
  leaves = [leaf for leaf in hf.mapping(model).values() if leaf.rows[0].expert is not None and len(leaf.shape) == 5]
  assert leaves
  for leaf in leaves:
    assert leaf.shape[:3] == (2, 3, 4)
    rows = {row.index[:3]: row for row in leaf.rows}
    assert (rows[1, 2, 3].layer, rows[1, 2, 3].expert) == (6, 3)
    assert ".layers.6." in rows[1, 2, 3].tensor and ".experts.3." in rows[1, 2, 3].tensor


@pytest.mark.parametrize("folder", GOLDEN, ids=name)
def test_checkpoints_are_read_leaf_by_leaf(folder):
  checkpoint = hf.open_checkpoint(folder)
  _, variables = hf.load_model(folder)
  for path, leaf in traverse_util.flatten_dict(variables["params"], sep="/").items():
    np.testing.assert_array_equal(checkpoint.read(path), leaf)


def test_parameters_go_where_they_are_sent():
  mesh = jax.make_mesh((4,), ("x",))
  split = jax.NamedSharding(mesh, jax.P(None, "x"))
  whole = jax.NamedSharding(mesh, jax.P())
  _, variables = hf.load_model(
      LLAMA, device=lambda path, leaf: split if path.endswith("kernel") and leaf.ndim > 2 else whole)
  _, before = hf.load_model(LLAMA)
  jax.tree.map(np.testing.assert_array_equal, variables, before)
  assert variables["params"]["layers"]["feed_forward"]["wo"]["kernel"].sharding == split
  assert variables["params"]["final_norm"]["scale"].sharding == whole
  _, variables = hf.load_model(LLAMA, device=jax.devices()[2])
  assert {leaf.device for leaf in jax.tree.leaves(variables)} == {jax.devices()[2]}


@hypothesis.given(kinds=st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=12),
                  axis=st.sampled_from([0, 1, 2, -1]), scan=st.booleans())
@hypothesis.example(kinds=(["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2, axis=0,
                    scan=True)
@hypothesis.settings(deadline=None, max_examples=20)
def test_tensors_of_a_layer_land_in_that_layer(kinds, axis, scan):
  config = {**hf.read_config(HERE / "golden" / "gemma3"), "num_hidden_layers": len(kinds), "layer_types": kinds}
  model = hf.model_from_config(config, param_axis=axis, scan=scan)
  tree = {}
  for path, leaf in hf.mapping(model).items():
    tree[path] = np.full(leaf.shape, -1)
    for row in leaf.rows:
      tree[path][row.index] = -2 if row.layer is None else row.layer
  layers = layers_of({"params": traverse_util.unflatten_dict(tree, sep="/")}, model.stack.plan, axis, scan)
  assert len(layers) == len(kinds)
  for i, layer in enumerate(layers):
    assert len(jax.tree.leaves(layer)) == 13 and all((leaf == i).all() for leaf in jax.tree.leaves(layer))


# Dtypes


def as_bfloat16(tensors):
  for key in tensors:
    tensors[key] = tensors[key].astype(jnp.bfloat16)


def test_parameters_keep_the_dtype_that_they_are_stored_in(copy, tmp_path):
  def but_norms(tensors):
    as_bfloat16(tensors)
    for key in tensors:
      if "norm" in key:
        tensors[key] = tensors[key].astype(np.float32)

  folder = copy(tensors=but_norms)
  model, variables = hf.load_model(folder)
  assert model.dtype == model.param_dtype == jnp.bfloat16
  assert variables["params"]["layers"]["attention"]["query"]["kernel"].dtype == jnp.bfloat16
  assert variables["params"]["final_norm"]["scale"].dtype == jnp.float32
  hf.save_model(tmp_path / "saved", model, variables)
  assert_same_tensors(stored(tmp_path / "saved"), stored(folder))
  assert hf.read_config(tmp_path / "saved")["dtype"] == "bfloat16"


def test_dtypes_can_be_chosen(copy):
  folder = copy(tensors=as_bfloat16)
  model, variables = hf.load_model(folder, dtype="float32")
  assert (model.dtype, model.param_dtype) == (jnp.float32, jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.bfloat16)}
  model, wide = hf.load_model(folder, param_dtype=jnp.float32)
  assert (model.dtype, model.param_dtype) == (jnp.float32, jnp.float32)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.float32), b), variables, wide)
  assert all(spec.kwargs["param_dtype"] == jnp.float32 for spec in model.stack.plan.layers)


def test_tensors_of_one_leaf_in_two_dtypes_need_a_choice(copy):
  def mix(tensors):
    key = "model.layers.2.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(jnp.bfloat16)

  folder = copy(tensors=mix)
  with pytest.raises(ValueError, match="layers/feed_forward/wi_1/kernel.*layers.2.mlp.up_proj.*BF16.*param_dtype"):
    hf.load_model(folder)
  hf.load_model(folder, param_dtype="float32")


def test_scaled_embeddings_are_scaled_in_the_dtype_of_the_computation():
  config = hf.read_config(HERE / "golden" / "gemma3")
  for dtype, scale in ((jnp.float32, 32**0.5), (jnp.bfloat16, 5.65625)):
    model = hf.model_from_config(config, dtype=dtype)
    assert jnp.asarray(model.embed_scale, dtype) == jnp.asarray(scale, dtype)


# What published files have beside the model


def test_tensors_that_are_no_part_of_the_model_are_left_out(copy, tmp_path):
  def older(tensors):
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

  model, variables = hf.load_model(copy(tensors=older))
  hf.save_model(tmp_path / "saved", model, variables)
  assert_same_tensors(stored(tmp_path / "saved"), stored(LLAMA))


def test_an_output_projection_beside_tied_embeddings_must_equal_them(copy):
  def tied(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

  def untied(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

  qwen = HERE / "golden" / "qwen3"
  folder = copy(qwen, tensors=tied)
  _, variables = hf.load_model(folder)
  assert "lm_head" not in variables["params"]
  shutil.rmtree(folder)
  with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"):
    hf.load_model(copy(qwen, tensors=untied))


def test_the_layer_that_predicts_a_second_token_is_left_out(copy):
  def with_another(tensors):
    for key in [key for key in tensors if key.startswith("model.layers.4.")]:
      tensors[key.replace(".4.", ".5.", 1)] = tensors[key]
    tensors["model.layers.5.eh_proj.weight"] = np.zeros((32, 64), np.float32)

  deepseek = HERE / "golden" / "deepseek_v3"
  folder = copy(deepseek, tensors=with_another)
  _, variables = hf.load_model(folder)
  _, before = hf.load_model(deepseek)
  jax.tree.map(np.testing.assert_array_equal, variables, before)
  # Without the field that announces it, it is one layer too many.
  config = hf.read_config(folder)
  config["num_nextn_predict_layers"] = 0
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="of 6 layers where num_hidden_layers is 5"):
    hf.load_model(folder)
