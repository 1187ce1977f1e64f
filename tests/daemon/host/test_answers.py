"""An answer counts although this process reads it late."""

import asyncio
import socket
import time

import pytest

from gpulease.daemon.host.answers import answer_within

LIMIT_S = 0.05


@pytest.mark.parametrize("has_answered", [False, True])
def test_an_answer_that_came_in_time_is_returned_by_a_process_that_is_late(has_answered: bool) -> None:
    async def story() -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(ours, lambda: answer.set_result(ours.recv(16)))
        loop.call_soon(be_late)
        try:
            return await answer_within(answer, LIMIT_S)
        finally:
            loop.remove_reader(ours)

    def be_late() -> None:
        if has_answered:
            theirs.send(b"done")
        time.sleep(2 * LIMIT_S)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        if has_answered:
            assert asyncio.run(story()) == b"done"
        else:
            with pytest.raises(TimeoutError):
                asyncio.run(story())


def test_a_coroutine_that_gives_no_answer_has_ended_behind_the_wait() -> None:
    ends = []

    async def silent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("ended")

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await answer_within(silent(), LIMIT_S)
        waiting = asyncio.create_task(answer_within(silent(), LIMIT_S * 1000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())
    assert ends == ["ended"] * 2
