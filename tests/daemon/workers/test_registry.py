"""The registry of workers, where no process is needed for it."""

import asyncio
import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, send_message
from gpulease.daemon.leases.events import Event, SessionFaulted, WorkerExited, WorkerFailed
from gpulease.daemon.leases.model import FIRST_WARM_ID
from gpulease.daemon.workers.registry import MAX_REASON_CHARS, Workers
from gpulease.daemon.workers.worker import ENDED_BY_DAEMON, Worker
from helpers.processes import stop_process

LEASE = 7


def test_an_end_is_told_by_the_number_the_worker_has_by_then() -> None:
    """Its lease may have given it back and been given another worker meanwhile, which has not ended."""
    told: list[Event] = []

    async def run() -> None:
        workers = Workers("cpu")
        workers.deliver_to(told.append)
        # There is no zygote, so it ends at once, and that is told a little later.
        workers.spawn(WorkerSpec(LEASE, "GPU-0", 1, is_shared=False))
        workers.rename(LEASE, FIRST_WARM_ID)
        await asyncio.sleep(0)
        assert workers.ended_pid(LEASE) == 0
        assert workers.page(LEASE) is None

    asyncio.run(run())
    assert told == [WorkerExited(FIRST_WARM_ID, "could not be started: the zygote is not running")]


def test_one_made_ahead_that_dies_as_it_is_taken_is_told_of_once_and_nothing_is_made_in_its_place() -> None:
    told: list[Event] = []

    async def run() -> None:
        workers = Workers("cpu")
        workers.deliver_to(told.append)
        workers.spawn(WorkerSpec(FIRST_WARM_ID, "GPU-0", 0, is_shared=False))
        workers.rename(FIRST_WARM_ID, LEASE)
        workers.spawn(WorkerSpec(LEASE, "GPU-0", 1, is_shared=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert told == [WorkerExited(LEASE, "could not be started: the zygote is not running")]


@contextlib.contextmanager
def descriptors_left(room: int) -> Iterator[None]:
    """This process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One that is open has a number; the next free ones are what there is room for.
    free = [os.dup(0) for _ in range(room + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PAGES_AND_CHANNEL = 4


@pytest.mark.parametrize("room", [0, PAGES_AND_CHANNEL, PAGES_AND_CHANNEL + 2], ids=["none", "no copy", "some copies"])
def test_a_worker_for_which_no_descriptor_is_left_leaves_none_behind(room: int) -> None:
    """The zygote is stopped and its channel full: what is asked of it is to wait, with copies of all descriptors."""
    told: list[Event] = []

    async def run() -> None:
        workers = Workers("cpu")
        workers.deliver_to(told.append)
        await workers.start()
        zygote, spec = workers._zygotes.current, WorkerSpec(LEASE, "GPU-0", 1, is_shared=False)
        pid = zygote._pid
        try:
            stop_process(pid)
            told_of: list[None] = []
            for asked in itertools.count(1):
                zygote.change(0, spec, lambda: told_of.append(None))
                if len(told_of) < asked:
                    break
            files = len(os.listdir("/proc/self/fd"))
            with descriptors_left(room):
                workers.spawn(spec)
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == files
        finally:
            os.kill(pid, signal.SIGCONT)
            await workers.stop()

    asyncio.run(run())
    assert told == [WorkerExited(LEASE, "could not be started: Too many open files", is_busy=True)]


@pytest.mark.parametrize(("op", "event"), [("failed", WorkerFailed), ("faulted", SessionFaulted)])
@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("x" * 100_000, "x" * (MAX_REASON_CHARS - 1) + "…"),
        ("lost\n2026-11-21 ERROR \x1b[31mforged\u2028", "lost\ufffd2026-11-21 ERROR \ufffd[31mforged\ufffd"),
    ],
    ids=["long", "a line of the log"],
)
def test_what_a_worker_says_of_its_end_is_cut_and_one_line(
    op: str, event: type[WorkerFailed] | type[SessionFaulted], said: str, taken: str
) -> None:
    told: list[Event] = []
    workers = Workers("cpu")
    workers.deliver_to(told.append)
    ours, theirs = channel_pair()
    page = BrokerPage()
    with ours, theirs:
        send_message(theirs, {"op": op, "reason": said})
        spec = WorkerSpec(LEASE, "GPU-0", 1, is_shared=False)
        workers._on_worker_message(Worker(spec, page, ours, workers._zygotes.current, pid=1))
    page.close()
    assert told == [event(LEASE, taken)]


def test_a_lost_context_is_heard_of_once_in_each_lease() -> None:
    """Each time would be a row of the journal, and one that was taken over says it as fast as it can."""
    told: list[Event] = []
    workers = Workers("cpu")
    workers.deliver_to(told.append)
    ours, theirs = channel_pair()
    page = BrokerPage()
    with ours, theirs:
        worker = Worker(WorkerSpec(LEASE, "GPU-0", 1, is_shared=False), page, ours, workers._zygotes.current, pid=1)
        for number in range(3):
            send_message(theirs, {"op": "faulted", "reason": f"{number}"})
            workers._on_worker_message(worker)
        with contextlib.suppress(ChannelClosed):
            worker.take_lease(WorkerSpec(LEASE + 1, "GPU-0", 1, is_shared=False))
        send_message(theirs, {"op": "faulted", "reason": "another lease's"})
        workers._on_worker_message(worker)
    page.close()
    assert told == [SessionFaulted(LEASE, "0"), SessionFaulted(LEASE + 1, "another lease's")]


@pytest.mark.parametrize(
    ("is_killed", "reason", "told"),
    [
        (True, "was killed by SIGKILL", (ENDED_BY_DAEMON, True)),
        (True, "was killed by SIGSEGV", ("was killed by SIGSEGV", False)),
        (True, "exited with status 5", ("exited with status 5", False)),
        (False, "was killed by SIGKILL", ("was killed by SIGKILL", False)),
    ],
)
def test_whose_doing_an_end_was(is_killed: bool, reason: str, told: tuple[str, bool]) -> None:
    workers, page = Workers("cpu"), BrokerPage()
    ours, theirs = channel_pair()
    with ours, theirs:
        spec = WorkerSpec(LEASE, "GPU-0", 1, is_shared=False)
        assert Worker(spec, page, ours, workers._zygotes.current, pid=1, is_killed=is_killed).end_reason(reason) == told
    page.close()
