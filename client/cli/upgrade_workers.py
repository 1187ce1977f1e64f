"""`gpulease upgrade-workers`: moves sessions out of the workers of an earlier daemon, one after the other."""

import time
from itertools import count

import click

from gpulease.client.cli.drain import span_option
from gpulease.client.cli.session_moves import ENDED, BusyRetries, MoveOutcomes, move_each
from gpulease.client.console.reports import Report, leases_of
from gpulease.client.errors import (
    Busy,
    CapacityExceeded,
    Denied,
    InvalidRequest,
    Unsupported,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.counts import counted
from gpulease.protocol.messages import Empty, LeaseMove
from gpulease.protocol.time_units import US_PER_MS


@click.command()
@span_option("--pause", "pause_ms", "200ms", "The pause between two sessions.")
@span_option("--patience", "patience_ms", "10s", "How long to retry a session that is busy.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def upgrade_workers(pause_ms: int, patience_ms: int, as_json: bool) -> None:
    """Move sessions out of the workers of an earlier daemon into workers of the running one, one after the other.

    Use it after an upgrade of the daemon. Each session is parked and continues in another process, with the same
    connections, handles and device addresses; its tenant notices one slow operation. A session that can't leave its
    worker stays there until its lease ends. The command lists such sessions with the reasons, and then exits with 1.
    """
    leases = [
        lease
        for lease in leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)
        if lease.get("earlier_version") and lease["state"] == "active"
    ]
    numbers = count(1)

    def upgrade(lease: Report) -> Report:
        if (number := next(numbers)) > 1:
            time.sleep(pause_ms / 1000)
        outcome = _upgrade(lease, patience_ms / 1000)
        if not as_json and len(leases) > 1:
            click.echo(f"{number} of {len(leases)}", err=True)
        return outcome

    move_each(
        leases,
        upgrade,
        MoveOutcomes(
            name=lambda lease: (
                {key: lease[key] for key in ("lease_id", "tenant")} | {"from_version": lease["earlier_version"]}
            ),
            columns={"lease": "lease_id", "tenant": "tenant", "version": "from_version"},
            text_of=_text,
            if_none="No worker runs the code of an earlier daemon.",
            if_stays=lambda stays: (
                f"{counted(stays, 'session')} stayed in {'its' if stays == 1 else 'their'} earlier worker."
            ),
            as_json=as_json,
        ),
    )


def _upgrade(lease: Report, patience_s: float) -> Report:
    """Move one session to another worker; return the outcome."""
    retries = BusyRetries(patience_s)
    while True:
        try:
            moved = ask(Opcode.LEASE_MOVE, LeaseMove(int(lease["lease_id"], 16), lease["card_uuid"]))
        except ENDED:
            return {"outcome": "ended"}
        except Busy as error:
            if retries.pause():
                continue
            return {"outcome": "stays", "reason": error.message}
        except (Unsupported, CapacityExceeded, Denied) as error:
            return {"outcome": "stays", "reason": error.message}
        except InvalidRequest:
            # The session has left its worker since it was listed, because it was parked cold.
            return {"outcome": "upgraded", "moved_bytes": 0, "took_us": 0}
        return {"outcome": "upgraded", "moved_bytes": moved.moved_bytes, "took_us": moved.took_us}


def _text(outcome: Report) -> str:
    match outcome["outcome"]:
        case "upgraded":
            return f"upgraded in {outcome['took_us'] / US_PER_MS:.0f} ms"
        case "ended":
            return "its lease has ended"
        case _:
            return f"{outcome['outcome']}: {outcome['reason']}"
