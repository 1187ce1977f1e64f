"""Promises of parked sessions, each with its proof: no tenant can read their bytes, and they come back whole."""

import secrets
import time
from typing import Final

from gpulease.client import Busy, GpuLease, GpuSession
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, worker_pid
from gpulease.client.verify.faulty_kernels import count_set, fill, rule_breakers
from gpulease.client.verify.memory_search import count_in_process

MIB: Final = 1 << 20
WORD_BYTES: Final = 4
PATTERN: Final = 0xA5A5A5A5
SECRET_BYTES: Final = 32
SPARE_BYTES: Final = 32 * MIB
"""Left of each slice for modules and counters."""

CARD_VRAM: Final = "8GiB"
HOST_VRAM: Final = "128MiB"
SETTINGS: Final = """
[limits]
park_memory = "12GiB"
park_stay_ms = 0
"""
"""Host memory for the parkable slices of these proofs, and no bound on how soon a session is parked again."""


def parked_claims(scene: Scene) -> list[MatrixCheck[str]]:
    """The promises of parked sessions, on a daemon with SETTINGS; each proof returns what it found."""
    return [
        MatrixCheck("no byte of a parked session", no_byte_readable),
        MatrixCheck("a parked session's return to a full card", return_to_a_full_card),
    ]


def _slice_bytes(scene: Scene) -> int:
    """Five eighths of the card: two do not fit, so that a second lease gets pages of the parked one."""
    return scene.vram_bytes // 8 * 5 // (2 * MIB) * (2 * MIB)


def _park(lease: GpuLease) -> float:
    """Park a lease; return the milliseconds until its bytes were free."""
    started = time.perf_counter()
    lease.park()
    return (time.perf_counter() - started) * 1e3


def no_byte_readable(scene: Scene) -> str:
    """A session is parked; the next lease searches all of its own memory, and its worker's, for the session's bytes."""
    size_bytes = _slice_bytes(scene)
    secret = secrets.token_bytes(SECRET_BYTES)
    builder = scene.builder(size_bytes).parkable()
    with builder.acquire() as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(rule_breakers()), session.mem_alloc(size_bytes - SPARE_BYTES)
        words = buffer.size_bytes // WORD_BYTES
        fill(session, module, buffer, words, PATTERN)
        session.mem_write(buffer, 0, secret)
        session.sync()
        taken_ms = _park(lease)
        with scene.builder(size_bytes).acquire() as other, GpuSession(other) as neighbour:
            theirs, probe = neighbour.mem_alloc(size_bytes - SPARE_BYTES), neighbour.module_load(rule_breakers())
            if found := count_set(neighbour, probe, theirs, words):
                raise Breach(f"{found} of {words} words of a parked session were readable")
            _search(other, secret)
            # The neighbour's own work, over all pages that the session had.
            fill(neighbour, probe, theirs, words, 1)
            if count_set(neighbour, probe, theirs, words) != words:
                raise Breach("a parked session's neighbour lost words")
        started = time.perf_counter()
        first = bytes(session.mem_read(buffer, 0, SECRET_BYTES))
        back_ms = (time.perf_counter() - started) * 1e3
        if first != secret or count_set(session, module, buffer, words) != words:
            raise Breach("a parked session came back with other bytes")
    return f"{size_bytes // MIB} MiB parked in {taken_ms:.0f} ms, none of it readable, back in {back_ms:.0f} ms"


def _search(lease: GpuLease, secret: bytes) -> None:
    try:
        if found := count_in_process(worker_pid(lease.lease_id), secret):
            raise Breach(f"another lease's worker has {found} copies of a parked session's secret")
    except PermissionError:
        # Workers are closed to all but root.
        return


def return_to_a_full_card(scene: Scene) -> str:
    """A parked session's request is refused while the card is full, loses nothing, and succeeds afterwards."""
    size_bytes = _slice_bytes(scene)
    builder = scene.builder(size_bytes).parkable().timeout(0)
    with builder.acquire() as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(rule_breakers()), session.mem_alloc(size_bytes - SPARE_BYTES)
        words = buffer.size_bytes // WORD_BYTES
        fill(session, module, buffer, words, PATTERN)
        session.sync()
        lease.park()
        with scene.builder(size_bytes).acquire() as other, GpuSession(other) as neighbour:
            theirs = neighbour.mem_alloc(size_bytes - SPARE_BYTES)
            fill(neighbour, neighbour.module_load(rule_breakers()), theirs, words, 1)
            neighbour.sync()
            try:
                session.mem_read(buffer, 0, WORD_BYTES)
            except Busy as error:
                refused = str(error)
            else:
                raise Breach("a session came back to a card without room")
        if count_set(session, module, buffer, words) != words:
            raise Breach("a session that was refused its return lost words")
    return f"Busy ({refused}), and whole once there was room"
