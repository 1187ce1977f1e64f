"""A real zygote that dies with its broker. The test stands in for the broker."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.driver_choice import has_nvidia_driver
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, receive_message, send_message
from gpulease.daemon.leases.model import FIRST_WARM_ID
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.session.main import WARM_NAME
from helpers.daemon import python_environment, worker_name
from helpers.processes import descendants, is_running, open_files, process_info
from helpers.waiting import wait_until

SIZE = 1 << 20

ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can look into a worker")

STANDARD = [0, 1, 2]
OF_EVERY_WORKER = ["/memfd:gpulease-claims (deleted)", "/memfd:gpulease-lease (deleted)", "socket"]
"""The mappings of its two pages keep a descriptor each; and the channel to the broker."""


def what_is_open(pid: int) -> list[object]:
    """The standard descriptors, and in order what the others lead to, but the folder for compiled code."""
    files = open_files(pid)
    others = [to.partition(":[")[0] for fd, to in files.items() if fd not in STANDARD and "/workers-" not in to]
    return [*sorted(files.keys() & set(STANDARD)), *sorted(others)]


@dataclass
class Born:
    """A worker and what the test, as its broker, holds of it."""

    pid: int
    channel: socket.socket
    page: BrokerPage
    pidfd: int


class Parent:
    """Stands where the broker does."""

    def __init__(self, driver: str) -> None:
        self.channel, theirs = channel_pair()
        self.channel.settimeout(60)
        module = [sys.executable, "-P", "-m", "gpulease.daemon.zygote"]
        sandbox = SandboxSettings().to_text()
        with theirs:
            self.process = subprocess.Popen(
                [*module, driver, str(theirs.fileno()), str(os.getpid()), sandbox],
                pass_fds=(theirs.fileno(),),
                env=python_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self.born: list[Born] = []
        self.exits = 0

    def hear(self) -> dict[str, Any]:
        message, fds = receive_message(self.channel)
        assert not fds
        self.exits += message["op"] == "exited"
        return {key: value for key, value in message.items() if key != "serial"}

    def spawn(self, lease_id: int, size_bytes: int = SIZE) -> Born:
        page = BrokerPage()
        ours, theirs = channel_pair()
        ours.settimeout(60)
        spec = WorkerSpec(lease_id, "GPU-0", size_bytes, is_shared=False)
        with theirs:
            send_message(self.channel, spec.to_map(), (theirs.fileno(), *page.fds))
        message, (pidfd,) = receive_message(self.channel)
        assert message["op"] == "spawned"
        assert message["lease"] == f"{lease_id:032x}"
        born = Born(message["pid"], ours, page, pidfd)
        self.born.append(born)
        return born

    def end_workers(self) -> None:
        """End all workers, and hear of each end that was not heard of: the next test finds an idle zygote."""
        self._let_go()
        while self.exits < len(self.born):
            assert self.hear()["op"] == "exited"
        self.born, self.exits = [], 0

    def close(self) -> None:
        self.channel.close()
        self._let_go()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()

    def _let_go(self) -> None:
        for born in self.born:
            born.channel.close()
            born.page.close()
            os.close(born.pidfd)


@pytest.fixture(scope="module")
def of_module() -> Iterator[Parent]:
    """One zygote for all tests that leave it alive."""
    parent = Parent("cpu")
    try:
        assert parent.hear()["op"] == "preloaded"
        yield parent
    finally:
        parent.close()


@pytest.fixture
def parent(of_module: Parent) -> Iterator[Parent]:
    yield of_module
    of_module.end_workers()


@pytest.mark.exhaustive
def test_a_worker_is_born_ready_and_named(parent: Parent) -> None:
    born = parent.spawn(0xABC << 100)
    assert receive_message(born.channel) == ({"op": "ready"}, [])
    info = process_info(born.pid)
    assert info is not None
    assert info.name == worker_name(0xABC << 100)
    assert info.parent == parent.process.pid


@pytest.mark.exhaustive
@ONLY_ROOT
def test_a_worker_holds_nothing_of_its_zygote(parent: Parent) -> None:
    born = parent.spawn(1)
    receive_message(born.channel)
    sockets, of_zygote = (
        {to for to in open_files(pid).values() if to.startswith("socket:")} for pid in (born.pid, parent.process.pid)
    )
    assert len(sockets) == 1
    assert not sockets & of_zygote
    assert what_is_open(born.pid) == STANDARD + OF_EVERY_WORKER


@pytest.mark.exhaustive
def test_a_worker_gains_no_privileges(parent: Parent) -> None:
    born = parent.spawn(1)
    receive_message(born.channel)
    with open(f"/proc/{born.pid}/status") as status:
        assert "NoNewPrivs:\t1\n" in status.read()


@pytest.mark.exhaustive
@ONLY_ROOT
def test_a_worker_made_ahead_takes_a_lease_and_holds_nothing_else(parent: Parent) -> None:
    born = parent.spawn(FIRST_WARM_ID, size_bytes=0)
    assert receive_message(born.channel) == ({"op": "ready"}, [])
    info = process_info(born.pid)
    assert info is not None
    assert info.name == WARM_NAME
    send_message(born.channel, {"op": "end"})
    lease = WorkerSpec(7, "GPU-0", SIZE, is_shared=False)
    send_message(born.channel, lease.to_map())
    assert receive_message(born.channel) == ({"op": "ready"}, [])
    wait_until(lambda: process_info(born.pid).name == worker_name(7), "it has its lease's name")  # type: ignore[union-attr]
    # What it rehearsed with is closed.
    assert what_is_open(born.pid) == STANDARD + OF_EVERY_WORKER


@pytest.mark.exhaustive
def test_a_worker_made_ahead_ends_when_its_channel_closes(parent: Parent) -> None:
    born = parent.spawn(FIRST_WARM_ID, size_bytes=0)
    receive_message(born.channel)
    born.channel.close()
    assert parent.hear() == {"op": "exited", "lease": f"{FIRST_WARM_ID:032x}", "reason": "exited with status 0"}


@pytest.mark.exhaustive
def test_the_end_of_a_worker_is_told_and_it_is_reaped(parent: Parent) -> None:
    born = parent.spawn(7)
    receive_message(born.channel)
    signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
    assert parent.hear() == {"op": "exited", "lease": f"{7:032x}", "reason": "was killed by SIGKILL"}
    assert process_info(born.pid) is None


@pytest.mark.exhaustive
def test_a_worker_ends_when_its_channel_closes(parent: Parent) -> None:
    born = parent.spawn(7)
    receive_message(born.channel)
    born.channel.close()
    assert parent.hear() == {"op": "exited", "lease": f"{7:032x}", "reason": "exited with status 0"}


@pytest.mark.exhaustive
def test_a_context_that_can_not_be_made(parent: Parent) -> None:
    born = parent.spawn(7, size_bytes=1 << 60)
    message, _ = receive_message(born.channel)
    assert message["op"] == "failed"
    assert message["reason"]
    assert parent.hear()["reason"] == "exited with status 3"


@pytest.mark.exhaustive
def test_many_at_once(parent: Parent) -> None:
    births = [parent.spawn(number) for number in range(1, 9)]
    for born in births:
        assert receive_message(born.channel) == ({"op": "ready"}, [])
    for born in births:
        os.kill(born.pid, signal.SIGKILL)
    ended = {parent.hear()["lease"] for _ in births}
    assert ended == {f"{number:032x}" for number in range(1, 9)}
    assert [info.name for info in descendants(parent.process.pid)] == []


@pytest.mark.exhaustive
def test_it_ends_with_its_parents_channel_and_its_workers_with_it() -> None:
    parent = Parent("cpu")
    try:
        assert parent.hear()["op"] == "preloaded"
        born = parent.spawn(1)
        receive_message(born.channel)
        parent.channel.close()
        assert parent.process.wait(60) == 0
        wait_until(lambda: not is_running(born.pid), "the worker ends with its zygote")
    finally:
        parent.close()


@pytest.mark.exhaustive
def test_it_dies_with_nobody_to_serve_even_without_a_message() -> None:
    parent = Parent("cpu")
    parent.close()
    assert parent.process.returncode is not None


@pytest.mark.exhaustive
@pytest.mark.skipif(has_nvidia_driver(), reason="this host has an NVIDIA driver")
def test_a_driver_that_is_not_there() -> None:
    parent = Parent("no-such-driver")
    try:
        message = parent.hear()
        assert message["op"] == "broken"
        assert "no-such-driver" in message["reason"]
        assert message["hint"]
        with pytest.raises(ChannelClosed):
            parent.hear()
        assert parent.process.wait(60) == 1
    finally:
        parent.close()
