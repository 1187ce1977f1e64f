"""The folder of a daemon's state: who may read it, that one daemon has it, and the journal's head.

The head is a small file beside the journal that tells how many commits there were. SQLite takes whatever it finds in
its log up to the first frame that does not check, as if there had never been more; by the head a loss shows. It is
written after each commit and never synced: a daemon that is killed leaves it exact, a host that dies leaves an older
one, and neither leaves one that is ahead.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Final

from gpulease.daemon.journal.broken import EX_CONFIG, EX_IOERR, EX_UNAVAILABLE, JournalBroken, not_whole

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

LOCK_NAME: Final = "lock"
JOURNAL_NAME: Final = "journal.db"
HEAD_NAME: Final = "journal.head"

HEAD_BYTES: Final = 64
"""Less than a sector, and always the same: a crash leaves the old head or the new one."""

_MAKE_IT: Final = "Make it, or name another: the daemon makes the last folder of a path alone."
_MISTAKES: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What a later start meets again, where nobody corrects the setting or the folder."""

_HEAD: Final = re.compile(rb"commits (\d{1,20}) ([0-9a-f]{16}) *\n")


def prepare(folder: Path) -> int:
    """Make the folder if only it is missing, and lock it; the lock's descriptor. Raises JournalBroken."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise JournalBroken(
                f"the state folder {folder} must be a folder of the daemon's user with mode 0700",
                "Correct that, or let the daemon make one.",
                EX_CONFIG,
            )
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise JournalBroken(
            f"another daemon has the state folder {folder}", "Stop it, or give this one its own.", EX_UNAVAILABLE
        ) from None
    except OSError as error:
        os.close(fd)
        raise _unusable(folder, error) from None
    return fd


def sync(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HeadFile:
    """How many commits the journal has had, as its last daemon knew.

    Attributes:
        commits: That number; None if there is no such file.

    Raises:
        JournalBroken: The file is not as it was written.
        OSError: It can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEAD_NAME
        self._fd = -1
        self.commits: int | None = None
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        data = os.pread(self._fd, HEAD_BYTES + 1, 0)
        found = _HEAD.fullmatch(data)
        if found is None or len(data) != HEAD_BYTES or data != _head_bytes(int(found[1])):
            self.close()
            raise not_whole(self._path, "it is not what was written there")
        self.commits = int(found[1])

    def make(self) -> None:
        """Begin at 0, durably. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        new = self._path.with_name(f"{HEAD_NAME}.new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        self._fd = os.open(new, flags, FILE_MODE)
        os.pwrite(self._fd, _head_bytes(0), 0)
        os.fsync(self._fd)
        new.rename(self._path)
        sync(self._path.parent)
        self.commits = 0

    def write(self, commits: int) -> None:
        """There were so many. Raises OSError."""
        os.pwrite(self._fd, _head_bytes(commits), 0)
        self.commits = commits

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _head_bytes(commits: int) -> bytes:
    digest = blake2b(b"%d" % commits, digest_size=8).hexdigest().encode()
    return (b"commits %d %s" % (commits, digest)).ljust(HEAD_BYTES - 1) + b"\n"


def _unusable(folder: Path, error: OSError) -> JournalBroken:
    if error.errno == errno.ENOENT:
        return JournalBroken(f"there is no folder {folder.parent} for the state folder {folder}", _MAKE_IT, EX_CONFIG)
    said = f"the state folder {folder} can't be used: {error.strerror}"
    if error.errno in _MISTAKES:
        return JournalBroken(said, "Name another, or let the daemon's user in.", EX_CONFIG)
    return JournalBroken(said, "Look after the disk, or name another.", EX_IOERR)
