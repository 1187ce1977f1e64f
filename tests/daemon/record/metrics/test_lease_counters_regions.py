"""Regions are counted by themselves: a region's bytes are its lease's."""

import pytest

from gpulease.daemon.leases.events import (
    FreeRequested,
    RegionEnded,
    RegionOpened,
    RegionRequested,
    RenewRequested,
    TimerFired,
    TimerKind,
)
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.gauges import gauges

from .test_gauges import facts_of
from .test_lease_counters import ANN, CARD, Counted

GRANULE = 2


def opened() -> Counted:
    """Half a second after it was asked for."""
    s = Counted()
    s.active(1)
    s.do(RegionRequested(2, 1, 50, "ann", "ann", 4, 1000, GRANULE))
    s.at(0.5).do(RegionOpened(50, 1 << 40))
    return s


def test_a_life() -> None:
    s = opened()
    assert s.count(families.REGIONS_OPENED, *ANN) == 1
    assert s.seen(families.REGION_OPEN_SECONDS, *CARD).total == 0.5
    s.do(RenewRequested(3, 50, "ann", 1000))
    s.do(FreeRequested(4, 50, "ann"))
    s.at(0.25).do(RegionEnded(50, 4, 0, True))
    assert s.count(families.REGIONS_RENEWED, *ANN) == s.count(families.REGIONS_ENDED, *ANN) == 1
    assert s.seen(families.REGION_RETURN_SECONDS, "freed").total == pytest.approx(0.25)


def test_it_counts_as_no_lease() -> None:
    s = opened()
    s.do(RenewRequested(3, 50, "ann", 1000))
    s.do(FreeRequested(4, 50, "ann"))
    s.do(RegionEnded(50, 4, 0, True))
    counted = (families.LEASES_ACQUIRED, families.LEASES_RENEWED, families.LEASES_DROPPED)
    assert [s.count(family, *ANN) for family in counted] == [1, 0, 0]
    assert not s.tally.histograms[families.RECLAIM_SECONDS]


def test_a_region_that_expires_shows_how_late_it_was_refused() -> None:
    s = opened()
    s.at(1.25).do(TimerFired(50, 1, TimerKind.EXPIRY))
    assert s.seen(families.EXPIRY_LATENESS_SECONDS).total == pytest.approx(0.25)


def test_what_is_open_now() -> None:
    s = opened()
    values = gauges(facts_of(s))
    assert (values[families.REGIONS_ACTIVE][ANN], values[families.REGIONS_BYTES][ANN]) == (1, 4)
    assert values[families.LEASES_BYTES][ANN] == 20, "a region's bytes are its lease's"
    s.do(FreeRequested(4, 50, "ann"))
    values = gauges(facts_of(s))
    assert (values[families.REGIONS_ACTIVE][ANN], values[families.REGIONS_BYTES][ANN]) == (0, 4)
    s.do(RegionEnded(50, 4, 0, True))
    assert gauges(facts_of(s))[families.REGIONS_BYTES][ANN] == 0


def test_how_soon_a_launch_sees_a_flip() -> None:
    s = Counted()
    s.tally.forward_revoked("revoked", 20_000, 90_000)
    s.tally.forward_revoked("expired", 30_000, None)
    assert s.seen(families.FORWARD_REVOKED_SECONDS, "revoked").total == pytest.approx(0.00002)
    assert s.seen(families.FORWARD_TOLD_SECONDS, "revoked").total == pytest.approx(0.00009)
    known = s.tally.histograms[families.FORWARD_TOLD_SECONDS].of
    assert set(known) == {("revoked",)}, "the other launch's tenant has not asked"
