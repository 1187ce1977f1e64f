"""`gpulease acquire`, `renew` and `free`: a lease that outlives the command that acquired it.

Such a lease ends by its deadline or by `free`: it is never orphaned. Programs find it by GPULEASE_ADDRESS and
GPULEASE_LEASE_ID, as the programs of `gpulease run` do.
"""

import json
import math
import shlex
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import click

from gpulease.client.cli.fleet import ask_about
from gpulease.client.cli.lease_ids import lease_id_argument
from gpulease.client.cli.lease_options import LeaseArguments, lease_options, time_option
from gpulease.client.console.exit_status import MissingPrerequisite, if_interrupted
from gpulease.client.console.tables import seconds_text, size_text
from gpulease.client.core import lease as engine
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE, LeaseRequest, address_of
from gpulease.client.sync.driver import drive, drive_with_clean_up
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import LeaseRef, LeaseRenew, LeaseRenewed

EPOCH_VARIABLE: Final = "GPULEASE_EPOCH"
"""Environment variable in which `gpulease acquire` gives programs the lease's epoch, if it has a name."""

_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
_lease = lease_id_argument(variable=LEASE_ID_VARIABLE)


class _LastingRequest(LeaseRequest):
    """Acquires a lease that needs no connection."""

    def acquire(self, use: Callable[[engine.LeaseHandle], None]) -> None:
        """Acquire the lease and use it; it is freed if that fails. Raises the errors of `GpuBuilder.acquire`."""
        # The lease's only connection ends with this command.
        self.orphan_secs(0)
        acquisition = engine.lease_clean_up()
        drive_with_clean_up(
            acquisition, engine.acquire(self._where(), self._request(), threading.RLock(), acquisition), use
        )


@click.command()
@lease_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of shell commands.")
def acquire(lease_request: LeaseArguments, as_json: bool) -> None:
    """Acquire a lease for the duration --for, whichever programs use it.

    `gpulease free` ends it earlier.

    Prints variable assignments for the shell, so that its programs find the lease: eval "$(gpulease acquire --vram
    4GiB)". Such a program opens a session with `GpuSession.attach()`. If you connect through a fleet address,
    GPULEASE_ADDRESS is set to the node that granted the lease.
    """
    # If the id can't be printed, nobody can free the lease.
    if sys.stdout is None:
        raise MissingPrerequisite("the lease can't be printed because standard output is closed")

    def use(lease: engine.LeaseHandle) -> None:
        try:
            click.echo(json.dumps(_fields(lease)) if as_json else _exports(lease))
        finally:
            lease.channel.close()

    # If printing the id fails, the lease is freed.
    lease_request.described_to(_LastingRequest()).acquire(use)


def _environment(lease: engine.LeaseHandle) -> dict[str, str]:
    """The variables by which a program finds a lease."""
    # `gpulease run` sets the same variables, so a program finds its lease in the same way with either command.
    variables = {ADDRESS_VARIABLE: str(lease.address), LEASE_ID_VARIABLE: str(LeaseId(lease.grant.lease_id))}
    return variables | ({EPOCH_VARIABLE: str(lease.epoch)} if lease.name else {})


def _exports(lease: engine.LeaseHandle) -> str:
    """Commands for any shell; the semicolons allow several of them on one line."""
    return "\n".join(f"export {name}={shlex.quote(value)};" for name, value in _environment(lease).items())


def _fields(lease: engine.LeaseHandle) -> dict[str, Any]:
    claim = {"name": lease.name, "epoch": lease.epoch} if lease.name else {}
    return {
        "lease_id": str(LeaseId(lease.grant.lease_id)),
        "address": str(lease.address),
        "environment": _environment(lease),
        **claim,
        "generation": lease.generation,
        "size_bytes": lease.grant.size_bytes,
        "card_uuid": lease.grant.card_uuid,
        "ttl_ms": lease.grant.ttl_ms,
        "expires_at_unix_s": lease.expires_at_unix_s,
    }


@click.command()
@_lease
@time_option
@_json
def renew(lease_id: LeaseId, ttl_ms: int, as_json: bool) -> None:
    """Extend a lease or a region, so that it ends after the time --for, counted from now.

    LEASE_ID defaults to GPULEASE_LEASE_ID.
    """
    note = f"Lease {lease_id} may have been extended: see gpulease leases."
    with if_interrupted(lambda: note):
        renewed: LeaseRenewed = ask_about(lease_id, Opcode.LEASE_RENEW, LeaseRenew(lease_id, ttl_ms))
    # A program reads the JSON object; its times are those of the reply.
    if as_json:
        fields = {"lease_id": str(lease_id), "generation": renewed.generation, "ttl_ms": renewed.ttl_ms}
        click.echo(json.dumps(fields | {"expires_at_unix_s": renewed.expires_at_unix_s}))
    else:
        click.echo(f"Lease {lease_id} lasts for {seconds_text(math.ceil(renewed.ttl_ms / 1000))}.")


@click.command()
@_lease
@click.option("--memory", is_flag=True, help="Free only the memory that no open session owns; the lease continues.")
@_json
def free(lease_id: LeaseId, memory: bool, as_json: bool) -> None:
    """Free a lease or a region, with everything in its memory.

    LEASE_ID defaults to GPULEASE_LEASE_ID.

    With --memory, only buffers kept by name and buffers left by ended programs are freed; the lease continues. The
    command opens a session for this: unless the lease is SHARED, its session must not be open elsewhere.
    """
    if memory:
        with if_interrupted(lambda: f"Memory of lease {lease_id} may have been freed: see gpulease leases."):
            freed_bytes = _reset(lease_id)
        fields = {"lease_id": str(lease_id), "freed_bytes": freed_bytes}
        click.echo(json.dumps(fields) if as_json else f"{size_text(freed_bytes)} of lease {lease_id} were freed.")
        return
    with if_interrupted(lambda: f"Lease {lease_id} may have been freed: see gpulease leases."):
        ask_about(lease_id, Opcode.LEASE_FREE, LeaseRef(lease_id))
    click.echo(json.dumps({"lease_id": str(lease_id)}) if as_json else f"Lease {lease_id} was freed.")


def _reset(lease_id: LeaseId) -> int:
    """Free everything that no open session of a lease holds; returns the number of bytes.

    Raises the errors of `GpuSession.reset`.
    """
    # Import these only here, because that takes longer than the other commands take to run.
    from gpulease.client.sync.lease import GpuSharedLease
    from gpulease.client.sync.session import GpuSession

    # The lease belongs to this user, so its id is enough, and no token is needed.
    state = drive(engine.by_id(address_of(None), threading.RLock(), lease_id))
    try:
        with GpuSession(GpuSharedLease(state), shared_memory=False) as session:
            return session.reset()
    finally:
        state.channel.close()
