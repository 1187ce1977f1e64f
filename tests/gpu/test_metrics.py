"""Metrics of real cards: their labels match those of other exporters, counts are right, and no end of a lease leaks
anything.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpulease.client import GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.card_daemon import daemon_on
from helpers.daemon import Daemon
from helpers.kernels import check_main_job, start_endless
from helpers.nvml import Cards
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

GIB = 1 << 30


@pytest.fixture
def whole(cards: Cards) -> Iterator[Daemon]:
    """Yield a daemon that leases all memory of each card."""
    with daemon_on(cards, vram=()) as daemon:
        yield daemon


def told(daemon: Daemon) -> dict[str, dict[str, float]]:
    """Return the metrics by name and card, as sums over all tenants."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(ask(Opcode.METRICS, Empty(), daemon.address).exposition):
        for sample in family.samples:
            by_card = found.setdefault(sample.name, {})
            card = sample.labels.get("UUID", "")
            by_card[card] = by_card.get(card, 0.0) + sample.value
    return found


def test_cards_are_told_as_nvml_knows_them_and_nothing_leaks(whole: Daemon, cards: Cards) -> None:
    first = cards.uuids()[0]
    assert set(told(whole)["gpu_lease_leaked_bytes"]) == set(cards.uuids())
    with whole.builder(4 * GIB).device(0).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        kept = session.mem_alloc(3 * GIB)
        during = told(whole)
        assert during["gpu_session_mem_alloc_bytes"][first] >= kept.size_bytes
        assert during["gpu_lease_leaked_bytes"] == dict.fromkeys(cards.uuids(), 0)
    killed = whole.builder(2 * GIB, seconds=60).device(0).acquire()
    session = GpuSession(killed)
    endless = start_endless(session)
    os.kill(whole.worker_pid(killed.lease_id), signal.SIGKILL)
    whole.wait_for_end(killed.lease_id)
    del endless
    wait_until(
        lambda: told(whole)["gpu_lease_leaked_bytes"] == dict.fromkeys(cards.uuids(), 0),
        "nothing is leaked",
        seen=lambda: told(whole)["gpu_lease_leaked_bytes"],
    )
    after = told(whole)
    assert after["gpu_lease_acquired_total"][first] == after["gpu_lease_dropped_total"][first] == 2
    assert after["gpu_lease_reclaim_seconds_count"][first] == 2
    assert after["gpu_session_launch_total"][first] >= 3
    assert after["gpu_lease_fenced_slices"] == dict.fromkeys(cards.uuids(), 0)
