"""The node's keys: the newest signs, the others verify until no token of theirs can be valid any more.

The key ring on disk: one text file that only the daemon's user may read.

    node <64 hex digits>
    boot <the host's boot id>
    key <number> <64 hex digits>

with one line for each key. It is replaced as a whole (rename(2)), so a crash leaves the old one or the new one. Tokens
expire by the monotonic clock, which starts anew with the host: keys of an earlier boot verify nothing.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulease.daemon.capabilities.claims import MAX_TOKEN_TTL_S, NS_PER_S

KEY_BYTES: Final = 32
"""An Ed25519 private key (RFC 8032, section 5.1.5)."""

NODE_ID_BYTES: Final = 32
"""What tells this node's audiences from another's."""

MAX_KEYS: Final = 16
"""Keys of one ring. Only a clock or a file gone wrong gets there."""

Draw = Callable[[int], bytes]
"""So many random bytes."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        number: Named in the tokens that it signed; never used again for another key.
        private: Its bytes.
        retired_ns: When another took its place, on the monotonic clock; None for the one that signs.
    """

    number: int
    private: bytes
    retired_ns: int | None = None


class KeyRing:
    """The keys by number, and the node's id.

    Raises:
        ValueError: The ring is empty or over `MAX_KEYS`, a key or the id has the wrong length, or a number is there
            twice.
    """

    def __init__(self, node_id: bytes, keys: list[tuple[int, bytes]], now_ns: int) -> None:
        if len(node_id) != NODE_ID_BYTES or any(len(private) != KEY_BYTES for _, private in keys):
            raise ValueError(f"a node's id has {NODE_ID_BYTES} bytes, a key {KEY_BYTES}")
        if not 0 < len(keys) <= MAX_KEYS or len({number for number, _ in keys}) < len(keys):
            raise ValueError(f"a ring has 1 to {MAX_KEYS} keys, each with a number of its own")
        self.node_id = node_id
        newest = max(number for number, _ in keys)
        # When the older ones were retired is not known: long enough ago or not, their tokens end within the bound.
        self._keys = {number: Key(number, key, None if number == newest else now_ns) for number, key in keys}
        self._newest = newest
        self._signs_since_ns = now_ns

    @classmethod
    def fresh(cls, now_ns: int, draw: Draw = secrets.token_bytes) -> "KeyRing":
        """A ring of one new key, for a new node."""
        return cls(draw(NODE_ID_BYTES), [(1, draw(KEY_BYTES))], now_ns)

    @property
    def signing(self) -> Key:
        """The key that signs."""
        return self._keys[self._newest]

    def age_ns(self, now_ns: int) -> int:
        """For how long the newest key has signed, as far as this process knows."""
        return now_ns - self._signs_since_ns

    def all(self, now_ns: int) -> list[Key]:
        """Every key that may still verify, oldest first."""
        self._drop_old(now_ns)
        return [self._keys[number] for number in sorted(self._keys)]

    def get(self, number: int | None, now_ns: int) -> Key | None:
        """The key with that number, if its tokens can still be valid."""
        self._drop_old(now_ns)
        return None if number is None else self._keys.get(number)

    def rotate(self, now_ns: int, draw: Draw = secrets.token_bytes) -> None:
        """Sign with a new key from now on."""
        self._drop_old(now_ns)
        if len(self._keys) >= MAX_KEYS:
            raise ValueError(f"{MAX_KEYS} keys are in use already")
        old = self.signing
        self._keys[old.number] = Key(old.number, old.private, now_ns)
        self._newest = old.number + 1
        self._keys[self._newest] = Key(self._newest, draw(KEY_BYTES))
        self._signs_since_ns = now_ns

    def replace_all(self, draw: Draw = secrets.token_bytes) -> None:
        """Trust no key there is: only a new one, from now on."""
        self._newest += 1
        self._keys = {self._newest: Key(self._newest, draw(KEY_BYTES))}

    def _drop_old(self, now_ns: int) -> None:
        for key in list(self._keys.values()):
            if key.retired_ns is not None and now_ns > key.retired_ns + MAX_TOKEN_TTL_S * NS_PER_S:
                del self._keys[key.number]


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
