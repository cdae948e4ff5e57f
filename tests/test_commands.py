"""The command line: help, mistakes, `plan`, and the errors of `generate`."""
import os
import pathlib
import re
import subprocess
import sys

from flax import linen as nn
import pytest

from linen_stack import commands
from linen_stack.commands import main


def run(capsys, *argv):
  """(exit status, stdout, stderr) of a command line."""
  status = main(argv)
  out = capsys.readouterr()
  return status, out.out, out.err


def test_no_command_prints_help(capsys):
  status, out, err = run(capsys)
  assert status == 0 and not err
  assert all(name in out for name in commands.COMMANDS)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_help_with_its_flags(capsys, name):
  status, out, _ = run(capsys, name, "--help")
  assert status == 0 and f"python -m linen_stack {name}" in out and "--traceback" in out


@pytest.mark.parametrize("argv, words", [
    (["trian", "tiny"], "no command 'trian'; did you mean 'train'?"),
    (["--steps", "3", "train"], "no flag before the command '--steps'"),
    (["train", "tiny", "--stpes", "3"], "train has no flag --stpes; did you mean 'steps'?"),
    (["plan", "tiny", "--steps", "3"], "plan has no flag --steps"),
    (["train", "tiny", "--steps", "three"], "invalid literal"),
    (["train", "tiny", "--steps", "0"], "--steps"),
    (["train"], "train needs CONFIG"),
    (["train", "tiny", "train.steps=3"], "unexpected argument 'train.steps=3'; write --set train.steps=3"),
    (["plan", "tiny", "small"], "unexpected argument 'small'; it takes CONFIG"),
    (["generate", "runs"], "generate needs --prompt"),
])
def test_command_lines_that_cannot_be_understood_have_status_2(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 2 and not out and words in err
  assert err.count("\n") == 1  # one line, no traceback


@pytest.mark.parametrize("argv, words", [
    (["plan", "tinny"], "no config 'tinny': neither a file nor a shipped config; did you mean 'tiny'?"),
    (["plan", "tiny", "--set", "stack.remta=full"], "unknown key 'stack.remta'; did you mean 'remat'?"),
    (["plan", "tiny", "--set", "model.args.num_heads=3"], "not a multiple of num_heads 3"),
    (["plan", "tiny", "--set", "stack.remat={save: [contxt]}"], "did you mean 'context'?"),
    (["plan", "tiny", "--set", "stack.offload_params=true", "--set", "stack.param_axis=1"],
     "offload_params needs param_axis=0"),
    (["generate", "no/such/run", "--prompt", "a"], "there is no such file or folder"),
    (["generate", ".", "--prompt", "a"], "it holds no step that was written to the end"),
    (["generate", "no/such/run", "--prompt", ""], "--prompt is empty"),
])
def test_what_users_get_wrong_is_one_line_and_status_1(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 1 and not out and words in err
  assert err.count("\n") == 1


def test_traceback_flag_shows_where(capsys):
  with pytest.raises(commands.CommandError):
    main(["plan", "tinny", "--traceback"])


def test_plan_prints_segments_and_parameters(capsys):
  status, out, _ = run(capsys, "plan", "tiny-hybrid")
  assert status == 0
  assert "14 layers, 3 traced" in out and "layers:3 local:3" in out
  assert re.search(r"layers/local/attention/query/kernel +\[3, 3, 96, 4, 24\] +float32 +"
                   r"layers local embed q_heads head_dim", out)
  numbers = [int(n.replace(",", "")) for n in re.findall(r"  ([\d,]+)$", out, re.MULTILINE)]
  assert f"{sum(numbers):,} parameters" in out


def test_plan_allocates_nothing(capsys):
  status, out, _ = run(capsys, "plan", "llama3-8b", "--set", "model.num_layers=1000")
  assert status == 0 and "[1000, 4096, 14336]" in out and "219,162,677,248 parameters" in out


class PlainLayer(nn.Module):
  """A layer without logical axes."""

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    self.variable("counts", "calls", lambda: 0.0)
    return x + nn.Dense(x.shape[-1])(x)


def test_plan_of_an_own_layer_from_a_file(capsys, tmp_path):
  path = tmp_path / "own.yml"
  path.write_text(f"model: {{vocab: 16, embed: 8, layer: '{__name__}:PlainLayer', num_layers: 3}}\n")
  status, out, _ = run(capsys, "plan", str(path))
  assert status == 0 and "(counts) layers/calls" in out
  assert re.search(r"layers/Dense_0/kernel +\[3, 8, 8\] +float32 +- ", out)


def test_the_program_ends_with_the_status(tmp_path):
  done = subprocess.run([sys.executable, "-m", "linen_stack", "paln"], capture_output=True, text=True, check=False,
                        cwd=pathlib.Path(__file__).parents[1])
  assert done.returncode == 2 and done.stderr == "linen_stack: no command 'paln'; did you mean 'plan'?\n"


@pytest.mark.parametrize("module", ["jax", "linen_stack.commands", "linen_stack.commands.train"])
def test_ctrl_c_while_modules_are_imported(module, tmp_path):
  (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
  def find_spec(self, name, *args):
    if name == {module!r}:
      os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
""")
  done = subprocess.run([sys.executable, "-m", "linen_stack", "train", "tiny"], capture_output=True, text=True, check=False,
                        cwd=pathlib.Path(__file__).parents[1], env={**os.environ, "PYTHONPATH": str(tmp_path)})
  assert (done.returncode, done.stderr) == (130, "linen_stack: interrupted\n")
