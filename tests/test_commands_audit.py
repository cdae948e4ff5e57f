"""The command `audit`: its report, its exit status, and what users get wrong."""
import re

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
import pytest

from linen_stack import commands
from linen_stack.commands import main

SMALL = "model.args={mlp: 16, num_heads: 2}"


class PlainLayer(nn.Module):
  """A layer that tags one value, and takes no option but the one that language models pass."""

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    return x + checkpoint_name(nn.Dense(x.shape[-1])(x), "dense")


def run(capsys, *argv):
  """(exit status, stdout, stderr) of `audit`."""
  status = main(["audit", *argv])
  out = capsys.readouterr()
  return status, out.out, out.err


def row(out, *cells):
  """Whether the table has a row that starts with these cells."""
  return re.search("^" + " +".join(map(re.escape, cells)) + " ", out, re.MULTILINE)


def test_report_of_a_shipped_config(capsys):
  status, out, err = run(capsys, "tiny-hybrid")
  assert status == 0 and not err
  assert out.startswith("batch 16, seq 128\npolicy of layers: save_qkv_proj\n"
                        "policy of layers_remainder: save_qkv_proj\n")
  assert row(out, "layers", "local", "9", "carry", "[16, 128, 96]")
  assert row(out, "layers", "global", "3", "query_proj", "[16, 128, 4, 24]")
  assert row(out, "layers_remainder", "local", "2", "mlpwo", "[16, 128, 96]")
  assert " saved, " in out and "info: " in out and "error: " not in out


def test_batch_and_seq(capsys):
  status, out, _ = run(capsys, "tiny", "--batch", "3", "--seq", "5", "--set", "stack.remat=full")
  assert status == 0 and out.startswith("batch 3, seq 5\npolicy of layers: full\n")
  assert row(out, "layers", "decoder_layer", "4", "query_proj", "[3, 5, 4, 32]")


def test_set_wins_over_the_file_and_flags_over_both(capsys):
  _, out, _ = run(capsys, "tiny", "--set", "train.batch=2", "--set", "train.seq=6", "--seq", "7", "--set", SMALL)
  assert out.startswith("batch 2, seq 7\npolicy of layers: none\n")
  assert "kept (no remat)" in out


def test_errors_of_the_report_end_with_status_1(capsys):
  status, out, err = run(capsys, "tiny", "--set", "stack.remat={save: [contxt], offload: [mlpwi_2]}")
  assert status == 1 and err == "linen_stack: the audit of tiny found 2 errors\n"
  assert "error: the policy names 'contxt', which is not tagged by any layer of the plan; did you mean 'context'" in out
  assert "error: the policy names 'mlpwi_2'" in out and row(out, "layers", "decoder_layer", "4", "context")


def test_warnings_are_no_errors(capsys):
  status, out, err = run(capsys, "tiny", "--set", "stack.remat={save: [decoder_layer_input]}")
  assert status == 0 and not err and "warning: " in out


def test_policies_by_segment(capsys):
  remat = "stack.remat={layers: {offload: [out_proj], carry: offload}, layers_remainder: none}"
  status, out, _ = run(capsys, "tiny-hybrid", "--set", remat)
  assert status == 0
  assert "policy of layers: offload out_proj, carry offload\npolicy of layers_remainder: none\n" in out
  assert re.search(r"^layers +local .* out_proj .* offloaded$", out, re.MULTILINE)
  assert re.search(r"^layers_remainder +local .* out_proj .* kept \(no remat\)$", out, re.MULTILINE)


def test_own_layer_from_a_file(capsys, tmp_path):
  path = tmp_path / "own.yml"
  path.write_text(f"model: {{vocab: 16, embed: 8, layer: '{__name__}:PlainLayer', num_layers: 3}}\n"
                  "stack: {remat: {save: [dense]}}\n")
  status, out, _ = run(capsys, str(path), "--batch", "1", "--seq", "4")
  assert status == 0 and row(out, "layers", "plain_layer", "3", "dense", "[1, 4, 8]")
  status, out, err = run(capsys, str(path), "--set", "stack.remat=minimal")
  assert status == 1 and "1 error" in err
  assert "error: preset minimal: none of its names" in out and "tags there: dense" in out


def test_a_large_model_is_not_allocated(capsys):
  status, out, _ = run(capsys, "llama3-8b", "--set", "model.num_layers=1000", "--batch", "1", "--seq", "8192")
  assert status == 0 and row(out, "layers", "decoder_layer", "1000", "mlpwo", "[1, 8192, 4096]")


@pytest.mark.parametrize("argv, words", [
    ([], "audit needs CONFIG"),
    (["tiny", "tiny"], "unexpected argument 'tiny'; it takes CONFIG"),
    (["tiny", "stack.remat=full"], "write --set stack.remat=full"),
    (["tiny", "--bacth", "3"], "audit has no flag --bacth; did you mean 'batch'?"),
    (["tiny", "--batch", "0"], "--batch"),
    (["tiny", "--seq", "x"], "invalid literal"),
])
def test_command_lines_that_cannot_be_understood_have_status_2(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 2 and not out and words in err
  assert err.count("\n") == 1


@pytest.mark.parametrize("argv, words", [
    (["tinny"], "no config 'tinny': neither a file nor a shipped config; did you mean 'tiny'?"),
    (["tiny", "--set", "stack.remat=minimall"], "unknown remat preset 'minimall'; did you mean 'minimal'?"),
    (["tiny", "--set", "stack.remat={layer: full}"], "did you mean 'layers'?"),
    (["tiny", "--set", "stack.remat={levels: [2, 2], every: 2}"], "exclude each other"),
    (["tiny", "--set", "model.args.num_heads=3"], "not a multiple of num_heads 3"),
    (["tiny", "--set", "model.vocab=null"], "'model.vocab' is missing"),
])
def test_what_users_get_wrong_is_one_line_and_status_1(capsys, argv, words):
  status, out, err = run(capsys, *argv)
  assert status == 1 and not out and words in err
  assert err.count("\n") == 1


def test_traceback_flag_shows_where(capsys):
  with pytest.raises(commands.CommandError, match="found 1 error"):
    main(["audit", "tiny", "--set", "stack.remat={save: [contxt]}", "--traceback"])
  assert "did you mean 'context'?" in capsys.readouterr().out
