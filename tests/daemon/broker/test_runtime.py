"""What the runtime keeps of requests is gone with whoever asked."""

import asyncio

import pytest

from gpulease.daemon.audit.recorder import Recorder
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.tokens import TokenOffice
from gpulease.daemon.cards.embedded import EmbeddedCards
from gpulease.daemon.core import (
    AcquireRequested,
    Card,
    LeaseTable,
    RequesterGone,
    SubmitRequested,
    WaitTimerFired,
    WorkerReady,
)
from gpulease.daemon.core_bench import SimulatedWorkers

LEAVING = 20
"""Clients, one after the other: far more than may wait at a time."""


@pytest.mark.parametrize("what", ["an acquire", "a submit"])
def test_nothing_is_left_of_a_client_that_waited_and_left(what: str) -> None:
    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenOffice(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, Recorder(), 1)

        def expect() -> int:
            return runtime.expect(lambda _: None)

        runtime.post(AcquireRequested(expect(), "ann", 5, 900, 60_000, submit_bytes=100))
        runtime.post(WorkerReady(5))
        runtime.post(SubmitRequested(expect(), 5, "ann", 1000))
        for number in range(LEAVING):
            request = expect()
            if what == "an acquire":
                runtime.post(AcquireRequested(request, "ann", 10 + number, 900, 60_000, wait_ms=30_000))
            else:
                runtime.post(SubmitRequested(request, 5, "ann", 1000))
            assert (WaitTimerFired, request) in runtime.timers
            runtime.post(RequesterGone(request))
            runtime.forget(request)
            assert (WaitTimerFired, request) not in runtime.timers
        await runtime.stop()

    asyncio.run(story())
