from collections.abc import Iterator

import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from helpers.decode_kernels import KernelRig

SLICE_BYTES = 256 << 20


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[CpuContext, KernelRig]]:
    """Yield a context for all tests of a file, and its kernels."""
    opened = CpuDriver().open_context("", SLICE_BYTES)
    yield opened, KernelRig(opened)
    opened.close()


@pytest.fixture
def rig(lasting: tuple[CpuContext, KernelRig]) -> Iterator[KernelRig]:
    context, rig = lasting
    yield rig
    assert context.rest()
