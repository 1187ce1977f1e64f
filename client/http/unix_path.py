"""The path of a Unix socket at which a server listens.

Cleaning up a folder may remove the socket file of a running server. So a server tries to connect to a path before it
takes the path, never removes another server's socket, and recreates its own. No lock is needed: of two servers that
start at the same moment, one notices and logs that the other has the path.
"""

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from gpulease.protocol.address import NOBODY_LISTENS
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

BACKLOG: Final = 128

CHECK_INTERVAL_S: Final = 5.0
"""Seconds between two checks of a socket's file. After the file's removal, clients may be unable to connect for that
long."""

_MODE: Final = 0o660
_log: Final = logging.getLogger("gpulease.socket")


def bound_to_path(path: str) -> socket.socket:
    """Return a socket that listens at a path. The file of an abandoned socket is replaced. Raises OSError."""
    remove_abandoned(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.bind(path)
        # Set the mode before `listen`, so that no peer can connect while the mode is still the default.
        os.chmod(path, _MODE)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def remove_abandoned(path: str) -> None:
    """Remove a socket's file if no process listens there, but no other file. Raises OSError if a process listens."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            # If a process listens, the path is in use, and its file must stay.
            if _listener_at(path) is not None:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
            os.unlink(path)


def remove_path(path: str) -> None:
    """Remove a server's own socket file when the server ends, but not a file that another server has made since."""
    with suppress(OSError):
        # After this server's file was removed, another server may have taken the path, or a user made a file there.
        if stat.S_ISSOCK(os.lstat(path).st_mode) and _listener_at(path) in (None, os.getpid()):
            os.unlink(path)


async def keep_path(sock: socket.socket, replace: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Watch the path of a listening socket until cancelled, and make a new socket whenever its file was removed.

    Args:
        sock: The socket. A socket without a path is not watched.
        replace: Called with each new socket. The old one gets no new connections; those that it accepted continue.
    """
    path = sock.getsockname() if sock.family == socket.AF_UNIX else ""
    if not path:
        return
    own_file, is_lost = file_at(path), False
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        # If the file has the same inode as at the start, it is still this server's socket.
        if (
            (current_file := file_at(path)) is not None
            and own_file is not None
            and os.path.samestat(current_file, own_file)
        ):
            continue
        try:
            bound = bound_to_path(path)
        except OSError as error:
            # Log once per loss, not at every check.
            if not is_lost:
                _log.error("the socket's file %s was removed, and it can't be created again yet: %s", path, error)
            is_lost = True
            continue
        own_file, is_lost = file_at(path), False
        _log.warning("the socket's file %s was removed: the socket was created again", path)
        # Let the server accept from the new socket.
        await replace(bound)


def _listener_at(path: str) -> int | None:
    """Return the pid of the process that listens at a path; 0 if unknown; None if there is none. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as probe:
        # While the backlog is full, a blocking connect would wait. This one fails with EAGAIN, which shows that a
        # process listens.
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno in NOBODY_LISTENS:
                return None
            raise
        # The kernel reports the process that called listen(2) (unix(7), SO_PEERCRED).
        return parse_ucred(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).pid


def file_at(path: str) -> os.stat_result | None:
    """Return the status of a path, without following a link; None if nothing is there."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
