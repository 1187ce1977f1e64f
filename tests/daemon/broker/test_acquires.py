"""Acquires with a request id: however often one is asked for, one lease is placed, and it is not an ended one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.handlers.acquires import TAKEN_OVER, OpenAcquires
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases import (
    AcquireRequested,
    Card,
    CoreLimits,
    FreeRequested,
    Granted,
    HorizonMoved,
    LeaseState,
    LeaseTable,
    LeaseTerms,
    Outcome,
    WorkerReady,
)
from gpulease.daemon.leases.quotas import TenantLimits, TenantRules
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.journal import Journal
from gpulease.protocol.failures import Failure
from helpers.local_claims import LocalClaims

REQUEST_ID = "ab" * 16


class SlowJournal(Journal):
    """A journal whose disk is slow: outcomes are durable when the test says so."""

    def __init__(self) -> None:
        self._held: list[tuple[Outcome, Callable[[Outcome], None]]] = []

    def answer(self, outcome: Outcome, on_outcome: Callable[[Outcome], None]) -> None:
        self._held.append((outcome, on_outcome))

    def become_durable(self) -> None:
        held, self._held = self._held, []
        for outcome, on_outcome in held:
            on_outcome(outcome)


class Node:
    """A node with one card, and the lease that it places."""

    def __init__(self) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        self.journal = SlowJournal()
        tokens = TokenService(self.table, frozenset(), None, None, {})
        workers = SimulatedWorkers()
        self.runtime = Runtime(self.table, EmbeddedCards([1000]), workers, tokens, Recorder(), 1, self.journal)

    def place(self, connection: "Connection") -> None:
        """Have a connection ask, and the lease's worker start."""
        connection.ask(5)
        self.runtime.post(WorkerReady(5))
        assert self.table.snapshots()[0].state is LeaseState.ACTIVE


class Connection:
    """A connection that asks for one lease, as LEASE_ALLOC does."""

    def __init__(self, node: Node) -> None:
        self.answers: list[Granted | Failure] = []
        self._node = node
        self._is_open = True
        self._acquires = OpenAcquires(node.runtime, node.runtime.open_acquires)

    def ask(self, lease_id: int) -> None:
        if not self._acquires.answer_known("ann", REQUEST_ID, self._answer):
            terms = LeaseTerms(100, 60_000, request_id=REQUEST_ID)
            self._acquires.ask(AcquireRequested(0, "ann", lease_id, terms), self._answer)

    def close(self) -> None:
        self._is_open = False
        self._acquires.leave()

    def _answer(self, result: Granted | Failure) -> None:
        if self._is_open:
            self.answers.append(result)
        elif isinstance(result, Granted):
            self._node.runtime.post(FreeRequested(0, result.lease.lease_id, result.lease.tenant))


def run(story: Callable[[Node], None]) -> None:
    async def whole() -> None:
        node = Node()
        story(node)
        await node.runtime.stop()

    asyncio.run(whole())


def granted(answers: list[Granted | Failure]) -> list[int]:
    return [answer.lease.lease_id for answer in answers if isinstance(answer, Granted)]


def test_a_retry_takes_over_a_grant_that_is_not_durable_yet() -> None:
    """The first connection is lost after the grant and before its commit; the retry comes within that time."""

    def story(node: Node) -> None:
        first, retry = Connection(node), Connection(node)
        node.place(first)
        first.close()
        retry.ask(6)
        assert retry.answers == []
        node.journal.become_durable()
        assert granted(retry.answers) == [5]
        assert [lease.state for lease in node.table.snapshots()] == [LeaseState.ACTIVE]

    run(story)


def test_a_grant_that_nobody_waits_for_any_more_is_given_back() -> None:
    def story(node: Node) -> None:
        first, retry = Connection(node), Connection(node)
        node.place(first)
        first.close()
        retry.ask(6)
        retry.close()
        node.journal.become_durable()
        assert [lease.state for lease in node.table.snapshots()] != [LeaseState.ACTIVE]
        assert node.runtime.open_acquires == {}

    run(story)


def test_a_retry_beside_a_connection_that_is_still_there_gets_the_answer() -> None:
    def story(node: Node) -> None:
        first, retry = Connection(node), Connection(node)
        node.place(first)
        retry.ask(6)
        assert first.answers == [TAKEN_OVER]
        first.close()
        node.journal.become_durable()
        assert granted(retry.answers) == [5]
        assert [lease.state for lease in node.table.snapshots()] == [LeaseState.ACTIVE]

    run(story)


def test_a_granted_lease_is_told_again_though_nothing_can_be_written_now() -> None:
    def story(node: Node) -> None:
        first, retry = Connection(node), Connection(node)
        node.place(first)
        node.journal.become_durable()
        # From here on the journal's disk answers nobody.
        retry.ask(6)
        assert granted(first.answers) == granted(retry.answers) == [5]

    run(story)


# --- named acquires ---


class NamedNode:
    """A node that claims names in a folder; its tenants' rate is bounded to two acquires."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        limits = CoreLimits(tenants=TenantRules(TenantLimits(acquires_per_minute=1, acquire_burst=2)))
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], limits)
        tokens = TokenService(self.table, frozenset(), None, None, {})
        self.runtime = Runtime(self.table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, Recorder(), 1)
        self.runtime.claims = LocalClaims(folder)
        self.runtime.post(HorizonMoved(time.monotonic_ns() + 10**12, boot_ns() + 10**12))
        self._acquires = OpenAcquires(self.runtime, self.runtime.open_acquires)
        self._last_id = 0

    async def acquire(self, name: str, size_bytes: int = 100, wait_ms: int = 0) -> Granted | Failure:
        """Ask for a lease, and have its worker start."""
        self._last_id += 1
        answer: asyncio.Future[Granted | Failure] = asyncio.get_running_loop().create_future()
        terms = LeaseTerms(size_bytes, 60_000, name=name)
        event = AcquireRequested(0, "ann", self._last_id, terms, None, wait_ms)
        self._acquires.ask(event, answer.set_result)
        while not answer.done():
            await asyncio.sleep(0)
            self.runtime.post(WorkerReady(self._last_id))
        return answer.result()

    @property
    def claims_made(self) -> int:
        path = self.folder / "epoch"
        return int(path.read_text()) if path.exists() else 0


def with_names(folder: Path, story: Callable[[NamedNode], Awaitable[None]]) -> None:
    async def whole() -> None:
        node = NamedNode(folder)
        await story(node)
        await node.runtime.stop()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("size_bytes", "wait_ms", "why"),
    [(0, 0, "The smallest"), (2000, 0, "were requested"), (100, 0xFFFFFFFF, "this node allows at most")],
)
def test_what_is_refused_in_any_case_is_not_claimed(tmp_path: Path, size_bytes: int, wait_ms: int, why: str) -> None:
    async def story(node: NamedNode) -> None:
        answer = await node.acquire("alpha", size_bytes, wait_ms)
        assert isinstance(answer, Failure)
        assert why in answer.message
        assert node.claims_made == 0
        assert node.runtime.history.is_at_rest

    with_names(tmp_path, story)


def test_a_named_acquire_counts_once_against_the_rate_also_if_its_name_is_taken(tmp_path: Path) -> None:
    async def story(node: NamedNode) -> None:
        assert isinstance(await node.acquire("alpha"), Granted)
        taken = await node.acquire("alpha")
        assert isinstance(taken, Failure)
        assert "taken" in taken.message
        too_fast = await node.acquire("beta")
        assert isinstance(too_fast, Failure)
        assert "a minute" in too_fast.message
        assert node.claims_made == 1

    with_names(tmp_path, story)
