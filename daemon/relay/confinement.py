"""What a relay gives up before it reads a byte of a stranger's: everything but its own connection."""

import os
import resource
from typing import Final

from gpulease.daemon.processes import gain_no_privileges, never_dump, set_name

NOBODY: Final = 65534
"""The user and group of that name on Linux hosts: what a relay is where the daemon is root."""

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
    set_name("gpul-relay")
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
    most_fds = max(descriptors) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
