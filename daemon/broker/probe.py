"""Start-up's proof that contexts can be made, and what one costs.

One worker is made on each card by the very path that leases take, and ended; what the card says it held, and what a
session may make the driver take besides, is what every lease there will cost the node besides its tenant's bytes.
"""

import asyncio
import contextlib
import time
from typing import Final

from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.cards.source import CardFacts, CardSource, CardsUnavailable
from gpulease.daemon.core import Event, WorkerExited, WorkerFailed, WorkerReady
from gpulease.daemon.worker.spec import WorkerSpec

PROBE_TIMEOUT_S: Final = 60.0
"""For one context to be made; a cold driver takes seconds."""

PROOF_TIMEOUT_S: Final = 10.0
"""For its bytes to come back."""

_LOOK_S: Final = 0.02


async def measure_overhead(source: CardSource, workers: Workers, cards: list[CardFacts]) -> list[int]:
    """Bytes one context may cost on each card: what it had when made, and what the driver may take besides later.

    Raises CardsUnavailable if one can't be made, or does not go away.
    """
    events: asyncio.Queue[Event] = asyncio.Queue()
    workers.deliver_to(events.put_nowait)
    return [await _probe(source, workers, events, card, number) for number, card in enumerate(cards, start=1)]


async def _probe(
    source: CardSource, workers: Workers, events: asyncio.Queue[Event], card: CardFacts, number: int
) -> int:
    workers.spawn(WorkerSpec(number, card.uuid, 1, is_shared=False))
    started = await _next_event(events, card)
    if not isinstance(started, WorkerReady):
        reason = started.reason if isinstance(started, WorkerFailed | WorkerExited) else "its worker lost its context"
        raise CardsUnavailable(
            f"no context can be made on card {card.index} ({card.uuid}, {card.name}): {reason}",
            hint="Check that the driver works there, and without which measure of the sandbox (sandbox_without), or "
            "start with --driver cpu.",
        )
    pid = workers.pid(number)
    overhead = await asyncio.to_thread(source.process_bytes, card.uuid, pid)
    workers.kill(number)
    while not isinstance(await _next_event(events, card), WorkerExited):
        pass
    await _wait_for_proof(source, card, pid)
    workers.settle(number)
    return overhead + source.reserve_bytes


async def _next_event(events: "asyncio.Queue[Event]", card: CardFacts) -> Event:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(events.get(), PROBE_TIMEOUT_S)
    raise CardsUnavailable(
        f"card {card.index} ({card.uuid}) did not answer within {PROBE_TIMEOUT_S:g} s",
        hint="Check that the driver works there, or start with --driver cpu.",
    )


async def _wait_for_proof(source: CardSource, card: CardFacts, pid: int) -> None:
    until = time.monotonic() + PROOF_TIMEOUT_S
    while missing := await asyncio.to_thread(source.missing_proof, card.uuid, pid):
        if time.monotonic() > until:
            raise CardsUnavailable(
                f"card {card.index} ({card.uuid}) does not give memory back: {missing}",
                hint="See what nvidia-smi lists there.",
            )
        await asyncio.sleep(_LOOK_S)
