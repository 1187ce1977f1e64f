"""The images of cold sessions, which the broker keeps while a session has no worker.

The broker reads only one part of an image, the offsets of regions' bytes, which it wipes if the region ends. It also
writes the words of all regions. It keeps the descriptors of the image, of the session's host memory, and of its
clients' sockets and rings. It watches the sockets, because a client that waits rings or sends. New connections wait
here as well, and are sent to the next worker after the image.

A tenant may have compromised the worker that sent an image. So an image is sent only to a worker of the same lease, and
descriptors are received only through a channel that was made for one order.
"""

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import field
from typing import Final

from gpulease.daemon.contract.message_fields import MalformedMessage, parse_message
from gpulease.daemon.contract.messages import (
    IMAGE_MESSAGES,
    AdoptOrder,
    AttachOrder,
    ImageConnection,
    ImagedReport,
    ImageMemory,
    ImageMessage,
    ImagePages,
    ParkedRegion,
)
from gpulease.daemon.contract.regions_page import BrokerRegionsPage
from gpulease.daemon.contract.session_image import IMAGE_VERSIONS
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, close_all, fd_groups, receive_message, send_message
from gpulease.daemon.leases.events import (
    Event,
    RegionEnded,
    RegionRefused,
    RegionStuck,
    ReturnWanted,
    SessionImaged,
    SessionStays,
)
from gpulease.daemon.workers.region_link import RegionLink
from gpulease.daemon.workers.worker import MAX_HAND_OVERS, Worker
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Opcode, Status

WATCH_AGAIN_S: Final = 1.0
"""Pause before the clients of a session that could not return are watched again: at least one of them still waits."""

CHANNEL_BYTES: Final = 1 << 20
"""Size of an image's channel: room for the messages of all connections."""


@dataclass(slots=True)
class _Image:
    """The image of a session.

    Attributes:
        number: The number of its park.
        in_place: Whether it is parked in place, for a direct move.
        channel: The broker's end of the channel to its worker; None once everything was read.
        memory: What the worker sent with the image, and the two descriptors.
        pages: Descriptors of the session's pages, which its former worker still holds; none if its bytes are in the
            host memory.
        connections: Each connection's message, and its descriptors, the socket first.
        is_kept: Whether the session has no worker any more.
        is_lent: Whether a new worker is adopting it.
        is_awaited: Whether its last worker had received requests that wait for its return. Clients do not send these
          again.
        link: The page with the lease's words, which clients map.
        counted: The counters that its last worker reported.
        former: The worker that it came from.
        opened_bytes: Size of the slice with which the session was opened.
        regions: Where the bytes of its regions are in the host memory, by id.
        held: New connections, each with its socket.
        watched: Sockets that are watched for requests, which bring the session back.
    """

    number: int
    in_place: bool
    channel: socket.socket | None
    memory: tuple[ImageMemory, list[int]] | None = None
    pages: list[int] = field(default_factory=list)
    connections: list[tuple[ImageConnection, list[int]]] = field(default_factory=list)
    is_kept: bool = False
    is_lent: bool = False
    is_awaited: bool = False
    link: RegionLink | None = None
    counted: tuple[int, ...] = ()
    former: Worker | None = None
    opened_bytes: int = 0
    regions: dict[int, ParkedRegion] = field(default_factory=dict)
    held: list[tuple[int, AttachOrder]] = field(default_factory=list)
    watched: list[int] = field(default_factory=list)


class SessionImages:
    """Keeps the images of cold sessions, by lease.

    Args:
        post: Called with events for the lease table.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._images: dict[int, _Image] = {}

    def is_connected(self, lease_id: int) -> bool:
        """Return whether a cold session has clients."""
        image = self._images.get(lease_id)
        return image is not None and image.is_kept and bool(image.connections or image.held)

    def opened_bytes(self, lease_id: int) -> int:
        """Return the size of the slice with which a cold session was opened; 0 for any other session."""
        image = self._images.get(lease_id)
        return 0 if image is None or not image.is_kept else image.opened_bytes

    # --- leaving ---

    def begin(self, lease_id: int, number: int, *, in_place: bool = False) -> socket.socket:
        """Return the worker's end of a channel for its session's image. The caller closes it. Raises OSError.

        `in_place`: Whether the session is parked in place. Only then may its worker lend pages.
        """
        self.discard(lease_id)
        own_end, peer_end = channel_pair()
        peer_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHANNEL_BYTES)
        own_end.setblocking(False)
        self._images[lease_id] = _Image(number, in_place, own_end)
        return peer_end

    def on_imaged(self, lease_id: int, report: ImagedReport) -> bool:
        """Receive, from the channel, the image that a worker has reported.

        Returns False if there is none. Then the worker, which stopped serving when it sent the image, must serve the
        session again.
        """
        image = self._images.get(lease_id)
        # The order to leave was withdrawn.
        if image is None:
            return False
        # Ignore a report of an earlier park, and a repeated one.
        if image.channel is None or image.number != report.number:
            return True
        # The worker sends everything before it reports, so the channel never blocks. The worker may be compromised: if
        # something can't be parsed, drop the image, and the session stays with its worker.
        try:
            self._read(image, image.channel, report.connections)
            self._take_regions(image, report)
        except (ChannelClosed, BlockingIOError, MalformedMessage, ValueError) as error:
            self._post(SessionStays(lease_id, report.number, f"its image did not arrive: {error}", is_lasting=True))
            return False
        image.channel.close()
        image.channel, image.is_awaited = None, report.is_awaited
        self._post(SessionImaged(lease_id, report.number, report.image_bytes))
        return True

    def _read(self, image: _Image, channel: socket.socket, connections: int) -> None:
        # First receive the host memory's descriptor with the image's, then pages, then each connection with its
        # descriptors.
        memory, fds = _receive(channel)
        if not isinstance(memory, ImageMemory) or len(fds) != 2:
            close_all(fds)
            raise ValueError("its memory is missing")
        if memory.version not in IMAGE_VERSIONS:
            close_all(fds)
            raise ValueError(f"its image must have a version up to {max(IMAGE_VERSIONS)}, not {memory.version}")
        image.memory = memory, fds
        # Only a session that was parked in place may lend pages: any number of sessions may be cold, for any time, and
        # the broker has a bounded number of descriptors.
        is_ring_alone = memory.pages == 1 or not memory.by_ring
        if memory.in_place != image.in_place or (memory.pages and not memory.in_place) or not is_ring_alone:
            raise ValueError("its bytes are not where they were parked")
        while len(image.pages) < memory.pages:
            pages, fds = _receive(channel)
            image.pages += fds
            if not isinstance(pages, ImagePages) or not fds or len(image.pages) > memory.pages:
                raise ValueError("its pages are missing")
        for _ in range(connections):
            connection, fds = _receive(channel)
            if not isinstance(connection, ImageConnection) or not fds:
                close_all(fds)
                raise ValueError("a connection is missing")
            image.connections.append((connection, fds))

    def _take_regions(self, image: _Image, report: ImagedReport) -> None:
        host_bytes = 0 if image.memory is None else image.memory[0].host_bytes
        if any(
            region.at + region.size_bytes > host_bytes or region.kept_bytes > region.size_bytes
            for region in report.regions
        ):
            raise ValueError("one of its regions is outside its memory")
        image.regions = {region.region_id: region for region in report.regions}

    def keep(self, lease_id: int, worker: Worker | None) -> None:
        """Keep a session that leaves its worker. From now on its clients are watched."""
        image = self._images.get(lease_id)
        if image is None:
            return
        image.is_kept = True
        # The page that clients map and the counters outlive the worker; the next worker continues with them.
        if worker is not None:
            image.link, worker.regions = worker.regions, None
            image.counted, image.former = worker.counted, worker
            image.opened_bytes = worker.spec.context_bytes
        # If a client attached while the session left, it waits already, so bring the session back at once.
        if image.held or image.is_awaited:
            self._post(ReturnWanted(lease_id, image.number))
        else:
            self.watch(lease_id)

    def watch(self, lease_id: int) -> None:
        """Report the next client that sends something or disconnects."""
        image = self._images.get(lease_id)
        if image is None or not image.is_kept or image.is_lent or image.watched:
            return
        loop = asyncio.get_running_loop()
        # Ignore a descriptor that can't be watched. It is not a socket, and the next worker will refuse it.
        for _, fds in image.connections:
            with contextlib.suppress(OSError):
                loop.add_reader(fds[0], self._on_client, lease_id)
                image.watched.append(fds[0])

    def watch_later(self, lease_id: int) -> None:
        """After a pause, again watch the clients of a session that could not return."""
        image = self._images.get(lease_id)
        if image is not None:
            self._unwatch(image)
            asyncio.get_running_loop().call_later(WATCH_AGAIN_S, self._ask_again, lease_id)

    def _ask_again(self, lease_id: int) -> None:
        image = self._images.get(lease_id)
        if image is not None and image.is_kept and (image.held or image.is_awaited) and not image.is_lent:
            self._post(ReturnWanted(lease_id, image.number))
        self.watch(lease_id)

    def _on_client(self, lease_id: int) -> None:
        image = self._images.get(lease_id)
        if image is not None:
            self._unwatch(image)
            self._post(ReturnWanted(lease_id, image.number))

    def _unwatch(self, image: _Image) -> None:
        loop = asyncio.get_running_loop()
        while image.watched:
            loop.remove_reader(image.watched.pop())

    def hold(self, lease_id: int, sock_fd: int, attach: AttachOrder) -> bool | None:
        """Hold a new connection of a session that is leaving, or has left, its worker.

        Returns whether it is held; None if the session has a worker that can take it.
        """
        image = self._images.get(lease_id)
        if image is None:
            return None
        if len(image.held) >= MAX_HAND_OVERS:
            return False
        try:
            image.held.append((os.dup(sock_fd), attach))
        except OSError:
            return False
        if image.is_kept and not image.is_lent:
            self._post(ReturnWanted(lease_id, image.number))
        return True

    # --- regions of a session without a worker ---

    def words(self, lease_id: int) -> BrokerRegionsPage | None:
        """Return the page with the words of a lease's regions, if no worker has the lease's session; otherwise None."""
        image = self._images.get(lease_id)
        return None if image is None or image.is_lent or image.link is None else image.link.page

    def end_region(self, lease_id: int, region_id: int) -> Event | None:
        """Wipe the bytes of an ended region, and return them to the host. Returns the event that reports the result.

        Returns None if a worker has the session or is adopting it. That worker ends the region: the region's word shows
        that it must not restore the region. Also returns None if the session's bytes are still in pages of its former
        worker, not in the host memory; another worker adopts such a session at once.
        """
        image = self._images.get(lease_id)
        if image is None or not image.is_kept or image.is_lent or image.memory is None:
            return None
        if image.memory[0].in_place:
            return None
        region = image.regions.pop(region_id, None)
        if region is None:
            return RegionRefused(region_id, "The session has no such region.")
        try:
            _wipe(image.memory[1][1], region.at, region.size_bytes)
        except (OSError, ValueError) as error:
            return RegionStuck(region_id, f"the host memory of its session can't be wiped: {error}")
        # None of its bytes is on a card, so no proof is needed.
        return RegionEnded(region_id, region.size_bytes - region.kept_bytes, region.kept_bytes, is_shown=True)

    # --- returning ---

    def stay(self, lease_id: int, worker: Worker | None) -> None:
        """Give a session that stays the connections that were held, and discard its image.

        `worker`: The worker that has the session.
        """
        image = self._images.get(lease_id)
        if image is not None and worker is not None and worker.has_left:
            worker.has_left = False
            # If the page can't be sent, only the worker notifies the clients of the lease's end.
            with contextlib.suppress(OSError, ChannelClosed):
                self._give_words(image, worker)
        if image is not None:
            self._hand_over_held(image, worker)
        self.discard(lease_id)

    def adopt(self, lease_id: int, number: int, worker: Worker, refusal: str = "") -> bool:
        """Send a cold session to a new worker. Returns False if that fails. `refusal`: as in AdoptOrder."""
        image = self._images.get(lease_id)
        if image is None or not image.is_kept or image.memory is None:
            return False
        # Keep the image here until the worker has restored the whole session.
        self._unwatch(image)
        image.is_lent = True
        try:
            own_end, peer_end = channel_pair()
        except OSError:
            return False
        with own_end, peer_end:
            own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHANNEL_BYTES)
            own_end.setblocking(False)
            # Put everything into the channel before the order that passes it on, so that the worker never waits for a
            # part.
            try:
                memory, fds = image.memory
                send_message(own_end, memory.to_map(), tuple(fds))
                for page_fds in fd_groups(image.pages):
                    send_message(own_end, ImagePages().to_map(), page_fds)
                for connection, fds in image.connections:
                    send_message(own_end, connection.to_map(), tuple(fds))
                self._give_words(image, worker)
                order = AdoptOrder(number, len(image.connections), refusal or None)
                send_message(worker.channel, order.to_map(), (peer_end.fileno(),))
            except (OSError, ChannelClosed):
                return False
        worker.page.open_session()
        worker.counted = image.counted
        return True

    def on_adopted(self, lease_id: int, worker: Worker | None) -> None:
        """Discard the image of a session that a worker has adopted, and give that worker the held connections."""
        image = self._images.get(lease_id)
        if image is not None and image.is_lent:
            self.stay(lease_id, worker)

    def on_mismatch(self, lease_id: int, worker: Worker | None) -> None:
        """Take back a session from a worker that could not adopt it and has served none of its requests."""
        image = self._images.get(lease_id)
        if image is not None and image.is_lent:
            image.is_lent = False
            if worker is not None and worker.regions is not None:
                image.link, worker.regions = worker.regions, None

    def on_lost(self, lease_id: int, worker: Worker) -> None:
        """Take back a session after its new worker has ended, if its former worker was set aside for that.

        Without such a worker its lease ends.
        """
        image = self._images.get(lease_id)
        if image is not None and image.former is not None and not image.former.is_killed:
            self.on_mismatch(lease_id, worker)

    def _give_words(self, image: _Image, worker: Worker) -> None:
        """Give the worker the page with the words that the session's clients map. Raises OSError."""
        if image.link is None:
            return
        image.link.move_to(worker.channel)
        worker.regions, image.link = image.link, None
        worker.regions.page.set_generation(worker.page.generation)
        worker.regions.show_page()

    def _hand_over_held(self, image: _Image, worker: Worker | None) -> None:
        while image.held:
            fd, attach = image.held.pop(0)
            if worker is not None:
                # A connection for which the worker has no room is closed; its client tries again.
                worker.hand_over(fd, attach)
            os.close(fd)

    # --- ends ---

    def refuse(self, lease_id: int, status: Status, reason: str, cause: str) -> None:
        """Notify a cold session's clients that its lease has ended, and drop the image."""
        image = self._images.get(lease_id)
        if image is None or not image.is_kept:
            return
        # Clients that map the page with the words read the end there; send the others a GOODBYE.
        if image.link is not None and cause:
            image.link.page.end_lease(status, cause, reason)
        goodbye = Failure(status, reason or "the lease has ended").to_frame(Opcode.GOODBYE, request_id=0)
        for connection, fds in image.connections:
            # A client with a ring notices that its socket is closed, and asks the broker.
            if not connection.has_ring:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fds[0])) as sock:
                    sock.send(goodbye, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        self.discard(lease_id)

    def discard(self, lease_id: int) -> None:
        """Close an image's descriptors, which returns the session's host memory unless a worker has adopted it."""
        image = self._images.pop(lease_id, None)
        if image is None:
            return
        self._unwatch(image)
        if image.channel is not None:
            image.channel.close()
        if image.memory is not None:
            close_all(image.memory[1])
        close_all(image.pages)
        for _, fds in image.connections:
            close_all(fds)
        close_all([fd for fd, _ in image.held])
        if image.link is not None:
            image.link.close()

    def close(self) -> None:
        for lease_id in list(self._images):
            self.discard(lease_id)


def _wipe(fd: int, at: int, size_bytes: int) -> None:
    """Zero a part of a memfd, and return its whole pages to the host. Raises OSError or ValueError."""
    start = at // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(fd, at + size_bytes - start, offset=start) as memory:
        first, end = at - start, at - start + size_bytes
        pages_from, pages_to = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if pages_from >= pages_to:
            memory[first:end] = bytes(size_bytes)
            return
        # Keep the pages at both ends, because they also hold neighbouring bytes.
        memory.madvise(mmap.MADV_REMOVE, pages_from, pages_to - pages_from)
        memory[first:pages_from] = bytes(pages_from - first)
        memory[pages_to:end] = bytes(end - pages_to)


def _receive(channel: socket.socket) -> tuple[ImageMessage | None, list[int]]:
    """Receive one message of an image. Raises the errors of `receive_message` and `parse_message`."""
    message, fds = receive_message(channel)
    try:
        return parse_message(IMAGE_MESSAGES, message), fds
    except MalformedMessage:
        close_all(fds)
        raise
