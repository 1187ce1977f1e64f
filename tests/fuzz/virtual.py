"""The broker without processes, sockets and real time: a loop with a jumping clock, and simulated workers and wires.

The parts that decide are the product's: lease table, runtime, handlers, control connections and tokens. The parts
around them are simulated. A worker is a number that becomes ready, fails or hangs; a socket is a name; and a timer
fires at once if nothing else is due.
"""

import asyncio
import logging
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.capabilities.authority import CapabilityAuthority
from gpulease.daemon.capabilities.keys import KeyRing
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.messages import AttachOrder
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.host.fair_queue import FairQueue
from gpulease.daemon.leases.events import Event, SessionFaulted, WorkerExited, WorkerFailed, WorkerReady
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.workers.registry import Workers
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_S

START_NS = 5_000_000_000_000
START_UNIX_S = 1_790_000_000.0
READY_S = 0.05


class Clock:
    now_ns = START_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / NS_PER_S

    def time(self) -> float:
        return START_UNIX_S + (self.now_ns - START_NS) / NS_PER_S

    def time_ns(self) -> int:
        return int(START_UNIX_S) * NS_PER_S + self.now_ns - START_NS


CLOCK = Clock()


class _Selector(selectors.SelectSelector):
    """Reports no events. Instead of waiting, it advances the virtual time."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        CLOCK.now_ns += int(max(0, timeout) * NS_PER_S) + (timeout > 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Selector())
        self.wrong: list[str] = []
        self.set_exception_handler(lambda _, context: self.wrong.append(repr(context)))

    def time(self) -> float:
        return CLOCK.monotonic()


class _Complaints(logging.Handler):
    """Collects errors that the product logs, because each is a fault."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self._wrong.append(self.format(record))


def modules_on_the_host_clock() -> list[ModuleType]:
    """Return every loaded module of the product that reads the host's clock through the module `time`."""
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("gpulease.") and vars(module).get("time") is time
    ]


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Give every module of the product the virtual clock, and collect errors that the product logs.

    The modules are searched for and not listed, because a deadline of the virtual clock must never be compared with the
    host's clock.

    Raises:
        AssertionError: The block loaded a module that reads the host's clock.
    """
    CLOCK.now_ns = START_NS
    complaints, log = _Complaints(loop.wrong), logging.getLogger("gpulease")
    propagates, log.propagate = log.propagate, False
    replaced = modules_on_the_host_clock()
    for module in replaced:
        vars(module)["time"] = CLOCK
    log.addHandler(complaints)
    try:
        yield
        assert modules_on_the_host_clock() == [], "load these before the time is virtual"
    finally:
        log.removeHandler(complaints)
        log.propagate = propagates
        for module in replaced:
            vars(module)["time"] = time


class SimulatedWorkers(Workers):
    """Workers by number. `luck` decides what happens to each.

    Attributes:
        attached: Receives the sessions that attach.
    """

    def __init__(self, luck: Callable[[], int]) -> None:
        super().__init__("cpu")
        self._luck = luck
        self._names: dict[int, int] = {}
        self._last = 0
        self.refused: dict[int, Status] = {}
        self.on_attach: Callable[[int, int, Guest | None], None] = lambda lease_id, inode, guest: None

    def spawn(self, spec: WorkerSpec) -> None:
        worker = self._names.get(spec.lease_id)
        if worker is None:
            self._last += 1
            worker = self._names[spec.lease_id] = self._last
        luck = self._luck() % 16
        if luck == 15:
            return
        event: Callable[[int], Event] = WorkerReady
        if luck == 14:
            event = lambda number: WorkerFailed(number, "no context")  # noqa: E731
        elif luck == 13:
            event = lambda number: WorkerExited(number, "signal 11")  # noqa: E731
        self._say_later(READY_S * (1 + luck % 3), worker, event)
        if luck == 12:
            self._say_later(3 * READY_S, worker, lambda number: SessionFaulted(number, "an address"))

    def kill(self, lease_id: int) -> None:
        worker = self._names.get(lease_id)
        if worker is None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._post, WorkerExited(lease_id, "it had no process"))
        elif self._luck() % 8 != 7:
            self._say_later(0.1, worker, lambda number: WorkerExited(number, "killed"))

    def _say_later(self, delay_s: float, worker: int, event: Callable[[int], Event]) -> None:
        """Report an event later, with the number that the worker has then. Reports nothing after the worker's end."""

        def say() -> None:
            number = next((number for number, found in self._names.items() if found == worker), None)
            if number is None:
                return
            said = event(number)
            if isinstance(said, WorkerExited):
                del self._names[number]
            self._post(said)

        asyncio.get_running_loop().call_later(delay_s, say)

    def rename(self, from_id: int, to_id: int) -> None:
        worker = self._names.pop(from_id, None)
        if worker is not None:
            self._names[to_id] = worker

    def is_alive(self, lease_id: int) -> bool:
        return lease_id in self._names

    def refuse(self, lease_id: int, status: Status, reason: str = "", cause: str = "") -> None:
        self.refused[lease_id] = status

    def attach(self, lease_id: int, sock_fd: int, attach: AttachOrder) -> bool:
        if lease_id not in self._names or self._luck() % 8 == 7:
            return False
        self.on_attach(lease_id, os.fstat(sock_fd).st_ino, attach.guest)
        return True


class SimulatedSocket:
    def __init__(self, uid: int | None, fd: int) -> None:
        self.family = socket.AF_INET if uid is None else socket.AF_UNIX
        self._uid = uid
        self._fd = fd

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 1, self._uid or 0, 1)

    def fileno(self) -> int:
        return self._fd


class Wire(asyncio.Transport):
    """A transport that passes everything written to the other end."""

    def __init__(self, sock: SimulatedSocket, deliver: Callable[[bytes], None], unread: Callable[[], int]) -> None:
        super().__init__({"socket": sock})
        self._deliver = deliver
        self._unread = unread
        self.protocol: Any = None
        self.is_paused = False
        self._is_closing = False
        self.is_lost = False

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._deliver(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self._unread()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.is_lost = True
        self.protocol.connection_lost(None)


def broker_of(table: LeaseTable, tokens: TokenService, workers: SimulatedWorkers, sizes: list[int]) -> Runtime:
    """Return a runtime on the virtual clock, with its own authority."""
    ring = KeyRing.fresh(CLOCK.now_ns)
    tokens._authority = CapabilityAuthority(ring, tokens._facts, clock_ns=CLOCK.monotonic_ns, unix_s=CLOCK.time)
    made = Runtime(table, EmbeddedCards(sizes), workers, tokens, FactRecorder(), max_load_s=120)
    made.fair_queue = FairQueue(CLOCK.monotonic_ns)
    # There are no pages to poll, and polling would be most of the work while time passes.
    setattr(made._watchdog, "start", lambda: None)  # noqa: B010

    async def stray_bytes() -> dict[str, int]:
        return dict.fromkeys((card.uuid for card in table.cards()), 0)

    # The reply of a thread would come in real time.
    setattr(made.metrics, "_read_stray_bytes", stray_bytes)  # noqa: B010
    return made
