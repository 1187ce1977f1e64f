"""Parks a session: its bytes are moved from the card to host memory, and back before its next request is served.

The broker orders both moves. The worker carries them out between two requests, in its own thread. While the session is
parked, the server holds every connection that sends something, and asks the broker for the return (server.py). So
neither native code nor an operation ever runs on a parked session, and a session that is not parked pays nothing.

The host memory. The broker provides it before the first park. Fresh memory is slow: the host needs 0.2 to 0.8 s to
allocate a GiB and 0.04 s to pin it, while the card copies a GiB in 0.02 s. So threads populate as much of the memory as
the session needs now, and the worker's loop pins what they have populated, one small part at a time, while it has
nothing else to do. If a park comes before they have finished, it does the rest itself. The memory is kept for the next
park, until the broker drops it because another session needs it. Then the loop unpins it and returns it to the host in
the same way, one part at a time. If it returned 16 GiB at once, requests would wait for half a second.

Copying ahead. If the session will probably be parked soon, the broker orders the loop to copy its bytes to the prepared
host memory while it is idle; the park then copies the rest, and releases the pages. The copy counts only if nothing has
run since it began. It begins while no work is in progress. From then on only requests and changes of regions can change
the session's bytes: each request changes the control page's counters (SESSION_USES), and the context itself notices if
memory is taken or released (`Context.copy_ahead`). Until the park, requests are served as if there were no copy.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract.control_page import SESSION_USES, Counter, Transfer
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import (
    MAX_LENT_PAGES,
    ImagedReport,
    LeaveOrder,
    LeaveRefusedReport,
    ParkedReport,
    ParkMemoryOrder,
    ParkOrder,
    ParkRefusal,
    ParkRefusedReport,
    RefuseReturn,
    ReturnedReport,
    ReturnFailedReport,
    ReturnOrder,
    ReturnWantedReport,
)
from gpulease.daemon.contract.session_image import SessionImage
from gpulease.daemon.drivers.interface import (
    PARK_STEP_BYTES,
    Context,
    DriverError,
    ImageMismatch,
    KernelFault,
    PageMove,
)
from gpulease.daemon.host.copy_ring import CopyRing, RingBroken, RingEnd
from gpulease.daemon.host.ipc import close_all
from gpulease.daemon.session.huge_mapping import HugeMapping
from gpulease.daemon.session.image import CantLeave
from gpulease.daemon.session.operations import LeaseOver, SessionResources, StillRuns, do_not_wait
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

POPULATING_THREADS: Final = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
"""Threads that populate host memory: a quarter of the cores, and at most four, because more gained nothing (H200)."""

IDLE_NS: Final = 50_000_000
"""Time without a request after which the worker's loop pins host memory, because each step can delay a request by 3
ms."""

RELEASE_NS: Final = 1_000_000_000
"""Time after which dropped memory is released even if the session is never idle: another session's memory counts in its
place, so both together may exceed `park_memory`."""

PINS_PAUSE_MS: Final = 5
"""Sleep of the worker's loop between two steps of the preparation, if the threads have not populated the next part
yet."""

WANTED_AGAIN_NS: Final = 1_000_000_000
"""Time after which a request to return is repeated, because the broker that received it may have exited."""

AHEAD_PAUSE_MS: Final = 1
"""Sleep of the worker's loop between two steps of a copy ahead: less than the card needs for a step."""

HELD_POLL_MS: Final = 100
"""Longest sleep while requests wait for a return. If no broker reports that the lease has ended, they are refused at
most this much too late."""

PUMP_AWAKE_NS: Final = 5_000_000
"""Time after a ring's last progress during which the worker polls the ring without sleeping: the card fills all buffers
in 2 ms. While the peer does not empty the ring, the worker polls it once a millisecond.
"""

_PARKED: Final = Failure(
    Status.BUSY,
    "the session is parked, and its card has no room for its return now",
    hint="Try again later: nothing of the session is lost.",
)


_RUNNING: Final = "work that it launched has not ended in time"


class HostMemory:
    """Host memory for a session's bytes, in steps of PARK_STEP_BYTES. Each step is populated, then pinned.

    Args:
        fd: The memory's memfd, which the caller may close afterwards.
        size_bytes: The memory's size.
        context: The context that pins the memory.

    Attributes:
        view: The whole memory.
        fd: A descriptor of the memory, which this object closes.

    Raises:
        OSError: The memory can't be mapped.
    """

    def __init__(self, fd: int, size_bytes: int, context: Context) -> None:
        self._map = HugeMapping(fd, size_bytes)
        self.view = self._map.view
        # Keep a descriptor for the process that may continue the session.
        self.fd = os.dup(fd)
        self._context = context
        # The number of wanted steps, the number of steps that a thread has begun to populate, the steps that are
        # populated, and the number of pinned steps.
        self._wanted_steps = self._prepared_steps = 0
        self._populated: set[int] = set()
        self._pinned = 0
        # Why the host did not provide the memory; "" if it has not failed.
        self._failure = ""
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    # --- preparation ---

    def want(self, size_bytes: int) -> None:
        """Prepare host memory of at least this size in the background."""
        steps = -(-min(size_bytes, len(self.view)) // PARK_STEP_BYTES)
        if steps <= self._wanted_steps:
            return
        with self._changed:
            self._wanted_steps = steps
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):
            # If no thread can be started, the pages are populated when they are pinned.
            while len(self._threads) < min(POPULATING_THREADS, steps):
                thread = threading.Thread(target=self._populate, name="gpul-populate", daemon=True)
                thread.start()
                self._threads.append(thread)

    @property
    def prepared_bytes(self) -> int:
        """The size of the memory's beginning that is prepared."""
        return min(self._pinned * PARK_STEP_BYTES, len(self.view))

    @property
    def is_unprepared(self) -> bool:
        """Whether a wanted step is not pinned yet."""
        return self._pinned < self._wanted_steps and not self._failure

    def prepare_step(self) -> int:
        """Pin one step that is populated, if there is one.

        Returns the number of milliseconds that the loop may sleep before the next step.
        """
        if self._threads and self._pinned not in self._populated:
            return PINS_PAUSE_MS
        self._pin_next()
        return 0

    def ready(self, end: int) -> None:
        """Prepare everything before `end` now. Raises _Refused if the host has no memory for it."""
        self.want(end)
        while self._pinned * PARK_STEP_BYTES < end:
            if self._threads:
                with self._changed:
                    self._changed.wait_for(lambda: self._pinned in self._populated)
            if self._failure:
                raise _Refused(ParkRefusal.NO_MEMORY, f"the host has no memory for it: {self._failure}")
            self._pin_next()

    def _pin_next(self) -> None:
        self._context.pin_host(self._step(self._pinned))
        self._pinned += 1

    def _step(self, number: int) -> memoryview:
        return self.view[number * PARK_STEP_BYTES : (number + 1) * PARK_STEP_BYTES]

    def _populate(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._prepared_steps < self._wanted_steps)
                if self._is_closed:
                    return
                number, self._prepared_steps = self._prepared_steps, self._prepared_steps + 1
            start = number * PARK_STEP_BYTES
            size_bytes = min(PARK_STEP_BYTES, len(self.view) - start)
            failure = self._map.populate(start, size_bytes)
            with self._changed:
                self._failure = self._failure or failure
                self._populated.add(number)
                self._changed.notify_all()

    # --- release ---

    def retire(self) -> None:
        """Stop preparing memory. From now on call only `release_step` and `close`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def release_step(self) -> int | None:
        """Unpin one step and return its memory to the host.

        Returns the number of milliseconds that the loop may sleep before the next step; None once nothing is left. Then
        call `close`.
        """
        if any(thread.is_alive() for thread in self._threads):
            # A thread still populates its last step.
            return PINS_PAUSE_MS
        number = max(self._pinned, self._prepared_steps) - 1
        if number < 0:
            return None
        if number < self._pinned:
            self._pinned = number
            self._context.unpin_host(self._step(number))
        self._prepared_steps = min(self._prepared_steps, number)
        self._map.give_back(number * PARK_STEP_BYTES, len(self._step(number)))
        return 0

    def close(self) -> None:
        """Unpin and unmap the memory. Raises DriverError, or BufferError if it is in use."""
        self.retire()
        for thread in self._threads:
            thread.join()
        for number in range(self._pinned):
            self._context.unpin_host(self._step(number))
        self._map.close()
        os.close(self.fd)


class _Refused(Exception):
    """The session can't be parked now. The refusal is reported to the broker."""

    def __init__(self, refusal: ParkRefusal, reason: str) -> None:
        super().__init__(reason)
        self.why = refusal


class SessionParking:
    """Parks one session and brings it back.

    Args:
        resources: The session's resources.
        is_moving: Returns whether one of its regions is being opened or ended.
        is_lost: Returns whether its context is lost.
        is_parkable: Whether its lease is parkable, and hence its context.

    Attributes:
        outbox: Messages for the broker.
        refusal: The refusal of a request that can't wait for the return.
        is_misfit: Whether the session came from another process but could not be restored exactly: none of it may be
          served.
    """

    def __init__(
        self,
        resources: SessionResources,
        is_moving: Callable[[], bool],
        is_lost: Callable[[], bool],
        *,
        is_parkable: bool,
    ) -> None:
        self._resources = resources
        self._context = resources.context
        self._counters = resources.counters
        self._is_moving, self._is_lost = is_moving, is_lost
        self.is_parkable = resources.shows_pages = is_parkable
        self.outbox: deque[Message] = deque()
        self._memory: HostMemory | None = None
        # Memory that the broker has dropped and that is not released yet, and since when there is some.
        self._dropped: deque[HostMemory] = deque()
        self._dropped_ns = 0
        # Whether to copy ahead; and the counts of uses when that copy began, None if there is no copy.
        self._copies_ahead = False
        self._ahead_uses: tuple[int, ...] | None = None
        # The bytes that were copied ahead, until they are parked or counted as discarded.
        self._ahead_bytes = 0
        self._report: ParkedReport | None = None
        # Whether the session's former process also has the bytes, until the session is complete here.
        self._is_borrowing = False
        # In the process that the session leaves: the ring through which its bytes pass to the next process. In the next
        # process: its side of that ring.
        self._lending: tuple[CopyRing, RingEnd] | None = None
        self._pumped_ns = 0
        self._borrowed: CopyRing | None = None
        self._requested_ns: int | None = None
        self.refusal = _PARKED
        self._finish: Callable[[], None] | None = None
        self.is_misfit = False

    @property
    def is_parked(self) -> bool:
        return self._resources.is_parked

    @property
    def is_in_place(self) -> bool:
        """Whether the session is parked with its bytes on the card."""
        return self._resources.is_in_place

    # --- host memory ---

    def use_memory(self, order: ParkMemoryOrder, fds: list[int]) -> None:
        """Use this host memory for future parks, in place of any earlier one."""
        if self.is_parked or not self.is_parkable:
            return
        self._forget_ahead()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.retire()
            self._dropped_ns = self._dropped_ns if self._dropped else time.monotonic_ns()
            self._dropped.append(memory)
        if len(fds) == 1 and order.size_bytes:
            # Without memory the next park is refused, with that reason.
            with contextlib.suppress(OSError):
                self._memory = HostMemory(fds[0], order.size_bytes, self._context)

    def _drop_memory(self) -> None:
        """Release all host memory at once."""
        if self._memory is not None:
            self._forget_ahead()
            self._dropped.append(self._memory)
            self._memory = None
        while self._dropped:
            with contextlib.suppress(DriverError):
                self._dropped.popleft().close()

    @property
    def is_releasing(self) -> bool:
        """Whether dropped memory is not released yet. Then `prepare` must be called even if there is always work."""
        return bool(self._dropped)

    def prepare(self, served_ns: int) -> int | None:
        """Release or prepare some host memory if the session has been idle. Call this when there is nothing else to do.

        Args:
            served_ns: When a request was last served, on the monotonic clock.

        Returns the number of milliseconds that the worker may sleep; None if there is nothing to prepare.
        """
        # A void copy is counted now, and dropped with the next order.
        if self._ahead_bytes and self._ahead_uses != self._uses():
            self._count_discarded()
        now_ns = time.monotonic_ns()
        wait_ms = -((now_ns - served_ns - IDLE_NS) // NS_PER_MS)
        if self._dropped:
            if wait_ms > 0 and now_ns - self._dropped_ns < RELEASE_NS:
                return wait_ms
            return self._release_step()
        if self._memory is None or self.is_parked:
            return None
        self._memory.want(self._context.pages_bytes)
        is_unprepared = self._memory.is_unprepared
        if not (is_unprepared or self._copies_ahead):
            return None
        if wait_ms > 0:
            return wait_ms
        # The card copies the parts that are prepared while the host prepares the next one.
        pauses_ms = [self._memory.prepare_step()] if is_unprepared else []
        if self._copies_ahead and self._copy_step(self._memory):
            pauses_ms.append(AHEAD_PAUSE_MS)
        return min(pauses_ms, default=None)

    def _release_step(self) -> int:
        memory = self._dropped[0]
        # What the driver fails to unpin is freed with the process.
        with contextlib.suppress(DriverError):
            if (pause_ms := memory.release_step()) is not None:
                return pause_ms
            memory.close()
        self._dropped.popleft()
        return 0

    # --- copying ahead ---

    def begin_ahead(self) -> None:
        """Copy the session's bytes to its host memory while it is idle. A copy that still counts continues."""
        if self.is_parked or self._memory is None:
            return
        if self._ahead_uses != self._uses():
            self._forget_ahead()
            self._copies_ahead = True

    def _copy_step(self, memory: HostMemory) -> bool:
        """Copy a part of the session's bytes ahead; return whether to call this again."""
        context = self._context
        try:
            if self._is_lost() or self._is_moving():
                raise StillRuns
            if self._ahead_uses is None:
                # Nothing may be in progress, and the context must keep no freed memory, as for a park.
                self._resources.call_outside_request(lambda: context.sync(do_not_wait))
                context.trim(0, do_not_wait)
                self._resources.record_usage()
                self._ahead_uses = self._uses()
            elif self._ahead_uses != self._uses():
                raise StillRuns
            self._resources.check_lease()
            is_whole = context.copy_ahead(memory.view, memory.prepared_bytes)
            # If memory was taken or released, the context has begun again.
            if (copied_bytes := context.ahead_bytes) < self._ahead_bytes:
                self._count_discarded()
            self._ahead_bytes = copied_bytes
        except (StillRuns, LeaseOver, DriverError) as error:
            self._forget_ahead()
            if isinstance(error, KernelFault):
                self._resources.keep_fault(error)
            return False
        # Without memory from the host, the rest can't be copied now.
        self._copies_ahead = not is_whole and (
            memory.is_unprepared or memory.prepared_bytes >= min(context.pages_bytes, len(memory.view))
        )
        return self._copies_ahead

    def _uses(self) -> tuple[int, ...]:
        return tuple(self._counters[counter] for counter in SESSION_USES)

    def _forget_ahead(self) -> None:
        self._copies_ahead = False
        self._ahead_uses = None
        self._count_discarded()
        # If the driver fails here, the context is lost, and the next request reports that.
        with contextlib.suppress(DriverError):
            self._context.forget_ahead()

    def _count_discarded(self) -> None:
        if self._ahead_bytes:
            self._counters[Counter.AHEAD_DISCARDED] += 1
            self._counters[Counter.AHEAD_DISCARDED_BYTES] += self._ahead_bytes
            self._ahead_bytes = 0

    # --- park and return ---

    def park(self, order: ParkOrder) -> None:
        """Park the session, and report to the broker that it is parked, or why it can't be."""
        if self.is_parked and self._report is not None and self.is_in_place <= order.in_place:
            # The broker repeats its order, or is a new one: report the same park again, under the order's number.
            report = replace(self._report, number=order.number, shown_bytes=0, waited_ns=0, copied_ns=0, released_ns=0)
            self._enter(report)
            return
        try:
            report = self._park(order)
        except _Refused as refused:
            self._refuse(order.number, refused.why, str(refused))
        except LeaseOver:
            self._refuse(order.number, ParkRefusal.OVER, "the lease has ended")
        except KernelFault as fault:
            self._resources.keep_fault(fault)
            self._refuse(order.number, ParkRefusal.LOST if fault.context_lost else ParkRefusal.FAILED, str(fault))
        except DriverError as error:
            self._refuse(order.number, ParkRefusal.FAILED, str(error))
        else:
            self._requested_ns, self.refusal = None, _PARKED
            self._enter(report)

    def _park(self, order: ParkOrder) -> ParkedReport:
        """Move the bytes to host memory. Raises _Refused, LeaseOver or DriverError, and then has changed nothing."""
        began_ns, context, memory = time.monotonic_ns(), self._context, self._memory
        # Step 1: refuse if something prevents the park.
        if not self.is_parkable:
            raise _Refused(ParkRefusal.NOT_PARKABLE, "its lease is not parkable")
        if self._is_lost():
            raise _Refused(ParkRefusal.LOST, "its context is lost")
        if self._is_moving():
            raise _Refused(ParkRefusal.REGIONS, "one of its regions is being opened or ended")
        # Start the threads that populate the missing host memory; they run during the next steps.
        if memory is not None:
            memory.want(context.pages_bytes)
        # Step 2: wait for the work in flight. If it faults, the fault is kept for the tenant and does not prevent the
        # park.
        self._resources.call_outside_request(lambda: context.sync(lambda: self._check_time(order.until_ns)))
        context.trim(0, self._resources.check_lease)
        self._resources.record_usage()
        # The bytes that were copied ahead count only if the session has not been used since.
        if self._ahead_uses != self._uses():
            self._forget_ahead()
        if memory is None or len(memory.view) < context.pages_bytes:
            raise _Refused(ParkRefusal.NO_MEMORY, "it has too little host memory, or none")
        waited_ns = time.monotonic_ns() - began_ns
        if order.in_place and context.can_lend():
            self._forget_ahead()
            kept_bytes = self._resources.ledger.fixed_bytes
            return ParkedReport(order.number, context.pages_bytes, 0, waited_ns, 0, 0, kept_bytes, in_place=True)
        # Step 3: move the bytes. The broker compares them with the driver's free memory before and after.
        before_bytes, ahead_bytes = context.free_bytes(), context.ahead_bytes
        try:
            moved = context.park(memory.view, memory.ready, self._resources.check_lease)
            # If the context had begun again by itself, the earlier copy was in vain.
            self._ahead_bytes = max(0, self._ahead_bytes - ahead_bytes)
        finally:
            self._forget_ahead()
        shown_bytes = context.free_bytes() - before_bytes
        kept_bytes = self._resources.ledger.fixed_bytes
        return ParkedReport(
            order.number,
            moved.size_bytes,
            shown_bytes,
            waited_ns,
            moved.copied_ns,
            moved.mapped_ns,
            kept_bytes,
            ahead_bytes=ahead_bytes,
        )

    def refuse_late(self, order: ParkOrder) -> bool:
        """Refuse a park that has waited for a request for too long; False if it has not."""
        is_late = time.monotonic_ns() >= order.until_ns
        if is_late:
            self._refuse(order.number, ParkRefusal.RUNNING, _RUNNING)
        return is_late

    def _check_time(self, until_ns: int) -> None:
        self._resources.check_lease()
        if time.monotonic_ns() >= until_ns:
            raise _Refused(ParkRefusal.RUNNING, _RUNNING)

    def _enter(self, report: ParkedReport) -> None:
        # From now on the server holds all requests.
        self._resources.is_parked, self._resources.is_in_place, self._report = True, report.in_place, report
        self._counters[Counter.PARK_NUMBER] = report.number
        self.outbox.append(report)

    def _refuse(self, number: int, refusal: ParkRefusal, reason: str) -> None:
        self.outbox.append(ParkRefusedReport(number, refusal, reason, self._context.pages_bytes))

    def bring_back(self, order: ReturnOrder) -> None:
        """Bring the session back, or report to the broker why that failed."""
        if not self.is_parked:
            self.outbox.append(ReturnedReport(order.number, 0, 0, 0))
            return
        if order.number != self._number:
            return
        try:
            moved = PageMove(0, 0, 0) if self.is_in_place else self._context.unpark(self._resources.check_lease)
            # A session that came from another process becomes complete only now.
            if self._finish is not None:
                self._finish()
                self._finish = None
        except LeaseOver:
            # This process has only a part of the bytes that the former one lent, so it must serve nothing, whatever the
            # broker does with the lease.
            self.is_misfit = self._is_borrowing
            self.outbox.append(ReturnFailedReport(order.number, "the lease has ended", self.is_misfit))
        except DriverError as error:
            # The process that lent the bytes still has them, so the session goes back to it, whatever failed here.
            self.is_misfit = isinstance(error, ImageMismatch) or self._is_borrowing
            if isinstance(error, KernelFault) and not self.is_misfit:
                self._resources.keep_fault(error)
            self.outbox.append(ReturnFailedReport(order.number, str(error), self.is_misfit))
        else:
            self._resources.is_parked = self._resources.is_in_place = self._is_borrowing = False
            self._report = None
            self._close_borrowed()
            self._counters[Counter.PARK_NUMBER] = 0
            self._resources.record_usage()
            self.outbox.append(ReturnedReport(order.number, moved.size_bytes, moved.mapped_ns, moved.copied_ns))

    # --- leaving the process ---

    def leave(self, order: LeaveOrder) -> tuple[HostMemory, ParkedReport]:
        """Return the host memory and the park's report for a session that is ordered to leave. Raises CantLeave."""
        if not self.is_parked or self._memory is None or self._report is None or order.number != self._number:
            raise CantLeave("it is no longer in the park that this order belongs to", is_lasting=False)
        # The session came from another process and has not returned yet (the return failed, or the broker refused it):
        # this process lacks the graphs and variables of its image.
        if self._finish is not None:
            raise CantLeave("it came from another process, and must first return to its card", is_lasting=False)
        return self._memory, self._report

    def note_left(self) -> None:
        """Show on the claims page that the image was sent, and that this process serves nothing any more."""
        self._counters[Counter.TRANSFER] = Transfer.LEFT

    def note_serves(self) -> None:
        """Show on the claims page that only this process has the session. Call this before it reads from clients."""
        self._counters[Counter.TRANSFER] = Transfer.SERVES

    def lend_pages(self, *, by_ring: bool = False) -> list[int]:
        """Lend the pages of a session that is parked in place to the next process. Returns [] for any other session.

        `by_ring`: Whether they pass through a ring, which `pump` fills. Then only its descriptor is returned.

        The caller closes the returned descriptors. Raises CantLeave.
        """
        if not self.is_in_place or self._memory is None:
            return []
        memory, check = self._memory, self._resources.check_lease
        try:
            if by_ring:
                return [self._open_ring()]
            return self._context.lend_pages(MAX_LENT_PAGES, memory.view, memory.ready, check)
        except (DriverError, LeaseOver, _Refused) as error:
            raise CantLeave(f"its pages can't be lent: {error}", is_lasting=False) from None

    def _open_ring(self) -> int:
        self.end_lending()
        try:
            ring = CopyRing()
        except OSError as error:
            raise DriverError(f"the host has no memory for it: {error}") from None
        try:
            # Pinned memory is copied at the bus's rate.
            self._context.pin_host(ring.buffers)
        except DriverError:
            ring.close()
            raise
        self._lending = ring, self._context.lend_ring(ring)
        return os.dup(ring.fd)

    def pump(self) -> int | None:
        """Copy what fits into the ring through which pages are lent. Never waits.

        Returns the number of milliseconds until the next call; None if nothing is left to copy.
        """
        if self._lending is None or self._lending[1].is_over:
            return None
        ring, end = self._lending
        try:
            if end.advance():
                self._pumped_ns = time.monotonic_ns()
        except (DriverError, RingBroken):
            # The other process notices the impossible number at once, and the session continues here.
            ring.break_off()
            self.end_lending()
            return None
        return 0 if time.monotonic_ns() - self._pumped_ns < PUMP_AWAKE_NS else 1

    def end_lending(self) -> None:
        """Stop lending pages. From now on the context may be used again."""
        lending, self._lending = self._lending, None
        if lending is not None:
            ring, end = lending
            with contextlib.suppress(DriverError):
                end.settle()
                self._context.unpin_host(ring.buffers)
            ring.close()

    def _close_borrowed(self) -> None:
        ring, self._borrowed = self._borrowed, None
        if ring is not None:
            ring.close()

    def report(self, message: ImagedReport | LeaveRefusedReport | ReturnFailedReport) -> None:
        self.outbox.append(message)

    def adopt(
        self,
        number: int,
        fd: int,
        size_bytes: int,
        image: SessionImage,
        finish: Callable[[], None],
        pages: Sequence[int] | None = None,
        *,
        by_ring: bool = False,
    ) -> None:
        """Take over the park of a session that has left another process.

        Args:
            number: The park's number.
            fd: The descriptor of the session's host memory.
            size_bytes: The size of that memory.
            image: The session's image.
            finish: Called after each return, until it succeeds, to restore what needs the session's bytes. Raises
                ImageMismatch.
            pages: Descriptors of the pages that the former process lends, if it parked the session in place; None
                otherwise. The context owns them from now on.
            by_ring: Whether the only descriptor is of the ring that the former process fills with them.

        Raises:
            ImageMismatch: The context does not match the image, or the host memory can't be mapped.
        """
        if self.is_parked or not self.is_parkable or image.number != number:
            close_all([*(pages or ())])
            raise ImageMismatch("the image does not belong to this park")
        self._drop_memory()
        try:
            self._memory = HostMemory(fd, size_bytes, self._context)
        except (OSError, ValueError) as error:
            close_all([*(pages or ())])
            raise ImageMismatch(f"its host memory can't be mapped: {error}") from None
        self._is_borrowing = pages is not None
        if pages and by_ring:
            try:
                self._borrowed = CopyRing(pages[0])
            except (OSError, RingBroken) as error:
                raise ImageMismatch(f"its ring can't be mapped: {error}") from None
            finally:
                close_all([*pages])
            # Its first buffers may have other bytes by now.
            if self._borrowed.emptied:
                raise ImageMismatch("another worker has taken some of its bytes")
            pages = ()
        self._context.adopt_parked(image.context, self._memory.view, pages or (), self._borrowed)
        self._resources.is_parked = True
        self._report = ParkedReport(number, image.moved_bytes, 0, 0, 0, 0, self._resources.ledger.fixed_bytes)
        self._counters[Counter.PARK_NUMBER] = number
        self._finish = finish

    def refuse_return(self, order: RefuseReturn) -> bool:
        """Refuse the waiting requests, with the broker's reason. Returns False if the session is not in that park."""
        if not self.is_parked or order.number != self._number:
            return False
        self.refusal, self._requested_ns = replace(_PARKED, message=order.reason), None
        return True

    def want(self) -> None:
        """Ask the broker for the session's return, because a request needs the session.

        Call this again while a request waits: it asks the broker again if the broker does not answer for a long time.
        """
        now_ns = time.monotonic_ns()
        if self._requested_ns is None or now_ns - self._requested_ns >= WANTED_AGAIN_NS:
            self._requested_ns = now_ns
            self.outbox.append(ReturnWantedReport(self._number))

    def forget_wish(self) -> None:
        """Forget the request to return, because the waiting requests were answered. The next one is sent at once."""
        self._requested_ns = None

    @property
    def _number(self) -> int:
        return 0 if self._report is None else self._report.number

    def close(self) -> None:
        """Return the host memory. Raises BufferError if it is in use."""
        self.end_lending()
        self._close_borrowed()
        self._drop_memory()
