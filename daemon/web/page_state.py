"""The state that the page shows: the broker's reports and the leases' latest changes.

The feed fetches reports only while a page is open. Its rate of queries does not depend on the number of readers.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.web.broker_link import BrokerLink, BrokerSilent
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.view import Changed, FleetNow, LeaseChange, Report, Snapshot
from gpulease.protocol.messages import Empty, LeaseEvent, LeaseRef, LeaseSubscribe
from gpulease.protocol.opcodes import Opcode, Phase

FETCH_EVERY_S: Final = 1.0
"""Seconds between two fetches while a page is open."""

FRESH_S: Final = 0.5
"""Maximum age in seconds of a snapshot that a request is answered with."""

FETCH_SOON_S: Final = 0.2
"""Minimum seconds between two fetches. Changes that come in this time are shown together."""

MAX_CHANGES: Final = 100
"""Maximum number of changes of leases that are kept and shown."""

ENDING: Final = frozenset({"grace", "teardown", "ended"})
"""The phases in which a lease ends. The page shows one line for all of them, with the latest phase."""

HISTORY: Final = 60
"""Number of snapshots for which a card's launch rate is kept."""

GAP_S: Final = 5.0
"""Maximum seconds between two snapshots from which a launch rate is computed."""

MAX_CACHED_LEASES: Final = 4096
"""Maximum number of leases whose tenant, card and size the feed keeps, to show them with later changes."""

MAX_LOOKUPS: Final = 64
"""Maximum number of changes that wait for a query of their lease. Further changes are shown without a tenant. So
thousands of short leases do not cause as many queries."""

LOOKUP_PAUSE_S: Final = 0.05
"""Pause, in seconds, between two queries of leases."""


class Feed:
    """The latest snapshot, the latest changes, and the readers that wait for the next snapshot.

    Args:
        node: The host's name.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self,
        node: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._clock = clock
        self._membership: FleetMembership | None = None
        self._link: BrokerLink | None = None
        self._snapshot: Snapshot | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._failure = ""
        self._watchers = 0
        self._wakeup = asyncio.Event()
        self._changed = asyncio.Event()
        self._last_number = 0
        self._changes: deque[LeaseChange] = deque(maxlen=MAX_CHANGES)
        self._cached: OrderedDict[str, Changed] = OrderedDict()
        self._lookup_queue: deque[str] = deque()
        self._lookup_wanted = asyncio.Event()
        self._launches: dict[str, int] = {}
        self._history: dict[str, deque[float | None]] = {}

    async def run(self, link: BrokerLink) -> None:
        """Subscribe to all leases, then fetch while a page is open. Raises BrokerSilent if it can't subscribe."""
        self._link = link
        # Step 1: subscribe before the first snapshot, so that no change after it is missed.
        await link.ask(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(0))
        # Step 2: run two tasks, because a query of a lease must not delay the snapshots.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_fetching())
            group.create_task(self._lookup())

    def on_event(self, event: LeaseEvent) -> None:
        """Process the broker's event: a lease has entered another phase."""
        lease_id = f"{event.lease_id:032x}"
        self._last_number += 1
        # A newer broker may send a phase that is unknown to this version; show its number.
        phase = Phase(event.phase).name.lower() if event.phase in list(Phase) else str(event.phase)
        cached = self._cached.get(lease_id)
        # Grace, teardown and end are one line on the page.
        if phase in ENDING:
            self._forget_end(lease_id)
        self._changes.append(
            LeaseChange(self._last_number, self._clock(), lease_id, phase, event.cause, event.reason, cached)
        )
        # The lease was never in a snapshot, so ask the broker for its tenant and card.
        if cached is None and len(self._lookup_queue) < MAX_LOOKUPS:
            self._lookup_queue.append(lease_id)
            self._lookup_wanted.set()
        self._wakeup.set()

    def on_membership(self, membership: FleetMembership) -> None:
        """Process the broker's message about its node's fleet."""
        self._membership = membership

    def _forget_end(self, lease_id: str) -> None:
        """Remove the earlier change of a lease that is ending."""
        before = next((entry for entry in self._changes if entry.lease_id == lease_id and entry.phase in ENDING), None)
        if before is not None:
            self._changes.remove(before)

    async def latest(self, fresh_s: float = FRESH_S) -> Snapshot:
        """Return a snapshot that is at most `fresh_s` old. Raises BrokerSilent."""
        if self._snapshot is None or self._clock() - self._snapshot.at_s > fresh_s:
            await self._fetch()
        if self._snapshot is None:
            raise BrokerSilent(self._failure or "the daemon has not answered yet")
        return self._snapshot

    async def watch(self, quiet_s: float) -> AsyncIterator[Snapshot | None]:
        """Yield each snapshot from now on, and None after each `quiet_s` without one."""
        with self._watching():
            last: Snapshot | None = None
            while True:
                changed = self._changed
                if self._snapshot is not None and self._snapshot is not last:
                    last = self._snapshot
                    yield last
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), quiet_s)
                except TimeoutError:
                    yield None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._watchers += 1
        self._wakeup.set()
        try:
            yield
        finally:
            self._watchers -= 1

    # --- fetching ---

    async def _keep_fetching(self) -> None:
        while True:
            self._wakeup.clear()
            # Do not query the broker while no page is open.
            if self._watchers:
                try:
                    await self._fetch()
                except BrokerSilent:
                    await asyncio.sleep(FETCH_EVERY_S)
            # Pause at least this long, even if leases change during the pause.
            await asyncio.sleep(FETCH_SOON_S)
            try:
                # While no page is open, wait without a timeout. A new watcher sets the event.
                await asyncio.wait_for(self._wakeup.wait(), FETCH_EVERY_S - FETCH_SOON_S if self._watchers else None)
            except TimeoutError:
                continue

    async def _fetch(self) -> None:
        """Fetch a snapshot; concurrent callers share one fetch. Raises BrokerSilent."""
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch_snapshot())
            # Retrieve the exception, in case every caller has been cancelled.
            self._fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._fetching)

    async def _fetch_snapshot(self) -> None:
        try:
            inventory = await self.ask(Opcode.GET_INVENTORY, Empty())
            report = await self.ask(Opcode.LEASE_LIST_ACTIVE, Empty())
        except BrokerSilent as error:
            self._failure = str(error)
            raise
        leases: list[Report] = report.report
        # Step 1: remember the leases, so that a later event can name its tenant.
        for lease in leases:
            self._remember(lease)
        at_s = self._clock()
        # Step 2: compute launch rates since the previous snapshot.
        rates = self._rates(leases, at_s)
        self._append_rates(inventory.details, leases, rates, at_s)
        self._describe_changes()
        # Step 3: replace the old snapshot as a whole. Readers keep the snapshot that they have.
        self._snapshot = Snapshot(
            at_s,
            self._node,
            "" if self._link is None else self._link.agent,
            inventory.details,
            leases,
            rates,
            {card: tuple(rates_of_card) for card, rates_of_card in self._history.items()},
            tuple(self._changes),
            self._fleet(),
        )
        # Step 4: wake every reader, and create the event for the next snapshot.
        self._changed.set()
        self._changed = asyncio.Event()

    def _fleet(self) -> FleetNow | None:
        if (membership := self._membership) is None:
            return None
        return FleetNow(membership.node, membership.left_s(boot_ns()), membership.fenced)

    async def ask(self, op: Opcode, body: Any) -> Any:
        """Ask the broker. Returns the body of its reply. Raises BrokerSilent."""
        if self._link is None:
            raise BrokerSilent("the daemon has not answered yet")
        return await self._link.ask(op, body)

    # --- the leases of changes ---

    def _remember(self, lease: Report) -> None:
        self._cached[lease["lease_id"]] = Changed(
            lease["tenant"], lease["card_uuid"], lease["size_bytes"], lease.get("parent") is not None
        )
        self._cached.move_to_end(lease["lease_id"])
        # First forget the lease that was seen longest ago.
        if len(self._cached) > MAX_CACHED_LEASES:
            self._cached.popitem(last=False)

    async def _lookup(self) -> None:
        while True:
            await self._lookup_wanted.wait()
            self._lookup_wanted.clear()
            while self._lookup_queue:
                lease_id = self._lookup_queue.popleft()
                # A snapshot has contained the lease since the query was planned.
                if lease_id in self._cached:
                    continue
                try:
                    self._remember((await self.ask(Opcode.LEASE_QUERY, LeaseRef(int(lease_id, 16)))).report)
                except BrokerSilent:
                    continue  # the broker no longer knows the lease
                await asyncio.sleep(LOOKUP_PAUSE_S)

    def _describe_changes(self) -> None:
        for index, change in enumerate(self._changes):
            if change.about is None and change.lease_id in self._cached:
                self._changes[index] = replace(change, about=self._cached[change.lease_id])

    # --- launch rates ---

    def _rates(self, leases: list[Report], at_s: float) -> dict[str, float]:
        """Return launches per second since the last snapshot, by lease id.

        Workers report the counters, so a counter that decreases counts as unchanged.
        """
        before = self._launches
        self._launches = {lease["lease_id"]: lease["launches"] for lease in leases if "launches" in lease}
        elapsed_s = at_s - self._snapshot.at_s if self._snapshot is not None else 0.0
        if not 0 < elapsed_s <= GAP_S:
            return {}
        # Count only leases that are in both snapshots: a new lease has no earlier counter.
        common_ids = self._launches.keys() & before.keys()
        return {lease_id: max(0, self._launches[lease_id] - before[lease_id]) / elapsed_s for lease_id in common_ids}

    def _append_rates(self, cards: list[Report], leases: list[Report], rates: Mapping[str, float], at_s: float) -> None:
        has_rates = self._snapshot is not None and at_s - self._snapshot.at_s <= GAP_S
        # A card without leases has the rate 0. After a gap, every card has None, which the page does not draw.
        by_card: dict[str, float] = {card["uuid"]: 0.0 for card in cards}
        for lease in leases:
            by_card[lease["card_uuid"]] = by_card.get(lease["card_uuid"], 0.0) + rates.get(lease["lease_id"], 0.0)
        for uuid in by_card:
            history = self._history.setdefault(uuid, deque(maxlen=HISTORY))
            history.append(by_card[uuid] if has_rates else None)
