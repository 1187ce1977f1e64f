"""For how long a client sleeps during a large copy."""

import time

import pytest

from gpulease.client.core import copies
from gpulease.client.core.copies import COPY_BYTES_PER_NS, MAX_COPY_SPIN_NS, NAP_PART, CopyTimes

LARGE = 256 << 20


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> CopyTimes:
    # Now it is one second after zero.
    monkeypatch.setattr("gpulease.client.core.copies.time.monotonic_ns", lambda: 10**9)
    return CopyTimes()


def test_before_any_copy_was_timed_there_is_no_sleep(times: CopyTimes) -> None:
    assert times.nap_ns(LARGE) == 0


def test_the_fastest_copy_decides(times: CopyTimes) -> None:
    for nanoseconds in (9 * LARGE, 2 * LARGE, 5 * LARGE):
        times.note(LARGE, 10**9 - nanoseconds)
    assert times.nap_ns(LARGE) == int(2 * LARGE * NAP_PART)
    assert times.nap_ns(2 * LARGE) == int(4 * LARGE * NAP_PART)


def test_during_a_copy_that_is_spun_for_there_is_no_sleep(times: CopyTimes) -> None:
    times.note(LARGE, 0)
    assert times.nap_ns(MAX_COPY_SPIN_NS * COPY_BYTES_PER_NS) == 0
    assert copies.spin_ns(LARGE) == MAX_COPY_SPIN_NS
    assert time.monotonic_ns() == 10**9
