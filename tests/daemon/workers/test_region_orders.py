"""Orders about regions reach the session's worker, and only answers that can be true reach the lease table."""

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gpulease.daemon.contract import messages as m
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.leases.events import (
    EndRegion,
    Event,
    OpenRegion,
    RegionEnded,
    RegionOpened,
    RegionRefused,
    RegionReleased,
    RegionStuck,
    ResizeSlice,
    SessionCondemned,
    SetRegion,
    SliceResized,
)
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState
from gpulease.daemon.workers.region_orders import RegionOrders
from gpulease.daemon.workers.registry import MAX_REASON_CHARS, Workers
from gpulease.daemon.workers.session_images import SessionImages
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES
from gpulease.protocol.opcodes import Exclusivity, Status
from gpulease.protocol.session_words import RegionWord

LEASE, OTHER, REGION = 7, 8, 70
SIZE = 64 << 20


@dataclass
class MadePage:
    words: list[tuple[int, int, RegionWord, int]] = field(default_factory=list)

    def set(self, slot: int, number: int, word: RegionWord, deadline_ns: int, now_ns: int) -> None:
        self.words.append((slot, number, word, deadline_ns))


@dataclass
class MadeLink:
    error: OSError | None = None
    page: MadePage = field(default_factory=MadePage)
    ordered: list[Message] = field(default_factory=list)
    released: int = 0

    def order(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        self.ordered.append(message)

    def release(self) -> None:
        if self.error is not None:
            raise self.error
        self.released += 1


@dataclass
class MadeWorker:
    spec: WorkerSpec = WorkerSpec(LEASE, "GPU-a", SIZE, is_shared=False)
    regions: MadeLink = field(default_factory=MadeLink)
    size_bytes: int = 0

    def open_regions(self, *, is_held: bool = False) -> MadeLink:
        return self.regions

    def resize(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class MadeWorkers:
    def __init__(self) -> None:
        self.one = MadeWorker()
        # No session of theirs is without a worker.
        self.images = SessionImages(lambda event: None)

    def worker(self, lease_id: int) -> MadeWorker | None:
        return self.one if lease_id == LEASE else None

    def serving(self) -> list[MadeWorker]:
        return [self.one]


def region(parent_id: int = LEASE, state: LeaseState = LeaseState.ACTIVE, deadline_ns: int = 1 << 62) -> LeaseSnapshot:
    return LeaseSnapshot(
        REGION, "ann", "GPU-a", SIZE, Exclusivity.SHARED, 1, state, None, "", "", 7, deadline_ns, None, 1000, parent_id
    )


ENDING = region(state=LeaseState.DRAINING)


class Rig:
    def __init__(self, known: LeaseSnapshot | None = None) -> None:
        self.posted: list[Event] = []
        self.refused: list[tuple[LeaseSnapshot, m.ForwardRevokedReport]] = []
        self.workers = MadeWorkers()
        found = {REGION: known or region()}
        self.orders = RegionOrders(
            found.get,
            cast(Workers, self.workers),
            self.posted.append,
            lambda region, told, _: self.refused.append((region, told)),
        )

    def told(self, message: Message, lease_id: int = LEASE) -> list[Event]:
        self.orders.on_message(lease_id, message)
        return self.posted


def forward_revoked(**changes: Any) -> m.ForwardRevokedReport:
    now_ns = time.monotonic_ns()
    told: dict[str, Any] = {"status": -Status.REVOKED, "kernel": "decode", "site": 3, "position": 4}
    return m.ForwardRevokedReport(REGION, **(told | {"flipped_ns": now_ns - 5, "seen_ns": now_ns - 1} | changes))


# --- orders ---


def test_orders_reach_the_worker() -> None:
    rig = Rig()
    rig.orders.open(OpenRegion(LEASE, REGION, 3, 9, SIZE))
    rig.orders.end(EndRegion(LEASE, REGION, 50))
    rig.orders.resize(ResizeSlice(LEASE, 2 * SIZE, after_record=False))
    ordered = rig.workers.one.regions.ordered
    assert ordered == [
        m.OpenRegionOrder(REGION, 3, 9, SIZE),
        m.EndRegionOrder(REGION, 50),
        m.ResizeSliceOrder(2 * SIZE),
    ]
    assert not rig.posted


def test_a_resize_that_is_not_ordered_is_answered_with_the_slice_as_it_is() -> None:
    rig = Rig()
    rig.orders.refuse_resize(ResizeSlice(LEASE, 2 * SIZE, after_record=True), "the journal can't be written")
    assert rig.posted == [SliceResized(LEASE, SIZE, "the journal can't be written")]
    assert not rig.workers.one.regions.ordered


def test_a_word_is_written_where_the_worker_reads_it() -> None:
    rig = Rig()
    rig.orders.set(SetRegion(LEASE, REGION, 3, 9, RegionWord.REVOKED, 55))
    assert rig.workers.one.regions.page.words == [(3, 9, RegionWord.REVOKED, 55)]


def test_nobody_is_told_where_no_worker_is() -> None:
    rig = Rig()
    rig.orders.open(OpenRegion(OTHER, REGION, 3, 9, SIZE))
    rig.orders.set(SetRegion(OTHER, REGION, 3, 9, RegionWord.REVOKED, 55))
    rig.orders.end(EndRegion(OTHER, REGION, 50))
    rig.orders.resize(ResizeSlice(OTHER, SIZE, after_record=False))
    assert not rig.posted


def test_without_a_descriptor_for_the_page_no_region_opens_and_none_stays_open() -> None:
    rig = Rig()
    rig.workers.one.regions.error = OSError(24, "Too many open files")
    rig.orders.open(OpenRegion(LEASE, REGION, 3, 9, SIZE))
    rig.orders.end(EndRegion(LEASE, REGION, 50))
    refused, stuck = rig.posted
    assert isinstance(refused, RegionRefused)
    assert isinstance(stuck, RegionStuck)
    assert "Too many open files" in refused.reason
    assert "Too many open files" in stuck.reason
    assert stuck.cause is Cause.UNRESPONSIVE


def test_workers_that_were_taken_over_get_their_pages_at_the_end_of_the_adoption() -> None:
    rig = Rig()
    rig.orders.begin_adoption()
    assert rig.workers.one.regions.released == 0
    rig.orders.end_adoption()
    assert rig.workers.one.regions.released == 1


def test_a_session_that_can_not_be_shown_its_regions_is_ended() -> None:
    """Nobody could end a region of it."""
    rig = Rig()
    rig.workers.one.regions.error = OSError(24, "Too many open files")
    rig.orders.end_adoption()
    (condemned,) = rig.posted
    assert isinstance(condemned, SessionCondemned)
    assert condemned.worker_id == LEASE


# --- answers ---


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.RegionOpenedReport(REGION, 1 << 40), RegionOpened(REGION, 1 << 40)),
        (m.RegionRefusedReport(REGION, "The card is full."), RegionRefused(REGION, "The card is full.")),
        (m.RegionEndedReport(REGION, SIZE, 0, SIZE), RegionEnded(REGION, SIZE, 0, True)),
        (m.RegionEndedReport(REGION, SIZE - 5, 5, SIZE), RegionEnded(REGION, SIZE - 5, 5, True)),
        (m.RegionEndedReport(REGION, SIZE, 0, SIZE - 1), RegionEnded(REGION, SIZE, 0, False)),
        (m.RegionEndedReport(REGION, SIZE, 0, -1), RegionEnded(REGION, SIZE, 0, False)),
        (m.RegionStuckReport(REGION, "a kernel runs on"), RegionStuck(REGION, "a kernel runs on")),
        (m.RegionReleasedReport(REGION), RegionReleased(REGION)),
    ],
    ids=repr,
)
def test_an_answer_is_an_event(message: Message, event: Event) -> None:
    assert Rig().told(message) == [event]


ABOUT_A_REGION = [
    m.RegionOpenedReport(REGION, 1 << 40),
    m.RegionRefusedReport(REGION, "no"),
    m.RegionEndedReport(REGION, SIZE, 0, SIZE),
    m.RegionStuckReport(REGION, "no"),
    m.RegionReleasedReport(REGION),
    forward_revoked(),
]


@pytest.mark.parametrize("message", ABOUT_A_REGION, ids=lambda message: message.OP)
def test_a_worker_says_nothing_of_another_lease_s_region(message: Message) -> None:
    rig = Rig()
    assert rig.told(message, OTHER) == []
    assert rig.refused == []


@pytest.mark.parametrize("message", ABOUT_A_REGION, ids=lambda message: message.OP)
def test_what_is_no_region_is_none_of_a_worker_s(message: Message) -> None:
    rig = Rig(region(parent_id=0))
    assert rig.told(message, 0) == []
    assert rig.refused == []


@pytest.mark.parametrize("address", [0, (1 << 64) - SIZE + 1, (1 << 64) - 1])
def test_an_address_that_can_not_be_opens_nothing(address: int) -> None:
    (event,) = Rig().told(m.RegionOpenedReport(REGION, address))
    assert isinstance(event, RegionRefused)


def test_a_session_that_has_nothing_of_a_region_proves_nothing() -> None:
    (event,) = Rig().told(m.RegionEndedReport(REGION, 0, 0, 0))
    assert isinstance(event, RegionRefused)


@pytest.mark.parametrize(("freed", "kept"), [(SIZE, 1), (SIZE - 1, 0), (0, 1), (1 << 63, 0)])
def test_figures_that_do_not_add_up_prove_nothing(freed: int, kept: int) -> None:
    (event,) = Rig().told(m.RegionEndedReport(REGION, freed, kept, SIZE))
    assert isinstance(event, RegionStuck)
    assert str(SIZE) in event.reason
    assert event.cause is Cause.UNRESPONSIVE


def test_a_long_reason_is_cut() -> None:
    (event,) = Rig().told(m.RegionStuckReport(REGION, "x" * 100_000))
    assert isinstance(event, RegionStuck)
    assert len(event.reason) <= MAX_REASON_CHARS


def test_a_refused_launch_is_told_as_it_was_said() -> None:
    rig, said = Rig(ENDING), forward_revoked()
    assert rig.told(said) == []
    assert rig.refused == [(ENDING, said)]


@pytest.mark.parametrize(
    ("known", "changes", "is_reported"),
    [
        (region(), {}, False),
        (region(), {"status": -Status.LEASE_FREED}, False),
        (region(), {"status": -Status.LEASE_EXPIRED}, False),
        (region(deadline_ns=8), {"status": -Status.LEASE_EXPIRED, "flipped_ns": 8}, True),
        (region(), {"status": -Status.CANCELLED}, True),
        (region(), {"status": -Status.FENCED, "flipped_ns": 0}, True),
        (region(state=LeaseState.TORNDOWN), {"flipped_ns": 7}, True),
        (region(state=LeaseState.TORNDOWN), {"flipped_ns": 6}, False),
        (region(), {"status": -Status.CANCELLED, "flipped_ns": 6}, False),
    ],
)
def test_no_launch_was_refused_for_an_end_that_was_not(
    known: LeaseSnapshot, changes: dict[str, int], is_reported: bool
) -> None:
    rig = Rig(known)
    rig.told(forward_revoked(**changes))
    assert bool(rig.refused) is is_reported


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 0},
        {"status": -Status.INVALID_HANDLE},
        {"status": 1 << 63},
        {"site": 1 << 32},
        {"seen_ns": 1, "flipped_ns": 2},
        {"seen_ns": (1 << 64) - 1},
        {"told_ns": 1},
        {"told_ns": (1 << 64) - 1},
    ],
    ids=repr,
)
def test_a_refusal_that_can_not_be_is_not_told(changes: dict[str, int]) -> None:
    rig = Rig(ENDING)
    rig.told(forward_revoked(**changes))
    assert rig.refused == []


@pytest.mark.parametrize("kernel", ["k" * 100_000, "\N{SNOWMAN}" * 100_000, "\x1b[31m"], ids=["long", "wide", "colour"])
def test_a_kernel_s_name_fits_an_event_and_moves_no_cursor(kernel: str) -> None:
    rig = Rig(ENDING)
    rig.told(forward_revoked(kernel=kernel))
    ((_, told),) = rig.refused
    assert len(told.kernel.encode()) <= MAX_KERNEL_NAME_BYTES
    assert told.kernel.isprintable()


# --- sizes ---


def test_a_size_that_was_asked_for_is_the_worker_s_from_then_on() -> None:
    rig = Rig()
    rig.orders.resize(ResizeSlice(LEASE, SIZE, after_record=False))
    assert rig.told(m.SliceResizedReport(SIZE, "")) == [SliceResized(LEASE, SIZE, "")]
    assert rig.workers.one.size_bytes == SIZE


def test_another_size_than_asked_for_is_a_doubt() -> None:
    rig = Rig()
    rig.orders.resize(ResizeSlice(LEASE, SIZE, after_record=False))
    (event,) = rig.told(m.SliceResizedReport(SIZE + 1, ""))
    assert isinstance(event, SliceResized)
    assert event.doubt
    assert rig.workers.one.size_bytes == 0


def test_a_size_that_nobody_asked_for_is_not_told() -> None:
    rig = Rig()
    assert rig.told(m.SliceResizedReport(SIZE, "")) == []
    rig.orders.resize(ResizeSlice(LEASE, SIZE, after_record=False))
    rig.orders.forget(LEASE)
    assert rig.told(m.SliceResizedReport(SIZE, "")) == []
