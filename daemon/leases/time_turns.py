"""Turns on a card: when each of the sessions that saturate it begins work. Pure: the clock is an argument.

What the driver gives to each of two busy sessions is near a half only while both always have work queued. One that is
held back for some milliseconds gets up to two thirds of the time after that, and no worker can measure it. So sessions
that want all of the card and may not have it are not held back after a while, but take turns: each begins work only in
its own turn, and no more of it than ends there. Then a session's GPU time is its turn's length,
whatever the driver does.

Turns come again after a period, without the broker. It changes their lengths between two periods only, because a
balance within a period only shows which session was on. A session that leaves much of its turns idle gets no more
turns for a while: its pauses would be everyone's. A short gap, or a turn that its worker saw late, costs it nothing.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from gpulease.daemon.leases.time_account import SessionTime
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S, NS_PER_US

ROUND_NS: Final = 10 * NS_PER_MS
"""Time between two rounds: long against the driver's slice of 1.35 ms, short against a person's patience."""

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
"""The part of its turns in which a session may neither work nor wait, in the long run, if it is to get more of them. A
client that waits for its work before it launches more leaves some 1 ms idle each time."""

_MOST_LATE: Final = 0.5
"""The part of its turns that it may leave unused while it waits: for a latency session, or because its worker saw the
turn's begin late, or because a long kernel does not fit into what is left of the turn."""

_PATIENCE_NS: Final = 15 * NS_PER_MS
"""How much more than these a session may leave unused at once: some turns in which its worker wakes late, or a gap of
its client. With less, sessions that saturate the card lose their turns by chance."""

_MIN_BAR_NS: Final = 200 * NS_PER_MS
_MAX_BAR_NS: Final = 2 * NS_PER_S
"""How long a session gets no turns after it left too much of them unused. The first time, it is the first; each
further time it is doubled, up to the second; once all of its patience is back, it is the first again. Without turns,
what a session gets is only as exact as the account."""

_FORGET_NS: Final = 2 * _MAX_BAR_NS
"""How long after its last turn a session's use of its turns is forgotten."""


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


@dataclass(slots=True)
class _TurnUse:
    """How a session has used its turns.

    Attributes:
        patience_ns: How much more of its turns it may leave unused before it gets none.
        next_bar_ns: How long it gets none then.
        barred_until_ns: Until when it gets none.
        seen_ns: When it had a turn last.
    """

    patience_ns: float = float(_PATIENCE_NS)
    next_bar_ns: int = _MIN_BAR_NS
    barred_until_ns: int = 0
    seen_ns: int = 0


class Bar(NamedTuple):
    """Why a session gets no turns for a while, for the log.

    Attributes:
        session: Its number.
        bar_ns: For how long.
        due_ns: The length of its turns since they were renewed.
        busy_ns: For how long it worked since then.
        held_ns: For how long its work was held back since then.
    """

    session: int
    bar_ns: int
    due_ns: int
    busy_ns: int
    held_ns: int


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
    """The turns of one card's sessions: what each may use of a period, and when the period ends.

    Attributes:
        bars: The sessions that lost their turns in the last update.
    """

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        # When the present period began and ends; since when the turns are as they are, and each session's account then.
        self._began_ns = self._until_ns = self._since_ns = 0
        self._before: dict[int, tuple[int, int]] = {}
        self._uses: dict[int, _TurnUse] = {}
        self.bars: list[Bar] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, session: int) -> bool:
        return session in self._turns

    def __getitem__(self, session: int) -> Turn:
        return self._turns[session]

    def clear(self) -> None:
        self._turns.clear()
        self.bars = []

    def next_round_ns(self, now_ns: int) -> int:
        """Return when the next round is due: some round ends with the period, where balances show no part of a turn."""
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
        """Decide who takes turns, and how long they are, once a period is over or a session has gone.

        Args:
            now_ns: The present time.
            more_ns: Time since the last round.
            round_ns: Time until the next round.
            takers: The sessions that may take turns, in any order.
            only_for_caps: There are turns only if all capped sessions would get too much without them, and all sessions
                that are busy take turns.
        """
        self.bars = []
        if self._turns and all(session in takers for session in self._turns) and now_ns < self._until_ns:
            return
        chosen = {session: one for session, one in takers.items() if self._takes_turns(session, one, now_ns, more_ns)}
        self._uses = {session: use for session, use in self._uses.items() if now_ns - use.seen_ns < _FORGET_NS}
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
        # Each period begins where the one before ended, so turns move little from one to the next. If a session has
        # gone, the others' turns change in the midst of the period: if it began again, the first in line would gain.
        began_ns = self._began_ns if now_ns < self._until_ns else self._until_ns
        began_ns += (now_ns - began_ns) // period_ns * period_ns
        # One that has nothing to get begins nothing: even in a moment it could begin a long kernel each time.
        switches_ns = sum(bool(part) for part in parts.values()) * SWITCH_NS
        edges = [0.0]
        for part in parts.values():
            edges.append(edges[-1] + part * (period_ns - switches_ns) + (SWITCH_NS if part else 0))
        for session, (begin, end) in zip(parts, pairwise(edges), strict=True):
            # 0 would mean no turns, and so no limit.
            self._turns[session] = Turn(began_ns + int(begin), max(1, int(end) - int(begin)), period_ns)
        self._since_ns, self._began_ns, self._until_ns = now_ns, began_ns, began_ns + period_ns
        self._before = {session: (one.time.busy_ns, one.time.held_ns) for session, one in chosen.items()}

    def _takes_turns(self, session: int, one: Taker, now_ns: int, more_ns: int) -> bool:
        """Return whether a session gets turns; note how it used those that it had."""
        if (turn := self._turns.get(session)) is not None:
            return self._keeps_turns(session, one, turn, now_ns)
        if session in self._uses and now_ns < self._uses[session].barred_until_ns:
            return False
        busy_ns, held_ns = one.time.more_busy_ns, one.time.more_held_ns
        wanted_ns = busy_ns + held_ns if one.is_limited else busy_ns
        return bool(busy_ns) and wanted_ns >= more_ns * _SATURATES

    def _keeps_turns(self, session: int, one: Taker, turn: Turn, now_ns: int) -> bool:
        """Charge a session for what it left unused of its turns, and return whether it gets more of them."""
        use = self._uses.setdefault(session, _TurnUse())
        use.seen_ns = now_ns
        busy_ns, held_ns = self._before[session]
        busy_ns, held_ns = one.time.busy_ns - busy_ns, one.time.held_ns - held_ns
        due_ns = turn.time_between(self._since_ns, now_ns)
        # What it leaves idle next to its turns is nobody's loss. It may be held back and work at once: so this is the
        # least that it can have been idle.
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
