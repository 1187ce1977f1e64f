"""Proves at start-up that contexts can be made, and measures the memory that one costs.

On each card, one worker is started as for a lease, and then ended. A lease costs the node its tenant's bytes, the bytes
that the card showed for that worker, and the bytes that a session may make the driver take later.
"""

import asyncio
import itertools
import time
from functools import partial
from typing import Final

from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.source import CardFacts, CardSource, CardsUnavailable, retry
from gpulease.daemon.host.answers import answer_within
from gpulease.daemon.leases.devices import Others
from gpulease.daemon.leases.events import Event, SessionFaulted, WorkerExited, WorkerFailed, WorkerReady
from gpulease.daemon.workers.monitors import UnlistedSince
from gpulease.daemon.workers.registry import Workers
from gpulease.protocol.fast_dataclass import dataclass

PROBE_TIMEOUT_S: Final = 60.0
"""Longest time for making one context; a cold driver takes seconds."""

PROOF_TIMEOUT_S: Final = 10.0
"""Longest time until the context's bytes are free again."""

_POLL_S: Final = 0.02
_WORKER_EVENTS: Final = (WorkerReady, WorkerFailed, WorkerExited, SessionFaulted)


async def measure_overhead(source: CardSource, workers: Workers, cards: list[CardFacts]) -> list[int]:
    """Return the bytes that one context may cost on each card, including the bytes that the driver may take later.

    Raises CardsUnavailable if a context can't be made, or if its bytes are not released.
    """
    events: asyncio.Queue[Event] = asyncio.Queue()
    workers.deliver_to(events.put_nowait)
    numbers = itertools.count(1)

    async def attempt(card: CardFacts) -> int:
        return await _Probe(source, workers, events, card, next(numbers)).measure()

    return [await retry(partial(attempt, card)) for card in cards]


@dataclass(frozen=True, slots=True)
class _Probe:
    """A worker on one card. `number`: the worker's number in the registry."""

    source: CardSource
    workers: Workers
    events: asyncio.Queue[Event]
    card: CardFacts
    number: int

    async def measure(self) -> int:
        """Return the bytes that the worker's context costs, after ending the worker. Raises CardsUnavailable."""
        # Use a slice of 1 byte, because 0 would make it a warm worker.
        self.workers.spawn(WorkerSpec(self.number, self.card.uuid, 1, is_shared=False))
        # Step 1: wait until the worker has its context, or reports why not.
        first_event = await self._next()
        pid = self.workers.pid(self.number)
        if not isinstance(first_event, WorkerReady):
            await self._end(first_event)
            raise await self._failure(first_event)
        # Step 2: measure while it runs. The card's figure for the process is the cost of its context.
        overhead = await asyncio.to_thread(self.source.process_bytes, self.card.uuid, pid)
        # Step 3: end it, and prove its bytes free. If the card continued to report a dead process's bytes as used, no
        # lease's bytes could ever be proved free on it, so find that out now.
        await self._end(first_event)
        await _wait_for_proof(self.source, self.card, pid)
        self.workers.settle(self.number)
        return overhead + self.source.reserve_bytes

    async def _end(self, first_event: Event) -> None:
        if not isinstance(first_event, WorkerExited):
            self.workers.kill(self.number)
            while not isinstance(await self._next(), WorkerExited):
                pass

    async def _failure(self, first_event: Event) -> CardsUnavailable:
        """Return why no context could be made: the driver's own reason, if it has one."""
        self.workers.settle(self.number)
        # The driver's own reason (no device, a wrong version) is more helpful than what the worker reports.
        driver_says = await asyncio.to_thread(self.source.why_no_context)
        if driver_says is not None:
            return driver_says
        reason = "its worker lost its context"
        if isinstance(first_event, WorkerFailed | WorkerExited):
            reason = first_event.reason
        card = self.card
        return CardsUnavailable(
            f"no context can be created on card {card.index} ({card.uuid}, {card.name}): {reason}",
            hint="Check that the driver works on this card, and turn off measures of the sandbox one by one "
            "(sandbox_without) to find one that blocks the driver; or start with --driver cpu.",
        )

    async def _next(self) -> Event:
        """Return the next event of this worker. Raises CardsUnavailable if there is none within PROBE_TIMEOUT_S."""
        try:
            # The full timeout applies to each event, because loading a driver is slow.
            return await answer_within(self._own_event(), PROBE_TIMEOUT_S)
        except TimeoutError:
            raise CardsUnavailable(
                f"card {self.card.index} ({self.card.uuid}) did not answer within {PROBE_TIMEOUT_S:g} s",
                hint="Check that the driver works on this card, or start with --driver cpu.",
            ) from None

    async def _own_event(self) -> Event:
        """Wait for the next event of this worker. Late events of the previous worker are skipped."""
        while True:
            event = await self.events.get()
            if isinstance(event, _WORKER_EVENTS) and event.worker_id == self.number:
                return event


async def _wait_for_proof(source: CardSource, card: CardFacts, pid: int) -> None:
    """Wait until the probe's bytes are proved free, by the same rules as a lease's bytes."""
    deadline_s = time.monotonic() + PROOF_TIMEOUT_S
    unlisted, others = UnlistedSince(pid), Others(spare_bytes=0, slack_bytes=card.slack_bytes)
    while True:
        polled_ns = time.monotonic_ns()
        try:
            reading = await asyncio.to_thread(source.read, card.uuid)
        except CardsUnavailable as error:
            missing = str(error)
        # Use the same proof as for leases: the card does not list the process, and has no bytes that belong to no
        # process.
        else:
            missing = unlisted.missing(reading, polled_ns)
            if not missing:
                seen = unlisted.event(0, card.uuid, reading, polled_ns)
                if others.is_shown_free(seen.unowned_bytes, seen.least_bytes, seen.since_ns, seen.polled_ns):
                    return
                missing = f"{reading.unowned_bytes} bytes more than at the start belong to no process"
        if time.monotonic() > deadline_s:
            raise CardsUnavailable(
                f"card {card.index} ({card.uuid}) does not return memory: {missing}",
                hint="Check with nvidia-smi what uses it.",
            )
        await asyncio.sleep(_POLL_S)
