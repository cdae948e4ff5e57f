"""The NNX twin: NNX layers in the same plans, loops and policies, with the same tree of variables."""
from linen_stack.nnx.bridge import bridged
from linen_stack.nnx.scanned import ScannedLayers
from linen_stack.nnx.trees import update, variables

__all__ = ["ScannedLayers", "bridged", "update", "variables"]
