"""What a stack does with memory and names, told before it runs: audit, residuals, memory on a TPU, gradients."""
from linen_stack.inspect.audit import AuditReport, Finding, Tagged, audit
from linen_stack.inspect.gradients import GradientReport, check_gradients
from linen_stack.inspect.memory import MemoryReport, memory
from linen_stack.inspect.overlap import LoopBody, Transfer, overlap
from linen_stack.inspect.residuals import Residual, ResidualReport, residuals
from linen_stack.inspect.tune import TuneReport, tune
