"""Programs outside gpulease use a real card as well. No slice may be fenced because of memory that they leave used."""

import pytest

from gpulease.client import GpuSession
from helpers.card_daemon import daemon_on
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.nvml import Cards
from helpers.outside_program import outside_program
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

WARM = 4
PROGRAMS = 3
LEASES = 4
SLICE_BYTES = 64 << 20


def wait_until_full(daemon: Daemon) -> None:
    def is_full() -> bool:
        return all(card["warm_contexts"] == WARM for card in daemon.inventory().details)

    wait_until(is_full, "the pool is full", 60, seen=daemon.log)


def wait_for_outside_bytes(daemon: Daemon, held: int) -> None:
    def is_booked() -> bool:
        return bool(daemon.inventory().details[0]["outside_bytes"] == held)

    wait_until(is_booked, "what programs hold is off the capacity", seen=daemon.inventory)


def test_programs_with_managed_memory_come_and_go_beside_leases(cards: Cards) -> None:
    """The driver keeps their memory until the card's last context ends, and the pool's contexts do not end."""
    with daemon_on(cards, vram=(), config=f"warm_contexts = {WARM}\n[limits]\nreclaim_timeout_s = 10\n") as daemon:
        wait_until_full(daemon)
        capacity = daemon.inventory().details[0]["capacity_bytes"]
        for _ in range(PROGRAMS):
            with outside_program() as pid:
                for _ in range(LEASES):
                    with daemon.builder(SLICE_BYTES).device(0).acquire() as lease, GpuSession(lease) as session:
                        check_main_job(session)
                wait_for_outside_bytes(daemon, cards.process_bytes(0, pid))
            with daemon.builder(SLICE_BYTES).device(0).acquire() as lease, GpuSession(lease) as session:
                check_main_job(session)
        wait_for_outside_bytes(daemon, 0)
        wait_until_full(daemon)
        card = daemon.inventory().details[0]
        assert card["fenced_bytes"] == 0
        assert card["capacity_bytes"] == capacity - card["unowned_bytes"]
