"""What a worker gets of its session's regions, and in which order."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.daemon.contract.messages import EndRegionOrder, OpenRegionOrder
from gpulease.daemon.host.ipc import channel_pair, close_all, receive_message, send_message
from gpulease.daemon.workers.region_link import RegionLink
from gpulease.protocol.session_words import SESSION_WORDS_BYTES, RegionWord

Channel = tuple[socket.socket, socket.socket]

MANY = 2000
"""More orders than any channel has room for."""


@pytest.fixture
def channel() -> Iterator[Channel]:
    ours, theirs = channel_pair()
    ours.setblocking(False)
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


def received(theirs: socket.socket) -> list[tuple[dict[str, Any], bytes]]:
    """What came so far; with a page, what is on it."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            message, fds = receive_message(theirs)
            found.append((message, os.pread(fds[0], SESSION_WORDS_BYTES, 0) if fds else b""))
            close_all(fds)
    return found


def ops(theirs: socket.socket) -> list[str]:
    return [message["op"] for message, _ in received(theirs)]


def test_the_page_goes_once_and_before_the_first_order(channel: Channel) -> None:
    async def run() -> None:
        link = RegionLink(channel[0])
        link.order(OpenRegionOrder(1, 0, 1, 2 << 20))
        link.order(EndRegionOrder(1, 5))
        link.close()

    asyncio.run(run())
    assert ops(channel[1]) == ["regions", "region", "end_region"]


def test_orders_that_find_no_room_wait_in_their_order(channel: Channel) -> None:
    async def run() -> list[str]:
        link = RegionLink(channel[0])
        for number in range(MANY):
            link.order(EndRegionOrder(number + 1, 5))
        found: list[tuple[dict[str, Any], bytes]] = []
        while len(found) < MANY + 1:
            found += received(channel[1])
            await asyncio.sleep(0)
        link.close()
        return [message.get("lease", "") for message, _ in found]

    told = asyncio.run(asyncio.wait_for(run(), 60))
    assert told == ["", *(f"{number + 1:032x}" for number in range(MANY))]


def test_a_worker_that_was_taken_over_gets_a_page_with_its_words_on_it_first(channel: Channel) -> None:
    async def run() -> None:
        link = RegionLink(channel[0], is_held=True)
        link.order(EndRegionOrder(1, 5))
        assert ops(channel[1]) == []
        link.page.set(3, 9, RegionWord.REVOKED, 5, now_ns=4)
        link.release()
        (page, content), (end, _) = received(channel[1])
        assert (page["op"], end["op"]) == ("regions", "end_region")
        assert content == os.pread(link.page.reading_fd, SESSION_WORDS_BYTES, 0)
        link.order(EndRegionOrder(2, 5))
        assert ops(channel[1]) == ["end_region"], "the page goes once"
        link.close()

    asyncio.run(run())


def test_a_page_that_finds_no_room_waits_without_any_order(channel: Channel) -> None:
    async def run() -> list[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                send_message(channel[0], {"op": "attach"})
        link = RegionLink(channel[0], is_held=True)
        link.release()
        found: list[str] = []
        while "regions" not in found:
            found += ops(channel[1])
            await asyncio.sleep(0)
        link.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)).count("regions") == 1


def test_a_worker_that_is_gone_gets_nothing_and_keeps_nobody(channel: Channel) -> None:
    async def run() -> None:
        link = RegionLink(channel[0])
        channel[1].close()
        link.order(EndRegionOrder(1, 5))
        link.order(EndRegionOrder(2, 5))
        link.close()

    asyncio.run(run())


def test_what_waits_when_the_worker_ends_is_dropped(channel: Channel) -> None:
    async def run() -> None:
        link = RegionLink(channel[0])
        for number in range(MANY):
            link.order(EndRegionOrder(number + 1, 5))
        link.close()
        loop = asyncio.get_running_loop()
        assert not loop.remove_writer(channel[0]), "nobody waits for room any more"

    asyncio.run(run())
