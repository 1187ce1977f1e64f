"""The host's wall clock is set by hours while leases live. No lease, renewal, token or log may depend on it."""

import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpulease.client import (
    Denied,
    GpuExclusivityClass,
    GpuLeaseError,
    GpuSession,
    LeaseExpired,
    Permission,
    my_audience,
)
from gpulease.protocol import EndOfStream, Goodbye
from gpulease.protocol.time_units import US_PER_S
from helpers.audit_log import check_whole, config, records, stop, usage
from helpers.daemon import TESTS, Daemon
from helpers.kernels import check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.remote import Pki
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

SHORT_S = (1.5, 8.0, 40.0)
LATE_S = 60.0
"""Seconds. This is far more than an end is ever late, and far less than any step of the clock here."""


class WallClock:
    """The wall clock of the daemons that are started from now on, and of their zygotes and workers."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._path = path
        self.set(timedelta())
        folders = [str(TESTS / "helpers" / "stepped_clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        patch.setenv("GPULEASE_TEST_CLOCK", str(path))

    def set(self, off: timedelta) -> None:
        """Set the clock's error. It is one store, so a reader gets either the old or the new value."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("=q", int(off.total_seconds()) * 10**9))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(tmp_path / "clock", monkeypatch)


@pytest.mark.parametrize("off", [timedelta(hours=-26), timedelta(hours=26)], ids=["backwards", "forwards"])
def test_a_clock_that_is_set(
    start_daemon: Callable[..., Daemon], tmp_path: Path, clock: WallClock, off: timedelta
) -> None:
    folder = tmp_path / "log"
    settings = f'state = "{tmp_path / "state"}"\n' + config(folder, required=True)
    daemon = start_daemon(config=settings, tcp=True)
    guest = my_audience(daemon.tcp_address)
    with daemon.builder(seconds=600).exclusivity(GpuExclusivityClass.SHARED).acquire() as lease:
        session = GpuSession(lease)
        good = lease.issue(Permission.MEM_READ, guest, 300).token
        # A lease must still live when the clock is set. On a busy host it may have expired, so a longer one is tried.
        for short_s in SHORT_S:
            short = lease.issue(Permission.MEM_READ, guest, short_s).token
            asked_s = time.monotonic()
            ends = daemon.builder(seconds=short_s).acquire()
            with suppress(LeaseExpired):
                ending = GpuSession(ends)
                kept = start_endless(ending)
                break
        else:
            raise AssertionError("the lease ended before its kernel ran")
        clock.set(off)
        shown = lease.issue(Permission.MEM_READ, guest, 30).expires_at_unix_secs
        assert abs(shown - 30 - time.time() - off.total_seconds()) < LATE_S, "what is shown is the new clock's"
        # Nothing ends early,
        GpuSession.attach(good, daemon.tcp_address).close()
        check_main_job(session)
        assert daemon.query(ends.lease_id)["state"] == "active" or time.monotonic() > asked_s + short_s
        # and nothing ends late.
        with pytest.raises(LeaseExpired):
            ending.sync()
        assert 0 <= time.monotonic() - asked_s - short_s < LATE_S
        daemon.wait_for_end(ends.lease_id)
        with pytest.raises(Denied, match="expired"):
            GpuSession.attach(short, daemon.tcp_address)
        lease.renew(900)
        assert 800_000 < daemon.query(lease.lease_id)["remaining_ms"] <= 900_000
        check_main_job(session)
        session.close()
        del kept
    stop(daemon)
    check_audit_log(folder, off)
    # Set the clock right. The next daemon continues the log's chain, and leases that ended are still ended.
    clock.set(timedelta())
    again = start_daemon(config=settings)
    assert again.query(ends.lease_id)["state"] == "torndown"
    with again.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    stop(again)
    check_whole(folder)


def check_audit_log(folder: Path, off: timedelta) -> None:
    """Check that the log verifies, that it has the clock's times, and that it counts the seconds that passed."""
    check_whole(folder)
    told = [datetime.strptime(record["at"], "%Y-%m-%dT%H:%M:%S.%f%z") for record in records(folder)]
    now = datetime.now(UTC)
    assert abs(told[0] - now) < timedelta(minutes=5)
    assert abs(told[-1] - now - off) < timedelta(minutes=5)
    (used,) = usage(folder).values()
    assert used["leases"] >= 2
    assert 2 * SHORT_S[0] * US_PER_S < used["lease_us"] < 600 * US_PER_S


def test_a_clock_that_is_set_while_no_daemon_is_there(lasting: LastingDaemon, clock: WallClock) -> None:
    with lasting.now.builder(seconds=600).acquire() as lease, GpuSession(lease) as session:
        asked_s = time.monotonic()
        ends = lasting.now.builder(seconds=SHORT_S[0]).acquire()
        lasting.kill()
        clock.set(timedelta(hours=-26))
        check_main_job(session)
        assert lasting.has_worker(ends.lease_id) or time.monotonic() > asked_s + SHORT_S[0]
        wait_until(lambda: not lasting.has_worker(ends.lease_id), "the zygote ends it in time")
        assert 0 <= time.monotonic() - asked_s - SHORT_S[0] < LATE_S
        again = lasting.start()
        assert 400_000 < again.query(lease.lease_id)["remaining_ms"] <= 600_000
        lease.renew(600)
        check_main_job(session)


def test_a_clock_that_is_set_under_remote_sessions(
    start_daemon: Callable[..., Daemon], tmp_path: Path, clock: WallClock
) -> None:
    """A connection ends when its certificate would have expired by the clock at its start.

    Later ones are judged by the new date.
    """
    pki = Pki.make(tmp_path)
    daemon = start_daemon(tls=True, config=pki.settings())
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        with ExitStack() as stack:
            for short_s in (2.0, 10.0, 50.0):
                ends_s = time.monotonic() + short_s
                # As with leases: if the certificate expires too soon, a longer one is tried.
                with suppress(OSError, AssertionError):
                    eve = stack.enter_context(pki.peer(daemon.tls_address, pki.short_lived("eve", short_s)).hello())
                    break
            else:
                raise AssertionError("the certificate expired before its bearer was greeted")
            clock.set(timedelta(hours=-26))
            check_main_job(session)
            eve.sock.settimeout(LATE_S + short_s)
            assert isinstance(eve.next_event(), EndOfStream | Goodbye)
        # Dates in certificates have whole seconds.
        assert -1.1 < time.monotonic() - ends_s < LATE_S
        clock.set(timedelta(days=40))
        check_main_job(session)
        lease.renew(60)
        with pytest.raises(GpuLeaseError):
            pki.builder(daemon.tls_address, pki.ann).acquire()
        check_main_job(session)


READS_WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|CLOCK_REALTIME|from time import")


def test_who_reads_the_wall_clock() -> None:
    """Only code for people, for records and for certificates reads the wall clock."""
    sources = [path for part in ("daemon", "protocol") for path in (TESTS.parent / part).rglob("*.py")]
    readers = {
        path.relative_to(TESTS.parent).as_posix() for path in sources if READS_WALL_CLOCK.search(path.read_text())
    }
    assert readers == {
        "daemon/broker/caller.py",
        "daemon/log/writer.py",
        "daemon/record/audit/record_writer.py",
        "daemon/capabilities/authority.py",
        "daemon/remote/pki/certificates.py",
        "daemon/remote/relay.py",
    }
