"""Invariants of the lease table, recomputed from the leases, regions, submits and contexts alone.

No check relies on a running sum: each computes the figure again and compares.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from gpulease.daemon.contract.regions_page import MAX_NUMBER
from gpulease.daemon.leases.deferred_requests import must_wait
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.epochs import MAX_NAMES
from gpulease.daemon.leases.model import (
    ALONE,
    FIRST_SUBMIT_ID,
    FIRST_WARM_ID,
    YIELDING,
    Cause,
    Lease,
    LeaseState,
    RegionState,
    Submit,
    SubmitState,
    TableRegion,
    Trigger,
    WarmContext,
    WarmState,
)
from gpulease.daemon.leases.park_state import ParkDepth, ParkPhase
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.wait_queue import Waiter, WaitQueue
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Exclusivity

LASTING = (RegionState.FENCED, RegionState.RETURNED)


class InvariantBroken(Exception):
    """A rule of the lease table does not hold, which is a bug in the core. The text says which rule."""


def validate(store: LeaseStore) -> None:
    """Check every rule.

    Raises:
        InvariantBroken: A rule does not hold.
    """
    # Check each lease by itself, then each card, then the rules that span cards.
    by_card: dict[str, list[Lease]] = {account.card.uuid: [] for account in store.accounts}
    for lease in store.live.values():
        if lease.card_uuid not in by_card:
            raise InvariantBroken(f"{_name(lease)} is on card {lease.card_uuid}, which is not here.")
        by_card[lease.card_uuid].append(lease)
        _validate_lease(store, lease)
    for account in store.accounts:
        _validate_account(account, by_card[account.card.uuid])
        _validate_pool(store, account, by_card[account.card.uuid])
    _validate_submits(store)
    _validate_regions(store)
    _validate_counts(store)
    _validate_queue(store)
    _validate_claims(store)
    _validate_host(store)


class Charges(NamedTuple):
    """The bytes that leases hold, by lease id, and the bytes of contexts that no lease can have, by card."""

    leases: Mapping[int, int]
    stuck: Mapping[str, int]


def charges_of(store: LeaseStore) -> Charges:
    """Return what leases and stuck contexts hold now."""
    leases = {lease.lease_id: lease.charge_bytes for lease in store.live.values()}
    return Charges(leases, {account.card.uuid: account.stuck_bytes for account in store.accounts})


def validate_charges(store: LeaseStore, before: Charges) -> None:
    """Check that an event gave no lease more bytes of a card that already holds more than its current capacity.

    Others may reduce the capacity below the granted bytes. Then leases keep their bytes, but none gets more, except a
    session that returns to its former worker, which takes over that worker's bytes.
    """
    for lease in store.live.values():
        account = store.account_by_uuid[lease.card_uuid]
        taken_over_bytes = max(0, before.stuck[account.card.uuid] - account.stuck_bytes)
        is_more = lease.charge_bytes > before.leases.get(lease.lease_id, 0) + taken_over_bytes
        held_bytes = account.held_bytes + account.stuck_bytes
        if is_more and held_bytes > account.capacity_bytes:
            raise InvariantBroken(
                f"{_name(lease)} got more of a card that holds {held_bytes} of {account.capacity_bytes} bytes."
            )


def _name(lease: Lease) -> str:
    return f"Lease {lease.lease_id:032x} ({lease.state.value})"


def _validate_lease(store: LeaseStore, lease: Lease) -> None:
    state = lease.state
    # State, cause and fence must agree.
    has_ended = state in (LeaseState.DRAINING, LeaseState.FENCED)
    if state is LeaseState.TORNDOWN:
        raise InvariantBroken(f"{_name(lease)} is torn down but still counted as live.")
    if has_ended != (lease.cause is not None):
        raise InvariantBroken(f"{_name(lease)} has cause {lease.cause}.")
    if (state is LeaseState.FENCED) != (lease.lease_id in store.fenced):
        raise InvariantBroken(f"The index of fenced leases is wrong about {_name(lease)}.")
    if (state is LeaseState.FENCED) != (lease.ended_ns is not None):
        raise InvariantBroken(f"{_name(lease)} ended at {lease.ended_ns}.")
    # A pending lease has exactly one open acquire; an active one has a deadline and a worker.
    is_awaited = store.pending.get(lease.request) == lease.lease_id
    if (state is LeaseState.PENDING) != is_awaited:
        raise InvariantBroken(f"{_name(lease)} and the index of open acquires contradict each other.")
    if state is LeaseState.PENDING and lease.deadline_ns is not None:
        raise InvariantBroken(f"{_name(lease)} has a deadline already.")
    if state is LeaseState.ACTIVE and lease.deadline_ns is None:
        raise InvariantBroken(f"{_name(lease)} has no deadline.")
    if state is LeaseState.ACTIVE and lease.is_worker_gone:
        raise InvariantBroken(f"{_name(lease)} has no worker.")
    if not has_ended and (lease.is_kill_sent or lease.revoke_requests):
        raise InvariantBroken(f"{_name(lease)} has parts of a teardown, but has not ended.")
    # Bytes: either all of the lease's own bytes are still awaited, or none. If the lease took over a warm context, its
    # overhead is charged already and is not awaited.
    is_awaiting = lease.awaited_bytes > 0
    own_bytes = lease.charge_bytes
    if lease.warm_id:
        own_bytes -= store.account_by_uuid[lease.card_uuid].card.overhead_bytes
    park = lease.park
    # A returning session waits for as many bytes as it released when it was parked; its lease may end before they are
    # free.
    is_returning = park is not None and park.phase is ParkPhase.RETURNING
    returned_bytes = lease.terms.size_bytes - park.kept_bytes if park is not None and is_returning else 0
    if lease.awaited_bytes not in (0, own_bytes, returned_bytes):
        raise InvariantBroken(f"{_name(lease)} waits for {lease.awaited_bytes} bytes.")
    is_startless = is_awaiting and state is LeaseState.ACTIVE and not is_returning
    if is_startless:
        raise InvariantBroken(f"{_name(lease)} is active, but still waits for its bytes.")
    if lease.unconnected_ns is not None and lease.orphan_ms <= 0:
        raise InvariantBroken(f"{_name(lease)} counts time without a connection, but needs none.")
    if lease.warm_id in store.warm:
        raise InvariantBroken(f"{_name(lease)} and the pool have the same context.")
    if not has_ended and lease.free_request is not None:
        raise InvariantBroken(f"{_name(lease)} is being freed but has not ended.")
    # Teardown: some timer must be armed, otherwise a lost answer would leave the lease DRAINING forever.
    if state is LeaseState.DRAINING:
        is_moving = lease.grace_due_ns is not None or lease.reclaim_due_ns is not None
        if not is_moving:
            raise InvariantBroken(f"{_name(lease)} has no timer, so nothing would ever end its teardown.")
    # Recycling needs a clean end: the tenant freed the lease, only the tenant used it, and nothing has killed its
    # worker.
    is_scrubbed_rightly = state is LeaseState.DRAINING and lease.cause is Cause.FREED and bool(lease.warm_id)
    is_scrubbed_rightly = is_scrubbed_rightly and not (lease.is_in_doubt or lease.fault or lease.revoke_requests)
    is_scrubbed_rightly = is_scrubbed_rightly and not (lease.is_kill_sent or lease.is_worker_gone)
    if not is_scrubbed_rightly and lease.is_scrubbing:
        raise InvariantBroken(f"{_name(lease)} must not be recycled.")
    _validate_history(store, lease)
    _validate_park(store, lease)


def _validate_park(store: LeaseStore, lease: Lease) -> None:
    park = lease.park
    if (park is not None) != lease.terms.is_parkable:
        raise InvariantBroken(f"The park state of {_name(lease)} contradicts its terms.")
    if (park is not None) != (store.parkable.get(lease.lease_id) is lease):
        raise InvariantBroken(f"The index of parkable leases is wrong about {_name(lease)}.")
    waiter = store.queue.get(-lease.lease_id)
    if park is None:
        if waiter is not None:
            raise InvariantBroken(f"{_name(lease)} waits to return, but is not parkable.")
        return
    # Only a parked session has released its bytes, even while it gets a worker that refuses its waiting operations.
    is_off = park.off_bytes > 0
    may_be_off = park.phase is ParkPhase.PARKED or (park.phase is ParkPhase.RETURNING and park.refusal != "")
    if is_off and not may_be_off:
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}, but has released its bytes.")
    if park.refusal and park.phase is not ParkPhase.RETURNING:
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}, but has the refusal of a return.")
    is_cold = park.depth is ParkDepth.COLD
    most_bytes = store.account_by_uuid[lease.card_uuid].charge_bytes(lease.terms)
    is_bounded = 0 <= park.off_bytes <= (most_bytes if is_cold else lease.terms.size_bytes)
    if not is_bounded:
        raise InvariantBroken(f"{_name(lease)} has released {park.off_bytes} bytes.")
    # A cold session has no worker, so it holds nothing unless it is already charged for its return.
    is_charged = lease.charge_bytes > lease.awaited_bytes
    if is_cold and is_charged:
        raise InvariantBroken(f"{_name(lease)} is cold, but charged {lease.charge_bytes} bytes.")
    if lease.state is LeaseState.ACTIVE:
        is_off_deep = park.depth in (ParkDepth.LEAVING, ParkDepth.COLD, ParkDepth.ARRIVING, ParkDepth.ADOPTING)
        if is_off_deep and park.phase not in (ParkPhase.PARKED, ParkPhase.RETURNING):
            raise InvariantBroken(f"{_name(lease)} left its worker, but is {park.phase.value}.")
    else:
        if park.move is not None:
            raise InvariantBroken(f"{_name(lease)} has ended, but a move of it continues.")
        if park.held_id:
            raise InvariantBroken(f"{_name(lease)} has ended, but its former worker is held.")
    if lease.state is not LeaseState.ACTIVE:
        is_wanted = any(group.lease_id == lease.lease_id for group in store.deferred)
        if waiter is not None or park.requests or is_wanted:
            raise InvariantBroken(f"{_name(lease)} has ended, but a request waits for its park or return.")
        return
    # An active lease whose bytes are off the card has host memory. If it waits in the queue, it is parked and awaited.
    # The worker of a restored lease may have shown nothing yet.
    has_host = park.host_bytes >= lease.terms.size_bytes or (lease.is_restored and park.phase is ParkPhase.RETURNING)
    if park.phase is not ParkPhase.RESIDENT and not has_host:
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value} without host memory.")
    is_waiting = park.phase is ParkPhase.PARKED and park.is_awaited
    if (waiter is not None) != is_waiting:
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}; the queue contradicts this.")
    if park.is_in_place and (park.phase not in (ParkPhase.PARKED, ParkPhase.RETURNING) or park.parked_ns):
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}, but parked in place.")
    if park.phase is ParkPhase.PARKED and park.parked_ns <= 0 and not park.is_in_place:
        raise InvariantBroken(f"{_name(lease)} is parked, but has no time of its park.")
    is_asked = park.is_leaving or park.phase is ParkPhase.RETURNING
    if park.requests and not is_asked:
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}, but a request waits for its park.")
    waiting = [group for group in store.deferred if group.lease_id == lease.lease_id]
    if not all(must_wait(park, is_move=group.is_move) for group in waiting):
        raise InvariantBroken(f"{_name(lease)} is {park.phase.value}; a deferred request need not wait.")
    is_settled = park.phase is ParkPhase.PARKED and park.depth in (ParkDepth.WARM, ParkDepth.COLD)
    if waiting and is_settled and not park.is_awaited:
        raise InvariantBroken(f"{_name(lease)} is parked; nothing returns it for a deferred request.")
    # A restored session's worker confirms that the session is on the card. Meanwhile the lease is charged in full.
    is_confirming = lease.is_restored and park.phase is ParkPhase.RETURNING
    if park.is_off and lease.submit_id and not is_confirming:
        raise InvariantBroken(f"{_name(lease)} is parked, but its submit runs.")
    if park.is_off and lease.resize is not None:
        raise InvariantBroken(f"{_name(lease)} is parked, but is being resized.")


def _validate_history(store: LeaseStore, lease: Lease) -> None:
    history = lease.history
    if len(history) > store.limits.max_story_entries:
        raise InvariantBroken(f"{_name(lease)} has a history of {len(history)} entries.")
    if history and history[-1].finish is not lease.state:
        raise InvariantBroken(f"{_name(lease)} has another state than the end of its history.")
    # Generations never go back: tokens and grants carry them, and an old one must stay invalid.
    generations = [entry.generation for entry in history] + [lease.generation]
    if generations != sorted(generations) or generations[0] < 1:
        raise InvariantBroken(f"{_name(lease)} went back to an earlier generation.")
    renewed = [entry.generation for entry in history if entry.trigger is Trigger.RENEWED]
    if len(set(renewed)) != len(renewed):
        raise InvariantBroken(f"{_name(lease)} used a generation twice.")
    ends = sum(entry.finish is LeaseState.DRAINING for entry in history)
    if ends > 1:
        raise InvariantBroken(f"{_name(lease)} was torn down {ends} times.")
    # Only a restored lease may have no bytes: it may represent a worker of an earlier daemon. A parked session has
    # given bytes of its slice back; a restored one that was ending may have, too.
    off_bytes = 0 if lease.park is None else lease.park.off_bytes
    is_whole = lease.charge_bytes + off_bytes >= lease.terms.size_bytes or (
        lease.is_restored and lease.park is not None
    )
    is_charged = is_whole and (lease.terms.size_bytes > 0 or lease.is_restored)
    if not is_charged:
        raise InvariantBroken(f"{_name(lease)} is charged {lease.charge_bytes} bytes.")


def _validate_host(store: LeaseStore) -> None:
    host_bytes = sum(lease.park.host_bytes for lease in store.parkable.values() if lease.park is not None)
    if store.parked_host_bytes != host_bytes:
        raise InvariantBroken(f"{store.parked_host_bytes} bytes of the host are counted, not {host_bytes}.")
    if not store.parkable.keys() <= store.live.keys():
        raise InvariantBroken("The index of parkable leases has leases that are not live.")
    # Sessions that an earlier daemon parked may exceed a bound that has been lowered since.
    is_bound = not any(lease.is_restored for lease in store.parkable.values())
    most = store.limits.park_memory_bytes
    if host_bytes > most and is_bound:
        raise InvariantBroken(f"Parked sessions hold {host_bytes} of {most} bytes of the host.")


def _validate_claims(store: LeaseStore) -> None:
    # Each live name belongs to exactly one lease, even while that lease is fenced.
    named = {lease.terms.name: lease for lease in store.live.values() if lease.terms.name}
    count = sum(bool(lease.terms.name) for lease in store.live.values())
    if len(named) != count:
        raise InvariantBroken(f"{count} leases have {len(named)} names.")
    if store.claimed != named:
        raise InvariantBroken("The index of leases with names is wrong.")
    with_claims = {lease.lease_id: lease for lease in store.live.values() if lease.terms.is_claimed}
    if store.with_claims != with_claims:
        raise InvariantBroken("The index of claimed leases is wrong.")
    # A claimed lease is never ACTIVE without a membership deadline, because after that time another node may take its
    # name over.
    for lease in store.live.values():
        claim = lease.terms
        if bool(claim.name) != (claim.epoch > 0):
            raise InvariantBroken(f"{_name(lease)} has the name {claim.name!r} and epoch {claim.epoch}.")
        has_deadline = lease.membership_deadline is not None or lease.is_restored
        if claim.is_claimed and lease.state is LeaseState.ACTIVE and not has_deadline:
            raise InvariantBroken(f"{_name(lease)} has a claim, but no membership deadline.")
        if not claim.is_claimed and lease.membership_deadline is not None:
            raise InvariantBroken(f"{_name(lease)} has a membership deadline, but no claim.")
        is_covered = lease.is_restored or not claim.fleet_bytes or claim.size_bytes <= claim.fleet_bytes
        if not is_covered:
            raise InvariantBroken(f"{_name(lease)} has more bytes than were claimed for it.")
        is_known = claim.epoch <= store.epochs.of(claim.name) or lease.is_restored
        if claim.name and not is_known:
            raise InvariantBroken(f"{_name(lease)} has an epoch above the highest of its name.")
    if len(store.epochs) > MAX_NAMES:
        raise InvariantBroken(f"{len(store.epochs)} names are kept with their epochs.")
    # The index with which a client that repeats its request is given its lease.
    for (tenant, request_id), lease in store.by_request.items():
        is_its_own = store.live.get(lease.lease_id) is lease and lease.tenant == tenant
        if not is_its_own or lease.terms.request_id != request_id:
            raise InvariantBroken(f"The index of leases by request is wrong about {_name(lease)}.")


def _validate_account(account: CardAccount, leases: list[Lease]) -> None:
    name, card = f"Card {account.card.uuid}", account.card
    # The sums, computed again from the leases.
    charged_bytes = sum(lease.charge_bytes for lease in leases)
    fenced = sum(lease.charge_bytes for lease in leases if lease.state is LeaseState.FENCED)
    fenced += sum(context.charge_bytes for context in account.warm.values() if context.state is WarmState.FENCED)
    alone = sum(lease.terms.exclusivity in ALONE for lease in leases)
    if account.held_bytes != charged_bytes:
        raise InvariantBroken(f"{name} counts {account.held_bytes} bytes held, its leases {charged_bytes}.")
    if account.fenced_bytes != fenced:
        raise InvariantBroken(f"{name} counts {account.fenced_bytes} bytes fenced, not {fenced}.")
    # Restored leases may exceed the card, or share it with one that must be alone, because the limits or the card have
    # changed since. No new lease was granted next to them. A cold session that waits for room there holds no bytes.
    is_all_restored = all(lease.is_restored for lease in leases if lease.charge_bytes)
    parkable = sum(lease.terms.size_bytes for lease in leases if lease.terms.is_parkable)
    parked = sum(lease.park.off_bytes for lease in leases if lease.park is not None)
    if account.parked_bytes != parked:
        raise InvariantBroken(f"{name} counts {account.parked_bytes} bytes parked, not {parked}.")
    if account.parkable_bytes != parkable:
        raise InvariantBroken(f"{name} counts {account.parkable_bytes} bytes parkable.")
    if charged_bytes > card.capacity_bytes and not is_all_restored:
        raise InvariantBroken(f"{name} holds {charged_bytes} of {card.capacity_bytes} bytes.")
    if account.leases != len(leases):
        raise InvariantBroken(f"{name} counts {account.leases} leases, not {len(leases)}.")
    by_tenant = Counter(lease.tenant for lease in leases)
    if account.leases_by_tenant != by_tenant:
        raise InvariantBroken(f"{name} miscounts its leases per tenant.")
    if account.exclusive_leases != alone:
        raise InvariantBroken(f"{name} counts {account.exclusive_leases} exclusive leases, not {alone}.")
    if alone and len(leases) != 1 and not is_all_restored:
        raise InvariantBroken(f"{name} has an exclusive lease, and {len(leases)} leases in all.")
    # Each lease is charged the bytes that its terms cost on this card.
    for lease in leases:
        charge_bytes = account.charge_bytes(lease.terms) + lease.extra_bytes
        charge_bytes -= 0 if lease.park is None else lease.park.off_bytes
        is_rightly_charged = lease.charge_bytes == charge_bytes or lease.is_restored
        if not is_rightly_charged:
            raise InvariantBroken(f"{_name(lease)} is charged {lease.charge_bytes} bytes, not {charge_bytes}.")
        is_partitioned = lease.terms.exclusivity is not Exclusivity.PARTITION_EXCLUSIVE or card.is_partition
        if not is_partitioned:
            raise InvariantBroken(f"{_name(lease)} needs a partition, but {name} is not one.")


def _validate_pool(store: LeaseStore, account: CardAccount, leases: list[Lease]) -> None:
    # Grants remain valid when other programs take the card's memory, but no new ones are made.
    name, capacity, now = f"Card {account.card.uuid}", account.card.capacity_bytes, account.capacity_bytes
    contexts = list(account.warm.values())
    for context in contexts:
        _validate_warm(store, account, context)
    # Sum up four kinds of bytes: all contexts, contexts that can be dropped, stuck contexts, and leases.
    warm = sum(context.charge_bytes for context in contexts)
    yielding = sum(context.charge_bytes for context in contexts if context.state in YIELDING)
    lasting = (WarmState.FENCED, WarmState.HELD)
    stuck = sum(context.charge_bytes for context in contexts if context.state in lasting)
    charged_bytes = sum(lease.charge_bytes for lease in leases)
    awaited = sum(lease.awaited_bytes for lease in leases)
    going = (LeaseState.PENDING, LeaseState.ACTIVE)
    waiting = [lease for lease in leases if lease.awaited_bytes and lease.state in going]
    never = awaited - sum(lease.awaited_bytes for lease in waiting)
    if account.stuck_bytes != stuck:
        raise InvariantBroken(f"{name} counts {account.stuck_bytes} bytes stuck, not {stuck}.")
    if account.awaited_bytes != awaited:
        raise InvariantBroken(f"{name} counts {account.awaited_bytes} bytes awaited, not {awaited}.")
    knows = set(account.awaiting) == {lease.lease_id for lease in waiting}
    if not knows:
        raise InvariantBroken(f"{name} has a wrong index of leases that wait for warm contexts to leave.")
    # Bytes in use now must fit the measured capacity, unless all leases come from an earlier table.
    used = charged_bytes - awaited + warm
    is_new_in = any(lease.charge_bytes > lease.awaited_bytes and not lease.is_restored for lease in leases)
    is_new_in = is_new_in or not all(context.is_restored for context in contexts)
    if used > capacity and is_new_in:
        raise InvariantBroken(f"{name} may have {used} of {capacity} bytes in use.")
    # Bytes promised to leases that wait for contexts to leave must fit, too, once those contexts are gone.
    promised = charged_bytes - never + stuck + yielding
    is_new_in = is_new_in or bool(waiting)
    if promised > capacity and is_new_in:
        raise InvariantBroken(f"{name} promises {promised} of {capacity} bytes.")
    is_fitting = promised <= now or not (waiting or yielding)
    if not is_fitting:
        raise InvariantBroken(
            f"{name} promises {promised} of {now} bytes, although contexts could leave or leases wait."
        )
    # The first lease in the queue must really lack room; otherwise it would wait in vain.
    first = next(iter(account.awaiting.values()), None)
    if first is not None and used + first.awaited_bytes <= now:
        raise InvariantBroken(f"{name} has room for a lease that still waits.")
    _validate_pool_size(store, account, leases)


def _validate_pool_size(store: LeaseStore, account: CardAccount, leases: list[Lease]) -> None:
    name, contexts = f"Card {account.card.uuid}", list(account.warm.values())
    pending = sum(lease.state is LeaseState.PENDING for lease in leases)
    if account.pending_leases != pending:
        raise InvariantBroken(f"{name} counts {account.pending_leases} pending leases, not {pending}.")
    # The pool makes one context at a time and never more than wanted. Contexts being dropped count as well, so that a
    # driver that loses every context can't fill the card with fences.
    making = sum(context.state is WarmState.WARMING for context in contexts)
    if making > 1:
        raise InvariantBroken(f"{name} makes {making} warm contexts at a time.")
    shared_count = sum(context.state in YIELDING and context.tenant is None for context in contexts)
    if shared_count > account.warm_wanted:
        raise InvariantBroken(f"{name} has {shared_count} warm contexts; {account.warm_wanted} are wanted.")
    is_bounded = shared_count + account.leaving <= account.warm_wanted or any(
        context.is_restored for context in contexts
    )
    if not is_bounded:
        raise InvariantBroken(
            f"{name} has {account.leaving} warm contexts that leave or are fenced, and {shared_count} more."
        )
    most = 0 if store.recycling is None else store.recycling.max_idle
    if account.recycled > most:
        raise InvariantBroken(f"{name} has {account.recycled} contexts that wait for their tenant.")
    # A card that must be empty of contexts has none.
    is_closed = store.is_shutting_down or store.drain_ns is not None
    must_be_empty = is_closed or account.exclusive_leases or account.drain_ns is not None
    if account.yielding_bytes and must_be_empty:
        raise InvariantBroken(f"{name} must have no warm contexts.")


def _validate_warm(store: LeaseStore, account: CardAccount, context: WarmContext) -> None:
    name = f"Warm context {context.warm_id - FIRST_WARM_ID}"
    if context.warm_id < FIRST_WARM_ID:
        raise InvariantBroken(f"{name} has a lease's number.")
    if store.warm.get(context.warm_id) is not context:
        raise InvariantBroken(f"{name} is not in the pool.")
    if context.card_uuid != account.card.uuid:
        raise InvariantBroken(f"{name} is on another card.")
    is_rightly_charged = context.charge_bytes == account.card.overhead_bytes or context.is_restored
    if not is_rightly_charged:
        raise InvariantBroken(f"{name} is charged {context.charge_bytes} bytes.")
    is_needed = context.state in YIELDING or context.state is WarmState.HELD
    if context.is_worker_gone and is_needed:
        raise InvariantBroken(f"{name} has no worker.")
    holders = [lease for lease in store.parkable.values() if lease.park and lease.park.held_id == context.warm_id]
    is_held_once = context.state is not WarmState.HELD or len(holders) == 1
    if not is_held_once:
        raise InvariantBroken(f"{name} is held for {len(holders)} sessions.")
    if (context.tenant is None) != (context.leases == 0):
        raise InvariantBroken(f"{name} belongs to {context.tenant!r}, and has served {context.leases} leases.")
    most = 1 if store.recycling is None else store.recycling.max_leases
    is_waiting = context.tenant is None or context.state is not WarmState.WARMING
    if context.leases >= most or not is_waiting:
        raise InvariantBroken(f"{name} has served {context.leases} leases.")


def _validate_submits(store: LeaseStore) -> None:
    for submit in store.submits.values():
        _validate_submit(store, submit)
    for lease in store.live.values():
        _validate_lease_submit(store, lease)


def _validate_submit(store: LeaseStore, submit: Submit) -> None:
    name, state = f"Submit {submit.submit_id - FIRST_SUBMIT_ID} ({submit.state.value})", submit.state
    lease = store.live.get(submit.lease_id)
    if submit.submit_id < FIRST_SUBMIT_ID:
        raise InvariantBroken(f"{name} has the number of a lease or a warm context.")
    if lease is None or lease.submit_id != submit.submit_id:
        raise InvariantBroken(f"{name} is not in the index of its lease.")
    if lease is None:
        return
    # A submit that has not ended needs an active lease and a worker; one that ends needs a timer.
    goes_on = state in (SubmitState.STARTING, SubmitState.RUNNING)
    if goes_on and lease.state is not LeaseState.ACTIVE:
        raise InvariantBroken(f"{name} continues, and its lease is {lease.state.value}.")
    if lease.state is LeaseState.FENCED:
        raise InvariantBroken(f"{name} is not part of its lease's fence.")
    if submit.is_worker_gone and goes_on:
        raise InvariantBroken(f"{name} has no worker.")
    is_awaited = state is SubmitState.ENDING and lease.state is LeaseState.ACTIVE and submit.is_warm
    if submit.is_replaced and not is_awaited:
        raise InvariantBroken(f"{name} can't be replaced: it has not ended, or its lease has.")
    if state is SubmitState.RUNNING and submit.due_ns is None:
        raise InvariantBroken(f"{name} would never end.")
    is_moving = submit.grace_due_ns is not None or submit.reclaim_due_ns is not None
    if state is SubmitState.ENDING and not is_moving:
        raise InvariantBroken(f"{name} has no timer, so nothing would ever end it.")
    # The submit's bytes are a part of its lease's charge, never an addition to it.
    own_bytes = lease.charge_bytes - lease.submit_charge_bytes
    overhead_bytes = store.account_by_uuid[lease.card_uuid].card.overhead_bytes
    is_own = submit.size_bytes == lease.terms.submit_bytes or own_bytes == overhead_bytes or lease.is_restored
    if not is_own:
        raise InvariantBroken(f"{name} has more or fewer bytes than its lease keeps for it.")
    if own_bytes + submit.charge_bytes != lease.charge_bytes:
        raise InvariantBroken(f"{name} and its session hold more or fewer bytes than their lease is charged.")


def _validate_lease_submit(store: LeaseStore, lease: Lease) -> None:
    name = f"Lease {lease.lease_id:032x} ({lease.state.value})"
    is_split = 0 <= lease.terms.submit_bytes < max(1, lease.terms.size_bytes)
    if not is_split:
        raise InvariantBroken(f"{name} keeps {lease.terms.submit_bytes} of {lease.terms.size_bytes} bytes for submits.")
    if lease.submit_id not in (0, *store.submits):
        raise InvariantBroken(f"{name} has an unknown submit.")
    has_place = lease.terms.submit_bytes > 0 or lease.own_submit_bytes > 0
    if lease.submit_id and not has_place:
        raise InvariantBroken(f"{name} has a submit, but no room for it.")
    is_alone = not (lease.terms.submit_bytes or lease.has_session) and lease.submit_id > 0
    if lease.own_submit_bytes and not is_alone and not lease.is_restored:
        raise InvariantBroken(f"{name} has a submit that uses the room of its session.")
    # A context lent for a submit must have a submit, or be part of a fence.
    is_lent = lease.own_submit_bytes > 0 or lease.state is LeaseState.FENCED
    if lease.extra_bytes and not is_lent:
        raise InvariantBroken(f"{name} is charged a context for a submit, but has no submit.")
    if lease.is_scrubbing and lease.submit_id:
        raise InvariantBroken(f"{name} is to be recycled, but has a submit.")
    earlier = store.submits.get(lease.submit_id)
    is_served = earlier is not None and earlier.state is not SubmitState.FENCED and lease.state is LeaseState.ACTIVE
    if lease.next_submit is not None and not is_served:
        raise InvariantBroken(f"{name} has a waiting submit, but none that will end before it.")


def _validate_regions(store: LeaseStore) -> None:
    # Both indexes of regions agree, and each opening region has exactly one open request.
    of_leases = {region_id: lease for lease in store.live.values() for region_id in lease.regions}
    if of_leases.keys() != store.regions.keys():
        raise InvariantBroken("The index of regions does not match the regions of live leases.")
    opening = {region.request for region in store.regions.values() if region.state is RegionState.OPENING}
    if opening != store.region_requests.keys():
        raise InvariantBroken("The index of region requests does not match the regions that open.")
    for region_id, region in store.regions.items():
        _validate_region(store, of_leases[region_id], region)
    for lease in store.live.values():
        _validate_slice(lease)
    # An ended region is in this index only once its memory is returned.
    for region_id, ended in store.ended_regions.items():
        child = store.regions.get(region_id)
        is_over = child is None or child.state is RegionState.RETURNED
        if not is_over:
            raise InvariantBroken(f"Region {region_id:032x} is both live and ended.")
        is_whole = ended.state is LeaseState.TORNDOWN and ended.cause is not None and ended.ended_ns is not None
        if not is_whole:
            raise InvariantBroken(
                f"Region {region_id:032x} is in the index of ended ones, but has not ended completely."
            )
    if len(store.ended_regions) > store.limits.max_tombstones:
        raise InvariantBroken("Too many ended regions are remembered.")


def _validate_region(store: LeaseStore, lease: Lease, region: TableRegion) -> None:
    name, state = f"Region {region.region_id:032x} ({region.state.value})", region.state
    # A region that has not ended needs an active lease; one that has ended has a cause.
    goes_on = state in (RegionState.OPENING, RegionState.ACTIVE)
    is_known = region.lease_id == lease.lease_id and lease.regions.get(region.region_id) is region
    if not is_known or region.region_id in store.live:
        raise InvariantBroken(f"{name} is not in the index of its lease.")
    if goes_on and lease.state is not LeaseState.ACTIVE:
        raise InvariantBroken(f"{name} continues, and its lease is {lease.state.value}.")
    if goes_on != (region.cause is None):
        raise InvariantBroken(f"{name} has cause {region.cause}.")
    if state is RegionState.ACTIVE and region.deadline_ns is None:
        raise InvariantBroken(f"{name} has no deadline.")
    if region.state is RegionState.OPENING and region.address:
        raise InvariantBroken(f"{name} has an address already.")
    is_reported = state is RegionState.RETURNED or region.is_given_up
    if is_reported != (region.ended_ns is not None):
        raise InvariantBroken(f"{name} ended at {region.ended_ns}.")
    if region.is_given_up and state not in LASTING:
        raise InvariantBroken(f"{name} was given up.")
    if state is RegionState.RETURNED and region.kept_bytes <= 0:
        raise InvariantBroken(f"{name} keeps no bytes, so it must be removed.")
    # Until the end of a region is reported, an answer is awaited. While its lease is active, a timer must bound that
    # wait.
    if goes_on and (region.free_request or region.revoke_requests):
        raise InvariantBroken(f"{name} has parts of an end, but has not ended.")
    is_awaited = lease.state is LeaseState.ACTIVE and not goes_on and not is_reported
    if is_awaited != (region.end_due_ns is not None):
        raise InvariantBroken(f"{name} lacks the timer that bounds its end, or has one without need.")
    is_fenced = lease.state is not LeaseState.FENCED or state is RegionState.RETURNED or region.is_given_up
    if not is_fenced:
        raise InvariantBroken(f"{name} is not part of its lease's fence.")
    if not 0 <= region.kept_bytes <= region.size_bytes:
        raise InvariantBroken(f"{name} keeps {region.kept_bytes} bytes.")
    history = region.history
    if len(history) > store.limits.max_story_entries:
        raise InvariantBroken(f"{name} has a history of {len(history)} entries.")
    if history and history[-1].finish is not state:
        raise InvariantBroken(f"{name} has another state than the end of its history.")
    ends = [entry.trigger for entry in history if isinstance(entry.trigger, Cause)]
    if len(ends) > 1 or (ends and ends[0] is not region.cause):
        raise InvariantBroken(f"{name} ended {len(ends)} times.")


def _validate_slice(lease: Lease) -> None:
    regions = lease.regions.values()
    # A slot belongs to one region at a time. A number is never used twice in a lease, so an old set can't name a new
    # region.
    going = {region.slot: region for region in regions if region.state is not RegionState.RETURNED}
    if going != lease.slots or not all(0 <= slot < MAX_REGIONS for slot in going):
        raise InvariantBroken(f"{_name(lease)} miscounts its slots.")
    count = sum(region.state is not RegionState.RETURNED for region in regions)
    if len(going) != count:
        raise InvariantBroken(f"{_name(lease)} has two regions in a slot.")
    numbers = {region.number for region in regions}
    is_numbered = len(numbers) == len(regions) and lease.region_number >= max(numbers, default=0)
    if not is_numbered or lease.region_number > MAX_NUMBER:
        raise InvariantBroken(f"{_name(lease)} gave two regions the same number, or one that is too high.")
    # Regions never hold more than the slice, even while the slice shrinks.
    charged_bytes = sum(region.charge_bytes for region in regions)
    if charged_bytes != lease.region_bytes:
        raise InvariantBroken(f"{_name(lease)} counts {lease.region_bytes} bytes of regions, not {charged_bytes}.")
    room = lease.region_room_bytes
    if charged_bytes > room and not lease.is_restored:
        raise InvariantBroken(f"{_name(lease)} has regions of {charged_bytes} bytes in a slice of {room}.")
    is_marked = lease.is_reshaped or not (regions or lease.resize is not None)
    if not is_marked or (lease.is_reshaped and lease.is_scrubbing):
        raise InvariantBroken(f"{_name(lease)} had regions or was resized, but is to be recycled.")
    if going and lease.own_submit_bytes:
        raise InvariantBroken(f"{_name(lease)} has regions in the room of a submit.")
    resize = lease.resize
    # During a resize the lease is charged for the larger of both sizes.
    if resize is not None:
        if lease.state is not LeaseState.ACTIVE:
            raise InvariantBroken(f"{_name(lease)} is being resized, but is not active.")
        largest = max(resize.size_bytes, resize.least_bytes)
        if largest > lease.terms.size_bytes:
            raise InvariantBroken(f"{_name(lease)} may get {largest} bytes, but is charged for fewer.")
        if lease.own_submit_bytes:
            raise InvariantBroken(f"{_name(lease)} is being resized while a submit uses the room of its session.")


def _validate_counts(store: LeaseStore) -> None:
    limits = store.limits
    by_tenant = Counter(lease.tenant for lease in store.live.values())
    # Limits may have been lowered since a lease was granted. Its tenant keeps the lease and gets no more.
    has_restored = {lease.tenant for lease in store.live.values() if lease.is_restored} | store.under_earlier_rules
    on_cards = sum(len(account.warm) for account in store.accounts)
    if len(store.warm) != on_cards:
        raise InvariantBroken(f"{len(store.warm)} warm contexts, {on_cards} on cards.")
    left = {(context.left_by, warm_id) for warm_id, context in store.warm.items() if context.left_by}
    indexed = {(lease_id, warm_id) for lease_id, contexts in store.left_by_lease.items() for warm_id in contexts}
    if left != indexed or not all(store.left_by_lease.values()):
        raise InvariantBroken("The workers that sessions have left are indexed wrongly.")
    if by_tenant != store.live_by_tenant:
        raise InvariantBroken("The live leases per tenant are miscounted.")
    if len(store.live) > limits.max_leases and not bool(has_restored):
        raise InvariantBroken(f"There are {len(store.live)} leases.")
    for tenant, count in by_tenant.items():
        is_allowed = count <= limits.max_leases_of(tenant) or tenant in has_restored
        if not is_allowed:
            raise InvariantBroken(f"Tenant {tenant!r} has {count} leases.")
    _validate_bytes(store)
    pending = sum(lease.state is LeaseState.PENDING for lease in store.live.values())
    if len(store.pending) != pending:
        raise InvariantBroken(f"{len(store.pending)} acquires wait for {pending} pending leases.")
    if len(store.ended) > limits.max_tombstones:
        raise InvariantBroken(f"{len(store.ended)} ended leases are remembered.")
    # Leases in `ended` are over: their memory is returned, and they have a cause.
    for lease_id, snapshot in store.ended.items():
        if lease_id in store.live:
            raise InvariantBroken(f"Lease {lease_id:032x} is both live and ended.")
        is_whole = snapshot.state is LeaseState.TORNDOWN and snapshot.cause is not None
        if not is_whole or snapshot.ended_ns is None:
            raise InvariantBroken(f"Lease {lease_id:032x} is in the index of ended ones, but has not ended completely.")


def _validate_bytes(store: LeaseStore) -> None:
    by_tenant: Counter[str] = Counter()
    has_restored = {lease.tenant for lease in store.live.values() if lease.is_restored} | store.under_earlier_rules
    for lease in store.live.values():
        by_tenant[lease.tenant] += lease.terms.size_bytes
        card = store.account_by_uuid[lease.card_uuid].card
        is_older = lease.is_restored or lease.tenant in store.under_earlier_rules
        if not (is_older or store.limits.tenants.of(lease.tenant).may_use(card)):
            raise InvariantBroken(f"{_name(lease)} is on a card that its tenant may not use.")
    if by_tenant != store.bytes_by_tenant:
        raise InvariantBroken("The live leases' bytes per tenant are miscounted.")
    # Queued acquires count towards their tenant's bytes, as `check_bytes` counts them.
    for waiter in store.queue:
        if waiter.returning is not None:
            continue
        by_tenant[waiter.acquire.tenant] += waiter.acquire.terms.size_bytes
    for tenant, size_bytes in by_tenant.items():
        bound = store.limits.tenants.of(tenant).max_vram_bytes
        is_allowed = bound is None or size_bytes <= bound or tenant in has_restored
        if not is_allowed:
            raise InvariantBroken(f"Tenant {tenant!r} has or awaits {size_bytes} bytes.")


def _validate_queue(store: LeaseStore) -> None:
    limits, waiters = store.limits, tuple(waiter for waiter in store.queue if waiter.returning is None)
    if len(waiters) > limits.max_waiting:
        raise InvariantBroken(f"{len(waiters)} acquires wait.")
    by_tenant = Counter(waiter.acquire.tenant for waiter in waiters)
    most = max(by_tenant.values(), default=0)
    if most > limits.max_waiting_per_tenant:
        raise InvariantBroken(f"{most} acquires of one tenant wait.")
    for waiter in waiters:
        lease_id = waiter.acquire.lease_id
        if not bool(waiter.candidates):
            raise InvariantBroken(f"Request {waiter.acquire.request} waits for a card that can't exist.")
        is_new = lease_id not in store.live and lease_id not in store.ended
        if not is_new:
            raise InvariantBroken(f"Lease {lease_id:032x} waits and is there already.")
    # A closed node has an empty queue, and no waiter could be placed at this moment.
    is_closed = store.is_shutting_down or store.drain_ns is not None
    if is_closed and waiters:
        raise InvariantBroken("An acquire waits on a node that grants no lease.")
    for lease_id in store.pending.values():
        is_drained = store.drain_ns_of(store.live[lease_id].card_uuid) is not None
        if is_drained:
            raise InvariantBroken(f"Lease {lease_id:032x} is being started on a card that is drained.")
    for waiter in waiters:
        if not bool(waiter.open_candidates()):
            raise InvariantBroken(f"Request {waiter.acquire.request} waits for drained cards alone.")
    if store.queue.next_placeable() is not None or first_placeable(store.queue) is not None:
        raise InvariantBroken("Somebody waits who could be placed.")
    for tenant in {waiter.acquire.tenant for waiter in store.queue}:
        own = [waiter for waiter in waiters if waiter.acquire.tenant == tenant]
        bytes_of = sum(waiter.acquire.terms.size_bytes for waiter in own)
        if (store.queue.count_of(tenant), store.queue.bytes_of(tenant)) != (len(own), bytes_of):
            raise InvariantBroken(f"The waiting acquires of tenant {tenant!r} are miscounted.")
    if store.queue.acquires() != len(waiters):
        raise InvariantBroken("The waiting acquires are miscounted.")
    for waiter in waiters:
        if waiter.acquire.terms.name and store.queue.named(waiter.acquire.terms.name) is not waiter:
            raise InvariantBroken(f"The waiter for the name {waiter.acquire.terms.name!r} can't be found.")
    _validate_holds(store)


def first_placeable(queue: WaitQueue) -> tuple[Waiter, CardAccount] | None:
    """Return the result of `WaitQueue.next_placeable`, by its definition: found by a walk, without the indexes."""
    # Each waiter that finds no room blocks its cards for all after it, while its hold lasts.
    blocked: set[str] = set()
    for waiter in queue:
        allowed = [account for account in waiter.open_candidates() if account.card.uuid not in blocked]
        account = waiter.choose(allowed, queue.order)
        if account is not None:
            return waiter, account
        if waiter.acquire.request in queue.holders and not waiter.group.has_own_lease():
            blocked.update(account.card.uuid for account in allowed)
    return None


def _validate_holds(store: LeaseStore) -> None:
    queue, terms = store.queue, store.queue.terms
    begin_times_ns = list(terms.begun_ns.values())
    if len(begin_times_ns) > store.limits.max_waiting:
        raise InvariantBroken(f"{len(begin_times_ns)} terms are remembered.")
    if begin_times_ns != sorted(begin_times_ns):
        raise InvariantBroken("The terms are not in the order they began.")
    for request, waiter in queue.holders.items():
        name, tenant = f"Request {request}", waiter.acquire.tenant
        if queue.get(request) is not waiter:
            raise InvariantBroken(f"{name} holds others back and is not in line.")
        lasts_ns = waiter.holds_until_ns - waiter.since_ns
        if not 0 < lasts_ns <= terms.length_ns:
            raise InvariantBroken(f"{name} may hold others back for {lasts_ns} ns.")
        end_ns = terms.begun_ns.get(tenant, 0) + terms.length_ns
        if waiter.holds_until_ns != end_ns:
            raise InvariantBroken(f"{name} may hold others back outside the term of {tenant!r}.")
    ends_ns = [waiter.holds_until_ns for waiter in queue.holders.values()]
    if queue.next_hold_end_ns() != min(ends_ns, default=None):
        raise InvariantBroken("The next end of a hold is wrong.")
    holding = [waiter for waiter in queue.holders.values() if not waiter.group.has_own_lease()]
    if queue.held_cards() != {account.card.uuid for waiter in holding for account in waiter.open_candidates()}:
        raise InvariantBroken("The cards that waiters hold are wrong.")
