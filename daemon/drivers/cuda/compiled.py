"""Machine code that the driver made of PTX, for who comes with the same PTX again: making it takes tens of ms.

It is kept by one context, of one card, in its own process, and goes with it: whoever took that process over could
change it for nobody but those who are served by it anyway. Where a context is used again its tenant's next lease finds
it, though nothing of an earlier lease may be found there. So what is kept is masked with a key made of the PTX, and
named by another hash of it: of use to whoever has the PTX, to the byte, and noise to all others.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

MAX_IMAGES: Final = 16
"""Kept at a time, the latest."""

MAX_KEPT_BYTES: Final = 8 << 20
"""Of machine code. Stops a tenant from filling its worker's memory with images."""

_NAME: Final = b"gpulease: the name of an image\0"
_KEY: Final = b"gpulease: the key of an image\0"


class Compiled:
    """What was made of the latest images."""

    def __init__(self) -> None:
        self._masked: OrderedDict[bytes, bytearray] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = MAX_KEPT_BYTES

    def of(self, ptx: bytes, compile_anew: Callable[[bytes], bytes]) -> bytes:
        """The machine code of an image; raises what `compile_anew` raises, of which nothing is kept."""
        # Both are made of a hash, so that an image of many megabytes is read once.
        digest = hashlib.sha256(ptx).digest()
        name = name_of(digest)
        masked = self._masked.get(name)
        if masked is not None:
            self._masked.move_to_end(name)
            return bytes(_mask(masked, digest))
        code = compile_anew(ptx)
        if len(code) <= self._most_bytes:
            self._keep(name, _mask(code, digest))
        return code

    def close(self) -> None:
        """Let go of all, and keep nothing more."""
        self._masked.clear()
        self._most_bytes = self._kept_bytes = 0

    def _keep(self, name: bytes, masked: bytearray) -> None:
        self._masked[name] = masked
        self._kept_bytes += len(masked)
        while self._kept_bytes > self._most_bytes or len(self._masked) > MAX_IMAGES:
            _, oldest = self._masked.popitem(last=False)
            self._kept_bytes -= len(oldest)


def name_of(digest: bytes) -> bytes:
    """What the code is known by of an image with that SHA-256."""
    return hashlib.sha256(_NAME + digest).digest()


def _mask(data: bytes | bytearray, digest: bytes) -> bytearray:
    """The same bytes twice masked are themselves. SHAKE256 (FIPS 202) of an image's hash masks its one code alone."""
    stream = bytearray(hashlib.shake_256(_KEY + digest).digest(len(data)))
    # In its place: arrays of numpy's own are in memory that it keeps as it is.
    masked = np.frombuffer(stream, np.uint8)
    np.bitwise_xor(masked, np.frombuffer(data, np.uint8), out=masked)
    return stream
