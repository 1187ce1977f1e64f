"""`python -m gpulease.daemon.bench.revocation DRIVER CARD PTX_FILE COUNT`: times how soon a worker sees its lease end.

Prints one JSON object.

A session of this very process takes launches as fast as they can be given to it, as a worker's does; another process
flips the revocation word of its control page, as the broker does, at a time of its own. Counted from the flip to the
typed refusal of what comes behind the launches, a SYNC here; and how many launches began after the flip. The two
processes have a core each, if there are two: what is measured is the look, not who of them runs first.
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

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.drivers.interface import Context, Dim3, Kernel, Module, NativeLaunch
from gpulease.daemon.drivers.registry import driver_named
from gpulease.daemon.host.processes import die_with_parent
from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode
from gpulease.daemon.session import native
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.session import Session
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
"""Launches that arrive together."""

FAR_NS: Final = 1 << 62
"""A deadline that does not come: it is the word that is measured."""

FLY_S: Final = (0.001, 0.006)
"""A session launches for a time between these before the word flips."""


class GateOpen(Exception):
    """A session whose lease is over did what it was asked to."""


class Stamps(ctypes.Structure):
    """A driver's native functions, and when launches through them began; stamp.ll has these offsets too."""

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
class Stamped:
    """A context whose launches' begins are written down; all else is the context's own."""

    context: Context
    by_python_ns: list[int] = field(default_factory=list)
    times: Any = field(default_factory=lambda: (ctypes.c_uint64 * BURST)())
    stamps: Stamps = field(default_factory=Stamps)

    def launch(self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        """See Context."""
        self.by_python_ns.append(time.monotonic_ns())
        self.context.launch(kernel, grid, block, shared_bytes, params, tag)

    def native(self) -> NativeLaunch | None:
        """See Context."""
        own = self.context.native()
        if own is None:
            return None
        code = _stamping_code()
        self.stamps = Stamps(own.launch, own.query, own.state, ctypes.addressof(self.times), 0, BURST)
        state = ctypes.addressof(self.stamps)
        return replace(own, state=state, launch=code.address("stamped_launch"), query=code.address("stamped_query"))

    def forget(self) -> None:
        """Begin anew."""
        self.by_python_ns.clear()
        self.stamps.count = 0

    def begun_after(self, time_ns: int) -> int:
        """How many launches, of not more than BURST, began after that."""
        return sum(begun_ns > time_ns for begun_ns in self.by_python_ns + self.times[: self.stamps.count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


class Flipper:
    """A process that flips the words of pages, one after the other, each a while after it is asked to.

    Forked by `start`, which must come before the driver is initialised.
    """

    def __init__(self, count: int) -> None:
        self.pages = [BrokerPage() for _ in range(count)]
        self._map = mmap.mmap(-1, 16 * count)
        self._stamps = memoryview(self._map).cast("Q")
        self._ours, self._theirs = os.pipe()

    def start(self) -> None:
        """Fork it; it ends with this process, or when all words are flipped."""
        parent_pid = os.getpid()
        cores = sorted(os.sched_getaffinity(0))
        if os.fork() == 0:
            try:
                os.sched_setaffinity(0, cores[-1:])
                die_with_parent(parent_pid)
                for number in range(len(self.pages)):
                    self._flip(number)
            finally:
                os._exit(0)
        os.sched_setaffinity(0, cores[: max(1, len(cores) - 1)])

    def ask(self) -> None:
        """Have it flip the next word soon."""
        os.write(self._theirs, b"f")

    def flipped_ns(self, number: int) -> tuple[int, int]:
        """When it began to flip that page's word, and when it had."""
        while not self._stamps[2 * number + 1]:
            time.sleep(0)
        return self._stamps[2 * number], self._stamps[2 * number + 1]

    def _flip(self, number: int) -> None:
        os.read(self._ours, 1)
        time.sleep(random.uniform(*FLY_S))
        # Once without effect: a page's first use, which is not what is measured, can take longer than the rest.
        self.pages[number].refuse(Status.OK)
        self._stamps[2 * number] = time.monotonic_ns()
        self.pages[number].refuse(Status.REVOKED)
        self._stamps[2 * number + 1] = time.monotonic_ns()


def measure(driver_name: str, card: str, ptx: bytes, count: int) -> dict[str, float]:
    """Microseconds, and launches. Raises GateOpen if a session is not refused."""
    driver = driver_named(driver_name)
    driver.preload()
    flipper = Flipper(count)
    flipper.start()
    context = Stamped(driver.open_context(card, SLICE_BYTES))
    module = context.context.module_load(ptx)
    samples = [_sample(flipper, number, context, module) for number in range(count)]
    refused_us = sorted(taken_ns / 1e3 for taken_ns, _ in samples)
    return {
        "refused_p50_us": refused_us[count // 2],
        "refused_p99_us": refused_us[min(count - 1, count * 99 // 100)],
        "begun_after_flip_most": max(begun for _, begun in samples),
    }


def _sample(flipper: Flipper, number: int, context: Stamped, module: Module) -> tuple[int, int]:
    """Nanoseconds from flip to refusal, and launches begun after the flip."""
    page = flipper.pages[number]
    page.set_deadline(FAR_NS, 1)
    with _session(page, context, module) as (session, launch):
        stream = launch * BURST
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(launch)
        session.handle(cast(Frame, reader.next_frame()))
        flipper.ask()
        until_ns = time.monotonic_ns() + 10**9
        while reader.start == reader.end:
            context.forget()
            reader.receive_data(stream)
            session.take_launches(reader)
            if time.monotonic_ns() > until_ns:
                raise GateOpen("launches are still taken a second after the word was to flip")
        reply = session.handle(Frame(Opcode.SYNC, 0, 0, 2, LEASE, memoryview(b"")))
        refused_ns = time.monotonic_ns()
        answers = FrameReader(MAX_PAYLOAD_BYTES)
        answers.receive_data(reply or b"")
        answer = answers.next_frame()
        if answer is None or answer.status != Status.REVOKED:
            raise GateOpen("a revoked session's SYNC is not answered with REVOKED")
    before_ns, after_ns = flipper.flipped_ns(number)
    begun = context.begun_after(after_ns)
    context.context.sync()
    return refused_ns - before_ns, begun


@contextmanager
def _session(page: BrokerPage, context: Stamped, module: Module) -> Iterator[tuple[Session, bytes]]:
    """A session on that page, and the frame of a quiet launch in it."""
    view = WorkerPage(page.fds)
    ledger = Ledger(SLICE_BYTES)
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
    # As a worker ends: pycuda aborts a process that leaves in good order and leaves its context behind.
    os._exit(0)
