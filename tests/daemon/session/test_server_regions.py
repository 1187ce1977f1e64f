"""The worker's loop with regions, on the embedded driver: the broker speaks through its channel, a tenant beside it."""

import select
import threading
import time

import pytest

from gpulease.daemon.contract.messages import (
    EndRegionOrder,
    ForwardRevokedReport,
    RegionEndedReport,
    ResizeSliceOrder,
    SliceResizedReport,
)
from gpulease.daemon.drivers.interface import Poll
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.session import server as server_module
from gpulease.daemon.session.connection import SPINS_PER_REPLY
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import (
    AttachReply,
    Empty,
    Handle,
    LaunchIn,
    ModuleLoad,
    ModuleLoaded,
    RegionRef,
    RegionSet,
)
from gpulease.protocol.opcodes import Opcode, SessionOption, Status
from gpulease.protocol.session_words import RegionWord
from gpulease.protocol.time_units import NS_PER_S
from helpers.kernels import TRANSFORM
from helpers.ring_pair import pair
from helpers.server_rig import REGION, SLICE, Worker, worker
from helpers.session_rig import SIZES
from helpers.waiting import wait_until


def granule_of(welcome: AttachReply) -> int:
    (value,) = [option.value for option in welcome.options if option.type == SessionOption.REGIONS]
    return int.from_bytes(value, "big")


def launch_in(made: Worker, address: int) -> LaunchIn:
    loaded = made.ask(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM))
    assert isinstance(loaded, ModuleLoaded)
    chosen = made.ask(Opcode.REGION_SET, RegionSet((RegionRef(0, 1),)))
    assert isinstance(chosen, Handle)
    args = address.to_bytes(8, "little") + (8).to_bytes(4, "little") + b"\0\0\x80\x3f"
    return LaunchIn(loaded.module, "scale", 1, 1, 1, 32, 1, 1, 0, args, SIZES, chosen.handle, 7)


def test_a_region_from_its_opening_to_its_release() -> None:
    with worker() as (made, welcome):
        granule_bytes = granule_of(welcome)
        address = made.open_region(granule_bytes)
        launch = launch_in(made, address)
        for _ in range(5):
            made.send(Opcode.LAUNCH_IN, launch, quiet=True)
        assert made.ask(Opcode.SYNC, Empty()) == Empty()
        made.writer.set(0, 1, RegionWord.REVOKED, 0, 5)
        made.send(Opcode.LAUNCH_IN, launch, quiet=True)
        failure = made.ask(Opcode.SYNC, Empty())
        assert isinstance(failure, Failure)
        assert (failure.status, failure.region, failure.position) == (Status.REVOKED, REGION, 7)
        told = made.hear(ForwardRevokedReport)
        assert isinstance(told, ForwardRevokedReport)
        assert (told.region_id, told.kernel, told.site, told.flipped_ns) == (REGION, "scale", 0, 5)
        made.say(EndRegionOrder(REGION, 1000))
        ended = made.hear(RegionEndedReport)
        assert isinstance(ended, RegionEndedReport)
        assert ended.freed_bytes + ended.kept_bytes == granule_bytes
        assert ended.shown_bytes == ended.freed_bytes
        assert made.ask(Opcode.REGION_RELEASE, Handle(address)) == Empty()


def test_a_resized_slice_is_what_the_next_connection_hears() -> None:
    with worker() as (made, _):
        made.say(ResizeSliceOrder(SLICE // 2))
        assert made.hear(SliceResizedReport) == SliceResizedReport(SLICE // 2, "")


def test_a_region_ends_while_the_session_waits_for_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant waits for its kernels; the broker has the region ended all the same, and other messages later."""
    waiting, go_on = threading.Event(), threading.Event()
    with worker() as (made, welcome):
        address = made.open_region(granule_of(welcome))
        launch_in(made, address)

        def sync(_context: CpuContext, poll: Poll) -> None:
            waiting.set()
            while not go_on.wait(0.001):
                poll()

        monkeypatch.setattr(CpuContext, "sync", sync)
        made.send(Opcode.STREAM_SYNC, Handle(0))
        made.send(Opcode.SYNC, Empty())
        waiting.wait()
        made.writer.set(0, 1, RegionWord.REVOKED, 0, 5)
        made.say(EndRegionOrder(REGION, 1000))
        assert isinstance(made.hear(RegionEndedReport), RegionEndedReport)
        assert not go_on.is_set()
        go_on.set()
        assert made.reply() == Empty()
        assert made.reply() == Empty()


def test_a_bell_without_a_request_makes_the_worker_poll_for_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ORDER_POLL_NS", 600 * NS_PER_S)
    with worker(ring=True) as (made, welcome):
        server = made.server
        assert server is not None
        server._may_poll = True
        made.sock.sendall(b"\0")
        wait_until(lambda: server._poll_until_ns, "the worker polls")
        # Orders and requests are served as usual.
        made.open_region(granule_of(welcome))
        assert made.ask(Opcode.SYNC, Empty()) == Empty()


@pytest.mark.parametrize("timeout_ms", [0, 60_000])
def test_a_worker_that_polls_does_not_sleep(monkeypatch: pytest.MonkeyPatch, timeout_ms: int) -> None:
    timeouts: list[int] = []

    class Poll:
        """poll(2), at the third call of which there is something."""

        def poll(self, timeout: int) -> list[tuple[int, int]]:
            timeouts.append(timeout)
            return [(1, select.POLLIN)] if len(timeouts) == 3 or timeout else []

    with pair(is_native=False) as made:
        server = made.server
        monkeypatch.setattr(server, "_poll", Poll())
        server._poll_until_ns = time.monotonic_ns() + 60 * NS_PER_S
        server._await_events(timeout_ms)
        assert timeouts == ([0, 0, 0] if timeout_ms else [0])
        # With work to do, or once the time is over, it is the usual wait.
        timeouts.clear()
        server._ready.add(made.connection.fd)
        server._await_events(timeout_ms)
        server._ready.clear()
        server._poll_until_ns = 1
        server._await_events(7)
        assert (timeouts, server._poll_until_ns) == ([0, 7], 0)


def test_a_session_with_regions_polls_its_ring_once_after_a_reply() -> None:
    with worker() as (made, welcome):
        assert made.server is not None
        assert made.server._spins_per_reply == SPINS_PER_REPLY
        made.open_region(granule_of(welcome))
        assert made.server._spins_per_reply == 1
