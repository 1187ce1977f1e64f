"""Acquires with a request id: however often one is asked for, one lease is placed, and it is not an ended one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.caller import ACQUIRED_STEP, Caller, ClientConnection
from gpulease.daemon.broker.handlers.lease_requests import LeaseHandler
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import TAKEN_OVER, Runtime
from gpulease.daemon.broker.token_service import ConnectionTokens, TokenService
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import Outcome, WorkerReady
from gpulease.daemon.leases.membership_events import MembershipDeadlineMoved
from gpulease.daemon.leases.model import LeaseState
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.lease_options import LEASE_NAME
from gpulease.protocol.lease_options import REQUEST_ID as REQUEST_ID_OPTION
from gpulease.protocol.messages import Body, LeaseAlloc, LeaseEvent, LeaseGrant, RegionEvent
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Opcode
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
    """A node with one card, whose journal is slow."""

    def __init__(self) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        self.journal = SlowJournal()
        tokens = TokenService(self.table, frozenset(), None, None, {})
        workers = SimulatedWorkers()
        self.runtime = Runtime(self.table, EmbeddedCards([1000]), workers, tokens, FactRecorder(), 1, self.journal)

    def connection(self) -> "Connection":
        return Connection(self.runtime)

    def place(self, connection: "Connection") -> int:
        """Have a connection ask for a lease, and its worker start. Returns the lease's id."""
        connection.ask(request_id=REQUEST_ID)
        (lease,) = [lease for lease in self.table.snapshots() if lease.state is LeaseState.PENDING]
        self.runtime.post(WorkerReady(lease.lease_id))
        assert LeaseState.ACTIVE in [one.state for one in self.table.snapshots() if one.lease_id == lease.lease_id]
        return lease.lease_id


class Connection:
    """A tenant's connection, and what its requests for a lease are answered."""

    def __init__(self, runtime: Runtime) -> None:
        self.peer = Peer("ann", is_operator=False, is_known=True)
        self.answers: list[Body | Failure] = []
        self.is_open = True
        self.caller = Caller(
            runtime,
            cast(ClientConnection, self),
            ConnectionTokens(runtime.tokens, self.peer),
            "cpu",
        )
        self._handler = LeaseHandler(self.caller)

    def ask(self, size_bytes: int = 100, wait_ms: int = 0, name: str = "", request_id: str = "") -> None:
        """Ask for a lease. Raises Refused."""
        chosen = [
            *([LEASE_NAME.parameter(name)] if name else []),
            *([REQUEST_ID_OPTION.parameter(request_id)] if request_id else []),
        ]
        body = LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, 60_000, wait_ms, None, tuple(chosen))
        self._handler.lease_alloc(Request(Opcode.LEASE_ALLOC, 1, 0, is_quiet=False, body=body), body)

    def close(self) -> None:
        self.is_open = False
        self._handler.leave()

    def answer(self, request: Request, result: Body | Failure) -> None:
        if self.is_open:
            self.answers.append(result)

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        raise AssertionError("nothing was subscribed to")


def run(story: Callable[[Node], None]) -> None:
    async def whole() -> None:
        node = Node()
        story(node)
        await node.runtime.stop()

    asyncio.run(whole())


def granted(answers: list[Body | Failure]) -> list[int]:
    return [answer.lease_id for answer in answers if isinstance(answer, LeaseGrant)]


def test_a_retry_takes_over_a_grant_that_is_not_durable_yet() -> None:
    """The first connection is lost after the grant and before its commit; the retry comes within that time."""

    def story(node: Node) -> None:
        first, retry = node.connection(), node.connection()
        lease_id = node.place(first)
        first.close()
        retry.ask(request_id=REQUEST_ID)
        assert retry.answers == []
        node.journal.become_durable()
        assert granted(retry.answers) == [lease_id]
        assert [lease.state for lease in node.table.snapshots()] == [LeaseState.ACTIVE]

    run(story)


def test_a_grant_that_nobody_waits_for_any_more_is_given_back() -> None:
    def story(node: Node) -> None:
        first, retry = node.connection(), node.connection()
        lease_id = node.place(first)
        first.close()
        retry.ask(request_id=REQUEST_ID)
        retry.close()
        node.journal.become_durable()
        assert [lease.state for lease in node.table.snapshots()] != [LeaseState.ACTIVE]
        # Its request id is free: the next acquire with it is a new one.
        assert node.place(node.connection()) != lease_id

    run(story)


def test_a_retry_beside_a_connection_that_is_still_there_gets_the_answer() -> None:
    def story(node: Node) -> None:
        first, retry = node.connection(), node.connection()
        lease_id = node.place(first)
        retry.ask(request_id=REQUEST_ID)
        assert first.answers == [TAKEN_OVER]
        first.close()
        node.journal.become_durable()
        assert granted(retry.answers) == [lease_id]
        assert [lease.state for lease in node.table.snapshots()] == [LeaseState.ACTIVE]

    run(story)


def test_a_granted_lease_is_told_again_though_nothing_can_be_written_now() -> None:
    def story(node: Node) -> None:
        first, retry = node.connection(), node.connection()
        lease_id = node.place(first)
        node.journal.become_durable()
        # From here on the journal's disk answers nobody.
        retry.ask(request_id=REQUEST_ID)
        assert granted(first.answers) == granted(retry.answers) == [lease_id]

    run(story)


# --- named acquires ---


class NamedNode:
    """A node that claims names in a folder; its tenants' rate is bounded to two acquires."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        limits = CoreLimits(tenants=TenantRules(TenantLimits(acquires_per_minute=1, acquire_burst=2)))
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], limits)
        tokens = TokenService(self.table, frozenset(), None, None, {})
        self.runtime = Runtime(self.table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        self.runtime.claims = LocalClaims(folder)
        self.runtime.post(MembershipDeadlineMoved(time.monotonic_ns() + 10**12, boot_ns() + 10**12))

    def connection(self) -> Connection:
        return Connection(self.runtime)

    async def acquire(self, name: str, size_bytes: int = 100, wait_ms: int = 0) -> Body | Failure:
        """Ask for a lease over a connection of its own, and have its worker start."""
        connection = self.connection()
        connection.ask(size_bytes, wait_ms, name)
        return await self.answer_of(connection)

    async def answer_of(self, connection: Connection) -> Body | Failure:
        while not connection.answers:
            await asyncio.sleep(0)
            for lease in self.table.snapshots():
                self.runtime.post(WorkerReady(lease.lease_id))
        return connection.answers[0]

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
    [(0, 0, "must be at least"), (2000, 0, "was requested"), (100, 0xFFFFFFFF, "this node allows at most")],
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
        assert isinstance(await node.acquire("alpha"), LeaseGrant)
        taken = await node.acquire("alpha")
        assert isinstance(taken, Failure)
        assert "taken" in taken.message
        too_fast = await node.acquire("beta")
        assert isinstance(too_fast, Failure)
        assert "per minute" in too_fast.message
        assert node.claims_made == 1

    with_names(tmp_path, story)


def test_a_retry_takes_over_an_acquire_that_waits_for_its_name(tmp_path: Path) -> None:
    async def story(node: NamedNode) -> None:
        first, retry = node.connection(), node.connection()
        first.ask(name="alpha", request_id=REQUEST_ID)
        retry.ask(name="alpha", request_id=REQUEST_ID)
        assert first.answers == [TAKEN_OVER]
        first.close()
        assert isinstance(await node.answer_of(retry), LeaseGrant)
        assert node.claims_made == 1

    with_names(tmp_path, story)


def test_nothing_is_left_of_an_acquire_whose_client_left_while_it_waited_for_its_name(tmp_path: Path) -> None:
    async def story(node: NamedNode) -> None:
        first, next_one = node.connection(), node.connection()
        first.ask(name="alpha", request_id=REQUEST_ID)
        first.close()
        await asyncio.sleep(0)
        assert node.claims_made == 0
        assert node.runtime.history.is_at_rest
        next_one.ask(name="alpha", request_id=REQUEST_ID)
        assert isinstance(await node.answer_of(next_one), LeaseGrant)

    with_names(tmp_path, story)


def test_a_client_that_left_while_its_claimed_acquire_waited_for_room_keeps_no_claim(tmp_path: Path) -> None:
    async def story(node: NamedNode) -> None:
        assert isinstance(await node.acquire("alpha", 900), LeaseGrant)
        waiting = node.connection()
        waiting.ask(900, 30_000, "beta")
        await asyncio.sleep(0)
        assert node.claims_made == 2
        waiting.close()
        assert (tmp_path / "released").read_text() == "beta 2\n"

    with_names(tmp_path, story)


def test_a_kept_connection_notes_no_leases_but_those_that_its_peer_may_list() -> None:
    def story(node: Node) -> None:
        connection = node.connection()
        lease_id = node.place(connection)
        node.journal.become_durable()
        assert granted(connection.answers) == [lease_id]
        # A peer with an identity may list all of its tenant's leases.
        assert not connection.caller.acquired
        connection.peer = Peer("tcp", is_operator=False, is_known=False)
        connection.caller.note_acquired(lease_id)
        for other in range(1, 10 * ACQUIRED_STEP):
            connection.caller.note_acquired(other)
        assert lease_id in connection.caller.acquired
        assert len(connection.caller.acquired) <= ACQUIRED_STEP

    run(story)
