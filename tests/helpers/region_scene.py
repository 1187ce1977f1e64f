"""A session that doubles numbers in regions of a real daemon."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from gpulease.client import GpuLease, GpuSession, KernelArgs, Module
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.sync.regions import Region
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, TRANSFORM, floats, grid_for, numbers
from helpers.waiting import wait_until

MIB = 1 << 20
SLICE_BYTES, REGION_BYTES = 64 * MIB, 4 * MIB
N = 1000


@dataclass
class Scene:
    """The session, with methods to open regions and to work in them."""

    daemon: Daemon
    lease: GpuLease
    session: GpuSession
    module: Module

    def region(self, **terms: float) -> Region:
        region = self.lease.region(REGION_BYTES, **terms)  # type: ignore[arg-type]
        self.session.mem_write(region, 0, numbers(N))
        self.session.sync()
        return region

    def double(self, region: Region, position: int = 0) -> None:
        """Launch a kernel in the region, and wait for it. If the region has ended, raises the error for its end."""
        self.double_in(self.session.region_set([region]), region, position)

    def double_in(self, regions: RegionSet, region: Region, position: int = 0) -> None:
        args = KernelArgs().push_buffer(region).push_u32(N).push_f32(2.0)
        self.session.launch(self.module, "scale", grid_for(N), BLOCK, args, regions=regions, position=position)
        self.session.sync()

    def check(self, region: Region, factor: float) -> None:
        np.testing.assert_array_equal(floats(self.session.mem_read(region, 0, 4 * N)), numbers(N) * factor)

    def state_of(self, region: Region) -> str:
        return str(self.daemon.query(region.lease_id)["state"])

    def wait_until_returned(self, region: Region) -> None:
        wait_until(lambda: self.state_of(region) == "torndown", "the region is returned")


@contextmanager
def scene_of(daemon: Daemon) -> Iterator[Scene]:
    with daemon.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        yield Scene(daemon, lease, session, session.module_load(TRANSFORM))
