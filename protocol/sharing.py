"""What a client and a worker on one host agree to share, in the options of ATTACH and of its reply.

The client names what it can use, the worker what it gives; the memory's descriptors come beside the reply's first byte
(SCM_RIGHTS, unix(7)), in the order of `SharedMemory`. An option of another length is one that is not known: skipped.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import RING_VERSION, RingLayout

MAX_DESCRIPTORS: Final = 2
"""One for each kind of `SharedMemory`."""

_U64: Final = struct.Struct(">Q")


class SharedMemory(IntEnum):
    """Types of the options."""

    RING = 1
    ARENA = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for.

    Attributes:
        ring: Whether it can speak through a ring of this version.
        arena_bytes: How large an arena it wants at most; 0: none.
    """

    ring: bool = False
    arena_bytes: int = 0

    def to_options(self) -> tuple[Tlv, ...]:
        """As ATTACH carries it."""
        options = [Tlv(SharedMemory.RING, bytes([RING_VERSION]))] * self.ring
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """As ATTACH carried it."""
        values = {option.type: option.value for option in options}
        return cls(values.get(SharedMemory.RING) == bytes([RING_VERSION]), _number(values.get(SharedMemory.ARENA)))


@dataclass(frozen=True, slots=True)
class Given:
    """What a worker gives.

    Attributes:
        ring: The layout of the first descriptor's memory; None if it gives no ring.
        arena_bytes: Of the next descriptor's memory; 0 if it gives no arena.
    """

    ring: RingLayout | None = None
    arena_bytes: int = 0

    def to_options(self) -> tuple[Tlv, ...]:
        """As ATTACH's reply carries it."""
        options = [] if self.ring is None else [Tlv(SharedMemory.RING, self.ring.to_bytes())]
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """As ATTACH's reply carried it."""
        values = {option.type: option.value for option in options}
        ring = values.get(SharedMemory.RING)
        return cls(None if ring is None else RingLayout.from_bytes(ring), _number(values.get(SharedMemory.ARENA)))


def _number(value: bytes | None) -> int:
    return 0 if value is None or len(value) != _U64.size else int(_U64.unpack(value)[0])
