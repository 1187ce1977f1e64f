"""The fleet process between a real etcd and a broker that the test plays."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Outcome, Transaction
from gpulease.daemon.fleet.live_claims import NOTHING_LIVES, Live, live_messages
from gpulease.daemon.fleet.machine_readings import MachineReadings
from gpulease.daemon.fleet.process import FleetProcess
from gpulease.daemon.fleet.records.fleet_records import read_inventory, read_node
from gpulease.daemon.fleet.rules.fleet_events import Effect, Event, FleetTerms, QuotaWanted
from gpulease.daemon.fleet.rules.member import Member
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, receive_message, send_message
from gpulease.daemon.sandbox.measures import SandboxSettings
from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster
from helpers.readable import readable
from helpers.waiting import PATIENCE_S, wait_until

HORIZON_S: Final = 5
CARD: Final = ["GPU-1", "card", 1 << 30, 1 << 29, 2, False]


class Broker:
    """The broker's end of the channel, and the process at the other."""

    def __init__(
        self, cluster: EtcdCluster, node: str = "node-0", live: dict[str, int] | None = None, history_s: int = 0
    ) -> None:
        self.channel, theirs = channel_pair()
        self.channel.settimeout(PATIENCE_S)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), SandboxSettings().to_text()]
            command = [sys.executable, "-P", "-m", "gpulease.daemon.fleet", *arguments]
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=python_environment())
        identity = {"cluster_id": 0, "generation": "", "revision": 0}
        start: dict[str, Any] = {"etcd": cluster.endpoints, "files": [], "node": node}
        start |= {"horizon_s": HORIZON_S, "incarnation": 0, "identity": identity, "mark": {}, "timeout_s": 1.0}
        start["history_s"] = history_s
        send_message(self.channel, start)
        self.record = {"op": "record", "addresses": ["tls:h:1"], "labels": {"zone": "a"}, "cards": [CARD]}
        send_message(self.channel, self.record | {"is_draining": False, "version": "1"})
        for message in live_messages(Live(live or {}, {})):
            send_message(self.channel, message)
        self.said: list[dict[str, Any]] = []

    def until(self, op: str) -> dict[str, Any]:
        """The next message of that op; horizons before it are set, and marks are kept."""
        while True:
            message, _ = receive_message(self.channel)
            self.said.append(message)
            if message["op"] == "mark" != op:
                send_message(self.channel, {"op": "mark_kept", "beat": message["mark"]["beat"]})
            if message["op"] == "horizon":
                send_message(self.channel, {"op": "horizon_set"})
            if message["op"] == op:
                return message

    def next_horizon(self) -> None:
        """Wait for the next horizon, and do not set it."""
        while (message := receive_message(self.channel)[0])["op"] != "horizon":
            if message["op"] == "mark":
                send_message(self.channel, {"op": "mark_kept", "beat": message["mark"]["beat"]})

    def claim(self, number: int, name: str, wait_ms: int = 60_000) -> None:
        """Ask for a name. An etcd of a busy host answers late: who waits gets it all the same."""
        message = {"op": "claim", "number": number, "name": name, "lease_id": f"{number:032x}", "tenant": "ann"}
        send_message(self.channel, message | {"wait_ms": wait_ms})

    def end(self) -> None:
        """Go away, which ends the process."""
        self.channel.close()
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def broker(cluster: EtcdCluster) -> Iterator[Broker]:
    broker = Broker(cluster)
    yield broker
    broker.end()


def test_it_takes_etcd_s_history_away(cluster: EtcdCluster) -> None:
    cluster.control("put", "/old", "1")
    found = json.loads(cluster.control("get", "--write-out=json", "/old"))
    broker = Broker(cluster, history_s=1)
    try:

        def is_gone() -> bool:
            broker.until("horizon")
            read = cluster.try_control("get", f"--rev={found['header']['revision']}", "/old")
            return "has been compacted" in read.stderr + read.stdout

        wait_until(is_gone, "the history before the fleet's mark is gone")
        assert cluster.control("get", "--print-value-only", "/old") == "1\n"
    finally:
        broker.end()


def test_it_tells_the_size_of_etcd_s_largest_database(cluster: EtcdCluster, broker: Broker) -> None:
    store = broker.until("store")
    assert (store["endpoint"], store["size_bytes"] > 0) == (cluster.members[0].endpoint, True)


def test_it_joins_beats_and_claims(cluster: EtcdCluster, broker: Broker) -> None:
    began_ns = boot_ns()
    assert broker.until("joined")["identity"]["cluster_id"] != 0
    first = broker.until("horizon")
    assert began_ns < first["boot_ns"] < boot_ns() + HORIZON_S * 10**9
    found = cluster.control("get", "/gpulease/v1/inventories/node-0", "--print-value-only")
    record = readable(read_inventory(found.encode()))
    assert (record.addresses, record.labels, record.cards[0].uuid) == (("tls:h:1",), {"zone": "a"}, "GPU-1")
    assert broker.until("horizon")["boot_ns"] > first["boot_ns"]
    broker.claim(1, "model-a")
    claimed = broker.until("claimed")
    assert (claimed["number"], claimed["epoch"] > 0) == (1, True)
    broker.claim(2, "model-a", wait_ms=0)
    assert broker.until("refused")["why"] == "taken"
    send_message(broker.channel, {"op": "ended", "name": "model-a", "epoch": claimed["epoch"]})
    broker.claim(3, "model-a")
    assert broker.until("claimed")["epoch"] > claimed["epoch"]


def test_it_does_not_beat_for_a_broker_that_hangs(cluster: EtcdCluster, broker: Broker) -> None:
    """The second horizon is not set, so no third comes, and the node's record stays as it is."""
    broker.until("horizon")
    broker.next_horizon()
    asked = ("get", "/gpulease/v1/nodes/node-0", "--print-value-only")
    before = cluster.control(*asked)
    broker.channel.settimeout(HORIZON_S / 2)
    with pytest.raises((BlockingIOError, TimeoutError, ChannelClosed)):
        broker.next_horizon()
    assert cluster.control(*asked) == before
    broker.channel.settimeout(PATIENCE_S)
    send_message(broker.channel, {"op": "horizon_set"})
    broker.until("horizon")


def test_it_beats_once_the_journal_has_the_mark(cluster: EtcdCluster, broker: Broker) -> None:
    """A journal that does not answer is asked again, and what it answers late is no answer to that."""
    beats = [broker.until("mark")["mark"]["beat"] for _ in range(2)]
    asked = ("get", "/gpulease/v1/nodes/node-0", "--print-value-only")
    assert readable(read_node(cluster.control(*asked).encode())).beat < beats[0] < beats[1]
    send_message(broker.channel, {"op": "mark_kept", "beat": beats[0]})
    broker.until("horizon")
    assert readable(read_node(cluster.control(*asked).encode())).beat > beats[1]


def test_leases_of_a_node_that_the_fleet_gave_up_end(cluster: EtcdCluster) -> None:
    """The node has leases, and no membership that it could go on with."""
    broker = Broker(cluster, live={"model-a": 5})
    broker.until("lost")
    for message in live_messages(NOTHING_LIVES):
        send_message(broker.channel, message)
    broker.until("horizon")
    broker.end()


class FaultyMember(Member):
    """Rules with a fault: they can't handle a wish for bytes."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        if isinstance(event, QuotaWanted):
            raise ValueError("a fault of the rules")
        return super().handle(event, now_ns)


class FaultyClient(EtcdClient):
    """A client with a fault: it returns no outcome."""

    async def do(self, transaction: Transaction) -> Outcome:
        raise ValueError("a fault of the client")


def test_no_fault_leaves_a_request_without_an_answer() -> None:
    """What nobody can answer any more is answered by the process's end: the broker refuses all who wait then."""
    heard: list[dict[str, Any]] = []

    async def play() -> None:
        ours, theirs = channel_pair()
        ours.setblocking(False)
        client = FaultyClient(EtcdSettings(("127.0.0.1:1",)))
        member = FaultyMember("node-0", FleetTerms(HORIZON_S), instance="n")
        readings = MachineReadings()
        try:
            running = asyncio.ensure_future(FleetProcess(member, client, theirs, lambda *_: None, readings).run())
            for message in live_messages(NOTHING_LIVES):
                send_message(ours, message)
            claim = {"op": "claim", "number": 1, "name": "m", "lease_id": "0" * 32, "tenant": "ann", "wait_ms": 0}
            send_message(ours, claim)
            send_message(ours, {"op": "claim", "number": 2})
            send_message(ours, {"op": "count", "number": 3, "wait_ms": "soon"})

            def is_answered() -> bool:
                texts = [message.get("text", "") for message in heard]
                numbers = {message.get("number") for message in heard}
                return {1, 2, 3} <= numbers and any("a fault of the client" in text for text in texts)

            async with asyncio.timeout(PATIENCE_S):
                while not is_answered():
                    with contextlib.suppress(BlockingIOError):
                        heard.append(receive_message(ours)[0])
                    assert not running.done(), "it goes on after those"
                    await asyncio.sleep(0.001)
            wanted = {"op": "count", "number": 4, "tenant": "ann", "lease_id": "0" * 32, "size_bytes": 1, "wait_ms": 0}
            send_message(ours, wanted)
            async with asyncio.timeout(PATIENCE_S):
                await running
        finally:
            await client.close()
            readings.close()
            ours.close()
            theirs.close()

    asyncio.run(play())
    answers = {message["number"]: (message["op"], message["why"]) for message in heard if "number" in message}
    assert answers == {1: ("refused", "isolated"), 2: ("refused", "rejected"), 3: ("not_counted", "rejected")}
