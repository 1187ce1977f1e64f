"""The journal's disk is full, or contains something that is no journal.

Also what a daemon still knows after a restart.
"""

import os
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulease.client import (
    Busy,
    GpuExclusivityClass,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    Permission,
    Revoked,
    my_audience,
)
from gpulease.client.sync.driver import ask
from gpulease.daemon.broker.audit_setup import boot_id
from gpulease.daemon.contract.control_page import PAGE_BYTES
from gpulease.daemon.record.journal.database import HEAD_NAME, JOURNAL_NAME, Store
from gpulease.daemon.record.journal.rows import Contents
from gpulease.protocol import Failure
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.messages import Attach, Drain, Empty, FenceClear, LeaseRenew, LeaseRevoke
from gpulease.protocol.opcodes import Opcode, RevokeOutcome, Status
from gpulease.protocol.primitives import Tlv
from helpers.audit_log import check_whole, stop
from helpers.audit_log import config as audit_config
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer
from helpers.waiting import wait_until
from helpers.working import working

from .test_startup import check_sentence, start_in_vain

WAL_NAME = f"{JOURNAL_NAME}-wal"
CAN_NOT_BE_WRITTEN = "the journal can't be written"


class Disk:
    """A daemon's disk, which a test fills by a limit on the size of files. A worker's pages fit, a commit does not."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._pid = daemon.process.pid
        _, self._hard = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        self._daemon.shorten_log()
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (2 * PAGE_BYTES, self._hard))

    def empty(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (self._hard, self._hard))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon], folder: Path) -> Daemon:
    return start_daemon(config=f'state = "{folder}"')


def can_acquire(daemon: Daemon) -> bool:
    try:
        with daemon.builder().acquire():
            return True
    except Busy:
        return False


@pytest.mark.exhaustive
def test_a_journal_that_is_moved_under_its_daemon(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        aside = tmp_path / JOURNAL_NAME
        (folder / JOURNAL_NAME).rename(aside)
        with pytest.raises(Busy, match="was moved or deleted"):
            daemon.builder().acquire()
        assert not can_acquire(daemon)
        check_main_job(session)
        aside.rename(folder / JOURNAL_NAME)
        wait_until(lambda: can_acquire(daemon), "grants go on")
        lease.renew(60)
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)


@pytest.mark.exhaustive
def test_a_full_disk_stops_grants_and_not_leases(
    daemon: Daemon, folder: Path, start_daemon: Callable[..., Daemon]
) -> None:
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    disk = Disk(daemon)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        other = daemon.builder().acquire()
        disk.fill()
        with pytest.raises(Busy, match=CAN_NOT_BE_WRITTEN):
            daemon.builder().acquire()
        # The daemon writes its log some milliseconds later.
        wait_until(lambda: CAN_NOT_BE_WRITTEN in daemon.log(), "the log says it")
        with pytest.raises(Busy, match=CAN_NOT_BE_WRITTEN):
            daemon.builder().acquire()
        with pytest.raises(Busy, match=CAN_NOT_BE_WRITTEN):
            lease.renew(90)
        check_main_job(session)
        with pytest.raises(Busy, match=f"was freed, but {CAN_NOT_BE_WRITTEN}"):
            other.free()
        daemon.wait_for_end(other.lease_id)
        disk.empty()
        wait_until(lambda: can_acquire(daemon), "leases are granted again")
        lease.renew(90)
        check_main_job(session)
    stop(daemon)
    again = start_daemon(config=f'state = "{folder}"')
    assert again.query(other.lease_id)["state"] == "torndown"


@pytest.mark.exhaustive
def test_a_worker_that_ended_on_a_full_disk_is_forgotten_once_its_end_is_recorded(
    start_lasting: Callable[..., LastingDaemon],
) -> None:
    """Until then its zygote keeps it for the next daemon."""
    lasting = start_lasting()
    lasting.now.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    disk = Disk(lasting.now)
    lease = lasting.now.builder().acquire()
    disk.fill()
    with pytest.raises(Busy, match=f"was freed, but {CAN_NOT_BE_WRITTEN}"):
        lease.free()
    disk.empty()
    wait_until(lambda: can_acquire(lasting.now), "leases are granted again")
    # What waited for the same commit as the last answer has happened before the next one.
    assert lasting.now.query(lease.lease_id)["state"] == "torndown"
    lasting.restart()
    assert "of an earlier daemon" not in lasting.now.log()
    assert lasting.now.query(lease.lease_id)["state"] == "torndown"


@pytest.mark.exhaustive
def test_operators_are_told_of_a_full_disk(daemon: Daemon) -> None:
    """Operators' requests are executed nevertheless, and get a reply at once."""
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    disk = Disk(daemon)
    with daemon.builder().acquire() as lease:
        disk.fill()
        for op, body in (
            (Opcode.DRAIN, Drain(60_000)),
            (Opcode.DRAIN_CANCEL, Empty()),
            (Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "")),
            (Opcode.FENCE_CLEAR, FenceClear(None)),
        ):
            with pytest.raises(Busy, match=CAN_NOT_BE_WRITTEN):
                ask(op, body, daemon.address)
    disk.empty()
    wait_until(lambda: can_acquire(daemon), "leases are granted again")


@pytest.mark.exhaustive
def test_a_full_disk_under_journal_and_audit_log(
    start_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    daemon = start_daemon(config=f'state = "{folder}"\n' + audit_config(log, required=True))
    daemon.allowed_trouble += [CAN_NOT_BE_WRITTEN, "the audit log can't be written"]
    for _ in range(8):
        assert can_acquire(daemon), "the log is longer than what fits now"
    disk = Disk(daemon)
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        soon = daemon.builder(seconds=0.8).acquire()
        disk.fill()
        for _ in range(2):
            with pytest.raises(Busy, match="can't be written"):
                daemon.builder().acquire()
        with pytest.raises(Busy, match=CAN_NOT_BE_WRITTEN):
            lease.renew(90)
        check_main_job(session)
        wait_until(lambda: not daemon.has_worker(soon.lease_id), "a lease ends in time")
        disk.empty()
        wait_until(lambda: can_acquire(daemon), "leases are granted again")
        lease.renew(90)
        check_main_job(session)
    stop(daemon)
    check_whole(log)
    again = start_daemon(config=f'state = "{folder}"')
    assert again.query(soon.lease_id)["cause"] == "expired"


@pytest.mark.exhaustive
def test_a_restart_remembers_who_was_revoked(daemon: Daemon, folder: Path, start_daemon: Callable[..., Daemon]) -> None:
    lease = daemon.builder().acquire()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    stop(daemon)
    again = start_daemon(config=f'state = "{folder}"')
    assert again.query(lease.lease_id)["state"] == "torndown"
    assert again.revoke(lease.lease_id) == RevokeOutcome.TORN_DOWN
    with pytest.raises(Revoked):
        ask(Opcode.LEASE_RENEW, LeaseRenew(lease.lease_id, 60_000), again.address)


class Guest:
    """Another tenant, with a token for a lease's session."""

    def __init__(self, daemon: Daemon, lease: GpuLease) -> None:
        self._address, self._lease_id = daemon.tcp_address, lease.lease_id
        self._token = lease.issue(Permission.MEM_READ, my_audience(daemon.tcp_address), 60).token

    def attach(self) -> Status:
        """Attach to the session, and return the status."""
        with RawPeer(self._address).hello() as peer:
            peer.session_id = self._lease_id
            answer = peer.ask(Opcode.ATTACH, Attach((Tlv(AttachOption.TOKEN, self._token),)), self._lease_id)
            return answer.status if isinstance(answer, Failure) else Status.OK


@pytest.mark.exhaustive
def test_a_token_opens_one_connection_and_a_restart_knows_which(
    folder: Path, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(config=f'state = "{folder}"', tcp=True)
    with daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire() as lease:
        guest = Guest(daemon, lease)
        with ThreadPoolExecutor(6) as pool:
            told = list(pool.map(lambda _: guest.attach(), range(6)))
        assert sorted(told) == sorted([Status.OK] + [Status.DENIED] * 5)
        left = Path(shutil.copytree(folder, tmp_path / "left", ignore=shutil.ignore_patterns("zygotes")))
        contents = Contents()
        Store(left, boot_id(), contents.take).close()
        assert [lease_id for lease_id, _, _ in contents.spent] == [lease.lease_id]
        assert (folder / "token.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.exhaustive
def test_no_token_is_used_that_a_restart_would_not_know(folder: Path, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config=f'state = "{folder}"', tcp=True)
    daemon.allowed_trouble.append(CAN_NOT_BE_WRITTEN)
    disk = Disk(daemon)
    with daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire() as lease:
        guest = Guest(daemon, lease)
        disk.fill()
        assert [guest.attach(), guest.attach()] == [Status.BUSY] * 2
        disk.empty()
        wait_until(lambda: guest.attach() is Status.OK, "the token, which was not used, is good")
        assert guest.attach() is Status.DENIED


@pytest.mark.exhaustive
def test_one_state_one_daemon(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "second.toml"
    settings.write_text(f'state = "{folder}"')
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/s", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_UNAVAILABLE
    check_sentence(said, "another daemon uses the state folder")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "content"), [(JOURNAL_NAME, b"x" * 9000), (HEAD_NAME, b"x")])
def test_a_journal_that_can_not_be_used(folder: Path, tmp_path: Path, name: str, content: bytes) -> None:
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(content)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'state = "{folder}"')
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/s", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_DATAERR
    check_sentence(said, "is damaged: .* move the folder's journal files aside")
    assert (folder / name).read_bytes() == content


@pytest.mark.exhaustive
def test_a_journal_is_spoilt_under_sessions(lasting: LastingDaemon, tmp_path: Path) -> None:
    """The next daemon finds the damage and does not start; sessions continue. A daemon without a journal ends them."""
    lease = lasting.now.builder().acquire()
    with working(lease) as work:
        lasting.kill()
        # The journal was not closed cleanly, so the latest changes are in the write-ahead log next to it.
        path = lasting.state / WAL_NAME
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])
        refused = lasting.begin()
        assert refused.wait_for_exit() == os.EX_DATAERR
        check_sentence(refused.log(), "is damaged: .* move the folder's journal files aside")
        work.check_goes_on()
        path.write_bytes(data)
        lasting.start()
        lease.renew(60)
        work.check_goes_on()
    lasting.kill()
    for name in (JOURNAL_NAME, WAL_NAME, HEAD_NAME):
        (lasting.state / name).rename(tmp_path / name)
    forgetful = lasting.start()
    wait_until(lambda: not lasting.has_worker(lease.lease_id), "a session of nobody's is ended")
    with pytest.raises(GpuLeaseError):
        lease.renew(60)
    with forgetful.builder().acquire() as another, GpuSession(another) as session:
        check_main_job(session)
    lasting.check_idle()
