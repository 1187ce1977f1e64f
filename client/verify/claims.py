"""Promises of leases that do not depend on a fault, each with its proof.

No byte of an earlier lease is readable, on the card or in host memory; as many leases fit as the memory holds; a
revoked session launches nothing more; a one-shot job and its lease's session are isolated.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from gpulease.client.bench.kernel_times import Prepared, kernels_ptx, works
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, breach_of, worker_pid
from gpulease.client.sync.driver import ask
from gpulease.client.verify.faulty_kernels import BLOCK, GRID, ONE, WARP, count_set, fill, rule_breakers
from gpulease.client.verify.memory_search import count_in_process
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRevoke

GIB: Final = 1 << 30
MIB: Final = 1 << 20
WORD_BYTES: Final = 4
PATTERN: Final = 0xA5A5A5A5
TENANTS: Final = 6
HOST_BYTES: Final = 1 << 20
"""How many bytes of each slice are written with the embedded driver, whose card is larger than most hosts' memory."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """The result of one proof; `breach` is "" if the promise held."""

    name: str
    found: str
    breach: str


def claims(scene: Scene) -> list[MatrixCheck[str]]:
    """Return the promises that a daemon with the card's whole memory can prove. Each proof returns its finding."""
    # Half of a large card: the second lease must fit next to the memory that is still being freed.
    canary_bytes = min(40 * GIB, scene.vram_bytes // 2) if scene.is_card else 16 * MIB
    return [
        MatrixCheck("no byte of an earlier lease", lambda scene: canary(scene, canary_bytes)),
        MatrixCheck("no byte of it in the host's buffers", lambda scene: host_buffers(scene)),
        MatrixCheck("launch gate", lambda scene: launch_gate(scene, 10 if scene.is_card else 3)),
        MatrixCheck("a submit alongside its session", lambda scene: submit_beside(scene)),
    ]


def check(name: str, prove: Callable[[], str]) -> ClaimResult:
    """Run a proof. Its result reports whether the promise holds."""
    try:
        return ClaimResult(name, prove(), "")
    except (Breach, GpuLeaseError) as error:
        return ClaimResult(name, "", breach_of(error))


def canary(scene: Scene, size_bytes: int) -> str:
    """Fill a lease's slice, and free the lease. Then count the words that the next lease of that size can read."""
    words = size_bytes // WORD_BYTES
    # Do this twice: the second lease gets the memory that the first lease filled.
    for _ in range(2):
        with scene.builder(size_bytes).acquire() as lease, GpuSession(lease) as session:
            module = session.module_load(rule_breakers())
            small = session.mem_alloc(WORD_BYTES)
            session.mem_free(small)
            # Allocate twice in each session, too: memory that the session itself freed must be zero again.
            for reuse in range(2):
                # Leave room for the counter.
                buffer = session.mem_alloc(size_bytes - WORD_BYTES)
                if nonzero_words := count_set(session, module, buffer, words - 1):
                    origin = "of this session" if reuse else "of an earlier lease"
                    raise Breach(f"{nonzero_words} of {words} words {origin} were readable")
                fill(session, module, buffer, words - 1, PATTERN)
                session.sync()
                session.mem_free(buffer)
    return f"{size_bytes >> 20} MiB, twice, and twice in each session: all zero"


SLICE_BYTES: Final = 16 << 20
COPY_BYTES: Final = 4 << 20
SECRET_BYTES: Final = 32
"""Length of the secret, which is too long for the same bytes to occur by chance."""


def host_buffers(scene: Scene) -> str:
    """Send and receive a secret in every possible way; then search the next lease's worker for it.

    A lease's bytes pass through its worker: frames, the reply buffer, ring and arena. The search reads the worker's
    memory from outside, as no tenant could. It first searches the worker through which the secret passed, to show that
    it can find the secret, and then the next lease's worker, which must not contain the secret.
    """
    try:
        return _search(scene)
    except PermissionError:
        return "not looked for: workers are closed to all but root"


def _search(scene: Scene) -> str:
    secret = secrets.token_bytes(SECRET_BYTES)
    with scene.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        secret_buffer = send_and_fetch(session, secret)
        # First show that the search works, because otherwise finding nothing would prove nothing.
        if not count_in_process(worker_pid(lease.lease_id), secret):
            raise Breach("the search does not find a secret in the worker it passed through, so it proves nothing")
        del secret_buffer
    # The next lease, of the same size: its worker may be given the same pages.
    with scene.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        array = session.empty(COPY_BYTES, np.uint8)
        # An array without a base is in this process's own memory, not in an arena.
        if array.base is not None and array.any():
            raise Breach("a new arena's bytes are not zero")
        buffer = session.mem_alloc(COPY_BYTES)
        if any(session.mem_read(buffer, 0, COPY_BYTES)):
            raise Breach("new memory is not zero")
        if copies := count_in_process(worker_pid(lease.lease_id), secret):
            raise Breach(f"a later lease's worker has {copies} copies of an earlier one's secret")
    return "found in the worker it passed through, in no byte of the next"


def send_and_fetch(session: GpuSession, secret: bytes) -> object:
    """Copy the secret by frames and replies, and by the arena if there is one. Returns the objects to keep alive."""
    data = np.frombuffer(secret * (COPY_BYTES // SECRET_BYTES), np.uint8)
    array = session.empty(COPY_BYTES, np.uint8)
    array[:] = data
    buffer = session.mem_alloc(COPY_BYTES)
    # Ordinary memory goes through frames or staging, the array through the arena.
    for source in (data, array):
        session.mem_write(buffer, 0, source)
        if bytes(session.mem_read(buffer, 0, COPY_BYTES)) != data.tobytes():
            raise Breach("what was written is not what is read")
    session.mem_read(buffer, 0, COPY_BYTES, into=array)
    return array, buffer


def six_and_no_seventh(scene: Scene, slice_bytes: int) -> str:
    """Six leases do different work at the same time, each with all of its memory; a seventh is refused."""
    with contextlib.ExitStack() as stack:
        sessions = []
        for _ in range(TENANTS):
            lease = stack.enter_context(scene.builder(slice_bytes).acquire())
            sessions.append(stack.enter_context(GpuSession(lease)))
        # All six are open, so the daemon must consider the card full.
        try:
            scene.builder(slice_bytes).acquire().free()
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
            # Each tenant writes a different value over all of its memory.
            fill(session, module, buffer, words, number + 1)
            work.append((session, buffer, number + 1))
        # Read only after all have written: a tenant that can reach another tenant's memory has changed it by then.
        for session, buffer, value in work:
            for at in (0, words // 2, words - 1):
                if session.mem_read(buffer, at * WORD_BYTES, WORD_BYTES) != value.to_bytes(WORD_BYTES, "little"):
                    raise Breach(f"tenant {value} reads something else than it wrote")
    return f"6 x {slice_bytes >> 20} MiB, {rounds} rounds of six kinds of work, all right; the seventh: {refused}"


WORK_S: Final = 0.5
"""Seconds for which all tenants compute at the same time."""

END_S: Final = 30.0
"""Longest time in seconds for a round in progress to end, on a host with one core for all tenants."""

WORKLOAD_WORDS: Final = 1 << 18

Round = Callable[[], None]


def at_the_same_time(sessions: list[GpuSession]) -> int:
    """Do one kind of work in each session for a while. Returns the total number of rounds. Raises Breach."""
    rounds = [make(session) for make, session in zip(_KINDS, sessions, strict=True)]
    done = [0] * len(rounds)
    mismatches: list[str] = []
    deadline_s = time.monotonic() + WORK_S

    def repeat(number: int) -> None:
        try:
            # Do at least one round in each session, however slow the host is.
            while not done[number] or time.monotonic() < deadline_s:
                rounds[number]()
                done[number] += 1
        except (Breach, GpuLeaseError) as error:
            mismatches.append(f"tenant {number + 1}: {error}")

    # Use daemon threads, because a thread that hangs must not keep the command from ending.
    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(rounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    if mismatches or not all(done):
        raise Breach("; ".join(mismatches) or f"a tenant did not end a round in {END_S:g} s")
    return sum(done)


def _kernel(name: str) -> Callable[[GpuSession], Round]:
    """Return a round that runs a kernel of the benchmark and checks it against numpy."""

    def make(session: GpuSession) -> Round:
        return Prepared(session, session.module_load(kernels_ptx()), works()[name]).check

    return make


def _counting(session: GpuSession) -> Round:
    """Write memory and count the written words."""
    module, buffer = session.module_load(rule_breakers()), session.mem_alloc(4 * WORKLOAD_WORDS)

    def fill_and_count() -> None:
        fill(session, module, buffer, WORKLOAD_WORDS, 1)
        set_words = count_set(session, module, buffer, WORKLOAD_WORDS)
        fill(session, module, buffer, WORKLOAD_WORDS, 0)
        if set_words != WORKLOAD_WORDS or count_set(session, module, buffer, WORKLOAD_WORDS):
            raise Breach(f"{set_words} of {WORKLOAD_WORDS} words were counted")

    return fill_and_count


def _reallocating(session: GpuSession) -> Round:
    """Allocate memory, which must be zero, use it and free it."""
    module = session.module_load(rule_breakers())

    def take_and_free() -> None:
        buffer = session.mem_alloc(4 * WORKLOAD_WORDS)
        if count_set(session, module, buffer, WORKLOAD_WORDS):
            raise Breach("memory granted again is not zero")
        fill(session, module, buffer, WORKLOAD_WORDS, 7)
        session.mem_free(buffer)

    return take_and_free


_KINDS: Final = (*map(_kernel, ("matmul", "saxpy", "softmax", "layernorm")), _counting, _reallocating)


LAUNCHING_S: Final = 0.05
"""Seconds for which a session launches before it is revoked."""

GATE_S: Final = 10.0
"""Longest time in seconds for a revoked tenant to get its error."""


def launch_gate(scene: Scene, count: int) -> str:
    """Revoke sessions that launch as fast as they can, and time until each is refused with the right error."""
    refused_ms = sorted(_gate(scene) for _ in range(count))
    return f"revoked to refused, {count} times: p50 {percentile(refused_ms, 50):.1f} ms, worst {refused_ms[-1]:.1f} ms"


def _gate(scene: Scene) -> float:
    """Return the milliseconds from the revocation of a new lease to the refusal of its session's launches."""
    lease = scene.builder().acquire()
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

    launching = threading.Thread(target=launch_for_ever, daemon=True)
    # Launch for a moment, so that the ring and the card's queue are full when the lease is revoked.
    launching.start()
    time.sleep(LAUNCHING_S)
    started = time.perf_counter()
    ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "the launch gate"), scene.address)
    launching.join(GATE_S)
    if not refused:
        raise Breach(f"a revoked session still launches after {GATE_S:g} s")
    at, error = refused[0]
    # A refusal is not enough: its error must say why, too.
    if not isinstance(error, Revoked):
        raise Breach(f"a revoked session got {type(error).__name__}: {error}")
    return (at - started) * 1e3


SESSION_BYTES: Final = 64 << 20
ROOM_BYTES: Final = 32 << 20
OUTPUT_BYTES: Final = 8 << 20
WORDS: Final = OUTPUT_BYTES // WORD_BYTES
FAR: Final = 1 << 40
"""An offset beyond all memory."""

TIME_S: Final = 0.5
"""Seconds given to an endless kernel."""

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
"""Reads a word at any address."""


def submit_beside(scene: Scene) -> str:
    """One-shot jobs change no byte of a concurrent session, and find no byte of each other."""
    with scene.builder(SESSION_BYTES).submits(ROOM_BYTES).acquire() as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(rule_breakers()), session.mem_alloc(OUTPUT_BYTES)
        fill(session, module, buffer, WORDS, PATTERN)
        session.sync()
        # The second round would find words that the first job left.
        for _ in range(2):
            (written,) = _submit(lease, "fill").out(OUTPUT_BYTES).args(_words().push_u32(PATTERN)).launch()
            if (np.frombuffer(written, np.uint32) != PATTERN).any():
                raise Breach("a submit's output is not what its kernel wrote")
            _, result = _submit(lease, "count_set").out(OUTPUT_BYTES).args(_words()).out(WORD_BYTES).launch()
            if count := int.from_bytes(result, "little"):
                raise Breach(f"{count} of {WORDS} words of an earlier submit were readable")
        _read_session_memory(lease, buffer.handle)
        # Run three jobs, each of which breaks a rule; the session must not be affected.
        late_ms = _break_rules(lease)
        # After all rules were broken, the session's memory must contain the data that it wrote, and the session must
        # work.
        if (np.frombuffer(session.mem_read(buffer, 0, OUTPUT_BYTES), np.uint32) != PATTERN).any():
            raise Breach("the session's memory is not what it wrote")
        fill(session, module, buffer, WORDS, 0)
        session.sync()
    return (
        f"{OUTPUT_BYTES >> 20} MiB alongside a session's: all zero, all correct; an endless one ended "
        f"{late_ms:.0f} ms late"
    )


def _submit(lease: GpuLease, kernel: str) -> Submission:
    return lease.submit(kernel, rule_breakers()).grid(GRID).block(BLOCK)


def _words() -> KernelArgs:
    return KernelArgs().push_u64(WORDS)


def _read_session_memory(lease: GpuLease, address: int) -> None:
    """Read the session's address from a job, which must fail or find another value."""
    try:
        (value_bytes,) = lease.submit("peek", PEEK_PTX).arg(np.uint64(address)).out(WORD_BYTES).launch()
    except SyncFailed:
        return
    if int.from_bytes(value_bytes, "little") == PATTERN:
        raise Breach("a word of the session was readable")


def _break_rules(lease: GpuLease) -> float:
    """Run jobs that store out of bounds, use too much memory, and never end. Returns how late the last ended, in ms."""
    stray = lease.submit("stray", rule_breakers()).out(WORD_BYTES).arg(np.uint64(FAR))
    too_much = _submit(lease, "fill").arg(bytes(ROOM_BYTES)).args(_words().push_u32(0)).out(OUTPUT_BYTES)
    endless = lease.submit("endless", rule_breakers()).out(WORD_BYTES).timeout_secs(TIME_S)
    # Each job must end with its own error, and the next job must run nevertheless.
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
        raise Breach(f"a submit must get {kind.__name__}, not {type(error).__name__}: {error}") from None
    raise Breach(f"a submit that must end with {kind.__name__} answered")
