"""Blocks of pointers into themselves (woven.ptx), for sessions that leave their card.

The block must later be at the same address, because the pointers are addresses. Kernels write the pointers, follow them
and compare every word on the card, so a request over many gigabytes takes milliseconds.
"""

import struct
from importlib.resources import files
from typing import Final

from gpulease.client import Buffer, GpuSession, KernelArgs, Module

FACTOR: Final = 2654435761
"""Word i points to word i * FACTOR + seed, modulo the number of words. If the seed is odd, all words form one ring
(Hull and Dobell, "Random number generators", 1962)."""

STEPS: Final = 100
"""Number of pointers that a request follows."""

WORD_BYTES: Final = 8

GRID: Final = (256,)
BLOCK: Final = (256,)

_WORDS: Final = struct.Struct("<3Q")
"""The values that a request's kernels store: where the pointers led, the number of calls that the module has counted,
and the number of wrong words."""


def woven_ptx() -> bytes:
    return files("gpulease.client.bench").joinpath("woven.ptx").read_bytes()


EXTRA_BYTES: Final = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Bytes of a lease in addition to its woven data, for results and code, by driver."""


def woven_bytes(most_bytes: int) -> int:
    """Return the size of the largest block of woven data within a number of bytes: a power of two."""
    return 1 << (most_bytes.bit_length() - 1)


def end_of(base: int, words: int, seed: int) -> int:
    """Return the address reached by following STEPS pointers from the beginning of a block."""
    at = 0
    for _ in range(STEPS):
        at = (at * FACTOR + seed) % words
    return base + WORD_BYTES * at


class WovenData:
    """A block of woven data in one session, and requests that use and check all of it.

    Args:
        session: The session.
        size_bytes: A power of two.
        seed: An odd number.
        is_woven: False if the bytes are written from elsewhere, with 0 as the origin of the pointers.

    Attributes:
        wrong: Number of wrong words and wrong results so far.
    """

    def __init__(self, session: GpuSession, size_bytes: int, seed: int, *, is_woven: bool = True) -> None:
        self.session, self.size_bytes, self.seed = session, size_bytes, seed
        self.module: Module = session.module_load(woven_ptx())
        self.block: Buffer = session.mem_alloc(size_bytes)
        self.results: Buffer = session.mem_alloc(_WORDS.size)
        self.origin = self.block.handle if is_woven else 0
        self.wrong = 0
        self._requests = 0
        if is_woven:
            self.weave(self.block)

    def weave(self, block: Buffer) -> None:
        """Write the pointers of a block of this size. They point into this object's own block."""
        args = KernelArgs().push_buffer(block).push_u64(self.origin)
        self.session.launch(self.module, "weave", GRID, BLOCK, args.push_u64(self.mask).push_u64(self.seed))

    @property
    def mask(self) -> int:
        """The number of words less one, as a bit mask for word indexes: the number is a power of two."""
        return self.size_bytes // WORD_BYTES - 1

    def begin(self) -> None:
        """Launch a request's first kernels and wait for them, as a caller waits for a model's answer."""
        session, results = self.session, self.results
        if self.origin:
            args = KernelArgs().push_buffer(self.block).push_u32(STEPS).push_buffer(results, 0)
            session.launch(self.module, "follow", (1,), (1,), args)
        session.launch(self.module, "count", (1,), (1,), KernelArgs().push_buffer(results, WORD_BYTES))
        session.sync()
        self._requests += 1

    def check(self) -> int:
        """Compare every word and the results of all requests; return how many are wrong, and add them to `wrong`."""
        session = self.session
        args = KernelArgs().push_buffer(self.block).push_u64(self.origin).push_u64(self.mask).push_u64(self.seed)
        session.launch(self.module, "check", GRID, BLOCK, args.push_buffer(self.results, 2 * WORD_BYTES))
        at, calls, wrong_words = _WORDS.unpack(session.mem_read(self.results, 0, _WORDS.size))
        end = end_of(self.block.handle, self.mask + 1, self.seed) if self.origin else 0
        wrong: int = wrong_words + (at != end) + (calls != self._requests)
        # Reset the number of wrong words, because the kernel adds to the earlier value.
        session.mem_write(self.results, 2 * WORD_BYTES, bytes(WORD_BYTES))
        self.wrong += wrong
        return wrong
