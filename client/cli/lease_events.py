"""`gpulease events`: print what happens to leases, one line per event."""

import json
import math
from typing import Any, Final

import click

from gpulease.client.cli.lease_ids import lease_id_argument
from gpulease.client.console.tables import seconds_text, shown
from gpulease.client.core.events import EVERY_LEASE, EventStream, ForwardRevoked, LeaseEvent, RefusalStream
from gpulease.client.core.lease_request import address_of
from gpulease.client.errors import NotFound
from gpulease.client.sync.events import LeaseEvents, RegionWatch
from gpulease.protocol import Phase, Status
from gpulease.protocol.counts import counted


@click.command()
@lease_id_argument(required=False)
@click.option(
    "--refused",
    is_flag=True,
    help=(
        "Print refused launches instead: those that name the region LEASE_ID, or any region of the lease LEASE_ID, "
        "after the region has ended."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(lease_id: int | None, refused: bool, as_json: bool) -> None:
    """Print each phase of LEASE_ID as it begins, until the lease has ended; without LEASE_ID, of all leases."""
    if refused:
        if lease_id is None:
            raise click.UsageError("--refused needs a LEASE_ID, that of a region or of a lease with regions.")
        with RegionWatch(RefusalStream(address_of(None), lease_id)) as watch:
            for refusal in watch:
                click.echo(json.dumps(_refusal_fields(refusal)) if as_json else refusal_text(refusal))
        return
    if lease_id == EVERY_LEASE:
        # In the protocol this id stands for all leases.
        raise NotFound(f"no lease has the id {lease_id}", "See `gpulease leases`")
    with LeaseEvents(EventStream(address_of(None), EVERY_LEASE if lease_id is None else lease_id)) as stream:
        for event in stream:
            click.echo(json.dumps(_fields(event)) if as_json else event_text(event))


def _fields(event: LeaseEvent) -> dict[str, Any]:
    # The names are those of LeaseEvent's fields, except `left_s`, which is in seconds.
    return {
        "lease_id": str(event.lease_id),
        "phase": event.phase_text,
        "left_s": event.left_s,
        "generation": event.generation,
        "cause": event.cause or None,
        "reason": event.reason,
        "lost": event.lost,
    }


def _refusal_fields(refusal: ForwardRevoked) -> dict[str, Any]:
    return {
        "lease_id": str(refusal.lease_id),
        "status": _status_text(refusal.status),
        "kernel": refusal.kernel,
        "site": refusal.site,
        "position": refusal.position,
        "flipped_ns": refusal.flipped_ns,
        "seen_ns": refusal.seen_ns,
        "lost": refusal.lost,
    }


def _status_text(status: Status | int) -> str:
    return status.name.lower() if isinstance(status, Status) else f"status {status}"


def refusal_text(refusal: ForwardRevoked) -> str:
    """Describe a refused launch in one line, without characters that a terminal interprets."""
    refused = f"launch {refusal.site} of {refusal.kernel}" if refusal.kernel else "a graph"
    # The time from the broker's decision until the session noticed the end.
    after_us = (refusal.seen_ns - refusal.flipped_ns) / 1000
    parts = [
        str(refusal.lease_id),
        f"{_status_text(refusal.status)}: {refused} was not started",
        f"position {refusal.position}",
        f"noticed {after_us:.0f} us after the region ended",
    ]
    return shown("  ".join([*parts, *_lost_text(refusal.lost)]))


def _lost_text(lost: int) -> list[str]:
    # Say how many events were dropped because the reader was too slow.
    lost_text = counted(lost, "event before this one was", "events before this one were")
    return [f"{lost_text} lost (read too slowly)"] if lost else []


_NEXT: Final = {
    Phase.ACTIVE: "its warning comes in {}, unless it is renewed",
    Phase.WARNING: "it ends in {} at the latest",
    Phase.GRACE: "its process is killed in {} at the latest",
    Phase.TEARDOWN: "its memory is proved free or fenced within {}",
}
"""What follows a phase, and when. Only a warning's time is the time to the lease's end."""


def event_text(event: LeaseEvent) -> str:
    """Describe an event in one line, without characters that a terminal interprets."""
    parts = [str(event.lease_id), event.phase_text]
    if event.left_s and isinstance(event.phase, Phase) and event.phase in _NEXT:
        # Round up, so that "0.0 s" means that the time has passed.
        parts.append(_NEXT[event.phase].format(seconds_text(math.ceil(event.left_s * 10) / 10)))
    parts += [part for part in (event.cause, event.reason) if part]
    return shown("  ".join([*parts, *_lost_text(event.lost)]))
