"""Memory on a TPU, read from programs compiled ahead of time. Sizes repeat to the byte, so bounds are exact."""
import json
import subprocess
import sys

import pytest

# One worker compiles for all of these tests.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tpu")]

CARRY = 8 * 512 * 256 * 2  # bytes of one layer's hidden states
CASES = {
    "flat full": dict(plan="flat"),
    "flat minimal": dict(plan="flat", remat="minimal"),
    "flat minimal_offloaded": dict(plan="flat", remat="minimal_offloaded"),
    "flat carry offloaded": dict(plan="flat", remat="P(carry='offload')"),
    "apart full": dict(plan="apart"),
    "apart full, merged": dict(plan="apart", remat="P(prevent_cse=False)"),
    "cycle full": dict(plan="cycle"),
    "cycle whole blocks": dict(plan="cycle", remat="P(every=4)"),
    "cycle minimal": dict(plan="cycle", remat="minimal"),
    "cycle minimal_offloaded": dict(plan="cycle", remat="minimal_offloaded"),
    "cycle carry offloaded": dict(plan="cycle", remat="P(carry='offload')"),
    "remainder full": dict(plan="remainder"),
    "remainder carry offloaded": dict(plan="remainder", remat="P(carry='offload')"),
}


@pytest.fixture(scope="module")
def sizes():
  done = subprocess.run([sys.executable, "-m", "tests.tpu_programs", json.dumps(list(CASES.values()))],
                        capture_output=True, text=True, timeout=1500, check=False)
  lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
  assert len(lines) == len(CASES), done.stderr[-3000:]
  return dict(zip(CASES, lines))


def test_every_program_compiles(sizes):
  assert not {name: size["error"] for name, size in sizes.items() if "error" in size}


@pytest.mark.parametrize("plan", ["flat", "cycle"])
def test_full_keeps_less_than_minimal_and_offload_moves_it_to_the_host(sizes, plan):
  full, minimal, offloaded = (sizes[f"{plan} {name}"] for name in ("full", "minimal", "minimal_offloaded"))
  assert full["temp"] < minimal["temp"] and full["host"] == minimal["host"] == 0
  assert offloaded["temp"] < minimal["temp"] and offloaded["host"] > 0


def test_carries_leave_the_device(sizes):
  for name, layers in (("flat", 8), ("cycle", 16), ("remainder", 14)):
    full, offloaded = sizes[f"{name} full"], sizes[f"{name} carry offloaded"]
    assert offloaded["host"] >= (layers - 1) * CARRY
    assert full["temp"] - offloaded["temp"] >= (layers - 2) * CARRY


def test_straight_line_layers_are_kept_from_being_merged(sizes):
  assert sizes["apart full"]["temp"] < 0.6 * sizes["apart full, merged"]["temp"]


def test_layers_of_a_block_are_rematerialised_alone(sizes):
  assert sizes["cycle full"]["temp"] <= 0.6 * sizes["cycle whole blocks"]["temp"]
