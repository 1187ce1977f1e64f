"""A region on this side: what is asked about it, what ends it, and its use as a buffer; on both APIs."""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    Busy,
    Denied,
    Disconnected,
    GpuLeaseError,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LeaseExpired,
    RegionCancelled,
    RegionExpired,
    RegionFailed,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
    Revoked,
    Unsupported,
)
from gpulease.client.core.events import ForwardRevoked
from gpulease.client.errors import PERMANENT_ERRORS
from gpulease.protocol import Failure, Opcode, Request, RevokeOutcome, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.lease_options import REGIONS_REQUIRED
from gpulease.protocol.limits import MAX_NOTE_BYTES
from gpulease.protocol.messages import (
    Body,
    Empty,
    LeaseNote,
    LeaseRenew,
    LeaseRevoke,
    LeaseRevoked,
    RegionCancel,
    RegionEvent,
    RegionOpen,
    Report,
)
from gpulease.protocol.opcodes import Flag
from helpers.client_faces import Face, Scenario, entered, real
from helpers.scripted_peer import GRANULE, LEASE_ID, REGION_ID, HangUp, Refusal, ScriptedPeer, SendRaw
from helpers.waiting import PATIENCE_S

Run = Callable[[Scenario], None]

FIRST = REGION_ID + 1


def heard(face: Face, op: Opcode) -> list[Any]:
    return [request.body for request in face.peer.heard if request.op is op]


async def opened(face: Face, **wishes: Any) -> tuple[Any, Any, Any]:
    """A lease, its session and a region of it."""
    lease = await face.acquire()
    session = await face.open(lease)
    return lease, session, await lease.region(GRANULE, **wishes)


async def what_is_asked_and_shown(face: Face) -> None:
    asked_s = time.monotonic()
    lease, _, region = await opened(face, tenant="bob", ttl_secs=30)
    assert heard(face, Opcode.REGION_OPEN) == [RegionOpen(LEASE_ID, GRANULE, 30_000, "bob")]
    assert (region.lease_id, region.tenant, region.generation, region.size_bytes) == (FIRST, "bob", 1, GRANULE)
    assert region.address == real(region).handle
    assert 30 >= region.remaining_s >= 30 - (time.monotonic() - asked_s)
    assert region.is_alive
    assert region.lease_id_text == f"{FIRST:032x}"
    await region.renew(40)
    assert heard(face, Opcode.LEASE_RENEW) == [LeaseRenew(FIRST, 40_000)]
    assert region.generation == 2
    assert (lease.generation, region.is_alive) == (1, True)
    assert (await region.query())["state"] == "active"


async def a_size_as_text_and_the_leases_time(face: Face) -> None:
    lease = await face.acquire(face.builder().lease_secs(12))
    await lease.region("3MiB")
    assert heard(face, Opcode.REGION_OPEN) == [RegionOpen(LEASE_ID, 3 << 20, 12_000, "")]


async def a_region_ends_no_later_than_its_lease(face: Face) -> None:
    lease, _, region = await opened(face, ttl_secs=100_000)
    left_s = lease.remaining_s
    assert region.remaining_s <= left_s
    await lease.free()
    assert (region.remaining_s, region.is_alive) == (0, False)


async def freed_once(face: Face) -> None:
    lease, session, region = await opened(face)
    await region.free()
    assert not region.is_alive
    with pytest.raises(RegionFreed) as caught:
        await region.free()
    assert caught.value.lease_id == FIRST
    assert face.peer.ops().count("LEASE_FREE") == 1
    assert lease.is_alive
    await session.sync()


async def revoked_by_its_leases_tenant(face: Face) -> None:
    lease, _, region = await opened(face)
    assert await region.revoke("quota") is RevokeOutcome.TORN_DOWN
    assert heard(face, Opcode.LEASE_REVOKE) == [LeaseRevoke(FIRST, "quota")]
    with pytest.raises(RegionRevoked, match="renew: the region was revoked: quota"):
        await region.renew(5)
    assert lease.is_alive


async def a_newer_daemons_outcome_is_a_number(face: Face) -> None:
    _, _, region = await opened(face)
    face.peer.on(Opcode.LEASE_REVOKE, LeaseRevoked(77))
    assert await region.revoke() == 77


async def a_report_without_a_state_ends_no_wait(face: Face) -> None:
    _, _, region = await opened(face)
    face.peer.on(Opcode.LEASE_QUERY, Report({}))
    await region.close()
    assert face.peer.ops()[-1] == "REGION_RELEASE"


async def cancelled_and_resumed(face: Face) -> None:
    _, _, region = await opened(face)
    await region.cancel()
    await region.resume()
    assert heard(face, Opcode.REGION_CANCEL) == [RegionCancel(FIRST, 1), RegionCancel(FIRST, 0)]
    assert region.is_alive


async def notes_about_a_lease_and_a_region(face: Face) -> None:
    lease, _, region = await opened(face)
    await lease.note({"b": [1, None], "a": "é\n"})
    await region.note({})
    told = [LeaseNote(LEASE_ID, '{"a":"é\\n","b":[1,null]}'.encode()), LeaseNote(FIRST, b"{}")]
    assert heard(face, Opcode.LEASE_NOTE) == told
    for wrong in ({"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, {"a": "x" * MAX_NOTE_BYTES}):
        with pytest.raises(InvalidRequest, match="note"):
            await lease.note(wrong)
    assert heard(face, Opcode.LEASE_NOTE) == told
    face.peer.fail(Opcode.LEASE_NOTE, Status.UNSUPPORTED, "this daemon keeps no audit log")
    with pytest.raises(Unsupported, match="no audit log"):
        await lease.note({})
    assert lease.is_alive


async def several_notes_at_once_each_with_its_outcome(face: Face) -> None:
    lease = await face.acquire()

    def take(request: Request) -> Body:
        if request.body == LeaseNote(LEASE_ID, b'{"n":2}'):
            raise Refusal(Failure(Status.BUSY, "one too many"))
        return Empty()

    face.peer.script[Opcode.LEASE_NOTE] = take
    outcomes = await lease.notes([{"n": 0}, {"n": 0.1j}, {"n": 2}, {"n": 3}])
    assert [type(outcome) for outcome in outcomes] == [type(None), InvalidRequest, Busy, type(None)]
    assert [body.note for body in heard(face, Opcode.LEASE_NOTE)] == [b'{"n":0}', b'{"n":2}', b'{"n":3}']
    with pytest.raises(InvalidRequest, match="at most 256 at once, not"):
        await lease.notes([{}] * 257)
    assert await lease.notes([]) == []


async def notes_that_lost_their_connection_are_told_and_not_repeated(face: Face) -> None:
    lease = await face.acquire()
    notes = [{"n": number} for number in range(5)]

    def take(request: Request) -> Body:
        if request.body == LeaseNote(LEASE_ID, b'{"n":2}'):
            del face.peer.script[Opcode.LEASE_NOTE]
            raise HangUp
        return Empty()

    face.peer.script[Opcode.LEASE_NOTE] = take
    outcomes = await lease.notes(notes)
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [Disconnected] * 3
    assert [body.note for body in heard(face, Opcode.LEASE_NOTE)] == [b'{"n":%d}' % number for number in range(3)]
    assert await lease.notes(notes[2:]) == [None] * 3
    assert lease.is_alive


async def notes_about_a_lease_that_is_over(face: Face) -> None:
    lease = await face.acquire()
    face.peer.fail(Opcode.LEASE_NOTE, Status.LEASE_EXPIRED)
    assert [type(outcome) for outcome in await lease.notes([{}, {}])] == [LeaseExpired] * 2
    with pytest.raises(LeaseExpired):
        await lease.notes([{}])
    assert len(heard(face, Opcode.LEASE_NOTE)) == 2


async def a_lease_grows_and_shrinks(face: Face) -> None:
    lease = await face.acquire()
    session = await face.open(lease)
    before = session.slice_bytes
    await lease.grow("2MiB")
    assert lease.size_bytes == (1 << 20) + GRANULE
    assert session.slice_bytes == before + GRANULE
    await lease.shrink(GRANULE)
    assert [body.size_bytes for body in heard(face, Opcode.LEASE_RESIZE)] == [(1 << 20) + GRANULE, 1 << 20]
    assert session.slice_bytes == before
    with pytest.raises(InvalidRequest, match="shrink"):
        await lease.shrink(1 << 20)
    face.peer.fail(Opcode.LEASE_RESIZE, Status.ALLOC_FAILED, "its session uses it")
    with pytest.raises(AllocFailed):
        await lease.shrink(4096)
    assert lease.size_bytes == 1 << 20


async def it_is_a_buffer_of_every_session_of_its_lease(face: Face) -> None:
    lease, session, region = await opened(face)
    buffer, other = real(region), await face.open(lease)
    module = await session.module_load("// ptx")
    args = KernelArgs().push_buffer(buffer).push_u32(1).push_f32(1)
    for used, data in ((session, b"abcd"), (other, b"efgh"), (session, b"ijkl")):
        await used.mem_write(buffer, 4, data)
        into = np.zeros(4, np.uint8)
        await used.mem_read(buffer, 4, 4, into)
        assert bytes(into) == data
    await session.launch(module, "scale", [1], [1], args)
    await session.launch(module, "scale", [1], [1], [(buffer, 16), np.uint32(1), np.float32(1)])
    await session.sync()
    pointers = [int.from_bytes(body.args[:8], "little") for body in heard(face, Opcode.LAUNCH)]
    assert pointers == [region.address, region.address + 16]
    with pytest.raises(InvalidHandle, match="outside buffer"):
        await session.mem_write(buffer, GRANULE, b"x")
    with pytest.raises(InvalidRequest, match="must be an allocation, not a region"):
        await session.mem_free(buffer)
    assert region.is_alive


async def a_region_of_another_lease_is_refused(face: Face) -> None:
    _, session, region = await opened(face)
    real(region)._state.parent.grant = real(region)._state.parent.grant.__class__(5, 1, 1, 1, 1, 0, "")
    with pytest.raises(InvalidHandle, match="belongs to another lease"):
        await session.mem_write(real(region), 0, b"x")


async def closing_lets_go_of_the_addresses(face: Face) -> None:
    _, session, region = await opened(face)
    address = region.address
    states = ["draining", "draining", "torndown"]
    face.peer.script[Opcode.LEASE_QUERY] = lambda _: Report({"state": states.pop(0)})
    await region.close()
    assert face.peer.ops()[-5:] == ["LEASE_FREE", *["LEASE_QUERY"] * 3, "REGION_RELEASE"]
    assert [body.handle for body in heard(face, Opcode.REGION_RELEASE)] == [address]
    with pytest.raises(InvalidHandle, match="is closed"):
        await session.mem_write(real(region), 0, b"x")
    with pytest.raises(InvalidHandle, match="freed"):
        KernelArgs().push_buffer(real(region))


async def closing_another_tenants_region_revokes_it(face: Face) -> None:
    _, _, region = await opened(face, tenant="bob")
    face.peer.report["state"] = "torndown"
    await region.close()
    assert face.peer.ops()[-3:] == ["LEASE_REVOKE", "LEASE_QUERY", "REGION_RELEASE"]


async def closing_without_a_session_only_ends_it(face: Face) -> None:
    lease = await face.acquire()
    region = await lease.region(GRANULE)
    await region.close()
    assert face.peer.ops()[-1] == "LEASE_FREE"


async def closing_what_had_ended_is_no_error(face: Face) -> None:
    _, _, region = await opened(face)
    face.peer.report["state"] = "torndown"
    face.peer.fail(Opcode.LEASE_FREE, Status.REVOKED, "the region was revoked")
    await region.close()
    assert face.peer.ops()[-1] == "REGION_RELEASE"


async def closing_a_fenced_region_says_so(face: Face) -> None:
    _, _, region = await opened(face)
    face.peer.fail(Opcode.LEASE_FREE, Status.FENCED, "its memory is not proved free")
    with pytest.raises(RegionFenced):
        await region.close()


async def an_open_request_that_lost_its_connection_is_not_repeated(face: Face) -> None:
    lease = await face.acquire()
    face.peer.cut()
    with pytest.raises(GpuLeaseError):
        await lease.region(GRANULE)
    assert "REGION_OPEN" not in face.peer.ops()
    await lease.region(GRANULE)


async def an_old_daemon_says_what_it_lacks(face: Face) -> None:
    face.peer.fail(Opcode.REGION_OPEN, Status.UNSUPPORTED, "unknown operation 0x0210")
    lease = await face.acquire()
    with pytest.raises(Unsupported, match="region_open: unknown operation"):
        await lease.region(GRANULE)
    assert lease.is_alive


async def regions_can_be_required(face: Face) -> None:
    await face.acquire(face.builder().regions_required())
    (asked,) = heard(face, Opcode.LEASE_ALLOC)
    assert [(parameter.tag, parameter.value) for parameter in asked.parameters] == [(REGIONS_REQUIRED.tag, b"\1")]


SCENARIOS: list[Scenario] = [
    what_is_asked_and_shown,
    a_size_as_text_and_the_leases_time,
    a_region_ends_no_later_than_its_lease,
    freed_once,
    revoked_by_its_leases_tenant,
    a_newer_daemons_outcome_is_a_number,
    a_report_without_a_state_ends_no_wait,
    cancelled_and_resumed,
    notes_about_a_lease_and_a_region,
    several_notes_at_once_each_with_its_outcome,
    notes_that_lost_their_connection_are_told_and_not_repeated,
    notes_about_a_lease_that_is_over,
    a_lease_grows_and_shrinks,
    it_is_a_buffer_of_every_session_of_its_lease,
    a_region_of_another_lease_is_refused,
    closing_lets_go_of_the_addresses,
    closing_another_tenants_region_revokes_it,
    closing_without_a_session_only_ends_it,
    closing_what_had_ended_is_no_error,
    closing_a_fenced_region_says_so,
    an_open_request_that_lost_its_connection_is_not_repeated,
    an_old_daemon_says_what_it_lacks,
    regions_can_be_required,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_scenario(run: Run, scenario: Scenario) -> None:
    run(scenario)


WISHES: list[dict[str, Any]] = [
    {"size": 0},
    {"size": "many"},
    {"size": 1 << 64},
    {"size": GRANULE, "ttl_secs": 0},
    {"size": GRANULE, "ttl_secs": float("nan")},
    {"size": GRANULE, "tenant": "x" * 2000},
]


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_a_wish_that_makes_no_sense_is_not_sent(run: Run, wish: dict[str, Any]) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(InvalidRequest):
            await lease.region(**wish)
        assert "REGION_OPEN" not in face.peer.ops()

    run(scenario)


ENDS = {
    Status.REVOKED: RegionRevoked,
    Status.LEASE_EXPIRED: RegionExpired,
    Status.LEASE_FREED: RegionFreed,
    Status.FENCED: RegionFenced,
    Status.CANCELLED: RegionCancelled,
    Status.DRAINED: RegionFailed,
    Status.INTERNAL: RegionFailed,
}


@pytest.mark.parametrize("status", ENDS, ids=lambda status: str(status.name))
def test_a_failure_that_names_a_region_is_its_alone(run: Run, peer: ScriptedPeer, status: Status) -> None:
    async def scenario(face: Face) -> None:
        lease, session, region = await opened(face)
        other = await lease.region(GRANULE)
        details = {"region": FIRST, "kernel": "scale", "site": 3, "position": 4096, "flipped_ns": 77}
        peer.fail(Opcode.SYNC, status, "no such luck", **details)
        with pytest.raises(ENDS[status]) as caught:
            await session.sync()
        error = caught.value
        assert type(error) is ENDS[status]
        assert {name: getattr(error, name) for name in details if name != "region"} == {
            name: value for name, value in details.items() if name != "region"
        }
        assert error.lease_id == region.lease_id
        assert region.is_alive is (status not in (Status.REVOKED, Status.LEASE_EXPIRED, *OTHER_ENDS))
        assert (lease.is_alive, session.is_alive, other.is_alive) == (True, True, True)
        await session.mem_alloc(4)

    run(scenario)


OTHER_ENDS = (Status.LEASE_FREED, Status.FENCED, Status.DRAINED)


@pytest.mark.parametrize(("status", "error"), [(Status.REVOKED, RegionRevoked), (Status.LEASE_EXPIRED, RegionExpired)])
def test_a_renewal_that_is_refused_ends_the_region_alone(
    run: Run, peer: ScriptedPeer, status: Status, error: type[GpuLeaseError]
) -> None:
    async def scenario(face: Face) -> None:
        lease, session, region = await opened(face)
        peer.fail(Opcode.LEASE_RENEW, status, "it is over")
        for _ in range(2):
            with pytest.raises(error):
                await region.renew(5)
        assert peer.ops().count("LEASE_RENEW") == 1
        assert (region.is_alive, lease.is_alive, session.is_alive) == (False, True, True)

    run(scenario)


def test_a_denied_renewal_ends_nothing(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        _, _, region = await opened(face, tenant="bob")
        peer.fail(Opcode.LEASE_RENEW, Status.DENIED, "it is bob's")
        with pytest.raises(Denied):
            await region.renew(5)
        assert region.is_alive

    run(scenario)


@pytest.mark.parametrize(("status", "error"), [(Status.REVOKED, Revoked), (Status.LEASE_EXPIRED, LeaseExpired)])
def test_without_the_detail_the_lease_is_over(
    run: Run, peer: ScriptedPeer, status: Status, error: type[GpuLeaseError]
) -> None:
    async def scenario(face: Face) -> None:
        lease, session, region = await opened(face)
        peer.fail(Opcode.SYNC, status, "it is over")
        with pytest.raises(error) as caught:
            await session.sync()
        assert not isinstance(caught.value, RegionFailed)
        assert (lease.is_alive, session.is_alive, region.is_alive) == (False, False, False)
        with pytest.raises(error):
            await region.renew(5)

    run(scenario)


def test_a_region_nobody_here_opened_may_fail(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease, session, _ = await opened(face)
        peer.fail(Opcode.SYNC, Status.REVOKED, "gone", region=(1 << 128) - 1)
        with pytest.raises(RegionRevoked) as caught:
            await session.sync()
        assert caught.value.lease_id == (1 << 128) - 1
        assert (lease.is_alive, session.is_alive) == (True, True)

    run(scenario)


def test_no_repetition_cures_a_regions_end() -> None:
    assert RegionFailed in PERMANENT_ERRORS


def test_keep_alive_renews_a_region_and_says_why_it_is_lost(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        _, _, region = await opened(face, ttl_secs=0.2)
        keeper = region.keep_alive()
        async with asyncio.timeout(PATIENCE_S):
            while not heard(face, Opcode.LEASE_RENEW):  # noqa: ASYNC110  # a thread asks on one of the APIs
                await asyncio.sleep(0.005)
            peer.fail(Opcode.LEASE_RENEW, Status.REVOKED, "quota")
            while keeper.loss is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert type(keeper.loss) is RegionRevoked
        if face.name == "blocking":
            keeper.stop()
        else:
            await keeper.stop()

    run(scenario)


@pytest.mark.parametrize("of", ["lease", "region"])
@pytest.mark.parametrize("way", ["untold", "told", "by an exception"])
def test_leaving_its_block_raises_a_renewal_that_was_refused_unless_that_was_told(
    run: Run, peer: ScriptedPeer, of: str, way: str
) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire(face.builder().lease_secs(0.2 if of == "lease" else 60))
        kept = real(lease if of == "lease" else await lease.region(GRANULE, ttl_secs=0.2))
        peer.fail(Opcode.LEASE_RENEW, Status.DENIED, "only that tenant may renew")
        told: list[GpuLeaseError] = []
        keeper = kept.keep_alive(told.append if way == "told" else None)
        expected: Any = {"untold": Denied, "by an exception": KeyError}.get(way)
        with pytest.raises(expected) if expected else nullcontext():
            async with entered(keeper), asyncio.timeout(PATIENCE_S):
                while keeper.loss is None:  # noqa: ASYNC110  # a thread asks on one of the APIs
                    await asyncio.sleep(0.005)
                if way == "by an exception":
                    raise KeyError
        assert [type(error) for error in told] == ([Denied] if way == "told" else [])

    run(scenario)


EVENTS = [
    RegionEvent(FIRST, 1, 0, Status.REVOKED, "scale", 3, 4096, 10, 30),
    RegionEvent(FIRST, 5, 3, -1000, "", 0, 0, 10, 40),
]


@pytest.mark.parametrize("whose", ["region", "lease"])
def test_a_watch_tells_of_refused_launches(run: Run, peer: ScriptedPeer, whose: str) -> None:
    async def scenario(face: Face) -> None:
        lease, _, region = await opened(face)
        reply = build_frame(Opcode.REGION_WATCH, build_body(Empty()), request_id=2, flags=Flag.REPLY)
        events = [build_frame(Opcode.REGION_EVENT, build_body(e), request_id=2, flags=Flag.REPLY) for e in EVENTS]
        peer.on(Opcode.REGION_WATCH, SendRaw(reply + b"".join(events)))
        watch = region.watch() if whose == "region" else lease.watch_regions()
        if face.name == "blocking":
            told = [next(watch), next(watch)]
            watch.close()
        else:
            told = [await anext(watch), await anext(watch)]
            await watch.close()
        assert told == [
            ForwardRevoked(LeaseId(FIRST), Status.REVOKED, "scale", 3, 4096, 10, 30, 0),
            ForwardRevoked(LeaseId(FIRST), -1000, "", 0, 0, 10, 40, 3),
        ]
        assert [body.lease_id for body in heard(face, Opcode.REGION_WATCH)] == [
            FIRST if whose == "region" else LEASE_ID
        ]

    run(scenario)


def test_an_event_of_another_kind_breaks_the_watch(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        _, _, region = await opened(face)
        reply = build_frame(Opcode.REGION_WATCH, build_body(Empty()), request_id=2, flags=Flag.REPLY)
        foreign = build_frame(Opcode.LEASE_EVENT, bytes(45), request_id=2, flags=Flag.REPLY)
        peer.on(Opcode.REGION_WATCH, SendRaw(reply + foreign))
        watch = region.watch()
        with pytest.raises(GpuLeaseError):
            next(watch) if face.name == "blocking" else await anext(watch)

    run(scenario)


def test_a_with_block_closes_it(peer: ScriptedPeer) -> None:
    face = Face("blocking", peer)
    peer.report["state"] = "torndown"

    async def scenario() -> None:
        lease, session, _ = await opened(face)
        with real(lease).region(GRANULE) as region:
            real(session).mem_write(region, 0, b"x")
        assert peer.ops()[-1] == "REGION_RELEASE"
        peer.on(Opcode.LEASE_FREE, Refusal(Failure(Status.FENCED, "not proved")))
        with pytest.raises(ZeroDivisionError), real(lease).region(GRANULE):
            raise ZeroDivisionError

    asyncio.run(scenario())


def test_an_async_with_block_closes_it(peer: ScriptedPeer) -> None:
    face = Face("asyncio", peer)
    peer.report["state"] = "torndown"

    async def scenario() -> None:
        lease, session, _ = await opened(face)
        async with lease.region(GRANULE) as region:
            await session.mem_write(region, 0, b"x")
        assert peer.ops()[-1] == "REGION_RELEASE"

    asyncio.run(scenario())
