"""A worker's user, groups, capabilities and descriptors: the workers' user, the devices' groups, and nothing else.

Workers share one user. They can't trace or open each other, because they are not dumpable, and both Landlock and the
filter stop their signals. The zygote keeps the daemon's user: if it ran as the workers' user, any worker could signal
it on a kernel that lacks both.
"""

import ctypes
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gpulease.daemon.host.processes import prctl
from gpulease.daemon.sandbox.measures import SandboxUnavailable
from gpulease.protocol.fast_dataclass import dataclass

STANDARD = (0, 1, 2)
"""The standard descriptors: an empty input, and a pipe to the daemon's log."""


def keep_only(kept_fds: Iterable[int]) -> None:
    """Close every descriptor of this process except `kept_fds` and the standard descriptors."""
    spared = {*STANDARD, *kept_fds}
    # Close each listed descriptor instead of using close_range(2), because the descriptors to keep are among the
    # others.
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in spared:
            try:
                os.close(int(entry))
            except OSError:
                # This was the descriptor of listdir itself.
                continue


DEFAULT_USER: Final = "nobody"

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_CAPABILITY_VERSION_3: Final = 0x20080522
_MAX_CAPABILITIES: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The workers' user. `groups` are the groups that it needs for the devices, in addition to its own group."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def identity_of(name: str, devices: tuple[Path, ...]) -> WorkerIdentity:
    """Return a user with the groups that it needs for the devices. Raises SandboxUnavailable."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise SandboxUnavailable(
            f"the user {name!r} does not exist", hint="Set worker_user to a user that exists."
        ) from None
    if user.pw_uid == 0:
        raise SandboxUnavailable("worker_user is root", hint="Set it to a user without rights.")
    return WorkerIdentity(name, user.pw_uid, user.pw_gid, _groups_for(user.pw_uid, user.pw_gid, devices))


def _groups_for(uid: int, gid: int, devices: tuple[Path, ...]) -> tuple[int, ...]:
    """Return the groups that can read and write the devices.

    Root's group is refused, because it gives access to too much else.
    """
    groups = set()
    for device in devices:
        try:
            status = device.stat()
        except FileNotFoundError:
            continue
        mode = status.st_mode
        # A device that all users, or this user, can open needs no group.
        if not stat.S_ISCHR(mode) or mode & 0o006 == 0o006 or status.st_uid == uid:
            continue
        if mode & 0o060 != 0o060 or status.st_gid == 0:
            raise SandboxUnavailable(
                f"only root can open {device}",
                hint="Give the device to a group (NVreg_DeviceFileGID and NVreg_DeviceFileMode of the nvidia module).",
            )
        groups.add(status.st_gid)
    return tuple(sorted(groups - {gid}))


def become(identity: WorkerIdentity) -> None:
    """Change to that user permanently. Clears the signal for the parent's death (prctl(2)). Raises OSError."""
    # Change the user last, because afterwards the groups can't be changed.
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    # Check the effective, real and saved ids: if one of them were still the old id, the process could change back.
    if os.getresuid() != (identity.uid,) * 3 or os.getresgid() != (identity.gid,) * 3:
        raise PermissionError("the user was not changed")


def bound_capabilities() -> None:
    """Empty the capability sets that an exec could use, as far as this process is allowed to. Raises OSError."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_MAX_CAPABILITIES):
        try:
            if prctl(_PR_CAPBSET_READ, capability):
                prctl(_PR_CAPBSET_DROP, capability)
        except PermissionError:
            # Without CAP_SETPCAP the set stays, but no_new_privs keeps an exec from using it.
            return
        except OSError:
            # This kernel has no capability of this number or a higher one.
            return


def drop_capabilities() -> None:
    """Drop every capability (capset(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # The effective, permitted and inheritable sets, first of 32 capabilities, then of the next 32.
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
