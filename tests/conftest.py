"""Settings of the test run: the CPU, and a compiler in a hurry, since programs here are tiny and many."""
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()
