"""What a zygote keeps of its workers, and which of them it ends.

That is, for each: what the broker knew of it, its process, its control pages, and, where the zygote outlives its
broker, the broker's end of its channel. So a worker does not notice that the broker died: its channel is whole, and
what it says meanwhile waits in it for the next broker. While there is none, this is who ends leases: by the deadline on
the lease's page, the word there, or a kernel that has run for longer than it may. The first two are the broker's, which
no worker can write; of the kernel the worker tells, so that one that was taken over lives to its deadline.

A broker that is there may hang: stopped, or in a disk. What it should have ended a second ago, this ends too.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.contract.control_page import NO_FDS, PageFds, PageState, flip_word, gone_by, overran_on, state_of
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.opcodes import Status

NS_PER_MS: Final = 1_000_000

GRACE_NS: Final = 20_000_000
"""From the end of a lease to the end of its worker while there is no broker: what a broker gives by default."""

MAX_LOOK_NS: Final = 1_000_000_000
"""Between two looks at the kernels of a lease that bounds them, while there is no broker."""

MIN_LOOK_NS: Final = 10_000_000
"""The same, however short the bound is: a look is a few system calls."""

LOOKS_PER_BOUND: Final = 8
"""How late such a kernel is found at most, as a part of the time it may run."""

OVERDUE_NS: Final = 1_000_000_000
"""After a worker was to be gone, or a kernel to have ended: a broker that lives is never that late, one that hangs is
not waited for. Stops a kernel that never ends from outliving its lease for as long as a broker hangs."""

LOOK_NS: Final = 500_000_000
"""Between two looks at the page of a lease while a broker is there, which writes there that the lease has ended."""

LONGEST_GRACE_NS: Final = 10_000_000_000
"""For a worker whose lease an older broker has ended: it does not write its grace down, and this is the longest that
settings allow."""

NEVER_NS: Final = 1 << 63

ALONE_S: Final = 60.0
"""How long a zygote waits for a broker once it has no worker. Stops one that nobody will come back for from staying."""


@dataclass(slots=True)
class KeptWorker:
    """One worker, from its fork until a broker says that it may be forgotten.

    Attributes:
        serial: Its number in this zygote, never used again.
        born_as: The lease, or warm context, it was made for.
        spec: What it is now: one that was made ahead has taken a lease since.
        page_fds: Its control pages.
        channel_fd: The broker's end of its channel, -1 of a zygote that dies with its broker.
        reason: How it ended; None while it has not.
        last_page: What its page said then.
        deadline_ns: When its lease ends, as the broker wrote last.
        kill_due_ns: When it is killed, None while nothing has ended it.
        is_killed: That was done.
        overran: What is to be said of a kernel for which its lease was ended, "" if it was not.
        look_ns: When it can be overdue at the earliest, by the last look.
        is_overdue: It was ended for that, though there was a broker.
        left_gone_by_ns: When it was to be gone by what the broker before this one wrote.
    """

    serial: int
    born_as: int
    spec: WorkerSpec
    pid: int
    pidfd: int = -1
    page_fds: PageFds = NO_FDS
    channel_fd: int = -1
    reason: str | None = None
    last_page: PageState | None = None
    deadline_ns: int = 0
    kill_due_ns: int | None = None
    is_killed: bool = False
    overran: str = ""
    look_ns: int = 0
    is_overdue: bool = False
    left_gone_by_ns: int = 0

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in (self.pidfd, *self.page_fds, self.channel_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.channel_fd = -1
        self.page_fds = NO_FDS


class WorkerTable:
    """The workers of one zygote."""

    def __init__(self) -> None:
        self._living: dict[int, KeptWorker] = {}
        self._ended: dict[int, KeptWorker] = {}
        self._last_serial = 0
        self._look_ns = NEVER_NS

    # --- what becomes of them ---

    def add(self, spec: WorkerSpec, pid: int, fds: tuple[int, PageFds, int]) -> KeptWorker:
        """A worker was forked; `fds`: its pidfd, pages and channel, the keeper's from now on."""
        self._last_serial += 1
        kept = KeptWorker(self._last_serial, spec.lease_id, spec, pid, *fds)
        self._living[pid] = kept
        self._look_ns = 0
        return kept

    def change(self, serial: int, spec: WorkerSpec, page_fds: PageFds = NO_FDS) -> None:
        """The worker has another lease now, or none; and other control pages, the keeper's now, if they are given."""
        for kept in self._living.values():
            if kept.serial == serial:
                kept.spec = spec
                kept.look_ns = self._look_ns = 0
                if page_fds != NO_FDS:
                    kept.page_fds, page_fds = page_fds, kept.page_fds
        for fd in page_fds:
            if fd >= 0:
                os.close(fd)

    def end(self, pid: int, reason: str, *, remember: bool) -> KeptWorker | None:
        """It was reaped; None if it was none of these. To be remembered until a broker has had its bytes proved."""
        kept = self._living.pop(pid, None)
        if kept is not None:
            kept.reason = reason
            if remember:
                # A broker that died before it could write down why it ended the lease had flipped the word before.
                kept.last_page = state_of(kept.page_fds.lease)
            kept.close()
            if remember:
                self._ended[kept.serial] = kept
        return kept

    def lease_of(self, pid: int) -> int:
        """The lease of a worker, or the warm context that it is; 0 if it is reaped."""
        kept = self._living.get(pid)
        return 0 if kept is None else kept.spec.submit_of or kept.spec.lease_id

    def forget(self, serial: int) -> None:
        """Nobody needs to know any more that it was."""
        self._ended.pop(serial, None)

    def living(self) -> list[KeptWorker]:
        """Those not reaped yet."""
        return list(self._living.values())

    def ended(self) -> list[KeptWorker]:
        """Those that were reaped and not forgotten."""
        return list(self._ended.values())

    def close(self) -> None:
        """In a worker just forked: let go of whatever is others'."""
        for kept in self._living.values():
            kept.close()
        self._living.clear()
        self._ended.clear()

    # --- while there is a broker ---

    def end_overdue(self, now_ns: int) -> int | None:
        """End what its broker should have ended a second ago; when to come back, None if nothing can be overdue."""
        if now_ns >= self._look_ns:
            self._look_ns = min((self._look(kept, now_ns) for kept in self.living()), default=NEVER_NS)
        return None if self._look_ns == NEVER_NS else self._look_ns

    def _look(self, kept: KeptWorker, now_ns: int) -> int:
        """When to look at it again."""
        if kept.is_killed or kept.spec.is_warm:
            return NEVER_NS
        if now_ns < kept.look_ns:
            return kept.look_ns
        # The broker moves it without a word to this process.
        overdue_ns = _gone_by_ns(kept) + OVERDUE_NS
        bound_ms = kept.spec.max_kernel_ms
        if now_ns >= overdue_ns:
            is_expired = now_ns >= state_of(kept.page_fds.lease).deadline_ns
            self._end_overdue(kept, Status.LEASE_EXPIRED if is_expired else Status.TIMED_OUT)
            return NEVER_NS
        if bound_ms and overran_on(kept.page_fds.claims, bound_ms + OVERDUE_NS // NS_PER_MS):
            kept.overran = overran_on(kept.page_fds.claims, bound_ms)
            self._end_overdue(kept, Status.SESSION_FAILED)
            return NEVER_NS
        kept.look_ns = min(overdue_ns, now_ns + LOOK_NS)
        return kept.look_ns

    def _end_overdue(self, kept: KeptWorker, word: Status) -> None:
        if state_of(kept.page_fds.lease).word is None:
            flip_word(kept.page_fds.lease, word)
        kept.is_overdue = kept.is_killed = True
        log_event(
            LogEvent.WORKER_OVERDUE, lease_id=kept.spec.of_lease, worker_pid=kept.pid, reason=kept.overran or None
        )
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(kept.pidfd, signal.SIGKILL)

    # --- while there is no broker ---

    def lose_broker(self, now_ns: int) -> None:
        """Nobody else ends leases, nor writes deadlines, from now on."""
        for kept in self._living.values():
            state = state_of(kept.page_fds.lease)
            kept.deadline_ns = state.deadline_ns
            if not state.deadline_ns:
                # Nobody was told of it, nor will be.
                kept.kill_due_ns = now_ns
            elif state.word is not None:
                kept.kill_due_ns = now_ns + GRACE_NS

    def regain_broker(self) -> None:
        """There is somebody else again to end what is not killed yet."""
        for kept in self._living.values():
            if not kept.is_killed:
                kept.kill_due_ns = None
            kept.left_gone_by_ns = gone_by(kept.page_fds.lease).unrefused_ns
            kept.look_ns = self._look_ns = 0

    def enforce(self, now_ns: int) -> int | None:
        """End what is due; when to come back, None if nothing is left that could become due."""
        return min((due_ns for kept in self.living() for due_ns in self._enforce(kept, now_ns)), default=None)

    def _enforce(self, kept: KeptWorker, now_ns: int) -> Iterator[int]:
        if kept.is_killed:
            return
        if kept.kill_due_ns is None and (word := _word_for(kept, now_ns)) is not None:
            kept.kill_due_ns = now_ns + GRACE_NS
            flip_word(kept.page_fds.lease, word)
            _wake(kept.channel_fd)
        if kept.kill_due_ns is None:
            yield kept.deadline_ns
            if bound_ns := kept.spec.max_kernel_ms * NS_PER_MS:
                yield now_ns + max(MIN_LOOK_NS, min(bound_ns // LOOKS_PER_BOUND, MAX_LOOK_NS))
        elif now_ns < kept.kill_due_ns:
            yield kept.kill_due_ns
        else:
            kept.is_killed = True
            log_event(LogEvent.WORKER_KILLED_ALONE, lease_id=kept.spec.of_lease, worker_pid=kept.pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(kept.pidfd, signal.SIGKILL)


def _gone_by_ns(kept: KeptWorker) -> int:
    """When a worker is to be gone while there is a broker, `NEVER_NS` if its page does not say."""
    state, (unrefused_ns, refused_ns) = state_of(kept.page_fds.lease), gone_by(kept.page_fds.lease)
    if state.word is not None and refused_ns:
        return refused_ns
    # An older broker moves the deadline alone. A submit may be over before that, by the time that this broker gives it.
    is_of_submit = kept.spec.submit_of and unrefused_ns != kept.left_gone_by_ns
    by_ns = unrefused_ns if is_of_submit else max(unrefused_ns, state.deadline_ns)
    if not by_ns:
        return NEVER_NS
    return by_ns if state.word is None else by_ns + LONGEST_GRACE_NS


def _word_for(kept: KeptWorker, now_ns: int) -> Status | None:
    """What ends a lease now, None if nothing does."""
    if now_ns >= kept.deadline_ns:
        return Status.LEASE_EXPIRED
    kept.overran = overran_on(kept.page_fds.claims, kept.spec.max_kernel_ms)
    return Status.SESSION_FAILED if kept.overran else None


def _wake(channel_fd: int) -> None:
    """Have a worker that sleeps look at its page, so that it tells its tenants why it ends."""
    channel = socket.socket(fileno=channel_fd)
    try:
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            send_message(channel, {"op": "end"})
    finally:
        channel.detach()
