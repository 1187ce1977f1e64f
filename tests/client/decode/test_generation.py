"""A generation without a decoder: what its reader gets if tokens come before, during or after its waits."""

import asyncio

import pytest

from gpulease.client.decode.decode_errors import CompletionReason, RequestRejected
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters
from gpulease.client.decode.supervisor.generation import Generation


@pytest.fixture
def generation() -> Generation:
    return Generation(PromptRequest("a", "r", (1,), SamplingParameters(), 8, 0.0), Generation.cancel)


def test_a_wait_that_is_given_up_loses_no_token(generation: Generation) -> None:
    async def part() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(generation)
        generation.emit(7, 1, -0.5)
        generation.emit(8, 2, -0.5)
        generation.end(CompletionReason.MAX_TOKENS_REACHED)
        assert [emitted.token async for emitted in generation] == [7, 8]

    asyncio.run(part())


def test_a_second_task_that_waits_is_told_so(generation: Generation) -> None:
    async def part() -> None:
        first = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected, match="another task waits"):
            await anext(generation)
        generation.emit(7, 1, -0.5)
        assert (await first).token == 7

    asyncio.run(part())
