"""Fences: a node that was silent for longer than a horizon is removed from the fleet, which frees its names.

A node that claims a name of another node reads the other's record. From the dates of its own answers (`revision_dates`)
it can compute the minimum time for which the record has been unchanged. After T (1 + rho) on its clock, the claimed
leases of the silent node have ended by their deadline.

The fence then removes the record, if it is still at that revision, and writes a mark. From then on the silent node's
heartbeats and claims fail, and the mark shows every other node that memberships before it are over. A mark stays. A
later membership has a higher revision.

An operator or a node of an earlier version may remove a record without a mark. Then the last heartbeat is unknown, and
a node waits from the time when it found that the record was gone.

During an outage of etcd, all nodes are silent. After the outage, a node first gives others the time of two heartbeats
to return.
"""

from typing import Final

from gpulease.daemon.fleet.etcd.transactions import (
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
)
from gpulease.daemon.fleet.records.fleet_records import fenced_key, held_key, name_key, node_key
from gpulease.daemon.fleet.rules.fleet_events import Note, Noted
from gpulease.daemon.fleet.rules.membership import Membership, node_removal

MAX_SILENT_NODES: Final = 1_024
"""Maximum number of memberships without record and mark that are remembered. For a forgotten one, the wait restarts."""

BEATS_TO_REJOIN: Final = 2
"""Number of this node's heartbeats that must succeed after an outage before it fences another node."""

FenceReads = tuple[tuple[KeyValue, ...], tuple[KeyValue, ...]]
"""Results of the reads that `reads_of` returns."""


def reads_of(node_id: str) -> tuple[Get, Get]:
    """Return the reads of a node for `NodeFences.poll`: its record, and its fence's mark."""
    return Get(node_key(node_id)), Get(fenced_key(node_id))


class NodeFences:
    """Determines whether the leases of other nodes are over, and fences silent nodes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._silent_since_ns: dict[tuple[str, int], int] = {}
        """The time since which a record is known to be gone, by node and incarnation."""
        self._asking: set[str] = set()

    def forget(self) -> None:
        """Forget observations of the store, because another store has other incarnations."""
        self._silent_since_ns.clear()

    def poll(self, node_id: str, incarnation: int, reads: FenceReads, now_ns: int) -> tuple[bool, int]:
        """Check a node that made a claim in this incarnation, and fence the node if it was silent for too long.

        Returns whether that incarnation's claims may be deleted now, and when to check again.
        """
        # Case 1: a mark proves that all memberships before it are over.
        membership, (records, marks) = self._membership, reads
        next_ns = now_ns + membership.poll_ns
        if marks and marks[0].mod_revision > incarnation:
            return True, now_ns
        # Case 2: the record is gone or is another membership's. Wait from the time when this was certain.
        if not records or records[0].create_revision != incarnation:
            over_ns = self._gone_since_ns(node_id, incarnation, records, now_ns) + membership.wait_ns
            return now_ns >= over_ns, max(now_ns, min(next_ns, over_ns))
        # Case 3: the record exists. During an outage, this node can't find out whether the other one is silent.
        if membership.member_since_ns is None:
            return False, next_ns
        # Fence the node when all of its leases must have ended, and after an outage only when others had time to
        # return.
        silent_ns = membership.dates.written_by_ns(records[0].mod_revision, now_ns)
        back_ns = membership.member_since_ns + BEATS_TO_REJOIN * membership.beat_ns
        due_ns = max(silent_ns + membership.wait_ns, back_ns)
        if now_ns < due_ns:
            return False, min(next_ns, due_ns)
        # The next read shows the mark. Only then may the claims be deleted.
        self._fence(node_id, records[0].mod_revision, now_ns)
        return False, next_ns

    def delete_claim(self, name: str, node_id: str, revision: int) -> Transaction:
        """Return the transaction that deletes another node's claim, if this node is still a member."""
        compares = (ModRevisionIs(name_key(name), revision), *self._membership.as_member())
        return Transaction(compares, (Delete(name_key(name)), Delete(held_key(node_id, name))))

    def _gone_since_ns(self, node_id: str, incarnation: int, records: tuple[KeyValue, ...], now_ns: int) -> int:
        """Return the time at which a membership was certainly over.

        By then the next membership had begun, or the record was found to be gone.
        """
        # The earlier membership was over when the next one's record was written.
        if records and records[0].create_revision > incarnation:
            return self._membership.dates.written_by_ns(records[0].create_revision, now_ns)
        key = node_id, incarnation
        if key not in self._silent_since_ns:
            # Forget the oldest observation.
            while len(self._silent_since_ns) >= MAX_SILENT_NODES:
                del self._silent_since_ns[next(iter(self._silent_since_ns))]
            self._silent_since_ns[key] = now_ns
        return self._silent_since_ns[key]

    def _fence(self, node_id: str, mod_revision: int, now_ns: int) -> None:
        """Remove the record of a silent node, and leave the mark."""
        membership = self._membership
        if node_id in self._asking:
            return
        self._asking.add(node_id)
        # Compare this node's last heartbeat, because an earlier state of the store has earlier records of all nodes.
        own_record = ModRevisionIs(node_key(membership.node_id), membership.mod_revision)
        compares = ModRevisionIs(node_key(node_id), mod_revision), own_record, *membership.as_member()
        writes: tuple[Put | Delete, ...] = (*node_removal(node_id), Put(fenced_key(node_id), b""))

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._asking.discard(node_id)
            if isinstance(outcome, TransactionAnswer) and outcome.succeeded:
                membership.effects.append(Noted(Note.FENCED_OTHER, node_id=node_id))

        membership.ask(now_ns, Transaction(compares, writes), on_outcome)
