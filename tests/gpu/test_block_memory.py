"""Shared memory of a thread block up to the card's opt-in limit, with every way to launch. More is refused with an
error.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuLease, GpuSession, LaunchFailed
from helpers.block_memory import DEFAULT_BYTES, FOUND, MOST_BYTES, REACH, STATIC_BYTES, WAYS, Way
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TURNS = 2000
OFFERED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB per block by compute capability.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""


@pytest.fixture
def lease(daemon: Daemon) -> Iterator[GpuLease]:
    with daemon.builder(64 * MIB).device(0).submits(256 * MIB).acquire() as lease:
        yield lease


@pytest.fixture(scope="module")
def most_bytes() -> int:
    """The most bytes that a block may have on the first card."""
    import pynvml

    found = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0)))
    return OFFERED.get(found, MOST_BYTES // 1024) * 1024


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kernel", "own_bytes"), [("reach", 0), ("reach_behind", STATIC_BYTES)])
def test_a_block_gets_what_the_card_has_and_no_byte_more(
    lease: GpuLease, most_bytes: int, way: Way, kernel: str, own_bytes: int
) -> None:
    assert way(lease, kernel, most_bytes - own_bytes) == FOUND
    with pytest.raises(LaunchFailed, match=f"exceed the {most_bytes} "):
        way(lease, kernel, most_bytes - own_bytes + 1)
    # The default limit is for static and dynamic shared memory together. With a static variable, this needs an opt-in.
    assert way(lease, kernel, DEFAULT_BYTES) == FOUND


def test_one_session_launches_with_little_and_much_in_turn(lease: GpuLease, most_bytes: int) -> None:
    with GpuSession(lease) as session:
        module, out = session.module_load(REACH), session.mem_alloc(4)
        for size_bytes in (4, most_bytes, 4, most_bytes + 1, most_bytes, DEFAULT_BYTES + 4):
            session.mem_write(out, 0, bytes(4))
            args = [out, np.uint32(size_bytes - 4)]
            if size_bytes > most_bytes:
                session.launch(module, "reach", [1], [1], args, shared_bytes=size_bytes)
                with pytest.raises(LaunchFailed):
                    session.sync()
                continue
            for _ in range(TURNS):
                session.launch(module, "reach", [1], [1], args, shared_bytes=size_bytes)
            session.sync()
            assert int.from_bytes(session.mem_read(out, 0, 4), "little") == FOUND
