"""What must hold of submits at all times."""

from collections.abc import Callable

from gpulease.daemon.core.book import Book
from gpulease.daemon.core.leases import Lease, LeaseState
from gpulease.daemon.core.submit import FIRST_SUBMIT_ID, Submit, SubmitState

Require = Callable[[bool, str], None]


def validate(book: Book, require: Require) -> None:
    """Check every rule; `require` is told what holds, and what it means if it does not."""
    for submit in book.submits.values():
        _validate_submit(book, submit, require)
    for lease in book.live.values():
        _validate_lease(book, lease, require)


def _validate_submit(book: Book, submit: Submit, require: Require) -> None:
    name, state = f"Submit {submit.submit_id - FIRST_SUBMIT_ID} ({submit.state.value})", submit.state
    lease = book.live.get(submit.lease_id)
    require(submit.submit_id >= FIRST_SUBMIT_ID, f"{name} has another's number.")
    require(lease is not None and lease.submit_id == submit.submit_id, f"{name} is not its lease's.")
    if lease is None:
        return
    goes_on = state in (SubmitState.STARTING, SubmitState.RUNNING)
    require(not goes_on or lease.state is LeaseState.ACTIVE, f"{name} goes on, and its lease is {lease.state.value}.")
    require(lease.state is not LeaseState.FENCED, f"{name} is not part of its lease's fence.")
    require(not (submit.is_worker_gone and goes_on), f"{name} has no worker.")
    is_awaited = state is SubmitState.ENDING and lease.state is LeaseState.ACTIVE and submit.is_warm
    require(not submit.is_replaced or is_awaited, f"{name} is to be replaced and has not ended, or its lease has.")
    require((state is SubmitState.RUNNING) <= (submit.due_ns is not None), f"{name} would never end.")
    is_moving = submit.grace_due_ns is not None or submit.reclaim_due_ns is not None
    require(state is not SubmitState.ENDING or is_moving, f"{name} has no timer, so nothing would ever end it.")
    own_bytes = lease.charge_bytes - lease.submit_charge_bytes
    overhead_bytes = book.account_by_uuid[lease.card_uuid].card.overhead_bytes
    is_own = submit.size_bytes == lease.submit_bytes or own_bytes == overhead_bytes or lease.is_restored
    require(is_own, f"{name} has other bytes than its lease keeps for it.")
    require(own_bytes + submit.charge_bytes == lease.charge_bytes, f"{name} and its session hold another sum.")


def _validate_lease(book: Book, lease: Lease, require: Require) -> None:
    name = f"Lease {lease.lease_id:032x} ({lease.state.value})"
    is_split = 0 <= lease.submit_bytes < max(1, lease.size_bytes)
    require(is_split, f"{name} keeps {lease.submit_bytes} of {lease.size_bytes} bytes for submits.")
    require(lease.submit_id in (0, *book.submits), f"{name} has a submit that is not known.")
    has_place = lease.submit_bytes > 0 or lease.own_submit_bytes > 0
    require(not lease.submit_id or has_place, f"{name} has a submit and no room for it.")
    is_alone = not (lease.submit_bytes or lease.has_session) and lease.submit_id > 0
    require(not lease.own_submit_bytes or is_alone or lease.is_restored, f"{name} has a submit in its session's place.")
    is_lent = lease.own_submit_bytes > 0 or lease.state is LeaseState.FENCED
    require(not lease.extra_bytes or is_lent, f"{name} holds a context that nobody has.")
    require(not (lease.is_scrubbing and lease.submit_id), f"{name} is to be recycled and has a submit.")
    earlier = book.submits.get(lease.submit_id)
    is_served = earlier is not None and earlier.state is not SubmitState.FENCED and lease.state is LeaseState.ACTIVE
    require(lease.next_submit is None or is_served, f"{name} has somebody wait for a submit that will never be gone.")
