"""Sessions leave their worker, and another continues them, on the same card or another, with all that they had."""

import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gpulease.client import (
    Busy,
    Denied,
    Drained,
    GpuBuilder,
    GpuExclusivityClass,
    GpuLease,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    LeaseExpired,
    Permission,
    Region,
    RegionCancelled,
    RegionExpired,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
    Revoked,
    Unsupported,
    aio,
)
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import Empty, LeaseMove, LeaseRevoke
from helpers.daemon import Daemon, running
from helpers.kernels import TRANSFORM, check_main_job, floats, numbers, scale_args
from helpers.lasting import LastingDaemon, lent_lasting, stop_lasting
from helpers.parking import park_limits, row
from helpers.pointers import POINTERS, chase_args, count_args
from helpers.waiting import PATIENCE_S, wait_until

MIB = 1 << 20
SLICE = 64 * MIB
N = 10_000
CONFIG = park_limits("2GiB")


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with running(Daemon(vram=("512MiB", "512MiB"), config=CONFIG)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def _lasting_nodes() -> Iterator[list[LastingDaemon]]:
    yield from stop_lasting()


@pytest.fixture
def lasting(_lasting_nodes: list[LastingDaemon]) -> Iterator[LastingDaemon]:
    """Return a daemon that the file's tests restart, one after another."""
    yield from lent_lasting(_lasting_nodes, lambda: LastingDaemon(vram=("512MiB", "512MiB"), config=CONFIG))


@pytest.fixture
def lease(node: Daemon) -> Iterator[GpuLease]:
    with parkable(node.address) as lease:
        yield lease


def parkable(address: str, *, seconds: float = 120, idle_s: float = 0) -> GpuLease:
    builder = GpuBuilder(address).min_vram(SLICE).lease_secs(seconds).parkable(idle_s).device("0")
    return builder.exclusivity(GpuExclusivityClass.SHARED).acquire()


def depth(address: str, lease: GpuLease) -> str:
    shown = row(address, lease)["park"]
    return str(shown["depth"]) if shown["phase"] == "parked" else str(shown["phase"])


def chill(address: str, lease: GpuLease) -> None:
    """Make a session leave its worker."""
    # Requests that its client still has to send, such as frees, may make it return once.
    for _ in range(5):
        move(address, lease, None)
        time.sleep(0.02)
        if depth(address, lease) == "cold":
            return
    raise AssertionError(f"the session is {depth(address, lease)}")


PASSING = ("has sent a request", "returning", "is being opened or ended")
"""Parts of refusals that say that a session can't be moved at this moment."""


def move(address: str, lease: GpuLease, device: str | None) -> Any:
    """Move a session, once its clients and the broker have no operation in progress."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, device), address)
        except (Unsupported, Busy) as error:
            if not any(words in str(error) for words in PASSING) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def cards(address: str) -> list[dict[str, Any]]:
    return list(ask(Opcode.GET_INVENTORY, Empty(), address).details)


def has_ended(address: str, lease: GpuLease) -> Callable[[], bool]:
    return lambda: row(address, lease)["state"] == "torndown"


def region_has_ended(address: str, region: Region) -> Callable[[], bool]:
    return lambda: region.query()["state"] == "torndown"


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_main_job_before_between_and_after(node: Daemon, lease: GpuLease, shared_memory: bool) -> None:
    with GpuSession(lease, shared_memory=shared_memory) as session:
        for _ in range(3):
            check_main_job(session)
            before = node.worker_pid(lease.lease_id)
            chill(node.address, lease)
            check_main_job(session)
            assert node.worker_pid(lease.lease_id) != before


def test_pointers_variables_graphs_streams_and_kept_buffers(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    module = session.module_load(POINTERS)
    nodes = [session.mem_alloc(16) for _ in range(7)]
    for one, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        session.mem_write(one, 0, struct.pack("<QQ", following.handle, 0))
    counted = session.mem_alloc(8)
    session.keep(counted, "counted")
    variable = module.variable("kept") if hasattr(module, "variable") else None
    transform, buffer = session.module_load(TRANSFORM), session.mem_alloc(4 * N)
    data, back = session.empty(N, np.float32), session.empty(N, np.float32)
    with session.record() as graph:
        session.mem_write(buffer, 0, data)
        session.launch(transform, "bias", [40], [256], scale_args(buffer, N, 7))
        session.mem_read(buffer, 0, data.nbytes, into=back)
    stream = session.stream()
    session.sync()
    for turn in range(1, 4):
        if turn % 2:
            chill(node.address, lease)
        else:
            move(node.address, lease, "1")
        session.launch(module, "chase", [1], [1], chase_args(nodes[0], 70), stream=stream)
        stream.sync()
        session.launch(module, "count", [1], [1], count_args(counted))
        session.sync()
        assert [struct.unpack("<Q", session.mem_read(one, 8, 8))[0] for one in nodes] == [10 * turn] * 7
        assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (5 + turn,)
        data[:] = numbers(N) * turn
        graph.launch()
        session.sync()
        np.testing.assert_array_equal(back, numbers(N) * turn + 7)
        assert floats(session.mem_read(buffer, 0, 4))[0] == turn * numbers(N)[0] + 7
    assert variable is None or variable.handle


def test_regions_move_with_their_session(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    module, region, other = session.module_load(POINTERS), lease.region(4 * MIB, ttl_secs=60), lease.region(2 * MIB)
    # A ring of nodes in both regions and in a buffer. Each node contains the address of the next one.
    places = [(region, 0), (session.mem_alloc(16), 0), (other, 64), (region, 3 * MIB)]
    for (here, at), (there, then) in zip(places, places[1:] + places[:1], strict=True):
        session.mem_write(here, at, struct.pack("<QQ", there.handle + then, 0))
    both, only = session.region_set([region, other]), session.region_set([region])
    with session.record() as graph:
        session.mem_write(other, 128, b"graph")
    session.sync()
    for turn in range(1, 4):
        if turn % 2:
            chill(node.address, lease)
            region.renew(60 + turn)
        else:
            move(node.address, lease, "1")
        session.launch(module, "chase", [1], [1], chase_args(region, 40), regions=both)
        session.sync()
        assert [struct.unpack("<Q", session.mem_read(one, at + 8, 8))[0] for one, at in places] == [10 * turn] * 4
        session.mem_write(other, 128, b"-----")
        graph.launch()
        assert bytes(session.mem_read(other, 128, 5)) == b"graph"
    # Launches must obey region words that the broker writes while no worker has the session.
    chill(node.address, lease)
    region.cancel()
    with pytest.raises(RegionCancelled):
        chase(session, module, region, only)
    chill(node.address, lease)
    region.resume()
    chase(session, module, region, only)
    third = lease.region(2 * MIB)
    assert third.handle not in (region.handle, other.handle)
    for one in (region, other, third):
        one.close()


def test_requests_that_need_the_session_bring_it_back(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    buffer = session.mem_alloc(MIB)
    session.mem_write(buffer, 0, b"weights")
    chill(node.address, lease)
    region = lease.region(2 * MIB)
    session.mem_write(region, 0, b"pages")
    chill(node.address, lease)
    lease.grow(4 * MIB)
    assert row(node.address, lease)["size_bytes"] == SLICE + 4 * MIB
    chill(node.address, lease)
    lease.shrink(4 * MIB)
    assert (bytes(session.mem_read(region, 0, 5)), bytes(session.mem_read(buffer, 0, 7))) == (b"pages", b"weights")
    region.close()


def chase(session: GpuSession, module: Any, region: Any, regions: Any) -> None:
    session.launch(module, "chase", [1], [1], chase_args(region, 5), regions=regions)
    session.sync()


def test_what_keeps_a_session_in_its_process_shows_while_it_is_used_and_after_a_kill(lasting: LastingDaemon) -> None:
    with parkable(lasting.address) as held, GpuSession(held) as session:

        def warm_only() -> str:
            return str(row(lasting.address, held)["park"]["warm_only"])

        buffer = session.mem_alloc(64)
        with session.record() as graph:
            session.mem_write(buffer, 0, b"graph")
        graph.launch()
        session.mem_free(buffer)
        session.sync()
        wait_until(lambda: "no longer exists" in warm_only(), "the reason shows although nobody has moved the session")
        lasting.restart()
        wait_until(lambda: "no longer exists" in warm_only(), "the next broker shows it, too")
        listed = CliRunner(env={ADDRESS_VARIABLE: lasting.address, "COLUMNS": "250"}).invoke(main, ["leases"]).stdout
        assert "active (warm only)" in listed
        assert "something that no longer exists" in listed
        with pytest.raises(Unsupported, match="no longer exists"):
            move(lasting.address, held, None)
        assert "no longer exists" in warm_only(), "parked warm"
        graph.close()
        session.sync()
        wait_until(lambda: not warm_only(), "nothing keeps it any more")
        chill(lasting.address, held)


def replay(session: GpuSession, graph: Any) -> None:
    graph.launch()
    session.sync()


@pytest.mark.parametrize("end", ["revoked", "expired", "freed"])
def test_a_region_that_ends_while_its_session_is_cold(
    node: Daemon, lease: GpuLease, session: GpuSession, end: str
) -> None:
    module, kept = session.module_load(POINTERS), lease.region(2 * MIB)
    gone = lease.region(48 * MIB, ttl_secs=1 if end == "expired" else 60)
    session.mem_write(kept, 0, struct.pack("<QQ", kept.handle, 0))
    session.mem_write(gone, 0, b"secret")
    with session.record() as graph:
        session.mem_write(gone, 0, b"again")
    of_both, of_kept = session.region_set([kept, gone]), session.region_set([kept])
    session.sync()
    chill(node.address, lease)
    if end == "revoked":
        gone.revoke("maintenance")
    elif end == "freed":
        gone.free()
    wait_until(region_has_ended(node.address, gone), "the region has ended")
    # The region's bytes belong to the slice again before the session returns, and the region does not return.
    assert depth(node.address, lease) == "cold"
    chase(session, module, kept, of_kept)
    refusal = {"revoked": RegionRevoked, "expired": RegionExpired, "freed": RegionFreed}[end]
    with pytest.raises(refusal):
        chase(session, module, kept, of_both)
    with pytest.raises(RegionFenced):
        session.mem_read(gone, 0, 6)
    with pytest.raises(InvalidHandle):
        replay(session, graph)
    graph.close()
    with lease.region(48 * MIB) as another:
        assert bytes(session.mem_read(another, 0, 6)) == bytes(6)
        # The address of the ended region stays reserved for the session when it leaves its worker again.
        chill(node.address, lease)
        session.mem_write(another, 0, b"mine")
        with pytest.raises(RegionFenced):
            session.mem_read(gone, 0, 6)
        gone.close()
    assert struct.unpack("<Q", session.mem_read(kept, 8, 8)) == (5,)


def test_a_token_reaches_a_region_after_its_session_has_moved(
    node: Daemon, lease: GpuLease, session: GpuSession
) -> None:
    region = lease.region(2 * MIB)
    session.mem_write(region, 0, b"weights")
    session.sync()
    grant = lease.issue(Permission.MEM_READ)
    move(node.address, lease, "1")
    with GpuSession.attach(grant, node.address) as guest:
        assert bytes(guest.mem_read(region, 0, 7)) == b"weights"
        # A connection that was opened with a token can't be passed to another worker.
        with pytest.raises(Unsupported, match="with a token"):
            move(node.address, lease, "0")


def test_regions_that_end_during_moves_end_once(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    kept = lease.region(2 * MIB)
    session.mem_write(kept, 0, b"kept")
    for turn in range(8):
        region = lease.region(4 * MIB)
        session.mem_write(region, 0, b"x" * 100)
        session.sync()
        mover = threading.Thread(target=suppressed, args=(move, node.address, lease, str(1 - turn % 2)))
        mover.start()
        time.sleep(0.004 * turn)
        region.revoke("maintenance")
        mover.join()
        assert bytes(session.mem_read(kept, 0, 4)) == b"kept"
        wait_until(region_has_ended(node.address, region), "the region has ended")
        with pytest.raises((RegionRevoked, RegionFenced)):
            session.mem_read(region, 0, 1)
        region.close()
    # Every byte of the slice can be used for a region again.
    with lease.region(60 * MIB):
        pass


@pytest.mark.exhaustive
def test_many_returns_while_the_worker_before_still_ends(node: Daemon) -> None:
    # A lease's next worker is often requested before the last one is reaped.
    builder = GpuBuilder(node.address).min_vram(SLICE).parkable().device("1")
    with builder.acquire() as lease, GpuSession(lease) as session:
        module, counted, stream = session.module_load(POINTERS), session.mem_alloc(8), session.stream()
        for turn in range(60):
            session.sync()
            move(node.address, lease, None)
            session.launch(module, "count", [1], [1], count_args(counted), stream=stream)
            stream.sync()
            assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (6 + turn,)


def test_events_keep_their_times(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    module, counted, stream = session.module_load(POINTERS), session.mem_alloc(8), session.stream()
    first = stream.event()
    session.launch(module, "count", [1], [1], count_args(counted), stream=stream)
    second = stream.event()
    between_ms = first.elapsed_ms(second)
    for turn in range(2):
        chill(node.address, lease)
        assert first.elapsed_ms(second) == between_ms
        # Later events use the same clock, and can be compared with earlier ones.
        third = stream.event()
        assert second.elapsed_ms(third) > 0
        move(node.address, lease, "1" if turn == 0 else "0")
        assert 0 < second.elapsed_ms(third) < first.elapsed_ms(third)
    stream.sync()
    assert struct.unpack("<Q", session.mem_read(counted, 0, 8)) == (6,)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_tenant_moves_its_lease_after_what_it_has_sent(node: Daemon, lease: GpuLease, shared_memory: bool) -> None:
    uuids = [card["uuid"] for card in cards(node.address)]
    with GpuSession(lease, shared_memory=shared_memory) as session:
        buffer = session.mem_alloc(MIB)
        for turn in range(4):
            session.mem_write(buffer, 0, bytes([turn]) * 1000)
            assert lease.move(uuids[1 - turn % 2]) >= MIB
            assert lease.card_uuid == row(node.address, lease)["card_uuid"] == uuids[1 - turn % 2]
            assert bytes(session.mem_read(buffer, 0, 1000)) == bytes([turn]) * 1000


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_move_says_how_the_bytes_went_and_loses_none(is_direct: bool) -> None:
    config = CONFIG + f"direct_moves = {str(is_direct).lower()}\n"
    daemon = Daemon(vram=("512MiB", "512MiB"), config=config)
    with running(daemon) as node, parkable(node.address) as lease, GpuSession(lease) as session:
        data = os.urandom(20 * MIB)
        buffer, small = session.mem_alloc(len(data)), session.mem_alloc(8)
        session.mem_write(buffer, 0, data)
        session.mem_write(small, 0, b"smallest")
        region = lease.region(2 * MIB)
        session.mem_write(region, 4096, b"region")
        env = {ADDRESS_VARIABLE: node.address}
        for turn in (1, 2):
            session.sync()
            moved = CliRunner().invoke(main, ["move", str(lease.lease_id), "--device", str(turn % 2)], env=env)
            way = "directly" if is_direct else "through the host's memory because direct_moves is off"
            assert (moved.exit_code, way in moved.output) == (0, True), moved.output
            shown = row(node.address, lease)["park"]
            assert shown["last_move"] == {
                "is_direct": is_direct,
                "reason": "" if is_direct else "direct_moves is off",
            }
            assert shown["moved_bytes"] >= len(data) + 2 * MIB
            assert bytes(session.mem_read(buffer, 0, len(data))) == data
            assert bytes(session.mem_read(small, 0, 8)) == b"smallest"
            assert bytes(session.mem_read(region, 4096, 6)) == b"region"
        # The former worker has ended, and all its memory is free.
        wait_until(lambda: cards(node.address)[1]["available_bytes"] == 512 * MIB, "the other card's bytes are back")
        metrics = ask(Opcode.METRICS, Empty(), node.address).exposition.splitlines()
        series = f'gpu_lease_moved_directly_total{{UUID="{cards(node.address)[0]["uuid"]}"}} '
        assert [float(line.removeprefix(series)) for line in metrics if line.startswith(series)] == [int(is_direct)]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_session_at_work_moves_between_two_operations(node: Daemon, lease: GpuLease, shared_memory: bool) -> None:
    uuids = [card["uuid"] for card in cards(node.address)]
    is_over = threading.Event()
    wrong: list[object] = []

    def work(session: GpuSession) -> None:
        module, counted, large = session.module_load(POINTERS), session.mem_alloc(8), session.mem_alloc(4 * MIB)
        session.mem_write(counted, 0, bytes(8))
        turn = 0
        while not is_over.is_set():
            turn += 1
            session.launch(module, "count", [1], [1], count_args(counted))
            session.mem_write(large, 0, turn.to_bytes(4, "little") * MIB)
            if bytes(session.mem_read(large, 4 * MIB - 4, 4)) != turn.to_bytes(4, "little"):
                wrong.append(("large", turn))
        if struct.unpack("<Q", session.mem_read(counted, 0, 8)) != (5 + turn,):
            wrong.append(("counted", turn, bytes(session.mem_read(counted, 0, 8))))

    def watched(session: GpuSession) -> None:
        try:
            work(session)
        except Exception as error:
            wrong.append(error)

    with GpuSession(lease, shared_memory=shared_memory) as session:
        thread = threading.Thread(target=watched, args=(session,))
        thread.start()
        try:
            for turn in range(6):
                moved = ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, uuids[1 - turn % 2]), node.address)
                assert moved.card_uuid == row(node.address, lease)["card_uuid"] == uuids[1 - turn % 2]
        finally:
            is_over.set()
            thread.join()
    assert not wrong


def run_command(node: Daemon, *words: str) -> tuple[int, str]:
    """Run a command of `gpulease` on a node; returns its exit status and output."""
    result = CliRunner().invoke(main, words, env={ADDRESS_VARIABLE: node.address, "COLUMNS": "250"})
    return result.exit_code, result.output


def test_a_card_is_emptied_and_what_stays_is_listed(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    run = partial(run_command, node, "move")
    other = cards(node.address)[1]["uuid"]
    buffer = session.mem_alloc(MIB)
    session.mem_write(buffer, 0, b"weights")
    with parkable(node.address) as held, GpuSession(held) as shared:
        region = held.region(2 * MIB)
        shared.mem_write(region, 0, b"pages")
        grant = held.issue(Permission.MEM_READ)
        with (
            GpuBuilder(node.address).min_vram(MIB).device("0").acquire() as fixed,
            GpuSession.attach(grant, node.address) as guest,
        ):
            status, output = run("--from", "0", "--json")
            outcomes = {one["lease_id"]: one for one in json.loads(output)}
            assert status == 1
            assert outcomes[str(lease.lease_id)]["card_uuid"] == row(node.address, lease)["card_uuid"] == other
            for one, reason in ((held, "with a token"), (fixed, "parkable")):
                assert outcomes[str(one.lease_id)]["outcome"] == "stays"
                assert reason in outcomes[str(one.lease_id)]["reason"]
            assert bytes(guest.mem_read(region, 0, 5)) == b"pages"
    assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
    status, output = run("--from", "0")
    assert (status, "has no lease" in output) == (0, True)
    status, output = run("--from", "1", "--device", "0")
    assert (status, "moved to" in output) == (0, True), output
    for words in ([], ["--from", "9"], ["--from", "0", "--device", "0"], [str(lease.lease_id)]):
        assert run(*words)[0] == 2
    with GpuBuilder(node.address).min_vram(cards(node.address)[1]["available_bytes"]).device("1").acquire():
        status, output = run("--from", "0")
        assert (status, "no other card has room" in output) == (1, True)


def test_a_card_is_drained_and_its_sessions_leave_it(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    run = partial(run_command, node, "drain")
    other = cards(node.address)[1]["uuid"]
    buffer = session.mem_alloc(MIB)
    session.mem_write(buffer, 0, b"weights")
    with GpuBuilder(node.address).min_vram(MIB).device("0").acquire() as fixed:
        status, output = run("--device", "0", "--move", "--within", "1h")
        # The drain is reported after the moves, which may have taken a second of its hour.
        assert (status, f"moved to {other}" in output) == (1, True), output
        assert re.search("will end within (1 h|59 min)", output), output
        assert "not parkable" in output
        assert row(node.address, lease)["card_uuid"] == other
        assert row(node.address, lease)["phase"] == "active"
        with pytest.raises(Drained, match="is being drained"):
            GpuBuilder(node.address).min_vram(MIB).device("0").acquire()
        with GpuBuilder(node.address).min_vram(MIB).acquire() as elsewhere:
            assert elsewhere.card_uuid == other
        assert row(node.address, fixed)["phase"] == "warning"
        with pytest.raises(Busy, match="is drained"):
            ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, "0"), node.address)
    status, output = run("--device", "0", "--wait", "--within", "1s", "--json")
    assert (status, json.loads(output)["leases"]) == (0, 0), output
    assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
    status, output = run("--device", "0", "--cancel")
    assert (status, "it grants leases" in output) == (0, True), output
    for words in (["--move"], ["--device", "9"], ["--device", "0", "--cancel", "--move"]):
        assert run(*words)[0] == 2
    GpuBuilder(node.address).min_vram(MIB).device("0").acquire().free()


def test_a_card_is_emptied_to_those_that_the_tenant_may_use() -> None:
    # The card with the most room is not for this tenant.
    daemon = Daemon(vram=("256MiB", "512MiB", "256MiB"), config=CONFIG + "[tenants.default]\ndevices = [0, 2]\n")
    try:
        daemon.wait_until_it_answers()
        third = cards(daemon.address)[2]["uuid"]
        with parkable(daemon.address) as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(MIB)
            session.mem_write(buffer, 0, b"weights")
            with pytest.raises(Denied, match="may not use"):
                lease.move(1)
            status, output = run_command(daemon, "move", "--from", "0")
            assert (status, f"moved to {third}" in output) == (0, True), output
            status, output = run_command(daemon, "move", "--from", "2", "--device", "1")
            assert (status, "may not use" in output) == (1, True), output
            assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
    finally:
        daemon.stop()


def test_an_idle_session_makes_room_on_another_card() -> None:
    daemon = Daemon(vram=("512MiB", "512MiB"), config=CONFIG + "moves_for_need = true\n")
    try:
        daemon.wait_until_it_answers()
        with parkable(daemon.address) as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(MIB)
            session.mem_write(buffer, 0, b"weights")
            free = [card["available_bytes"] for card in cards(daemon.address)]
            large = GpuBuilder(daemon.address).min_vram(free[0] + MIB).device("0").timeout(20)
            with large.acquire():
                wait_until(lambda: row(daemon.address, lease)["card_uuid"] != lease.card_uuid, "it is moved")
                assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
                assert row(daemon.address, lease)["park"]["phase"] == "resident"
    finally:
        daemon.stop()


def test_an_asyncio_program_moves_too(node: Daemon) -> None:
    async def program() -> tuple[str, bytes]:
        wanted = aio.GpuBuilder(node.address).min_vram(SLICE).lease_secs(60).parkable().device(0)
        async with await wanted.acquire() as lease, aio.GpuSession(lease) as session:
            buffer = await session.mem_alloc(MIB)
            await session.mem_write(buffer, 0, b"weights")
            await lease.move(1)
            return lease.card_uuid, bytes(await session.mem_read(buffer, 0, 7))

    assert asyncio.run(program()) == (cards(node.address)[1]["uuid"], b"weights")


def test_who_may_move_and_where_to(node: Daemon, lease: GpuLease) -> None:
    with pytest.raises(InvalidRequest, match="No card matches"):
        ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, "no such card"), node.address)
    with pytest.raises(InvalidRequest, match="already"):
        ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, "0"), node.address)
    with GpuBuilder(node.address).min_vram(MIB).acquire() as fixed, pytest.raises(Unsupported):
        ask(Opcode.LEASE_MOVE, LeaseMove(fixed.lease_id, "1"), node.address)


def test_a_move_without_room_leaves_the_session_in_the_host(node: Daemon, lease: GpuLease, session: GpuSession) -> None:
    buffer = session.mem_alloc(MIB)
    session.mem_write(buffer, 0, b"weights")
    room = cards(node.address)[1]["available_bytes"]
    with GpuBuilder(node.address).min_vram(room - MIB).device("1").acquire():
        with pytest.raises(Busy):
            move(node.address, lease, "1")
        assert depth(node.address, lease) == "cold"
    # With the next operation, the session returns on the card to which it was moved.
    assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
    assert row(node.address, lease)["card_uuid"] == cards(node.address)[1]["uuid"]


def test_an_operation_of_a_cold_session_without_room_is_busy_after_its_wait() -> None:
    daemon = Daemon(vram=("512MiB",), config=CONFIG + "session_timeout_s = 1\n")
    try:
        daemon.wait_until_it_answers()
        with parkable(daemon.address) as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(MIB)
            session.mem_write(buffer, 0, b"weights")
            session.sync()
            chill(daemon.address, lease)
            with GpuBuilder(daemon.address).min_vram(cards(daemon.address)[0]["available_bytes"]).acquire():
                for _ in range(2):
                    with pytest.raises(Busy, match="can't return"):
                        session.mem_read(buffer, 0, 7)
                    assert row(daemon.address, lease)["park"]["phase"] == "parked"
            assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
            chill(daemon.address, lease)
    finally:
        daemon.stop()


def test_a_new_connection_brings_a_cold_session_back(node: Daemon, lease: GpuLease) -> None:
    with GpuSession(lease) as session:
        buffer = session.mem_alloc(MIB)
        session.mem_write(buffer, 0, b"weights")
        session.keep(buffer, "model")
    chill(node.address, lease)
    with GpuSession(lease) as session:
        assert bytes(session.mem_read(session.kept("model"), 0, 7)) == b"weights"


def test_a_cold_sessions_card_is_free_to_the_byte(node: Daemon) -> None:
    before = cards(node.address)[0]["available_bytes"]
    with parkable(node.address) as lease, GpuSession(lease) as session:
        session.mem_alloc(MIB)
        session.sync()
        chill(node.address, lease)
        wait_until(lambda: cards(node.address)[0]["available_bytes"] >= before, "the card has everything back")


@pytest.mark.parametrize("end", ["revoked", "expired", "freed", "client gone"])
def test_the_end_of_a_cold_lease(node: Daemon, end: str) -> None:
    # The lease must not expire before the test lets it. On a busy host a longer one is tried.
    for seconds in (4, 20, 100) if end == "expired" else (120,):
        lease = parkable(node.address, seconds=seconds)
        with contextlib.suppress(LeaseExpired):
            session = GpuSession(lease)
            buffer = session.mem_alloc(MIB)
            session.sync()
            chill(node.address, lease)
            break
    else:
        raise AssertionError("the lease ended before it was cold")
    if end == "revoked":
        ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "maintenance"), node.address)
    if end in ("revoked", "expired"):
        wait_until(has_ended(node.address, lease), "the lease has ended")
        with pytest.raises((Revoked, LeaseExpired)):
            session.mem_read(buffer, 0, 1)
    if end == "client gone":
        session.close()
        wait_until(lambda: depth(node.address, lease) != "cold", "the end of its client is served")
    if end in ("freed", "client gone"):
        lease.free()
    wait_until(has_ended(node.address, lease), "the lease has ended")
    wait_until(lambda: cards(node.address)[0]["park_host_bytes"] == 0, "the host's memory is given back")


def test_a_session_that_stays_parked_leaves_its_worker() -> None:
    daemon = Daemon(vram=("512MiB",), config=CONFIG + "cold_park_secs = 1\n")
    try:
        daemon.wait_until_it_answers()
        with parkable(daemon.address, idle_s=0.3) as lease, GpuSession(lease) as session:
            buffer = session.mem_alloc(MIB)
            session.mem_write(buffer, 0, b"weights")
            wait_until(lambda: depth(daemon.address, lease) == "cold", "it leaves its worker")
            assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
    finally:
        daemon.stop()


def test_a_killed_worker_ends_its_lease_once_after_a_return(lasting: LastingDaemon) -> None:
    lease = parkable(lasting.address)
    session = GpuSession(lease)
    buffer, region = session.mem_alloc(MIB), lease.region(2 * MIB)
    session.sync()
    chill(lasting.address, lease)
    session.mem_read(buffer, 0, 1)
    os.kill(lasting.worker_pid(lease.lease_id), signal.SIGKILL)
    wait_until(has_ended(lasting.address, lease), "the lease has ended")
    assert region.query()["state"] == "torndown"


@pytest.mark.parametrize(
    "step", ["moved", "leaving", *(pytest.param(step, marks=pytest.mark.exhaustive) for step in ("cold", "moving"))]
)
def test_a_killed_broker_accounts_for_every_byte(lasting: LastingDaemon, step: str) -> None:
    before = cards(lasting.address)
    lease = parkable(lasting.address)
    session = GpuSession(lease)
    buffer = session.mem_alloc(MIB)
    session.mem_write(buffer, 0, b"weights")
    region = lease.region(2 * MIB)
    session.mem_write(region, 0, b"layer")
    if step == "cold":
        chill(lasting.address, lease)
    elif step == "moved":
        move(lasting.address, lease, "1")
    else:
        device = "1" if step == "moving" else None
        threading.Thread(target=lambda: suppressed(move, lasting.address, lease, device), daemon=True).start()
    lasting.restart()
    if step == "moved":
        assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
        assert bytes(session.mem_read(region, 0, 5)) == b"layer"
        session.close()
        lease.free()
    elif row(lasting.address, lease)["state"] == "active":
        # The session had not left its worker yet.
        assert bytes(session.mem_read(buffer, 0, 7)) == b"weights"
        assert bytes(session.mem_read(region, 0, 5)) == b"layer"
        lease.free()
    wait_until(has_ended(lasting.address, lease), "the lease has ended")
    assert region_has_ended(lasting.address, region)()
    for card, was in zip(cards(lasting.address), before, strict=True):
        assert card["held_bytes"] == was["held_bytes"]


def suppressed(call: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(Exception):
        call(*arguments)


def test_the_commands_park_cold_and_move_and_the_list_says_so(
    node: Daemon, lease: GpuLease, session: GpuSession
) -> None:
    env = {ADDRESS_VARIABLE: node.address}
    session.sync()
    time.sleep(0.1)
    parked = CliRunner().invoke(main, ["park", str(lease.lease_id), "--cold"], env=env)
    assert (parked.exit_code, "are in the host's memory" in parked.output) == (0, True), parked.output
    assert "cold)" in CliRunner().invoke(main, ["leases"], env=env | {"COLUMNS": "250"}).output
    moved = CliRunner().invoke(main, ["move", str(lease.lease_id), "--device", "1", "--json"], env=env)
    assert json.loads(moved.output)["card_uuid"] == cards(node.address)[1]["uuid"]
