"""One moment of a node, as gauges."""

import re
from dataclasses import replace

from gpulease.client.serve.models import model_metrics as models
from gpulease.daemon.leases.events import DrainRequested, FreeRequested, ReclaimFailed, RevokeRequested
from gpulease.daemon.leases.parking import ParkPace
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.gauges import AuditFacts, NodeFacts, TenantTotals, gauges

from ...leases.scenario import OVERHEAD, Scenario, card  # noqa: TID252  # the core's own scenarios

ANN, BOB, CID = (("GPU-a", name) for name in ("ann", "bob", "cid"))


def facts_of(s: Scenario) -> NodeFacts:
    totals = TenantTotals()
    for lease in s.table.snapshots():
        totals.add((lease.card_uuid, lease.tenant), lease, 3)
    for region in s.table.regions.snapshots():
        totals.add((region.card_uuid, region.tenant), region)
    return NodeFacts(
        now_ns=s.now_ns,
        tenants=totals,
        cards=s.table.cards(),
        warm=s.table.warming(),
        waiting=s.table.waiting(),
        pairs=[ANN, BOB, CID],
        booked_bytes=s.table.booked_bytes(),
        stray_bytes={"GPU-a": 0},
        busy_ratios={"GPU-a": 0.5},
        checks={"journal": True, "zygote": False},
        is_draining=s.table.drain_ns is not None,
        audit=None,
        version="1",
        driver="cpu",
    )


def busy() -> Scenario:
    """Ann works in two leases, bob in one that ends, and another of his could not be proved free; cid waits."""
    s = Scenario()
    s.active(1, 20)
    s.active(2, 10)
    s.active(3, 5, tenant="bob")
    s.active(4, 5, tenant="bob")
    s.do(FreeRequested(9, 3, "bob"))
    s.do(RevokeRequested(10, 4, "because"))
    s.do(ReclaimFailed(4, "it shows"))
    s.acquire(5, 90, tenant="cid", wait_ms=5000)
    s.at(2)
    return s


def test_tenants() -> None:
    values = gauges(facts_of(busy()))
    assert values[families.LEASES_ACTIVE] == {ANN: 2, BOB: 0, CID: 0}
    assert values[families.LEASES_BYTES] == {ANN: 30, BOB: 0, CID: 0}
    assert values[families.SESSION_ALLOCATED_BYTES] == {ANN: 6, BOB: 6, CID: 0}


def test_cards_and_the_line() -> None:
    values = gauges(facts_of(busy()))
    assert values[families.CARD_HELD_BYTES] == {("GPU-a",): 40 + 4 * OVERHEAD}
    assert values[families.FENCED_SLICES] == {("GPU-a",): 1}
    assert values[families.FENCED_BYTES] == {("GPU-a",): 5 + OVERHEAD}
    assert values[families.QUEUE_LENGTH] == {(): 1}
    assert values[families.QUEUE_OLDEST_SECONDS] == {(): 2}
    empty = gauges(facts_of(Scenario()))
    assert empty[families.QUEUE_OLDEST_SECONDS] == {(): 0}


def test_bytes_that_the_books_hold_for_nobody_are_leaked() -> None:
    facts = facts_of(busy())
    assert gauges(facts)[families.LEAKED_BYTES] == {("GPU-a",): 0}
    booked = facts.booked_bytes["GPU-a"]
    forgotten = replace(facts, booked_bytes={"GPU-a": booked - 20 - OVERHEAD})
    assert gauges(forgotten)[families.LEAKED_BYTES] == {("GPU-a",): 20 + OVERHEAD}
    held_too_little = replace(facts, booked_bytes={"GPU-a": booked + 7})
    assert gauges(held_too_little)[families.LEAKED_BYTES] == {("GPU-a",): 7}
    on_the_card = replace(facts, stray_bytes={"GPU-a": 5})
    assert gauges(on_the_card)[families.LEAKED_BYTES] == {("GPU-a",): 5}
    assert gauges(replace(facts, stray_bytes={}))[families.LEAKED_BYTES] == {}, "unknown is not none"


def test_the_daemon() -> None:
    facts = facts_of(Scenario())
    values = gauges(facts)
    assert values[families.READY] == {(): False}
    assert values[families.CHECK] == {("journal",): True, ("zygote",): False}
    assert values[families.AUDIT_WRITABLE] == values[families.AUDIT_DROPPED] == {}, "no log is kept"
    values = gauges(replace(facts, checks={"zygote": True}, audit=AuditFacts(False, 3, 4), is_draining=True))
    assert values[families.READY] == {(): True}
    assert [values[family][()] for family in (families.AUDIT_WAITING, families.AUDIT_DROPPED)] == [3, 4]
    assert values[families.CARD_AVAILABLE_BYTES] == {("GPU-a",): 0}, "a drained node grants nothing"
    assert values[families.CARD_DRAINING] == {("GPU-a",): True}


def test_a_drained_card() -> None:
    s = Scenario(card(0), card(1))
    s.do(DrainRequested(1, 1000, "1"))
    values = gauges(facts_of(s))
    assert values[families.CARD_DRAINING] == {("GPU-a",): False, ("GPU-b",): True}
    assert values[families.CARD_AVAILABLE_BYTES] == {("GPU-a",): 100, ("GPU-b",): 0}
    assert values[families.DRAINING] == {(): False}


def test_no_name_is_a_model_servers_too() -> None:
    theirs = set(re.findall(r"^    ([a-z_]+)\{", models.__doc__ or "", re.MULTILINE))
    assert "gpu_lease_seconds_total" in theirs
    ours = {name for family in families.FAMILIES for name in (family.name, *family.series_names)}
    assert not ours & {*theirs, *(name.removesuffix("_total") for name in theirs)}


def test_a_card_whose_parks_have_to_wait() -> None:
    assert gauges(facts_of(Scenario()))[families.PARK_WAIT_SECONDS] == {}
    paced = replace(facts_of(Scenario()), park_paces={"GPU-a": ParkPace(0, 5_000_000_000)})
    assert gauges(paced)[families.PARK_WAIT_SECONDS] == {("GPU-a", "need"): 0, ("GPU-a", "tenant"): 5}
