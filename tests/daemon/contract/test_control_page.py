import fcntl
import mmap
import os
import time
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.control_page import (
    MAX_STAY_BYTES,
    PAGE_BYTES,
    BrokerPage,
    Counter,
    PageFds,
    PageState,
    TimeClaims,
    TimeLimits,
    WorkerPage,
    flip_word,
    for_reading,
    for_worker,
    latency_memory,
    sealed_memory,
    show_why_stays,
    state_of,
)
from gpulease.daemon.leases.model import Cause
from gpulease.protocol.opcodes import Status

FAR = 1 << 62


@pytest.fixture
def broker() -> Iterator[BrokerPage]:
    page = BrokerPage()
    yield page
    page.close()


@pytest.fixture
def worker(broker: BrokerPage) -> Iterator[WorkerPage]:
    page = WorkerPage(broker.fds)
    yield page
    page.close()


def test_a_lease_without_a_deadline_has_none_left(worker: WorkerPage) -> None:
    assert worker.refusal() is Status.LEASE_EXPIRED


def test_a_live_lease(broker: BrokerPage, worker: WorkerPage) -> None:
    broker.set_deadline(FAR, 1)
    assert worker.refusal() is None


def test_a_deadline_that_passes_refuses_without_the_broker(broker: BrokerPage, worker: WorkerPage) -> None:
    deadline = time.monotonic_ns() + 20_000_000
    broker.set_deadline(deadline, 1)
    while worker.refusal() is None:
        assert time.monotonic_ns() < deadline + 60_000_000_000
    assert time.monotonic_ns() >= deadline
    assert worker.refusal() is Status.LEASE_EXPIRED


def test_a_renewal_moves_it(broker: BrokerPage, worker: WorkerPage) -> None:
    broker.set_deadline(time.monotonic_ns() - 1, 1)
    assert worker.refusal() is Status.LEASE_EXPIRED
    broker.set_deadline(FAR, 2)
    assert worker.refusal() is None


@pytest.mark.parametrize(
    "status", [Status.REVOKED, Status.LEASE_EXPIRED, Status.LEASE_FREED, Status.SESSION_FAILED, Status.BUSY]
)
def test_the_word_comes_before_the_deadline(broker: BrokerPage, worker: WorkerPage, status: Status) -> None:
    broker.set_deadline(FAR, 1)
    broker.refuse(status)
    assert worker.refusal() is status
    broker.set_deadline(0, 2)
    assert worker.refusal() is status


def test_counters_travel_the_other_way(broker: BrokerPage, worker: WorkerPage) -> None:
    for counter in Counter:
        assert broker.counter(counter) == 0
        worker.counters[counter] = (1 << 63) + counter
    for counter in Counter:
        assert broker.counter(counter) == (1 << 63) + counter


def test_limits_of_time_reach_the_worker_and_change_nothing_else(broker: BrokerPage, worker: WorkerPage) -> None:
    assert worker.time_limits == TimeLimits()
    broker.set_deadline(FAR, 7)
    broker.set_membership_deadline(FAR + 1)
    broker.set_time_limits(TimeLimits(1 << 60, 2, 0b1000_0001, 4, 5))
    assert worker.time_limits == TimeLimits(1 << 60, 2, 0b1000_0001, 4, 5)
    assert state_of(broker.fds.lease) == PageState(None, FAR, 7, has_session=False, membership_deadline_boot_ns=FAR + 1)


def test_limits_of_time_survive_the_broker(broker: BrokerPage, worker: WorkerPage) -> None:
    broker.set_time_limits(TimeLimits(1, 2, 3, 4, 5))
    taken = BrokerPage(PageFds(*map(os.dup, broker.fds)))
    assert worker.time_limits == TimeLimits(1, 2, 3, 4, 5)
    taken.close()


def test_an_older_worker_claims_no_time(broker: BrokerPage, worker: WorkerPage) -> None:
    worker.counters[Counter.BUSY_NS] = 5
    assert broker.time_claims() is None


def test_claims_of_time(broker: BrokerPage, worker: WorkerPage) -> None:
    worker.keep_time()
    assert broker.time_claims() == TimeClaims(0, 0, 0, 0)
    worker.counters[Counter.BUSY_NS] = 100
    worker.counters[Counter.BUSY_SINCE_NS] = 1000
    worker.counters[Counter.HELD_BACK_NS] = 7
    claims = broker.time_claims()
    assert claims == TimeClaims(100, 1000, 7, 0)
    assert claims.busy_until(1050) == 150
    assert claims.busy_until(900) == 100, "a begin in the future adds nothing"
    assert claims.held_back_until(1050) == 7


def test_only_its_own_worker_writes_a_latency_word() -> None:
    own = latency_memory()
    other = for_reading(own)
    try:
        with mmap.mmap(own, PAGE_BYTES) as writable, mmap.mmap(other, PAGE_BYTES, prot=mmap.PROT_READ) as readable:
            writable[:8] = (77).to_bytes(8, "little")
            assert readable[:8] == (77).to_bytes(8, "little")
        with pytest.raises(PermissionError):
            mmap.mmap(other, PAGE_BYTES)
    finally:
        os.close(own)
        os.close(other)


def test_the_worker_can_not_write_the_brokers_page(worker: WorkerPage) -> None:
    with pytest.raises(TypeError):
        worker._state_map[0] = 1
    with pytest.raises(TypeError):
        worker._state[0] = 1


@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1, 2 * PAGE_BYTES])
def test_nobody_can_change_their_size(broker: BrokerPage, worker: WorkerPage, size: int) -> None:
    for fd in broker.fds:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    broker.set_deadline(FAR, 1)
    assert worker.refusal() is None


def test_each_side_has_a_page_of_its_own(broker: BrokerPage, worker: WorkerPage) -> None:
    assert [os.fstat(fd).st_size for fd in broker.fds] == [mmap.PAGESIZE] * 2
    for counter in range(PAGE_BYTES // 8):
        worker.counters[counter] = 2**64 - 1
    broker.set_deadline(FAR, 1)
    assert worker.refusal() is None
    assert state_of(broker.fds.lease) == PageState(None, FAR, 1, has_session=False)


def test_the_broker_can_not_write_the_claims(broker: BrokerPage) -> None:
    with pytest.raises(TypeError):
        broker._claims[0] = 1


def test_the_views_do_without_the_descriptors(broker: BrokerPage, worker: WorkerPage) -> None:
    kept = PageFds(*map(os.dup, broker.fds))
    broker.close_fds()
    broker.set_deadline(FAR, 7)
    worker.counters[Counter.LAUNCHES] = 5
    # Another broker's, which has what this one wrote.
    taken = BrokerPage(kept)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept.lease)
    taken.set_deadline(FAR + 1, 8)
    assert taken.counter(Counter.LAUNCHES) == broker.counter(Counter.LAUNCHES) == 5
    taken.refuse(Status.REVOKED)
    assert worker.refusal() is Status.REVOKED
    taken.close()


def test_the_next_broker_reads_whether_the_session_was_opened(broker: BrokerPage) -> None:
    kept = PageFds(*map(os.dup, broker.fds))
    lease_fd = os.dup(kept.lease)
    try:
        assert not state_of(lease_fd).has_session
        taken = BrokerPage(kept)
        assert not state_of(lease_fd).has_session, "taking it over says nothing"
        taken.open_session()
        assert state_of(lease_fd).has_session
        taken.close()
    finally:
        os.close(lease_fd)


def test_the_next_broker_reads_why_it_ended(broker: BrokerPage) -> None:
    assert max(len(cause.value) for cause in Cause) <= 32, "it is cut there"
    broker.refuse(Status.LEASE_EXPIRED, cause=Cause.ORPHANED.value)
    assert state_of(broker.fds.lease) == PageState(Status.LEASE_EXPIRED, 0, 0, has_session=False, cause="orphaned")
    broker.refuse(Status.LEASE_EXPIRED, cause=Cause.FREED.value)
    assert state_of(broker.fds.lease).cause == "freed"


def test_a_page_of_a_broker_that_did_not_say_may_have_been_opened() -> None:
    empty = sealed_memory("gpulease-lease", PAGE_BYTES)
    assert state_of(empty).has_session
    os.close(empty)


def test_what_a_worker_is_given_of_the_leases_page_is_to_be_read(broker: BrokerPage) -> None:
    broker.set_deadline(FAR, 1)
    fds = for_worker(PageFds(*map(os.dup, broker.fds)))
    try:
        assert fcntl.fcntl(fds.lease, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert os.fstat(fds.lease).st_mode & 0o777 == 0o400
        assert state_of(fds.lease) == PageState(None, FAR, 1, has_session=False)
        view = WorkerPage(fds)
        assert view.refusal() is None
        # What was open before, with a broker or a zygote, writes on.
        flip_word(broker.fds.lease, Status.SESSION_FAILED)
        assert view.refusal() is Status.SESSION_FAILED
        view.close()
    finally:
        for fd in fds:
            os.close(fd)


def test_a_worker_shows_why_its_session_stays_and_whatever_it_writes_is_read_in_bounds(
    broker: BrokerPage, worker: WorkerPage
) -> None:
    assert broker.why_stays() == ""
    worker.show_connection(1, 7)
    for reason in ("a module calls malloc", "short", "", "\u00e9" * MAX_STAY_BYTES):
        show_why_stays(worker.counters, reason)
        assert broker.why_stays() == reason[: MAX_STAY_BYTES // 2 if reason.startswith("\u00e9") else None]
    assert [shown.pid for shown in broker.connections()] == [7]
    # A length that no worker of ours writes.
    worker.counters[128] = FAR
    assert len(broker.why_stays()) <= MAX_STAY_BYTES
