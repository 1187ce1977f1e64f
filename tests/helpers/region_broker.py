"""A broker without processes, whose sessions open regions, and peers that send requests to it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.caller import Step
from gpulease.daemon.broker.handlers.requests import RequestDispatcher
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.contract import messages as told
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.workers.region_link import RegionLink
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol import messages as m
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Opcode, Waiting
from gpulease.protocol.session_words import RegionWord

CARD_BYTES = 1 << 30
MIB = 1 << 20
FIRST_ADDRESS = 1 << 40

MADE_PID = 1 << 30
"""A process id that no process has, because it is greater than any pid_max."""

ANSWER_S = 20.0
"""Limit for answers that do not depend on a process. Only a test that fails waits that long."""


@dataclass
class MadePage:
    """The words and deadlines that were set on a page, by slot."""

    words: dict[int, tuple[int, RegionWord]] = field(default_factory=dict)
    deadlines: dict[int, int] = field(default_factory=dict)

    def set(self, slot: int, number: int, word: RegionWord, deadline_ns: int, now_ns: int) -> None:
        self.words[slot], self.deadlines[slot] = (number, word), deadline_ns


@dataclass
class MadeSession:
    """A session that opens every region, and returns all of a region's memory on request."""

    spec: WorkerSpec
    say: Callable[[int, Message], None]
    page: MadePage = field(default_factory=MadePage)
    sizes: dict[int, int] = field(default_factory=dict)
    ordered: list[Message] = field(default_factory=list)
    is_mute: bool = False
    regions: RegionLink | None = None
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.regions = cast(RegionLink, self)

    def open_regions(self, *, is_held: bool = False) -> RegionLink:
        return cast(RegionLink, self)

    def order(self, message: Message) -> None:
        self.ordered.append(message)
        if not self.is_mute:
            asyncio.get_running_loop().call_soon(self.say, self.spec.lease_id, self._answer(message))

    def _answer(self, message: Message) -> Message:
        match message:
            case told.OpenRegionOrder(region_id, _, _, size_bytes):
                self.sizes[region_id] = size_bytes
                return told.RegionOpenedReport(region_id, FIRST_ADDRESS * len(self.sizes))
            case told.EndRegionOrder(region_id):
                size_bytes = self.sizes[region_id]
                return told.RegionEndedReport(region_id, size_bytes, 0, size_bytes)
            case told.ResizeSliceOrder(size_bytes):
                return told.SliceResizedReport(size_bytes, "")
        raise AssertionError(message)

    def resize(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class MadeWorkers(SimulatedWorkers):
    """Workers without processes. Their sessions open regions.

    Attributes:
        waiting: How the sessions' ends wait for each other; None for the default.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Waiting | None = None
        self.sessions: dict[int, MadeSession] = {}

    def worker(self, lease_id: int) -> Worker | None:
        # Only leases have sessions; submits, warm contexts and regions have none.
        if lease_id not in self.leases():
            return None
        spec = WorkerSpec(lease_id, "GPU-a", 100 * MIB, is_shared=False, waiting=self.waiting)
        return cast(Worker, self.sessions.setdefault(lease_id, MadeSession(spec, self.say)))

    def pid(self, lease_id: int) -> int:
        return MADE_PID if lease_id in self.leases() else 0

    def say(self, lease_id: int, message: Message) -> None:
        self._on_region(lease_id, message)

    def leases(self) -> set[int]:
        return set(self._deadlines)


class Caller:
    """A peer's control connection, with the messages that were sent to it."""

    def __init__(self, runtime: Runtime, peer: Peer) -> None:
        self.peer = peer
        self.is_open = True
        self.is_lost = False
        self.answers: dict[int, asyncio.Future[m.Body | Failure]] = {}
        self.events: list[tuple[int, m.LeaseEvent | m.RegionEvent]] = []
        self.last_id = 0
        self.dispatcher = RequestDispatcher(runtime, self, "cpu")

    def answer(self, request: Request, result: m.Body | Failure) -> None:
        if self.is_open:
            self.answers[request.request_id].set_result(result)

    def send_event(self, subscription: int, event: m.LeaseEvent | m.RegionEvent) -> bool:
        self.events.append((subscription, event))
        return True

    def resume_reading(self) -> None:
        """Do nothing, because nothing is read here."""

    def when_written(self, action: Callable[[], None]) -> None:
        action()

    def hand_over(self, pass_on: Callable[[int, bytes], bool]) -> bool:
        return False

    def serve_in_steps(self, request: Request, step: Step) -> None:
        raise NotImplementedError

    def serve_next(self) -> None:
        """Do nothing, because no request waits here."""

    def begin(self, op: Opcode, body: m.Body, session_id: int = 0) -> asyncio.Future[m.Body | Failure]:
        self.last_id += 1
        answer = self.answers[self.last_id] = asyncio.get_running_loop().create_future()
        self.dispatcher.dispatch(Request(op, self.last_id, session_id, False, body))
        return answer

    async def ask(self, op: Opcode, body: m.Body, session_id: int = 0) -> Any:
        return await asyncio.wait_for(self.begin(op, body, session_id), ANSWER_S)

    async def refused(self, op: Opcode, body: m.Body, session_id: int = 0) -> Failure:
        failure = await self.ask(op, body, session_id)
        assert isinstance(failure, Failure), failure
        return failure


class Broker:
    """A broker with one card, and a lease of the tenant Ann.

    Attributes:
        lease_id: The id of Ann's lease.
    """

    def __init__(self, demands: frozenset[Demand] = frozenset()) -> None:
        self.table = LeaseTable([Card("GPU-a", 0, "a", CARD_BYTES, 10)])
        self.workers = MadeWorkers()
        tokens = TokenService(self.table, demands, None)
        self.runtime = Runtime(self.table, EmbeddedCards([CARD_BYTES]), self.workers, tokens, FactRecorder(), 1)
        self.ann, self.bob, self.eve = (self.caller(name) for name in ("ann", "bob", "eve"))
        self.root = self.caller("root", is_operator=True)
        self.lease_id = 0

    def caller(self, tenant: str, *, is_operator: bool = False) -> Caller:
        return Caller(self.runtime, Peer(tenant, is_operator=is_operator, is_known=True))

    @property
    def session(self) -> MadeSession:
        return self.workers.sessions[self.lease_id]

    async def begin(self) -> None:
        grant = await self.root_or_ann.ask(
            Opcode.LEASE_ALLOC, m.LeaseAlloc(GPU_RESOURCE_TYPE, 100 * MIB, 600_000, 0, None, ())
        )
        assert isinstance(grant, m.LeaseGrant), grant
        self.lease_id = grant.lease_id

    @property
    def root_or_ann(self) -> Caller:
        return self.root if self.runtime.tokens.demands else self.ann

    async def regions_gone(self) -> None:
        """Wait until every region has been returned."""
        async with asyncio.timeout(ANSWER_S):
            while self.table.regions.snapshots():  # noqa: ASYNC110  # the table tells nobody
                await asyncio.sleep(0.001)

    async def open(self, who: Caller | None = None, owner: str = "bob", size_bytes: int = 4 * MIB) -> m.RegionGrant:
        body = m.RegionOpen(self.lease_id, size_bytes, 60_000, owner)
        grant = await (who or self.ann).ask(Opcode.REGION_OPEN, body)
        assert isinstance(grant, m.RegionGrant), grant
        return grant


def with_broker(
    scenario: Callable[[Broker], Awaitable[None]], demands: frozenset[Demand] = frozenset()
) -> Callable[[], None]:
    def run() -> None:
        async def play() -> None:
            broker = Broker(demands)
            try:
                await broker.begin()
                await scenario(broker)
                broker.table.validate()
            finally:
                await broker.runtime.stop()

        asyncio.run(play())

    run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
    return run
