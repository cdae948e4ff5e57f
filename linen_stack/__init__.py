"""Deep Flax Linen decoders from one layer: scan, remat and host offload, without silent faults."""
import sys

if sys.argv[:1] == ["-m"] and "linen_stack" in sys.orig_argv:
  # `python -m linen_stack`: Ctrl-C while all of this is imported ends it as it does later.
  def _end(kind, error, trace):
    if not issubclass(kind, KeyboardInterrupt):
      return sys.__excepthook__(kind, error, trace)
    print("linen_stack: interrupted", file=sys.stderr)
    sys.exit(130)

  sys.excepthook = _end

from linen_stack.adapters import lora, merge_lora
from linen_stack.config import StackConfig
from linen_stack.hf_plan import plan_from_hf_config
from linen_stack.lifts import offload_params, remat
from linen_stack.loops import scan, static_unroll
from linen_stack.models.generate import generate
from linen_stack.per_layer import per_layer
from linen_stack.placement import host_shardings
from linen_stack.plan import Plan, Segment, split_at, split_cycle, split_prefix
from linen_stack.specs import LayerSpec
from linen_stack.streaming import on_device
from linen_stack.policies import RematPolicy
from linen_stack.stack import StackedDecoder
from linen_stack import convert, hf, inspect  # last: they read stacks


def __getattr__(name):
  if name == "nnx":  # flax.nnx takes a while to import, and Linen users need none of it
    import linen_stack.nnx  # pylint: disable=g-import-not-at-top
    return linen_stack.nnx
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
