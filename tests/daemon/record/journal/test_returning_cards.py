"""The card of a session that returns on another card than its row says."""

from types import SimpleNamespace
from typing import Any

from gpulease.daemon.leases.events import RestartWorker, TimerFired, TimerKind
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.record.journal.journal import JournalProjector
from gpulease.protocol.opcodes import Exclusivity


def test_the_row_names_the_card_before_a_worker_starts_there() -> None:
    kept: Any = SimpleNamespace(lease_id=5, worker_pid=0)
    row = object()
    table: Any = SimpleNamespace(lease_row=lambda _lease_id, _pid: row)
    order = RestartWorker(5, "GPU-b", LeaseTerms(1, ttl_ms=1, exclusivity=Exclusivity.SHARED, orphan_ms=0))
    event = TimerFired(5, 1, TimerKind.PARK)
    (change,) = JournalProjector([kept]).changes(event, [order], table, lambda _: 0)
    assert change.content is row
