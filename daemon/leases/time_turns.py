"""Turns on a card: when each of the sessions that saturate it may begin work. Does no I/O, and reads no clock.

The driver gives each of two busy sessions about half of the time only while both always have work queued. A session
that was held back for some milliseconds then gets up to two thirds of the time, and no worker can measure that. So
sessions that could use all of the card, but may not, take turns, instead of being held back when they have used up
their part. Each session begins work only in its own turn, and only as much as ends within the turn. Then the GPU time
of a session equals the length of its turns, whatever the driver does.

Turns repeat after a period, without the broker. The broker changes their lengths only between two periods, because
balances within a period show only which session has had its turn. A session that leaves much of its turns idle gets no
turns for a while, because its pauses would cost all sessions time. A short gap, or a turn that its worker noticed late,
has no consequence.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from gpulease.daemon.leases.time_account import SessionTime
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S, NS_PER_US

ROUND_NS: Final = 10 * NS_PER_MS
"""Time between two rounds: long compared with the driver's time slice of 1.35 ms, and too short for a person to
notice."""

MIN_PERIOD_NS: Final = 20 * NS_PER_MS
MAX_PERIOD_NS: Final = 100 * NS_PER_MS
"""Bounds of the time from one turn of a session to its next turn. Work may have to wait for this time, and also for
the work that is queued before it."""

MIN_TURN_NS: Final = 5 * NS_PER_MS
"""Shortest length of a turn, unless the period is already MAX_PERIOD_NS."""

SWITCH_NS: Final = 180 * NS_PER_US
"""Time by which each turn exceeds its session's part, because the card needs it to switch from one session's work to
another's. Measured on an H200 (driver 580.159) with kernels of 20 us: turns of 5 and 15 ms lost 0.20 and 0.17 ms
each."""

TURN_QUEUE_NS: Final = 200 * NS_PER_US
"""Work that a session may have outstanding in its turn: enough to keep the card busy between two launches."""

_SATURATES: Final = 0.95
"""A session that works or waits for at least this fraction of the time saturates the card."""

_MOST_IDLE: Final = 0.15
"""Fraction of its turns that a session may leave idle (neither working nor waiting) in the long run without losing its
turns. A client that waits for its work before it launches more leaves about 1 ms idle each time."""

_MOST_LATE: Final = 0.5
"""Fraction of its turns that a session may leave unused because it waits for a latency session, because its worker
noticed the beginning of the turn late, or because a long kernel does not fit into the rest of the turn.
"""

_PATIENCE_NS: Final = 15 * NS_PER_MS
"""Time, beyond these allowed fractions, that a session may leave unused before it loses its turns: some turns in which
its worker wakes late, or a gap of its client. With less, sessions that saturate the card would lose their turns by
chance.
"""

_MIN_BAR_NS: Final = 200 * NS_PER_MS
_MAX_BAR_NS: Final = 2 * NS_PER_S
"""For how long a session gets no turns after it has left too much of them unused: _MIN_BAR_NS at first, then twice as
long each time, up to _MAX_BAR_NS. After the session's patience is full again, the next bar is _MIN_BAR_NS again.
Without turns, a session's time is only as exact as the account."""

_FORGET_NS: Final = 2 * _MAX_BAR_NS
"""How long after a session's last turn the record of its use is dropped."""


class TurnSchedule(NamedTuple):
    """The schedule of a session's turns.

    Attributes:
        begin_ns: Time at which one of the turns begins, on the monotonic clock.
        length_ns: Length of each turn.
        period_ns: Time from the beginning of a turn to the beginning of the next.
    """

    begin_ns: int
    length_ns: int
    period_ns: int

    def time_between(self, from_ns: int, until_ns: int) -> int:
        """Return how much of the time between two moments falls in the session's turns."""
        return self._time_until(until_ns) - self._time_until(from_ns)

    def _time_until(self, time_ns: int) -> int:
        periods, phase_ns = divmod(time_ns - self.begin_ns, self.period_ns)
        return periods * self.length_ns + min(phase_ns, self.length_ns)


@dataclass(slots=True)
class _TurnUse:
    """How a session has used its turns.

    Attributes:
        patience_ns: Time of its turns that it may still leave unused before it loses them.
        next_bar_ns: How long it gets no turns once it has lost them.
        barred_until_ns: Time until which it gets no turns.
        last_turns_ns: When it last had turns.
    """

    patience_ns: float = float(_PATIENCE_NS)
    next_bar_ns: int = _MIN_BAR_NS
    barred_until_ns: int = 0
    last_turns_ns: int = 0


class Bar(NamedTuple):
    """Why a session gets no turns for a while, for the log.

    Attributes:
        session: The session's number.
        bar_ns: For how long it gets no turns.
        due_ns: The total length of its turns since the turns last changed.
        busy_ns: Time for which it has worked since then.
        held_ns: Time for which its work has been held back since then.
    """

    session: int
    bar_ns: int
    due_ns: int
    busy_ns: int
    held_ns: int


class Taker(NamedTuple):
    """A session that may take turns.

    Attributes:
        time: The session's account.
        share_ns: Its share of the GPU time until the next round, before debts and credits.
        target_ns: The GPU time that it should get until the next round.
        is_capped: Whether it may not get more than `target_ns`, even if the rest stays unused.
        is_limited: Whether it was held back in the last round only because it had used up its allowance.
    """

    time: SessionTime
    share_ns: float
    target_ns: float
    is_capped: bool
    is_limited: bool


class Turns:
    """The turns of one card's sessions.

    Attributes:
        bars: One `Bar` for each session that lost its turns in the last update.
    """

    def __init__(self) -> None:
        self._turns: dict[int, TurnSchedule] = {}
        # Beginning and end of the current period, and the time of the last change of turns. `_before` is how long each
        # session had worked, and been held back, at that time.
        self._began_ns = self._until_ns = self._since_ns = 0
        self._before: dict[int, tuple[int, int]] = {}
        self._uses: dict[int, _TurnUse] = {}
        self.bars: list[Bar] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, session: int) -> bool:
        return session in self._turns

    def __getitem__(self, session: int) -> TurnSchedule:
        return self._turns[session]

    def clear(self) -> None:
        self._turns.clear()
        self.bars = []

    def next_round_ns(self, now_ns: int) -> int:
        """Return when the next round is due.

        A round also ends with each period, because balances are complete only at the end of a period.
        """
        left_ns = self._until_ns - now_ns
        if not self._turns or left_ns <= 0:
            return now_ns + ROUND_NS
        return now_ns + left_ns // max(1, round(left_ns / ROUND_NS))

    def update(
        self,
        now_ns: int,
        more_ns: int,
        round_ns: int,
        takers: Mapping[int, Taker],
        *,
        only_for_caps: bool = False,
    ) -> None:
        """Choose the sessions that take turns, and the lengths of the turns, once a period or a session has ended.

        Args:
            now_ns: The present time.
            more_ns: Time since the last round.
            round_ns: Time until the next round.
            takers: The sessions that may take turns, in any order.
            only_for_caps: Whether to give turns only if all capped sessions would get too much without turns, and all
                busy sessions take turns.
        """
        self.bars = []
        if self._turns and all(session in takers for session in self._turns) and now_ns < self._until_ns:
            return
        chosen = {
            session: taker for session, taker in takers.items() if self._takes_turns(session, taker, now_ns, more_ns)
        }
        self._uses = {session: use for session, use in self._uses.items() if now_ns - use.last_turns_ns < _FORGET_NS}
        self._turns = {}
        if len(chosen) < 2:
            return
        capped = [taker for taker in chosen.values() if taker.is_capped]
        # Without turns, the driver gives each session the same time. If a cap allows more, turns are not needed.
        if only_for_caps and not (capped and all(taker.target_ns * len(chosen) < round_ns for taker in capped)):
            return
        # A busy session without turns would take time in all the others' turns.
        if only_for_caps and any(taker.time.more_busy_ns for session, taker in takers.items() if session not in chosen):
            return
        parts = _parts(chosen, round_ns)
        least = min((part for part in parts.values() if part), default=1.0)
        period_ns = int(min(max(MIN_PERIOD_NS, MIN_TURN_NS / least), MAX_PERIOD_NS))
        # Each period begins where the last one ended, so turns move little between periods. If a session has ended, the
        # others' turns change within the period, because a new period would favour the first session.
        began_ns = self._began_ns if now_ns < self._until_ns else self._until_ns
        began_ns += (now_ns - began_ns) // period_ns * period_ns
        # A session gets no turns while its part is 0: even in a short turn it could begin a long kernel.
        switches_ns = sum(bool(part) for part in parts.values()) * SWITCH_NS
        edges = [0.0]
        for part in parts.values():
            edges.append(edges[-1] + part * (period_ns - switches_ns) + (SWITCH_NS if part else 0))
        for session, (begin, end) in zip(parts, pairwise(edges), strict=True):
            # A length of 0 would mean no turns, and so no limit.
            self._turns[session] = TurnSchedule(began_ns + int(begin), max(1, int(end) - int(begin)), period_ns)
        self._since_ns, self._began_ns, self._until_ns = now_ns, began_ns, began_ns + period_ns
        self._before = {session: (taker.time.busy_ns, taker.time.held_ns) for session, taker in chosen.items()}

    def _takes_turns(self, session: int, taker: Taker, now_ns: int, more_ns: int) -> bool:
        """Return whether a session gets turns, and record how it used its last turns."""
        if (schedule := self._turns.get(session)) is not None:
            return self._keeps_turns(session, taker, schedule, now_ns)
        if session in self._uses and now_ns < self._uses[session].barred_until_ns:
            return False
        busy_ns, held_ns = taker.time.more_busy_ns, taker.time.more_held_ns
        wanted_ns = busy_ns + held_ns if taker.is_limited else busy_ns
        return bool(busy_ns) and wanted_ns >= more_ns * _SATURATES

    def _keeps_turns(self, session: int, taker: Taker, schedule: TurnSchedule, now_ns: int) -> bool:
        """Charge a session for the unused time of its turns, and return whether it keeps getting turns."""
        use = self._uses.setdefault(session, _TurnUse())
        use.last_turns_ns = now_ns
        busy_ns, held_ns = self._before[session]
        busy_ns, held_ns = taker.time.busy_ns - busy_ns, taker.time.held_ns - held_ns
        due_ns = schedule.time_between(self._since_ns, now_ns)
        # Only idle time within its turns matters. A session may work while one of its launches is held back, so this is
        # the shortest time for which it can have been idle.
        unused_ns = max(0, due_ns - busy_ns)
        idle_ns = min(unused_ns, max(0, now_ns - self._since_ns - busy_ns - held_ns))
        earned_ns = min(due_ns * _MOST_IDLE - idle_ns, due_ns * _MOST_LATE - unused_ns)
        use.patience_ns = min(use.patience_ns + earned_ns, _PATIENCE_NS)
        if use.patience_ns >= 0.0:
            if use.patience_ns == _PATIENCE_NS:
                use.next_bar_ns = _MIN_BAR_NS
            return True
        self.bars.append(Bar(session, use.next_bar_ns, due_ns, busy_ns, held_ns))
        use.barred_until_ns, use.patience_ns = now_ns + use.next_bar_ns, 0.0
        use.next_bar_ns = min(2 * use.next_bar_ns, _MAX_BAR_NS)
        return False


def _parts(takers: Mapping[int, Taker], round_ns: int) -> dict[int, float]:
    """Return the fraction of a period that each session's turn takes, by session, in the order of their numbers."""
    capped = {session: taker.target_ns / round_ns for session, taker in takers.items() if taker.is_capped}
    free_part = 1.0 - sum(capped.values())
    # The uncapped sessions share the rest. Ignore debts that all of them have in common: these are owed to sessions
    # without turns, and shorter turns for all would not pay them back.
    free = {session: taker for session, taker in takers.items() if not taker.is_capped and taker.share_ns}
    relief = max(0.0, min((1.0 - taker.target_ns / taker.share_ns for taker in free.values()), default=0.0))
    dues = {session: taker.target_ns + taker.share_ns * relief for session, taker in free.items()}
    due_ns = sum(dues.values())
    if free_part < 0.0 or not due_ns:
        # If the caps add up to more than the card's time, they act as weights.
        scale = 1.0 / max(1.0, sum(capped.values()))
        return {session: capped.get(session, 0.0) * scale for session in sorted(takers)}
    return {
        session: capped[session] if session in capped else free_part * dues.get(session, 0.0) / due_ns
        for session in sorted(takers)
    }
