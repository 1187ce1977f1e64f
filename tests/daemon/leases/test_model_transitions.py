"""The transition table, exhaustively, and proof that the invariants can fail."""

import pytest

from gpulease.daemon.leases import (
    TRANSITIONS,
    Cause,
    CoreLimits,
    InvalidTransition,
    InvariantBroken,
    LeaseState,
    LeaseTerms,
    RenewRequested,
    Trigger,
)
from gpulease.daemon.leases.model import Lease

from .scenario import Scenario, card

TRIGGERS: list[Trigger | Cause] = [*Trigger, *Cause]


def lease_in(state: LeaseState) -> Lease:
    lease = Lease(1, "ann", "GPU-a", LeaseTerms(20, 1000), 30, 1, 0, 60, 64)
    lease.state = state
    return lease


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("state", LeaseState)
def test_a_step_missing_from_the_table_raises_and_changes_nothing(state: LeaseState, trigger: Trigger | Cause) -> None:
    lease = lease_in(state)
    finish = TRANSITIONS.get((state, trigger))
    if finish is None:
        with pytest.raises(InvalidTransition, match=trigger.value):
            lease.move(trigger, 5)
        assert (lease.state, lease.history) == (state, [])
    else:
        lease.move(trigger, 5)
        assert (lease.state, len(lease.history)) == (finish, 1)


def test_no_step_leads_back() -> None:
    order = list(LeaseState)
    for (start, _), finish in TRANSITIONS.items():
        assert order.index(finish) >= order.index(start) or (start, finish) == (
            LeaseState.FENCED,
            LeaseState.TORNDOWN,
        )
    assert all(start is not LeaseState.TORNDOWN for start, _ in TRANSITIONS)
    assert {finish for (_, t), finish in TRANSITIONS.items() if isinstance(t, Cause)} == {LeaseState.DRAINING}


def test_every_cause_can_end_a_lease() -> None:
    assert {trigger for _, trigger in TRANSITIONS if isinstance(trigger, Cause)} == set(Cause)


def test_an_invalid_transition_tells_the_whole_history() -> None:
    lease = lease_in(LeaseState.PENDING)
    lease.move(Trigger.WORKER_READY, 7)
    with pytest.raises(InvalidTransition) as raised:
        lease.move(Trigger.WORKER_READY, 8)
    assert "7 ns: pending -> active by worker_ready (generation 1)" in str(raised.value)
    assert raised.value.history == tuple(lease.history)


def test_a_history_is_bounded() -> None:
    s = Scenario(limits=CoreLimits(max_story_entries=5))
    s.active(1)
    for _ in range(20):
        s.do(RenewRequested(1, 1, "ann", 1000))
    story = s.table.history(1)
    assert [entry.generation for entry in story] == [17, 18, 19, 20, 21]
    assert s.table.history(2) == ()


def test_validate_finds_bytes_that_were_miscounted() -> None:
    s = Scenario(card(0))
    s.active(1)
    s.table._store.accounts[0].held_bytes -= 1
    with pytest.raises(InvariantBroken, match="counts 29 bytes held, its leases 30"):
        s.table.validate()


def test_validate_finds_a_lease_on_no_card() -> None:
    s = Scenario()
    s.active(1)
    s.table._store.live[1].card_uuid = "GPU-z"
    with pytest.raises(InvariantBroken, match="which is not here"):
        s.table.validate()


def test_validate_finds_a_waiter_that_was_forgotten() -> None:
    s = Scenario()
    s.active(1, 100)
    s.acquire(2, 50, wait_ms=1000)
    book = s.table._store
    book.accounts[0].give_back(book.live.pop(1))
    book.live_by_tenant.clear()
    book.bytes_by_tenant.clear()
    with pytest.raises(InvariantBroken, match="could be placed"):
        s.table.validate()
