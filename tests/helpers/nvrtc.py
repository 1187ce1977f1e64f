"""A pytest mark for tests that compile CUDA C."""

import pytest

from gpulease.client import Unsupported
from gpulease.client.kernels.cuda_c import ptx_of


def is_installed() -> bool:
    try:
        ptx_of("")
    except Unsupported:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not is_installed(), reason="CUDA C is not compiled: pip install '.[cuda-c]'")
