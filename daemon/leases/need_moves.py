"""Moves that make room: which idle sessions of a card are moved to other cards of the host so that an acquire fits.

An acquire that fits on no card may fit after sessions have gone from one card to others that have room. A plan names
sessions of one card and a target card for each. It moves few bytes: the smallest session that suffices, or else the
largest ones first. Moves in progress are taken into account, so that no second plan is made for the same acquire. A
session that was moved to make room is not moved for that again within `MOVED_STAY_NS`, so that two acquires can't move
it back and forth.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gpulease.daemon.leases import devices
from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.model import Lease
from gpulease.daemon.leases.quotas import TenantRules
from gpulease.protocol.time_units import NS_PER_S

MOVED_STAY_NS: Final = 60 * NS_PER_S
"""Time in nanoseconds for which a session that was moved to make room for another lease is not moved for that again."""


Moves = tuple[tuple[Lease, str], ...]
"""Sessions to move, each with the uuid of its next card."""


class NeedMoves(NamedTuple):
    """The moves that make room on one card for an acquire that fits on none."""

    from_uuid: str
    moves: Moves

    @property
    def moved_bytes(self) -> int:
        return sum(lease.terms.size_bytes for lease, _ in self.moves)


def plan_moves(
    movable: Iterable[Lease],
    missing_bytes: int,
    targets: Iterable[CardAccount],
    arriving: Mapping[str, int],
    rules: TenantRules,
    most: int,
) -> Moves | None:
    """Return the moves that free the bytes that a card lacks; None if no moves can.

    Args:
        movable: Sessions of the card that may be moved now.
        missing_bytes: Bytes that the card lacks.
        targets: The cards that the sessions may move to.
        arriving: Bytes that moves in progress will take on each card, by its uuid.
        rules: The limits of the sessions' tenants, which name the cards that they may use.
        most: Maximum number of moves.
    """
    accounts = {account.card.uuid: account for account in targets}
    rooms = {uuid: account.free_bytes - arriving.get(uuid, 0) for uuid, account in accounts.items()}
    candidates = sorted(movable, key=lambda lease: (lease.terms.size_bytes, lease.lease_id))
    moves: list[tuple[Lease, str]] = []
    while missing_bytes > 0:
        if len(moves) == most:
            return None
        # Take the smallest session that suffices alone; if there is none, take the largest ones first.
        enough = [lease for lease in candidates if lease.terms.size_bytes >= missing_bytes]
        for lease in [*enough, *reversed(candidates[: len(candidates) - len(enough)])]:
            # A session that no target has room for is dropped: the targets' room only shrinks.
            candidates.remove(lease)
            card_uuid = _target_of(lease, accounts, rooms, rules)
            if card_uuid is not None:
                break
        else:
            return None
        moves.append((lease, card_uuid))
        rooms[card_uuid] -= accounts[card_uuid].charge_bytes(lease.terms)
        missing_bytes -= lease.terms.size_bytes
    return tuple(moves)


def may_take(account: CardAccount, lease: Lease) -> bool:
    """Return whether a card can take a lease once there is room. Whether its tenant may use the card is not checked."""
    is_large_enough = account.charge_bytes(lease.terms) <= account.card.capacity_bytes
    is_able = is_large_enough and account.has_parkable_room(lease.terms) and not account.exclusive_leases
    is_able = is_able and account.drain_ns is None
    return is_able and bool(devices.suitable([account], lease.terms.exclusivity))


def _target_of(
    lease: Lease, accounts: Mapping[str, CardAccount], rooms: Mapping[str, int], rules: TenantRules
) -> str | None:
    """Return the card that a session fits on best, with the least room left; None if it fits on none."""
    limits = rules.of(lease.tenant)
    free_bytes = {
        uuid: rooms[uuid] - account.charge_bytes(lease.terms)
        for uuid, account in accounts.items()
        if may_take(account, lease) and limits.may_use(account.card)
    }
    fitting = [(room, uuid) for uuid, room in free_bytes.items() if room >= 0]
    return min(fitting)[1] if fitting else None
