"""`python -m tests.lab.etcd_beats ENDPOINTS PIDS NODES BEAT_S SECONDS`: measures a fleet's heartbeats, as JSON.

ENDPOINTS and PIDS are those of a new etcd's members on this host. NODES nodes of 8 cards run the rules of a fleet's
member, in processes of NODES_PER_PROCESS nodes. Each node sends a heartbeat (beat) every BEAT_S seconds. At
CHANGED_PART of the beats the node's cards have changed, and CLAIMS_PER_S names are claimed per second. The nodes of a
process share a few etcd clients, each connected like a node's. One watch follows all nodes.

Before the load, this measures etcd's CPU time at rest, and plain puts one after another, the minimum for a claim.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random
from typing import Final

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Get,
    Outcome,
    Put,
    StoreSize,
    Transaction,
    TransactionAnswer,
)
from gpulease.daemon.fleet.records.fleet_records import GENERATION, NODES, PREFIX, CardRecord, InventoryRecord, node_key
from gpulease.daemon.fleet.rules.fleet_events import (
    Answered,
    ArmFleetTimer,
    Ask,
    ClaimGiven,
    ClaimRefused,
    ClaimWanted,
    Event,
    FleetTerms,
    FleetTimerFired,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    Note,
    Noted,
    RecordChanged,
    Started,
)
from gpulease.daemon.fleet.rules.member import Member

CARDS: Final = 8
CLAIMS_PER_S: Final = 50
CHANGED_PART: Final = 0.5
"""Share of beats at which a lease has begun or ended since the last beat: six changes per minute at each node."""

CLAIM_NUMBERS: Final = 1_000_000
"""The number of a process's first claim is its first node's number times this, so that no two claims share a name."""

BEATS_PER_HORIZON: Final = 6
NODES_PER_PROCESS: Final = 2_500
"""Maximum number of nodes that one process simulates. With more, the process itself would be the bottleneck."""

AT_A_TIME: Final = 128
"""Maximum number of nodes of a process that join at the same time."""

CLIENTS: Final = 12
"""Number of etcd clients that the nodes of a process share. With 10,000 connections, the processes would be the
bottleneck."""

REST_S: Final = 3.0
PLAIN_PUTS: Final = 200
"""Before the load: seconds of measuring etcd at rest, and number of plain puts."""

START_LIMIT_S: Final = 30.0
JOIN_LIMIT_S: Final = 300.0
"""Seconds for all nodes to join. A process that died must not block the others forever."""

TIMEOUT_S: Final = 5.0
SETTLE_S: Final = 0.05

_FAILED: Final = (Note.BEAT_UNKNOWN, Note.REJECTED, Note.FENCED, Note.REFUSED)


@dataclass
class Measured:
    """The measurements of the nodes of one process.

    Attributes:
        beat_s: Duration of each acknowledged beat.
        claim_s: Duration of each acknowledged claim.
        failed: Number of beats and claims that were not acknowledged.
        cpu_s: CPU time of the process itself.
    """

    beat_s: list[float] = field(default_factory=list)
    claim_s: list[float] = field(default_factory=list)
    failed: int = 0
    cpu_s: float = 0.0


class SimulatedNode:
    """A member of the fleet with simulated leases. It measures while `measured` is set."""

    def __init__(self, node_id: str, terms: FleetTerms, client: EtcdClient, draw: Random) -> None:
        self.measured: Measured | None = None
        self.joined = asyncio.Event()
        self._key = node_key(node_id)
        self._client = client
        self._draw = draw
        self._member = Member(node_id, terms, instance=f"{draw.getrandbits(64):016x}")
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted_s: dict[int, float] = {}

    def start(self) -> None:
        self._change()
        # The node has no leases of an earlier process, so the list of live claims is empty.
        self._post(Started())
        self._post(LiveClaims())

    def claim(self, number: int) -> None:
        # Record the time before posting the event, because the rules may refuse it at once.
        self._wanted_s[number] = time.monotonic()
        self._post(ClaimWanted(number, f"name-{number}", f"{number:032x}", "tenant"))

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _change(self) -> None:
        record = inventory_of(self._draw)
        self._post(RecordChanged(record.addresses, record.labels or {}, record.cards, version=record.version))

    def _post(self, event: Event) -> None:
        # Run the fleet's real rules, and carry out their effects without a daemon.
        for effect in self._member.handle(event, boot_ns()):
            match effect:
                case Ask(number, transaction):
                    task = asyncio.get_running_loop().create_task(self._ask(number, transaction))
                    self._tasks.add(task)
                    # asyncio keeps only weak references to tasks, so keep a strong one.
                    task.add_done_callback(self._tasks.discard)
                case ArmFleetTimer(due_ns):
                    if self._timer is not None:
                        self._timer.cancel()
                    # The member's times are on CLOCK_BOOTTIME, which the loop does not know.
                    left_s = max(0, due_ns - boot_ns()) / 1e9
                    self._timer = asyncio.get_running_loop().call_later(left_s, self._fire)
                case Joined():
                    self.joined.set()
                case KeepMark(mark):
                    # These nodes have no journal. Answer in another turn of the loop, as a daemon would.
                    asyncio.get_running_loop().call_soon(self._post, MarkKept(mark.beat))
                case ClaimGiven(request):
                    self._take_claim(request, is_given=True)
                case ClaimRefused(request):
                    self._take_claim(request, is_given=False)
                case Noted(note) if note in _FAILED and self.measured is not None:
                    self.measured.failed += 1

    def _fire(self) -> None:
        # After a change, a beat also writes the node's record, which is larger than the beat.
        if self._draw.random() < CHANGED_PART:
            self._change()
        self._post(FleetTimerFired())

    def _take_claim(self, number: int, *, is_given: bool) -> None:
        # Claims from before the measurement are not counted.
        sent_s = self._wanted_s.pop(number)
        if self.measured is not None and is_given:
            self.measured.claim_s.append(time.monotonic() - sent_s)
        elif self.measured is not None:
            self.measured.failed += 1

    async def _ask(self, number: int, transaction: Transaction) -> None:
        sent_s = time.monotonic()
        outcome = await self._client.do(transaction)
        if self.measured is not None and self._is_beat(transaction, outcome):
            self.measured.beat_s.append(time.monotonic() - sent_s)
        self._post(Answered(number, outcome))

    def _is_beat(self, transaction: Transaction, outcome: Outcome) -> bool:
        # A beat is a write to the node's key. Claims and records are other transactions.
        is_done = isinstance(outcome, TransactionAnswer) and outcome.succeeded
        return is_done and any(isinstance(write, Put) and write.key == self._key for write in transaction.writes)


def inventory_of(draw: Random) -> InventoryRecord:
    """Return the record of a node's cards, with random leases."""
    cards = tuple(
        CardRecord(
            f"GPU-00000000-0000-0000-0000-00000000000{number}",
            "NVIDIA H100 80GB HBM3",
            80 << 30,
            draw.randrange(80) << 30,
            draw.randrange(4),
            False,
        )
        for number in range(CARDS)
    )
    return InventoryRecord(("tls:node.example:7443",), {"zone": "a"}, cards, version="0.1.0")


# --- the processes of nodes ---

_barrier: Barrier | None = None
"""Set when a process starts, because the pool can't pass a barrier to it later."""


def _begin_process(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def run_nodes(endpoints: list[str], first: int, nodes: int, every_s: float, seconds: float, claims: float) -> Measured:
    """Let `nodes` nodes from number `first` on join, wait for the other processes, and measure for `seconds`."""
    return asyncio.run(_run_nodes(endpoints, first, nodes, every_s, seconds, claims))


async def _run_nodes(
    endpoints: list[str], first: int, nodes: int, every_s: float, seconds: float, claims: float
) -> Measured:
    assert _barrier is not None
    draw = Random(first)
    clients = [EtcdClient(EtcdSettings(tuple(endpoints), timeout_s=TIMEOUT_S)) for _ in range(CLIENTS)]
    terms = FleetTerms(every_s * BEATS_PER_HORIZON)
    found = [
        SimulatedNode(f"{first + at:05d}", terms, clients[at % CLIENTS], Random(draw.random())) for at in range(nodes)
    ]
    # Limit how many join at the same time, because the burst is not what this measures.
    room = asyncio.Semaphore(AT_A_TIME)

    async def join(at: int, node: SimulatedNode) -> None:
        # Spread the nodes' beats evenly over the interval.
        await asyncio.sleep(every_s * at / nodes)
        async with room:
            node.start()
            await node.joined.wait()

    measured = Measured()
    try:
        # Step 1: all nodes of this process join. Step 2: wait for the other processes.
        await asyncio.gather(*(join(at, node) for at, node in enumerate(found)))
        await asyncio.to_thread(_barrier.wait)
        # Step 3: measure. Claim names at a constant rate, by all nodes in turn. Beats are sent by the nodes' timers.
        for node in found:
            node.measured = measured
        cpu_s = time.process_time()
        numbers = count(first * CLAIM_NUMBERS)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            number = next(numbers)
            found[number % nodes].claim(number)
            await asyncio.sleep(min(left_s, 1 / claims))
        measured.cpu_s = time.process_time() - cpu_s
    finally:
        # Stop measuring before stopping a node, because its open requests would count as failures.
        for node in found:
            node.measured = None
            await node.stop()
        for client in clients:
            await client.close()
    return measured


# --- the measurement ---


async def measure(
    endpoints: list[str], pids: list[int], nodes: int, every_s: float, seconds: float
) -> dict[str, object]:
    """Run the load on etcd's members with these endpoints and process ids. Returns the figures."""
    client = EtcdClient(EtcdSettings(tuple(endpoints), timeout_s=TIMEOUT_S))
    try:
        # Step 1: measure etcd at rest, and plain writes.
        await _wait_for(client)
        # Mark etcd as new, so that no node waits for earlier leases to end.
        await client.do(Transaction((CreateRevisionIs(GENERATION, 0),), (Put(GENERATION, b"a benchmark"),)))
        before = [_cpu_s(pid) for pid in pids]
        await asyncio.sleep(REST_S)
        resting = [(_cpu_s(pid) - cpu_s) / REST_S for pid, cpu_s in zip(pids, before, strict=True)]
        plain_s = await _plain_puts(client)
        # Step 2: start the processes of nodes. They begin to measure together, at the barrier.
        parts = list(_parts(nodes))
        # Spawn the processes, because gRPC's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        # This process also waits at the barrier, to know when all nodes have joined.
        barrier = context.Barrier(len(parts) + 1, timeout=JOIN_LIMIT_S)
        with ProcessPoolExecutor(len(parts), context, _begin_process, (barrier,)) as pool:
            began_s = time.monotonic()
            claims = CLAIMS_PER_S / len(parts)
            running = [pool.submit(run_nodes, endpoints, *part, every_s, seconds, claims) for part in parts]
            try:
                await asyncio.to_thread(barrier.wait)
            except BaseException:
                # The other processes would wait until JOIN_LIMIT_S.
                barrier.abort()
                raise
            joined_s = time.monotonic() - began_s
            # Step 3: run the load. Read etcd's CPU time and size before and after it.
            changes = Changes()
            watch = asyncio.create_task(changes.follow(client))
            before, sizes = [_cpu_s(pid) for pid in pids], await client.sizes()
            began_s = time.monotonic()
            done = await asyncio.gather(*map(asyncio.wrap_future, running))
            took_s = time.monotonic() - began_s
            cores = [(_cpu_s(pid) - cpu_s) / took_s for pid, cpu_s in zip(pids, before, strict=True)]
            grown_bytes = _largest(await client.sizes()) - _largest(sizes)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    finally:
        await client.close()
    # Step 4: combine the figures of all processes.
    beat_s = [each for measured in done for each in measured.beat_s]
    claim_s = [each for measured in done for each in measured.claim_s]
    writes_per_s = (len(beat_s) + len(claim_s)) / took_s
    return {
        "members": len(endpoints),
        "nodes": nodes,
        "beat_every_s": every_s,
        "inventory_bytes": len(inventory_of(Random(0)).encode()),
        "joined_s": round(joined_s, 2),
        "beats_wanted_per_s": nodes / every_s,
        "beats_per_s": round(len(beat_s) / seconds, 1),
        "beat_p50_ms": _quantile_ms(beat_s, 0.5),
        "beat_p99_ms": _quantile_ms(beat_s, 0.99),
        "claims_per_s": round(len(claim_s) / seconds, 1),
        "claim_p50_ms": _quantile_ms(claim_s, 0.5),
        "claim_p99_ms": _quantile_ms(claim_s, 0.99),
        "plain_put_p50_ms": _quantile_ms(plain_s, 0.5),
        "failed": sum(measured.failed for measured in done),
        "watched_per_s": round(changes.seen / took_s, 1),
        "etcd_resting_cores": [round(value, 3) for value in resting],
        "etcd_cores": [round(value, 3) for value in cores],
        "etcd_us_per_write": [
            round(1e6 * (value - rest) / writes_per_s) for value, rest in zip(cores, resting, strict=True)
        ],
        "etcd_bytes_per_beat": round(grown_bytes / len(beat_s)) if beat_s else None,
        "nodes_cores": [round(measured.cpu_s / seconds, 2) for measured in done],
    }


class Changes:
    """Counts the changes of nodes' records that a directory's watch reports."""

    def __init__(self) -> None:
        self.seen = 0

    async def follow(self, client: EtcdClient) -> None:
        """Count changes of records below PREFIX until cancelled."""
        async for batch in client.watch(PREFIX, 0):
            self.seen += sum(change.key.startswith(NODES) for change in batch.changes)


def _parts(nodes: int) -> Iterator[tuple[int, int]]:
    """Yield the first node and the number of nodes of each process. The numbers differ by at most 1."""
    processes = -(-nodes // NODES_PER_PROCESS)
    for number in range(processes):
        first = nodes * number // processes
        yield first, nodes * (number + 1) // processes - first


async def _plain_puts(client: EtcdClient) -> list[float]:
    """Return the duration, in seconds, of each of PLAIN_PUTS unconditional puts, one after another."""
    took_s, value = [], inventory_of(Random(0)).encode()
    for _ in range(PLAIN_PUTS):
        sent_s = time.monotonic()
        await client.do(Transaction(writes=(Put(b"/bench/plain", value),)))
        took_s.append(time.monotonic() - sent_s)
    return took_s


async def _wait_for(client: EtcdClient) -> None:
    limit_s = time.monotonic() + START_LIMIT_S
    while not isinstance(await client.do(Transaction(reads=(Get(NODES),))), TransactionAnswer):
        if time.monotonic() > limit_s:
            raise TimeoutError(f"etcd does not answer within {START_LIMIT_S:g} s")
        await asyncio.sleep(SETTLE_S)


def _largest(sizes: list[StoreSize]) -> int:
    return max((size.size_bytes for size in sizes), default=0)


def _cpu_s(pid: int) -> float:
    # Fields 14 and 15 are user and system time in clock ticks (proc_pid_stat(5)). Field 3 is the first after the name.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantile_ms(found_s: list[float], part: float) -> float | None:
    return round(1e3 * sorted(found_s)[int(len(found_s) * part)], 2) if found_s else None


def main() -> None:
    """Run the measurement that the command line describes, and print the figures."""
    endpoints, pids, nodes, every_s, seconds = sys.argv[1:6]
    members = endpoints.split(","), [int(pid) for pid in pids.split(",")]
    print(json.dumps(asyncio.run(measure(*members, int(nodes), float(every_s), float(seconds)))))


if __name__ == "__main__":
    main()
