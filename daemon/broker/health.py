"""Readiness: whether the daemon can grant leases, check by check. HEALTH and the metrics report it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpulease.daemon.broker.memory_reserve import MemoryReserve
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.workers.registry import Workers
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    # Only a daemon in a fleet imports it.
    from gpulease.daemon.broker.fleet_frontend import FleetFrontend


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A condition for granting leases.

    Attributes:
        name: The check's name for programs, on the wire and in a metric's label.
        is_met: Whether the condition holds.
        detail: What is wrong; if the condition holds, anything that still needs an operator's attention.
    """

    name: str
    is_met: bool
    detail: str = ""


class Health:
    """Evaluates the checks on demand, without I/O.

    Attributes:
        is_listening: Whether the daemon listens. The service sets it.
        listening_problem: Returns why clients can't connect at an address, "" if they can. The service sets it.
        cards_warning: A warning about the cards for operators and tenants. The service sets it.
        missing_cards: The settings that name cards which this host does not have now, "" if none does. The service
          sets it.
        memory_warning: Returns which setting needs more memory than the host has now, "" if none does. The service
          sets it.
        fleet: The node's fleet; None if it belongs to none. The service sets it.
    """

    def __init__(
        self,
        table: LeaseTable,
        workers: Workers,
        journal: Journal,
        recorder: FactRecorder,
        memory_reserve: MemoryReserve,
    ) -> None:
        self.is_listening = False
        self.listening_problem: Callable[[], str] = str
        self.cards_warning = ""
        self.missing_cards = ""
        self.memory_warning: Callable[[], str] = str
        self.fleet: FleetFrontend | None = None
        self._table = table
        self._workers = workers
        self._journal = journal
        self._recorder = recorder
        self._memory_reserve = memory_reserve

    def checks(self) -> tuple[HealthCheck, ...]:
        """Evaluate all checks, always in the same order. Each is a gauge and a line of the report."""
        return tuple(self._checks())

    def report(self) -> dict[str, Any]:
        """Return the reply to HEALTH: whether the node is ready, each check, and the problems as sentences."""
        checks = self.checks()
        return {
            "ready": all(check.is_met for check in checks),
            "checks": [{"check": check.name, "ok": check.is_met, "detail": check.detail} for check in checks],
        }

    def _checks(self) -> Iterator[HealthCheck]:
        # Each check is met if its problem is "".
        is_up = self.is_listening and not self._table.is_shutting_down
        yield _check("listening", self.listening_problem() if is_up else "the daemon is starting or stopping")
        if self._workers.can_start:
            yield HealthCheck("zygote", True, self._earlier_versions())
        else:
            yield HealthCheck("zygote", False, "no worker can be started because the zygote is not running")
        problem = "the node is drained" if self._table.drain_ns is not None else "every card is drained"
        yield _check("not_draining", problem if self._table.grants_nothing else "")
        yield _check("capacity", self._capacity_problem())
        yield HealthCheck("cards", True, "; ".join(filter(None, (self.cards_warning, self.missing_cards))))
        if self._memory_reserve.is_short:
            yield HealthCheck("memory", False, "the daemon is out of memory")
        else:
            yield HealthCheck("memory", True, self.memory_warning())
        yield _check("journal", self._journal.problem())
        # Unless the operator requires the audit log, leases are granted without it.
        yield HealthCheck("audit", self._recorder.denial() is None, self._recorder.problem())
        if self.fleet is not None:
            # While this is not met, leases with a name are refused. Whether others are refused is the operator's
            # choice.
            yield HealthCheck("fleet", self.fleet.refusal() is None, self.fleet.problem())

    def _earlier_versions(self) -> str:
        """Return how many workers run the code of an earlier daemon; "" if none does."""
        workers = [worker for worker in self._workers.serving() if worker.earlier_version]
        if not workers:
            return ""
        versions = ", ".join(sorted({worker.earlier_version for worker in workers}))
        subject = "worker runs" if len(workers) == 1 else "workers run"
        return (
            f"{len(workers)} {subject} the code of an earlier daemon ({versions}); `gpulease upgrade-workers` "
            "moves their sessions"
        )

    def _capacity_problem(self) -> str:
        cards = self._table.cards()
        # In these two cases no lease will ever fit, unlike on cards that are full only at this moment.
        if not any(card.capacity_bytes for card in cards):
            return "no card has memory to lease"
        if all(card.fenced_bytes >= card.capacity_bytes for card in cards):
            return "all memory is fenced; `gpulease fence clear` allows it to be granted again"
        return ""


def _check(name: str, problem: str) -> HealthCheck:
    return HealthCheck(name, not problem, problem)
