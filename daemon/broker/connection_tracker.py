"""The leases that are connected. The lease table ends a lease that stays without a connection for too long.

A lease counts as connected while one of these exists:

- a control connection that acquired or renewed the lease, asked about it as its tenant, or asked for a submit of it;
- a connection of its session, a guest's included, or a connection on its way to the worker;
- a submit of the lease that starts or runs.

A worker counts its own connections on its control page, so the next broker knows them too. The next broker knows none
of the control connections, and gives their clients time to come back.
"""

from collections.abc import Callable
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.leases import ConnectionsChanged, Event, LeaseTable, SubmitState
from gpulease.daemon.workers.registry import Workers

TAKEOVER_WAIT_MS: Final = 60_000
"""The shortest wait for a connection to a lease of an earlier broker. Its client may live without a connection and make
a new one only when it next asks for something. Stops an upgrade from ending its lease before that."""

_UNDER_WAY: Final = frozenset({SubmitState.STARTING, SubmitState.RUNNING})


class ConnectionTracker:
    """Posts `ConnectionsChanged` when a lease loses its last connection, and when it has one again."""

    def __init__(self, table: LeaseTable, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._workers = workers
        self._post = post
        self._connections_of_lease: dict[int, set[object]] = {}
        self._leases_of_connection: dict[object, set[int]] = {}
        # Leases that the table knows to be without a connection.
        self._disconnected: set[int] = set()
        self._of_earlier_broker: set[int] = set()

    def hold(self, lease_id: int, connection: object) -> None:
        """Count a control connection as the lease's, until `leave`."""
        if not self._table.orphan_ms(lease_id):
            return
        self._connections_of_lease.setdefault(lease_id, set()).add(connection)
        self._leases_of_connection.setdefault(connection, set()).add(lease_id)
        self.update(lease_id)

    def leave(self, connection: object) -> None:
        """Count a closed control connection as no lease's."""
        lease_ids = self._leases_of_connection.pop(connection, set())
        for lease_id in lease_ids:
            self._connections_of_lease[lease_id].discard(connection)
        for lease_id in lease_ids:
            self.update(lease_id)

    def update(self, lease_id: int) -> None:
        """Tell the table whether the lease is connected, if that has changed."""
        if not self._table.orphan_ms(lease_id):
            return
        is_connected = self._is_connected(lease_id)
        if is_connected != (lease_id in self._disconnected):
            return
        (self._disconnected.discard if is_connected else self._disconnected.add)(lease_id)
        wait_ms = TAKEOVER_WAIT_MS if lease_id in self._of_earlier_broker else 0
        self._post(ConnectionsChanged(lease_id, is_connected, wait_ms))

    def take_over(self) -> None:
        """Begin with an earlier broker's leases: the table waits for connections to those that have none."""
        for lease in self._table.snapshots():
            self._of_earlier_broker.add(lease.lease_id)
            self.update(lease.lease_id)

    def forget(self, lease_id: int) -> None:
        """Drop a lease that has ended."""
        self._disconnected.discard(lease_id)
        self._of_earlier_broker.discard(lease_id)
        for connection in self._connections_of_lease.pop(lease_id, ()):
            lease_ids = self._leases_of_connection[connection]
            lease_ids.discard(lease_id)
            if not lease_ids:
                del self._leases_of_connection[connection]

    def _is_connected(self, lease_id: int) -> bool:
        if self._connections_of_lease.get(lease_id):
            return True
        submit = self._table.submits.of(lease_id)
        if submit is not None and submit.state in _UNDER_WAY:
            return True
        worker = self._workers.worker(lease_id)
        return worker is not None and (worker.hand_overs > 0 or worker.page.counter(Counter.CONNECTIONS) > 0)
