"""Moves all sessions of a card to other cards, for `gpulease move --from` and `gpulease drain --device --move`."""

from collections.abc import Collection
from typing import Final

import click

from gpulease.client.cli.session_moves import ENDED, BusyRetries, MoveOutcomes, move_each
from gpulease.client.console.reports import Report, cards_of, leases_of
from gpulease.client.console.tables import seconds_text, size_text
from gpulease.client.errors import (
    Busy,
    CapacityExceeded,
    Denied,
    Drained,
    GpuLeaseError,
    InvalidRequest,
    NotFound,
    Unsupported,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.counts import counted
from gpulease.protocol.messages import Empty, LeaseMove, LeaseRef

PATIENCE_S: Final = 10.0
"""How long to try to move a session that is busy, in seconds."""


def move_sessions(uuid: str, target: str | None = None, *, as_json: bool) -> None:
    """Move the sessions of a card one after another, the largest first, because small ones fit into less room.

    Prints a report for each lease of the card, and exits with 1 if any stays (`move_each`).

    Args:
        uuid: The card that the sessions leave.
        target: The card to which they go. If None, each goes to the card with the most room.
        as_json: Whether JSON is printed.
    """
    active = sorted((lease for lease in leases_on(uuid) if lease["state"] == "active"), key=_size_of, reverse=True)
    move_each(
        active,
        lambda lease: _leave(lease, uuid, target),
        MoveOutcomes(
            name=lambda lease: {key: lease[key] for key in ("lease_id", "tenant")},
            columns={"lease": "lease_id", "tenant": "tenant"},
            text_of=_text,
            if_none=f"Card {uuid} has no lease.",
            if_stays=lambda stays: f"{counted(stays, 'lease')} stayed on card {uuid}.",
            as_json=as_json,
        ),
    )


def leases_on(uuid: str) -> list[Report]:
    """Return the reports of the leases on a card, without those of regions."""
    leases = leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)
    return [lease for lease in leases if lease["card_uuid"] == uuid and not lease.get("parent")]


def card_uuid_of(name: str, option: str) -> str:
    """Return the UUID of the card that has this UUID or index. Raises UsageError."""
    cards = cards_of(ask(Opcode.GET_INVENTORY, Empty()))
    for card in cards:
        if name in (card["uuid"], str(card["index"])):
            return str(card["uuid"])
    indexes = ", ".join(str(card["index"]) for card in cards)
    raise click.UsageError(f"{option} must be the UUID or index of a card of this node ({indexes}), not {name!r}")


def _size_of(lease: Report) -> int:
    return int(lease["size_bytes"])


def _leave(lease: Report, uuid: str, target: str | None) -> Report:
    """Move one session to a card with room; return the outcome, and the `reason` if the session was not moved."""
    number, retries = int(lease["lease_id"], 16), BusyRetries(PATIENCE_S)
    if not lease.get("park"):
        return {"outcome": "stays", "reason": "it is not parkable"}
    # A card with room may still refuse this lease: for example, its tenant may not use the card.
    refused, reason = {uuid}, "no other card has room for it"
    while True:
        card = _card_with_room(_size_of(lease), refused, target)
        if card is None:
            return {"outcome": "stays", "reason": reason}
        try:
            moved = ask(Opcode.LEASE_MOVE, LeaseMove(number, card))
        except ENDED:
            return {"outcome": "ended"}
        except Busy as error:
            problem = _not_moved(number, uuid, error)
            if problem["outcome"] == "stays" and retries.pause():
                continue
            return problem
        except (CapacityExceeded, Denied, Drained) as error:
            problem = _not_moved(number, uuid, error)
            if problem["outcome"] != "stays":
                return problem
            refused.add(card)
            reason = error.message
            continue
        except (Unsupported, InvalidRequest) as error:
            return _not_moved(number, uuid, error)
        report = {"card_uuid": moved.card_uuid, "moved_bytes": moved.moved_bytes, "took_us": moved.took_us}
        return {"outcome": "moved"} | report


def _card_with_room(size_bytes: int, refused: Collection[str], target: str | None) -> str | None:
    """Return `target`, or the card outside `refused` with the most room; None if it has too little room."""
    cards = [card for card in cards_of(ask(Opcode.GET_INVENTORY, Empty())) if card["uuid"] not in refused]
    able = [card for card in cards if card["available_bytes"] >= size_bytes and target in (None, card["uuid"])]
    return max(able, key=lambda card: card["available_bytes"])["uuid"] if able else None


def _not_moved(number: int, uuid: str, error: GpuLeaseError) -> Report:
    """Report a session whose move the daemon refused. The session is still on its card, or was parked for the move."""
    try:
        is_on_card = ask(Opcode.LEASE_QUERY, LeaseRef(number)).report["card_uuid"] == uuid
    except NotFound:
        return {"outcome": "ended"}
    return {"outcome": "stays" if is_on_card else "in host memory", "reason": error.message}


def _text(outcome: Report) -> str:
    match outcome["outcome"]:
        case "moved":
            amount = f"{size_text(outcome['moved_bytes'])} in {seconds_text(outcome['took_us'] / 1_000_000)}"
            return f"moved to {outcome['card_uuid']}: {amount}"
        case "ended":
            return "its lease has ended"
        case _:
            return f"{outcome['outcome']}: {outcome['reason']}"
