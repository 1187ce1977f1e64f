"""The blocks of one tenant's region: free blocks, blocks in use, and cached blocks for later sequences.

The keys and values in a full block depend on the block's tokens and on all tokens before them. The block's key
identifies these tokens: it is the hash of the previous block's key and of the block's own tokens. The chain of keys
begins with the region's generation. So blocks with equal keys have the same bits, and keys of a lost region match no
block.

A full block that no sequence uses stays cached until its place is needed. The least recently used block is freed first.
Sequences share only full blocks, into which no row writes again. Each sequence computes the last block of a prefix
again if it is not full.

Blocks of the operator's shared prefixes are in other regions. Their numbers follow those of the region's own blocks:
block `size + i` is block i of the shared prefix that the sequence uses.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final

from gpulease.client.decode.row_records import PAGE

KEY_BYTES: Final = 16
"""Bytes of a key. A collision is likely only among 2^64 blocks, and would concern only one tenant's tokens."""

_TOKENS: Final = Struct(f"<{PAGE}i")


class RegionBlocks:
    """The blocks of one region, as numbers and keys.

    Attributes:
        size: The number of blocks.
        evictions: Number of cached blocks that were freed because sequences needed their place.
    """

    def __init__(self, size: int, generation: int = 0) -> None:
        """Begin with all blocks free. No two regions of a tenant may have the same generation."""
        self.size = size
        self.evictions = 0
        self._root = generation.to_bytes(KEY_BYTES, "big")
        # In descending order, so that `pop` returns the lowest block.
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size
        # The published blocks by key, and their keys by block.
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Published blocks without a reference, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # The writer that is computing a block, by key. Other sequences wait for the block.
        self._writers: dict[bytes, object] = {}
        # The shared prefixes that have a block, by key.
        self._shared: dict[bytes, list[str]] = {}

    # --- counts ---

    @property
    def available(self) -> int:
        """The number of blocks that `take` can return: free and cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def cached(self) -> int:
        """The number of cached blocks, which no sequence uses."""
        return len(self._cached)

    # --- keys ---

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], count: int, salt: str = "") -> None:
        """Append to a sequence's keys until there is one for each of its first `count` blocks.

        Only sequences with the same salt have the same keys.
        """
        parent = keys[-1] if keys else self._root
        if salt and not keys:
            # A salt is a JSON string and may have unpaired surrogates. With `person`, a salt's hash differs from that
            # of a block with the same bytes.
            hashed = parent + salt.encode(errors="surrogatepass")
            parent = blake2b(hashed, digest_size=KEY_BYTES, person=b"salt").digest()
        for index in range(len(keys), count):
            block = _TOKENS.pack(*tokens[index * PAGE : (index + 1) * PAGE])
            parent = blake2b(parent + block, digest_size=KEY_BYTES).digest()
            keys.append(parent)

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return how many keys, from the first on, have a published block, and how many of these are only cached."""
        count = reusable = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            count += 1
            reusable += block in self._cached
        return count, reusable

    def find_shared(self, keys: Sequence[bytes]) -> tuple[str, int]:
        """Return the shared prefix with the most of these keys, from the first on, and their number.

        Returns ("", 0) if no prefix has the first key.
        """
        name, count = "", 0
        # A key depends on all tokens before it, so a prefix that has one key also has all earlier ones.
        for key in keys:
            if (names := self._shared.get(key)) is None:
                break
            name, count = names[0], count + 1
        return name, count

    def attach(self, name: str, tokens: Sequence[int]) -> None:
        """Let sequences use the blocks of a shared prefix."""
        keys: list[bytes] = []
        self.extend_keys(keys, tokens, len(tokens) // PAGE)
        for key in keys:
            self._shared.setdefault(key, []).append(name)

    def detach(self, name: str) -> None:
        """Do not let further sequences use the blocks of a shared prefix."""
        others = {key: [other for other in names if other != name] for key, names in self._shared.items()}
        self._shared = {key: names for key, names in others.items() if names}

    # --- use ---

    def take(self) -> int | None:
        """Return a block for a sequence to write, with one reference; None if all are in use."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            # Free the cached block that was released first.
            block, _ = self._cached.popitem(last=False)
            del self._blocks[self._keys.pop(block)]
            self.evictions += 1
        else:
            return None
        self._references[block] = 1
        return block

    def share(self, key: bytes) -> int | None:
        """Add a reference to the published block with a key, and return the block; None if there is none."""
        block = self._blocks.get(key)
        if block is not None:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block. Cached blocks are evicted in the order of `blocks`."""
        for block in blocks:
            if block >= self.size:
                continue  # Blocks of shared prefixes have no reference counts.
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Let other sequences find a computed block. Of two blocks with the same key, they find the first."""
        self._writers.pop(key, None)
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self) -> None:
        """Free all cached blocks, because their contents are about to be lost."""
        for block in self._cached:
            del self._blocks[self._keys.pop(block)]
            self._free.append(block)
        self._cached.clear()

    # --- blocks that are being computed ---

    def claim(self, writer: object, keys: Sequence[bytes]) -> bool:
        """Note that `writer` computes the blocks with these keys.

        Returns False, and changes nothing, if another writer is computing the first of them.
        """
        first = self._writers.get(keys[0]) if keys else writer
        if first is None:
            for key in keys:
                self._writers.setdefault(key, writer)
        return first is None or first is writer

    def withdraw(self, writer: object, keys: Iterable[bytes]) -> None:
        """Remove the claims of `writer` to blocks that it did not publish."""
        for key in keys:
            if self._writers.get(key) is writer:
                del self._writers[key]
