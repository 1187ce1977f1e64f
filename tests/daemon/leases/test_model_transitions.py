"""The transition table, exhaustively, and proof that the invariants can fail."""

import pytest

from gpulease.daemon.leases.events import RenewRequested, RevokeRequested
from gpulease.daemon.leases.invariants import InvariantBroken
from gpulease.daemon.leases.model import (
    REGION_TRANSITIONS,
    TRANSITIONS,
    Cause,
    InvalidTransition,
    Lease,
    LeaseState,
    LeaseTerms,
    RegionState,
    TableRegion,
    Trigger,
)
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.protocol.opcodes import Exclusivity

from .scenario import Scenario, card

TRIGGERS: list[Trigger | Cause] = [*Trigger, *Cause]


def lease_in(state: LeaseState) -> Lease:
    lease = Lease(1, "ann", "GPU-a", LeaseTerms(20, 1000), 30, 1, 0, 60, 64)
    lease.state = state
    return lease


def region_in(state: RegionState) -> TableRegion:
    region = TableRegion(1, 2, "ann", "GPU-a", Exclusivity.SHARED, 20, 1000, 0, 1, 1, 0, 60, 64)
    region.state = state
    return region


@pytest.mark.parametrize("state", LeaseState)
def test_a_step_missing_from_the_table_raises_and_changes_nothing(state: LeaseState) -> None:
    for trigger in TRIGGERS:
        lease = lease_in(state)
        finish = TRANSITIONS.get((state, trigger))
        if finish is None:
            with pytest.raises(InvalidTransition, match=trigger.value):
                lease.move(trigger, 5)
            assert (lease.state, lease.history) == (state, [])
        else:
            lease.move(trigger, 5)
            assert (lease.state, len(lease.history)) == (finish, 1), trigger


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


@pytest.mark.parametrize("state", RegionState)
def test_a_region_takes_no_step_that_is_missing_from_its_table(state: RegionState) -> None:
    for trigger in TRIGGERS:
        region = region_in(state)
        finish = REGION_TRANSITIONS.get((state, trigger))
        if finish is None:
            with pytest.raises(InvalidTransition, match=trigger.value):
                region.move(trigger, 5)
            assert (region.state, region.history) == (state, [])
        else:
            region.move(trigger, 5)
            assert (region.state, len(region.history)) == (finish, 1), trigger


def test_no_step_of_a_region_leads_back() -> None:
    ends = (RegionState.REVOKED, RegionState.EXPIRED, RegionState.FREED)
    order = {RegionState.OPENING: 0, RegionState.ACTIVE: 1, RegionState.FENCED: 3, RegionState.RETURNED: 4}
    order |= dict.fromkeys(ends, 2)
    for (start, trigger), finish in REGION_TRANSITIONS.items():
        assert order[finish] > order[start] or trigger is Trigger.RENEWED
    assert {finish for (_, t), finish in REGION_TRANSITIONS.items() if isinstance(t, Cause)} == set(ends)


def test_every_cause_can_end_a_region_that_opens() -> None:
    assert {t for s, t in REGION_TRANSITIONS if s is RegionState.OPENING} == {*Cause, Trigger.REGION_OPENED}


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


def test_validate_finds_bytes_of_regions_that_were_miscounted() -> None:
    s = Scenario()
    s.active(1)
    s.region(2)
    s.table._store.live[1].region_bytes -= 1
    with pytest.raises(InvariantBroken, match="counts 3 bytes of regions, not 4"):
        s.table.validate()


def test_validate_finds_a_region_that_outlives_its_lease() -> None:
    s = Scenario()
    s.active(1)
    s.region(2)
    s.do(RevokeRequested(9, 1, "because"))
    s.table._store.regions[2].state = RegionState.ACTIVE
    with pytest.raises(InvariantBroken, match="continues, and its lease is draining"):
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
