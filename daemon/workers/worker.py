"""One worker as the broker sees it.

What workers' counters say, as increments: a session's numbers go into its tenant's, which outlive it.

A page is its worker's own to write, so nothing of it is taken at its word: a number that goes back, or that no counting
could have come to, counts as no news. A tenant that took its worker over can lie about its own figures, no further.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from gpulease.daemon.contract.control_page import BrokerPage, Counter, PageFds
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.fd_passing import refuse_descriptors
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, send_message
from gpulease.daemon.host.processes import exit_text
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.families import Family
from gpulease.daemon.workers.zygote_client import Zygote
from gpulease.protocol.opcodes import Status
from gpulease.protocol.ring import Wanted

MAX_HAND_OVERS: Final = 16
"""Sockets on their way to a worker that is too busy to take them. They count as nobody's connections meanwhile."""

NS_PER_MS: Final = 1_000_000

KILLED: Final = exit_text(signal.SIGKILL)
"""How a zygote tells that a worker died of what the daemon, or anybody else, kills with."""

ENDED_BY_DAEMON: Final = "was ended by the daemon"


@dataclass(slots=True)
class Worker:
    """One worker, or one to be. `pid` is 0 until the zygote said that it has forked it.

    Attributes:
        zygote: Who made it.
        serial: Its number there.
        born_as: The lease, or warm context, it was made for.
        counted: What of its page's counters was told, see `readings`; empty before the first time.
        is_weighed: It was, or is being, weighed before it had a lease.
        own_bytes: What the card showed for it then; None if that is not known.
        next_page: Its control page once it is scrubbed; None unless it is asked to be.
        has_answered: It has said how that went.
        is_stranger: Whether whoever attaches next may be of another tenant than the lease.
        has_faulted: It has said why its context was lost, in this lease.
        submit_ends_ns: When the time of a submit is over; None until it began, or if it is none.
    """

    spec: WorkerSpec
    page: BrokerPage
    channel: socket.socket
    zygote: Zygote
    serial: int = 0
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_killed: bool = False
    hand_overs: int = 0
    born_as: int = 0
    counted: tuple[int, ...] = ()
    is_weighed: bool = False
    own_bytes: int | None = None
    next_page: BrokerPage | None = None
    has_answered: bool = False
    is_stranger: bool = True
    has_faulted: bool = False
    submit_ends_ns: int | None = None

    @classmethod
    def to_be(cls, spec: WorkerSpec, zygote: Zygote) -> tuple[Self, socket.socket]:
        """One that a zygote is to make, and its own end of its channel. Raises OSError."""
        page = BrokerPage()
        try:
            ours, theirs = channel_pair()
        except OSError:
            page.close()
            raise
        ours.setblocking(False)
        refuse_descriptors(ours)
        return cls(spec, page, ours, zygote, born_as=spec.lease_id), theirs

    @classmethod
    def adopted(cls, spec: WorkerSpec, pid: int, fds: Sequence[int], zygote: Zygote, serial: int) -> Self:
        """One that an earlier daemon had; `fds` are its pidfd, pages and channel."""
        pidfd, *page_fds, channel_fd = fds
        channel = socket.socket(fileno=channel_fd)
        channel.setblocking(False)
        refuse_descriptors(channel)
        return cls(spec, BrokerPage(PageFds(*page_fds)), channel, zygote, serial, pid, pidfd, is_ready=True)

    def refuse(self, status: Status, reason: str = "", cause: str = "") -> None:
        """Have it answer everything with `status` and that reason, and say so to whoever is connected.

        Its zygote ends it if this process hangs; what is in flight has no grace unless the page is given one. The next
        broker reads `cause`.
        """
        self.page.refuse(status, reason, time.monotonic_ns(), cause)
        # The word alone suffices; the message wakes a worker that sleeps, so that idle tenants learn why.
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            send_message(self.channel, {"op": "end"})

    def set_deadline(self, deadline_ns: int, generation: int, grace_ns: int) -> None:
        """Write the deadline where it reads it, and where its zygote does, which ends it if nobody else does."""
        ends_ns = deadline_ns
        if self.spec.submit_of:
            if self.submit_ends_ns is None:
                self.submit_ends_ns = time.monotonic_ns() + self.spec.timeout_ms * NS_PER_MS
            ends_ns = min(deadline_ns, self.submit_ends_ns)
        self.page.set_deadline(deadline_ns, generation, ends_ns + grace_ns)

    def take_lease(self, spec: WorkerSpec) -> None:
        """Have it take a lease, or a submit, if it was made ahead."""
        self.spec, self.has_faulted = spec, False
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            # The zygote first: a worker that has a lease must not be known to it as one that has none.
            self.zygote.change(self.serial, spec, lambda: self._tell_lease(spec))

    def _tell_lease(self, spec: WorkerSpec) -> None:
        if self.spec is spec:
            with contextlib.suppress(ChannelClosed, BlockingIOError):
                send_message(self.channel, spec.to_message())

    def hand_over(self, sock_fd: int, request_id: int, rest: bytes, wanted: Wanted, guest: Guest | None) -> bool:
        """Give it a tenant's socket, or a guest's; False if it can't take it now."""
        if self.hand_overs >= MAX_HAND_OVERS:
            return False
        message = {"op": "attach", "request_id": request_id, "rest": rest}
        message |= {"ring": wanted.ring, "arena": wanted.arena_bytes}
        message["is_stranger"] = self.is_stranger
        message["guest"] = None if guest is None else guest.to_message()
        self.page.open_session()
        try:
            send_message(self.channel, message, (sock_fd,))
        except (ChannelClosed, BlockingIOError):
            return False
        self.hand_overs += 1
        return True

    def faults_first(self) -> bool:
        """It says that its context is lost; whether it says so for the first time in its lease.

        What it says again is not listened to: each would be a row of the journal, and one that was taken over says it
        as fast as it can.
        """
        was_first, self.has_faulted = not self.has_faulted, True
        return was_first

    def kill(self) -> None:
        """End its process, if there is one."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.pid:
                # Its pidfd did not get through for want of descriptors here. The zygote reaps it, and says so first.
                os.kill(self.pid, signal.SIGKILL)

    def end_of(self, reason: str) -> tuple[str, bool]:
        """How it ended, for logs, and whether by the daemon; `reason`: as its zygote tells it."""
        # Whatever else it died of, it died of before the kill.
        is_by_daemon = self.is_killed and reason == KILLED
        return (ENDED_BY_DAEMON if is_by_daemon else reason), is_by_daemon

    def become_warm(self) -> bool:
        """It is scrubbed: it has its next page, and no lease but its number. False if its zygote can't be told."""
        if self.next_page is None:
            return False
        self.page.close()
        self.page, self.next_page, self.has_answered, self.counted = self.next_page, None, False, ()
        self.spec = WorkerSpec(self.spec.lease_id, self.spec.card_uuid, 0, is_shared=False)
        try:
            self.zygote.renew(self.serial, self.spec, self.page.fds)
        except (ChannelClosed, OSError):
            return False
        finally:
            self.page.let_go()
        return True

    def close(self) -> None:
        """Let go of all that is open for it; it is listened to no more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.channel)
        self.channel.close()
        self.page.close()
        if self.next_page is not None:
            self.next_page.close()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


@dataclass(slots=True)
class Ended:
    """What is known of a worker that was reaped, until its bytes are proved back."""

    lease_id: int
    pid: int
    zygote: Zygote | None = None
    serial: int = 0


LARGEST: Final = 1 << 53
"""Of a counter: what Prometheus's numbers, doubles, hold exactly. A launch a microsecond comes to it in 285 years."""

_READ: Final = (
    Counter.LAUNCHES,
    Counter.SYNCS,
    Counter.SYNC_ERRORS,
    Counter.COPIES,
    Counter.COPIED_BYTES,
    Counter.OPS,
    Counter.FAILED_OPS,
)
_NOTHING: Final = (0,) * len(_READ)
_FAMILIES: Final = (
    families.SESSION_LAUNCHES,
    families.SESSION_SYNCS,
    families.SESSION_SYNC_ERRORS,
    families.SESSION_COPIES,
    families.SESSION_COPIED_BYTES,
    families.SESSION_OPERATIONS,
    families.SESSION_OPERATION_ERRORS,
)


def news_of(worker: Worker) -> list[tuple[Family, float]]:
    """What it did since it was asked last."""
    before = worker.counted or _NOTHING
    now = _read(worker.page, before)
    worker.counted = now
    more = [new - old for new, old in zip(now, before, strict=True)]
    # The page counts waits that went well and those that did not; the series counts all.
    more[1] += more[2]
    return [(family, float(count)) for family, count in zip(_FAMILIES, more, strict=True) if count]


def begin_at(worker: Worker) -> None:
    """What it did so far was another daemon's to count."""
    worker.counted = _read(worker.page, _NOTHING)


def held_bytes(worker: Worker, most_bytes: int) -> int:
    """What its session holds, as far as that can be."""
    return min(worker.page.counter(Counter.ALLOCATED_BYTES), most_bytes)


def _read(page: BrokerPage, before: tuple[int, ...]) -> tuple[int, ...]:
    found = page.counters()
    return tuple(
        found[counter] if old <= found[counter] < LARGEST else old for counter, old in zip(_READ, before, strict=True)
    )
