"""The daemon under the unit's own hardening: it does all it does without, and workers are shut in no less."""

import os
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.client import GpuBuilder, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, Inventory, LeaseRevoke
from helpers.daemon import Daemon
from helpers.hardened import MISSING
from helpers.hardened_daemon import Hardened
from helpers.kernels import check_main_job
from helpers.remote import Pki
from helpers.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can shut a process in so"),
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def hardened(folder: Path) -> Iterator[Hardened]:
    daemon = Hardened(folder)
    try:
        daemon.wait_until_it_listens()
        yield daemon
        daemon.stop()
    finally:
        daemon.discard()


def sandbox(address: str) -> dict[str, bool]:
    reply = ask(Opcode.GET_INVENTORY, Empty(), address)
    assert isinstance(reply, Inventory)
    return {found["measure"]: found["on"] for found in reply.details[0]["sandbox"]}


@pytest.mark.exhaustive
def test_it_leases_ends_and_shuts_in_as_without(hardened: Hardened, daemon: Daemon) -> None:
    assert sandbox(hardened.address) == sandbox(daemon.address)
    assert sandbox(hardened.address)["user"], "workers are another user"
    with GpuBuilder(hardened.address).min_vram(1 << 20).acquire() as lease:
        with GpuSession(lease) as session:
            check_main_job(session)
        # Its worker is another user's process: to end it is a right of its own.
        ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "a test"), hardened.address)
    with GpuBuilder(hardened.address).min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    assert " ERROR " not in hardened.log.read_text()


@pytest.mark.exhaustive
def test_it_can_neither_write_elsewhere_nor_reach_a_network(hardened: Hardened) -> None:
    status = Path(f"/proc/{hardened.process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0b111100000, "setuid, setgid, setpcap, kill"
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    networks = {
        name: os.readlink(f"/proc/{pid}/ns/net") for name, pid in (("own", "self"), ("its", hardened.process.pid))
    }
    assert networks["own"] != networks["its"]


@pytest.mark.exhaustive
def test_remote_tenants_come_by_a_socket_that_is_handed_over(folder: Path) -> None:
    pki = Pki.make(folder / "pki")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tls:127.0.0.1:{listener.getsockname()[1]}"
        daemon = Hardened(folder, pki.settings(), listener, address, compiles=False)
        try:
            daemon.wait_until_it_listens()
            with pki.builder(address, pki.ann).acquire() as lease, GpuSession(lease) as session:
                check_main_job(session)
            daemon.stop()
        finally:
            daemon.discard()


@pytest.mark.exhaustive
def test_the_web_page_comes_by_a_socket_that_is_handed_over(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        daemon = Hardened(folder, f'http = "{place}"\n', listener, compiles=False)
        try:
            daemon.wait_until_it_listens()
            wait_until(lambda: "serves its web page at" in daemon.log.read_text(), "the page is served")
            with urllib.request.urlopen(f"http://{place}/healthz", timeout=60) as reply:
                assert reply.status == 200
            daemon.stop()
        finally:
            daemon.discard()


@pytest.mark.exhaustive
def test_it_makes_no_tcp_socket_itself(folder: Path) -> None:
    daemon = Hardened(folder, "", None, "tcp:127.0.0.1:0", compiles=False)
    try:
        status = daemon.process.wait(60)
        if status == MISSING:
            pytest.skip(daemon.log.read_text())
        assert status == os.EX_CONFIG, daemon.log.read_text()
        said = "no socket unit passes it to the daemon, and the daemon may not create network sockets"
        assert said in daemon.log.read_text()
    finally:
        daemon.discard()
