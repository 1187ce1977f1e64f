from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client import (
    CapacityExceeded,
    Denied,
    Disconnected,
    Fenced,
    GpuLeaseError,
    InvalidRequest,
    LeaseExpired,
    LeaseFreed,
    NotFound,
    Revoked,
    Unsupported,
)
from gpulease.client.core.lease import FIRST_BACKOFF_S, LEAST_DELAY_S, MAX_BACKOFF_S, RenewalSchedule

FRACTIONS = st.floats(0, 1)
TTLS = st.floats(0.1, 1e6)


@given(TTLS, FRACTIONS)
def test_renews_at_three_quarters_give_or_take_a_tenth_of_that(ttl_s: float, uniform: float) -> None:
    delay_s = RenewalSchedule(lambda: uniform).after_grant(ttl_s)
    assert 0.675 * ttl_s * 0.999 <= delay_s <= 0.825 * ttl_s * 1.001


@given(st.integers(1, 200), TTLS)
def test_backs_off_to_five_seconds_and_never_past_the_end(failures: int, remaining_s: float) -> None:
    schedule = RenewalSchedule()
    delays = [schedule.after_failure(Disconnected("gone"), remaining_s) for _ in range(failures)]
    for at, delay_s in enumerate(cast("list[float]", delays)):
        expected = min(FIRST_BACKOFF_S * 2**at, MAX_BACKOFF_S, remaining_s / 2)
        assert delay_s == pytest.approx(max(expected, LEAST_DELAY_S))
        assert delay_s < remaining_s


@given(st.integers(1, 20))
def test_a_success_ends_the_back_off(failures: int) -> None:
    schedule = RenewalSchedule()
    for _ in range(failures):
        schedule.after_failure(Disconnected("gone"), 100)
    schedule.after_grant(100)
    assert schedule.after_failure(Disconnected("gone"), 100) == FIRST_BACKOFF_S


@pytest.mark.parametrize(
    "kind", [LeaseExpired, Revoked, Fenced, InvalidRequest, LeaseFreed, NotFound, Denied, Unsupported]
)
def test_gives_up_on_what_asking_again_cannot_cure(kind: type[GpuLeaseError]) -> None:
    assert RenewalSchedule().after_failure(kind("no"), 100) is None


@pytest.mark.parametrize("kind", [Disconnected, CapacityExceeded, GpuLeaseError])
def test_gives_up_when_the_lease_is_over(kind: type[GpuLeaseError]) -> None:
    assert RenewalSchedule().after_failure(kind("no"), 100) is not None
    assert RenewalSchedule().after_failure(kind("no"), 0) is None
