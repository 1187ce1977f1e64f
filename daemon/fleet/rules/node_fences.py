"""Fences. A node that was silent for longer than a horizon is removed from the fleet, which frees its claims at once.

A node that wants the name of another node reads the other's record. From the dates of the answers that it has received
(`revision_dates`) it knows the minimum time for which the record has been unchanged. After T (1 + rho) on this node's
clock, the claimed leases of the silent node have ended by themselves, whatever that node does. So any number of nodes
may then be fenced, because none loses anything that it still has. A fence removes the record, if it is still at that
revision, and leaves a mark in its place. From then on the silent node's heartbeats and claims fail, and every other
node accepts the mark as proof that all memberships before it are over. A mark stays; a later membership has a higher
revision.

If a record is gone without a mark (because an operator or a node of an earlier version removed it), its last heartbeat
is unknown. Then the wait counts from the moment when a node found that the record was gone.

During an outage of etcd, all nodes are silent. So afterwards a node fences others only when they have had the time of
two heartbeats to return.
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
"""Maximum number of memberships without record and mark that are remembered, to bound memory. For a forgotten
membership, the wait restarts."""

BEATS_TO_REJOIN: Final = 2
"""Number of this node's heartbeats that must succeed after an outage before this node fences another one, which may
have had the same outage."""

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
        """By node and incarnation: the time since which its record is known to be gone."""
        self._asking: set[str] = set()

    def forget(self) -> None:
        """Forget observations of another store, whose incarnations mean something else."""
        self._silent_since_ns.clear()

    def poll(self, node_id: str, incarnation: int, reads: FenceReads, now_ns: int) -> tuple[bool, int]:
        """Check a node that has a claim of that incarnation, and fence it if it was silent for too long.

        Returns whether that incarnation's claims may be deleted now, and when to check again.
        """
        # Case 1: a mark proves that all memberships before it are over.
        membership, (records, marks) = self._membership, reads
        next_ns = now_ns + membership.poll_ns
        if marks and marks[0].mod_revision > incarnation:
            return True, now_ns
        # Case 2: the record is gone, or belongs to another membership. The wait counts from the time when this was
        # certain.
        if not records or records[0].create_revision != incarnation:
            over_ns = self._gone_since_ns(node_id, incarnation, records, now_ns) + membership.wait_ns
            return now_ns >= over_ns, max(now_ns, min(next_ns, over_ns))
        # Case 3: the record is unchanged. During an outage, this node can't distinguish a dead node from a store that
        # it can't reach.
        if membership.member_since_ns is None:
            return False, next_ns
        # Fence it when its silence has outlasted every lease, and others have had time to return after an outage.
        silent_ns = membership.dates.written_by_ns(records[0].mod_revision, now_ns)
        back_ns = membership.member_since_ns + BEATS_TO_REJOIN * membership.beat_ns
        due_ns = max(silent_ns + membership.wait_ns, back_ns)
        if now_ns < due_ns:
            return False, min(next_ns, due_ns)
        # The next read shows the mark. Only then may the claims be deleted.
        self._fence(node_id, records[0].mod_revision, now_ns)
        return False, next_ns

    def delete_claim(self, name: str, node_id: str, revision: int) -> Transaction:
        """Return the transaction that deletes a claim after the wait, on condition that this node is still a member."""
        compares = (ModRevisionIs(name_key(name), revision), *self._membership.as_member())
        return Transaction(compares, (Delete(name_key(name)), Delete(held_key(node_id, name))))

    def _gone_since_ns(self, node_id: str, incarnation: int, records: tuple[KeyValue, ...], now_ns: int) -> int:
        """Return the time at which a membership was certainly over.

        By then the next membership had begun, or the record was found to be gone.
        """
        # The next membership's record began then, so the earlier one was over.
        if records and records[0].create_revision > incarnation:
            return self._membership.dates.written_by_ns(records[0].create_revision, now_ns)
        key = node_id, incarnation
        if key not in self._silent_since_ns:
            # Forget the oldest observation; its wait would restart.
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
        # Require this node's last heartbeat in the store: an earlier state of the store has earlier records of other
        # nodes.
        own_record = ModRevisionIs(node_key(membership.node_id), membership.mod_revision)
        compares = ModRevisionIs(node_key(node_id), mod_revision), own_record, *membership.as_member()
        writes: tuple[Put | Delete, ...] = (*node_removal(node_id), Put(fenced_key(node_id), b""))

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._asking.discard(node_id)
            if isinstance(outcome, TransactionAnswer) and outcome.succeeded:
                membership.effects.append(Noted(Note.FENCED_OTHER, node_id=node_id))

        membership.ask(now_ns, Transaction(compares, writes), on_outcome)
