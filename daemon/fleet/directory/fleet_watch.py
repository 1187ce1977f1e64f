"""Keeps a directory's view up to date with etcd, and answers requests from the view.

After VIEW_LIMIT_S without an answer from etcd, requests fail, because the view no longer shows which nodes are alive.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import field
from random import Random
from typing import Any, Final

from gpulease.daemon.fleet.directory.fleet_placement import PlaceQuery, place
from gpulease.daemon.fleet.directory.fleet_view import FleetView
from gpulease.daemon.fleet.directory.node_index import NodeView
from gpulease.daemon.fleet.etcd.client import EtcdClient
from gpulease.daemon.fleet.etcd.transactions import (
    Get,
    KeyValue,
    Transaction,
    TransactionAnswer,
    WatchBatch,
    WatchEnded,
)
from gpulease.daemon.fleet.records.fleet_records import GENERATION, HORIZON, INVENTORIES, NAMES, NODES, PREFIX
from gpulease.daemon.fleet.rules.fleet_events import DEFAULT_TERMS
from gpulease.daemon.fleet.rules.membership import SILENT_PART
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import LINE_EVERY_S, RateLimit
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.codec import build_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_names import NAME
from gpulease.protocol.messages import Place, Placement, Report
from gpulease.protocol.opcodes import Exclusivity, Status

VIEW_LIMIT_S: Final = 10.0
"""Maximum age in seconds of a view from which requests are answered. An election in etcd takes two seconds. With an
older view, a directory would send tenants to nodes that may be gone. Its answer is an error, and tenants ask another
directory."""

CHECK_S: Final = 2.0
"""Seconds between checks that etcd still answers."""

RETRY_S: Final = 0.5
"""Seconds after a failure before the view is read again."""

FLEET_READS: Final = (*(Get(key, is_prefix=True) for key in (INVENTORIES, NODES, NAMES)), Get(HORIZON))

COUNTS_S: Final = 60.0
"""Seconds between two log lines with counts of answers."""

MAX_LISTED: Final = 20_000
"""Maximum number of nodes, and of names, in one listing: about 20 MiB."""

LISTING_S: Final = 1.0
"""Maximum age of a cached listing in seconds. A listing of 10,000 nodes takes 200 ms and 11 MiB."""

MAX_LISTINGS: Final = 64
"""Maximum number of cached listings, one for each tenant and one for operators. Further listings are not cached."""

_CLASSES: Final = {int(member): member for member in Exclusivity}


@dataclass(slots=True)
class Counts:
    """Numbers of requests by result: `placed`, `unplaced`, `listed`, or the status of a failure."""

    placements: Counter[str] = field(default_factory=lambda: Counter(placed=0, unplaced=0))
    listings: Counter[str] = field(default_factory=lambda: Counter(listed=0))


class FleetWatch:
    """Reads the fleet's records, follows their changes, and answers PLACE and FLEET_LIST.

    Args:
        client: The client for etcd.
        order: The order of candidates.
        draw: Random numbers.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self,
        client: EtcdClient,
        order: PlacementOrder,
        draw: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = FleetView()
        self.counts = Counts()
        self._client = client
        self._order = order
        self._draw = draw or Random()
        self._clock = clock
        self._began_s = clock()
        self._is_read = False
        self._confirmed_s: float | None = None
        self._reason = "it has not answered yet"
        self._was_current = False
        self._logged_unreadable = 0
        self._unreadable_lines = RateLimit(LINE_EVERY_S)
        self._listings: dict[str | None, tuple[float, bytes]] = {}
        """Time and bytes of each cached listing, by tenant; None is the operators' listing."""

    async def run(self) -> None:
        """Keep the view current until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            # One task reads and follows the records, one checks that etcd answers, and one logs counts.
            tasks.create_task(self._follow())
            tasks.create_task(self._check())
            tasks.create_task(self._count())

    # --- requests ---

    def place(self, body: Place, tenant: str, *, is_operator: bool) -> Placement | Failure:
        """Answer PLACE. Only operators and the lease's tenant learn which node serves a name."""
        # Only the name's tenant and operators may learn its node.
        claim = self.view.claims.get(body.name)
        tells_holder = is_operator or (claim is not None and claim.record.tenant == tenant)
        result = self.denial() or self._placed(body, tells_holder)
        self.counts.placements[_result_of(result)] += 1
        return result

    def listing(self, tenant: str, *, is_operator: bool) -> bytes | Failure:
        """Answer FLEET_LIST with the encoded Report: all nodes and names for an operator, else the tenant's own names.

        Peers with the same rights get the same bytes object, at most LISTING_S old.
        """
        denial = self.denial()
        if denial is not None:
            self.counts.listings[denial.status.name.lower()] += 1
            return denial
        self.counts.listings["listed"] += 1
        viewer, now_s = None if is_operator else tenant, self._clock()
        while self._listings:
            # Drop expired listings. The dictionary is in the order of creation, the oldest first.
            oldest, (made_s, _) = next(iter(self._listings.items()))
            if now_s - made_s < LISTING_S:
                break
            del self._listings[oldest]
        # Peers with the same rights share the bytes, because encoding takes much longer than sending.
        if viewer in self._listings:
            return self._listings[viewer][1]
        payload = build_body(self._report(viewer, now_s))
        # Limit the cache, because there may be many tenants, and a listing may have megabytes.
        if len(self._listings) < MAX_LISTINGS:
            self._listings[viewer] = now_s, payload
        return payload

    def _report(self, viewer: str | None, now_s: float) -> Report:
        """Return the report for a tenant, or for operators if `viewer` is None."""
        view = self.view
        # Mark the nodes that have become silent since the last request.
        view.settle(self._silent_before_s())
        # Only operators see nodes. A tenant sees its own names, whichever node serves them.
        nodes = sorted(view.nodes.items())[:MAX_LISTED] if viewer is None else []
        names = sorted(view.claims if viewer is None else view.names_of(viewer))[:MAX_LISTED]
        claims = ((name, view.claims[name]) for name in names)
        return Report(
            {
                "operator": viewer is None,
                "nodes": [self._node_map(node_id, node, now_s) for node_id, node in nodes],
                "names": [
                    {
                        "name": name,
                        "node_id": claim.record.node_id,
                        "lease_id": claim.record.lease_id,
                        "tenant": claim.record.tenant,
                        "epoch": claim.epoch,
                    }
                    for name, claim in claims
                ],
                "view_age_ms": int(self.age_s() * 1000),
                "placement": self._order.value,
                "bad_records": view.bad_records,
                "unreadable": view.unreadable.sentence() if viewer is None else "",
            }
        )

    def nodes_by_state(self) -> Counter[str]:
        """Return the numbers of ready, draining and silent nodes."""
        self.view.settle(self._silent_before_s())
        index = self.view.index
        silent, draining = len(index.silent), len(index.draining - index.silent)
        return Counter({"ready": len(self.view.nodes) - silent - draining, "draining": draining, "silent": silent})

    def age_s(self) -> float:
        """Return the seconds since etcd last answered."""
        return self._clock() - (self._began_s if self._confirmed_s is None else self._confirmed_s)

    def denial(self) -> Failure | None:
        """Return why the directory can't answer now; None if it can."""
        if self._is_read and self.age_s() <= VIEW_LIMIT_S:
            return None
        # Without a current view every answer could be wrong. The failure says why there is no current view.
        cause = f"has not reached etcd for {self.age_s():.0f} s"
        if not self._is_read:
            cause = "has not read the fleet's records from etcd yet"
        return Failure(
            Status.DISCONNECTED,
            f"this directory {cause}, so it can't find out which nodes are alive: {self._reason}",
            hint="Use another directory. The operator should check etcd and the network to it; leases continue.",
        )

    def _placed(self, body: Place, tells_holder: bool) -> Placement | Failure:
        # Step 1: check for values that only a client of another version sends.
        exclusivity = _CLASSES.get(body.exclusivity)
        if exclusivity is None:
            return Failure(Status.UNSUPPORTED, f"exclusivity class {body.exclusivity} is unknown", hint="Use 0 to 3.")
        if body.name and not NAME.fullmatch(body.name):
            return Failure(
                Status.INVALID_REQUEST,
                "the lease's name is not valid",
                hint="Use 1 to 128 letters, digits, dots, dashes and underscores.",
            )
        # Step 2: split labels, which are KEY=VALUE. A label without "=" stands for an empty value.
        labels = dict(text.partition("=")[::2] for text in body.labels)
        query = PlaceQuery(body.size_bytes, exclusivity, body.name, labels, body.device, frozenset(body.tried))
        # Step 3: choose candidates from the view.
        return place(
            self.view,
            query,
            self._order,
            self._draw,
            silent_before_s=self._silent_before_s(),
            tells_holder=tells_holder,
        )

    def _silent_before_s(self) -> float:
        """Return the time at or before which a silent node's record has last changed."""
        horizon_s = self.view.horizon_s or DEFAULT_TERMS.horizon_s
        return self._clock() - horizon_s * SILENT_PART

    def _node_map(self, node_id: str, node: NodeView, now_s: float) -> dict[str, Any]:
        record = node.inventory
        return {
            "node_id": node_id,
            "addresses": list(record.addresses),
            "labels": record.labels or {},
            "cards": [
                {
                    "uuid": card.uuid,
                    "name": card.name,
                    "capacity_bytes": card.capacity_bytes,
                    "largest_bytes": card.largest_bytes,
                    "leases": card.leases,
                }
                for card in record.cards
            ],
            "draining": record.is_draining,
            "silent": node_id in self.view.index.silent,
            "silent_ms": int((now_s - node.changed_s) * 1000),
            "version": record.version,
        }

    # --- etcd ---

    async def _follow(self) -> None:
        while True:
            # Step 1: read all records at one revision.
            answer = await self._client.do(Transaction(reads=FLEET_READS))
            if not isinstance(answer, TransactionAnswer):
                self._reason = answer.reason
                await asyncio.sleep(RETRY_S)
                continue
            # Step 2: replace the view with these records.
            self.view.replace((item for items in answer.found for item in items), self._clock())
            self._log_unreadable()
            self._is_read, self._confirmed_s = True, self._clock()
            try:
                # Step 3: apply every change after that revision, in order, until the watch ends.
                async for batch in self._client.watch(PREFIX, answer.revision + 1):
                    self._apply(batch)
            except WatchEnded as ended:
                # Keep the view until it is read again.
                self._reason = str(ended)
                await asyncio.sleep(RETRY_S)

    def _apply(self, batch: WatchBatch) -> None:
        now_s = self._clock()
        for change in batch.changes:
            if isinstance(change, KeyValue):
                self.view.put(change, now_s)
            else:
                self.view.delete(change.key)
        self._log_unreadable()

    def _log_unreadable(self) -> None:
        count = self.view.bad_records
        if count > self._logged_unreadable and (suppressed := self._unreadable_lines.admit()) is not None:
            self._logged_unreadable = count
            reason = self.view.unreadable.sentence()
            log_event(LogEvent.FLEET_UNREADABLE, reason=reason, suppressed=suppressed or None)

    async def _check(self) -> None:
        """Check at intervals that etcd answers. The watch alone does not show this while nothing changes."""
        while True:
            asked_s = self._clock()
            answer = await self._client.do(Transaction(reads=(Get(GENERATION),)))
            if isinstance(answer, TransactionAnswer):
                # The view is at least as recent as the request, so use the time of the request.
                self._confirmed_s = asked_s
            else:
                self._reason = answer.reason
            self._log_change()
            await asyncio.sleep(CHECK_S)

    def _log_change(self) -> None:
        is_current = self.denial() is None
        if is_current and not self._was_current:
            log_event(LogEvent.DIRECTORY_CURRENT, nodes=len(self.view.nodes), names=len(self.view.claims))
        elif self._was_current and not is_current:
            log_event(LogEvent.DIRECTORY_STALE, reason=self._reason)
        self._was_current = is_current

    async def _count(self) -> None:
        counts = Counts()
        while True:
            await asyncio.sleep(COUNTS_S)
            # Log the difference since the last line.
            placements = self.counts.placements - counts.placements
            listings = self.counts.listings - counts.listings
            counts = Counts(self.counts.placements.copy(), self.counts.listings.copy())
            answered = placements["placed"], placements["unplaced"], listings["listed"]
            log_event(
                LogEvent.DIRECTORY_COUNTS,
                nodes=len(self.view.nodes),
                names=len(self.view.claims),
                placed=answered[0],
                unplaced=answered[1],
                listed=answered[2],
                refused=placements.total() + listings.total() - sum(answered),
                bad_records=self.view.bad_records,
            )


def _result_of(answer: Placement | Failure) -> str:
    if isinstance(answer, Failure):
        return answer.status.name.lower()
    return "placed" if answer.candidates else "unplaced"
