"""Claims as seen from outside: which leases were granted each name, until when by their pages, and all epochs."""

from typing import TYPE_CHECKING

from gpulease.daemon.leases.events import (
    Effect,
    Event,
    Granted,
    LeaseEnded,
    LeaseRestored,
    RefuseWork,
    SlicesCleared,
    TimerFired,
    TimerKind,
)
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved, SetMembershipDeadline
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState, MembershipDeadline
from gpulease.daemon.leases.persisted import LeaseRow

if TYPE_CHECKING:
    from .simulated import Shell

SLEPT_NS = 7_000_000_000
"""Time for which the host has slept: the difference between CLOCK_BOOTTIME and the monotonic clock."""


class ExpectedNames:
    """Names, stored separately from the table's own state.

    Attributes:
        named: The name and epoch of every lease that was requested with a name.
        counted: Every lease whose bytes count for a quota in the fleet.
        holders: Leases that were granted a name and are not proved free.
        highest: The highest epoch of each name that was granted.
        pages: The membership deadline on each worker's page.
        membership_deadline_ns: The node's membership deadline; None if its claims are lost.
    """

    def __init__(self) -> None:
        self.named: dict[int, tuple[str, int]] = {}
        self.counted: set[int] = set()
        self.holders: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        self.pages: dict[int, int] = {}
        self.membership_deadline_ns: int | None = None
        self._undo: list[tuple[str, int]] = []

    def saw(self, event: Event, effects: list[Effect], shell: "Shell") -> None:
        self._undo.clear()
        if isinstance(event, MembershipDeadlineMoved):
            self.membership_deadline_ns = max(event.membership_deadline_ns, self.membership_deadline_ns or 0)
        elif isinstance(event, ClaimsLost):
            self.membership_deadline_ns = None
        for effect in effects:
            self._on_effect(effect, event, shell)
        if isinstance(event, ClaimsLost):
            going_on = [lease for lease in shell.table.snapshots() if lease.state is LeaseState.ACTIVE]
            assert not any(map(self._is_claimed, going_on)), "a lease kept its claim although the claims are lost"
        if isinstance(event, TimerFired) and event.kind is TimerKind.MEMBERSHIP:
            self._check_over(event, shell)

    def _on_effect(self, effect: Effect, event: Event, shell: "Shell") -> None:
        if isinstance(effect, Granted):
            self._on_grant(effect, shell)
        elif isinstance(effect, SetMembershipDeadline):
            assert effect.membership_deadline_boot_ns >= self.pages.get(effect.worker_id, 0), "a horizon went back"
            self.pages[effect.worker_id] = effect.membership_deadline_boot_ns
        elif isinstance(effect, RefuseWork):
            is_of_fleet = isinstance(event, MembershipDeadlineMoved | ClaimsLost) or effect.cause is Cause.ISOLATED
            claimed = self.named.keys() | self.counted
            assert not is_of_fleet or effect.worker_id in claimed, "a lease without a claim felt the fleet"
        elif isinstance(effect, LeaseEnded) and effect.lease.state is LeaseState.TORNDOWN:
            self._release(effect.lease.lease_id)
        elif isinstance(effect, SlicesCleared):
            for lease_id in effect.lease_ids:
                self._release(lease_id)

    def _on_grant(self, effect: Granted, shell: "Shell") -> None:
        lease = effect.lease
        assert (lease.lease_id in self.counted) == (lease.fleet_bytes > 0)
        if not self._is_claimed(lease):
            assert lease.lease_id not in self.pages, "a lease without a claim has a horizon"
            return
        assert self.membership_deadline_ns is not None
        assert shell.now_ns < self.membership_deadline_ns, "a claimed lease was granted behind the horizon"
        assert self.pages[lease.lease_id] == self.membership_deadline_ns + SLEPT_NS, "its page has another horizon"
        if not lease.name:
            return
        assert self.named[lease.lease_id] == (lease.name, lease.epoch)
        assert lease.name not in self.holders, "two leases have one name"
        assert lease.epoch > self.highest.get(lease.name, 0), "an epoch fell"
        self._undo.append((lease.name, self.highest.get(lease.name, 0)))
        self.holders[lease.name], self.highest[lease.name] = lease.lease_id, lease.epoch

    def _check_over(self, event: TimerFired, shell: "Shell") -> None:
        lease = shell.table.get(event.worker_id)
        if (
            lease is None
            or not self._is_claimed(lease)
            or lease.generation != event.generation
            or lease.state is not LeaseState.ACTIVE
        ):
            return
        assert shell.now_ns < self.pages[event.worker_id] - SLEPT_NS, "a claimed lease outlived its horizon"

    def _is_claimed(self, lease: LeaseSnapshot) -> bool:
        return lease.lease_id in self.named or lease.lease_id in self.counted

    def _release(self, lease_id: int) -> None:
        self.holders = {name: holder for name, holder in self.holders.items() if holder != lease_id}

    def lose_tail(self) -> None:
        """Remove the grants of the last event, because no reply about them was sent."""
        for name, before in self._undo:
            self.highest[name] = before
            del self.holders[name]
        self._undo.clear()

    def forget_daemon(self) -> None:
        """A new daemon knows no membership deadline until its fleet reports one."""
        self.membership_deadline_ns = None

    def restored(self, kept: LeaseRow, shell: "Shell") -> LeaseRestored:
        """Return a lease as the next daemon takes it over, with the membership deadline on its page."""
        boot_ns = self.pages.get(kept.lease_id)
        membership_deadline = None if boot_ns is None else MembershipDeadline(boot_ns - SLEPT_NS, boot_ns)
        return LeaseRestored(
            kept, kept.lease_id in shell.alive, kept.lease_id in shell.submits.opened, membership_deadline
        )
