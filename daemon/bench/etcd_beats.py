"""`python -m gpulease.daemon.bench.etcd_beats ENDPOINTS PIDS NODES BEAT_S SECONDS`: what a fleet's beats cost, as JSON.

ENDPOINTS and PIDS are those of a new etcd's members on this host. This process simulates NODES: each has a record of 8
cards, and rewrites it every BEAT_S seconds if it is the one that it wrote last, as a member of a fleet does. Beside
them CLAIMS_PER_S names are claimed, each while its node is still the same. One watch follows all nodes.
Before the load: etcd's processor time while it rests, and plain puts one after the other, the least that a claim costs.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import (
    Answer,
    CreateRevisionIs,
    Get,
    ModRevisionIs,
    Put,
    Transaction,
)
from gpulease.daemon.fleet.fleet_records import NODES, CardRecord, ClaimRecord, NodeRecord, name_key, node_key

CARDS: Final = 8
CLAIMS_PER_S: Final = 50
AT_A_TIME: Final = 128
"""Nodes that join together."""

CLIENTS_PER_MEMBER: Final = 4
"""Clients that stand for all nodes: 10,000 connections of one process would measure this process."""

REST_S: Final = 3.0
PLAIN_PUTS: Final = 200
"""What is measured before the load, in the same run."""

START_LIMIT_S: Final = 30.0
TIMEOUT_S: Final = 5.0
SETTLE_S: Final = 0.05


class BeatLoad:
    """Simulated nodes on a real etcd.

    Attributes:
        beat_s: How long each acknowledged beat took.
        claim_s: How long each acknowledged claim took.
        failed: Writes without an answer that says done.
        seen: Changes that the watch told of.
        joined_at: The store's revision once all had joined.
    """

    def __init__(self, clients: list[EtcdClient], nodes: int) -> None:
        self.beat_s: list[float] = []
        self.claim_s: list[float] = []
        self.failed = self.seen = 0
        self._clients, self._nodes = clients, nodes
        self._revisions = [0] * nodes
        self._created = list(self._revisions)
        self.joined_at = 0
        cards = tuple(
            CardRecord(
                f"GPU-00000000-0000-0000-0000-00000000000{n}", "NVIDIA H100 80GB HBM3", 80 << 30, 7 << 30, 3, False
            )
            for n in range(CARDS)
        )
        self.value = NodeRecord("0" * 16, ("tls:node.example:7443",), {"zone": "a"}, cards, False, 1, "0.1.0").encode()

    def _client(self, number: int) -> EtcdClient:
        return self._clients[number % len(self._clients)]

    async def join(self) -> None:
        """Write all nodes' first records."""
        room = asyncio.Semaphore(AT_A_TIME)

        async def one(node: int) -> None:
            async with room:
                put = Put(node_key(f"{node:05d}"), self.value)
                answer = await self._client(node).do(Transaction(writes=(put,)))
                if isinstance(answer, Answer):
                    self._revisions[node] = answer.revision
                else:
                    self.failed += 1

        await asyncio.gather(*map(one, range(self._nodes)))
        self._created = list(self._revisions)
        self.joined_at = max(self._revisions)

    async def beat(self, node: int, every_s: float, until_s: float) -> None:
        """Rewrite a node's record again and again, each node at its own part of the interval."""
        key = node_key(f"{node:05d}")
        due_s = time.monotonic() + every_s * node / self._nodes
        while due_s < until_s:
            await asyncio.sleep(due_s - time.monotonic())
            sent_s = time.monotonic()
            same = ModRevisionIs(key, self._revisions[node])
            answer = await self._client(node).do(Transaction((same,), (Put(key, self.value),)))
            if isinstance(answer, Answer) and answer.succeeded:
                self._revisions[node] = answer.revision
                self.beat_s.append(time.monotonic() - sent_s)
            else:
                self.failed += 1
            due_s = max(due_s + every_s, time.monotonic())

    async def claim(self, until_s: float) -> None:
        """Claim names at a steady rate."""

        async def one(number: int) -> None:
            node = number % self._nodes
            key = name_key(f"name-{number}")
            mine = CreateRevisionIs(node_key(f"{node:05d}"), self._created[node])
            record = ClaimRecord(f"{node:05d}", self._created[node], "0" * 32, "tenant", "0" * 16)
            sent_s = time.monotonic()
            transaction = Transaction((CreateRevisionIs(key, 0), mine), (Put(key, record.encode()),))
            answer = await self._client(number).do(transaction)
            if isinstance(answer, Answer) and answer.succeeded:
                self.claim_s.append(time.monotonic() - sent_s)
            else:
                self.failed += 1

        async with asyncio.TaskGroup() as group:
            number = 0
            while time.monotonic() < until_s:
                group.create_task(one(number))
                number += 1
                await asyncio.sleep(1 / CLAIMS_PER_S)

    async def plain_puts(self) -> list[float]:
        """Seconds of puts without a condition, one after the other."""
        took_s = []
        for number in range(PLAIN_PUTS):
            sent_s = time.monotonic()
            await self._client(number).do(Transaction(writes=(Put(b"/bench/plain", self.value),)))
            took_s.append(time.monotonic() - sent_s)
        return took_s

    async def watch(self, revision: int) -> None:
        """Count what a directory would hear."""
        async for batch in self._clients[0].watch(NODES, revision):
            self.seen += len(batch.changes)


async def measure(
    endpoints: list[str], pids: list[int], nodes: int, every_s: float, seconds: float
) -> dict[str, object]:
    """Run the load on etcd's members, which have those endpoints and process ids; return its figures."""
    members = len(endpoints)
    clients = [
        EtcdClient(EtcdSettings((endpoints[number % members],), timeout_s=TIMEOUT_S))
        for number in range(members * CLIENTS_PER_MEMBER)
    ]
    try:
        await _wait_for(clients)
        load = BeatLoad(clients, nodes)
        before = [_cpu_s(pid) for pid in pids]
        await asyncio.sleep(REST_S)
        resting = [(_cpu_s(pid) - cpu_s) / REST_S for pid, cpu_s in zip(pids, before, strict=True)]
        plain_s = await load.plain_puts()
        began_s = time.monotonic()
        await load.join()
        joined_s = time.monotonic() - began_s
        watch = asyncio.create_task(load.watch(load.joined_at + 1))
        before, own = [_cpu_s(pid) for pid in pids], time.process_time()
        began_s = time.monotonic()
        until_s = began_s + seconds
        await asyncio.gather(load.claim(until_s), *(load.beat(node, every_s, until_s) for node in range(nodes)))
        took_s = time.monotonic() - began_s
        cores = [(_cpu_s(pid) - cpu_s) / took_s for pid, cpu_s in zip(pids, before, strict=True)]
        own_cores = (time.process_time() - own) / took_s
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    finally:
        for client in clients:
            await client.close()
    per_s = len(load.beat_s) / took_s
    writes_per_s = per_s + len(load.claim_s) / took_s
    return {
        "members": members,
        "nodes": nodes,
        "beat_every_s": every_s,
        "record_bytes": len(load.value),
        "joined_s": round(joined_s, 2),
        "beats_wanted_per_s": nodes / every_s,
        "beats_per_s": round(per_s, 1),
        "beat_p50_ms": _quantile_ms(load.beat_s, 0.5),
        "beat_p99_ms": _quantile_ms(load.beat_s, 0.99),
        "claims_per_s": round(len(load.claim_s) / took_s, 1),
        "claim_p50_ms": _quantile_ms(load.claim_s, 0.5),
        "claim_p99_ms": _quantile_ms(load.claim_s, 0.99),
        "plain_put_p50_ms": _quantile_ms(plain_s, 0.5),
        "failed": load.failed,
        "watched_per_s": round(load.seen / took_s, 1),
        "etcd_resting_cores": [round(value, 3) for value in resting],
        "etcd_cores": [round(value, 3) for value in cores],
        "etcd_us_per_write": [
            round(1e6 * (value - rest) / writes_per_s) for value, rest in zip(cores, resting, strict=True)
        ],
        "this_process_cores": round(own_cores, 2),
    }


async def _wait_for(clients: list[EtcdClient]) -> None:
    limit_s = time.monotonic() + START_LIMIT_S
    for client in clients:
        while not isinstance(await client.do(Transaction(reads=(Get(NODES),))), Answer):
            if time.monotonic() > limit_s:
                raise TimeoutError(f"etcd does not answer within {START_LIMIT_S:g} s")
            await asyncio.sleep(SETTLE_S)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantile_ms(found_s: list[float], part: float) -> float | None:
    return round(1e3 * sorted(found_s)[int(len(found_s) * part)], 2) if found_s else None


def main() -> None:
    """Measure what the command line says, and print the figures."""
    endpoints, pids, nodes, every_s, seconds = sys.argv[1:6]
    members = endpoints.split(","), [int(pid) for pid in pids.split(",")]
    print(json.dumps(asyncio.run(measure(*members, int(nodes), float(every_s), float(seconds)))))


if __name__ == "__main__":
    main()
