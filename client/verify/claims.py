"""What one lease leaves to the next in the host's memory: nothing.

A lease's bytes pass through its worker: frames, the buffer of replies, ring and arena. The worker is searched for them
from outside, as no tenant could: first the one they passed through, so that the search is known to find them, then that
of the next lease.

Different work in several sessions at the same time, each result checked.

Promises that are no fault's: no byte of an earlier lease, room for as many leases as fit, the launch gate.

The promise of submits: a kernel beside a lease's session, and nothing of either is the other's.
"""

import contextlib
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from gpulease.client import (
    AllocFailed,
    CapacityExceeded,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    KernelArgs,
    Revoked,
    Submission,
    SyncFailed,
    TimedOut,
)
from gpulease.client.bench.figures import percentile
from gpulease.client.bench.kernels import Prepared, kernels_ptx, works
from gpulease.client.sync.driver import ask
from gpulease.client.verify.kernels import BLOCK, GRID, ONE, WARP, count_set, fill, rule_breakers
from gpulease.client.verify.scene import Breach, Scene, worker_pid
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRevoke

SLICE_BYTES: Final = 16 << 20
COPY_BYTES: Final = 4 << 20
SECRET_BYTES: Final = 32
"""No such run of bytes comes about by chance."""

PAGE_BYTES: Final = mmap.PAGESIZE
CHUNK_PAGES: Final = 4096
PRESENT_SHIFT: Final = np.uint64(62)
"""Of a page's entry: above it, whether it is in memory or swapped out."""

DEVICES: Final = ("/dev/nvidia", "/dev/dri")


def host_buffers(scene: Scene) -> str:
    """One lease sends and fetches a secret by every way there is; the next one's worker has no byte of it."""
    try:
        return _search(scene)
    except PermissionError:
        return "not looked for: workers are closed to all but root"


def _search(scene: Scene) -> str:
    secret = secrets.token_bytes(SECRET_BYTES)
    with scene.wish(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        kept = _pass_through(session, secret)
        if not _count(worker_pid(lease.lease_id), secret):
            raise Breach("the search does not find a secret in the worker it passed through, so it proves nothing")
        del kept
    with scene.wish(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        array = session.empty(COPY_BYTES, np.uint8)
        # One that is nobody's view is this process's own, for want of an arena.
        if array.base is not None and array.any():
            raise Breach("a new arena's bytes are not zero")
        buffer = session.mem_alloc(COPY_BYTES)
        if any(session.mem_read(buffer, 0, COPY_BYTES)):
            raise Breach("new memory is not zero")
        if found := _count(worker_pid(lease.lease_id), secret):
            raise Breach(f"a later lease's worker has {found} copies of an earlier one's secret")
    return "found in the worker it passed through, in no byte of the next"


def _pass_through(session: GpuSession, secret: bytes) -> object:
    """By frames and replies, and by the arena if there is one; what must be kept alive."""
    data = np.frombuffer(secret * (COPY_BYTES // SECRET_BYTES), np.uint8)
    array = session.empty(COPY_BYTES, np.uint8)
    array[:] = data
    buffer = session.mem_alloc(COPY_BYTES)
    for source in (data, array):
        session.mem_write(buffer, 0, source)
        if bytes(session.mem_read(buffer, 0, COPY_BYTES)) != data.tobytes():
            raise Breach("what was written is not what is read")
    session.mem_read(buffer, 0, COPY_BYTES, into=array)
    return array, buffer


def _count(pid: int, secret: bytes) -> int:
    """How often the secret stands in the memory that a process has and may write to, other than devices."""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory, Path(f"/proc/{pid}/pagemap").open("rb", 0) as pagemap:
        return sum(
            _count_in(memory.fileno(), at, end, secret)
            for start, stop in _writable(pid)
            for at, end in _present(pagemap.fileno(), start, stop)
        )


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    """See proc_pid_maps(5)."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions.startswith("rw") and not (path and path[0].startswith(DEVICES)):
            start, stop = (int(number, 16) for number in span.split("-"))
            yield start, stop


def _present(pagemap: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that are there: reading the others would make them. See proc_pid_pagemap(5)."""
    entries = np.frombuffer(os.pread(pagemap, (stop - start) // PAGE_BYTES * 8, start // PAGE_BYTES * 8), np.uint64)
    is_there = np.concatenate([[False], entries >> PRESENT_SHIFT != 0, [False]])
    edges = np.flatnonzero(is_there[1:] != is_there[:-1]).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        for page in range(first, last, CHUNK_PAGES):
            yield start + page * PAGE_BYTES, start + min(last, page + CHUNK_PAGES) * PAGE_BYTES


def _count_in(memory: int, at: int, end: int, secret: bytes) -> int:
    try:
        return os.pread(memory, end - at, at).count(secret)
    except OSError:
        return 0  # pages of a device, which are no memory of the process


WORK_S: Final = 0.5
"""For so long all of them compute at the same time."""

END_S: Final = 30.0
"""For a round that is under way to end, on a host that has one core for all of them."""

WORKLOAD_WORDS: Final = 1 << 18

Round = Callable[[], None]


def at_the_same_time(sessions: list[GpuSession]) -> int:
    """One kind of work in each session for a while; how many rounds they did in all. Raises Breach."""
    rounds = [make(session) for make, session in zip(_KINDS, sessions, strict=True)]
    done = [0] * len(rounds)
    wrong: list[str] = []
    until = time.monotonic() + WORK_S

    def repeat(number: int) -> None:
        try:
            while not done[number] or time.monotonic() < until:
                rounds[number]()
                done[number] += 1
        except (Breach, GpuLeaseError) as error:
            wrong.append(f"tenant {number + 1}: {error}")

    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(rounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    if wrong or not all(done):
        raise Breach("; ".join(wrong) or f"a tenant did not end a round in {END_S:g} s")
    return sum(done)


def _kernel(name: str) -> Callable[[GpuSession], Round]:
    """A kernel of the bench, its result beside numpy's."""

    def make(session: GpuSession) -> Round:
        return Prepared(session, session.module_load(kernels_ptx()), works()[name]).check

    return make


def _counting(session: GpuSession) -> Round:
    """Writes memory and counts what it wrote."""
    module, buffer = session.module_load(rule_breakers()), session.mem_alloc(4 * WORKLOAD_WORDS)

    def fill_and_count() -> None:
        fill(session, module, buffer, WORKLOAD_WORDS, 1)
        found = count_set(session, module, buffer, WORKLOAD_WORDS)
        fill(session, module, buffer, WORKLOAD_WORDS, 0)
        if found != WORKLOAD_WORDS or count_set(session, module, buffer, WORKLOAD_WORDS):
            raise Breach(f"{found} of {WORKLOAD_WORDS} words were counted")

    return fill_and_count


def _renewing(session: GpuSession) -> Round:
    """Takes memory, which must be zero, uses it and gives it back."""
    module = session.module_load(rule_breakers())

    def take_and_free() -> None:
        buffer = session.mem_alloc(4 * WORKLOAD_WORDS)
        if count_set(session, module, buffer, WORKLOAD_WORDS):
            raise Breach("memory given anew is not zero")
        fill(session, module, buffer, WORKLOAD_WORDS, 7)
        session.mem_free(buffer)

    return take_and_free


_KINDS: Final = (*map(_kernel, ("matmul", "saxpy", "softmax", "layernorm")), _counting, _renewing)


WORD_BYTES: Final = 4
PATTERN: Final = 0xA5A5A5A5
TENANTS: Final = 6
HOST_BYTES: Final = 1 << 20
"""Written of each slice on the embedded driver, whose pretended card is larger than most hosts' memory."""

FLYING_S: Final = 0.05
"""A session launches for so long before it is revoked."""

GATE_S: Final = 10.0
"""For a revoked tenant to be told."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise; `breach` is "" if it held."""

    name: str
    found: str
    breach: str


def check(name: str, prove: Callable[[], str]) -> Claim:
    """Run a proof, which says what it found or raises."""
    try:
        return Claim(name, prove(), "")
    except (Breach, GpuLeaseError) as error:
        return Claim(name, "", f"{type(error).__name__}: {error}")


def canary(scene: Scene, size_bytes: int) -> str:
    """One lease fills its slice, is killed, and the next one of that size counts what is left of it."""
    words = size_bytes // WORD_BYTES
    for _ in range(2):
        with scene.wish(size_bytes).acquire() as lease, GpuSession(lease) as session:
            module = session.module_load(rule_breakers())
            small = session.mem_alloc(WORD_BYTES)
            session.mem_free(small)
            for reuse in range(2):
                # Room is left for the counter.
                buffer = session.mem_alloc(size_bytes - WORD_BYTES)
                if found := count_set(session, module, buffer, words - 1):
                    where = "of this session" if reuse else "of an earlier lease"
                    raise Breach(f"{found} of {words} words {where} were readable")
                fill(session, module, buffer, words - 1, PATTERN)
                session.sync()
                session.mem_free(buffer)
    return f"{size_bytes >> 20} MiB, twice, and twice in each session: all zero"


def six_and_no_seventh(scene: Scene, slice_bytes: int) -> str:
    """Six leases do different work at the same time, each with every byte it asked for; the seventh is refused."""
    with contextlib.ExitStack() as stack:
        sessions = []
        for _ in range(TENANTS):
            lease = stack.enter_context(scene.wish(slice_bytes).acquire())
            sessions.append(stack.enter_context(GpuSession(lease)))
        try:
            scene.wish(slice_bytes).acquire().free()
        except CapacityExceeded as error:
            refused = str(error)
        else:
            raise Breach("a seventh lease was granted")
        rounds = at_the_same_time(sessions)
        words = (slice_bytes if scene.is_card else HOST_BYTES) // WORD_BYTES
        work = []
        for number, session in enumerate(sessions):
            buffer = session.mem_alloc(slice_bytes)
            module = session.module_load(rule_breakers())
            fill(session, module, buffer, words, number + 1)
            work.append((session, buffer, number + 1))
        for session, buffer, value in work:
            for at in (0, words // 2, words - 1):
                if session.mem_read(buffer, at * WORD_BYTES, WORD_BYTES) != value.to_bytes(WORD_BYTES, "little"):
                    raise Breach(f"tenant {value} reads something else than it wrote")
    return f"6 x {slice_bytes >> 20} MiB, {rounds} rounds of six kinds of work, all right; the seventh: {refused}"


def launch_gate(scene: Scene, count: int) -> str:
    """Sessions that launch as fast as they can are revoked: until each is refused, by name."""
    told_ms = sorted(_gate(scene) for _ in range(count))
    return f"revoked to refused, {count} times: p50 {percentile(told_ms, 50):.1f} ms, worst {told_ms[-1]:.1f} ms"


def _gate(scene: Scene) -> float:
    lease = scene.wish().acquire()
    session = GpuSession(lease)
    module = session.module_load(rule_breakers())
    args = KernelArgs().push_buffer(session.mem_alloc(4096)).push_u32(8).push_f32(1.0)
    refused: list[tuple[float, GpuLeaseError]] = []

    def launch_for_ever() -> None:
        try:
            while True:
                session.launch(module, "scale", ONE, WARP, args)
        except GpuLeaseError as error:
            refused.append((time.perf_counter(), error))

    flying = threading.Thread(target=launch_for_ever, daemon=True)
    flying.start()
    time.sleep(FLYING_S)
    started = time.perf_counter()
    ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "the launch gate"), scene.address)
    flying.join(GATE_S)
    if not refused:
        raise Breach(f"a revoked session still launches after {GATE_S:g} s")
    at, error = refused[0]
    if not isinstance(error, Revoked):
        raise Breach(f"a revoked session was told {type(error).__name__}: {error}")
    return (at - started) * 1e3


SESSION_BYTES: Final = 64 << 20
ROOM_BYTES: Final = 32 << 20
OUTPUT_BYTES: Final = 8 << 20
WORDS: Final = OUTPUT_BYTES // WORD_BYTES
FAR: Final = 1 << 40
"""Past everything."""

TIME_S: Final = 0.5
"""Given to a kernel that never ends."""

PEEK_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry peek(.param .u64 at, .param .u64 into)
{
    .reg .b32 %r1;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [into];
    ld.global.u32 %r1, [%rd1];
    st.global.u32 [%rd2], %r1;
    ret;
}
"""
"""Reads a word wherever it is told to."""


def submit_beside(scene: Scene) -> str:
    """A session's memory is what it was, whatever submits beside it do; and none of them finds what another left."""
    with scene.wish(SESSION_BYTES).submits(ROOM_BYTES).acquire() as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(rule_breakers()), session.mem_alloc(OUTPUT_BYTES)
        fill(session, module, buffer, WORDS, PATTERN)
        session.sync()
        for _ in range(2):
            (written,) = _submit(lease, "fill").out(OUTPUT_BYTES).args(_words().push_u32(PATTERN)).launch()
            if (np.frombuffer(written, np.uint32) != PATTERN).any():
                raise Breach("a submit's output is not what its kernel wrote")
            _, found = _submit(lease, "count_set").out(OUTPUT_BYTES).args(_words()).out(WORD_BYTES).launch()
            if count := int.from_bytes(found, "little"):
                raise Breach(f"{count} of {WORDS} words of an earlier submit were readable")
        _look_at_the_session(lease, buffer.handle)
        late_ms = _break_rules(lease)
        if (np.frombuffer(session.mem_read(buffer, 0, OUTPUT_BYTES), np.uint32) != PATTERN).any():
            raise Breach("the session's memory is not what it wrote")
        fill(session, module, buffer, WORDS, 0)
        session.sync()
    return (
        f"{OUTPUT_BYTES >> 20} MiB beside a session's: all zero, all whole; an endless one ended {late_ms:.0f} ms late"
    )


def _submit(lease: GpuLease, kernel: str) -> Submission:
    return lease.submit(kernel, rule_breakers()).grid(GRID).block(BLOCK)


def _words() -> KernelArgs:
    return KernelArgs().push_u64(WORDS)


def _look_at_the_session(lease: GpuLease, address: int) -> None:
    """At its address a submit finds nothing, or something of its own."""
    try:
        (found,) = lease.submit("peek", PEEK_PTX).arg(np.uint64(address)).out(WORD_BYTES).launch()
    except SyncFailed:
        return
    if int.from_bytes(found, "little") == PATTERN:
        raise Breach("a word of the session was readable")


def _break_rules(lease: GpuLease) -> float:
    """A store into nowhere, more than is kept, a kernel that never ends; how late that was ended, in milliseconds."""
    stray = lease.submit("stray", rule_breakers()).out(WORD_BYTES).arg(np.uint64(FAR))
    too_much = _submit(lease, "fill").arg(bytes(ROOM_BYTES)).args(_words().push_u32(0)).out(OUTPUT_BYTES)
    endless = lease.submit("endless", rule_breakers()).out(WORD_BYTES).timeout_secs(TIME_S)
    for submission, kind in ((stray, SyncFailed), (too_much, AllocFailed)):
        _expect(submission, kind)
    started = time.perf_counter()
    _expect(endless, TimedOut)
    return max(0.0, time.perf_counter() - started - TIME_S) * 1e3


def _expect(submission: Submission, kind: type[GpuLeaseError]) -> None:
    try:
        submission.launch()
    except kind:
        return
    except GpuLeaseError as error:
        raise Breach(f"a submit was told {type(error).__name__}, not {kind.__name__}: {error}") from None
    raise Breach(f"a submit that must end with {kind.__name__} answered")
