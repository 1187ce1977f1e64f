"""Turns on a card: when each of the sessions that saturate it begins work. Pure: the clock is an argument.

What the driver gives to each of two busy sessions is near a half only while both always have work queued. One that is
held back for some milliseconds gets up to two thirds of the time after that, and no worker can measure it. So sessions
that want all of the card and may not have it are not held back after a while, but take turns: each begins work only in
its own turn, and no more of it than ends there. Then a session's GPU time is its turn's length,
whatever the driver does.

Turns come again after a period, without the broker. It changes their lengths between two periods only, because a
balance within a period only shows which session was on. A session that leaves a part of its turn idle gets no more
turns for a while: its pauses would be everyone's.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from gpulease.daemon.leases.time_account import SessionTime
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S, NS_PER_US

MIN_PERIOD_NS: Final = 20 * NS_PER_MS
MAX_PERIOD_NS: Final = 100 * NS_PER_MS
"""Bounds of the time from a session's turn to its next: how long the others' work waits, apart from what is queued."""

MIN_TURN_NS: Final = 5 * NS_PER_MS
"""Length of the shortest turn, as long as periods can be longer."""

SWITCH_NS: Final = 180 * NS_PER_US
"""What each turn is longer than its session's part: the card takes so much from one session's work to another's.
Measured on an H200 (driver 580.159) with kernels of 20 us: turns of 5 and 15 ms lost 0.20 and 0.17 ms each."""

TURN_QUEUE_NS: Final = 200 * NS_PER_US
"""Work that a session may have outstanding in its turn: enough that the card is never idle between two launches."""

_SATURATES: Final = 0.95
"""A session that works or waits in this part of the time saturates the card."""

_MOST_IDLE: Final = 0.15
"""The time in which a session neither works nor waits, in parts of its turns, if it is to get more of them.

Turns count as MIN_TURN_NS at least. A client that waits for its work before it launches more is idle for some 0.1 ms
each time."""

_LEAST_TURN_USE: Final = 0.5
"""The part of its turns in which a session works, if it is to get more of them: a long kernel may leave less of a turn
than the next one needs, and a worker may see a turn's begin late."""

_BAR_NS: Final = 2 * NS_PER_S
"""How long a session gets no turns after it left some of them idle."""


class Turn(NamedTuple):
    """When a session has its turns.

    Attributes:
        begin_ns: When one of them begins, on the monotonic clock.
        length_ns: How long each of them is.
        period_ns: The time from the begin of one to that of the next.
    """

    begin_ns: int
    length_ns: int
    period_ns: int

    def time_between(self, from_ns: int, until_ns: int) -> int:
        """Return how much of its turns lies between two times."""
        return self._time_until(until_ns) - self._time_until(from_ns)

    def _time_until(self, time_ns: int) -> int:
        periods, phase_ns = divmod(time_ns - self.begin_ns, self.period_ns)
        return periods * self.length_ns + min(phase_ns, self.length_ns)


class Taker(NamedTuple):
    """A session that may take turns.

    Attributes:
        time: Its account.
        share_ns: Its share of the GPU time until the next round, before debts and credits.
        target_ns: The GPU time that it is to get until then.
        is_capped: It gets no more than that, even if the rest stays unused.
        is_limited: It was held back in the last round only because it had used up what it may use.
    """

    time: SessionTime
    share_ns: float
    target_ns: float
    is_capped: bool
    is_limited: bool


class Turns:
    """The turns of one card's sessions: what each may use of a period, and when the period ends."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        # When the present period ends; since when the turns are as they are, and each session's account then.
        self._until_ns = self._since_ns = 0
        self._before: dict[int, tuple[int, int]] = {}
        # Until when a session gets no turns.
        self._barred: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, session: int) -> bool:
        return session in self._turns

    def __getitem__(self, session: int) -> Turn:
        return self._turns[session]

    def clear(self) -> None:
        self._turns.clear()

    def update(
        self,
        now_ns: int,
        more_ns: int,
        round_ns: int,
        takers: Mapping[int, Taker],
        *,
        only_for_caps: bool = False,
    ) -> None:
        """Decide who takes turns, and how long they are, once a period is over or a session has gone.

        Args:
            now_ns: The present time.
            more_ns: Time since the last round.
            round_ns: Time until the next round.
            takers: The sessions that may take turns, in any order.
            only_for_caps: There are turns only if all capped sessions would get too much without them, and all sessions
                that are busy take turns.
        """
        if self._turns and all(session in takers for session in self._turns) and now_ns < self._until_ns:
            return
        chosen = {session: one for session, one in takers.items() if self._takes_turns(session, one, now_ns, more_ns)}
        self._barred = {session: until_ns for session, until_ns in self._barred.items() if until_ns > now_ns}
        self._turns = {}
        if len(chosen) < 2:
            return
        capped = [one for one in chosen.values() if one.is_capped]
        # The driver gives each of them the same: a cap of more than that is not a right to more.
        if only_for_caps and not (capped and all(one.target_ns * len(chosen) < round_ns for one in capped)):
            return
        # One without turns would take what all the others' turns leave to each of them.
        if only_for_caps and any(one.time.more_busy_ns for session, one in takers.items() if session not in chosen):
            return
        parts = _parts(chosen, round_ns)
        least = min((part for part in parts.values() if part), default=1.0)
        period_ns = int(min(max(MIN_PERIOD_NS, MIN_TURN_NS / least), MAX_PERIOD_NS))
        # Each period begins a whole number of periods after the clock's, so turns move little from one to the next.
        began_ns = now_ns - now_ns % period_ns
        # One that has nothing to get begins nothing: even in a moment it could begin a long kernel each time.
        switches_ns = sum(bool(part) for part in parts.values()) * SWITCH_NS
        edges = [0.0]
        for part in parts.values():
            edges.append(edges[-1] + part * (period_ns - switches_ns) + (SWITCH_NS if part else 0))
        for session, (begin, end) in zip(parts, pairwise(edges), strict=True):
            # 0 would mean no turns, and so no limit.
            self._turns[session] = Turn(began_ns + int(begin), max(1, int(end) - int(begin)), period_ns)
        self._since_ns, self._until_ns = now_ns, began_ns + period_ns
        self._before = {session: (one.time.busy_ns, one.time.held_ns) for session, one in chosen.items()}

    def _takes_turns(self, session: int, one: Taker, now_ns: int, more_ns: int) -> bool:
        """Return whether a session gets turns; note it if it got some and left them idle."""
        if (turn := self._turns.get(session)) is not None:
            busy_ns, held_ns = self._before[session]
            busy_ns, held_ns = one.time.busy_ns - busy_ns, one.time.held_ns - held_ns
            # It has to have worked or waited, but for a part of its turn, and used its turn if there was one.
            due_ns = turn.time_between(self._since_ns, now_ns)
            idle_ns = now_ns - self._since_ns - busy_ns - held_ns
            # It may have been sampled just before its turn: then a wait of its client must not count against it.
            most_idle_ns = max(due_ns, MIN_TURN_NS) * _MOST_IDLE
            if idle_ns <= most_idle_ns and (busy_ns >= due_ns * _LEAST_TURN_USE or due_ns < MIN_TURN_NS):
                return True
            self._barred[session] = now_ns + _BAR_NS
        if self._barred.get(session, 0) > now_ns:
            return False
        busy_ns, held_ns = one.time.more_busy_ns, one.time.more_held_ns
        wanted_ns = busy_ns + held_ns if one.is_limited else busy_ns
        return bool(busy_ns) and wanted_ns >= more_ns * _SATURATES


def _parts(takers: Mapping[int, Taker], round_ns: int) -> dict[int, float]:
    """Return the part of a period that each session's turn is, in the order of the sessions' numbers."""
    capped = {session: one.target_ns / round_ns for session, one in takers.items() if one.is_capped}
    rest = 1.0 - sum(capped.values())
    # The others share the rest. Debts that all of them have are to sessions that take no turns: shorter turns for all
    # would pay nothing back.
    free = {session: one for session, one in takers.items() if not one.is_capped and one.share_ns}
    relief = max(0.0, min((1.0 - one.target_ns / one.share_ns for one in free.values()), default=0.0))
    dues = {session: one.target_ns + one.share_ns * relief for session, one in free.items()}
    due_ns = sum(dues.values())
    if rest < 0.0 or not due_ns:
        # Caps of more than the card together are as good as weights.
        scale = 1.0 / max(1.0, sum(capped.values()))
        return {session: capped.get(session, 0.0) * scale for session in sorted(takers)}
    return {
        session: capped[session] if session in capped else rest * dues.get(session, 0.0) / due_ns
        for session in sorted(takers)
    }
