"""The promise of submits: a kernel beside a lease's session, and nothing of either is the other's."""

import time
from typing import Final

import numpy as np

from gpulease.client import (
    AllocFailed,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    KernelArgs,
    Submission,
    SyncFailed,
    TimedOut,
)
from gpulease.client.verify.claims import PATTERN, WORD_BYTES
from gpulease.client.verify.kernels import BLOCK, GRID, fill, rule_breakers
from gpulease.client.verify.scene import Breach, Scene

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
