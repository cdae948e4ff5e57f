"""Memory on a named TPU: what is refused before compiling, what comes back from it, and the compiled programs themselves."""
import json
import os
import subprocess
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec as P
import pytest

import linen_stack as ls
from linen_stack import sharding
from linen_stack.inspect import aot, chips, hlo, memory, programs
from linen_stack.models import DecoderLayer

S = jax.ShapeDtypeStruct
X, W = S((8, 16), jnp.float32), S((16, 16), jnp.float32)
LAYER = ls.LayerSpec(DecoderLayer, embed=16, mlp=32, num_heads=2)
STACK = ls.StackedDecoder(ls.Plan.homogeneous(LAYER, 3))
HIDDEN = S((8, 4, 16), jnp.float32)


def product(x, w):
  return jnp.tanh(x @ w)


# Topologies and sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, slices, devices", [
    ("v5p:2x2x1", 1, 4), ("v5p:4x4x8", 1, 128), ("v5e:2x2", 2, 8), ("v6e:16x16", 1, 256), ("V3:2x2", 1, 8),
    ("v4:2x2x1", 1, 4), ("tpu7x:2x2x1", 1, 8), ("v5e:1x1", 1, 1)])
def test_topologies(name, slices, devices):
  topology = chips.topology(name, slices)
  assert topology.num_devices == devices and topology.name == name.lower()


@pytest.mark.parametrize("name, slices, error, words", [
    ("v9:2x2", 1, ValueError, "no TPU generation 'v9'; known: .*v5p:2x2x1"),
    ("v5q:2x2x1", 1, ValueError, "did you mean 'v5p'"),
    ("v5e", 1, ValueError, "missing; some of v5e: v5e:2x2"),
    ("v5e:2x2x2", 1, ValueError, "has 2 dimensions"),
    ("v5p:2x0x1", 1, ValueError, "at least one chip"),
    ("v5p:3x2x1", 1, ValueError, "a host has 2 x 2 chips"),
    ("v5e:32x32", 1, ValueError, "at most 256 chips, not 1024"),
    ("v5e:2x2", 0, ValueError, "slices must be at least 1"),
    ("v5e:2x2", "2", TypeError, "slices must be an int"),
    (None, 1, TypeError, "topology must be a name"),
])
def test_topologies_that_are_not(name, slices, error, words):
  with pytest.raises(error, match=words):
    chips.topology(name, slices)
  with pytest.raises(error, match=words):
    memory(product, (X, W), topology=name, slices=slices)


@pytest.mark.parametrize("text, size", [
    ("15GiB", 15 * 2**30), ("1.5 GiB", 1.5 * 2**30), ("64gb", 64e9), ("512MiB", 2**29), ("100B", 100), (".5KiB", 512)])
def test_sizes(text, size):
  assert chips.parse_bytes(text, "budget") == size


@pytest.mark.parametrize("text, words", [
    ("15", "budget: '15' has no unit; write 15GiB"), ("15Gi", "no unit 'Gi'"), ("lots", "must be a size"),
    ("-1GiB", "must be a size"), ("0GiB", "more than nothing"), (15, "must be a size")])
def test_sizes_that_are_not(text, words):
  with pytest.raises(ValueError, match=words):
    chips.parse_bytes(text, "budget")


# Refused before compiling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, options, error, words", [
    ((X, W), dict(mesh={"a": 2}), ValueError, r"mesh \(a: 2\) has 2 devices, but v5p:2x2x1 has 4"),
    ((X, W), dict(mesh={"a": -1, "b": 3}), ValueError, "has 3 devices"),
    ((X, W), dict(mesh=[4]), TypeError, "mesh must be a mapping"),
    ((X, W), dict(mesh={"a": "4"}), TypeError, "sizes of at least 1"),
    ((X, W), dict(rules={"embed": "b"}), ValueError, "'embed' goes over 'b', which is no axis"),
    ((X, W), dict(shardings=(P("b"), None)), ValueError, "'b' is no axis of the mesh"),
    ((X, W), dict(shardings=(P(None, None, "fsdp"), None)), ValueError, "fewer dimensions"),
    ((X, W), dict(shardings=("fsdp", None)), TypeError, "PartitionSpec"),
    ((S((6, 16), jnp.float32), W), dict(shardings=(P("fsdp"), None)), ValueError,
     r"args\[0\] of shape \[6, 16\]: dimension 0 of 6 does not divide among 4 devices \(fsdp\); take a multiple of 4"),
    ((X, W), dict(donate_argnums=(2,)), ValueError, "no argument 2; 2 were given"),
    (X, {}, TypeError, "args must be a tuple"),
])
def test_what_does_not_fit_together(args, options, error, words):
  with pytest.raises(error, match=words):
    memory(product, args, **options)


def test_modules_and_functions_only():
  with pytest.raises(TypeError, match="a module or a function"):
    memory(3, ())
  with pytest.raises(ValueError, match="gradients are compiled"):
    memory(STACK, (HIDDEN,), donate_argnums=(0,))
  with pytest.raises(ValueError, match=r"dimension 0 of 6 does not divide among 4 devices"):
    memory(STACK, (S((6, 4, 16), jnp.float32),))


def test_libtpu_that_is_not_installed(monkeypatch):
  monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install 'linen_stack\[aot\]'"):
    memory(product, (X, W))


# The process that compiles -------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch, tmp_path):
  """Replaces the process that compiles by a script; returns how often it ran."""
  runs = tmp_path / "runs"
  monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
  monkeypatch.setattr(aot.importlib.metadata, "version", lambda package: "1")

  def replace(*lines):
    script = tmp_path / "worker.py"
    script.write_text("\n".join([
        "import json, os, sys, time", "request = json.load(open(sys.argv[1]))", f"open({str(runs)!r}, 'a').write('x')",
        "answer = lambda **kw: json.dump(kw, open(request['result'], 'w'))", *lines]))
    monkeypatch.setattr(aot, "_WORKER", script)
    return lambda: len(runs.read_text()) if runs.exists() else 0

  return replace


SIZES = {"argument_size_in_bytes": 100, "output_size_in_bytes": 10, "alias_size_in_bytes": 5, "temp_size_in_bytes": 1000,
         "generated_code_size_in_bytes": 1, "host_temp_size_in_bytes": 7, "peak_memory_in_bytes": 1100}
GOOD = ("open(request['hlo'], 'w').write('')",
        f"answer(sizes={SIZES!r}, cost={{'flops': 4.0, 'bytes accessed': 3.0, 'optimal_seconds': 1e-6}}, seconds=2.0)")


def test_what_the_compiler_says_is_reported_and_kept(worker, tmp_path):
  runs = worker(*GOOD)
  options = dict(topology="v5e:2x2", cache=tmp_path / "cache")
  report = memory(product, (X, W), **options)
  assert (report.hbm, report.host, report.fits, report.cached) == (100 + 10 - 5 + 1000 + 1, 7, True, False)
  assert report.cost.flops == 2 * 8 * 16 * 16 and report.xla_flops == 4.0
  for word in ("v5e:2x2, 4 devices of 15.8 GiB", "temp", "1000 B", "each loop body once"):
    assert word in str(report)
  assert json.loads(json.dumps(report.to_dict()))["hbm"] == report.hbm
  again = memory(product, (X, W), **options)
  assert again.cached and again.hbm == report.hbm and runs() == 1
  memory(lambda x, w: jnp.sin(x @ w), (X, W), **options)
  memory(product, (X, W), **{**options, "topology": "v5e:4x4"})
  memory(product, (X, W), shardings=(P("fsdp"), None), **options)
  assert runs() == 4
  for file in (tmp_path / "cache").iterdir():
    file.write_text("{")  # as a full disk leaves it
  assert not memory(product, (X, W), **options).cached
  assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".json"]


def test_cache_folder_by_the_environment(worker, monkeypatch, tmp_path):
  worker(*GOOD)
  monkeypatch.setenv("LINEN_STACK_CACHE", str(tmp_path / "own"))
  memory(product, (X, W))
  assert len(list((tmp_path / "own").iterdir())) == 1
  monkeypatch.delenv("LINEN_STACK_CACHE")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert aot.cache_folder() == tmp_path / "linen_stack"


def test_cache_that_cannot_be_written_is_told_before_compiling(worker, tmp_path):
  runs = worker(*GOOD)
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match=r"results cannot be kept in .*file/cache: Not a directory; set \$LINEN_STACK_CACHE"):
    memory(product, (X, W), cache=tmp_path / "file" / "cache")
  assert not runs() and memory(product, (X, W), cache=False).fits


def test_flags_of_the_compiler_are_part_of_what_is_kept(worker, monkeypatch, tmp_path):
  runs = worker(*GOOD)
  memory(product, (X, W), cache=tmp_path / "cache")
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
  memory(product, (X, W), cache=tmp_path / "cache")
  assert runs() == 2


def test_environment_of_the_compiling_process(worker, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "tpu")
  worker("assert os.environ['JAX_PLATFORMS'] == 'cpu' and os.environ['TPU_SKIP_MDS_QUERY'] == '1'",
         "assert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == 'true'", "assert 'linen_stack' not in sys.modules",
         "assert not any(path.endswith('inspect') for path in sys.path)", *GOOD)
  assert memory(product, (X, W), cache=False).fits


def test_too_large_is_a_result(worker, tmp_path):
  message = ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (21.88G) exceeds "
             "available HBM (15.75G).")
  runs = worker(f"answer(kind='compile', error={message!r}, seconds=3.0)")
  for _ in range(2):
    report = memory(product, (X, W), topology="v5e:2x2", cache=tmp_path)
    assert not report.fits and report.hbm == int(21.88 * 2**30)
    assert "does not fit: at least 21.9 GiB needed" in str(report) and "HLO temporaries" in str(report)
  assert runs() == 1


@pytest.mark.parametrize("message, size", [
    ("Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.\n\n"
     "Total hbm usage >= 22.47G:\n    reserved        530.00M\n    program          21.95G\n", 22.47 * 2**30),
    ("Ran out of memory in memory space hbm. Used 900.50M of 512.00M hbm.", 900.5 * 2**20),
    ("the total memory required for HLO temporaries (3.12T) exceeds available HBM (15.48G)", 3.12 * 2**40),
    ("something else", None)])
def test_what_the_compiler_says_that_it_needs(message, size):
  assert aot.needed(message) == (size if size is None else int(size))


@pytest.mark.parametrize("lines, error, words", [
    (("answer(kind='topology', error='INVALID_ARGUMENT: what?')",), ValueError,
     "libtpu does not know the topology 'v5p:2x2x1': INVALID_ARGUMENT: what.*Some that it knows: v5p:2x2x1"),
    (("answer(kind='compile', error='INTERNAL: Mosaic failed', seconds=1.0)",), RuntimeError, "failed: INTERNAL: Mosaic"),
    (("print('F1129 Check failed: this', file=sys.stderr)", "os.abort()"), RuntimeError,
     r"ended with status -6 and no result(.|\n)*Check failed: this"),
])
def test_failures_of_the_compiling_process(worker, tmp_path, lines, error, words):
  worker(*lines)
  with pytest.raises(error, match=words):
    memory(product, (X, W), cache=tmp_path)
  assert not list(tmp_path.glob("*.json"))


def test_compiling_that_takes_too_long_is_given_up(worker, tmp_path):
  worker("open(request['result'] + '.pid', 'w').write(str(os.getpid()))", "time.sleep(60)")
  with pytest.raises(TimeoutError, match="given up after 1 s; raise the limit"):
    memory(product, (X, W), cache=tmp_path, limit=1)


# Programs ------------------------------------------------------------------------------------------------------------------


def test_parameters_lie_as_their_logical_axes_say():
  mesh = programs.as_mesh({"data": 2, "model": -1}, chips.topology("v5p:2x2x1"))
  rules = programs.as_rules({**sharding.FSDP, "batch": "data", "embed": "data", "mlp": "model"}, mesh)
  program = programs.gradients(STACK, (HIDDEN,), {}, mesh, rules, None)
  params, _, (x,) = program.args
  assert params["layers"]["feed_forward"]["wi_0"]["kernel"].sharding.spec == P(None, "data", "model")
  assert params["layers"]["attention_norm"]["scale"].sharding.spec == P(None, None)
  assert x.sharding.spec == P("data") and program.batch_shards() == 2
  assert isinstance(mesh, AbstractMesh) and dict(mesh.shape) == {"data": 2, "model": 2}


def test_selected_parameters_are_in_host_memory():
  mesh = programs.as_mesh(None, chips.topology("v5p:2x2x1"))
  stack = STACK.clone(offload_params=lambda path, leaf: path.endswith("wi_0/kernel"))
  params = programs.gradients(stack, (HIDDEN,), {}, mesh, programs.as_rules(None, mesh), None).args[0]
  kinds = {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  assert [path for path, kind in kinds.items() if kind == "pinned_host"] == ["['layers']['feed_forward']['wi_0']['kernel']"]


def test_arguments_beside_arrays_stay_what_they_are():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, *, deterministic=True):
      assert deterministic is False and mask is None
      return STACK.clone(parent=self, name="stack")(x, mask, deterministic=deterministic)

  mesh = programs.as_mesh(None, chips.topology("v5p:2x2x1"))
  program = programs.gradients(Model(), (HIDDEN, None), {"deterministic": False}, mesh, programs.as_rules(None, mesh), None)
  assert "params" not in program.args[1] and program.trace().jaxpr.out_avals


def test_who_places_each_result():
  mesh = programs.as_mesh(None, chips.topology("v5p:2x2x1"))
  program = programs.gradients(STACK, (HIDDEN,), {}, mesh, programs.as_rules(None, mesh), None)
  open_results = program.open_results(program.trace())
  assert open_results == [True] + [False] * len(jax.tree.leaves(program.args[0]))
  own = programs.of_function(product, (X, W), {}, mesh, (), None, ())
  assert own.open_results(own.trace()) == [True]


def test_arrays_keep_shardings_of_their_own():
  mesh = programs.as_mesh(None, chips.topology("v5p:2x2x1"))
  x = S(X.shape, X.dtype, sharding=jax.sharding.NamedSharding(mesh, P(None, "fsdp")))
  (x,), (w,), _ = programs.of_function(product, (x, W), {}, mesh, (), None, ()).args
  assert (x.sharding.spec, w.sharding.spec) == (P(None, "fsdp"), P())


# The compiled text ---------------------------------------------------------------------------------------------------------

HLO = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"999"}
}

%inner_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"10"}}
}

%inner_condition (t: (s32[], f32[8])) -> pred[] {
  %c.1 = s32[]{:T(128)} constant(3)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %compare.1 = pred[]{:T(512)} compare(%i, %c.1), direction=LT
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%inner_condition, body=%inner_body
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %c.2 = s32[] constant(5)
  ROOT %compare.2 = pred[] compare(%i, %c.2), direction=LT
}

%called (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"7"}
}

%dear (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"50"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1000"}
  %while.2 = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body
  %while.3 = (s32[], f32[8]{0}) while(%t), condition=%odd, body=%inner_body, backend_config={"known_trip_count":{"n":"4"}}
  %call.1 = f32[8]{0} call(%f), to_apply=%called
  ROOT %c = f32[8]{0} conditional(%i, %f, %f), branch_computations={%called, %dear}
}
"""


def test_cycles_of_a_compiled_program():
  assert hlo.cycles(HLO) == 1000 + 5 * (100 + 3 * 10) + 4 * 10 + 7 + 50
  assert hlo.cycles("") == 0


# Compiled for a TPU --------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
import linen_stack as ls
from linen_stack.inspect import memory
from linen_stack.models import DecoderLayer
layer = ls.LayerSpec(DecoderLayer, embed=256, mlp=1024, num_heads=2, dtype=jnp.bfloat16)
stack = ls.StackedDecoder(ls.Plan.homogeneous(layer, 8), remat=ls.RematPolicy(offload=["query_proj"]))
x = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16)
print(json.dumps(memory(stack, (x,), topology=sys.argv[1], slices=int(sys.argv[2]), cache=False, limit=500).to_dict()))
"""


def clean(*args):
  """Runs the script with nothing in its environment but where Python and its caches are."""
  keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
  return subprocess.Popen([sys.executable, "-c", SCRIPT, *args], env={**keep, "JAX_PLATFORMS": "cpu"}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_two_processes_compile_at_once_from_a_clean_environment_and_agree_to_the_byte():
  both = [clean("v5p:2x2x1", "1"), clean("v5p:2x2x1", "1")]
  outs = [process.communicate(timeout=550) for process in both]
  assert [process.returncode for process in both] == [0, 0], outs
  first, second = (json.loads(out) for out, _ in outs)
  # Quiet: nothing of what libtpu writes comes through.
  assert [err for _, err in outs] == ["", ""]
  for report in (first, second):
    report.pop("seconds")
  assert first == second
  # Eight layers' queries, of a batch that is spread over four devices.
  assert first["host_temp"] == 8 * 8 * 256 * 256 * 2 // 4 and first["fits"] and first["cycles"] > 0
  assert first["xla_flops"] * 4 < first["cost"]["flops"]  # each loop's body once


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_slices_that_are_joined(tmp_path):
  x, w = S((64, 256), jnp.bfloat16), S((256, 256), jnp.bfloat16)
  shardings = (P("fsdp"), P(None, "fsdp"))
  one = memory(product, (x, w), topology="v5e:2x2", shardings=shardings, cache=tmp_path)
  two = memory(product, (x, w), topology="v5e:2x2", slices=2, shardings=shardings, cache=tmp_path)
  assert two.topology.num_devices == 8 and two.argument == one.argument // 2


@pytest.mark.slow
@pytest.mark.xdist_group("tpu")
def test_a_program_that_is_too_large_is_a_result(tmp_path):
  x = S((2**18, 2**15), jnp.bfloat16)
  report = memory(lambda x: jnp.sort(x, axis=0), (x,), topology="v5e:1x1", cache=tmp_path)
  assert not report.fits and report.hbm > 16 * 2**30
