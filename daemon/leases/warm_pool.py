"""The pool of warm contexts: how many there are, which lease gets one, and when they are dropped.

1. Each card has as many contexts as the operator's setting requires. They are made one at a time, never while an
   acquire of that card is in progress, and not until some time after a lease has taken one over. After each loss, the
   pause before the next context is longer.
2. A context is charged to its card like the context of a lease, so a lease that takes it over adds only its slice.
3. Leases have priority: admission counts the pool's bytes as free, and contexts that occupy a placed lease's room are
   killed. The lease starts only once their bytes are proved free.
4. A card that one lease has to itself keeps no contexts, and neither does a drained node. If a lease's bytes are
   fenced, the pool may still use the rest of the card. Each fenced context reduces the pool by one until an operator
   clears the fence, and so does a dropped one until its bytes are proved free. So if the driver loses every context, no
   more are fenced than the setting requires. A fenced context that served a tenant does not count, because that tenant
   may have caused the fence.
5. A lease that loses its warm context before it is ready gets a new one, as if there were no pool.
6. Submits take over contexts like leases, but only those that served no tenant. Their lease already holds the bytes of
   a second context, so the pool's bytes for it become free.
7. A scrubbed context (`model.Recycling`) waits only for its tenant, in addition to the wanted number, and is dropped
   for leases as well. Its loss does not delay other contexts, because its tenant may have caused it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from gpulease.daemon.leases import events
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.events import (
    ArmTimer,
    CapacityChanged,
    Effect,
    KillWorker,
    PoolTimerFired,
    ProveReclaimed,
    RecycleWorker,
    RefuseWork,
    RenameWorker,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WarmEnded,
    WarmUp,
)
from gpulease.daemon.leases.model import (
    FIRST_LEFTOVER_ID,
    FIRST_WARM_ID,
    YIELDING,
    Cause,
    Lease,
    LeaseState,
    Submit,
    WarmContext,
    WarmState,
)
from gpulease.daemon.leases.persisted import WarmRow
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.teardown import Teardown
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

REFILL_PAUSE_MS: Final = 100
"""Pause after a lease takes over a context before the next one is made. Making one slows the driver down for all
tenants, just when the lease's tenant attaches."""

FIRST_BACK_OFF_S: Final = 1
"""Pause after the loss of a context before the next one is made. Stops the daemon from trying in a loop on a card that
can't make contexts."""

MAX_BACK_OFF_S: Final = 64
"""Longest pause after many losses in a row, each of which doubles it."""


@dataclass(slots=True)
class Refill:
    """The earliest time for a card's next context.

    Attributes:
        next_ns: Earliest monotonic time for it.
        losses: Losses since a context was last ready.
    """

    next_ns: int = 0
    losses: int = 0

    def was_taken(self, now_ns: int) -> None:
        """Postpone the next context after a lease or a submit took one over."""
        self._postpone(now_ns + REFILL_PAUSE_MS * NS_PER_MS)

    def was_made(self) -> None:
        """Reset the count of losses, because a context is ready."""
        self.losses = 0

    def was_lost(self, now_ns: int) -> None:
        """Postpone the next context after one died, hung, or was not ready in time."""
        pause_s = back_off_s(self.losses, FIRST_BACK_OFF_S, MAX_BACK_OFF_S)
        self.losses += 1
        self._postpone(now_ns + int(pause_s * NS_PER_S))

    def _postpone(self, until_ns: int) -> None:
        self.next_ns = max(self.next_ns, until_ns)


RECORD_LIMIT_S: Final = 5
"""Longest time for which the kill of a worker that a session has left waits for its record (`Journal.once_decided`), in
seconds. A disk that is slow must not fence the worker's bytes."""

_GENERATION: Final = 0
"""Generation of a warm context's timers: contexts have no generations."""

_TIMER_BY_STATE: Final = {
    WarmState.WARMING: TimerKind.SPAWN,
    WarmState.READY: TimerKind.IDLE,
    WarmState.DROPPING: TimerKind.RECLAIM,
}


Handler = Callable[[WarmContext, Any, int, list[Effect]], None]


class WarmPool:
    """Manages the pool. Each method appends what to execute to `effects`."""

    def __init__(self, store: LeaseStore, teardown: Teardown) -> None:
        self._store = store
        self._teardown = teardown
        self._reclaim_timeout_ns = store.limits.reclaim_timeout_s * NS_PER_S
        self._spawn_timeout_ns = store.limits.spawn_timeout_s * NS_PER_S
        # Ids are counted upwards and never used twice, in two ranges: those of the pool's own contexts, and those of
        # workers that leases left.
        self._last_id = FIRST_WARM_ID - 1
        self._last_leftover_id = FIRST_LEFTOVER_ID - 1
        self._refills = {account.card.uuid: Refill() for account in store.accounts}
        self._timer_ns: int | None = None
        self._is_begun = False
        teardown.submits.use_pool(self)
        teardown.parking.use_pool(self)
        self.handlers: Mapping[type, Handler] = {
            events.WorkerReady: self._on_ready,
            events.WorkerFailed: self._on_lost,
            events.SessionCondemned: self._on_lost,
            events.WorkerExited: self._on_exited,
            events.TimerFired: self._on_timer,
            events.ReclaimProved: self._on_proved,
            events.ReclaimFailed: self._on_not_proved,
        }

    # --- leases ---

    def place(self, lease: Lease, now_ns: int, effects: list[Effect]) -> None:
        """Start a lease that was just added to the store once it has room, on a warm context if there is one."""
        account = self._account(lease.card_uuid)
        # Step 1: take over a context. Its bytes are charged already, so the lease waits only for the rest.
        context = _choose(account.warm.values(), lease.tenant)
        if context is not None:
            self._store.remove_warm(context)
            account.await_bytes(lease, lease.charge_bytes - context.charge_bytes)
            lease.warm_id, lease.served = context.warm_id, context.leases
            effects.append(RenameWorker(context.warm_id, lease.lease_id))
            if context.tenant is None:
                self._refills[lease.card_uuid].was_taken(now_ns)
        # Step 2: kill contexts that occupy the lease's room. Their bytes become free later, with their proof.
        self._make_room(account, now_ns, effects)
        # Step 3: start every lease that has room now; the order of their arrival is kept.
        self._start_leases(account, now_ns, effects)
        # This lease must wait for room. Bound the wait, in case the contexts' bytes are never proved free.
        if lease.awaited_bytes:
            effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.SPAWN), lease.spawn_due_ns))

    def replace_worker(self, lease: Lease, reason: str, now_ns: int, effects: list[Effect], *, is_gone: bool) -> None:
        """Drop a pending lease's dead or hung warm context, and start the lease on a new one."""
        account = self._account(lease.card_uuid)
        overhead_bytes = account.card.overhead_bytes
        # Give the context back to the pool, which then proves its bytes free; the lease waits for room again.
        context = WarmContext(lease.warm_id, lease.card_uuid, overhead_bytes, 0, is_worker_gone=is_gone)
        if lease.served:
            context.tenant, context.leases = lease.tenant, lease.served
        effects.append(RenameWorker(lease.lease_id, lease.warm_id))
        lease.warm_id = 0
        account.await_bytes(lease, lease.charge_bytes)
        self._store.add_warm(context)
        self._drop_lost(context, reason, now_ns, effects)
        self._start_leases(account, now_ns, effects)

    def on_guest_attached(self, event: events.GuestAttached, now_ns: int, effects: list[Effect]) -> None:
        """Exclude the lease's context from recycling, because a client other than its tenant used it."""
        lease = self._store.live.get(event.lease_id)
        if lease is not None:
            lease.is_in_doubt = True
            self._teardown.give_up_scrub(lease, now_ns, effects)

    def on_worker_scrubbed(self, event: events.WorkerScrubbed, now_ns: int, effects: list[Effect]) -> None:
        """Recycle a lease's worker if the scrub is proved and nothing else is in doubt; otherwise kill it."""
        lease, recycling = self._store.live.get(event.lease_id), self._store.recycling
        # Ignore a late or repeated event: the worker is already dead, or was not to be scrubbed.
        if lease is None or recycling is None or not lease.is_scrubbing or lease.is_worker_gone:
            return
        # Check again: the scrub took time, in which the tenant, the card or the node may have changed.
        if event.doubt or not self._store.may_recycle(lease):
            self._teardown.give_up_scrub(lease, now_ns, effects)
            return
        # Exchange the lease for a context in the pool. The worker is renamed before the lease's bytes are released, so
        # that no event about it reaches the lease any more.
        self._last_id += 1
        account = self._account(lease.card_uuid)
        for other in account.contexts_to_drop(lease.tenant, recycling.max_idle) or ():
            self._drop(other, "it makes room for a context of another tenant, who has fewer", now_ns, effects)
        due_ns = now_ns + recycling.idle_s * NS_PER_S
        context = WarmContext(self._last_id, lease.card_uuid, account.card.overhead_bytes, due_ns, WarmState.READY)
        context.tenant, context.leases = lease.tenant, lease.served + 1
        effects.append(RecycleWorker(lease.lease_id, context.warm_id))
        self._teardown.release_recycled(lease, now_ns, effects)
        self._store.add_warm(context)
        effects.append(ArmTimer(TimerFired(context.warm_id, _GENERATION, TimerKind.IDLE), due_ns))

    def drop_renamed(self, now_ns: int, effects: list[Effect]) -> None:
        """Drop contexts that wait for a tenant if the tenant's name may now belong to another person."""
        for account in self._store.accounts:
            for context in account.yielding():
                if context.tenant in self._store.renamed:
                    self._drop(context, "its tenant's name may now belong to somebody else", now_ns, effects)

    # --- submits ---

    def has_ready(self, card_uuid: str) -> bool:
        """Return whether a submit on that card would get a context."""
        return _choose(self._account(card_uuid).warm.values()) is not None

    def give(self, submit: Submit, now_ns: int, effects: list[Effect]) -> bool:
        """Give a starting submit a context, which it never returns. Returns False if none is ready."""
        account = self._account(submit.card_uuid)
        context = _choose(account.warm.values())
        if context is None:
            return False
        self._store.remove_warm(context)
        effects.append(RenameWorker(context.warm_id, submit.submit_id))
        self._refills[submit.card_uuid].was_taken(now_ns)
        return True

    def on_submit_lost(self, card_uuid: str, now_ns: int) -> None:
        """Postpone the next context after a submit lost one before the submit was ready."""
        self._refills[card_uuid].was_lost(now_ns)

    # --- sessions that leave their workers ---

    def drop_behind(
        self, lease: Lease, charge_bytes: int, now_ns: int, effects: list[Effect], *, is_gone: bool = False
    ) -> None:
        """Drop the worker of a lease that continues without it.

        The worker holds `charge_bytes` until they are proved free.

        `is_gone`: Whether its process was reaped.
        """
        self._last_leftover_id += 1
        context = self._enter_restored(self._last_leftover_id, lease.card_uuid, charge_bytes, "", lease.lease_id)
        context.is_worker_gone = is_gone
        effects.append(RenameWorker(lease.lease_id, context.warm_id))
        reason = f"the session of lease {lease.lease_id:032x} has left it"
        self._drop(context, reason, now_ns, effects, after_record=True)

    def give_to(self, lease: Lease, now_ns: int, effects: list[Effect]) -> bool:
        """Give a lease without a worker a context of its card that served no tenant; return whether one was ready."""
        account = self._account(lease.card_uuid)
        context = _choose(account.warm.values())
        if context is not None:
            self._store.remove_warm(context)
            effects.append(RenameWorker(context.warm_id, lease.lease_id))
            self._refills[lease.card_uuid].was_taken(now_ns)
        return context is not None

    def hold(self, lease: Lease, charge_bytes: int, effects: list[Effect]) -> int:
        """Set aside the worker of a lease; `charge_bytes` are the bytes that it holds. Returns its id as a context.

        Afterwards the lease has no worker, until `take_held` returns this one. `drop_held` drops it instead.
        """
        self._last_leftover_id += 1
        context = self._enter_restored(self._last_leftover_id, lease.card_uuid, charge_bytes, "", lease.lease_id)
        context.state = WarmState.HELD
        # Unlike a dropped context's bytes, these are not released soon, so no acquire may wait for them.
        self._account(lease.card_uuid).stuck_bytes += charge_bytes
        effects.append(RenameWorker(lease.lease_id, context.warm_id))
        return context.warm_id

    def take_held(self, lease: Lease, warm_id: int, effects: list[Effect]) -> tuple[str, int] | None:
        """Give the worker that was set aside back to its lease.

        Returns its card's UUID and the bytes that it holds there; None if it has ended.
        """
        context = self._store.warm.get(warm_id)
        if context is None or context.state is not WarmState.HELD:
            return None
        self._account(context.card_uuid).stuck_bytes -= context.charge_bytes
        self._store.remove_warm(context)
        effects.append(RenameWorker(warm_id, lease.lease_id))
        return context.card_uuid, context.charge_bytes

    def drop_held(self, warm_id: int, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Drop a worker that was set aside, unless it has ended."""
        context = self._store.warm.get(warm_id)
        if context is not None and context.state is WarmState.HELD:
            self._account(context.card_uuid).stuck_bytes -= context.charge_bytes
            self._store.has_freed_room = True
            self._drop(context, reason, now_ns, effects)

    # --- the whole pool ---

    def update(self, now_ns: int, effects: list[Effect]) -> None:
        """Start leases that have room now, and drop and make contexts. Called after every event."""
        # This runs after every event, so a card with nothing to do must cost next to nothing.
        for account in self._store.accounts:
            if account.awaiting:
                # A returning session also waits for room here, although `place` was not called for it.
                if any(lease.state is LeaseState.ACTIVE for lease in account.awaiting.values()):
                    self._make_room(account, now_ns, effects)
                self._start_leases(account, now_ns, effects)
            # A drain, a shutdown or an exclusive lease empties the card of contexts.
            if account.warm and not self._store.may_keep_warm(account):
                for context in account.yielding():
                    self._drop(context, "its card should have no warm contexts", now_ns, effects)
            elif account.warm_wanted and self._is_begun:
                self._refill(account, now_ns, effects)

    def on_pool_timer(self) -> None:
        """Allow contexts to be made; `update` makes them. Also called once an earlier table's state is restored."""
        self._is_begun = True
        self._timer_ns = None

    def clear_fences(self, card_uuids: Iterable[str]) -> tuple[int, ...]:
        """Release contexts with fenced bytes, because an operator vouches for them; return their ids."""
        uuids = set(card_uuids)
        # The bytes are grantable again because a person vouches for them, not because they were proved free.
        fenced = [context for context in self._store.warm.values() if context.state is WarmState.FENCED]
        cleared = [context for context in fenced if context.card_uuid in uuids]
        for context in cleared:
            account = self._account(context.card_uuid)
            account.stuck_bytes -= context.charge_bytes
            account.fenced_bytes -= context.charge_bytes
            self._store.remove_warm(context)
            self._store.has_freed_room = True
        return tuple(context.warm_id for context in cleared)

    # --- memory of others ---

    def on_card_polled(self, event: events.CardPolled, now_ns: int, effects: list[Effect]) -> None:
        """Book the memory of the card that others hold, and change the card's capacity by it."""
        account = self._account(event.card_uuid)
        # The capacity changes only if the booked bytes do; most polls change nothing.
        before_bytes, was_known = account.others.booked_bytes, account.others.is_known
        if account.others.poll(event.unowned_bytes, event.outside_bytes, event.polled_ns):
            self._change_capacity(account, before_bytes, now_ns, effects)
        elif not was_known:
            # From the first poll on, the card can be granted.
            self._store.has_freed_room = True

    def is_shown_free(self, event: events.WorkerUnlisted, now_ns: int, effects: list[Effect]) -> bool:
        """Return whether a reaped worker's bytes are proved free, after booking the bytes that others hold."""
        others = self._account(event.card_uuid).others
        before_bytes = others.booked_bytes
        is_free = others.is_shown_free(event.unowned_bytes, event.least_bytes, event.since_ns, event.polled_ns)
        if others.booked_bytes != before_bytes:
            self._change_capacity(self._account(event.card_uuid), before_bytes, now_ns, effects)
        return is_free

    def _change_capacity(self, account: CardAccount, before_bytes: int, now_ns: int, effects: list[Effect]) -> None:
        is_less = account.others.booked_bytes > before_bytes
        effects.append(CapacityChanged(account.snapshot(), is_less))
        # A capacity that grew can serve waiters, and one that shrank can free the bytes of leases that are refused.
        self._store.has_freed_room = True
        self._fit(account, now_ns, effects)

    # --- contexts of an earlier daemon ---

    def restore_fence(self, row: WarmRow) -> None:
        """Hold the bytes of an earlier daemon's context, which could not be proved free."""
        context = self._enter_restored(row.warm_id, row.card_uuid, row.charge_bytes, row.reason)
        context.state = WarmState.FENCED
        account = self._account(row.card_uuid)
        account.stuck_bytes += row.charge_bytes
        account.fenced_bytes += row.charge_bytes

    def drop_earlier_context(
        self, warm_id: int, card_uuid: str, charge_bytes: int, now_ns: int, effects: list[Effect]
    ) -> None:
        """Drop a context that an earlier daemon made."""
        context = self._enter_restored(warm_id, card_uuid, charge_bytes, "")
        effects.append(RefuseWork(warm_id, Cause.ABANDONED))
        self._drop(context, "it was created by the previous daemon", now_ns, effects)

    def drop_leftover_worker(self, event: events.WorkerFound, now_ns: int, effects: list[Effect]) -> None:
        """Drop a worker that an ended lease left, or an extra one, holding its bytes until they are proved free.

        The lease's own bytes were proved free before, or an operator cleared its fence. The bytes are held under a new
        id.
        """
        self._last_leftover_id += 1
        context = self._enter_restored(self._last_leftover_id, event.card_uuid, event.charge_bytes, "")
        effects.append(RenameWorker(event.worker_id, context.warm_id))
        effects.append(RefuseWork(context.warm_id, Cause.ABANDONED))
        self._drop(context, f"lease {event.beside_lease_id or event.worker_id:032x} has left it", now_ns, effects)

    def _enter_restored(
        self, warm_id: int, card_uuid: str, charge_bytes: int, reason: str, left_by: int = 0
    ) -> WarmContext:
        # The worker has this id in the zygote as well, so no other worker may get it.
        if warm_id < FIRST_LEFTOVER_ID:
            self._last_id = max(self._last_id, warm_id)
        else:
            self._last_leftover_id = max(self._last_leftover_id, warm_id)
        context = WarmContext(
            warm_id, card_uuid, charge_bytes, 0, WarmState.DROPPING, reason=reason, is_restored=True, left_by=left_by
        )
        self._store.add_warm(context)
        return context

    # --- room ---

    def _make_room(self, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        """Kill contexts that occupy placed leases' room: first those being made, then the newest."""
        in_the_way = sorted(
            account.yielding(), key=lambda context: (context.state is WarmState.READY, -context.warm_id)
        )
        for context in in_the_way:
            # Stop as soon as the promised bytes fit: every context that can stay saves a later lease half a second.
            kept_bytes = account.stuck_bytes + account.yielding_bytes
            if account.promised_bytes + kept_bytes <= account.capacity_bytes:
                return
            self._drop(context, "a lease needs its room", now_ns, effects)

    def _start_leases(self, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        """Start leases that wait for room, in the order of their arrival."""
        # A session that can't return to a new worker waits again, for fewer bytes, to return to its former one.
        while account.awaiting:
            lease = next(iter(account.awaiting.values()))
            # Stop at the first that lacks room. A smaller lease after it must not take the bytes it waits for.
            if account.used_bytes + lease.awaited_bytes > account.capacity_bytes:
                return
            # From now on the bytes count as used, and the time limit of the start runs.
            account.await_bytes(lease, 0)
            if lease.state is LeaseState.ACTIVE:
                # The lease's worker is running: the session was parked, and returns.
                self._teardown.parking.start_return(lease, now_ns, effects)
                continue
            wait_s = self._store.limits.adopt_timeout_s if lease.warm_id else self._store.limits.spawn_timeout_s
            lease.spawn_due_ns = now_ns + wait_s * NS_PER_S
            effects.append(SpawnWorker(lease.lease_id, lease.card_uuid, lease.terms))
            effects.append(ArmTimer(TimerFired(lease.lease_id, lease.generation, TimerKind.SPAWN), lease.spawn_due_ns))

    # --- refilling ---

    def _refill(self, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        # Make one more only if the card is not busy with an acquire or another context, too few contexts exist, there
        # is room beyond all promised bytes, and the card may have contexts at all.
        if account.pending_leases:
            return
        shared = [context for context in account.yielding() if context.tenant is None]
        if len(shared) + account.leaving >= account.warm_wanted or any(
            context.state is WarmState.WARMING for context in shared
        ):
            return
        needed_bytes = account.promised_bytes + account.warm_bytes + account.card.overhead_bytes
        if needed_bytes > account.capacity_bytes or not self._store.may_keep_warm(account):
            return
        # The pause after a taken or lost context may not be over; one timer serves the whole pool.
        due_ns = self._refills[account.card.uuid].next_ns
        if now_ns >= due_ns:
            self._warm_up(account, now_ns, effects)
        elif self._timer_ns is None or due_ns < self._timer_ns:
            self._timer_ns = due_ns
            effects.append(ArmTimer(PoolTimerFired(), due_ns))

    def _warm_up(self, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        self._last_id += 1
        due_ns = now_ns + self._spawn_timeout_ns
        context = WarmContext(self._last_id, account.card.uuid, account.card.overhead_bytes, due_ns)
        self._store.add_warm(context)
        effects.append(WarmUp(context.warm_id, context.card_uuid))
        effects.append(ArmTimer(TimerFired(context.warm_id, _GENERATION, TimerKind.SPAWN), due_ns))

    # --- ends ---

    def _on_ready(self, context: WarmContext, event: events.WorkerReady, now_ns: int, effects: list[Effect]) -> None:
        # If it was dropped while it started, its kill is already ordered.
        if context.state is WarmState.WARMING:
            context.state = WarmState.READY
            self._refills[context.card_uuid].was_made()

    def _on_lost(
        self,
        context: WarmContext,
        event: events.WorkerFailed | events.SessionCondemned,
        now_ns: int,
        effects: list[Effect],
    ) -> None:
        if context.state in YIELDING:
            self._drop_lost(context, event.reason, now_ns, effects)
        else:
            self.drop_held(context.warm_id, event.reason, now_ns, effects)

    def _on_exited(self, context: WarmContext, event: events.WorkerExited, now_ns: int, effects: list[Effect]) -> None:
        if context.is_worker_gone:
            return
        context.is_worker_gone = True
        if context.state in YIELDING:
            self._drop_lost(context, event.reason, now_ns, effects)
        elif context.state is WarmState.HELD:
            self.drop_held(context.warm_id, event.reason, now_ns, effects)
        elif context.state is WarmState.DROPPING:
            effects.append(ProveReclaimed(context.warm_id, context.card_uuid))

    def _on_timer(self, context: WarmContext, event: events.TimerFired, now_ns: int, effects: list[Effect]) -> None:
        # A READY context has a time limit only if it waits for its tenant.
        if event.kind is not _TIMER_BY_STATE.get(context.state) or (
            context.state is WarmState.READY and not context.leases
        ):
            return
        if now_ns < context.due_ns:
            effects.append(ArmTimer(TimerFired(context.warm_id, _GENERATION, event.kind), context.due_ns))
        elif context.state is WarmState.WARMING:
            self._drop_lost(context, f"it was not ready within {self._store.limits.spawn_timeout_s} s", now_ns, effects)
        elif context.state is WarmState.READY:
            self._drop(context, "its tenant did not acquire another lease in time", now_ns, effects)
        else:
            missing = "its memory was not shown free" if context.is_worker_gone else "it could not be reaped"
            self._fence(context, f"{missing} within {self._store.limits.reclaim_timeout_s} s", now_ns, effects)

    def _on_proved(self, context: WarmContext, event: events.ReclaimProved, now_ns: int, effects: list[Effect]) -> None:
        # A proof from before the reap is not valid: the process could still hold memory.
        if context.state is WarmState.DROPPING and context.is_worker_gone:
            self._store.remove_warm(context)
            effects.append(WarmEnded(context.warm_id, context.card_uuid, context.reason, is_fenced=False))

    def _on_not_proved(
        self, context: WarmContext, event: events.ReclaimFailed, now_ns: int, effects: list[Effect]
    ) -> None:
        if context.state is WarmState.DROPPING:
            self._fence(context, event.reason, now_ns, effects)

    def _drop_lost(self, context: WarmContext, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Drop a context that was lost, and postpone the next one."""
        # The loss of a context that served a tenant does not delay others, because that tenant may have caused it.
        if context.tenant is None:
            self._refills[context.card_uuid].was_lost(now_ns)
        self._drop(context, reason, now_ns, effects)

    def _drop(
        self, context: WarmContext, reason: str, now_ns: int, effects: list[Effect], *, after_record: bool = False
    ) -> None:
        """Kill a context's worker, and release its bytes once they are proved free.

        `after_record`: As in `KillWorker`.
        """
        # No RefuseWork: no client is connected to a context that has no lease.
        context.state = WarmState.DROPPING
        context.reason = reason
        context.due_ns = now_ns + self._reclaim_timeout_ns + (RECORD_LIMIT_S * NS_PER_S if after_record else 0)
        if context.is_worker_gone:
            effects.append(ProveReclaimed(context.warm_id, context.card_uuid))
        else:
            effects.append(KillWorker(context.warm_id, after_record))
        effects.append(ArmTimer(TimerFired(context.warm_id, _GENERATION, TimerKind.RECLAIM), context.due_ns))

    def _fence(self, context: WarmContext, reason: str, now_ns: int, effects: list[Effect]) -> None:
        """Fence a context's bytes, and end leases that were to get them, the latest first."""
        account = self._account(context.card_uuid)
        context.state = WarmState.FENCED
        # No lease can get stuck bytes, so end those that waited for them.
        account.stuck_bytes += context.charge_bytes
        account.fenced_bytes += context.charge_bytes
        full_reason = f"{context.reason}; {reason}" if context.reason else reason
        effects.append(WarmEnded(context.warm_id, context.card_uuid, full_reason, is_fenced=True))
        self._fit(account, now_ns, effects)

    def _fit(self, account: CardAccount, now_ns: int, effects: list[Effect]) -> None:
        """Drop contexts, then end leases that wait for room, the latest first, until the card's capacity suffices."""
        self._make_room(account, now_ns, effects)
        while account.awaiting and account.promised_bytes + account.stuck_bytes > account.capacity_bytes:
            lease = next(reversed(account.awaiting.values()))
            if lease.state is LeaseState.ACTIVE:
                self._teardown.parking.take_room_back(lease, now_ns, effects)
                continue
            self._teardown.begin(
                lease, Cause.SPAWN_FAILED, "its room on the card could not be cleared", now_ns, effects
            )

    def _account(self, card_uuid: str) -> CardAccount:
        return self._store.account_by_uuid[card_uuid]


def _choose(contexts: Iterable[WarmContext], tenant: str | None = None) -> WarmContext | None:
    """Choose a context for a lease: the one that its tenant used last, otherwise the oldest that served no tenant.

    Without a tenant, choose only among the latter.
    """
    ready = [context for context in contexts if context.state is WarmState.READY]
    own = [context for context in ready if context.tenant is not None and context.tenant == tenant]
    return own[-1] if own else next((context for context in ready if context.tenant is None), None)
