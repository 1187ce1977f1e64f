"""A directory's watch of a real etcd: what it sees of changes, of a history that is gone, and of an etcd that is."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Outcome, Transaction
from gpulease.daemon.fleet.records.fleet_records import HORIZON, name_key, node_key
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.protocol import Failure, Status
from gpulease.protocol.codec import parse_body
from gpulease.protocol.messages import Place, Placement, Report
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_directory import put_claim, put_node, record_of
from helpers.waiting import PATIENCE_S

ADDRESS = "tls:gpu.example:7443"


class CompactingClient(EtcdClient):
    """A client that loses the history behind its first read, before a watch can begin there."""

    def __init__(self, cluster: EtcdCluster) -> None:
        super().__init__(EtcdSettings(cluster.endpoints))
        self._cluster = cluster
        self.reads = 0

    async def do(self, transaction: Transaction) -> Outcome:
        outcome = await super().do(transaction)
        if any(read.is_prefix for read in transaction.reads):
            self.reads += 1
            if self.reads == 1:
                await asyncio.to_thread(self._lose_history)
        return outcome

    def _lose_history(self) -> None:
        for node_id in ("n2", "n3"):
            put_node(self._cluster, node_id, record_of(ADDRESS))
        self._cluster.control("del", node_key("n2").decode())
        found = json.loads(self._cluster.control("get", "--write-out=json", node_key("n3").decode()))
        self._cluster.compact(int(found["header"]["revision"]))


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what) from None


def run_beside(make: Callable[[], EtcdClient], play: Callable[[FleetWatch], Awaitable[None]]) -> None:
    """Let a watch run beside a test."""

    async def run() -> None:
        client = make()
        watch = FleetWatch(client, PlacementOrder.PACK)
        task = asyncio.ensure_future(watch.run())
        try:
            await play(watch)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    asyncio.run(run())


def place(watch: FleetWatch, name: str = "") -> Placement | Failure:
    return watch.place(Place(1 << 30, 0, name, (), None, ()), "ann", is_operator=False)


def ids(watch: FleetWatch) -> list[str]:
    return sorted(watch.view.nodes)


def test_a_view_follows_nodes_and_names(cluster: EtcdCluster) -> None:
    put_node(cluster, "n1", record_of(ADDRESS))

    async def play(watch: FleetWatch) -> None:
        failure = place(watch)
        assert isinstance(failure, Failure)
        assert "has not read the fleet's records from etcd yet" in failure.message
        await until(lambda: ids(watch) == ["n1"], "it reads what was there")
        await asyncio.to_thread(put_node, cluster, "n2", record_of(ADDRESS, free_bytes=0))
        await until(lambda: ids(watch) == ["n1", "n2"], "it sees a node that joins")
        incarnation = watch.view.nodes["n2"].incarnation
        await asyncio.to_thread(put_claim, cluster, "model-a", "n2", incarnation)
        await until(lambda: "model-a" in watch.view.claims, "it sees a claim")
        placed = place(watch, "model-a")
        assert isinstance(placed, Placement)
        assert placed.holder == "n2"
        listing = watch.listing("ann", is_operator=False)
        assert isinstance(listing, bytes)
        report = parse_body(Report, listing).report
        assert [name["epoch"] for name in report["names"]] == [watch.view.claims["model-a"].epoch]
        for key in (node_key("n2"), name_key("model-a")):
            await asyncio.to_thread(cluster.control, "del", key.decode())
        await until(lambda: ids(watch) == ["n1"] and not watch.view.claims, "it sees what goes")

    run_beside(lambda: EtcdClient(EtcdSettings(cluster.endpoints)), play)


def test_a_history_that_is_gone_is_read_anew(cluster: EtcdCluster) -> None:
    put_node(cluster, "n1", record_of(ADDRESS))

    async def play(watch: FleetWatch) -> None:
        await until(lambda: ids(watch) == ["n1", "n3"], "it reads anew what the watch could not tell")
        await asyncio.to_thread(put_node, cluster, "n4", record_of(ADDRESS))
        await until(lambda: ids(watch) == ["n1", "n3", "n4"], "it goes on")

    run_beside(lambda: CompactingClient(cluster), play)


def test_the_horizon_is_the_one_that_the_nodes_agreed_on(cluster: EtcdCluster) -> None:
    put_node(cluster, "n1", record_of(ADDRESS))

    def placed(watch: FleetWatch) -> bool:
        answer = place(watch)
        return isinstance(answer, Placement) and bool(answer.candidates)

    async def play(watch: FleetWatch) -> None:
        await until(lambda: placed(watch), "it names the node")
        await asyncio.to_thread(cluster.control, "put", HORIZON.decode(), "2")
        await until(lambda: not placed(watch), "the node is silent by a short horizon")
        await asyncio.to_thread(cluster.control, "put", HORIZON.decode(), "600")
        await until(lambda: placed(watch), "it is not by a long one")

    run_beside(lambda: EtcdClient(EtcdSettings(cluster.endpoints)), play)


def test_an_etcd_that_restarts_is_followed_again(cluster: EtcdCluster) -> None:
    put_node(cluster, "n1", record_of(ADDRESS))

    async def play(watch: FleetWatch) -> None:
        await until(lambda: isinstance(place(watch), Placement), "it answers")
        cluster.kill(cluster.members[0])
        await until(lambda: isinstance(place(watch), Failure), "it answers no more without etcd")
        failure = place(watch)
        assert isinstance(failure, Failure)
        assert failure.status is Status.DISCONNECTED
        assert ids(watch) == ["n1"]
        await asyncio.to_thread(cluster.restart, cluster.members[0])
        await asyncio.to_thread(put_node, cluster, "n2", record_of(ADDRESS))
        await until(lambda: ids(watch) == ["n1", "n2"] and isinstance(place(watch), Placement), "it answers again")

    run_beside(lambda: EtcdClient(EtcdSettings(cluster.endpoints)), play)
