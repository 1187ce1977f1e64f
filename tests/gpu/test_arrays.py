"""Arrays on a real card: the kernel that copies and fills, with every width of its units and many nested loops."""

import numpy as np
import pytest

from gpulease.client import GpuSession
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu


def test_slices_are_copied_and_filled_as_numpy_does(daemon: Daemon) -> None:
    with daemon.builder(512 << 20).device(0).acquire() as lease, GpuSession(lease) as session:
        for dtype in ("u1", "i2", "f4", "f8", "c16"):
            given = (np.arange(6 * 5 * 4 * 3 * 2 * 7) % 113).reshape(6, 5, 4, 3, 2, 7).astype(dtype)
            array = session.array(given)
            for key in (np.s_[::2, 1:, ::-1, ..., 1::3], np.s_[:, 2], np.s_[..., 0], np.s_[...]):
                assert np.array_equal(array[key].copy().numpy(), given[key])
                array[key][::2] = given[key][::2] = 5
                array[key] = array[key][::-1]
                given[key] = given[key][::-1].copy()
                assert np.array_equal(array.numpy(), given)
        large = session.zeros(1 << 26, "f4")
        large.fill(2.5)
        large[1::2] = large[0]
        assert (large.numpy() == 2.5).all()
