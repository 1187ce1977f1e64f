"""Leases that were acquired for this program: the one in GPULEASE_LEASE_ID, or those in files of its container.

A container runtime merges the environment variables of a container's devices, and keeps only the last value of a name,
so variables can't name several leases. Therefore a cluster's driver gives a container a folder, which GPULEASE_LEASES
names, with one JSON file for each of its leases.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.client.errors import InvalidRequest
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_ids import LeaseId, lease_id_of

FOLDER_VARIABLE: Final = "GPULEASE_LEASES"

MAX_FILE_BYTES: Final = 64 << 10
"""Maximum number of bytes read from a file; a file has about 300."""


@dataclass(frozen=True, slots=True)
class AssignedLease:
    """A lease that a cluster assigned to this container.

    Attributes:
        lease_id: The lease.
        names: Names that select the lease: `CLAIM/REQUEST/NUMBER`, `CLAIM/REQUEST`, `REQUEST` and its id.
    """

    lease_id: LeaseId
    names: tuple[str, ...]


def assigned_lease_id(name: str | None) -> LeaseId:
    """Return the id of a lease that was acquired for this program.

    Args:
        name: Which of a container's leases; None for GPULEASE_LEASE_ID, or the container's only lease.

    Raises InvalidRequest if there is none, or if several have that name.
    """
    text = os.environ.get(LEASE_ID_VARIABLE, "")
    # The user's setting takes precedence over the container's.
    if name is None and text:
        try:
            return lease_id_of(text)
        except ValueError as error:
            raise InvalidRequest(f"{LEASE_ID_VARIABLE}: {error}") from None
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        raise InvalidRequest(
            f"attach: no token was given, and neither {LEASE_ID_VARIABLE} nor {FOLDER_VARIABLE} is set",
            "Give a token, or start the program as `gpulease run --vram 4GiB -- CMD`",
        )
    leases = assigned_leases(Path(folder))
    matches = [lease for lease in leases if name is None or name in lease.names]
    if len(matches) != 1:
        subject = "lease of this container" if name is None else f"lease that is named {name!r}"
        choice = ", ".join(lease.names[0] for lease in leases) or "none"
        raise InvalidRequest(
            f"attach: there must be one {subject}, not {len(matches)}",
            f"Name one: attach(name=...). There are: {choice}",
        )
    return matches[0].lease_id


def assigned_leases(folder: Path) -> list[AssignedLease]:
    """Return the leases in a container's folder, in the order of their names. Raises InvalidRequest."""
    try:
        return sorted(map(_read, folder.glob("*.json")), key=lambda lease: lease.names)
    except OSError as error:
        raise InvalidRequest(f"{FOLDER_VARIABLE}: {error}") from None


def _read(path: Path) -> AssignedLease:
    try:
        with path.open("rb") as file:
            contents: dict[str, Any] = json.loads(file.read(MAX_FILE_BYTES))
        lease_id = lease_id_of(contents["lease_id"])
        claim, request, number = str(contents["claim"]), str(contents["request"]), int(contents["number"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{FOLDER_VARIABLE}: {path} does not describe a lease: {error}") from None
    names = f"{claim}/{request}/{number}", f"{claim}/{request}", request, str(contents["lease_id"])
    return AssignedLease(lease_id, names)
