"""Orphans: leases without a connection."""

import pytest

from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    ConnectionsChanged,
    DrainRequested,
    RefuseWork,
    RenewRequested,
    TimerFired,
    TimerKind,
    Warned,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms
from gpulease.daemon.leases.quotas import UNCONNECTED, CoreLimits
from gpulease.protocol.opcodes import Phase

from .scenario import S, Scenario, armed, kinds


def granted(orphan_ms: int | None = 4000, *, limits: CoreLimits | None = None) -> Scenario:
    s = Scenario(limits=limits)
    s.do(AcquireRequested(1001, "ann", 1, LeaseTerms(20, 10_000, orphan_ms=orphan_ms)))
    s.do(WorkerReady(1))
    return s


def left(s: Scenario) -> list[object]:
    return list(s.do(ConnectionsChanged(1, is_connected=False)))


def came(s: Scenario) -> list[object]:
    return list(s.do(ConnectionsChanged(1, is_connected=True)))


def test_a_lease_ends_so_long_after_its_last_connection_went() -> None:
    s = granted()
    assert left(s.at(1)) == [
        ArmTimer(TimerFired(1, 1, TimerKind.ORPHAN), s.now_ns + 4 * S),
        Warned(1, Phase.WARNING, 4000),
    ]
    assert s.table.orphan_due_ns(1) == s.now_ns + 4 * S
    assert s.at(3.9).fire(1, TimerKind.ORPHAN) == [ArmTimer(TimerFired(1, 1, TimerKind.ORPHAN), s.now_ns + S // 10)]
    effects = s.at(0.1).fire(1, TimerKind.ORPHAN)
    assert effects[0] == RefuseWork(1, Cause.ORPHANED)
    assert s.lease(1).reason == "no client was connected to it for 4 s"
    s.gone(1)
    assert (s.lease(1).state, s.lease(1).cause) == (LeaseState.TORNDOWN, Cause.ORPHANED)


def test_subscribers_are_warned_and_the_warning_is_withdrawn() -> None:
    s = granted()
    left(s)
    standing = s.table.phase(1, s.now_ns)
    assert standing is not None
    assert (standing.phase, standing.left_ms(s.now_ns), standing.reason) == (Phase.WARNING, 4000, UNCONNECTED)
    assert came(s.at(1)) == [Warned(1, Phase.ACTIVE, 8000)]


def test_a_connection_in_time_saves_the_lease() -> None:
    s = granted()
    left(s)
    came(s.at(3))
    assert s.at(1).fire(1, TimerKind.ORPHAN) == []
    assert s.table.orphan_due_ns(1) is None
    left(s)
    assert s.at(3.9).fire(1, TimerKind.ORPHAN) != []
    assert s.lease(1).state is LeaseState.ACTIVE


def test_a_repeated_event_changes_nothing() -> None:
    s = granted()
    assert came(s) == []
    left(s)
    assert left(s.at(1)) == []
    assert s.table.orphan_due_ns(1) == s.now_ns + 3 * S


def test_a_renewal_restarts_the_wait() -> None:
    s = granted()
    left(s)
    effects = s.at(3).do(RenewRequested(7, 1, "ann", 10_000))
    assert armed(effects, TimerKind.ORPHAN) == ArmTimer(TimerFired(1, 2, TimerKind.ORPHAN), s.now_ns + 4 * S)
    assert s.at(1).fire(1, TimerKind.ORPHAN) == [], "the timer of before the renewal"
    assert s.at(3).fire(1, TimerKind.ORPHAN, generation=2)[0] == RefuseWork(1, Cause.ORPHANED)


def test_an_earlier_end_is_the_leases_end() -> None:
    s = granted(20_000)
    left(s)
    standing = s.table.phase(1, s.now_ns)
    assert standing is not None
    assert standing.phase is Phase.ACTIVE, "it ends by itself before that"
    assert s.at(30).fire(1, TimerKind.ORPHAN)[0] == RefuseWork(1, Cause.EXPIRED)


def test_a_later_drain_is_not_the_warning() -> None:
    s = granted()
    s.do(DrainRequested(60, 9000))
    left(s)
    standing = s.table.phase(1, s.now_ns)
    assert standing is not None
    assert (standing.reason, standing.until_ns) == (UNCONNECTED, s.now_ns + 4 * S)


@pytest.mark.parametrize(("asked_ms", "default_s", "waits_ms"), [(None, 0, 0), (None, 3, 3000), (0, 3, 0), (5, 3, 5)])
def test_the_tenants_bound_comes_before_the_operators(asked_ms: int | None, default_s: int, waits_ms: int) -> None:
    s = granted(asked_ms, limits=CoreLimits(orphan_s=default_s))
    assert s.table.orphan_ms(1) == waits_ms
    assert kinds(s.do(ConnectionsChanged(1, is_connected=False))) == ([TimerFired, Warned] if waits_ms else [])


def test_the_wait_is_kept_over_a_restart_and_begins_when_the_daemon_says() -> None:
    s = granted()
    left(s)
    kept = s.table.lease_row(1)
    assert kept is not None
    assert kept.terms.orphan_ms == 4000


@pytest.mark.parametrize(("least_ms", "waits_s"), [(0, 4), (3000, 4), (9000, 9)])
def test_a_daemon_that_took_the_lease_over_may_wait_longer(least_ms: int, waits_s: int) -> None:
    s = granted()
    effects = s.do(ConnectionsChanged(1, is_connected=False, least_wait_ms=least_ms))
    assert armed(effects, TimerKind.ORPHAN).due_ns == s.now_ns + waits_s * S
    assert s.table.orphan_due_ns(1) == s.now_ns + waits_s * S
    before_ns = s.now_ns
    s.at(1).do(RenewRequested(7, 1, "ann", 10_000))
    assert s.table.orphan_due_ns(1) == max(before_ns + waits_s * S, s.now_ns + 4 * S), "a renewal takes nothing away"


def test_a_lease_that_has_ended_waits_for_nobody() -> None:
    s = granted()
    s.at(10).fire(1, TimerKind.EXPIRY)
    assert left(s) == []
    assert s.table.orphan_due_ns(1) is None
