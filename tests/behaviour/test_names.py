"""Leases with a name, in a daemon whose claims the test stores: epochs, the horizon, and leases that end at it."""

import json
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import Busy, GpuBuilder, GpuSession, Revoked, Unsupported
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_options import LEASE_NAME, REQUEST_ID
from gpulease.protocol.messages import LeaseAlloc, LeaseGrant
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter
from helpers.daemon import Daemon, Faults
from helpers.kernels import check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.processes import continue_process, is_running, stop_process
from helpers.waiting import wait_until
from helpers.working import working

SIZE = 1 << 20
AHEAD_S = 10.0
"""Seconds from now to the horizon. This is longer than a busy host delays a beat."""

FAR_AHEAD_S = 600.0
"""Seconds to a horizon that does not come while a daemon restarts, even on a busy host."""

beyond_restarts = pytest.mark.parametrize("folder", [FAR_AHEAD_S], indirect=True, ids=["far horizon"])

StartLasting = Callable[..., LastingDaemon]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the folder of claims. Its horizon moves with the time."""
    (tmp_path / "horizon").write_text(str(getattr(request, "param", AHEAD_S)))
    return tmp_path


@pytest.fixture
def lasting(folder: Path, start_lasting: StartLasting) -> LastingDaemon:
    return start_lasting(faults=Faults(names_in=folder))


def named(daemon: Daemon, name: str = "model-a") -> GpuBuilder:
    return daemon.builder(SIZE, seconds=120).name(name)


def claims_in(folder: Path) -> dict[str, int]:
    claims: dict[str, int] = json.loads((folder / "claims").read_text())
    return claims


def is_served(session: GpuSession) -> bool:
    try:
        check_main_job(session)
    except Revoked:
        return False
    return True


def isolate(folder: Path) -> None:
    """Stop the horizon from moving."""
    (folder / "horizon").unlink()


def test_a_name_is_served_once_and_its_epochs_rise(lasting: LastingDaemon, folder: Path) -> None:
    lease = named(lasting.now).acquire()
    with GpuSession(lease) as session:
        check_main_job(session)
        assert (lease.name, lease.epoch) == ("model-a", 1)
        with pytest.raises(Busy, match="is taken"):
            named(lasting.now).acquire()
        other = named(lasting.now, "model-b").acquire()
        assert (other.name, other.epoch) == ("model-b", 2)
        report = lasting.now.query(lease.lease_id)
        assert (report["name"], report["epoch"]) == ("model-a", 1)
        assert claims_in(folder) == {"model-a": 1, "model-b": 2}
    lease.free()
    wait_until(lambda: claims_in(folder) == {"model-b": 2}, "the claim is released once the memory is free")
    again = named(lasting.now).acquire()
    assert again.epoch == 3
    assert "name=model-a" in lasting.now.log()
    for one in (again, other):
        one.free()
    # A lease may also require labels of the node.
    lasting.now.builder(SIZE).labels(zone="a").acquire().free()
    with pytest.raises(Unsupported, match="it has zone=a"):
        lasting.now.builder(SIZE).labels(zone="b").acquire()
    lasting.check_idle()


def test_a_node_without_a_fleet_refuses_names(daemon: Daemon) -> None:
    with pytest.raises(Unsupported, match="does not belong to a fleet"):
        named(daemon).acquire()
    with pytest.raises(Unsupported, match="does not have the label zone=a"):
        daemon.builder(SIZE).labels(zone="a").acquire()


def test_claims_that_are_lost_end_the_leases_with_names(lasting: LastingDaemon, folder: Path) -> None:
    lease, anonymous = named(lasting.now).acquire(), lasting.now.builder(SIZE, seconds=120).acquire()
    with GpuSession(lease) as session, working(anonymous) as work:
        (folder / "lost").write_text("another node has fenced this one")
        wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "torndown", "it ended")
        with pytest.raises(Revoked, match="another node has fenced this one"):
            session.sync()
        work.check_goes_on()
    assert lasting.now.query(lease.lease_id)["cause"] == "isolated"
    anonymous.free()
    lasting.check_idle()


@pytest.mark.parametrize(
    "broker", ["killed", *(pytest.param(state, marks=pytest.mark.exhaustive) for state in ("runs", "stopped"))]
)
def test_an_endless_kernel_of_a_named_lease_ends_at_the_horizon(
    lasting: LastingDaemon, folder: Path, broker: str
) -> None:
    lease, anonymous = named(lasting.now).acquire(), lasting.now.builder(SIZE, seconds=120).acquire()
    with working(anonymous) as work, GpuSession(lease) as session:
        kept = start_endless(session)
        worker = lasting.worker_pid(lease.lease_id)
        isolate(folder)
        if broker == "stopped":
            stop_process(lasting.now.process.pid)
        elif broker == "killed":
            lasting.kill()
        wait_until(lambda: not is_running(worker), "the kernel is ended")
        work.check_goes_on()
        if broker == "stopped":
            os.kill(lasting.now.process.pid, signal.SIGCONT)
        elif broker == "killed":
            lasting.start(Faults(names_in=folder))
        wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "torndown", "its memory is proved free")
        assert lasting.now.query(lease.lease_id)["cause"] == "isolated"
        with pytest.raises(Busy, match="unable to reach its fleet"):
            named(lasting.now).acquire()
        work.check_goes_on()
        with pytest.raises(Revoked):
            session.sync()
        del kept
    with pytest.raises(Revoked):
        lease.renew(10)
    anonymous.free()
    lasting.now.allowed_trouble.append("the broker did not end it in time")
    lasting.check_idle()


def test_a_session_refuses_launches_behind_the_horizon_by_itself(lasting: LastingDaemon, folder: Path) -> None:
    """The broker and the zygote are stopped: the zygote would kill the worker, and its client could read no reply."""
    lease = named(lasting.now).acquire()
    (zygote,) = lasting.zygotes()
    with GpuSession(lease) as session:
        check_main_job(session)
        isolate(folder)
        stop_process(lasting.now.process.pid)
        stop_process(zygote)
        try:
            wait_until(lambda: not is_served(session), "it is refused")
        finally:
            # First the zygote, which then answers the pings of the time before.
            continue_process(zygote)
            continue_process(lasting.now.process.pid)
    wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "torndown", "its memory is proved free")
    assert lasting.now.query(lease.lease_id)["cause"] == "isolated"
    # Either of the two may come first.
    lasting.now.allowed_trouble.append("the broker did not end it in time")
    lasting.check_idle()


@beyond_restarts
def test_a_restarted_broker_keeps_the_horizon_and_the_epochs(lasting: LastingDaemon, folder: Path) -> None:
    lease = named(lasting.now).acquire()
    with GpuSession(lease) as session:
        lasting.restart(Faults(names_in=folder))
        check_main_job(session)
        report = lasting.now.query(lease.lease_id)
        assert (report["state"], report["name"], report["epoch"]) == ("active", "model-a", 1)
        lease.renew(100)
    lease.free()
    # Let the store give the same epoch again, as one that was restored from a backup would.
    wait_until(lambda: claims_in(folder) == {}, "the claim is released")
    (folder / "epoch").write_text("0")
    lasting.restart(Faults(names_in=folder))
    with pytest.raises(Exception, match="has already served epoch 1"):
        named(lasting.now).acquire()
    wait_until(lambda: claims_in(folder) == {}, "the claim that could not be used is released")
    assert named(lasting.now).acquire().epoch == 2
    lasting.check_idle()


@beyond_restarts
def test_one_request_id_places_once(lasting: LastingDaemon, folder: Path) -> None:
    request_id = secrets.token_bytes(16)
    parameters = (LeaseParameter(REQUEST_ID.tag, request_id), LeaseParameter(LEASE_NAME.tag, b"model-a"))
    wanted = LeaseAlloc(GPU_RESOURCE_TYPE, SIZE, 60_000, 0, None, parameters)

    def place() -> LeaseGrant:
        reply = ask(Opcode.LEASE_ALLOC, wanted, lasting.now.address)
        assert isinstance(reply, LeaseGrant)
        return reply

    first = place()
    assert place().lease_id == first.lease_id
    lasting.restart(Faults(names_in=folder))
    assert place().lease_id == first.lease_id
    lasting.now.revoke(first.lease_id)
    assert place().lease_id != first.lease_id
    for report in lasting.now.leases():
        lasting.now.revoke(int(report["lease_id"], 16))
    lasting.check_idle()
