"""The driver's files on its node: records of prepared ResourceClaims, files for containers, and CDI specifications.

Each claim has a record, a folder with a file for each of its leases, and a CDI specification. Each user has a folder
that only this user can enter, with the daemon's socket. Files are replaced atomically.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from gpulease.client.core.assigned_leases import FOLDER_VARIABLE
from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.file_replacement import replace_file, sync_folder
from gpulease.client.integrations.kubernetes.kubernetes_objects import MAX_USER
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.json_text import indented_json
from gpulease.protocol.lease_ids import lease_id_of

CDI_VERSION: Final = "0.5.0"
"""The oldest version of CDI in which a device's name may begin with a digit, like a uid."""

CDI_KIND: Final = "gpulease.internal/lease"

POD_FOLDER: Final = "/run/gpulease"
"""Path in each container. The folder has `leases`, and `users/USER/daemon` with the daemon's socket."""

MAX_RECORD_BYTES: Final = 1 << 20
"""Maximum number of bytes of a record. A record of 32 devices has about 10 KiB."""

_RECORD_VERSION: Final = 2
_TOKENS_VERSION: Final = 1
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_DAEMON: Final = "daemon"
_LEASE_MEMBERS_V1: Final = ("request", "pool", "device", "share_id", "lease_id")


class RecordUnreadable(GpuLeaseError):
    """The record of a prepared claim is invalid or from another version."""

    default_hint = "Was it changed, or written by a newer driver? Move it away once no pod uses its claim"


@dataclass(frozen=True, slots=True)
class LeasedDevice:
    """A device that is prepared for one request of a claim.

    Attributes:
        request: The request's name, as the scheduler reported it.
        number: The device's number among the devices of the request.
        pool: The pool's name.
        device: The device's name.
        share_id: Kubernetes' id of this share of the device, if several claims share it; else ''.
        user: The user that the containers run as, and the lease's tenant.
        lease_id: The lease in 32 hex digits; "" for an administrator's access, which has no lease.
        size_bytes: The lease's size.
        until_s: Until when the lease is renewed, in seconds of CLOCK_BOOTTIME; None for as long as the claim is
            prepared.
    """

    request: str
    number: int
    pool: str
    device: str
    share_id: str
    user: int
    lease_id: str
    size_bytes: int
    until_s: float | None

    @property
    def main_request(self) -> str:
        """The request's name in the pod, without the alternative that was chosen."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """The record of a claim that holds leases.

    Attributes:
        uid: The claim's uid.
        boot_id: The host's boot id (random(4)) when the leases were made. No lease survives a reboot.
        namespace: The claim's namespace.
        name: The claim's name.
        claim: The claim's name in the pod.
        users: The users that its containers run as.
        devices: The devices that have been acquired for it.
        is_ready: Whether the claim is fully prepared. Only then does the kubelet get a reply.
    """

    uid: str
    boot_id: str
    namespace: str
    name: str
    claim: str
    users: tuple[int, ...]
    devices: tuple[LeasedDevice, ...] = ()
    is_ready: bool = False

    def with_device(self, device: LeasedDevice) -> Self:
        """Return a copy of the record with one more device."""
        return replace(self, devices=(*self.devices, device))

    @property
    def leases(self) -> tuple[LeasedDevice, ...]:
        return tuple(device for device in self.devices if device.lease_id)


class NodeFiles:
    """The driver's files, in its own folder `state` and in the container runtimes' folder `cdi`."""

    def __init__(self, state: Path, cdi: Path) -> None:
        """Create the folders. Only this user can read the driver's own folder."""
        self._records, self._leases, self._users = state / "claims", state / "leases", state / "users"
        self._locks, self._cdi = state / "locks", cdi
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._records, self._leases, self._users, self._locks):
            folder.mkdir(mode=0o700, exist_ok=True)
        # An earlier version of the driver stored tokens here.
        shutil.rmtree(state / "tokens", ignore_errors=True)
        cdi.mkdir(mode=0o755, parents=True, exist_ok=True)

    @contextmanager
    def locked(self, name: str, *, waits: bool = True) -> Iterator[bool]:
        """Hold a lock during the block, against other threads and the other driver of a rolling update.

        Yields False if `waits` is False and the lock is held.
        """
        path = self._locks / name
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                yield False
                return
            # If the previous holder has removed the file, the lock of this descriptor has no effect. Then open the file
            # again.
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    break
            os.close(descriptor)
        try:
            yield True
        finally:
            # Remove the file while the lock is held, so that claims leave no files behind.
            path.unlink(missing_ok=True)
            os.close(descriptor)

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

    def readable_records(self) -> list[PreparedClaim]:
        """Return all records that can be read."""
        records = []
        for uid in self.uids():
            with suppress(RecordUnreadable, OSError):
                if (record := self.record(uid)) is not None:
                    records.append(record)
        return records

    def _read(self, path: Path) -> PreparedClaim:
        try:
            with path.open("rb") as file:
                document = json.loads(file.read(MAX_RECORD_BYTES))
            version = document.pop("version")
            if version == _TOKENS_VERSION:
                document = _of_tokens(document)
            elif version != _RECORD_VERSION:
                raise ValueError("another version")
            # A record under another claim's name would free the wrong leases.
            if document["uid"] != path.stem:
                raise ValueError("another claim's")
            # Unknown or missing members raise TypeError, and make the record unreadable.
            devices = tuple(LeasedDevice(**device) for device in document["devices"])
            record = PreparedClaim(**document | {"devices": devices, "users": tuple(document["users"])})
            _check(record)
            return record
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordUnreadable(f"{path}: {error}") from None

    def save(self, record: PreparedClaim, *, is_synced: bool = True) -> None:
        """Write a claim's record. If `is_synced`, it is on the disk when this returns."""
        text = json.dumps({"version": _RECORD_VERSION} | asdict(record))
        replace_file(self._records / f"{record.uid}.json", text.encode(), 0o600, is_synced=is_synced)

    def forget(self, uid: str) -> None:
        """Delete a claim's files, its record last. If it raises OSError, the record stays."""
        # Remove the record last. While it exists, the claim's leases can be found and ended.
        self._spec_path(uid).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._leases / uid)
        (self._records / f"{uid}.json").unlink(missing_ok=True)
        sync_folder(self._records)

    # --- files for containers ---

    def write_container_files(self, record: PreparedClaim, daemon_socket: Path) -> None:
        """Write the files for a claim's containers: users' folders, a file per lease, and the CDI specification."""
        for user in record.users:
            folder = self._users / str(user)
            folder.mkdir(mode=0o500, exist_ok=True)
            # In a container, the daemon's folder is mounted here.
            (folder / _DAEMON).mkdir(mode=0o555, exist_ok=True)
            # Only this user can enter the folder, so a container that runs as another user can't reach the socket.
            if os.stat(folder).st_uid != user:
                os.chown(folder, user, -1)
        leases = self._leases / record.uid
        leases.mkdir(mode=0o755, exist_ok=True)
        for number, device in enumerate(record.devices):
            if device.lease_id:
                text = indented_json(_lease_file(record, device))
                replace_file(leases / f"{number}.json", text.encode(), 0o444)
        spec = cdi_spec(record, daemon_socket, self._users, leases)
        replace_file(self._spec_path(record.uid), indented_json(spec).encode(), 0o644)

    def _spec_path(self, uid: str) -> Path:
        return self._cdi / f"gpulease-{uid}.json"


def _lease_file(record: PreparedClaim, device: LeasedDevice) -> dict[str, Any]:
    return {
        "lease_id": device.lease_id,
        "claim": record.claim,
        "request": device.main_request,
        "number": device.number,
        "device": device.device,
        "size_bytes": device.size_bytes,
    }


def _of_tokens(document: dict[str, Any]) -> dict[str, Any]:
    """Convert a record of the version that gave tokens to pods. Its leases end, and the claim is prepared again."""
    user = document["user"]
    defaults = {"number": 0, "user": user, "size_bytes": 0, "until_s": None}
    devices = [{name: lease[name] for name in _LEASE_MEMBERS_V1} | defaults for lease in document["leases"]]
    names = dict.fromkeys(("namespace", "name", "claim"), "")
    return names | {"uid": document["uid"], "boot_id": document["boot_id"], "users": [user], "devices": devices}


def _check(record: PreparedClaim) -> None:
    """Raise ValueError or TypeError if this driver can't have written the record."""
    if not all(type(user) is int and 0 <= user <= MAX_USER for user in record.users):
        raise ValueError("its users must be user ids")
    if type(record.is_ready) is not bool:
        raise ValueError("its readiness is missing")
    if not all(isinstance(text, str) for text in (record.boot_id, record.namespace, record.name, record.claim)):
        raise ValueError("its names must be strings")
    for device in record.devices:
        if device.lease_id:
            lease_id_of(device.lease_id)
        texts = device.request, device.pool, device.device, device.share_id, device.lease_id
        if not all(isinstance(text, str) for text in texts) or device.user not in record.users:
            raise ValueError(f"the request of {device.lease_id} must be a string, its user one of the claim's")
        if type(device.number) is not int or type(device.size_bytes) is not int:
            raise ValueError(f"the size of {device.lease_id} must be a number")
        if device.until_s is not None and not isinstance(device.until_s, int | float):
            raise ValueError(f"the end of {device.lease_id} must be a number of seconds")


def boot_id() -> str:
    """Return the host's boot id (random(4)), which is the same in containers."""
    return _BOOT_ID.read_text().strip()


def cdi_id(uid: str, number: int) -> str:
    """Return the CDI name of a claim's device, by which container runtimes find its specification."""
    return f"{CDI_KIND}={uid}-{number}"


def cdi_spec(record: PreparedClaim, daemon_socket: Path, users: Path, leases: Path) -> dict[str, Any]:
    """Return the specification of a container's mounts: the daemon's socket and a file for each of its leases.

    A runtime merges the specifications of a container's devices, so they must not contradict each other. The container
    gets no device node of a GPU, with which it could bypass the daemon.
    """
    devices = []
    for number, device in enumerate(record.devices):
        of_user = f"{POD_FOLDER}/users/{device.user}"
        env = [f"{ADDRESS_VARIABLE}=unix:{of_user}/{_DAEMON}/{daemon_socket.name}"]
        mounts = [
            _mount(str(users / str(device.user)), of_user),
            # Mount the folder, because a daemon that restarts creates another socket in it.
            _mount(str(daemon_socket.parent), f"{of_user}/{_DAEMON}"),
        ]
        if device.lease_id:
            env.append(f"{FOLDER_VARIABLE}={POD_FOLDER}/leases")
            mounts.append(_mount(str(leases / f"{number}.json"), f"{POD_FOLDER}/leases/{record.uid}-{number}.json"))
        devices.append({"name": f"{record.uid}-{number}", "containerEdits": {"env": env, "mounts": mounts}})
    return {"cdiVersion": CDI_VERSION, "kind": CDI_KIND, "devices": devices}


def _mount(host: str, container: str) -> Mapping[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "noexec", "bind"]}
