"""Landlock (landlock(7)): the files, devices, network and signals that a worker can reach.

Landlock permanently forbids a process, and the threads that it starts later, to open files and devices; open
descriptors remain usable. A kernel supports the rights of its ABI version. A ruleset forbids all of these rights, and
its rules allow exceptions.
"""

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path
from typing import Final

from gpulease.daemon.sandbox.measures import SandboxNeeds, system_call
from gpulease.protocol.fast_dataclass import dataclass

# The same numbers on every architecture except alpha.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446

_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_RULE_NET_PORT: Final = 2

FILES_SINCE: Final = 1
REFER_SINCE: Final = 2
TRUNCATE_SINCE: Final = 3
NETWORK_SINCE: Final = 4
DEVICES_SINCE: Final = 5
SCOPE_SINCE: Final = 6
"""The first ABI with each right. In this order, the rights came with Linux 5.13, 5.19, 6.2, 6.7, 6.10 and 6.12."""


class PathAccess(IntFlag):
    """LANDLOCK_ACCESS_FS_*, by their names in linux/landlock.h."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


_BIND_TCP: Final = 0b01
_CONNECT_TCP: Final = 0b10
"""LANDLOCK_ACCESS_NET_BIND_TCP and _CONNECT_TCP."""

_ANY_PORT: Final = 0
"""With this port, bind(2) uses a port that the kernel chooses. gRPC tests in this way whether the host has IPv6."""

_ALL_SCOPES: Final = 0b11
"""LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and _SIGNAL."""

# The rights for each use of a path: to read it, to use a device, to name threads below /proc/self, to keep files in a
# folder.
_READ: Final = PathAccess.READ_FILE | PathAccess.READ_DIR
_USE: Final = PathAccess.READ_FILE | PathAccess.WRITE_FILE | PathAccess.READ_DIR | PathAccess.IOCTL_DEV
_NAME_THREADS: Final = _READ | PathAccess.WRITE_FILE | PathAccess.TRUNCATE
_KEEP: Final = (
    _READ
    | PathAccess.WRITE_FILE
    | PathAccess.TRUNCATE
    | PathAccess.MAKE_REG
    | PathAccess.MAKE_DIR
    | PathAccess.REMOVE_FILE
)
_OF_FILES: Final = (
    PathAccess.EXECUTE | PathAccess.WRITE_FILE | PathAccess.READ_FILE | PathAccess.TRUNCATE | PathAccess.IOCTL_DEV
)
"""The rights that a rule on a file may name. The kernel refuses a rule on a file with other rights."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    # The header declares it packed: 12 bytes, without padding.
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def abi() -> int:
    """Return the version of this kernel's Landlock. Raises OSError if it has none, or it is not enabled."""
    return system_call(_CREATE_RULESET, 0, 0, _CREATE_RULESET_VERSION)


@dataclass(frozen=True, slots=True)
class Reach:
    """The kinds of access that a ruleset forbids.

    Attributes:
        files: Access to the file system except the needed paths.
        devices: ioctl on device nodes other than the driver's.
        network: TCP except connections to the needed ports.
        scope: Signals to outside processes, and connections to their abstract sockets.
    """

    files: bool = False
    devices: bool = False
    network: bool = False
    scope: bool = False

    def handled(self, version: int) -> PathAccess:
        """Return the rights on files that a ruleset must forbid for this, as far as this ABI version has them."""
        handled = PathAccess(0)
        if self.files:
            # Begin with all rights of the first ABI, which are the bits below REFER. Add the later rights that this
            # kernel supports.
            handled = PathAccess((1 << PathAccess.REFER.bit_length() - 1) - 1)
            handled |= PathAccess.REFER if version >= REFER_SINCE else PathAccess(0)
            handled |= PathAccess.TRUNCATE if version >= TRUNCATE_SINCE else PathAccess(0)
        if self.devices:
            handled |= PathAccess.IOCTL_DEV
        return handled


def restrict(reach: Reach, needs: SandboxNeeds) -> None:
    """Forbid this process everything that `reach` names, except its needs. no_new_privs must be set. Raises OSError."""
    version = abi()
    handled = reach.handled(version)
    attributes = _Ruleset(handled, (_BIND_TCP | _CONNECT_TCP) * reach.network, _ALL_SCOPES * reach.scope)
    # An older kernel refuses a structure that is longer than its own, so the fields that it lacks are left out.
    size = ctypes.sizeof(_Ruleset) if reach.scope else 16 if reach.network else 8
    ruleset = system_call(_CREATE_RULESET, ctypes.addressof(attributes), size, 0)
    try:
        # Add the exceptions. A rule may name only rights that the ruleset handles.
        for folder in needs.kept:
            _allow(ruleset, folder, _KEEP & handled)
        for path, access in _rules(needs):
            with _opened(path) as fd:
                if fd is not None:
                    _allow(ruleset, fd, access & handled)
        if reach.network and needs.tcp_ports:
            for port, access_to_it in ((_ANY_PORT, _BIND_TCP), *((port, _CONNECT_TCP) for port in needs.tcp_ports)):
                net_rule = _NetPort(access_to_it, port)
                system_call(_ADD_RULE, ruleset, _RULE_NET_PORT, ctypes.addressof(net_rule), 0)
        # From here on the rules apply to this thread and to everything that it starts, and can't be removed.
        system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _rules(needs: SandboxNeeds) -> Iterator[tuple[Path, PathAccess]]:
    yield from ((path, _READ) for path in needs.readable)
    yield from ((path, _USE) for path in needs.devices)
    yield from ((path, _KEEP) for path in needs.writable)
    if needs.own_process:
        yield Path("/proc/self"), _NAME_THREADS


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        # O_PATH suffices, because a rule only refers to the path.
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # A path that is missing, or that this user can't reach, needs no rule.
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _allow(ruleset: int, fd: int, access: PathAccess) -> None:
    # The kernel refuses a rule on a file with a right that only folders have (EINVAL).
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        access &= _OF_FILES
    # The kernel also refuses a rule without rights (ENOMSG).
    if access:
        rule = _PathBeneath(access, fd)
        system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule), 0)
