"""Quotas over all nodes: claims of bytes, in shards whose budgets move to where they are used.

A tenant's quota is the sum of 16 budgets. A node admits a lease against the budget of one shard, that of its id, so
that nodes seldom wait for each other. Where the budget does not do, one transaction takes from others what is missing
and half of what they have left, ahead of need; the sum stays. An entry is written under the lease's id: an attempt
whose answer was lost is read back by it. Who gives an entry up rewrites the shard in any case, so that no late attempt
succeeds.

Entries of a node that was fenced count for as long as its leases may live, as a name's claim does.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from json import dumps, loads
from typing import Final, TypeGuard
from urllib.parse import quote
from zlib import crc32

from gpulease.daemon.fleet.etcd.transactions import (
    Answer,
    Compare,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Rejected,
    Transaction,
)
from gpulease.daemon.fleet.fleet_records import MAX_RECORD_BYTES, QUOTAS, node_key
from gpulease.daemon.fleet.rules.fleet_events import (
    QuotaGiven,
    QuotaRefused,
    QuotaSet,
    QuotaSetDone,
    QuotaWanted,
    Why,
)
from gpulease.daemon.fleet.rules.membership import Membership
from gpulease.daemon.fleet.rules.node_fences import NodeFences

SHARDS: Final = 16
"""Parts of a quota. Nodes of different parts never wait for each other."""

MAX_ENTRIES: Final = 512
"""Leases of one tenant in one shard. Keeps a shard's record below the largest that is read."""

MAX_LOOKS: Final = 32
"""Nodes that are looked at in one attempt. Bounds a transaction; etcd's own limit is 128 operations."""

MAX_WANTS: Final = 1_024
"""Claims of bytes that may wait at one node. Stops tenants from keeping it busy with asking etcd again and again."""

RETRY_AFTER_MS: Final = 1_000


@dataclass(slots=True)
class _Entry:
    """Bytes of one lease."""

    node_id: str
    incarnation: int
    size_bytes: int


@dataclass(slots=True)
class _Shard:
    """A part of a quota, as it was read at that revision."""

    key: bytes
    mod_revision: int
    budget_bytes: int = 0
    used: dict[str, _Entry] = field(default_factory=dict)

    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - sum(entry.size_bytes for entry in self.used.values()))

    def put(self) -> Put:
        used = {lease: [entry.node_id, entry.incarnation, entry.size_bytes] for lease, entry in self.used.items()}
        return Put(self.key, dumps({"budget": self.budget_bytes, "used": used}, separators=(",", ":")).encode())


@dataclass(slots=True)
class _Want:
    """A claim of bytes that somebody waits for.

    Attributes:
        nodes: Nodes with entries, to be looked at because no bytes are left.
        may_be_written: The answer to an attempt was lost: the entry may be there, or still come.
        refusal: Why the last attempt failed.
    """

    wanted: QuotaWanted
    next_ns: int
    nodes: tuple[str, ...] = ()
    is_asking: bool = False
    may_be_written: bool = False
    refusal: tuple[Why, str] | None = None


class QuotaShards:
    """Claims of bytes by this node."""

    def __init__(self, membership: Membership, fences: NodeFences) -> None:
        self._membership = membership
        self._fences = fences
        self._wants: dict[int, _Want] = {}
        self._endings: dict[tuple[str, str], int] = {}
        """When to try to remove the entry of a tenant's lease; such an attempt is not under way."""
        self._slot = crc32(membership.node_id.encode()) % SHARDS

    def want(self, wanted: QuotaWanted, now_ns: int) -> None:
        """Take a request for bytes; `advance` makes the first attempt."""
        if len(self._wants) >= MAX_WANTS:
            self._refuse(wanted, (Why.BUSY, f"{MAX_WANTS} claims wait at this node: ask another node"))
        else:
            self._wants[wanted.request] = _Want(wanted, now_ns)

    def drop(self, request: int, now_ns: int) -> None:
        """Forget a request, and remove what its last attempt wrote."""
        want = self._wants.pop(request, None)
        if want and (want.is_asking or want.may_be_written):
            self.end(want.wanted.tenant, want.wanted.lease_id, now_ns)

    def end(self, tenant: str, lease_id: str, now_ns: int) -> None:
        """Give a lease's bytes back, as often as it takes."""
        self._endings[tenant, lease_id] = now_ns

    def advance(self, now_ns: int) -> None:
        """Make the attempts that are due, and refuse who has waited long enough."""
        is_member = self._membership.is_member(now_ns)
        for want in list(self._wants.values()):
            if want.is_asking:
                continue
            if now_ns >= want.wanted.wait_until_ns and (want.refusal or not is_member):
                self.drop(want.wanted.request, now_ns)
                self._refuse(want.wanted, want.refusal if want.refusal and is_member else self._membership.trouble)
            elif is_member and now_ns >= want.next_ns:
                self._read(want, now_ns)
        for key, due_ns in list(self._endings.items()):
            if now_ns >= due_ns:
                del self._endings[key]
                self._remove(*key, now_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """Return when `advance` has something to do; None: not by itself."""
        waiting = [want for want in self._wants.values() if not want.is_asking]
        ends = [max(want.wanted.wait_until_ns, now_ns) for want in waiting]
        tries = [want.next_ns for want in waiting] if self._membership.is_member(now_ns) else []
        return min([*ends, *tries, *self._endings.values()], default=None)

    # --- one attempt: read all shards, then write those that change ---

    def _read(self, want: _Want, now_ns: int) -> None:
        want.is_asking = True
        nodes = want.nodes
        reads = (Get(_prefix(want.wanted.tenant), is_prefix=True), *(Get(node_key(node)) for node in nodes))
        on_outcome = partial(self._answered, want, nodes)
        self._membership.ask(now_ns, Transaction(reads=reads), on_outcome)

    def _answered(self, want: _Want, nodes: tuple[str, ...], outcome: Outcome, asked_ns: int, now_ns: int) -> None:
        want.is_asking = False
        if self._wants.get(want.wanted.request) is not want or not self._is_answer(outcome, want, now_ns):
            return
        shards = _shards(outcome.found[0])
        home = shards.get(_key(want.wanted.tenant, self._slot))
        if home is None:
            want.refusal = Why.REJECTED, "an operator has set no quota for this tenant in the fleet"
            want.next_ns = now_ns + self._membership.poll_ns
            return
        mine = home.used.get(want.wanted.lease_id)
        if mine and mine.incarnation == self._membership.incarnation:
            self._give(want, now_ns)
            return
        changed = self._drop_dead(shards.values(), dict(zip(nodes, outcome.found[1:], strict=True)), now_ns)
        self._place(want, home, shards, changed, now_ns)

    def _place(self, want: _Want, home: _Shard, shards: dict[bytes, _Shard], changed: set[bytes], now_ns: int) -> None:
        """Write a lease's entry into the home shard, with budgets of others if need be."""
        membership, wanted = self._membership, want.wanted
        others = sorted((shard for shard in shards.values() if shard is not home), key=_Shard.free_bytes, reverse=True)
        free = sum(shard.free_bytes() for shard in shards.values())
        if wanted.size_bytes > free or len(home.used) >= MAX_ENTRIES:
            want.refusal = Why.TAKEN, f"the tenant's quota in the fleet has {free} bytes left: free leases, or wait"
            foreign = {entry.node_id for shard in shards.values() for entry in shard.used.values()}
            # First the nodes that were not looked at just now, so that all have their turn.
            nodes = sorted(foreign - {membership.node_id}, key=lambda node: (node in want.nodes, node))[:MAX_LOOKS]
            want.next_ns = now_ns if nodes and not want.nodes else now_ns + membership.poll_ns
            want.nodes = tuple(nodes)
            return
        left = home.budget_bytes - sum(entry.size_bytes for entry in home.used.values())
        missing = wanted.size_bytes - left
        for other in others:
            if missing <= 0:
                break
            moved = min(other.free_bytes(), max(missing, other.free_bytes() // 2))
            other.budget_bytes -= moved
            home.budget_bytes += moved
            missing -= moved
            changed.add(other.key)
        if missing > 0:
            # The home shard is overdrawn, because an operator lowered the quota.
            want.refusal = Why.TAKEN, "the tenant uses more than its quota in the fleet: free leases, or wait"
            want.next_ns = now_ns + membership.poll_ns
            return
        home.used[wanted.lease_id] = _Entry(membership.node_id, membership.incarnation, wanted.size_bytes)
        written = [shards[key] for key in sorted(changed | {home.key})]
        revisions = (ModRevisionIs(shard.key, shard.mod_revision) for shard in written)
        compares: tuple[Compare, ...] = (membership.is_mine(), *revisions)
        want.is_asking = True
        on_outcome = partial(self._written, want, membership.incarnation)
        membership.ask(now_ns, Transaction(compares, tuple(shard.put() for shard in written)), on_outcome)

    def _written(self, want: _Want, incarnation: int, outcome: Outcome, asked_ns: int, now_ns: int) -> None:
        want.is_asking = False
        want.may_be_written |= not isinstance(outcome, Answer)
        wanted = want.wanted
        if self._wants.get(wanted.request) is not want:
            # Whoever dropped it has removed the entry, unless this attempt was done after that.
            self.end(wanted.tenant, wanted.lease_id, now_ns)
        elif self._is_answer(outcome, want, now_ns):
            want.next_ns = now_ns
            want.may_be_written |= outcome.succeeded
            if outcome.succeeded and incarnation == self._membership.incarnation:
                self._give(want, now_ns)

    def _is_answer(self, outcome: Outcome, want: _Want, now_ns: int) -> TypeGuard[Answer]:
        """Return whether there is an answer; if not, note when to try again and why."""
        if isinstance(outcome, Answer):
            return True
        want.next_ns = now_ns + self._membership.poll_ns
        if isinstance(outcome, Rejected):
            want.refusal = Why.REJECTED, f"the fleet's store refused; an operator must act: {outcome.reason}"
        else:
            want.refusal = Why.UNKNOWN, "the fleet's store did not answer: ask again, with the same request id"
        return False

    def _give(self, want: _Want, now_ns: int) -> None:
        if self._membership.is_member(now_ns):
            del self._wants[want.wanted.request]
            self._membership.effects.append(QuotaGiven(want.wanted.request))
        else:
            want.refusal, want.next_ns = self._membership.trouble, now_ns + self._membership.retry_ns

    def _drop_dead(self, shards: Iterable[_Shard], found: dict[str, tuple[KeyValue, ...]], now_ns: int) -> set[bytes]:
        """Drop entries whose leases are surely over. Returns the shards that had some."""
        membership = self._membership
        changed = set()
        for shard in shards:
            for lease_id, entry in list(shard.used.items()):
                if entry.node_id == membership.node_id:
                    # This node joined with no claimed lease left: an earlier incarnation's leases are over.
                    is_over = entry.incarnation != membership.incarnation
                elif entry.node_id in found:
                    is_over, _ = self._fences.look(entry.node_id, entry.incarnation, found[entry.node_id], now_ns)
                else:
                    is_over = False
                if is_over:
                    del shard.used[lease_id]
                    changed.add(shard.key)
        return changed

    # --- giving back ---

    def _remove(self, tenant: str, lease_id: str, now_ns: int) -> None:
        """Rewrite the home shard without a lease's entry; its revision rises even if the entry is not there."""
        membership = self._membership
        key = _key(tenant, self._slot)

        def again(now_ns: int) -> None:
            self._endings.setdefault((tenant, lease_id), now_ns + membership.retry_ns)

        def on_read(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            if not isinstance(outcome, Answer):
                again(now_ns)
            elif shard := _shards(outcome.found[0]).get(key):
                shard.used.pop(lease_id, None)
                transaction = Transaction((ModRevisionIs(key, shard.mod_revision),), (shard.put(),))
                membership.ask(now_ns, transaction, on_written)

        def on_written(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            if not (isinstance(outcome, Answer) and outcome.succeeded):
                again(now_ns)

        membership.ask(now_ns, Transaction(reads=(Get(key),)), on_read)

    # --- an operator's limit ---

    def set_quota(self, event: QuotaSet, now_ns: int) -> None:
        """Set the sum of a tenant's budgets; what is used stays used."""
        membership = self._membership

        def done(text: str, is_set: bool = False) -> None:
            membership.effects.append(QuotaSetDone(event.request, is_set, text))

        def on_read(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            if not isinstance(outcome, Answer):
                done(f"the fleet's store did not do it: {outcome.reason}")
                return
            found = _shards(outcome.found[0])
            keys = [_key(event.tenant, number) for number in range(SHARDS)]
            shards = [found.get(key) or _Shard(key, 0) for key in keys]
            used = [sum(entry.size_bytes for entry in shard.used.values()) for shard in shards]
            spare = event.total_bytes - sum(used)
            for number, shard in enumerate(shards):
                share = spare // SHARDS + (number < spare % SHARDS)
                shard.budget_bytes = used[number] + share
            compares = tuple(ModRevisionIs(shard.key, shard.mod_revision) for shard in shards)
            membership.ask(now_ns, Transaction(compares, tuple(shard.put() for shard in shards)), on_written)

        def on_written(outcome: Outcome, asked_ns: int, now_ns: int) -> None:
            is_set = isinstance(outcome, Answer) and outcome.succeeded
            done("" if is_set else "the quota is in use or the store did not answer: try again", is_set)

        reads = (Get(_prefix(event.tenant), is_prefix=True),)
        membership.ask(now_ns, Transaction(reads=reads), on_read)

    def _refuse(self, wanted: QuotaWanted, refusal: tuple[Why, str]) -> None:
        self._membership.effects.append(QuotaRefused(wanted.request, *refusal, RETRY_AFTER_MS))


def _prefix(tenant: str) -> bytes:
    return QUOTAS + quote(tenant, safe="").encode() + b"/"


def _key(tenant: str, number: int) -> bytes:
    return _prefix(tenant) + b"%02d" % number


def _shards(found: tuple[KeyValue, ...]) -> dict[bytes, _Shard]:
    """Read shards by key; a foreign writer's value is a shard without budget."""
    shards = {}
    for key, value, _, mod_revision in found:
        shards[key] = _Shard(key, mod_revision)
        if len(value) > MAX_RECORD_BYTES:
            continue
        try:
            record = loads(value)
            used = {str(lease): _Entry(str(n), int(i), int(size)) for lease, (n, i, size) in record["used"].items()}
            shards[key] = _Shard(key, mod_revision, int(record["budget"]), used)
        except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
            continue
    return shards
