"""The audit log of a real daemon: its records, and what is on disk after the daemon was killed."""

import json
import os
import random
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpulease.client import CapacityExceeded, GpuLeaseError, GpuSession, Permission, my_audience
from gpulease.daemon.record.audit.files import log_files
from gpulease.daemon.record.audit.log_reader import find_log
from gpulease.daemon.record.audit.record_writer import BEAT_S
from gpulease.daemon.record.audit.records import AuditRecord, RecordKind
from gpulease.daemon.record.audit.usage import UsageSum
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.messages import Attach, AttachReply, CapabilityPresent
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.time_units import US_PER_S
from helpers.audit_log import check_whole, config, gpulease_audit, kinds, records, stop, usage
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.raw_peer import RawPeer, lease_alloc

SIZE = 1 << 20
WHO = f"uid:{os.getuid()}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("required", [False, True])
def test_what_a_day_leaves(start_daemon: Callable[..., Daemon], tmp_path: Path, required: bool) -> None:
    folder = tmp_path / "log"
    daemon = start_daemon(config=config(folder, required=required), tcp=True)
    began = time.monotonic()
    with daemon.builder(SIZE, 60).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        lease.renew(90)
        time.sleep(0.2)
    had_s = time.monotonic() - began
    with pytest.raises(CapacityExceeded):
        daemon.builder(1 << 40).acquire()
    revoked = daemon.builder(SIZE).acquire()
    daemon.revoke(revoked.lease_id, "maintenance\x1b[2J")
    with RawPeer(daemon.tcp_address).hello() as stranger:
        stranger.attach(revoked.lease_id)
    stop(daemon)
    told = records(folder)
    happened = "start grant attach renew over end deny grant over operator end deny stop"
    assert [record["kind"] for record in told] == happened.split()
    assert check_whole(folder) == len(told)
    start, grant, *_ = told
    assert len(start["data"]["config"]) == 64
    assert (start["data"]["version"], start["data"]["driver"]) != ("", "cuda")
    assert (grant["data"]["tenant"], grant["data"]["size_bytes"]) == (WHO, SIZE)
    over, operator, end, foreign = told[8:12]
    assert over["data"]["reason"] == "maintenance\N{REPLACEMENT CHARACTER}[2J"
    assert (operator["data"]["by"], operator["data"]["action"]) == (WHO, "revoke")
    assert (end["data"]["cause"], end["data"]["latency_us"] > 0) == ("revoked", True)
    assert (foreign["data"]["tenant"], foreign["data"]["operation"]) == ("tcp", "attach")
    (used,) = usage(folder).values()
    assert (used["leases"], used["open_leases"]) == (2, 0)
    assert 0.2 * US_PER_S < used["lease_us"] < (had_s + 1) * US_PER_S
    assert used["byte_us"] == used["lease_us"] * SIZE


def test_guests_and_limits(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / "log"
    settings = "warm_contexts = 1\n[tenants.tcp]\nmax_leases = 1\n"
    daemon = start_daemon(config=config(folder, required=True) + settings, tcp=True)
    theirs = my_audience(daemon.tcp_address)
    with RawPeer(daemon.tcp_address).hello() as guest, RawPeer(daemon.tcp_address).hello() as again:
        guest.acquire()
        assert "max_leases of tenant 'tcp'" in guest.refused(Opcode.LEASE_ALLOC, lease_alloc()).message
        lease = daemon.builder(SIZE).acquire()
        tokens = [lease.issue(permission, theirs).token for permission in (Permission.MEM_READ, Permission.LEASE_FREE)]
        guest.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(tokens[1]))
        opened = Attach((Tlv(AttachOption.TOKEN, tokens[0]),))
        assert isinstance(guest.ask(Opcode.ATTACH, opened, lease.lease_id), AttachReply)
        assert isinstance(again.ask(Opcode.ATTACH, opened, lease.lease_id), Failure)
        again.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(tokens[1]))
        again.free(lease.lease_id)
    stop(daemon)
    check_whole(folder)
    text = b"".join(path.read_bytes() for path in log_files(folder))
    assert not any(form in text for token in tokens for form in (token, token.hex().encode(), b64encode(token)))
    told = [(record["kind"], record["data"]) for record in records(folder)]
    limit, replay = (data for kind, data in told if kind == "deny")
    assert (limit["tenant"], limit["reason"], limit["operation"]) == ("tcp", "limit", "acquire")
    assert (replay["tenant"], replay["lease"], replay["operation"]) == ("tcp", f"{lease.lease_id:032x}", "attach")
    assert "replayed nonce" in replay["message"]
    (attach,) = (data for kind, data in told if kind == "attach")
    assert attach == {"lease": replay["lease"], "tenant": "tcp"}
    (freed,) = (data for kind, data in told if kind == "operator")
    assert (freed["action"], freed["by"], freed["lease"]) == ("free", "tcp", replay["lease"])
    assert {WHO, "tcp"} == usage(folder).keys()


def test_what_an_auditor_types(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder, head_file = tmp_path / "log", tmp_path / "apart.json"
    daemon = start_daemon(config=config(folder, audit_head=json.dumps(str(head_file))))
    with daemon.builder(SIZE).acquire() as lease:
        text = lease.lease_id_text
    stop(daemon)
    assert "The log is whole: 5 records" in gpulease_audit("verify", "--head-file", head_file, folder).stdout
    head = gpulease_audit("head", "--head-file", head_file, folder).stdout.strip()
    (file,) = folder.iterdir()
    shown = gpulease_audit("show", "--lease", text, "--kind", "grant", folder).stdout
    assert (shown.count("\n"), text in shown) == (1, True)
    assert gpulease_audit("show", "--lease", text[:8], "--kind", "grant", folder).stdout == shown
    assert gpulease_audit("show", "--lease", "f" * 31, folder).exit_code == 2
    lines = file.read_bytes().splitlines(keepends=True)
    assert gpulease_audit("show", "--json", folder).stdout.encode() == b"".join(lines)
    assert gpulease_audit("show", "--tenant", "uid:77", folder).stdout == ""
    assert WHO in gpulease_audit("usage", folder).stdout
    # Missing records at the end are detected with the head that the daemon writes to a file, or with a head that was
    # stored elsewhere.
    file.write_bytes(b"".join(lines[:-1]))
    summed = gpulease_audit("usage", "--head-file", head_file, folder)
    assert (summed.exit_code, WHO in summed.stdout, "NOT whole" in summed.stderr) == (1, True, True)
    for option in (("--head-file", head_file), ("--head", head)):
        done = gpulease_audit("verify", *option, folder)
        assert done.exit_code == 1
        assert "it ends with record 4, but its head is 5: records at the end were removed" in done.stdout
    assert "no head is known" in gpulease_audit("verify", file).stdout
    # An edited record is reported with its place.
    file.write_bytes(b"".join(lines).replace(b'"size_bytes":1048576', b'"size_bytes":1048577', 1))
    done = gpulease_audit("verify", "--head", head, file)
    assert f"byte {len(lines[0] + lines[1])}, record 3: it does not have the hash of record 2" in done.stdout
    assert gpulease_audit("verify", tmp_path / "nothing").exit_code == 66
    assert gpulease_audit("verify", "--head", "5", file).exit_code == 2


# --- kill -9 ---


@dataclass
class Had:
    """A tenant's knowledge of one lease.

    The lease existed at least from `told` to `left`, and at most from `asked` to `gone`.
    """

    asked: float
    told: float
    left: float = 0.0
    gone: float = 0.0


class Tenant(threading.Thread):
    """Acquires and frees leases until its daemon dies."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        super().__init__()
        self.had: dict[str, Had] = {}
        self._daemon = daemon
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            while True:
                asked = time.monotonic()
                lease = self._daemon.builder(SIZE).acquire()
                had = self.had[lease.lease_id_text] = Had(asked, time.monotonic())
                time.sleep(self._random.random() * 0.05)
                if self._random.random() < 0.3:
                    lease.renew(30)
                had.left = time.monotonic()
                lease.free()
                had.gone = time.monotonic()
        except GpuLeaseError:
            pass


KILLS = 2


@pytest.mark.exhaustive
def test_no_grant_that_was_told_is_lost_to_a_kill(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / "log"
    settings = config(folder, required=True, audit_file_size='"64KiB"')
    daemon = start_daemon(config=settings)
    chance = random.Random(2)
    had: dict[str, Had] = {}
    for number in range(KILLS):
        tenants = [Tenant(daemon, 10 * number + which) for which in range(3)]
        for tenant in tenants:
            tenant.start()
        time.sleep(0.05 + chance.random() * 0.3)
        killed = time.monotonic()
        daemon.kill()
        gone = time.monotonic()
        for tenant in tenants:
            tenant.join()
            for one in tenant.had.values():
                one.left, one.gone = one.left or killed, one.gone or gone
            had |= tenant.had
        daemon.check_nothing_is_left()
        daemon = start_daemon(folder=daemon.folder, config=settings)
        check_whole(folder)
    stop(daemon)
    assert kinds(folder).count("start") == KILLS + 1
    granted = {record["data"]["lease"] for record in records(folder) if record["kind"] == "grant"}
    assert had.keys() <= granted
    # A tenant whose daemon is killed before the reply may have a lease that it does not know: at most one per tenant
    # and kill.
    assert len(granted - had.keys()) <= 3 * KILLS
    everything = list(find_log([folder]).records())
    used_us = {lease: used_by(everything, lease) for lease in granted}
    over = {record.data["lease"] for record in everything if record.kind == RecordKind.OVER}
    for lease, one in had.items():
        # If the record of an end was not on disk at the kill, the lease counts until the last record or beat before it.
        unknown_s = 0 if lease in over else BEAT_S + 0.5
        assert one.left - one.told - unknown_s < used_us[lease] / US_PER_S < one.gone - one.asked
    (used,) = usage(folder).values()
    assert (used["leases"], used["open_leases"]) == (len(granted), 0)
    assert used["lease_us"] == sum(used_us.values())
    assert used["byte_us"] == used["lease_us"] * SIZE


def used_by(everything: list[AuditRecord], lease: str) -> int:
    """Return the microseconds of one lease. Other records count only as proof that its daemon was running."""
    total = UsageSum()
    for record in everything:
        is_told = record.data.get("lease") == lease or record.kind == RecordKind.START
        total.take(record if is_told else replace(record, data={}))
    (used,) = total.finish().values()
    return used.lease_us


@pytest.mark.exhaustive
def test_the_log_of_one_folder_is_one_daemons(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    start_daemon(config=config(tmp_path / "log"))
    second = Daemon(config=config(tmp_path / "log"))
    try:
        assert second.wait_for_exit() == 69
        assert "another gpuleased writes the audit log" in second.log()
    finally:
        second.discard()
