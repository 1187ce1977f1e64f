"""A real zygote that outlives its broker: what it keeps, hands over and ends. The test stands in for the broker."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, PageFds, state_of
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, receive_message, send_message
from gpulease.daemon.leases.model import FIRST_WARM_ID
from gpulease.daemon.leases.quotas import MAX_GRACE_MS
from gpulease.daemon.sandbox.measures import Measure, SandboxSettings
from gpulease.daemon.workers.zygote_discovery import FoundWorker, FoundZygote, find_zygotes
from gpulease.daemon.zygote.worker_table import LONGEST_GRACE_NS, PAGE_POLL_NS, WorkerEntry, WorkerTable
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS
from helpers.daemon import python_environment
from helpers.processes import descendants, is_running, open_files, process_info
from helpers.waiting import wait_until

SIZE = 1 << 20
S = 1_000_000_000
LAUNCHER = """
import sys
import gpulease.daemon.zygote.__main__ as z
{before}
z.ALONE_S = {alone}
sys.exit(z.main(*{args!r}))
"""


class Broker:
    """Stands where the broker does: it starts a zygote, makes workers, and goes away without a word.

    Args:
        before: Python that the zygote runs first; it is `z` there.

    Attributes:
        measures: Which its workers are under.
    """

    def __init__(
        self,
        folder: Path,
        alone_s: float = 60.0,
        stderr: int | None = None,
        sandbox: SandboxSettings | None = None,
        before: str = "",
    ) -> None:
        self.path = folder / "z.sock"
        self.channel, theirs = channel_pair()
        self.channel.settimeout(60)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.path))
            listener.listen()
            fds = (theirs.fileno(), listener.fileno())
            args = ("cpu", fds[0], os.getpid(), (sandbox or SandboxSettings()).to_text(), fds[1])
            code = LAUNCHER.format(alone=alone_s, args=args, before=before)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], pass_fds=fds, env=python_environment(), stderr=stderr
            )
        said, _ = receive_message(self.channel)
        assert said["op"] == "preloaded"
        self.measures = {Measure(finding["measure"]) for finding in said["sandbox"] if finding["on"]}

    def spawn(self, lease_id: int, *, size_bytes: int = SIZE, for_s: float = 0) -> int:
        """A worker, ready, and granted if `for_s`; its process id. This side keeps nothing of it."""
        pid, channel, page = self.bear(lease_id, size_bytes)
        if for_s:
            page.set_deadline(time.monotonic_ns() + int(for_s * 1e9), 1)
        channel.close()
        page.close()
        return pid

    def bear(self, lease_id: int, size_bytes: int = SIZE) -> tuple[int, socket.socket, BrokerPage]:
        """A worker that is ready: its process id, and this side's end of its channel and page."""
        page = BrokerPage()
        ours, theirs = channel_pair()
        ours.settimeout(60)
        spec = WorkerSpec(lease_id, "GPU-0", size_bytes, is_shared=False)
        with theirs:
            send_message(self.channel, spec.to_map(), (theirs.fileno(), *page.fds, ours.fileno()))
        message, (pidfd,) = receive_message(self.channel)
        os.close(pidfd)
        assert receive_message(ours) == ({"op": "ready"}, [])
        ours.setblocking(False)
        return int(message["pid"]), ours, page

    def die(self) -> None:
        """As a kill does: with messages that it has not read."""
        self.channel.close()

    def find(self) -> FoundZygote:
        """What the next broker finds."""
        (found,) = find_zygotes(self.path.parent)
        return found

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    try:
        yield broker
    finally:
        broker.close()


@contextlib.contextmanager
def found(broker: Broker) -> Iterator[tuple[FoundZygote, dict[int, FoundWorker]]]:
    zygote = broker.find()
    try:
        yield zygote, {worker.spec.lease_id: worker for worker in zygote.workers}
    finally:
        zygote.close()


def test_the_next_broker_gets_all_that_the_last_one_had(broker: Broker) -> None:
    pids = [broker.spawn(number, for_s=60) for number in (1, 2, 3)]
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: len(descendants(broker.process.pid)) == 2, "it is reaped")
    # Its end is a message that the broker has not read: what the broker said last must count all the same.
    message = WorkerSpec(9, "GPU-0", 5, is_shared=True).to_map() | {"op": "lease", "serial": 3}
    send_message(broker.channel, message)
    broker.die()
    with found(broker) as (zygote, workers):
        assert zygote.driver == "cpu"
        assert {number: worker.pid for number, worker in workers.items()} == {1: pids[0], 2: pids[1], 9: pids[2]}
        assert workers[2].fds is None
        assert workers[2].reason == "was killed by SIGKILL"
        assert workers[9].spec == WorkerSpec(9, "GPU-0", 5, is_shared=True)
        for number in (1, 9):
            fds = workers[number].fds
            assert fds is not None
            assert state_of(fds[1]).generation == 1
        send_message(zygote.channel, {"op": "forget", "serial": 2})
    with found(broker) as (zygote, workers):
        assert sorted(workers) == [1, 9]


def test_what_a_worker_says_meanwhile_waits_for_the_next_broker(broker: Broker) -> None:
    broker.spawn(1, for_s=60)
    broker.die()
    with found(broker) as (_, workers):
        fds = workers[1].fds
        assert fds is not None
        with socket.socket(fileno=os.dup(fds[3])) as channel:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                attach = {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "guest": None}
                send_message(channel, attach, (theirs.fileno(),))
                ours.settimeout(60)
                assert ours.recv(1)
    with found(broker) as (_, workers):
        fds = workers[1].fds
        assert fds is not None
        with socket.socket(fileno=os.dup(fds[3])) as channel:
            # Nonblocking, as the broker's end is, whoever has it.
            wait_until(lambda: select.select([channel], [], [], 1)[0], "it has said it")
            assert receive_message(channel) == ({"op": "attached"}, [])


def test_a_worker_holds_nothing_of_the_others(broker: Broker) -> None:
    pids = [broker.spawn(number, for_s=60) for number in (1, 2, 3)]
    held = [list(open_files(pid).values()) for pid in pids]
    sockets = [{to for to in files if to.startswith("socket:")} for files in held]
    assert [len(found) for found in sockets] == [1, 1, 1], "its channel"
    assert len(set.union(*sockets)) == 3
    # One for the mapping of each of its pages, and one for what its kernels print.
    assert [sum("memfd:gpulease" in to for to in files) for files in held] == [3, 3, 3]
    assert not any("pidfd" in to for files in held for to in files)


@pytest.mark.exhaustive
def test_without_a_broker_leases_end_in_time_and_those_of_nobody_at_once(broker: Broker) -> None:
    long, ungranted, warm = broker.spawn(2, for_s=60), broker.spawn(3), broker.spawn(FIRST_WARM_ID, size_bytes=0)
    begun_at = time.monotonic()
    short = broker.spawn(1, for_s=1.5)
    broker.die()
    wait_until(lambda: not is_running(ungranted) and not is_running(warm), "nobody's workers end")
    # Reaped, too: a zombie's end is not known to the zygote yet.
    wait_until(lambda: process_info(short) is None, "the expired one ends")
    assert time.monotonic() > begun_at + 1.5
    assert is_running(long)
    with found(broker) as (_, workers):
        assert {number for number, worker in workers.items() if worker.reason is None} == {2}
        assert set(workers) == {1, 2, 3, FIRST_WARM_ID}


@pytest.mark.exhaustive
def test_a_broker_that_hangs_keeps_no_worker_alive(broker: Broker) -> None:
    """It reads nothing, so that its channel is full, and ends nothing: what is overdue is ended, and that alone."""
    overdue, moved, warm = broker.bear(1), broker.bear(2), broker.bear(FIRST_WARM_ID, size_bytes=0)
    now_ns = time.monotonic_ns()
    for _, _, page in (overdue, moved):
        page.set_deadline(now_ns, 1, now_ns)
    moved[2].set_deadline(now_ns + 600 * S, 2, now_ns + 600 * S)
    broker.channel.setblocking(False)
    asked = 0
    with contextlib.suppress(BlockingIOError):
        # Until neither takes any more: it has stopped reading, or goes on and keeps its answers.
        for _ in range(2000):
            send_message(broker.channel, {"op": "ping"})
            asked += 1
    broker.channel.settimeout(30)
    wait_until(lambda: not is_running(overdue[0]), "the one that is overdue is gone")
    assert state_of(overdue[2].fds.lease).word is Status.LEASE_EXPIRED
    told: list[dict[str, Any]] = []
    while not told or told[-1]["op"] != "exited":
        told.append(receive_message(broker.channel)[0])
    assert told[-1] | {"serial": 1, "is_overdue": True, "overran": ""} == told[-1]
    assert [one["op"] for one in told[:-1]] == ["pong"] * len(told[:-1])
    assert is_running(moved[0])
    assert is_running(warm[0])
    for _, channel, page in (overdue, moved, warm):
        channel.close()
        page.close()


@pytest.mark.parametrize(
    ("unrefused_s", "word", "refused_s", "deadline_s", "submit_of", "is_ended"),
    [
        (600, None, 0, 600, 0, False),
        (-2, None, 0, -2, 0, True),
        # Its lease has ended: how long it had to go does not count, but the grace.
        (600, Status.REVOKED, -2, 600, 0, True),
        (600, Status.DRAINED, -2, 600, 7, True),
        (-2, Status.REVOKED, 5, -2, 0, False),
        (-2, Status.TIMED_OUT, 5, 600, 7, False),
        # Never granted.
        (0, None, 0, 0, 0, False),
        (0, Status.SESSION_FAILED, -2, 0, 0, True),
        # An older broker writes neither a grace nor, with a renewal, when its worker is to be gone.
        (-2, None, 0, 600, 0, False),
        (-2, Status.REVOKED, 0, 600, 0, False),
        (-2, Status.LEASE_EXPIRED, 0, -2, 0, False),
        (-12, Status.LEASE_EXPIRED, 0, -12, 0, True),
        # A submit's own time is over before its lease's.
        (-2, None, 0, 600, 7, True),
    ],
)
def test_what_a_page_says_of_when_its_worker_is_to_be_gone(
    unrefused_s: int, word: Status | None, refused_s: int, deadline_s: int, submit_of: int, is_ended: bool
) -> None:
    now_ns = time.monotonic_ns()
    at = {seconds: now_ns + seconds * S if seconds else 0 for seconds in (unrefused_s, refused_s, deadline_s)}
    with kept_of(submit_of) as (keeper, kept, page):
        page.set_deadline(at[deadline_s], 1, at[unrefused_s])
        if word is not None:
            page.refuse(word, "", at[refused_s])
        look_ns = keeper.end_overdue(now_ns)
        assert kept.is_overdue == is_ended
        # It is seen within a moment that the broker has ended the lease.
        assert look_ns == (None if is_ended else now_ns + PAGE_POLL_NS)


def test_a_submit_has_the_time_that_the_next_broker_gives_it() -> None:
    now_ns = time.monotonic_ns()
    with kept_of(7) as (keeper, kept, page):
        page.set_deadline(now_ns + 600 * S, 1, now_ns - 2 * S)
        keeper.regain_broker()
        keeper.end_overdue(now_ns)
        assert not kept.is_overdue
        page.set_deadline(now_ns + 600 * S, 1, now_ns + S)
        keeper.end_overdue(now_ns + PAGE_POLL_NS)
        assert not kept.is_overdue
        keeper.end_overdue(now_ns + 3 * S)
        assert kept.is_overdue


@contextlib.contextmanager
def kept_of(submit_of: int) -> Iterator[tuple[WorkerTable, WorkerEntry, BrokerPage]]:
    """What a zygote keeps of one worker, here another process, and the broker's view of its page."""
    page, keeper = BrokerPage(), WorkerTable()
    with subprocess.Popen(["sleep", "600"]) as process:
        spec = WorkerSpec(1, "GPU-0", SIZE, is_shared=False, submit_of=submit_of)
        kept = keeper.add(spec, process.pid, (os.pidfd_open(process.pid), PageFds(*map(os.dup, page.fds)), -1))
        try:
            yield keeper, kept, page
        finally:
            process.kill()
            keeper.close()
            page.close()


def test_the_longest_grace_of_older_brokers_is_what_settings_allow() -> None:
    assert LONGEST_GRACE_NS == MAX_GRACE_MS * NS_PER_MS


@pytest.mark.exhaustive
def test_a_worker_whose_word_is_flipped_ends(broker: Broker) -> None:
    pid = broker.spawn(1, for_s=60)
    with found_alive(broker) as page:
        page.refuse(Status.REVOKED)
    wait_until(lambda: not is_running(pid), "it ends")


@contextlib.contextmanager
def found_alive(broker: Broker) -> Iterator[BrokerPage]:
    """The page of its only worker, as the next broker has it until that is gone too."""
    broker.die()
    with found(broker) as (_, workers):
        (worker,) = workers.values()
        assert worker.fds is not None
        page = BrokerPage(PageFds(*map(os.dup, worker.fds[1:3])))
        try:
            yield page
        finally:
            page.close()


@pytest.mark.exhaustive
def test_one_broker_at_a_time(broker: Broker) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.connect(str(broker.path))
        assert receive_message(second) == ({"op": "taken"}, [])
        with pytest.raises(ChannelClosed):
            receive_message(second)


@pytest.mark.exhaustive
def test_it_ends_when_nobody_needs_it(tmp_path: Path) -> None:
    broker = Broker(tmp_path, alone_s=0.3)
    try:
        pid = broker.spawn(1, for_s=0.5)
        broker.die()
        assert broker.process.wait(60) == 0
        assert not is_running(pid)
        assert not broker.path.exists()
        assert find_zygotes(tmp_path) == []
    finally:
        broker.close()


def test_a_retired_one_ends_with_its_last_worker(broker: Broker) -> None:
    pid = broker.spawn(1, for_s=60)
    send_message(broker.channel, {"op": "retire"})
    time.sleep(0.1)
    assert broker.process.poll() is None
    os.kill(pid, signal.SIGKILL)
    message, _ = receive_message(broker.channel)
    send_message(broker.channel, {"op": "forget", "serial": message["serial"]})
    assert broker.process.wait(60) == 0


def test_its_workers_die_with_it(broker: Broker) -> None:
    pid = broker.spawn(1, for_s=60)
    broker.die()
    broker.process.kill()
    wait_until(lambda: not is_running(pid), "the worker ends with its zygote")
    assert broker.path.exists()
    assert find_zygotes(broker.path.parent) == []
    assert not broker.path.exists()


@pytest.mark.exhaustive
def test_a_pipe_that_nobody_reads_ends_neither_it_nor_its_workers(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    broker = Broker(tmp_path, stderr=writer)
    os.close(writer)
    os.close(reader)
    try:
        other = broker.spawn(1, for_s=60)
        pid, channel, page = broker.bear(FIRST_WARM_ID, size_bytes=0)
        # A lease on another card than its context's: a bug of the broker's, of which it prints a traceback.
        send_message(channel, WorkerSpec(7, "GPU-1", SIZE, is_shared=False).to_map())
        message, _ = receive_message(broker.channel)
        assert message["reason"] == f"exited with status {WorkerExit.BUG:d}"
        assert not is_running(pid)
        assert is_running(other)
        assert broker.process.poll() is None
        channel.close()
        page.close()
    finally:
        broker.close()
