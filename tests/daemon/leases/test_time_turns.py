"""Turns of sessions that saturate a card, on a card that works for one session at a time."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import TimeLimits
from gpulease.daemon.leases.time_account import SessionTime
from gpulease.daemon.leases.time_turns import (
    MAX_PERIOD_NS,
    MIN_PERIOD_NS,
    MIN_TURN_NS,
    ROUND_NS,
    Bar,
    Taker,
    Turns,
    TurnSchedule,
)

from .simulated_card import MS, US, S, SimulatedCard, SimulatedSession


def saturating(target_ns: float, *, is_capped: bool = False) -> Taker:
    time = SessionTime(busy_ns=S, more_busy_ns=ROUND_NS, is_busy=True)
    return Taker(time, target_ns, target_ns, is_capped=is_capped, is_limited=False)


def turns_of(takers: dict[int, Taker], now_ns: int = S) -> dict[int, TurnSchedule]:
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


def waiting(tenant: str, weight: int, kernel_ns: int, seed: int, *, lateness: float = 0.0) -> SimulatedSession:
    """Return a session as on a card: a client that waits for each batch, and is back a millisecond later."""
    random = Random(seed)
    pause_ns = random.randrange(MS // 2, 3 * MS // 2)
    return SimulatedSession(tenant, weight, kernel_ns, pause_ns, batch_ns=25 * MS, lateness=lateness, random=random)


@pytest.mark.parametrize("lateness", [0.05, pytest.param(0.0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernel_ns", [20 * US, 200 * US])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_weights_hold_for_clients_that_wait_between_batches(kernel_ns: int, seed: int, lateness: float) -> None:
    sessions = [
        waiting(f"t{at}", weight, kernel_ns, 10 * seed + at, lateness=lateness) for at, weight in ((1, 1), (2, 3))
    ]
    card = SimulatedCard(*sessions, is_sliced=True, seed=seed)
    card.run(0.5)
    for _ in range(2):
        least, most = card.run(1.0)
        assert most / least == pytest.approx(3.0, rel=0.05)
        assert least + most >= 0.9 * S


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (2, 3, 4))])
@pytest.mark.parametrize("lateness", [0.2, pytest.param(0.0, marks=pytest.mark.exhaustive)])
def test_six_tenants_with_kernels_of_all_lengths_and_clients_that_wait_get_the_same(seed: int, lateness: float) -> None:
    lengths = (20 * US, 50 * US, 100 * US, 200 * US, 500 * US, 1 * MS)
    sessions = [waiting(f"t{ns}", 2, ns, 10 * seed + at, lateness=lateness) for at, ns in enumerate(lengths)]
    card = SimulatedCard(*sessions, is_sliced=True, seed=seed)
    card.run(0.5)
    found = card.run(1.0)
    assert sum(found) ** 2 / (len(found) * sum(got**2 for got in found)) >= 0.98


# Clients that wait for each batch and are back soon, on workers that may wake late.
WAITING = st.builds(
    SimulatedSession,
    weight=st.integers(1, 5),
    kernel_ns=st.sampled_from([20 * US, 200 * US, 1 * MS]),
    pause_ns=st.integers(150 * US, 2 * MS),
    batch_ns=st.sampled_from([25 * MS, 60 * MS]),
    lateness=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(st.lists(WAITING, min_size=2, max_size=5))
def test_clients_that_wait_get_their_parts_and_the_card_is_not_idle(mix: list[SimulatedSession]) -> None:
    def card() -> SimulatedCard:
        sessions = [replace(one, tenant=f"t{at}", random=Random(at)) for at, one in enumerate(mix)]
        return SimulatedCard(*sessions, is_sliced=True)

    limited, free = card(), card()
    # What was queued before the turns began is paid back first.
    limited.run(2.0)
    found = limited.run(1.0)
    free.run(0.3, limits=False)
    assert sum(found) >= sum(free.run(1.0, limits=False)) * 0.9
    for one, got in zip(mix, found, strict=True):
        assert got / S >= one.weight / sum(other.weight for other in mix) * 0.75


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
    schedule = TurnSchedule(begin_ns=100, length_ns=30, period_ns=50)
    assert schedule.time_between(100, 150) == 30
    assert schedule.time_between(120, 160) == 20
    assert schedule.time_between(135, 145) == 0
    assert schedule.time_between(60, 200) == 20 + 60


class Periods:
    """Two sessions with turns of 10 ms each, and what the first one does with its own."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.now_ns = S
        self._times = [SessionTime(busy_ns=S), SessionTime(busy_ns=S)]
        self.update(MIN_PERIOD_NS)
        self.now_ns = self.turns[1].begin_ns

    def update(self, busy_ns: int, held_ns: int = 0) -> list[Bar]:
        """Let a period pass. Returns who lost its turns because of it."""
        self._times[0].busy_ns += busy_ns
        self._times[0].held_ns += held_ns
        self._times[1].busy_ns += MIN_PERIOD_NS // 2
        self._times[1].held_ns += MIN_PERIOD_NS // 2
        for time, more_ns in zip(self._times, (busy_ns, MIN_PERIOD_NS), strict=True):
            time.more_busy_ns = more_ns
        self.now_ns += MIN_PERIOD_NS
        takers = {
            number: Taker(time, MS, MS, is_capped=False, is_limited=True) for number, time in enumerate(self._times, 1)
        }
        self.turns.update(self.now_ns, MIN_PERIOD_NS, MIN_PERIOD_NS, takers)
        return self.turns.bars


def test_gaps_of_a_client_and_late_wakes_cost_no_turns() -> None:
    periods = Periods()
    for _ in range(100):
        # A client that has nothing to launch for 1 ms each time.
        assert not periods.update(9 * MS, 10 * MS)
    # A worker that wakes late now and then, and one whole turn in which it did not run.
    for _ in range(10):
        assert not periods.update(2 * MS, 18 * MS)
        assert not periods.update(9 * MS, 10 * MS)
        assert not periods.update(10 * MS, 10 * MS)
    assert not periods.update(0, 20 * MS)
    assert len(periods.turns) == 2


def test_what_is_idle_next_to_its_turns_costs_nothing() -> None:
    periods = Periods()
    for _ in range(20):
        assert not periods.update(10 * MS)


def test_a_session_that_leaves_its_turns_unused_loses_them_for_longer_each_time() -> None:
    periods = Periods()
    lengths, begun_ns = [], 0
    for _ in range(500):
        bars = periods.update(0 if len(periods.turns) else 20 * MS)
        lengths += [bar.bar_ns for bar in bars]
        begun_ns = begun_ns or (periods.now_ns if bars else 0)
        assert all(bar.session == 1 and bar.due_ns == 10 * MS and not bar.busy_ns for bar in bars)
    assert lengths[:5] == [200 * MS, 400 * MS, 800 * MS, 1600 * MS, 2 * S]
    # The first time after two periods.
    assert begun_ns <= S + 4 * MIN_PERIOD_NS


def test_a_session_that_uses_its_turns_again_is_forgiven() -> None:
    periods = Periods()
    while not periods.update(0):
        pass
    for _ in range(100):
        periods.update(20 * MS if len(periods.turns) < 2 else 10 * MS, 10 * MS)
    assert len(periods.turns) == 2
    bars: list[Bar] = []
    while not bars:
        bars = periods.update(0)
    assert [bar.bar_ns for bar in bars] == [200 * MS]


def test_rounds_end_with_the_periods() -> None:
    periods = Periods()
    # 20 ms of a period are two rounds, however late the first one was.
    assert periods.turns.next_round_ns(periods.now_ns + MS // 2) == pytest.approx(periods.now_ns + 10.25 * MS, abs=2)
    assert periods.turns.next_round_ns(periods.now_ns + 11 * MS) == periods.now_ns + 20 * MS
    assert Turns().next_round_ns(S) == S + ROUND_NS


def test_a_period_begins_where_the_one_before_ended() -> None:
    """If another length moved all turns, some would get two at once and some none."""
    turns = Turns()
    now_ns = S
    turns.update(now_ns, ROUND_NS, ROUND_NS, {1: saturating(1 * MS), 2: saturating(3 * MS)})
    for at, part in enumerate((1.0, 0.9, 1.1, 0.8), 2):
        end_ns = turns[1].begin_ns + turns[1].period_ns
        time = SessionTime(busy_ns=at * S, held_ns=at * S, more_busy_ns=ROUND_NS)
        takers = {one: saturating(share * MS)._replace(time=time) for one, share in ((1, part), (2, 3.0))}
        turns.update(end_ns + MS, ROUND_NS, ROUND_NS, takers)
        assert turns[1].begin_ns == end_ns


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
