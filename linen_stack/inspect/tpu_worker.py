"""Compiles one StableHLO program for a TPU that is not there: a script, run by `linen_stack.inspect.aot`.

It imports nothing of linen_stack, so that it starts fast and so that its environment is set before jax is imported:

    python -P tpu_worker.py REQUEST

REQUEST is a JSON file: paths `program`, `hlo` and `result`, the topology's name and `options`, the sizes of the `mesh`, and
which results are `open_results`. The result is a JSON file: sizes, cost and seconds of the compiled program, whose text
is in `hlo`; or `error` and its `kind`.
"""
import json
import os
import sys
import time
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
  """What compiling came to."""
  import jax
  from jax.experimental import mesh_utils, topologies
  from jax.extend import backend
  from jax.extend.mlir import ir
  # There is no public way to compile the text of a program; that of `jax.stages` starts from a function.
  from jax._src.interpreters.mlir import make_ir_context
  from jaxlib._jax import DeviceList
  import numpy as np

  try:
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **{key: tuple(value) if isinstance(value, list) else value
                                                              for key, value in request["options"].items()})
  except Exception as error:  # pylint: disable=broad-exception-caught  # whatever libtpu raises is told
    return {"kind": "topology", "error": str(error)}
  devices = np.array(described.devices, dtype=object)
  if request["options"].get("num_slices", 1) == 1:
    devices = mesh_utils.create_device_mesh(request["mesh"], devices=list(devices))
  devices = devices.reshape(-1)
  options = backend.get_compile_options(
      num_replicas=1, num_partitions=devices.size, device_assignment=np.array([[device.id for device in devices]]))
  # As under jit: results that the program does not place are placed by the compiler.
  options.executable_build_options.allow_spmd_sharding_propagation_to_output = request["open_results"]
  with open(request["program"], encoding="utf-8") as file, make_ir_context():
    program = ir.Module.parse(file.read())
    start = time.perf_counter()
    try:
      compiled = devices[0].client.compile(program, DeviceList(tuple(devices)), options)
    except jax.errors.JaxRuntimeError as error:
      return {"kind": "compile", "error": str(error), "seconds": time.perf_counter() - start}
  seconds = time.perf_counter() - start
  stats = compiled.get_compiled_memory_stats()
  sizes = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}
  cost = compiled.cost_analysis()
  cost = cost[0] if isinstance(cost, (list, tuple)) else cost
  with open(request["hlo"], "w", encoding="utf-8") as file:
    file.write(compiled.hlo_modules()[0].to_string())
  # Figures of single operands have braces in their names.
  return {"sizes": sizes, "cost": {key: value for key, value in cost.items() if "{" not in key}, "seconds": seconds}


if __name__ == "__main__":
  with open(sys.argv[1], encoding="utf-8") as request_file:
    asked = json.load(request_file)
  answer = main(asked)
  with open(asked["result"] + ".part", "w", encoding="utf-8") as result_file:
    json.dump(answer, result_file)
  os.replace(asked["result"] + ".part", asked["result"])
