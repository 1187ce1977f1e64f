"""Notes as peers ask for them: who may write one, about what, and what the audit log gets."""

from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.record.audit.recorder import FactRecorder, OnNoteRecorded
from gpulease.daemon.record.lease_log import LeaseLog
from gpulease.protocol import messages as m
from gpulease.protocol.opcodes import Opcode, Status

from helpers.region_broker import Broker, with_broker  # isort: skip


class MadeRecorder(FactRecorder):
    """A recorder that takes every note, or denies it."""

    def __init__(self, denial: Denial | None = None) -> None:
        self.denies = denial
        self.notes: list[tuple[int, str, bytes]] = []

    def note(self, lease_id: int, tenant: str, note: bytes, on_noted: OnNoteRecorded) -> None:
        self.notes.append((lease_id, tenant, note))
        on_noted(self.denies)


def noting(broker: Broker) -> MadeRecorder:
    """Give the broker a recorder that takes notes."""
    recorder = MadeRecorder()
    broker.runtime.recorder = LeaseLog(recorder, broker.table.get, broker.workers.pid)
    return recorder


@with_broker
async def test_a_lease_s_tenant_and_a_region_s_write(broker: Broker) -> None:
    recorder = noting(broker)
    region = await broker.open(owner="bob")
    for caller, lease_id in (
        (broker.ann, broker.lease_id),
        (broker.ann, region.lease_id),
        (broker.bob, region.lease_id),
    ):
        assert await caller.ask(Opcode.LEASE_NOTE, m.LeaseNote(lease_id, b"{}")) == m.Empty()
    told = [(broker.lease_id, "ann"), (region.lease_id, "ann"), (region.lease_id, "bob")]
    assert recorder.notes == [(*one, b"{}") for one in told]


@with_broker
async def test_nobody_else_does(broker: Broker) -> None:
    recorder = noting(broker)
    await broker.open(owner="bob")
    for caller, lease_id in ((broker.eve, broker.lease_id), (broker.bob, broker.lease_id), (broker.root, 12345)):
        failure = await caller.refused(Opcode.LEASE_NOTE, m.LeaseNote(lease_id, b"{}"))
        assert failure.status is Status.NOT_FOUND
    assert recorder.notes == []


@with_broker
async def test_an_ended_lease_takes_none(broker: Broker) -> None:
    recorder = noting(broker)
    region = await broker.open(owner="")
    await broker.ann.ask(Opcode.LEASE_FREE, m.LeaseRef(region.lease_id))
    failure = await broker.ann.refused(Opcode.LEASE_NOTE, m.LeaseNote(region.lease_id, b"{}"))
    assert (failure.status, recorder.notes) == (Status.LEASE_FREED, [])


@with_broker
async def test_a_daemon_without_an_audit_log_refuses(broker: Broker) -> None:
    failure = await broker.ann.refused(Opcode.LEASE_NOTE, m.LeaseNote(broker.lease_id, b"{}"))
    assert (failure.status, "no audit log" in failure.message) == (Status.UNSUPPORTED, True)
