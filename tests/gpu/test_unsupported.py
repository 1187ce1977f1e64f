"""Operations that would harm a card's other tenants, or destroy the context, are refused. The session continues."""

from pathlib import Path

import pytest

from gpulease.client import GpuSession, KernelArgs, LaunchFailed, LoadFailed, Module
from helpers.daemon import Daemon
from helpers.kernels import check_main_job

pytestmark = pytest.mark.gpu

MIB = 1 << 20
IMAGES = Path(__file__).parents[1] / "daemon" / "drivers" / "images"
COOPERATIVE = {"grid_sync", "grid_sync_in_call", "grid_sync_behind_pointer"}


@pytest.mark.parametrize("name", ["managed.sm75.ptx", "managed.sm75.cubin", "managed.sm90.cubin"])
def test_an_image_with_a_managed_variable_is_refused(daemon: Daemon, name: str) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="'counter' is __managed__"):
                session.module_load((IMAGES / name).read_bytes())
        check_main_job(session)


def test_a_fatbin_is_refused(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        with pytest.raises(LoadFailed, match="fatbin"):
            session.module_load((IMAGES / "managed.sm75.fatbin").read_bytes())
        check_main_job(session)


def run(session: GpuSession, module: Module, kernel: str, args: KernelArgs) -> None:
    session.launch(module, kernel, [1], [32], args)
    session.sync()


@pytest.mark.parametrize("name", ["launches.sm75.ptx", "launches.sm90.cubin"])
def test_kernels_that_synchronise_their_grid_are_refused_and_others_run(daemon: Daemon, name: str) -> None:
    """The cubin is for a Hopper card."""
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load((IMAGES / name).read_bytes())
        buffer = session.mem_alloc(4096)
        for kernel in module.kernels:
            if kernel == "names_pointers":
                continue
            args = KernelArgs().push_buffer(buffer)
            if kernel == "grid_sync_behind_pointer":
                args.push_u32(1)
            if kernel in COOPERATIVE:
                with pytest.raises(LaunchFailed, match=f"kernel {kernel} needs a cooperative launch"):
                    run(session, module, kernel, args)
            else:
                run(session, module, kernel, args)
        check_main_job(session)


def test_kernels_of_ptx_that_guard_their_synchronisation_run(daemon: Daemon) -> None:
    with daemon.builder(64 * MIB).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load((IMAGES / "guards.sm75.ptx").read_bytes())
        buffer = session.mem_alloc(4096)
        for kernel, info in module.kernels.items():
            args = KernelArgs().push_buffer(buffer)
            if len(info.parameter_sizes) > 1:
                args.push_u32(8)
            if kernel.startswith("needs_"):
                with pytest.raises(LaunchFailed, match=f"kernel {kernel} needs a cooperative launch"):
                    run(session, module, kernel, args)
            else:
                run(session, module, kernel, args)
        check_main_job(session)
