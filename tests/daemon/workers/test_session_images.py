"""The broker's side of a session that leaves its worker: what does not arrive, and what a hostile worker sends."""

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.contract.messages import (
    ImageConnection,
    ImagedReport,
    ImageMemory,
    ImagePages,
    ParkedRegion,
    ReturnOrder,
)
from gpulease.daemon.host.ipc import send_message
from gpulease.daemon.leases.events import (
    AdoptSession,
    Event,
    LeaveSession,
    RegionEnded,
    RegionRefused,
    SessionStays,
    StaySession,
)
from gpulease.daemon.workers.park_orders import ParkOrders
from gpulease.daemon.workers.session_images import SessionImages

LEASE, PARK = 5, 7
MIB = 1 << 20


class Node:
    """A lease with a worker, without anything behind its channel."""

    def __init__(self) -> None:
        self.posted: list[Event] = []
        self.images = SessionImages(self.posted.append)
        ours, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self.worker: Any = SimpleNamespace(channel=ours, regions=None, counted=(), has_left=False, earlier_version="")
        workers: Any = SimpleNamespace(images=self.images, worker=lambda _: self.worker)
        table: Any = SimpleNamespace(get=lambda _: SimpleNamespace(size_bytes=1 << 20))
        self.orders = ParkOrders(table, workers, 0, self.posted.append, moves_modules=True)

    def reports(self, connections: int = 0, regions: tuple[ParkedRegion, ...] = ()) -> list[bytes]:
        """Have the worker report its image; return the orders that it gets."""

        async def hear() -> None:
            self.orders.on_message(LEASE, ImagedReport(PARK, 1, connections, regions=regions))

        asyncio.run(hear())
        return self.ordered()

    def ordered(self) -> list[bytes]:
        found: list[bytes] = []
        try:
            while True:
                found.append(self.channel.recv(4096))
        except BlockingIOError:
            return found


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.worker.channel.close()
    node.channel.close()


@pytest.mark.parametrize("connections", [0, 1])
def test_a_worker_whose_image_does_not_arrive_serves_its_session_again(node: Node, connections: int) -> None:
    with node.images.begin(LEASE, PARK) as channel:
        if connections:
            send_message(channel, ImageMemory(1, 1).to_map(), (0, 0))
        (order,) = node.reports(connections)
    assert b"stay" in order
    assert [type(event) for event in node.posted] == [SessionStays]
    # Neither does it wait for ever if the leave was given up meanwhile.
    (order,) = node.reports()
    assert b"stay" in order


@pytest.mark.parametrize("is_first", [True, False])
def test_a_malformed_message_leaves_no_descriptor_open(node: Node, is_first: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with node.images.begin(LEASE, PARK) as channel:
        if not is_first:
            send_message(channel, ImageMemory(1, 1).to_map(), (0, 0))
        good = ImageMemory(1, 1) if is_first else ImageConnection(has_ring=False, has_arena=False)
        bad = dict.fromkeys(good.to_map(), "") | {"op": good.OP}
        send_message(channel, bad, (0, 0))
        node.reports(1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_broker_wipes_a_region_that_ends(node: Node) -> None:
    fd = sealed_memory("host", 4 * MIB)
    with mmap.mmap(fd, 4 * MIB) as memory, node.images.begin(LEASE, PARK) as channel:
        memory[:] = b"x" * (4 * MIB)
        send_message(channel, ImageMemory(1, 4 * MIB).to_map(), (0, fd))
        # Neither begins nor ends with a page; a small one lies within a page.
        regions = ParkedRegion(1, 100, 2 * MIB, 16), ParkedRegion(2, 3 * MIB + 8, 80, 0)
        assert node.reports(regions=regions) == []
        # Its worker is there until the table has the image.
        assert node.images.end_region(LEASE, 1) is None

        async def run() -> None:
            node.images.keep(LEASE, None)
            assert node.images.end_region(LEASE, 1) == RegionEnded(1, 2 * MIB - 16, 16, is_shown=True)
            assert node.images.end_region(LEASE, 2) == RegionEnded(2, 80, 0, is_shown=True)
            assert isinstance(node.images.end_region(LEASE, 1), RegionRefused)
            node.images.close()

        asyncio.run(run())
        left = b"x" * 100, bytes(2 * MIB), b"x" * (MIB - 92), bytes(80), b"x" * (MIB - 88)
        assert bytes(memory[:]) == b"".join(left)
    os.close(fd)


@pytest.mark.parametrize("region", [ParkedRegion(1, 1, MIB, 0), ParkedRegion(1, 0, 8, 9)])
def test_a_worker_whose_regions_are_not_in_its_memory_keeps_its_session(node: Node, region: ParkedRegion) -> None:
    with node.images.begin(LEASE, PARK) as channel:
        send_message(channel, ImageMemory(1, MIB).to_map(), (0, 0))
        (order,) = node.reports(regions=(region,))
    assert b"stay" in order


def test_a_session_that_could_not_be_sent_is_watched_again(node: Node) -> None:
    client, served = socket.socketpair()
    with node.images.begin(LEASE, PARK) as channel:
        send_message(channel, ImageMemory(1, 1).to_map(), (0, 0))
        message = ImageConnection(has_ring=False, has_arena=False)
        send_message(channel, message.to_map(), (served.fileno(),))
        assert node.reports(1) == []

    async def run() -> None:
        node.images.keep(LEASE, None)
        # Its new worker takes no orders.
        node.channel.close()
        node.orders.adopt(AdoptSession(LEASE, PARK))
        node.posted.clear()
        node.images.watch(LEASE)
        client.send(b"x")
        await asyncio.sleep(0.05)
        assert node.posted
        node.images.close()

    asyncio.run(run())
    client.close()
    served.close()


def test_a_worker_with_a_full_channel_gets_its_order_to_stay_later(node: Node) -> None:
    async def run() -> None:
        node.images.begin(LEASE, PARK).close()
        full = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                send_message(node.worker.channel, ReturnOrder(PARK).to_map())
                full += 1
        node.orders.stay(StaySession(LEASE, PARK))
        # Another leave would be ended by the order that is still to come.
        node.orders.leave(LeaveSession(LEASE, PARK + 1))
        assert [type(event) for event in node.posted] == [SessionStays]
        assert len(node.ordered()) == full
        order = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(node.channel, 4096), 30)
        assert b"stay" in order
        node.orders.leave(LeaveSession(LEASE, PARK + 2))
        (order,) = node.ordered()
        assert b"leave" in order
        node.images.close()

    node.worker.channel.setblocking(False)
    asyncio.run(run())


def test_a_session_leaves_a_worker_of_an_earlier_version_only_if_it_could_return_there(node: Node) -> None:
    async def run() -> None:
        node.worker.earlier_version = "1.0"
        node.orders.leave(LeaveSession(LEASE, PARK, carries=True))
        (stays,) = node.posted
        assert isinstance(stays, SessionStays)
        assert (stays.is_lasting, "upgrade-workers" in stays.reason, node.ordered()) == (False, True, [])
        node.orders.leave(LeaveSession(LEASE, PARK, carries=True, is_upgrade=True))
        (order,) = node.ordered()
        assert b"leave" in order
        node.images.close()

    asyncio.run(run())


def test_an_image_of_an_unknown_version_is_refused_and_its_worker_serves_again(node: Node) -> None:
    with node.images.begin(LEASE, PARK) as channel:
        send_message(channel, ImageMemory(1, 1, version=99).to_map(), (0, 0))
        (order,) = node.reports()
    assert b"stay" in order
    (stays,) = node.posted
    assert isinstance(stays, SessionStays)
    assert (stays.is_lasting, "not 99" in stays.reason) == (True, True)


@pytest.mark.parametrize(
    ("ordered", "memory"),
    [
        (False, ImageMemory(1, 1, pages=1, in_place=True)),
        (False, ImageMemory(1, 1, pages=1)),
        (False, ImageMemory(1, 1, in_place=True)),
        (True, ImageMemory(1, 1)),
    ],
)
def test_a_worker_lends_pages_only_if_its_session_is_parked_in_place(
    node: Node, ordered: bool, memory: ImageMemory
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node.orders.leave(LeaveSession(LEASE, PARK, carries=True, in_place=ordered))
    _, fds, _, _ = socket.recv_fds(node.channel, 4096, 1)
    with socket.socket(fileno=fds[0]) as channel:
        send_message(channel, memory.to_map(), (0, 0))
        if memory.pages:
            send_message(channel, ImagePages().to_map(), (0,))
        (order,) = node.reports()
    assert b"stay" in order
    assert [type(event) for event in node.posted] == [SessionStays]
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_broker_keeps_the_pages_of_a_session_that_is_parked_in_place_until_it_stays(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node.orders.leave(LeaveSession(LEASE, PARK, carries=True, in_place=True))
    _, fds, _, _ = socket.recv_fds(node.channel, 4096, 1)
    with socket.socket(fileno=fds[0]) as channel:
        send_message(channel, ImageMemory(1, 1, pages=2, in_place=True).to_map(), (0, 0))
        send_message(channel, ImagePages().to_map(), (0, 0))
        assert node.reports() == []
    assert len(os.listdir("/proc/self/fd")) == before + 4

    async def stay() -> None:
        node.orders.stay(StaySession(LEASE, PARK))

    asyncio.run(stay())
    assert len(os.listdir("/proc/self/fd")) == before
