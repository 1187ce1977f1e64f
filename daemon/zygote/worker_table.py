"""The workers of a zygote, and the rules under which the zygote itself ends their leases.

For each worker the table has its specification from the broker, its process and its control pages. A zygote that
outlives its broker also has the broker's end of the worker's channel. So if the broker dies, the channel stays open,
and the worker's messages wait in it until the next broker reads them.

While no broker runs, the zygote ends leases: by the deadline, the membership deadline or the revocation word on the
lease's page, or because a kernel has run for too long. No worker can write the lease's page. The times of kernels are
the worker's own claims, so a compromised worker can hide a kernel, and then lives until its lease's deadline.

A broker may also hang, because it is stopped or waits for a disk. Then the zygote ends the leases that the broker
should have ended a second ago.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Final

from gpulease.daemon.contract.control_page import (
    NO_FDS,
    PageFds,
    PageState,
    Transfer,
    boot_ns,
    flip_word,
    gone_by,
    overran_on,
    state_of,
    transfer_on,
)
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import EndedWorker, EndSession, HandoverDone, LivingWorker
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.processes import is_exiting
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

NEVER_NS: Final = 1 << 63


@dataclass(slots=True)
class WorkerEntry:
    """A worker, from its fork until a broker orders the zygote to forget it.

    Attributes:
        serial: The worker's number in this zygote; never used again.
        forked_for: The lease, or warm context, for which the worker was made.
        spec: The specification of the worker's present lease. A warm worker gets its lease after the fork.
        page_fds: The worker's control pages.
        channel_fd: The broker's end of the worker's channel; -1 if the zygote dies with its broker.
        reason: How the worker ended; None while it lives.
        last_page: The state of the lease's page when the worker was reaped.
        last_transfer: The worker's last claims about its session when it was reaped.
        deadline_ns: When the lease ends, as the last broker wrote it. Set while no broker runs.
        kill_due_ns: When the zygote kills the worker; None while nothing has ended its lease.
        is_killed: Whether the zygote has killed it.
        overran: The kernel because of which the zygote ended the lease, as text; "" if there is none.
        poll_ns: When the worker can be overdue at the earliest, by the last reading of its page.
        is_overdue: Whether the zygote killed the worker although there was a broker.
        left_gone_by_ns: The time by which the worker had to have exited, according to the page that the earlier broker
            left.
    """

    serial: int
    forked_for: int
    spec: WorkerSpec
    pid: int
    pidfd: int = -1
    page_fds: PageFds = NO_FDS
    channel_fd: int = -1
    reason: str | None = None
    last_page: PageState | None = None
    last_transfer: Transfer | None = None
    deadline_ns: int = 0
    kill_due_ns: int | None = None
    is_killed: bool = False
    overran: str = ""
    poll_ns: int = 0
    is_overdue: bool = False
    left_gone_by_ns: int = 0

    def kill(self) -> None:
        """Kill the process by its pidfd; do nothing if it has ended."""
        self.is_killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for fd in (self.pidfd, *self.page_fds, self.channel_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.channel_fd = -1
        self.page_fds = NO_FDS


class WorkerTable:
    """The workers of one zygote, living and ended."""

    def __init__(self) -> None:
        # By process id while they live; by serial number once they were reaped.
        self._live_workers: dict[int, WorkerEntry] = {}
        self._ended: dict[int, WorkerEntry] = {}
        self._last_serial = 0
        # When some worker can be overdue at the earliest; 0 makes the next call read all pages.
        self._poll_ns = NEVER_NS

    def add(self, spec: WorkerSpec, pid: int, fds: tuple[int, PageFds, int]) -> WorkerEntry:
        """Add a worker that was forked. `fds`: its pidfd, pages and channel, which the table closes from now on."""
        self._last_serial += 1
        worker = WorkerEntry(self._last_serial, spec.lease_id, spec, pid, *fds)
        self._live_workers[pid] = worker
        self._poll_ns = 0
        return worker

    def change(self, serial: int, spec: WorkerSpec, page_fds: PageFds = NO_FDS) -> None:
        """Give a worker another lease, or none; with `page_fds`, which the table closes, also other control pages."""
        # A change may also move a deadline, so read the page again at once.
        for worker in self._live_workers.values():
            if worker.serial == serial:
                worker.spec = spec
                worker.poll_ns = self._poll_ns = 0
                if page_fds != NO_FDS:
                    # The statement below closes the old pages instead of the new ones.
                    worker.page_fds, page_fds = page_fds, worker.page_fds
        for fd in page_fds:
            if fd >= 0:
                os.close(fd)

    def reap(self, pid: int, reason: str, *, remember: bool) -> WorkerEntry | None:
        """Record that a child was reaped. Returns its entry; None if it was not a worker.

        Args:
            pid: The child's process id.
            reason: How the child ended, as text.
            remember: Whether to keep the entry until a broker reports that the worker's bytes are proved free.
        """
        worker = self._live_workers.pop(pid, None)
        if worker is not None:
            worker.reason = reason
            if remember:
                # A broker sets the revocation word before it records the end. If it died in between, only the page
                # shows the end.
                worker.last_page = state_of(worker.page_fds.lease)
                worker.last_transfer = transfer_on(worker.page_fds.claims)
            worker.close()
            if remember:
                self._ended[worker.serial] = worker
        return worker

    def lease_of(self, pid: int) -> int:
        """Return the lease or warm context of a worker; 0 if it was reaped."""
        worker = self._live_workers.get(pid)
        return 0 if worker is None else worker.spec.submit_of or worker.spec.lease_id

    def forget(self, serial: int) -> None:
        self._ended.pop(serial, None)

    def live_workers(self) -> list[WorkerEntry]:
        return list(self._live_workers.values())

    def is_empty(self) -> bool:
        """Return whether no worker lives, and no broker still needs the report of an ended one."""
        return not self._live_workers and not self._ended

    def close(self) -> None:
        """Close all descriptors, in a newly forked worker: nothing of another lease may be open there."""
        for worker in self._live_workers.values():
            worker.close()
        self._live_workers.clear()
        self._ended.clear()

    def handover(self) -> Iterator[tuple[Message, tuple[int, ...]]]:
        """Yield the messages, with their descriptors, that report the workers to the next broker."""
        # First yield the live workers, each with its descriptors; then the ended workers, which only need a report.
        for worker in self._live_workers.values():
            living = LivingWorker(worker.serial, worker.pid, worker.spec, worker.overran)
            yield living, (worker.pidfd, *worker.page_fds, worker.channel_fd)
        for worker in self._ended.values():
            page, reason = worker.last_page, worker.reason or ""
            cause = None if page is None else page.cause
            transfer = worker.last_transfer
            yield (
                EndedWorker(worker.serial, worker.pid, reason, worker.spec, worker.overran, page, cause, transfer),
                (),
            )
        yield HandoverDone(), ()

    # --- while there is a broker ---

    def end_overdue(self, now_ns: int) -> int | None:
        """Kill workers that the broker should have ended a second ago.

        Returns:
            When to call again, in monotonic nanoseconds; None if no worker can become overdue.
        """
        if now_ns >= self._poll_ns:
            # Pages are read only when one of them may have something due.
            self._poll_ns = min((_end_if_overdue(worker, now_ns) for worker in self.live_workers()), default=NEVER_NS)
        return None if self._poll_ns == NEVER_NS else self._poll_ns

    # --- while no broker runs ---

    def lose_broker(self, now_ns: int) -> None:
        """Become responsible for ending leases: from now on, no broker ends them or writes deadlines."""
        for worker in self._live_workers.values():
            state = state_of(worker.page_fds.lease)
            worker.deadline_ns = state.deadline_ns
            if not state.deadline_ns:
                # The lease was never granted, so no tenant has its id.
                worker.kill_due_ns = now_ns
            elif state.word is not None:
                worker.kill_due_ns = now_ns + GRACE_NS

    def regain_broker(self) -> None:
        """Leave all workers that have not been killed to the new broker."""
        for worker in self._live_workers.values():
            # The new broker ends leases by its own rules, but kills that were already decided remain.
            if not worker.is_killed:
                worker.kill_due_ns = None
            # Keep the values that the old broker wrote to the page, to distinguish them from those of the new broker.
            worker.left_gone_by_ns = gone_by(worker.page_fds.lease).unrefused_ns
            worker.poll_ns = self._poll_ns = 0

    def end_due(self, now_ns: int) -> int | None:
        """End leases that are over, and kill their workers after a grace.

        Returns:
            When to call again, in monotonic nanoseconds; None if nothing can become due.
        """
        return min((due_ns for worker in self.live_workers() for due_ns in _end_if_due(worker, now_ns)), default=None)


# --- overdue while there is a broker ---

OVERDUE_NS: Final = 1_000_000_000
"""Delay of a broker after which the zygote acts, so that an endless kernel can't long outlive its lease while the
broker hangs. A broker that runs is never so late."""

PAGE_POLL_NS: Final = 500_000_000
"""Time between two readings of a page: the broker ends the lease or moves the deadline there, without a message."""

BEYOND_NS: Final = 100_000_000
"""Time after a lease's membership deadline after which the zygote acts although there is a broker. Soon after that
deadline (a few hundredths of its length), another node may serve the lease's name, so the zygote does not wait for a
second here."""

ISOLATED: Final = "isolated"
"""The cause of an end at the membership deadline, for the next broker."""

LONGEST_GRACE_NS: Final = 10_000_000_000
"""Grace of a worker after an older broker has ended its lease. That broker does not record the grace; this is the
longest one that settings allow."""


def _end_if_overdue(worker: WorkerEntry, now_ns: int) -> int:
    """Kill a worker that its broker should have ended. Returns when to check the worker again."""
    if worker.is_killed or worker.spec.is_warm:
        return NEVER_NS
    if now_ns < worker.poll_ns:
        return worker.poll_ns
    # There are three reasons, in this order: the membership deadline, after which another node may serve the name; the
    # time by which the broker planned to end the worker; a kernel that runs for too long.
    page = state_of(worker.page_fds.lease)
    overdue_ns = _gone_by_ns(worker, page) + OVERDUE_NS
    membership_deadline_ns = _membership_deadline_ns(page, now_ns)
    bound_ms = worker.spec.max_kernel_ms
    if now_ns >= membership_deadline_ns + BEYOND_NS:
        _end_overdue(worker, Status.REVOKED, ISOLATED)
        return NEVER_NS
    if now_ns >= overdue_ns:
        _end_overdue(worker, Status.LEASE_EXPIRED if now_ns >= page.deadline_ns else Status.TIMED_OUT)
        return NEVER_NS
    if bound_ms and overran_on(worker.page_fds.claims, bound_ms + OVERDUE_NS // NS_PER_MS):
        worker.overran = overran_on(worker.page_fds.claims, bound_ms)
        _end_overdue(worker, Status.SESSION_FAILED)
        return NEVER_NS
    worker.poll_ns = min(overdue_ns, membership_deadline_ns + BEYOND_NS, now_ns + PAGE_POLL_NS)
    return worker.poll_ns


def _membership_deadline_ns(page: PageState, now_ns: int) -> int:
    """Return the membership deadline on a named lease's page, on the monotonic clock; else `NEVER_NS`."""
    return now_ns + page.membership_deadline_boot_ns - boot_ns() if page.membership_deadline_boot_ns else NEVER_NS


def _gone_by_ns(worker: WorkerEntry, page: PageState) -> int:
    """Return when a worker must have exited, according to its lease's page; `NEVER_NS` if the page does not say."""
    unrefused_ns, refused_ns = gone_by(worker.page_fds.lease)
    # A broker that ended the lease has written when the worker must have exited.
    if page.word is not None and refused_ns:
        return refused_ns
    # An older broker moves only the deadline. A submit may be over earlier, by the timeout that the present broker
    # wrote.
    is_of_submit = worker.spec.submit_of and unrefused_ns != worker.left_gone_by_ns
    by_ns = unrefused_ns if is_of_submit else max(unrefused_ns, page.deadline_ns)
    if not by_ns:
        return NEVER_NS
    return by_ns if page.word is None else by_ns + LONGEST_GRACE_NS


def _end_overdue(worker: WorkerEntry, word: Status, cause: str = "") -> None:
    # Set the revocation word before the kill, so that the worker may report the end to its tenants before it dies.
    if state_of(worker.page_fds.lease).word is None:
        flip_word(worker.page_fds.lease, word, cause)
    # The broker did end the lease, and the worker is still exiting: the driver unpins a parked lease's host memory.
    if is_exiting(worker.pid):
        return
    worker.is_overdue = True
    reason = worker.overran or None
    log_event(LogEvent.WORKER_OVERDUE, lease_id=worker.spec.of_lease, worker_pid=worker.pid, reason=reason)
    worker.kill()


# --- due while no broker runs ---

GRACE_NS: Final = 20_000_000
"""Time from the end of a lease to the kill of its worker, equal to the default in a broker's settings."""

MAX_POLL_NS: Final = 1_000_000_000
"""Longest time between two polls of a kernel with a bounded time."""

MIN_POLL_NS: Final = 10_000_000
"""Shortest time between two such polls, however short the bound: a poll is a few system calls."""

POLLS_PER_BOUND: Final = 8
"""Number of polls in the time for which a kernel may run. An overrun is found late by at most this fraction of that
time."""


def _end_if_due(worker: WorkerEntry, now_ns: int) -> Iterator[int]:
    """End a worker's lease if it is over, and the worker after the grace. Yields the times at which to check again."""
    if worker.is_killed:
        return
    # Step 1: if the lease is over, set the revocation word and wake the worker; the grace begins.
    if worker.kill_due_ns is None and (word := _word_for(worker, now_ns)) is not None:
        worker.kill_due_ns = now_ns + GRACE_NS
        flip_word(worker.page_fds.lease, word, ISOLATED if word is Status.REVOKED else "")
        _wake(worker.channel_fd)
    # Step 2: while the lease lives, yield the next time at which that may change.
    if worker.kill_due_ns is None:
        yield worker.deadline_ns
        if (membership_deadline_ns := _membership_deadline_ns(state_of(worker.page_fds.lease), now_ns)) != NEVER_NS:
            # The host may sleep during this wait, and the clock of the wait does not count sleep.
            yield min(membership_deadline_ns, now_ns + PAGE_POLL_NS)
        if bound_ns := worker.spec.max_kernel_ms * NS_PER_MS:
            yield now_ns + max(MIN_POLL_NS, min(bound_ns // POLLS_PER_BOUND, MAX_POLL_NS))
    # Step 3: in the grace, wait; after it, kill.
    elif now_ns < worker.kill_due_ns:
        yield worker.kill_due_ns
    else:
        log_event(LogEvent.WORKER_KILLED_ALONE, lease_id=worker.spec.of_lease, worker_pid=worker.pid)
        worker.kill()


def _word_for(worker: WorkerEntry, now_ns: int) -> Status | None:
    """Return the revocation word that ends a lease now; None if it continues."""
    # The order of precedence is: the deadline, the membership deadline, a kernel that ran for too long.
    if now_ns >= worker.deadline_ns:
        return Status.LEASE_EXPIRED
    if now_ns >= _membership_deadline_ns(state_of(worker.page_fds.lease), now_ns):
        return Status.REVOKED
    worker.overran = overran_on(worker.page_fds.claims, worker.spec.max_kernel_ms)
    return Status.SESSION_FAILED if worker.overran else None


def _wake(channel_fd: int) -> None:
    """Make a sleeping worker read its page, so that it reports the end of the lease to its tenants."""
    channel = socket.socket(fileno=channel_fd)
    try:
        # The descriptor belongs to the table, so the socket object must not close it.
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            send_message(channel, EndSession().to_map())
    finally:
        channel.detach()
