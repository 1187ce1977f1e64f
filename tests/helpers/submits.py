"""One-shot jobs for tests: a correct one, one that faults, and one that never ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from gpulease.client import (
    Disconnected,
    GpuLease,
    GpuLeaseError,
    GpuSessionFailed,
    KernelArgs,
    LeaseFreed,
    Revoked,
    Submission,
    TimedOut,
)
from gpulease.daemon.session.main import WARM_NAME
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, FAULTS, TRANSFORM, floats, grid_for, numbers
from helpers.processes import ProcessInfo
from helpers.waiting import wait_until

ROOM: Final = 1 << 20
"""Bytes that leases in these tests reserve for submits."""

WORKER: Final = "gpul-submit"

SHORT_S: Final = (1.0, 5.0, 25.0, 125.0)
"""Time limits, in the order in which they are tried, of submits that must soon time out."""

LONG_S: Final = 600.0
"""Time limit of a submit that something else ends."""

POOL_S: Final = 120.0
"""How long a pool may take to be full again. A card makes contexts slowly, and waits before it replaces a lost one."""


def scaling(lease: Any, n: int = 1000, factor: float = 2.0) -> Any:
    """Return a submit that scales n numbers."""
    args = KernelArgs().push_u32(n).push_f32(factor)
    return lease.submit("scale", TRANSFORM).grid(grid_for(n)).block(BLOCK).inout(numbers(n)).args(args)


def check_scaled(outputs: list[bytes], n: int = 1000, factor: float = 2.0) -> None:
    """Fail unless there is one output, in which every number is correct."""
    (output,) = outputs
    np.testing.assert_array_equal(floats(output), numbers(n) * np.float32(factor))


def endless(lease: Any) -> Any:
    return lease.submit("endless", FAULTS).out(4)


def stray(lease: Any) -> Any:
    """Return a submit that stores far outside of all memory. Its output has been written before the launch."""
    return lease.submit("stray_store", FAULTS).inout(b"abcd").arg(np.uint64(1 << 40))


class Running:
    """A submit in a thread.

    Attributes:
        outputs: The submit's outputs; None until it has succeeded.
        error: The submit's error, if it failed.
    """

    def __init__(self, submission: Submission) -> None:
        self.outputs: list[bytes] | None = None
        self.error: GpuLeaseError | None = None
        self._submission = submission
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outputs = self._submission.launch()
        except GpuLeaseError as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        wait_until(lambda: self.is_over, "the submit is over")
        self._thread.join()


def workers_of(processes: Callable[[], list[ProcessInfo]]) -> list[int]:
    return [info.pid for info in processes() if info.name == WORKER and not info.is_zombie]


def wait_until_warm(daemon: Daemon, wanted: int = 1) -> list[int]:
    """Wait until the first card has `wanted` warm contexts, and return their process ids."""

    def is_full() -> bool:
        return int(daemon.inventory().details[0]["warm_contexts"]) == wanted

    wait_until(is_full, "the pool is full", POOL_S, seen=lambda: daemon.inventory().details)
    return [info.pid for info in daemon.processes() if info.name == WARM_NAME]


@contextmanager
def running(daemon: Daemon, lease: GpuLease, submission: Submission | None = None) -> Iterator[Running]:
    """Run a submit, by default one that never ends. Yields when its kernel runs; after the block, waits for its end."""
    found = Running(submission or endless(lease).timeout_secs(60))
    try:
        wait_until(lambda: found.is_over or is_launched(daemon, lease.lease_id), "its kernel is launched")
        assert not found.is_over, found.error
        yield found
    finally:
        found.wait()


def timed_out(daemon: Daemon, lease: GpuLease, scene: Callable[[Running], bool]) -> None:
    """Run a scene while the kernel of a submit that soon times out runs. Fails unless the submit times out.

    On a busy host the submit may time out before the scene ends. Then the scene runs again with a longer time limit.

    Args:
        daemon: The daemon, which must run until the scene begins.
        lease: A lease with memory for submits.
        scene: Returns whether the submit ran during the whole scene. It fails the test if the submit ran and a check
            failed.
    """
    for seconds in SHORT_S:
        work = Running(endless(lease).timeout_secs(seconds))
        try:
            wait_until(lambda work=work: work.is_over or is_launched(daemon, lease.lease_id), "its kernel is launched")  # type: ignore[misc]
            ran = not work.is_over and scene(work)
        finally:
            work.wait()
        # If a host makes no context within ten seconds, the client gives up. That is not a failure of the test.
        if isinstance(work.error, Disconnected) and "did not answer within" in str(work.error):
            wait_until(lambda: "submit" not in daemon.query(lease.lease_id), "what it began is gone")
            continue
        assert isinstance(work.error, TimedOut), work.error
        if ran:
            return
    raise AssertionError(f"the scene takes longer than {SHORT_S[-1]:g} s")


def start_endless(daemon: Daemon) -> Callable[[GpuLease], Running]:
    """Return a function for `Daemon.short_lease` that starts an endless submit.

    It raises the submit's error if the submit ends before its kernel runs.
    """

    def start(lease: GpuLease) -> Running:
        work = Running(endless(lease).timeout_secs(LONG_S))
        wait_until(lambda: work.is_over or is_launched(daemon, lease.lease_id), "its kernel is launched")
        if work.error is not None:
            raise work.error
        return work

    return start


def revoke(daemon: Daemon, lease: GpuLease) -> None:
    daemon.revoke(lease.lease_id, "maintenance at noon")


def free(daemon: Daemon, lease: GpuLease) -> None:
    lease.free()


def lose_the_session(daemon: Daemon, lease: GpuLease) -> None:
    os.kill(daemon.worker_pid(lease.lease_id), signal.SIGKILL)


ENDS: Final[dict[str, tuple[Callable[[Daemon, GpuLease], None], type[GpuLeaseError]]]] = {
    "revoked": (revoke, Revoked),
    "freed": (free, LeaseFreed),
    "its session's worker killed": (lose_the_session, GpuSessionFailed),
}
"""Actions that end a lease, and the error that its submit then raises."""


def is_launched(daemon: Daemon, lease_id: int) -> bool:
    """Return whether the kernel of a lease's submit has been launched."""
    submit = daemon.query(lease_id).get("submit")
    return submit is not None and submit["state"] == "running" and submit["launches"] == 1
