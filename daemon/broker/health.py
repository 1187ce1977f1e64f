"""Whether the daemon can grant leases, check by check: what HEALTH is answered with, and metrics tell."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpulease.daemon.broker.memory_reserve import MemoryReserve
from gpulease.daemon.leases import LeaseTable
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.workers.registry import Workers


@dataclass(frozen=True, slots=True)
class Check:
    """One condition. `detail` says what is wrong; of one that holds, what an operator should look after all the same.

    Attributes:
        name: For programs; it is on the wire, and a label.
    """

    name: str
    is_met: bool
    detail: str = ""


class Health:
    """Looks at what leases depend on; costs nothing.

    Attributes:
        is_listening: Set by whoever listens.
    """

    def __init__(
        self, table: LeaseTable, workers: Workers, journal: Journal, recorder: Recorder, headroom: MemoryReserve
    ) -> None:
        self.is_listening = False
        self._table = table
        self._workers = workers
        self._journal = journal
        self._recorder = recorder
        self._headroom = headroom

    def checks(self) -> tuple[Check, ...]:
        """All of them, in an order that stays."""
        return tuple(self._checks())

    def report(self) -> dict[str, Any]:
        """The map of a reply to HEALTH."""
        checks = self.checks()
        return {
            "ready": all(check.is_met for check in checks),
            "checks": [{"check": check.name, "ok": check.is_met, "detail": check.detail} for check in checks],
        }

    def _checks(self) -> Iterator[Check]:
        is_going = self._table.is_shutting_down
        yield _check("listening", "" if self.is_listening and not is_going else "the daemon is starting or stopping")
        yield _check("zygote", "" if self._workers.can_start else "no worker can be started: the zygote is not there")
        yield _check("not_draining", "" if self._table.drain_ns is None else "the node is drained")
        yield _check("capacity", self._what_capacity_lacks())
        yield _check("memory", "the daemon is out of memory" if self._headroom.is_short else "")
        yield _check("journal", self._journal.problem())
        problem = self._recorder.problem()
        # Where the operator does not demand the log, leases are granted without it.
        yield Check("audit", self._recorder.denial() is None, problem)

    def _what_capacity_lacks(self) -> str:
        cards = self._table.cards()
        if not any(card.capacity_bytes for card in cards):
            return "no card has memory to lease"
        if all(card.fenced_bytes >= card.capacity_bytes for card in cards):
            return "all memory is fenced: see `gpulease fence`"
        return ""


def _check(name: str, problem: str) -> Check:
    return Check(name, not problem, problem)
