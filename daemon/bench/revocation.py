"""`python -m gpulease.daemon.bench.revocation DRIVER CARD PTX_FILE COUNT`: times the end of a worker's lease.

Measures how soon a worker notices that its lease has ended, and prints one JSON object.

A session in this process receives launches as fast as it accepts them, like a worker's session. Another process sets
the revocation word of the session's page at a random time, as the broker does. Two figures are measured: the time from
that moment until a SYNC after the launches is refused, and how many launches began after the word was set. Each process
has its own core, if there are two; otherwise the measurement would show the scheduler.
"""

import ctypes
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from gpulease.daemon.bench.percentiles import percentile
from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.drivers.interface import Context, Dim3, DriverKernel, DriverModule, NativeLaunch
from gpulease.daemon.host.processes import die_with_parent
from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode
from gpulease.daemon.session import native
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
from gpulease.daemon.zygote.driver_registry import driver_named
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Launch
from gpulease.protocol.opcodes import Flag, Opcode, Status

LEASE: Final = 1
SLICE_BYTES: Final = 1 << 20
BYTES: Final = 4096
THREADS: Final = 32
BURST: Final = 64
"""Number of launches in one delivery."""

FAR_NS: Final = 1 << 62
"""A deadline that never comes, so that only the revocation word ends the lease."""

FLY_S: Final = (0.001, 0.006)
"""Bounds of the random time for which a session launches before the word is set."""


class NotRefused(Exception):
    """A session executed a request although its lease had ended."""


class Stamps(ctypes.Structure):
    """A driver's native functions, and when launches through them began. session/native/stamp.ll has the offsets."""

    _fields_ = (
        ("launch", ctypes.c_uint64),
        ("query", ctypes.c_uint64),
        ("driver", ctypes.c_uint64),
        ("times", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("room", ctypes.c_uint64),
    )


@cache
def _stamping_code() -> NativeCode:
    return load_ir(files(native).joinpath("stamp.ll").read_text("ascii"))


@dataclass
class StampedContext:
    """A context that records when each launch begins, and otherwise behaves like the context that it wraps."""

    context: Context
    by_python_ns: list[int] = field(default_factory=list)
    times: Any = field(default_factory=lambda: (ctypes.c_uint64 * BURST)())
    stamps: Stamps = field(default_factory=Stamps)

    def launch(self, kernel: DriverKernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        self.by_python_ns.append(time.monotonic_ns())
        self.context.launch(kernel, grid, block, shared_bytes, params, tag)

    def native(self) -> NativeLaunch | None:
        # Native code records the time, because a call back into Python would take longer than the measured time.
        own = self.context.native()
        if own is None:
            return None
        code = _stamping_code()
        self.stamps = Stamps(own.launch, own.query, own.state, ctypes.addressof(self.times), 0, BURST)
        state = ctypes.addressof(self.stamps)
        launch, query, copy = map(code.address, ("stamped_launch", "stamped_query", "unstamped"))
        return replace(
            own,
            state=state,
            launch=launch,
            query=query,
            copy_in=copy,
            copy_out=copy,
            zero=copy,
            chain=None,
            replay_graph=0,
        )

    def forget(self) -> None:
        self.by_python_ns.clear()
        self.stamps.count = 0

    def begun_after(self, time_ns: int) -> int:
        """Return how many of the last launches, at most BURST in native code, began after a time."""
        return sum(begun_ns > time_ns for begun_ns in self.by_python_ns + self.times[: self.stamps.count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


class Revoker:
    """A process that sets the revocation words of pages, one after the other, each a moment after a request.

    `start` forks the process, and must be called before the driver is initialised.
    """

    def __init__(self, count: int) -> None:
        self.pages = [BrokerPage() for _ in range(count)]
        self._map = mmap.mmap(-1, 16 * count)
        self._stamps = memoryview(self._map).cast("Q")
        self._ours, self._theirs = os.pipe()

    def start(self) -> None:
        """Fork the process, which ends with this one, or when all words are set."""
        parent_pid = os.getpid()
        # Use the last core for the process that revokes, and the others for the session.
        cores = sorted(os.sched_getaffinity(0))
        # The child only writes pages and times; it never touches the driver.
        if os.fork() == 0:
            try:
                os.sched_setaffinity(0, cores[-1:])
                die_with_parent(parent_pid)
                for number in range(len(self.pages)):
                    self._revoke(number)
            finally:
                os._exit(0)
        os.sched_setaffinity(0, cores[: max(1, len(cores) - 1)])

    def ask(self) -> None:
        os.write(self._theirs, b"f")

    def revoked_ns(self, number: int) -> tuple[int, int]:
        """Return the times before and after the process set a page's word."""
        # The process has already set the word, or sets it within milliseconds.
        while not self._stamps[2 * number + 1]:
            time.sleep(0)
        return self._stamps[2 * number], self._stamps[2 * number + 1]

    def _revoke(self, number: int) -> None:
        os.read(self._ours, 1)
        time.sleep(random.uniform(*FLY_S))
        # Set the word once without effect, because the first use of a page can take longer.
        self.pages[number].refuse(Status.OK)
        self._stamps[2 * number] = time.monotonic_ns()
        self.pages[number].refuse(Status.REVOKED)
        self._stamps[2 * number + 1] = time.monotonic_ns()


def measure(driver_name: str, card: str, ptx: bytes, count: int) -> dict[str, float]:
    """Return microseconds until the refusal, and numbers of launches that began too late. Raises NotRefused."""
    driver = driver_named(driver_name)
    driver.preload()
    # Fork before a context exists, because an initialised driver does not survive a fork.
    revoker = Revoker(count)
    revoker.start()
    context = StampedContext(driver.open_context(card, SLICE_BYTES))
    module = context.context.module_load(ptx)
    samples = [_sample(revoker, number, context, module) for number in range(count)]
    refused_us = [taken_ns / 1e3 for taken_ns, _ in samples]
    return {
        "refused_p50_us": percentile(refused_us, 50),
        "refused_p99_us": percentile(refused_us, 99),
        "begun_after_flip_most": max(launches for _, launches in samples),
    }


def _sample(revoker: Revoker, number: int, context: StampedContext, module: DriverModule) -> tuple[int, int]:
    """Return nanoseconds from the word to the refusal, and how many launches began after the word was set."""
    # Step 1: a session of a live lease, warmed up by one launch.
    page = revoker.pages[number]
    page.set_deadline(FAR_NS, 1)
    with _session(page, context, module) as (session, launch):
        stream = launch * BURST
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(launch)
        session.handle(cast(Frame, reader.next_frame()))
        # Step 2: launch without a pause until the session answers a launch, which is the refusal.
        revoker.ask()
        until_ns = time.monotonic_ns() + 10**9
        while reader.start == reader.end:
            context.forget()
            reader.receive_data(stream)
            session.take_launches(reader)
            if time.monotonic_ns() > until_ns:
                raise NotRefused("launches are still taken a second after the word was to be set")
        # Step 3: send a SYNC, for which a client would wait.
        reply = session.handle(Frame(Opcode.SYNC, 0, 0, 2, LEASE, memoryview(b"")))
        refused_ns = time.monotonic_ns()
        answers = FrameReader(MAX_PAYLOAD_BYTES)
        answers.receive_data(reply or b"")
        answer = answers.next_frame()
        if answer is None or answer.status != Status.REVOKED:
            raise NotRefused("a revoked session's SYNC is not answered with REVOKED")
    before_ns, after_ns = revoker.revoked_ns(number)
    launches = context.begun_after(after_ns)
    context.context.sync()
    return refused_ns - before_ns, launches


@contextmanager
def _session(page: BrokerPage, context: StampedContext, module: DriverModule) -> Iterator[tuple[Session, bytes]]:
    """Yield a session on a page, and the frame of a quiet launch in it."""
    view = WorkerPage(page.fds)
    ledger = Ledger(SLICE_BYTES)
    # Make a session like a worker's, with a ledger that has one allocation and one module.
    address = context.context.mem_alloc(BYTES)
    ledger.add_allocation(address, BYTES)
    number = ledger.add_module(module, 1)
    args = address.to_bytes(8, "little") + THREADS.to_bytes(4, "little") + b"\0\0\x80\x3f"
    body = build_body(Launch(number, "scale", 1, 1, 1, THREADS, 1, 1, 0, args, (8, 4, 4)))
    launch = build_frame(Opcode.LAUNCH, body, request_id=1, session_id=LEASE, flags=Flag.QUIET)
    yield Session(LEASE, cast(Context, context), ledger, view, native=context.native()), launch
    context.context.sync()
    context.context.mem_free(address)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes(), int(sys.argv[4]))), flush=True)
    # Like a worker: pycuda aborts a process that exits normally and leaves its context behind.
    os._exit(0)
