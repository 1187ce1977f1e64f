"""Which leases and workers of an earlier daemon go on: `reconcile`, without processes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import PageState, Transfer
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.leases.events import LeaseRestored, SubmitFound, WorkerFound
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID, Cause, LeaseState, LeaseTerms
from gpulease.daemon.leases.persisted import LeaseRow
from gpulease.daemon.workers.adoption import MAX_RENEWALS_AHEAD, LeftoverWorker, reconcile
from gpulease.daemon.workers.zygote_discovery import FoundWorker
from gpulease.protocol.opcodes import Exclusivity, Status

CARD = "GPU-a"
OVERHEAD = 7
LATEST_NS = 10_000
ENDED = "was killed by SIGKILL"
SERIALS = count(1)
LIVING = PageState(None, 1000, 3)

KEPT = LeaseRow(
    lease_id=5,
    tenant="ann",
    card_uuid=CARD,
    terms=LeaseTerms(100, 60_000, exclusivity=Exclusivity.SHARED, orphan_ms=0),
    charge_bytes=107,
    generation=3,
    state=LeaseState.ACTIVE,
    cause=None,
    reason="",
    fault="",
    created_ns=1,
    deadline_ns=1000,
    ended_ns=None,
    worker_pid=77,
)


def left(
    lease_id: int,
    page: PageState = LIVING,
    *,
    reason: str | None = None,
    size: int = 100,
    overran: str = "",
    submit_of: int = 0,
    transfer: Transfer | None = Transfer.NONE,
) -> LeftoverWorker:
    spec = WorkerSpec(lease_id, CARD, size, is_shared=True, submit_of=submit_of, timeout_ms=50)
    return LeftoverWorker(FoundWorker(next(SERIALS), spec, 77, None, reason, overran=overran), page, transfer)


def decide(
    kept: list[LeaseRow], workers: list[LeftoverWorker]
) -> list[tuple[LeaseRestored | WorkerFound | SubmitFound, int]]:
    """Events, each with its worker's serial, 0 for none."""
    draw = count(1000).__next__
    adoptions = reconcile(kept, workers, {CARD: OVERHEAD}, LATEST_NS, draw)
    return [(one.event, 0 if one.worker is None else one.worker.serial) for one in adoptions]


@pytest.mark.parametrize(
    ("kept", "page", "expected"),
    [
        (KEPT, PageState(None, 1000, 3), KEPT),
        # A renewal that was not on the disk yet, and one that was not on the page.
        (KEPT, PageState(None, 2000, 4), KEPT._replace(deadline_ns=2000, generation=4)),
        (KEPT, PageState(None, 500, 2), KEPT),
        # Nobody wrote that: a worker that was taken over did.
        (
            KEPT,
            PageState(None, 2**63, 2**63),
            KEPT._replace(deadline_ns=LATEST_NS, generation=3 + MAX_RENEWALS_AHEAD),
        ),
        (KEPT, PageState(Status.REVOKED, 1000, 3), (LeaseState.DRAINING, Cause.REVOKED)),
        (KEPT, PageState(Status.LEASE_EXPIRED, 1000, 3), (LeaseState.DRAINING, Cause.EXPIRED)),
        (KEPT, PageState(Status.LEASE_FREED, 1000, 3), (LeaseState.DRAINING, Cause.FREED)),
        (KEPT, PageState(Status.DRAINED, 1000, 3), (LeaseState.DRAINING, Cause.DRAINED)),
        (KEPT, PageState(Status.SESSION_FAILED, 1000, 3), (LeaseState.DRAINING, Cause.WORKER_DIED)),
        # The broker named the cause beside the word; a name that is none, or another word's, says nothing.
        (KEPT, PageState(Status.LEASE_EXPIRED, 1000, 3, cause="orphaned"), (LeaseState.DRAINING, Cause.ORPHANED)),
        (KEPT, PageState(Status.SESSION_FAILED, 1000, 3, cause="over_slice"), (LeaseState.DRAINING, Cause.OVER_SLICE)),
        (KEPT, PageState(Status.LEASE_EXPIRED, 1000, 3, cause="bored"), (LeaseState.DRAINING, Cause.EXPIRED)),
        (KEPT, PageState(Status.REVOKED, 1000, 3, cause="orphaned"), (LeaseState.DRAINING, Cause.REVOKED)),
        # What is kept of an end is why it ended, whatever the page says.
        (
            KEPT._replace(state=LeaseState.DRAINING, cause=Cause.OVER_SLICE),
            PageState(Status.SESSION_FAILED, 9000, 9),
            (LeaseState.DRAINING, Cause.OVER_SLICE),
        ),
        (KEPT._replace(state=LeaseState.FENCED, cause=Cause.FREED), PageState(None, 1000, 3), None),
    ],
)
@pytest.mark.parametrize("reason", [None, ENDED])
def test_a_kept_lease_with_its_own_worker(
    kept: LeaseRow,
    page: PageState,
    expected: LeaseRow | tuple[LeaseState, Cause] | None,
    reason: str | None,
) -> None:
    ((event, serial),) = decide([kept], [worker := left(5, page, reason=reason)])
    assert isinstance(event, LeaseRestored)
    assert event.has_worker == (reason is None)
    assert serial == worker.worker.serial
    if expected is None or isinstance(expected, LeaseRow):
        assert event.kept == (expected or kept)
    else:
        assert (event.kept.state, event.kept.cause) == expected


@pytest.mark.parametrize("reason", [None, ENDED])
def test_one_whose_kernel_ran_for_too_long_while_nobody_was_there(reason: str | None) -> None:
    said = "a kernel ran for more than 2 s"
    worker = left(5, PageState(Status.SESSION_FAILED, 1000, 3), reason=reason, overran=said)
    ((event, _),) = decide([KEPT], [worker])
    assert isinstance(event, LeaseRestored)
    assert (event.kept.state, event.kept.cause, event.kept.reason) == (LeaseState.DRAINING, Cause.KERNEL_TIMEOUT, said)


@pytest.mark.parametrize("has_session", [True, False])
def test_whether_its_session_was_opened_is_what_its_page_says(has_session: bool) -> None:
    ((event, _),) = decide([KEPT], [left(5, PageState(None, 1000, 3, has_session=has_session))])
    assert event == LeaseRestored(KEPT, has_worker=True, has_session=has_session)


@pytest.mark.parametrize("reason", [None, ENDED])
def test_a_lease_is_restored_on_its_workers_card(reason: str | None) -> None:
    """The record names the next card of a session that is moved, before the worker that it left has ended."""
    ((event, _),) = decide([KEPT._replace(card_uuid="GPU-b", is_cold=True)], [left(5, reason=reason)])
    assert event == LeaseRestored(KEPT._replace(is_cold=True), has_worker=reason is None)
    fenced = KEPT._replace(card_uuid="GPU-b", state=LeaseState.FENCED)
    ((event, _),) = decide([fenced], [left(5, reason=reason)])
    assert event == LeaseRestored(fenced, has_worker=reason is None), "a fence stays where it is"


def test_a_kept_lease_without_a_worker() -> None:
    assert decide([KEPT], []) == [(LeaseRestored(KEPT, has_worker=False), 0)]


@pytest.mark.parametrize("order", [lambda pair: pair, lambda pair: pair[::-1]])
def test_of_two_workers_the_one_that_was_granted_is_the_leases(
    order: Callable[[list[LeftoverWorker]], list[LeftoverWorker]],
) -> None:
    hung, own = left(5, PageState(None, 0, 0)), left(5)
    (restored, serial), (found, other) = decide([KEPT], order([hung, own]))
    assert isinstance(restored, LeaseRestored)
    assert (serial, other) == (own.worker.serial, hung.worker.serial)
    assert found == WorkerFound(1000, CARD, 107, 5)


PARKABLE = KEPT._replace(terms=replace(KEPT.terms, park_idle_ms=0))
NONE, LEFT, SERVES = Transfer


@pytest.mark.parametrize(("said", "number"), [(0, 0), (900, 900), (901, 0)])
def test_the_park_that_its_session_is_in_is_what_its_worker_says(said: int, number: int) -> None:
    """The number of a park is a time, so no broker has given one that lies in the future."""
    worker = replace(left(5), park_number=said)
    (adoption,) = reconcile([PARKABLE], [worker], {CARD: OVERHEAD}, LATEST_NS, lambda: 1000, (900, 900))
    assert adoption.event == LeaseRestored(PARKABLE, has_worker=True, park_number=number)


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize(
    ("workers", "chosen", "has_session"),
    [
        # Each worker: what it says about the session, and whether it lives.
        ([(LEFT, True), (SERVES, True)], 1, True),
        ([(LEFT, True), (NONE, True)], 0, True),
        ([(LEFT, True), (NONE, False)], 0, True),
        # One that served the session last, and is dead, has taken it along.
        ([(LEFT, True), (SERVES, False)], 1, True),
        ([(LEFT, False), (SERVES, True)], 1, True),
        ([(None, False), (SERVES, True)], 1, True),
        # The record is older than the only worker's word, and newer than its silence.
        ([(SERVES, True)], 0, True),
        ([(NONE, True)], 0, None),
        ([(LEFT, True)], 0, None),
        # Nobody knows: two that say nothing or the same, or one whose end its zygote does not describe.
        ([(NONE, True), (NONE, True)], None, False),
        ([(LEFT, True), (LEFT, True)], None, False),
        ([(SERVES, True), (SERVES, True)], None, False),
        ([(LEFT, True), (NONE, True), (None, False)], None, False),
    ],
)
def test_a_session_continues_in_the_worker_that_served_it_last(
    workers: list[tuple[Transfer | None, bool]], chosen: int | None, has_session: bool | None, is_cold: bool
) -> None:
    found = [left(5, transfer=transfer, reason=None if lives else ENDED) for transfer, lives in workers]
    (restored, serial), *others = decide([PARKABLE._replace(is_cold=is_cold)], found)
    assert isinstance(restored, LeaseRestored)
    assert restored.kept.is_cold == (is_cold if has_session is None else not has_session)
    if chosen is not None:
        assert (serial, restored.has_worker) == (found[chosen].worker.serial, workers[chosen][1])
    assert len(others) == len(workers) - 1
    assert all(isinstance(event, WorkerFound) and event.beside_lease_id == 5 for event, _ in others)


@pytest.mark.parametrize(
    ("workers", "has_session"),
    [
        # Each worker: what it says about the session, and whether it lives and has a deadline.
        ([(LEFT, False, True), (NONE, True, False)], False),
        ([(NONE, True, False)], False),
        ([(NONE, True, True)], False),
        ([(LEFT, True, True), (NONE, True, False)], True),
        ([(LEFT, True, True)], True),
        ([(SERVES, True, True)], True),
    ],
)
def test_a_session_that_had_left_its_worker_is_in_no_next_one_that_does_not_say_so(
    workers: list[tuple[Transfer, bool, bool]], has_session: bool
) -> None:
    never_granted = PageState(None, 0, 0)
    found = [
        left(5, LIVING if is_leased else never_granted, transfer=transfer, reason=None if lives else ENDED)
        for transfer, lives, is_leased in workers
    ]
    (restored, _), *_ = decide([PARKABLE._replace(worker_pid=0)], found)
    assert isinstance(restored, LeaseRestored)
    assert restored.kept.is_cold is not has_session


def test_a_worker_that_an_earlier_broker_has_dropped_has_no_session() -> None:
    """It lives on while its driver frees its memory, and says what it said when it was dropped."""
    dropped = left(5, PageState(Status.SESSION_FAILED, 1000, 3, cause="abandoned"), transfer=LEFT)
    for own, kept in ((left(5, transfer=LEFT), PARKABLE), (left(5), KEPT)):
        (restored, serial), (other, other_serial) = decide([kept], [dropped, own])
        assert (restored, serial) == (LeaseRestored(kept, has_worker=True), own.worker.serial)
        assert (other, other_serial) == (WorkerFound(1000, CARD, 107, 5), dropped.worker.serial)
    assert decide([KEPT], [dropped])[0] == (LeaseRestored(KEPT, has_worker=False), 0)
    # The fence of a lease that was never granted holds the bytes of a dropped worker.
    fenced = KEPT._replace(state=LeaseState.FENCED, cause=Cause.ABANDONED)
    assert decide([fenced], [dropped]) == [(LeaseRestored(fenced, has_worker=True), dropped.worker.serial)]


def test_a_worker_that_grew_for_an_earlier_broker_is_charged_for_that() -> None:
    """That broker was killed before it received the worker's report, and another one during the worker's upgrade."""
    former, following = left(5, size=40, transfer=LEFT), left(5, transfer=SERVES)
    assert decide([PARKABLE], [former, following])[1:] == [(WorkerFound(1000, CARD, 107, 5), former.worker.serial)]


def test_what_workers_say_is_for_running_parkable_leases_alone() -> None:
    serving, granted = left(5, PageState(None, 0, 0), transfer=SERVES), left(5)
    for kept in (KEPT, PARKABLE._replace(state=LeaseState.DRAINING, cause=Cause.FREED), PARKABLE):
        ((restored, serial), _) = decide([kept], [serving, granted])
        assert (restored, serial) == (LeaseRestored(kept, has_worker=True), granted.worker.serial)


def test_workers_of_nobody_are_told_with_what_they_hold() -> None:
    warm, pending = left(FIRST_WARM_ID, PageState(None, 0, 0), size=0), left(6, PageState(None, 0, 0))
    dead = left(8, reason=ENDED)
    assert decide([], [warm, pending, dead]) == [
        (WorkerFound(FIRST_WARM_ID, CARD, OVERHEAD), warm.worker.serial),
        (WorkerFound(6, CARD, 107), pending.worker.serial),
        (WorkerFound(8, CARD, 107), dead.worker.serial),
    ]


@pytest.mark.parametrize(
    ("page", "reason", "is_running"),
    [
        (LIVING, None, True),
        (LIVING, ENDED, False),
        (PageState(None, 0, 0), None, False),
        (PageState(Status.TIMED_OUT, 1000, 3), None, False),
    ],
    ids=["running", "has ended", "not told of", "was ended"],
)
def test_a_submit_of_a_kept_lease(page: PageState, reason: str | None, is_running: bool) -> None:
    own, submit = left(5), left(FIRST_SUBMIT_ID, page, reason=reason, submit_of=5)
    assert decide([KEPT], [submit, own])[1:] == [
        (SubmitFound(FIRST_SUBMIT_ID, 5, CARD, is_running, 50, submit.worker.spec.size_bytes), submit.worker.serial)
    ]


def test_a_submit_whose_lease_takes_none_is_nobodys() -> None:
    fenced = KEPT._replace(state=LeaseState.FENCED, cause=Cause.FREED)
    submit = left(FIRST_SUBMIT_ID, submit_of=5)
    assert decide([fenced], [submit])[1:] == [(WorkerFound(1000, CARD, 107, 5), submit.worker.serial)]
    assert decide([], [submit]) == [(WorkerFound(1000, CARD, 107, 5), submit.worker.serial)]
    one, another = left(FIRST_SUBMIT_ID, submit_of=5), left(FIRST_SUBMIT_ID + 1, submit_of=5)
    assert [type(event) for event, _ in decide([KEPT], [one, another])] == [LeaseRestored, SubmitFound, WorkerFound]


def test_a_submit_that_an_earlier_broker_has_dropped_is_not_its_leases() -> None:
    """It is still ending, and the lease has another one by now."""
    dropped = left(FIRST_SUBMIT_ID, PageState(Status.SESSION_FAILED, 1000, 3, cause="abandoned"), submit_of=5)
    running = left(FIRST_SUBMIT_ID + 1, submit_of=5)
    assert decide([KEPT], [left(5), dropped, running])[1:] == [
        (WorkerFound(1000, CARD, 107, 5), dropped.worker.serial),
        (SubmitFound(FIRST_SUBMIT_ID + 1, 5, CARD, True, 50, 100), running.worker.serial),
    ]


PAGES = st.builds(
    PageState,
    st.sampled_from([None, *Status]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
WORKERS = st.lists(
    st.builds(
        left,
        st.sampled_from([5, 6, 7, FIRST_WARM_ID]),
        PAGES,
        reason=st.sampled_from([None, ENDED]),
        size=st.sampled_from([0, 100]),
    )
    | st.builds(left, st.integers(FIRST_SUBMIT_ID, FIRST_SUBMIT_ID + 9), PAGES, submit_of=st.sampled_from([5, 6, 8])),
    max_size=6,
    unique_by=lambda one: one.worker.spec.lease_id if one.worker.spec.submit_of else one.worker.serial,
)
ROWS = st.lists(
    st.builds(
        lambda lease_id, state, generation: KEPT._replace(
            lease_id=lease_id,
            state=state,
            cause=None if state is LeaseState.ACTIVE else Cause.FREED,
            generation=generation,
        ),
        st.sampled_from([5, 6, 7]),
        st.sampled_from([LeaseState.ACTIVE, LeaseState.DRAINING, LeaseState.FENCED]),
        st.integers(1, 5),
    ),
    max_size=3,
    unique_by=lambda kept: kept.lease_id,
)


def number_of(event: LeaseRestored | WorkerFound | SubmitFound) -> int:
    match event:
        case LeaseRestored(kept):
            return kept.lease_id
        case WorkerFound(number) | SubmitFound(number):
            return number


@given(ROWS, WORKERS)
def test_every_worker_is_told_of_once_and_no_end_is_undone(rows: list[LeaseRow], workers: list[LeftoverWorker]) -> None:
    events = decide(rows, workers)
    assert sorted(serial for _, serial in events if serial) == sorted(one.worker.serial for one in workers)
    numbers = [number_of(event) for event, _ in events]
    assert len(set(numbers)) == len(numbers)
    before = {kept.lease_id: kept for kept in rows}
    for event, _ in events:
        if isinstance(event, LeaseRestored):
            kept = before.pop(event.kept.lease_id)
            assert event.kept.generation >= kept.generation
            assert kept.state is LeaseState.ACTIVE or event.kept == kept
            assert (event.kept.deadline_ns or 0) <= max(LATEST_NS, kept.deadline_ns or 0)
    assert not before
