"""Closing what a worker inherits and has no use for.

Whose process a worker is: a user of its own, no groups but the devices', no capabilities.

Workers share one user. What keeps them from each other is that none can be traced or opened (undumpable), and that
neither Landlock nor the filter lets a signal through. The zygote stays the daemon's: one that ran as the workers' user
could be signalled by any of them wherever a kernel lacks those two.
"""

import ctypes
import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulease.daemon.sandbox.measures import SandboxBroken, prctl

STANDARD = (0, 1, 2)
"""Nothing to read, and a pipe to the daemon's log."""


def keep_only(kept: Iterable[int]) -> None:
    """Close every descriptor of this process but these and the standard ones."""
    spared = {*STANDARD, *kept}
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in spared:
            try:
                os.close(int(entry))
            except OSError:
                # The one that the folder was read by.
                continue


DEFAULT_USER: Final = "nobody"

_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_CAPABILITY_VERSION_3: Final = 0x20080522
_MAX_CAPABILITIES: Final = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """Who workers are."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def identity_of(name: str, devices: tuple[Path, ...]) -> Identity:
    """A user, with the groups that it needs for the devices. Raises SandboxBroken."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise SandboxBroken(f"there is no user {name!r}", hint="Set worker_user to one that is there.") from None
    if user.pw_uid == 0:
        raise SandboxBroken("worker_user is root", hint="Set it to a user who may do nothing.")
    return Identity(name, user.pw_uid, user.pw_gid, _groups_for(user.pw_uid, user.pw_gid, devices))


def _groups_for(uid: int, gid: int, devices: tuple[Path, ...]) -> tuple[int, ...]:
    """The groups by which the devices can be read and written. Root's is never given: it opens too much else."""
    groups = set()
    for device in devices:
        try:
            found = device.stat()
        except FileNotFoundError:
            continue
        mode = found.st_mode
        if not stat.S_ISCHR(mode) or mode & 0o006 == 0o006 or found.st_uid == uid:
            continue
        if mode & 0o060 != 0o060 or found.st_gid == 0:
            raise SandboxBroken(
                f"nobody but root can open {device}",
                hint="Give it to a group (NVreg_DeviceFileGID and NVreg_DeviceFileMode of the nvidia module).",
            )
        groups.add(found.st_gid)
    return tuple(sorted(groups - {gid}))


def become(identity: Identity) -> None:
    """Be that user, for good; clears the signal of the parent's death (prctl(2)). Raises OSError."""
    os.setgroups(identity.groups)
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    if os.getresuid() != (identity.uid,) * 3 or os.getresgid() != (identity.gid,) * 3:
        raise PermissionError("the user was not changed")


def bound_capabilities() -> None:
    """Empty the sets that an exec could take capabilities from; as long as this process may. Raises OSError."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_MAX_CAPABILITIES):
        try:
            if prctl(_PR_CAPBSET_READ, capability):
                prctl(_PR_CAPBSET_DROP, capability)
        except PermissionError:
            # Without CAP_SETPCAP there is nothing to lose: no_new_privs keeps an exec from using the set.
            return
        except OSError:
            # The first number that this kernel knows no capability for.
            return


def drop_capabilities() -> None:
    """Have none (capset(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable, 32 of each, and once more for the next 32.
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def be_undumpable() -> None:
    """Let nobody of the same user trace this process or open its memory; setuid and exec undo it (prctl(2))."""
    prctl(_PR_SET_DUMPABLE, 0)
