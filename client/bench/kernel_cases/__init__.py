"""Kernels as people write them, with their results in numpy; `gpulease.client.bench.kernel_suite` runs them."""
