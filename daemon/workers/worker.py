"""The broker's view of a worker: its process, its channel and its control page, and the counters on that page.

A worker writes its own counters. So a counter that decreases, or that is impossibly high, counts as unchanged. A tenant
that has compromised its worker can falsify only its own figures.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Final, Self

from gpulease.daemon.contract.control_page import SESSION_TOTALS, BrokerPage, Counter, PageFds
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import AttachOrder, EndSession
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, send_message
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.record.metrics.families import SESSION_FAMILIES, MetricFamily
from gpulease.daemon.workers.region_link import RegionLink
from gpulease.daemon.workers.zygote_client import ZygoteClient
from gpulease.protocol.failures import KILLED, LEASE_ENDS
from gpulease.protocol.fast_dataclass import dataclass, replace
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

MAX_HAND_OVERS: Final = 16
"""Maximum number of sockets that wait in the channel of a busy worker. They do not count as connections until the
worker takes them."""

ENDED_BY_DAEMON: Final = "was ended by the daemon"


@dataclass(slots=True)
class Worker:
    """A worker, from the time of the request to the zygote.

    Attributes:
        spec: The worker's lease; its `lease_id` is the worker's number in the broker.
        page: Its control page.
        channel: The broker's end of its channel.
        zygote: The zygote that forked it, or is about to.
        serial: Its number in that zygote; 0 until it is forked.
        pid: Its process id; 0 until it is forked.
        pidfd: Its pidfd; -1 until it is forked, or if the descriptor was lost in transit.
        is_ready: Whether it has a context.
        is_killed: Whether the broker has killed it.
        hand_overs: Number of sockets that were sent to it and that it has not taken yet.
        forked_for: The lease, or warm context, for which it was made.
        counted: The counters that were reported last (see `counter_increments`); empty before the first report.
        is_measured: Whether its memory was measured, or is being measured, before its first lease.
        own_bytes: Bytes that the card showed for it in that measurement; None if unknown.
        next_page: Its control page after the scrub; None unless the broker has ordered a scrub.
        has_answered: Whether it has reported the result of the scrub.
        is_proof_awaited: Whether its kill was put off because of that report; see `Recycler.kill_put_off_until_ns`.
        is_stranger: Whether the next tenant to attach may be someone other than the lease's tenant.
        has_faulted: Whether it has reported, during this lease, why its context is lost.
        submit_ends_ns: Time at which the submit's timeout expires, on the monotonic clock; None before it begins, or
          for a lease.
        regions: Its session's regions and words; None before a warm worker takes a lease, a client asks for the words,
            or a region is opened.
        has_left: Whether the broker has taken its session's image. Then it serves nothing, unless the session stays.
        asks_for_words: Whether the latest connection asked for the session's words; True before the first one.
    """

    spec: WorkerSpec
    page: BrokerPage
    channel: socket.socket
    zygote: ZygoteClient
    serial: int = 0
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_killed: bool = False
    hand_overs: int = 0
    forked_for: int = 0
    counted: tuple[int, ...] = ()
    is_measured: bool = False
    own_bytes: int | None = None
    next_page: BrokerPage | None = None
    has_answered: bool = False
    is_proof_awaited: bool = False
    is_stranger: bool = True
    has_faulted: bool = False
    submit_ends_ns: int | None = None
    regions: RegionLink | None = None
    has_left: bool = False
    asks_for_words: bool = True

    @property
    def earlier_version(self) -> str:
        """The daemon's version that its code comes from; "" for the code of this daemon, under its settings."""
        return "" if self.zygote.is_current else self.zygote.version

    @classmethod
    def create(cls, spec: WorkerSpec, zygote: ZygoteClient) -> tuple[Self, socket.socket]:
        """Return a worker that a zygote is about to fork, and the worker's end of its channel. Raises OSError."""
        # Both may fail for lack of descriptors. Then nothing may stay open.
        page = BrokerPage()
        try:
            own_end, peer_end = channel_pair()
        except OSError:
            page.close()
            raise
        own_end.setblocking(False)
        refuse_descriptors(own_end)
        return cls(spec, page, own_end, zygote, forked_for=spec.lease_id), peer_end

    @classmethod
    def adopt(cls, spec: WorkerSpec, pid: int, fds: Sequence[int], zygote: ZygoteClient, serial: int) -> Self:
        """Return a worker of an earlier daemon. `fds`: its pidfd, two pages, and the broker's end of its channel."""
        pidfd, *page_fds, channel_fd = fds
        channel = socket.socket(fileno=channel_fd)
        channel.setblocking(False)
        refuse_descriptors(channel)
        return cls(spec, BrokerPage(PageFds(*page_fds)), channel, zygote, serial, pid, pidfd, is_ready=True)

    # --- its lease ---

    def take_lease(self, spec: WorkerSpec) -> None:
        """Give a warm worker a lease or a submit. The zygote is notified before the worker."""
        self.spec, self.has_faulted = spec, False
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            # Notify the zygote first: it must not mistake a worker that has a lease for a warm one.
            self.zygote.change(self.serial, spec, lambda: self._send_lease(spec))

    def _send_lease(self, spec: WorkerSpec) -> None:
        # The worker may have another lease by the time the zygote has read the message.
        if self.spec is not spec:
            return
        self._send_or_drop(spec)
        if not spec.submit_of and self.asks_for_words:
            # Most clients ask for the session's words. Make the page while the worker opens its context, which takes
            # longer. If this fails, it is tried again for the first such client. A recycled worker's tenant asks as it
            # did in its last lease.
            with contextlib.suppress(OSError):
                self.open_regions().show_page()

    def set_deadline(self, deadline_ns: int, generation: int, grace_ns: int) -> None:
        """Write the deadline on the page, for the worker and for its zygote, both of which enforce it.

        Args:
            deadline_ns: Time at which the lease ends, on the monotonic clock.
            generation: The number of the grant or renewal.
            grace_ns: How long work in flight may continue after the deadline.
        """
        ends_ns = deadline_ns
        # A submit has its own timeout, which starts with its first deadline and is not extended by renewals of the
        # lease.
        if self.spec.submit_of:
            if self.submit_ends_ns is None:
                self.submit_ends_ns = time.monotonic_ns() + self.spec.timeout_ms * NS_PER_MS
            ends_ns = min(deadline_ns, self.submit_ends_ns)
        self.page.set_deadline(deadline_ns, generation, ends_ns + grace_ns)
        if self.regions is not None:
            self.regions.page.set_generation(generation)

    def refuse(self, status: Status, reason: str = "", cause: str = "") -> None:
        """Make the worker answer everything with `status` and `reason`, and notify its connections.

        If this process hangs, the zygote ends the worker at once; `BrokerPage.set_grace_end` gives work in flight time.
        The next broker reads `cause`.
        """
        self.page.refuse(status, reason, time.monotonic_ns(), cause)
        # Write the state word after the control page: when a client reads the word, the session must have ended
        # already.
        if self.regions is not None and cause:
            self.regions.page.end_lease(status, cause, reason)
        # The word on the page is enough to end the lease. The message wakes a sleeping worker, so that idle tenants are
        # sent the reason.
        self._send_or_drop(EndSession())

    def hand_over(self, sock_fd: int, attach: AttachOrder) -> bool:
        """Send the worker a tenant's socket, or a guest's. Returns False if the worker can't take it now."""
        if self.hand_overs >= MAX_HAND_OVERS:
            return False
        attach = replace(attach, is_stranger=self.is_stranger)
        self.asks_for_words = attach.words
        # Write this before the socket is sent: if this process dies in between, the next broker assumes that there is a
        # session.
        self.page.open_session()
        if attach.words and not self.spec.submit_of:
            # Without a descriptor for the page, only the worker notifies the client of the lease's end.
            with contextlib.suppress(OSError):
                self.open_regions().show_page()
        try:
            send_message(self.channel, attach.to_map(), (sock_fd,))
        except (ChannelClosed, BlockingIOError):
            return False
        # Count it until the worker reports Attached.
        self.hand_overs += 1
        return True

    def on_fault(self) -> bool:
        """Record that the worker's context is lost.

        Returns False if the worker has reported that before, in this lease.

        Each new report is a row of the journal, and a compromised worker could send them as fast as it can.
        """
        was_first, self.has_faulted = not self.has_faulted, True
        return was_first

    def become_warm(self) -> bool:
        """After a scrub, drop the lease and use the next page. Returns False if the zygote can't be notified."""
        if self.next_page is None:
            return False
        # Close the old lease's pages. On the new page, counters start at zero.
        self.close_regions()
        self.page.close()
        self.page, self.next_page, self.counted = self.next_page, None, ()
        self.has_answered = self.is_proof_awaited = False
        self.spec = WorkerSpec(self.spec.lease_id, self.spec.card_uuid, 0, is_shared=False)
        try:
            # The zygote needs the new pages for its own watchdog, and for the next broker.
            self.zygote.renew(self.serial, self.spec, self.page.fds)
        except (ChannelClosed, OSError):
            return False
        finally:
            self.page.close_fds()
        return True

    def resize(self, size_bytes: int) -> None:
        """Record a slice's new size, for the next broker as well."""
        self.spec = replace(self.spec, size_bytes=size_bytes, opened_bytes=self.spec.context_bytes)
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            self.zygote.change(self.serial, self.spec, lambda: None)

    def open_regions(self, *, is_held: bool = False) -> RegionLink:
        """Return the link to the session's regions, which is made at its first use. Raises OSError.

        Args:
            is_held: Whether a new link's orders wait; see RegionLink.
        """
        # Write the lease's current generation to a new link's page.
        if self.regions is None:
            self.regions = RegionLink(self.channel, is_held=is_held)
            self.regions.page.set_generation(self.page.generation)
        return self.regions

    def close_regions(self) -> None:
        """Forget the session's regions, which have all ended with it."""
        if self.regions is not None:
            self.regions.close()
            self.regions = None

    def _send_or_drop(self, message: Message) -> None:
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            send_message(self.channel, message.to_map())

    # --- its end ---

    def kill(self) -> None:
        """Send the process SIGKILL. Without a process, or after its end, this has no effect."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.pid:
                # The pidfd was lost because this process had no descriptor left. The number belongs to the worker until
                # the zygote reaps it and reports that.
                os.kill(self.pid, signal.SIGKILL)

    def end_reason(self, reason: str) -> tuple[str, bool]:
        """Return how the worker ended, for logs, and whether the daemon ended it.

        `reason`: the zygote's description.
        """
        # If it did not end by SIGKILL, it died before the daemon killed it.
        is_by_daemon = self.is_killed and reason == KILLED
        return (ENDED_BY_DAEMON if is_by_daemon else reason), is_by_daemon

    def note_end(self, reason: str) -> None:
        """Write on the page that clients map that the session's worker has died, unless it shows another end already.

        If the daemon ends a lease, `refuse` writes the end; if a worker dies by itself, only this method does.
        """
        if self.regions is not None:
            cause = Cause.WORKER_DIED.value
            self.regions.page.end_lease(LEASE_ENDS[cause].status, cause, self.end_reason(reason)[0])

    def close(self) -> None:
        """Close all descriptors, and stop reading the channel."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.channel)
        self.close_regions()
        self.channel.close()
        self.page.close()
        if self.next_page is not None:
            self.next_page.close()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


@dataclass(slots=True)
class ReapedWorker:
    """A worker that was reaped, until its bytes are proved free.

    Attributes:
        lease_id: The worker's number in the broker.
        pid: The process id that it had; 0 if it was never forked.
        zygote: The zygote that must forget it; None if there is none.
        serial: Its number in that zygote.
    """

    lease_id: int
    pid: int
    zygote: ZygoteClient | None = None
    serial: int = 0


MAX_COUNT: Final = 1 << 53
"""Largest value of a counter. Prometheus uses doubles, which represent all integers up to this exactly. At one launch
per microsecond it is reached in 285 years."""

_ZEROS: Final = (0,) * len(SESSION_TOTALS)


def counter_increments(worker: Worker) -> list[tuple[MetricFamily, float]]:
    """Return the increments of a worker's counters since the last call.

    Metrics count by tenant, and a tenant outlives its sessions, so the metrics add up increments.
    """
    before = worker.counted or _ZEROS
    now = _read(worker.page, before)
    worker.counted = now
    increments: dict[MetricFamily, float] = {}
    for added_to, new, old in zip(SESSION_FAMILIES, now, before, strict=True):
        if new != old:
            for family in added_to:
                increments[family] = increments.get(family, 0.0) + (new - old)
    return list(increments.items())


def skip_counts(worker: Worker) -> None:
    """Skip a worker's counts so far, because another daemon has counted them."""
    worker.counted = _read(worker.page, _ZEROS)


def held_bytes(worker: Worker, most_bytes: int) -> int:
    """Return the bytes that a worker's session reports to hold, at most `most_bytes`."""
    return min(worker.page.counter(Counter.ALLOCATED_BYTES), most_bytes)


def _read(page: BrokerPage, before: tuple[int, ...]) -> tuple[int, ...]:
    counters = page.counters()
    return tuple(
        counters[counter] if old <= counters[counter] < MAX_COUNT else old
        for counter, old in zip(SESSION_TOTALS, before, strict=True)
    )
