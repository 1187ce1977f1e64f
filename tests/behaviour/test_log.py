"""A lease can be followed by its id through a real daemon's log, however it ends. The log contains no secrets."""

import base64
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from gpulease.client import CapacityExceeded, GpuLeaseError, GpuSession
from gpulease.client.sync.lease import my_audience
from gpulease.protocol.capabilities import SESSION_PERMISSIONS
from helpers.daemon import Daemon, running
from helpers.lasting import LastingDaemon
from helpers.log_story import Record, records_of, story_of
from helpers.waiting import wait_until

BEGIN = ["lease.requested", "lease.placed", "worker.ready", "lease.granted", "session.attached"]
END = ["lease.ending", "worker.exited", "lease.reclaimed"]


@pytest.fixture(scope="module")
def logging_daemon() -> Iterator[Daemon]:
    with running(Daemon(log_format="json")) as daemon:
        yield daemon


def whole_story(daemon: Daemon, lease_id: int) -> list[Record]:
    """Wait until the log says that the lease's memory is proved free. Returns the lease's records."""

    def is_told() -> list[Record]:
        story = story_of(daemon.log().rpartition("\n")[0], lease_id)
        return story if "lease.reclaimed" in names(story) else []

    story = wait_until(is_told, "the story is told to its end", seen=daemon.log)
    # An operator's action is logged when it is complete, and requests after the end at any time. So leave these out.
    return [record for record in story if record["event"] not in ("operator.acted", "request.denied")]


def names(story: list[Record]) -> list[str]:
    return [record["event"] for record in story]


def kill_worker(daemon: Daemon, lease_id: int) -> None:
    os.kill(daemon.worker_pid(lease_id), signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cause", "end"),
    [
        ("freed", lambda daemon, lease: lease.free()),
        ("expired", lambda daemon, lease: None),
        ("revoked", lambda daemon, lease: daemon.revoke(lease.lease_id, "two\nwords")),
        ("worker_died", lambda daemon, lease: kill_worker(daemon, lease.lease_id)),
    ],
    ids=["freed", "expired", "revoked", "worker killed"],
)
def test_a_lease_from_its_request_to_its_end(
    logging_daemon: Daemon, cause: str, end: Callable[[Daemon, object], None]
) -> None:
    daemon = logging_daemon
    seconds = 0.5 if cause == "expired" else 60
    with daemon.builder(seconds=seconds).acquire() as lease, GpuSession(lease) as session:
        session.sync()
        worker = daemon.worker_pid(lease.lease_id)
        end(daemon, lease)
        story = whole_story(daemon, lease.lease_id)
        with pytest.raises(GpuLeaseError):
            lease.renew(1)
    # If the daemon did not kill the worker, the log begins with the worker's end.
    expected = ["worker.died", END[0], END[2]] if cause == "worker_died" else END
    assert names(story) == BEGIN + expected
    by_name = {record["event"]: record for record in story}
    assert by_name["lease.reclaimed"]["cause"] == by_name["lease.ending"]["cause"] == cause
    assert 0 < by_name["lease.reclaimed"]["reclaim_ms"] < 30_000 or cause == "worker_died"
    assert {record["worker_pid"] for record in story if "worker_pid" in record} == {worker}
    assert {record["tenant"] for record in story if "tenant" in record} == {f"uid:{os.getuid()}"}
    assert [record["monotonic_ns"] for record in story] == sorted(record["monotonic_ns"] for record in story)
    assert by_name["lease.granted"]["generation"] == 1
    end_of_worker = next(record for record in story if record["event"] in ("worker.exited", "worker.died"))
    told = ("warning", "was killed by SIGKILL") if cause == "worker_died" else ("info", "was ended by the daemon")
    assert (end_of_worker["level"], end_of_worker["reason"]) == told
    assert [record["level"] for record in story if record is not end_of_worker] == ["info"] * (len(story) - 1)
    assert ("late_ms" in by_name["lease.ending"]) == (cause == "expired")


def test_a_renewed_lease_and_one_that_waits(logging_daemon: Daemon) -> None:
    daemon = logging_daemon
    with daemon.builder(6 << 30).acquire() as first:
        with pytest.raises(CapacityExceeded):
            daemon.builder().timeout(0.3).acquire()
        first.renew(2)
        first.renew(61)
        first.renew(60)
    story = whole_story(daemon, first.lease_id)
    assert [record["generation"] for record in story if record["event"] == "lease.renewed"] == [2, 3, 4]
    (waited,) = [record for record in records_of(daemon.log()) if record["event"] == "lease.queued"]
    refused = story_of(daemon.log(), int(waited["lease_id"], 16))
    assert names(refused) == ["lease.requested", "lease.queued", "request.denied"]
    assert refused[-1]["denial"] == "capacity_exceeded"


def test_who_listens_is_warned(logging_daemon: Daemon) -> None:
    with logging_daemon.builder(seconds=1).acquire() as lease, contextlib.suppress(GpuLeaseError):
        assert [event.phase_text for event in lease.events()][-1] == "ended"
    assert "lease.warned" in names(whole_story(logging_daemon, lease.lease_id))


def test_no_token_is_logged(logging_daemon: Daemon) -> None:
    daemon = logging_daemon
    with daemon.builder().acquire() as lease:
        token = lease.issue(SESSION_PERMISSIONS, my_audience(daemon.address), 30).token
        with GpuSession.attach(token, daemon.address) as session:
            session.sync()
        with pytest.raises(GpuLeaseError):
            GpuSession.attach(token, daemon.address)
        lease.revoke_token(token)
    story = whole_story(daemon, lease.lease_id)
    issued, revoked = [record for record in story if record["event"].startswith("token.")]
    assert [issued["event"], revoked["event"]] == ["token.issued", "token.revoked"]
    for name in ("tenant", "by", "nonce"):
        assert issued[name] == revoked[name] != ""
    log = daemon.log()
    for secret in (token.hex(), base64.b64encode(token).decode(), base64.urlsafe_b64encode(token).decode()):
        assert secret[20:40] not in log
    assert repr(token)[10:40] not in log


@pytest.mark.exhaustive
def test_a_killed_broker_and_the_one_that_adopts(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting(log_format="json")
    with lasting.now.builder().acquire() as lease, GpuSession(lease) as session:
        session.sync()
        before = lasting.now
        # The last records of a killed broker may be lost with it, so wait for them.
        wait_until(lambda: names(story_of(before.log(), lease.lease_id)) == BEGIN, "all is told", seen=before.log)
        lasting.restart()
        session.sync()
        lease.renew(30)
        lease.free()
        after = whole_story(lasting.now, lease.lease_id)
        pid = {record["worker_pid"] for record in after if "worker_pid" in record}
    told_before = story_of(before.log(), lease.lease_id)
    assert names(told_before) == BEGIN
    assert names(after) == ["lease.adopted", "lease.renewed", *END]
    assert pid == {told_before[2]["worker_pid"]}


def test_people_are_told_the_same(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.builder().acquire() as lease:
        pass
    wait_until(lambda: "memory proved free" in daemon.log(), "it is told", seen=daemon.log)
    (line,) = [line for line in daemon.log().splitlines() if " lease granted " in line]
    assert f"lease_id={lease.lease_id:032x} tenant=uid:{os.getuid()} " in line
    assert not any(line.startswith("{") for line in daemon.log().splitlines())


def test_a_start_that_fails_is_a_record() -> None:
    daemon = Daemon(log_format="json", config="[limits]\nmax_leases = 0\n")
    try:
        assert daemon.wait_for_exit() == 78
        record = json.loads(daemon.log().splitlines()[-1])
        assert (record["event"], record["level"], record["status"]) == ("daemon.failed", "error", 78)
        assert "max_leases" in record["message"]
    finally:
        daemon.discard()
