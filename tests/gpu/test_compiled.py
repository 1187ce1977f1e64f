"""A context that is used again keeps code that it compiled from PTX: the same code, only for its tenant."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpulease.client import GpuBuilder, GpuLease, GpuSession, KernelArgs, LoadFailed, my_audience
from gpulease.client.verify.faulty_kernels import with_variable
from gpulease.daemon.drivers.cuda.jit_cache import name_of
from gpulease.protocol import Exclusivity
from gpulease.protocol.capabilities import SESSION_PERMISSIONS
from helpers.card_daemon import daemon_on
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, check_main_job
from helpers.memory_of import count_in_heap
from helpers.nvml import Cards
from helpers.secret_ways import spread
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def recycling(cards: Cards) -> Iterator[Daemon]:
    with daemon_on(cards, config='warm_contexts = 1\nrecycle = "same-tenant"\n', tcp=True) as daemon:
        yield daemon


@contextmanager
def leased(daemon: Daemon, size_bytes: int = 64 * MIB) -> Iterator[tuple[GpuLease, GpuSession, int]]:
    """Yield a lease on a context that was waiting for one, its session, and its process id."""
    counts = ("warm_contexts", "recycled_contexts")
    wait_until(lambda: any(daemon.inventory().details[0][count] for count in counts), "a context waits", 60)
    shared = daemon.builder(size_bytes).device(0).exclusivity(Exclusivity.SHARED)
    with shared.acquire() as lease, GpuSession(lease) as session:
        yield lease, session, daemon.worker_pid(lease.lease_id)


def is_kept(pid: int, ptx: bytes) -> bool:
    return count_in_heap(pid, name_of(hashlib.sha256(ptx).digest())) > 0


def storing(number: int) -> bytes:
    """Return a kernel that stores the number."""
    return spread(end=f"mov.u64 %r6, {number}; st.global.u64 [%r1], %r6; ret;")


def stored(session: GpuSession, ptx: bytes) -> int:
    out = session.mem_alloc(32)
    args = KernelArgs().push_buffer(out).push_u64(0).push_u64(0).push_u64(0).push_u64(0)
    session.launch(session.module_load(ptx), "spread", [1], [1], args)
    return int.from_bytes(session.mem_read(out, 0, 8), "little")


def test_the_next_lease_finds_the_same_kernels(recycling: Daemon) -> None:
    seen, pids, was_kept = [], set(), []
    for _ in range(3):
        with leased(recycling) as (lease, session, pid):
            was_kept.append(is_kept(pid, TRANSFORM))
            module = session.module_load(TRANSFORM)
            seen.append((dict(module.kernels), lease.query()["allocated_bytes"]))
            check_main_job(session)
            pids.add(pid)
    assert was_kept == [False, True, True]
    assert len(pids) == 1
    assert seen[0] == seen[1] == seen[2]


def test_other_ptx_is_other_code(recycling: Daemon) -> None:
    numbers, was_kept = [0x1234567, 0x7654321, 0x1234567, 0x1111111], []
    for number in numbers:
        with leased(recycling) as (_, session, pid):
            was_kept.append(is_kept(pid, storing(number)))
            assert stored(session, storing(number)) == number
    assert was_kept == [False, False, True, False]


def test_nobody_else_finds_it(recycling: Daemon) -> None:
    with leased(recycling) as (_, session, first):
        check_main_job(session)
    assert is_kept(first, TRANSFORM)
    lease = GpuBuilder(recycling.tcp_address).device(0).min_vram(64 * MIB).lease_secs(60).acquire()
    with lease, GpuSession(lease) as session:
        others = recycling.worker_pid(lease.lease_id)
        assert others != first
        assert not is_kept(others, TRANSFORM)
        check_main_job(session)


def test_what_earlier_leases_loaded_is_forgotten_before_a_stranger_is_let_in(recycling: Daemon) -> None:
    with leased(recycling) as (_, session, first):
        assert stored(session, storing(1)) == 1
    with leased(recycling) as (lease, session, pid):
        assert pid == first
        session.sync()
        assert is_kept(pid, storing(1))
        grant = lease.issue(SESSION_PERMISSIONS, my_audience(recycling.tcp_address))
        with GpuSession.attach(grant, recycling.tcp_address) as stranger:
            assert not is_kept(pid, storing(1))
            assert stored(stranger, storing(1)) == 1


def test_what_is_no_ptx_is_refused_with_the_same_words_each_time(recycling: Daemon) -> None:
    wrong, told = spread(end="add.u64 %r1, %r1, %nothing; ret;"), []
    for _ in range(2):
        with leased(recycling) as (_, session, pid):
            for _ in range(2):
                with pytest.raises(LoadFailed) as caught:
                    session.module_load(wrong)
                told.append((caught.value.failure.message, caught.value.log, caught.value.line))
            assert not is_kept(pid, wrong)
            check_main_job(session)
    assert len(set(told)) == 1
    assert told[0][1:] != ("", 0)


def test_a_module_is_charged_and_refused_as_if_it_were_new(recycling: Daemon, cards: Cards) -> None:
    fits, is_too_large = with_variable(400 * MIB), with_variable(GIB)
    with leased(recycling, 512 * MIB) as (_, session, pid):
        assert not is_kept(pid, fits)
        held = cards.process_bytes(0, pid)
        for _ in range(2):
            with pytest.raises(LoadFailed, match="bytes on the card"):
                session.module_load(is_too_large)
            assert is_kept(pid, is_too_large)
            assert cards.process_bytes(0, pid) < held + GIB // 2
            module = session.module_load(fits)
            with pytest.raises(LoadFailed, match="bytes on the card"):
                session.module_load(fits)
            assert is_kept(pid, fits)
            session.module_unload(module)
