"""The exclusivity classes: who else may use the session, and who else may use the card."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpulease.client import Busy, CapacityExceeded, GpuExclusivityClass, GpuSession, InvalidRequest, Unsupported
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.lease_options import EXCLUSIVITY
from gpulease.protocol.messages import LeaseAlloc, Ping
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter
from helpers.daemon import Daemon
from helpers.kernels import check_main_job
from helpers.raw_peer import RawPeer, lease_alloc


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[RawPeer]:
    with RawPeer(daemon.address).hello() as peer:
        yield peer


@pytest.mark.parametrize(
    "exclusivity", [None, GpuExclusivityClass.SESSION_EXCLUSIVE, GpuExclusivityClass.DEVICE_EXCLUSIVE]
)
def test_a_second_connection_to_an_exclusive_session(daemon: Daemon, exclusivity: GpuExclusivityClass | None) -> None:
    builder = daemon.builder() if exclusivity is None else daemon.builder().exclusivity(exclusivity)
    with builder.acquire() as lease, GpuSession(lease) as session:
        with pytest.raises(Busy, match="1 connection, "):
            GpuSession(lease)
        check_main_job(session)


def test_the_next_connection_once_the_first_is_closed(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        for _ in range(30):
            with GpuSession(lease) as session:
                session.sync()
        with GpuSession(lease) as session:
            check_main_job(session)


def test_a_shared_session_takes_several_and_bounds_them(daemon: Daemon) -> None:
    with daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire() as lease, ExitStack() as stack:
        sessions = [stack.enter_context(GpuSession(lease)) for _ in range(16)]
        for session in sessions:
            check_main_job(session)
        with pytest.raises(Busy, match="16 connections") as refused:
            GpuSession(lease)
        assert "SHARED" not in str(refused.value), "the lease is shared already"
        check_main_job(sessions[0])


def test_device_exclusive_keeps_others_off_the_card(daemon: Daemon) -> None:
    with daemon.builder().exclusivity(GpuExclusivityClass.DEVICE_EXCLUSIVE).acquire() as lease:
        assert daemon.inventory().details[0]["exclusive"]
        with pytest.raises(CapacityExceeded, match="exclusive use of the cards"):
            daemon.builder().acquire()
        with GpuSession(lease) as session:
            check_main_job(session)
    daemon.builder().acquire().free()


def test_device_exclusive_does_not_push_others_off(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        with pytest.raises(CapacityExceeded, match="every card has other leases"):
            daemon.builder().exclusivity(GpuExclusivityClass.DEVICE_EXCLUSIVE).acquire()
        check_main_job(session)


def test_partition_exclusive_needs_a_partition(daemon: Daemon) -> None:
    with pytest.raises(Unsupported, match="MIG") as caught:
        daemon.builder().exclusivity(GpuExclusivityClass.PARTITION_EXCLUSIVE).acquire()
    assert caught.value.host_code == -5


@pytest.mark.parametrize("number", [4, 7, 254])
def test_unknown_classes(peer: RawPeer, number: int) -> None:
    failure = peer.refused(Opcode.LEASE_ALLOC, lease_alloc(exclusivity=number))
    assert failure.status is Status.UNSUPPORTED
    assert str(number) in failure.message


def test_class_255_is_never_valid(peer: RawPeer) -> None:
    failure = peer.refused(Opcode.LEASE_ALLOC, lease_alloc(exclusivity=255))
    assert failure.status is Status.INVALID_REQUEST
    assert "255" in failure.message


@pytest.mark.parametrize("values", [[b""], [b"\0\0"], [b"\0", b"\0"]])
def test_malformed_classes(peer: RawPeer, values: list[bytes]) -> None:
    parameters = tuple(LeaseParameter(EXCLUSIVITY.tag, value) for value in values)
    failure = peer.refused(Opcode.LEASE_ALLOC, LeaseAlloc(GPU_RESOURCE_TYPE, 1, 1000, 0, None, parameters))
    assert failure.status is Status.INVALID_REQUEST


def test_unknown_lease_parameters_are_skipped(peer: RawPeer) -> None:
    parameters = (LeaseParameter(0x7777, b"what is this"), LeaseParameter(EXCLUSIVITY.tag, b"\0"))
    grant = peer.acquire(LeaseAlloc(GPU_RESOURCE_TYPE, 1, 1000, 0, None, parameters))
    assert grant.exclusivity == GpuExclusivityClass.SHARED
    peer.free(grant.lease_id)


def test_unknown_resource_type(peer: RawPeer) -> None:
    failure = peer.refused(Opcode.LEASE_ALLOC, LeaseAlloc(0x0006, 1, 1000, 0, None, ()))
    assert failure.status is Status.UNSUPPORTED
    assert "0x0005" in failure.hint


def test_refusals_leave_the_connection_usable(peer: RawPeer) -> None:
    for number in (3, 7, 255):
        assert isinstance(peer.ask(Opcode.LEASE_ALLOC, lease_alloc(exclusivity=number)), Failure)
    assert peer.request(Opcode.PING, Ping(5)) == Ping(5)


def test_the_builder_knows_its_classes(daemon: Daemon) -> None:
    with pytest.raises(InvalidRequest, match="SESSION_EXCLUSIVE"):
        daemon.builder().exclusivity(255)
