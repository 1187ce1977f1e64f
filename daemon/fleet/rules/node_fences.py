"""Fences: a node that was silent for more than a horizon is removed from the fleet, and its claims are free at once.

A node that wants the name of another looks at that node's record. How long that is unchanged, at least, it knows from
the dates of its own answers (`revision_dates`). Past T (1 + rho) on this node's clock the claimed leases of the silent
node are over by themselves, whatever it does. So any number of nodes may be fenced then: no node loses what it still
has. A fence removes the record, if it is still that very revision, and leaves a mark in its place. From then on the
silent node's beats and claims fail, and every other node takes the mark for the proof that all memberships of before it
are over. A mark stays; a membership that begins later has a higher revision.

Where a record is gone without a mark (an operator removed it, or a node of an earlier version), nobody knows when its
last beat was: the wait counts from the moment at which it was seen gone.

After etcd was away all nodes look silent: nobody is fenced before they had two beats' time to come back.
"""

from typing import Final

from gpulease.daemon.fleet.etcd.transactions import (
    Answer,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
)
from gpulease.daemon.fleet.records.fleet_records import fenced_key, held_key, name_key, node_key
from gpulease.daemon.fleet.rules.fleet_events import Note, Noted
from gpulease.daemon.fleet.rules.membership import Membership, node_removal

MAX_GONE: Final = 1_024
"""Memberships without record and mark that are remembered. Bounds memory; the wait of one that is forgotten begins
anew."""

BEATS_TO_COME_BACK: Final = 2
"""Beats of this node's own, after its way to etcd was lost, before it fences another: that may have lost it, too."""

Looked = tuple[tuple[KeyValue, ...], tuple[KeyValue, ...]]
"""What the reads of `reads_of` found."""


def reads_of(node_id: str) -> tuple[Get, Get]:
    """Return the reads of a node that `NodeFences.look` takes the answers to: its record, and its fence's mark."""
    return Get(node_key(node_id)), Get(fenced_key(node_id))


class NodeFences:
    """Silent nodes as this node sees them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._gone_ns: dict[tuple[str, int], int] = {}
        """By node and incarnation: since when its record is known to be gone."""
        self._asking: set[str] = set()

    def forget(self) -> None:
        """Forget what was seen in another store: its incarnations may be others' here."""
        self._gone_ns.clear()

    def look(self, node_id: str, incarnation: int, looked: Looked, now_ns: int) -> tuple[bool, int]:
        """Look at a node that has a claim of that incarnation, and fence it if it was silent too long.

        Returns whether that incarnation's claims may be deleted now, and when to look again.
        """
        membership, (records, marks) = self._membership, looked
        next_ns = now_ns + membership.poll_ns
        if marks and marks[0].mod_revision > incarnation:
            return True, now_ns
        if not records or records[0].create_revision != incarnation:
            over_ns = self._gone_since_ns(node_id, incarnation, records, now_ns) + membership.wait_ns
            return now_ns >= over_ns, max(now_ns, min(next_ns, over_ns))
        if membership.beating_since_ns is None:
            return False, next_ns
        silent_ns = membership.dates.written_by_ns(records[0].mod_revision, now_ns)
        back_ns = membership.beating_since_ns + BEATS_TO_COME_BACK * membership.beat_ns
        due_ns = max(silent_ns + membership.wait_ns, back_ns)
        if now_ns < due_ns:
            return False, min(next_ns, due_ns)
        self._fence(node_id, records[0].mod_revision, now_ns)
        return False, next_ns

    def delete_claim(self, name: str, node_id: str, revision: int) -> Transaction:
        """Return the transaction that deletes a claim whose wait is over, if this node is a member still."""
        compares = (ModRevisionIs(name_key(name), revision), *self._membership.as_member())
        return Transaction(compares, (Delete(name_key(name)), Delete(held_key(node_id, name))))

    def _gone_since_ns(self, node_id: str, incarnation: int, records: tuple[KeyValue, ...], now_ns: int) -> int:
        """Return since when a membership is surely over: it was when the next one began, or it was seen gone."""
        if records and records[0].create_revision > incarnation:
            return self._membership.dates.written_by_ns(records[0].create_revision, now_ns)
        key = node_id, incarnation
        if key not in self._gone_ns:
            while len(self._gone_ns) >= MAX_GONE:
                del self._gone_ns[next(iter(self._gone_ns))]
            self._gone_ns[key] = now_ns
        return self._gone_ns[key]

    def _fence(self, node_id: str, mod_revision: int, now_ns: int) -> None:
        """Remove the record of a silent node, and leave the mark."""
        membership = self._membership
        if node_id in self._asking:
            return
        self._asking.add(node_id)
        # This node's own last beat is in the store: it is not an earlier state of it, with earlier records.
        mine = ModRevisionIs(node_key(membership.node_id), membership.mod_revision)
        compares = ModRevisionIs(node_key(node_id), mod_revision), mine, *membership.as_member()
        writes: tuple[Put | Delete, ...] = (*node_removal(node_id), Put(fenced_key(node_id), b""))

        def on_outcome(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            self._asking.discard(node_id)
            if isinstance(outcome, Answer) and outcome.succeeded:
                membership.effects.append(Noted(Note.FENCED_OTHER, node_id=node_id))

        membership.ask(now_ns, Transaction(compares, writes), on_outcome)
