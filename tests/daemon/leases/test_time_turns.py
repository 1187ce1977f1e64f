"""Turns of sessions that saturate a card, on a card that works for one session at a time."""

import pytest

from gpulease.daemon.contract.control_page import TimeLimits
from gpulease.daemon.leases.time_account import SessionTime
from gpulease.daemon.leases.time_shares import ROUND_NS
from gpulease.daemon.leases.time_turns import MAX_PERIOD_NS, MIN_PERIOD_NS, MIN_TURN_NS, Taker, Turn, Turns

from .simulated_card import MS, US, S, SimulatedCard, SimulatedSession


def saturating(target_ns: float, *, is_capped: bool = False) -> Taker:
    time = SessionTime(busy_ns=S, more_busy_ns=ROUND_NS, is_busy=True)
    return Taker(time, target_ns, target_ns, is_capped=is_capped, is_limited=False)


def turns_of(takers: dict[int, Taker], now_ns: int = S) -> dict[int, Turn]:
    turns = Turns()
    turns.update(now_ns, ROUND_NS, ROUND_NS, takers)
    return {session: turns[session] for session in takers if session in turns}


@pytest.mark.parametrize("kernel_ns", [20 * US, 200 * US, 2 * MS])
@pytest.mark.parametrize("weights", [(1, 3), (2, 3, 5), (1, 9)])
def test_kernels_get_the_time_that_weights_say(kernel_ns: int, weights: tuple[int, ...]) -> None:
    sessions = [SimulatedSession(f"t{at}", weight, kernel_ns) for at, weight in enumerate(weights)]
    card = SimulatedCard(*sessions, is_sliced=True)
    card.run(0.3)
    found = card.run(2.0)
    assert [got / sum(found) for got in found] == pytest.approx([one / sum(weights) for one in weights], rel=0.08)
    # Changes from one session to another are rarer than the driver's own.
    assert sum(found) >= 2 * S * 0.93


def test_turns_follow_each_other_and_fill_the_period() -> None:
    found = turns_of({1: saturating(1 * MS), 2: saturating(3 * MS), 3: saturating(6 * MS)})
    assert found[1].begin_ns + found[1].length_ns == found[2].begin_ns
    assert found[2].begin_ns + found[2].length_ns == found[3].begin_ns
    assert sum(turn.length_ns for turn in found.values()) == found[1].period_ns
    assert found[1].length_ns >= MIN_TURN_NS
    # The shortest turn is long enough where the period may be.
    assert turns_of({1: saturating(1.0), 2: saturating(1e6)})[1].period_ns == MAX_PERIOD_NS
    assert turns_of({1: saturating(1e6), 2: saturating(1e6)})[1].period_ns == MIN_PERIOD_NS


def test_a_capped_session_s_turn_is_its_cap_and_the_rest_is_the_others() -> None:
    found = turns_of({1: saturating(0.3 * ROUND_NS, is_capped=True), 2: saturating(1.0)})
    assert found[1].length_ns == pytest.approx(0.3 * MIN_PERIOD_NS, rel=0.03)
    assert found[2].length_ns == pytest.approx(0.7 * MIN_PERIOD_NS, rel=0.03)


def test_one_session_alone_takes_no_turns_nor_does_one_that_pauses() -> None:
    pausing = saturating(MS)._replace(time=SessionTime(busy_ns=S, more_busy_ns=ROUND_NS // 2))
    assert not turns_of({1: saturating(MS)})
    assert not turns_of({1: saturating(MS), 2: pausing})


def test_a_debt_that_all_have_leaves_nobody_without_a_turn() -> None:
    owing = saturating(MS)._replace(target_ns=0.0)
    found = turns_of({1: owing, 2: owing})
    assert found[1].length_ns == pytest.approx(found[2].length_ns, rel=0.01)


def test_how_much_of_its_turns_lies_between_two_times() -> None:
    turn = Turn(begin_ns=100, length_ns=30, period_ns=50)
    assert turn.time_between(100, 150) == 30
    assert turn.time_between(120, 160) == 20
    assert turn.time_between(135, 145) == 0
    assert turn.time_between(60, 200) == 20 + 60


@pytest.mark.parametrize(("idle_ns", "goes_on"), [(100 * US, True), (2 * MS, False)])
def test_a_client_s_wait_before_its_first_turn_does_not_cost_it_its_turns(idle_ns: int, goes_on: bool) -> None:
    turns = Turns()
    takers = {1: saturating(1 * MS), 2: saturating(1 * MS)}
    # The first session waits for its turn in the next period, and its limits are renewed as that begins.
    begin_ns, more_ns = S - S % MIN_PERIOD_NS + 12 * MS, 8100 * US
    turns.update(begin_ns, ROUND_NS, ROUND_NS, takers)
    waited = SessionTime(busy_ns=S, held_ns=more_ns - idle_ns, more_busy_ns=1, more_held_ns=ROUND_NS)
    used = SessionTime(busy_ns=S + more_ns, more_busy_ns=ROUND_NS, is_busy=True)
    takers = {1: takers[1]._replace(time=waited, is_limited=True), 2: takers[2]._replace(time=used)}
    turns.update(begin_ns + more_ns, ROUND_NS, ROUND_NS, takers)
    assert (1 in turns) is goes_on


def test_turns_end_soon_after_a_session_stops() -> None:
    stopping = SimulatedSession("ann", stops_ns=S + S // 2)
    card = SimulatedCard(stopping, SimulatedSession("bob"))
    card.run(0.45)
    assert card.sessions[1].limits.turn_ns
    card.run(0.15)
    assert card.sessions[1].limits == TimeLimits()
    assert card.run(0.5)[1] == pytest.approx(0.5 * S, rel=0.01)


def test_a_kernel_longer_than_every_turn_is_begun_and_paid_for() -> None:
    card = SimulatedCard(SimulatedSession("ann", 1, 300 * MS), SimulatedSession("bob", 1))
    card.run(0.3)
    assert card.run(5.0) == pytest.approx([2.5 * S, 2.5 * S], rel=0.07)
