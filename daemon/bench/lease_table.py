"""`python -m gpulease.daemon.bench.lease_table [--no-expiry] LEASES [KEPT...]`: times the broker's core, as JSON.

The lease table, its runtime and its timers are the broker's own, on the broker's event loop. The journal, the audit log
and the log are also the broker's own, if KEPT names them; they are in a temporary folder. Only processes are simulated,
so that there can be ten thousand leases: a worker starts and ends within one turn of the loop.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from gpulease.daemon.bench.percentiles import percentile
from gpulease.daemon.broker.audit_setup import boot_id, open_recorder
from gpulease.daemon.broker.runtime import Result, Runtime
from gpulease.daemon.broker.service import loop_factory
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.config.settings import Config
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.host.memory_cleanup import collect_rarely
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Event,
    FreeRequested,
    Granted,
    RenewRequested,
    ShutdownRequested,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.writer import JsonShape, QueueingHandler
from gpulease.daemon.record.journal import Journal, open_journal
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import ENDED_BY_DAEMON
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

KEPT: Final = ("journal", "audit", "log")
"""Records that can be kept during the measurement."""

NO_EXPIRY: Final = "--no-expiry"
"""Option that omits the loads that wait for leases to expire."""

SIZE_BYTES: Final = 1 << 20
CARDS: Final = 8
TENANTS: Final = 100

PER_TURN: Final = 64
"""Number of requests in one turn of the loop, as if this many connections sent one each."""

AT_A_TIME: Final = 512
"""Maximum number of requests that wait for an answer; with few leases, a quarter of the number of leases."""

LONG_MS: Final = 3_600_000
ROUNDS_S: Final = 3.0
"""Duration of each kind of load."""

EXPIRY_S: Final = 10.0
"""Time within which half of the leases expire, evenly."""

FLOOR_TEXT: Final = "".join(f'[lease_{number}]\ntenant = "t{number}"\nat = [0, {number}]\n' for number in range(8))
FLOOR_SAMPLES: Final = 100
"""How many times FLOOR_TEXT is parsed before and after each load."""

SETTLE_MS: Final = 2000
"""Time until the first of these leases expires. By then, all are granted."""

RENEWALS_PER_S: Final = 1000
"""Rate at which the other half of the leases is renewed meanwhile."""

BURST: Final = 1000
"""Number of leases that expire at one moment."""


class SimulatedWorkers(Workers):
    """Workers without processes.

    Attributes:
        late_ms: Milliseconds between the deadline of each expired lease and the refusal of its operations.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.late_ms: list[float] = []
        self._deadlines: dict[int, int] = {}
        self._changed = asyncio.Event()

    async def refused(self, count: int) -> None:
        while len(self.late_ms) < count:
            self._changed.clear()
            await self._changed.wait()

    def spawn(self, spec: WorkerSpec) -> None:
        # A real worker's answer also comes in a later turn of the loop.
        asyncio.get_running_loop().call_soon(self._post, WorkerReady(spec.lease_id))

    def kill(self, lease_id: int) -> None:
        asyncio.get_running_loop().call_soon(self._post, WorkerExited(lease_id, ENDED_BY_DAEMON, True))

    def set_deadline(self, lease_id: int, deadline_ns: int, generation: int) -> None:
        """Note the deadline. A real registry would write it on the worker's page."""
        self._deadlines[lease_id] = deadline_ns

    def refuse(self, lease_id: int, status: Status, reason: str = "", cause: str = "") -> None:
        """Note the time. A real registry would set the revocation word."""
        deadline_ns = self._deadlines.pop(lease_id, 0)
        if status is Status.LEASE_EXPIRED:
            self.late_ms.append((time.monotonic_ns() - deadline_ns) / NS_PER_MS)
            self._changed.set()


class LeaseLoad:
    """Requests of many tenants to one runtime.

    Attributes:
        live: Lease id and tenant of each granted lease.
    """

    def __init__(self, runtime: Runtime, leases: int) -> None:
        self._runtime = runtime
        self._at_a_time = max(1, min(AT_A_TIME, leases // 4))
        self._last_id = 0
        self._open = 0
        self._changed = asyncio.Event()
        self.live: list[tuple[int, str]] = []

    async def ask(self, events: Iterator[Callable[[int], Event]], until_ns: int = 0) -> int:
        """Post all events, or as many as possible until `until_ns`, and return how many were answered."""
        # At most `_at_a_time` requests wait for their answers, as with this many connections.
        requests = 0
        for make in events:
            # Wait for an answer before the next request, as a connection with a bounded pipeline does.
            while self._open >= self._at_a_time:
                self._changed.clear()
                await self._changed.wait()
            self._open += 1
            requests += 1
            self._runtime.post(make(self._runtime.expect(self._answered)))
            # Let the loop run, because the broker answers between its clients' packets.
            if requests % PER_TURN == 0:
                await asyncio.sleep(0)
                if until_ns and time.monotonic_ns() > until_ns:
                    break
        # The rate counts answers, so wait for the last of them.
        while self._open:
            self._changed.clear()
            await self._changed.wait()
        return requests

    def acquire(self, ttl_ms: int) -> Callable[[int], Event]:
        self._last_id += 1
        # Tenants take turns, so that all have about the same number of leases.
        lease_id, tenant = self._last_id, f"tenant-{self._last_id % TENANTS}"
        return lambda request: AcquireRequested(request, tenant, lease_id, LeaseTerms(SIZE_BYTES, ttl_ms))

    def _answered(self, outcome: Result) -> None:
        self._open -= 1
        self._changed.set()
        if isinstance(outcome, Granted):
            self.live.append((outcome.lease.lease_id, outcome.lease.tenant))


def renewal(lease: tuple[int, str]) -> Callable[[int], Event]:
    """Return a tenant's request to renew a lease."""
    return lambda request: RenewRequested(request, *lease, LONG_MS)


def release(lease: tuple[int, str]) -> Callable[[int], Event]:
    """Return a tenant's request to free a lease."""
    return lambda request: FreeRequested(request, *lease)


async def measure(leases: int, kinds: frozenset[str], *, has_expiry: bool = True) -> dict[str, float]:
    """Return the figures.

    Args:
        leases: Leases that are held during each load.
        kinds: The records that are kept.
        has_expiry: Whether to measure also how late leases expire, which takes some seconds longer than EXPIRY_S.

    Raises:
        OSError: The journal or the audit log can't be created.
        ValueError: `kinds` has a name that is not in KEPT.
    """
    if unknown := kinds - set(KEPT):
        raise ValueError(
            f"the kinds of records to keep must be among {', '.join(KEPT)}, not {', '.join(sorted(unknown))}"
        )
    figures: dict[str, float] = {}
    async with _runtime(leases, kinds) as (runtime, workers):
        # Each load starts with the leases that the previous load left.
        load = LeaseLoad(runtime, leases)
        grants = (load.acquire(LONG_MS) for _ in range(leases))
        figures |= await _rate("grants", load, grants, None)
        figures |= await _rate("renewals", load, _repeat_forever(load), ROUNDS_S)
        # One in four requests is a free, which is not counted.
        figures |= await _rate("mixed", load, _churn(load), ROUNDS_S, counted=0.75)
        if has_expiry:
            figures |= _lateness("expiry", await _expire_evenly(load, workers, leases))
            figures |= _lateness("burst", await _expire_at_once(load, workers))
    return figures


async def _rate(
    name: str, load: LeaseLoad, events: Iterator[Callable[[int], Event]], seconds: float | None, counted: float = 1.0
) -> dict[str, float]:
    """Return requests per second, the reciprocal, CPU time per request in the broker's thread, and a floor."""
    floor_us = _floor_us()
    # Also measure the thread's CPU time: on a busy host, the wall clock alone would measure other processes.
    cpu_s, began_ns = time.thread_time(), time.monotonic_ns()
    until_ns = 0 if seconds is None else began_ns + int(seconds * NS_PER_S)
    requests = counted * await load.ask(events, until_ns)
    cpu_s = time.thread_time() - cpu_s
    taken_s = (time.monotonic_ns() - began_ns) / NS_PER_S
    return {
        f"{name}_per_s": requests / taken_s,
        f"{name}_us": taken_s * 1e6 / requests,
        f"{name}_cpu_us": cpu_s * 1e6 / requests,
        f"{name}_floor_us": (floor_us + _floor_us()) / 2,
    }


def _floor_us() -> float:
    """Return the CPU time of parsing FLOOR_TEXT in this thread, in microseconds: a measure of the host's speed."""
    samples = []
    for _ in range(FLOOR_SAMPLES):
        began_s = time.thread_time()
        tomllib.loads(FLOOR_TEXT)
        samples.append((time.thread_time() - began_s) * 1e6)
    return sorted(samples)[FLOOR_SAMPLES // 2]


def _repeat_forever(load: LeaseLoad) -> Iterator[Callable[[int], Event]]:
    while True:
        for lease in list(load.live):
            yield renewal(lease)


def _churn(load: LeaseLoad) -> Iterator[Callable[[int], Event]]:
    """Yield grants, renewals, and as many frees as grants, so that the number of leases stays the same."""
    while True:
        # Release a lease from the middle, so that both old and new leases end.
        yield release(load.live.pop(len(load.live) // 2))
        yield load.acquire(LONG_MS)
        for other in load.live[-2:]:
            yield renewal(other)


async def _expire_evenly(load: LeaseLoad, workers: SimulatedWorkers, leases: int) -> list[float]:
    """Let half of the leases expire one by one while the others are renewed. Return the delays in milliseconds."""
    # Free half of the leases, then acquire as many again, with deadlines spread over EXPIRY_S.
    half = leases // 2
    expiring, load.live = load.live[half:], load.live[:half]
    await load.ask(map(release, expiring))
    workers.late_ms.clear()
    # Copy the list, because the leases that are granted next are appended to `live`.
    others = list(load.live)
    await load.ask(load.acquire(SETTLE_MS + int(EXPIRY_S * 1000 * number / half)) for number in range(half))
    begin_s = time.monotonic()
    renewed = 0
    # The other half is renewed at the same time, at a steady rate: expiry must be on time under load.
    while len(workers.late_ms) < half:
        await asyncio.sleep(0.005)
        due = int((time.monotonic() - begin_s) * RENEWALS_PER_S) - renewed
        renewed += await load.ask(renewal(others[(renewed + step) % len(others)]) for step in range(due))
    return list(workers.late_ms)


async def _expire_at_once(load: LeaseLoad, workers: SimulatedWorkers) -> list[float]:
    workers.late_ms.clear()
    # All deadlines are at the same moment, so each lease's duration is the time that remains until then.
    until_ns = time.monotonic_ns() + NS_PER_S
    await load.ask(load.acquire(max(1, (until_ns - time.monotonic_ns()) // NS_PER_MS)) for _ in range(BURST))
    await workers.refused(BURST)
    return list(workers.late_ms)


@contextlib.asynccontextmanager
async def _runtime(leases: int, kinds: frozenset[str]) -> AsyncIterator[tuple[Runtime, SimulatedWorkers]]:
    with tempfile.TemporaryDirectory(prefix="gpulease-") as folder, _logging("log" in kinds):
        config = Config(audit=Path(folder) / "audit" if "audit" in kinds else None)
        journal = Journal()
        if "journal" in kinds:
            journal = await asyncio.to_thread(open_journal, Path(folder) / "state", boot_id())
        # Make room for all loads, so that no request is refused or queued for lack of memory.
        most = leases + AT_A_TIME + BURST
        source = EmbeddedCards([most * SIZE_BYTES // CARDS + SIZE_BYTES] * CARDS)
        cards = [Card(card.uuid, card.index, card.name, card.capacity_bytes, 0) for card in source.discover({})]
        table = LeaseTable(cards, CoreLimits(max_leases=most, max_leases_per_tenant=most), 0, journal.recovered)
        workers = SimulatedWorkers()
        async with open_recorder(config, "cpu", cards) as recorder:
            tokens = TokenService(table, frozenset(), None, None, journal.spent)
            runtime = Runtime(table, source, workers, tokens, recorder, config.max_load_s, journal)
            yield runtime, workers
            # End as a daemon does: every lease is torn down before the records are closed.
            runtime.post(ShutdownRequested())
            await runtime.drained()
            await runtime.stop()
        await journal.stop()


@contextlib.contextmanager
def _logging(is_on: bool) -> Iterator[None]:
    """Log to /dev/null, which is never slow."""
    if not is_on:
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    root = logging.getLogger()
    before = root.level
    handler = QueueingHandler(JsonShape("broker"), sink)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()
        os.close(sink)


def _lateness(name: str, late_ms: list[float]) -> dict[str, float]:
    parts = {f"p{part}": percentile(late_ms, part) for part in (50, 99)}
    return {f"{name}_late_{part}_ms": late for part, late in (parts | {"max": max(late_ms)}).items()}


if __name__ == "__main__":
    collect_rarely()
    arguments = [argument for argument in sys.argv[1:] if argument != NO_EXPIRY]
    load = measure(int(arguments[0]), frozenset(arguments[1:]), has_expiry=NO_EXPIRY not in sys.argv)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(load)
    print(json.dumps(found))
