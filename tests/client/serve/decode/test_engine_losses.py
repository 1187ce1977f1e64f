"""Which errors say that an engine is lost, who is suspected of it, and when the next one is asked for."""

import pytest

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
from gpulease.client.serve.decode.engine_losses import FIRST_PAUSE_S, MAX_PAUSE_S, Suspects, is_fault, is_known, pause_s


@pytest.mark.parametrize("kind", [Revoked, LeaseExpired, Drained, Disconnected])
def test_the_end_of_a_lease_is_known_and_nobody_s_fault(kind: type[GpuLeaseError]) -> None:
    assert (is_known(kind("")), is_fault(kind(""))) == (True, False)


@pytest.mark.parametrize("kind", [GpuSessionFailed, SyncFailed])
def test_the_loss_of_a_context_is_known_and_may_be_somebody_s_fault(kind: type[GpuLeaseError]) -> None:
    assert (is_known(kind("")), is_fault(kind(""))) == (True, True)


@pytest.mark.parametrize("error", [KeyError(), OSError(), InvalidHandle(""), RegionRevoked(""), GpuLeaseError("")])
def test_any_other_error_is_unknown_and_may_be_somebody_s_fault(error: Exception) -> None:
    assert (is_known(error), is_fault(error)) == (False, True)


def test_pauses_double_up_to_a_limit() -> None:
    pauses = [pause_s(attempt) for attempt in range(1000)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == MAX_PAUSE_S


def test_each_suspect_has_one_turn_in_order() -> None:
    suspects = Suspects()
    suspects.add(["x", "y"])
    suspects.add(["y", "z"])
    assert [suspects.next() for _ in range(4)] == ["x", "y", "z", ""]
    assert suspects.current == ""


def test_a_suspect_that_is_not_ready_keeps_its_place() -> None:
    suspects = Suspects()
    suspects.add("xyz")
    held = {"x"}

    def is_ready(name: str) -> bool:
        return name not in held

    assert [suspects.next(is_ready) for _ in range(3)] == ["y", "z", ""]
    assert not suspects.has_next(is_ready)
    held.clear()
    assert suspects.has_next(is_ready)
    assert suspects.next(is_ready) == "x"


def test_a_suspect_that_is_put_off_comes_behind_the_others() -> None:
    suspects = Suspects()
    suspects.add("xy")
    suspects.next()
    suspects.put_off()
    assert [suspects.next() for _ in range(3)] == ["y", "x", ""]
