"""Launches by native code: the same as the context's own, or left to it."""

import ctypes
from collections.abc import Iterator

import pytest

from gpulease.daemon.drivers.interface import Dim3, DriverKernel, KernelFault, NativeLaunch
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.ptx.image import CpuKernel
from gpulease.daemon.ptx.limits import QUEUE_DEPTH
from helpers.waiting import wait_until

PTX = b"""
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 values);
.global .align 1 .b8 text[4] = {104, 105, 10, 0};

.visible .entry bump(.param .u64 at, .param .u32 more) {
  .reg .b64 %at; .reg .b32 %more, %old;
  ld.param.u64 %at, [at]; ld.param.u32 %more, [more];
  atom.global.add.u32 %old, [%at], %more;
  ret;
}

.visible .entry stall(.param .u64 at) {
  .reg .b64 %at; .reg .b32 %seen; .reg .pred %p;
  ld.param.u64 %at, [at];
again:
  ld.volatile.global.u32 %seen, [%at];
  setp.eq.u32 %p, %seen, 0;
  @%p bra again;
  ret;
}

.visible .entry print() {
  .reg .b64 %text;
  .param .b64 format; .param .b64 values; .param .b32 result;
  cvta.global.u64 %text, text;
  st.param.b64 [format], %text;
  st.param.b64 [values], 0;
  call (result), vprintf, (format, values);
  ret;
}
"""
ONE: Dim3 = (1, 1, 1)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64
)
QUERY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
ENDED, RUNS, ASK = 0, 1, 2


class Native:
    """The native functions, called from here."""

    def __init__(self, context: CpuContext) -> None:
        self.context = context
        self.own: NativeLaunch = context.native()
        self._launch, self._query = LAUNCH(self.own.launch), QUERY(self.own.query)
        self.kernels = context.module_load(PTX).kernels
        self.at = context.mem_alloc(8)
        self.word = self.at.to_bytes(8, "little")

    def launch(self, kernel: DriverKernel, params: bytes, tag: int = 1, *, grid: Dim3 = ONE) -> int:
        return self.launch_record(self.own.record(kernel, grid, ONE, 0), params, tag)

    def launch_record(self, record: bytes | None, params: bytes, tag: int = 1) -> int:
        assert record is not None
        return int(self._launch(self.own.state, record, params, len(params), tag))

    def query(self) -> int:
        return int(self._query(self.own.state))

    def started(self) -> "Native":
        """With its threads: Python starts them."""
        self.context.launch(self.kernels["bump"], (4, 1, 1), ONE, 0, self.word + bytes(4), 1)
        self.context.sync()
        return self

    def found(self) -> int:
        data = bytearray(4)
        self.context.mem_read(self.at, memoryview(data))
        return int.from_bytes(data, "little")


@pytest.fixture
def native() -> Iterator[Native]:
    context = CpuDriver().open_context("GPU-0", 1 << 20)
    yield Native(context)
    context.close()


def test_launches_are_done_in_order(native: Native) -> None:
    native.started()
    for number in range(500):
        assert native.launch(native.kernels["bump"], native.word + number.to_bytes(4, "little"), number + 1) == 0
    native.context.launch(native.kernels["bump"], ONE, ONE, 0, native.word + (1).to_bytes(4, "little"), 501)
    assert native.launch(native.kernels["bump"], native.word + (2).to_bytes(4, "little"), 9, grid=(64, 1, 1)) == 0
    assert native.found() == 499 * 500 // 2 + 1 + 128
    assert native.query() == ENDED


def test_a_kernel_that_has_run_for_long_is_left_to_python_which_optimises_it(native: Native) -> None:
    native.started()
    kernel = native.kernels["bump"]
    more = native.word + (1).to_bytes(4, "little")
    assert isinstance(kernel, CpuKernel)
    assert kernel.running.first_code_ns > 0
    kernel.running.first_code_ns = 1
    record = native.own.record(kernel, ONE, ONE, 0)
    assert native.launch_record(record, more) == 0
    native.context.sync()
    assert kernel.is_due
    assert native.launch_record(record, more) == 1
    native.context.launch(kernel, ONE, ONE, 0, more, 1)
    assert (kernel.code.is_optimised, kernel.is_due) == (True, False)
    # The same record runs the optimised code.
    assert native.launch_record(record, more) == 0
    assert native.found() == 3


def test_threads_are_started_by_python(native: Native) -> None:
    assert native.launch(native.kernels["bump"], native.word + bytes(4)) == 1
    assert native.query() == ENDED
    assert native.context.rest()
    native.started()
    assert native.launch(native.kernels["bump"], native.word + bytes(4)) == 0
    native.context.sync()
    assert native.context.rest()
    assert native.launch(native.kernels["bump"], native.word + bytes(4)) == 1


def test_a_full_queue_is_left_to_python(native: Native) -> None:
    native.started()
    native.context.launch(native.kernels["stall"], ONE, ONE, 0, native.word, 1)
    taken = 0
    while native.launch(native.kernels["bump"], native.word + bytes(4)) == 0:
        taken += 1
    assert taken == QUEUE_DEPTH - 1
    assert native.query() == RUNS
    release(native)
    native.context.sync()
    assert native.query() == ENDED


def test_a_fault_is_for_python_to_tell(native: Native) -> None:
    native.started()
    assert native.launch(native.kernels["bump"], (8).to_bytes(8, "little") + bytes(4), 77) == 0
    wait_while_it_runs(native)
    assert native.query() == ASK
    with pytest.raises(KernelFault) as caught:
        native.context.sync()
    assert (caught.value.tag, caught.value.kernel, caught.value.address) == (77, "bump", 8)
    assert native.query() == ENDED


def test_what_kernels_print_is_for_python_to_tell(native: Native) -> None:
    printed: list[tuple[str, str]] = []
    native.context.printed = lambda kernel, text: printed.append((kernel, text))
    native.started()
    assert native.launch(native.kernels["print"], b"") == 0
    wait_while_it_runs(native)
    assert native.query() == ASK
    native.context.sync()
    assert printed == [("print", "hi\n")]
    assert native.query() == ENDED


@pytest.mark.parametrize(("grid", "shared_bytes"), [((1, 65536, 1), 0), (ONE, 227 * 1024 + 1), ((0, 1, 1), 0)])
def test_what_is_refused_has_no_record(native: Native, grid: Dim3, shared_bytes: int) -> None:
    assert native.own.record(native.kernels["bump"], grid, ONE, shared_bytes) is None


def wait_while_it_runs(native: Native) -> None:
    wait_until(lambda: native.query() != RUNS, "it ends")


def release(native: Native) -> None:
    """Let `stall` end: its word is host memory."""
    ctypes.c_uint32.from_address(native.at).value = 1
