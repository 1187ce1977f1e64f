"""The time of the cards: samples of the workers' claims, each lease's account, and limits on the control pages.

Each card is sampled separately. A card with shared time (a lease there has a weight or is of the latency class, or its
tenant has `max_share`) is sampled every 10 ms, and every 2 ms while a tenant's sessions there may hide how they
overlap. Any other card is sampled only for the account: once a second, and 20 times a second while two or more sessions
are busy in parts of the time. A card without sessions is not sampled.

The account lacks the time of older workers, which keep no account, and the time of a kernel after its worker's last
sample. A lease's account is also on its control page, so the next broker continues it; how sessions overlapped while no
broker ran is estimated.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import field
from typing import Final

from gpulease.daemon.contract.control_page import (
    MAX_LATENCY_WORDS,
    TimeAccounted,
    TimeClaims,
    TimeLimits,
    for_reading,
    latency_memory,
)
from gpulease.daemon.contract.messages import LatencyWord
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.time_account import LeaseTimeUse, RoundTimes, TimeAccount
from gpulease.daemon.leases.time_shares import FINE_NS, LAPSE_NS, SharedSession, TimeShares
from gpulease.daemon.leases.time_turns import ROUND_NS
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

SLOW_NS: Final = NS_PER_S
"""Time between two samples of a card that is sampled only for the account. If at most one session is busy for only a
part of the time, the account is exact, however long this is."""

FAST_NS: Final = 50 * NS_PER_MS
"""The same time while two or more sessions are each busy for only a part of it, because their overlap within a sample
is estimated."""

LEAST_NS: Final = 10 * NS_PER_MS
"""Shortest time between two samples that are caused by queries and ends of workers. Stops a tenant that queries in a
loop, or ends lease after lease, from making the broker sample all the time. A lease's account may lack up to this time
at its end."""

LOOP_PART: Final = 10
"""Samples take at most 1 / LOOP_PART of the loop's time: a card with a thousand busy sessions is sampled less often."""

Pair = tuple[str, str]
"""A card and a tenant."""


@dataclass(slots=True)
class _Member:
    """A worker with a lease or submit, on one card.

    Attributes:
        words: The latency words that it has, by number, with each word's serial.
        limits: The limits that its page has now.
        seen: Its claims, as bytes, if it was idle at the last sample; b"" if it was not.
    """

    worker: Worker
    lease_id: int
    tenant: str
    requested_weight: int
    is_latency: bool
    weight: int = 1
    words: dict[int, int] = field(default_factory=dict)
    limits: TimeLimits = TimeLimits()
    seen: bytes = b""


@dataclass(slots=True)
class _Word:
    """A latency word. `serial` distinguishes it from others that had its number."""

    serial: int
    fd: int
    reading_fd: int

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.reading_fd)


@dataclass(slots=True)
class _Card:
    """A card with at least one member.

    Attributes:
        words: The word of each latency session, and its number.
        is_shared: Whether its time is shared, so that it is sampled every 10 ms.
        by_weights: Whether it is shared by weights, and not only by caps and the latency class.
        weights: The weight of each tenant.
        caps: The largest part of the card of each tenant that has a bound.
        round: The samples since the limits were last set.
        round_due_ns: Time at which the limits are set next.
        is_fine: Whether several samples are taken in a round.
        active: Members that were not idle in the last round.
        since_ns: Time at which the period of `ratio` began; `busy_ns` is the account's value at that time.
    """

    account: TimeAccount = field(default_factory=TimeAccount)
    members: dict[int, _Member] = field(default_factory=dict)
    words: dict[int, tuple[int, _Word]] = field(default_factory=dict)
    sampled_ns: int = 0
    due_ns: int = 0
    is_shared: bool = False
    weights: dict[str, int] = field(default_factory=dict)
    shares: TimeShares = field(default_factory=TimeShares)
    by_weights: bool = False
    caps: dict[str, float] = field(default_factory=dict)
    idle_due_ns: int = 0
    round: RoundTimes = field(default_factory=RoundTimes)
    round_due_ns: int = 0
    is_fine: bool = False
    active: set[int] = field(default_factory=set)
    busy_ns: float = 0.0
    since_ns: int = 0
    ratio: float = 0.0


class CardTimes:
    """The time of all cards of the node.

    Attributes:
        rounds: Number of samples so far.
    """

    def __init__(self, table: LeaseTable, workers: Workers) -> None:
        self.rounds = 0
        self._table = table
        self._workers = workers
        self._cards: dict[str, _Card] = {}
        self._uses: dict[int, LeaseTimeUse] = {}
        # Each lease's use when it was last recorded.
        self._recorded: dict[int, float] = {}
        # The use that has not been counted in metrics yet.
        self._uncounted: dict[Pair, LeaseTimeUse] = {}
        self._last_serial = 0
        self._is_stale = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    # --- queries of other modules ---

    def use_of(self, lease_id: int, card_uuid: str) -> LeaseTimeUse | None:
        """Return the time that a live lease has used until now; None if unknown."""
        self._sample_soon_enough(card_uuid)
        return self._uses.get(lease_id)

    def known_use(self, lease_id: int) -> LeaseTimeUse | None:
        """Return the time that a lease had used at the last sample; None if unknown."""
        return self._uses.get(lease_id)

    def take_uncounted(self) -> dict[Pair, LeaseTimeUse]:
        """Return each tenant's use of each card since the last call."""
        uncounted, self._uncounted = self._uncounted, {}
        return uncounted

    def take_unrecorded(self) -> list[tuple[int, LeaseTimeUse]]:
        """Return the leases that have used their card since the last call, each with its use so far."""
        unrecorded = [(lease, use) for lease, use in self._uses.items() if use.gpu_ns != self._recorded.get(lease, 0.0)]
        self._recorded |= {lease: use.gpu_ns for lease, use in unrecorded}
        return unrecorded

    def busy_ratios(self) -> dict[str, float]:
        """Return, by card with sessions, the fraction of the last second or more in which any session was busy."""
        return {uuid: card.ratio for uuid, card in self._cards.items()}

    # --- what changes ---

    def members_changed(self) -> None:
        """Read the workers with leases and the rules again in the next round, and begin that soon."""
        self._is_stale = True
        # A tenant in debt must not get a new session's first launch before the session's page has limits.
        is_urgent = any(card.shares.debtors for card in self._cards.values())
        self._arm(time.monotonic_ns() + (0 if is_urgent else ROUND_NS))

    def on_worker_end(self, worker: Worker) -> None:
        """Take the last sample of a worker that has ended, while its page can still be read."""
        card = self._cards.get(worker.spec.card_uuid)
        if card is not None and worker.spec.lease_id in card.members:
            self._sample_soon_enough(worker.spec.card_uuid)
            card.members.pop(worker.spec.lease_id, None)
            card.account.end(worker.spec.lease_id)
        self.members_changed()

    def forget(self, lease_id: int) -> None:
        """Forget a lease after its end was recorded."""
        self._uses.pop(lease_id, None)
        self._recorded.pop(lease_id, None)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for card in self._cards.values():
            self._close_words(card)

    # --- rounds ---

    def _arm(self, due_ns: int) -> None:
        """Make the next round begin at `due_ns` at the latest."""
        if self._timer is not None:
            if self._timer_ns <= due_ns:
                return
            self._timer.cancel()
        delay_s = max(0, due_ns - time.monotonic_ns()) / NS_PER_S
        self._timer_ns = due_ns
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ns = time.monotonic_ns()
        try:
            self.sample(now_ns)
        except Exception:
            # This is a bug of ours. Limits lapse by themselves, and no lease depends on the account.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="sampling the time of the cards")
        if self._cards:
            self._arm(max(min(card.due_ns for card in self._cards.values()), now_ns + FINE_NS // 2))

    def sample(self, now_ns: int) -> None:
        if self._is_stale:
            self._update_members()
        for uuid, card in self._cards.items():
            if card.due_ns <= now_ns:
                self._sample(uuid, card, now_ns)

    def _sample_soon_enough(self, card_uuid: str) -> None:
        card, now_ns = self._cards.get(card_uuid), time.monotonic_ns()
        if card is not None and now_ns - card.sampled_ns >= LEAST_NS:
            self._sample(card_uuid, card, now_ns)

    def _update_members(self) -> None:
        """Find the workers that have a lease, and how the time of each card is shared."""
        self._is_stale = False
        members_by_card: dict[str, dict[int, _Member]] = {}
        for worker in self._workers.serving():
            spec = worker.spec
            card = self._cards.get(spec.card_uuid)
            member = None if card is None else card.members.get(spec.lease_id)
            if member is None or member.worker is not worker or member.lease_id != spec.of_lease:
                member = self._new_member(worker)
            if member is not None:
                members_by_card.setdefault(spec.card_uuid, {})[spec.lease_id] = member
        limits = self._table.limits
        for uuid in self._cards.keys() - members_by_card.keys():
            if self._cards[uuid].shares.debtors:
                # The tenant may return while it owes time.
                members_by_card[uuid] = {}
            else:
                self._close_words(self._cards.pop(uuid))
        for uuid, members in members_by_card.items():
            card = self._cards.setdefault(uuid, _Card())
            adopted: dict[int, LeaseTimeUse] = {}
            # A worker that is new on the card may be from an earlier broker, which left its account on the page.
            for number, member in members.items():
                if number not in card.members and (before := member.worker.page.time_account()).sampled_ns:
                    card.account.resume(number, before.busy_ns, before.held_back_ns, before.sampled_ns)
                    if member.lease_id not in self._uses:
                        use = adopted.setdefault(member.lease_id, LeaseTimeUse())
                        # Each page has the whole lease's use at this worker's last sample, and the worker's own busy
                        # time.
                        use.gpu_ns = max(use.gpu_ns, before.gpu_ns)
                        use.busy_ns += before.busy_ns
                        use.held_ns += before.held_back_ns
            for number in card.members.keys() - members.keys():
                card.account.end(number)
            self._uses |= adopted
            card.members = members
            for member in members.values():
                self._uses.setdefault(member.lease_id, LeaseTimeUse())
            self._update_rules(card, limits)
            card.due_ns = card.round_due_ns = 0

    def _update_rules(self, card: _Card, limits: CoreLimits) -> None:
        """Find how the time of a card is shared, by its members and their tenants' bounds."""
        tenants, absent = {member.tenant for member in card.members.values()}, card.shares.debtors
        rules = {tenant: limits.tenants.of(tenant) for tenant in tenants | absent}
        # A tenant in debt that no longer has a session keeps its last weight.
        last_weights = {tenant: card.weights.get(tenant, 1) for tenant in absent - tenants}
        card.weights = dict.fromkeys(rules, 1) | last_weights
        for member in card.members.values():
            # A reload may have lowered the bound.
            member.weight = min(member.requested_weight, rules[member.tenant].max_weight)
            card.weights[member.tenant] = max(card.weights[member.tenant], member.weight)
        card.caps = {tenant: rule.max_share / 100 for tenant, rule in rules.items() if rule.max_share is not None}
        card.by_weights = limits.shares_time or any(member.weight != 1 for member in card.members.values())
        self._update_words(card, {tenant for tenant, rule in rules.items() if rule.may_latency})
        was_shared, card.is_shared = card.is_shared, bool(card.by_weights or card.caps or card.words)
        if was_shared and not card.is_shared:
            # Drop all debts and credits that arose before the change.
            card.shares, card.round, card.is_fine = TimeShares(), RoundTimes(), False
            for member in card.members.values():
                self._write_limits(member, TimeLimits())

    def _new_member(self, worker: Worker) -> _Member | None:
        lease = self._table.get(worker.spec.of_lease) if worker.spec.of_lease else None
        if lease is None:
            return None
        # A submit is a single job, so it is of the ordinary class.
        is_latency = lease.latency and not worker.spec.submit_of
        return _Member(worker, lease.lease_id, lease.tenant, lease.weight, is_latency)

    def _sample(self, uuid: str, card: _Card, now_ns: int) -> None:
        self.rounds += 1
        began_ns = time.monotonic_ns()
        claims: dict[int, TimeClaims] = {}
        for number, member in card.members.items():
            page = member.worker.page
            # Skip sessions with unchanged claims: most are idle most of the time.
            seen = page.time_bytes()
            if seen == member.seen and number not in card.words:
                continue
            claim = page.time_claims()
            # An older worker keeps no account: it counts as neither busy nor idle.
            if claim is not None:
                claims[number] = claim
                member.seen = b"" if claim.busy_since_ns or claim.held_back_since_ns else seen
        # The tenants with latency sessions that have held the others back since the last sample.
        obeyed = card.shares.obeyed
        first = [
            session for session in card.words if session in card.members and card.members[session].tenant in obeyed
        ]
        account = card.account
        account.sample(now_ns, claims, first)
        card.sampled_ns = now_ns
        for number in claims:
            self._add_use(uuid, card, number, now_ns)
        if now_ns - card.since_ns >= NS_PER_S:
            if card.since_ns:
                card.ratio = min(1.0, (account.busy_ns - card.busy_ns) / (now_ns - card.since_ns))
            card.since_ns, card.busy_ns = now_ns, account.busy_ns
        if card.is_shared:
            card.round.add(account)
            if now_ns >= card.round_due_ns:
                self._set_limits(card, now_ns)
        pause_ns = FAST_NS if account.partly_busy >= 2 else SLOW_NS
        if card.is_shared:
            pause_ns = card.round_due_ns - now_ns
            if card.is_fine:
                pause_ns = min(pause_ns, int(FINE_NS * random.uniform(0.5, 1.5)))
        # With very many sessions a sample takes long, so sample less often: the loop has other work to do.
        card.due_ns = now_ns + max(pause_ns, LOOP_PART * (time.monotonic_ns() - began_ns))
        if not card.members and not card.shares.debtors:
            # The last debt is paid: forget the card in the next round.
            self._is_stale = True

    def _add_use(self, uuid: str, card: _Card, number: int, now_ns: int) -> None:
        spent, member = card.account.sessions[number], card.members[number]
        if not (spent.more_busy_ns or spent.more_held_ns):
            return
        increase = LeaseTimeUse(spent.more_gpu_ns, spent.more_busy_ns, spent.more_held_ns)
        use = self._uses.setdefault(member.lease_id, LeaseTimeUse())
        use.add(increase)
        self._uncounted.setdefault((uuid, member.tenant), LeaseTimeUse()).add(increase)
        page = member.worker.page
        page.set_time_account(TimeAccounted(int(use.gpu_ns), spent.busy_ns, spent.held_ns, now_ns))

    def _set_limits(self, card: _Card, now_ns: int) -> None:
        # Sessions that ended during the round no longer have limits.
        members, used = card.members, card.round
        # A tenant that owes time remains in the rounds while it is idle, because a pause must not end its debt.
        if debtors := card.shares.debtors:
            used.add_idle(card.account, [number for number, member in members.items() if member.tenant in debtors])
        times = {number: time for number, time in used.sessions.items() if number in members}
        card.is_fine = card.by_weights and used.may_hide({number: members[number].tenant for number in times})
        card.round = RoundTimes()
        sessions = [
            SharedSession(
                number,
                members[number].tenant,
                members[number].weight,
                card.words[number][0] if number in card.words else None,
                time,
            )
            for number, time in times.items()
        ]
        limits = card.shares.limits(
            now_ns,
            used.more_ns,
            sessions,
            card.weights,
            card.caps,
            used.more_busy_ns,
            shares=card.by_weights,
        )
        card.round_due_ns = card.shares.next_round_ns(now_ns)
        for bar in card.shares.bars:
            # Log the figures since its turns were renewed, which show the reason.
            spent = (bar.bar_ns, bar.due_ns, bar.busy_ns, bar.held_ns)
            for_ms, due_ms, busy_ms, held_ms = (round(part_ns / NS_PER_MS, 2) for part_ns in spent)
            log_event(
                LogEvent.TURNS_LOST,
                lease_id=members[bar.session].lease_id,
                for_ms=for_ms,
                due_ms=due_ms,
                busy_ms=busy_ms,
                held_ms=held_ms,
            )
        active = set(times)
        for number, session_limits in limits.items():
            self._write_limits(members[number], session_limits)
        # For idle sessions only latency sessions matter. Write these limits at once to sessions that have just become
        # idle, and to all others before their limits lapse.
        idle = card.shares.idle_limits(now_ns)
        is_due = bool(card.words) and now_ns >= card.idle_due_ns
        if is_due:
            card.idle_due_ns = now_ns + LAPSE_NS // 2
        for number in members if is_due else card.active - active:
            if number in members and number not in active:
                self._write_limits(members[number], idle)
        card.active = active
        if card.words:
            self._send_words(card)

    def _write_limits(self, member: _Member, limits: TimeLimits) -> None:
        # Leave out words that the worker does not have yet.
        if limits.latency_mask:
            mask = sum(1 << word for word in member.words) & limits.latency_mask
            limits = limits._replace(latency_mask=mask)
        if limits != member.limits:
            member.worker.page.set_time_limits(limits)
            member.limits = limits

    # --- latency words ---

    def _update_words(self, card: _Card, permitted: set[str]) -> None:
        """Give each session of the latency class a word, and remove the words of ended sessions."""
        latency_sessions = {
            session_id
            for session_id, member in card.members.items()
            if member.is_latency and member.tenant in permitted
        }
        for session in card.words.keys() - latency_sessions:
            number, word = card.words.pop(session)
            word.close()
            for member in card.members.values():
                member.words.pop(number, None)
        free = _free_numbers({number for number, _ in card.words.values()})
        for session in [session_id for session_id in latency_sessions if session_id not in card.words]:
            # Without a free number or descriptor, the session is of the ordinary class for now.
            with contextlib.suppress(OSError, StopIteration):
                number = next(free)
                self._last_serial += 1
                fd = latency_memory()
                try:
                    card.words[session] = number, _Word(self._last_serial, fd, for_reading(fd))
                except OSError:
                    os.close(fd)
                    raise
        self._send_words(card)

    def _send_words(self, card: _Card) -> None:
        """Send each worker the words that it lacks. A worker that is too busy now gets them later."""
        for session, (number, word) in card.words.items():
            for session_id, member in card.members.items():
                # Skip older workers, which do not support words (and keep no account).
                if member.words.get(number) == word.serial or member.worker.page.time_claims() is None:
                    continue
                message = LatencyWord(number, is_own=session_id == session)
                fd = word.fd if session_id == session else word.reading_fd
                with contextlib.suppress(ChannelClosed, OSError):
                    send_message(member.worker.channel, message.to_map(), (fd,))
                    member.words[number] = word.serial

    def _close_words(self, card: _Card) -> None:
        for _, word in card.words.values():
            word.close()
        card.words.clear()


def _free_numbers(taken: set[int]) -> Iterator[int]:
    return (number for number in range(MAX_LATENCY_WORDS) if number not in taken)
