"""Cooperative launches and clusters on a card: they run, too large ones get an error, and the lease's end ends them."""

from pathlib import Path

import numpy as np
import pytest

from gpulease.client import GpuLeaseError, GpuSession, KernelArgs, LaunchFailed
from helpers.daemon import Daemon
from helpers.kernels import check_main_job

pytestmark = pytest.mark.gpu

MIB = 1 << 20
IMAGES = Path(__file__).parents[1] / "daemon" / "drivers" / "images"
BARRIER = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry meet(.param .u64 cell, .param .u32 wanted)
{
  .reg .b64 %d<3>; .reg .b32 %r<4>; .reg .pred %p;
  ld.param.u64 %d1, [cell];
  ld.param.u32 %r2, [wanted];
  cvta.to.global.u64 %d1, %d1;
  atom.global.add.u32 %r1, [%d1], 1;
WAIT:
  ld.volatile.global.u32 %r3, [%d1];
  setp.lt.u32 %p, %r3, %r2;
  @%p bra WAIT;
  ret;
}
.visible .entry ranks(.param .u64 out)
{
  .reg .b64 %d<4>; .reg .b32 %r<5>;
  ld.param.u64 %d1, [out];
  cvta.to.global.u64 %d1, %d1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %cluster_ctarank;
  mov.u32 %r3, %cluster_nctarank;
  mad.lo.u32 %r2, %r3, 100, %r2;
  mul.wide.u32 %d2, %r1, 4;
  add.u64 %d3, %d1, %d2;
  st.global.u32 [%d3], %r2;
  ret;
}
"""


def test_blocks_of_a_cooperative_launch_wait_for_each_other(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        module, cell = session.module_load(BARRIER), session.zeros(1, np.uint32)
        stream = session.stream()
        for number, blocks in enumerate((1, 64, 100), start=1):
            before = int(cell.numpy()[0])
            session.launch(module, "meet", [blocks], [1], [cell, before + blocks], stream=stream, cooperative=True)
            stream.sync()
            assert cell.numpy()[0] == before + blocks, number
        synchronising = session.module_load((IMAGES / "launches.sm75.ptx").read_bytes())
        buffer = session.mem_alloc(4096)
        for kernel in ("grid_sync", "grid_sync_in_call"):
            session.launch(synchronising, kernel, [8], [32], KernelArgs().push_buffer(buffer), cooperative=True)
            session.sync()
        check_main_job(session)


def test_blocks_of_a_cluster_know_their_ranks(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        module, out = session.module_load(BARRIER), session.zeros(8, np.uint32)
        session.launch(module, "ranks", [8], [1], [out], cluster=(4,))
        assert out.numpy().tolist() == [400, 401, 402, 403] * 2
        session.launch(module, "ranks", [8], [1], [out])
        assert out.numpy().tolist() == [100] * 8


def test_what_does_not_fit_names_the_bound_and_the_session_goes_on(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        module, cell = session.module_load(BARRIER), session.zeros(64, np.uint32)
        session.launch(module, "meet", [1 << 20], [1024], [cell, 1], cooperative=True)
        with pytest.raises(LaunchFailed, match=r"1048576 blocks was requested; at most \d+ of its blocks"):
            session.sync()
        session.launch(module, "ranks", [64], [1], [cell], cluster=(64,))
        with pytest.raises(LaunchFailed, match=r"clusters of 64 blocks were requested; at most \d+ fit"):
            session.sync()
        check_main_job(session)


def test_a_kernel_for_ever_ends_with_its_lease(daemon: Daemon) -> None:
    lease = daemon.builder(64 * MIB).acquire()
    with GpuSession(lease) as session:
        module, cell = session.module_load(BARRIER), session.zeros(1, np.uint32)
        session.launch(module, "meet", [32], [32], [cell, 1 << 30], cooperative=True)
        lease.free()
        with pytest.raises(GpuLeaseError):
            session.sync()
    with daemon.builder(64 * MIB).acquire() as another, GpuSession(another) as session:
        check_main_job(session)
