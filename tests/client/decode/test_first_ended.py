"""Waiting for the first of several works: its result, and the end of the others."""

import asyncio

import pytest

from gpulease.client.decode.first_ended import first_ended


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


async def _first(*works: object) -> list[asyncio.Future[object] | None]:
    return await first_ended(*works)  # type: ignore[arg-type]
