"""Claims of bytes of quotas that apply to all nodes.

A tenant's quota is the sum of the budgets of 16 shards. A node enters its leases in one shard, its home shard, which
its id selects. So nodes seldom wait for each other. If the home shard's budget is too small, one transaction moves
bytes there from other shards. The sum stays the same.

An entry's key is the lease's id. If an answer is lost, the node reads the entry by that id. A node that removes an
entry rewrites the shard even if the entry is absent, so that no late attempt succeeds. Each heartbeat reads the node's
entries, and removes those without a lease or a waiting request, as it does with names.

Entries of a fenced node count until its leases must have ended, like its claims of names.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple, TypeGuard
from zlib import crc32

from gpulease.daemon.fleet.etcd.transactions import (
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
)
from gpulease.daemon.fleet.records.fleet_records import QUOTA_DEFAULT, is_quotas
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimRefusal,
    Note,
    Noted,
    QuotaGiven,
    QuotaRefused,
    QuotaWanted,
)
from gpulease.daemon.fleet.rules.membership import ISOLATED_TROUBLE, Membership
from gpulease.daemon.fleet.rules.node_fences import FenceReads, NodeFences, reads_of
from gpulease.daemon.fleet.rules.quota_records import (
    SHARDS,
    DefaultQuota,
    QuotaEntry,
    Shard,
    all_shards,
    has_sound_budgets,
    held_entry,
    held_entry_key,
    quota_prefix,
    read_default,
    read_shards,
    shard_key,
    spread,
)
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.sizes import size_text

MAX_ENTRIES: Final = 256
"""Maximum number of leases of one tenant in one shard. With node ids of 128 characters, the shard has 50 KB, less than
MAX_RECORD_BYTES."""

MAX_DROPS: Final = 64
"""Maximum number of entries of dead nodes that one attempt removes. etcd accepts 128 operations in one transaction."""

MAX_LOOKS: Final = 32
"""Maximum number of nodes that one attempt checks, with two reads each. etcd accepts 128 operations in one transaction.
"""

MAX_REQUESTS: Final = 1_024
"""Maximum number of claims of bytes that may wait on one node, to limit the requests to etcd that tenants can cause."""

MAX_TENANTS: Final = 1_024
"""Maximum number of tenants whose nodes are remembered from one request to the next."""

MAX_REMOVALS: Final = 256
"""Maximum number of removals in progress that heartbeats begin, as MAX_RELEASES for names."""

RETRY_AFTER_MS: Final = 1_000


@dataclass(slots=True)
class _BytesRequest:
    """A claim of bytes that the broker has requested.

    Attributes:
        nodes: Nodes with entries that the next attempt checks, because no bytes are left.
        may_be_written: Whether an attempt may have written the entry, or may still write it.
        refusal: Why the last attempt failed.
    """

    demand: QuotaWanted
    next_ns: int
    nodes: tuple[str, ...] = ()
    is_asking: bool = False
    may_be_written: bool = False
    refusal: tuple[ClaimRefusal, str] | None = None


class _Quota(NamedTuple):
    """A tenant's quota as one attempt read it, with the attempt's changes.

    Attributes:
        home: The home shard, with this node's entries.
        shards: All shards by key.
        changed: Keys of the shards to be written.
        writes: Writes of other keys, by key.
        default: The default that the budgets were made from; None if the quota is the tenant's own.
    """

    home: Shard
    shards: dict[bytes, Shard]
    changed: set[bytes]
    writes: dict[bytes, Put | Delete]
    default: DefaultQuota | None


class QuotaShards:
    """This node's claims of quota bytes: requests, leases that have bytes, and bytes to be returned."""

    def __init__(self, membership: Membership, fences: NodeFences) -> None:
        self.live: dict[str, str] = {}
        """The tenant of each lease that has bytes."""
        self._former: frozenset[str] = frozenset()
        """Leases of this daemon's earlier memberships. They have ended."""
        self._membership = membership
        self._fences = fences
        self._requests: dict[int, _BytesRequest] = {}
        self._endings: dict[tuple[str, str], int] = {}
        """Entries to remove, and when to try. Removals in progress are not included."""
        self._removing: set[tuple[str, str]] = set()
        self._read_nodes: dict[str, tuple[str, ...]] = {}
        """The nodes that the tenant's next request checks. So even a request that does not wait can use a dead node's
        bytes."""
        self._slot = crc32(membership.node_id.encode()) % SHARDS

    @property
    def has_entries(self) -> bool:
        """Whether a lease has bytes, or an entry is still to be removed."""
        return bool(self.live or self._endings or self._removing)

    def add_request(self, demand: QuotaWanted, now_ns: int) -> None:
        """Accept a request for bytes. `advance` makes the first attempt."""
        # Check the limit before the request is kept.
        if len(self._requests) >= MAX_REQUESTS:
            self._refuse(
                demand, (ClaimRefusal.BUSY, f"{MAX_REQUESTS} claims wait at this node, the maximum: use another node")
            )
        else:
            self._requests[demand.request] = _BytesRequest(demand, now_ns, self._read_nodes.get(demand.tenant, ()))

    def drop(self, request: int, now_ns: int) -> None:
        """Forget a request, and remove the entry that its last attempt wrote."""
        pending = self._requests.pop(request, None)
        # Remove the entry that an attempt may have written, because it counts against the tenant.
        if pending and (pending.is_asking or pending.may_be_written):
            self.end(pending.demand.tenant, pending.demand.lease_id, now_ns)

    def ended(self, tenant: str, lease_id: str, now_ns: int) -> None:
        """Return the bytes of a lease that has ended, if this member has them."""
        if lease_id in self.live or lease_id in self._former:
            self.end(tenant, lease_id, now_ns)

    def end(self, tenant: str, lease_id: str, now_ns: int) -> None:
        """Return a lease's bytes, with as many attempts as necessary."""
        self.live.pop(lease_id, None)
        self._endings[tenant, lease_id] = now_ns

    def restore(self, quotas: Mapping[str, str]) -> None:
        """Restore the broker's leases of the membership that continues: their tenants by lease."""
        self.live = dict(quotas)

    def lose(self, *, forgets: bool) -> None:
        """Drop all bytes because the membership was lost.

        Args:
            forgets: Whether the earlier entries may belong to another daemon, or to another store.
        """
        # Remember these leases, because this daemon can return their bytes without a wait.
        self._former = frozenset() if forgets else frozenset(self.live)
        self.live = {}

    def sweep(self, items: tuple[KeyValue, ...], now_ns: int) -> None:
        """Remove this node's entries without a lease or a waiting request. A heartbeat has read the entries."""
        # A waiting request may have written an entry, although there is no lease yet.
        awaited = {request.demand.lease_id for request in self._requests.values()}
        for item in items:
            if not is_quotas(item.key, self._membership.node_id):
                continue
            key = held_entry(item.key, self._membership.node_id)
            # Keep an unreadable key, because a newer version may have written it.
            if isinstance(key, Unreadable):
                self._membership.distrust(item, key.reason)
                continue
            if len(self._endings) + len(self._removing) >= MAX_REMOVALS:
                # Leave the rest to a later heartbeat.
                return
            tenant, lease_id = key
            # The entry has an owner, or its removal is in progress.
            if lease_id in self.live or lease_id in awaited or key in self._endings or key in self._removing:
                continue
            # Another daemon with this node's id may have written the entry, and its lease may still run.
            if lease_id not in self._former and not self._membership.is_over(now_ns):
                continue
            self._membership.effects.append(Noted(Note.ORPHAN_DELETED, f"bytes of {tenant}'s lease {lease_id}"))
            self.end(tenant, lease_id, now_ns)

    def advance(self, now_ns: int) -> None:
        """Make the attempts that are due, and refuse requests that have waited long enough."""
        is_member = self._membership.is_member(now_ns)
        # Step 1: attempt or refuse the waiting requests. A request gets at least one attempt. When its wait is over, it
        # is refused with its last reason.
        for request in list(self._requests.values()):
            if request.is_asking:
                continue
            if now_ns >= request.demand.wait_until_ns and (request.refusal or not is_member):
                self.drop(request.demand.request, now_ns)
                self._refuse(
                    request.demand, request.refusal if request.refusal and is_member else self._membership.trouble
                )
            elif is_member and now_ns >= request.next_ns:
                self._read(request, now_ns)
        # Step 2: return the bytes that are due.
        for key, due_ns in list(self._endings.items()):
            if now_ns >= due_ns:
                del self._endings[key]
                self._remove(*key, now_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """Return when `advance` next has something to do; None if it only has to wait for events."""
        # A request with an attempt in progress needs no timer, because the answer is an event.
        waiting = [request for request in self._requests.values() if not request.is_asking]
        deadlines = [max(request.demand.wait_until_ns, now_ns) for request in waiting]
        tries = [request.next_ns for request in waiting] if self._membership.is_member(now_ns) else []
        return min([*deadlines, *tries, *self._endings.values()], default=None)

    # --- one attempt: read all shards, then write those that change ---

    def _read(self, request: _BytesRequest, now_ns: int) -> None:
        request.is_asking = True
        # Read the shards, the default, and the records of nodes that may be dead, at one revision.
        nodes = request.nodes
        fence_reads = (read for node in nodes for read in reads_of(node))
        reads = (Get(quota_prefix(request.demand.tenant), is_prefix=True), Get(QUOTA_DEFAULT), *fence_reads)
        on_outcome = partial(self._answered, request, nodes)
        self._membership.ask(now_ns, Transaction(reads=reads), on_outcome)

    def _answered(
        self, request: _BytesRequest, nodes: tuple[str, ...], outcome: Outcome, sent_ns: int, now_ns: int
    ) -> None:
        request.is_asking = False
        # The request was dropped in the meantime, or etcd has not answered.
        if self._requests.get(request.demand.request) is not request or not self._is_answer(outcome, request, now_ns):
            return
        # Step 1: check that there is a quota that can be read.
        tenant = request.demand.tenant
        quota = self._quota(tenant, outcome)
        if isinstance(quota, Unreadable):
            text = f"the fleet quota of tenant {tenant!r} can't be read: an operator of the fleet must repair it"
            self._refuse_at_once(request, ClaimRefusal.REJECTED, text, now_ns)
        elif quota is None:
            self._refuse_at_once(request, ClaimRefusal.NO_QUOTA, f"tenant {tenant!r} has no fleet quota", now_ns)
        # Step 2: grant the request if an earlier attempt without an answer has written the entry.
        elif self._is_mine(quota.home.used.get(request.demand.lease_id)):
            self._grant(request, now_ns)
        else:
            # Step 3: drop the entries of dead nodes, and then place the new entry if there is room.
            fence_answers = zip(outcome.found[2::2], outcome.found[3::2], strict=True)
            self._drop_dead(tenant, quota, dict(zip(nodes, fence_answers, strict=True)), now_ns)
            self._place(request, quota, now_ns)

    def _quota(self, tenant: str, answer: TransactionAnswer) -> _Quota | Unreadable | None:
        """Return a tenant's own quota, or one made from the default; None if there is neither."""
        shards, default = self._shards(answer.found[0]), read_default(answer.found[1])
        changed: set[bytes] = set()
        # If a shard is unreadable, the sum is unknown, so nothing is granted.
        if not has_sound_budgets(shards.values()):
            return Unreadable("a shard can't be read")
        # Step 1: if the shards are the tenant's own, the default does not apply.
        if shards and not any(shard.default_revision for shard in shards.values()):
            default = None
        elif default and default.unreadable:
            self._membership.distrust(answer.found[1][0], default.unreadable)
            return Unreadable("the default can't be read")
        elif default:
            # Step 2: otherwise use the default. Shards that were made from an earlier default get new budgets.
            shards = all_shards(tenant, shards)
            if any(shard.default_revision != default.mod_revision for shard in shards.values()):
                spread(shards.values(), default.total_bytes, default.mod_revision)
                changed = set(shards)
        # Step 3: without a home shard, the tenant has no quota.
        home = shards.get(shard_key(tenant, self._slot))
        return _Quota(home, shards, changed, {}, default) if home else None

    def _shards(self, items: tuple[KeyValue, ...]) -> dict[bytes, Shard]:
        shards = read_shards(items)
        for item in items:
            if not shards[item.key].is_readable:
                self._membership.distrust(item, shards[item.key].unreadable)
        return shards

    def _is_mine(self, entry: QuotaEntry | None) -> bool:
        return entry is not None and entry.incarnation == self._membership.incarnation

    def _place(self, request: _BytesRequest, quota: _Quota, now_ns: int) -> None:
        """Write a lease's entry into the home shard, and move budgets of other shards there if necessary."""
        # Sum up the budgets and the used bytes of all shards.
        membership, demand, home = self._membership, request.demand, quota.home
        shards = quota.shards.values()
        total_bytes = sum(shard.budget_bytes for shard in shards)
        left_bytes = total_bytes - sum(shard.used_bytes for shard in shards)
        quota_text = f"tenant {demand.tenant!r} has a fleet quota of {size_text(total_bytes)}"
        request_text = f"{size_text(demand.size_bytes)} was requested"
        # The request exceeds the whole quota, so it need not wait.
        if demand.size_bytes > total_bytes:
            self._refuse_at_once(request, ClaimRefusal.TOO_LARGE, f"{quota_text}, and {request_text}", now_ns)
            return
        # The request waits for leases to end, or for entries of dead nodes to be removed. Check the nodes that have
        # entries.
        if demand.size_bytes > left_bytes or len(home.used) >= MAX_ENTRIES:
            request.refusal = (
                ClaimRefusal.TAKEN,
                f"{quota_text}: {size_text(max(0, left_bytes))} is left, and {request_text}",
            )
            if demand.size_bytes <= left_bytes:
                request.refusal = (
                    ClaimRefusal.BUSY,
                    f"tenant {demand.tenant!r} has {MAX_ENTRIES} leases on the nodes that share this part "
                    "of its quota, the maximum",
                )
            foreign = {entry.node_id for shard in shards for entry in shard.used.values()}
            # Nodes that the last attempt did not check come first, so that all are checked in turn.
            nodes = sorted(foreign - {membership.node_id}, key=lambda node: (node in request.nodes, node))[:MAX_LOOKS]
            request.next_ns = now_ns if nodes and not request.nodes else now_ns + membership.poll_ns
            request.nodes = tuple(nodes)
            self._remember(demand.tenant, request.nodes)
            return
        # The quota suffices. Move missing bytes to the home shard, from the shards with the most free bytes first. Of
        # each, move at least half of the free bytes, for the tenant's next leases.
        missing = demand.size_bytes - (home.budget_bytes - home.used_bytes)
        # If a shard uses more than its budget, the other shards' free bytes are not all available. So compare all
        # shards.
        is_overdrawn = any(shard.budget_bytes < shard.used_bytes for shard in shards)
        for other in sorted(shards, key=lambda shard: shard.free_bytes, reverse=True):
            if missing <= 0 or other is home:
                continue
            moved = min(other.free_bytes, max(missing, other.free_bytes // 2))
            other.budget_bytes -= moved
            home.budget_bytes += moved
            missing -= moved
            quota.changed.add(other.key)
        # Write the entry, and its key in the node's list, in one transaction.
        home.used[demand.lease_id] = QuotaEntry(membership.node_id, membership.incarnation, demand.size_bytes)
        quota.changed.add(home.key)
        held_record = held_entry_key(membership.node_id, demand.tenant, demand.lease_id)
        quota.writes[held_record] = Put(held_record, b"")
        self._write(request, quota, set(quota.shards) if is_overdrawn else quota.changed, now_ns)

    def _remember(self, tenant: str, nodes: tuple[str, ...]) -> None:
        # Move the tenant to the end. The tenant with the oldest request is removed first.
        self._read_nodes.pop(tenant, None)
        while len(self._read_nodes) >= MAX_TENANTS:
            del self._read_nodes[next(iter(self._read_nodes))]
        self._read_nodes[tenant] = nodes

    def _write(self, request: _BytesRequest, quota: _Quota, compared: set[bytes], now_ns: int) -> None:
        membership = self._membership
        # Compare every shard that is written, and the default. If one has changed since the read, nothing is written.
        compares = [ModRevisionIs(key, quota.shards[key].mod_revision) for key in sorted(compared)]
        if quota.default:
            compares.append(ModRevisionIs(QUOTA_DEFAULT, quota.default.mod_revision))
        writes = (*(quota.shards[key].put() for key in sorted(quota.changed)), *quota.writes.values())
        request.is_asking = True
        on_outcome = partial(self._written, request, membership.incarnation)
        membership.ask_as_member(now_ns, Transaction(tuple(compares), writes), on_outcome)

    def _written(self, request: _BytesRequest, incarnation: int, outcome: Outcome, sent_ns: int, now_ns: int) -> None:
        request.is_asking = False
        request.may_be_written |= not isinstance(outcome, TransactionAnswer)
        demand = request.demand
        if self._requests.get(demand.request) is not request:
            # The request was dropped and its entry removed. This attempt may have been executed later, so remove the
            # entry again.
            self.end(demand.tenant, demand.lease_id, now_ns)
        elif self._is_answer(outcome, request, now_ns):
            # If this node is still a member, another node has changed a shard. Try again at once. If it is not, no
            # attempt can succeed, and the next heartbeat shows that.
            request.next_ns = now_ns
            request.may_be_written |= outcome.succeeded
            if outcome.succeeded and incarnation == self._membership.incarnation:
                self._grant(request, now_ns)
            elif not self._membership.is_standing(incarnation, outcome):
                request.refusal, self._membership.is_suspect = ISOLATED_TROUBLE, True
                request.next_ns = now_ns + self._membership.poll_ns

    def _is_answer(self, outcome: Outcome, request: _BytesRequest, now_ns: int) -> TypeGuard[TransactionAnswer]:
        """Return whether the outcome is an answer. If not, note the reason and when to try again."""
        if isinstance(outcome, TransactionAnswer):
            return True
        request.next_ns = now_ns + self._membership.poll_ns
        if isinstance(outcome, TransactionRejected):
            request.refusal = (
                ClaimRefusal.REJECTED,
                f"the fleet's store refused; an operator must act: {outcome.reason}",
            )
        else:
            request.refusal = (
                ClaimRefusal.UNKNOWN,
                "the fleet's store did not answer: repeat the request with the same request id",
            )
        return False

    def _grant(self, request: _BytesRequest, now_ns: int) -> None:
        # If the membership has ended, the entry stays until a later attempt or `drop` finds it.
        if self._membership.is_member(now_ns):
            del self._requests[request.demand.request]
            self.live[request.demand.lease_id] = request.demand.tenant
            self._membership.effects.append(
                QuotaGiven(request.demand.request, request.demand.tenant, request.demand.lease_id)
            )
        else:
            request.refusal, request.next_ns = self._membership.trouble, now_ns + self._membership.retry_ns

    def _drop_dead(self, tenant: str, quota: _Quota, fence_reads: dict[str, FenceReads], now_ns: int) -> None:
        """Remove the entries of leases that have certainly ended."""
        membership = self._membership
        for shard in quota.shards.values():
            for lease_id, entry in list(shard.used.items()):
                if len(quota.writes) >= MAX_DROPS:
                    return
                # This node's own entry may be dropped if its membership has ended and no other daemon can have the
                # lease.
                if entry.node_id == membership.node_id:
                    is_known = lease_id in self._former
                    is_earlier = entry.incarnation != membership.incarnation
                    is_over = is_earlier and (is_known or membership.is_over(now_ns))
                # Another node's entry can be checked only if that node's record was read in the same transaction.
                elif entry.node_id in fence_reads:
                    is_over, _ = self._fences.poll(entry.node_id, entry.incarnation, fence_reads[entry.node_id], now_ns)
                else:
                    is_over = False
                if is_over:
                    del shard.used[lease_id]
                    quota.changed.add(shard.key)
                    held_record = held_entry_key(entry.node_id, tenant, lease_id)
                    quota.writes[held_record] = Delete(held_record)

    # --- giving back ---

    def _remove(self, tenant: str, lease_id: str, now_ns: int) -> None:
        """Rewrite the home shard without a lease's entry, even if the entry is absent, so that late attempts fail."""
        membership = self._membership
        key = shard_key(tenant, self._slot)
        held_record = Delete(held_entry_key(membership.node_id, tenant, lease_id))
        self._removing.add((tenant, lease_id))

        def on_read(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            # The write compares the revision that was read, so that no other entry is lost.
            if not isinstance(outcome, TransactionAnswer):
                on_written(outcome, sent_ns, now_ns)
                return
            # If the shard is absent, only the node's list entry must be deleted.
            transaction = Transaction((ModRevisionIs(key, 0),), (held_record,))
            if shard := self._shards(outcome.found[0]).get(key):
                shard.used.pop(lease_id, None)
                writes = (shard.put(), held_record) if shard.is_readable else (held_record,)
                transaction = Transaction((ModRevisionIs(key, shard.mod_revision),), writes)
            membership.ask(now_ns, transaction, on_written)

        def on_written(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            # Repeat until the removal succeeds, because the entry counts against the tenant.
            self._removing.discard((tenant, lease_id))
            if not (isinstance(outcome, TransactionAnswer) and outcome.succeeded):
                self._endings.setdefault((tenant, lease_id), now_ns + membership.retry_ns)

        membership.ask(now_ns, Transaction(reads=(Get(key),)), on_read)

    def _refuse_at_once(self, request: _BytesRequest, why: ClaimRefusal, text: str, now_ns: int) -> None:
        """Refuse a request without a wait, because only an operator can help."""
        self.drop(request.demand.request, now_ns)
        self._refuse(request.demand, (why, text))

    def _refuse(self, demand: QuotaWanted, refusal: tuple[ClaimRefusal, str]) -> None:
        self._membership.effects.append(QuotaRefused(demand.request, *refusal, RETRY_AFTER_MS))
