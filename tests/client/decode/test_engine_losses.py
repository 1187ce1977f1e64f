"""Which errors say that an engine is lost, who is suspected of it, and when the next one is asked for."""

import pytest

from gpulease.client.decode.supervisor.engine_losses import (
    FIRST_PAUSE_S,
    MAX_PAUSE_OF_LOSSES_S,
    MAX_PAUSE_S,
    TRIES_LOGGED,
    Suspects,
    is_fault,
    is_kill,
    is_known,
    is_logged,
    pause_before_engine_s,
    pause_s,
)
from gpulease.client.errors import (
    Disconnected,
    Drained,
    GpuLeaseError,
    GpuSessionFailed,
    InvalidHandle,
    LeaseExpired,
    RegionRevoked,
    Revoked,
    SyncFailed,
)
from gpulease.protocol import Failure, Status

KILLED = GpuSessionFailed("", "", Failure(Status.SESSION_FAILED, "", is_kill=True))


@pytest.mark.parametrize("kind", [Revoked, LeaseExpired, Drained, Disconnected])
def test_the_end_of_a_lease_is_known_and_nobody_s_fault(kind: type[GpuLeaseError]) -> None:
    assert (is_known(kind("")), is_fault(kind(""))) == (True, False)


@pytest.mark.parametrize("kind", [GpuSessionFailed, SyncFailed])
def test_the_loss_of_a_context_is_known_and_may_be_somebody_s_fault(kind: type[GpuLeaseError]) -> None:
    assert (is_known(kind("")), is_fault(kind(""))) == (True, True)


@pytest.mark.parametrize("error", [KeyError(), OSError(), InvalidHandle(""), RegionRevoked(""), GpuLeaseError("")])
def test_any_other_error_is_unknown_and_may_be_somebody_s_fault(error: Exception) -> None:
    assert (is_known(error), is_fault(error)) == (False, True)


def test_a_kill_from_outside_is_known_and_at_first_nobody_s_fault() -> None:
    assert (is_known(KILLED), is_kill(KILLED), is_fault(KILLED)) == (True, True, False)
    assert not is_kill(GpuSessionFailed(""))


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [pause_s(attempt) for attempt in range(1000)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == MAX_PAUSE_S


def test_the_first_loss_is_met_at_once_and_losses_in_a_row_later_and_later() -> None:
    pauses = [pause_before_engine_s(losses) for losses in range(1, 1000)]
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == MAX_PAUSE_OF_LOSSES_S


def test_tries_without_end_are_logged_without_end_and_not_each() -> None:
    logged = [tries for tries in range(1, 10_001) if is_logged(tries)]
    assert logged[:TRIES_LOGGED] == list(range(1, TRIES_LOGGED + 1))
    assert 800 < len(logged) < 850
    assert logged[-1] > 9_980


# --- Suspects. ---


def found_by(suspects: Suspects, poison: set[str], everybody: list[str]) -> tuple[list[str], int]:
    """Compute everybody until all but the poisoned are cleared. Returns who was given up, and the engines lost."""
    given_up: list[str] = []
    lost = 0
    computed = everybody
    while True:
        if any(name in poison and name not in given_up for name in computed):
            lost += 1
            if guilty := suspects.fault([name for name in computed if name not in given_up]):
                given_up.append(guilty)
        if not (group := suspects.next()):
            return given_up, lost
        computed = list(group)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_a_poisoned_request_is_found_by_halves(count: int) -> None:
    everybody = [f"r{number}" for number in range(count)]
    most = 1 + (count - 1).bit_length() + 1
    for name in everybody:
        given_up, lost = found_by(Suspects(), {name}, everybody)
        assert given_up == [name]
        assert lost <= most


def test_each_of_several_poisoned_requests_is_found_and_nobody_else() -> None:
    everybody = [f"r{number}" for number in range(16)]
    given_up, _ = found_by(Suspects(), {"r0", "r7", "r8"}, everybody)
    assert sorted(given_up) == ["r0", "r7", "r8"]


def test_a_lone_suspect_has_a_second_chance_alone() -> None:
    suspects = Suspects()
    assert suspects.fault(["x"]) == ""
    assert suspects.next() == ("x",)
    assert suspects.fault(["x"]) == "x"
    assert not suspects


def test_a_group_s_members_without_rows_are_not_blamed_and_stay_suspects() -> None:
    suspects = Suspects()
    suspects.fault("abcd")
    assert suspects.next() == ("a", "b")
    assert suspects.fault(["a"]) == ""
    assert [suspects.next() for _ in range(4)] == [("a",), ("c", "d"), ("b",), ()]


def test_those_who_are_suspected_already_keep_their_places() -> None:
    suspects = Suspects()
    suspects.fault("ab")
    suspects.fault("bc")
    groups = [suspects.next() for _ in range(4)]
    assert sorted(groups) == [(), ("a",), ("b",), ("c",)]


def test_a_suspect_that_is_not_ready_keeps_a_place_and_the_others_go_on() -> None:
    suspects = Suspects()
    suspects.fault("abcd")
    held = {"a", "c", "d"}

    def is_ready(name: str) -> bool:
        return name not in held

    assert [suspects.next(is_ready) for _ in range(2)] == [("b",), ()]
    assert not suspects.has_next(is_ready)
    held.clear()
    assert suspects.has_next(is_ready)
    assert [suspects.next(is_ready) for _ in range(3)] == [("a",), ("c", "d"), ()]


def test_suspects_that_are_put_off_come_behind_the_others() -> None:
    suspects = Suspects()
    suspects.fault("abcd")
    suspects.next()
    suspects.put_off(["b"])
    assert suspects.current == ("a",)
    assert suspects.count == 4
    assert [suspects.next() for _ in range(3)] == [("c", "d"), ("b",), ()]


def test_who_is_there_at_two_kills_without_getting_on_is_suspected() -> None:
    suspects = Suspects()
    assert suspects.killed({"a": 0, "b": 5, "c": 1}, 2) == []
    assert suspects.killed({"a": 1, "b": 7, "d": 0}, 2) == ["a"]
    assert suspects.killed({"d": 1}, 2) == ["d"]
