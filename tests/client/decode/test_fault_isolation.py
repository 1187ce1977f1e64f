"""The search for the request that ends engines, by halving groups of suspects."""

import pytest

from gpulease.client.decode.supervisor.fault_isolation import FaultIsolation


def found_by(isolation: FaultIsolation, poison: set[str], everybody: list[str]) -> tuple[list[str], int]:
    """Compute all requests until all but the poisoned are cleared. Returns those given up, and the lost engines."""
    given_up: list[str] = []
    lost = 0
    computed = everybody
    while True:
        if any(name in poison and name not in given_up for name in computed):
            lost += 1
            if guilty := isolation.fault([name for name in computed if name not in given_up]):
                given_up.append(guilty)
        if not (group := isolation.next()):
            return given_up, lost
        computed = list(group)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_a_poisoned_request_is_found_by_halves(count: int) -> None:
    everybody = [f"r{number}" for number in range(count)]
    most = 1 + (count - 1).bit_length() + 1
    for name in everybody:
        given_up, lost = found_by(FaultIsolation(), {name}, everybody)
        assert given_up == [name]
        assert lost <= most


def test_each_of_several_poisoned_requests_is_found_and_nobody_else() -> None:
    everybody = [f"r{number}" for number in range(16)]
    given_up, _ = found_by(FaultIsolation(), {"r0", "r7", "r8"}, everybody)
    assert sorted(given_up) == ["r0", "r7", "r8"]


def test_a_lone_suspect_has_a_second_chance_alone() -> None:
    isolation = FaultIsolation()
    assert isolation.fault(["x"]) == ""
    assert isolation.next() == ("x",)
    assert isolation.fault(["x"]) == "x"
    assert not isolation


def test_a_group_s_members_without_rows_are_not_blamed_and_stay_suspects() -> None:
    isolation = FaultIsolation()
    isolation.fault("abcd")
    assert isolation.next() == ("a", "b")
    assert isolation.fault(["a"]) == ""
    assert [isolation.next() for _ in range(4)] == [("a",), ("c", "d"), ("b",), ()]


def test_those_who_are_suspected_already_keep_their_places() -> None:
    isolation = FaultIsolation()
    isolation.fault("ab")
    isolation.fault("bc")
    groups = [isolation.next() for _ in range(4)]
    assert sorted(groups) == [(), ("a",), ("b",), ("c",)]


def test_a_suspect_that_is_not_ready_keeps_a_place_and_the_others_go_on() -> None:
    isolation = FaultIsolation()
    isolation.fault("abcd")
    held = {"a", "c", "d"}

    def is_ready(name: str) -> bool:
        return name not in held

    assert [isolation.next(is_ready) for _ in range(2)] == [("b",), ()]
    assert not isolation.has_next(is_ready)
    held.clear()
    assert isolation.has_next(is_ready)
    assert [isolation.next(is_ready) for _ in range(3)] == [("a",), ("c", "d"), ()]


def test_suspects_that_are_deferred_come_behind_the_others() -> None:
    isolation = FaultIsolation()
    isolation.fault("abcd")
    isolation.next()
    isolation.defer(["b"])
    assert isolation.current == ("a",)
    assert isolation.count == 4
    assert [isolation.next() for _ in range(3)] == [("c", "d"), ("b",), ()]


def test_who_is_there_at_two_kills_without_getting_on_is_suspected() -> None:
    isolation = FaultIsolation()
    assert isolation.killed({"a": 0, "b": 5, "c": 1}, 2) == []
    assert isolation.killed({"a": 1, "b": 7, "d": 0}, 2) == ["a"]
    assert isolation.killed({"d": 1}, 2) == ["d"]
