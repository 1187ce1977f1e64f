"""What a relay gives up before it reads a byte of a stranger's: everything but its own connection."""

import os
import platform
import resource
from typing import Final

from gpulease.daemon.processes import gain_no_privileges, never_dump, set_name
from gpulease.daemon.sandbox import landlock, syscalls
from gpulease.daemon.sandbox.needs import Needs

NOBODY: Final = 65534
"""The user and group of that name on Linux hosts: what a relay is where the daemon is root."""

RELAY_NAME: Final = "gpul-relay"
"""For ps(1)."""

MAX_DATA_BYTES: Final = 256 << 20
"""Of a relay's own memory. An honest one uses a few MiB; stops a handshake that makes OpenSSL grow without end."""

_LIMITS: Final = (
    (resource.RLIMIT_CORE, 0),  # no memory of it, with its connection's keys, on a disk
    (resource.RLIMIT_NPROC, 0),  # no process and no thread, where it is not root
    (resource.RLIMIT_DATA, MAX_DATA_BYTES),
)


def keep_only(descriptors: tuple[int, ...]) -> None:
    """Close every descriptor but these and the standard three: the others are other people's connections."""
    begin = 3
    for fd in sorted(descriptors):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(descriptors: tuple[int, ...]) -> None:
    """Keep these and nothing else, for good. Raises OSError if it can't be done: then nothing is to be relayed."""
    keep_only(descriptors)
    set_name(RELAY_NAME)
    gain_no_privileges()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # After the change of user, which sets it anew.
    never_dump()
    for limit, most in _LIMITS:
        resource.setrlimit(limit, (most, most))
    # No more descriptors than there are.
    most_fds = max(descriptors) + 2  # one for Landlock's own, which is closed again
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
    _shut_in()


def _shut_in() -> None:
    """No file, no address, nobody's signal, and no system call but a worker's: as far as this host has it.

    Workers are the same user where the daemon is root, and the daemon's files are where it is not.
    """
    try:
        version = landlock.abi()
    except OSError:
        version = 0  # this kernel has no Landlock, which the workers' sandbox tells the operator of
    if version >= landlock.FILES_SINCE:
        reach = landlock.Reach(
            files=True,
            devices=version >= landlock.DEVICES_SINCE,
            network=version >= landlock.NETWORK_SINCE,
            scope=version >= landlock.SCOPE_SINCE,
        )
        landlock.restrict(reach, Needs())
    if platform.machine() == syscalls.MACHINE:
        syscalls.install(writes_files=False)
