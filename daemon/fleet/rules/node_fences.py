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
from json import JSONDecodeError, dumps, loads
from typing import Final

from gpulease.daemon.fleet.etcd.transactions import (
    Answer,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
)
from gpulease.daemon.fleet.fleet_records import FENCES, NODES, held_key, held_name, name_key, node_key
from gpulease.daemon.fleet.rules.fleet_events import FenceDone, FenceWanted, Note, Noted
from gpulease.daemon.fleet.rules.membership import NS_PER_S, Membership

FENCES_SPAN_S: Final = 60
"""Within so many seconds the fleet fences no more than its budget."""

NODES_PER_FENCE: Final = 100
"""The budget is one node of so many, and at least one. Stops a broken network from fencing the fleet away."""

OPERATOR_ATTEMPTS: Final = 4
"""Attempts to delete the record of a node that an operator fences; a beat between reading and deleting fails one."""

MAX_SIGHTINGS: Final = 1_024
"""Nodes that are watched at once. More than that at once is no node's failure, but the network's."""


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
            self._budget = _Budget(revision, now_ns, _used(found[0].value) if found else 0)

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
            text = f"the fleet has fenced {used} nodes within {FENCES_SPAN_S} s"
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

    # --- an operator's fence ---

    def fence_by_operator(self, wanted: FenceWanted, now_ns: int, attempts: int = OPERATOR_ATTEMPTS) -> None:
        """Remove a node from the fleet; if it is off, its claims too."""
        membership = self._membership
        key = node_key(wanted.node_id)
        if wanted.node_id == membership.node_id:
            self._done(wanted, "a node does not fence itself: ask another node")
            return

        def on_read(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            if not isinstance(outcome, Answer):
                self._done(wanted, f"the fleet's store did not do it: {outcome.reason}")
            elif record := outcome.found[0]:
                transaction = Transaction((ModRevisionIs(key, record[0].mod_revision),), (Delete(key),))
                membership.ask(now_ns, transaction, on_delete)
            elif wanted.is_off:
                self._delete_all(wanted, outcome.found[1], now_ns)
            else:
                self._done(wanted, "", is_fenced=True)

        def on_delete(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            # Reading again shows whether the record is gone, and the claims that no beat adds to any more.
            if attempts > 1:
                self.fence_by_operator(wanted, now_ns, attempts - 1)
            else:
                self._done(wanted, "the node beats all the time, or the fleet's store does not answer: try again")

        reads = (Get(key), Get(held_key(wanted.node_id), is_prefix=True))
        membership.ask(now_ns, Transaction(reads=reads), on_read)

    def _delete_all(self, wanted: FenceWanted, held: tuple[KeyValue, ...], now_ns: int) -> None:
        """Delete the claims of a node that is off and has no record."""
        # Entries in quotas are dropped by who wants their bytes.
        claims = [(item, name) for item in held if (name := held_name(item.key, wanted.node_id)) is not None]
        left = len(claims)
        deleted = 0

        def on_outcome(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            nonlocal left, deleted
            left -= 1
            deleted += isinstance(outcome, Answer) and outcome.succeeded
            if not left:
                self._done(wanted, f"{deleted} of {len(claims)} claims are deleted", is_fenced=True)

        for item, name in claims:
            claim = name_key(name)
            compares = (ModRevisionIs(claim, item.mod_revision), CreateRevisionIs(node_key(wanted.node_id), 0))
            self._membership.ask(now_ns, Transaction(compares, (Delete(claim), Delete(item.key))), on_outcome)
        if not claims:
            self._done(wanted, "it had no claims", is_fenced=True)

    def _done(self, wanted: FenceWanted, text: str, is_fenced: bool = False) -> None:
        self._membership.effects.append(FenceDone(wanted.request, is_fenced, text))


def _used(value: bytes) -> int:
    """Read how many nodes were fenced; a foreign writer's value counts as one."""
    try:
        return int(loads(value)["used"])
    except (JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError):
        return 1
