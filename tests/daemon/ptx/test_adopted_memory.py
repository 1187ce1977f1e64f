"""A parked context's memory and modules, adopted by another context: at the same addresses, or not at all."""

import os
import struct

import pytest

from gpulease.daemon.drivers.interface import ImageMismatch
from gpulease.daemon.host.copy_ring import CopyRing
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.memory import PARKABLE_ADDRESS
from helpers.pointers import POINTERS

SLICE = 1 << 20


def parkable() -> CpuContext:
    context = CpuContext(SLICE)
    context.make_parkable(SLICE)
    return context


def test_another_context_continues_where_the_first_one_was_parked() -> None:
    host = memoryview(bytearray(SLICE))
    first = parkable()
    kept, freed = first.mem_alloc(1000), first.mem_alloc(1000)
    first.mem_free(freed)
    first.mem_write(kept, memoryview(b"weights"))
    module = first.module_load(POINTERS)
    place, (variable, size) = first.module_place(module), module.variable("kept")
    first.mem_write(variable, memoryview(struct.pack("<Q", 41)))
    first.park(host, lambda end: None)
    state = first.parked_state()
    # While the first one has the addresses, no other can have them.
    with pytest.raises(ImageMismatch, match="would begin at"):
        parkable().adopt_parked(state, host)
    first.close()
    second = parkable()
    second.adopt_parked(state, host)
    adopted = second.adopt_module(POINTERS, place)
    second.unpark()
    assert kept >= PARKABLE_ADDRESS
    assert adopted.variable("kept") == (variable, size)
    counted, back = second.mem_alloc(8), bytearray(7)
    second.mem_read(kept, memoryview(back))
    assert bytes(back) == b"weights"
    # The freed block is the next one, as it would have been, and it is zeroed.
    block = bytearray(1000)
    assert second.mem_alloc(1000) == freed
    second.mem_read(freed, memoryview(block))
    assert block == bytearray(1000)
    second.launch(adopted.kernels["count"], (1, 1, 1), (1, 1, 1), 0, struct.pack("<Q", counted), 1)
    second.sync()
    second.mem_read(counted, memoryview(word := bytearray(8)))
    assert struct.unpack("<Q", word) == (42,)
    second.close()


def test_another_context_copies_what_the_first_one_lends_and_changes_nothing_there() -> None:
    first = parkable()
    kept = first.mem_alloc(1000)
    first.mem_write(kept, memoryview(b"weights"))
    region = first.region_open(first.region_granule_bytes)
    assert first.can_lend()
    fds, state = first.lend_pages(1, memoryview(b""), lambda end: None), first.parked_state()
    back = bytearray(7)
    first.mem_read(kept, memoryview(back))
    assert bytes(back) == b"weights"
    first.close()
    second = parkable()
    second.adopt_parked(state, memoryview(b""), fds)
    # The descriptors are the second context's, which has closed them.
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])
    second.unpark()
    second.mem_read(kept, memoryview(back))
    assert bytes(back) == b"weights"
    second.region_end(region)
    second.close()


def test_another_context_gets_what_the_first_one_lends_through_a_ring() -> None:
    first = parkable()
    kept, other = first.mem_alloc(600_000), first.mem_alloc(1000)
    first.mem_write(kept + 500_000, memoryview(b"weights"))
    first.mem_write(other, memoryview(b"others"))
    region, ended = (first.region_open(first.region_granule_bytes) for _ in range(2))
    first.mem_write(ended, memoryview(b"secret"))
    ring = CopyRing()
    filling, state = first.lend_ring(ring), first.parked_state()
    while filling.advance():
        pass
    assert filling.is_over
    back = bytearray(7)
    first.mem_read(kept + 500_000, memoryview(back))
    assert bytes(back) == b"weights"
    first.close()
    second = parkable()
    second.adopt_parked(state, memoryview(b""), ring=ring)
    # A region that ends meanwhile has no bytes any more.
    second.region_end(ended)
    second.unpark()
    ring.close()
    for address, data in ((kept + 500_000, b"weights"), (other, b"others\0"), (kept, bytes(7))):
        second.mem_read(address, memoryview(back))
        assert bytes(back) == data
    second.region_end(region)
    second.close()


def test_what_is_lent_in_a_wrong_number_of_pieces_is_refused_and_closed() -> None:
    context = parkable()
    fds = [os.memfd_create("lent") for _ in range(2)]
    with pytest.raises(ImageMismatch, match="lent 2 pieces"):
        context.adopt_parked(b"", memoryview(b""), fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    context.close()


def test_a_module_with_other_variables_is_refused() -> None:
    context = parkable()
    place = context.module_place(context.module_load(POINTERS))
    with pytest.raises(ImageMismatch, match="other variables"):
        context.adopt_module(OTHER, place)
    context.close()


OTHER = b"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
"""


def test_state_that_is_no_state_is_refused() -> None:
    context = parkable()
    for state in (b"", b"\\x93\\x01\\x80\\x90", b"\\xff" * 20):
        with pytest.raises(ImageMismatch):
            context.adopt_parked(state, memoryview(bytearray(16)))
    context.close()
