"""Tenants that acquire a named lease, and record when the kernels of its session ran."""

import threading
import time
from dataclasses import field
from typing import Final

from gpulease.client import GpuBuilder, GpuLease, GpuLeaseError, GpuSession, KernelArgs
from gpulease.protocol.fast_dataclass import dataclass

VALUES: Final = 1024
WORK_PAUSE_S: Final = 0.005
SLICE_BYTES: Final = 64 << 20
LEASE_S: Final = 300
ASK_PAUSE_S: Final = 0.2


@dataclass(slots=True)
class Work:
    """The kernels that a tenant ran in one session and waited for.

    Attributes:
        spans: The time of each kernel's launch and of its end, in monotonic seconds.
        end: The error with which the session ended.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    end: str = ""


class Tenant:
    """A tenant that computes in one lease's session until the session ends or `stop` is called."""

    def __init__(self, lease: GpuLease, ptx: bytes) -> None:
        self.work = Work()
        self._lease = lease
        self._ptx = ptx
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenant")

    def start(self) -> None:
        """Start to compute, in a separate thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop computing. Waits for the kernel in progress, and for the end of the session."""
        self._is_over.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until the session has ended on its own."""
        self._thread.join()

    def await_kernels(self, count: int) -> None:
        """Wait until `count` kernels have run, or the session has ended."""
        while len(self.work.spans) < count and self._thread.is_alive():
            time.sleep(WORK_PAUSE_S)

    def _run(self) -> None:
        # Wait for each kernel before launching the next, so that its end is known and the spans of one session never
        # overlap.
        try:
            with GpuSession(self._lease) as session:
                module, buffer = session.module_load(self._ptx), session.mem_alloc(4 * VALUES)
                args = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(1.0)
                while not self._is_over.wait(WORK_PAUSE_S):
                    began_s = time.monotonic()
                    session.launch(module, "bias", [4], [256], args)
                    session.sync()
                    self.work.spans.append((began_s, time.monotonic()))
        except GpuLeaseError as error:
            self.work.end = f"{type(error).__name__}: {error}"


def builder_of(address: str, name: str) -> GpuBuilder:
    """Return a builder for the name's lease, at the daemon at `address`."""
    return GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(LEASE_S).name(name)


def acquire_name(address: str, name: str, wait_s: float) -> GpuLease:
    """Acquire a name's lease. Retries for `wait_s` while the node has not joined or the name is not free."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            # In each attempt the node itself waits for the name, for the remaining time.
            return builder_of(address, name).timeout(max(1.0, until_s - time.monotonic())).acquire()
        except GpuLeaseError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(ASK_PAUSE_S)


def overlaps(first: Work, second: Work) -> int:
    """Return the number of pairs of kernels, one from each session, that ran at the same time."""
    # Two spans overlap if each begins before the other ends.
    return sum(a < d and c < b for a, b in first.spans for c, d in second.spans)
