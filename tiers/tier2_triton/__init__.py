"""Tier 2 in Triton: a planner on the host, kernels one a file, and the operators that torch sees."""
