"""Fences: a node that was silent too long is removed from the fleet, and its claims when they can't be in use.

A node that wants the name of another watches that node's record. Unchanged for half a horizon, while its own beats are
acknowledged: it deletes the record, if it is still that very revision. From then on the silent node's beats and claims
fail. Its claimed leases end by themselves: at most the horizon of its last beat later. That beat was done before the
record was first seen at this revision, so from that moment the wait of T (1 + rho) counts, on this node's own clock.
Where somebody else removed the record, the wait counts from the moment at which it was seen gone.

The fleet fences no more than one node of a hundred within a minute, so that a broken network doesn't end it all. The
count is in one key, which each fence rewrites in its own transaction.
"""

from dataclasses import dataclass
from json import dumps
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
from gpulease.daemon.fleet.fleet_records import FENCES, NODES, held_key, name_key, node_key
from gpulease.daemon.fleet.record_reader import Number, Unreadable, read_record
from gpulease.daemon.fleet.rules.fleet_events import Note, Noted
from gpulease.daemon.fleet.rules.membership import NS_PER_S, Membership
from gpulease.protocol.counts import counted

FENCES_SPAN_S: Final = 60
"""Within so many seconds the fleet fences no more than its budget."""

NODES_PER_FENCE: Final = 100
"""The budget is one node of so many, and at least one. Stops a broken network from fencing the fleet away."""

MAX_SIGHTINGS: Final = 1_024
"""Nodes that are watched at once. More than that at once is no node's failure, but the network's."""


@dataclass(frozen=True, slots=True)
class _Fences:
    """The value of the key that counts fences."""

    used: Number


@dataclass(slots=True)
class _Sighting:
    """A node's record as it was seen first at this revision; `gone_ns`: since when the incarnation is known gone."""

    incarnation: int
    mod_revision: int
    since_ns: int
    gone_ns: int | None = None


@dataclass(slots=True)
class _Budget:
    """The key that counts fences, and since when it is unchanged."""

    mod_revision: int
    since_ns: int
    used: int


class NodeFences:
    """Silent nodes as this node sees them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sightings: dict[tuple[str, int], _Sighting] = {}
        self._budget = _Budget(0, 0, 0)
        self._nodes = 0
        self._counted_ns: int | None = None
        self._is_asking = False

    def saw_budget(self, found: tuple[KeyValue, ...], now_ns: int) -> None:
        """Take the key that counts fences, as a beat or a fence read it."""
        revision = found[0].mod_revision if found else 0
        if revision != self._budget.mod_revision:
            used = self._membership.read(_read_fences, found[0]) if found else _Fences(0)
            # A value that can't be read counts as none: the next fence writes another.
            self._budget = _Budget(revision, now_ns, 0 if used is None else used.used)

    def look(self, node_id: str, incarnation: int, found: tuple[KeyValue, ...], now_ns: int) -> tuple[bool, int]:
        """Look at the record of a node that has a claim, and fence the node if it was silent too long.

        Returns whether that incarnation's claims may be deleted now, and when to look again.
        """
        sighting = self._sight(node_id, incarnation, found[0] if found else None, now_ns)
        next_ns = now_ns + self._membership.poll_ns
        if sighting.gone_ns is not None:
            over_ns = sighting.gone_ns + self._membership.wait_ns
            return now_ns >= over_ns, max(now_ns, min(next_ns, over_ns))
        if (beating_ns := self._membership.beating_since_ns) is None:
            return False, next_ns
        due_ns = max(sighting.since_ns, beating_ns) + self._membership.silence_ns
        if now_ns < due_ns:
            return False, min(next_ns, due_ns)
        self._fence(node_id, sighting, now_ns)
        return False, next_ns

    def delete_claim(self, name: str, node_id: str, epoch: int) -> Transaction:
        """Return the transaction that deletes a claim whose wait is over, if this node is a member still."""
        compares = (ModRevisionIs(name_key(name), epoch), self._membership.is_mine())
        return Transaction(compares, (Delete(name_key(name)), Delete(held_key(node_id, name))))

    def _sight(self, node_id: str, incarnation: int, record: KeyValue | None, now_ns: int) -> _Sighting:
        key = node_id, incarnation
        sighting = self._sightings.get(key)
        is_there = record is not None and record.create_revision == incarnation
        revision = record.mod_revision if record is not None and is_there else 0
        if sighting is None:
            while len(self._sightings) >= MAX_SIGHTINGS:
                del self._sightings[next(iter(self._sightings))]
            sighting = self._sightings[key] = _Sighting(incarnation, revision, now_ns)
        if is_there and revision > sighting.mod_revision:
            sighting.mod_revision, sighting.since_ns = revision, now_ns
        if not is_there and sighting.gone_ns is None:
            sighting.gone_ns = now_ns
        return sighting

    def _fence(self, node_id: str, sighting: _Sighting, now_ns: int) -> None:
        """Fence a node, or count the nodes first if that was long ago."""
        membership, span_ns = self._membership, int(FENCES_SPAN_S * NS_PER_S * (1 + self._membership.rho))
        if self._is_asking:
            return
        if self._counted_ns is None or now_ns - self._counted_ns > span_ns:
            self._is_asking = True
            membership.ask(now_ns, Transaction(reads=(Get(NODES, is_prefix=True),)), self._counted)
            return
        budget = self._budget
        # Counted from the last fence, so that no span of that length has more fences than the budget.
        used = 0 if now_ns - budget.since_ns > span_ns else budget.used
        if used >= max(1, self._nodes // NODES_PER_FENCE):
            text = f"the fleet has fenced {counted(used, 'node')} within {FENCES_SPAN_S} s"
            membership.effects.append(Noted(Note.FENCE_PUT_OFF, text, node_id))
            return
        self._is_asking = True
        silent = ModRevisionIs(node_key(node_id), sighting.mod_revision)
        compares = (silent, ModRevisionIs(FENCES, budget.mod_revision), membership.is_mine())
        writes = (Delete(node_key(node_id)), Put(FENCES, dumps({"used": used + 1}).encode()))
        transaction = Transaction(compares, writes, (Get(FENCES),))

        def on_outcome(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            self._is_asking = False
            if not isinstance(outcome, Answer):
                return
            self.saw_budget(outcome.found[0], now_ns)
            if outcome.succeeded:
                # Its last beat was done before this revision was seen, and none was done since.
                sighting.gone_ns = sighting.since_ns
                membership.effects.append(Noted(Note.FENCED_OTHER, node_id=node_id))

        membership.ask(now_ns, transaction, on_outcome)

    def _counted(self, outcome: Outcome, asked_ns: int, now_ns: int) -> None:
        self._is_asking = False
        if isinstance(outcome, Answer):
            self._nodes, self._counted_ns = len(outcome.found[0]), now_ns


def _read_fences(value: bytes) -> _Fences | Unreadable:
    return read_record(_Fences, value)
