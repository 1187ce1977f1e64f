"""A scrub leaves nothing of a freed lease, or gives the reason why not."""

import os
import time
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.host.heap_wipe import is_heap_wiped
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.session import main
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.main import NotScrubbed, scrub
from gpulease.daemon.session.session import Session
from gpulease.protocol.opcodes import Status
from helpers.kernels import FAULTS, TRANSFORM

MINUTE_NS = 60_000_000_000


class Scene:
    """A session of the embedded driver whose lease was just freed."""

    def __init__(self) -> None:
        self.page = BrokerPage()
        self.page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
        self.view = WorkerPage(self.page.fds)
        self.driver = CpuDriver()
        self.context = self.driver.open_context("GPU-0", 1 << 20)
        self.ledger = Ledger(1 << 20)
        self.session = Session(7, self.context, self.ledger, self.view, native=self.context.native())
        self.address = self.context.mem_alloc(4096)
        self.ledger.add_allocation(self.address, 4096)

    def load(self, image: bytes) -> None:
        self.module = self.context.module_load(image)
        self.ledger.add_module(self.module, 1)

    def launch(self, kernel: str, *more: int) -> None:
        params = b"".join(number.to_bytes(8, "little") for number in (self.address, *more))
        self.context.launch(self.module.kernels[kernel], (1, 1, 1), (1, 1, 1), 0, params, 1)

    def end(self) -> None:
        self.page.refuse(Status.LEASE_FREED)

    def scrub(self) -> CpuContext:
        opened = scrub(self.session, self.context, self.driver)(1 << 16)
        assert isinstance(opened, CpuContext)
        return opened


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    # The tests' own process is not started so; a session's is, in tests/behaviour/test_recycling.py.
    monkeypatch.setattr(main, "is_heap_wiped", lambda: True)
    made = Scene()
    yield made
    made.context.close()
    made.view.close()
    made.page.close()


def test_everything_is_released(scene: Scene) -> None:
    scene.load(TRANSFORM)
    slot = scene.session.pinned_buffers.acquire()
    assert slot is not None
    arena = scene.session.arena.open(4 << 20)
    scene.end()
    again = scene.scrub()
    assert (scene.ledger.used_bytes, scene.ledger.modules(), scene.ledger.allocations()) == (0, [], [])
    assert scene.context.is_closed
    assert slot.memory.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        arena.close()
    address = again.mem_alloc(4096)
    found = bytearray(4096)
    again.mem_read(address, memoryview(found))
    assert not any(found)
    again.close()


def test_an_unreported_fault_is_found(scene: Scene) -> None:
    scene.load(FAULTS)
    scene.launch("stray_store", 1 << 40)
    scene.end()
    with pytest.raises(NotScrubbed, match="stray_store"):
        scene.scrub()


def test_a_kernel_that_ends_too_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "BUSY_S", 0.01)
    scene.load(FAULTS)
    scene.launch("endless")
    scene.end()
    with pytest.raises(NotScrubbed, match="has not ended"):
        scene.scrub()
    # The kernel looks at its flag.
    scene.context._arena.bytes_at(scene.address, 4)[:] = b"\1\0\0\0"


def test_what_the_driver_keeps(scene: Scene) -> None:
    scene.ledger.charge_kept(4096)
    with pytest.raises(NotScrubbed, match="keeps memory"):
        scene.scrub()


def test_output_that_is_not_read_any_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(main, "_STDERR", writer)
    try:
        os.close(reader)
        with pytest.raises(NotScrubbed, match="more output than is logged of one process"):
            scene.scrub()
    finally:
        os.close(writer)


def test_memory_that_is_still_viewed(scene: Scene) -> None:
    slot = scene.session.pinned_buffers.acquire()
    assert slot is not None
    view = slot.view[:8]
    with pytest.raises(NotScrubbed):
        scene.scrub()
    view.release()


def test_a_heap_that_is_not_overwritten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "is_heap_wiped", is_heap_wiped)
    assert not is_heap_wiped()
    with pytest.raises(NotScrubbed, match="overwrite"):
        scene.scrub()
