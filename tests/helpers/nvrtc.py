"""Marks tests that compile CUDA C."""

import importlib.util

import pytest

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="CUDA C is not compiled: pip install '.[cuda-c]'",
)
