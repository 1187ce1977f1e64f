"""Where blocks run: shared memory, local windows and frames for each block that is under way."""

import ctypes
from dataclasses import dataclass

from gpulease.daemon.drivers.cpu.limits import (
    CHUNKS_PER_THREAD,
    MAX_CHUNK_BLOCKS,
    MAX_RESIDENT_BLOCKS,
    RESIDENT_FRAME_BYTES,
    RESIDENT_LOCAL_BYTES,
    RESIDENT_SHARED_BYTES,
)
from gpulease.daemon.drivers.cpu.mapping import Mapping
from gpulease.daemon.drivers.cpu.native.layout import Environment, Fault
from gpulease.daemon.drivers.cpu.ptx.declarations import round_up

# Areas of different blocks are in different pages, so no two threads write to one cache line.
_STRIDE_STEP = 4096

# A launch's last five numbers: chunk, places, and the strides of shared memory, local windows and frames.
Spread = tuple[int, int, int, int, int]

# All blocks one after another in the first place.
IN_ORDER: Spread = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a block of a kernel takes beside shared memory, and how its blocks may be handed out.

    Attributes:
        local_bytes: Local windows, whatever the block's size.
        local_bytes_per_thread: Local windows, for each thread on top.
        frame_bytes: Frames, whatever the block's size.
        frame_bytes_per_thread: Frames, for each thread on top.
        parks: Whether a block may come back because it waits for another.
    """

    local_bytes: int
    local_bytes_per_thread: int
    frame_bytes: int
    frame_bytes_per_thread: int
    parks: bool

    def areas(self, threads: int) -> tuple[int, int]:
        """Bytes of local windows and of frames of a block of so many threads, in whole steps."""
        local = self.local_bytes + threads * self.local_bytes_per_thread
        frames = self.frame_bytes + threads * self.frame_bytes_per_thread
        return round_up(local, _STRIDE_STEP), round_up(frames, _STRIDE_STEP)

    def fit(self, threads: int) -> bool:
        """Whether there is room for one such block."""
        local, frames = self.areas(threads)
        return local <= RESIDENT_LOCAL_BYTES and frames <= RESIDENT_FRAME_BYTES


class Areas:
    """The environments of a context's blocks, and what theirs is.

    Args:
        first: What is the same in all; the areas are filled in.
    """

    def __init__(self, first: Environment) -> None:
        self._memory = Mapping(RESIDENT_SHARED_BYTES + RESIDENT_LOCAL_BYTES + RESIDENT_FRAME_BYTES)
        self._places = (Environment * MAX_RESIDENT_BLOCKS)()
        self._faults = (Fault * MAX_RESIDENT_BLOCKS)()
        first.shared = self._memory.address
        first.local = first.shared + RESIDENT_SHARED_BYTES
        first.frames = first.local + RESIDENT_LOCAL_BYTES
        first.fault = ctypes.addressof(self._faults)
        self._places[0] = first
        self.address = ctypes.addressof(self._places)

    def spread(self, needs: Needs, blocks: int, threads: int, shared_bytes: int, hosts: int) -> Spread:
        """How to divide a launch of such blocks, of which one fits, among so many host threads."""
        if not needs.parks and (hosts == 1 or blocks == 1):
            return IN_ORDER
        chunk = 1 if needs.parks else max(1, min(MAX_CHUNK_BLOCKS, blocks // (CHUNKS_PER_THREAD * hosts)))
        shared = round_up(shared_bytes, _STRIDE_STEP)
        local, frames = needs.areas(threads)
        places = min(
            MAX_RESIDENT_BLOCKS,
            RESIDENT_SHARED_BYTES // (shared or 1),
            RESIDENT_LOCAL_BYTES // (local or 1),
            RESIDENT_FRAME_BYTES // (frames or 1),
        )
        return chunk, places, shared, local, frames

    def close(self) -> None:
        """Give the memory back; nothing may run any more."""
        self._memory.close()
