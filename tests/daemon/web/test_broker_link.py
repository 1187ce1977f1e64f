"""The web process's channel to the broker: every message is handled, and every answer ends a wait."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpulease.daemon.host.ipc import channel_pair, receive_message, send_message
from gpulease.daemon.web.broker_link import ActionNotDone, BrokerChannel, BrokerSilent
from gpulease.daemon.web.web_messages import FencesCleared, WebRefusal
from helpers.process_messages import TO_WEB
from helpers.waiting import PATIENCE_S

CARD = "GPU-a"


def play(story: Callable[[BrokerChannel, socket.socket], Awaitable[None]]) -> list[object]:
    """Run a story with an open channel and the broker's end of it; what the process was told."""
    told: list[object] = []

    async def run() -> None:
        ours, theirs = channel_pair()
        with ours, theirs:
            ours.setblocking(False)
            channel = BrokerChannel(told.append, told.append, told.append)
            channel.open(theirs)
            await story(channel, ours)
            asyncio.get_running_loop().remove_reader(theirs)

    asyncio.run(run())
    return told


async def request_at(broker: socket.socket) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return receive_message(broker)[0]
            except BlockingIOError:
                await asyncio.sleep(0.001)


def test_every_message_of_the_broker_is_handled() -> None:
    async def story(channel: BrokerChannel, broker: socket.socket) -> None:
        for message in TO_WEB.messages:
            channel._dispatch(message)  # type: ignore[arg-type]
        assert (await request_at(broker))["op"] == "pong"

    assert len(play(story)) == 3, "the token, the samples, the membership"


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ({"op": "fences_cleared", "count": "two"}, BrokerSilent, "can't be read"),
        ({"op": "tomorrow's"}, BrokerSilent, "can't be read"),
        ({"op": "revoked", "outcome": 0}, BrokerSilent, "must be fences_cleared, not revoked"),
        ({"op": "refused", "why": "failed", "message": "See the log."}, ActionNotDone, "See the log."),
    ],
    ids=["malformed", "unknown", "of another request", "refused"],
)
def test_an_answer_without_the_outcome_ends_the_wait(answer: dict[str, Any], error: type[Exception], text: str) -> None:
    async def story(channel: BrokerChannel, broker: socket.socket) -> None:
        clearing = asyncio.ensure_future(channel.clear_fences(CARD, b"token"))
        number = (await request_at(broker))["number"]
        # Answers of nobody's requests are ignored.
        send_message(broker, {"op": "fences_cleared", "number": number + 1, "count": 1})
        send_message(broker, {"op": "tomorrow's", "number": number + 1})
        send_message(broker, answer | {"number": number})
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(error, match=text) as failure:
                await clearing
        if isinstance(failure.value, ActionNotDone):
            assert failure.value.why is WebRefusal.FAILED

    play(story)


def test_an_outcome_is_returned() -> None:
    async def story(channel: BrokerChannel, broker: socket.socket) -> None:
        clearing = asyncio.ensure_future(channel.clear_fences(CARD, b"token"))
        number = (await request_at(broker))["number"]
        send_message(broker, FencesCleared(number, 2).to_map())
        assert await clearing == 2

    play(story)
