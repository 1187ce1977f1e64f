"""Which errors mean that an engine is lost, and when the next one is requested."""

import pytest

from gpulease.client.decode.supervisor.engine_losses import (
    FIRST_PAUSE_S,
    MAX_PAUSE_OF_LOSSES_S,
    MAX_PAUSE_S,
    TRIES_LOGGED,
    is_fault,
    is_kill,
    is_logged,
    pause_before_engine_s,
    pause_s,
    shows_loss,
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
    assert (shows_loss(kind("")), is_fault(kind(""))) == (True, False)


@pytest.mark.parametrize("kind", [GpuSessionFailed, SyncFailed])
def test_the_loss_of_a_context_is_known_and_may_be_somebody_s_fault(kind: type[GpuLeaseError]) -> None:
    assert (shows_loss(kind("")), is_fault(kind(""))) == (True, True)


@pytest.mark.parametrize("error", [KeyError(), OSError(), InvalidHandle(""), RegionRevoked(""), GpuLeaseError("")])
def test_any_other_error_is_unknown_and_may_be_somebody_s_fault(error: Exception) -> None:
    assert (shows_loss(error), is_fault(error)) == (False, True)


def test_a_kill_from_outside_is_known_and_at_first_nobody_s_fault() -> None:
    assert (shows_loss(KILLED), is_kill(KILLED), is_fault(KILLED)) == (True, True, False)
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
