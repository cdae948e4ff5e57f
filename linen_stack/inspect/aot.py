"""Compiles a lowered program for a TPU that is not there: in a process of its own, with a time limit, and once.

libtpu reads the environment when it is loaded, asks a metadata server about the machine that it is on, writes to stderr
what it did not find, and keeps a lock. So it never comes into this process: the program goes to a child as StableHLO.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from linen_stack.inspect import chips, hlo

_WORKER = pathlib.Path(__file__).with_name("tpu_worker.py")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # this machine's devices are left alone
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several processes may compile at once; none holds the lock file
    # What it would have asked for; the topology is named in every request.
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
}
# These change what the compiler does.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 1  # of what is cached


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler said of a program."""

  sizes: dict[str, int]
  """Sizes on one device, by the names of XLA's memory analysis; empty where the program did not fit."""
  cost: dict[str, float]
  """XLA's own cost analysis of one device's program: each loop body counts once."""
  cycles: float
  """Cycles that the compiler expects, loop bodies as often as they run, without transfers between devices."""
  seconds: float
  """What compiling took."""
  out_of_memory: str | None
  """The compiler's message where the program does not fit; None: it does."""
  cached: bool = False


def compile_program(text: str, topology: chips.Topology, mesh: Sequence[int], open_results: Sequence[bool], *,
                    limit: float = 600.0, cache: str | os.PathLike[str] | bool = True) -> Compiled:
  """Compiles StableHLO for a topology.

  Args:
    text: the program, lowered for "tpu" over an abstract mesh.
    mesh: the sizes of that mesh.
    open_results: for each result, whether the compiler chooses its sharding.
    limit: seconds after which compiling is given up.
    cache: a folder for results, True for `cache_folder()`, False for none.

  Raises:
    ImportError: libtpu is not installed.
    OSError: the cache's folder cannot be written to.
    ValueError: libtpu does not know the topology.
    TimeoutError: the limit was hit.
    RuntimeError: the compiler failed, other than for a lack of memory.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError("compiling for a TPU needs libtpu, which is not installed: pip install 'linen_stack[aot]'")
  folder = cache_folder() if cache is True else pathlib.Path(cache) if cache else None
  request = {"topology": topology.name, "options": topology.options, "mesh": list(mesh), "open_results": list(open_results)}
  path = folder / f"{_key(text, request)}.json" if folder else None
  answer = _read(path) if path else None
  if answer is not None:
    return Compiled(**answer, cached=True)
  if path:
    _check_writable(path.parent)
  answer = _run(text, request, limit)
  compiled = _compiled(answer, topology)
  if path:
    _write(path, dataclasses.asdict(compiled))
  return compiled


def cache_folder() -> pathlib.Path:
  """Where results are kept: $LINEN_STACK_CACHE, or a folder in the user's own cache."""
  own = os.environ.get("LINEN_STACK_CACHE")
  if own:
    return pathlib.Path(own)
  return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "linen_stack"


def _key(text: str, request: dict[str, Any]) -> str:
  versions = [importlib.metadata.version(package) for package in ("jax", "jaxlib", "libtpu")]
  flags = [os.environ.get(name) for name in _FLAGS]
  digest = hashlib.sha256(json.dumps([_FORMAT, versions, flags, request]).encode())
  digest.update(text.encode())
  return digest.hexdigest()


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """A result of before; None where there is none that can be used."""
  try:
    answer = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  fields = {field.name for field in dataclasses.fields(Compiled)} - {"cached"}
  return answer if isinstance(answer, dict) and set(answer) == fields else None


def _check_writable(folder: pathlib.Path) -> None:
  """Raises OSError before the work of which the folder would keep the result."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise OSError(f"results cannot be kept in {folder}: {error.strerror}; set $LINEN_STACK_CACHE to another folder, or keep "
                  "none (cache=False, --nocache)") from error


def _write(path: pathlib.Path, answer: dict[str, Any]) -> None:
  answer.pop("cached")
  with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
    json.dump(answer, file)
  os.replace(file.name, path)


def _run(text: str, request: dict[str, Any], limit: float) -> dict[str, Any]:
  """What the child answers, with the compiled program's cycles."""
  with tempfile.TemporaryDirectory(prefix="linen_stack_") as folder:
    at = pathlib.Path(folder)
    (at / "program.mlir").write_text(text, encoding="utf-8")
    paths = {"program": "program.mlir", "hlo": "compiled.hlo", "result": "result.json"}
    request = {**request, **{key: str(at / name) for key, name in paths.items()}}
    (at / "request.json").write_text(json.dumps(request), encoding="utf-8")
    # -P: the folder of the script holds modules with names of the standard library's.
    command = [sys.executable, "-P", str(_WORKER), str(at / "request.json")]
    try:
      done = subprocess.run(command, env={**os.environ, **_ENVIRONMENT}, stdin=subprocess.DEVNULL, capture_output=True,
                            text=True, errors="replace", timeout=limit, check=False)
    except subprocess.TimeoutExpired:
      raise TimeoutError(f"compiling for {request['topology']} was given up after {limit:.0f} s; "
                         "raise the limit, or take a smaller program") from None
    if not (at / "result.json").exists():
      said = [line for line in (done.stdout + done.stderr).splitlines() if not line.lstrip().startswith(("@", "https://"))]
      raise RuntimeError(f"the compiling process ended with status {done.returncode} and no result; the end of its output:\n"
                         + "\n".join(said)[-2000:])
    answer = json.loads((at / "result.json").read_text(encoding="utf-8"))
    if "error" not in answer:
      answer["cycles"] = hlo.cycles((at / "compiled.hlo").read_text(encoding="utf-8"))
    return answer


def _compiled(answer: dict[str, Any], topology: chips.Topology) -> Compiled:
  error = answer.get("error")
  if error is None:
    return Compiled(answer["sizes"], answer["cost"], answer["cycles"], answer["seconds"], None)
  if answer["kind"] == "topology":
    raise ValueError(f"libtpu does not know the topology {topology.name!r}: {error}. "
                     f"Some that it knows: {', '.join(chips.known(topology.chip))}")
  if "RESOURCE_EXHAUSTED" in error and re.search(r"\bhbm\b", error, re.IGNORECASE):
    return Compiled({}, {}, 0.0, answer["seconds"], error)
  raise RuntimeError(f"the compiler for {topology.name} failed: {error[:4000]}")


def needed(message: str) -> int | None:
  """Bytes of device memory that the compiler's message says a program needs; None where it says none.

  Its forms: "the total memory required for HLO temporaries (21.88G) exceeds available HBM (15.75G)"; "Used 21.95G of
  15.48G hbm", after which "Total hbm usage >= 22.47G" counts what is reserved, too.
  """
  for pattern in (r"Total hbm usage >= ([\d.]+)([KMGT]?)", r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm",
                  r"HLO temporaries \(([\d.]+)([KMGT]?)\)"):
    found = re.search(pattern, message)
    if found:
      return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))
  return None
