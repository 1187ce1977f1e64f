"""Parked sessions on a card: meanwhile their bytes are free; later everything is where it was. Measures both
directions.
"""

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from gpulease.client import (
    Buffer,
    Busy,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    Region,
    RegionExpired,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
    Unsupported,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseMove, MovedSession
from helpers.arenas import arenas_of
from helpers.daemon import Daemon, Faults, running
from helpers.kernels import TRANSFORM, check_main_job, floats, numbers, scale_args
from helpers.lasting import LastingDaemon
from helpers.nvml import SLACK_BYTES, Cards
from helpers.pointers import POINTERS, chase_args, count_args
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
CARD_BYTES = 40 * GIB
CONFIG = """
[limits]
park_memory = "48GiB"
overcommit = 4.0
park_stay_ms = 0
"""
N = 100_000
PATTERN = os.urandom(MIB)


@pytest.fixture(scope="module")
def node(cards: Cards) -> Iterator[Daemon]:
    with running(Daemon(driver="cuda", vram=("40GiB",), config=CONFIG)) as daemon:
        yield daemon


def lease_of(node: Daemon, size_bytes: int) -> GpuLease:
    return node.builder(size_bytes).device(0).lease_secs(300).timeout(30).parkable().acquire()


def places(size_bytes: int) -> range:
    """Return the offsets of the pattern in a buffer. More of them in each step of a copy would show no more faults."""
    return range(0, size_bytes - MIB, 49 * MIB + 4096)


def fill(session: GpuSession, size_bytes: int) -> Buffer:
    buffer = session.mem_alloc(size_bytes)
    for at in places(size_bytes):
        session.mem_write(buffer, at, PATTERN)
    session.sync()
    return buffer


def is_whole(session: GpuSession, buffer: Buffer, size_bytes: int) -> bool:
    return all(bytes(session.mem_read(buffer, at, MIB)) == PATTERN for at in places(size_bytes))


@pytest.mark.parametrize("gib", [1, 16])
def test_the_bytes_are_free_meanwhile_and_come_back(node: Daemon, cards: Cards, gib: int) -> None:
    size = gib * GIB
    with lease_of(node, size + 64 * MIB) as lease, GpuSession(lease) as session:
        buffer = fill(session, size)
        figures = []
        for _ in range(4):
            session.sync()
            used = cards.used_bytes()[0]
            began = time.monotonic()
            assert lease.park() >= size
            parked_s = time.monotonic() - began
            assert used - cards.used_bytes()[0] >= size - SLACK_BYTES
            began = time.monotonic()
            session.mem_read(buffer, 0, 64)
            figures.append((parked_s, time.monotonic() - began))
            assert is_whole(session, buffer, size)
        for parked_s, back_s in figures:
            print(f"{gib} GiB: park {parked_s:.3f} s, first operation {back_s:.3f} s")
        # The first park may have found host memory that was not prepared.
        assert min(parked_s for parked_s, _ in figures[1:]) < 0.1 + 0.05 * gib
        assert min(back_s for _, back_s in figures) < 0.1 + 0.05 * gib


def test_kernels_that_chase_pointers_in_their_data_go_on(node: Daemon) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        module = session.module_load(POINTERS)
        nodes = [session.mem_alloc(16) for _ in range(20)]
        for one, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
        counted = session.mem_alloc(8)
        for turn in range(1, 5):
            for _ in range(3):
                session.launch(module, "chase", [1], [1], chase_args(nodes[0], 50))
            session.launch(module, "count", [1], [1], count_args(counted))
            session.sync()
            lease.park()
            session.launch(module, "chase", [1], [1], chase_args(nodes[0], 50))
            session.sync()
            counts = [struct.unpack("<Q", session.mem_read(one, 8, 8))[0] for one in nodes]
            assert counts == [turn * 4 * (2 + (at < 10)) for at in range(20)]
            # A variable of the module, which stays loaded on the card.
            assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)


def test_graphs_and_streams_go_on(node: Daemon) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
        data, back = session.empty(N, np.float32), session.empty(N, np.float32)
        with session.record() as graph:
            session.mem_write(buffer, 0, data)
            for _ in range(40):
                session.launch(module, "bias", [391], [256], scale_args(buffer, N, 1))
            session.mem_write(buffer, 4, np.array([1000, 2000], np.float32).tobytes())
            session.mem_read(buffer, 0, data.nbytes, into=back)
        streams = [session.stream() for _ in range(3)]
        for turn in range(1, 4):
            data[:] = numbers(N) * turn
            graph.launch()
            session.sync()
            expected = numbers(N) * turn + 40
            expected[1:3] = (1000, 2000)
            np.testing.assert_array_equal(back, expected)
            lease.park()
            back[:] = 0
            # The launch of the graph itself makes the session return.
            graph.launch()
            session.sync()
            np.testing.assert_array_equal(back, expected)
            for stream in streams:
                session.launch(module, "bias", [391], [256], scale_args(buffer, N, 1), stream=stream)
                stream.sync()
            assert floats(session.mem_read(buffer, 0, 4))[0] == 43


def test_another_lease_uses_the_bytes_meanwhile(node: Daemon, cards: Cards) -> None:
    """The card has room for one of two sessions at a time. They work in turn, and neither sees the other's bytes."""
    size = 22 * GIB
    with lease_of(node, size) as first, GpuSession(first) as session:
        buffer = fill(session, size - 64 * MIB)
        first.park()
        with lease_of(node, size) as second, GpuSession(second) as other:
            fresh = other.mem_alloc(size - 64 * MIB)
            assert all(bytes(other.mem_read(fresh, at, MIB)) == bytes(MIB) for at in places(size - 64 * MIB))
            check_main_job(other)
            second.park()
            assert is_whole(session, buffer, size - 64 * MIB)
            first.park()
            assert bytes(other.mem_read(fresh, 0, MIB)) == bytes(MIB)


def test_freed_memory_and_new_memory_after_a_park(node: Daemon) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        for turn in range(3):
            kept = [session.mem_alloc(size) for size in (100, 70_000, 3 * MIB, 40 * MIB)]
            for number, one in enumerate(kept):
                session.mem_write(one, 0, bytes([number + 1]) * 100)
            lease.park()
            fresh = session.mem_alloc(40 * MIB)
            assert bytes(session.mem_read(fresh, 0, MIB)) == bytes(MIB), turn
            for number, one in enumerate(kept):
                assert bytes(session.mem_read(one, 0, 100)) == bytes([number + 1]) * 100
            for one in (*kept, fresh):
                session.mem_free(one)


COLD_MIB = 1024


def leave(node: Daemon, lease: GpuLease, device: str | None = None) -> MovedSession:
    """Let a session leave its worker, once its client and the broker have no operation in progress."""
    until = time.monotonic() + 20
    while True:
        try:
            moved: MovedSession = ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, device), node.address)
        except (Busy, Unsupported) as error:
            if time.monotonic() > until or not ("has sent a request" in str(error) or "returning" in str(error)):
                raise
            time.sleep(0.01)
        else:
            return moved


def check_everything(session: GpuSession, turns: Iterable[Callable[[], None]]) -> None:
    """Work in a session with pointers, variables, a graph, streams and memory. The session leaves its worker before
    each turn.
    """
    size = COLD_MIB * MIB
    module = session.module_load(POINTERS)
    nodes = [session.mem_alloc(16) for _ in range(7)]
    for one, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
    counted = session.mem_alloc(8)
    transform, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        session.launch(transform, "bias", [400], [256], scale_args(buffer, N, 7))
        session.mem_read(buffer, 0, data.nbytes, into=back)
    stream = session.stream()
    large = fill(session, size)
    for turn, leave_now in enumerate(turns, 1):
        session.sync()
        leave_now()
        began = time.monotonic()
        session.launch(module, "chase", [1], [1], chase_args(nodes[0], 70), stream=stream)
        stream.sync()
        print(f"turn {turn}: first operation {time.monotonic() - began:.3f} s")
        session.launch(module, "count", [1], [1], count_args(counted))
        session.sync()
        assert [struct.unpack("<Q", session.mem_read(one, 8, 8))[0] for one in nodes] == [10 * turn] * 7
        assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
        data[:] = numbers(N) * turn
        graph.launch()
        session.sync()
        np.testing.assert_array_equal(back, numbers(N) * turn + 7)
        assert is_whole(session, large, size)


def test_a_session_leaves_its_worker_and_returns_in_another(node: Daemon, cards: Cards) -> None:
    before = cards.used_bytes()[0]
    with lease_of(node, COLD_MIB * MIB + 64 * MIB) as lease, GpuSession(lease) as session:
        pids = [node.worker_pid(lease.lease_id)]

        def leave_now() -> None:
            began = time.monotonic()
            moved = leave(node, lease)
            print(f"left in {time.monotonic() - began:.3f} s: {moved.moved_bytes >> 20} MiB")
            until = time.monotonic() + 10
            while cards.used_bytes()[0] > before + SLACK_BYTES and time.monotonic() < until:
                time.sleep(0.02)
            print(f"{(cards.used_bytes()[0] - before) / MIB:.0f} MiB more than before are in use")

        check_everything(session, [leave_now] * 3)
        pids.append(node.worker_pid(lease.lease_id))
        assert pids[0] != pids[1]


def test_the_drivers_threads_have_no_malloc_arena(node: Daemon) -> None:
    """An arena is reserved when a thread first allocates, and the addresses of modules would depend on the moment."""
    with lease_of(node, 64 * MIB) as lease, GpuSession(lease) as session:
        session.module_load(POINTERS)
        assert not arenas_of(node.worker_pid(lease.lease_id))


@pytest.mark.parametrize("why", ["unloaded", "stream"])
def test_a_session_stays_in_its_process_if_a_variable_would_move(node: Daemon, why: str) -> None:
    with lease_of(node, 64 * MIB) as lease, GpuSession(lease) as session:
        if why == "stream":
            session.stream()
            module = session.module_load(POINTERS)
        else:
            earlier, module = session.module_load(POINTERS), session.module_load(POINTERS)
            session.module_unload(earlier)
        counted = session.mem_alloc(8)
        for turn in range(1, 3):
            session.launch(module, "count", [1], [1], count_args(counted))
            assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
            session.sync()
            with pytest.raises(Unsupported, match=why):
                leave(node, lease)
            assert why in node.query(lease.lease_id)["park"]["stays_here"]


def test_a_session_moves_between_cards(cards: Cards) -> None:
    if len(cards.used_bytes()) < 2:
        pytest.skip("a move needs two cards")
    node = Daemon(driver="cuda", vram=("40GiB",), config=CONFIG)
    try:
        node.wait_until_it_answers()
        with lease_of(node, COLD_MIB * MIB + 64 * MIB) as lease, GpuSession(lease) as session:
            targets = iter(["1", "0", "1"])

            def move_now() -> None:
                moved = leave(node, lease, next(targets))
                print(f"moved to {moved.card_uuid}: {moved.moved_bytes >> 20} MiB in {moved.took_us / 1e6:.3f} s")

            check_everything(session, [move_now] * 3)
    finally:
        node.stop()


# --- regions and events of a session that leaves its worker ---


def fill_region(session: GpuSession, region: Region) -> None:
    for at in places(region.size_bytes):
        session.mem_write(region, at, PATTERN)
    session.sync()


def test_events_keep_their_times_in_another_worker(node: Daemon) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        module, buffer, stream = session.module_load(TRANSFORM), session.mem_alloc(4 * N), session.stream()
        events = [stream.event()]
        for launches in (1, 40, 3):
            for _ in range(launches):
                session.launch(module, "bias", [391], [256], scale_args(buffer, N, 1), stream=stream)
            events.append(session.default_stream.event() if launches == 3 else stream.event())
        stream.sync()
        for turn in range(3):
            times_ms = [events[0].elapsed_ms(event) for event in events]
            session.sync()
            leave(node, lease)
            found_ms = [events[0].elapsed_ms(event) for event in events]
            print(f"turn {turn}: {times_ms} and then {found_ms} ms")
            # Distances between events of one process are exact; the driver rounds those to events of a later process.
            assert found_ms[:4] == pytest.approx(times_ms[:4], abs=2e-3)
            assert found_ms == pytest.approx(times_ms, rel=1e-4, abs=2e-3)
            events.append(stream.event())
            assert events[-2].elapsed_ms(events[-1]) > 0
            with pytest.raises(InvalidRequest):
                events[-1].elapsed_ms(events[-2])
        assert session.mem_read(buffer, 0, 4) == struct.pack("<f", 44)


def finish(session: GpuSession, begin: Callable[[], object]) -> None:
    begin()
    session.sync()


def test_regions_and_events_leave_their_worker_with_their_session(node: Daemon, cards: Cards) -> None:
    before = cards.used_bytes()[0]
    with lease_of(node, 2 * GIB) as lease, GpuSession(lease) as session:
        first, counted = session.module_load(POINTERS), session.mem_alloc(8)
        large, small = lease.region(GIB, ttl_secs=200), lease.region(2 * MIB)
        # Load the module after the regions: its variables must nevertheless keep their addresses.
        second = session.module_load(POINTERS)
        fill_region(session, large)
        # A ring of nodes in both regions and in a buffer. Each node contains the address of the next one.
        ring = [(large, 30 * MIB), (session.mem_alloc(16), 0), (small, 64), (large, 400 * MIB)]
        for (here, at), (there, then) in zip(ring, ring[1:] + ring[:1], strict=True):
            session.mem_write(here, at, struct.pack("<QQ", there.handle + then, 0))
        both, stream = session.region_set([large, small]), session.stream()
        with session.record() as graph:
            session.mem_write(small, 128, b"graph")
        events = [stream.event()]
        session.launch(first, "count", [1], [1], count_args(counted), stream=stream)
        events.append(stream.event())
        stream.sync()
        times_ms = [events[0].elapsed_ms(events[1])]
        for turn in range(1, 4):
            session.mem_write(small, 128, b"-----")
            session.sync()
            began = time.monotonic()
            moved = leave(node, lease)
            left_s = time.monotonic() - began
            assert moved.moved_bytes >= GIB + 2 * MIB
            wait_until(lambda: cards.used_bytes()[0] <= before + SLACK_BYTES, "the card has everything back")
            large.renew(200 + turn)
            began = time.monotonic()
            args = KernelArgs().push_u64(large.handle + 30 * MIB).push_u32(40)
            session.launch(first, "chase", [1], [1], args, regions=both)
            session.sync()
            print(f"{moved.moved_bytes >> 20} MiB: left in {left_s:.3f} s, back in {time.monotonic() - began:.3f} s")
            for one, at in ring:
                assert struct.unpack("<Q", session.mem_read(one, at + 8, 8)) == (10 * turn,)
            assert all(bytes(session.mem_read(large, at, MIB)) == PATTERN for at in places(GIB))
            graph.launch()
            assert bytes(session.mem_read(small, 128, 5)) == b"graph"
            session.launch(first, "count", [1], [1], count_args(counted), stream=stream)
            session.launch(second, "count", [1], [1], count_args(counted), stream=stream)
            stream.sync()
            assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
            # Events keep their distances, and can be compared with later events.
            found_ms = [start.elapsed_ms(end) for start, end in pairwise(events)]
            print(f"events: {times_ms} and then {found_ms} ms")
            assert found_ms[:1] == pytest.approx(times_ms[:1], abs=1e-3)
            assert found_ms == pytest.approx(times_ms, rel=1e-3, abs=1e-3)
            events.append(stream.event())
            times_ms.append(events[-2].elapsed_ms(events[-1]))
            assert times_ms[-1] > 0
        third = lease.region(2 * MIB)
        assert third.handle not in range(small.handle, large.handle + GIB)
        assert third.handle not in range(large.handle, small.handle + 2 * MIB)
        assert bytes(session.mem_read(third, 0, 2 * MIB)) == bytes(2 * MIB)


@pytest.mark.parametrize("end", ["revoked", "freed", "expired"])
def test_a_region_that_ends_while_its_session_has_no_worker(node: Daemon, end: str) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        module, kept = session.module_load(POINTERS), lease.region(2 * MIB)
        gone = lease.region(128 * MIB, ttl_secs=2 if end == "expired" else 60)
        session.mem_write(kept, 0, struct.pack("<QQ", kept.handle, 0))
        session.mem_write(gone, 0, b"secret")
        session.mem_write(gone, 120 * MIB, b"secret")
        with session.record() as graph:
            session.mem_write(gone, 0, b"again")
        of_both, of_kept = session.region_set([kept, gone]), session.region_set([kept])
        session.sync()
        leave(node, lease)
        if end == "revoked":
            gone.revoke("maintenance")
        elif end == "freed":
            gone.free()
        wait_until(lambda: gone.query()["state"] == "torndown", "the region has ended")
        session.launch(module, "chase", [1], [1], chase_args(kept, 5), regions=of_kept)
        session.sync()
        with pytest.raises({"revoked": RegionRevoked, "expired": RegionExpired, "freed": RegionFreed}[end]):
            finish(session, lambda: session.launch(module, "chase", [1], [1], chase_args(kept, 5), regions=of_both))
        with pytest.raises(RegionFenced):
            session.mem_read(gone, 0, 6)
        with pytest.raises(InvalidHandle):
            finish(session, graph.launch)
        graph.close()
        # The region's bytes, except the scratch, are the slice's again, and contain nothing of the region.
        with lease.region(128 * MIB) as another:
            assert another.handle not in range(gone.handle, gone.handle + 128 * MIB)
            for at in (0, 120 * MIB):
                assert bytes(session.mem_read(another, at, 6)) == bytes(6)
            # The address of the ended region stays reserved for the session when it leaves its worker again.
            session.sync()
            leave(node, lease)
            session.mem_write(another, 0, b"mine")
            with pytest.raises(RegionFenced):
                session.mem_read(gone, 0, 6)
            gone.close()
        assert struct.unpack("<Q", session.mem_read(kept, 8, 8)) == (5,)


def test_a_region_is_revoked_while_its_session_leaves_or_returns(node: Daemon) -> None:
    with lease_of(node, 256 * MIB) as lease, GpuSession(lease) as session:
        kept = lease.region(2 * MIB)
        session.mem_write(kept, 0, b"kept")
        for turn in range(6):
            region = lease.region(64 * MIB)
            session.mem_write(region, 0, b"x" * 100)
            session.sync()
            moving = threading.Thread(target=suppressed, args=(leave, node, lease))
            moving.start()
            time.sleep(0.02 * turn)
            region.revoke("maintenance")
            moving.join()
            assert bytes(session.mem_read(kept, 0, 4)) == b"kept"
            wait_until(lambda: region.query()["state"] == "torndown", "the region has ended")  # noqa: B023
            with pytest.raises((RegionRevoked, RegionFenced)):
                session.mem_read(region, 0, 1)
            region.close()
        # Every byte of the slice can be used for a region again.
        session.sync()
        with lease.region(200 * MIB) as region:
            assert bytes(session.mem_read(region, 0, 100)) == bytes(100)


def suppressed(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(GpuLeaseError):
        call(*arguments)


@pytest.mark.parametrize("has_variables", [False, True])
def test_a_worker_of_the_next_version_has_regions_and_events(cards: Cards, has_variables: bool) -> None:
    node = LastingDaemon(driver="cuda", vram=("8GiB",), config=CONFIG)
    try:
        node.start()
        with node.now.builder(512 * MIB).lease_secs(300).parkable().acquire() as lease, GpuSession(lease) as session:
            module, region, stream = session.module_load(TRANSFORM), lease.region(64 * MIB), session.stream()
            counted, pointers = session.mem_alloc(8), session.module_load(POINTERS) if has_variables else None
            session.mem_write(region, 0, numbers(N))
            of_region, events = session.region_set([region]), [stream.event()]

            def work() -> None:
                args = scale_args(region, N, 7)
                session.launch(module, "bias", [400], [256], args, regions=of_region, stream=stream)
                if pointers is not None:
                    session.launch(pointers, "count", [1], [1], count_args(counted), stream=stream)
                events.append(stream.event())
                stream.sync()

            work()
            between_ms, worker = events[0].elapsed_ms(events[1]), node.worker_pid(lease.lease_id)
            node.restart(Faults(constants={"gpulease.daemon.workers.zygote_client:VERSION": "99.0"}))
            assert node.now.query(lease.lease_id)["earlier_version"]
            # A worker of this version may use other addresses, so a plain move must be refused.
            with pytest.raises(Busy, match="upgrade-workers"):
                leave(node.now, lease)
            reason, until = "", time.monotonic() + 20
            while node.worker_pid(lease.lease_id) == worker and not reason:
                try:
                    ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, "0"), node.address)
                except Busy:
                    assert time.monotonic() < until
                    time.sleep(0.1)
                except Unsupported as error:
                    # The session continues in its earlier worker.
                    reason = str(error)
            print(f"upgraded: {not reason} {reason}")
            assert not reason or "would begin at" in reason or (has_variables and "variable" in reason)
            assert bool(node.now.query(lease.lease_id)["earlier_version"]) == bool(reason)
            for turn in range(2, 4):
                work()
                np.testing.assert_array_equal(floats(session.mem_read(region, 0, 4 * N)), numbers(N) + 7 * turn)
                if has_variables:
                    assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
            assert events[0].elapsed_ms(events[1]) == pytest.approx(between_ms, abs=1e-3)
            assert events[1].elapsed_ms(events[2]) > 0
    except BaseException:
        print(node.logs())
        node.discard()
        raise
    node.stop()
