from gpulease.protocol.back_off import back_off_s


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    assert [back_off_s(failures, 0.1, 1.0) for failures in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_failures_without_end_give_the_longest_pause() -> None:
    assert back_off_s(10**9, 0.05, 5.0) == 5.0
