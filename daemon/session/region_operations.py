"""A session's regions, and the check before each launch or copy that names one.

A region is memory that the broker lets the session use until the region's word on the regions page says otherwise, or
until its deadline. Launches name a region set: a list of regions, made once. Once all words of a set have been compared
at an epoch of the page, the set stays valid until the epoch changes or the earliest of its regions' deadlines passes.
So a launch compares two numbers, however many regions the set names, and native code can do that (`native/serve.ll`).
It does so for the set in use: the one that `RegionGate` admitted last, in the stream selected now. If the page has
changed, native code compares the set's regions, too, and refuses a launch for the first that was revoked;
`refuse_revoked` records that afterwards. Any other launch is served by Python, which compares the whole set and records
that its regions are used in that stream: a region's memory is removed only once those launches have ended
(`region_memory.py`).

The first launch or copy that is refused for a region reports how the region ended; every later one reports FENCED. A
cancelled region has not ended: it is refused as CANCELLED for as long as it is cancelled.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import field, replace
from operator import itemgetter
from typing import Final, NamedTuple

from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import ForwardRevokedReport, RegionReleasedReport
from gpulease.daemon.contract.regions_page import WorkerRegions
from gpulease.daemon.drivers.interface import Ticket
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.ledger import invalid_handle
from gpulease.daemon.session.native.layout import RegionRecord
from gpulease.daemon.session.native.region_refusals import NO_WORD, record_of
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import empty, handle_reply
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure, Refused, region_refusal
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.fastpath import HANDLE, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import Handle, RegionRefusal, RegionSet
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import ENDED_WORDS, RegionWord, word_of

MAX_REGION_SETS: Final = 4096
"""Maximum number of region sets of a session. Stops a loop that makes sets and never releases them."""

MAX_SET_MEMBERS: Final = 65_536
"""Maximum number of members of all of a session's sets together: each takes about 100 bytes of the host's memory, which
no slice bounds."""

MAX_REPEATS: Final = 100
"""Maximum number of repeated refusals for regions that are reported to the broker within REPEAT_NS; the first one for
each region is always reported. Stops a tenant that keeps launching in ended regions from keeping the broker busy."""

REPEAT_NS: Final = 1_000_000_000

REPORT_WAIT_NS: Final = 1_000_000
"""Longest time for which a refusal waits for the tenant's next request before it is reported to the broker. A tenant
that launches step after step sends one within microseconds; but watchers must not wait for a tenant that only
launches."""

SETTLE_NS: Final = 2_000_000
"""Time for which connections are served in small portions after a region's word on the regions page has changed from
active. The broker is about to order the region's end. The small portions let the worker read the order soon, so that
the region's bytes are free within two milliseconds."""

NO_EPOCH: Final = (1 << 64) - 1
"""An epoch that no page reaches. It stands for the epoch of a set that was never compared, or of no set."""

_U32_MASK: Final = (1 << 32) - 1


class Flip(NamedTuple):
    """The state word that causes a region's refusal, and the time when it was set, on the monotonic clock."""

    word: RegionWord
    flipped_ns: int


@dataclass(slots=True, eq=False)
class MappedRegion:
    """A region that the session has mapped.

    Attributes:
        number: Identifies the region in its slot; a later region in the same slot has another number.
        streams: The numbers of the driver's streams that may have work with it that no ticket in `marks` covers.
        marks: By the stream's number: a ticket for all work that was queued in the stream when a set with the region
          last stopped being the set in use there.
        tickets: Tickets for the region's work in streams that have been destroyed.
        ended: How the region ended; None until the session has noticed that. Set once (`end`).
        is_reported: Whether a refusal has reported how it ended; every later one reports FENCED.
        record: The record of the region that native code reads; None until a set that names it is used.
    """

    region_id: int
    slot: int
    number: int
    address: int
    size_bytes: int
    streams: set[int] = field(default_factory=set)
    marks: dict[int, Ticket] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    ended: Flip | None = None
    is_reported: bool = False
    record: RegionRecord | None = None

    def end(self, flip: Flip) -> None:
        """Record how the region ended. From now on native code leaves its refusals to Python."""
        self.ended = flip
        if self.record is not None:
            self.record.active = self.record.revoked = NO_WORD

    def address_of_record(self) -> int:
        """Return the address of the region's record, which is made at the first call."""
        if self.record is None:
            self.record = record_of(self.region_id, self.slot, self.number)
            if self.ended is not None:
                self.end(self.ended)
        return ctypes.addressof(self.record)


def end_text(region: MappedRegion) -> str:
    """Describe a region that has begun to end, for objects that used it."""
    return f"the region {region.region_id:032x}, which has ended"


class SetInUse:
    """A region set.

    Attributes:
        holder: The holder for which it was made.
        handle: Its handle; `wire` has the handle's bytes on the wire.
        regions: The regions, in the order of the request.
        epoch: The page's epoch at which all of them were active; NO_EPOCH if none is known.
        deadline_ns: The earliest of their deadlines then.
    """

    __slots__ = ("_active", "_getter", "_records", "deadline_ns", "epoch", "handle", "holder", "regions", "wire")

    def __init__(self, handle: int, regions: list[MappedRegion], holder: Holder) -> None:
        self.holder = holder
        self.handle, self.wire, self.regions = handle, HANDLE.pack(handle), regions
        self.epoch, self.deadline_ns = NO_EPOCH, 0
        # Give the getter at least two slots, so that it always returns a tuple.
        slots = [region.slot for region in regions] * (1 + (len(regions) == 1))
        self._getter = itemgetter(*slots)
        self._active = [word_of(region.number, RegionWord.ACTIVE) for region in regions]
        self._records: ctypes.Array[ctypes.c_uint64] | None = None

    def address_of_records(self) -> int:
        """Return the address of the list of its regions' record addresses, for native code."""
        if self._records is None:
            addresses = [region.address_of_record() for region in self.regions]
            self._records = (ctypes.c_uint64 * len(addresses))(*addresses)
        return ctypes.addressof(self._records)

    def compare(self, page: WorkerRegions, now_ns: int) -> list[MappedRegion]:
        """Compare all words and deadlines; return the regions that may have to be refused.

        If there are none, record the epoch. The epoch is read first, so a change during the comparison makes the
        recorded epoch out of date.
        """
        epoch = page.epoch
        words, deadlines = self._getter(page.words), self._getter(page.deadlines)
        self.epoch, self.deadline_ns = epoch, min(deadlines)
        suspects = [
            region
            for region, word, active, deadline_ns in zip(self.regions, words, self._active, deadlines, strict=False)
            if word != active or deadline_ns <= now_ns or region.ended is not None
        ]
        if suspects:
            self.forget()
        return suspects

    def forget(self) -> None:
        self.epoch = NO_EPOCH


class RegionGate:
    """Checks a session's regions before each operation that names them, and makes the refusals.

    Attributes:
        page: The regions page; None before the first region.
        regions: All regions for which the session still holds addresses, by slot and number.
        current: The set that was admitted last in the selected stream; None if there is none.
        mark: Returns a ticket for the current work of a stream.
        on_change: Called when `current`, its epoch, its deadline or the page may have changed.
        launches_begun: Returns how many launches have begun in this burst; see `refuse`.
        outbox: Messages to the broker.
        unreported: Refusals that neither the tenant nor the broker has received yet; see `report_refusals`.
        is_ending: Returns whether a region opens or ends now.
        is_restoring: Whether graphs that used regions are being made again. Then the page's words are not checked yet.
    """

    def __init__(self, resources: SessionResources, launches_begun: Callable[[], int]) -> None:
        self.page: WorkerRegions | None = None
        self.regions: dict[tuple[int, int], MappedRegion] = {}
        self.current: SetInUse | None = None
        self.mark: Callable[[int], Ticket] = resources.context.mark
        self.on_change: Callable[[], None] = lambda: None
        # The stream in which the set in use was admitted.
        self._stream = 0
        self.launches_begun = launches_begun
        self.outbox: deque[Message] = deque()
        self.unreported: deque[ForwardRevokedReport] = deque()
        self.sets: dict[int, SetInUse] = {}
        self._resources = resources
        self.is_ending: Callable[[], bool] = lambda: False
        self._repeats = 0
        self._repeats_since_ns = 0
        self._seen_epoch = 0
        self._moved_ns = -SETTLE_NS
        self.had_any = False
        self.is_restoring = False

    # --- checks ---

    def admit(self, handle: int, position: int, kernel: str = "") -> None:
        """Check the regions of a set before a launch, and record that they are used in the selected stream.

        Raises Refused.
        """
        chosen = self.sets.get(handle)
        if chosen is None or self.page is None:
            raise invalid_handle(f"{handle} is not a region set of this session")
        now_ns = time.monotonic_ns()
        # Compare the whole set only if the epoch or a deadline may have changed something; else the set is still valid.
        if chosen.epoch != self.page.epoch or now_ns >= chosen.deadline_ns:
            if suspects := chosen.compare(self.page, now_ns):
                self.on_change()
                self._refuse_first(suspects, kernel, position, now_ns)
        elif chosen is self.current:
            return
        # If the set or the stream has changed, the end of these regions has to wait for this stream from now on.
        if chosen is not self.current:
            self._leave_current()
            self.current, self._stream = chosen, self._resources.stream
            for region in chosen.regions:
                region.streams.add(self._stream)
        self.on_change()

    def is_quiet(self, buffer: bytearray, set_at: int) -> bool:
        """Return whether the LAUNCH_IN with its region set at `set_at` of the buffer is admitted without a comparison.

        Reference implementation of the check in native/serve.ll.
        """
        current, page = self.current, self.page
        return (
            current is not None
            and page is not None
            and buffer.startswith(current.wire, set_at)
            and time.monotonic_ns() < current.deadline_ns
            and page.epoch == current.epoch
        )

    def admit_copy(self, region: MappedRegion) -> None:
        """Check a region before a copy that uses it in the selected stream. Raises Refused."""
        if self.is_restoring:
            return
        self.admit_named((region,), "", None)

    def admit_named(self, regions: Iterable[MappedRegion], kernel: str, position: int | None) -> None:
        """Check regions that a copy or a graph names without a region set, before it uses them in the selected stream.

        Args:
            regions: The regions.
            kernel: The kernel that a refusal names; "" for a copy, and for a graph of several.
            position: The position that the launch passed; None without one.

        Raises Refused.
        """
        self._refuse_first(regions, kernel, position, time.monotonic_ns())
        for region in regions:
            region.streams.add(self._resources.stream)

    def regions_at(self, addresses: Container[int]) -> tuple[MappedRegion, ...]:
        """Return the session's regions with these addresses."""
        return tuple(region for region in self.regions.values() if region.address in addresses)

    def _refuse_first(self, regions: Iterable[MappedRegion], kernel: str, position: int | None, now_ns: int) -> None:
        """Raise the refusal for the first of these regions that is not active, if there is one."""
        for region in regions:
            flip = self.flip_of(region, now_ns)
            if flip is not None:
                raise self.refuse(region, flip, kernel, position, now_ns)

    def flip_of(self, region: MappedRegion, now_ns: int) -> Flip | None:
        """Return the state word that causes a region's refusal now; None while it is active."""
        if region.ended is not None or self.page is None:
            return region.ended
        page, slot = self.page, region.slot
        number, state = page.word(slot)
        # Another region has this slot now, and the page shows that one instead.
        if number != region.number:
            return Flip(RegionWord.NONE, 0)
        if state is RegionWord.ACTIVE:
            deadline_ns = page.deadlines[slot]
            return None if now_ns < deadline_ns else Flip(RegionWord.EXPIRED, deadline_ns)
        flip = Flip(state, page.flipped_ns[slot])
        if state in ENDED_WORDS:
            region.end(flip)
        return flip

    def refuse_revoked(self, member: int, flipped_ns: int, kernel: str, position: int, seen_ns: int) -> Refused:
        """Return the refusal of a launch with the set in use that native code refused. Record it for the broker.

        Args:
            member: Index of the revoked region in the set's `regions`.
            flipped_ns: When it was revoked.
            kernel: The launch's kernel.
            position: The launch's position.
            seen_ns: When native code refused the launch.
        """
        current = self.current
        if current is None:
            raise AssertionError("native code refuses launches in the set in use alone")
        region, flip = current.regions[member], Flip(RegionWord.REVOKED, flipped_ns)
        region.end(flip)
        current.forget()
        self.on_change()
        return self.refuse(region, flip, kernel, position, seen_ns)

    def refuse(self, region: MappedRegion, flip: Flip, kernel: str, position: int | None, now_ns: int) -> Refused:
        """Return the refusal of a launch or a copy because of a region, and record it for the broker.

        Its `site` is the number of launches that have begun since the session last answered a wait (SYNC, STREAM_SYNC)
        or reported a failure, whichever is later. This counts launches with and without a set, in all streams, and each
        kernel of a graph. If a tenant numbers the launches of a burst from 0, `site` is the number of the launch that
        did not begin.
        """
        # Read the facts of this refusal before it changes the region's state.
        site, is_repeat, has_ended = self.launches_begun() & _U32_MASK, region.is_reported, flip.word in ENDED_WORDS
        failure = region_refusal(
            region.region_id,
            flip.word,
            flip.flipped_ns,
            is_repeat=is_repeat,
            kernel=kernel,
            site=site,
            position=position,
        )
        # The first refusal reports how the region ended; later refusals report FENCED.
        region.is_reported = is_repeat or has_ended
        if self._may_report(now_ns, is_first=has_ended and not is_repeat):
            status = -failure.status
            report = ForwardRevokedReport(
                region.region_id, status, kernel, site, position or 0, flip.flipped_ns, now_ns
            )
            self.unreported.append(report)
        return Refused(failure)

    def end_at(self, address: int) -> str:
        """Return text that names the ended region at this address; "" if no region there has begun to end."""
        ended = (
            candidate
            for candidate in self.regions.values()
            if candidate.address == address and candidate.ended is not None
        )
        region = next(ended, None)
        return "" if region is None else end_text(region)

    @property
    def has_reports(self) -> bool:
        """Return whether a report about regions is still to be sent to the broker."""
        return bool(self.outbox or self.unreported)

    def report_refusals(self, told_ns: int = 0) -> None:
        """Report all refusals to the broker. The tenant gets them in the reply made at `told_ns`, by default now."""
        told_ns = told_ns or time.monotonic_ns()
        while self.unreported:
            self.outbox.append(replace(self.unreported.popleft(), told_ns=told_ns))

    def report_overdue(self, now_ns: int) -> None:
        """Report to the broker the refusals that the tenant has not asked about for REPORT_WAIT_NS."""
        while self.unreported and now_ns - self.unreported[0].seen_ns >= REPORT_WAIT_NS:
            self.outbox.append(self.unreported.popleft())

    def _may_report(self, now_ns: int, *, is_first: bool) -> bool:
        # The first refusal of each region is always reported; repeats have a bound per second.
        if is_first:
            return True
        if now_ns - self._repeats_since_ns >= REPEAT_NS:
            self._repeats, self._repeats_since_ns = 0, now_ns
        self._repeats += 1
        return self._repeats <= MAX_REPEATS

    def is_moving(self) -> bool:
        """Return whether a region has just ended, or is being opened or ended, so that the worker should poll soon."""
        # A session that never had a region has the page only for its lease's word.
        if self.page is None or not self.had_any:
            return False
        now_ns, epoch = time.monotonic_ns(), self.page.epoch
        # An opened or renewed region raises the epoch as well, but then no message follows.
        if epoch != self._seen_epoch:
            self._seen_epoch = epoch
            if not self._are_active():
                self._moved_ns = now_ns
        return now_ns - self._moved_ns < SETTLE_NS or self.is_ending()

    def _are_active(self) -> bool:
        """Return whether the page shows all regions that have their memory as active."""
        page, has_ended = self.page, self._resources.ledger.has_ended
        return page is None or all(
            page.words[region.slot] == word_of(region.number, RegionWord.ACTIVE) or has_ended(region.address)
            for region in self.regions.values()
        )

    # --- streams ---

    def forget_current(self) -> None:
        """Make Python serve the next launch, because the selected stream, a set or the page has changed."""
        self._leave_current()
        self.on_change()

    def _leave_current(self) -> None:
        """Mark the end of the launches in the set in use, so that no region's end waits for later launches."""
        if self.current is None:
            return
        # One ticket serves all regions of the set: launches that are queued later don't use them.
        regions, self.current = self.current.regions, None
        mark = self.mark(self._stream)
        for region in regions:
            region.marks[self._stream] = mark
            region.streams.discard(self._stream)

    def leave_stream(self, stream: int) -> None:
        """Record that a stream is about to be destroyed and its number may be used again; its work continues."""
        if stream == self._stream:
            self.forget_current()
        # Regions refer to the stream by its number, which a later stream may get.
        users = [used for used in self.regions.values() if stream in used.streams or stream in used.marks]
        if users:
            ticket = self.mark(stream)
            for region in users:
                region.streams.discard(stream)
                region.marks.pop(stream, None)
                region.tickets = [*(old for old in region.tickets if not old.is_done()), ticket]


class RegionOperations(OperationHandler):
    """REGION_SET, REGION_SET_FREE, REGION_RELEASE and REGION_REFUSED."""

    def __init__(self, resources: SessionResources, gate: RegionGate, forget: Callable[[int], None]) -> None:
        super().__init__(resources)
        self._gate, self._forget = gate, forget
        self._last_set = 0
        self._member_count = 0

    @serves(Opcode.REGION_SET)
    def make_set(self, frame: Frame) -> bytes:
        """Serve REGION_SET. An ended region may be a member: launches in the set are then refused."""
        named = parse_body(RegionSet, frame.payload).regions
        if not named:
            raise BodyError("a region set must name at least one region")
        gate = self._gate
        if len(gate.sets) >= MAX_REGION_SETS or self._member_count + len(named) > MAX_SET_MEMBERS:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"the session has {len(gate.sets)} region sets that name {self._member_count} "
                    f"regions; at most {MAX_REGION_SETS} sets and {MAX_SET_MEMBERS} regions are allowed",
                    hint="Free sets that you no longer need.",
                )
            )
        # Check that all members exist before a handle is given out.
        regions = []
        for ref in named:
            region = gate.regions.get((ref.slot, ref.number))
            if region is None:
                raise invalid_handle(f"this session has no region in slot {ref.slot} with number {ref.number}")
            regions.append(region)
        self._last_set += 1
        gate.sets[self._last_set] = SetInUse(self._last_set, regions, self._ledger.holder)
        self._member_count += len(regions)
        return handle_reply(frame, self._last_set)

    @serves(Opcode.REGION_SET_FREE)
    def free_set(self, frame: Frame) -> bytes:
        """Serve REGION_SET_FREE. Launches that were queued in the set continue."""
        (handle,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        if handle not in self._gate.sets:
            raise invalid_handle(f"{handle} is not a region set of this session")
        self._free(handle)
        return empty(frame)

    def made(self) -> list[SetInUse]:
        """Return all region sets that the session has now."""
        return list(self._gate.sets.values())

    @property
    def launches_begun(self) -> int:
        """Number of launches since the last wait that was answered; see `RegionGate.refuse`."""
        return self._gate.launches_begun()

    @property
    def last_set(self) -> int:
        """The highest handle that a region set of this session ever had."""
        return self._last_set

    def restore_sets(self, sets: Iterable[tuple[int, list[MappedRegion], Holder]], last_set: int) -> None:
        """Add the region sets that the session had in another process: the handle, regions and holder of each."""
        for handle, regions, holder in sets:
            self._gate.sets[handle] = SetInUse(handle, regions, holder)
            self._member_count += len(regions)
        self._last_set = last_set

    def give_back(self, holder: Holder) -> None:
        for handle in [handle for handle, region_set in self._gate.sets.items() if region_set.holder is holder]:
            self._free(handle)

    def _free(self, handle: int) -> None:
        freed_set = self._gate.sets.pop(handle)
        self._member_count -= len(freed_set.regions)
        if freed_set is self._gate.current:
            self._gate.forget_current()

    @serves(Opcode.REGION_REFUSED)
    def note_refusal(self, frame: Frame) -> bytes:
        """Serve REGION_REFUSED: report a client's refusal to the broker as one of the worker's own.

        The worker's page decides, not the client: if the region is active here, nothing is reported.
        """
        refusal, gate, now_ns = parse_body(RegionRefusal, frame.payload), self._gate, time.monotonic_ns()
        region = gate.regions.get((refusal.slot, refusal.number))
        flip = None if region is None else gate.flip_of(region, now_ns)
        if region is not None and flip is not None:
            gate.refuse(region, flip, refusal.kernel, refusal.position, now_ns)
            gate.report_refusals()
        return empty(frame)

    @serves(Opcode.REGION_RELEASE)
    def release(self, frame: Frame) -> bytes:
        """Serve REGION_RELEASE: release the address of a region after its memory was removed."""
        (address,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        region = next((candidate for candidate in self._gate.regions.values() if candidate.address == address), None)
        if region is None:
            raise invalid_handle(f"{address:#x} is not the address of a region in this session")
        if not self._ledger.has_ended(address):
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"region {region.region_id:032x} still has its memory",
                    hint="Free it by its lease id first, and wait until its memory is returned.",
                    region=region.region_id,
                )
            )
        self._release(region)
        self._record_usage()
        return empty(frame)

    def release_ended(self) -> None:
        """Release the addresses of all regions without memory."""
        for region in [
            candidate for candidate in self._gate.regions.values() if self._ledger.has_ended(candidate.address)
        ]:
            self._release(region)
        self._record_usage()

    def _release(self, region: MappedRegion) -> None:
        self._context.region_release(region.address)
        self._ledger.remove_region(region.address)
        del self._gate.regions[region.slot, region.number]
        self._forget(region.region_id)
        self._gate.outbox.append(RegionReleasedReport(region.region_id))


def no_set() -> Refused:
    """Return the refusal of a launch that names no region set in a session where every launch must name one."""
    return Refused(
        Failure(
            Status.LAUNCH_FAILED,
            "the lease accepts no launch without a region set",
            hint="Make a region set of the regions that the launch touches, and launch in it; or acquire the lease "
            "without regions_required.",
        )
    )
