from gpulease.client.decode.scheduler.cell_rate import CellRate


def test_permits_are_given_at_once_and_then_one_every_interval() -> None:
    rate = CellRate(at_once=3, interval_s=10.0)
    assert [rate.take(50.0) for _ in range(4)] == [0.0, 0.0, 0.0, 10.0]
    assert rate.take(60.0) == 0.0
    assert rate.delay_s(60.0) == 10.0
    assert rate.delay_s(64.0) == 6.0


def test_a_refusal_takes_no_permit() -> None:
    rate = CellRate(at_once=1, interval_s=10.0)
    rate.take(0.0)
    assert {rate.take(9.0) for _ in range(5)} == {1.0}
    assert rate.take(10.0) == 0.0


def test_permits_come_back_up_to_as_many_as_there_are_at_once() -> None:
    rate = CellRate(at_once=2, interval_s=10.0)
    rate.take(0.0)
    rate.take(1000.0)
    rate.take(1000.0)
    assert rate.delay_s(1000.0) == 10.0


def test_whoever_waits_as_long_as_told_gets_a_permit() -> None:
    rate = CellRate(at_once=3, interval_s=0.1)
    now = 1e6 / 3
    for _ in range(1000):
        now += rate.delay_s(now)
        assert rate.take(now) == 0.0
