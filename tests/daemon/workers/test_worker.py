"""Counters on workers' pages, also those that lie."""

import socket
from collections.abc import Iterator
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import SESSION_TOTALS, BrokerPage, Counter, WorkerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.record.metrics import families
from gpulease.daemon.workers.worker import MAX_COUNT, Worker, counter_increments, held_bytes, skip_counts
from gpulease.daemon.workers.zygote_client import ZygoteClient


class Scene:
    """A worker without a process: its page is all that is looked at."""

    def __init__(self) -> None:
        page = BrokerPage()
        self.own = WorkerPage(page.fds)
        spec = WorkerSpec(5, "GPU-a", 1, is_shared=False)
        self.worker = Worker(spec, page, cast(socket.socket, None), cast(ZygoteClient, None), is_ready=True)

    def shows(self, **counts: int) -> None:
        for name, count in counts.items():
            self.own.counters[Counter[name]] = count

    def news(self) -> dict[str, float]:
        return {family.name: more for family, more in counter_increments(self.worker)}


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.own.close()
    made.worker.page.close()


def test_each_thing_is_told_once(scene: Scene) -> None:
    assert scene.news() == {}
    scene.shows(LAUNCHES=10, OPS=12, COPIES=2, COPIED_BYTES=100, FAILED_OPS=1)
    told = {"gpu_session_launch": 10, "gpu_session_operation": 12, "gpu_session_copy": 2}
    assert scene.news() == told | {"gpu_session_copied_bytes": 100, "gpu_session_operation_errors": 1}
    scene.shows(LAUNCHES=13)
    assert scene.news() == {"gpu_session_launch": 3}
    assert scene.news() == {}


def test_every_total_of_a_page_has_a_family_of_its_own() -> None:
    counted = {counter.metrics[0] for counter in SESSION_TOTALS}
    assert len(counted) == len(SESSION_TOTALS)
    assert {family.name for added_to in families.SESSION_FAMILIES for family in added_to} == counted


def test_waits_are_all_waits(scene: Scene) -> None:
    scene.shows(SYNCS=5, SYNC_ERRORS=2)
    assert scene.news() == {"gpu_session_sync": 7, "gpu_session_sync_errors": 2}


def test_what_another_daemon_counted_is_not_counted_again(scene: Scene) -> None:
    scene.shows(LAUNCHES=1_000_000)
    skip_counts(scene.worker)
    scene.shows(LAUNCHES=1_000_007)
    assert scene.news() == {"gpu_session_launch": 7}


@pytest.mark.parametrize("lie", [0, 9, MAX_COUNT, 2**64 - 1])
def test_a_number_that_no_counting_comes_to_is_no_news(scene: Scene, lie: int) -> None:
    scene.shows(LAUNCHES=10)
    assert scene.news() == {families.SESSION_LAUNCHES.name: 10}
    scene.shows(LAUNCHES=lie, OPS=2**64 - 1, ALLOCATED_BYTES=2**64 - 1)
    assert scene.news() == {}
    scene.shows(LAUNCHES=11)
    assert scene.news() == {families.SESSION_LAUNCHES.name: 1}
    assert held_bytes(scene.worker, 30) == 30


def test_copies_ahead_in_vain_are_reported(scene: Scene) -> None:
    scene.shows(AHEAD_DISCARDED=2, AHEAD_DISCARDED_BYTES=500)
    told = {"gpu_lease_park_ahead_discarded": 2, "gpu_lease_park_ahead_discarded_bytes": 500}
    assert scene.news() == told
