"""Delivers the lease table's orders about regions to the sessions' workers, and the workers' answers to the table.

A tenant may have compromised its worker. An answer counts only if it concerns a region of the worker's own lease and
its figures can be true. The lease table ignores answers without an order.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract import messages
from gpulease.daemon.contract.message_fields import U64_MAX, Message
from gpulease.daemon.contract.regions_page import BrokerRegionsPage
from gpulease.daemon.leases import events
from gpulease.daemon.leases.events import Event
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState
from gpulease.daemon.record.audit.records import clean_text
from gpulease.daemon.workers.region_link import RegionLink
from gpulease.daemon.workers.registry import MAX_REASON_CHARS, Workers
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES
from gpulease.protocol.opcodes import Status
from gpulease.protocol.session_words import STATUS_OF_WORD

U32_MAX: Final = 2**32 - 1

_REFUSALS: Final = frozenset(-status for status in (*STATUS_OF_WORD.values(), Status.FENCED))

_LIVE_STATES: Final = (LeaseState.PENDING, LeaseState.ACTIVE)

OnForwardRevoked = Callable[[LeaseSnapshot, messages.ForwardRevokedReport, bool], None]
"""Called with a region, a launch that was refused because of it, and whether that launch was the first for which the
region's word was read."""


class RegionOrders:
    """Delivers orders about regions to workers, and their answers to the lease table.

    Args:
        lookup: Returns a lease or a region by its id.
        workers: The workers.
        post: Called with each answer, as an event.
        on_forward_revoked: Called with each launch that a session refused because of a region.
    """

    def __init__(
        self,
        lookup: Callable[[int], LeaseSnapshot | None],
        workers: Workers,
        post: Callable[[Event], None],
        on_forward_revoked: OnForwardRevoked,
    ) -> None:
        self._lookup = lookup
        self._workers = workers
        self._post = post
        self._on_forward_revoked = on_forward_revoked
        self._is_adopting = False
        # By lease: the slice's size in the order to its worker, until the worker has answered.
        self._ordered_bytes: dict[int, int] = {}
        # By cancelled region, the time of the last cancel that a refused launch has reported.
        self._reported_cancels: dict[int, int] = {}

    # --- orders ---

    def open(self, order: events.OpenRegion) -> None:
        region = messages.OpenRegionOrder(order.region_id, order.slot, order.number, order.size_bytes)
        if (problem := self._send(order.lease_id, region)) is not None:
            self._post(
                events.RegionRefused(order.region_id, f"The session can't be notified of the region: {problem}.")
            )

    def set(self, order: events.SetRegion) -> None:
        """Write a region's word, which the session's worker reads, or its next worker if it has none now."""
        try:
            page = self._page(order.lease_id)
        except OSError as error:
            self._condemn(order.lease_id, error)
            return
        if page is not None:
            # Read the clock last: the delay of refusals is measured from this time of the word's change.
            page.set(order.slot, order.number, order.word, order.deadline_ns, time.monotonic_ns())

    def _page(self, lease_id: int) -> BrokerRegionsPage | None:
        """Return the page of a session's words, made when first used; None if there is none. Raises OSError."""
        page = self._workers.images.words(lease_id)
        if page is None and (link := self._link(lease_id)) is not None:
            page = link.page
        return page

    def end(self, order: events.EndRegion) -> None:
        """Order a worker to remove a region's memory. If the session has no worker, wipe the memory here."""
        if (answer := self._workers.images.end_region(order.lease_id, order.region_id)) is not None:
            self._post(answer)
            return
        if (
            problem := self._send(order.lease_id, messages.EndRegionOrder(order.region_id, order.grace_ms))
        ) is not None:
            reason = f"its session can't be notified of its end: {problem}"
            self._post(events.RegionStuck(order.region_id, reason, Cause.UNRESPONSIVE))

    def resize(self, order: events.ResizeSlice) -> None:
        """Order a worker to change the size of its slice."""
        # Record the order before it is sent, because an answer without an order is ignored.
        self._ordered_bytes[order.lease_id] = order.size_bytes
        self._send(order.lease_id, messages.ResizeSliceOrder(order.size_bytes))

    def refuse_resize(self, order: events.ResizeSlice, doubt: str) -> None:
        """Answer in the worker's place that the slice keeps its size."""
        if (worker := self._workers.worker(order.lease_id)) is not None:
            self._post(events.SliceResized(order.lease_id, worker.spec.size_bytes, doubt))

    def forget(self, lease_id: int) -> None:
        """Forget the orders and reports of a lease or region that has ended."""
        self._ordered_bytes.pop(lease_id, None)
        self._reported_cancels.pop(lease_id, None)

    # --- adoption ---

    def begin_adoption(self) -> None:
        """Hold every order from now on: workers that were taken over must receive a complete page first."""
        self._is_adopting = True

    def end_adoption(self) -> None:
        """Send each adopting worker its page, and the orders that were held back."""
        self._is_adopting = False
        for worker in self._workers.serving():
            if worker.regions is None:
                continue
            try:
                worker.regions.release()
            except OSError as error:
                self._condemn(worker.spec.lease_id, error)

    def _condemn(self, lease_id: int, error: OSError) -> None:
        """End a session whose worker can't be sent its regions' words: without them no region could be ended."""
        reason = f"its regions page can't be sent to it: {error.strerror}"
        self._post(events.SessionCondemned(lease_id, Cause.UNRESPONSIVE, reason))

    def _link(self, lease_id: int) -> RegionLink | None:
        """Return a worker's link, which is made when it is first used; None without a worker. Raises OSError."""
        worker = self._workers.worker(lease_id)
        return None if worker is None else worker.open_regions(is_held=self._is_adopting)

    def _send(self, lease_id: int, message: Message) -> str | None:
        """Send an order. Returns why it can't be sent; None if it was sent, or if the lease has no worker."""
        try:
            if (link := self._link(lease_id)) is not None:
                link.order(message)
        except OSError as error:
            return error.strerror or "no file descriptor is left"
        return None

    # --- answers ---

    def on_message(self, lease_id: int, message: Message) -> None:
        if isinstance(message, messages.SliceResizedReport):
            self._on_resized(lease_id, message)
            return
        # A worker may only report regions of its own lease.
        region = self._lookup(getattr(message, "region_id", 0))
        if region is None or not lease_id or region.parent_id != lease_id:
            return
        match message:
            case messages.RegionOpenedReport(region_id, address):
                # The worker chose the address, and its tenant gets it. Refuse an address that would overflow when the
                # tenant adds an offset.
                is_possible = 0 < address <= U64_MAX + 1 - region.size_bytes
                impossible = events.RegionRefused(region_id, "The session returned an impossible address.")
                self._post(events.RegionOpened(region_id, address) if is_possible else impossible)
            case messages.RegionRefusedReport(region_id, reason):
                self._post(events.RegionRefused(region_id, clean_text(reason, MAX_REASON_CHARS)))
            case messages.RegionEndedReport():
                self._post(_end_of(region, message))
            case messages.RegionStuckReport(region_id, reason):
                self._post(events.RegionStuck(region_id, clean_text(reason, MAX_REASON_CHARS)))
            case messages.RegionReleasedReport(region_id):
                self._post(events.RegionReleased(region_id))
            case messages.ForwardRevokedReport() if _is_possible(region, message):
                # The kernel's name is a tenant's text: cut it to its maximum length in bytes, and drop half a character
                # at the end.
                kernel = clean_text(message.kernel, MAX_KERNEL_NAME_BYTES).encode()[:MAX_KERNEL_NAME_BYTES]
                message = replace(message, kernel=kernel.decode(errors="ignore"))
                self._on_forward_revoked(region, message, self._is_first_refusal(region, message))

    def _is_first_refusal(self, region: LeaseSnapshot, message: messages.ForwardRevokedReport) -> bool:
        """Return whether a refused launch is the first for which the region's word was read.

        Only then does its delay measure the time from the change of the word to its first reader.
        """
        if message.status != -Status.CANCELLED or region.state is not LeaseState.ACTIVE:
            return message.status != -Status.FENCED
        earlier_ns, self._reported_cancels[region.lease_id] = (
            self._reported_cancels.get(region.lease_id),
            message.flipped_ns,
        )
        return earlier_ns != message.flipped_ns

    def _on_resized(self, lease_id: int, message: messages.SliceResizedReport) -> None:
        # A worker may answer an order only once.
        ordered_bytes = self._ordered_bytes.pop(lease_id, None)
        if ordered_bytes is None:
            return
        doubt = clean_text(message.doubt, MAX_REASON_CHARS)
        if message.size_bytes != ordered_bytes:
            doubt = doubt or f"its session used {message.size_bytes} bytes"
        elif (worker := self._workers.worker(lease_id)) is not None:
            worker.resize(ordered_bytes)
        self._post(events.SliceResized(lease_id, message.size_bytes, doubt))


def _end_of(region: LeaseSnapshot, message: messages.RegionEndedReport) -> Event:
    if not (message.freed_bytes or message.kept_bytes):
        # The region was never opened, or the session has released it. If it was open once, the table requires a proof.
        return events.RegionRefused(region.lease_id, "The session has no such region.")
    if message.freed_bytes + message.kept_bytes != region.size_bytes:
        figures = f"{message.freed_bytes} bytes freed and {message.kept_bytes} kept"
        reason = f"its session reports {figures} of {region.size_bytes}"
        return events.RegionStuck(region.lease_id, reason, Cause.UNRESPONSIVE)
    # If the driver's figure for free memory grew by that much, the proof needs no poll of the card.
    is_shown = message.shown_bytes >= message.freed_bytes
    return events.RegionEnded(region.lease_id, message.freed_bytes, message.kept_bytes, is_shown)


def _is_possible(region: LeaseSnapshot, message: messages.ForwardRevokedReport) -> bool:
    # The refusal must fit the table's own times: a compromised worker could otherwise distort the metrics and the audit
    # log.
    now_ns = time.monotonic_ns()
    if message.status not in _REFUSALS or message.site > U32_MAX or not message.flipped_ns <= message.seen_ns <= now_ns:
        return False
    if message.told_ns and not message.seen_ns <= message.told_ns <= now_ns:
        return False
    if message.status == -Status.FENCED:
        # When a deadline passes, no word is written, so there is no time to compare.
        return True
    # Every end is in the table before it is on the page, except that the worker may notice first that a deadline has
    # passed.
    is_due = message.status == -Status.LEASE_EXPIRED and region.deadline_ns is not None and region.deadline_ns <= now_ns
    may_be_live = message.status == -Status.CANCELLED or is_due
    return region.created_ns <= message.flipped_ns and (may_be_live or region.state not in _LIVE_STATES)
