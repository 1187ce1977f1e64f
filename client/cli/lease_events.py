"""`gpulease events`: print what happens to leases, a line for each event."""

import json
import math
from typing import Any, Final

import click

from gpulease.client.cli.lease_ids import lease_id_argument
from gpulease.client.cli.tables import seconds_text, shown
from gpulease.client.engine.events import EVERY_LEASE, EventStream, LeaseEvent
from gpulease.client.engine.lease_request import address_of
from gpulease.client.sync.events import LeaseEvents
from gpulease.protocol import Phase


@click.command()
@lease_id_argument(required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def events(lease_id: int | None, as_json: bool) -> None:
    """Print what leases go through, a line each: of LEASE_ID until it has ended, or of all you may see, for ever."""
    with LeaseEvents(EventStream(address_of(None), EVERY_LEASE if lease_id is None else lease_id)) as stream:
        for event in stream:
            click.echo(json.dumps(_fields(event)) if as_json else event_text(event))


def _fields(event: LeaseEvent) -> dict[str, Any]:
    return {
        "lease_id": str(event.lease_id),
        "phase": event.phase_text,
        "left_s": event.left_s,
        "generation": event.generation,
        "cause": event.cause or None,
        "reason": event.reason,
        "lost": event.lost,
    }


_NEXT: Final = {
    Phase.ACTIVE: "its warning comes in {}, if it is not renewed",
    Phase.WARNING: "it ends in {} at most",
    Phase.GRACE: "what still runs is killed in {} at most",
    Phase.TEARDOWN: "its memory is proved free in {}, or fenced",
}
"""The next step after a phase, and the time to it. Only a warning's time is the time to the lease's end."""


def event_text(event: LeaseEvent) -> str:
    """Describe an event in one line, without characters that a terminal obeys."""
    parts = [str(event.lease_id), event.phase_text]
    if event.left_s and isinstance(event.phase, Phase) and event.phase in _NEXT:
        # Rounded up, so that "0.0 s" means that the time has passed.
        parts.append(_NEXT[event.phase].format(seconds_text(math.ceil(event.left_s * 10) / 10)))
    parts += [part for part in (event.cause, event.reason) if part]
    if event.lost:
        which = "1 event before this one was" if event.lost == 1 else f"{event.lost} events before this one were"
        parts.append(f"{which} not read in time and lost")
    return shown("  ".join(parts))
