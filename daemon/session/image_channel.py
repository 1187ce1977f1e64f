"""Sends a session's image, its memory and its connections' descriptors from one worker to the next.

The channel is made by the broker for this session. The broker receives everything from it, keeps the descriptors, and
sends them through a new channel to the next worker.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.daemon.contract.message_fields import MalformedMessage, parse_message
from gpulease.daemon.contract.messages import IMAGE_MESSAGES, ImageConnection, ImageMemory, ImageMessage, ImagePages
from gpulease.daemon.contract.session_image import MAX_IMAGE_BYTES, SessionImage, UnreadableImage
from gpulease.daemon.host.ipc import ChannelClosed, close_all, fd_groups, receive_message, send_message


class ConnectionFds(NamedTuple):
    """The descriptors of one connection; -1 for a missing one."""

    sock: int
    ring: int = -1
    arena: int = -1

    def present(self) -> tuple[int, ...]:
        return tuple(fd for fd in self if fd >= 0)


def send_image(
    channel_fd: int,
    image: SessionImage,
    host: tuple[int, int],
    connections: Sequence[ConnectionFds],
    pages: Sequence[int] = (),
    *,
    in_place: bool = False,
    by_ring: bool = False,
) -> int:
    """Put a session into a channel; return the image's size. The descriptors stay open here.

    Args:
        channel_fd: The channel.
        image: The image.
        host: Descriptor and size of the session's host memory.
        connections: The descriptors of its connections.
        pages: Descriptors of the pages that it lends.
        in_place: Whether it is parked in place.
        by_ring: Whether `pages` is a ring, through which it lends its pages.

    Raises:
        ValueError: The image is too large.
        OSError: The channel is full, or can't be used.
        ChannelClosed: The broker is gone.
    """
    data = image.to_bytes()
    if len(data) > MAX_IMAGE_BYTES:
        raise ValueError(f"the image has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are allowed")
    image_fd = sealed_memory("gpulease-image", len(data))
    try:
        with mmap.mmap(image_fd, len(data)) as memory:
            memory[:] = data
        with socket.socket(fileno=os.dup(channel_fd)) as channel:
            channel.setblocking(False)
            header = ImageMemory(len(data), host[1], image.version, len(pages), in_place, by_ring)
            send_message(channel, header.to_map(), (image_fd, host[0]))
            for fds in fd_groups(pages):
                send_message(channel, ImagePages().to_map(), fds)
            for connection in connections:
                message = ImageConnection(has_ring=connection.ring >= 0, has_arena=connection.arena >= 0)
                send_message(channel, message.to_map(), connection.present())
    finally:
        os.close(image_fd)
    return len(data)


class ReceivedImage:
    """A session received from a channel. `close` closes all descriptors that were not taken out.

    Attributes:
        image: The image.
        host_fd: Descriptor of its host memory, which has `host_bytes`.
        pages: Descriptors of the pages that its former worker lends.
        in_place: Whether its former worker parked it in place.
        by_ring: Whether `pages` is a ring, which that worker fills with its pages.
        connections: The descriptors of its connections.
    """

    def __init__(self, channel_fd: int, connections: int) -> None:
        """Read the channel, which must hold everything already. Raises UnreadableImage."""
        self._fds: list[int] = []
        try:
            with socket.socket(fileno=os.dup(channel_fd)) as channel:
                channel.setblocking(False)
                self._read(channel, connections)
        except (OSError, ChannelClosed, MalformedMessage) as error:
            self.close()
            raise UnreadableImage(f"the image did not arrive: {error}") from None
        except UnreadableImage:
            self.close()
            raise

    def _read(self, channel: socket.socket, connections: int) -> None:
        memory, fds = self._receive(channel)
        if not isinstance(memory, ImageMemory) or len(fds) != 2:
            raise UnreadableImage("the image did not arrive")
        self.host_fd, self.host_bytes, self.in_place = fds[1], memory.host_bytes, memory.in_place
        self.by_ring = memory.by_ring
        with mmap.mmap(fds[0], memory.image_bytes, access=mmap.ACCESS_READ) as data:
            self.image = SessionImage.from_bytes(bytes(data))
        self.pages: list[int] = []
        while len(self.pages) < memory.pages:
            message, fds = self._receive(channel)
            if not isinstance(message, ImagePages) or not 0 < len(fds) <= memory.pages - len(self.pages):
                raise UnreadableImage("pages of the session did not arrive")
            self.pages += fds
        self.connections: list[ConnectionFds] = []
        for _ in range(connections):
            message, fds = self._receive(channel)
            if not isinstance(message, ImageConnection) or len(fds) != 1 + message.has_ring + message.has_arena:
                raise UnreadableImage("a connection of the session did not arrive")
            rest = iter(fds)
            self.connections.append(
                ConnectionFds(
                    next(rest), next(rest) if message.has_ring else -1, next(rest) if message.has_arena else -1
                )
            )
        if len(self.connections) != len(self.image.connections):
            raise UnreadableImage("the image's connections are not those of the session")

    def _receive(self, channel: socket.socket) -> tuple[ImageMessage, list[int]]:
        message, fds = receive_message(channel)
        self._fds += fds
        parsed = parse_message(IMAGE_MESSAGES, message)
        if parsed is None:
            raise UnreadableImage("the image was made by another version")
        return parsed, fds

    def take(self, fd: int) -> int:
        """Take a descriptor out: the caller closes it."""
        self._fds.remove(fd)
        return fd

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
