"""Element-wise kernels on a real card: every element type, arrays with gaps, and more elements than threads."""

import numpy as np
import pytest

from gpulease.client import GpuSession
from gpulease.client.kernels.elementwise_source import C_TYPES
from helpers.daemon import Daemon
from helpers.nvrtc import needs_nvrtc

pytestmark = [pytest.mark.gpu, needs_nvrtc]


def test_operations_do_what_numpy_does(daemon: Daemon) -> None:
    with daemon.builder(512 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        added = session.elementwise("T x, T y", "T z", "z = x + y", "added")
        for dtype in C_TYPES:
            given = (np.arange(7 * 5 * 6) % 2).reshape(7, 5, 6).astype(dtype)
            x = session.array(given)
            found = added(x[::-1, :, ::2], x[0, :, :3])
            assert np.array_equal(found.numpy(), given[::-1, :, ::2] + given[0, :, :3])
        numbers = session.array(np.arange((1 << 21) + 5, dtype=np.int64))
        backwards = session.elementwise("raw T x", "T z", "z = x[_ind.size() - 1 - i]")
        assert np.array_equal(backwards(numbers, size=numbers.size).numpy(), np.arange(numbers.size)[::-1])
