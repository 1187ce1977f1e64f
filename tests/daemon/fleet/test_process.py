"""The fleet process between a real etcd and a broker that the test plays."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, get_args

import pytest

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.contract.message_fields import Message, expect_message
from gpulease.daemon.contract.messages import FROM_HELPER
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Outcome, Transaction
from gpulease.daemon.fleet.fleet_messages import FROM_FLEET, FleetStart, HorizonSet, StoreMeasured
from gpulease.daemon.fleet.live_claims import parts_of
from gpulease.daemon.fleet.machine_readings import MachineReadings
from gpulease.daemon.fleet.process import FleetProcess
from gpulease.daemon.fleet.records.fleet_records import CardRecord, InventoryRecord, read_node
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimEnded,
    ClaimGiven,
    ClaimRefusal,
    ClaimRefused,
    ClaimWanted,
    DaemonMark,
    Effect,
    EndClaimed,
    Event,
    FleetIdentity,
    FleetTerms,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    MoveHorizon,
    QuotaWanted,
    RecordChanged,
)
from gpulease.daemon.fleet.rules.member import Member
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, receive_message, send_message
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.protocol.time_units import NS_PER_S
from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster
from helpers.process_messages import TO_FLEET
from helpers.readable import readable
from helpers.waiting import PATIENCE_S, wait_until

HORIZON_S: Final = 5
CARD: Final = CardRecord("GPU-1", "card", 1 << 30, 1 << 29, 2, is_partition=False)
M = TypeVar("M", bound=Message)


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
        start = FleetStart(
            etcd=tuple(cluster.endpoints),
            files=(),
            node=node,
            horizon_s=HORIZON_S,
            history_s=history_s,
            timeout_s=1.0,
            incarnation=0,
            identity=FleetIdentity(),
            mark=DaemonMark(),
        )
        self.send(start)
        self.send(RecordChanged(("tls:h:1",), {"zone": "a"}, (CARD,), is_draining=False, version="1"))
        self.send_live(LiveClaims(live or {}))
        self.said: list[Message] = []

    def send(self, message: Message) -> None:
        send_message(self.channel, message.to_map())

    def send_live(self, live: LiveClaims) -> None:
        for message in parts_of(live):
            self.send(message)

    def receive(self) -> Message:
        return expect_message({**FROM_HELPER, **FROM_FLEET}, receive_message(self.channel)[0])

    def until(self, kind: type[M]) -> M:
        """The next message of that class; horizons before it are set, and marks are kept."""
        while True:
            message = self.receive()
            self.said.append(message)
            if isinstance(message, KeepMark) and kind is not KeepMark:
                self.send(MarkKept(message.mark.beat))
            if isinstance(message, MoveHorizon):
                self.send(HorizonSet())
            if isinstance(message, kind):
                return message

    def next_horizon(self) -> None:
        """Wait for the next horizon, and do not set it."""
        while not isinstance(message := self.receive(), MoveHorizon):
            if isinstance(message, KeepMark):
                self.send(MarkKept(message.mark.beat))

    def claim(self, number: int, name: str, wait_s: float = 60) -> None:
        """Ask for a name. An etcd of a busy host answers late: who waits gets it all the same."""
        self.send(ClaimWanted(number, name, f"{number:032x}", "ann", boot_ns() + int(wait_s * NS_PER_S)))

    def end(self) -> None:
        """Go away, which ends the process."""
        self.channel.close()
        assert self.process.wait(PATIENCE_S) == 0


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
            broker.until(MoveHorizon)
            read = cluster.try_control("get", f"--rev={found['header']['revision']}", "/old")
            return "has been compacted" in read.stderr + read.stdout

        wait_until(is_gone, "the history before the fleet's mark is gone")
        assert cluster.control("get", "--print-value-only", "/old") == "1\n"
    finally:
        broker.end()


def test_it_tells_the_size_of_etcd_s_largest_database(cluster: EtcdCluster, broker: Broker) -> None:
    store = broker.until(StoreMeasured).store
    assert (store.endpoint, store.size_bytes > 0) == (cluster.members[0].endpoint, True)


def test_it_joins_beats_and_claims(cluster: EtcdCluster, broker: Broker) -> None:
    began_ns = boot_ns()
    assert broker.until(Joined).identity.cluster_id != 0
    first = broker.until(MoveHorizon)
    assert began_ns < first.horizon_ns < boot_ns() + HORIZON_S * 10**9
    found = cluster.control("get", "/gpulease/v1/inventories/node-0", "--print-value-only")
    record = readable(InventoryRecord.read(found.encode()))
    assert (record.addresses, record.labels, record.cards[0].uuid) == (("tls:h:1",), {"zone": "a"}, "GPU-1")
    assert broker.until(MoveHorizon).horizon_ns > first.horizon_ns
    broker.claim(1, "model-a")
    claimed = broker.until(ClaimGiven)
    assert (claimed.request, claimed.epoch > 0) == (1, True)
    broker.claim(2, "model-a", wait_s=0)
    assert broker.until(ClaimRefused).why is ClaimRefusal.TAKEN
    broker.send(ClaimEnded("model-a", claimed.epoch))
    broker.claim(3, "model-a")
    assert broker.until(ClaimGiven).epoch > claimed.epoch


def test_it_does_not_beat_for_a_broker_that_hangs(cluster: EtcdCluster, broker: Broker) -> None:
    """The second horizon is not set, so no third comes, and the node's record stays as it is."""
    broker.until(MoveHorizon)
    broker.next_horizon()
    asked = ("get", "/gpulease/v1/nodes/node-0", "--print-value-only")
    before = cluster.control(*asked)
    broker.channel.settimeout(HORIZON_S / 2)
    with pytest.raises((BlockingIOError, TimeoutError, ChannelClosed)):
        broker.next_horizon()
    assert cluster.control(*asked) == before
    broker.channel.settimeout(PATIENCE_S)
    broker.send(HorizonSet())
    broker.until(MoveHorizon)


@pytest.mark.parametrize("has_joined", [False, True])
def test_it_joins_and_beats_once_the_journal_has_the_mark(
    cluster: EtcdCluster, broker: Broker, has_joined: bool
) -> None:
    """A journal that does not answer is asked again, and what it answers late is no answer to that."""

    def beat() -> int:
        found = cluster.control("get", "/gpulease/v1/nodes/node-0", "--print-value-only")
        return readable(read_node(found.encode())).beat if found else 0

    if has_joined:
        broker.until(Joined)
    beats = [broker.until(KeepMark).mark.beat for _ in range(2)]
    assert (beat() > 0) == has_joined
    assert beat() < beats[0] < beats[1]
    broker.send(MarkKept(beats[0]))
    broker.until(MoveHorizon)
    assert beat() > beats[1]


def test_leases_of_a_node_that_the_fleet_gave_up_end(cluster: EtcdCluster) -> None:
    """The node has leases, and no membership that it could go on with."""
    broker = Broker(cluster, live={"model-a": 5})
    broker.until(EndClaimed)
    broker.send_live(LiveClaims())
    broker.until(MoveHorizon)
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
            for message in parts_of(LiveClaims()):
                send_message(ours, message.to_map())
            send_message(ours, ClaimWanted(1, "m", "0" * 32, "ann").to_map())
            send_message(ours, {"op": "claim", "number": 2})
            send_message(ours, {"op": "count", "number": 3, "wait_until_ns": "soon"})

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
            send_message(ours, QuotaWanted(4, "ann", 1, "0" * 32).to_map())
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


def test_the_process_handles_every_message_of_the_broker() -> None:
    async def play() -> None:
        ours, theirs = channel_pair()
        ours.setblocking(False)
        client = EtcdClient(EtcdSettings(("127.0.0.1:1",)))
        readings = MachineReadings()
        files: list[Sequence[str]] = []
        try:
            member = Member("node-0", FleetTerms(HORIZON_S), instance="n")
            process = FleetProcess(member, client, theirs, lambda names, _: files.append(names), readings)
            for message in TO_FLEET.messages:
                process._take(message, [])  # type: ignore[arg-type]
            assert not process._ended.is_set()
            assert process._handlers.keys() == set(get_args(Effect)), "every effect of the rules has a handler"
            assert (files, receive_message(ours)[0]) == ([("ca",)], {"op": "pong"})
        finally:
            await client.close()
            readings.close()
            ours.close()
            theirs.close()

    asyncio.run(play())
