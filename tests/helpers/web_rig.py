"""The web process, with a simulated broker that returns the tenants, states and texts that the test sets."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.web_frontend import WebFrontend
from gpulease.daemon.leases.events import DrainSet, Outcome, RevokeDone, SlicesCleared
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.http_settings import HttpSettings
from gpulease.daemon.web.load_samples import CardLoads
from gpulease.daemon.workers.helper_process import Timeouts
from gpulease.protocol.address import TcpAddress
from gpulease.protocol.connection import Connection, EndOfStream, Request, Role
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Empty, HelloReply, Inventory, LeaseEvent, Metrics, Report
from gpulease.protocol.opcodes import Opcode, Phase, RevokeOutcome
from helpers.waiting import PATIENCE_S

GIB = 1 << 30
CARD = "GPU-00000000-0000-0000-0000-000000000001"


def card(**changes: Any) -> dict[str, Any]:
    """Return a card's report: 80 GiB and empty, with the given changes."""
    return {
        "uuid": CARD,
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "driver": "cuda",
        "capacity_bytes": 79 * GIB,
        "held_bytes": 0,
        "available_bytes": 79 * GIB,
        "fenced_bytes": 0,
        "leases": 0,
        "exclusive": False,
        "warm_contexts": 0,
        "warm_wanted": 0,
        "warm_bytes": 0,
        "drain_left_ms": None,
        "card_drain_left_ms": None,
        "sandbox": [],
    } | changes


def lease(number: int, tenant: str, **changes: Any) -> dict[str, Any]:
    """Return a lease's report: active, with the given changes."""
    return {
        "lease_id": f"{number:032x}",
        "tenant": tenant,
        "state": "active",
        "cause": None,
        "reason": "",
        "fault": "",
        "generation": 1,
        "size_bytes": GIB,
        "card_uuid": CARD,
        "exclusivity": "session_exclusive",
        "remaining_ms": 60_000,
        "ttl_ms": 120_000,
        "age_ms": 60_000,
        "phase": "active",
        "allocated_bytes": 0,
        "launches": 0,
        "syncs": 0,
        "operations": 0,
    } | changes


@dataclass
class Scene:
    """The simulated broker's replies, and the requests that it has received.

    Attributes:
        is_silent: Whether it sends no replies.
        asked: The requests that it has received, in order.
        outcome: The outcome of each revocation; None to leave it without a reply.
        revoked: The leases that were revoked, with the reasons.
        drained: Each drain that was requested: its time in milliseconds, and its card if it has one. None for a request
            to end a drain.
        cleared: The cards on which fences were cleared.
        refusals: The operations that the web process has refused.
        loads: The broker's record of the cards' load in the last hour.
    """

    cards: list[dict[str, Any]] = field(default_factory=lambda: [card()])
    leases: list[dict[str, Any]] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=lambda: {"ready": True, "checks": []})
    metrics: str = ""
    is_silent: bool = False
    asked: list[Opcode] = field(default_factory=list)
    outcome: Outcome | None = field(default_factory=lambda: RevokeDone(0, RevokeOutcome.TORN_DOWN))
    revoked: list[tuple[int, str]] = field(default_factory=list)
    drained: list[int | tuple[str, int | None] | None] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    loads: list[CardLoads] = field(default_factory=list)

    def revoke(self, lease_id: int, reason: str, on_outcome: Callable[[Outcome], None]) -> None:
        self.revoked.append((lease_id, reason))
        if self.outcome is not None:
            on_outcome(self.outcome)

    def drain(self, within_ms: int | None, card_uuid: str, on_outcome: Callable[[Outcome], None]) -> None:
        self.drained.append((card_uuid, within_ms) if card_uuid else within_ms)
        deadline_ns = None if within_ms is None else time.monotonic_ns() + within_ms * 1_000_000
        on_outcome(DrainSet(0, deadline_ns, len(self.leases)))

    def clear_fences(self, card_uuid: str, on_outcome: Callable[[Outcome], None]) -> None:
        self.cleared.append(card_uuid)
        on_outcome(SlicesCleared(0, 2, (8,)))

    def refused(self, operation: str, lease_id: int, message: str) -> None:
        self.refusals.append(operation)

    def answer(self, request: Request) -> Body:
        self.asked.append(request.op)
        match request.op:
            case Opcode.HELLO:
                return HelloReply(0, "gpuleased/0.1.0", MAX_PAYLOAD_BYTES, ())
            case Opcode.PING:
                return request.body
            case Opcode.GET_INVENTORY:
                return Inventory((), self.cards)
            case Opcode.LEASE_LIST_ACTIVE:
                return Report(self.leases)
            case Opcode.LEASE_QUERY:
                return Report(lease(getattr(request.body, "lease_id", 0), "somebody"))
            case Opcode.HEALTH:
                return Report(self.health)
            case Opcode.METRICS:
                return Metrics("text/plain; version=0.0.4; charset=utf-8", self.metrics)
            case _:
                return Empty()


class ScriptedBroker(asyncio.Protocol):
    """The broker's end of the connection to a web process."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._connection = Connection(Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES)
        self._subscription = 0
        self._sequence = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._connection.receive_data(data)
        while (event := self._connection.next_event()) is not None:
            if isinstance(event, EndOfStream):
                return
            assert isinstance(event, Request), event
            if event.op is Opcode.LEASE_SUBSCRIBE:
                self._subscription = event.request_id
            if not self._scene.is_silent and self._transport is not None:
                self._transport.write(self._connection.send_reply(event, self._scene.answer(event)))

    def tell(self, lease_id: int, phase: Phase, cause: str, reason: str) -> None:
        if self._transport is None or not self._subscription:
            return
        self._sequence += 1
        event = LeaseEvent(lease_id, self._sequence, 0, int(phase), 0, 1, cause, reason)
        self._transport.write(self._connection.send_event(self._subscription, event))


class WebRig:
    """A web process with its simulated broker, both in a thread that has its own event loop.

    Attributes:
        url: The page's URL.
        process_id: The web process's id.
    """

    def __init__(
        self,
        scene: Scene,
        token_file: Path | None = None,
        hosts: frozenset[str] = frozenset(),
        patience: Timeouts | None = None,
    ) -> None:
        self.scene = scene
        self.url = ""
        self._settings = HttpSettings(TcpAddress("127.0.0.1", 0), hosts, token_file)
        self._loop = asyncio.new_event_loop()
        self._brokers: list[ScriptedBroker] = []
        sandbox = SandboxSettings()
        self._frontend = WebFrontend(self._settings, sandbox, self._connect, scene, patience, lambda: scene.loads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="web rig")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.url = self._in_loop(self._frontend.listen())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()

    @property
    def process_id(self) -> int:
        return self._frontend._process.pid

    def tell(self, lease_id: int, phase: Phase, cause: str = "", reason: str = "") -> None:
        async def tell() -> None:
            self._brokers[-1].tell(lease_id, phase, cause, reason)

        self._in_loop(tell())

    def change_token(self, token: str) -> None:
        """Make another token valid, as a reload of the settings does."""

        async def change() -> None:
            self._frontend.set_token(hashlib.sha256(token.encode()).digest())

        self._in_loop(change())

    def notify_page(self, message: CardLoads | FleetMembership) -> None:
        """Send the web process a new sample of a card's load, or a new membership of the node in its fleet."""

        async def tell() -> None:
            self._frontend.send(message)

        self._in_loop(tell())

    def _connect(self, peer: Peer) -> ScriptedBroker:
        assert peer.is_reader
        self._brokers.append(ScriptedBroker(self.scene))
        return self._brokers[-1]

    def _in_loop(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE_S)

    def _stop(self) -> None:
        with suppress(Exception):
            self._in_loop(self._frontend.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
