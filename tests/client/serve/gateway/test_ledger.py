"""A store may repeat a transaction with an unknown outcome: each rule gives the same entry and answer twice."""

import pytest

from gpulease.client.serve.gateway import StaleEpoch, ledger
from gpulease.client.serve.gateway.ledger import Entry, InFlight, Moment, OperationPhase, Reservation

HASH = bytes(32)
AT = Moment("clock", 100.0)


def made(claim_id: bytes = b"mine", entry: Entry | None = None, at: Moment = AT) -> tuple[Entry, Reservation]:
    entry, answer = ledger.reserve(entry, "key", HASH, claim_id, at, 10.0)
    assert entry is not None
    assert isinstance(answer, Reservation)
    return entry, answer


def test_reserving_again_with_the_same_claim() -> None:
    entry, held = made()
    assert ledger.reserve(entry, "key", HASH, b"mine", Moment("clock", 105.0), 10.0) == (entry, held)
    again, answer = ledger.reserve(entry, "key", HASH, b"other", Moment("clock", 105.0), 10.0)
    assert (again, answer) == (entry, InFlight(1, 5.0))


def test_a_takeover_done_again() -> None:
    entry, _ = made()
    taken, held = made(b"other", entry, Moment("clock", 110.0))
    assert (taken.epoch, held.epoch) == (2, 2)
    assert made(b"other", taken, Moment("clock", 110.5)) == (taken, held)


def test_the_other_steps_done_again() -> None:
    entry, held = made()
    started = ledger.start(entry, held)
    assert ledger.start(started, held) == started
    completed = ledger.complete(started, held, b"out")
    assert ledger.complete(completed, held, b"out") == completed
    assert (completed.phase, completed.outcome) == (OperationPhase.COMPLETED, b"out")
    released = ledger.release(entry, held)
    assert ledger.release(released, held) == released


def test_an_epoch_alone_is_not_enough() -> None:
    """A key that was forgotten begins again at epoch 1; whoever held it before does not hold it now."""
    _, stale = made(b"long ago")
    entry, _ = made(b"now")
    with pytest.raises(StaleEpoch):
        ledger.start(entry, stale)
