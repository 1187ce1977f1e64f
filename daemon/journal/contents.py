"""What is in a journal when it is opened, and what the host's restart changes in it."""

from array import array
from dataclasses import dataclass, field

from gpulease.daemon.core import Cause, KeptCard, KeptLease, LeaseSnapshot, LeaseState, Past
from gpulease.daemon.core.keeping import KeptWarm
from gpulease.daemon.journal import rows
from gpulease.daemon.journal.rows import LEASE_ID_BYTES, Change, KeptRelay, RowKind

Spent = tuple[int, bytes, int]
"""A token that was used, or revoked: its lease, its nonce, and until when no token of that nonce can be valid
(monotonic ms)."""


@dataclass(slots=True)
class Contents:
    """The rows, read.

    Attributes:
        drain_ns: When a drain ends what is left; None if the node is not drained.
        next_tombstone: The place of the tombstone that comes next.
    """

    leases: list[KeptLease] = field(default_factory=list)
    warm: list[KeptWarm] = field(default_factory=list)
    tombstones: list[LeaseSnapshot] = field(default_factory=list)
    revoked: "array[int]" = field(default_factory=lambda: array("Q"))
    cleared: "array[int]" = field(default_factory=lambda: array("Q"))
    spent: list[Spent] = field(default_factory=list)
    revoked_tokens: list[Spent] = field(default_factory=list)
    cards: dict[str, KeptCard] = field(default_factory=dict)
    drain_ns: int | None = None
    relays: dict[int, KeptRelay] = field(default_factory=dict)
    next_tombstone: int = 0

    def take(self, kind: int, key: bytes, value: bytes) -> None:
        """One row, in the order of kinds and keys. Raises ValueError, KeyError or TypeError if it makes no sense."""
        match RowKind(kind):
            case RowKind.REVOKED:
                self.revoked.append(int.from_bytes(key, "big"))
            case RowKind.CLEARED:
                self.cleared.append(int.from_bytes(key, "big"))
            case RowKind.LEASE:
                self.leases.append(rows.read_lease(value))
            case RowKind.WARM:
                self.warm.append(rows.read_warm(value))
            case RowKind.TOMBSTONE:
                self.tombstones.append(rows.read_tombstone(value))
                self.next_tombstone = int.from_bytes(key, "big") + 1
            case RowKind.SPENT:
                self.spent.append(_spent(key, value))
            case RowKind.REVOKED_TOKEN:
                self.revoked_tokens.append(_spent(key, value))
            case RowKind.CARD:
                card = rows.read_card(value)
                self.cards[card.uuid] = card
            case RowKind.DRAIN:
                self.drain_ns = int(value)
            case RowKind.RELAY:
                relay = rows.read_relay(value)
                self.relays[relay.pid] = relay

    def past(self) -> Past:
        """What needs no doing."""
        return Past(tuple(self.tombstones), self.revoked, self.cleared, tuple(self.warm), self.drain_ns)

    def cross_boot(self) -> list[Change]:
        """The host was restarted: what that ended, in these contents and as changes to the rows.

        Nothing of another boot runs, and its times mean nothing now; what is fenced stays so until an operator says
        otherwise, and so does a drain: nothing is left for it to end. Tokens of another boot verify with no key.
        """
        changes: list[Change] = []
        for lease in self.leases:
            changes.append(Change(RowKind.LEASE, rows.lease_key(lease.lease_id), None))
            if lease.state is LeaseState.FENCED:
                deadline_ns = None if lease.deadline_ns is None else 0
                fenced = lease._replace(created_ns=0, deadline_ns=deadline_ns, ended_ns=0, worker_pid=0)
                changes[-1] = changes[-1]._replace(content=fenced)
            else:
                self.tombstones.append(_ended_with_host(lease))
                changes.append(Change(RowKind.TOMBSTONE, rows.number_key(self.next_tombstone), self.tombstones[-1]))
                self.next_tombstone += 1
        changes += [Change(RowKind.CARD, uuid.encode(), None) for uuid in self.cards]
        changes += [Change(RowKind.RELAY, rows.number_key(pid), None) for pid in self.relays]
        for kind, tokens in ((RowKind.SPENT, self.spent), (RowKind.REVOKED_TOKEN, self.revoked_tokens)):
            changes += [Change(kind, rows.spent_key(lease_id, nonce), None) for lease_id, nonce, _ in tokens]
            tokens.clear()
        if self.drain_ns is not None:
            self.drain_ns = 0
            changes.append(Change(RowKind.DRAIN, rows.DRAIN_KEY, self.drain_ns))
        self.leases = [c.content for c in changes if isinstance(c.content, KeptLease)]
        self.cards.clear()
        self.relays.clear()
        return changes


def _spent(key: bytes, value: bytes) -> Spent:
    return int.from_bytes(key[:LEASE_ID_BYTES], "big"), key[LEASE_ID_BYTES:], int(value)


def _ended_with_host(lease: KeptLease) -> LeaseSnapshot:
    return LeaseSnapshot(
        lease.lease_id,
        lease.tenant,
        lease.card_uuid,
        lease.size_bytes,
        lease.exclusivity,
        lease.generation,
        LeaseState.TORNDOWN,
        lease.cause or Cause.WORKER_DIED,
        lease.reason or "the host was restarted",
        lease.fault,
        created_ns=0,
        deadline_ns=0,
        ended_ns=0,
        ttl_ms=lease.ttl_ms,
    )
