"""Takes over the leases that an earlier daemon left in its journal, and the workers of its zygotes.

`reconcile` decides what happens to each; `adopt` executes it. A lease continues only if the journal has it and its own
worker still runs. Every other worker is ended, because its owner is unknown.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpulease.daemon.contract.control_page import PageState, Transfer, boot_ns
from gpulease.daemon.host.processes import has_ended, is_exiting, name_of
from gpulease.daemon.leases.events import Event, LeaseRestored, RegionRestored, SubmitFound, WorkerFound
from gpulease.daemon.leases.model import Cause, LeaseState, MembershipDeadline
from gpulease.daemon.leases.persisted import LeaseRow, RegionRow
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.revocation_word import cause_of
from gpulease.daemon.workers.zygote_discovery import FoundWorker
from gpulease.protocol.fast_dataclass import dataclass

MAX_RENEWALS_AHEAD: Final = 1 << 20
"""Maximum number of renewals by which a page's generation may exceed the journal's, because they were not on the disk
yet. No broker gets further ahead."""

STRAY_TIMEOUT_S: Final = 5.0
"""Longest wait for the end of a worker after its zygote has died: the kernel kills it with its parent."""


@dataclass(frozen=True, slots=True)
class LeftoverWorker:
    """A worker of an earlier daemon, as it is now, or as it was when it was reaped.

    Attributes:
        page: The state of its lease's page.
        transfer: What the worker claims about its session; None if that is not known.
        park_number: The number of the park in which its session is, as the worker reports it; 0 if it is not parked.
    """

    worker: FoundWorker
    page: PageState
    transfer: Transfer | None = Transfer.NONE
    park_number: int = 0

    @property
    def is_alive(self) -> bool:
        return self.worker.reason is None

    @property
    def is_leased(self) -> bool:
        """Return whether the worker's lease was granted, so that a tenant may have its id."""
        return self.page.deadline_ns > 0

    @property
    def is_dropped(self) -> bool:
        """Return whether an earlier broker has ended it because its lease continued, if at all, in another worker.

        Its end may take seconds, in which that broker may be killed as well.
        """
        return self.page.word is not None and cause_of(self.page.word, self.page.cause) is Cause.ABANDONED


@dataclass(frozen=True, slots=True)
class Adoption:
    """An event for the lease table, and the worker that it concerns, or None without a worker."""

    event: LeaseRestored | WorkerFound | SubmitFound
    worker: FoundWorker | None


def reconcile(
    rows: Sequence[LeaseRow],
    left_workers: Sequence[LeftoverWorker],
    overheads: Mapping[str, int],
    latest_ns: int,
    draw: Callable[[], int],
    clocks: tuple[int, int] = (0, 0),
) -> list[Adoption]:
    """Decide what happens to each lease and to each worker.

    Args:
        rows: The leases that the journal has.
        left_workers: The workers that the zygotes have.
        overheads: The bytes that one context costs on each card, by the card's uuid.
        latest_ns: The latest deadline that a broker could have given, on the monotonic clock.
        draw: Returns an unused lease id.
        clocks: The present time, on the monotonic clock and on CLOCK_BOOTTIME.
    """
    # Step 1: find each lease's own worker. The remaining workers belong to submits, to the pool, or to no lease.
    adoptions, others = _restore(rows, left_workers, latest_ns, clocks)
    sizes = {lease.lease_id: lease.terms.session_bytes for lease in rows}
    used_ids = set(sizes)
    open_for_submits = {lease.lease_id for lease in rows if lease.state is not LeaseState.FENCED}
    # Step 2: decide about the remaining workers, oldest first.
    for candidate in others:
        spec = candidate.worker.spec
        if spec.submit_of in open_for_submits and not candidate.is_dropped:
            # A lease has one submit at a time. If there is a second one, an operator has cleared its fence, so it
            # belongs to no lease.
            open_for_submits.discard(spec.submit_of)
            is_running = candidate.is_alive and candidate.is_leased and candidate.page.word is None
            submit = SubmitFound(
                spec.lease_id, spec.submit_of, spec.card_uuid, is_running, spec.timeout_ms, spec.size_bytes
            )
            adoptions.append(Adoption(submit, candidate.worker))
            continue
        # An additional worker of a known lease must not have that lease's number, so draw one for it.
        is_additional = bool(spec.submit_of) or spec.lease_id in used_ids
        number = draw() if is_additional else spec.lease_id
        used_ids.add(number)
        of_lease = (spec.submit_of or spec.lease_id) if is_additional else 0
        # The record of a resize that grew the session may be newer than the zygote's record of the worker's size.
        size_bytes = spec.size_bytes if spec.submit_of else max(spec.size_bytes, sizes.get(of_lease, 0))
        charge_bytes = size_bytes + overheads.get(spec.card_uuid, 0)
        adoptions.append(Adoption(WorkerFound(number, spec.card_uuid, charge_bytes, of_lease), candidate.worker))
    return adoptions


def _restore(
    rows: Sequence[LeaseRow], left_workers: Sequence[LeftoverWorker], latest_ns: int, clocks: tuple[int, int]
) -> tuple[list[Adoption], list[LeftoverWorker]]:
    """Find each lease's own worker. Returns the leases with their workers, and the remaining workers."""
    adoptions = []
    others = list(left_workers)
    for lease in rows:
        own = [candidate for candidate in others if candidate.worker.spec.lease_id == lease.lease_id]
        # A fence may be of a lease that was never granted, so that its only worker was dropped.
        if lease.state is not LeaseState.FENCED:
            own = [candidate for candidate in own if not candidate.is_dropped]
        # While a hung context is being replaced, a lease has two workers, and the second one has no deadline yet.
        # While a session passes from one worker to another, both have the lease's deadline.
        best = max(own, key=lambda candidate: (candidate.is_leased, candidate.is_alive), default=None)
        has_session: bool | None = None
        if lease.terms.is_parkable and lease.state is LeaseState.ACTIVE:
            has_session, best = _with_session(lease, own, best)
        # No zygote has the lease's worker: it died with its zygote, or `end_stray` kills it.
        if best is None:
            adoptions.append(Adoption(LeaseRestored(lease, has_worker=False), None))
            continue
        others.remove(best)
        on_page = _updated_by_page(lease, best.page, latest_ns, best.worker.overran)
        # If a session was being moved to another card, this may be its former worker. Charge the lease, and prove its
        # memory free, on this worker's card.
        if lease.state is not LeaseState.FENCED:
            on_page = on_page._replace(card_uuid=best.worker.spec.card_uuid)
        # The workers' reports are newer than the record.
        if has_session is not None:
            on_page = on_page._replace(is_cold=not has_session)
        membership_deadline = membership_deadline_on(best.page, clocks) if lease.terms.is_claimed else None
        # Numbers of parks are times, so no broker has given one that lies in the future.
        park_number = best.park_number if best.park_number <= clocks[0] else 0
        restored = LeaseRestored(on_page, best.is_alive, best.page.has_session, membership_deadline, park_number)
        adoptions.append(Adoption(restored, best.worker))
    return adoptions, others


def _with_session(
    lease: LeaseRow, own: Sequence[LeftoverWorker], best: LeftoverWorker | None
) -> tuple[bool | None, LeftoverWorker | None]:
    """Find the worker that has the session of a parkable lease.

    The tenant's own workers make these claims, so false ones harm only the tenant's own session.

    Args:
        lease: The lease, as recorded.
        own: Its workers.
        best: The worker that has the session unless the workers say otherwise.

    Returns:
        Whether there is such a worker, and that worker; None and `best` if only the journal shows it.
    """
    leased = [candidate for candidate in own if candidate.is_leased]
    serving = [candidate for candidate in leased if candidate.transfer is Transfer.SERVES]
    if len(serving) == 1:
        return True, serving[0]
    left = [candidate for candidate in leased if candidate.is_alive and candidate.transfer is Transfer.LEFT]
    # According to the record, the session had left its worker, which was set aside. If that worker has died since, the
    # next worker has nothing of the session unless it says that it serves.
    if not (lease.worker_pid or serving or left):
        return False, best
    if len(leased) < 2:
        return None, best
    # The session has left one worker and has not arrived in another. It is unchanged, so the worker that it left can
    # serve it again.
    if len(left) == 1 and not serving and all(candidate.transfer is not None for candidate in leased):
        return True, left[0]
    # It is unknown which of these workers served the session last.
    return (False if serving or sum(candidate.is_alive for candidate in leased) > 1 else None), best


def _found(worker: FoundWorker) -> LeftoverWorker:
    transfer = worker.transfer()
    # The earlier broker has killed this worker, because the session was in the image that the broker kept.
    if transfer is Transfer.LEFT and worker.fds is not None and is_exiting(worker.pid):
        transfer = None
    return LeftoverWorker(worker, worker.page(), transfer, worker.park_number())


def _stop_arrivals(left_workers: Sequence[LeftoverWorker]) -> list[LeftoverWorker]:
    """Kill the workers that have not finished adopting a session, and return the state of all workers after that.

    Such a session continues in the worker that it has left, so its next worker must not finish in the meantime. Blocks
    until the killed workers have ended.
    """
    by_lease: dict[int, list[LeftoverWorker]] = {}
    for candidate in left_workers:
        is_own = not (candidate.worker.spec.submit_of or candidate.is_dropped)
        if candidate.is_leased and candidate.is_alive and is_own:
            by_lease.setdefault(candidate.worker.spec.lease_id, []).append(candidate)
    arrivals: list[FoundWorker] = []
    for own in by_lease.values():
        transfers = [candidate.transfer for candidate in own]
        if Transfer.LEFT in transfers and Transfer.SERVES not in transfers:
            arrivals += [candidate.worker for candidate in own if candidate.transfer is not Transfer.LEFT]
    for worker in arrivals:
        if worker.fds is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.fds[0], signal.SIGKILL)
    for worker in arrivals:
        if worker.fds is not None:
            has_ended(worker.fds[0], STRAY_TIMEOUT_S)
    if not arrivals:
        return list(left_workers)
    return [_found(one.worker) for one in left_workers]


def membership_deadline_on(page: PageState, clocks: tuple[int, int]) -> MembershipDeadline | None:
    """Return the membership deadline on a page, on both clocks; None without one.

    `clocks`: the present time, on both clocks.
    """
    monotonic_ns, now_boot_ns = clocks
    if not page.membership_deadline_boot_ns:
        return None
    return MembershipDeadline(
        page.membership_deadline_boot_ns - now_boot_ns + monotonic_ns, page.membership_deadline_boot_ns
    )


def _updated_by_page(lease: LeaseRow, page: PageState, latest_ns: int, overran: str) -> LeaseRow:
    """Update a lease of the journal by its page, which brokers write before the journal."""
    # A page survives a crash, but the worker's process maps it as well. So accept only values that a broker can have
    # written: a deadline up to `latest_ns`, and a bounded number of renewals.
    if lease.state is LeaseState.ACTIVE and lease.deadline_ns is not None:
        lease = lease._replace(
            deadline_ns=max(lease.deadline_ns, min(page.deadline_ns, latest_ns)),
            generation=max(lease.generation, min(page.generation, lease.generation + MAX_RENEWALS_AHEAD)),
        )
    # The earlier broker has ended the lease, or the zygote has because of a kernel.
    if page.word is not None and lease.state is LeaseState.ACTIVE:
        cause = Cause.KERNEL_TIMEOUT if overran else cause_of(page.word, page.cause)
        reason = overran or "it was ended just before the daemon was"
        lease = lease._replace(state=LeaseState.DRAINING, cause=cause, reason=reason)
    return lease


def adopt(
    rows: Sequence[LeaseRow],
    workers: Workers,
    overheads: Mapping[str, int],
    latest_ns: int,
    post: Callable[[Event], None],
    regions: Sequence[RegionRow] = (),
) -> None:
    """Take over everything: give every worker a number, and post an event about each lease, worker and region.

    Blocks for as long as stray workers take to end.

    Args:
        rows: The leases that the journal has.
        workers: The registry, which has the zygotes' workers.
        overheads: The bytes that one context costs on each card, by the card's uuid.
        latest_ns: The latest deadline that a broker could have given, on the monotonic clock.
        post: Called with each event, for the lease table.
        regions: The regions that the journal has.
    """
    # Step 1: decide, only from the pages and the journal.
    left_workers = _stop_arrivals([_found(worker) for worker in workers.found_workers()])
    clocks = time.monotonic_ns(), boot_ns()
    adoptions = reconcile(rows, left_workers, overheads, latest_ns, lambda: secrets.randbits(128) or 1, clocks)
    # Step 2: register every worker before the first event, because its effects address workers by number.
    for adoption in adoptions:
        event, worker = adoption.event, adoption.worker
        match event:
            case LeaseRestored(kept_lease):
                number = kept_lease.lease_id
            case SubmitFound(submit_id):
                number = submit_id
            case WorkerFound(worker_id):
                number = worker_id
        if worker is not None:
            workers.adopt(worker, number)
        elif isinstance(event, LeaseRestored) and event.kept.worker_pid:
            end_stray(number, event.kept.worker_pid)
            workers.remember_ended(number, event.kept.worker_pid)
    # Step 3: post the events to the lease table.
    for adoption in adoptions:
        post(adoption.event)
        if isinstance(adoption.event, LeaseRestored) and adoption.event.kept.state is LeaseState.FENCED:
            # The lease's bytes stay fenced, whichever process still holds them.
            fenced = adoption.event.kept
            workers.kill(fenced.lease_id)
            workers.fence(fenced.lease_id, fenced.card_uuid, fenced.lease_id)
            workers.settle(fenced.lease_id)
    for region in regions:
        post(RegionRestored(region))
    going_on = sum(isinstance(each.event, LeaseRestored) and each.event.has_worker for each in adoptions)
    if adoptions:
        log_event(LogEvent.SESSIONS_FOUND, count=len(adoptions), going_on=going_on)


def end_stray(lease_id: int, pid: int) -> None:
    """Kill a lease's worker if it still runs and belongs to no zygote: its zygote has died, or can't be found.

    The process id may belong to another process by now, so the process must have the worker's name, too.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if name_of(pid) != worker_name(lease_id):
            return
        log_event(LogEvent.WORKER_STRAY, lease_id=lease_id, worker_pid=pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        has_ended(pidfd, STRAY_TIMEOUT_S)
    finally:
        os.close(pidfd)


def worker_name(lease_id: int) -> str:
    """Return the process name of a lease's worker; the kernel keeps 15 bytes."""
    return f"gpul-{lease_id:032x}"[:15]
