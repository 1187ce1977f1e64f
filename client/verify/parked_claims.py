"""Promises of parked sessions, each with its proof: no tenant can read their bytes, and no byte changes."""

import secrets
import time
from typing import Final

from gpulease.client import Busy, GpuLease, GpuSession
from gpulease.client.bench.woven_data import WovenData, woven_bytes
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, worker_pid
from gpulease.client.errors import RegionRevoked, Unsupported
from gpulease.client.sync.driver import ask
from gpulease.client.verify.faulty_kernels import count_set, fill, rule_breakers
from gpulease.client.verify.memory_search import count_in_process
from gpulease.client.verify.neighbour import neighbour
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseMove

MIB: Final = 1 << 20
WORD_BYTES: Final = 4
PATTERN: Final = 0xA5A5A5A5
SECRET_BYTES: Final = 32
SPARE_BYTES: Final = 32 * MIB
"""Bytes of each slice that are left free for modules and counters."""

LEAVE_S: Final = 10.0
LEAVE_PAUSE_S: Final = 0.05
"""Longest time until a session leaves its process, and the pause between two attempts, both in seconds. The client's
last requests may bring the session back once."""

PARKS: Final = 10
"""Number of times that a session is parked and returns next to a neighbour at work."""

PIECE_BYTES: Final = 4 * MIB
"""Size of the blocks with which a neighbour leaves holes on the card. Each block has separate pages."""

CARD_VRAM: Final = "8GiB"
HOST_VRAM: Final = "128MiB"
SETTINGS: Final = """
[limits]
park_memory = "12GiB"
park_stay_ms = 0
"""
"""Host memory for the parkable slices of these proofs, and no bound on how soon a session is parked again."""


def parked_claims(scene: Scene) -> list[MatrixCheck[str]]:
    """Return the promises of parked sessions, for a daemon with SETTINGS. Each proof returns its finding."""
    return [
        MatrixCheck("no byte of a parked session", no_byte_readable),
        MatrixCheck("a parked session's return to a full card", return_to_a_full_card),
        MatrixCheck("a parked session's return to a fragmented card", return_to_a_fragmented_card),
        MatrixCheck("a parked session in another process", return_in_another_process),
        MatrixCheck("a parked session's neighbour", neighbour_unharmed),
        MatrixCheck("a region that ends in a parked session", region_gone),
    ]


def _slice_bytes(scene: Scene) -> int:
    """Five eighths of the card's bytes. Two slices do not fit, so a second lease gets pages of the parked one."""
    return scene.vram_bytes // 8 * 5 // (2 * MIB) * (2 * MIB)


def _park(lease: GpuLease) -> float:
    """Park a lease. Returns the milliseconds until its bytes were free."""
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
            neighbour_buffer, probe = (
                neighbour.mem_alloc(size_bytes - SPARE_BYTES),
                neighbour.module_load(rule_breakers()),
            )
            if nonzero_words := count_set(neighbour, probe, neighbour_buffer, words):
                raise Breach(f"{nonzero_words} of {words} words of a parked session were readable")
            _search(other, secret)
            # Let the neighbour write to all pages that the session had.
            fill(neighbour, probe, neighbour_buffer, words, 1)
            if count_set(neighbour, probe, neighbour_buffer, words) != words:
                raise Breach("a parked session's neighbour lost words")
        started = time.perf_counter()
        first = bytes(session.mem_read(buffer, 0, SECRET_BYTES))
        back_ms = (time.perf_counter() - started) * 1e3
        if first != secret or count_set(session, module, buffer, words) != words:
            raise Breach("a parked session came back with other bytes")
    return f"{size_bytes // MIB} MiB parked in {taken_ms:.0f} ms, none of it readable, back in {back_ms:.0f} ms"


def _search(lease: GpuLease, secret: bytes) -> None:
    try:
        if copies := count_in_process(worker_pid(lease.lease_id), secret):
            raise Breach(f"another lease's worker has {copies} copies of a parked session's secret")
    except PermissionError:
        # Only root may read a worker's memory.
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
        _park(lease)
        with scene.builder(size_bytes).acquire() as other, GpuSession(other) as neighbour:
            neighbour_buffer = neighbour.mem_alloc(size_bytes - SPARE_BYTES)
            fill(neighbour, neighbour.module_load(rule_breakers()), neighbour_buffer, words, 1)
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


def return_to_a_fragmented_card(scene: Scene) -> str:
    """A neighbour takes the card in small blocks and frees every other one; the parked session returns to the holes."""
    size_bytes = woven_bytes(scene.vram_bytes * 3 // 8 - SPARE_BYTES // 4)
    with scene.builder(size_bytes + SPARE_BYTES // 4).parkable().acquire() as lease, GpuSession(lease) as session:
        data = WovenData(session, size_bytes, 5)
        data.begin()
        _park(lease)
        # Leave three sixteenths of the card, because contexts need some of it.
        with scene.builder(scene.vram_bytes // 16 * 13).acquire() as other, GpuSession(other) as holder:
            probe = holder.module_load(rule_breakers())
            words = PIECE_BYTES // WORD_BYTES
            pieces = [holder.mem_alloc(PIECE_BYTES) for _ in range((scene.vram_bytes // 16 * 12) // PIECE_BYTES)]
            for piece in pieces:
                fill(holder, probe, piece, words, 1)
            for piece in pieces[::2]:
                holder.mem_free(piece)
            holder.sync()
            other.shrink(len(pieces[::2]) * PIECE_BYTES)
            data.begin()
            if wrong := data.check():
                raise Breach(f"a parked session came back to a fragmented card with {wrong} wrong words")
            if lost := sum(count_set(holder, probe, piece, words) != words for piece in pieces[1::2]):
                raise Breach(f"{lost} blocks of a neighbour changed when a parked session came back")
    return f"{size_bytes // MIB} MiB, whole, into {len(pieces[::2])} holes of {PIECE_BYTES // MIB} MiB"


def return_in_another_process(scene: Scene) -> str:
    """A session is parked cold, without any memory of the card; another process continues it at the same addresses."""
    size_bytes = woven_bytes(_slice_bytes(scene) - SPARE_BYTES)
    held_bytes = scene.held_bytes()
    with scene.builder(size_bytes + SPARE_BYTES).parkable().acquire() as lease, GpuSession(lease) as session:
        data, before = WovenData(session, size_bytes, 7), worker_pid(lease.lease_id)
        data.begin()
        if wrong := data.check():
            raise Breach(f"a session had {wrong} wrong words before it was parked")
        leave(scene, lease)
        if (more_bytes := scene.held_bytes() - held_bytes) > 0:
            raise Breach(f"a session without a process holds {more_bytes} bytes of the card")
        # Leave an eighth of the card, which contexts need.
        with scene.builder(scene.vram_bytes // 8 * 7).acquire() as other, GpuSession(other) as neighbour:
            buffer = neighbour.mem_alloc(scene.vram_bytes // 8 * 7 - SPARE_BYTES)
            probe, words = neighbour.module_load(rule_breakers()), buffer.size_bytes // WORD_BYTES
            if nonzero_words := count_set(neighbour, probe, buffer, words):
                raise Breach(f"{nonzero_words} of {words} words of a session without a process were readable")
            fill(neighbour, probe, buffer, words, PATTERN)
            neighbour.sync()
        started = time.perf_counter()
        data.begin()
        back_ms = (time.perf_counter() - started) * 1e3
        if wrong := data.check():
            raise Breach(f"a session came back in another process with {wrong} wrong words")
        if worker_pid(lease.lease_id) == before:
            raise Breach("a session that was parked cold came back in the same process")
    return f"{size_bytes // MIB} MiB, nothing of it on the card meanwhile, back in {back_ms:.0f} ms"


def leave(scene: Scene, lease: GpuLease) -> None:
    """Make a session leave its process when all requests that its client sent are done."""
    deadline_s = time.monotonic() + LEAVE_S
    while True:
        try:
            ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, None), scene.address)
        except (Busy, Unsupported):
            if time.monotonic() > deadline_s:
                raise
        else:
            return
        time.sleep(LEAVE_PAUSE_S)


def neighbour_unharmed(scene: Scene) -> str:
    """A session is parked and comes back PARKS times. A neighbour at work has no wrong result and no error."""
    size_bytes = woven_bytes(scene.vram_bytes // 4)
    builder = scene.builder(size_bytes + SPARE_BYTES // 4).parkable()
    with (
        builder.acquire() as lease,
        GpuSession(lease) as session,
        neighbour(scene.address, scene.card_uuid) as bystander,
    ):
        data = WovenData(session, size_bytes, 3)
        bystander.window()
        for _ in range(PARKS):
            _park(lease)
            data.begin()
            if wrong := data.check():
                raise Breach(f"a parked session came back with {wrong} wrong words")
        window = bystander.window()
    if window.error or not window.rounds:
        raise Breach(f"the neighbour of a parked session: {window.error or 'it did no work'}")
    return f"{window.rounds} rounds, all right, during {PARKS} parks of {size_bytes // MIB} MiB"


def region_gone(scene: Scene) -> str:
    """A region is revoked while its session is parked. It never comes back, and its bytes are nowhere in the slice."""
    size_bytes = woven_bytes(scene.vram_bytes // 8)
    with scene.builder(2 * size_bytes + SPARE_BYTES).parkable().acquire() as lease, GpuSession(lease) as session:
        data, module = WovenData(session, size_bytes, 9), session.module_load(rule_breakers())
        words = size_bytes // WORD_BYTES
        region = lease.region(size_bytes)
        regions = session.region_set([region])
        fill(session, module, region, words, PATTERN, regions)
        session.sync()
        _park(lease)
        region.revoke()
        try:
            fill(session, module, region, words, PATTERN, regions)
            session.sync()
        except RegionRevoked:
            region.close()
        else:
            raise Breach("a region that ended while its session was parked could be used")
        with lease.region(size_bytes) as later:
            if nonzero_words := count_set(session, module, later, words, session.region_set([later])):
                raise Breach(f"{nonzero_words} of {words} words of a region that had ended were readable")
        data.begin()
        if wrong := data.check():
            raise Breach(f"the session around a region that ended has {wrong} wrong words")
    return f"{size_bytes // MIB} MiB revoked while parked, refused, and none of it readable"
