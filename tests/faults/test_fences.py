"""Memory that is not proved free is not granted until an operator clears its fence."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client import CapacityExceeded, Fenced, GpuSession, InvalidRequest, LeaseExpired, Revoked
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Failure, Notification, Opcode, Phase, RevokeOutcome, Status
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import FenceClear, LeaseEvent, LeaseRef, LeaseRenew, LeaseSubscribe
from gpulease.protocol.opcodes import InventoryFlag
from helpers.audit_log import check_whole, config, records, stop
from helpers.daemon import SHORT_LEASES_S, Daemon, Faults, running
from helpers.kernels import check_main_job
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import wait_until

GIB = 1 << 30


@pytest.fixture(scope="module")
def withheld_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fences") / "withheld"


@pytest.fixture
def withheld(withheld_path: Path) -> Iterator[Path]:
    """Yield a path. While this file exists, no card shows that a dead worker's bytes are free."""
    yield withheld_path
    withheld_path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def shared_fencing(withheld_path: Path) -> Iterator[Daemon]:
    faults, config = Faults(withhold_proof_while=withheld_path), "[limits]\nreclaim_timeout_s = 1\n"
    with running(Daemon(vram=("2GiB", "2GiB"), tcp=True, config=config, faults=faults)) as daemon:
        yield daemon


@pytest.fixture
def fencing(shared_fencing: Daemon, withheld: Path) -> Iterator[Daemon]:
    """Yield a daemon with two cards, which fences after one second. Afterwards nothing is fenced."""
    files = len(shared_fencing.open_files())
    yield shared_fencing
    ask(Opcode.FENCE_CLEAR, FenceClear(None), shared_fencing.address)
    shared_fencing.check_idle(files)


def clear(daemon: Daemon, device: str | None = None) -> int:
    return int(ask(Opcode.FENCE_CLEAR, FenceClear(device), daemon.address).count)


@pytest.mark.exhaustive
def test_a_revoke_that_can_not_be_proved(fencing: Daemon, withheld: Path) -> None:
    lease = fencing.builder(GIB).device(0).acquire()
    session = GpuSession(lease)
    withheld.touch()
    assert fencing.revoke(lease.lease_id) == RevokeOutcome.FENCED
    assert not fencing.has_worker(lease.lease_id)
    # The tenant's session reports how the lease ended.
    with pytest.raises((Fenced, Revoked)):
        session.sync()
    # Later requests are refused, because the lease is fenced.
    with RawPeer(fencing.address).hello() as peer:
        for op, body in (
            (Opcode.LEASE_RENEW, LeaseRenew(lease.lease_id, 1000)),
            (Opcode.LEASE_FREE, LeaseRef(lease.lease_id)),
        ):
            assert peer.refused(op, body).status is Status.FENCED
        failure = peer.attach(lease.lease_id)
        assert failure.status is Status.FENCED  # type: ignore[union-attr]
    assert fencing.revoke(lease.lease_id) == RevokeOutcome.FENCED
    report = fencing.query(lease.lease_id)
    assert (report["state"], report["cause"]) == ("fenced", "revoked")

    # The inventory shows the fence, and its bytes are not available.
    entry, other = fencing.inventory().entries
    assert entry.flags == InventoryFlag.FENCED
    assert entry.available_bytes == GIB
    assert (other.flags, other.available_bytes) == (0, 2 * GIB)
    details = fencing.inventory().details[0]
    assert details["fenced_bytes"] == GIB
    with pytest.raises(CapacityExceeded):
        fencing.builder(GIB + 1).device(0).acquire()

    # The rest of the card can be leased again, once its memory is proved free.
    withheld.unlink()
    with fencing.builder(GIB).device(0).acquire() as rest, GpuSession(rest) as working:
        check_main_job(working)
    assert fencing.query(lease.lease_id)["state"] == "fenced"

    # An operator clears the fence, which frees the bytes.
    assert clear(fencing) == 1
    assert fencing.available_bytes() == 2 * GIB
    assert fencing.inventory().entries[0].flags == 0
    assert clear(fencing) == 0
    with fencing.builder(2 * GIB).device(0).acquire() as whole:
        assert whole.is_alive


@pytest.mark.exhaustive
def test_an_expiry_that_can_not_be_proved(fencing: Daemon, withheld: Path) -> None:
    # While proofs are possible, the bytes of a lease that expires before its session is set up are freed.
    *_, longest_s = SHORT_LEASES_S
    for seconds in SHORT_LEASES_S:
        lease = fencing.builder(GIB, seconds=seconds).device(1).acquire()
        try:
            session = GpuSession(lease)
            break
        except LeaseExpired:
            assert seconds < longest_s
    withheld.touch()
    wait_until(lambda: fencing.query(lease.lease_id)["state"] == "fenced", "the lease is fenced")
    with pytest.raises((LeaseExpired, Fenced)):
        session.sync()
    assert fencing.inventory().entries[1].flags == InventoryFlag.FENCED


@pytest.mark.exhaustive
def test_a_proof_that_comes_late_is_no_fence(start_daemon: Callable[..., Daemon], withheld: Path) -> None:
    config = "[limits]\nreclaim_timeout_s = 600\n"
    fencing = start_daemon(vram=("2GiB",), config=config, faults=Faults(withhold_proof_while=withheld))
    withheld.touch()
    lease = fencing.builder(GIB, seconds=0.5).device(0).acquire()
    wait_until(lambda: not fencing.has_worker(lease.lease_id), "its worker is gone")
    assert fencing.query(lease.lease_id)["state"] == "draining"
    assert fencing.available_bytes() == GIB
    withheld.unlink()
    wait_until(lambda: fencing.query(lease.lease_id)["state"] == "torndown", "the lease is gone")
    assert fencing.available_bytes() == 2 * GIB


@pytest.mark.exhaustive
def test_fences_are_cleared_card_by_card(fencing: Daemon, withheld: Path) -> None:
    leases = [fencing.builder(GIB).device(index).acquire() for index in (0, 1)]
    withheld.touch()
    for lease in leases:
        assert fencing.revoke(lease.lease_id) == RevokeOutcome.FENCED
    withheld.unlink()
    assert clear(fencing, fencing.inventory().details[1]["uuid"]) == 1
    assert [entry.flags for entry in fencing.inventory().entries] == [InventoryFlag.FENCED, 0]
    with pytest.raises(InvalidRequest):
        clear(fencing, "7")
    assert clear(fencing, "0") == 1


@pytest.mark.exhaustive
def test_only_operators_clear(fencing: Daemon) -> None:
    with RawPeer(fencing.tcp_address).hello() as peer:
        assert peer.refused(Opcode.FENCE_CLEAR, FenceClear(None)).status is Status.DENIED


@pytest.mark.exhaustive
def test_who_waits_gets_what_is_cleared(fencing: Daemon, withheld: Path) -> None:
    lease = fencing.builder(2 * GIB).device(0).acquire()
    withheld.touch()
    assert fencing.revoke(lease.lease_id) == RevokeOutcome.FENCED
    withheld.unlink()
    with RawPeer(fencing.address).hello() as peer:
        wanted = lease_alloc(2 * GIB, wait_ms=30_000, device="0")
        peer.sock.sendall(peer.connection.send_request(Opcode.LEASE_ALLOC, wanted)[1])
        assert fencing.available_bytes(0) == 0
        assert clear(fencing) == 1
        grant = peer.next_event().result  # type: ignore[union-attr]
        peer.free(grant.lease_id)  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_a_daemon_stops_although_a_lease_is_fenced(start_daemon: Callable[..., Daemon], withheld: Path) -> None:
    daemon = start_daemon(config="[limits]\nreclaim_timeout_s = 1\n", faults=Faults(withhold_proof_while=withheld))
    lease = daemon.builder().acquire()
    withheld.touch()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.FENCED
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0


@pytest.mark.exhaustive
def test_a_fence_that_was_cleared_is_told_of_by_the_next_daemon_too(
    start_lasting: Callable[..., LastingDaemon], withheld: Path
) -> None:
    faults = Faults(withhold_proof_while=withheld)
    lasting = start_lasting(config="[limits]\nreclaim_timeout_s = 1\n", faults=faults)
    lease = lasting.now.builder().acquire()
    withheld.touch()
    assert lasting.now.revoke(lease.lease_id) == RevokeOutcome.FENCED
    assert clear(lasting.now) == 1
    assert lasting.now.revoke(lease.lease_id) == RevokeOutcome.FENCED
    lasting.restart()
    assert lasting.now.revoke(lease.lease_id) == RevokeOutcome.FENCED
    with pytest.raises(Revoked):
        lease.renew(10)


@pytest.mark.exhaustive
def test_the_whole_story_of_a_fence(start_daemon: Callable[..., Daemon], withheld: Path, tmp_path: Path) -> None:
    """Only an operator frees the bytes; the id can never be used again; and the log records all of it."""
    folder = tmp_path / "log"
    daemon = start_daemon(
        vram=("2GiB",),
        config=config(folder) + "[limits]\nreclaim_timeout_s = 1\n",
        faults=Faults(withhold_proof_while=withheld),
    )
    lease = daemon.builder(2 * GIB).acquire()
    withheld.touch()
    gpulease = partial(CliRunner().invoke, main, env={ADDRESS_VARIABLE: daemon.address})
    revoked = gpulease(["revoke", lease.lease_id_text, "--reason", "maintenance"])
    assert (revoked.exit_code, "is fenced" in revoked.output) == (1, True)

    def is_good_for_nothing(*, statuses: set[Status]) -> None:
        asked = (
            (Opcode.LEASE_RENEW, LeaseRenew(lease.lease_id, 1000)),
            (Opcode.LEASE_FREE, LeaseRef(lease.lease_id)),
        )
        with RawPeer(daemon.address).hello() as peer:
            found = {peer.refused(op, body).status for op, body in asked}
            failure = peer.attach(lease.lease_id)
            assert isinstance(failure, Failure)
            assert found | {failure.status} == statuses
            # A subscriber gets the event that ended the lease.
            peer.request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(lease.lease_id))
            told = peer.next_event()
            assert isinstance(told, Notification)
            assert isinstance(told.event, LeaseEvent)
            assert (told.event.phase, told.event.cause) == (Phase.ENDED, "revoked")

    is_good_for_nothing(statuses={Status.FENCED})
    with pytest.raises(CapacityExceeded):
        daemon.builder(1).acquire()
    # A later proof does not clear the fence. A drain does not either, and it reports the fenced lease.
    withheld.unlink()
    drained = gpulease(["drain", "--within", "0", "--wait"])
    assert (drained.exit_code, lease.lease_id_text in drained.output) == (1, True)
    assert gpulease(["drain", "--cancel"]).exit_code == 0
    with pytest.raises(CapacityExceeded):
        daemon.builder(1).acquire()
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.FENCED

    cleared = gpulease(["fence", "clear"])
    assert cleared.output == "1 fenced slice can be leased again.\n"
    is_good_for_nothing(statuses={Status.REVOKED})
    assert daemon.revoke(lease.lease_id) == RevokeOutcome.FENCED
    with daemon.builder(2 * GIB).acquire() as whole:
        assert whole.lease_id != lease.lease_id
    is_good_for_nothing(statuses={Status.REVOKED})

    stop(daemon)
    check_whole(folder)
    _check_log(folder, lease.lease_id_text)


def _check_log(folder: Path, lease_id: str) -> None:
    of_it = [record for record in records(folder) if record["data"].get("lease") == lease_id]
    # Requests that were denied, before and after the fence was cleared: renew, free and attach, three times each.
    kinds = [record["kind"] for record in of_it if record["kind"] != "deny"]
    assert kinds == ["grant", "over", "operator", "fence", "operator", "clear", "operator"]
    assert sum(record["kind"] == "deny" for record in of_it) == 9
    fence = next(record["data"] for record in of_it if record["kind"] == "fence")
    assert fence["cause"] == "revoked"
    assert "its memory was not shown free within 1 s" in fence["reason"]
    done = [record["data"] for record in records(folder) if record["kind"] == "operator"]
    assert [data["action"] for data in done] == ["revoke", "drain", "drain_cancel", "revoke", "fence_clear", "revoke"]
    assert [data.get("outcome") for data in done] == ["fenced", None, None, "fenced", None, "fenced"]
