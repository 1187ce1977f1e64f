"""Tracks which leases are connected. The lease table ends a lease that has had no connection for too long.

A lease counts as connected while one of these exists:

- a control connection that acquired or renewed the lease, queried it as its tenant, or requested a submit on it;
- a connection of its session, a guest's included, or a connection on its way to the worker;
- a submit of the lease that is starting or running.

A worker counts its own connections on its control page, so the next broker can count them as well. The next broker has
no record of the control connections, so it gives their clients time to connect again.
"""

from collections.abc import Callable
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.leases.events import ConnectionsChanged, Event
from gpulease.daemon.leases.model import SubmitState
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.workers.registry import Workers

TAKEOVER_WAIT_MS: Final = 60_000
"""Shortest wait for a connection to a lease of an earlier broker. Its client may not connect again before its next
request, and an upgrade must not end the lease before then."""

_UNDER_WAY: Final = frozenset({SubmitState.STARTING, SubmitState.RUNNING})


class ConnectionTracker:
    """Posts `ConnectionsChanged` when a lease loses its last connection, and when it is connected again."""

    def __init__(self, table: LeaseTable, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._workers = workers
        self._post = post
        self._connections_of_lease: dict[int, set[object]] = {}
        self._leases_of_connection: dict[object, set[int]] = {}
        # Leases without a connection, as reported to the table.
        self._disconnected: set[int] = set()
        self._of_earlier_broker: set[int] = set()

    def hold(self, lease_id: int, connection: object) -> None:
        """Count a control connection as one of the lease's, until `leave`."""
        # Do not track leases without a bound on the time without a connection: the table ignores their connections.
        if not self._table.orphan_ms(lease_id):
            return
        self._connections_of_lease.setdefault(lease_id, set()).add(connection)
        self._leases_of_connection.setdefault(connection, set()).add(lease_id)
        self.update(lease_id)

    def leave(self, connection: object) -> None:
        """Stop counting a closed control connection for any lease."""
        lease_ids = self._leases_of_connection.pop(connection, set())
        for lease_id in lease_ids:
            self._connections_of_lease[lease_id].discard(connection)
        # Update only after all sets have changed, so that no event is handled while the connection is half removed.
        for lease_id in lease_ids:
            self.update(lease_id)

    def update(self, lease_id: int) -> None:
        """Post to the table whether the lease is connected, if that has changed."""
        if not self._table.orphan_ms(lease_id):
            return
        # Only changes are posted: most updates find the lease connected as before.
        is_connected = self._is_connected(lease_id)
        if is_connected != (lease_id in self._disconnected):
            return
        (self._disconnected.discard if is_connected else self._disconnected.add)(lease_id)
        wait_ms = TAKEOVER_WAIT_MS if lease_id in self._of_earlier_broker else 0
        self._post(ConnectionsChanged(lease_id, is_connected, wait_ms))

    def take_over(self) -> None:
        """Track an earlier broker's leases: the table starts the wait for those without a connection."""
        # This broker has no control connections of these leases, so a lease without a session's connection starts its
        # wait now.
        for lease in self._table.snapshots():
            self._of_earlier_broker.add(lease.lease_id)
            self.update(lease.lease_id)

    def forget(self, lease_id: int) -> None:
        """Stop tracking a lease that has ended; its connections may still count for other leases."""
        self._disconnected.discard(lease_id)
        self._of_earlier_broker.discard(lease_id)
        for connection in self._connections_of_lease.pop(lease_id, ()):
            lease_ids = self._leases_of_connection[connection]
            lease_ids.discard(lease_id)
            if not lease_ids:
                del self._leases_of_connection[connection]

    def _is_connected(self, lease_id: int) -> bool:
        # Begin with the cheapest check; any one of the three is enough.
        if self._connections_of_lease.get(lease_id):
            return True
        submit = self._table.submits.of(lease_id)
        if submit is not None and submit.state in _UNDER_WAY:
            return True
        worker = self._workers.worker(lease_id)
        if worker is None or self._workers.images.is_connected(lease_id):
            return self._workers.images.is_connected(lease_id)
        return worker.hand_overs > 0 or worker.page.counter(Counter.CONNECTIONS) > 0
