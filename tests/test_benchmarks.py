"""The benchmarks: contenders compute the same, linen_stack's programs equal an expert's, results are compared as told."""
import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import contenders as c
from benchmarks import measures, report, results, suites
import linen_stack as ls
from tests.reference import assert_close

SIZE = c.Size(batch=2, seq=8, embed=16, mlp=32, heads=2)
DEPTH = 8
LAYOUTS = ("flat", "prefixed", "cyclic", "nested")


def made(name, layout):
  contender = c.build(name, layout, DEPTH, SIZE)
  return contender and (contender, c.shapes(contender, SIZE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_are_those_that_an_expert_writes(layout):
  optimizer = optax.adam(1e-3)
  sizes = {}
  for name in ("linen_stack", "expert", "expert_defaults"):
    contender, params = made(name, layout)
    args = (params, jax.eval_shape(optimizer.init, params), SIZE.x)
    sizes[name] = measures.sizes(c.train_step(contender, optimizer), args)
  assert sizes["linen_stack"] == sizes["expert"] == sizes["expert_defaults"]


@pytest.mark.parametrize("name", [name for name in c.BUILDERS if name not in ("linen_stack", "haliax")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contenders_compute_the_same(layout, name):
  if made(name, layout) is None:
    assert name in ("remat_scan", "lax_scan") and layout != "flat"
    return
  (reference, own), (contender, params) = made("linen_stack", layout), made(name, layout)
  plan = c.plan(layout, DEPTH, SIZE)
  rng = np.random.default_rng(0)
  values = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.1, 0.3, leaf.shape), leaf.dtype), own)
  if name == "loop":
    layers = ls.convert.unstack({"params": values}, plan)
    theirs = {f"layer_{i}": layer["params"] for i, layer in enumerate(layers)}
  else:
    theirs = values if name.startswith("expert") else values["layers"]
  wanted = jax.tree.structure(params)
  theirs = jax.tree.unflatten(wanted, jax.tree.leaves(theirs))
  assert [leaf.shape for leaf in jax.tree.leaves(theirs)] == [leaf.shape for leaf in jax.tree.leaves(params)]
  x = jax.random.normal(jax.random.key(0), SIZE.x.shape)
  assert_close(jax.jit(contender.apply)(theirs, x), jax.jit(reference.apply)(values, x))


def figure(**changes):
  return dataclasses.replace(results.Figure("tpu", "flat", "linen_stack", "temp", 100.0, "MiB", 8, True), **changes)


@pytest.mark.parametrize("now, lines", [
    ([figure()], 0), ([figure(value=100.9)], 0), ([figure(value=50.0)], 0), ([figure(value=102.0)], 1),
    ([figure(value=300.0, exact=False)], 1), ([figure(case="nested")], 1), ([figure(benchmark="steps")], 0)])
def test_exact_figures_that_get_worse_are_told(now, lines):
  assert len(results.worse(now, [figure(), figure(measure="compile seconds", exact=False)])) == lines


def test_results_are_read_back(tmp_path):
  results.save(tmp_path / "run.json", [figure()])
  assert results.load(tmp_path / "run.json") == [figure()] and len(list(tmp_path.iterdir())) == 1
  assert json.loads((tmp_path / "run.json").read_text())["about"]["jax"] == jax.__version__
  (tmp_path / "other.json").write_text("[]")
  with pytest.raises(ValueError, match="other.json is no file of benchmark results"):
    results.load(tmp_path / "other.json")


def test_exponents_of_growth():
  flat, linear = ([figure(measure=m, depth=d, value=v(d)) for d in (2, 4, 8)] for m, v in
                  (("flat", lambda d: 3.0), ("linear", lambda d: 2.0 * d)))
  assert [round(f.value, 6) for f in results.exponents([*flat, *linear])] == [0.0, 1.0]


def test_times_are_medians_of_ratios_within_a_round():
  assert measures.ratios({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 2.0]}, "a") == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("arguments, message", [
    (["step"], "no benchmark 'step'; did you mean 'steps'?"),
    (["programs", "--json", "nowhere/run.json"], "cannot write nowhere/run.json: there is no folder"),
    (["programs", "--compare", "nowhere.json"], "--compare: "),
])
def test_mistakes_are_told_before_anything_runs(arguments, message):
  done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, check=False)
  assert done.returncode != 0 and message in done.stdout + done.stderr
  assert "Traceback" not in done.stderr


def test_every_benchmark_has_a_line_of_help():
  assert all(suite.__doc__ and suite.__doc__.endswith(".") for suite in suites.SUITES.values())


def test_the_table_of_the_readme_is_made_of_the_kept_results():
  readme = report.ROOT.joinpath("README.md").read_text(encoding="utf-8")
  shown = re.search(r"<!-- benchmarks.*?-->\n(.*?)<!-- end of benchmarks -->", readme, re.DOTALL).group(1)
  assert shown == report.section(report.REFERENCE)
  for picture in re.findall(r"!\[.*?\]\((benchmarks/.*?)\)", readme):
    assert report.ROOT.joinpath(picture).is_file()


def test_tables_leave_out_what_was_not_measured():
  rows = report.table([figure(case="flat gradient"), figure(case="flat gradient", contender="loop", value=2000.0)]).splitlines()
  assert len(rows) == 3 and rows[2] == "| TPU memory in MiB, gradient, 8 layers | 100.00 |  |  |  |  |  | 2,000.00 |"


def test_programs_are_made_anew_and_every_phase_is_timed():
  made = []
  times = measures.making({"a": lambda: made.append(1) or (jnp.sin, (1.0,))}, 2)
  assert len(made) == 3 and list(times["a"]) == ["trace", "lowering", "compile"]
  assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times["a"].values())


def test_steps_take_turns():
  called = []
  times = measures.running({name: functools.partial(called.append, name) for name in "ab"}, 2)
  assert called == ["a", "b", "b", "a", "a", "b"]
  assert [len(of["a"]) for of in times.values()] == [2, 2]


def test_kept_programs_are_no_larger_than_those_of_an_expert():
  exact = {f.key: f.value for f in results.load(report.REFERENCE) if f.exact and f.benchmark in ("programs", "steps", "tpu")}
  pairs = [(value, exact[benchmark, case, "expert", measure, layers])
           for (benchmark, case, name, measure, layers), value in exact.items()
           if name == "linen_stack" and (benchmark, case, "expert", measure, layers) in exact]
  assert len(pairs) > 40 and all(own <= other for own, other in pairs)
