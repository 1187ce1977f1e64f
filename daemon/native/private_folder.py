"""A directory of entries that only this user can have written. Each entry is complete or absent."""

import hashlib
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# Bounds on disk for all processes of a user. The oldest entries are removed first. A single entry is bounded, too, so
# that one image can't take the whole cache.
MAX_CACHED_BYTES = 256 << 20
MAX_CACHED_ENTRIES = 4096
MAX_ENTRY_BYTES = 16 << 20

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_ENTRY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

# Number of writes between two prunes, because reading all entries takes milliseconds if there are thousands.
_WRITES_PER_PRUNE = 32

_DRAFT_BYTES = 8

_DIGEST_BYTES = hashlib.sha256().digest_size

# The name of an entry, which is its key, a digest, or of a draft.
_NAME = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}|[0-9a-f]{{{2 * _DRAFT_BYTES}}}\.new")


class PrivateFolder:
    """Entries by key in a directory of mode 0700.

    Ignores a directory or an entry that belongs to another user, that others could write to, or that can't be read or
    written. Raises nothing.

    Args:
        directory: Its path, which is created if it does not exist, or the descriptor of an open directory.
    """

    def __init__(self, directory: Path | int) -> None:
        self._directory = directory
        self._written = 0

    def read(self, key: bytes) -> bytes | None:
        """Return the entry of a key; None for an absent or untrustworthy one."""
        try:
            folder = self._open()
        except OSError:
            return None
        try:
            # A hash in front of the data reveals damage, and an entry under another name.
            data = _read_own(key.hex(), folder)
            if data is None or data[:_DIGEST_BYTES] != _digest(key, data[_DIGEST_BYTES:]):
                return None
            # The entry was used, so it will be removed last. A read-only directory keeps its order.
            with suppress(OSError):
                os.utime(key.hex(), dir_fd=folder)
            return data[_DIGEST_BYTES:]
        except OSError:
            return None
        finally:
            os.close(folder)

    def write(self, key: bytes, data: bytes) -> None:
        """Write an entry. The first write, and each 32nd after it, removes the oldest entries beyond the bounds."""
        if len(data) + _DIGEST_BYTES > MAX_ENTRY_BYTES:
            return
        try:
            # The directory may have been removed since the last write.
            if not isinstance(self._directory, int):
                _make(self._directory)
            folder = self._open()
        except OSError:
            return
        try:
            _write_whole(key.hex(), _digest(key, data) + data, folder)
            if self._written % _WRITES_PER_PRUNE == 0:
                _prune(folder)
            self._written += 1
        except OSError:
            return
        finally:
            os.close(folder)

    def _open(self) -> int:
        """Return a descriptor of the directory. Raises OSError unless only this user can reach it."""
        # A descriptor was passed through the sandbox. A path is opened again each time.
        if isinstance(self._directory, int):
            folder = os.dup(self._directory)
        else:
            folder = os.open(self._directory, _OPEN_DIRECTORY)
        # Check the open descriptor, so that the directory can't be exchanged after the check.
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(folder)
            raise PermissionError
        return folder


def open_for(owner: int, directory: Path) -> int | None:
    """Return a descriptor of a directory that `owner` owns, created if missing; None on failure."""
    try:
        _make(directory)
        folder = os.open(directory, _OPEN_DIRECTORY)
    except OSError:
        return None
    try:
        # Do not take over a directory of a third user.
        if os.fstat(folder).st_uid not in (owner, os.geteuid()):
            raise PermissionError
        os.fchown(folder, owner, -1)
    except OSError:
        os.close(folder)
        return None
    return folder


def _make(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def _digest(key: bytes, data: bytes) -> bytes:
    """Return a hash of key and data, so that an entry that was renamed to another key's name does not match."""
    return hashlib.sha256(key + data).digest()


def _read_own(name: str, folder: int) -> bytes | None:
    # Make the same checks for a file: no link, no other owner, no write permission for others.
    with open(os.open(name, _OPEN_ENTRY, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not is_ours or status.st_size > MAX_ENTRY_BYTES:
            return None
        # Request no more bytes than the file has, because read() first allocates, and may fill, that much memory.
        return file.read(status.st_size)


def _write_whole(name: str, data: bytes, folder: int) -> None:
    """Write a file that is complete or absent under its name, at whatever point the process ends."""
    # Use a random name, created exclusively, because two processes may write the same entry.
    draft = f"{secrets.token_hex(_DRAFT_BYTES)}.new"
    try:
        with open(os.open(draft, _CREATE_ENTRY, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        _remove(draft, folder)
        raise


def _prune(folder: int) -> None:
    """Remove the oldest entries beyond the bounds, and drafts that were left behind."""
    entries = []
    # A user may have chosen a folder with other files, such as the home directory: those are not ours to remove.
    for name in filter(_NAME.fullmatch, os.listdir(folder)):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            # Another process has removed it.
            continue
        entries.append((status.st_mtime_ns, name, status.st_size))
    # Remove files in the order of their last use, oldest first, until both bounds are met.
    total, count = sum(size for _, _, size in entries), len(entries)
    for _, name, size in sorted(entries):
        if total <= MAX_CACHED_BYTES and count <= MAX_CACHED_ENTRIES:
            return
        _remove(name, folder)
        total, count = total - size, count - 1


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        # Another process has removed it, or it is a directory.
        return
