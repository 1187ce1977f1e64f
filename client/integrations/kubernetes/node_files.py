"""The driver's files on its node: records of prepared claims, tokens for pods, and CDI specifications.

Each claim has a record, a folder with its tokens, and a specification. Files are replaced atomically. The record is on
the disk before anything is reported to the kubelet.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.file_replacement import replace_file, sync_folder
from gpulease.client.integrations.kubernetes.kubernetes_objects import MAX_USER
from gpulease.protocol.json_text import indented_json
from gpulease.protocol.lease_ids import lease_id_of

CDI_VERSION: Final = "0.6.0"
CDI_KIND: Final = "gpulease.internal/lease"

POD_FOLDER: Final = "/run/gpulease"
"""Folder inside a container, which has the daemon's socket and a folder for each claim."""

TOKEN_VARIABLE: Final = "GPULEASE_TOKEN_FILE"
"""Environment variable with the path of a container's token; with the suffix _REQUEST, of that request's token."""

MAX_RECORD_BYTES: Final = 1 << 20
"""Most bytes of a record that are read. A record of 32 devices has some 10 KiB."""

_RECORD_VERSION: Final = 1
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class RecordUnreadable(GpuLeaseError):
    """The record of a prepared claim is invalid or from another version."""

    default_hint = "Was it changed, or written by a newer driver? Move it away once no pod uses its claim"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that serves one request of a claim. `lease_id` is 32 hex digits, as in reports."""

    request: str
    pool: str
    device: str
    share_id: str
    lease_id: str


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """The record of a claim that holds leases.

    Attributes:
        uid: The claim's uid.
        boot_id: The host's boot id (random(4)) when the leases were made. No lease survives a reboot.
        user: The user id that its pods run as.
        audience: The user's audience on the node, in hex digits.
        leases: The leases that were acquired for it so far.
        is_ready: Whether the claim is fully prepared. The kubelet is notified only then.
    """

    uid: str
    boot_id: str
    user: int
    audience: str
    leases: tuple[HeldLease, ...] = ()
    is_ready: bool = False

    def with_lease(self, lease: HeldLease) -> Self:
        """Return a copy of the record with one more lease."""
        return replace(self, leases=(*self.leases, lease))


class NodeFiles:
    """The driver's files in two folders: its own, and the one in which container runtimes look for CDI."""

    def __init__(self, state: Path, cdi: Path) -> None:
        """Create the folders. Only this user can read the driver's own folder, because it contains tokens."""
        self._records, self._tokens, self._cdi = state / "claims", state / "tokens", cdi
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._records, self._tokens):
            folder.mkdir(mode=0o700, exist_ok=True)
        cdi.mkdir(mode=0o755, parents=True, exist_ok=True)

    # --- records ---

    def uids(self) -> list[str]:
        """Return the uids of all claims that have a record, readable or not."""
        return sorted(path.stem for path in self._records.glob("*.json"))

    def record(self, uid: str) -> PreparedClaim | None:
        """Return a claim's record; None if it has none. Raises RecordUnreadable, OSError."""
        try:
            return self._read(self._records / f"{uid}.json")
        except FileNotFoundError:
            return None

    def _read(self, path: Path) -> PreparedClaim:
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(MAX_RECORD_BYTES))
            # A copy under another name would free another claim's leases.
            if found.pop("version") != _RECORD_VERSION or found["uid"] != path.stem:
                raise ValueError("another version, or another claim's")
            # Unknown or missing members make this raise TypeError, which counts as unreadable.
            record = PreparedClaim(**found | {"leases": tuple(HeldLease(**lease) for lease in found["leases"])})
            _check(record)
            return record
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordUnreadable(f"{path}: {error}") from None

    def save(self, record: PreparedClaim) -> None:
        """Write a claim's record. It is on the disk when this returns."""
        text = json.dumps({"version": _RECORD_VERSION} | asdict(record))
        replace_file(self._records / f"{record.uid}.json", text.encode(), 0o600, is_synced=True)

    def forget(self, uid: str) -> None:
        """Delete a claim's files, its record last. If it raises OSError, the record stays."""
        # The record is removed last: while it exists, the claim can still be found and ended.
        self._spec_path(uid).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._tokens / uid)
        (self._records / f"{uid}.json").unlink(missing_ok=True)
        sync_folder(self._records)

    # --- what pods get ---

    def write_token(self, record: PreparedClaim, number: int, token: str) -> None:
        """Write the token of a claim's lease, readable only for the pod's user."""
        folder = self._tokens / record.uid
        folder.mkdir(mode=0o500, exist_ok=True)
        # The pod's user may enter the folder, but not write to it.
        if os.geteuid() != record.user:
            os.chown(folder, record.user, -1)
        replace_file(folder / f"token-{number}", token.encode(), 0o400, owner=record.user)

    def drop_token(self, uid: str, number: int) -> None:
        """Delete the token of a lease that is over."""
        (self._tokens / uid / f"token-{number}").unlink(missing_ok=True)

    def write_spec(self, record: PreparedClaim, daemon_socket: Path) -> None:
        """Write a claim's CDI specification, which container runtimes read."""
        spec = cdi_spec(record, daemon_socket, self._tokens / record.uid)
        replace_file(self._spec_path(record.uid), indented_json(spec).encode(), 0o644)

    def _spec_path(self, uid: str) -> Path:
        return self._cdi / f"gpulease-{uid}.json"


def _check(record: PreparedClaim) -> None:
    """Raises ValueError or TypeError for a record that this driver can't have written, before its parts are used."""
    if type(record.user) is not int or not 0 < record.user <= MAX_USER or type(record.is_ready) is not bool:
        raise ValueError("its user is missing, or its readiness is")
    if not isinstance(record.boot_id, str):
        raise ValueError("its boot id must be a string")
    # Raises ValueError for anything but hex digits.
    bytes.fromhex(record.audience)
    for lease in record.leases:
        lease_id_of(lease.lease_id)
        if not all(isinstance(text, str) for text in (lease.request, lease.pool, lease.device, lease.share_id)):
            raise ValueError(f"the request of {lease.lease_id} must be a string")


def boot_id() -> str:
    """Return the host's boot id (random(4)), which is the same in containers."""
    return _BOOT_ID.read_text().strip()


def cdi_id(uid: str, number: int) -> str:
    """Return the CDI name of a claim's device, by which a container runtime adds it to a container."""
    return f"{CDI_KIND}={uid}-{number}"


def cdi_spec(record: PreparedClaim, daemon_socket: Path, tokens: Path) -> dict[str, Any]:
    """Return the specification of what a container gets: the daemon's socket, its tokens and environment variables.

    It gets no device node of a GPU, with which it could bypass the daemon.
    """
    folder = f"{POD_FOLDER}/claims/{record.uid}"
    common = {
        "env": [f"GPULEASE_ADDRESS=unix:{POD_FOLDER}/{daemon_socket.name}"],
        "mounts": [
            _mount(str(daemon_socket), f"{POD_FOLDER}/{daemon_socket.name}"),
            _mount(str(tokens), folder),
        ],
    }
    devices = []
    for number, lease in enumerate(record.leases):
        # A request's name is a DNS label, which may have dashes; a variable's name may not.
        of_request = "".join(mark if mark.isalnum() else "_" for mark in lease.request.upper())
        path = f"{folder}/token-{number}"
        env = [f"{TOKEN_VARIABLE}={path}", f"{TOKEN_VARIABLE}_{of_request}={path}"]
        devices.append({"name": f"{record.uid}-{number}", "containerEdits": {"env": env}})
    return {"cdiVersion": CDI_VERSION, "kind": CDI_KIND, "containerEdits": common, "devices": devices}


def _mount(host: str, container: str) -> Mapping[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "noexec", "bind"]}
