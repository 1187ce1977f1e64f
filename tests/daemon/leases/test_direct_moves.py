"""Direct moves: which sessions move that way, and what becomes of one that fails."""

from dataclasses import replace

import pytest

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AdoptSession,
    Effect,
    KillWorker,
    LeaseEnded,
    LeaseLeft,
    LeaseMoved,
    LeaseParked,
    LeaseRestored,
    LeaseReturned,
    LeaveSession,
    MoveRequested,
    ParkFailed,
    ParkRequested,
    ParkSession,
    ProveRegion,
    ReclaimFailed,
    ReclaimProved,
    RegionProved,
    RenameWorker,
    RequestDenied,
    RestartWorker,
    ReturnSession,
    ReturnWanted,
    RevokeRequested,
    SessionCondemned,
    SessionImaged,
    SessionMoved,
    SessionParked,
    SessionReturned,
    SessionReturnFailed,
    SessionStays,
    StaySession,
    WarmEnded,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, WarmState
from gpulease.daemon.leases.park_state import ParkDepth, ParkFailure, ParkPhase, ParkState
from gpulease.daemon.leases.quotas import CoreLimits

from .scenario import OVERHEAD, Scenario, card, denied, kinds, one

LIMITS = CoreLimits(park_memory_bytes=16 << 20, overcommit=4.0, park_stay_ms=0)
MOVE = 7
SIZE = 60


def scenario(*, are_peers: bool = True, limits: CoreLimits = LIMITS) -> Scenario:
    first, second = card(0, 200), card(1, 200)
    if are_peers:
        first, second = replace(first, peers=(second.uuid,)), replace(second, peers=(first.uuid,))
    s = Scenario(first, second, limits=limits)
    s.active(1, SIZE, park_idle_ms=0, selector="0")
    return s


def state_of(s: Scenario) -> ParkState:
    state = s.table._store.parkable[1].park
    assert state is not None
    return state


def begin(s: Scenario) -> ParkSession:
    return one(s.do(MoveRequested(MOVE, 1, "ann", "1")), ParkSession)


def leave(s: Scenario) -> list[Effect]:
    """Have the session of lease 1 parked in place, and its image sent."""
    order = begin(s)
    assert order.in_place
    effects = s.do(SessionParked(1, order.number, 50, 4, is_in_place=True))
    # Nothing has left the card, so nothing is proved or recorded as parked.
    assert not {ProveRegion, LeaseParked} & {type(effect) for effect in effects}
    assert one(effects, LeaveSession).carries
    return list(s.do(SessionImaged(1, order.number, 1000)))


def held(s: Scenario) -> list[tuple[str, WarmState]]:
    return [(context.card_uuid, context.state) for context in s.table.warming()]


def bytes_held(s: Scenario) -> tuple[int, int]:
    """Return the bytes of leases, and of workers that belong to none, on each card."""
    first, second = s.card(0), s.card(1)
    return first.held_bytes + first.warm_bytes, second.held_bytes + second.warm_bytes


def test_both_cards_are_charged_until_the_next_worker_has_the_session() -> None:
    s = scenario()
    effects = leave(s)
    one(effects, LeaseLeft)
    assert one(effects, RestartWorker).card_uuid == "GPU-b"
    assert not any(isinstance(effect, KillWorker) for effect in effects)
    assert (held(s), bytes_held(s)) == ([("GPU-a", WarmState.HELD)], (SIZE + OVERHEAD, SIZE + OVERHEAD))
    one(s.do(WorkerReady(1)), AdoptSession)
    effects = list(s.do(SessionReturned(1, state_of(s).number, 50)))
    moved = one(effects, LeaseMoved)
    assert (moved.from_uuid, moved.lease.card_uuid, moved.moved_bytes) == ("GPU-a", "GPU-b", 50)
    assert moved.why_through_host == ""
    assert one(effects, SessionMoved).request == MOVE
    # It was never parked, so it has not returned either.
    assert LeaseReturned not in kinds(effects)
    killed = one(effects, KillWorker).worker_id
    assert (held(s), state_of(s).phase) == ([("GPU-a", WarmState.DROPPING)], ParkPhase.RESIDENT)
    snapshot = s.table.parking.of(1)
    assert snapshot is not None
    assert snapshot.last_move == ""
    # The bytes on the former card are free once they are proved free.
    s.do(WorkerExited(killed, "it was killed"))
    assert bytes_held(s)[0] == SIZE + OVERHEAD
    s.do(ReclaimProved(killed))
    assert bytes_held(s) == (0, SIZE + OVERHEAD)


def test_memory_that_the_next_worker_keeps_on_the_former_card_is_granted_to_nobody() -> None:
    """A hostile worker has duplicated the descriptors that it was lent: the card never shows those bytes free."""
    s = scenario()
    leave(s)
    s.do(WorkerReady(1))
    killed = one(list(s.do(SessionReturned(1, state_of(s).number, 50))), KillWorker).worker_id
    s.do(WorkerExited(killed, "it was killed"))
    fenced = one(list(s.do(ReclaimFailed(killed, "its memory was not shown free"))), WarmEnded)
    # The reason names the lease that an operator must end before the fence can be cleared.
    assert (fenced.is_fenced, f"{1:032x}" in fenced.reason) == (True, True)
    assert (held(s), s.card(0).fenced_bytes) == ([("GPU-a", WarmState.FENCED)], SIZE + OVERHEAD)
    # Not even the end of the lease lifts the fence: an operator does.
    s.do(RevokeRequested(9, 1, "maintenance", is_operator=True))
    s.gone(1)
    assert bytes_held(s) == (SIZE + OVERHEAD, 0)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: scenario(are_peers=False), "the cards can't access each other's memory"),
        (lambda: scenario(limits=replace(LIMITS, direct_moves=False)), "direct_moves is off"),
    ],
)
def test_a_move_through_a_ring_says_why_and_its_bytes_stay_until_they_have_passed(made: object, why: str) -> None:
    s = made()  # type: ignore[operator]
    order = begin(s)
    assert order.in_place
    left = one(s.do(SessionParked(1, order.number, 50, 4, is_in_place=True)), LeaveSession)
    assert (left.in_place, left.by_ring) == (True, True)
    s.do(SessionImaged(1, order.number, 1000))
    assert (held(s), bytes_held(s)) == ([("GPU-a", WarmState.HELD)], (SIZE + OVERHEAD, SIZE + OVERHEAD))
    s.do(WorkerReady(1))
    effects = list(s.do(SessionReturned(1, state_of(s).number, 50)))
    assert one(effects, LeaseMoved).why_through_host == why
    one(effects, KillWorker)


@pytest.mark.parametrize("are_peers", [True, False])
def test_only_a_move_between_cards_that_are_no_peers_needs_a_ring(are_peers: bool) -> None:
    s = scenario(are_peers=are_peers)
    order = begin(s)
    effects = s.do(SessionParked(1, order.number, 50, 4, is_in_place=True))
    assert one(effects, LeaveSession).by_ring is not are_peers


def test_a_lease_ends_if_its_former_worker_dies_while_the_bytes_pass_through_a_ring() -> None:
    s = scenario(are_peers=False)
    order = begin(s)
    s.do(SessionParked(1, order.number, 50, 4, is_in_place=True))
    aside = one(s.do(SessionImaged(1, order.number, 1000)), RenameWorker).to_id
    s.do(WorkerReady(1))
    s.do(WorkerExited(aside, "signal 9"))
    # The next worker notices that nothing comes, and so does the one that is tried after it.
    for _ in range(2):
        s.do(SessionReturnFailed(1, state_of(s).number, "nothing comes", is_mismatch=True))
        s.do(WorkerReady(1))
    assert (s.lease(1).state.name, s.lease(1).cause) == ("DRAINING", Cause.WORKER_DIED)


def test_a_worker_that_can_not_fill_a_ring_parks_the_session() -> None:
    s = scenario(are_peers=False)
    order = begin(s)
    s.do(SessionParked(1, order.number, 50))
    left = one(s.do(RegionProved(1)), LeaveSession)
    assert (left.in_place, left.by_ring) == (False, False)


def through_host(s: Scenario, number: int, why: str) -> None:
    """Have the session of lease 1, which has its order to park, move through the host's memory."""
    s.do(SessionParked(1, number, 50))
    one(s.do(RegionProved(1)), LeaveSession)
    s.do(SessionImaged(1, number, 1000))
    s.do(WorkerReady(1))
    effects = s.do(SessionReturned(1, number, 50))
    assert why in one(effects, LeaseMoved).why_through_host
    snapshot = s.table.parking.of(1)
    assert snapshot is not None
    assert snapshot.last_move == one(effects, LeaseMoved).why_through_host


def test_a_parked_session_moves_through_the_host() -> None:
    s = scenario()
    number = one(s.do(ParkRequested(5, 1, "ann")), ParkSession).number
    s.do(SessionParked(1, number, 50))
    s.do(RegionProved(1))
    one(s.do(MoveRequested(MOVE, 1, "ann", "1")), LeaveSession)
    s.do(SessionImaged(1, number, 1000))
    s.do(WorkerReady(1))
    assert "already in host memory" in one(s.do(SessionReturned(1, number, 50)), LeaseMoved).why_through_host


def test_a_card_without_room_for_the_session_now_gets_it_through_the_host() -> None:
    s = scenario()
    s.active(2, 150, tenant="bob", selector="1")
    assert not begin(s).in_place


def misfit(s: Scenario) -> int:
    """Have lease 1 move directly to workers that it does not fit; return the number of its former worker meanwhile."""
    aside = one(leave(s), RenameWorker).to_id
    back(s, aside)
    return aside


def back(s: Scenario, aside: int) -> None:
    """Have the session not fit its next workers, and go back to its former one."""
    for _ in range(2):
        s.do(WorkerReady(1))
        effects = list(s.do(SessionReturnFailed(1, state_of(s).number, "a variable is elsewhere", is_mismatch=True)))
        if RenameWorker(aside, 1) in effects:
            break
    assert RenameWorker(aside, 1) in effects
    s.do(SessionReturned(1, state_of(s).number, 50))
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    assert (s.lease(1).state.name, s.lease(1).card_uuid, state_of(s).phase) == ("ACTIVE", "GPU-a", ParkPhase.RESIDENT)


def leave_through_host(s: Scenario) -> int:
    """Have lease 1 leave for the other card through the host; return the number of the worker that is set aside."""
    order = begin(s)
    assert not order.in_place
    s.do(SessionParked(1, order.number, 50))
    one(s.do(RegionProved(1)), LeaveSession)
    effects = list(s.do(SessionImaged(1, order.number, 1000)))
    assert KillWorker not in kinds(effects)
    return one(effects, RenameWorker).to_id


def test_a_session_that_has_fitted_no_other_worker_keeps_its_own_during_the_next_moves() -> None:
    s = scenario()
    misfit(s)
    for _ in range(2):
        # Without its former worker the lease would end here.
        back(s, leave_through_host(s))
    leave_through_host(s)
    s.do(WorkerReady(1))
    effects = list(s.do(SessionReturned(1, state_of(s).number, 50)))
    one(effects, LeaseMoved)
    one(effects, KillWorker)
    assert (s.lease(1).card_uuid, state_of(s).misfit) == ("GPU-b", "")


def test_a_session_that_has_fitted_no_other_worker_is_not_parked_cold() -> None:
    s = scenario()
    misfit(s)
    number = one(s.do(MoveRequested(MOVE, 1, "ann", None)), ParkSession).number
    s.do(SessionParked(1, number, 50))
    effects = list(s.do(RegionProved(1)))
    assert "a variable is elsewhere" in one(effects, RequestDenied).denial.message
    assert LeaveSession not in kinds(effects)
    snapshot = s.table.parking.of(1)
    assert snapshot is not None
    assert (snapshot.phase, snapshot.depth) == (ParkPhase.PARKED, ParkDepth.WARM)
    assert "a variable is elsewhere" in snapshot.stays_here


def test_each_worker_that_does_not_fit_is_reported_and_the_direct_move_once() -> None:
    s, effects = scenario(), list[Effect]()
    leave(s)
    s.do(WorkerReady(1))
    effects += s.do(SessionReturnFailed(1, state_of(s).number, "a variable is elsewhere", is_mismatch=True))
    failures = [effect.failure for effect in effects if isinstance(effect, ParkFailed)]
    assert failures == [ParkFailure.MISFIT, ParkFailure.DIRECT_MOVE]


def test_a_restarted_daemon_knows_that_a_session_has_fitted_no_other_worker() -> None:
    """Without that, it would end the session's worker for a cold park, and the lease would end with the return."""
    first = scenario()
    misfit(first)
    row = first.table.lease_row(1, 7)
    assert row is not None
    assert "a variable is elsewhere" in row.misfit
    s = Scenario(*(account.card for account in first.table._store.accounts), limits=LIMITS)
    s.now_ns = first.now_ns
    s.do(LeaseRestored(row, has_worker=True, has_session=True))
    s.do(SessionReturned(1, state_of(s).number, 0))
    number = one(s.do(MoveRequested(MOVE, 1, "ann", None)), ParkSession).number
    s.do(SessionParked(1, number, 50))
    effects = list(s.do(RegionProved(1)))
    assert "a variable is elsewhere" in one(effects, RequestDenied).denial.message
    assert LeaveSession not in kinds(effects)
    # Once another worker has continued the session, nothing is left to know.
    back(first, leave_through_host(first))
    aside = leave_through_host(first)
    first.do(WorkerReady(1))
    effects = list(first.do(SessionReturned(1, state_of(first).number, 50)))
    assert one(effects, KillWorker).worker_id == aside
    row = first.table.lease_row(1, 7)
    assert row is not None
    assert row.misfit == ""


def test_a_session_that_is_in_no_worker_any_more_has_lost_its_worker() -> None:
    """Its former worker dies during the copy, which fails then, and so does that of the next worker."""
    s = scenario()
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerReady(1))
    s.do(WorkerExited(aside, "signal 9"))
    for _ in range(2):
        effects = list(s.do(SessionReturnFailed(1, state_of(s).number, "nothing comes", is_mismatch=True)))
        s.do(WorkerReady(1))
    # It fits the other card as before, so it is no mismatch.
    assert (s.lease(1).state.name, s.lease(1).cause) == ("DRAINING", Cause.WORKER_DIED)
    assert not any(isinstance(effect, ParkFailed) and effect.failure is ParkFailure.MISMATCH for effect in effects)


def test_a_worker_that_can_not_lend_its_pages_parks_the_session_and_that_is_reported() -> None:
    s = scenario()
    order = begin(s)
    assert order.in_place
    through_host(s, order.number, "could not lend its pages")


def test_a_worker_that_was_not_ordered_to_keep_its_pages_is_not_believed() -> None:
    s = scenario()
    number = one(s.do(ParkRequested(5, 1, "ann")), ParkSession).number
    one(s.do(SessionParked(1, number, 50, is_in_place=True)), ProveRegion)


@pytest.mark.parametrize("cause", [Cause.UNRESPONSIVE, Cause.LOAD_TIMEOUT])
def test_the_former_worker_has_the_session_back_if_the_next_one_hangs(cause: Cause) -> None:
    s = scenario()
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerReady(1))
    # Whether it has the session is known once it has ended, and its last report was read.
    assert list(s.do(SessionCondemned(1, cause, "it showed no sign of life"))) == [KillWorker(1)]
    check_back(s, list(s.do(WorkerExited(1, "it was killed"))), aside, "its last direct move failed: it was killed")


def test_a_worker_that_hangs_with_the_whole_session_ends_the_lease() -> None:
    s = scenario()
    leave(s)
    s.do(WorkerReady(1))
    s.do(SessionReturned(1, state_of(s).number, 50))
    s.do(SessionCondemned(1, Cause.UNRESPONSIVE, "it showed no sign of life"))
    assert (s.lease(1).state.name, s.lease(1).cause) == ("DRAINING", Cause.UNRESPONSIVE)


def test_a_next_worker_that_takes_more_than_its_slice_ends_the_lease() -> None:
    s = scenario()
    leave(s)
    s.do(WorkerReady(1))
    s.do(SessionCondemned(1, Cause.OVER_SLICE, "9 bytes too many"))
    assert (s.lease(1).state.name, s.lease(1).cause) == ("DRAINING", Cause.OVER_SLICE)


def check_back(s: Scenario, effects: list[Effect], aside: int, why: str) -> None:
    """Check that the former worker continues the session on its own card, and that the next move avoids this way."""
    assert RenameWorker(aside, 1) in effects
    assert effects.index(RenameWorker(aside, 1)) < effects.index(StaySession(1, state_of(s).number))
    one(effects, RequestDenied)
    one(effects, ReturnSession)
    assert LeaseMoved not in kinds(effects)
    assert s.lease(1).card_uuid == "GPU-a"
    assert bytes_held(s)[0] == SIZE + OVERHEAD
    s.do(SessionReturned(1, state_of(s).number, 0))
    assert (state_of(s).phase, state_of(s).depth) == (ParkPhase.RESIDENT, ParkDepth.WARM)
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    order = begin(s)
    assert not order.in_place
    through_host(s, order.number, why)
    # What failed then need not fail again.
    for context in s.table.warming():
        s.do(WorkerExited(context.warm_id, "it was killed"))
        s.do(ReclaimProved(context.warm_id))
    assert one(s.do(MoveRequested(MOVE + 1, 1, "ann", "0")), ParkSession).in_place


@pytest.mark.parametrize("is_mismatch", [True, False])
def test_a_session_that_could_not_be_copied_is_back_in_its_former_worker(is_mismatch: bool) -> None:
    s = scenario()
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerReady(1))
    failed = SessionReturnFailed(1, state_of(s).number, "the pages can't be mapped", is_mismatch=is_mismatch)
    effects = list(s.do(failed))
    assert any(isinstance(effect, ParkFailed) for effect in effects)
    check_back(s, effects, aside, "its last direct move failed: the pages can't be mapped")


def test_a_session_is_back_in_its_former_worker_if_its_next_one_ends() -> None:
    s = scenario()
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerReady(1))
    check_back(s, list(s.do(WorkerExited(1, "it was killed"))), aside, "its last direct move failed")


def test_a_session_that_can_not_leave_is_served_again_at_once() -> None:
    s = scenario()
    order = begin(s)
    s.do(SessionParked(1, order.number, 50, is_in_place=True))
    effects = s.do(SessionStays(1, order.number, "a client is connected by a token", is_lasting=True))
    assert denied(effects).reason is DenialReason.UNSUPPORTED
    one(effects, ReturnSession)
    s.do(SessionReturned(1, order.number, 0))
    assert (state_of(s).phase, bytes_held(s)) == (ParkPhase.RESIDENT, (SIZE + OVERHEAD, 0))


def test_a_session_with_pages_that_can_not_be_lent_moves_through_the_host_next() -> None:
    s = scenario()
    order = begin(s)
    s.do(SessionParked(1, order.number, 50, is_in_place=True))
    s.do(SessionStays(1, order.number, "its pages can't be lent", is_lasting=False))
    s.do(SessionReturned(1, order.number, 0))
    order = begin(s)
    assert not order.in_place
    through_host(s, order.number, "its last direct move failed: its pages can't be lent")


def test_an_operation_during_the_move_is_served_on_the_other_card() -> None:
    s = scenario()
    order = begin(s)
    s.do(SessionParked(1, order.number, 50, is_in_place=True))
    assert s.do(ReturnWanted(1, order.number)) == []
    s.do(SessionImaged(1, order.number, 1000))
    assert s.do(ReturnWanted(1, order.number)) == []
    s.do(WorkerReady(1))
    one(s.do(SessionReturned(1, order.number, 50)), SessionMoved)


def test_a_lease_that_ends_on_its_way_takes_both_workers_along() -> None:
    s = scenario()
    leave(s)
    s.do(WorkerReady(1))
    s.do(RevokeRequested(9, 1, "maintenance", is_operator=True))
    assert held(s) == [("GPU-a", WarmState.DROPPING)]


def test_a_session_with_no_worker_left_ends_its_lease() -> None:
    s = scenario()
    aside = one(leave(s), RenameWorker).to_id
    s.do(WorkerExited(aside, "signal 9"))
    effects = s.do(WorkerExited(1, "signal 9"))
    assert denied(effects).reason is not None
    ended = [effect for effect in effects if isinstance(effect, LeaseEnded)]
    lease = s.table.get(1)
    assert ended or lease is None or lease.state.name != "ACTIVE"
