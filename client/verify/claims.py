"""Promises that are no fault's: no byte of an earlier lease, room for as many leases as fit, the launch gate."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.client import CapacityExceeded, GpuLeaseError, GpuSession, KernelArgs, Revoked
from gpulease.client.asking import ask
from gpulease.client.bench.figures import percentile
from gpulease.client.verify.kernels import ONE, WARP, count_set, fill, rule_breakers
from gpulease.client.verify.scene import Breach, Scene
from gpulease.client.verify.workloads import at_the_same_time
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRevoke

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
