"""The node's keys and their file. The newest key signs; older keys verify until all of their tokens have expired.

The file is text that only the daemon's user may read:

    node <64 hex digits>
    boot <the host's boot id>
    key <number> <64 hex digits>

with one line for each key. Each change replaces the whole file (rename(2)), so a crash leaves either the old file or
the new one. Tokens expire by the monotonic clock, which restarts with the host, so keys of an earlier boot verify
nothing.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulease.daemon.capabilities.claims import MAX_TOKEN_TTL_S
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S

KEY_BYTES: Final = 32
"""An Ed25519 private key (RFC 8032, section 5.1.5)."""

NODE_ID_BYTES: Final = 32
"""The length of a node's id, which distinguishes its audiences from those of other nodes."""

MAX_KEYS: Final = 16
"""Maximum number of keys of one ring. Only a faulty clock or file leads to so many."""

Draw = Callable[[int], bytes]
"""Returns this many random bytes."""


@dataclass(frozen=True, slots=True)
class Key:
    """A private key of the node.

    Attributes:
        number: The key's number, which its tokens name. No other key ever gets the same number.
        private: The private key.
        retired_ns: The time at which another key replaced it, on the monotonic clock; None for the signing key.
    """

    number: int
    private: bytes
    retired_ns: int | None = None


class KeyRing:
    """The keys by number, and the node's id.

    Raises:
        ValueError: The ring is empty or has more than `MAX_KEYS` keys, a key or the id has the wrong length, or a
            number occurs twice.
    """

    def __init__(self, node_id: bytes, keys: list[tuple[int, bytes]], now_ns: int) -> None:
        if len(node_id) != NODE_ID_BYTES or any(len(private) != KEY_BYTES for _, private in keys):
            raise ValueError(f"a node's id must have {NODE_ID_BYTES} bytes, and a key {KEY_BYTES}")
        if not 0 < len(keys) <= MAX_KEYS or len({number for number, _ in keys}) < len(keys):
            raise ValueError(f"a key ring must have 1 to {MAX_KEYS} keys, each with a different number")
        self.node_id = node_id
        newest = max(number for number, _ in keys)
        # The file does not contain the times at which older keys were retired. If they count as retired now, their
        # tokens still end in time.
        self._keys = {number: Key(number, key, None if number == newest else now_ns) for number, key in keys}
        self._newest = newest
        self._signs_since_ns = now_ns

    @classmethod
    def fresh(cls, now_ns: int, draw: Draw = secrets.token_bytes) -> "KeyRing":
        """Return a ring of one new key, for a new node."""
        return cls(draw(NODE_ID_BYTES), [(1, draw(KEY_BYTES))], now_ns)

    @property
    def signing(self) -> Key:
        return self._keys[self._newest]

    def age_ns(self, now_ns: int) -> int:
        """Return for how many ns the newest key has signed, according to this process."""
        return now_ns - self._signs_since_ns

    def all(self, now_ns: int) -> list[Key]:
        """Return every key that may still verify, oldest first."""
        self._drop_old(now_ns)
        return [self._keys[number] for number in sorted(self._keys)]

    def get(self, number: int | None, now_ns: int) -> Key | None:
        """Return the key with this number, if its tokens can still be valid; otherwise None."""
        self._drop_old(now_ns)
        return None if number is None else self._keys.get(number)

    def rotate(self, now_ns: int, draw: Draw = secrets.token_bytes) -> None:
        """Sign with a new key from now on. The old key verifies until its last token has expired. Raises ValueError."""
        self._drop_old(now_ns)
        if len(self._keys) >= MAX_KEYS:
            raise ValueError(f"{MAX_KEYS} keys are already in use, the maximum")
        # The number only grows, so a token that names a key always means the same key.
        old = self.signing
        self._keys[old.number] = Key(old.number, old.private, now_ns)
        self._newest = old.number + 1
        self._keys[self._newest] = Key(self._newest, draw(KEY_BYTES))
        self._signs_since_ns = now_ns

    def replace_all(self) -> None:
        """Drop every key, and sign with a new one from now on."""
        # Numbers continue, so that no token of the old keys names the new one.
        self._newest += 1
        self._keys = {self._newest: Key(self._newest, secrets.token_bytes(KEY_BYTES))}

    def _drop_old(self, now_ns: int) -> None:
        for key in list(self._keys.values()):
            if key.retired_ns is not None and now_ns > key.retired_ns + MAX_TOKEN_TTL_S * NS_PER_S:
                del self._keys[key.number]


BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""The id of this boot of the host (random(4))."""

MAX_FILE_BYTES: Final = 4096
"""Maximum number of bytes of a key file, twice as many as the largest ring takes. Prevents reading a wrong, large
file."""


class KeyFileBroken(Exception):
    """The key file can't be used; the message is a sentence for the operator."""


def load_or_make(path: Path, now_ns: int) -> KeyRing:
    """Return the ring in a file, or make a new ring if there is no file. Raises KeyFileBroken."""
    try:
        # Use O_NONBLOCK, because opening a FIFO would otherwise block forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        ring = KeyRing.fresh(now_ns)
        save(path, ring, now_ns)
        return ring
    except OSError as error:
        raise KeyFileBroken(f"the key file {path} can't be read: {error.strerror}") from None
    # Check the descriptor, not the path, which could name another file by now.
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        os.close(fd)
        raise KeyFileBroken(f"the key file {path} is a folder; name a file instead")
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise KeyFileBroken(f"the key file {path} must be a file of the daemon's user with mode 0600")
        data = file.read(MAX_FILE_BYTES + 1)
    # Tokens contain monotonic times, which start again with the host, so old keys would accept tokens from before the
    # restart.
    boot_id, ring = _parse(path, data, now_ns)
    if boot_id != BOOT_ID.read_text().strip():
        ring.replace_all()
        save(path, ring, now_ns)
    return ring


def save(path: Path, ring: KeyRing, now_ns: int) -> None:
    """Write the ring's present keys to the file. Raises KeyFileBroken."""
    # A new file takes the old one's place in one step, so that a crash leaves one of the two. Write, sync, rename, sync
    # the folder.
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
    foreign = "its lines are not those of a key file"
    try:
        # The file has two fixed lines, then one for each key. This module writes no other content.
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        lines = [line.split() for line in data.decode("ascii").splitlines()]
        if [len(line) for line in lines] != [2, 2] + [3] * (len(lines) - 2):
            raise ValueError(foreign)
        (node, node_id), (boot, boot_id), *lines = lines
        keys = []
        for kind, number, private in lines:
            if kind != "key" or not number.isdecimal() or not 0 < int(number) < 1 << 32:
                raise ValueError(foreign)
            keys.append((int(number), bytes.fromhex(private)))
        if (node, boot) != ("node", "boot"):
            raise ValueError("it names no node and boot")
        return boot_id, KeyRing(bytes.fromhex(node_id), keys, now_ns)
    except ValueError as error:
        # UnicodeDecodeError is a ValueError. An error never quotes a word of the file, which may be a key.
        reason = str(error) if "hex" not in str(error) else "a number is not hexadecimal"
        raise KeyFileBroken(
            f"the key file {path} is damaged: {reason}; restore it, or move it away so that the daemon "
            "creates a new one"
        ) from None
