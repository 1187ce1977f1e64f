"""The workers of a real card run in the sandbox, and the driver can do everything in it that it needs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import GpuSession, GpuSessionFailed
from gpulease.client.verify.faulty_kernels import compiling_long
from helpers.daemon import Daemon
from helpers.kernels import PTX, check_main_job
from helpers.nvml import Cards
from helpers.processes import open_files, status_of
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MAY_BE_OPEN = ("/dev/null", "/dev/nvidia", "socket:", "pipe:", "anon_inode:", "/memfd:gpulease-")


def test_a_worker_of_a_card_is_shut_in_as_told(daemon: Daemon) -> None:
    (found,) = {str(card["sandbox"]): card["sandbox"] for card in daemon.inventory().details}.values()
    is_on = {measure["measure"]: measure["on"] for measure in found}
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        status = status_of(daemon.worker_pid(lease.lease_id))
        assert is_on["user"] == (status["Uid"].split()[0] != str(os.geteuid()))
        assert is_on["syscalls"] == (status["Seccomp"] == "2")
        assert (status["NoNewPrivs"], int(status["CapEff"], 16)) == ("1", 0)
        log = str(daemon.folder)
        files = open_files(daemon.worker_pid(lease.lease_id)).values()
        assert [to for to in files if not to.startswith((*MAY_BE_OPEN, log))] == []


@pytest.mark.parametrize("image", sorted(path.name for path in PTX.glob("*.sm75.ptx")))
def test_the_drivers_compiler_works_in_it(daemon: Daemon, image: str) -> None:
    with daemon.builder(256 << 20).acquire() as lease, GpuSession(lease) as session:
        assert session.module_load((PTX / image).read_bytes()).kernels


def test_nothing_is_kept_of_what_was_compiled(daemon: Daemon) -> None:
    """The driver's cache must not be written: what one worker wrote there, the next one would execute."""
    cache = Path.home() / ".nv" / "ComputeCache"
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        session.module_load(compiling_long(3))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_an_image_that_compiles_for_too_long(cards: Cards, start_daemon: Callable[..., Daemon]) -> None:
    used = cards.used_bytes()
    daemon = start_daemon(driver="cuda", vram=("1GiB",), config="max_load_s = 1\n")
    lease = daemon.builder(64 << 20).acquire()
    session = GpuSession(lease)
    with pytest.raises(GpuSessionFailed, match="took more than 1 s to compile"):
        session.module_load(compiling_long(1000))
    wait_until(lambda: daemon.query(lease.lease_id)["state"] == "torndown", "it is over")
    assert daemon.query(lease.lease_id)["cause"] == "load_timeout"
    cards.check_back_to(used)
