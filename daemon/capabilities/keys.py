"""The node's keys: the newest signs, the others verify until no token of theirs can be valid any more."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
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
