"""Claims of names. At most one node has a name at a time, and each claim has a higher epoch than earlier ones.

One transaction makes a claim, if the name is absent and the node is still a member. The epoch is the transaction's
revision plus the fleet's base of epochs. If the answer is lost, the node repeats the attempt with the same nonce. If
the first attempt was executed, the repetition fails and reads the claim. A lease is granted only after an answer has
shown the claim.

Each heartbeat reads this node's claims, and deletes those without a lease or a waiting request. A claim of which this
daemon has no record may belong to another daemon with the same node id. It is deleted when all leases of that daemon
have ended.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
    Unknown,
)
from gpulease.daemon.fleet.records.fleet_records import (
    ClaimRecord,
    held_key,
    held_name,
    is_quotas,
    name_key,
)
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimGiven,
    ClaimRefusal,
    ClaimRefused,
    ClaimWanted,
    Note,
    Noted,
)
from gpulease.daemon.fleet.rules.membership import ISOLATED_TROUBLE, Membership
from gpulease.daemon.fleet.rules.node_fences import NodeFences, reads_of
from gpulease.protocol.fast_dataclass import dataclass

MAX_REQUESTS: Final = 1_024
"""Maximum number of claims that may wait on one node, to limit the requests to etcd that tenants can cause."""

MAX_HOLDERS: Final = 1_024
"""Maximum number of names whose holders are remembered from one attempt to the next."""

MAX_RELEASES: Final = 256
"""Maximum number of deletions in progress that heartbeats begin. A foreign program may write thousands of claims under
this node's id."""

RETRY_AFTER_MS: Final = 1_000
"""Milliseconds after which a client should try again if a name is taken or the node is cut off."""


@dataclass(slots=True)
class _ClaimRequest:
    """A claim that the broker has requested.

    Attributes:
        nonce: The nonce, the same for all attempts.
        next_ns: When the next attempt is due.
        refusal: Why the last attempt failed; None if no attempt has been answered yet.
    """

    claim: ClaimWanted
    nonce: str
    next_ns: int
    is_asking: bool = False
    refusal: tuple[ClaimRefusal, str] | None = None


class NodeClaims:
    """This node's claims, and the requests for more."""

    def __init__(self, membership: Membership, fences: NodeFences) -> None:
        self.live: dict[str, int] = {}
        """The granted claims that have not ended: revisions by name."""
        self._membership = membership
        self._fences = fences
        self._requests: dict[int, _ClaimRequest] = {}
        self._releasing: set[tuple[str, int]] = set()
        self._holders: dict[str, str] = {}
        self._former: frozenset[tuple[str, int]] = frozenset()
        """Claims of this daemon's earlier memberships, as name and revision. Their leases have ended."""

    # --- requests of the broker ---

    def add_request(self, claim: ClaimWanted, now_ns: int) -> None:
        """Accept a request for a name. `advance` makes the first attempt."""
        if len(self._requests) >= MAX_REQUESTS:
            self._refuse(
                claim, ClaimRefusal.BUSY, f"{MAX_REQUESTS} claims wait at this node, the maximum: use another node"
            )
            return
        self._requests[claim.request] = _ClaimRequest(claim, self._membership.nonce(), now_ns)

    def drop(self, request: int) -> None:
        """Forget a request. If an attempt has claimed the name, or claims it later, a heartbeat deletes the claim."""
        self._requests.pop(request, None)

    def end(self, name: str, epoch: int, now_ns: int) -> None:
        """Delete the claim of a lease that has ended.

        If this member has no record of the claim, a heartbeat deletes it later.
        """
        claim = name, epoch - self._membership.epoch_base
        if claim in self.live.items():
            del self.live[name]
        elif claim not in self._former:
            return
        self._release(*claim, now_ns)

    def restore(self, epochs: Mapping[str, int]) -> None:
        """Restore the broker's claims of the membership that continues."""
        self.live = {name: epoch - self._membership.epoch_base for name, epoch in epochs.items()}

    def lose(self, *, forgets: bool) -> None:
        """Drop all claims. `forgets` says whether earlier claims may belong to another daemon or another store."""
        self._former = frozenset() if forgets else frozenset(self.live.items())
        self.live = {}

    # --- time ---

    def advance(self, now_ns: int) -> None:
        """Make attempts that are due, and refuse requests whose wait is over."""
        is_member = self._membership.is_member(now_ns)
        # When its wait is over, a request is refused with its last reason, but only after an attempt was answered.
        for request in list(self._requests.values()):
            if request.is_asking:
                continue
            is_over = now_ns >= request.claim.wait_until_ns
            if is_over and (request.refusal or not is_member):
                reason, text = request.refusal if request.refusal and is_member else self._membership.trouble
                del self._requests[request.claim.request]
                self._refuse(request.claim, reason, text)
            elif is_member and now_ns >= request.next_ns:
                self._attempt(request, now_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """Return when `advance` next has something to do; None if it only has to wait for events."""
        is_member = self._membership.is_member(now_ns)
        waiting = [request for request in self._requests.values() if not request.is_asking]
        deadlines = [max(request.claim.wait_until_ns, now_ns) for request in waiting]
        return min([*deadlines, *(request.next_ns for request in waiting if is_member)], default=None)

    # --- attempts ---

    def _attempt(self, request: _ClaimRequest, now_ns: int) -> None:
        membership, claim = self._membership, request.claim
        key = name_key(claim.name)
        ids = membership.node_id, membership.incarnation, claim.lease_id, claim.tenant
        record = ClaimRecord(*ids, request.nonce, membership.epoch_base)
        held_record = Put(held_key(membership.node_id, claim.name), request.nonce.encode())
        # If the last attempt found the name taken, read the holder's node in the same transaction.
        holder = self._holders.get(claim.name)
        holder_reads = reads_of(holder) if holder else ()
        transaction = Transaction(
            (CreateRevisionIs(key, 0),), (Put(key, record.encode()), held_record), (Get(key), *holder_reads)
        )
        request.is_asking = True
        on_outcome = partial(self._answered, request, membership.incarnation, holder)
        membership.ask_as_member(now_ns, transaction, on_outcome)

    def _answered(
        self, request: _ClaimRequest, incarnation: int, holder: str | None, outcome: Outcome, sent_ns: int, now_ns: int
    ) -> None:
        """Process the outcome of an attempt, which was made in `incarnation` and also read the node `holder`."""
        request.is_asking = False
        claim = request.claim
        is_wanted = self._requests.get(claim.request) is request
        # The claim may exist. Repeat the attempt with the same nonce, which then finds it.
        if isinstance(outcome, Unknown):
            request.next_ns = now_ns + self._membership.retry_ns
            request.refusal = (
                ClaimRefusal.UNKNOWN,
                "the fleet's store did not answer: repeat the request with the same request id",
            )
            return
        if isinstance(outcome, TransactionRejected):
            request.next_ns = now_ns + self._membership.poll_ns
            request.refusal = (
                ClaimRefusal.REJECTED,
                f"the fleet's store refused the claim; an operator must act: {outcome.reason}",
            )
            return
        # A failed attempt may have found the claim of an earlier attempt without an answer.
        revision = outcome.revision if outcome.succeeded else self._revision_of_mine(request, incarnation, outcome)
        if not revision:
            if is_wanted:
                self._taken(request, holder, outcome, now_ns)
        # The broker has dropped the request, so delete the claim.
        elif not is_wanted:
            self._release(claim.name, revision, now_ns)
        elif incarnation != self._membership.incarnation or not self._membership.is_member(now_ns):
            # This node is not a member now. The next attempt or a heartbeat will find the claim.
            request.refusal = ISOLATED_TROUBLE
            request.next_ns = now_ns + self._membership.retry_ns
        else:
            # The claim is in etcd and this node is a member, so the broker may admit the lease.
            del self._requests[claim.request]
            self.live[claim.name] = revision
            epoch = revision + self._membership.epoch_base
            self._membership.effects.append(ClaimGiven(claim.request, claim.name, epoch))

    def _revision_of_mine(self, request: _ClaimRequest, incarnation: int, answer: TransactionAnswer) -> int:
        """Return the revision at which an earlier attempt of the same request claimed the name; 0 if none did."""
        record = self._claim(answer.found[0])
        is_own = record is not None and (record.nonce, record.incarnation) == (request.nonce, incarnation)
        return answer.found[0][0].mod_revision if is_own else 0

    def _taken(self, request: _ClaimRequest, read_node: str | None, answer: TransactionAnswer, now_ns: int) -> None:
        """Wait for a name that is taken, and check the node that has it."""
        membership, name = self._membership, request.claim.name
        request.refusal = (
            ClaimRefusal.TAKEN,
            f"another lease has the name {name}: wait until it ends, or free it",
        )
        request.next_ns = now_ns + membership.poll_ns
        if not answer.found[0]:
            # The name is free, so the comparison of this node's membership failed. The next heartbeat will show why.
            request.refusal = ISOLATED_TROUBLE
            membership.is_suspect = True
            return
        revision = answer.found[0][0].mod_revision
        record = self._claim(answer.found[0])
        if record is None:
            request.refusal = ClaimRefusal.TAKEN, f"the claim of {name} can't be read; an operator must delete it"
        # The claim is this node's, from an earlier incarnation or from a request that has ended.
        elif record.node_id == membership.node_id:
            self._holders.pop(name, None)
            is_earlier = record.incarnation != membership.incarnation
            if is_earlier or self._is_orphan(name, revision, record.nonce):
                self._release_if_over(name, revision, record.nonce, now_ns)
        # The attempt did not read the holder's record. Repeat the attempt at once with this read.
        elif record.node_id != read_node:
            self._remember_holder(name, record.node_id)
            request.next_ns = now_ns
        else:
            # The attempt read the holder's record. If the holder was silent for too long, fence it and delete its
            # claim.
            holder_state = answer.found[1], answer.found[2]
            is_free, request.next_ns = self._fences.poll(record.node_id, record.incarnation, holder_state, now_ns)
            if is_free:
                request.next_ns = now_ns + membership.poll_ns
                transaction = self._fences.delete_claim(name, record.node_id, revision)
                membership.ask(now_ns, transaction, partial(self._freed, name))

    def _remember_holder(self, name: str, node_id: str) -> None:
        while len(self._holders) >= MAX_HOLDERS:
            del self._holders[next(iter(self._holders))]
        self._holders[name] = node_id

    # --- the end of claims ---

    def sweep(self, items: tuple[KeyValue, ...], revision: int, now_ns: int) -> str | None:
        """Compare this node's claims, which a heartbeat read at this revision, with its leases.

        Claims without a lease or a waiting request are deleted. Returns the name of a lease whose claim is gone; None
        if there is none.
        """
        claimed = {}
        for item in items:
            if is_quotas(item.key, self._membership.node_id):
                # QuotaShards handles entries of quotas.
                continue
            name, claim_revision = held_name(item.key, self._membership.node_id), item.mod_revision
            if isinstance(name, Unreadable):
                self._membership.distrust(item, name.reason)
                continue
            claimed[name] = claim_revision
            nonce = item.value.decode(errors="replace")
            # Leave the rest to a later heartbeat.
            if len(self._releasing) >= MAX_RELEASES or not self._is_orphan(name, claim_revision, nonce):
                continue
            if self._release_if_over(name, claim_revision, nonce, now_ns):
                self._membership.effects.append(Noted(Note.ORPHAN_DELETED, name=name))
        # A claim with a higher revision was made after the heartbeat, so it may be missing.
        lost = (
            name
            for name, revision_of_claim in self.live.items()
            if revision_of_claim <= revision and claimed.get(name) != revision_of_claim
        )
        return next(lost, None)

    def _is_orphan(self, name: str, revision: int, nonce: str) -> bool:
        """Return whether a claim of this node has no lease, and no request whose next attempt will find it."""
        if self.live.get(name) == revision or (name, revision) in self._releasing:
            return False
        return all(request.nonce != nonce for request in self._requests.values())

    def _release_if_over(self, name: str, revision: int, nonce: str, now_ns: int) -> bool:
        """Delete a claim, unless another daemon with this id may serve the name. Returns whether it is deleted."""
        # The claim is this daemon's if the daemon has a record of it or made its nonce. Otherwise, all leases of other
        # daemons with this id must have ended.
        is_known = (name, revision) in self._former or self._membership.is_own_nonce(nonce)
        is_over = is_known or self._membership.is_over(now_ns)
        if is_over:
            self._release(name, revision, now_ns)
        return is_over

    def _release(self, name: str, revision: int, now_ns: int) -> None:
        """Delete a claim. If the answer is lost, the next heartbeat deletes it again."""
        if (name, revision) in self._releasing:
            return
        self._releasing.add((name, revision))
        held_record = held_key(self._membership.node_id, name)
        transaction = Transaction(
            (ModRevisionIs(name_key(name), revision),), (Delete(name_key(name)), Delete(held_record))
        )

        def on_outcome(outcome: Outcome, sent_ns: int, now_ns: int) -> None:
            self._releasing.discard((name, revision))
            if isinstance(outcome, TransactionAnswer) and not outcome.succeeded:
                # The claim is already deleted, but its entry in this node's list remains.
                leftover = Transaction((ModRevisionIs(held_record, revision),), (Delete(held_record),))
                self._membership.ask(now_ns, leftover, lambda outcome, sent_ns, now_ns: None)
            self._freed(name, outcome, sent_ns, now_ns)

        self._membership.ask(now_ns, transaction, on_outcome)

    def _freed(self, name: str, outcome: Outcome, sent_ns: int, now_ns: int) -> None:
        """Let requests for a name try again at once, because its claim was deleted."""
        if isinstance(outcome, TransactionAnswer):
            for request in self._requests.values():
                if request.claim.name == name:
                    request.next_ns = min(request.next_ns, now_ns)

    def _claim(self, items: tuple[KeyValue, ...]) -> ClaimRecord | None:
        """Read a claim; None if absent or unreadable."""
        return self._membership.read(ClaimRecord.read, items[0]) if items else None

    def _refuse(self, claim: ClaimWanted, why: ClaimRefusal, text: str) -> None:
        self._membership.effects.append(ClaimRefused(claim.request, why, text, RETRY_AFTER_MS))
