"""What a directory counts, and how it is told."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpulease.daemon.fleet.directory.directory_metrics import DIRECTORY_FAMILIES, FRESH_S, DirectoryMetrics
from gpulease.daemon.fleet.directory.fleet_watch import VIEW_LIMIT_S, FleetWatch
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import ClaimRecord, NodeRecord, name_key, node_key
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.record.metrics.families import FAMILIES
from gpulease.protocol.messages import Place
from helpers.fleet_directory import record_of

MANUAL = Path(__file__).parents[4] / "daemon" / "manual" / "fleet.md"
HORIZON_S = 30.0


class Scene:
    """A fleet of one node, read from no etcd, at a time that the test sets."""

    def __init__(self, client: EtcdClient) -> None:
        self.now_s = 100.0
        self.fleet = FleetWatch(client, PlacementOrder.PACK, clock=lambda: self.now_s)
        self.fleet.view.put(
            KeyValue(node_key("n1"), NodeRecord("n", inventory=record_of("tls:h:1")).encode(), 3, 4), self.now_s
        )
        self.fleet.view.put(KeyValue(node_key("n2"), b"no record", 3, 4), self.now_s)
        claim = ClaimRecord("n1", 3, "0" * 32, "ann", "n")
        self.fleet.view.put(KeyValue(name_key("model-a"), claim.encode(), 7, 7), self.now_s)
        self.confirm()
        self.metrics = DirectoryMetrics(self.fleet, lambda: 5, lambda: self.now_s)

    def confirm(self) -> None:
        self.fleet._is_read, self.fleet._confirmed_s = True, self.now_s

    def place(self, size_bytes: int) -> None:
        self.fleet.place(Place(size_bytes, 0, "", (), None, ()), "ann", is_operator=False)

    def told(self) -> dict[str, float]:
        """Series of the directory's own, a second later."""
        self.now_s += FRESH_S
        found = {}
        for family in text_string_to_metric_families(self.metrics.text().decode()):
            for sample in family.samples:
                found[" ".join([sample.name, *sample.labels.values()])] = sample.value
        return {name: value for name, value in found.items() if name.startswith("gpu_directory")}


@pytest.fixture
def scene() -> Iterator[Scene]:
    async def make() -> EtcdClient:
        return EtcdClient(EtcdSettings(("127.0.0.1:1",)))

    with asyncio.Runner() as runner:
        client = runner.run(make())
        yield Scene(client)
        runner.run(client.close())
        runner.run(asyncio.sleep(0))


def test_each_answer_is_counted_by_its_result(scene: Scene) -> None:
    begun = scene.told()
    assert begun == {
        "gpu_directory_placements_total placed": 0,
        "gpu_directory_placements_total unplaced": 0,
        "gpu_directory_listings_total listed": 0,
        "gpu_directory_nodes ready": 1,
        "gpu_directory_nodes draining": 0,
        "gpu_directory_nodes silent": 0,
        "gpu_directory_names": 1,
        "gpu_directory_view_age_seconds": FRESH_S,
        "gpu_directory_current": 1,
        "gpu_directory_bad_records_total": 1,
        "gpu_directory_connections": 5,
    }
    for size_bytes in (1, 1, 1 << 50):
        scene.place(size_bytes)
    scene.fleet.listing("ann", is_operator=False)
    now = scene.told()
    changed = {name: value for name, value in now.items() if value != begun[name]}
    assert changed == {
        "gpu_directory_placements_total placed": 2,
        "gpu_directory_placements_total unplaced": 1,
        "gpu_directory_listings_total listed": 1,
        "gpu_directory_view_age_seconds": 2 * FRESH_S,
    }


def test_a_view_that_is_too_old_is_told(scene: Scene) -> None:
    scene.now_s += VIEW_LIMIT_S
    scene.place(1)
    scene.fleet.listing("ann", is_operator=False)
    told = scene.told()
    assert not scene.metrics.is_ready
    assert told["gpu_directory_current"] == 0
    assert told["gpu_directory_view_age_seconds"] == VIEW_LIMIT_S + FRESH_S
    # The view was exactly as old as it may be when both asked.
    assert told["gpu_directory_placements_total placed"] == told["gpu_directory_listings_total listed"] == 1
    scene.place(1)
    scene.fleet.listing("ann", is_operator=False)
    told = scene.told()
    assert told["gpu_directory_placements_total disconnected"] == 1
    assert told["gpu_directory_listings_total disconnected"] == 1


def test_nodes_that_drain_or_are_silent_are_told_apart(scene: Scene) -> None:
    scene.now_s += HORIZON_S
    told = scene.told()
    assert (told["gpu_directory_nodes ready"], told["gpu_directory_nodes silent"]) == (0, 1)
    draining = NodeRecord("n", inventory=replace(record_of("tls:h:1"), is_draining=True))
    scene.fleet.view.put(KeyValue(node_key("n3"), draining.encode(), 3, 4), scene.now_s)
    assert scene.told()["gpu_directory_nodes draining"] == 1


def test_a_text_is_made_once_a_second(scene: Scene) -> None:
    before = scene.metrics.text()
    scene.place(1)
    assert scene.metrics.text() is before
    assert scene.told()["gpu_directory_placements_total placed"] == 1


def test_the_manual_lists_them() -> None:
    rows = re.findall(r"^\| `(gpu_directory\w+)` \|([^|]*)\| ([^|]*) \|$", MANUAL.read_text(), flags=re.MULTILINE)
    told = {name: (tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, labels, meaning in rows}
    assert told == {family.series_names[0]: (family.labels, family.meaning) for family in DIRECTORY_FAMILIES}
    assert not {family.name for family in DIRECTORY_FAMILIES} & {family.name for family in FAMILIES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_finds_nothing_to_mend(scene: Scene) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scene.metrics.text(), capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
