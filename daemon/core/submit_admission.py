"""Whether a lease may have a submit now: a pure function over the book."""

from gpulease.daemon.core import denials, submit_denials
from gpulease.daemon.core.book import Book
from gpulease.daemon.core.denials import Denial
from gpulease.daemon.core.events import SubmitRequested
from gpulease.daemon.core.leases import Lease, LeaseState
from gpulease.daemon.core.submit import SubmitState


def check(book: Book, lease: Lease | None, event: SubmitRequested, now_ns: int) -> Denial | None:
    """Why it may not; None if it may. One that may is counted as an acquire of its tenant's."""
    if lease is None or lease.tenant != event.tenant:
        return denials.not_found(event.lease_id)
    if lease.state is LeaseState.PENDING:
        return denials.lease_pending(lease.snapshot())
    if lease.state is not LeaseState.ACTIVE:
        return denials.lease_ended(lease.snapshot())
    if lease.is_expired(now_ns):
        return denials.lease_expired(lease.snapshot())
    if not lease.submit_bytes and lease.has_session:
        return submit_denials.has_session(lease.lease_id)
    if event.timeout_ms < 1:
        return submit_denials.no_time(event.timeout_ms)
    earlier = book.submits.get(lease.submit_id)
    if earlier is not None and earlier.state is SubmitState.FENCED:
        return submit_denials.stuck(lease.lease_id)
    if earlier is not None and lease.next_submit is not None:
        return submit_denials.busy(lease.lease_id)
    return book.rates.denial(event.tenant, book.limits.tenants.of(event.tenant), now_ns)
