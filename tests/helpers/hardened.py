"""`python -m helpers.hardened UNIT FOLDER COMMAND...`: executes COMMAND with the restrictions of a systemd unit.

It applies them like systemd (systemd.exec(5)), as far as a process can do that by itself: capabilities, no_new_privs,
filters of system calls and address families, no network, and a read-only file system, except FOLDER and what is mounted
below the root.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MISSING: Final = 77
"""Exit status if this host does not permit these restrictions."""

LIBRARY: Final = "libseccomp.so.2"
"""The library with which systemd makes its filters."""

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_NUMBERS: Final = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SETPCAP": 8}

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWNET: Final = 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

_ALLOW: Final = 0x7FFF0000
_FAIL: Final = 0x00050000
_EPERM: Final = 1
_EAFNOSUPPORT: Final = 97
_NOT_EQUAL: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Comparison(ctypes.Structure):
    """A comparison of one argument of a system call: struct scmp_arg_cmp (seccomp_rule_add(3))."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    )


def values(unit: Path, key: str) -> list[str]:
    """Return the words of all lines of a unit that set `key`."""
    lines = (line.partition("=") for line in unit.read_text().splitlines())
    return [word for name, _, text in lines if name == key for word in text.split()]


def calls(names: list[str]) -> Iterator[str]:
    """Yield the system calls with these names. A name that begins with @ is a group of system calls."""
    for name in names:
        if not name.startswith("@"):
            yield name
            continue
        command = ["systemd-analyze", "--no-pager", "syscall-filter", name]
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        # systemd 255 writes colour codes even into a pipe.
        listed = re.sub(r"\x1b\[[0-9;]*m", "", listed)
        yield from calls([line.strip() for line in listed.splitlines()[1:] if line.strip()[:1] not in ("", "#")])


def mount_read_only(folder: str) -> None:
    """Enter a new mount namespace and a new network namespace, where only `folder` is writable. Raises OSError."""
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    path = folder.encode()
    _check(_libc.mount(path, path, None, ctypes.c_ulong(_MS_BIND), None))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | _MS_RDONLY), None))
    # Enter the folder again, because the working folder is still on the earlier mount.
    os.chdir(folder)


def bound(capabilities: list[str]) -> None:
    """Keep only these capabilities in root's bounding set. The next exec removes the others. Raises OSError."""
    kept = {_NUMBERS[name] for name in capabilities}
    number = 0
    while (held := _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:
        if held and number not in kept:
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))
        number += 1


def filter_calls(allowed: set[str], families: list[str]) -> None:
    """Permit only these system calls, and only sockets of these families. Raises OSError."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL | _EPERM)))
    for name in sorted(allowed):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            _check(library.seccomp_rule_add_array(context, _ALLOW, number, 0, None))
    _check(library.seccomp_load(context))
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    rules = [_Comparison(0, _NOT_EQUAL, int(getattr(socket, family)), 0) for family in families]
    assert len(rules) == 1, "several would have to be compared together"
    number = library.seccomp_syscall_resolve_name(b"socket")
    _check(library.seccomp_rule_add_array(context, _FAIL | _EAFNOSUPPORT, number, 1, ctypes.byref(rules[0])))
    _check(library.seccomp_load(context))


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno() or -result
        raise OSError(code, os.strerror(code))


def main(unit: Path, folder: str, command: list[str]) -> None:
    try:
        allowed = set(calls(values(unit, "SystemCallFilter")))
        families = values(unit, "RestrictAddressFamilies")
        mount_read_only(folder)
        bound(values(unit, "CapabilityBoundingSet"))
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        filter_calls(allowed, families)
    except OSError as error:
        print(f"can't be shut in: {error}", file=sys.stderr)
        sys.exit(MISSING)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
