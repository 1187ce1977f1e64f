"""LEASE_REVOKE: the tenant's next operation raises Revoked, whatever it is doing, and the operator gets the outcome."""

import re
import threading
import time
from functools import partial

import pytest

from gpulease.client import GpuLeaseError, GpuSession, KernelArgs, Revoked
from gpulease.protocol import RevokeOutcome
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, Neighbour, check_main_job, start_endless
from helpers.waiting import wait_until

AT_ONCE_S = 60.0
"""Seconds. A limit that shows that nothing waited for the lease's end (60 s) or for the kernel's end (never)."""


def test_outcome_of_a_live_lease(daemon: Daemon) -> None:
    before = daemon.available_bytes()
    lease = daemon.builder(1 << 30).acquire()
    session = GpuSession(lease)
    check_main_job(session)
    assert daemon.revoke(lease.lease_id, "the card is needed") == RevokeOutcome.TORN_DOWN
    # When the outcome is reported, the bytes are free and the worker has ended.
    assert daemon.available_bytes() == before
    assert not daemon.has_worker(lease.lease_id)
    report = daemon.query(lease.lease_id)
    assert (report["state"], report["cause"]) == ("torndown", "revoked")
    assert "the card is needed" in report["reason"]
    with pytest.raises(Revoked) as caught:
        session.sync()
    assert caught.value.host_code == -6


@pytest.mark.parametrize("shared_memory", [True, False], ids=["ring", "socket"])
def test_the_session_says_why(daemon: Daemon, shared_memory: bool) -> None:
    waiting, busy = (daemon.builder().acquire() for _ in range(2))
    with (
        GpuSession(waiting, shared_memory=shared_memory) as waits,
        GpuSession(busy, shared_memory=shared_memory) as works,
    ):
        kept = start_endless(waits)
        said = "the card is needed \x1b[31m" + "ö" * 400
        told = "the card is needed \N{REPLACEMENT CHARACTER}[31mööö"
        timer = threading.Timer(0.1, daemon.revoke, [waiting.lease_id, said])
        timer.start()
        with pytest.raises(Revoked, match=f"the lease was revoked: {re.escape(told)}") as caught:
            waits.sync()
        assert len(str(caught.value)) < 700
        timer.join()
        module = works.module_load(TRANSFORM)
        daemon.revoke(busy.lease_id, "for two reasons")
        for _ in range(2):
            with pytest.raises(Revoked, match="for two reasons"):
                works.module_unload(module)
    del kept


def test_outcomes(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    assert daemon.revoke(0xDEAD) == RevokeOutcome.NOT_FOUND
    with pytest.raises(Revoked):
        lease.free()


def test_revoking_what_is_over_changes_nothing(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    lease.free()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    assert daemon.query(lease.lease_id)["cause"] == "freed"


@pytest.mark.parametrize("operation", ["mem_alloc", "mem_write", "mem_read", "module_load", "sync"])
def test_the_next_operation_says_revoked(daemon: Daemon, operation: str) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    buffer = session.mem_alloc(16)
    operations = {
        "mem_alloc": lambda: session.mem_alloc(16),
        "mem_write": lambda: session.mem_write(buffer, 0, bytes(16)),
        "mem_read": lambda: session.mem_read(buffer, 0, 16),
        "module_load": lambda: session.module_load(b".version 7.0"),
        "sync": session.sync,
    }
    daemon.revoke(lease.lease_id)
    for _ in range(2):
        with pytest.raises(Revoked):
            operations[operation]()


def test_a_launch_says_revoked_soon(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    module, flag = start_endless(session)
    args = KernelArgs().push_buffer(flag)
    daemon.revoke(lease.lease_id)

    def is_refused() -> bool:
        try:
            session.launch(module, "endless", [1], [1], args)
        except Revoked:
            return True
        return False

    wait_until(is_refused, "a launch is refused")


@pytest.mark.parametrize("operation", ["launch", "sync"])
def test_leaving_the_block_does_not_raise_again_how_the_lease_ended(daemon: Daemon, operation: str) -> None:
    """The flag that the broker sets refuses the operation, before the client notices the session's end."""
    lease = daemon.builder().acquire()
    with GpuSession(lease) as session:
        module, flag = start_endless(session)
        args = KernelArgs().push_buffer(flag)
        daemon.revoke(lease.lease_id)
        wait_until(lambda: lease.revoked, "the lease's word says so")
        launch = partial(session.launch, module, "endless", [1], [1], args)
        refused = launch if operation == "launch" else session.sync
        with pytest.raises(Revoked):
            refused()


@pytest.mark.parametrize("waits_in", ["sync", "mem_read"])
def test_while_the_tenant_waits_for_an_endless_kernel(daemon: Daemon, waits_in: str) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    # A process asks for an image's parameter types once, so that `start_endless` is three operations from here on.
    session.module_load(FAULTS)
    # What the client has queued is served, and counted, before a sync returns.
    session.sync()
    before = lease.query()["operations"]
    _, flag = start_endless(session)
    errors: list[GpuLeaseError] = []

    def wait() -> None:
        try:
            if waits_in == "sync":
                session.sync()
            else:
                session.mem_read(flag, 0, 4)
        except GpuLeaseError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    # The fourth is the one that waits, before which the client sends everything queued.
    wait_until(lambda: lease.query()["operations"] == before + 4, "the worker waits for the kernel")
    started = time.monotonic()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    waiting.join(AT_ONCE_S)
    assert not waiting.is_alive()
    assert time.monotonic() - started < AT_ONCE_S
    assert [type(error) for error in errors] == [Revoked]


def test_while_a_free_waits_behind_an_endless_kernel(daemon: Daemon) -> None:
    """A driver may wait when it frees memory, as cudaFree does. The lease's end must not."""
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    # A buffer larger than those that the client holds for the next allocation, so that the worker frees it.
    freed = session.mem_alloc(512 << 10)
    kept = start_endless(session)
    session.mem_free(freed)
    assert lease.query()["state"] == "active"
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    with pytest.raises(Revoked):
        session.mem_alloc(4)
    del kept


def test_an_idle_tenant_is_told(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    session = GpuSession(lease)
    daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.mem_alloc(4)
    assert not lease.is_alive or lease.query()["cause"] == "revoked"


def test_the_neighbour_goes_on(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        for _ in range(5):
            victim = daemon.builder().acquire()
            doomed = GpuSession(victim)
            kept = start_endless(doomed)
            assert daemon.revoke(victim.lease_id) == RevokeOutcome.TORN_DOWN
            neighbour.check()
            doomed.close()
            del kept


def test_two_operators_at_once(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    kept = GpuSession(lease)
    endless = start_endless(kept)
    outcomes: list[int] = []
    operators = [threading.Thread(target=lambda: outcomes.append(daemon.revoke(lease.lease_id))) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()
    assert outcomes == [RevokeOutcome.TORN_DOWN] * 2
    del endless
