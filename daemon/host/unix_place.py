"""The place of a Unix socket: the socket's file, and the lock beside it.

Whoever cleans a folder may remove either under a living process. So nobody takes a place without having tried to
connect there, a process removes no file but its own, and makes anew what was removed.
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
"""Connections the kernel keeps until they are accepted. The kernel's own limit may be lower."""

LOOK_S: Final = 5.0
"""Seconds between two calls of `UnixPlace.restore`: how long clients may find no socket."""

MAX_TRIES: Final = 100
"""Tries for a lock whose file is removed between its opening and its locking. Stops somebody who keeps removing it."""


class PlaceChange(Enum):
    """What became of a place's files."""

    SOCKET_ANEW = auto()
    LOCK_ANEW = auto()
    LOST = auto()


Reporter = Callable[[PlaceChange, str, str], None]
"""Takes a change, the path of the file, and why that can't be made anew: "" unless it is lost."""


class UnixPlace:
    """A place that is this process's from now on, as far as nobody listens there.

    Args:
        address: The place.
        mode: The permissions of sockets that are made there.
        report: Gets each change.

    Attributes:
        problem: Why clients can't connect; "" as long as they can.

    Raises:
        CannotListen: Another process holds the lock.
        OSError: The lock can't be made.
    """

    def __init__(self, address: UnixAddress, mode: int, report: Reporter) -> None:
        self.address = address
        self.problem = ""
        self._mode, self._report = mode, report
        self._lock = PlaceLock(address)
        self._file: os.stat_result | None = None
        self._is_made_here = False

    def bind(self) -> socket.socket:
        """Make a socket that listens. A socket's file that is there is replaced if nobody listens behind it.

        Raises:
            CannotListen: Somebody listens, or may listen.
            OSError: The socket can't be made.
        """
        if Path(self.address.path).is_socket():
            try:
                is_taken = listener_at(self.address.path) is not None
            except OSError as error:
                raise CannotListen(
                    f"can't listen on {self.address}: it is unknown whether the socket there is in use "
                    f"({error.strerror}); remove it if it is not"
                ) from None
            if is_taken:
                raise CannotListen(f"can't listen on {self.address}: another process does")
            os.unlink(self.address.path)
        sock = bound_to_path(self.address.path, self._mode)
        self._file, self._is_made_here = file_at(self.address.path), True
        return sock

    def take(self, sock: socket.socket, *, set_mode: bool) -> socket.socket:
        """Return a socket that clients reach at the place: `sock`, which listened before, or else a new one.

        Raises as `bind` does.
        """
        # The kernel reports who has called listen(2) last (unix(7), SO_PEERCRED).
        sock.listen(BACKLOG)
        try:
            listener = listener_at(self.address.path)
        except PermissionError:
            # A unit's socket may be for others than the daemon's user. Nothing suggests that it was removed.
            listener = 0
        if listener not in (0, os.getpid()):
            made = self.bind()
            self._report_made_anew()
            sock.close()
            return made
        if set_mode:
            os.chmod(self.address.path, self._mode)
        self._file = file_at(self.address.path)
        return sock

    def restore(self) -> socket.socket | None:
        """Make anew what was removed. Returns the socket in place of the one before; None if that is there.

        It reports what it makes anew, and once what can't be made. Call it again after LOOK_S, for as long as the place
        is held.
        """
        is_there = self._is_there()
        try:
            if self._lock.renew():
                self._report(PlaceChange.LOCK_ANEW, self._lock.path, "")
            made = None if is_there else self.bind()
        except (CannotListen, OSError) as error:
            # A second daemon holds the lock until it has found that somebody listens.
            if not is_there and not self.problem:
                self.problem = f"clients can't connect at {self.address}: its file is gone, and {error}"
                self._report(PlaceChange.LOST, self.address.path, str(error))
            return None
        self.problem = ""
        if made is not None:
            self._report_made_anew()
        return made

    def release(self, *, keep_file: bool = False) -> None:
        """Give the place up, and remove the socket's file unless it is another's, or to be kept."""
        if self._is_made_here and not keep_file and self._is_there():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)
        self._lock.release()

    def _is_there(self) -> bool:
        there = file_at(self.address.path)
        return there is not None and self._file is not None and os.path.samestat(there, self._file)

    def _report_made_anew(self) -> None:
        self._report(PlaceChange.SOCKET_ANEW, self.address.path, "")


class PlaceLock:
    """A lock file beside a Unix socket, held for as long as one daemon listens there.

    The lock stops two daemons that start at a time from taking a socket from one another.

    Raises:
        CannotListen: Another daemon holds the lock.
        OSError: The file can't be opened.
    """

    def __init__(self, address: UnixAddress) -> None:
        self.path = f"{address.path}.lock"
        self._address = address
        self._fd = self._taken()

    def renew(self) -> bool:
        """Take the lock again if its file was removed. Returns whether it was. Raises as the class does."""
        if self._is_at_path(self._fd):
            return False
        fd = self._taken()
        os.close(self._fd)
        self._fd = fd
        return True

    def release(self) -> None:
        """Release the lock and remove its file."""
        with contextlib.suppress(OSError):
            # Only the holder removes the file, so no other daemon's can have come to the path since the check.
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
        raise CannotListen(f"can't listen on {self._address}: another gpuleased does")

    def _is_at_path(self, fd: int) -> bool:
        there = file_at(self.path)
        return there is not None and os.path.samestat(os.fstat(fd), there)


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
        # At once: a client that sees the file may connect.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def listener_at(path: str) -> int | None:
    """Return the process that listens at a path: None if none does, 0 for one that can't be named.

    A listener of this process gets a connection that is closed at once.

    Raises:
        OSError: Nobody can tell: this user may not connect, or it is a socket of another kind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.setblocking(False)
        try:
            tried.connect(path)
        except BlockingIOError:
            # Its backlog is full.
            return 0
        except OSError as error:
            if error.errno in NOBODY_LISTENS:
                return None
            raise
        return parse_ucred(tried.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).pid


def file_at(path: str) -> os.stat_result | None:
    """Return what the file system says of a path, which may be a link; None if nothing is there."""
    try:
        return os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
