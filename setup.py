"""Build script of linen_stack."""
import pathlib

from setuptools import find_packages, setup

here = pathlib.Path(__file__).parent

setup(
    name="linen_stack",
    version="0.1.0",
    description="Deep Flax Linen decoders from one layer: scan, remat and host offload, without silent faults",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["linen_stack", "linen_stack.*"]),
    package_data={"linen_stack": ["configs/*.yml"]},
    # optax, orbax-checkpoint, rich and PyYAML come with flax.
    install_requires=["jax>=0.10.2", "jaxlib>=0.10.2", "flax>=0.12.8", "numpy>=2.0", "absl-py>=2.0"],
    extras_require={
        # pytest 9.2 takes no notice of the groups that keep compilers for TPU on one worker (pytest-xdist 3.8).
        "test": ["pytest>=8,<9.2", "pytest-xdist>=3", "hypothesis>=6", "safetensors>=0.4", "jax[tpu]"],
        # The libtpu that the installed jax pins: reports of a TPU's memory are compiled with it, without a TPU.
        "aot": ["jax[tpu]"],
        "hf": ["safetensors>=0.4"],
        "plot": ["matplotlib>=3.8"],
    },
)
