"""Waiting for the first of several works: its result, and the end of the others."""

import asyncio
import socket
import time

import pytest

from gpulease.client.decode.first_ended import answer_within, first_ended


async def _endless(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        # The clean-up of a cancelled task takes a turn of the loop, and the call waits for it.
        await asyncio.sleep(0)
        ended.append("cleaned up")


async def _failing() -> None:
    raise KeyError("x")


def test_the_others_are_cancelled_and_cleaned_up() -> None:
    ended: list[str] = []
    first, other = asyncio.run(_first(asyncio.sleep(0, "done"), _endless(ended)))
    assert first is not None
    assert first.result() == "done"
    assert other is None
    assert ended == ["cleaned up"]


def test_a_failure_is_in_the_future_and_not_raised() -> None:
    failed, other = asyncio.run(_first(_failing(), _endless([])))
    assert failed is not None
    assert isinstance(failed.exception(), KeyError)
    assert other is None


def test_a_cancelled_wait_cancels_all() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        async with asyncio.timeout(0.01):
            await first_ended(_endless(ended), _endless(ended))

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    assert ended == ["cleaned up"] * 2


@pytest.mark.parametrize("has_answered", [False, True])
def test_an_answer_that_came_in_time_is_returned_by_a_process_that_is_late(has_answered: bool) -> None:
    """The answer completes a future in a task that reads a stream, as a front's readiness does."""
    limit_s = 0.05

    async def scenario() -> list[bytes]:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        ready = asyncio.get_running_loop().create_future()

        async def read() -> None:
            ready.set_result(await reader.readexactly(4))

        reading = asyncio.create_task(read())
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, be_late)
        try:
            return await answer_within(asyncio.gather(ready), limit_s)
        finally:
            reading.cancel()
            writer.close()

    def be_late() -> None:
        if has_answered:
            theirs.send(b"done")
        time.sleep(2 * limit_s)

    ours, theirs = socket.socketpair()
    with theirs:
        if has_answered:
            assert asyncio.run(scenario()) == [b"done"]
        else:
            with pytest.raises(TimeoutError):
                asyncio.run(scenario())


async def _first(*works: object) -> list[asyncio.Future[object] | None]:
    return await first_ended(*works)  # type: ignore[arg-type]
