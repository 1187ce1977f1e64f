import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.leases.events import Event, SessionCondemned
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.workers.monitors import UNRESPONSIVE_AFTER_S, KernelWatchdog
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.daemon.workers.zygote_client import ZygoteClient
from gpulease.protocol.opcodes import Opcode

S = 1_000_000_000
LONG = int(UNRESPONSIVE_AFTER_S) * S
MAX_LOAD_S = 7


@dataclass
class OneWorker:
    worker: Worker

    def serving(self) -> list[Worker]:
        return [self.worker]


@dataclass
class Scene:
    counters: memoryview
    watchman: KernelWatchdog
    posted: list[Event]
    _last_ns: int = 0

    def rounds(self, until_ns: int, *, polled_ns: int, doing: int = 0) -> list[Cause]:
        """Do a round each second, as the daemon does. Returns what they condemned."""
        causes = []
        while self._last_ns + S < until_ns:
            causes += self.round(self._last_ns + S, polled_ns=polled_ns, doing=doing)
        return causes + self.round(until_ns, polled_ns=polled_ns, doing=doing)

    def round(self, at_ns: int, *, polled_ns: int, since_ns: int = 0, doing: int = 0) -> list[Cause]:
        self.counters[Counter.LAST_POLL_NS] = polled_ns
        self.counters[Counter.KERNEL_SINCE_NS] = since_ns
        self.counters[Counter.DOING] = doing
        self.posted.clear()
        self._last_ns = at_ns
        self.watchman.check_all(at_ns)
        return [event.cause for event in self.posted if isinstance(event, SessionCondemned)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    page = BrokerPage()
    worker_page = WorkerPage(page.fds)
    spec = WorkerSpec(5, "GPU-a", 1, is_shared=False, max_kernel_ms=2000)
    # No channel and no process: the watchman looks at pages alone.
    worker = Worker(spec, page, cast(socket.socket, None), cast(ZygoteClient, None), is_ready=True)
    posted: list[Event] = []
    watchman = KernelWatchdog(cast(Workers, OneWorker(worker)), posted.append, MAX_LOAD_S)
    yield Scene(worker_page.counters, watchman, posted)
    worker_page.close()
    page.close()


def test_a_kernel_that_was_seen_to_run_for_too_long(scene: Scene) -> None:
    assert scene.round(13 * S, polled_ns=12 * S - 1, since_ns=10 * S) == []
    assert scene.round(13 * S, polled_ns=12 * S, since_ns=10 * S) == [Cause.KERNEL_TIMEOUT]
    assert scene.round(13 * S, polled_ns=12 * S) == []


def test_what_nobody_looked_at_may_have_ended(scene: Scene) -> None:
    """A worker that compiles does not look."""
    assert scene.round(19 * S, polled_ns=11 * S, since_ns=10 * S, doing=Opcode.MODULE_LOAD) == []


@pytest.mark.parametrize(("doing", "ends"), [(0, True), (Opcode.SYNC, True), (Opcode.MODULE_LOAD, False)])
def test_a_worker_that_goes_round_no_more(scene: Scene, doing: int, ends: bool) -> None:
    assert scene.round(S, polled_ns=S, doing=doing) == []
    assert scene.rounds(LONG, polled_ns=S, doing=doing) == []
    assert scene.rounds(S + LONG, polled_ns=S, doing=doing) == [Cause.UNRESPONSIVE] * ends
    assert scene.round(S + LONG + 1, polled_ns=2 * S, doing=doing) == []


@pytest.mark.parametrize("away", [LONG, 3600 * S])
def test_a_daemon_that_was_frozen_with_its_workers_blames_none(scene: Scene, away: int) -> None:
    assert scene.round(S, polled_ns=S) == []
    assert scene.round(S + away, polled_ns=S) == []
    assert scene.rounds(away + LONG - 2 * S, polled_ns=S) == []
    assert scene.rounds(away + LONG - S, polled_ns=S) == [Cause.UNRESPONSIVE]


def test_a_compilation_is_not_blamed_for_a_stop_of_the_daemon(scene: Scene) -> None:
    scene.counters[Counter.COMPILING_SINCE_NS] = 3 * S
    assert scene.round(4 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.round(3600 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.rounds(3603 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.rounds(3604 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == [Cause.LOAD_TIMEOUT]
    # The next one has its own time.
    scene.counters[Counter.COMPILING_SINCE_NS] = 3605 * S
    assert scene.rounds(3612 * S - 1, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.rounds(3612 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == [Cause.LOAD_TIMEOUT]


def test_a_compilation_that_begins_right_before_a_stop_of_the_daemon_is_not_blamed_for_it(scene: Scene) -> None:
    assert scene.round(3 * S, polled_ns=S) == []
    scene.counters[Counter.COMPILING_SINCE_NS] = 3 * S + 1
    assert scene.round(3600 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.rounds(3605 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.rounds(3606 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == [Cause.LOAD_TIMEOUT]


def test_an_image_that_compiles_for_too_long(scene: Scene) -> None:
    """A load that waits for a kernel is none: its worker has compiled by then."""
    scene.counters[Counter.COMPILING_SINCE_NS] = 3 * S
    assert scene.round(10 * S - 1, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.round(10 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == [Cause.LOAD_TIMEOUT]
    scene.counters[Counter.COMPILING_SINCE_NS] = 0
    assert scene.round(11 * S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []


def test_a_worker_that_compiles_a_graph_s_kernels_is_no_silent_one(scene: Scene) -> None:
    assert scene.round(S, polled_ns=S, doing=Opcode.GRAPH_CREATE) == []
    scene.counters[Counter.COMPILING_SINCE_NS] = LONG
    assert scene.round(S + LONG, polled_ns=S, doing=Opcode.GRAPH_CREATE) == []
    scene.counters[Counter.COMPILING_SINCE_NS] = 0
    assert scene.rounds(S + 2 * LONG, polled_ns=S, doing=Opcode.GRAPH_CREATE) == [Cause.UNRESPONSIVE]


def test_a_known_wait_leaves_time_for_the_next_look(scene: Scene) -> None:
    assert scene.round(S, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.round(S + 2 * LONG, polled_ns=S, doing=Opcode.MODULE_LOAD) == []
    assert scene.round(2 * S + 2 * LONG, polled_ns=S) == []
