"""Training with parameters, gradients and the optimiser's state in host memory."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linen_stack import checkpoints, training
from linen_stack import text as text_lib
from linen_stack.commands import main
from linen_stack.commands.train import train
from linen_stack.config import StackConfig
from linen_stack.models import families
from tests.test_placement import on_host

# Kernels of 16 KiB and more a layer, so that `true` selects them.
TINY = ["model.embed=64", "model.args={mlp: 64, num_heads: 2}", "model.num_layers=3", "train.batch=2", "train.seq=16",
        "train.steps=20", "train.checkpoint_every=null", "stack.remat=full"]
CONFIG = StackConfig.from_yaml("tiny").override(TINY)
OFFLOADED = CONFIG.override(["stack.offload_params=true"])
KERNELS = {f"attention/{name}/kernel" for name in ("query", "key", "value", "out")} | {
    f"feed_forward/{name}/kernel" for name in ("wi_0", "wi_1", "wo")}


@pytest.fixture(scope="module", name="text")
def _text(tmp_path_factory):
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_bytes(bytes(np.random.default_rng(0).choice(np.frombuffer(b"abcde \n", np.uint8), 3000)))
  return str(path)


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory, text):
  """A finished run of 20 steps on the device, and one in host memory that was interrupted after 15."""
  out = tmp_path_factory.mktemp("runs")
  plain = train(CONFIG, out / "plain", text_path=text)
  argv = [arg for pair in (*TINY, "stack.offload_params=true") for arg in ("--set", pair)]
  assert main(["train", "tiny", *argv, "--text", text, "--out", str(out / "host"), "--steps", "15"]) == 0
  return out, plain


def state_of(config, path=None):
  model = families.language_model(config)
  tx = training.optimizer(config.train, model.stack.plan)
  return checkpoints.load(path, training.abstract_state(model, tx)) if path else training.init_state(model, tx, 0)


def test_losses_of_20_steps_are_those_without(runs, text, tmp_path):
  _, plain = runs
  host = train(OFFLOADED, tmp_path, text_path=text)
  assert sorted(host.losses) == list(range(1, 21)) and host.losses == pytest.approx(plain.losses, rel=1e-6)
  assert host.losses[20] < host.losses[1]
  assert host.held_out_bits == pytest.approx(plain.held_out_bits, rel=1e-6)


@pytest.mark.parametrize("config", [OFFLOADED, CONFIG], ids=["host", "device"])
def test_resuming_into_another_placement(runs, text, config, capsys):
  out, plain = runs
  before = checkpoints.find(out / "host").name
  resumed = train(config, out / "host", text_path=text, resume=True, stop=int(before) + 2)
  want = {step: plain.losses[step] for step in resumed.losses}
  assert len(want) == 2 and resumed.losses == pytest.approx(want, rel=1e-6)
  note = "note: differs from the checkpoint: stack.offload_params"
  assert (note in capsys.readouterr().out) == (config is CONFIG)


def test_a_run_on_the_device_goes_on_in_host_memory(runs, text, tmp_path):
  _, plain = runs
  train(CONFIG, tmp_path, text_path=text, stop=2)
  resumed = train(OFFLOADED, tmp_path, text_path=text, resume=True, stop=4)
  assert resumed.losses == pytest.approx({step: plain.losses[step] for step in (3, 4)}, rel=1e-6)


def test_where_the_state_is(runs):
  out, _ = runs
  want = {f"variables/params/layers/{kernel}" for kernel in KERNELS} | {
      f"optimizer/1/0/{moment}/layers/{kernel}" for moment in ("mu", "nu") for kernel in KERNELS}
  path = checkpoints.find(out / "plain")
  states = state_of(OFFLOADED), state_of(OFFLOADED, path)
  for state in states:
    assert on_host(state) == want
  plain = state_of(CONFIG), state_of(CONFIG, path)
  assert not on_host(plain)
  jax.tree.map(np.testing.assert_array_equal, states, plain)
  model = families.language_model(OFFLOADED)
  tx = training.optimizer(OFFLOADED.train, model.stack.plan)
  step = training.train_step(model, tx, 0)
  state, _ = step(states[0], text_lib.batch(np.arange(100, dtype=np.uint8), 2, 16, 0, 0))
  assert on_host(state) == want and int(state["step"]) == 1
  abstract = training.abstract_state(model, tx)
  donated = [arg.donated for arg in jax.tree.leaves(step.lower(abstract, jnp.zeros((2, 17), int)).args_info[0][0])]
  assert donated and all(donated)


def test_generating_from_host_memory(runs, capsys):
  out, _ = runs
  texts = []
  for run in ("plain", "host"):
    assert main(["generate", str(out / run), "--prompt", "ab", "--tokens", "4"]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0].startswith("ab") and texts[1].startswith("ab")


def test_a_selection_of_nothing_is_told_before_training(text, tmp_path, capsys):
  argv = [arg for pair in (*TINY, "stack.offload_params=1000000") for arg in ("--set", pair)]
  assert main(["train", "tiny", *argv, "--text", text, "--out", str(tmp_path / "none")]) == 1
  err = capsys.readouterr().err
  assert "offload_params (1000000) selects none of the layers' parameters" in err and "Traceback" not in err
  assert not (tmp_path / "none").exists()
