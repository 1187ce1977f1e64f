"""Samples of how busy the cards are: their bounds, how they come from the broker, and what a reader is told of them.

What the page is fed from: the broker's reports, asked for while somebody looks, and the leases' events, always.

However many look, and however often they ask, the broker is asked once in so long.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from gpulease.daemon.web.broker_link import BrokerLink, BrokerSilent
from gpulease.daemon.web.view import Happening, Report, Snapshot
from gpulease.protocol.messages import Empty, LeaseEvent, LeaseRef, LeaseSubscribe
from gpulease.protocol.opcodes import Opcode, Phase

SAMPLE_S: Final = 10.0
"""Between two samples."""

MAX_SAMPLES: Final = 360
"""Of each card: an hour. Bounds the memory of broker and web process, and the answer: 12 kB a card."""

GAP_SAMPLES: Final = 2.5
"""Times SAMPLE_S between two samples, from which on what lies between is unknown and is drawn as a gap."""

LOADS: Final = "loads"
"""The message of the broker's that carries samples of one card."""

NS_PER_S: Final = 1_000_000_000


class LoadSample(NamedTuple):
    """One card at one moment; None is what is unknown.

    Attributes:
        at_ns: When, monotonic.
        used_bytes: By the card's own figure; where it has none, what sessions have allocated.
        leased_bytes: What leases have of it, fenced ones too.
    """

    at_ns: int
    utilization_percent: int | None
    used_bytes: int | None
    leased_bytes: int


def message_of(card_uuid: str, samples: Iterable[LoadSample]) -> dict[str, Any]:
    """Samples of one card, the newest last, as the broker tells the web process."""
    return {"op": LOADS, "card": card_uuid, "samples": [list(sample) for sample in samples]}


class Loads:
    """The last hour of each card, as the broker told it."""

    def __init__(self) -> None:
        self._samples: dict[str, list[LoadSample]] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Add what such a message tells, in order of time. What is told twice is kept once."""
        told = [LoadSample(*one) for one in message["samples"]]
        by_time = {sample.at_ns: sample for sample in (*self._samples.get(message["card"], ()), *told)}
        self._samples[message["card"]] = [by_time[at_ns] for at_ns in sorted(by_time)][-MAX_SAMPLES:]

    def view(self, now_s: float) -> dict[str, Any]:
        """As the page's JSON: a column for each figure, the oldest sample first, ages in seconds before `now_s`."""
        cards = {uuid: _columns(samples, now_s) for uuid, samples in self._samples.items()}
        return {"span_s": MAX_SAMPLES * SAMPLE_S, "gap_s": GAP_SAMPLES * SAMPLE_S, "cards": cards}


def _columns(kept: Sequence[LoadSample], now_s: float) -> dict[str, list[Any]]:
    return {
        "age_s": [round(max(0.0, now_s - one.at_ns / NS_PER_S), 1) for one in kept],
        "utilization_percent": [one.utilization_percent for one in kept],
        "used_bytes": [one.used_bytes for one in kept],
        "leased_bytes": [one.leased_bytes for one in kept],
    }


LOOK_S: Final = 1.0
"""Between two looks while somebody watches."""

FRESH_S: Final = 0.5
"""How old a look may be for the next who asks."""

SOONER_S: Final = 0.2
"""Between two looks if something happened: one lease that begins or ends is shown at once, a thousand together."""

MAX_HAPPENINGS: Final = 100
"""Events that are kept to be shown."""

ENDING: Final = frozenset({"grace", "teardown", "ended"})
"""Phases of a lease's end; the last of them that came is shown."""

HISTORY: Final = 60
"""Looks whose rates are kept for a card."""

GAP_S: Final = 5.0
"""Between two looks, from which on what was launched meanwhile is no rate worth showing."""

MAX_KNOWN: Final = 4096
"""Leases whose tenant is remembered, for events."""

MAX_TO_LOOK_UP: Final = 64
"""Events whose lease is still to be asked for; what comes beyond is shown without its tenant. Stops leases that come
and go by the thousand from making the broker answer for each."""

LOOK_UP_PAUSE_S: Final = 0.05
"""Between two such questions."""


class Feed:
    """The latest look, the events, and who waits for the next.

    Args:
        node: The host's name.
    """

    def __init__(self, node: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._link: BrokerLink | None = None
        self._snapshot: Snapshot | None = None
        self._looking: asyncio.Task[None] | None = None
        self._failure = ""
        self._watchers = 0
        self._moved = asyncio.Event()
        self._changed = asyncio.Event()
        self._number = 0
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._to_look_up: deque[str] = deque()
        self._looks_up = asyncio.Event()
        self._launches: dict[str, int] = {}
        self._history: dict[str, deque[float | None]] = {}

    async def run(self, link: BrokerLink) -> None:
        """Hear of all leases, and look while somebody watches, until cancelled. Raises BrokerSilent at the start."""
        self._link = link
        await link.ask(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(0))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_looking())
            group.create_task(self._look_up())

    def heard(self, event: LeaseEvent) -> None:
        """A lease's phase has changed."""
        lease_id = f"{event.lease_id:032x}"
        self._number += 1
        phase = Phase(event.phase).name.lower() if event.phase in list(Phase) else str(event.phase)
        tenant, card = self._owners.get(lease_id, ("", ""))
        if phase in ENDING:
            self._forget_end(lease_id)
        self._happenings.append(
            Happening(self._number, self._clock(), lease_id, phase, event.cause, event.reason, tenant, card)
        )
        if not tenant and len(self._to_look_up) < MAX_TO_LOOK_UP:
            self._to_look_up.append(lease_id)
            self._looks_up.set()
        self._moved.set()

    def _forget_end(self, lease_id: str) -> None:
        """A lease's end is one event, which says how far it has come."""
        before = next((one for one in self._happenings if one.lease_id == lease_id and one.phase in ENDING), None)
        if before is not None:
            self._happenings.remove(before)

    async def latest(self, fresh_s: float = FRESH_S) -> Snapshot:
        """A look that is not older than that. Raises BrokerSilent."""
        if self._snapshot is None or self._clock() - self._snapshot.at_s > fresh_s:
            await self._look()
        if self._snapshot is None:
            raise BrokerSilent(self._failure or "the daemon has not answered yet")
        return self._snapshot

    async def watch(self, quiet_s: float) -> AsyncIterator[Snapshot | None]:
        """Each look from now on; None where there was none for `quiet_s`."""
        with self._watching():
            told: Snapshot | None = None
            while True:
                changed = self._changed
                if self._snapshot is not None and self._snapshot is not told:
                    told = self._snapshot
                    yield told
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), quiet_s)
                except TimeoutError:
                    yield None

    @contextmanager
    def _watching(self) -> Any:
        self._watchers += 1
        self._moved.set()
        try:
            yield
        finally:
            self._watchers -= 1

    # --- looking ---

    async def _keep_looking(self) -> None:
        while True:
            self._moved.clear()
            if self._watchers:
                try:
                    await self._look()
                except BrokerSilent:
                    await asyncio.sleep(LOOK_S)
            await asyncio.sleep(SOONER_S)
            try:
                # While nobody watches, until somebody does.
                await asyncio.wait_for(self._moved.wait(), LOOK_S - SOONER_S if self._watchers else None)
            except TimeoutError:
                continue

    async def _look(self) -> None:
        """All who want one now share it. Raises BrokerSilent."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._take_a_look())
            # Nobody may be left to see how it failed.
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._looking)

    async def _take_a_look(self) -> None:
        try:
            inventory = await self.ask(Opcode.GET_INVENTORY, Empty())
            report = await self.ask(Opcode.LEASE_LIST_ACTIVE, Empty())
        except BrokerSilent as error:
            self._failure = str(error)
            raise
        leases: list[Report] = report.report
        for lease in leases:
            self._remember(lease)
        at_s = self._clock()
        rates = self._rates(leases, at_s)
        self._keep_history(inventory.details, leases, rates, at_s)
        self._fill_in()
        self._snapshot = Snapshot(
            at_s,
            self._node,
            "" if self._link is None else self._link.agent,
            inventory.details,
            leases,
            rates,
            {card: tuple(line) for card, line in self._history.items()},
            tuple(self._happenings),
        )
        self._changed.set()
        self._changed = asyncio.Event()

    async def ask(self, op: Opcode, body: Any) -> Any:
        """What the broker answers. Raises BrokerSilent."""
        if self._link is None:
            raise BrokerSilent("the daemon has not answered yet")
        return await self._link.ask(op, body)

    # --- whose leases those are that something happened to ---

    def _remember(self, lease: Report) -> None:
        self._owners[lease["lease_id"]] = lease["tenant"], lease["card_uuid"]
        self._owners.move_to_end(lease["lease_id"])
        if len(self._owners) > MAX_KNOWN:
            self._owners.popitem(last=False)

    async def _look_up(self) -> None:
        while True:
            await self._looks_up.wait()
            self._looks_up.clear()
            while self._to_look_up:
                lease_id = self._to_look_up.popleft()
                if lease_id in self._owners:
                    continue
                try:
                    self._remember((await self.ask(Opcode.LEASE_QUERY, LeaseRef(int(lease_id, 16)))).report)
                except BrokerSilent:
                    continue  # it is forgotten, too
                await asyncio.sleep(LOOK_UP_PAUSE_S)

    def _fill_in(self) -> None:
        for index, one in enumerate(self._happenings):
            if not one.tenant and one.lease_id in self._owners:
                tenant, card = self._owners[one.lease_id]
                self._happenings[index] = Happening(
                    one.number, one.at_s, one.lease_id, one.phase, one.cause, one.reason, tenant, card
                )

    # --- launches ---

    def _rates(self, leases: list[Report], at_s: float) -> dict[str, float]:
        """Launches a second since the last look. The counters are the workers' word: none is taken to run backwards."""
        before = self._launches
        self._launches = {lease["lease_id"]: lease["launches"] for lease in leases if "launches" in lease}
        past_s = at_s - self._snapshot.at_s if self._snapshot is not None else 0.0
        if not 0 < past_s <= GAP_S:
            return {}
        both = self._launches.keys() & before.keys()
        return {lease_id: max(0, self._launches[lease_id] - before[lease_id]) / past_s for lease_id in both}

    def _keep_history(self, cards: list[Report], leases: list[Report], rates: Mapping[str, float], at_s: float) -> None:
        has_rates = self._snapshot is not None and at_s - self._snapshot.at_s <= GAP_S
        by_card: dict[str, float] = {card["uuid"]: 0.0 for card in cards}
        for lease in leases:
            by_card[lease["card_uuid"]] = by_card.get(lease["card_uuid"], 0.0) + rates.get(lease["lease_id"], 0.0)
        for uuid in by_card:
            line = self._history.setdefault(uuid, deque(maxlen=HISTORY))
            line.append(by_card[uuid] if has_rates else None)
