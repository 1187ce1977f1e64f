"""Workers that were taken over, behind a real zygote's sandbox: they can't write what ends their leases."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpulease.daemon.contract.control_page import PageState, state_of
from gpulease.daemon.host.ipc import receive_message
from gpulease.daemon.sandbox.measures import Measure, SandboxSettings
from gpulease.protocol.opcodes import Status
from helpers.processes import is_running
from helpers.waiting import wait_until

from .test_worker_table import Broker, found

REFUSED = {
    "map it for writing": "EACCES",
    "make the mapping writable": "EACCES",
    "punch the mapping": "EACCES",
    "write": "EBADF",
    "write at the deadline": "EBADF",
    "write several": "EBADF",
    "empty it": "EINVAL",
    "enlarge it": "EINVAL",
    "punch it": "EBADF",
    "change how it is open": "EBADF",
    "a writable descriptor of it": "EBADF",
    "open it by its number": "EACCES",
    "open it by its number, to write alone": "EACCES",
    "open it by its number, emptied": "EACCES",
    "open it by the thread's number": "EACCES",
    "open it by /dev/fd": "EACCES",
    "change its mode": "EPERM",
    "change its mode by its name": "EPERM",
    "change its owner": "EPERM",
    "truncate it by its name": "EACCES",
    "seal it": "EPERM",
    "seal the claims": "EPERM",
    "empty the claims": "EPERM",
}
BY_THE_FILTER = {"write several": "EPERM", "truncate it by its name": "EPERM"}
"""Calls that it does not let through at all."""


@pytest.fixture
def hostile(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Broker]:
    body, without = request.param
    before = f"import helpers.hostile_worker; z.run_lease_worker = helpers.hostile_worker.{body}"
    broker = Broker(tmp_path, sandbox=SandboxSettings(without=frozenset(without)), before=before)
    try:
        yield broker
    finally:
        broker.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hostile", "rests_on"),
    [
        (("live", ()), {Measure.USER, Measure.SYSCALLS}),
        (("live", (Measure.SYSCALLS,)), {Measure.USER}),
        (("live", (Measure.USER,)), {Measure.SYSCALLS}),
    ],
    ids=["the whole sandbox", "by being another user", "by the filter"],
    indirect=["hostile"],
)
def test_a_worker_that_was_taken_over_ends_when_its_broker_said(hostile: Broker, rests_on: set[Measure]) -> None:
    if not rests_on & hostile.measures:
        pytest.skip(f"this host has none of {rests_on}")
    refused = REFUSED | (BY_THE_FILTER if Measure.SYSCALLS in hostile.measures else {})
    pid, channel, page = hostile.bear(1)
    with channel, closing(page):
        deadline_ns = time.monotonic_ns() + 1_500_000_000
        page.set_deadline(deadline_ns, 1)
        channel.settimeout(60)
        said, _ = receive_message(channel)
        assert said["outcomes"] == refused
        hostile.die()
        with found(hostile) as (_, workers):
            fds = workers[1].fds
            assert fds is not None
            assert state_of(fds[1])[1:3] == (deadline_ns, 1)
        wait_until(lambda: not is_running(pid), "it ends, whatever it claims")
        assert time.monotonic_ns() >= deadline_ns
        assert state_of(page.fds.lease) == PageState(Status.LEASE_EXPIRED, deadline_ns, 1, has_session=False)


@pytest.mark.parametrize("hostile", [("store", ())], indirect=True)
def test_a_worker_that_stores_to_its_leases_page_dies_of_it(hostile: Broker) -> None:
    pid, channel, page = hostile.bear(1)
    with channel, closing(page):
        message, _ = receive_message(hostile.channel)
        assert message["reason"] == "was killed by SIGSEGV"
        assert not is_running(pid)
        assert state_of(page.fds.lease) == PageState(None, 0, 0, has_session=False)
