"""The place of a Unix socket: the socket's file and its lock file.

A program that cleans folders may remove either file while the process lives. So a process takes a place only after it
has tried to connect there, removes no file but its own, and restores files that were removed.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Final

from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.protocol.address import NOBODY_LISTENS, UnixAddress
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

BACKLOG: Final = 512
"""Number of connections that the kernel keeps until they are accepted. The kernel's own limit may be lower."""

CHECK_INTERVAL_S: Final = 5.0
"""Seconds from one call of `UnixPlace.restore` to the next: the longest time for which clients find no socket."""

MAX_TRIES: Final = 100
"""Maximum number of tries for a lock, whose file may be removed after opening and before locking. It bounds the loop if
a program keeps removing the file."""


class PlaceChange(Enum):
    """The changes at a place: a removed file was created again, or clients can no longer be served there."""

    SOCKET_ANEW = auto()
    LOCK_ANEW = auto()
    LOST = auto()


Reporter = Callable[[PlaceChange, str, str], None]
"""Receives a change, the path of the file, and the reason why the file can't be restored; "" unless it is lost."""


class UnixPlace:
    """A place that belongs to this process from now on, unless another process listens there.

    Args:
        address: The place.
        mode: The permissions of sockets that are created there.
        report: Called with each change.

    Attributes:
        problem: The reason why clients can't connect; "" as long as they can.

    Raises:
        CannotListen: Another process holds the lock.
        OSError: The lock file can't be created.
    """

    def __init__(self, address: UnixAddress, mode: int, report: Reporter) -> None:
        self.address = address
        self.problem = ""
        self._mode, self._report = mode, report
        # Take the lock first, because only its holder may do anything else at the path.
        self._lock = PlaceLock(address)
        self._file: os.stat_result | None = None
        self._is_made_here = False

    def bind(self) -> socket.socket:
        """Create a listening socket. Replaces an existing socket file if no process listens at it.

        Raises:
            CannotListen: A process listens, or may listen.
            OSError: The socket can't be created.
        """
        # A socket's file outlives its process. Only connecting shows whether a process still listens.
        if Path(self.address.path).is_socket():
            try:
                is_taken = listener_at(self.address.path) is not None
            except OSError as error:
                raise CannotListen(
                    f"can't listen on {self.address}: it is unknown whether the socket there is in use "
                    f"({error.strerror}); if it is not, delete it"
                ) from None
            if is_taken:
                raise CannotListen(f"can't listen on {self.address}: another process listens on it")
            os.unlink(self.address.path)
        sock = bound_to_path(self.address.path, self._mode)
        self._file, self._is_made_here = file_at(self.address.path), True
        return sock

    def take(self, sock: socket.socket, *, set_mode: bool) -> socket.socket:
        """Return a socket that clients reach at the place: `sock` if it still listens there, or else a new one.

        Raises as `bind` does.
        """
        # The kernel reports the process that called listen(2) last (unix(7), SO_PEERCRED).
        sock.listen(BACKLOG)
        try:
            listener = listener_at(self.address.path)
        except PermissionError:
            # A unit's socket may be for others than the daemon's user. Nothing suggests that it was removed.
            listener = 0
        # Another process has put its own file there, or the file is gone: the socket that was passed can't be reached.
        if listener not in (0, os.getpid()):
            bound = self.bind()
            self._report_recreated()
            sock.close()
            return bound
        if set_mode:
            os.chmod(self.address.path, self._mode)
        self._file = file_at(self.address.path)
        return sock

    def restore(self) -> socket.socket | None:
        """Restore removed files. Returns the new socket that replaces the old one; None if the old one is intact.

        Reports what it restores, and once what it can't restore. Call it again after CHECK_INTERVAL_S, for as long as
        the place is held.
        """
        # Restore the lock file first: without it, another daemon could take the place while the socket is created.
        was_present = self._is_there()
        try:
            if self._lock.renew():
                self._report(PlaceChange.LOCK_ANEW, self._lock.path, "")
            bound = None if was_present else self.bind()
        except (CannotListen, OSError) as error:
            # A second daemon may hold the lock for a moment, until it finds that this one listens.
            if not was_present and not self.problem:
                self.problem = f"clients can't connect to {self.address}: its file was removed, and {error}"
                self._report(PlaceChange.LOST, self.address.path, str(error))
            return None
        self.problem = ""
        if bound is not None:
            self._report_recreated()
        return bound

    def release(self, *, keep_file: bool = False) -> None:
        """Release the place. Removes the socket's file, unless it belongs to another process or must be kept."""
        # Remove only a file that this process created and that is still at the path: by now, the file there could be
        # another daemon's.
        if self._is_made_here and not keep_file and self._is_there():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)
        self._lock.release()

    def _is_there(self) -> bool:
        current_file = file_at(self.address.path)
        return current_file is not None and self._file is not None and os.path.samestat(current_file, self._file)

    def _report_recreated(self) -> None:
        self._report(PlaceChange.SOCKET_ANEW, self.address.path, "")


class PlaceLock:
    """A lock file next to a Unix socket, held for as long as one daemon listens there.

    The lock keeps two daemons that start together from taking a socket from each other.

    Raises:
        CannotListen: Another daemon holds the lock.
        OSError: The file can't be opened.
    """

    def __init__(self, address: UnixAddress) -> None:
        self.path = f"{address.path}.lock"
        self._address = address
        self._fd = self._taken()

    def renew(self) -> bool:
        """Take the lock again if its file was removed, and return whether it was. Raises as the class does."""
        if self._is_at_path(self._fd):
            return False
        # Take the new lock before the old one is closed, so that the place is locked at every moment.
        fd = self._taken()
        os.close(self._fd)
        self._fd = fd
        return True

    def release(self) -> None:
        with contextlib.suppress(OSError):
            # Only the holder removes the file, so no other daemon's file can be at the path since the check.
            if self._is_at_path(self._fd):
                os.unlink(self.path)
        os.close(self._fd)

    def _taken(self) -> int:
        for _ in range(MAX_TRIES):
            fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                break
            # The holder before us may have removed the file after we opened it. Then our lock protects nothing: other
            # daemons lock a new file at the path.
            if self._is_at_path(fd):
                return fd
            os.close(fd)
        raise CannotListen(f"can't listen on {self._address}: another gpuleased listens on it")

    def _is_at_path(self, fd: int) -> bool:
        current_file = file_at(self.path)
        return current_file is not None and os.path.samestat(os.fstat(fd), current_file)


def bound_to_path(
    path: str, mode: int, kind: int = socket.SOCK_STREAM, *, takes_descriptors: bool = False
) -> socket.socket:
    """Return a socket that listens at a path where nothing is. Raises OSError.

    Args:
        path: The path.
        mode: The permissions of the socket's file.
        kind: The socket's type.
        takes_descriptors: Whether peers may pass descriptors.
    """
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        if not takes_descriptors:
            refuse_descriptors(sock)
        sock.setblocking(False)
        sock.bind(path)
        os.chmod(path, mode)
        # Listen at once: a client that finds the file may connect.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def listener_at(path: str) -> int | None:
    """Return the id of the process that listens at a path; None if there is none, 0 if it can't be identified.

    A listener in this process gets a connection that is closed at once.

    Raises:
        OSError: It can't be determined: this user may not connect, or it is a socket of another type.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        # Nonblocking, because a full backlog must not block the daemon's start.
        tried.setblocking(False)
        try:
            tried.connect(path)
        except BlockingIOError:
            # The listener's backlog is full.
            return 0
        except OSError as error:
            if error.errno in NOBODY_LISTENS:
                return None
            raise
        return parse_ucred(tried.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).pid


def file_at(path: str) -> os.stat_result | None:
    """Return the status of the file at a path, not following a link; None if there is no file."""
    try:
        return os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
