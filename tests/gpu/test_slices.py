"""A slice is a hard limit: whatever a session does, the card never reports more memory for it than was admitted."""

import random
from importlib.resources import files

import numpy as np
import pytest

from gpulease.client import AllocFailed, Buffer, GpuSession, KernelArgs, LaunchFailed, LoadFailed, Module, SyncFailed
from helpers.admitted import watched
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30
PTX = files("gpulease.client.verify")
HUNGRY = PTX.joinpath("hungry.ptx").read_bytes()
KERNELS = PTX.joinpath("kernels.ptx").read_bytes()


def with_variable(size_bytes: int) -> bytes:
    """Return a module with one variable of that size, which its kernel accesses."""
    return f"""
.version 7.0
.target sm_75
.address_size 64
.global .align 8 .b8 big[{size_bytes}];
.visible .entry touch(.param .u64 p) {{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    mov.u64 %rd2, big;
    ld.global.u32 %r1, [%rd2];
    st.global.u32 [%rd1], %r1;
    ret;
}}
""".encode()


@pytest.mark.parametrize("size_bytes", [3 * GIB // 2, 41 * GIB, 200 * GIB])
def test_variables_that_do_not_fit_take_nothing(daemon: Daemon, cards: Cards, size_bytes: int) -> None:
    with watched(daemon, cards, GIB) as seen:
        check_main_job(seen.session)
        before = seen.figure()
        with pytest.raises(LoadFailed, match="bytes on the card") as caught:
            seen.session.module_load(with_variable(size_bytes))
        assert caught.value.hint
        assert seen.peak <= before + 4 * MIB
        check_main_job(seen.session)


def test_variables_are_taken_from_the_slice_and_given_back(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, 2 * GIB) as seen:
        module = seen.session.module_load(with_variable(3 * GIB // 2))
        out = seen.session.mem_alloc(4)
        seen.session.launch(module, "touch", [1], [1], KernelArgs().push_buffer(out))
        assert seen.session.mem_read(out, 0, 4) == bytes(4)
        with pytest.raises(AllocFailed):
            seen.session.mem_alloc(GIB)
        seen.session.module_unload(module)
        seen.session.mem_alloc(2 * GIB - 4)


@pytest.mark.parametrize("reason", ["main job", "assertion", "heap"])
def test_a_full_slice_still_runs_kernels(daemon: Daemon, cards: Cards, reason: str) -> None:
    """The allowance covers the memory that every tenant needs besides its slice."""
    with watched(daemon, cards, 64 * MIB) as seen:
        buffer = seen.session.mem_alloc(64 * MIB - 4096)
        out = seen.session.mem_alloc(8)
        if reason == "main job":
            seen.session.mem_free(out)
            check_main_job(seen.session, 512)
            out = seen.session.mem_alloc(8)
        elif reason == "assertion":
            module = seen.session.module_load(KERNELS)
            seen.session.mem_write(out, 0, b"\1" * 8)
            seen.session.launch(module, "asserted", [1], [32], KernelArgs().push_buffer(out))
        else:
            module = seen.session.module_load(HUNGRY)
            for size, given in ((1 * MIB, True), (64 * MIB, False)):
                args = KernelArgs().push_buffer(out).push_u64(size)
                seen.session.launch(module, "from_heap", [1], [1], args)
                assert (seen.session.mem_read(out, 0, 8) != bytes(8)) is given
        seen.session.sync()
        seen.session.mem_write(buffer, 0, b"x")


@pytest.mark.parametrize(("kernel", "slice_gib", "fits"), [("local_64k", 1, False), ("local_16k", 5, True)])
def test_local_memory_is_charged_before_it_is_taken(
    daemon: Daemon, cards: Cards, kernel: str, slice_gib: int, fits: bool
) -> None:
    with watched(daemon, cards, slice_gib * GIB) as seen:
        module = seen.session.module_load(HUNGRY)
        out = seen.session.mem_alloc(4096)
        args = KernelArgs().push_buffer(out).push_u32(5)
        if fits:
            seen.session.launch(module, kernel, [1], [32], args)
            seen.session.sync()
            with pytest.raises(AllocFailed):
                seen.session.mem_alloc(2 * GIB)
        else:
            before = seen.figure()
            seen.session.launch(module, kernel, [1], [32], args)
            with pytest.raises(LaunchFailed, match="local memory") as caught:
                seen.session.sync()
            assert caught.value.hint
            assert seen.peak <= before + 4 * MIB
        check_main_job(seen.session)


def test_a_launch_the_driver_refuses_gives_its_charge_back(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, 5 * GIB) as seen:
        module = seen.session.module_load(HUNGRY)
        out = seen.session.mem_alloc(4096)
        args = KernelArgs().push_buffer(out).push_u32(5)
        before = seen.figure()
        for grid, shared_bytes in (([1, 1, 1], 1 << 20), ([1, 1 << 20, 1], 0)):
            seen.session.launch(module, "local_16k", grid, [32, 1, 1], args, shared_bytes=shared_bytes)
            with pytest.raises(LaunchFailed):
                seen.session.sync()
            assert seen.figure() <= before + 4 * MIB
            seen.session.mem_free(seen.session.mem_alloc(5 * GIB - 2 * MIB))
        seen.session.launch(module, "local_16k", [1], [32], args)
        seen.session.sync()
        with pytest.raises(AllocFailed):
            seen.session.mem_alloc(2 * GIB)


def test_deep_recursion_takes_nothing(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, GIB) as seen:
        module = seen.session.module_load(KERNELS)
        out = seen.session.mem_alloc(64)
        before = seen.figure()
        seen.session.launch(module, "sinking", [1], [32], KernelArgs().push_buffer(out))
        with pytest.raises(SyncFailed):
            seen.session.sync()
        assert seen.peak <= before


def test_any_allocations_stay_below_what_was_admitted(daemon: Daemon, cards: Cards) -> None:
    """Allocate sizes that waste the most pages, and leave holes.

    Nearly all of the slice can be allocated, and never more.
    """
    rng = random.Random(4)
    with watched(daemon, cards, 512 * MIB) as seen:
        held: list[Buffer] = []
        refusals = 0
        for _ in range(1500):
            if held and rng.random() < 0.4:
                seen.session.mem_free(held.pop(rng.randrange(len(held))))
                continue
            try:
                held.append(seen.session.mem_alloc(rng.choice([4, 5000, 900_000, MIB, MIB + 1, 3 * MIB, 9 * MIB + 1])))
            except AllocFailed:
                refusals += 1
        assert refusals
        assert seen.figure() >= seen.admitted - 256 * MIB


def load_for_ever(session: GpuSession, modules: list[Module]) -> None:
    while True:
        modules.append(session.module_load(with_variable(700_000 + 1024 * (len(modules) % 7))))


def test_many_modules_stay_below_what_was_admitted(daemon: Daemon, cards: Cards) -> None:
    with watched(daemon, cards, 256 * MIB) as seen:
        modules: list[Module] = []
        with pytest.raises(LoadFailed, match="bytes on the card"):
            load_for_ever(seen.session, modules)
        assert len(modules) > 300
        for module in modules[::2]:
            seen.session.module_unload(module)
        # Each remaining module keeps a page that nothing else can use.
        with pytest.raises(AllocFailed):
            seen.session.mem_alloc(64 * MIB)
        for module in modules[1::2]:
            seen.session.module_unload(module)
        buffer = seen.session.mem_alloc(255 * MIB)
        assert not np.frombuffer(seen.session.mem_read(buffer, 0, MIB), np.uint64).any()
