"""Frees a lease of a job or pod, and waits until its memory is proved free."""

import time
from collections.abc import Callable
from typing import Any, Final

from gpulease.client.errors import Disconnected, GpuLeaseError, NotFound, Revoked
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import LeaseRef

REVOKED: Final = "revoked"
"""The cause in the report of a lease that an operator revoked."""

_POLL_S: Final = 0.05


class NotProvedFree(GpuLeaseError):
    """A lease's memory is not proved free yet, so it can't be granted again."""

    default_hint = "Ask again. If the lease is fenced, an operator must clear it: gpulease fence clear"


def report_of(lease_id: LeaseId, address: str) -> dict[str, Any]:
    """Return a lease's report, with only `state` and `cause` if the daemon has forgotten the lease."""
    try:
        return dict(ask(Opcode.LEASE_QUERY, LeaseRef(lease_id), address).report)
    except NotFound:
        # A daemon without a journal was restarted. At its start it ended all workers and checked the cards.
        return {"state": "torndown", "cause": None}
    except Revoked:
        # The daemon remembers a revocation for longer than the lease itself.
        return {"state": "torndown", "cause": REVOKED}


def free_and_prove(lease_id: LeaseId, address: str, limit_s: float, on_message: Callable[[str], None]) -> None:
    """Free a lease, if it has not ended, and wait until every byte is proved free.

    Args:
        lease_id: The lease.
        address: The daemon's address.
        limit_s: Maximum seconds to wait.
        on_message: Called with a message if FREE fails, for example because the lease has already ended.

    Raises NotProvedFree after `limit_s`, or as soon as the lease is fenced, and Disconnected if no daemon answers.
    """
    until_s = time.monotonic() + limit_s
    state = report_of(lease_id, address)["state"]
    # Step 1: free it, unless it has ended already.
    if state in ("active", "pending"):
        try:
            ask(Opcode.LEASE_FREE, LeaseRef(lease_id), address, limit_s)
        except Disconnected:
            raise
        except GpuLeaseError as error:
            # The lease may have ended, which its state will show.
            on_message(f"freeing {lease_id}: {error}")
    # Step 2: poll until the daemon reports "torndown", which means that every byte is proved free.
    while (state := report_of(lease_id, address)["state"]) != "torndown":
        # A fenced lease stays fenced until an operator clears it, so do not wait longer.
        if state == "fenced" or time.monotonic() > until_s:
            raise NotProvedFree(f"the lease {lease_id} is {state}, its memory not proved free")
        time.sleep(_POLL_S)
