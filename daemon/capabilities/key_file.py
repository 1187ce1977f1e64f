"""The key ring on disk: one text file that only the daemon's user may read.

    node <64 hex digits>
    boot <the host's boot id>
    key <number> <64 hex digits>

with one line for each key. It is replaced as a whole (rename(2)), so a crash leaves the old one or the new one. Tokens
expire by the monotonic clock, which starts anew with the host: keys of an earlier boot verify nothing.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from gpulease.daemon.capabilities.keys import KeyRing

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Tells this boot of the host from every other (random(4))."""

MAX_FILE_BYTES: Final = 4096
"""Largest key file; a ring of the most keys has half of that. Stops a wrong path from being read as a whole."""


class KeyFileBroken(Exception):
    """The key file can't be used; the message is a sentence for the operator."""


def load_or_make(path: Path, now_ns: int) -> KeyRing:
    """The ring in a file, made if there is none. Raises KeyFileBroken."""
    try:
        # A FIFO would be waited at for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        ring = KeyRing.fresh(now_ns)
        save(path, ring, now_ns)
        return ring
    except OSError as error:
        raise KeyFileBroken(f"the key file {path} can't be read: {error.strerror}") from None
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        os.close(fd)
        raise KeyFileBroken(f"the key file {path} is a folder; name a file to be made in it")
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise KeyFileBroken(f"the key file {path} must be a file of the daemon's user with mode 0600")
        data = file.read(MAX_FILE_BYTES + 1)
    boot_id, ring = _parse(path, data, now_ns)
    if boot_id != BOOT_ID.read_text().strip():
        ring.replace_all()
        save(path, ring, now_ns)
    return ring


def save(path: Path, ring: KeyRing, now_ns: int) -> None:
    """Replace the file by the ring as it is. Raises KeyFileBroken."""
    lines = [f"node {ring.node_id.hex()}", f"boot {BOOT_ID.read_text().strip()}"]
    lines += [f"key {key.number} {key.private.hex()}" for key in ring.all(now_ns)]
    new = path.with_name(f"{path.name}.new")
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyFileBroken(f"the key file {path} can't be written: {error.strerror}") from None


def _parse(path: Path, data: bytes, now_ns: int) -> tuple[str, KeyRing]:
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        (node, node_id), (boot, boot_id), *lines = [line.split() for line in data.decode("ascii").splitlines()]
        keys = []
        for kind, number, private in lines:
            if kind != "key" or not 0 < int(number) < 1 << 32:
                raise ValueError(f"{kind!r} is not a key")
            keys.append((int(number), bytes.fromhex(private)))
        if (node, boot) != ("node", "boot"):
            raise ValueError("it names no node and boot")
        return boot_id, KeyRing(bytes.fromhex(node_id), keys, now_ns)
    except ValueError as error:
        # UnicodeDecodeError too. What a line holds is never told: it may be a key.
        why = str(error) if "hex" not in str(error) else "a number is not hexadecimal"
        raise KeyFileBroken(
            f"the key file {path} is broken: {why}; restore it, or move it away for a new one"
        ) from None
