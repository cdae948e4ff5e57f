"""Settings of the test run: the CPU, and a compiler in a hurry, since programs here are tiny and many."""
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax  # noqa: E402  (after the environment is set)
import pytest  # noqa: E402

jax.config.update("jax_disable_most_optimizations", True)
# Compiling the default generator's rounds takes longer than all else in these programs.
jax.config.update("jax_default_prng_impl", "unsafe_rbg")


def pytest_collection_modifyitems(items):
  """A set prints in another order in each process, so that workers would collect tests of different names."""
  for item in items:
    for name, value in (item.callspec.params if hasattr(item, "callspec") else {}).items():
      if isinstance(value, (set, frozenset)):
        raise pytest.UsageError(f"{item.nodeid}: {name} is a set; give a tuple")


@pytest.fixture
def float64():
  """A test that tells what is equal but for rounding from what is not."""
  with jax.enable_x64(True):
    yield
