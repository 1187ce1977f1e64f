"""Contexts that serve their tenant's next lease on a real card: to the byte, and with nothing left behind."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from gpulease.client import GpuSession
from gpulease.client.verify.kernels import count_set, fill, rule_breakers
from gpulease.client.verify.leftovers import SECRET_BYTES, _count, _pass_through
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
    used = cards.used_bytes()
    daemon = Daemon(driver="cuda", vram=("8GiB",), config='warm_contexts = 1\nrecycle = "same-tenant"\n')
    try:
        daemon.wait_until_it_answers()
        wait_until(lambda: daemon.inventory().details[0]["warm_contexts"] == 1, "the pool is full", 60)
        yield daemon
    except BaseException:
        daemon.discard()
        raise
    daemon.stop()
    cards.check_back_to(used)


def card(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.inventory().details[0])


def plain_kernels() -> bytes:
    """Those of `rule_breakers` that call nothing of the driver's: what that keeps can't be given back."""
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
            kept = _pass_through(session, secret)
            for size in SIZES:
                session.mem_write(session.mem_alloc(size), 0, (secret * (size // SECRET_BYTES + 1))[:size])
            check_main_job(session)
            assert _count(pid, secret)
            del kept
        assert is_running(pid), recycling.log()
        assert _count(pid, secret) == 0
        shown.add((pid, cards.process_bytes(0, pid)))
    assert len(shown) == 1


def test_whichever_way_a_secret_came(recycling: Daemon) -> None:
    left = {}
    for way, leave in WAYS.items():
        # One that was not made ahead serves nobody again.
        wait_until(lambda: any(card(recycling)[f"{kind}_contexts"] for kind in ("warm", "recycled")), "one waits", 60)
        with recycling.builder(64 * MIB).device(0).acquire() as lease, GpuSession(lease) as session:
            pid = recycling.worker_pid(lease.lease_id)
            secret = leave(session, secrets.token_bytes(SECRET_BYTES))
        left[way] = _count(pid, secret) if is_running(pid) else -1
    assert left == dict.fromkeys(WAYS, 0), recycling.log()


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
