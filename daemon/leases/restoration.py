"""Restoration: a new table takes over the state of an earlier one, before anything else happens.

1. An ACTIVE lease with a live worker continues with its deadline and generation. If its time is over, it expires.
2. A lease that has lost its worker, or that was DRAINING, ends as if that happened now. It keeps its earlier cause.
3. A FENCED slice stays fenced. If its card is missing, no bytes are held, and the fence waits in the journal.
4. An unknown worker is killed, and its bytes are held until they are proved free. The same applies to a worker that an
   ended lease left (the lease does not end a second time), and to an additional worker of a lease (the lease continues
   without it).
5. A drained node stays drained, with the same deadline. The first `DrainTimerFired` ends the remaining leases; the
   broker sends it when everything is restored.
6. A submit continues if its lease does, and its time starts again from zero. Otherwise it ends with its lease. A submit
   that its lease can't have is killed like an unknown worker.
7. A region continues if its lease does: its word and timer are set again. A region that had ended is ended again, as is
   a region whose grant was not reported. If its lease does not continue, a region ends with it (`Regions.on_restored`).
8. A claimed lease keeps the membership deadline on its page. No claim is granted until that deadline moves.
9. A parkable lease is charged in full until its worker has shown where its session is (`Parking.on_restored`), or, if
   the lease ends, until its worker's bytes are proved free: that may be a worker that the session has left.
10. Restored leases may exceed the card's capacity, or bounds that have been lowered since. Then no new lease is
   granted.
"""

from gpulease.daemon.leases import events
from gpulease.daemon.leases.epochs import HighestEpochs
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    KillWorker,
    LeaseEnded,
    RefuseSubmit,
    RefuseWork,
    SetDeadline,
    TimerFired,
    TimerKind,
)
from gpulease.daemon.leases.model import Cause, Lease, LeaseState, LeaseTerms, Trigger, WorkerKind, kind_of
from gpulease.daemon.leases.persisted import RecoveredState, revive
from gpulease.daemon.leases.table_state import LeaseStore, RevokedIds
from gpulease.daemon.leases.teardown import Teardown
from gpulease.daemon.leases.warm_pool import WarmPool
from gpulease.protocol.opcodes import Exclusivity


class Restoration:
    def __init__(self, store: LeaseStore, teardown: Teardown, pool: WarmPool) -> None:
        self._store = store
        self._teardown = teardown
        self._pool = pool

    def recover(self, recovered: RecoveredState) -> None:
        """Record ended leases, hold fenced bytes, and restore drains."""
        self._store.revoked, self._store.cleared = RevokedIds(recovered.revoked), RevokedIds(recovered.cleared)
        self._store.drain_ns = recovered.drain_ns
        # The drain of a card that this host no longer has waits in the journal until the card returns.
        for uuid, drain_ns in recovered.card_drains:
            if (account := self._store.account_by_uuid.get(uuid)) is not None:
                account.drain_ns = drain_ns
        self._store.epochs = HighestEpochs(recovered.epochs)
        for tombstone in recovered.tombstones:
            self._store.remember(tombstone)
        # A fence on a card that this host no longer has holds nothing here. The journal keeps it until the card
        # returns.
        for row in recovered.fenced_warm:
            if row.card_uuid in self._store.account_by_uuid:
                self._pool.restore_fence(row)

    def on_lease_restored(self, event: events.LeaseRestored, now_ns: int, effects: list[Effect]) -> None:
        lease = revive(
            event.kept,
            self._store.limits.max_story_entries,
            has_session=event.has_session,
            membership_deadline=event.membership_deadline,
        )
        if lease.lease_id in self._store.live:
            return
        # The lease's card is gone, so there is nothing to hold or to prove.
        if lease.card_uuid not in self._store.account_by_uuid:
            self._end_without_card(lease, event, now_ns, effects)
            return
        lease.is_worker_gone = not event.has_worker
        self._store.restore(lease)
        # A lease that was ending continues its teardown. An active lease that has lost its worker ends now.
        if lease.state is LeaseState.DRAINING:
            self._teardown.resume(lease, now_ns, effects)
        elif lease.state is LeaseState.ACTIVE and event.kept.is_cold:
            # The session's image was lost with the earlier daemon. A worker that was to adopt it is killed.
            reason = "its session was parked without a worker when the daemon ended"
            self._teardown.begin(lease, Cause.WORKER_DIED, reason, now_ns, effects)
        elif lease.state is LeaseState.ACTIVE and lease.is_worker_gone:
            self._teardown.on_active_worker_lost(lease, "it was gone when the daemon was restarted", now_ns, effects)
        elif lease.state is LeaseState.ACTIVE:
            self._continue(lease, event.park_number, now_ns, effects)

    def on_worker_found(self, event: events.WorkerFound, now_ns: int, effects: list[Effect]) -> None:
        """Kill a worker of an earlier daemon that belongs to no lease, and hold its bytes until they are proved free.

        Such a worker was started in advance, or its lease's grant was never reported, or its lease has ended but the
        daemon was killed before its zygote could forget the worker.
        """
        kind = kind_of(event.worker_id)
        # A submit's worker is reported as `SubmitFound`, or under a random id.
        if kind is WorkerKind.SUBMIT or event.worker_id in self._store.live or event.worker_id in self._store.warm:
            return
        if event.card_uuid not in self._store.account_by_uuid:
            effects += [RefuseWork(event.worker_id, Cause.ABANDONED), KillWorker(event.worker_id)]
        elif kind is WorkerKind.WARM:
            self._pool.drop_earlier_context(event.worker_id, event.card_uuid, event.charge_bytes, now_ns, effects)
        elif event.beside_lease_id or event.worker_id in self._store.ended:
            self._pool.drop_leftover_worker(event, now_ns, effects)
        # This is the worker of a lease whose grant was not reported, so no client has its id. A lease without a tenant
        # holds its bytes through the normal teardown.
        else:
            lease = Lease(
                lease_id=event.worker_id,
                tenant="",
                card_uuid=event.card_uuid,
                terms=LeaseTerms(event.charge_bytes, ttl_ms=0, exclusivity=Exclusivity.SHARED, orphan_ms=0),
                charge_bytes=event.charge_bytes,
                request=0,
                created_ns=now_ns,
                spawn_due_ns=0,
                max_story_entries=self._store.limits.max_story_entries,
                state=LeaseState.DRAINING,
                cause=Cause.REVOKED if event.worker_id in self._store.revoked else Cause.ABANDONED,
                reason="its grant was not reported before the daemon ended",
                is_restored=True,
            )
            self._store.restore(lease)
            self._teardown.resume(lease, now_ns, effects)

    def on_submit_found(self, event: events.SubmitFound, now_ns: int, effects: list[Effect]) -> None:
        """Add a submit of a restored lease. If the lease continues, so does the submit; otherwise it is killed.

        If the lease can't have a submit, its bytes are held until they are proved free.
        """
        if self._teardown.submits.restore(event, now_ns, effects):
            return
        account = self._store.account_by_uuid.get(event.card_uuid)
        if account is None:
            effects += [RefuseSubmit(event.submit_id, None), KillWorker(event.submit_id)]
            return
        charge_bytes = event.size_bytes + account.card.overhead_bytes
        found = events.WorkerFound(event.submit_id, event.card_uuid, charge_bytes, event.lease_id)
        self._pool.drop_leftover_worker(found, now_ns, effects)

    def _continue(self, lease: Lease, park_number: int, now_ns: int, effects: list[Effect]) -> None:
        # Expire it first, because its time continued while no broker served it.
        self._teardown.expire_if_due(lease, now_ns, effects)
        if lease.state is LeaseState.ACTIVE and lease.deadline_ns is not None:
            # Write the page and arm the timers again. The earlier broker's timers died with it.
            effects.append(SetDeadline(lease.lease_id, lease.generation, lease.deadline_ns))
            effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.EXPIRY), lease.deadline_ns))
            self._teardown.parking.on_restored(lease, park_number, now_ns, effects)
            if lease.membership_deadline is not None:
                due_ns = lease.membership_deadline.at_ns
                effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.MEMBERSHIP), due_ns))

    def _end_without_card(self, lease: Lease, event: events.LeaseRestored, now_ns: int, effects: list[Effect]) -> None:
        if lease.state is LeaseState.FENCED:
            return
        # No card means no memory to prove free, so the lease passes through its states at once.
        if lease.state is LeaseState.ACTIVE:
            lease.move(Cause.WORKER_DIED, now_ns)
            lease.cause, lease.reason = Cause.WORKER_DIED, "its card is no longer present"
        cause = lease.cause or Cause.WORKER_DIED
        if event.has_worker:
            effects += [RefuseWork(lease.lease_id, cause), KillWorker(lease.lease_id)]
        lease.move(Trigger.RECLAIM_PROVED, now_ns)
        lease.ended_ns = now_ns
        self._store.remember(lease.snapshot())
        effects.append(LeaseEnded(lease.snapshot(), cause, tuple(lease.history)))
