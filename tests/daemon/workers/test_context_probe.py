"""The probe's wait for its worker."""

import asyncio
import socket
import time
from typing import Any

import pytest

from gpulease.daemon.gpus.source import CardFacts, CardsUnavailable
from gpulease.daemon.leases.events import Event, WorkerReady
from gpulease.daemon.workers import context_probe

LIMIT_S = 0.05


@pytest.mark.parametrize("number", [1, 2])
def test_a_worker_that_is_ready_in_time_is_measured_although_the_broker_is_late(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of another worker is no answer."""
    monkeypatch.setattr(context_probe, "PROBE_TIMEOUT_S", LIMIT_S)
    # The wait uses neither the cards nor the workers.
    unused: Any = None

    async def story() -> Event:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        loop.add_reader(ours, lambda: events.put_nowait(WorkerReady(ours.recv(1)[0])))
        loop.call_soon(be_late)
        try:
            return await context_probe._Probe(unused, unused, events, CardFacts("GPU-a", 0, "Card", 1000), 1)._next()
        finally:
            loop.remove_reader(ours)

    def be_late() -> None:
        theirs.send(bytes([number]))
        time.sleep(2 * LIMIT_S)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        if number == 1:
            assert asyncio.run(story()) == WorkerReady(1)
        else:
            with pytest.raises(CardsUnavailable, match="did not answer within"):
                asyncio.run(story())
