"""`gpulease move`: moves a parkable lease's session to another card, or all sessions of a card to other cards."""

import json

import click

from gpulease.client.cli.card_moves import card_uuid_of, move_sessions
from gpulease.client.cli.lease_ids import lease_id_argument
from gpulease.client.console.exit_status import if_interrupted
from gpulease.client.console.tables import seconds_text, shown, size_text
from gpulease.client.core.lease import MoveReport
from gpulease.client.errors import NotFound
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import LeaseMove, LeaseRef


@click.command()
@lease_id_argument(required=False)
@click.option(
    "--device",
    help="The card to move to, given by its UUID or index. With --from, by default any card with enough room.",
)
@click.option("--from", "source", help="Move all sessions of this card, given by its UUID or index.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def move(lease_id: LeaseId | None, device: str | None, source: str | None, as_json: bool) -> None:
    """Move the session of a parkable lease to another card of this node, or with --from all sessions of a card.

    Connections, handles and device addresses stay valid, and programs can keep running. Waits until each move is
    complete. With --from, sessions that stay are listed with the reason, and the exit status is 1 if any session stays;
    new leases may still be granted on the card that is emptied, unless it is drained (`gpulease drain --device`).
    """
    if (lease_id is None) == (source is None):
        raise click.UsageError("give either LEASE_ID or --from")
    if source is not None:
        uuid = card_uuid_of(source, "--from")
        target = None if device is None else card_uuid_of(device, "--device")
        if uuid == target:
            raise click.UsageError("--from and --device must be different cards")
        move_sessions(uuid, target, as_json=as_json)
    elif lease_id is not None and device is not None:
        _move_one(lease_id, device, as_json)
    else:
        raise click.UsageError("LEASE_ID needs --device")


def _move_one(lease_id: LeaseId, device: str, as_json: bool) -> None:
    note = f"The move of lease {lease_id} may have begun, and then ends without this command: see gpulease leases."
    with if_interrupted(lambda: note):
        moved = ask(Opcode.LEASE_MOVE, LeaseMove(lease_id, device))
        way = _way_of(lease_id)
    if as_json:
        report = {"card_uuid": moved.card_uuid, "moved_bytes": moved.moved_bytes, "took_us": moved.took_us}
        click.echo(json.dumps({"lease_id": str(lease_id)} | report | {"last_move": way}))
        return
    amount = f"{size_text(moved.moved_bytes)} in {seconds_text(moved.took_us / 1_000_000)}"
    if way is not None:
        amount += ", directly" if way["is_direct"] else f", through the host's memory because {way['reason']}"
    click.echo(shown(f"Lease {lease_id} is on card {moved.card_uuid}: {amount}."))


def _way_of(lease_id: LeaseId) -> MoveReport | None:
    """Return how the bytes of a lease's last move were copied; None if the daemon no longer reports that."""
    try:
        report = ask(Opcode.LEASE_QUERY, LeaseRef(lease_id)).report
    except NotFound:
        return None
    way: MoveReport | None = (report.get("park") or {}).get("last_move")
    return way
