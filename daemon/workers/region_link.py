"""The broker's access to the regions of one session: the page that it writes, and orders to the worker.

Orders wait for room in the worker's channel and keep their order. There are at most three for each region.
"""

import asyncio
import socket

from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import RegionsPage
from gpulease.daemon.contract.regions_page import BrokerRegionsPage
from gpulease.daemon.host.ipc import ChannelClosed, Outbox


class RegionLink:
    """The regions page of one session, and the channel to its worker.

    Args:
        channel: The broker's end of the worker's channel, which must not block.
        is_held: Whether orders wait for `release`: a worker that was taken over receives the page only after all words
          are written to the page.

    Attributes:
        page: The page.
    """

    def __init__(self, channel: socket.socket, *, is_held: bool = False) -> None:
        self.page = BrokerRegionsPage()
        self._channel = channel
        self._outbox = Outbox(channel)
        self._held: list[Message] | None = [] if is_held else None
        self._is_page_sent = False

    def order(self, message: Message) -> None:
        """Send the worker an order, and before the first order the page. Does nothing if the worker has ended.

        Raises:
            OSError: No descriptor is left for a page that has to wait for room.
        """
        if self._held is not None:
            # Hold the order: the worker must not act on it before it can read the region's word.
            self._held.append(message)
            return
        try:
            # Send the page first, because an order names a slot of it.
            self._send_page()
            self._outbox.send(message.to_map())
        except ChannelClosed:
            self._outbox.close()
        self._flush_when_writable()

    def show_page(self) -> None:
        """Send the page, unless it was sent, before the first client that asks for it.

        Raises OSError as `order` does.
        """
        if self._held is not None:
            return
        try:
            self._send_page()
        except ChannelClosed:
            self._outbox.close()
        self._flush_when_writable()

    def _send_page(self) -> None:
        if not self._is_page_sent:
            self._outbox.send(RegionsPage().to_map(), (self.page.reading_fd,))
            self._is_page_sent = True

    def release(self) -> None:
        """Send the page, then the held orders, to a worker that was taken over. Raises OSError as `order` does."""
        # Clear `_held` first: then `order` sends, below, the held orders one by one.
        held_orders, self._held = self._held or [], None
        try:
            self._send_page()
        except ChannelClosed:
            return
        self._flush_when_writable()
        for message in held_orders:
            self.order(message)

    def move_to(self, channel: socket.socket) -> None:
        """Continue with another worker of the same lease. The next order sends the page to it.

        Orders that still wait are dropped.
        """
        if self._outbox:
            asyncio.get_running_loop().remove_writer(self._channel)
        self._outbox.close()
        self._channel, self._outbox, self._is_page_sent = channel, Outbox(channel), False

    def close(self) -> None:
        """Drop the orders that wait, and unmap the page."""
        if self._outbox:
            asyncio.get_running_loop().remove_writer(self._channel)
        self._outbox.close()
        self.page.close()

    def _flush_when_writable(self) -> None:
        if self._outbox:
            asyncio.get_running_loop().add_writer(self._channel, self._flush)

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except ChannelClosed:
            # A worker that has ended needs no orders; the zygote reports its end to the registry.
            self._outbox.close()
        if not self._outbox:
            asyncio.get_running_loop().remove_writer(self._channel)
