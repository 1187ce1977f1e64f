"""The account of a card's time against sessions whose real use is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import TimeClaims
from gpulease.daemon.leases.time_account import TimeAccount, shares_of

from .simulated_card import MS, US, S, SimulatedCard, SimulatedSession

NOTHING = TimeClaims(0, 0, 0, 0)


def real_and_accounted(card: SimulatedCard, every_ns: int, seconds: float = 10.0) -> list[tuple[float, float]]:
    """Let a card run without limits, and return what each session got, and what the account says, in seconds."""
    real = card.run(seconds, limits=False, every_ns=every_ns)
    # The account ends with the last sample, which is up to a period ago.
    return [(got / S, card.account.sessions[number].gpu_ns / S) for number, got in enumerate(real)]


@pytest.mark.parametrize("every_ns", [10 * MS, S // 10])
@pytest.mark.parametrize("tenants", [1, 2, 6])
def test_saturating_sessions_are_accounted_within_3_percent(tenants: int, every_ns: int) -> None:
    card = SimulatedCard(*(SimulatedSession(f"t{number}", kernel_ns=200 * US) for number in range(tenants)))
    found = real_and_accounted(card, every_ns, 5.0)
    assert all(said == pytest.approx(real, rel=0.03) for real, said in found)
    assert 0.97 <= sum(said for _, said in found) / (card.used_ns / S) <= 1.0


@pytest.mark.parametrize("tenants", [1, 2, 6])
def test_sessions_with_pauses_are_accounted_within_3_percent(tenants: int) -> None:
    sessions = (
        SimulatedSession(f"t{number}", kernel_ns=(3 + 2 * number) * MS, pause_ns=(5 + 3 * number) * MS)
        for number in range(tenants)
    )
    card = SimulatedCard(*sessions)
    found = real_and_accounted(card, 10 * MS)
    assert [said for _, said in found] == pytest.approx([real for real, _ in found], rel=0.03)
    assert 0.97 <= sum(said for _, said in found) / (card.used_ns / S) <= 1.01


def test_a_session_that_runs_while_another_pauses() -> None:
    """Known intervals: one in the first half of a sample, the other in the second half, do not overlap."""
    account = TimeAccount()
    account.sample(S, {1: NOTHING, 2: NOTHING})
    account.sample(
        S + 10 * MS,
        {1: TimeClaims(5 * MS, 0, 0, 0, S, S + 5 * MS), 2: TimeClaims(0, S + 5 * MS, 0, 0)},
    )
    assert [account.sessions[one].gpu_ns for one in (1, 2)] == pytest.approx([5 * MS, 5 * MS])
    assert account.more_busy_ns == pytest.approx(10 * MS)


def test_intervals_without_a_place_are_taken_to_be_independent() -> None:
    account = TimeAccount()
    account.sample(S, {1: NOTHING, 2: NOTHING})
    account.sample(S + 10 * MS, {1: TimeClaims(5 * MS, 0, 0, 0), 2: TimeClaims(5 * MS, 0, 0, 0)})
    assert account.more_busy_ns == pytest.approx(7.5 * MS)
    assert account.sessions[1].gpu_ns == pytest.approx(3.75 * MS)
    assert account.partly_busy == 2


def test_others_are_not_busy_while_they_hold_back() -> None:
    account = TimeAccount()
    account.sample(S, {1: NOTHING, 2: NOTHING})
    account.sample(S + 10 * MS, {1: TimeClaims(5 * MS, 0, 0, 0), 2: TimeClaims(5 * MS, 0, 0, 0)}, first={1})
    assert [account.sessions[one].gpu_ns for one in (1, 2)] == pytest.approx([5 * MS, 5 * MS])


def test_a_claim_never_goes_back_and_never_grows_faster_than_the_clock() -> None:
    account = TimeAccount()
    account.sample(S, {1: TimeClaims(7 * MS, 0, 0, 0)})
    assert account.sessions[1].gpu_ns == 0
    account.sample(S + 10 * MS, {1: TimeClaims(5 * MS, 0, 0, 0)})
    assert account.sessions[1].gpu_ns == 0
    account.sample(S + 20 * MS, {1: TimeClaims(1 << 63, 1, 1 << 63, 1)})
    assert account.sessions[1].gpu_ns == pytest.approx(10 * MS)
    assert account.sessions[1].more_held_ns == 10 * MS


def test_a_session_that_came_since_the_last_sample_counts_from_its_begin() -> None:
    account = TimeAccount()
    account.sample(S, {})
    account.sample(S + 10 * MS, {1: TimeClaims(0, S + 4 * MS, 0, 0)})
    assert account.sessions[1].gpu_ns == pytest.approx(6 * MS)


PARTS = st.dictionaries(st.integers(0, 30), st.floats(0.001, 1.0), min_size=1, max_size=30)


@given(PARTS)
def test_shares_sum_up_to_the_time_in_which_anyone_is_busy(busy: dict[int, float]) -> None:
    shares = shares_of(busy, 1000.0)
    nobody = 1.0
    for part in busy.values():
        nobody *= 1.0 - part
    assert sum(shares.values()) == pytest.approx(1000.0 * (1.0 - nobody), rel=1e-6)
    # Nobody has more than its busy time, and nobody less than were all others busy throughout.
    for one, part in busy.items():
        assert 1000.0 * part / len(busy) * 0.98 <= shares[one] <= 1000.0 * part * 1.02


CLAIMS = st.builds(TimeClaims, *[st.integers(0, 2**64 - 1)] * 6)


@given(st.lists(st.tuples(st.integers(0, S), st.dictionaries(st.integers(0, 5), CLAIMS)), max_size=8))
def test_whatever_workers_claim_the_sum_is_at_most_the_clock_s(
    samples: list[tuple[int, dict[int, TimeClaims]]],
) -> None:
    account, now_ns = TimeAccount(), S
    for more_ns, claims in samples:
        now_ns += more_ns
        account.sample(now_ns, claims, first={0, 1})
        assert 0 <= account.more_busy_ns <= account.more_ns * (1 + 1e-9)
        assert all(time.gpu_ns >= 0 for time in account.sessions.values())
    assert account.busy_ns <= (now_ns - S) * (1 + 1e-9)
