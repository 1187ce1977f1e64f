"""Where a Unix socket is made: its folder, and the lock beside it."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from gpulease.daemon.broker.cannot_listen import WRITABLE, CannotListen, NeverListens
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.protocol.address import DEFAULT_ADDRESS, UnixAddress

OWN_FOLDER: Final = Path(DEFAULT_ADDRESS.removeprefix("unix:")).parent
"""The one folder that the daemon makes: /run is empty after a reboot. Any other that is missing may be a mistyped one,
where tenants would never look."""

MAX_TRIES: Final = 100
"""For a lock whose file is removed between its opening and its locking. Stops somebody who keeps removing it."""


def prepare_place(address: UnixAddress, socket_mode: int) -> None:
    """See that a socket can be made there; its folder is made if it is the daemon's own. Raises CannotListen.

    Whoever may write to the socket may look into a folder that is made; nobody else may.
    """
    path = Path(address.path)
    if path.parent == OWN_FOLDER:
        _make_own(path.parent, socket_mode, address)
    try:
        why = _why_not_there(path)
    except PermissionError:
        why = f"the daemon's user may not look into {path.parent}; let it, or --listen elsewhere"
    if why:
        raise NeverListens(f"can't listen on {address}: {why}")


def _make_own(folder: Path, socket_mode: int, address: UnixAddress) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        return
    except OSError as error:
        raise NeverListens(
            f"can't listen on {address}: the daemon may not make the folder {folder} ({error.strerror});"
            " make it for the daemon's user, or --listen elsewhere"
        ) from None
    mode = sum(5 << shift for shift in (3, 0) if socket_mode >> shift & 2) | 0o700
    # Not by mkdir(2): the umask, which a service manager sets to 077, would take from it.
    folder.chmod(mode)
    tell(LogEvent.DAEMON_MADE_FOLDER, path=str(folder), mode=f"{mode:04o}")


def _why_not_there(path: Path) -> str:
    folder = path.parent
    if not folder.exists():
        missing = next(one for one in (folder, *folder.parents) if one.parent.exists())
        return f"there is no folder {missing}: name another path if it is mistyped, or make it first"
    if not folder.is_dir():
        return f"{folder} is no folder; name another path"
    if path.is_dir():
        return "it is a folder; name a socket to be made in it"
    if path.exists() and not path.is_socket():
        return "there is a file that is no socket; move it, or name another path"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is read-only to the daemon; name a place in {OWN_FOLDER}, or make {WRITABLE}{folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the daemon's user may not write in {folder}; let it, or --listen elsewhere"
    return ""


class PlaceLock:
    """A lock file beside a socket's path, held for as long as one daemon listens there.

    So two daemons can't take a socket from one another, and one left by a crash can be told from one in use: the
    kernel takes the lock from a process that dies (flock(2)). Raises CannotListen, or OSError.
    """

    def __init__(self, address: UnixAddress) -> None:
        self._path = f"{address.path}.lock"
        for _ in range(MAX_TRIES):
            self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                break
            # Whoever held it may have removed it since it was opened: then it is nobody's any more, and a next one lies
            # there, or will.
            if self._is_there():
                return
            os.close(self._fd)
        raise CannotListen(f"can't listen on {address}: another gpuleased does")

    def release(self) -> None:
        """Give it up, and leave no file."""
        with contextlib.suppress(OSError):
            # By its holder alone, so nobody else's can have come there since it was looked at.
            if self._is_there():
                os.unlink(self._path)
        os.close(self._fd)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False
