"""What a stack does with memory and names, told before it runs: audit, residuals and gradients against full remat."""
from linen_stack.inspect.residuals import Residual, ResidualReport, residuals
