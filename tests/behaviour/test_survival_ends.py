"""Sessions that outlived their daemon also end for other reasons than their deadline."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import GpuSession, GpuSessionFailed
from helpers.kernels import start_endless
from helpers.lasting import LastingDaemon
from helpers.processes import is_running
from helpers.remote import Pki
from helpers.waiting import wait_until
from helpers.working import working

StartLasting = Callable[..., LastingDaemon]


@pytest.mark.exhaustive
def test_a_kernel_may_not_run_for_longer_though_nobody_is_there(lasting: LastingDaemon) -> None:
    lease = lasting.now.builder(seconds=60).max_kernel_secs(0.5).acquire()
    other = lasting.now.builder(seconds=60).max_kernel_secs(30).acquire()
    with working(other) as work, GpuSession(lease) as session:
        kept = start_endless(session)
        worker = lasting.worker_pid(lease.lease_id)
        lasting.kill()
        wait_until(lambda: not is_running(worker), "its worker is gone")
        work.check_goes_on()
        lasting.start()
        report = lasting.now.query(lease.lease_id)
        assert (report["cause"], report["reason"]) == ("kernel_timeout", "a kernel ran for more than 0.5 s")
        with pytest.raises(GpuSessionFailed, match="a kernel ran for more than"):
            session.sync()
        del kept
    other.free()
    lasting.check_idle()


@pytest.mark.exhaustive
def test_a_remote_one_ends_once_its_certificate_is_revoked(start_lasting: StartLasting, tmp_path: Path) -> None:
    pki = Pki.make(tmp_path)
    lasting = start_lasting(tls=True, config=pki.settings())

    def relays() -> int:
        return sum(info.name == "gpul-relay" for info in lasting.processes())

    anns, bobs = (pki.builder(lasting.now.tls_address, who).acquire() for who in (pki.ann, pki.bob))
    with GpuSession(anns), GpuSession(bobs) as bob:
        lasting.kill()
        pki.authority.revoke(pki.ann.certificate)
        lasting.start()
        wait_until(lambda: relays() == 1, "hers is gone, that was revoked while no daemon was there")
        bob.sync()
        pki.authority.revoke(pki.bob.certificate)
        wait_until(lambda: not relays(), "his is gone, too")
    told = "a relay is ended because its certificate was revoked"
    wait_until(lambda: lasting.now.log().count(told) >= 2, "the log tells it of both")
    for lease in (anns, bobs):
        lasting.now.revoke(lease.lease_id)
    lasting.check_idle()
