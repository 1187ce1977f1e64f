"""Reports about modules' variables and kernels on a real card."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import GpuSession, InvalidHandle
from helpers.daemon import Daemon
from helpers.kernels import VARIABLES

pytestmark = pytest.mark.gpu

WEIGHTS = np.arange(8, dtype=np.float32)


@pytest.fixture
def session(daemon: Daemon) -> Iterator[GpuSession]:
    with daemon.builder(64 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


def test_constant_and_device_memory_are_written_and_read(session: GpuSession) -> None:
    module = session.module_load(VARIABLES)
    weights, count = module.variable("weights"), module.variable("count")
    assert (weights.size_bytes, count.size_bytes) == (32, 4)
    result = session.mem_alloc(32)
    for factor in (1, 2):
        session.mem_write(weights, 0, factor * WEIGHTS)
        session.launch(module, "weigh", [1], [8], [result])
        assert np.frombuffer(session.mem_read(result, 0, 32), np.float32).tolist() == (factor * WEIGHTS).tolist()
    assert session.mem_read(count, 0, 4) == (7 + 16).to_bytes(4, "little")
    with pytest.raises(InvalidHandle, match="has no variable 'nope'"):
        module.variable("nope")
    session.module_unload(module)
    with pytest.raises(InvalidHandle, match="not a live allocation"):
        session.mem_read(session.buffer(count.handle, 4), 0, 4)


def test_a_launch_may_ask_for_what_the_figures_say(session: GpuSession) -> None:
    module = session.module_load(VARIABLES)
    figures = module.kernel_figures()
    tile = figures["tile"]
    assert tile.shared_bytes == 4096
    assert figures["weigh"].registers > 0
    session.launch(module, "tile", [1], [1], [], shared_bytes=tile.max_dynamic_shared_bytes)
    session.sync()
