"""Kernels as people write them, with their results in numpy; `tests.lab.kernel_suite` runs them."""
