"""Other programs use memory of the card and free it, as an operator and a tenant see it."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from gpulease.client import CapacityExceeded, GpuSession
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon, Faults, running
from helpers.lasting import LastingDaemon
from helpers.log_story import records_of
from helpers.processes import stop_process
from helpers.waiting import wait_until

MIB = 1 << 20
CARD_MIB = 1024
WARM = 2

SETTLE_NS = 300_000_000
LOOK_S = 0.05


@pytest.fixture
def others(tmp_path: Path) -> Path:
    return tmp_path / "others"


@pytest.fixture
def daemon(others: Path) -> Iterator[Daemon]:
    constants = {
        "gpulease.daemon.leases.devices:SETTLE_NS": SETTLE_NS,
        "gpulease.daemon.workers.monitors:ROUND_S": LOOK_S,
    }
    faults = Faults(constants=constants, others_in=others)
    with running(
        Daemon(vram=(f"{CARD_MIB}MiB",), config=f"warm_contexts = {WARM}\n", faults=faults, log_format="json")
    ) as daemon:
        yield daemon


def hold(others: Path, unowned_mib: int, outside_mib: int = 0) -> None:
    fresh = others.with_suffix(".new")
    fresh.write_text(f"{unowned_mib * MIB} {outside_mib * MIB}")
    fresh.replace(others)


def wait_for_figures(daemon: Daemon, capacity_mib: int, unowned_mib: int, outside_mib: int) -> None:
    wanted = (capacity_mib * MIB, unowned_mib * MIB, outside_mib * MIB)

    def figures() -> tuple[int, int, int]:
        (card,) = daemon.inventory().details
        return card["capacity_bytes"], card["unowned_bytes"], card["outside_bytes"]

    wait_until(lambda: figures() == wanted, f"the card shows {wanted}", seen=figures)


def wait_until_full(daemon: Daemon) -> None:
    wait_until(lambda: daemon.inventory().details[0]["warm_contexts"] == WARM, "the pool is full")


@pytest.mark.exhaustive
def test_what_stays_behind_a_dead_worker_is_the_nodes_and_fences_nothing(daemon: Daemon, others: Path) -> None:
    wait_until_full(daemon)
    lease = daemon.builder(100 * MIB).acquire()
    beside = daemon.builder(100 * MIB).acquire()
    hold(others, 150)
    lease.free()
    assert daemon.inventory().details[0]["fenced_bytes"] == 0
    wait_for_figures(daemon, CARD_MIB - 150, 150, 0)
    done = CliRunner().invoke(main, ["info"], env={ADDRESS_VARIABLE: daemon.address, "COLUMNS": "200"})
    assert "GPU 0: since the daemon started, memory was taken by others: 150 MiB by the driver." in done.stdout
    told = text_string_to_metric_families(ask(Opcode.METRICS, Empty(), daemon.address).exposition)
    (family,) = [family for family in told if family.name == "gpulease_card_others_bytes"]
    assert {sample.labels["holder"]: sample.value for sample in family.samples} == {"unowned": 150 * MIB, "outside": 0}
    with pytest.raises(CapacityExceeded):
        daemon.builder((CARD_MIB - 150 - 99) * MIB).acquire()
    with GpuSession(beside) as session:
        session.sync()
    others.unlink()
    wait_for_figures(daemon, CARD_MIB, 0, 0)
    daemon.builder((CARD_MIB - 150 - 99) * MIB).acquire().free()
    beside.free()
    wait_until_full(daemon)


@pytest.mark.exhaustive
def test_a_program_that_takes_the_card_is_told_of(daemon: Daemon, others: Path) -> None:
    hold(others, 0, 1000)
    wait_for_figures(daemon, CARD_MIB - 1000, 0, 1000)
    with pytest.raises(CapacityExceeded):
        daemon.builder(100 * MIB).acquire()

    def told() -> list[tuple[int, int]]:
        shrank = [record for record in records_of(daemon.log()) if record["event"] == "card.shrank"]
        return [(record["outside_bytes"], record["capacity_bytes"]) for record in shrank]

    # A thread writes the log, so the record may come after the answer.
    wait_until(lambda: told() == [(1000 * MIB, 24 * MIB)], "the log says so once", seen=told)
    others.unlink()
    wait_for_figures(daemon, CARD_MIB, 0, 0)
    daemon.builder(100 * MIB).acquire().free()


def test_a_killed_nodes_card_is_granted_only_once_it_was_read(tmp_path: Path, others: Path) -> None:
    """Broker and zygote are killed together, and the card can't be read when the next daemon starts.

    A worker that no record names could still hold its bytes on the card.
    """
    unread = tmp_path / "unread"
    faults = Faults(
        constants={"gpulease.daemon.workers.monitors:ROUND_S": LOOK_S}, others_in=others, withhold_proof_while=unread
    )
    node = LastingDaemon(vram=(f"{CARD_MIB}MiB",))
    try:
        first = node.start(faults)
        first.allowed_trouble.append("the zygote died")
        first.builder(900 * MIB).acquire()
        stop_process(first.process.pid)
        os.kill(node.zygotes()[0], signal.SIGKILL)
        node.kill()
        hold(others, 0, 900)
        unread.touch()
        again = node.start(faults)
        again.allowed_trouble.append("nothing is granted on it until it can be read")
        with pytest.raises(CapacityExceeded, match="could not be read yet"):
            again.builder(100 * MIB).acquire()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(again.builder(100 * MIB).timeout(60).acquire)
            unread.unlink()
            waiting.result().free()
        with pytest.raises(CapacityExceeded, match="other leases use the memory"):
            again.builder(200 * MIB).acquire()
        assert [card["outside_bytes"] for card in again.inventory().details] == [900 * MIB]
    finally:
        node.stop()
