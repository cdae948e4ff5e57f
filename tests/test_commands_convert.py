"""`convert` from the command line: layouts, Hugging Face folders, interruptions, mistakes, and the memory it takes."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linen_stack as ls
from linen_stack import checkpoints, conversion, convert, hf, stored, training
from linen_stack.commands import main
from linen_stack.config import StackConfig
from linen_stack.models import families

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
LLAMA = GOLDEN / "llama"


class Layer(nn.Module):
  """A layer with a statistic."""

  width: int = 4

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    self.variable("statistics", "mean", jnp.zeros, (2,))
    return x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(self.width)(x)))


OWN = {"layer": f"{__name__}:Layer"}
CONFIG = StackConfig.from_dict({
    "model": {"vocab": 256, "embed": 8, "tie_embeddings": True, **OWN, "specs": {"a": {}, "b": {"args": {"width": 3}}},
              "pattern": ["a", "a", "b"], "num_layers": 7},
    "stack": {"remat": "none"},
    "train": {"batch": 4, "seq": 16, "steps": 8, "learning_rate": 1e-2},
})
# The same layers in other segments.
OTHER = {**CONFIG.to_dict(), "model": {
    "vocab": 256, "embed": 8, "tie_embeddings": True, **OWN, "specs": {"a": {}, "b": {"args": {"width": 3}}},
    "segments": [{"name": "one", "block": ["a"], "repeats": 2}, {"name": "two", "block": ["b", "a", "a"]},
                 {"name": "three", "block": ["b", "a"]}]}}


def run(capsys, *argv):
  status = main([str(arg) for arg in argv])
  out = capsys.readouterr()
  return status, out.out, out.err


def in_a_process(code, check):
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=check)


def state_of(config, fill=True):
  """A model, and a state with numbers of its own for each leaf."""
  model = families.language_model(config)
  state = training.abstract_state(model, training.optimizer(config.train, model.stack.plan))
  if fill:
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.integers(-99, 99, x.shape), x.dtype), state)
    state["step"] = jnp.asarray(5, jnp.int32)
  return model, state


def items(state):
  return {name: state[name] for name in ("variables", "optimizer")}


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert (x.shape, x.dtype) == (y.shape, y.dtype) and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory):
  """(a model, its state, where a checkpoint of it is)."""
  model, state = state_of(CONFIG)
  path = checkpoints.save(tmp_path_factory.mktemp("saved") / "run", state, CONFIG, {"bytes": 3, "sha256": "x"})
  return model, state, path.parent


# Between checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(name="pieces", params=[None, 100], ids=["at once", "in pieces"])
def _pieces(request, monkeypatch):
  """Small leaves are written at once; as if they were large, layer by layer."""
  if request.param is not None:
    monkeypatch.setattr(stored, "SMALL", request.param)


@pytest.mark.parametrize("flags", [
    ["--set", "stack.param_axis=1"], ["--set", "stack.scan=false"], ["--config", "OTHER"],
    ["--config", "OTHER", "--set", "stack.param_axis=-1"], []], ids=" ".join)
def test_there_and_back(capsys, tmp_path, saved, pieces, flags):
  model, state, src = saved
  (tmp_path / "other.yml").write_text(json.dumps(OTHER))
  flags = [str(tmp_path / "other.yml") if flag == "OTHER" else flag for flag in flags]
  status, out, err = run(capsys, "convert", src, tmp_path / "there", *flags)
  assert status == 0 and not err and f"wrote {tmp_path / 'there' / '5'}" in out and "MiB 1/1" in out
  assert [entry.name for entry in tmp_path.iterdir() if entry.name != "other.yml"] == ["there"]
  there = checkpoints.find(tmp_path / "there")
  config = checkpoints.load_config(there)
  assert checkpoints.load_text(there) == {"bytes": 3, "sha256": "x"}
  of_there, abstract = state_of(config, fill=False)
  loaded = checkpoints.load(there, abstract)
  assert loaded["step"] == 5
  assert_same(items(loaded), convert.restack(items(state), model, of_there))
  back = ["--config", tmp_path / "config.yml"]
  back[1].write_text(json.dumps(CONFIG.to_dict()))
  assert run(capsys, "convert", there, tmp_path / "back", *back)[0] == 0
  loaded = checkpoints.load(checkpoints.find(tmp_path / "back"), state_of(CONFIG, fill=False)[1])
  assert_same(items(loaded), items(state))


def test_training_goes_on_from_another_layout(capsys, tmp_path):
  """Resumed in another layout, the losses are those of a run that was never interrupted."""
  text = tmp_path / "text.txt"
  text.write_bytes(bytes(np.random.default_rng(0).choice(np.frombuffer(b"abcde \n", np.uint8), 3000)))
  config = tmp_path / "config.yml"
  config.write_text(json.dumps({**CONFIG.to_dict(), "model": {**CONFIG.to_dict()["model"], "num_layers": 3}}))
  train = ["train", config, "--text", text, "--out"]
  whole = run(capsys, *train, tmp_path / "whole", "--steps", 4, "--set", "train.checkpoint_every=2")
  apart = ["--set", "stack.scan=false"]
  status, _, err = run(capsys, *train, tmp_path / "whole", "--steps", 6, "--resume", *apart)
  assert status == 1 and "its layers are laid out in another way: stack.scan (there True, here False)" in err
  assert f"convert {tmp_path / 'whole' / '4'} NEW --set stack.scan=false` lays them out as here" in err
  assert run(capsys, "convert", tmp_path / "whole" / "2", tmp_path / "apart", *apart)[0] == 0
  resumed = run(capsys, *train, tmp_path / "apart", "--steps", 4, "--resume", *apart)
  assert whole[0] == 0 and resumed[0] == 0
  losses = [[float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if line.startswith("step ")][-2:]
            for _, out, _ in (whole, resumed)]
  np.testing.assert_allclose(*losses, rtol=1e-5)


def test_resuming_names_the_segments_that_differ(capsys, tmp_path, saved):
  (tmp_path / "other.yml").write_text(json.dumps(OTHER))
  shutil.copytree(saved[2], tmp_path / "run")
  resume = ["train", tmp_path / "other.yml", "--resume", "--out", tmp_path / "run", "--text", __file__]
  status, _, err = run(capsys, *resume)
  assert status == 1 and "its layers are laid out in another way: model.num_layers (there 7, here None)" in err
  assert "NEW --config CONFIG`" in err
  status, _, err = run(capsys, *resume, "--set", "model.args={width: 5}")
  assert status == 1 and "it is of another model" in err


@pytest.mark.parametrize("change, words", [
    ({"param_axis": 1}, "this tree is stacked along axis 0; the plan says 1"),
    ({"scan": False}, "these are the layers of scan=True; the plan's are laid out as scan=False says")])
def test_generate_says_what_the_layout_looks_like(capsys, tmp_path, saved, change, words):
  """A checkpoint whose config says another layout than its variables have."""
  shutil.copytree(saved[2], tmp_path / "run")
  file = tmp_path / "run" / "5" / "config" / "metadata"
  config = json.loads(file.read_text())
  config["stack"].update(change)
  file.write_text(json.dumps(config))
  status, _, err = run(capsys, "generate", tmp_path / "run", "--prompt", "a")
  assert status == 1 and words in err and "does not fit this model" in err
  status, _, err = run(capsys, "convert", tmp_path / "run", tmp_path / "new")
  assert status == 1 and words in err and not (tmp_path / "new").exists()


# Hugging Face folders -------------------------------------------------------------------------------------------------


def assert_same_folder(a, b):
  one, two = hf.open_checkpoint(a).folder, hf.open_checkpoint(b).folder
  assert {name for name in one.entries if "rotary_emb" not in name} == {*two.entries}
  for name in two.entries:
    x, y = one.read(name), two.read(name)
    assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name


@pytest.mark.parametrize("folder, layout", [
    *((GOLDEN / name, {}) for name in ("deepseek_v3", "gemma3", "llama", "qwen3", "qwen3_next")),
    (GOLDEN / "deepseek_v3", {"param_axis": 1}), (GOLDEN / "qwen3_next", {"param_axis": -1}),
    (GOLDEN / "gemma3", {"scan": False}), (GOLDEN / "llama", {"scan": False}),
    (GOLDEN.parent / "golden_more" / "llama_shards", {}), (GOLDEN.parent / "golden_more" / "gemma3_images", {})],
    ids=lambda value: value.name if isinstance(value, pathlib.Path) else str(value))
def test_folders_become_checkpoints_and_folders_again(capsys, tmp_path, folder, layout, monkeypatch):
  monkeypatch.setattr(stored, "SMALL", 500)
  flags = [part for key, value in layout.items() for part in ("--set", f"stack.{key}={str(value).lower()}")]
  status, out, err = run(capsys, "convert", folder, tmp_path / "there", *flags)
  assert status == 0 and not err, err
  there = checkpoints.find(tmp_path / "there")
  config = checkpoints.load_config(there)
  model = families.language_model(config)
  want_model, want = hf.load_model(folder, **layout)
  assert model.stack.plan == want_model.stack.plan
  assert (model.dtype, model.param_dtype) == (want_model.dtype, want_model.param_dtype)
  assert_same(checkpoints.load(there, {"variables": nn.unbox(training.abstract_variables(model))})["variables"], want)
  assert run(capsys, "convert", tmp_path / "there", tmp_path / "back", "--to=huggingface")[0] == 0
  assert_same_folder(folder, tmp_path / "back")


def test_a_converted_folder_generates_and_does_not_resume(capsys, tmp_path):
  run(capsys, "convert", LLAMA, tmp_path / "there", "--set", "model.param_dtype=bfloat16")
  config = checkpoints.load_config(checkpoints.find(tmp_path / "there"))
  assert config.model.param_dtype == "bfloat16" and config.model.hf["model_type"] == "llama"
  status, out, _ = run(capsys, "generate", tmp_path / "there", "--prompt", "ab", "--tokens", "3")
  assert status == 0 and out.startswith("ab") and len(out) > 3
  file = tmp_path / "config.yml"
  file.write_text(json.dumps(config.override(["model.hf.vocab_size=256"]).to_dict()))
  status, _, err = run(capsys, "train", file, "--out", tmp_path / "there", "--resume", "--text", __file__)
  assert status == 1 and "it is of another model: model.hf.vocab_size (there 128, here 256)" in err
  file.write_text(json.dumps(config.to_dict()))
  status, _, err = run(capsys, "train", file, "--out", tmp_path / "there", "--resume", "--text", __file__)
  assert status == 1 and "it holds a model alone, without the state of its training" in err


def test_a_folder_becomes_a_model_of_ones_own_config(capsys, tmp_path):
  """The family `decoder` has the layers of Llama, in segments of one's own."""
  spec = {"mlp": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
  (tmp_path / "config.yml").write_text(json.dumps({
      "model": {"vocab": 128, "embed": 32, "family": "decoder", "args": spec, "specs": {"a": {}}, "segments": [
          {"name": "first", "block": ["a"]}, {"name": "others", "block": ["a"], "repeats": 3}]},
      "stack": {"param_axis": 1}}))
  status, out, _ = run(capsys, "convert", LLAMA, tmp_path / "there", "--config", tmp_path / "config.yml")
  assert status == 0 and "layout: other segments" in out
  there = checkpoints.find(tmp_path / "there")
  model = families.language_model(checkpoints.load_config(there))
  loaded = checkpoints.load(there, {"variables": nn.unbox(training.abstract_variables(model))})["variables"]
  source, variables = hf.load_model(LLAMA)
  assert_same(loaded, convert.restack(variables, source, model))


def test_leaves_of_several_dtypes_stay_as_they_are_stored(capsys, tmp_path):
  """A model in bfloat16 with norms in float32."""
  from safetensors.numpy import load_file, save_file
  folder = LLAMA
  tensors = load_file(folder / "model.safetensors")
  shutil.copytree(folder, tmp_path / "mixed", ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
  save_file({name: x if "norm" in name else x.astype(jnp.bfloat16) for name, x in tensors.items()},
            tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
  assert run(capsys, "convert", tmp_path / "mixed", tmp_path / "there")[0] == 0
  there = checkpoints.find(tmp_path / "there")
  model = families.language_model(checkpoints.load_config(there))
  loaded = checkpoints.load(there, {"variables": nn.unbox(training.abstract_variables(model))})["variables"]
  assert_same(loaded, hf.load_model(tmp_path / "mixed")[1])
  assert loaded["params"]["final_norm"]["scale"].dtype == np.float32
  assert run(capsys, "convert", there, tmp_path / "back", "--to=huggingface")[0] == 0
  assert_same_folder(tmp_path / "mixed", tmp_path / "back")


def test_a_folder_laid_out_for_a_plan_of_ones_own(capsys, tmp_path, monkeypatch):
  """Readers of tensors are asked for single layers, experts and all, where the plans differ."""
  monkeypatch.setattr(stored, "SMALL", 500)
  folder = GOLDEN / "deepseek_v3"
  source = conversion.read_folder(folder, lambda config: config)
  plan = ls.Plan.from_layers(source.model.stack.plan.layers, "blocks")
  plan = ls.Plan.of(*(ls.Segment(f"s{i}", (spec,)) for i, spec in enumerate(plan.layers)))
  lazy = convert.restack(source.items["variables"], source.model, plan, lazy=True)
  want = convert.restack(hf.load_model(folder)[1], source.model, plan)
  assert_same(jax.tree.map(np.asarray, lazy), jax.tree.map(np.asarray, want))


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, words", [
    (["SRC", "SRC"], "is there already; give a new folder"),
    (["nowhere", "new"], "no checkpoint at"),
    ([".", "new"], "it holds no step that was written to the end"),
    (["SRC", "new", "--set", "model.num_layers=8"], "from_plan has 7 layers and to_plan has 8"),
    (["SRC", "new", "--set", "model.embed=16"], "optimizer/1/0/mu/layers/a/Dense_0/bias: float32 (2, 2, 8) in SRC"),
    (["SRC", "new", "--set", "model.param_dtype=bfloat16"], "float32 (256, 8) in SRC, bfloat16 (256, 8) in the model"),
    (["SRC", "new", "--set", "model.specs.b.args.width=5"], "SRC is not the model of the config"),
    (["SRC", "new", "--set", "stack.param_axes=1"], "unknown key 'stack.param_axes'; did you mean 'param_axis'?"),
    (["SRC", "new", "--config", "nothing.yml"], "no config 'nothing.yml'"),
    (["SRC", "new", "--to=huggingface"], "the model is of no published family"),
    (["FOLDER", "new", "--to=huggingface"], "so is DST; there is nothing to convert"),
    (["FOLDER", "new", "--set", "model.vocab=3"], "model.vocab: model.hf says it already"),
    (["FOLDER", "new", "--set", "model.hf.model_type=lama"], "did you mean 'llama'?"),
    (["FOLDER", "new", "--set", "model.hf.num_hidden_layers=3"], "from_plan has 4 layers and to_plan has 3"),
    (["FOLDER", "new", "--set", "model.hf.intermediate_size=60"], "feed_forward/wi_0/kernel: (4, 32, 64) in SRC"),
])
def test_mistakes_are_told_and_leave_nothing_behind(capsys, tmp_path, saved, monkeypatch, argv, words):
  monkeypatch.chdir(tmp_path)
  status, _, err = run(capsys, "convert", *({"SRC": saved[2], "FOLDER": LLAMA}.get(arg, arg) for arg in argv))
  assert status == 1 and words in err, err
  assert not [*tmp_path.iterdir()]


def test_layout_flags_for_a_folder_are_a_mistake(capsys, saved, tmp_path):
  status, _, err = run(capsys, "convert", saved[2], tmp_path / "new", "--to=huggingface", "--set", "stack.scan=false")
  assert status == 2 and "a Hugging Face folder has one layout" in err


def test_a_full_disk_is_told_before_anything_is_written(capsys, saved, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
  for flags in ([], ["--set", "stack.scan=false"]):
    status, _, err = run(capsys, "convert", saved[2], tmp_path / "new", *flags)
    assert status == 1 and "no space left on device: it takes" in err and not [*tmp_path.iterdir()]
  status, _, err = run(capsys, "convert", LLAMA, tmp_path / "new")
  assert status == 1 and "no space left on device" in err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("error, status, words", [
    (KeyboardInterrupt(), 130, "interrupted"), (OSError(28, "No space left on device"), 1, "no space left on device")])
def test_what_is_interrupted_leaves_nothing(capsys, saved, tmp_path, monkeypatch, error, status, words):
  fill, calls = stored._fill, []

  def failing(path, leaf):
    calls.append(path)
    if len(calls) == 4:
      raise error
    yield from fill(path, leaf)

  monkeypatch.setattr(stored, "_fill", failing)
  got, _, err = run(capsys, "convert", saved[2], tmp_path / "new")
  assert got == status and words in err and len(calls) == 4 and not [*tmp_path.iterdir()]


def test_a_killed_run_leaves_no_target_and_the_next_one_clears_up(capsys, saved, tmp_path):
  code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from linen_stack import stored
from linen_stack.commands import main
fill = stored._fill
def killed(path, leaf):
  if 'nu' in path.name: os.kill(os.getpid(), signal.SIGKILL)
  yield from fill(path, leaf)
stored._fill = killed
main(['convert', {str(saved[2])!r}, {str(tmp_path / 'new')!r}])
"""
  done = in_a_process(code, check=False)
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = [entry.name for entry in tmp_path.iterdir()]
  assert len(left) == 1 and left[0].startswith(".new.partial-")
  (tmp_path / ".new.partial-x").mkdir()  # whatever this is, it is not ours
  assert run(capsys, "convert", saved[2], tmp_path / "new")[0] == 0
  assert {entry.name for entry in tmp_path.iterdir()} == {"new", ".new.partial-x"}


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_of_a_conversion_is_a_few_tensors(tmp_path):
  """Beyond what the program takes before it writes, at most three times the largest tensor, however large the model."""
  folder, rng = tmp_path / "folder", np.random.default_rng(0)
  folder.mkdir()
  config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 8192, "num_attention_heads": 8,
            "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 512, "rms_norm_eps": 1e-6,
            "torch_dtype": "float32", "rope_theta": 1e4, "tie_word_embeddings": True}
  (folder / "config.json").write_text(json.dumps(config))
  leaves = hf.mapping(hf.model_from_config(config))
  from safetensors.numpy import save_file
  save_file({row.tensor: rng.random(leaf.tensor_shape, np.float32) for leaf in leaves.values() for row in leaf.rows},
            folder / "model.safetensors")
  code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from linen_stack import stored
from linen_stack.commands import main
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, save_empty = [], stored._save_empty
def watched(*args):
  made = save_empty(*args)
  before.append(peak())
  return made
stored._save_empty = watched
assert main(['convert', {str(folder)!r}, {str(tmp_path / 'new')!r}]) == 0
print(before[0], peak())
"""
  done = in_a_process(code, check=True)
  before, after = map(int, done.stdout.split()[-2:])
  largest = 8192 * 512 * 4
  size = sum(stored.nbytes(leaf) for leaf in leaves.values())
  assert size > 12 * largest
  assert after - before < 3 * largest, (after - before) / largest
