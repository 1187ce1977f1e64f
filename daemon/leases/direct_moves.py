"""Direct moves: a session's bytes go from its card straight to another card that can read the first card's memory.

1. The session is parked in place: its work has ended, and its bytes stay on its card. Nothing is copied to the host.
2. Its worker sends the image with descriptors of its pages, and is set aside, as in a worker upgrade. Both cards are
   charged for the session until the move is over.
3. The new worker copies the bytes from the pages, and reports that the session is complete. Only then is the former
   worker ended, and its bytes are proved free like those of any other worker.
4. If anything fails before that, the former worker continues the session on its own card. The request is refused with
   the reason, and the session's next move goes through the host's memory.

If the other card can't read the first card's memory, the steps are the same, but the bytes pass through a ring of
buffers in the host's memory, which the former worker fills while the next one empties it. All other moves need room for
the whole session in the host's memory. `way_of` decides which way a move goes; its reason is reported with the move.
"""

from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.events import Effect
from gpulease.daemon.leases.model import Lease
from gpulease.daemon.leases.park_state import ParkPhase, ParkState
from gpulease.daemon.leases.table_state import LeaseStore

FOR_NEED = "another lease needs its room"
NO_PAGES = "its worker could not lend its pages to the other card"


def way_of(store: LeaseStore, lease: Lease, state: ParkState, account: CardAccount) -> tuple[str, bool]:
    """Return why a session can't move to a card directly, "" if it can; and whether its bytes pass through a ring."""
    why = ""
    if not store.limits.direct_moves:
        why = "direct_moves is off"
    elif account.card.uuid not in store.account_by_uuid[lease.card_uuid].card.peers:
        why = "the cards can't access each other's memory"
    why_parked = _why_parked(store, lease, state, account)
    return why or why_parked, bool(why) and not why_parked


def _why_parked(store: LeaseStore, lease: Lease, state: ParkState, account: CardAccount) -> str:
    """Return why all bytes of a session must be in the host's memory during a move; "" if they can stay on its card."""
    if state.phase is not ParkPhase.RESIDENT:
        return "its bytes were already in host memory"
    if state.direct_failure:
        return f"its last direct move failed: {state.direct_failure}"
    # A session that waits for room would hold its bytes on its own card during the wait.
    is_held = account.card.uuid in store.queue.held_cards()
    if is_held or account.charge_bytes(lease.terms) > account.free_bytes:
        return "the other card had no room for it yet"
    return ""


def change_card(
    store: LeaseStore, lease: Lease, state: ParkState, account: CardAccount, now_ns: int, effects: list[Effect]
) -> None:
    """Put a lease that is charged nothing on another card."""
    former = store.drain_of(lease.card_uuid)
    store.account_by_uuid[lease.card_uuid].give_back(lease)
    lease.card_uuid, state.off_bytes = account.card.uuid, account.charge_bytes(lease.terms)
    account.restore(lease)
    account.parked_bytes += state.off_bytes
    # No bytes were released, but a lease that must be alone may fit on the former card now, and the waiters of this
    # tenant no longer hold others back on the new card.
    store.has_freed_room = True
    for region in lease.regions.values():
        region.card_uuid = account.card.uuid
    # Withdraw the former card's drain warning, and send that of the new card.
    if former != store.drain_of(lease.card_uuid):
        store.warn(lease, now_ns, effects)
