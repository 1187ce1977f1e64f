"""The shares of a card's time, on a simulated card that gives every busy session the same."""

import random
from dataclasses import replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import TimeClaims, TimeLimits
from gpulease.daemon.leases.time_account import SessionTime
from gpulease.daemon.leases.time_shares import LAPSE_NS, SharedSession, TimeShares, busy_times, fill
from gpulease.daemon.leases.time_turns import ROUND_NS

from .simulated_card import MS, US, Relay, S, SimulatedCard, SimulatedSession

WARM_UP_S = 0.3


def shares_of(*sessions: SimulatedSession, caps: dict[str, float] | None = None, seconds: float = 1.0) -> list[float]:
    """Return the part of the card that each session gets, after a moment to settle."""
    card = SimulatedCard(*sessions, caps=caps)
    card.run(WARM_UP_S)
    return [got / S / seconds for got in card.run(seconds)]


@pytest.mark.parametrize("kernel_ns", [20 * US, 200 * US, 2 * MS])
def test_two_saturating_tenants_share_by_their_weights(kernel_ns: int) -> None:
    found = shares_of(SimulatedSession("ann", 1, kernel_ns), SimulatedSession("bob", 3, kernel_ns), seconds=1.0)
    assert found == pytest.approx([0.25, 0.75], rel=0.05)


@pytest.mark.parametrize("pause_ns", [0, 25 * MS])
@pytest.mark.parametrize("kernel_ns", [50 * MS, 300 * MS, 900 * MS])
def test_a_kernel_that_is_longer_than_its_part_is_paid_back_whether_its_session_pauses_or_not(
    kernel_ns: int, pause_ns: int
) -> None:
    """Next to a running kernel the driver gives each of the two one half."""
    long = SimulatedSession("eve", 1, kernel_ns, pause_ns=pause_ns)
    found = shares_of(long, SimulatedSession("bob", 3, 200 * US), seconds=10.0)
    assert found == pytest.approx([0.25, 0.75], rel=0.05)


@pytest.mark.parametrize("kernel_ns", [50 * MS, 300 * MS])
def test_a_cap_holds_for_a_session_that_pauses_after_each_long_kernel(kernel_ns: int) -> None:
    card = SimulatedCard(SimulatedSession("eve", 1, kernel_ns, pause_ns=25 * MS), caps={"eve": 0.3}, by_weights=False)
    card.run(WARM_UP_S)
    assert card.run(10.0)[0] / S / 10.0 <= 0.3 * 1.05


def test_a_debt_holds_nobody_back_while_no_other_session_wants_the_card() -> None:
    other = SimulatedSession("bob", 3, 200 * US, stops_ns=2 * S)
    card = SimulatedCard(SimulatedSession("eve", 1, 900 * MS, pause_ns=25 * MS), other)
    card.run(1.1)
    assert card.run(2.0)[0] / S / 2.0 >= 0.95


def test_a_cap_holds_alone_and_beside_another() -> None:
    assert shares_of(SimulatedSession("ann"), caps={"ann": 0.3}) == pytest.approx([0.3], rel=0.03)
    both = shares_of(SimulatedSession("ann"), SimulatedSession("bob"), caps={"ann": 0.3})
    assert both == pytest.approx([0.3, 0.7], rel=0.03)


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_cap_holds_on_a_card_that_works_for_one_at_a_time(others: int) -> None:
    sessions = [SimulatedSession("ann", 1, 50 * US), *(SimulatedSession(f"t{at}", 1, 50 * US) for at in range(others))]
    card = SimulatedCard(*sessions, caps={"ann": 0.3}, is_sliced=True, by_weights=False)
    card.run(WARM_UP_S)
    capped, *rest = (got / S for got in card.run(1.0))
    # The driver would give it no more next to three others, so it must not get more from turns.
    assert capped == pytest.approx(min(0.3, 0.93 / (1 + others)), rel=0.03)
    assert rest == pytest.approx([(sum(rest)) / others] * others, rel=0.03)
    assert capped + sum(rest) >= 0.93


def test_next_to_a_cap_nobody_takes_turns_while_another_session_pauses() -> None:
    sessions = [SimulatedSession("ann"), SimulatedSession("bob"), SimulatedSession("eve", 1, 3 * MS, pause_ns=1 * MS)]
    card = SimulatedCard(*sessions, caps={"ann": 0.2}, is_sliced=True, by_weights=False)
    card.run(WARM_UP_S)
    capped, steady, _ = (got / S for got in card.run(1.0))
    assert steady > capped
    assert not sessions[1].limits.turn_ns


def test_a_tenant_below_its_cap_leaves_the_others_without_turns() -> None:
    quiet, loud = SimulatedSession("ann", 1, 20 * US, pause_ns=2 * MS), SimulatedSession("bob")
    card = SimulatedCard(quiet, loud, SimulatedSession("eve"), caps={"ann": 0.3}, is_sliced=True, by_weights=False)
    card.run(0.5)
    assert not loud.limits.turn_ns


def test_six_tenants_with_kernels_of_all_lengths_get_the_same() -> None:
    lengths = (20 * US, 50 * US, 200 * US, 1 * MS, 2 * MS, 5 * MS)
    found = shares_of(*(SimulatedSession(f"t{length}", 1, length) for length in lengths), seconds=2.0)
    jain = sum(found) ** 2 / (len(found) * sum(share**2 for share in found))
    assert jain >= 0.98


def test_a_tenant_that_splits_its_work_gets_no_more() -> None:
    ann = [SimulatedSession("ann", kernel_ns=10 * US) for _ in range(7)]
    found = shares_of(*ann, SimulatedSession("bob", kernel_ns=200 * US))
    assert sum(found[:7]) == pytest.approx(0.5, rel=0.05)
    # It may divide its own part by weights, which its other leases pay for.
    found = shares_of(SimulatedSession("ann", 3), SimulatedSession("ann", 1), SimulatedSession("bob", 3))
    assert found == pytest.approx([0.375, 0.125, 0.5], rel=0.06)


ADVERSARY = st.lists(
    st.builds(
        SimulatedSession,
        st.just("eve"),
        st.integers(1, 3),
        st.sampled_from([10 * US, 20 * US, 200 * US, 1 * MS]),
        pause_ns=st.sampled_from([0, 0, 1 * MS]),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@example([SimulatedSession("eve", 1, 10 * US)] * 8, 1)
@example([SimulatedSession("eve", 1, 20 * US, pause_ns=1 * MS)] * 8, 2)
@given(ADVERSARY, st.integers(1, 4))
def test_no_number_of_streams_leases_and_tiny_kernels_gets_more_than_the_weight(
    adversary: list[SimulatedSession], other: int
) -> None:
    sessions = [replace(one) for one in adversary]
    found = shares_of(*sessions, SimulatedSession("bob", other, 200 * US))
    weight = max(one.weight for one in sessions)
    assert sum(found[:-1]) <= weight / (weight + other) * 1.1
    # What it leaves is the other's.
    assert sum(found) >= 0.97


@pytest.mark.parametrize(("sessions", "kernel_ns"), [(2, 100 * US), (4, 100 * US), (8, 300 * US), (4, 1 * MS)])
def test_sessions_that_are_busy_one_after_the_other_hide_little_of_their_time(sessions: int, kernel_ns: int) -> None:
    """Samples of 10 ms alone would let them have a quarter more than their tenant's part."""
    eve = [SimulatedSession("eve", 1, kernel_ns, pause_ns=1) for _ in range(sessions)]
    card = SimulatedCard(*eve, SimulatedSession("bob", 5), relay=Relay(*eve))
    card.run(WARM_UP_S)
    assert sum(card.run(1.0)[:-1]) / S <= 1 / 6 * 1.2


def test_sessions_that_begin_together_are_not_charged_for_much_more_than_they_get() -> None:
    eve = [SimulatedSession("eve", 1, 200 * US, pause_ns=1 * MS) for _ in range(2)]
    assert sum(shares_of(SimulatedSession("bob", 5), *eve)[1:]) >= 1 / 6 * 0.92


def test_one_tenant_s_leases_share_by_weight_while_it_is_alone() -> None:
    assert shares_of(SimulatedSession("ann", 1), SimulatedSession("ann", 3)) == pytest.approx([0.25, 0.75], rel=0.05)


def test_a_session_alone_with_a_weight_has_no_limit() -> None:
    card = SimulatedCard(SimulatedSession("ann", 5))
    card.run(WARM_UP_S)
    assert card.sessions[0].limits == TimeLimits()


def test_what_one_does_not_want_is_the_others() -> None:
    # Alone, the second one would use a fifth of the card.
    found = shares_of(SimulatedSession("ann", 1), SimulatedSession("bob", 3, 1 * MS, pause_ns=4 * MS))
    assert sum(found) >= 0.98
    assert found[1] >= 0.16


def test_a_latency_session_goes_first_within_its_part() -> None:
    latency = SimulatedSession("bob", 1, 1 * MS, pause_ns=1 * MS, latency_word=0)
    found = shares_of(SimulatedSession("ann", 1), latency)
    # It gets what it gets alone, and the other has the rest.
    assert found[1] == pytest.approx(0.5, rel=0.06)
    assert sum(found) >= 0.95
    saturating = SimulatedSession("bob", 1, 1 * MS, latency_word=0)
    assert shares_of(SimulatedSession("ann", 1), saturating, seconds=2.0) == pytest.approx([0.5, 0.5], rel=0.05)


def test_while_a_latency_session_is_open_the_others_queues_are_bounded() -> None:
    card = SimulatedCard(SimulatedSession("ann"), SimulatedSession("bob", latency_word=2, starts_ns=1 << 62))
    card.run(WARM_UP_S)
    ordinary, latency = (one.limits for one in card.sessions)
    assert ordinary.latency_mask == 0b100
    assert ordinary.queue_bound_ns
    assert ordinary.latency_patience_ns
    assert not ordinary.allowance_ns
    # It does not wait for itself.
    assert latency == TimeLimits()


def test_limits_lapse_without_another_round() -> None:
    shares, time = TimeShares(), SessionTime(busy_ns=S, more_busy_ns=ROUND_NS, more_gpu_ns=ROUND_NS, is_busy=True)
    (limits,) = shares.limits(
        5 * S, ROUND_NS, [SharedSession(1, "ann", 1, None, time)], {"ann": 1}, {"ann": 0.1}, ROUND_NS
    ).values()
    assert limits.allowance_ns > S
    assert limits.until_ns == 5 * S + LAPSE_NS


# --- workers that lie, and workers that are dead ---


def hoard(claims: TimeClaims) -> TimeClaims:
    """Claim to be held back all the time, without ever using the card."""
    return TimeClaims(0, 0, 0, 1)


def never_busy(claims: TimeClaims) -> TimeClaims:
    return claims._replace(busy_ns=0, busy_since_ns=0, last_busy_from_ns=0, last_busy_until_ns=0)


def always_busy(claims: TimeClaims) -> TimeClaims:
    return claims._replace(busy_since_ns=1)


@pytest.mark.parametrize("lie", [hoard, always_busy])
def test_a_worker_that_wants_what_it_does_not_use_takes_no_more_than_its_part(lie: object) -> None:
    liar = SimulatedSession("eve", 1, starts_ns=1 << 62, lie=lie)  # type: ignore[arg-type]
    found = shares_of(liar, SimulatedSession("ann", 1), SimulatedSession("bob", 1))
    assert all(share >= 1 / 3 * 0.95 for share in found[1:])


def test_a_worker_that_only_claims_to_be_held_back_takes_nothing() -> None:
    liar = SimulatedSession("eve", 3, starts_ns=1 << 62, lie=hoard)
    assert shares_of(liar, SimulatedSession("ann", 1)) == pytest.approx([0, 1.0], abs=0.02)


def test_a_worker_that_claims_to_be_idle_gets_what_the_driver_gives_it_and_no_more() -> None:
    liar = SimulatedSession("eve", 1, lie=never_busy)
    found = shares_of(liar, SimulatedSession("ann", 1), SimulatedSession("bob", 1))
    # The driver gives it half of the time, because the others take turns; they get the same.
    assert found == pytest.approx([0.5, 0.25, 0.25], rel=0.05)


def test_a_worker_that_dies_while_it_waits_keeps_no_turns() -> None:
    dead = SimulatedSession("eve", 3, stops_ns=S + S // 2, lie=lambda claims: claims._replace(held_back_since_ns=1))
    other = SimulatedSession("bob", 1)
    card = SimulatedCard(dead, other, is_sliced=True)
    card.run(0.45)
    assert other.limits.turn_ns
    card.run(0.25)
    assert card.run(0.5)[1] >= 0.97 * 0.5 * S


def test_a_session_that_wastes_its_turns_on_purpose_wastes_its_own_part() -> None:
    # As much as it can without losing them: idle for a part of each turn.
    wasting = SimulatedSession("eve", 1, 1 * MS, pause_ns=2 * MS, batch_ns=10 * MS)
    card = SimulatedCard(wasting, SimulatedSession("ann"), SimulatedSession("bob"), is_sliced=True)
    card.run(0.5)
    found = card.run(2.0)
    assert all(got >= 2 * S / 3 * 0.93 for got in found[1:])


# --- any sessions ---

# A session that saturates the card next to siblings that want less than their parts of the tenant's.
SATURATING_AND_PAUSING_SIBLINGS = [
    SimulatedSession("eve", 4, 3 * MS, pause_ns=1 * MS),
    SimulatedSession("ann", 2, 20 * US),
    SimulatedSession("eve", 3, 3 * MS),
    SimulatedSession("ann", 3, 1 * MS, pause_ns=7 * MS),
    SimulatedSession("ann", 2, 1 * MS, pause_ns=7 * MS),
]


# Siblings with credits among each other while their tenant is in debt; the last one's kernel is longer than
# its turn.
SIBLINGS_IN_DEBT = [
    SimulatedSession("eve", 5, 1 * MS),
    SimulatedSession("eve", 3, 3 * MS, pause_ns=1 * MS),
    SimulatedSession("bob", 4, 3 * MS),
    SimulatedSession("ann", 2, 20 * US),
    SimulatedSession("eve", 1, 3 * MS),
]

SESSIONS = st.builds(
    SimulatedSession,
    st.sampled_from(["ann", "bob", "eve"]),
    st.integers(1, 5),
    st.sampled_from([20 * US, 200 * US, 1 * MS, 3 * MS]),
    pause_ns=st.sampled_from([0, 0, 1 * MS, 7 * MS]),
)
MIXES = st.lists(SESSIONS, min_size=1, max_size=5)

# Debts to tenants that pause, and rounds with and without idle time that alternate.
HEAVY_AND_PAUSING = [
    SimulatedSession("ann", 1, 3 * MS, pause_ns=1 * MS),
    SimulatedSession("bob", 1, 3 * MS),
    SimulatedSession("eve", 5, 3 * MS, pause_ns=7 * MS),
    SimulatedSession("eve", 5, 3 * MS, pause_ns=7 * MS),
]


# Of the mixes that were tried, the card is idle for longest between the turns of these siblings: 11 %.
PAUSING_SIBLINGS = [
    SimulatedSession("bob", 3, 3 * MS, pause_ns=1 * MS),
    SimulatedSession("bob", 4, 3 * MS, pause_ns=1 * MS),
    SimulatedSession("bob", 4, 200 * US),
    SimulatedSession("bob", 4, 200 * US),
    SimulatedSession("bob", 1, 3 * MS),
]


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@example(HEAVY_AND_PAUSING)
@example(PAUSING_SIBLINGS)
@given(MIXES)
def test_the_card_is_never_idle_while_somebody_wants_it(mix: list[SimulatedSession]) -> None:
    limited = sum(shares_of(*(replace(one) for one in mix)))
    free = SimulatedCard(*(replace(one) for one in mix))
    free.run(WARM_UP_S, limits=False)
    assert limited >= sum(free.run(1.0, limits=False)) / S * 0.85


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@example(SATURATING_AND_PAUSING_SIBLINGS)
@example(SIBLINGS_IN_DEBT)
@example([SimulatedSession("bob", 5), *[SimulatedSession("eve", 1, 200 * US, pause_ns=1 * MS)] * 2])
@given(MIXES)
def test_every_tenant_gets_its_part_or_what_it_wants(mix: list[SimulatedSession]) -> None:
    check_parts(mix)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "last"), [(0, 30), (30, 80), pytest.param(80, 200, marks=pytest.mark.slow)])
def test_of_many_mixes_none_leaves_a_tenant_without_its_part(first: int, last: int) -> None:
    draw = random.Random(1)
    mixes = [
        [
            SimulatedSession(
                draw.choice(["ann", "bob", "eve"]),
                draw.randint(1, 5),
                draw.choice([20 * US, 200 * US, 1 * MS, 3 * MS]),
                pause_ns=draw.choice([0, 0, 1 * MS, 7 * MS]),
            )
            for _ in range(draw.randint(1, 5))
        ]
        for _ in range(last)
    ]
    for mix in mixes[first:]:
        check_parts(mix)


def check_parts(mix: list[SimulatedSession]) -> None:
    """Check that every tenant of a mix gets its part, or what it wants."""
    found = shares_of(*(replace(one) for one in mix), seconds=1.0)
    tenants = {one.tenant: max(other.weight for other in mix if other.tenant == one.tenant) for one in mix}
    for tenant, weight in tenants.items():
        own = [one for one in mix if one.tenant == tenant]
        got = sum(share for one, share in zip(mix, found, strict=True) if one.tenant == tenant)
        part = weight / sum(tenants.values())
        # A session that pauses gets less than alone, however the card is shared: each kernel waits for the others'.
        alone = min(1.0, sum(one.kernel_ns / (one.kernel_ns * len(mix) + one.pause_ns) for one in own))
        assert got >= min(part, alone) * 0.85, mix


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.sampled_from([20 * US, 200 * US]))
def test_saturating_tenants_converge_to_their_weights(weights: list[int], kernel_ns: int) -> None:
    found = shares_of(*(SimulatedSession(f"t{n}", weight, kernel_ns) for n, weight in enumerate(weights)), seconds=2.0)
    # A part of an eighth is 0.054 off in one case: some 250 kernels.
    assert found == pytest.approx([weight / sum(weights) for weight in weights], rel=0.08)


@given(
    st.floats(0, 1e9),
    st.dictionaries(st.integers(0, 9), st.tuples(st.floats(0, 1e8), st.integers(1, 1000)), min_size=1),
)
def test_a_fill_wastes_nothing_and_exceeds_nothing(total: float, wants: dict[int, tuple[float, int]]) -> None:
    bounds = {one: bound for one, (bound, _) in wants.items()}
    parts = fill(total, bounds, {one: weight for one, (_, weight) in wants.items()})
    assert sum(parts.values()) == pytest.approx(min(total, sum(bounds.values())), abs=1)
    assert all(parts[one] <= bounds[one] for one in bounds)


def test_busy_times_of_sessions_that_share_the_card_equally() -> None:
    assert busy_times({1: 2.5, 2: 7.5}) == {1: 5.0, 2: 10.0}
    assert busy_times({1: 3.0}) == {1: 3.0}
    assert busy_times({}) == {}
