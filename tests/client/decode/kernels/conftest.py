from collections.abc import Iterator

import pytest

from gpulease.daemon.ptx import kernel_code
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from helpers.decode.shared_code import compiling_once
from helpers.decode_kernels import KernelRig

SLICE_BYTES = 256 << 20


@pytest.fixture(scope="module")
def lasting(_decode_kernels: None) -> Iterator[tuple[CpuContext, KernelRig]]:
    """Yield a context for all tests of a file, and its kernels, of which engines of this run have compiled some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_code, "compile_source", compiling_once(kernel_code.compile_source))
        opened = CpuDriver().open_context("", SLICE_BYTES)
        yield opened, KernelRig(opened)
        opened.close()


@pytest.fixture
def rig(lasting: tuple[CpuContext, KernelRig]) -> Iterator[KernelRig]:
    context, rig = lasting
    yield rig
    assert context.rest()
