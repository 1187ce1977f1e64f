"""A long list of leases is made in steps, between which other connections are served."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.control_connection import ControlConnection
from gpulease.daemon.broker.handlers.query_requests import LEASES_PER_STEP, QueryHandler
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import FAULT, Result, Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import AcquireRequested, FreeDone, FreeRequested
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.protocol import Opcode
from gpulease.protocol.connection import Connection, Reply, Role
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Empty, Hello, Ping

MIB = 1 << 20
LEASES = 3 * LEASES_PER_STEP + 1


class Client:
    """One end of a control connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)

    def send(self, op: Opcode, body: Body) -> None:
        _, frame = self._connection.send_request(op, body)
        self.writer.write(frame)

    async def next_reply(self) -> Any:
        while (event := self._connection.next_event()) is None:
            data = await asyncio.wait_for(self._reader.read(65536), 60)
            assert data
            self._connection.receive_data(data)
        assert isinstance(event, Reply)
        return event.result


Play = Callable[[Runtime, Client, Client], Awaitable[None]]


def with_many_leases(play: Play) -> None:
    """Play with the clients of an operator and of the tenant Ann, who has the second of the leases."""

    async def run(path: Path) -> None:
        card = Card("GPU-a", 0, "a", 2 * LEASES * MIB, 0)
        table = LeaseTable([card])
        tokens = TokenService(table, frozenset(), None)
        runtime = Runtime(table, EmbeddedCards([card.capacity_bytes]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        for number in range(1, LEASES + 1):
            tenant = "ann" if number == 2 else "bob"
            request = runtime.expect(lambda _: None)
            runtime.post(AcquireRequested(request, tenant, number, LeaseTerms(MIB, 3_600_000)))
        peers = iter([Peer("root", is_operator=True, is_known=True), Peer("ann", is_operator=False, is_known=True)])
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: ControlConnection(runtime, "cpu", None, {}, next(peers)), str(path)
        )
        clients = []
        for _ in range(2):
            clients.append(Client(*await asyncio.open_unix_connection(str(path))))
            clients[-1].send(Opcode.HELLO, Hello(0, "test", ()))
            await clients[-1].next_reply()
        try:
            await play(runtime, *clients)
        finally:
            for client in clients:
                client.writer.close()
            server.close()
            await runtime.stop()

    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder:
        asyncio.run(run(Path(folder) / "s"))


def numbers(report: Any) -> list[int]:
    return [int(lease["lease_id"], 16) for lease in report]


def test_a_long_list_is_whole_and_comes_before_later_replies() -> None:
    async def play(_: Runtime, root: Client, __: Client) -> None:
        root.send(Opcode.LEASE_LIST_ACTIVE, Empty())
        root.send(Opcode.PING, Ping(7))
        assert numbers((await root.next_reply()).report) == list(range(1, LEASES + 1))
        assert await root.next_reply() == Ping(7)

    with_many_leases(play)


def test_other_connections_are_served_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(runtime: Runtime, root: Client, ann: Client) -> None:
        answered: list[str] = []
        answer = ControlConnection.answer

        def note_answer(connection: ControlConnection, request: Any, result: Any) -> None:
            answered.append(request.op.name)
            answer(connection, request, result)

        monkeypatch.setattr(ControlConnection, "answer", note_answer)
        # Both requests are in the sockets before the broker's loop runs again.
        root.send(Opcode.LEASE_LIST_ACTIVE, Empty())
        ann.send(Opcode.PING, Ping(7))
        await ann.next_reply()
        await root.next_reply()
        assert answered == ["PING", "LEASE_LIST_ACTIVE"]

    with_many_leases(play)


def test_a_lease_that_ends_meanwhile_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(runtime: Runtime, root: Client, _: Client) -> None:
        begun: asyncio.Future[Callable[[], bool]] = asyncio.get_running_loop().create_future()
        freed: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(ControlConnection, "serve_in_steps", lambda _, __, step: begun.set_result(step))
        root.send(Opcode.LEASE_LIST_ACTIVE, Empty())
        list_more = await begun
        runtime.post(FreeRequested(runtime.expect(freed.set_result), LEASES, "bob"))
        assert isinstance(await freed, FreeDone)
        while not list_more():
            pass
        assert numbers((await root.next_reply()).report) == list(range(1, LEASES))

    with_many_leases(play)


def test_a_tenant_lists_its_own_at_once() -> None:
    async def play(_: Runtime, __: Client, ann: Client) -> None:
        ann.send(Opcode.LEASE_LIST_ACTIVE, Empty())
        assert numbers((await ann.next_reply()).report) == [2]

    with_many_leases(play)


@pytest.mark.parametrize("good_reports", [0, LEASES - 1], ids=["at once", "in the last step"])
def test_a_fault_is_answered_and_the_connection_continues(monkeypatch: pytest.MonkeyPatch, good_reports: int) -> None:
    report, left = QueryHandler._report, iter(range(good_reports))

    def fail_in_time(handler: QueryHandler, lease: Any) -> dict[str, Any]:
        if next(left, None) is None:
            raise ZeroDivisionError
        return report(handler, lease)

    async def play(_: Runtime, root: Client, __: Client) -> None:
        root.send(Opcode.LEASE_LIST_ACTIVE, Empty())
        root.send(Opcode.PING, Ping(7))
        assert await root.next_reply() == FAULT
        assert await root.next_reply() == Ping(7)

    monkeypatch.setattr(QueryHandler, "_report", fail_in_time)
    with_many_leases(play)
