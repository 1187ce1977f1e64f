from collections.abc import Iterator

import pytest

from gpulease.daemon.ptx import kernel_code
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.protocol.time_units import NS_PER_S
from helpers.decode.shared_code import compiling_once
from helpers.decode_kernels import KernelRig

SLICE_BYTES = 256 << 20

KEPT_FIRST_CODE_NS = 3600 * NS_PER_S
"""Longer than any test runs a kernel."""


@pytest.fixture(scope="module")
def lasting(_decode_kernels: None) -> Iterator[tuple[CpuContext, KernelRig]]:
    """Yield a context for all tests of a file, and its kernels, of which engines of this run have compiled some.

    Their first code is kept. On a busy host the widest kernels' launches take so long that they would be optimised,
    which takes up to 10 s for one of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_code, "compile_source", compiling_once(kernel_code.compile_source))
        patch.setattr(kernel_code, "FIRST_CODE_NS", KEPT_FIRST_CODE_NS)
        opened = CpuDriver().open_context("", SLICE_BYTES)
        yield opened, KernelRig(opened)
        opened.close()


@pytest.fixture
def rig(lasting: tuple[CpuContext, KernelRig]) -> Iterator[KernelRig]:
    context, rig = lasting
    yield rig
    assert context.rest()
