"""Typical kernels of users, with their results in numpy. `tests.lab.kernel_suite` runs them."""
