"""Training: text, batches, resuming, checkpoints that survive what happens to them, and `generate` from one."""
import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types

from absl import logging
from flax import linen as nn
import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import linen_stack as ls
from linen_stack import checkpoints, training
from linen_stack import text as text_lib
from linen_stack.commands import CommandError, main
from linen_stack.commands.train import train
from linen_stack.config import StackConfig
from linen_stack.models import families


class Layer(nn.Module):
  """As little as can learn: each byte's own prediction, with dropout, a statistic and an auxiliary loss."""

  aux: float = 0.0

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    y = nn.Dense(x.shape[-1], kernel_init=init)(x)
    mean = self.variable("statistics", "mean", jnp.zeros, ())
    if self.is_mutable_collection("statistics") and not self.is_initializing():
      mean.value = 0.9 * mean.value + 0.1 * jnp.mean(y)
    if self.aux:
      self.sow("losses", "aux", self.aux * jnp.sum(self.variables["params"]["Dense_0"]["bias"]))
    return x + nn.Dropout(0.5)(y, deterministic=deterministic)


CONFIG = StackConfig.from_dict({
    "model": {"vocab": 256, "embed": 8, "tie_embeddings": True, "layer": f"{__name__}:Layer", "num_layers": 2},
    "stack": {"remat": "none"},
    "train": {"batch": 4, "seq": 16, "steps": 8, "learning_rate": 1e-2, "checkpoint_every": 3},
})


@pytest.fixture(scope="module", autouse=True)
def _compile_each_program_once(tmp_path_factory):
  """Most runs here are of one program."""
  options = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
             "jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
  before = {name: getattr(jax.config, name) for name in options}
  for values in (options, before):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at its options once
    if values is options:
      yield


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
  """A folder with a text, and a finished run of 8 steps on it."""
  folder = tmp_path_factory.mktemp("train")
  rng = np.random.default_rng(0)
  (folder / "text.txt").write_bytes(bytes(rng.choice(np.frombuffer(b"abcde \n", np.uint8), 3000)))
  return folder


@pytest.fixture(scope="module", name="whole")
def _whole(folder):
  return train(CONFIG, folder / "whole", text_path=str(folder / "text.txt"))


# Text -----------------------------------------------------------------------------------------------------------------


def test_the_default_text_is_the_standard_library_and_the_same_each_time():
  first, second = text_lib.read(None), text_lib.read(None)
  assert first.fingerprint() == second.fingerprint()
  assert 1_000_000 < first.train.size + first.held_out.size <= text_lib.STDLIB_BYTES
  assert b"import " in first.held_out.tobytes()


@pytest.mark.parametrize("sizes", [
    [3000], [2_000_000], [500] * 30, [10, 5000, 20], [100] * 9 + [9000], [1000] * 3, [40]])
def test_a_tenth_is_held_out_and_nothing_is_in_both_parts(sizes):
  total = sum(sizes)
  joined = (np.arange(total) % 251).astype(np.uint8).tobytes()
  ends = np.cumsum([0, *sizes])
  text = text_lib.split([joined[a:b] for a, b in zip(ends, ends[1:])], "here")
  assert text.train.size + text.held_out.size == total
  assert 0.04 * total <= text.held_out.size <= 0.11 * total
  counts = np.bincount(text.train, minlength=256) + np.bincount(text.held_out, minlength=256)
  np.testing.assert_array_equal(counts, np.bincount(np.frombuffer(joined, np.uint8), minlength=256))


def test_whole_files_are_held_out_where_there_are_enough():
  texts = [bytes([i]) * 50 for i in range(40)]
  text = text_lib.split(texts, "here")
  assert not {*text.train} & {*text.held_out} and len({*text.held_out}) == 4


def test_folders_are_read_in_order_without_what_is_not_text(tmp_path):
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "x.txt").write_bytes(b"second " * 10)
  (tmp_path / "a.txt").write_bytes(b"first " * 10)
  (tmp_path / "c.png").write_bytes(b"\xff\xfe\x00")
  (tmp_path / ".hidden").write_bytes(b"hidden")
  text = text_lib.read(str(tmp_path))
  assert text.train.tobytes().startswith(b"first") and b"hidden" not in text.train.tobytes()
  assert "2 files (1 that is not text" in text.origin


def test_batches_depend_on_seed_and_step_alone():
  text = np.arange(200, dtype=np.uint8)
  one = text_lib.batch(text, 3, 5, seed=1, step=7)
  assert one.shape == (3, 6) and (np.diff(one) == 1).all()
  np.testing.assert_array_equal(one, text_lib.batch(text, 3, 5, seed=1, step=7))
  assert (one != text_lib.batch(text, 3, 5, seed=1, step=8)).any()
  assert (one != text_lib.batch(text, 3, 5, seed=2, step=7)).any()
  last = text_lib.batch(np.arange(6, dtype=np.uint8), 3, 5, 0, 0)  # a text of exactly one sequence
  assert (last == np.arange(6)).all()


@pytest.mark.parametrize("size", [2, 5, 16, 17, 18, 33, 100])
def test_windows_predict_each_byte_but_the_first_once(size):
  text = np.arange(size, dtype=np.uint8)
  seen = []
  for tokens, weights in text_lib.windows(text, 2, 16):
    assert tokens.shape == (2, 17) and weights.shape == (2, 16)
    seen += tokens[:, 1:][weights > 0].tolist()
  assert seen == list(range(1, size))


def test_entropy_of_single_bytes():
  assert text_lib.byte_entropy(np.frombuffer(b"abcd" * 5, np.uint8)) == 2.0
  assert text_lib.byte_entropy(np.frombuffer(b"aaaa", np.uint8)) == 0.0


# Training -------------------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(folder, whole):
  assert sorted(whole.losses) == list(range(1, 9)) and all(map(math.isfinite, whole.losses.values()))
  assert 0 < whole.byte_entropy < 3 and whole.held_out_bits > 0
  assert checkpoints.steps(folder / "whole") == [6, 8] and whole.checkpoint == folder / "whole" / "8"
  stored = json.loads((whole.checkpoint / "config" / "metadata").read_text())
  assert StackConfig.from_dict(stored) == CONFIG


def test_held_out_bits_are_those_of_a_direct_computation(folder, whole):
  model = families.language_model(CONFIG)
  tx = training.optimizer(CONFIG.train, model.stack.plan)
  variables = checkpoints.load(whole.checkpoint, training.abstract_state(model, tx))["variables"]
  held_out = text_lib.read(str(folder / "text.txt")).held_out.astype(np.int32)
  # The layers see one byte at a time, so that windows make no difference.
  log_probs = jax.nn.log_softmax(model.apply(variables, held_out[None, :-1]))[0]
  bits = -np.mean(np.asarray(log_probs)[np.arange(held_out.size - 1), held_out[1:]]) / math.log(2)
  np.testing.assert_allclose(whole.held_out_bits, bits, rtol=1e-5)


@pytest.mark.parametrize("stop", [2, 3])
def test_resumed_runs_have_the_losses_of_an_unbroken_one(folder, whole, stop, capsys):
  out, text = folder / f"resumed_{stop}", str(folder / "text.txt")
  first = train(CONFIG, out, text_path=text, stop=stop)
  second = train(CONFIG.override(["stack.remat=full"]), out, text_path=text, resume=True)
  assert {**first.losses, **second.losses} == pytest.approx(whole.losses, rel=1e-6)
  assert sorted(second.losses) == list(range(stop + 1, 9))
  assert second.held_out_bits == pytest.approx(whole.held_out_bits, rel=1e-6)
  assert "note: differs from the checkpoint: stack.remat (there 'none', here 'full')" in capsys.readouterr().out


def test_resuming_a_finished_run_measures_it_again(folder, whole, capsys):
  again = train(CONFIG, folder / "whole", text_path=str(folder / "text.txt"), resume=True)
  assert not again.losses and again.held_out_bits == whole.held_out_bits
  assert "nothing is left to train: 8 steps are done, of 8" in capsys.readouterr().out


def test_statistics_are_state_and_sown_losses_are_trained_on():
  plain, with_aux = (families.language_model(CONFIG.override([f"model.args={{aux: {aux}}}"])) for aux in (0.0, 100.0))
  tokens = text_lib.batch(np.arange(100, dtype=np.uint8), 2, 4, 0, 0)
  biases = []
  for model in (plain, with_aux):
    tx = optax.sgd(1e-2)
    state = training.init_state(model, tx, 0)
    assert set(state["variables"]) == {"params", "statistics"}
    state, loss = training.train_step(model, tx, 0)(state, tokens)
    assert state["variables"]["statistics"]["layers"]["mean"].shape == (2,) and int(state["step"]) == 1
    biases.append(state["variables"]["params"]["layers"]["Dense_0"]["bias"])
  np.testing.assert_allclose(biases[1], biases[0] - 1.0, rtol=1e-4)  # 100 per bias, at a rate of 0.01


def test_only_matrices_decay():
  plan = ls.Plan.homogeneous(ls.LayerSpec(Layer), 3)
  config = CONFIG.override(["train.learning_rate=0.1", "train.weight_decay=0.5", "train.warmup=0"]).train
  tx = training.optimizer(config, plan)
  params = {"layers": {"kernel": jnp.ones((3, 4, 4)), "scale": jnp.ones((3, 4))},
            "head": jnp.ones((4, 4)), "norm": jnp.ones((4,))}
  updates = jax.jit(lambda params: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0])(params)
  decayed = {key: bool(jnp.any(leaf)) for key, leaf in {**updates["layers"], **updates}.items() if key != "layers"}
  assert decayed == {"kernel": True, "scale": False, "head": True, "norm": False}


def test_the_state_is_donated():
  model = families.language_model(CONFIG)
  tx = training.optimizer(CONFIG.train, model.stack.plan)
  abstract = training.abstract_state(model, tx)
  lowered = training.train_step(model, tx, 0).lower(abstract, jax.ShapeDtypeStruct((2, 5), jnp.int32))
  donated = [arg.donated for arg in jax.tree.leaves(lowered.args_info[0][0])]
  assert donated and all(donated)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_run_is_not_overwritten(folder, whole):
  with pytest.raises(CommandError, match="holds a checkpoint of step 8; --resume goes on from it"):
    train(CONFIG, folder / "whole", text_path=str(folder / "text.txt"))
  assert checkpoints.steps(folder / "whole") == [6, 8]


@pytest.mark.parametrize("change, words", [
    (["model.num_layers=3"], ["another model", "model.num_layers (there 2, here 3)"]),
    (["stack.scan=false"], ["laid out in another way", "stack.scan (there True, here False)"]),
    (["model.args={aux: 1}"], ["another model", "model.args.aux"]),
])
def test_another_model_does_not_resume(folder, whole, change, words):
  with pytest.raises(CommandError) as raised:
    train(CONFIG.override(change), folder / "whole", text_path=str(folder / "text.txt"), resume=True)
  assert all(word in str(raised.value) for word in words)


def test_another_text_does_not_resume(folder, whole):
  (folder / "other.txt").write_bytes(b"other " * 500)
  with pytest.raises(CommandError, match="it was trained on another text"):
    train(CONFIG, folder / "whole", text_path=str(folder / "other.txt"), resume=True)


@pytest.mark.parametrize("content, change, words", [
    (None, [], "No such file or directory"),
    (b"", [], "it is empty"),
    (b"\xff\xfe\x00", [], "none of its 1 files is text"),
    (b"short", [], "one sequence takes 17"),
    (b"long enough " * 9, ["model.vocab=100"], "model.vocab must be at least 256"),
])
def test_texts_that_cannot_be_used(tmp_path, content, change, words):
  if content is not None:
    (tmp_path / "t.txt").write_bytes(content)
  with pytest.raises(CommandError, match=words):
    train(CONFIG.override(change), tmp_path / "out", text_path=str(tmp_path / "t.txt"))
  assert not (tmp_path / "out").exists()


def test_nothing_to_resume_from(tmp_path, folder):
  with pytest.raises(CommandError, match="no checkpoint at"):
    train(CONFIG, tmp_path / "out", text_path=str(folder / "text.txt"), resume=True)
  (tmp_path / "file").write_text("")
  with pytest.raises(CommandError, match="is a file; --out takes a folder"):
    train(CONFIG, tmp_path / "file", text_path=str(folder / "text.txt"))


def _fail_after(monkeypatch, target, name, error, calls):
  """Makes `target.name` raise once it was called `calls` times."""
  real, count = getattr(target, name), 0

  def failing(*args, **kwargs):
    nonlocal count
    count += 1
    if count > calls:
      raise error
    return real(*args, **kwargs)

  monkeypatch.setattr(target, name, failing)


@pytest.mark.parametrize("where, error, status, words", [
    ("write", OSError(errno.ENOSPC, "No space left on device"), 1, "cannot write a checkpoint to .*no space left"),
    ("write", ValueError("RESOURCE_EXHAUSTED: ... No space left on device [os_error_code='28']"), 1, "no space left"),
    ("write", KeyboardInterrupt(), 130, "interrupted in step 6"),
    ("step", KeyboardInterrupt(), 130, "interrupted in step 5"),
])
def test_a_failed_write_leaves_the_last_whole_checkpoint(folder, whole, tmp_path, monkeypatch, where, error, status,
                                                         words):
  text = str(folder / "text.txt")
  verbosity = logging.get_verbosity()
  monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # puts it back at the end
  with monkeypatch.context() as patch:
    if where == "write":
      # The second checkpoint fails when its first part is on disk.
      _fail_after(patch, ocp.JsonCheckpointHandler, "async_save", error, 2)
    else:
      _fail_after(patch, text_lib, "batch", error, 5)  # once for the trace, then once a step
    with pytest.raises(CommandError, match=words) as raised:
      train(CONFIG, tmp_path, text_path=text)
  assert raised.value.status == status and f"the last whole checkpoint is {tmp_path / '3'}" in str(raised.value)
  assert checkpoints.steps(tmp_path) == [3]
  resumed = train(CONFIG, tmp_path, text_path=text, resume=True)
  assert resumed.losses == pytest.approx({step: whole.losses[step] for step in range(4, 9)}, rel=1e-6)
  assert sorted(os.listdir(tmp_path)) == ["6", "8"]  # and what was left behind is gone
  logging.set_verbosity(verbosity)


def test_ctrl_c_in_a_write_waits_for_its_end(tmp_path, monkeypatch):
  real, handler = ocp.CompositeCheckpointHandler.save, signal.getsignal(signal.SIGINT)

  def save(*args, **kwargs):
    signal.raise_signal(signal.SIGINT)
    return real(*args, **kwargs)

  monkeypatch.setattr(ocp.CompositeCheckpointHandler, "save", save)
  state = {"variables": {"params": {"a": jnp.ones(3)}}, "optimizer": {"b": jnp.ones(3)}, "step": jnp.asarray(4)}
  with pytest.raises(KeyboardInterrupt):
    checkpoints.save(tmp_path, state, CONFIG, {})
  restored = checkpoints.load(tmp_path / "4", {"variables": state["variables"]})
  np.testing.assert_array_equal(restored["variables"]["params"]["a"], jnp.ones(3))
  assert signal.getsignal(signal.SIGINT) is handler


def test_a_full_disk_is_seen_before_writing(tmp_path, monkeypatch):
  monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
  state = {"variables": {"params": {"a": jnp.ones(300)}}, "optimizer": {}, "step": jnp.asarray(4)}
  with pytest.raises(checkpoints.CheckpointError, match="no space left on device: it takes .* are free; there is no"):
    checkpoints.save(tmp_path, state, CONFIG, {})
  assert not os.listdir(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(folder, tmp_path):
  config = CONFIG.override(["train.learning_rate=1e30", "train.clip_norm=1e30", "train.warmup=0"])
  with pytest.raises(CommandError, match="the loss of step . is (nan|inf)"):
    train(config, tmp_path, text_path=str(folder / "text.txt"))


def test_checkpoints_that_are_not_whole(folder, whole, tmp_path, capsys):
  state = {"variables": {"params": {"a": jnp.ones(3)}}, "optimizer": {"b": jnp.ones(3)}, "step": jnp.asarray(4)}
  path = checkpoints.save(tmp_path, state, CONFIG, {})
  with pytest.raises(checkpoints.CheckpointError, match="does not fit this model: params/a is .3,. and should be .2,."):
    checkpoints.load(path, {"variables": {"params": {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}}})
  (path / "config" / "metadata").write_text("{")
  with pytest.raises(checkpoints.CheckpointError, match="has a broken config"):
    checkpoints.load_config(path)
  (path / "config" / "metadata").unlink()
  assert main(["generate", str(path), "--prompt", "a"]) == 1
  assert "has no config" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_the_program_with_a_message(tmp_path):
  (tmp_path / "t.txt").write_bytes(b"some text to train on\n" * 500)
  (tmp_path / "c.yml").write_text(
      "model: {vocab: 256, embed: 8, family: decoder, args: {mlp: 8, num_heads: 1}, num_layers: 1}\n"
      "train: {steps: 1000000, seq: 8, batch: 1, checkpoint_every: 50}\n")
  # As `python -m linen_stack`, but what runs the tests may ignore Ctrl-C, and its children with it.
  program = ("import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
             "runpy.run_module('linen_stack', run_name='__main__', alter_sys=True)")
  command = [sys.executable, "-c", program, "train", str(tmp_path / "c.yml"), "--text", str(tmp_path / "t.txt"),
             "--out", str(tmp_path / "out"), "--set", "train.checkpoint_every=5"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        cwd=pathlib.Path(__file__).parents[1]) as process:
    (tmp_path / "out").mkdir()
    while process.poll() is None and len(checkpoints.steps(tmp_path / "out")) < 2:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.1)
    process.send_signal(signal.SIGINT)
    try:
      _, err = process.communicate(timeout=120)
    finally:
      process.kill()
  assert process.returncode == 130, err
  assert "interrupted in step" in err and "the last whole checkpoint is" in err and "Traceback" not in err
  checkpoints.load_config(checkpoints.find(tmp_path / "out"))


@pytest.mark.slow
def test_train_and_generate_from_the_command_line(tmp_path, folder, capsys):
  argv = ["--set", "model.embed=16", "--set", "model.args={mlp: 16, num_heads: 2}", "--set", "train.seq=16",
          "--set", "model.num_layers=2", "--text", str(folder / "text.txt"), "--out", str(tmp_path), "--steps", "2"]
  assert main(["train", "tiny", *argv]) == 0
  out = capsys.readouterr().out
  for words in ("2 layers, 1 traced", "parameters, ", "trace ", "compile ", "step 2/2  loss ", "tokens/s", "memory: at most ", "held out: ",
                "bits per byte; entropy of single bytes: "):
    assert words in out
  assert main(["generate", str(tmp_path), "--prompt", "ab", "--tokens", "5"]) == 0
  first = capsys.readouterr().out
  assert first.startswith("ab") and main(["generate", str(tmp_path / "2"), "--prompt", "ab", "--tokens", "5"]) == 0
  assert capsys.readouterr().out == first


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_done(tmp_path, capsys):
  (tmp_path / "file").write_text("")
  with pytest.raises(CommandError, match="cannot write checkpoints to .*file/run: "):
    train(CONFIG, tmp_path / "file" / "run")
  assert "parameters" not in capsys.readouterr().out
