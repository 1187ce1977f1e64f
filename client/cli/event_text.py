"""What `gpulease events` says of an event: what comes next, and until when at most."""

import math
from typing import Final

from gpulease.client.cli.cells import shown
from gpulease.client.cli.tables import seconds_text
from gpulease.client.core.events import LeaseEvent
from gpulease.protocol import Phase

_NEXT: Final = {
    Phase.ACTIVE: "its warning comes in {}, if it is not renewed",
    Phase.WARNING: "it ends in {} at most",
    Phase.GRACE: "what still runs is killed in {} at most",
    Phase.TEARDOWN: "its memory is proved free in {}, or fenced",
}
"""What an event's time is the time to: of none but a warning's is it the lease's end."""


def event_text(event: LeaseEvent) -> str:
    """One line, nothing in which a terminal obeys."""
    parts = [str(event.lease_id), event.phase_text]
    if event.left_s and isinstance(event.phase, Phase) and event.phase in _NEXT:
        # Rounded up: what is called 0.0 s has passed.
        parts.append(_NEXT[event.phase].format(seconds_text(math.ceil(event.left_s * 10) / 10)))
    parts += [part for part in (event.cause, event.reason) if part]
    if event.lost:
        which = "1 event before this one was" if event.lost == 1 else f"{event.lost} events before this one were"
        parts.append(f"{which} not read in time and lost")
    return shown("  ".join(parts))
