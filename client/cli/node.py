"""Looking after a node: `gpulease info`, `leases`, `revoke`, `fence`."""

import json
import re
import sys
from typing import Any, Final

import click

from gpulease.client.blocking import ask
from gpulease.client.cli.drain import lease_number
from gpulease.client.cli.tables import seconds_text, size_text, table
from gpulease.client.errors import InvalidRequest
from gpulease.protocol import Opcode, RevokeOutcome
from gpulease.protocol.messages import CapabilityRevoke, Empty, FenceClear, LeaseRevoke

_NONCE: Final = re.compile("[0-9a-f]{32}")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.command()
@_json_option
def info(as_json: bool) -> None:
    """Show the cards: what may be leased, what is free, what is fenced; and what workers are shut in by."""
    inventory = ask(Opcode.GET_INVENTORY, Empty())
    if as_json:
        click.echo(json.dumps(inventory.details, indent=2))
        return
    left_ms = next((card.get("drain_left_ms") for card in inventory.details), None)
    if left_ms is not None:
        when = f"what is left ends in {seconds_text(left_ms / 1000)}" if left_ms else "every lease is ended"
        click.echo(f"The node is drained: it grants nothing, and {when}.")
    rows = [
        [
            str(card["index"]),
            card["uuid"],
            card["name"],
            card["driver"],
            size_text(card["capacity_bytes"]),
            size_text(card["available_bytes"]),
            size_text(card["fenced_bytes"]),
            str(card["leases"]),
            _warm(card),
            "yes" if card["exclusive"] else "no",
        ]
        for card in inventory.details
    ]
    click.echo(
        table(["#", "card", "name", "driver", "capacity", "free", "fenced", "leases", "warm", "exclusive"], rows)
    )
    # All workers of a node are in the same one; a daemon from before there was one says nothing.
    sandbox = inventory.details[0].get("sandbox") if inventory.details else None
    if sandbox:
        measures = [[found["measure"], "on" if found["on"] else "OFF", found["detail"]] for found in sandbox]
        click.echo("\n" + table(["workers' sandbox", "", "how far, or why not"], measures))


def _warm(card: dict[str, Any]) -> str:
    """Contexts that wait for a lease, and what all of the pool's hold."""
    if not card.get("warm_wanted") and not card.get("warm_bytes"):
        return "0"
    return f"{card['warm_contexts']} of {card['warm_wanted']}, {size_text(card['warm_bytes'])}"


@click.command()
@_json_option
def leases(as_json: bool) -> None:
    """List leases: your own, or everybody's if you are the operator."""
    found = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo("No leases.")
        return
    click.echo(table(["lease", "tenant", "state", "slice", "used", "launches", "left"], [_row(item) for item in found]))


def _row(lease: dict[str, Any]) -> list[str]:
    return [
        lease["lease_id"],
        lease["tenant"],
        lease["state"] if lease["cause"] is None else f"{lease['state']} ({lease['cause']})",
        size_text(lease["size_bytes"]),
        size_text(lease.get("allocated_bytes", 0)),
        str(lease.get("launches", 0)),
        seconds_text(lease["remaining_ms"] / 1000),
    ]


@click.command()
@click.argument("lease_id")
@click.option("--reason", default="revoked by the operator", help="What its tenant is told.")
@click.option(
    "--token", "nonce", help="End that one token alone: its nonce, as the audit log's `issue` record tells it."
)
def revoke(lease_id: str, reason: str, nonce: str | None) -> None:
    """End a lease at once, whatever it is doing. Exit status 0 only if its memory is proved free."""
    if nonce is not None:
        ask(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(lease_number(lease_id), _nonce_number(nonce), b""))
        click.echo(f"Token {nonce} of lease {lease_id} is over, if there was one.")
        return
    outcome = ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_number(lease_id), reason)).outcome
    match outcome:
        case RevokeOutcome.TORN_DOWN:
            click.echo(f"Lease {lease_id} is torn down and its memory is free.")
        case RevokeOutcome.FENCED:
            why = "could not be proved free and is fenced, unless that was cleared since"
            click.echo(f"Lease {lease_id} is over, but its memory {why}.", err=True)
            sys.exit(1)
        case _:
            click.echo(f"There is no lease {lease_id}.", err=True)
            sys.exit(1)


def _nonce_number(text: str) -> int:
    """A token's nonce as it is typed. Raises InvalidRequest."""
    if not _NONCE.fullmatch(text):
        raise InvalidRequest(f"{text!r} is no token's nonce", "Copy one from `gpulease audit show --kind issue FOLDER`")
    return int(text, 16)


@click.group()
def fence() -> None:
    """Look after memory that could not be proved free."""


@fence.command("clear")
@click.argument("card", required=False)
def fence_clear(card: str | None) -> None:
    """Grant fenced memory again: you vouch that it is free. CARD is a UUID or index; without it, every card."""
    count = ask(Opcode.FENCE_CLEAR, FenceClear(card)).count
    click.echo(f"{count} fenced {'slice was' if count == 1 else 'slices were'} let go.")
