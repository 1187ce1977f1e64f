import pytest

from gpulease.client.serve.decode.decode_errors import RebindLimited
from gpulease.client.serve.decode.tenant_state import RebindLimiter


def test_a_limiter_gives_its_permits_at_once_and_then_one_every_interval() -> None:
    limiter = RebindLimiter(at_once=3, interval_s=10.0)
    for _ in range(3):
        limiter.take(50.0)
    with pytest.raises(RebindLimited, match=r"in 10\.000 s") as limited:
        limiter.take(50.0)
    assert limited.value.retry_after_s == 10.0
    limiter.take(60.0)
    assert limiter.delay_s(60.0) == 10.0
    assert limiter.delay_s(64.0) == 6.0


def test_a_refusal_takes_no_permit() -> None:
    limiter = RebindLimiter(at_once=1, interval_s=10.0)
    limiter.take(0.0)
    for _ in range(5):
        with pytest.raises(RebindLimited):
            limiter.take(9.0)
    limiter.take(10.0)


def test_permits_come_back_up_to_as_many_as_there_are_at_once() -> None:
    limiter = RebindLimiter(at_once=2, interval_s=10.0)
    limiter.take(0.0)
    limiter.take(1000.0)
    limiter.take(1000.0)
    assert limiter.delay_s(1000.0) == 10.0


def test_whoever_waits_as_long_as_told_gets_a_permit() -> None:
    limiter = RebindLimiter(at_once=3, interval_s=0.1)
    now = 1e6 / 3
    for _ in range(1000):
        now += limiter.delay_s(now)
        limiter.take(now)
