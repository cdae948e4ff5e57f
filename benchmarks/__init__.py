"""Benchmarks: linen_stack beside a Python loop, hand-written stacks and other libraries, on the same layer in one run."""
