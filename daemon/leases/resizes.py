"""Resizes: a running lease's slice becomes larger or smaller, within the rules of admission.

1. A larger slice is charged to the card before the worker is ordered to grow, and the order waits until the charge is
   recorded. It gets only bytes that no lease holds or waits for; warm contexts are not dropped for it.
2. A smaller slice must still hold the lease's regions. The worker gets its order first, and refuses to give up memory
   that the session uses.
3. Bytes are released to the card once it shows that the worker holds no more than the new charge. Until then, also
   after a refusal, the lease is charged for the larger of both sizes.
4. A lease has one resize at a time. If the worker or the proof takes too long, only the request is answered. The resize
   stays open, because a late answer must not be mistaken for the answer to another one.
"""

from dataclasses import replace

from gpulease.daemon.leases import denials, events
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import (
    ArmTimer,
    Effect,
    ProveRegion,
    RequestDenied,
    Resized,
    ResizeSlice,
    WaitTimerFired,
)
from gpulease.daemon.leases.model import Lease, LeaseState, Resize
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.protocol.sizes import size_text
from gpulease.protocol.time_units import NS_PER_S


class Resizes:
    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        # The lease of each request that is not answered yet.
        self._lease_by_request: dict[int, int] = {}

    def on_requested(self, event: events.ResizeRequested, now_ns: int, effects: list[Effect]) -> None:
        """Order the worker to change its slice, or refuse the request."""
        lease = self._store.live.get(event.lease_id)
        denial = self._check_request(lease, event, now_ns)
        if denial is not None or lease is None:
            effects.append(RequestDenied(event.request, denial or denials.not_found(event.lease_id)))
            return
        # If the earlier daemon was killed during a resize, a restored lease's worker may have fewer bytes than its
        # record. So carry out even a resize to the recorded size.
        if event.size_bytes == lease.terms.size_bytes and not lease.is_restored:
            effects.append(Resized(event.request, lease.snapshot()))
            return
        # Until the resize is over, the smaller of both sizes limits new regions.
        due_ns = now_ns + self._store.limits.session_timeout_s * NS_PER_S
        least_bytes = min(event.size_bytes, lease.terms.size_bytes)
        lease.resize = Resize(event.request, event.size_bytes, least_bytes, due_ns)
        lease.is_reshaped = True
        self._lease_by_request[event.request] = lease.lease_id
        # To grow, charge the card first, so that no other lease gets these bytes while the worker grows.
        is_growth = event.size_bytes > lease.terms.size_bytes
        if is_growth:
            self._store.change_size(lease, event.size_bytes)
        session_bytes = event.size_bytes - lease.terms.submit_bytes
        effects.append(ResizeSlice(lease.lease_id, session_bytes, after_record=is_growth))
        effects.append(ArmTimer(WaitTimerFired(event.request), due_ns))

    def _check_request(self, lease: Lease | None, event: events.ResizeRequested, now_ns: int) -> Denial | None:
        # Check in this order: who asks, the lease's state, the least size, the room.
        store = self._store
        denial = store.denial_unless_owner(event.lease_id, event.tenant, event.is_operator) or store.denial_for(
            event.lease_id, now_ns
        )
        if denial is not None or lease is None:
            return denial or denials.is_region(event.lease_id)
        if lease.resize is not None:
            return denials.is_resizing(lease.lease_id)
        if lease.own_submit_bytes:
            return denials.session_taken(lease.lease_id)
        if event.size_bytes < store.limits.min_size_bytes or event.size_bytes <= lease.terms.submit_bytes:
            return denials.invalid(
                f"Lease {lease.lease_id:032x} can't have {event.size_bytes} bytes: the smallest size is "
                f"{size_text(store.limits.min_size_bytes)}, plus its reserve for submits.",
                "Request a larger size.",
            )
        held_bytes = lease.region_bytes + lease.terms.submit_bytes
        if event.size_bytes < held_bytes:
            return denials.too_small_for_regions(lease.lease_id, event.size_bytes, held_bytes)
        more_bytes = event.size_bytes - lease.terms.size_bytes
        return self._check_growth(lease, more_bytes) if more_bytes > 0 else None

    def _check_growth(self, lease: Lease, more_bytes: int) -> Denial | None:
        # Growing must pass the same checks as an acquire: the fleet's claim, the drain, the tenant's bytes, the
        # waiters, the room.
        terms = lease.terms
        if terms.fleet_bytes and terms.size_bytes + more_bytes > terms.fleet_bytes:
            return denials.over_fleet_bytes(lease.lease_id, lease.tenant, terms.fleet_bytes)
        account = self._store.account_by_uuid[lease.card_uuid]
        denial = self._store.check_drains(account) or self._store.check_bytes(lease.tenant, more_bytes)
        if denial is not None:
            return denial
        # Waiters for the card come first, just as they come before a new acquire.
        is_held_back = lease.card_uuid in self._store.queue.held_cards()
        room_bytes = 0 if is_held_back else account.room_bytes
        larger = replace(terms, size_bytes=terms.size_bytes + more_bytes)
        more_charge_bytes = account.charge_bytes(larger) - account.charge_bytes(terms)
        return (
            None if more_charge_bytes <= room_bytes else denials.no_room_to_grow(lease.lease_id, more_bytes, room_bytes)
        )

    def on_resized(self, event: events.SliceResized, now_ns: int, effects: list[Effect]) -> None:
        """Process the worker's answer, and have the card polled before any byte is released."""
        lease = self._store.live.get(event.lease_id)
        if lease is None or lease.resize is None or lease.resize.is_answered:
            return
        resize, size_bytes = lease.resize, event.size_bytes + lease.terms.submit_bytes
        resize.is_answered = True
        if size_bytes != resize.size_bytes:
            resize.doubt = event.doubt or "the session gave no reason"
        # The worker reports the new slice, which never exceeds the bytes charged to the lease.
        resize.least_bytes = min(max(size_bytes, resize.least_bytes), lease.terms.size_bytes)
        less_bytes = lease.terms.size_bytes - resize.least_bytes
        if not less_bytes:
            self._finish(lease, resize, effects)
            return
        # The worker's report does not prove that the bytes are back on the card. Poll until the card shows it.
        allowed_bytes = self._store.charge_bytes(lease.lease_id) - less_bytes
        effects.append(ProveRegion(lease.lease_id, lease.lease_id, lease.card_uuid, allowed_bytes))

    def on_proved(self, lease: Lease, effects: list[Effect]) -> None:
        """Release the bytes that the card shows as free."""
        resize = lease.resize
        if resize is not None and resize.is_answered and lease.state is LeaseState.ACTIVE:
            self._store.change_size(lease, resize.least_bytes)
            self._finish(lease, resize, effects)

    def _finish(self, lease: Lease, resize: Resize, effects: list[Effect]) -> None:
        lease.resize = None
        denial = denials.resize_refused(lease.lease_id, resize.doubt, lease.terms.size_bytes) if resize.doubt else None
        self._answer(lease, resize, denial, effects)

    def _answer(self, lease: Lease, resize: Resize, denial: Denial | None, effects: list[Effect]) -> None:
        # Answer at most once: the timer may have answered already.
        request, resize.request = resize.request, None
        if request is None:
            return
        del self._lease_by_request[request]
        effects.append(Resized(request, lease.snapshot()) if denial is None else RequestDenied(request, denial))

    def on_wait_timer(self, request: int, now_ns: int, effects: list[Effect]) -> bool:
        """Answer a request that has waited too long; return False if the request was not for a resize."""
        lease = self._store.live.get(self._lease_by_request.get(request, 0))
        if lease is None or lease.resize is None:
            return False
        if now_ns < lease.resize.due_ns:
            effects.append(ArmTimer(WaitTimerFired(request), lease.resize.due_ns))
            return True
        task = "show the bytes free" if lease.resize.is_answered else "resize its slice"
        waited_s = self._store.limits.session_timeout_s
        # Only the request is answered. `lease.resize` stays, because the worker may still answer.
        self._answer(lease, lease.resize, denials.session_silent(lease.lease_id, task, waited_s), effects)
        return True

    def end_with_lease(self, lease: Lease, effects: list[Effect]) -> None:
        """End the resize of an ended lease. Its bytes are released with the lease's."""
        resize, lease.resize = lease.resize, None
        if resize is not None:
            self._answer(lease, resize, denials.lease_ended(lease.snapshot()), effects)
