"""The size of a real etcd's database under a fleet's beats, with the members' clock let run as fast as etcd answers."""

import asyncio
import json
from typing import Any, Final

import pytest

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Put, Transaction, TransactionAnswer
from gpulease.daemon.fleet.records.fleet_records import GENERATION, CardRecord
from gpulease.daemon.fleet.rules.fleet_events import (
    Answered,
    ArmFleetTimer,
    Ask,
    Compact,
    Event,
    FleetTimerFired,
    KeepMark,
    LiveClaims,
    MarkKept,
    Note,
    Noted,
    RecordChanged,
    Started,
)
from gpulease.daemon.fleet.rules.member import Member
from helpers.etcd_cluster import EtcdCluster

S: Final = 10**9
BEAT_S: Final = 5
"""A sixth of the horizon's default."""

LEASE_S: Final = 60
"""Between two changes of the node's inventory."""

HALF_HOUR_S: Final = 1_800
CARDS: Final = 8
HISTORY_S: Final = 60


class FastNode:
    """A member whose time passes as fast as a real etcd answers."""

    def __init__(self, client: EtcdClient, node_id: str, history_s: int) -> None:
        self.now_ns = 1_000 * S
        self.beats = self.compactions = 0
        self._client = client
        self._member = Member(node_id, instance=node_id, history_s=history_s)
        self._due_ns = 0
        self._leased = self._next_lease_ns = 0

    async def begin(self) -> None:
        """Join."""
        await self._lease()
        await self._send(Started())
        await self._send(LiveClaims())

    async def run(self, until_ns: int) -> None:
        """Let time pass, with every timer at its time, and let a lease come or go each LEASE_S."""
        while self._due_ns <= until_ns:
            self.now_ns = max(self.now_ns, self._due_ns)
            await self._send(FleetTimerFired())
            if self.now_ns >= self._next_lease_ns:
                await self._lease()
        self.now_ns = until_ns

    async def _lease(self) -> None:
        self._leased, self._next_lease_ns = self._leased + 1, self.now_ns + LEASE_S * S
        cards = tuple(
            CardRecord(f"GPU-{number:08x}", "NVIDIA H100 80GB HBM3", 80 << 30, self._leased << 20, 1, False)
            for number in range(CARDS)
        )
        await self._send(RecordChanged(("tls:gpu.example:7443",), {"zone": "a"}, cards))

    async def _send(self, event: Event) -> None:
        effects = self._member.handle(event, self.now_ns)
        for effect in effects:
            match effect:
                case ArmFleetTimer(due_ns):
                    self._due_ns = due_ns
                case Noted(Note.BEAT):
                    self.beats += 1
        # An answer comes when all else is carried out.
        for effect in effects:
            match effect:
                case Ask(number, transaction):
                    await self._send(Answered(number, await self._client.do(transaction)))
                case KeepMark(mark):
                    await self._send(MarkKept(mark.beat))
                case Compact(revision):
                    assert isinstance(await self._client.compact(revision), TransactionAnswer)
                    self.compactions += 1


class Growth:
    """A fleet of such nodes on one etcd, and the sizes that its database had."""

    def __init__(self, cluster: EtcdCluster, nodes: int = 1, history_s: int = HISTORY_S) -> None:
        self._cluster = cluster
        self._sizes = nodes, history_s
        self.in_use: list[int] = []
        self.files: list[int] = []
        self.beats = self.compactions = 0

    def pass_time(self, spans: int, span_s: int = 3_600) -> "Growth":
        """Let so many spans of time pass, and look after each."""
        asyncio.run(self._pass(spans, span_s))
        return self

    async def _pass(self, spans: int, span_s: int) -> None:
        count, history_s = self._sizes
        client = EtcdClient(EtcdSettings(self._cluster.endpoints, timeout_s=60))
        try:
            await client.do(Transaction(writes=(Put(GENERATION, b"first"),)))
            nodes = [FastNode(client, f"node-{number}", history_s) for number in range(count)]
            for node in nodes:
                await node.begin()
            step_ns = BEAT_S * S
            for span in range(spans):
                for step in range(span_s // BEAT_S):
                    until_ns = (1_000 + span * span_s) * S + (step + 1) * step_ns
                    await asyncio.gather(*(node.run(until_ns) for node in nodes))
                await asyncio.to_thread(self._look)
        finally:
            await client.close()
        self.beats = sum(node.beats for node in nodes)
        self.compactions = sum(node.compactions for node in nodes)

    def _look(self) -> None:
        (told,) = json.loads(self._cluster.control("endpoint", "status", "--write-out=json"))
        status: dict[str, Any] = told["Status"]
        self.in_use.append(status["dbSizeInUse"])
        self.files.append(status["dbSize"])


BOUND_BYTES: Final = 256 << 10
"""Two histories of beats, the keys, and the parts of bbolt's file that are not in use yet."""

SMALL_BYTES: Final = 700
"""What a beat may add while nothing is compacted; with eight cards in each beat it was 2,100."""


@pytest.mark.exhaustive
def test_a_database_of_three_nodes_does_not_grow_in_an_hour(cluster: EtcdCluster) -> None:
    # Without compaction it would have a third more than the bound by then.
    growth = Growth(cluster, nodes=3).pass_time(1)
    assert growth.beats >= 3 * 3_600 // BEAT_S
    assert max(growth.files) < 3 * BOUND_BYTES
    # One member of three compacts each time.
    assert 3_600 // (HISTORY_S + BEAT_S) - 2 <= growth.compactions <= 3_600 // HISTORY_S


def test_a_beat_is_small(cluster: EtcdCluster) -> None:
    growth = Growth(cluster, history_s=0).pass_time(2, HALF_HOUR_S)
    assert growth.compactions == 0
    assert (growth.in_use[1] - growth.in_use[0]) / (HALF_HOUR_S // BEAT_S) < SMALL_BYTES
