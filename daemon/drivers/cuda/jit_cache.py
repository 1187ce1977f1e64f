"""A cache of the machine code that the driver compiled from PTX: compiling takes tens of milliseconds.

The cache belongs to one context, of one card, and is in the memory of that context's process. An attacker who takes
over the process could change the code only for the tenants that this process serves anyway. A context may serve several
leases, one after another, and a later lease must find nothing of an earlier one. So the code is masked with a key made
from the PTX, and named by another hash of the PTX. Only a tenant that has the same PTX, byte for byte, can use the
code; to any other tenant it is noise.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

CACHE_VARIABLE: Final = "CUDA_CACHE_PATH"
"""The operator's setting for the driver's cache of compiled code (CUDA C++ Programming Guide, "CUDA Environment
Variables"). Without it the cache is off, because one worker would run code that another wrote there."""

MAX_IMAGES: Final = 16
"""Maximum number of images that are kept at a time. The most recently used images stay."""

MAX_KEPT_BYTES: Final = 8 << 20
"""Maximum number of bytes of machine code that are kept, so that a tenant can't fill its worker's memory with
images."""

_NAME: Final = b"gpulease: the name of an image\0"
_KEY: Final = b"gpulease: the key of an image\0"


class Compiled:
    """The machine code of the images that were used last."""

    def __init__(self) -> None:
        self._masked: OrderedDict[bytes, bytearray] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = MAX_KEPT_BYTES

    def of(self, ptx: bytes, compile_image: Callable[[bytes], bytes]) -> bytes:
        """Return the machine code of an image.

        Raises the errors of `compile_image`; after an error, nothing is kept.
        """
        # Name and key are hashes of the image's hash, so that an image of many megabytes is read only once.
        digest = hashlib.sha256(ptx).digest()
        name = name_of(digest)
        masked = self._masked.get(name)
        if masked is not None:
            # Remove the mask with the same key.
            self._masked.move_to_end(name)
            return bytes(_mask(masked, digest))
        code = compile_image(ptx)
        if len(code) <= self._most_bytes:
            self._keep(name, _mask(code, digest))
        return code

    def close(self) -> None:
        """Drop all code, and keep none from now on."""
        self._masked.clear()
        self._most_bytes = self._kept_bytes = 0

    def _keep(self, name: bytes, masked: bytearray) -> None:
        self._masked[name] = masked
        self._kept_bytes += len(masked)
        # Remove the oldest code first, until both bounds are met.
        while self._kept_bytes > self._most_bytes or len(self._masked) > MAX_IMAGES:
            _, oldest = self._masked.popitem(last=False)
            self._kept_bytes -= len(oldest)


def name_of(digest: bytes) -> bytes:
    """Return the name of the code of the image with this SHA-256."""
    return hashlib.sha256(_NAME + digest).digest()


def _mask(data: bytes | bytearray, digest: bytes) -> bytearray:
    """XOR with SHAKE256 (FIPS 202) of the image's hash. A second call undoes the first. Each mask serves one code."""
    stream = bytearray(hashlib.shake_256(_KEY + digest).digest(len(data)))
    # Compute in place, because numpy does not overwrite the memory of arrays that it frees.
    masked = np.frombuffer(stream, np.uint8)
    np.bitwise_xor(masked, np.frombuffer(data, np.uint8), out=masked)
    return stream
