"""A decoder with four tenants on a daemon, their prompts, and an observer that keeps all reports."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_reports import (
    DecoderObserver,
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.decode_requests import SamplingParameters, TenantConfig
from gpulease.client.decode.row_records import Rows
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.decode.supervisor.serving_engine import ServingEngine
from helpers.daemon import Daemon
from helpers.decode.engine_rig import GREEDY
from helpers.decode.random_models import LIGHT
from helpers.waiting import PATIENCE_S

SETTINGS = DecoderSettings(max_rows=16, prefill_rows=8, max_sequences=8)
PROMPTS = {"a": range(5), "b": range(100, 120), "c": range(300, 309), "d": range(40, 73), "a too": range(7, 24)}
"""Prompts by the name of a request. The first letter of a name is the tenant's name."""

TENANTS = [TenantConfig(name, 2, 12) for name in "abcd"]
TOKENS = 20
HOT = SamplingParameters(temperature=0.8, seed=3)
HOT_NAMES = ("a", "b")
"""Requests whose tokens are drawn, by a seed. To draw tokens takes longer than any other kernel of a step."""

Outputs = dict[str, list[Emitted]]


@asynccontextmanager
async def opened(at: Daemon | str, *observers: DecoderObserver) -> AsyncIterator[Decoder]:
    """Open a decoder with four tenants at a daemon, or at an address. Afterwards none of its tasks must be left."""
    before = asyncio.all_tasks()
    model, address = RandomCheckpoint(LIGHT, 1), at if isinstance(at, str) else at.address
    async with Decoder.open(model, TENANTS, SETTINGS, address=address, observers=observers) as decoder:
        yield decoder
    # If closing the decoder cancels an operation, another task frees what that operation still obtains. Wait for it.
    if left := asyncio.all_tasks() - before:
        _, left = await asyncio.wait(left, timeout=PATIENCE_S)
    assert not left, left


def play(at: Daemon | str, scene: Callable[[Decoder], Coroutine[Any, Any, None]], *observers: DecoderObserver) -> None:
    async def part() -> None:
        async with opened(at, *observers) as decoder:
            await scene(decoder)

    asyncio.run(part())


def submit(decoder: Decoder, name: str, max_tokens: int = TOKENS) -> Generation:
    sampling = HOT if name in HOT_NAMES else GREEDY
    return decoder.submit(list(PROMPTS[name]), max_tokens=max_tokens, tenant_id=name[0], sampling=sampling)


async def read(generation: Generation) -> list[Emitted]:
    return [emitted async for emitted in generation]


async def together(decoder: Decoder) -> Outputs:
    """Return every tenant's output, all generated at the same time."""
    generations = [submit(decoder, name) for name in PROMPTS]
    return dict(zip(PROMPTS, await asyncio.gather(*map(read, generations)), strict=True))


async def one_by_one(decoder: Decoder, max_tokens: int = TOKENS) -> Outputs:
    """Return every tenant's output, generated one after another."""
    return {name: await read(submit(decoder, name, max_tokens)) for name in PROMPTS}


@contextmanager
def before_step(decoder: Decoder, number: int, act: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Act as a step is about to start, counted from 1; the step names what it was planned with."""
    engine, started = decoder.engine, 0

    async def start(rows: Rows, pools: Any, *others: Any, **options: Any) -> int:
        nonlocal started
        started += 1
        if started == number:
            await act()
        return await type(engine).start(engine, rows, pools, *others, **options)

    engine.start = start  # type: ignore[method-assign]
    try:
        yield
        assert started >= number
    finally:
        del engine.start


@contextmanager
def no_new_steps(decoder: Decoder, after: int = 0) -> Iterator[None]:
    """Let only so many steps start inside the block, so that what ends there ends before the answers on any host.

    The block may be in another thread than the decoder.
    """
    engine, started, is_over = decoder.engine, count(), False

    async def start(*arguments: Any, **options: Any) -> int:
        if next(started) >= after:
            while not is_over:  # noqa: ASYNC110  # an event could not be set by another thread
                await asyncio.sleep(0.001)
        return await type(engine).start(engine, *arguments, **options)

    engine.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.start
        is_over = True


class Recorder(DecoderObserver):
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.revoked: list[ForwardRevoked] = []
        self.rebinds: list[RebindReport] = []
        self.finished: list[FinishedRequest] = []
        self.rebuilt: list[EngineRebuilt] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_forward_revoked(self, report: ForwardRevoked) -> None:
        self.revoked.append(report)

    def on_rebind(self, report: RebindReport) -> None:
        self.rebinds.append(report)

    def on_finished(self, report: FinishedRequest) -> None:
        self.finished.append(report)

    def on_engine_rebuilt(self, report: EngineRebuilt) -> None:
        self.rebuilt.append(report)


async def outputs_around(decoder: Decoder, event: Callable[[], Awaitable[None]], after: int = 4) -> Outputs:
    """Return all outputs. The event happens after `after` tokens of the first request."""
    generations = {name: submit(decoder, name) for name in PROMPTS}
    first, *others = generations.values()
    reads = asyncio.gather(*map(read, others))
    output = []
    async for emitted in first:
        output.append(emitted)
        if len(output) == after:
            await event()
    outputs = dict(zip(PROMPTS, [output, *await reads], strict=True))
    assert all(generation.reason is CompletionReason.MAX_TOKENS_REACHED for generation in generations.values())
    return outputs


class Gate:
    """Replaces `ServingEngine.open`, so that it waits until the test permits it, or fails.

    Attributes:
        is_asked: Set once `open` was called.
        may_open: While it is not set, `open` waits.
        errors: Each call raises the last error and removes it.
        refuses: Errors that calls with this address always raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, opens_before: bool = False) -> None:
        self._opens_before = opens_before
        self.is_asked, self.may_open = asyncio.Event(), asyncio.Event()
        self.errors: list[Exception] = []
        self.refuses: dict[str | None, Exception] = {}
        self._open = ServingEngine.open
        monkeypatch.setattr(ServingEngine, "open", self.open)

    async def open(self, *arguments: Any) -> ServingEngine:
        serving = await self._open(*arguments) if self._opens_before else None
        self.is_asked.set()
        if refusal := self.refuses.get(arguments[2]):
            raise refusal
        if self.errors:
            raise self.errors.pop()
        await self.may_open.wait()
        return serving or await self._open(*arguments)
