"""Scenes with regions in a context of this process: `python -m tests.gpu.region_scenes NAME`.

Each scene prints its observations as JSON. tests/gpu/test_regions.py checks them.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any, Final

from gpulease.daemon.drivers.interface import Context, DriverError, KernelFault, OutOfMemory

MIB: Final = 1 << 20
GIB: Final = 1 << 30
SIZES: Final = (2 * MIB, 64 * MIB, GIB, 126 * MIB)
"""The last size is not a multiple of its scratch."""
ROUNDS: Final = 20

KERNELS: Final = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 p, .param .u32 words, .param .u32 value) {
    .reg .pred %q; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [words]; ld.param.u32 %r2, [value];
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, %r4, %r5;
    mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r4;
NEXT:
    setp.ge.u32 %q, %r5, %r1; @%q bra DONE;
    mul.wide.u32 %rd2, %r5, 4; add.u64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r2;
    add.u32 %r5, %r5, %r6; bra NEXT;
DONE:
    ret;
}
.visible .entry count_others(.param .u64 p, .param .u32 words, .param .u32 value, .param .u64 out) {
    .reg .pred %q; .reg .b32 %r<9>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [words]; ld.param.u32 %r2, [value]; ld.param.u64 %rd4, [out];
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, %r4, %r5;
    mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r4;
NEXT:
    setp.ge.u32 %q, %r5, %r1; @%q bra DONE;
    mul.wide.u32 %rd2, %r5, 4; add.u64 %rd3, %rd1, %rd2; ld.global.u32 %r7, [%rd3];
    add.u32 %r5, %r5, %r6;
    setp.eq.u32 %q, %r7, %r2; @%q bra NEXT;
    atom.global.add.u32 %r8, [%rd4], 1; bra NEXT;
DONE:
    ret;
}
.visible .entry hammer(.param .u64 p, .param .u32 words, .param .u32 rounds) {
    .reg .pred %q; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [words]; ld.param.u32 %r2, [rounds];
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r5, %r3, %r4, %r5;
    setp.ge.u32 %q, %r5, %r1; @%q bra DONE;
    mul.wide.u32 %rd2, %r5, 4; add.u64 %rd1, %rd1, %rd2;
AGAIN:
    ld.volatile.global.u32 %r6, [%rd1]; add.u32 %r6, %r6, 1; st.volatile.global.u32 [%rd1], %r6;
    sub.u32 %r2, %r2, 1; setp.ne.u32 %q, %r2, 0; @%q bra AGAIN;
DONE:
    ret;
}
"""


class Stage:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._kernels = context.module_load(KERNELS).kernels
        self._out = context.mem_alloc(4)

    def fill(self, address: int, size: int, value: int) -> None:
        """Store the value in every word, in the order of the stream's other operations."""
        self._launch("fill", size, struct.pack("<QII", address, size // 4, value))

    def others(self, address: int, size: int, value: int) -> int:
        """Return the number of words that differ from the value."""
        self.context.mem_write(self._out, memoryview(bytes(4)))
        self._launch("count_others", size, struct.pack("<QIIQ", address, size // 4, value, self._out))
        seen = bytearray(4)
        self.context.mem_read(self._out, memoryview(seen))
        return int.from_bytes(seen, "little")

    def hammer(self, address: int, threads: int, rounds: int) -> None:
        """Add one to each of the first `threads` words, `rounds` times."""
        params = struct.pack("<QII", address, threads, rounds)
        self.context.launch(self._kernels["hammer"], (-(-threads // 256), 1, 1), (256, 1, 1), 0, params, 1)

    def rounds_for(self, address: int, threads: int, seconds: float) -> int:
        """Return the number of rounds for which `hammer` takes so many seconds. Afterwards the words are zero."""
        rounds = 2000
        self.hammer(address, threads, 1)
        self.context.sync()
        started = time.monotonic()
        self.hammer(address, threads, rounds)
        self.context.sync()
        taken = time.monotonic() - started
        self.fill(address, 4 * threads, 0)
        self.context.sync()
        return max(1, int(rounds * seconds / taken))

    def _launch(self, name: str, size: int, params: bytes) -> None:
        blocks = max(1, min(2048, size // 4096))
        self.context.launch(self._kernels[name], (blocks, 1, 1), (256, 1, 1), 0, params, 1)


def quiet(stage: Stage) -> dict[str, Any]:
    """On an idle card: the microseconds of each call, and the free bytes of the card that it used."""
    context, seen = stage.context, dict[str, Any]()
    for size in SIZES:
        kept, taken = context.region_kept_bytes(size), set[tuple[int, int, int]]()
        spans: dict[str, list[float]] = {"open": [], "end": [], "release": []}
        for _ in range(ROUNDS):
            before = context.free_bytes()
            with timed(spans["open"]):
                address = open_zeroed(context, size)
            opened = context.free_bytes()
            with timed(spans["end"]):
                returned = context.region_end(address)
            ended = context.free_bytes()
            with timed(spans["release"]):
                context.region_release(address)
            taken.add((before - opened, before - ended, before - context.free_bytes()))
            assert (returned.freed_bytes, returned.kept_bytes) == (size - kept, kept)
        us = {name: [round(median(span)), round(max(span))] for name, span in spans.items()}
        seen[str(size)] = {"p50_and_max_us": us, "taken": sorted(taken), "expected": [size, kept, 0]}
    return seen


class timed:
    def __init__(self, spans: list[float]) -> None:
        self._spans = spans

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._spans.append((time.perf_counter() - self._started) * 1e6)


def zeroed(stage: Stage) -> dict[str, Any]:
    """Count words that are not zero, in new regions and in ended ones.

    The new regions are opened after other regions and allocations.
    """
    context, fresh, stale = stage.context, [], []
    for size in (*SIZES, *SIZES[:2] * 5):
        address = open_zeroed(context, size)
        fresh.append(stage.others(address, size, 0))
        stage.fill(address, size, 0xFFFFFFFF)
        assert stage.others(address, size, 0xFFFFFFFF) == 0
        context.region_end(address)
        stale.append(stage.others(address, size, 0))
        allocation = context.mem_alloc(size)
        stage.fill(allocation, size, 0xFFFFFFFF)
        context.mem_free(allocation)
        context.trim(0)
    return {"fresh": fresh, "stale": stale}


def isolated(stage: Stage) -> dict[str, Any]:
    """A stale kernel writes to its own ended region. Count what it changed in any other region, earlier or later."""
    context, size = stage.context, 64 * MIB
    one, other = open_zeroed(context, size), open_zeroed(context, size)
    stage.fill(one, size, 1)
    stage.fill(other, size, 2)
    both = [stage.others(one, size, 1), stage.others(other, size, 2)]
    context.region_end(one)
    third = open_zeroed(context, size)
    gone = open_zeroed(context, size)
    context.region_end(gone)
    stage.fill(one, size, 7)
    context.sync()
    later = open_zeroed(context, size)
    return {
        "both": both,
        "other": stage.others(other, size, 2),
        "third": stage.others(third, size, 0),
        "ended other": stage.others(gone, size, 0),
        "later": stage.others(later, size, 0),
        "fault": str(context.fault() or ""),
    }


def beside(stage: Stage) -> dict[str, Any]:
    """Open and end regions while a kernel works in another one, with few threads and with as many as the card has."""
    context, seen = stage.context, dict[str, Any]()
    work = open_zeroed(context, 64 * MIB)
    stream = context.stream_create()
    context.stream_select(stream)
    for name, threads in (("few", 2560), ("all", 1 << 20)):
        stage.fill(work, 64 * MIB, 0)
        rounds = stage.rounds_for(work, threads, 0.5)
        spans: dict[str, list[float]] = {"open": [], "end": [], "release": []}
        started, count = time.monotonic(), 0
        stage.hammer(work, threads, rounds)
        hammering = context.mark(stream)
        while not hammering.is_done() and count < ROUNDS:
            with timed(spans["open"]):
                address = open_zeroed(context, 64 * MIB)
            with timed(spans["end"]):
                context.region_end(address)
            with timed(spans["release"]):
                context.region_release(address)
            count += 1
        context.sync()
        us = {call: [round(median(span)), round(max(span))] for call, span in spans.items()}
        took_ms = round((time.monotonic() - started) * 1e3)
        wrong = stage.others(work, 4 * threads, rounds)
        seen[name] = {"regions": count, "wrong": wrong, "hammer_ms": took_ms, "p50_and_max_us": us}
    return seen


def addresses(stage: Stage) -> dict[str, Any]:
    """Return the address ranges of 100 regions. Each is opened when the one before has been released."""
    context, ranges = stage.context, []
    for number in range(100):
        size = (2 + 2 * (number % 7)) * MIB
        address = open_zeroed(context, size)
        ranges.append((address, address + size))
        context.region_end(address)
        context.region_release(address)
    ranges.sort()
    overlaps = sum(first[1] > second[0] for first, second in pairwise(ranges))
    return {"overlaps": overlaps, "aligned": all(start % context.region_granule_bytes == 0 for start, _ in ranges)}


def marked(stage: Stage) -> dict[str, Any]:
    """Return whether marks are done while a kernel runs, and once it has ended."""
    context = stage.context
    work = open_zeroed(context, 2 * MIB)
    busy, idle = context.stream_create(), context.stream_create()
    context.stream_select(busy)
    stage.hammer(work, 256, stage.rounds_for(work, 256, 0.3))
    tickets = [context.mark(busy), context.mark(idle)]
    during = [ticket.is_done() for ticket in tickets]
    context.sync()
    return {"during": during, "after": [ticket.is_done() for ticket in tickets]}


def too_large(stage: Stage) -> dict[str, Any]:
    """Open a region for which the card has no room. Returns the error, and what the attempt used."""
    context = stage.context
    context.region_end(open_zeroed(context, 2 * MIB))
    before = context.free_bytes()
    said = []
    for size in (before // (2 * MIB) * 2 * MIB + 64 * MIB, 1 << 44):
        try:
            open_zeroed(context, size)
        except OutOfMemory as error:
            said.append(str(error))
    started = time.monotonic()
    address = open_zeroed(context, 64 * MIB)
    took_ms = round((time.monotonic() - started) * 1e3, 1)
    wrong = stage.others(address, 64 * MIB, 0)
    return {"said": said, "taken": before - context.free_bytes(), "wrong": wrong, "took_ms": took_ms}


def misused(stage: Stage) -> dict[str, Any]:
    """Return the errors of calls that a context with regions must refuse."""
    context: Any = stage.context
    address = open_zeroed(context, 2 * MIB)
    said = []
    for call in (
        lambda: context.region_release(address),
        lambda: context.region_end(address + 2 * MIB),
        lambda: open_zeroed(context, MIB),
        context.scrub,
        context.renew,
    ):
        try:
            call()
        except DriverError as error:
            said.append(str(error))
    context.region_end(address)
    context.region_release(address)
    return {"said": said, "wrong": stage.others(open_zeroed(context, 2 * MIB), 2 * MIB, 0)}


def ended_too_early(stage: Stage) -> dict[str, Any]:
    """End a region that a kernel uses: the context is lost, or the kernel accesses the scratch."""
    context, size = stage.context, 64 * MIB
    address = open_zeroed(context, size)
    # Use words outside the scratch, which stays mapped.
    words = address + context.region_kept_bytes(size)
    stream = context.stream_create()
    context.stream_select(stream)
    stage.hammer(words, 2560, stage.rounds_for(words, 2560, 1.0))
    seen = lost(lambda: context.region_end(address), context.sync)
    return seen if seen["lost"] else seen | {"wrong": stage.others(open_zeroed(context, size), size, 0)}


def used_after_release(stage: Stage) -> dict[str, Any]:
    """Access a region after its release: the context is lost."""
    context = stage.context
    address = open_zeroed(context, 2 * MIB)
    context.region_end(address)
    context.region_release(address)
    stage.fill(address, 4096, 1)
    return lost(context.sync)


def open_zeroed(context: Context, size_bytes: int) -> int:
    """Open a region, and wait until it is zeroed."""
    address = context.region_open(size_bytes)
    while not context.region_is_zeroed():
        pass
    return address


def lost(*calls: Callable[[], object]) -> dict[str, Any]:
    try:
        for call in calls:
            call()
    except KernelFault as fault:
        return {"said": str(fault), "lost": fault.context_lost}
    return {"said": "", "lost": False}


SCENES: Final = {
    scene.__name__: scene
    for scene in (
        quiet,
        zeroed,
        isolated,
        beside,
        addresses,
        marked,
        too_large,
        misused,
        ended_too_early,
        used_after_release,
    )
}


def main() -> Iterator[dict[str, Any]]:
    """Open the context and run the scenes that the command line names."""
    from gpulease.daemon.drivers.cuda.context import CudaContext

    stage = Stage(CudaContext.open())
    for name in sys.argv[1:]:
        yield SCENES[name](stage)


if __name__ == "__main__":
    for result in main():
        print(json.dumps(result), flush=True)
    # End like a worker, without a clean-up: pycuda aborts a process whose context still exists at its end.
    os._exit(0)
