"""A directory of entries that only this user can have written, each whole or not there."""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# What is kept on disk for all processes of a user, oldest out; and one entry, so that one image can't take it all.
MAX_KEPT_BYTES = 256 << 20
MAX_KEPT_ENTRIES = 4096
MAX_KEPT_ENTRY_BYTES = 16 << 20

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_ENTRY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_ENTRY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

# Looking at all entries takes milliseconds where there are thousands.
_WRITES_PER_PRUNE = 32

_DIGEST_BYTES = hashlib.sha256().digest_size


class PrivateFolder:
    """Entries by key in a directory of mode 0700, made if it is not there, or one that is open.

    A directory or an entry that belongs to someone else, or that others could write to, is as good as none; so is one
    that can't be read or written. Nothing is raised.
    """

    def __init__(self, directory: Path | int) -> None:
        self._directory = directory
        self._written = 0

    def read(self, key: bytes) -> bytes | None:
        """What is kept for a key; None if there is nothing, or nothing to be trusted."""
        try:
            folder = self._open()
        except OSError:
            return None
        try:
            data = _read_own(key.hex(), folder)
            if data is None or data[:_DIGEST_BYTES] != _digest(key, data[_DIGEST_BYTES:]):
                return None
            # What is used goes last, where anything can be written.
            with suppress(OSError):
                os.utime(key.hex(), dir_fd=folder)
            return data[_DIGEST_BYTES:]
        except OSError:
            return None
        finally:
            os.close(folder)

    def write(self, key: bytes, data: bytes) -> None:
        """Keep an entry; now and then, and the first time, the oldest go if there are too many."""
        if len(data) + _DIGEST_BYTES > MAX_KEPT_ENTRY_BYTES:
            return
        try:
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
        """A descriptor of the directory. Raises OSError if it is not ours alone."""
        if isinstance(self._directory, int):
            folder = os.dup(self._directory)
        else:
            folder = os.open(self._directory, _OPEN_DIRECTORY)
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(folder)
            raise PermissionError
        return folder


def open_for(owner: int, directory: Path) -> int | None:
    """A descriptor of a directory that is a user's own, made if it is not there; None if it can't be."""
    try:
        _make(directory)
        folder = os.open(directory, _OPEN_DIRECTORY)
    except OSError:
        return None
    try:
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
    """Of the key too: an entry under another's name is not that one."""
    return hashlib.sha256(key + data).digest()


def _read_own(name: str, folder: int) -> bytes | None:
    with open(os.open(name, _OPEN_ENTRY, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_ours or found.st_size > MAX_KEPT_ENTRY_BYTES:
            return None
        # No more is asked for than there is: the room for it is made, and may be filled, before it is read.
        return file.read(found.st_size)


def _write_whole(name: str, data: bytes, folder: int) -> None:
    """Under its name there is all of it or nothing, whenever the process ends."""
    draft = f"{secrets.token_hex(8)}.new"
    try:
        with open(os.open(draft, _CREATE_ENTRY, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        _remove(draft, folder)
        raise


def _prune(folder: int) -> None:
    """Remove the oldest entries, and drafts left behind, past the bounds."""
    entries = []
    for name in os.listdir(folder):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            # Another process removed it.
            continue
        entries.append((found.st_mtime_ns, name, found.st_size))
    total, count = sum(size for _, _, size in entries), len(entries)
    for _, name, size in sorted(entries):
        if total <= MAX_KEPT_BYTES and count <= MAX_KEPT_ENTRIES:
            return
        _remove(name, folder)
        total, count = total - size, count - 1


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        # Gone already, or a directory someone made in here.
        return
