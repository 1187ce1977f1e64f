"""Regions, and accesses of ended ones: loads of every kind give zeros, stores go nowhere, all are counted."""

import ctypes
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gpulease.daemon.drivers.interface import DriverError, KernelFault, OutOfMemory, RegionReturn
from gpulease.daemon.ptx.context import CpuContext

MIB = 1 << 20
GRANULE = 2 * MIB
SLICE_BYTES = 64 * MIB
MARK = 0xA5
# Where results begin in the allocation for them, and its size.
OUT_BYTES = 64 << 10

HEAD = """
.version 8.1 .target sm_90 .address_size 64
.entry k(.param .u64 p, .param .u64 out)
{
    .reg .pred %q<4>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<20>; .reg .f32 %f<9>; .reg .f64 %g<4>;
    .shared .align 128 .b8 window[4096];
    ld.param.u64 %d0, [p]; ld.param.u64 %d1, [out];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r0, %r1, %r2, %r0;
    mul.wide.u32 %d2, %r0, 8;
"""


def kernel(body: str) -> bytes:
    """A kernel of p, %d0, and the results' place, %d1; %r0 is the thread's number, %d2 that times 8."""
    return f"{HEAD}{body}\n    ret;\n}}\n".encode()


class Rig:
    """A context, a live region before and behind one that has ended, and a place for results."""

    def __init__(self, context: CpuContext) -> None:
        self.context = context
        self.said: list[tuple[str, str]] = []
        context.noted = lambda name, text: self.said.append((name, text))
        self.out = context.mem_alloc(OUT_BYTES)
        self.before, self.ended, self.behind = (context.region_open(2 * GRANULE) for _ in range(3))
        for address in (self.before, self.ended, self.behind):
            ctypes.memset(address, MARK, 2 * GRANULE)
        context.region_end(self.ended)

    def run(self, body: str, place: int | None = None, *, grid: int = 1, block: int = 1) -> bytes:
        """What a kernel leaves in the results; the bytes before are MARK's."""
        ctypes.memset(self.out, MARK, OUT_BYTES)
        loaded = self.context.module_load(kernel(body))
        params = struct.pack("<QQ", self.ended if place is None else place, self.out)
        self.context.launch(loaded.kernels["k"], (grid, 1, 1), (block, 1, 1), 0, params, 1)
        self.context.module_unload(loaded)
        return ctypes.string_at(self.out, OUT_BYTES)

    @property
    def count(self) -> int:
        return self.context._regions.stray_accesses(self.ended)

    def check_untouched(self) -> None:
        """The neighbours are what they were, and nothing lies in the ended region's place."""
        for address in (self.before, self.behind):
            assert ctypes.string_at(address, 2 * GRANULE) == bytes([MARK]) * (2 * GRANULE)
        assert ctypes.string_at(self.ended, 2 * GRANULE) == bytes(2 * GRANULE)


@pytest.fixture
def rig(context: CpuContext) -> Iterator[Rig]:
    made = Rig(context)
    yield made
    made.check_untouched()


LOADS = {
    "u8": ("ld.global.u8 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "s16": ("ld.global.s16 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "u32": ("ld.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "b64": ("ld.global.b64 %d3, [%d0]; st.global.u64 [%d1], %d3;", 8),
    "f32": ("ld.global.f32 %f3, [%d0]; st.global.f32 [%d1], %f3;", 4),
    "f64": ("ld.global.f64 %g3, [%d0]; st.global.f64 [%d1], %g3;", 8),
    "v2": ("ld.global.v2.u64 {%d3, %d4}, [%d0]; st.global.v2.u64 [%d1], {%d3, %d4};", 16),
    "v4": ("ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%d0]; st.global.v4.f32 [%d1], {%f1, %f2, %f3, %f4};", 16),
    "read only": ("ld.global.nc.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "volatile": ("ld.volatile.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "acquire": ("ld.acquire.gpu.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;", 4),
    "generic": ("ld.u32 %r3, [%d0]; st.u32 [%d1], %r3;", 4),
    "last": (f"ld.global.u32 %r3, [%d0+{2 * GRANULE - 4}]; st.global.u32 [%d1], %r3;", 4),
    "to shared memory": (
        "mov.u32 %r4, window; cp.async.cg.shared.global [%r4], [%d0], 16; cp.async.wait_all;"
        " ld.shared.v2.u64 {%d3, %d4}, [%r4]; st.global.v2.u64 [%d1], {%d3, %d4};",
        16,
    ),
    "some to shared memory": (
        "mov.u32 %r4, window; cp.async.ca.shared.global [%r4], [%d0], 16, 12; cp.async.wait_all;"
        " ld.shared.v2.u64 {%d3, %d4}, [%r4]; st.global.v2.u64 [%d1], {%d3, %d4};",
        16,
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_load_gives_zero_and_counts(rig: Rig, name: str) -> None:
    body, size = LOADS[name]
    assert rig.run(body)[: size + 1] == bytes(size) + bytes([MARK])
    assert rig.count == 1


STORES = {
    "u8": "st.global.u8 [%d0], 255;",
    "u64": "st.global.u64 [%d0], -1;",
    "v4": "mov.u32 %r3, -1; st.global.v4.u32 [%d0], {%r3, %r3, %r3, %r3};",
    "volatile": "st.volatile.global.u32 [%d0], -1;",
    "release": "st.release.gpu.global.u32 [%d0], -1;",
    "generic": "st.u32 [%d0], -1;",
    "last": f"st.global.u64 [%d0+{2 * GRANULE - 8}], -1;",
    "reduction": "red.global.add.u32 [%d0], 7;",
    "f32 reduction": "red.global.add.f32 [%d0], 0f3f800000;",
    "vector reduction": "mov.b32 %f1, 0f3f800000; red.global.add.v4.f32 [%d0], {%f1, %f1, %f1, %f1};",
}


@pytest.mark.parametrize("name", STORES)
def test_a_store_goes_nowhere_and_counts(rig: Rig, name: str) -> None:
    reload = "ld.global.v2.u64 {%d3, %d4}, [%d0]; st.global.v2.u64 [%d1], {%d3, %d4};"
    assert rig.run(STORES[name] + reload)[:16] == bytes(16)
    assert rig.count == 2


ATOMICS = {
    "add": "atom.global.add.u32 %r3, [%d0], 7;",
    "exch": "atom.global.exch.b32 %r3, [%d0], 7;",
    "cas": "atom.global.cas.b32 %r3, [%d0], 0, 7;",
    "max": "atom.global.max.u32 %r3, [%d0], 7;",
    "inc": "atom.global.inc.u32 %r3, [%d0], 7;",
    "f32": "atom.global.add.f32 %f3, [%d0], 0f3f800000; mov.b32 %r3, %f3;",
    "generic": "atom.add.u32 %r3, [%d0], 7;",
}


@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_operation_gives_zero_each_time_and_counts(rig: Rig, name: str) -> None:
    once = ATOMICS[name]
    body = f"{once} st.global.u32 [%d1], %r3; {once} st.global.u32 [%d1+4], %r3;"
    assert rig.run(body)[:9] == bytes(8) + bytes([MARK])
    assert rig.count == 2


@pytest.mark.parametrize("place", ["add.u64 %d3, %d0, %d2;", "shl.b64 %d4, %d2, 5; add.u64 %d3, %d0, %d4;"])
@pytest.mark.parametrize("block", [1, 33, 256])
def test_threads_together_get_zeros_and_are_all_counted(rig: Rig, place: str, block: int) -> None:
    body = f"""{place} add.u64 %d5, %d1, %d2; ld.global.u64 %d6, [%d3]; st.global.u64 [%d5], %d6;
        st.global.u64 [%d3], -1; atom.global.add.u64 %d7, [%d3], 1; add.u64 %d6, %d6, %d7; st.global.u64 [%d5], %d6;"""
    assert rig.run(body, grid=8, block=block)[: 64 * block + 1] == bytes(64 * block) + bytes([MARK])
    assert rig.count == 3 * 8 * block


def test_lanes_of_a_vector_part_where_the_region_begins(rig: Rig) -> None:
    """Half of the lanes access the region before, which has not ended."""
    body = "add.u64 %d3, %d0, %d2; ld.global.u64 %d4, [%d3]; add.u64 %d5, %d1, %d2; st.global.u64 [%d5], %d4;"
    half = bytes([MARK]) * 256
    assert rig.run(body, rig.ended - 256, block=64)[:513] == half + bytes(256) + bytes([MARK])
    assert rig.count == 32


# The check's place in a loop: the address is the same each time, goes on each time, or is known to few turns only.
LOOPS = {
    "same": ("", "ld.global.u32 %r5, [%d0]; add.u32 %r4, %r4, %r5;"),
    "same, stored": ("", "ld.global.u32 %r5, [%d0]; add.u32 %r4, %r4, %r5; st.global.u32 [%d0], %r3;"),
    "next": ("mov.u64 %d3, %d0;", "ld.global.u32 %r5, [%d3]; add.u32 %r4, %r4, %r5; add.u64 %d3, %d3, 4;"),
    "next, stored": ("mov.u64 %d3, %d0;", "st.global.u32 [%d3], %r3; add.u64 %d3, %d3, 4;"),
    "conditional": ("", "and.b32 %r6, %r3, 1; setp.eq.u32 %q1, %r6, 0; @%q1 ld.global.u32 %r4, [%d0];"),
    "added": ("", "atom.global.add.u32 %r5, [%d0], 1; add.u32 %r4, %r4, %r5;"),
}


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_finds_zeros_all_the_time(rig: Rig, name: str, block: int) -> None:
    before, inside = LOOPS[name]
    body = f"""{before} mov.u32 %r3, 1000; mov.u32 %r4, 0;
    AGAIN: {inside} sub.u32 %r3, %r3, 1; setp.ne.u32 %q0, %r3, 0; @%q0 bra AGAIN;
        add.u64 %d5, %d1, %d2; st.global.u32 [%d5], %r4;"""
    seen = rig.run(body, block=block)
    assert [seen[8 * thread : 8 * thread + 4] for thread in range(block)] == [bytes(4)] * block
    assert rig.count >= 500


def test_a_loop_that_leaves_a_live_region_goes_on_in_the_ended_one(rig: Rig) -> None:
    body = """mov.u32 %r3, 64; mov.u64 %d3, 0;
    AGAIN: ld.global.u64 %d4, [%d0]; add.u64 %d3, %d3, %d4; add.u64 %d0, %d0, 8; sub.u32 %r3, %r3, 1;
        setp.ne.u32 %q0, %r3, 0; @%q0 bra AGAIN;
        st.global.u64 [%d1], %d3;"""
    found = int.from_bytes(rig.run(body, rig.ended - 256)[:8], "little")
    assert found == 32 * int.from_bytes(bytes([MARK]) * 8, "little") % 2**64
    assert rig.count == 32


def test_a_copy_in_bulk_out_of_it_copies_zeros(rig: Rig) -> None:
    body = """mov.u32 %r3, window; add.u32 %r4, %r3, 1024; mbarrier.init.shared.b64 [%r4], 1;
        st.shared.u64 [%r3+248], -1;
        mbarrier.arrive.expect_tx.shared.b64 %d3, [%r4], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d0], 256, [%r4];
        ld.shared.u64 %d4, [%r3+248]; st.global.u64 [%d1], %d4;"""
    assert rig.run(body)[:9] == bytes(8) + bytes([MARK])
    assert rig.count == 16


def test_a_copy_in_bulk_into_it_goes_nowhere(rig: Rig) -> None:
    body = """mov.u32 %r3, window; st.shared.u64 [%r3], -1;
        cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 256;"""
    rig.run(body)
    assert rig.count == 16


def test_a_copy_in_bulk_says_what_it_could_not_access(rig: Rig) -> None:
    body = """mov.u32 %r3, window; cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 8192;"""
    with pytest.raises(KernelFault, match=r"shared address 0x1000 .16-byte load"):
        rig.run(body)
    with pytest.raises(KernelFault, match=r"illegal address .*16-byte store"):
        rig.run(body.replace("8192", "256"), rig.behind + 2 * GRANULE)


def test_a_matrix_out_of_it_is_zero(rig: Rig) -> None:
    registers = ", ".join(f"%r{n}" for n in range(10, 18))
    together = " ".join(f"or.b32 %r10, %r10, %r{n};" for n in range(11, 18))
    body = f"""wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {{{registers}}}, [%d0]; {together}
        add.u64 %d5, %d1, %d2; st.global.u32 [%d5], %r10;"""
    seen = rig.run(body, block=32)
    assert all(seen[8 * lane : 8 * lane + 4] == bytes(4) for lane in range(32))
    assert rig.count == 256


def test_what_is_not_aligned_faults_as_ever(rig: Rig) -> None:
    with pytest.raises(KernelFault, match="misaligned"):
        rig.run("ld.global.u32 %r3, [%d0+2]; st.global.u32 [%d1], %r3;")
    assert rig.count == 0


def test_addresses_that_no_region_had_fault(rig: Rig) -> None:
    with pytest.raises(KernelFault, match="illegal"):
        rig.run("ld.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;", rig.behind + 2 * GRANULE)


def test_a_released_region_faults_and_its_neighbours_do_not(rig: Rig) -> None:
    rig.context.region_release(rig.ended)
    load = "ld.global.u32 %r3, [%d0]; st.global.u32 [%d1], %r3;"
    for place in (rig.ended, rig.ended + 2 * GRANULE - 4):
        with pytest.raises(KernelFault, match="illegal"):
            rig.run(load, place)
    assert rig.run(load, rig.behind)[:4] == bytes([MARK]) * 4


def test_an_ended_region_with_strays_is_named_once(rig: Rig) -> None:
    other = rig.context.region_open(GRANULE)
    rig.context.region_end(other)
    for _ in range(3):
        rig.run("st.global.u32 [%d0], 1;")
    assert [name for name, _ in rig.said] == [f"region {rig.ended:#x}"]
    assert "accessed 1 times" in rig.said[0][1]
    rig.run("st.global.u32 [%d0], 1;", other)
    assert [name for name, _ in rig.said][1:] == [f"region {other:#x}"]
    assert rig.count == 3


def test_copies_look_for_an_active_region(rig: Rig) -> None:
    into = memoryview(bytearray(16))
    rig.context.mem_read(rig.behind, into)
    assert bytes(into) == bytes([MARK]) * 16
    rig.context.mem_write(rig.behind, into)
    for place in (rig.ended, rig.before + 2 * GRANULE - 8, rig.behind + 2 * GRANULE - 8, rig.behind + 2 * GRANULE):
        with pytest.raises(DriverError, match="not within one active region"):
            rig.context.mem_read(place, into)
        with pytest.raises(DriverError, match="not within one active region"):
            rig.context.mem_write(place, into)


def test_the_free_bytes_are_exact(context: CpuContext) -> None:
    free = context.free_bytes()
    buffer = context.mem_alloc(1000)
    address = context.region_open(8 * GRANULE)
    assert free - context.free_bytes() == 1000 + 8 * GRANULE
    assert context.region_kept_bytes(8 * GRANULE) == 0
    assert context.region_end(address) == RegionReturn(8 * GRANULE, 0)
    assert free - context.free_bytes() == 1000
    context.mem_free(buffer)
    context.region_release(address)
    assert context.free_bytes() == free


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_pages_of_a_region_go_back_to_the_host(context: CpuContext) -> None:
    address = context.region_open(SLICE_BYTES)
    ctypes.memset(address, MARK, SLICE_BYTES)
    before = resident_bytes()
    context.region_end(address)
    assert before - resident_bytes() > SLICE_BYTES * 3 // 4


def test_many_regions_leave_less_than_a_page_each(context: CpuContext) -> None:
    held = [context.region_open(GRANULE) for _ in range(4)]
    before = resident_bytes()
    for _ in range(2000):
        held.append(context.region_open(GRANULE))
        address = held.pop(1)
        context.region_end(address)
        context.region_release(address)
    assert resident_bytes() - before < 1000 * 4096


def test_no_address_is_given_twice_and_they_come_to_an_end(context: CpuContext) -> None:
    ordered = []
    for _ in range(1024):
        address = context.region_open(SLICE_BYTES)
        assert address % GRANULE == 0
        ordered.append(address)
        context.region_end(address)
        context.region_release(address)
    with pytest.raises(OutOfMemory, match="never used again"):
        context.region_open(GRANULE)
    ordered.sort()
    assert all(after - before >= SLICE_BYTES for before, after in pairwise(ordered))


@pytest.mark.parametrize("size", [0, -GRANULE, MIB, GRANULE + 256])
def test_a_region_has_whole_granules(context: CpuContext, size: int) -> None:
    with pytest.raises(DriverError, match="multiple"):
        context.region_open(size)


def test_a_region_ends_once_and_is_released_once_behind_it(context: CpuContext) -> None:
    address = context.region_open(GRANULE)
    with pytest.raises(DriverError, match="ended region"):
        context.region_release(address)
    context.region_end(address)
    with pytest.raises(DriverError, match="can be ended"):
        context.region_end(address)
    context.region_release(address)
    with pytest.raises(DriverError, match="ended region"):
        context.region_release(address)


WATCH = "AGAIN: ld.volatile.global.u32 %r3, [%d0]; setp.eq.u32 %q0, %r3, 0; @%q0 bra AGAIN; st.global.u32 [%d1], %r3;"


def test_a_region_ends_while_a_kernel_runs_elsewhere_and_a_mark_waits_for_it(rig: Rig) -> None:
    context = rig.context
    place, other = context.region_open(GRANULE), context.region_open(GRANULE)
    loaded = context.module_load(kernel(WATCH))
    context.launch(loaded.kernels["k"], (1, 1, 1), (1, 1, 1), 0, struct.pack("<QQ", place, rig.out), 1)
    ticket = context.mark(0)
    context.region_end(other)
    assert not ticket.is_done()
    ctypes.c_uint32.from_address(place).value = 5
    context.sync()
    assert ticket.is_done()
    assert ctypes.c_uint32.from_address(rig.out).value == 5


def test_a_mark_on_an_empty_queue_is_done(context: CpuContext) -> None:
    assert context.mark(0).is_done()


def test_a_kernel_that_watches_a_region_sees_zeros_from_its_end_on(rig: Rig) -> None:
    """It runs while the region ends, and its strays are counted."""
    context = rig.context
    body = """AGAIN: ld.volatile.global.u32 %r3, [%d0]; st.volatile.global.u32 [%d1], 1; setp.ne.u32 %q0, %r3, 0;
        @%q0 bra AGAIN; st.global.u32 [%d1+4], %r3;"""
    loaded = context.module_load(kernel(body))
    place = context.region_open(GRANULE)
    ctypes.memset(place, MARK, GRANULE)
    ctypes.memset(rig.out, 0, 8)
    context.launch(loaded.kernels["k"], (1, 1, 1), (1, 1, 1), 0, struct.pack("<QQ", place, rig.out), 1)
    while not ctypes.c_uint32.from_address(rig.out).value:
        assert not context.mark(0).is_done()
    context.region_end(place)
    context.sync()
    assert context.fault() is None
