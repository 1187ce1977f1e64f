"""Regions as peers ask for them: who may, what is told, and what the session's page says."""

import asyncio
import time
from typing import Any

import pytest

from gpulease.daemon.broker.handlers import query_requests
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.contract import messages as told
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.opcodes import Opcode, Phase, RevokeOutcome, Status, Waiting
from gpulease.protocol.session_words import RegionWord

from helpers.region_broker import FIRST_ADDRESS, MIB, Broker, Caller, with_broker  # isort: skip


# --- open ---


@with_broker
async def test_a_region_is_granted_with_its_address_once_the_session_has_mapped_it(broker: Broker) -> None:
    grant = await broker.open(size_bytes=3 * MIB)
    assert (grant.size_bytes, grant.address, grant.slot, grant.generation) == (4 * MIB, FIRST_ADDRESS, 0, 1)
    assert grant.ttl_ms <= 60_000
    assert broker.session.page.words == {0: (grant.number, RegionWord.ACTIVE)}


@with_broker
async def test_its_tenant_is_who_it_was_opened_for(broker: Broker) -> None:
    ours, theirs = await broker.open(owner=""), await broker.open(owner="bob")
    lookup = broker.table.get
    assert [getattr(lookup(one.lease_id), "tenant", None) for one in (ours, theirs)] == ["ann", "bob"]


@pytest.mark.parametrize("waiting", [None, Waiting.BLOCK])
def test_the_loop_stays_awake_for_the_address_as_its_tenant_waits(
    waiting: Waiting | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        broker.workers.waiting = waiting
        seen: list[Waiting | None] = []
        monkeypatch.setattr(broker.runtime._polling, "stay_awake", seen.append)
        await broker.open()
        assert seen == [waiting]

    story()


@with_broker
async def test_a_stranger_opens_none(broker: Broker) -> None:
    body = m.RegionOpen(broker.lease_id, 4 * MIB, 60_000, "")
    assert (await broker.eve.refused(Opcode.REGION_OPEN, body)).status is Status.NOT_FOUND


@with_broker
async def test_an_operator_opens_one_for_a_tenant(broker: Broker) -> None:
    assert (await broker.open(broker.root)).slot == 0


@with_broker
async def test_no_region_has_a_tenant_whose_name_moves_a_cursor(broker: Broker) -> None:
    body = m.RegionOpen(broker.lease_id, 4 * MIB, 60_000, "\x1b[2J")
    assert (await broker.ann.refused(Opcode.REGION_OPEN, body)).status is Status.INVALID_REQUEST


@with_broker
async def test_what_the_session_refuses_is_denied_in_its_words(broker: Broker) -> None:
    await broker.open()
    broker.session.is_mute = True
    answer = broker.ann.begin(Opcode.REGION_OPEN, m.RegionOpen(broker.lease_id, 4 * MIB, 60_000, ""))
    order = broker.session.ordered[-1]
    assert isinstance(order, told.OpenRegionOrder)
    broker.workers.say(broker.lease_id, told.RegionRefusedReport(order.region_id, "The card is full."))
    failure = await asyncio.wait_for(answer, 20)
    assert "The card is full" in str(failure)


@with_broker
async def test_a_region_whose_client_has_left_is_given_back(broker: Broker) -> None:
    answer = broker.ann.begin(Opcode.REGION_OPEN, m.RegionOpen(broker.lease_id, 4 * MIB, 60_000, ""))
    broker.ann.is_open = False
    broker.ann.dispatcher.close()
    await broker.regions_gone()
    assert any(isinstance(order, told.EndRegionOrder) for order in broker.session.ordered)
    assert not answer.done()


# --- renew, free, revoke ---


@with_broker
async def test_its_own_tenant_renews_it(broker: Broker) -> None:
    region = await broker.open()
    before = broker.session.page.deadlines[0]
    renewed = await broker.bob.ask(Opcode.LEASE_RENEW, m.LeaseRenew(region.lease_id, 120_000))
    assert renewed.generation == 2
    assert broker.session.page.deadlines[0] > before


@with_broker
async def test_its_own_tenant_gives_it_back_and_is_told_once_its_bytes_are(broker: Broker) -> None:
    region = await broker.open()
    assert await broker.bob.ask(Opcode.LEASE_FREE, m.LeaseRef(region.lease_id)) == m.Empty()
    assert broker.session.page.words[0] == (region.number, RegionWord.FREED)
    assert broker.table.regions.held_bytes(broker.lease_id) == 0


@pytest.mark.parametrize("who", ["ann", "root"])
def test_its_lease_s_tenant_and_operators_revoke_it(who: str) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region, other = await broker.open(), await broker.open()
        caller: Caller = getattr(broker, who)
        done = await caller.ask(Opcode.LEASE_REVOKE, m.LeaseRevoke(region.lease_id, "because"))
        assert done == m.LeaseRevoked(int(RevokeOutcome.TORN_DOWN))
        assert broker.session.page.words[region.slot] == (region.number, RegionWord.REVOKED)
        assert broker.session.page.words[other.slot] == (other.number, RegionWord.ACTIVE)

    story()


@pytest.mark.parametrize("who", ["bob", "eve"])
def test_nobody_else_revokes_it(who: str) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region = await broker.open()
        caller: Caller = getattr(broker, who)
        failure = await caller.refused(Opcode.LEASE_REVOKE, m.LeaseRevoke(region.lease_id, "because"))
        assert failure.status is Status.DENIED
        assert broker.session.page.words[0] == (region.number, RegionWord.ACTIVE)

    story()


@with_broker
async def test_a_tenant_revokes_no_lease_of_its_own(broker: Broker) -> None:
    failure = await broker.ann.refused(Opcode.LEASE_REVOKE, m.LeaseRevoke(broker.lease_id, "because"))
    assert failure.status is Status.DENIED


@with_broker
async def test_its_lease_s_end_ends_it(broker: Broker) -> None:
    region = await broker.open()
    await broker.ann.ask(Opcode.LEASE_FREE, m.LeaseRef(broker.lease_id))
    await broker.regions_gone()
    refused = await broker.bob.refused(Opcode.LEASE_RENEW, m.LeaseRenew(region.lease_id, 1000))
    assert refused.status is Status.LEASE_FREED


# --- cancel ---


@pytest.mark.parametrize("who", ["ann", "bob", "root"])
def test_a_region_is_cancelled_and_taken_again(who: str) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region = await broker.open()
        caller: Caller = getattr(broker, who)
        for is_cancelled, word in ((1, RegionWord.CANCELLED), (0, RegionWord.ACTIVE)):
            await caller.ask(Opcode.REGION_CANCEL, m.RegionCancel(region.lease_id, is_cancelled))
            assert broker.session.page.words[0] == (region.number, word)

    story()


@with_broker
async def test_a_stranger_cancels_none(broker: Broker) -> None:
    region = await broker.open()
    failure = await broker.eve.refused(Opcode.REGION_CANCEL, m.RegionCancel(region.lease_id, 1))
    assert failure.status is Status.NOT_FOUND


@with_broker
async def test_half_a_cancel_is_none(broker: Broker) -> None:
    region = await broker.open()
    failure = await broker.ann.refused(Opcode.REGION_CANCEL, m.RegionCancel(region.lease_id, 2))
    assert failure.status is Status.INVALID_REQUEST


# --- reports and events ---


@with_broker
async def test_a_region_s_report_names_its_lease_and_place_and_a_lease_s_its_regions(broker: Broker) -> None:
    region = await broker.open()
    report = (await broker.bob.ask(Opcode.LEASE_QUERY, m.LeaseRef(region.lease_id))).report
    assert report["parent"] == f"{broker.lease_id:032x}"
    assert (report["address"], report["slot"], report["region_state"]) == (FIRST_ADDRESS, 0, "active")
    of_lease = (await broker.ann.ask(Opcode.LEASE_QUERY, m.LeaseRef(broker.lease_id))).report
    assert of_lease["regions"] == [f"{region.lease_id:032x}"]
    assert of_lease["region_bytes"] == 4 * MIB
    assert "parent" not in of_lease
    assert "regions" not in report


@with_broker
async def test_the_report_of_a_lease_without_regions_says_so(broker: Broker) -> None:
    before = (await broker.ann.ask(Opcode.LEASE_QUERY, m.LeaseRef(broker.lease_id))).report
    (listed,) = (await broker.ann.ask(Opcode.LEASE_LIST_ACTIVE, m.Empty())).report
    assert [(report["regions"], report["region_bytes"]) for report in (before, listed)] == [([], 0), ([], 0)]


@pytest.mark.parametrize(("who", "sees"), [("ann", [0, 1]), ("root", [0, 1]), ("bob", [1]), ("eve", [])])
def test_a_list_has_regions_behind_their_lease_for_those_who_may_see_them(who: str, sees: list[int]) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region = await broker.open()
        caller: Caller = getattr(broker, who)
        reports = (await caller.ask(Opcode.LEASE_LIST_ACTIVE, m.Empty())).report
        everything = [f"{broker.lease_id:032x}", f"{region.lease_id:032x}"]
        assert [report["lease_id"] for report in reports] == [everything[number] for number in sees]

    story()


@with_broker
async def test_a_list_describes_no_more_regions_than_fit_and_each_lease_names_its_own(broker: Broker) -> None:
    for _ in range(3):
        await broker.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_requests, "MAX_LISTED_REGIONS", 2)
        lease, *regions = (await broker.ann.ask(Opcode.LEASE_LIST_ACTIVE, m.Empty())).report
    assert (len(regions), len(lease["regions"]), lease["region_bytes"]) == (2, 3, 3 * 4 * MIB)


@with_broker
async def test_a_region_s_phases_are_told_as_a_lease_s(broker: Broker) -> None:
    region = await broker.open()
    await broker.bob.ask(Opcode.LEASE_SUBSCRIBE, m.LeaseSubscribe(region.lease_id))
    await broker.ann.ask(Opcode.LEASE_REVOKE, m.LeaseRevoke(region.lease_id, "because"))
    phases = [event.phase for _, event in broker.bob.events if isinstance(event, m.LeaseEvent)]
    assert (phases[0], phases[-1]) == (Phase.ACTIVE, Phase.ENDED)


def refused_launch(region_id: int, **changes: Any) -> told.ForwardRevokedReport:
    now_ns = time.monotonic_ns()
    times = {"flipped_ns": now_ns, "seen_ns": now_ns}
    fields = {"status": -Status.CANCELLED, "site": 3, "position": 4} | times | changes
    return told.ForwardRevokedReport(region_id, kernel="decode", **fields)


@pytest.mark.parametrize("is_of_lease", [False, True])
@pytest.mark.parametrize("who", ["ann", "root"])
def test_a_refused_launch_is_told_to_watches_of_the_region_and_of_its_lease(who: str, is_of_lease: bool) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region, caller = await broker.open(), getattr(broker, who)
        watched = broker.lease_id if is_of_lease else region.lease_id
        await caller.ask(Opcode.REGION_WATCH, m.LeaseRef(watched))
        number = caller.last_id
        said = refused_launch(region.lease_id)
        broker.workers.say(broker.lease_id, said)
        ((subscription, event),) = caller.events
        assert subscription == number
        times = (said.flipped_ns, said.seen_ns)
        assert event == m.RegionEvent(region.lease_id, 1, 0, Status.CANCELLED, "decode", 3, 4, *times)
        await caller.ask(Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe(number))
        broker.workers.say(broker.lease_id, refused_launch(region.lease_id))
        assert len(caller.events) == 1

    story()


@with_broker
async def test_a_watch_is_told_of_its_own_region_alone(broker: Broker) -> None:
    region, other = await broker.open(), await broker.open()
    await broker.bob.ask(Opcode.REGION_WATCH, m.LeaseRef(region.lease_id))
    broker.workers.say(broker.lease_id, refused_launch(other.lease_id))
    assert broker.bob.events == []


@with_broker
async def test_nobody_watches_what_is_not_its_own(broker: Broker) -> None:
    region = await broker.open()
    for caller, watched in (
        (broker.eve, region.lease_id),
        (broker.eve, broker.lease_id),
        (broker.bob, broker.lease_id),
    ):
        assert (await caller.refused(Opcode.REGION_WATCH, m.LeaseRef(watched))).status is Status.NOT_FOUND


# --- sessions ---


@pytest.mark.parametrize("op", [Opcode.ATTACH, Opcode.GPU_SUBMIT])
def test_a_region_has_no_session_to_enter(op: Opcode) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region = await broker.open()
        body = m.Attach(()) if op is Opcode.ATTACH else m.GpuSubmit(1000, ())
        assert (await broker.bob.refused(op, body, region.lease_id)).status is Status.NOT_FOUND

    story()


# --- sizes ---


@with_broker
async def test_a_lease_grows_and_shrinks(broker: Broker) -> None:
    await broker.open()
    for size_bytes in (200 * MIB, 50 * MIB):
        answer = await broker.ann.ask(Opcode.LEASE_RESIZE, m.LeaseResize(broker.lease_id, size_bytes))
        assert answer == m.LeaseResize(broker.lease_id, size_bytes)
        assert broker.session.size_bytes == size_bytes
        assert getattr(broker.table.get(broker.lease_id), "size_bytes", 0) == size_bytes


@with_broker
async def test_a_stranger_resizes_none(broker: Broker) -> None:
    failure = await broker.eve.refused(Opcode.LEASE_RESIZE, m.LeaseResize(broker.lease_id, 1))
    assert failure.status is Status.NOT_FOUND


def test_where_leases_need_a_token_more_memory_does() -> None:
    async def story(broker: Broker) -> None:
        lease = broker.table.get(broker.lease_id)
        assert lease is not None
        owner = broker.caller(lease.tenant)
        failure = await owner.refused(Opcode.LEASE_RESIZE, m.LeaseResize(broker.lease_id, 200 * MIB))
        assert failure.status is Status.DENIED
        shrunk = await owner.ask(Opcode.LEASE_RESIZE, m.LeaseResize(broker.lease_id, 50 * MIB))
        assert shrunk == m.LeaseResize(broker.lease_id, 50 * MIB)

    with_broker(story, frozenset({Demand.ALLOC}))()


# --- tokens ---


async def given(broker: Broker, permissions: Permission, lease_id: int = 0, giver: Caller | None = None) -> None:
    """Ann, or an operator, or who is named, gives Eve a token for the lease, and Eve presents it."""
    audience = (await broker.eve.ask(Opcode.CAPABILITY_AUDIENCE, m.Empty())).audience
    giver = giver or (broker.root if permissions & Permission.REVOKE else broker.ann)
    issue = m.CapabilityIssue(lease_id or broker.lease_id, int(permissions), audience, 60_000, 0)
    token = (await giver.ask(Opcode.CAPABILITY_ISSUE, issue)).token
    await broker.eve.ask(Opcode.CAPABILITY_PRESENT, m.CapabilityPresent(token))


@with_broker
async def test_a_token_s_bearer_opens_regions_of_its_own(broker: Broker) -> None:
    await given(broker, Permission.REGION)
    region = await broker.open(broker.eve, owner="")
    assert getattr(broker.table.get(region.lease_id), "tenant", None) == "eve"


@with_broker
async def test_another_permission_opens_none(broker: Broker) -> None:
    await given(broker, Permission.LEASE_RENEW)
    body = m.RegionOpen(broker.lease_id, 4 * MIB, 60_000, "")
    assert (await broker.eve.refused(Opcode.REGION_OPEN, body)).status is Status.NOT_FOUND


@pytest.mark.parametrize(
    ("permission", "is_of_lease", "may_renew"),
    [
        (Permission.LEASE_RENEW, True, True),
        (Permission.LEASE_RENEW, False, True),
        (Permission.REGION, True, True),
        (Permission.MEM_READ, True, False),
    ],
)
@pytest.mark.parametrize("demands", [frozenset(), frozenset({Demand.RENEW})], ids=["free", "by token"])
def test_who_bears_a_token_that_renews_the_lease_or_opens_its_regions_renews_them(
    permission: Permission, is_of_lease: bool, may_renew: bool, demands: frozenset[Demand]
) -> None:
    async def story(broker: Broker) -> None:
        holder = broker.root if demands else broker.ann
        region = await broker.open(holder)
        if is_of_lease:
            await given(broker, permission, giver=holder)
        else:
            await given(broker, permission, region.lease_id, broker.root if demands else broker.bob)
        body = m.LeaseRenew(region.lease_id, 120_000)
        if may_renew:
            assert (await broker.eve.ask(Opcode.LEASE_RENEW, body)).generation == 2
        else:
            failure = await broker.eve.refused(Opcode.LEASE_RENEW, body)
            assert failure.status is (Status.DENIED if demands else Status.NOT_FOUND)

    with_broker(story, demands)()


@with_broker
async def test_its_leases_tenant_renews_it_and_a_stranger_does_not(broker: Broker) -> None:
    region = await broker.open()
    body = m.LeaseRenew(region.lease_id, 120_000)
    assert (await broker.ann.ask(Opcode.LEASE_RENEW, body)).generation == 2
    assert (await broker.eve.refused(Opcode.LEASE_RENEW, body)).status is Status.NOT_FOUND


@pytest.mark.parametrize("is_of_lease", [False, True])
def test_a_token_that_revokes_a_region_or_its_lease_revokes_the_region(is_of_lease: bool) -> None:
    @with_broker
    async def story(broker: Broker) -> None:
        region = await broker.open()
        await given(broker, Permission.REVOKE, broker.lease_id if is_of_lease else region.lease_id)
        done = await broker.eve.ask(Opcode.LEASE_REVOKE, m.LeaseRevoke(region.lease_id, "because"))
        assert done == m.LeaseRevoked(int(RevokeOutcome.TORN_DOWN))

    story()
