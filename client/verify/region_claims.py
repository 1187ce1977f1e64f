"""Promises of regions, each with its proof: one region ends, and nothing else in its session is affected.

At the end of every proof, all memory that regions had can be allocated in one piece again.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from gpulease.client import (
    GpuLease,
    GpuLeaseError,
    GpuSession,
    KernelArgs,
    Module,
    Region,
    RegionFailed,
    RegionFenced,
    RegionRevoked,
    RegionSet,
)
from gpulease.client.bench.figures import percentile
from gpulease.client.console.private_daemon import killable_daemon
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, worker_pid
from gpulease.client.verify.faulty_kernels import BLOCK, WARP, count_set, fill, rule_breakers
from gpulease.protocol.limits import MAX_REGIONS

MIB: Final = 1 << 20
WORD_BYTES: Final = 4
PATTERN: Final = 0xA5A5A5A5
TTL_S: Final = 60.0

RETURN_S: Final = 20.0
"""Longest time, in seconds, for an ended region to be proved free, on a host with one core for all processes."""

GRAPH_NODES: Final = 300

QUEUED: Final = 20
"""Number of graph replays that are queued before the region is revoked."""

STREAMS: Final = 8

QUIET_ROUNDS: Final = 20
"""Number of rounds of work that are timed before any region is revoked."""

OPENING_S: Final = (2.0, 8.0, 32.0)
"""Seconds within which all regions that a session can have must be opened. If a slow host fails, the next value is
tried."""


def region_claims(scene: Scene) -> list[MatrixCheck[str]]:
    """Return the promises of regions. Each proof returns its finding."""
    size_bytes, churn = (64 * MIB, 1000) if scene.is_card else (4 * MIB, 60)
    return [
        MatrixCheck(
            "a region next to another", lambda scene: beside_another(scene, size_bytes, 50 if scene.is_card else 5)
        ),
        MatrixCheck("a stale pointer into a region", lambda scene: stale_pointer(scene, size_bytes)),
        MatrixCheck("regions that come and go", lambda scene: churning(scene, churn)),
        MatrixCheck("a region under a graph", lambda scene: under_a_graph(scene, size_bytes)),
        MatrixCheck("regions of a killed session", lambda scene: parent_killed(scene, size_bytes)),
        MatrixCheck("256 regions that expire at once", expiring_at_once),
    ]


@contextlib.contextmanager
def _session(scene: Scene, slice_bytes: int) -> Iterator[tuple[GpuLease, GpuSession, Module]]:
    """Yield a session. Afterwards, allocate its whole slice, to prove that all memory is back."""
    with scene.builder(slice_bytes).acquire() as lease, GpuSession(lease) as session:
        yield lease, session, session.module_load(rule_breakers())
        # On a card, code, streams and graphs may take some of the slice's memory.
        spare_bytes = 32 * MIB if scene.is_card else 0
        session.mem_free(session.mem_alloc(slice_bytes - spare_bytes))


def _fill(session: GpuSession, module: Module, region: Region, value: int, regions: RegionSet) -> None:
    # Pass the region's address instead of the region, so that a stale pointer can be used, too.
    fill(session, module, region.address, region.size_bytes // WORD_BYTES, value, regions)


def beside_another(scene: Scene, size_bytes: int, times: int) -> str:
    """Revoke regions while kernels work constantly in another region. All results of that work must be right."""
    slice_bytes = 4 * size_bytes
    with (
        _session(scene, slice_bytes) as (lease, session, module),
        lease.region(size_bytes, ttl_secs=TTL_S) as kept_region,
    ):
        region_set = session.region_set([kept_region])
        taken_us: list[float] = []
        is_stopped = threading.Event()
        mismatches: list[str] = []

        def work() -> None:
            # Each round writes a new value to all words, and counts the words that are not 0. If there are fewer, a
            # word was lost.
            words = kept_region.size_bytes // WORD_BYTES
            while not is_stopped.is_set():
                started = time.perf_counter()
                try:
                    _fill(session, module, kept_region, len(taken_us) + 1, region_set)
                    if count_set(session, module, kept_region.address, words, region_set) != words:
                        mismatches.append("a word of the other region is missing")
                except GpuLeaseError as error:
                    mismatches.append(f"{type(error).__name__}: {error}")
                    return
                taken_us.append((time.perf_counter() - started) * 1e6)

        working = threading.Thread(target=work, daemon=True)
        working.start()
        deadline_s = time.monotonic() + RETURN_S
        # Step 1: time some undisturbed rounds, for comparison. Step 2: revoke other regions while the work continues.
        while len(taken_us) < QUIET_ROUNDS and not mismatches and time.monotonic() < deadline_s:
            time.sleep(0.01)
        quiet, rounds = percentile([*taken_us, 0.0], 99), len(taken_us)
        try:
            # Open, revoke, wait for the proof, release: the whole life of a region, during the work.
            for _ in range(times):
                other = lease.region(size_bytes, ttl_secs=TTL_S)
                other.revoke("the proof")
                scene.wait_for_end(other.lease_id, RETURN_S)
                other.close()
        finally:
            is_stopped.set()
            working.join(RETURN_S)
        if mismatches or len(taken_us) == rounds:
            raise Breach(mismatches[0] if mismatches else "the other region's work stood still")
        p99 = percentile(taken_us[rounds:], 99)
    return f"{times} revoked, {len(taken_us) - rounds} rounds right; p99 {p99:.0f} us, quiet {quiet:.0f} us"


def stale_pointer(scene: Scene, size_bytes: int) -> str:
    """Read and write where a revoked region was. Reads must find zeros, and writes must reach no other memory."""
    with (
        _session(scene, 4 * size_bytes) as (lease, session, module),
        lease.region(size_bytes, ttl_secs=TTL_S) as kept_region,
        lease.region(size_bytes, ttl_secs=TTL_S) as ended_region,
    ):
        words = ended_region.size_bytes // WORD_BYTES
        both, only_kept = session.region_set([kept_region, ended_region]), session.region_set([kept_region])
        _fill(session, module, ended_region, PATTERN, both)
        # Both regions are written; only one of them is revoked.
        _fill(session, module, kept_region, PATTERN, both)
        session.sync()
        ended_region.revoke("the proof")
        # The first refusal says how the region ended, and all later refusals that it is fenced.
        for error_type in (RegionRevoked, RegionFenced, RegionFenced):
            _expect(error_type, lambda: _fill(session, module, ended_region, PATTERN, both), session)
        scene.wait_for_end(ended_region.lease_id, RETURN_S)
        if nonzero_words := count_set(session, module, ended_region.address, words, only_kept):
            raise Breach(f"{nonzero_words} of {words} words of a returned region are readable")
        # A later region must have other addresses, and must not see writes through the stale pointer.
        with lease.region(size_bytes, ttl_secs=TTL_S) as later:
            if later.address == ended_region.address:
                raise Breach("a region's address was given again")
            # This launch writes to the ended region without naming it, as a kernel with a stale table of pointers does.
            _fill(session, module, ended_region, 1, only_kept)
            only_later = session.region_set([later])
            if nonzero_words := count_set(session, module, later.address, words, only_later):
                raise Breach(f"{nonzero_words} words written through a stale pointer are in a later region")
        if count_set(session, module, kept_region.address, words, only_kept) != words:
            raise Breach("another region lost words")
        ended_region.close()
    return f"{size_bytes >> 20} MiB: Revoked, then Fenced; reads find zeros, writes reach no tenant"


def _expect(kind: type[RegionFailed], launch: Callable[[], object], session: GpuSession) -> None:
    try:
        launch()
        session.sync()
    except kind:
        return
    except RegionFailed as error:
        raise Breach(f"a launch must get {kind.__name__}, not {type(error).__name__}") from None
    raise Breach(f"a launch in a region that has ended did not get {kind.__name__}")


def churning(scene: Scene, count: int) -> str:
    """Open and end regions at random during checked work in eight streams."""
    rng = random.Random(count)
    slice_bytes = 256 * MIB
    live: list[Region] = []
    with _session(scene, slice_bytes) as (lease, session, module):
        values = np.arange(1024, dtype=np.float32)
        buffers = [session.mem_alloc(values.nbytes) for _ in range(STREAMS)]
        streams = [session.stream() for _ in range(STREAMS)]
        rounds = 0
        for _ in range(count):
            # Queue work in all streams first, so that regions end while it runs.
            for stream, buffer in zip(streams, buffers, strict=True):
                session.mem_write(buffer, 0, values)
                args = KernelArgs().push_buffer(buffer).push_u32(values.size).push_f32(3.0)
                session.launch(module, "scale", (4, 1, 1), BLOCK, args, stream=stream)
            # Keep a few regions alive, and end them at random by revoking or freeing.
            while len(live) > 8 or (live and rng.random() < 0.5):
                freed = live.pop(rng.randrange(len(live)))
                freed.revoke("the proof") if rng.random() < 0.5 else freed.free()
                freed.close()
            live.append(lease.region(2 * MIB * rng.randint(1, 4), ttl_secs=TTL_S))
            session.sync()
            for buffer in buffers:
                if session.mem_read(buffer, 0, values.nbytes) != (values * 3).tobytes():
                    raise Breach("a result is wrong while regions come and go")
                rounds += 1
        # Free everything, so that the whole slice can be allocated at the end.
        for region in live:
            region.free()
            region.close()
        for stream in streams:
            stream.close()
        for buffer in buffers:
            session.mem_free(buffer)
    return f"{count} opened and ended, {rounds} results of other work correct"


def under_a_graph(scene: Scene, size_bytes: int) -> str:
    """Revoke a region while a graph that names it runs. Queued work must end, and no later replay may start."""
    with (
        _session(scene, 4 * size_bytes) as (lease, session, module),
        lease.region(size_bytes, ttl_secs=TTL_S) as kept_region,
        lease.region(size_bytes, ttl_secs=TTL_S) as ended_region,
    ):
        both, only_kept = session.region_set([kept_region, ended_region]), session.region_set([kept_region])
        # Make one graph for each region; only the first graph's region is revoked.
        graphs = []
        for region in (ended_region, kept_region):
            args = KernelArgs().push_buffer(region).push_u32(32).push_f32(1.0)
            with session.record() as graph:
                for _ in range(GRAPH_NODES):
                    session.launch(module, "scale", (1, 1, 1), WARP, args)
            graphs.append(graph)
        ended_graph, kept_graph = graphs
        # First queue replays, which begin before the revocation and must run to their end.
        for position in range(QUEUED):
            ended_graph.launch(regions=both, position=position)
        revoking = threading.Thread(target=ended_region.revoke, args=("the proof",))
        revoking.start()
        # Launch until a replay is refused. From then on none may begin.
        launches = _launch_until_refused(session, lambda at: ended_graph.launch(regions=both, position=at))
        revoking.join()
        kept_graph.launch(regions=only_kept)
        session.sync()
        scene.wait_for_end(ended_region.lease_id, RETURN_S)
        ended_region.close()
        kept_graph.close()
    return f"a graph of {GRAPH_NODES} nodes: refused at replay {launches}; the other region's graph continues"


def _launch_until_refused(session: GpuSession, launch: Callable[[int], object]) -> int:
    """Return the position of the first refused launch. Launches queued before have lower positions."""
    deadline_s = time.monotonic() + RETURN_S
    position = QUEUED
    while time.monotonic() < deadline_s:
        try:
            launch(position)
            session.sync()
        except RegionRevoked as error:
            if error.position is None or error.position > position:
                # The refusal names the first replay that did not begin, never a later one.
                raise Breach(f"the refusal names position {error.position}; {position} was the last") from None
            return error.position
        position += 1
    raise Breach("a revoked region's graph still begins")


def parent_killed(scene: Scene, size_bytes: int) -> str:
    """Kill a session's process while a region ends. All regions must end with it, and all bytes be proved free."""
    # This program opens no session: the worker serves only the regions.
    lease = scene.builder(4 * size_bytes).acquire()
    regions = [lease.region(size_bytes, ttl_secs=TTL_S) for _ in range(3)]
    revoking = threading.Thread(target=_revoke_anyway, args=(regions[0],))
    revoking.start()
    # Kill the worker during the revocation, at whatever step it is.
    os.kill(worker_pid(lease.lease_id), signal.SIGKILL)
    cause = scene.wait_for_end(lease.lease_id)
    revoking.join(RETURN_S)
    for region in regions:
        scene.wait_for_end(region.lease_id, RETURN_S)
    return f"ended by {cause}, with {len(regions)} regions"


def _revoke_anyway(region: Region) -> None:
    with contextlib.suppress(GpuLeaseError):
        region.revoke("the proof")


def expiring_at_once(scene: Scene) -> str:
    """Let all regions that a session can have expire in the same millisecond. All must be proved free."""
    with _session(scene, 2 * MAX_REGIONS * 2 * MIB) as (lease, session, module):
        regions, ends_s = _open_all(lease)
        names = session.region_set(regions)
        # On a slow host some may have expired already.
        with contextlib.suppress(RegionFailed):
            _fill(session, module, regions[0], 1, names)
            session.sync()
        time.sleep(max(0.0, ends_s - time.monotonic()))
        started = time.perf_counter()
        for region in regions:
            scene.wait_for_end(region.lease_id, RETURN_S)
        taken_ms = (time.perf_counter() - started) * 1e3
        for region in regions:
            region.close()
    return f"{MAX_REGIONS} proved back within {taken_ms:.0f} ms of their deadline"


def _open_all(lease: GpuLease) -> tuple[list[Region], float]:
    """Open as many regions as a session can have, all with the same end. Returns them and that time."""
    # A slow host needs more time to open all regions: try again with a later end.
    for opening_s in OPENING_S:
        regions: list[Region] = []
        ends_s = time.monotonic() + opening_s
        while len(regions) < MAX_REGIONS and (left_s := ends_s - time.monotonic()) > opening_s / 10:
            regions.append(lease.region(2 * MIB, ttl_secs=left_s))
        if len(regions) == MAX_REGIONS:
            return regions, ends_s
        for region in regions:
            region.close()
    raise Breach(f"{MAX_REGIONS} regions can't be opened in {OPENING_S[-1]:g} s")


def broker_killed(driver: str) -> str:
    """Kill the broker at each step of a region's life.

    The next broker must have a record of the region, and end it with proof.
    """
    with killable_daemon(driver) as daemon:
        scene = Scene.at(daemon.address)
        steps: list[str] = []
        with _session(scene, 256 * MIB) as (lease, session, module):
            # Each step leaves the region in another state when the broker dies.
            for step in ("opened", "revoked", "waited for", "returned"):
                region = lease.region(16 * MIB, ttl_secs=TTL_S)
                names = session.region_set([region])
                _fill(session, module, region, 1, names)
                if step == "waited for":
                    _keep_busy(session, module, region, names)
                if step != "opened":
                    revoking = threading.Thread(target=_revoke_anyway, args=(region,))
                    revoking.start()
                if step == "returned":
                    scene.wait_for_end(region.lease_id, RETURN_S)
                # Kill the broker; its worker and the session continue.
                daemon.kill()
                daemon.start()
                # The next broker must know the region, and must be able to end it.
                if step == "opened":
                    _fill(session, module, region, 1, names)
                    session.sync()
                _revoke_anyway(region)
                scene.wait_for_end(region.lease_id, RETURN_S)
                with contextlib.suppress(RegionFailed):
                    session.sync()
                region.close()
                steps.append(step)
    return f"killed when a region was {', '.join(steps)}: found again, ended, proved"


def _keep_busy(session: GpuSession, module: Module, region: Region, names: RegionSet) -> None:
    for value in range(20):
        _fill(session, module, region, value, names)
