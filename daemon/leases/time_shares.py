"""Computes how much of a card's time each session may use next, as limits for the control pages. Does no I/O.

A card's time is shared if a lease has a weight, a tenant has `max_share`, a lease is of the latency class, or `[limits]
shares_time` is set. Otherwise nothing is limited. The rules, in every round:

1. A tenant's demand is the time in which its sessions were busy in the last round plus a little more, or the whole card
   while one of them is held back by its allowance. The card's time is divided by weights. If a tenant's demand is
   smaller than its part, it gets its demand, and the others get the rest. Time that is still idle, because sessions
   pause, is given away as well. So, apart from caps, no tenant is limited while the card is idle, and every tenant that
   demands its part gets it.
2. A tenant's weight is the largest of its leases on the card. Its sessions share the tenant's part by their own
   weights. So a tenant does not get more by having more leases, streams or launches.
3. Time that a tenant used beyond its part is subtracted in its next rounds, up to MAX_DEBT_NS. Time by which it fell
   short of its part is added, up to MAX_CREDIT_NS. So the shares converge, although estimates are rough and kernels are
   not interrupted. A debt remains while the tenant is idle or has no session: it is reduced only by the time that it
   could have had. If the card was idle while a tenant was limited, no other tenant wanted that time, so it reduces
   every debt. Within a tenant, debts and credits are kept only among sessions that were held back: a session that
   paused got its demand, so the tenant's other sessions owe it nothing.
4. Sessions that saturate the card take turns (time_turns.py), each as long as its part.
   A part is GPU time, but a worker counts busy time. Sessions that are busy at the same time share the card equally, so
   a session that takes no turns is busy until its share of that time has reached its part. The session that finishes
   last needs no limit.
5. While a latency session has work outstanding, others hold back. They do so as long as its tenant stays within its
part by weights. While the tenant exceeds its part, the session is treated as an ordinary one.

A worker's claims may be false. If it claims too much busy time, its tenant's own part is charged for it. A claim to be
held back counts only if the busy time has reached the allowance.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from gpulease.daemon.contract.control_page import TimeLimits
from gpulease.daemon.leases.time_account import SessionTime
from gpulease.daemon.leases.time_turns import (
    MAX_PERIOD_NS,
    ROUND_NS,
    SWITCH_NS,
    TURN_QUEUE_NS,
    Bar,
    Taker,
    Turns,
    TurnSchedule,
)
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S, NS_PER_US

Key = int | str
"""A session's number, or a tenant's name."""

AnyKey = TypeVar("AnyKey", bound=Key)

FINE_NS: Final = 2 * NS_PER_MS
"""Mean time between two samples of a round in which a tenant's sessions may hide how they overlap
(`RoundTimes.may_hide`). Each pause is random, from half of this to three halves, so that no tenant can predict it."""

LAPSE_NS: Final = 10 * ROUND_NS
"""How long limits stay valid without another round. A broker that hangs or restarts must not leave sessions held
back."""

LATENCY_QUEUE_NS: Final = 30 * NS_PER_US
"""Longest outstanding work with which an ordinary session may still begin more work while the card has an open latency
session: two to three kernels of 20 us, or one of 100 us and the next shortly before its end. A latency session may have
to wait for this work.
"""

LATENCY_PATIENCE_NS: Final = 20 * NS_PER_MS
"""Longest time for which others hold back for one piece of a latency session's work. If a worker dies with its word
set, it delays the others by at most this time, until the broker removes the word."""

MAX_DEBT_NS: Final = NS_PER_S
"""Maximum GPU time beyond its part that a tenant pays back. The lease option `max_kernel_ms` bounds longer
kernels."""

MAX_CREDIT_NS: Final = 50 * NS_PER_MS
"""Maximum GPU time that a tenant can be owed, which bounds the length of its bursts."""

_MAX_CAP_CREDIT_NS: Final = 3 * NS_PER_MS
"""Maximum GPU time that a tenant with a cap can be owed: enough to make up for a late round, too little for a burst
beyond the cap."""

_HEADROOM: Final = 1.1
_LEAST_DEMAND_NS: Final = NS_PER_MS // 5
"""A session's demand is its last use times the first value plus the second: it can grow by a tenth, or begin, without
being limited."""

_CORRECTION_ROUNDS: Final = 10
"""Number of rounds over which a debt or credit is paid back. With fewer, shares would follow the noise of single
rounds."""

_LATE: Final = 0.98
"""A session that needs more than this fraction of the round for its part is not limited: it could hardly take more."""

_ALL: Final = 0.999
"""If a session gets at least this fraction of its demand, the demand counts as met; the difference is rounding."""

_IDLE_PART: Final = 0.01
"""Fraction of a round that is allowed to be idle: between kernels there are gaps that no tenant can fill."""

MAX_SLACK_ROUNDS: Final = 2
_SLACK_KEPT: Final = 0.97
"""The most extra time that can be given away, in rounds, and the fraction of it that remains after a round without idle
time. With a smaller fraction, rounds with and without idle time would alternate. With a larger one, time would be given
to others long after its owner needs it again."""

_TAKERS: Final = -1
"""The key, in place of a session's number, for all sessions that take turns."""

_OVERDRAWN_NS: Final = -20 * NS_PER_MS
"""At this balance or below, a tenant's latency sessions do not hold others back until the tenant owes nothing."""


class SharedSession(NamedTuple):
    """A session of a card, for one round.

    Attributes:
        session: Its number.
        tenant: Its tenant.
        weight: Its weight, within the tenant's `max_weight`.
        latency_word: The number of its latency word; None if it is of the ordinary class.
        time: Its account.
    """

    session: int
    tenant: str
    weight: int
    latency_word: int | None
    time: SessionTime


class TimeShares:
    """The shares of one card.

    Balances are in GPU nanoseconds: positive for time that a tenant or session is owed, negative for a debt.
    """

    def __init__(self) -> None:
        # The balances of tenants, by name, and of sessions, by number.
        self._balance_ns: dict[Key, float] = {}
        # The parts, in the last round, of all tenants and sessions that got less than they demanded or that have a cap.
        self._parts: dict[Key, float] = {}
        # Each session's part of the next round, before debts and credits.
        self._shares: dict[int, float] = {}
        self._at_cap: set[str] = set()
        # Whether other tenants kept a tenant from getting its demand; then the extra time that is given away because
        # sessions pause.
        self._is_short = False
        self._slack_ns = 0.0
        self._allowances: dict[int, int] = {}
        self._turns = Turns()
        # The balances of tenants with latency sessions, which decide whether these are obeyed.
        self._latency_balance_ns: dict[str, float] = {}
        self._obeyed: set[str] = set()
        self._mask = 0
        self._is_bounded = False

    @property
    def obeyed(self) -> frozenset[str]:
        """The tenants with latency sessions that have held all others back since the last round."""
        return frozenset(self._obeyed)

    @property
    def debtors(self) -> frozenset[str]:
        """The tenants that owe time."""
        return frozenset(key for key, balance in self._balance_ns.items() if balance < 0.0 and isinstance(key, str))

    @property
    def bars(self) -> Sequence[Bar]:
        """The sessions that lost their turns in the last round."""
        return self._turns.bars

    def next_round_ns(self, now_ns: int) -> int:
        """Return when the next round is due after a round at `now_ns`."""
        return self._turns.next_round_ns(now_ns)

    def limits(
        self,
        now_ns: int,
        more_ns: int,
        sessions: Sequence[SharedSession],
        weights: Mapping[str, int],
        caps: Mapping[str, float],
        used_ns: float,
        *,
        shares: bool = True,
    ) -> dict[int, TimeLimits]:
        """Return the limits of each session until the next round.

        Args:
            now_ns: The present time.
            more_ns: Time since the last round.
            sessions: The latency sessions of the card, all sessions of `debtors`, and all others that are not idle,
                after a sample at `now_ns`. Idle ones have `idle_limits`.
            weights: The weight of each tenant: the largest of its sessions on the card, idle ones included; 1 for a
                tenant in debt without an entry.
            caps: The largest part of the card, above 0 and at most 1, of each tenant that has one.
            used_ns: Time for which the card was used since the last round.
            shares: Whether the card's time is shared by weights; False if only caps and the latency class apply.
        """
        by_tenant: dict[str, list[SharedSession]] = {}
        for shared in sessions:
            by_tenant.setdefault(shared.tenant, []).append(shared)
        # Step 1: compute each session's demand, and the balances after the last round. Expect the next round to be as
        # late as the last one.
        round_ns = min(max(more_ns, ROUND_NS), LAPSE_NS)
        demands = {shared.session: self._demand_ns(shared, more_ns, round_ns) for shared in sessions}
        demand_by_tenant = {tenant: sum(demands[shared.session] for shared in own) for tenant, own in by_tenant.items()}
        self._settle(more_ns, by_tenant, caps)
        self._settle_latency(more_ns, by_tenant, weights, demand_by_tenant)
        # Step 2: compute the parts of the next round. Without weights, each tenant may have all that its cap allows.
        bounds = {
            tenant: min(demand_by_tenant[tenant], round_ns * caps[tenant])
            if tenant in caps
            else demand_by_tenant[tenant]
            for tenant in by_tenant
        }
        self._find_slack(more_ns, used_ns)
        parts = fill(round_ns + self._slack_ns, bounds, weights) if shares else bounds
        self._parts, self._shares, self._at_cap, self._is_short = {}, {}, set(), False
        targets: dict[int, float] = {}
        possible = self._pay_debts(more_ns, round_ns, parts, bounds, weights, caps, shares=shares)
        for tenant, own in by_tenant.items():
            cap, possible_ns = caps.get(tenant), possible.get(tenant, 0.0)
            targets |= self._targets(own, parts[tenant], bounds[tenant], demands, cap, round_ns, possible_ns)
        # Step 3: give turns to the sessions that saturate the card; without weights, only if a capped one would get too
        # much otherwise.
        if shares or self._at_cap:
            self._share_turns(now_ns, more_ns, round_ns, sessions, targets, demands, shares=shares)
        else:
            self._turns.clear()
        # Step 4: for the others, convert GPU time to busy time. Sessions that are not limited take part with their
        # demand. Those that take turns are busy one at a time, so they count as one session.
        due = {
            shared.session: targets.get(shared.session, demands[shared.session])
            for shared in sessions
            if demands[shared.session]
        }
        in_turns = [due.pop(session) for session in list(due) if session in self._turns]
        busy = busy_times(due | {_TAKERS: sum(in_turns)} if in_turns else due)
        allowances = {
            # 0 would mean no limit.
            shared.session: max(1, shared.time.busy_ns + int(busy.get(shared.session, targets[shared.session])))
            for shared in sessions
            if shared.session in targets
            and shared.session not in self._turns
            and busy.get(shared.session, targets[shared.session]) < round_ns * _LATE
        }
        self._allowances = allowances
        # Step 5: make the pages' fields.
        words = {shared.session: 1 << shared.latency_word for shared in sessions if shared.latency_word is not None}
        mask = sum(
            words[shared.session] for shared in sessions if shared.session in words and shared.tenant in self._obeyed
        )
        self._mask, self._is_bounded = mask, bool(words)
        limits_by_session: dict[int, TimeLimits] = {}
        for shared in sessions:
            own_word = words.get(shared.session, 0)
            limits = self._limits(now_ns, allowances.get(shared.session, 0), own_word)
            if shared.session in self._turns:
                limits = _in_turns(limits, self._turns[shared.session], now_ns)
            elif limits.allowance_ns == 1:
                # A session that was never busy could begin work with the smallest allowance, but not outside of a turn.
                limits = _in_turns(limits, TurnSchedule(now_ns, 1, MAX_PERIOD_NS), now_ns)
            limits_by_session[shared.session] = limits
        return limits_by_session

    def idle_limits(self, now_ns: int) -> TimeLimits:
        """Return the limits of a session that was idle in the last round: it may wake up at any time."""
        return self._limits(now_ns, 0, 0)

    def _limits(self, now_ns: int, allowance_ns: int, own_word: int) -> TimeLimits:
        mask = self._mask & ~own_word
        queue_bound_ns = LATENCY_QUEUE_NS if self._is_bounded and not own_word else 0
        if not (allowance_ns or mask or queue_bound_ns):
            return TimeLimits()
        patience_ns = LATENCY_PATIENCE_NS if mask else 0
        return TimeLimits(allowance_ns, queue_bound_ns, mask, patience_ns, now_ns + LAPSE_NS)

    def _share_turns(
        self,
        now_ns: int,
        more_ns: int,
        round_ns: int,
        sessions: Sequence[SharedSession],
        targets: Mapping[int, float],
        demands: Mapping[int, float],
        *,
        shares: bool,
    ) -> None:
        """Decide which sessions take turns.

        A latency session for which others hold back takes none: it works at any time.
        """
        takers = {
            session.session: Taker(
                session.time,
                self._shares[session.session],
                targets.get(session.session, demands[session.session]),
                is_capped=session.tenant in self._at_cap,
                is_limited=self._is_spent(session),
            )
            for session in sessions
            if session.latency_word is None or session.tenant not in self._obeyed
        }
        self._turns.update(now_ns, more_ns, round_ns, takers, only_for_caps=not shares)

    def _targets(
        self,
        own: Sequence[SharedSession],
        part_ns: float,
        bound_ns: float,
        demands: Mapping[int, float],
        cap: float | None,
        round_ns: int,
        possible_ns: float,
    ) -> dict[int, float]:
        """Return the GPU time until the next round for each limited session of a tenant.

        `possible_ns`: The part that a tenant in debt would get if it wanted the whole card.
        """
        tenant = own[0].tenant
        balance_ns = self._balance_ns.get(tenant, 0.0)
        # The tenant gets less than its demand, or it has a cap. Otherwise it gets its whole demand.
        if part_ns < bound_ns * _ALL:
            self._parts[tenant] = part_ns
            self._is_short = True
        elif cap is not None:
            self._parts[tenant] = part_ns = round_ns * cap
            self._at_cap.add(tenant)
        # The tenant's sessions share its part by their own weights, once with the tenant's balance and once without.
        demand_by_session, weights = {session.session: demands[session.session] for session in own}, _weights(own)
        self._shares |= fill(part_ns, demand_by_session, weights)
        is_limited = tenant in self._parts
        if is_limited:
            part_ns = max(0.0, part_ns + balance_ns / _CORRECTION_ROUNDS)
        elif balance_ns < 0.0 and possible_ns < round_ns * _ALL:
            # Others demand the card. Without this limit, a tenant that pauses after each long kernel would pay nothing.
            is_limited, part_ns = True, max(0.0, possible_ns + balance_ns / _CORRECTION_ROUNDS)
        shares = fill(part_ns, demand_by_session, weights)
        targets: dict[int, float] = {}
        for session in own:
            share_ns, demand_ns = shares[session.session], demands[session.session]
            if not demand_ns:
                # An idle session may wake up during the round. The time it uses then is charged to the tenant, and paid
                # back.
                if is_limited:
                    targets[session.session] = part_ns
            elif share_ns < demand_ns * _ALL:
                self._parts[session.session] = share_ns
                self._is_short = self._is_short or cap is None
                owed_ns = self._balance_ns.get(session.session, 0.0) if len(own) > 1 else 0.0
                targets[session.session] = max(0.0, share_ns + owed_ns / _CORRECTION_ROUNDS)
            elif cap is not None:
                targets[session.session] = part_ns
        # Debts and credits among the tenant's sessions are settled within the time that the tenant may use.
        total_ns = sum(
            targets[session.session] for session in own if session.session in targets and demands[session.session]
        )
        if is_limited and len(own) > 1 and total_ns > part_ns:
            for session in own:
                if session.session in targets and demands[session.session]:
                    targets[session.session] *= part_ns / total_ns
        return targets

    def _pay_debts(
        self,
        more_ns: int,
        round_ns: int,
        parts: Mapping[str, float],
        bounds: Mapping[str, float],
        weights: Mapping[str, int],
        caps: Mapping[str, float],
        *,
        shares: bool,
    ) -> dict[str, float]:
        """Reduce the debts of tenants that do not demand all that they could have, or that no longer have a session.

        Returns what each tenant in debt could have: the part that it would get if it demanded the whole card.
        """
        possible: dict[str, float] = {}
        for tenant in self.debtors:
            possible[tenant] = fill(round_ns, {**bounds, tenant: float(round_ns)}, {tenant: 1, **weights})[tenant]
            if tenant in caps:
                # If it has sessions, `_settle` counts what its cap allows.
                paid_ns = 0.0 if tenant in parts else more_ns * caps[tenant]
            elif not shares:
                paid_ns = MAX_DEBT_NS
            elif parts.get(tenant, 0.0) < bounds.get(tenant, 0.0) * _ALL:
                paid_ns = 0.0
            else:
                # A round may come early, so count the part by the time since the last one.
                paid_ns = (possible[tenant] - parts.get(tenant, 0.0)) * min(1.0, more_ns / round_ns)
            self._balance_ns[tenant] = min(0.0, self._balance_ns[tenant] + max(0.0, paid_ns))
        return possible

    def _demand_ns(self, session: SharedSession, more_ns: int, round_ns: int) -> float:
        """Return the most GPU time that a session could use in the next round."""
        time = session.time
        if session.session in self._turns:
            return round_ns
        # One of three limits held it back: its allowance, if that is used up; its turns; or a latency session to which
        # it yields.
        if (time.is_held or time.more_held_ns) and (
            self._is_spent(session) or session.session in self._turns or self._obeyed
        ):
            return round_ns
        if not time.more_busy_ns or not more_ns:
            return round_ns if time.is_busy else 0.0
        return min(round_ns, _HEADROOM * time.more_busy_ns * round_ns / more_ns + _LEAST_DEMAND_NS)

    def _is_spent(self, session: SharedSession) -> bool:
        """Return whether a session has used up its allowance, within the error of a kernel's estimate."""
        allowance_ns = self._allowances.get(session.session)
        return allowance_ns is not None and session.time.busy_ns >= allowance_ns - NS_PER_MS

    def _has_waited(self, session: SharedSession) -> bool:
        return bool(session.time.is_held or session.time.more_held_ns or session.session in self._turns)

    def _find_slack(self, more_ns: int, used_ns: float) -> None:
        """Give away more time while the card is idle although a session waits: others pause between their launches."""
        idle_ns = more_ns * (1.0 - _IDLE_PART) - used_ns
        # Ignore the idle moments between turns, which no other tenant could use.
        if idle_ns > 0.0 and self._is_short and not self._turns:
            self._slack_ns = min(self._slack_ns + idle_ns / 2, MAX_SLACK_ROUNDS * more_ns)
            # The card was idle while debtors were held back, so no other tenant wanted the time that they owe.
            for session, owed_ns in self._balance_ns.items():
                if owed_ns < 0.0:
                    self._balance_ns[session] = min(0.0, owed_ns + idle_ns)
        else:
            self._slack_ns *= _SLACK_KEPT

    def _settle(
        self, more_ns: int, by_tenant: Mapping[str, Sequence[SharedSession]], caps: Mapping[str, float]
    ) -> None:
        """Add to each balance the part of the last round less the time that was used."""
        spent = {session.session: self._spent_ns(session, more_ns) for own in by_tenant.values() for session in own}
        used = {tenant: sum((spent[session.session] for session in own), 0.0) for tenant, own in by_tenant.items()}
        # If its cap limited a tenant, the tenant's part is a fraction of the wall time. All other parts are fractions
        # of the used time.
        balances_ns: dict[Key, float] = {}
        for tenant in by_tenant:
            balances_ns[tenant] = self._balance_ns.get(tenant, 0.0)
            if tenant in self._at_cap and tenant in caps:
                balances_ns[tenant] += more_ns * caps[tenant] - used[tenant]
                balances_ns[tenant] = min(max(balances_ns[tenant], -MAX_DEBT_NS), _MAX_CAP_CREDIT_NS)
        short = [tenant for tenant in by_tenant if tenant in self._parts and tenant not in self._at_cap]
        self._even_out(balances_ns, {tenant: used[tenant] for tenant in short})
        for own in by_tenant.values():
            for session in own:
                balances_ns[session.session] = self._balance_ns.get(session.session, 0.0)
            # A session that was not held back got its demand, whatever its part was. So it is owed nothing for this
            # round.
            waiting = [session for session in own if session.session in self._parts and self._has_waited(session)]
            self._even_out(balances_ns, {session.session: spent[session.session] for session in waiting})
            _forgive(balances_ns, [session.session for session in waiting])
        # Keep only the balances of this round, and the debts of tenants that have no session now.
        absent = self.debtors - by_tenant.keys()
        self._balance_ns = balances_ns | {tenant: self._balance_ns[tenant] for tenant in absent}

    def _spent_ns(self, session: SharedSession, more_ns: int) -> float:
        """Return the GPU time charged to a session for the last round, without the time in which its turns begin."""
        if session.session not in self._turns:
            return session.time.more_gpu_ns
        return max(0.0, session.time.more_gpu_ns - SWITCH_NS * more_ns / self._turns[session.session].period_ns)

    def _even_out(self, balances_ns: dict[Key, float], used: Mapping[Key, float]) -> None:
        """Settle balances: add to each its part of the time that all used together, less the time that it used."""
        if len(used) == 1:
            # The others got their demands, so neither a debt to them nor a credit from them should last.
            (tenant,) = used
            balances_ns[tenant] = min(0.0, balances_ns[tenant] + ROUND_NS)
            return
        parts_ns, used_ns = sum(self._parts[tenant] for tenant in used), sum(used.values())
        more_ns = {
            tenant: (used_ns * self._parts[tenant] / parts_ns if parts_ns else own_ns) - own_ns
            for tenant, own_ns in used.items()
        }
        # Credits are cut at MAX_CREDIT_NS, and then the debts exceed them. What debtors pay of this excess is credited
        # to nobody, so whoever uses that time gets no debt for it. Otherwise a new debtor would appear at once, and the
        # old ones would never pay the rest.
        excess_ns = -sum(balances_ns[tenant] for tenant in used)
        paid_ns = sum(max(0.0, min(more_ns[tenant], -balances_ns[tenant])) for tenant in used)
        new_debts = {
            tenant: max(0.0, -balances_ns[tenant] - more_ns[tenant]) for tenant in used if balances_ns[tenant] >= 0.0
        }
        new_debts_ns = sum(new_debts.values())
        free = min(1.0, max(0.0, min(excess_ns, paid_ns)) / new_debts_ns) if new_debts_ns else 0.0
        for tenant, change_ns in more_ns.items():
            balance_ns = balances_ns[tenant] + change_ns + free * new_debts.get(tenant, 0.0)
            balances_ns[tenant] = min(max(balance_ns, -MAX_DEBT_NS), MAX_CREDIT_NS)

    def _settle_latency(
        self,
        more_ns: int,
        by_tenant: Mapping[str, Sequence[SharedSession]],
        weights: Mapping[str, int],
        demand_by_tenant: Mapping[str, float],
    ) -> None:
        """Decide which tenants' latency sessions are obeyed in the next round."""
        before, obeyed = self._latency_balance_ns, set()
        self._latency_balance_ns = {}
        for tenant, own in by_tenant.items():
            if all(session.latency_word is None for session in own):
                continue
            # Compute the tenant's part by its weight, relative to the other tenants with demand. Alone, it gets the
            # whole card.
            others = sum(weights[other] for other in by_tenant if other != tenant and demand_by_tenant[other])
            due_ns = more_ns * weights[tenant] / (weights[tenant] + others)
            owed_ns = before.get(tenant, 0.0) + due_ns - sum(session.time.more_gpu_ns for session in own)
            self._latency_balance_ns[tenant] = owed_ns = min(max(owed_ns, -MAX_CREDIT_NS), MAX_CREDIT_NS)
            # Use two bounds, so that a tenant near the limit does not change sides in every round. A new tenant is
            # obeyed.
            if owed_ns >= (_OVERDRAWN_NS if tenant in self._obeyed or tenant not in before else 0.0):
                obeyed.add(tenant)
        self._obeyed = obeyed


def _forgive(balances_ns: dict[Key, float], keys: Sequence[Key]) -> None:
    """Reduce the debt that all of `keys` share: their creditors have since got everything that they demanded."""
    if keys and (least_ns := max(balances_ns[key] for key in keys)) < 0.0:
        for key in keys:
            balances_ns[key] += min(-least_ns, ROUND_NS)


def _in_turns(limits: TimeLimits, schedule: TurnSchedule, now_ns: int) -> TimeLimits:
    """Return the limits of a session that takes turns: a short queue, and work only in its own turn."""
    return limits._replace(
        queue_bound_ns=min(limits.queue_bound_ns or TURN_QUEUE_NS, TURN_QUEUE_NS),
        until_ns=now_ns + LAPSE_NS,
        turn_begin_ns=schedule.begin_ns,
        turn_ns=schedule.length_ns,
        turn_period_ns=schedule.period_ns,
    )


def _weights(sessions: Iterable[SharedSession]) -> dict[int, int]:
    return {session.session: session.weight for session in sessions}


def fill(total_ns: float, bounds: Mapping[AnyKey, float], weights: Mapping[AnyKey, int]) -> dict[AnyKey, float]:
    """Divide a total by weights, giving each key at most its bound. The others share what a bound leaves over."""
    parts: dict[AnyKey, float] = {}
    rest_ns, rest_weight = total_ns, sum(weights[key] for key in bounds)
    # Begin with the key that reaches its bound first if all grow in proportion to their weights.
    for key in sorted(bounds, key=lambda key: bounds[key] / weights[key]):
        parts[key] = min(bounds[key], rest_ns * weights[key] / rest_weight)
        rest_ns -= parts[key]
        rest_weight -= weights[key]
    return parts


def busy_times(parts: Mapping[int, float]) -> dict[int, float]:
    """Return each session's busy time when it has received its part, if all begin now and share the card equally."""
    times: dict[int, float] = {}
    elapsed_ns = done_ns = 0.0
    for number, (session, part_ns) in enumerate(sorted(parts.items(), key=lambda item: item[1])):
        elapsed_ns += (part_ns - done_ns) * (len(parts) - number)
        times[session] = elapsed_ns
        done_ns = part_ns
    return times
