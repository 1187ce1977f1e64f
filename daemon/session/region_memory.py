"""Opens and removes the memory of a session's regions on the broker's orders, and resizes the slice.

The end of a region never blocks the worker's loop. `RegionMemory.end` begins it, and the loop calls `advance` until it
is over:

0. A launch that was in flight when the region's word changed may just have been refused. Its tenant asks for the
   outcome within microseconds and must be answered first, because each step below keeps the worker busy for longer.
1. Wait for the launches and copies that named the region to end, in all streams. If they don't end within the grace,
   the worker reports that, and the broker ends the lease.
2. Wait for all other work to end, but for QUIET_WAIT_NS at most. A kernel that uses the region without having named it
   should not run when the region's memory is replaced: on CUDA that can destroy the context. During this wait the card
   zeroes the memory that will replace the region's.
3. Wait until the tenant's next launch has been refused and the refusal reported, but for REFUSAL_WAIT_NS at most:
   removing memory keeps the worker busy for longer than both of these take.
4. The driver removes the memory, and the worker reports it.

Opening a region is similar: the worker maps its memory, and reports the region as open once the card has zeroed it.

A new broker that takes over the worker sends a regions page of its own. A region that had ended according to the
earlier page stays ended, whatever the new page says: the worker removes its memory without an order, and reports that.
It does the same with a region that the new page lacks, because the earlier broker was killed before it wrote the region
to its journal; and with regions that ended while the session moved from another process.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from gpulease.daemon.contract.messages import (
    EndRegionOrder,
    OpenRegionOrder,
    RegionEndedReport,
    RegionOpenedReport,
    RegionRefusedReport,
    RegionStuckReport,
    ResizeSliceOrder,
    SliceResizedReport,
)
from gpulease.daemon.contract.regions_page import WorkerRegions
from gpulease.daemon.contract.session_image import RegionImage
from gpulease.daemon.drivers.interface import DriverError, ImageMismatch, Ticket
from gpulease.daemon.session.operations import LeaseOver, SessionResources
from gpulease.daemon.session.region_operations import Flip, MappedRegion, RegionGate, end_text
from gpulease.protocol.failures import Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.session_words import ENDED_WORDS, RegionWord
from gpulease.protocol.time_units import NS_PER_MS

QUIET_WAIT_NS: Final = 1_000_000
"""Longest wait, at the end of a region, for launches that did not name it."""

REFUSAL_WAIT_NS: Final = 200_000
"""Longest wait, at the end of a region that launches have named, for the next such launch to be refused and reported. A
tenant that launches step after step sends the next launch within microseconds, and asks for its result right after
it."""

SPIN_NS: Final = 1_000_000
"""Time for which the worker polls continuously after each step of a region's end; then it polls once a millisecond.
Usually a step takes less. The limit keeps the worker from taking a core while a tenant runs one long kernel."""

UNASKED_GRACE_MS: Final = 1000
"""The grace of a region that the worker ends without an order: an earlier broker had ended it, or the current broker
has no record of it."""

MAX_MAPPED_REGIONS: Final = 4096
"""Maximum number of regions for which a session holds addresses, including ended ones. Otherwise a tenant could fill
the driver's tables with regions that it never releases."""


@dataclass(slots=True, eq=False)
class _End:
    """A region's end in progress.

    Attributes:
        waits: Tickets of the work that has to end before the next step; None before the first one.
        grace_ms: How long the launches that named the region may take; `stuck_ns` is the time at which they have taken
            too long.
        refusal_deadline_ns: Time until which to wait for a refusal that reports the region's end.
        quiet_ns: Time until which to wait for all other work; 0 while the launches that named the region run.
    """

    region: MappedRegion
    waits: list[Ticket] | None
    grace_ms: int
    stuck_ns: int
    refusal_deadline_ns: int
    quiet_ns: int = 0


class _NeverDone:
    """A ticket for work whose end can't be observed."""

    def is_done(self) -> bool:
        return False


class RegionMemory:
    """Opens and ends the regions of one session.

    Args:
        streams: Returns the numbers of all the session's streams in the driver.
        keeps_failure: Returns whether a failure waits for some connection's next request that has a reply.
    """

    def __init__(
        self,
        resources: SessionResources,
        gate: RegionGate,
        streams: Callable[[], set[int]],
        keeps_failure: Callable[[], bool],
    ) -> None:
        self._resources, self._gate = resources, gate
        # No call here belongs to a tenant's request, so a fault that a call meets is kept for the tenant
        # (SessionResources.aside).
        self._streams, self._call, self._keeps_failure = streams, resources.call_outside_request, keeps_failure
        self._by_id: dict[int, MappedRegion] = {}
        self._openings: list[MappedRegion] = []
        self._ends: dict[int, _End] = {}
        gate.mark = self._mark_anyway
        gate.is_ending = lambda: bool(self._ends or self._openings)
        self._results: dict[int, RegionEndedReport | RegionStuckReport] = {}
        self._spin_until_ns = 0
        self.page_fd = -1

    def is_moving(self) -> bool:
        """Return whether the worker should poll soon; see `RegionGate.is_moving`."""
        return self._gate.is_moving()

    @property
    def had_any(self) -> bool:
        """Return whether the context has had a region, because its addresses must never be used again."""
        return self._gate.had_any

    # --- the page ---

    def use_page(self, fd: int) -> None:
        """Use this regions page in place of an earlier one, which is read for the last time first.

        If the descriptor is not a regions page, nothing changes: no region opens, and existing regions remain valid by
        the earlier page until their deadlines.
        """
        gate = self._gate
        try:
            page = WorkerRegions(fd)
        except (OSError, ValueError):
            return
        now_ns = time.monotonic_ns()
        earlier = gate.page
        # Record what the earlier page says about ended regions, because the new page may lack them.
        if earlier is not None:
            for region in self._by_id.values():
                flip = gate.flip_of(region, now_ns)
                if flip is not None and flip.word is RegionWord.EXPIRED:
                    region.end(flip)
        gate.page = page
        self._drop_page_fd()
        with contextlib.suppress(OSError):
            self.page_fd = os.dup(fd)
        # Every set must be compared with the new page before it admits another launch.
        for chosen in gate.sets.values():
            chosen.forget()
        gate.forget_current()
        if earlier is not None:
            # End the regions that had ended, and those of which the new broker has no record.
            earlier.close()
            for region in list(self._by_id.values()):
                if region.ended is not None or page.word(region.slot).number != region.number:
                    self.end(EndRegionOrder(region.region_id, UNASKED_GRACE_MS))

    def _drop_page_fd(self) -> None:
        fd, self.page_fd = self.page_fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self._drop_page_fd()

    # --- leaving the process, and arriving in another one ---

    @property
    def is_busy(self) -> bool:
        """Return whether a region is being opened or ended, or a report to the broker is still to be sent."""
        return bool(self._ends or self._openings) or self._gate.has_reports

    def states(self) -> tuple[list[RegionImage], list[list[int]]]:
        """Return all regions that are mapped or that a set names, and for each set the positions of its regions."""
        mapped, ledger = list(self._by_id.values()), self._resources.ledger
        # A set may name regions that have released their addresses: launches in it are refused.
        position = {region: at for at, region in enumerate(mapped)}
        sets = [
            [position.setdefault(member, len(position)) for member in region_set.regions]
            for region_set in self._gate.sets.values()
        ]
        states = [
            RegionImage(
                region_id=region.region_id.to_bytes(16, "big"),
                slot=region.slot,
                number=region.number,
                address=region.address,
                size_bytes=region.size_bytes,
                kept_bytes=ledger.region_bytes(region.address) if at < len(mapped) else 0,
                ended=None if region.ended is None else (int(region.ended.word), region.ended.flipped_ns),
                is_reported=region.is_reported,
                is_removed=at >= len(mapped) or ledger.has_ended(region.address),
                is_released=at >= len(mapped),
            )
            for region, at in position.items()
        ]
        return states, sets

    def active(self) -> list[tuple[int, int]]:
        """Return id and address of each region that has its memory."""
        ledger = self._resources.ledger
        mapped = self._by_id.values()
        return [(region.region_id, region.address) for region in mapped if not ledger.has_ended(region.address)]

    def restore(self, states: Iterable[RegionImage]) -> list[MappedRegion]:
        """Add the regions that the session had in another process, in the order of `states`.

        The context must have adopted them. Raises ImageMismatch if the page with their words is missing.
        """
        gate, ledger = self._gate, self._resources.ledger
        if gate.page is None:
            raise ImageMismatch("the page with the state words of its regions is missing")
        restored: list[MappedRegion] = []
        for state in states:
            region_id = int.from_bytes(state.region_id, "big")
            region = MappedRegion(region_id, state.slot, state.number, state.address, state.size_bytes)
            region.is_reported = state.is_reported
            if state.ended is not None:
                region.end(Flip(RegionWord(state.ended[0]), state.ended[1]))
            restored.append(region)
            if state.is_released:
                continue
            self._by_id[region_id] = gate.regions[region.slot, region.number] = region
            ledger.add_region(region.address, region.size_bytes, partial(gate.admit_copy, region))
            if state.is_removed:
                ledger.end_region(region.address, state.kept_bytes)
                freed_bytes = region.size_bytes - state.kept_bytes
                self._results[region_id] = RegionEndedReport(region_id, freed_bytes, state.kept_bytes, freed_bytes)
        gate.had_any = True
        return restored

    def end_by_page(self) -> None:
        """End the regions that, according to the page, ended while the session had no process."""
        page = self._gate.page
        for region in list(self._by_id.values()):
            if page is None or region.region_id in self._results:
                continue
            word = page.word(region.slot)
            if word.number != region.number or word.state in ENDED_WORDS or region.ended is not None:
                self.end(EndRegionOrder(region.region_id, UNASKED_GRACE_MS))

    # --- opening ---

    def open(self, order: OpenRegionOrder) -> None:
        gate, region = self._gate, self._by_id.get(order.region_id)
        if region is None:
            reason = self._open(order)
            if reason:
                # Report the refusal; no memory was taken.
                gate.outbox.append(RegionRefusedReport(order.region_id, reason))
                return
            region = self._by_id[order.region_id]
        # The answer waits until the card has zeroed the memory.
        self._openings.append(region)
        self._spin_until_ns = time.monotonic_ns() + SPIN_NS
        self.advance()

    def _open(self, order: OpenRegionOrder) -> str:
        """Map memory for a region. Returns the reason if that fails, else ""."""
        resources, gate, size_bytes = self._resources, self._gate, order.size_bytes
        ledger, context = resources.ledger, resources.context
        # Step 1: the checks that need no driver.
        granule_bytes = context.region_granule_bytes
        key = (order.slot, order.number)
        if gate.page is None or not granule_bytes:
            return "the session can't have regions"
        if size_bytes % granule_bytes or not 0 <= order.slot < len(gate.page.words) or key in gate.regions:
            return (
                f"a region must have a multiple of {granule_bytes} bytes and an unused slot and number, "
                f"not {size_bytes} bytes in slot {order.slot}, number {order.number}"
            )
        if len(gate.regions) >= MAX_MAPPED_REGIONS:
            return f"the session has {MAX_MAPPED_REGIONS} regions, the maximum; it must release ended ones"
        # Step 2: check the slice's room, then map the driver's memory, which may have to release cached blocks.
        try:
            ledger.check_alloc(size_bytes)
            spare_bytes = ledger.cacheable_bytes(size_bytes)
            address = self._call(lambda: context.region_open(size_bytes, spare_bytes, resources.check_lease))
        except (Refused, DriverError, LeaseOver) as error:
            return str(error) or "the lease has ended"
        # Step 3: record the region; from now on launches and copies can name it.
        self._gate.had_any = True
        region = MappedRegion(order.region_id, order.slot, order.number, address, size_bytes)
        self._by_id[order.region_id] = gate.regions[key] = region
        ledger.add_region(address, size_bytes, lambda: gate.admit_copy(region))
        resources.record_usage()
        return ""

    # --- the end ---

    def end(self, order: EndRegionOrder) -> None:
        """Begin a region's end, which `advance` continues and then reports.

        If it has ended already, report that again.
        """
        region_id = order.region_id
        # The broker may repeat its order, for example after a restart; then report the same result again.
        region, result = self._by_id.get(region_id), self._results.get(region_id)
        if region is None:
            # The region never opened here, or the session has released it, so no launch can use it.
            result = result or RegionEndedReport(region_id, 0, 0, 0)
        if result is not None:
            self._gate.outbox.append(result)
        if region is None or result is not None or region_id in self._ends:
            return
        # From now on every launch that names the region is refused. Graphs that use it become void.
        now_ns = time.monotonic_ns()
        flip = self._gate.flip_of(region, now_ns)
        region.end(flip if flip is not None and flip.word in ENDED_WORDS else Flip(RegionWord.REVOKED, now_ns))
        self._gate.forget_current()
        self._resources.ledger.void_region(region.address, end_text(region))
        # Only a region that something used can have a launch to refuse.
        refusal_deadline_ns = now_ns + (REFUSAL_WAIT_NS if region.tickets or region.marks or region.streams else 0)
        self._ends[region_id] = _End(
            region, None, order.grace_ms, now_ns + order.grace_ms * NS_PER_MS, refusal_deadline_ns
        )
        self._spin_until_ns = now_ns + SPIN_NS
        self.advance()

    def poll_ms(self, now_ns: int) -> int | None:
        """Return the number of milliseconds that the worker's loop may sleep.

        None if no region is opening or ending, and no refusal is still to be reported.
        """
        if not self._ends and not self._openings:
            return 1 if self._gate.unreported else None
        return 0 if now_ns < self._spin_until_ns else 1

    def advance(self) -> None:
        """Continue openings and ends as far as possible without waiting.

        One call removes at most one region's memory.
        """
        now_ns = time.monotonic_ns()
        # Continue the openings first: they need only a poll of the card.
        self._report_opened()
        for end in list(self._ends.values()):
            # A failure has yet to be reported to the tenant; removing memory now would delay the report.
            if end.waits is None and self._keeps_failure() and now_ns < end.refusal_deadline_ns:
                continue
            try:
                if self._is_clear(end, now_ns):
                    del self._ends[end.region.region_id]
                    # Removing memory takes milliseconds, so serve the connections before the next region.
                    self._spin_until_ns = now_ns + SPIN_NS
                    self._remove_memory(end.region)
                    return
            except (DriverError, LeaseOver) as error:
                self._report_stuck(end.region, str(error) or "the lease has ended")

    def _report_opened(self) -> None:
        if not self._openings:
            return
        try:
            if not self._call(self._resources.context.region_is_zeroed):
                return
            reports: list[RegionOpenedReport | RegionRefusedReport] = [
                RegionOpenedReport(opening.region_id, opening.address) for opening in self._openings
            ]
        except DriverError as error:
            # The context is lost, and with it the lease.
            reports = [RegionRefusedReport(opening.region_id, str(error)) for opening in self._openings]
        self._openings.clear()
        self._gate.outbox.extend(reports)

    def _is_clear(self, end: _End, now_ns: int) -> bool:
        """Return whether a region's memory may be removed. Raises DriverError."""
        region = end.region
        if end.waits is None:
            # Take tickets of all streams that may still use the region. Work that is queued later can't use it.
            end.waits = [*region.tickets, *region.marks.values(), *map(self._mark, region.streams)]
        end.waits = [ticket for ticket in end.waits if not ticket.is_done()]
        # Steps 1 and 2 of the module's description: first the launches that named it, then a short wait for all others.
        if not end.quiet_ns:
            if end.waits:
                if now_ns >= end.stuck_ns:
                    self._report_stuck(end.region, f"a launch that names it did not end within {end.grace_ms} ms")
                return False
            # While the remaining launches end, zero the memory that stays.
            self._call(lambda: self._resources.context.region_wipe(end.region.address))
            marks = [self._mark(stream) for stream in self._streams()]
            end.waits = [ticket for ticket in marks if not ticket.is_done()]
            end.quiet_ns = now_ns + QUIET_WAIT_NS
            self._spin_until_ns = now_ns + SPIN_NS
        # A refusal that came in time gets REFUSAL_WAIT_NS more to be reported.
        refusal_deadline_ns = end.refusal_deadline_ns + (REFUSAL_WAIT_NS if end.region.is_reported else 0)
        is_reported = now_ns >= refusal_deadline_ns or (end.region.is_reported and not self._keeps_failure())
        is_quiet = not end.waits or now_ns >= end.quiet_ns
        return is_reported and is_quiet and self._call(self._resources.context.region_is_zeroed)

    def _remove_memory(self, region: MappedRegion) -> None:
        resources = self._resources
        context = resources.context
        # The broker compares the freed bytes with the driver's free memory before and after.
        before_bytes = self._call(context.free_bytes)
        returned = self._call(lambda: context.region_end(region.address, resources.check_lease))
        # A parked session's bytes were returned to the card, and shown to the broker, when it was parked.
        is_parked = resources.is_parked and not resources.is_in_place
        shown_bytes = returned.freed_bytes if is_parked else self._call(context.free_bytes) - before_bytes
        resources.ledger.end_region(region.address, returned.kept_bytes)
        resources.record_usage()
        # All launches that named the region have ended, so no ticket is needed any more.
        region.streams.clear()
        region.marks.clear()
        region.tickets.clear()
        self._answer(RegionEndedReport(region.region_id, returned.freed_bytes, returned.kept_bytes, shown_bytes))

    def _report_stuck(self, region: MappedRegion, reason: str) -> None:
        """Report that a region's memory can't be removed; the broker then ends the lease."""
        self._ends.pop(region.region_id, None)
        self._answer(RegionStuckReport(region.region_id, reason))

    def _answer(self, result: RegionEndedReport | RegionStuckReport) -> None:
        self._results[result.region_id] = result
        self._gate.outbox.append(result)

    def forget(self, region_id: int) -> None:
        """Forget a region after the session released its address."""
        self._by_id.pop(region_id, None)
        self._results.pop(region_id, None)

    def leave_stream(self, stream: int) -> None:
        """Record that one of the driver's streams is about to be destroyed; its work continues."""
        self._gate.leave_stream(stream)

    def _mark_anyway(self, stream: int) -> Ticket:
        try:
            return self._mark(stream)
        except DriverError:
            # Nothing can wait for its launches, so the end of a region that they use has to be given up.
            return _NeverDone()

    def _mark(self, stream: int) -> Ticket:
        return self._call(lambda: self._resources.context.mark(stream))

    # --- the slice ---

    def resize(self, order: ResizeSliceOrder) -> None:
        """Change the slice's size, and report the result.

        It never becomes smaller than the bytes that the session uses.
        """
        resources, ledger = self._resources, self._resources.ledger
        before_bytes, doubt = ledger.slice_bytes, ""
        # Set the new size at once, so that `room_bytes` is computed with it; undo that if the session uses more.
        ledger.slice_bytes = order.size_bytes
        if order.size_bytes < before_bytes:
            try:
                self._call(lambda: resources.context.trim(max(0, ledger.room_bytes), resources.check_lease))
                resources.record_usage()
                if ledger.charged_bytes > order.size_bytes:
                    doubt = f"the session uses {ledger.charged_bytes} bytes of it; it must free something first"
            except (DriverError, LeaseOver) as error:
                doubt = str(error) or "the lease has ended"
        if doubt:
            ledger.slice_bytes = before_bytes
        self._gate.outbox.append(SliceResizedReport(ledger.slice_bytes, doubt))
