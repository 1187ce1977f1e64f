"""Contexts that serve their tenant's next lease on a real card: they use no more bytes, and nothing is left in them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulease.client import GpuSession, KernelArgs
from gpulease.client.verify.claims import SECRET_BYTES, send_and_fetch
from gpulease.client.verify.faulty_kernels import count_set, fill, rule_breakers
from gpulease.client.verify.memory_search import PAGE_BYTES, count_in_process, count_in_span
from helpers.card_daemon import daemon_on
from helpers.daemon import Daemon
from helpers.kernels import check_main_job, start_endless
from helpers.nvml import Cards
from helpers.processes import is_running
from helpers.secret_ways import WAYS
from helpers.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = (32, 100, 1000, 5000, 70_000, 300_000, 2 * MIB)


@pytest.fixture
def recycling(cards: Cards) -> Iterator[Daemon]:
    with daemon_on(cards, config='warm_contexts = 1\nrecycle = "same-tenant"\n') as daemon:
        wait_until(lambda: daemon.inventory().details[0]["warm_contexts"] == 1, "the pool is full", 60)
        yield daemon


def card(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.inventory().details[0])


def plain_kernels() -> bytes:
    """Return the kernels of `rule_breakers` that call no driver function.

    The driver keeps memory for such calls, which can't be freed.
    """
    text = rule_breakers().decode()
    head = text[text.index(".version") : text.index(".extern")]
    return (head + text[text.index(".visible .entry fill(") : text.index(".visible .entry stray(")]).encode()


def test_nothing_is_left_and_the_card_shows_it(recycling: Daemon, cards: Cards) -> None:
    shown = set()
    for _ in range(4):
        secret = secrets.token_bytes(SECRET_BYTES)
        with recycling.builder(256 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
            pid = recycling.worker_pid(lease.lease_id)
            module = session.module_load(plain_kernels())
            everything = session.mem_alloc(200 * MIB)
            assert count_set(session, module, everything, 50 * MIB) == 0
            fill(session, module, everything, 50 * MIB, 0xA5A5A5A5)
            kept = send_and_fetch(session, secret)
            for size in SIZES:
                session.mem_write(session.mem_alloc(size), 0, (secret * (size // SECRET_BYTES + 1))[:size])
            check_main_job(session)
            assert count_in_process(pid, secret)
            del kept
        assert is_running(pid), recycling.log()
        assert count_in_process(pid, secret) == 0
        shown.add((pid, cards.process_bytes(0, pid)))
    assert len(shown) == 1


def test_whichever_way_a_secret_came(recycling: Daemon) -> None:
    left = {}
    for way, leave in WAYS.items():
        # A context that was not made ahead is not used again, so wait for one that was.
        wait_until(lambda: any(card(recycling)[f"{kind}_contexts"] for kind in ("warm", "recycled")), "one waits", 60)
        with recycling.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
            pid = recycling.worker_pid(lease.lease_id)
            secret = leave(session, secrets.token_bytes(SECRET_BYTES))
        left[way] = count_in_process(pid, secret) if is_running(pid) else -1
    assert left == dict.fromkeys(WAYS, 0), recycling.log()


def staged(pid: int, secret: bytes) -> list[int]:
    """Return the addresses of the pages that contain a secret, in memory shared with the card (proc_pid_maps(5))."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/zero" in line:
                start, stop = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
                found += [
                    at
                    for at in range(start, stop, PAGE_BYTES)
                    if count_in_span(memory.fileno(), at, at + PAGE_BYTES, secret)
                ]
    return found


def count_at(session: GpuSession, address: int) -> int:
    """Return how many words of a page of host memory are not 0, as a kernel sees them."""
    module, count = session.module_load(plain_kernels()), session.mem_alloc(4)
    args = KernelArgs().push_u64(address).push_u64(PAGE_BYTES // 4).push_buffer(count)
    session.launch(module, "count_set", [4], [256], args)
    return int.from_bytes(session.mem_read(count, 0, 4), "little")


def test_no_kernel_of_the_next_lease_reads_what_the_driver_kept(recycling: Daemon) -> None:
    secret = secrets.token_bytes(SECRET_BYTES)
    data = secret * 1800
    with recycling.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        pid = recycling.worker_pid(lease.lease_id)
        buffer = session.mem_alloc(len(data))
        session.mem_write(buffer, 0, data)
        assert bytes(session.mem_read(buffer, 0, len(data))) == data
        pages = staged(pid, secret)
        assert pages, "the driver has another way by now: what is searched for here proves nothing"
        assert count_at(session, pages[0]) > 0
    with recycling.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
        assert recycling.worker_pid(lease.lease_id) == pid
        assert staged(pid, secret) == []
        assert [count_at(session, page) for page in pages] == [0] * len(pages)


ENDS: dict[str, Callable[[GpuSession], object]] = {
    "a kernel that goes on": start_endless,
    "a stream": lambda session: session.stream(),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_can_not_be_undone_ends_as_ever(recycling: Daemon, what: str) -> None:
    lease = recycling.builder(16 * MIB).device(0).acquire()
    pid = recycling.worker_pid(lease.lease_id)
    with GpuSession(lease) as session:
        kept = ENDS[what](session)
        wait_until(lambda: "stream" in what or lease.query()["launches"] == 1, "it was launched")
        lease.free()
    del kept
    assert not is_running(pid)
