"""Weights elsewhere than on a TPU, read from programs compiled ahead of time. Sizes repeat to the byte, so bounds are exact."""
import importlib.metadata
import json
import subprocess
import sys

import pytest

# One worker compiles for all of these tests.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tpu")]

WIDE = dict(width=1024, batch=8, seq=128)
BUSY = dict(batch=8, seq=256)  # values that are kept outweigh parameters
# Products of a v5p take gathers along; later compilers leave that to v5e alone.
ON_V5P = tuple(map(int, importlib.metadata.version("libtpu").split(".")[:3])) < (0, 0, 50)
SPLIT = dict(width=1024, batch=16, seq=256, devices=4, program="gathered", topology="v5p:2x2x1" if ON_V5P else "v5e:2x2")
CASES = {
    "resident": dict(WIDE),
    "gradients": dict(WIDE, offload_params=True),
    "ahead": dict(WIDE, offload_params=True, prefetch=True),
    "gathered": dict(SPLIT),
    "gathered ahead": dict(SPLIT, prefetch=True),
    **({} if ON_V5P else {"gathered on v5p": dict(SPLIT, prefetch=True, topology="v5p:2x2x1")}),
    "step": dict(WIDE, offload_params=True, program="step"),
    "init": dict(width=1024, offload_params=True, program="init"),
    "prefix step": dict(plan="prefix", offload_params=True, program="step"),
    "cycle": dict(plan="cycle", offload_params=True, remat="minimal_offloaded"),
    "cycle step": dict(plan="cycle", offload_params=True, program="step"),
    "deep cycle step": dict(plan="deep cycle", offload_params=True, program="step"),
    "cycle decode": dict(plan="cycle", offload_params=True, program="decode"),
    "split": dict(devices=4, batch=4, offload_params=True, program="step"),
    "remainder offloaded": dict(BUSY, plan="remainder", remat="P('minimal_offloaded', carry='offload')"),
    "remainder saved": dict(BUSY, plan="remainder", remat="P('minimal_offloaded', carry='offload').saved"),
    "v6e offloaded": dict(BUSY, remat="minimal_offloaded", topology="v6e:2x2"),
    "v6e saved": dict(BUSY, remat="minimal", topology="v6e:2x2"),
    "vectors": dict(program="vectors"),
}


@pytest.fixture(scope="module")
def sizes():
  done = subprocess.run([sys.executable, "-m", "tests.host_programs", json.dumps(list(CASES.values()))],
                        capture_output=True, text=True, timeout=2400, check=False)
  lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
  assert len(lines) == len(CASES), done.stderr[-3000:]
  return dict(zip(CASES, lines))


def test_every_program_compiles(sizes):
  errors = {name: size["error"] for name, size in sizes.items() if "error" in size}
  assert not {name: error for name, error in errors.items() if name not in ("vectors", "gathered on v5p")}


def test_the_device_holds_few_parameters_at_a_time(sizes):
  """12 layers of width 1024."""
  resident, host = sizes["resident"], sizes["gradients"]
  assert resident["args"] >= host["params"] and host["host_args"] >= 0.99 * host["params"]
  assert host["args"] <= 0.05 * host["params"]
  assert host["temp"] <= resident["temp"] + 3 * host["layer"]


def test_the_next_layer_is_fetched_while_one_computes(sizes):
  """Forward and backward."""
  ahead, host = sizes["ahead"], sizes["gradients"]
  assert ahead["hidden"] == [True, True]
  assert ahead["temp"] <= host["temp"] + 2 * host["layer"]


def test_the_next_layer_is_gathered_while_one_computes(sizes):
  """Of layers that are split over 4 devices, forward and backward."""
  ahead, split = sizes["gathered ahead"], sizes["gathered"]
  assert ahead["hidden"] == [True, True]
  assert split["args"] == ahead["args"] <= 0.26 * split["params"]
  assert ahead["temp"] <= split["temp"] + 2 * split["layer"]


def test_gathers_on_v5p_are_hidden_or_refused(sizes):
  """When they are refused no longer, the compiler has learnt it, and the README need not say so."""
  on_v5p = sizes["gathered ahead" if ON_V5P else "gathered on v5p"]
  assert on_v5p["hidden"] == [True, True] if ON_V5P else "not supported" in on_v5p["error"]


def test_a_whole_train_step_takes_less_than_the_parameters(sizes):
  """12 layers of width 1024, with clipping and AdamW; parameters and the optimiser's state are written in place."""
  step = sizes["step"]
  assert step["peak"] < 0.5 * step["params"]
  assert step["host_alias"] == step["host_out"] >= 2.99 * step["params"]


def test_parameters_and_optimiser_are_made_layer_by_layer(sizes):
  init = sizes["init"]
  assert init["host_out"] >= 2.99 * init["params"] and init["peak"] <= 2 * init["layer"]


def test_other_layouts(sizes):
  assert sizes["prefix step"]["peak"] < sizes["prefix step"]["params"]
  # Twice the layers: no more of them on the device.
  assert sizes["deep cycle step"]["temp"] < sizes["cycle step"]["temp"] + 2 * sizes["cycle step"]["layer"]
  assert sizes["cycle decode"]["temp"] < 0.5 * sizes["cycle decode"]["params"]
  assert sizes["split"]["args"] <= 0.05 * sizes["split"]["params"] / 4


@pytest.mark.parametrize("name", ["remainder", "v6e"])
def test_values_in_host_memory_leave_the_device(sizes, name):
  offloaded, saved = sizes[f"{name} offloaded"], sizes[f"{name} saved"]
  assert offloaded["temp"] < saved["temp"] and offloaded["host_temp"] > saved["host_temp"] == 0


def test_vectors_of_short_elements_still_do_not_compile(sizes):
  """When this fails, the compiler has learnt it: `StackedDecoder.selects` need not refuse them any longer."""
  assert "Sublane slicing" in sizes["vectors"]["error"]
