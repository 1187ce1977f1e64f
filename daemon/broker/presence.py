"""Tells the lease table when a lease loses its last connection, and when it has one again.

A lease is connected while one of these is there: a control connection that acquired or renewed it, asked about it as
its tenant, or asked for a submit of it; a connection of its session, a guest's too, or one on its way to the worker; a
submit of it that starts or runs. The worker counts its own connections on its page, so that the next broker knows them
too; of control connections the next broker knows none, and gives their clients time to come back.
"""

from collections.abc import Callable
from typing import Final

from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.core import ConnectionsChanged, Event, LeaseTable, SubmitState
from gpulease.daemon.worker.page import Counter

TAKEOVER_WAIT_MS: Final = 60_000
"""The shortest wait of a lease that was taken over. Its client may live without a connection: it makes a new one only
when it next asks for something. Stops an upgrade from ending its lease before that."""

_GOES_ON: Final = frozenset({SubmitState.STARTING, SubmitState.RUNNING})


class Presence:
    """Knows which leases are connected."""

    def __init__(self, table: LeaseTable, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._workers = workers
        self._post = post
        self._holders: dict[int, set[object]] = {}
        self._held: dict[object, set[int]] = {}
        # Leases of which the table was told that nobody is connected.
        self._unconnected: set[int] = set()
        # An earlier broker's.
        self._taken_over: set[int] = set()

    def hold(self, lease_id: int, holder: object) -> None:
        """Count a control connection as the lease's, until `leave`."""
        if not self._table.orphan_ms(lease_id):
            return
        self._holders.setdefault(lease_id, set()).add(holder)
        self._held.setdefault(holder, set()).add(lease_id)
        self.look(lease_id)

    def leave(self, holder: object) -> None:
        """A control connection is gone."""
        lease_ids = self._held.pop(holder, set())
        for lease_id in lease_ids:
            self._holders[lease_id].discard(holder)
        for lease_id in lease_ids:
            self.look(lease_id)

    def look(self, lease_id: int) -> None:
        """Tell the table if the lease is connected and was not, or the other way round."""
        if not self._table.orphan_ms(lease_id):
            return
        is_connected = self._is_connected(lease_id)
        if is_connected != (lease_id in self._unconnected):
            return
        (self._unconnected.discard if is_connected else self._unconnected.add)(lease_id)
        self._post(ConnectionsChanged(lease_id, is_connected, TAKEOVER_WAIT_MS if lease_id in self._taken_over else 0))

    def look_at_all(self) -> None:
        """An earlier daemon's leases were taken over: those that nobody is connected to wait from now on."""
        for lease in self._table.snapshots():
            self._taken_over.add(lease.lease_id)
            self.look(lease.lease_id)

    def forget(self, lease_id: int) -> None:
        """The lease is over."""
        self._unconnected.discard(lease_id)
        self._taken_over.discard(lease_id)
        for holder in self._holders.pop(lease_id, ()):
            held = self._held[holder]
            held.discard(lease_id)
            if not held:
                del self._held[holder]

    def _is_connected(self, lease_id: int) -> bool:
        if self._holders.get(lease_id):
            return True
        submit = self._table.submits.of(lease_id)
        if submit is not None and submit.state in _GOES_ON:
            return True
        worker = self._workers.worker(lease_id)
        return worker is not None and (worker.hand_overs > 0 or worker.page.counter(Counter.CONNECTIONS) > 0)
