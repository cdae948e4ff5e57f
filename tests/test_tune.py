"""The tuner: what its model says against programs themselves, and how it searches, with a compiler that is made up."""
import dataclasses
import functools
import itertools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest
import yaml

import linen_stack as ls
from linen_stack.inspect import chips, flops, programs, render, tune
from linen_stack.inspect import candidates as candidates_lib
from linen_stack.inspect.estimate import Estimator
from linen_stack.inspect.memory import MemoryReport
from linen_stack.models import DecoderLayer

tune_lib = __import__("linen_stack.inspect.tune", fromlist=["search"])
TOPOLOGY = chips.topology("v5p:1x1x1")
LAYER = dict(embed=1024, mlp=4096, num_heads=8, dtype=jnp.bfloat16)
LOCAL, WIDE = (ls.LayerSpec(DecoderLayer, name, window=window, **LAYER) for name, window in (("local", 128), ("wide", None)))
PLANS = {"flat": ls.Plan.homogeneous(WIDE, 12), "cycle": ls.Plan.cycle([LOCAL, LOCAL, WIDE], 13),
         "prefix": ls.Plan.homogeneous(LOCAL, 1, "first") + ls.Plan.homogeneous(WIDE, 8)}
HIDDEN = jax.ShapeDtypeStruct((8, 512, 1024), jnp.bfloat16)
BASE = 2**30


@functools.cache
def program(layout):
  mesh = programs.as_mesh(None, TOPOLOGY)
  return programs.gradients(ls.StackedDecoder(PLANS[layout]), (HIDDEN,), {}, mesh, programs.as_rules(None, mesh), None)


@functools.cache
def ranked(layout):
  return tuple(candidates_lib.candidates(program(layout), TOPOLOGY.chip))


def made_up(hbm, host=0, topology=TOPOLOGY, error=None):
  """What compiling a program of that size would say."""
  zero = dict.fromkeys((field.name for field in dataclasses.fields(MemoryReport)), 0)
  return MemoryReport(**{**zero, "topology": topology, "temp": hbm, "host_temp": host, "out_of_memory": error,
                         "cached": False, "cost": flops.Cost()})


@pytest.fixture
def compiler(monkeypatch):
  """A compiler by whose word each kept byte takes `slope`, over a base; returns the policies that it was given."""
  given = []

  def replace(layout, slope=1.0, base=BASE):
    sizes = {candidate.policy: candidate for candidate in ranked(layout)}
    monkeypatch.setattr(tune_lib, "candidates", lambda program, chip: list(ranked(layout)))

    def compile_report(program, topology, **_):
      given.append(program.remat)
      candidate = sizes[program.remat]
      return made_up(base + round(slope * candidate.device), candidate.host)

    monkeypatch.setattr(tune_lib, "compile_report", compile_report)
    return given

  return replace


def search(layout, hbm, **options):
  return tune_lib.search(program(layout), TOPOLOGY, hbm, **options)


# The model -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PLANS)
def test_presets_are_weighed_as_their_own_programs_are(layout):
  estimator = Estimator(program(layout), TOPOLOGY.chip)
  by_preset = {name: candidate for candidate in ranked(layout) for name in candidate.presets}
  assert set(by_preset) == set(ls.RematPolicy.presets())
  full = estimator.estimate(ls.RematPolicy("full"))
  for name in ("none", "full", "minimal_with_context", "minimal_offloaded"):
    candidate, traced = by_preset[name], estimator.estimate(ls.RematPolicy(name))
    assert candidate.recomputed == traced.recomputed
    assert candidate.host == traced.host
    if name != "minimal_offloaded":  # there, buffers on the way to the host count as well
      grown = candidate.device - by_preset["full"].device
      assert grown == pytest.approx(traced.device - full.device, rel=2e-3, abs=1024)
    assert candidate.seconds == pytest.approx(traced.seconds, rel=0.05)


@pytest.mark.parametrize("remat", [dict(every=4), dict(every=2, save=["mlpwi_0"]), dict(levels=(3, 4))], ids=str)
def test_regions_are_weighed_as_their_own_programs_are(remat):
  candidate = next(c for c in ranked("flat") if c.policy == ls.RematPolicy(**remat))
  traced = Estimator(program("flat"), TOPOLOGY.chip).estimate(candidate.policy)
  assert candidate.recomputed == traced.recomputed
  assert candidate.seconds == pytest.approx(traced.seconds, rel=0.05)


def test_no_name_is_kept_in_vain_and_regions_divide():
  for layout in PLANS:
    policies = [candidate.policy for candidate in ranked(layout)]
    assert len(set(policies)) == len(policies) > 100
    stack = ls.StackedDecoder(PLANS[layout])
    for policy in policies[::37]:
      stack.clone(remat=policy)
  # The last product of a layer is added to the stream; no backward pass reads it.
  assert not any("mlpwo" in candidate.policy.names for candidate in ranked("flat"))
  assert {c.policy.every for c in ranked("flat")} == {1, 2, 3, 4, 6, 12}
  assert {c.policy.levels for c in ranked("flat")} == {None, (6, 2), (4, 3), (3, 4), (2, 6)}
  assert {c.policy.every for c in ranked("cycle")} == {1, 3, 6, 12}
  assert any(c.policy.offload and c.policy.carry == "offload" for c in ranked("flat"))


def test_candidates_stand_in_order():
  for layout in PLANS:
    seconds = [candidate.seconds for candidate in ranked(layout)]
    assert all(later > 0.997 * earlier for earlier, later in itertools.pairwise(seconds))


# The search ----------------------------------------------------------------------------------------------------------------


def best_by_hand(layout, hbm, host, slope):
  fits = [c for c in ranked(layout) if BASE + slope * c.device <= hbm and (host is None or c.host <= host)]
  return min((c.seconds for c in fits), default=None)


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("slope", [0.9, 1.0, 1.1])
@pytest.mark.parametrize("budget", [0.1, 0.4, 0.8, 2.0])
def test_the_winner_fits_and_is_the_fastest_with_few_programs_compiled(compiler, layout, slope, budget):
  given = compiler(layout, slope)
  most = max(c.device for c in ranked(layout) if c.presets)
  hbm = BASE + round(budget * most)
  report = search(layout, hbm, host=2**36)
  assert len(given) <= len(ls.RematPolicy.presets()) // 3
  assert report.winner is not None and report.winner.memory.hbm <= hbm
  assert report.winner.candidate.seconds <= 1.02 * best_by_hand(layout, hbm, 2**36, slope)
  for preset in report.presets:
    if BASE + slope * preset.device <= hbm:
      assert report.winner.candidate.seconds <= 1.02 * preset.seconds


def test_what_is_printed(compiler):
  compiler("flat")
  sizes = sorted({c.device for c in ranked("flat")})
  hbm = BASE + sizes[len(sizes) // 3]
  report = search("flat", hbm)
  text = str(report)
  chosen = report.winner.candidate
  for word in (f"winner: {chosen.name}", "runner-up: ", "the next faster one does not fit: ", "there are 13 presets",
               render.size(report.winner.memory.hbm)):
    assert word in text
  assert report.faster.seconds < chosen.seconds <= report.runner_up.seconds and report.faster_hbm > hbm
  config = yaml.safe_load(report.yaml())
  base = {"model": {"vocab": 8, "embed": 8, "family": "decoder", "num_layers": 12, "args": {"mlp": 8, "num_heads": 2}}}
  _, stack = ls.StackConfig.from_dict({**base, **config}).build()
  assert {c.policy for c in ranked("flat") if c.policy == stack.policy("layers")} or chosen.presets
  assert json.loads(json.dumps(report.to_dict()))["winner"]["policy"] == chosen.name


@pytest.mark.parametrize("policy", [
    ls.RematPolicy(save=["context"], offload=["mlpwi_0"], carry="offload"), ls.RematPolicy(levels=(3, 4), save=["context"]),
    ls.RematPolicy(every=4)], ids=str)
def test_yaml_reads_back_as_the_policy(policy):
  candidate = candidates_lib.Candidate(policy, 1.0, 0.0, 0, 0)
  confirmed = tune_lib.Confirmed(candidate, made_up(1))
  report = tune_lib.TuneReport(TOPOLOGY, 1, None, confirmed, None, None, None, False, (confirmed,), ())
  remat = yaml.safe_load(report.yaml())["stack"]["remat"]
  model = {"vocab": 8, "embed": 8, "family": "decoder", "num_layers": 12, "args": {"mlp": 8, "num_heads": 2}}
  _, stack = ls.StackConfig.from_dict({"model": model, "stack": {"remat": remat}}).build()
  assert stack.policy("layers") == policy


def test_with_all_the_room_the_fastest_wins(compiler):
  given = compiler("flat")
  report = search("flat", 2**40)
  fastest = min(c.seconds for c in ranked("flat"))
  assert report.winner.candidate.seconds == pytest.approx(fastest, rel=candidates_lib.SAME) and report.faster is None
  assert len(given) == 2 and not report.winner.candidate.host


def test_nothing_fits(compiler):
  compiler("flat")
  report = search("flat", BASE)
  least = min(c.device for c in ranked("flat"))
  assert report.winner is None and report.smallest == BASE + least
  assert f"nothing fits; the least that would do is {render.size(report.smallest)}" in str(report)
  with pytest.raises(ValueError, match="nothing fits"):
    report.yaml()


def test_full_remat_that_does_not_compile(compiler, monkeypatch):
  given = compiler("flat")
  small = tune_lib.compile_report
  error = "the total memory required for HLO temporaries (21.88G) exceeds available HBM (15.75G)"
  monkeypatch.setattr(tune_lib, "compile_report", lambda program, topology, **options: (
      made_up(0, error=error) if program.remat == ls.RematPolicy() else small(program, topology, **options)))
  report = search("flat", BASE + 2**36)
  assert report.winner is not None and given
  monkeypatch.setattr(tune_lib, "compile_report", lambda *args, **options: made_up(0, error=error))
  assert search("flat", 2**30).smallest == int(21.88 * 2**30)


def test_durations():
  assert [render.duration(value) for value in (2.4129, 61.2, 0.0123456, 9.96e-4, 8.5e-7)] == [
      "2.41 s", "61.2 s", "12.3 ms", "996 us", "0.85 us"]


def test_programs_that_take_too_long_are_left_out(compiler, monkeypatch):
  given = compiler("flat")
  quick, said, slow = tune_lib.compile_report, [], []

  def compile_report(program, topology, **options):
    if given and not slow:
      slow.append(program.remat)
      raise TimeoutError("given up")
    return quick(program, topology, **options)

  monkeypatch.setattr(tune_lib, "compile_report", compile_report)
  report = search("flat", 2**40, say=said.append)
  assert report.winner.candidate.policy in given[1:] and report.winner.candidate.policy not in slow
  assert any(line.startswith("left out: ") and "given up" in line for line in said)
  monkeypatch.setattr(tune_lib, "compile_report", _always_too_long)
  with pytest.raises(TimeoutError):
    search("flat", 2**40)


def _always_too_long(*_, **__):
  raise TimeoutError("given up")


def test_host_memory_is_a_bound(compiler):
  compiler("flat")
  report = search("flat", 2**40, host=1)
  assert report.winner.candidate.host == 0


def test_parameters_that_take_more_host_memory_than_there_is(monkeypatch):
  monkeypatch.setattr(tune_lib, "candidates", lambda program, chip: list(ranked("flat")))
  monkeypatch.setattr(tune_lib, "compile_report", lambda program, topology, **_: made_up(BASE, 2**30))
  report = search("flat", 2**40, host=2**20)
  assert report.winner is None and report.smallest is None
  assert "nothing fits; on the host, even parameters take more" in str(report)


# Arguments -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, error, words", [
    (dict(hbm="15"), ValueError, "hbm: '15' has no unit; write 15GiB"),
    (dict(host="64 lots"), ValueError, "host: no unit 'lots'"),
    (dict(hbm=True), ValueError, "hbm must be a size"),
    (dict(topology="v5x:2x2"), ValueError, "no TPU generation"),
])
def test_arguments_that_cannot_be(options, error, words):
  with pytest.raises(error, match=words):
    tune(ls.StackedDecoder(PLANS["flat"]), (HIDDEN,), **options)


def test_modules_without_a_stack():
  with pytest.raises(ValueError, match="calls no StackedDecoder"):
    tune(nn.Dense(4), (jax.ShapeDtypeStruct((4, 4), jnp.float32),))


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_a_winner_that_is_compiled(tmp_path):
  layer = ls.LayerSpec(DecoderLayer, embed=256, mlp=1024, num_heads=2, dtype=jnp.bfloat16)
  stack = ls.StackedDecoder(ls.Plan.homogeneous(layer, 96))
  x = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16)
  said = []
  report = tune(stack, (x,), topology="v5p:2x2x1", hbm="700MiB", cache=tmp_path, say=said.append)
  assert len(report.compiled) <= 4 and said
  assert report.winner.memory.fits and report.winner.memory.hbm <= 700 * 2**20
  full = report.compiled[0]
  assert report.winner.candidate.seconds < full.candidate.seconds
  grown = report.winner.memory.temp - full.memory.temp
  assert grown == pytest.approx(report.winner.candidate.device - full.candidate.device, rel=0.15)
