"""Several real cards: the daemon and every worker distinguish them. Skipped if there are fewer than two."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import CapacityExceeded, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode, RevokeOutcome
from gpulease.protocol.messages import FenceClear
from gpulease.protocol.opcodes import InventoryFlag
from helpers.daemon import Daemon, Faults, python_environment
from helpers.kernels import check_main_job
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

GIB = 1 << 30

# Prints which of the host's cards a worker's process can see, once it has opened its context.
WHAT_IS_SEEN = """
import json, os, sys
from gpulease.daemon.drivers.cuda.driver import CudaDriver
driver = CudaDriver()
driver.preload()
driver.open_context(sys.argv[1], 1 << 20)
import pycuda.driver as cuda
print(json.dumps([cuda.Device(number).pci_bus_id() for number in range(cuda.Device.count())]), flush=True)
# As a worker ends: pycuda aborts a process that leaves its context behind.
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _two_cards(cards: Cards) -> None:
    if len(cards.uuids()) < 2:
        pytest.skip("this host has one card")


def test_the_fuller_card_is_passed_by(daemon: Daemon, cards: Cards) -> None:
    first, second = cards.uuids()[:2]
    with ExitStack() as stack:
        for index, uuid in ((0, first), (1, second)):
            full = stack.enter_context(daemon.builder(GIB).device(index).acquire())
            assert full.card_uuid == uuid
            if index == 0:
                with daemon.builder(GIB).acquire() as lease:
                    assert lease.card_uuid != first
        # Each card has at most 5 GiB left, so two leases of 2.5 GiB with their overhead do not fit on one card.
        others = [stack.enter_context(daemon.builder(5 * GIB // 2).acquire()) for _ in cards.uuids()]
        assert len({lease.card_uuid for lease in others}) >= 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_lease_pinned_by_uuid_is_on_that_card_alone(daemon: Daemon, cards: Cards, index: int) -> None:
    uuid = cards.uuids()[index]
    used = cards.used_bytes()
    with daemon.builder(GIB).device(uuid).acquire() as lease, GpuSession(lease) as session:
        assert lease.card_uuid == session.card_uuid == uuid
        held_buffer = session.mem_alloc(GIB - (4 << 20))
        check_main_job(session)
        pid = daemon.worker_pid(lease.lease_id)
        held = [cards.process_bytes(card, pid) for card in range(len(used))]
        assert held[index] >= GIB - (4 << 20)
        assert sum(held) == held[index]
        session.mem_free(held_buffer)


def test_a_worker_sees_its_own_card_alone(cards: Cards) -> None:
    seen = set()
    for uuid in cards.uuids()[:2]:
        command = [sys.executable, "-P", "-c", WHAT_IS_SEEN, uuid]
        done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True, timeout=60)
        (bus_id,) = json.loads(done.stdout)
        seen.add(bus_id)
    assert len(seen) == 2


def test_a_fenced_card_takes_no_lease_while_the_other_goes_on(
    cards: Cards, tmp_path: Path, start_daemon: Callable[..., Any]
) -> None:
    withheld = tmp_path / "withheld"
    daemon = start_daemon(
        driver="cuda",
        vram=("8GiB",),
        config="[limits]\nreclaim_timeout_s = 1\n",
        faults=Faults(withhold_proof_while=withheld),
    )
    first, second = cards.uuids()[:2]
    with daemon.builder(GIB).device(second).acquire() as other, GpuSession(other) as session:
        check_main_job(session)
        whole = daemon.available_bytes()
        lost = daemon.builder(whole).device(first).acquire()
        withheld.touch()
        assert daemon.revoke(lost.lease_id) == RevokeOutcome.FENCED
        assert daemon.inventory().entries[0].flags == InventoryFlag.FENCED
        assert daemon.inventory().entries[1].flags == 0
        withheld.unlink()
        with pytest.raises(CapacityExceeded):
            daemon.builder().device(first).acquire()
        check_main_job(session)
        with daemon.builder().acquire() as lease, GpuSession(lease) as beside:
            assert lease.card_uuid != first
            check_main_job(beside)
        assert ask(Opcode.FENCE_CLEAR, FenceClear(None), daemon.address).count == 1
        with daemon.builder(whole).device(first).acquire() as again, GpuSession(again) as working:
            check_main_job(working)
