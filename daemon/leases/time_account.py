"""The account of one card's time, which computes each session's GPU time from all sessions' busy times. No clock.

A session is busy while it has work outstanding. The driver serves busy contexts in round robin, so each of k busy
contexts gets a k-th of the card. So the GPU time of a session is the integral of 1/k over the time in which it was
busy, and the GPU times of all sessions add up to the wall time in which any of them was busy.

A sample has each session's busy time so far, and the beginning and end of its latest busy interval. So between two
samples, the position of this interval is known. The rest of the busy time is assumed to be spread evenly, and to be
independent of other sessions. Sessions that hold back for a latency session are assumed to be busy when that one is
not.

The account is exact if all sessions or all but one were always busy, or if each session had one interval per sample. If
a tenant's sessions may hide how they overlap (`RoundTimes.may_hide`), several samples are taken in each round of
shares.

A worker's figures may be false. The account accepts no busy time that decreases or grows faster than the clock. A
worker that claims too much busy time is charged for it, and gets at most a share of the time of other sessions'
intervals.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

from gpulease.daemon.contract.control_page import TimeClaims
from gpulease.protocol.fast_dataclass import dataclass

MAX_CLAIM_NS: Final = 1 << 62
"""Maximum busy time that a worker may claim, 146 years. Larger claims are reduced to it, so that results fit into the
control page."""

Span = tuple[float, float, float]
"""A span of time: begin and end in monotonic nanoseconds, and the fraction of it in which a session was busy."""


@dataclass(slots=True)
class LeaseTimeUse:
    """The card's time that a lease has used, including its submits, in nanoseconds.

    Attributes:
        gpu_ns: GPU time: its share of the time in which it was busy.
        busy_ns: Time in which it had work outstanding.
        held_ns: Time in which its work was held back for others, or by its tenant's cap.
    """

    gpu_ns: float = 0.0
    busy_ns: int = 0
    held_ns: int = 0

    def add(self, other: "LeaseTimeUse") -> None:
        self.gpu_ns += other.gpu_ns
        self.busy_ns += other.busy_ns
        self.held_ns += other.held_ns


@dataclass(slots=True)
class SessionTime:
    """The account of one session.

    Attributes:
        gpu_ns: Its GPU time.
        busy_ns: Its busy time, as its worker reports it; never decreases.
        held_ns: Time in which one of its launches was held back.
        more_gpu_ns: Its GPU time between the last two samples.
        more_busy_ns: Its busy time between them.
        more_held_ns: Its time held back between them.
        is_busy: Whether work was outstanding at the last sample.
        is_held: Whether a launch was held back at the last sample.
    """

    gpu_ns: float = 0.0
    busy_ns: int = 0
    held_ns: int = 0
    more_gpu_ns: float = 0.0
    more_busy_ns: int = 0
    more_held_ns: int = 0
    is_busy: bool = False
    is_held: bool = False


class TimeAccount:
    """The account of one card.

    Attributes:
        sessions: The account of each session.
        active: The sessions in the last sample.
        busy_ns: Wall time in which any session was busy.
        more_ns: Wall time between the last two samples.
        more_busy_ns: The part of it in which any session was busy.
        partly_busy: Number of sessions that were busy only in a part of it. With two or more, the account is an
            estimate, which more frequent samples improve.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, SessionTime] = {}
        self.active: tuple[int, ...] = ()
        self.busy_ns = 0.0
        self.more_ns = 0
        self.more_busy_ns = 0.0
        self.partly_busy = 0
        self._sampled_ns = 0

    def resume(self, session: int, busy_ns: int, held_ns: int, sampled_ns: int) -> None:
        """Continue the account of a session that an earlier broker sampled last at `sampled_ns`.

        Call this before `sample`.
        """
        self.sessions[session] = SessionTime(busy_ns=busy_ns, held_ns=held_ns)
        self._sampled_ns = max(self._sampled_ns, sampled_ns)

    def end(self, session: int) -> None:
        """Forget a session that has ended, after a last sample."""
        self.sessions.pop(session, None)
        self.active = tuple(other for other in self.active if other != session)

    def sample(self, now_ns: int, claims: Mapping[int, TimeClaims], first: Collection[int] = ()) -> None:
        """Process the claims of the card's sessions at one moment.

        Args:
            now_ns: The moment, on the monotonic clock.
            claims: The claims by session. Sessions without one have been idle since the last sample.
            first: The sessions for which all others have held back since the last sample.
        """
        before_ns = self._sampled_ns or now_ns
        self.more_ns, self._sampled_ns = max(0, now_ns - before_ns), now_ns
        for session in self.active:
            if session not in claims:
                idle = self.sessions[session]
                idle.more_busy_ns = idle.more_held_ns = 0
                idle.more_gpu_ns, idle.is_busy, idle.is_held = 0.0, False, False
        self.active = tuple(claims)
        # Step 1: compute by how much each session's busy time has grown, and where that time lies.
        pieces: dict[int, list[Span]] = {}
        self.partly_busy = 0
        for session, claim in claims.items():
            busy_ns = min(claim.busy_until(now_ns), MAX_CLAIM_NS)
            held_ns = min(claim.held_back_until(now_ns), MAX_CLAIM_NS)
            if (time := self.sessions.get(session)) is None:
                # The session is new: any earlier busy time was counted by another daemon. An interval that has begun
                # since the last sample counts in full.
                begun_ns = now_ns - max(claim.busy_since_ns, before_ns) if claim.busy_since_ns else 0
                time = self.sessions[session] = SessionTime(busy_ns=busy_ns - max(0, begun_ns), held_ns=held_ns)
            time.more_busy_ns = min(max(0, busy_ns - time.busy_ns), self.more_ns)
            time.more_held_ns = min(max(0, held_ns - time.held_ns), self.more_ns)
            time.busy_ns, time.held_ns = max(time.busy_ns, busy_ns), max(time.held_ns, held_ns)
            time.is_busy, time.is_held = bool(claim.busy_since_ns), bool(claim.held_back_since_ns)
            time.more_gpu_ns = 0.0
            if time.more_busy_ns:
                self.partly_busy += time.more_busy_ns < self.more_ns
                pieces[session] = list(_pieces(claim, time.more_busy_ns, before_ns, now_ns))
        # Step 2: divide each stretch of time among the sessions that were busy in it.
        self.more_busy_ns = 0.0
        for session, gpu_ns in _shared(pieces, first):
            self.sessions[session].more_gpu_ns += gpu_ns
            self.sessions[session].gpu_ns += gpu_ns
            self.more_busy_ns += gpu_ns
        self.busy_ns += self.more_busy_ns


class RoundTimes:
    """The sums of the samples of one round.

    Attributes:
        sessions: For each session that was busy in one of them: its account so far, and its GPU time in the round.
        more_ns: Wall time of the round.
        more_busy_ns: The part of it in which any session was busy.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, SessionTime] = {}
        self.more_ns = 0
        self.more_busy_ns = 0.0

    def add(self, account: TimeAccount) -> None:
        """Add the busy time that the account charged in its last sample."""
        self.more_ns += account.more_ns
        self.more_busy_ns += account.more_busy_ns
        for session in account.active:
            self.sessions.setdefault(session, SessionTime())
        for session, total in self.sessions.items():
            # The session may have ended during the round.
            if (time := account.sessions.get(session)) is None:
                continue
            total.gpu_ns, total.busy_ns, total.held_ns = time.gpu_ns, time.busy_ns, time.held_ns
            total.is_busy, total.is_held = time.is_busy, time.is_held
            total.more_gpu_ns += time.more_gpu_ns
            total.more_busy_ns += time.more_busy_ns
            total.more_held_ns += time.more_held_ns

    def add_idle(self, account: TimeAccount, sessions: Iterable[int]) -> None:
        """Add those of `sessions` that were idle throughout the round, with their accounts so far."""
        for session in sessions:
            if session not in self.sessions:
                time = account.sessions.get(session) or SessionTime()
                self.sessions[session] = SessionTime(time.gpu_ns, time.busy_ns, time.held_ns)

    def may_hide(self, tenants: Mapping[int, str]) -> bool:
        """Return whether a tenant's sessions may overlap more or less than the account assumes.

        This is possible if two or more of them were busy in parts of the round, as well as another tenant's session. If
        they are always busy one after the other, the account charges them up to a quarter less than they get; if they
        always begin together, up to twice as much. Several samples in a round show how they overlap.

        Args:
            tenants: The tenant of each session.
        """
        busy = Counter(
            tenants[session] for session, time in self.sessions.items() if session in tenants and time.more_busy_ns
        )
        partly = Counter(
            tenants[session]
            for session, time in self.sessions.items()
            if session in tenants and 0 < time.more_busy_ns < self.more_ns
        )
        return len(busy) > 1 and any(count > 1 for count in partly.values())


def _pieces(claim: TimeClaims, busy_ns: int, from_ns: int, until_ns: int) -> Iterator[Span]:
    """Yield the spans between two samples over which `busy_ns` of busy time are spread, the latest first."""
    if busy_ns >= until_ns - from_ns:
        yield from_ns, until_ns, 1.0
        return
    # Two intervals have a known position: the current one and the one before. Either claim may be false, so cut each to
    # the busy time that is left.
    end_ns, rest_ns = until_ns, busy_ns
    intervals = ((claim.busy_since_ns, until_ns), (claim.last_busy_from_ns, claim.last_busy_until_ns))
    for begin_ns, finish_ns in intervals:
        if not begin_ns or not rest_ns:
            continue
        finish_ns = min(finish_ns, end_ns)
        begin_ns = max(begin_ns, from_ns, finish_ns - rest_ns)
        if begin_ns < finish_ns:
            yield begin_ns, finish_ns, 1.0
            end_ns, rest_ns = begin_ns, rest_ns - (finish_ns - begin_ns)
    # The rest of the busy time lies at unknown times before these two intervals.
    if rest_ns:
        if end_ns - from_ns < rest_ns:
            # The intervals contradict the busy time: count the busy time that the worker claims.
            yield from_ns, until_ns, rest_ns / (until_ns - from_ns)
        else:
            yield from_ns, end_ns, rest_ns / (end_ns - from_ns)


def _shared(pieces: Mapping[int, list[Span]], first: Collection[int]) -> Iterator[tuple[int, float]]:
    """Yield the GPU time of each session, piece by piece."""
    edges = sorted({edge for spans in pieces.values() for span in spans for edge in span[:2]})
    for begin_ns, end_ns in pairwise(edges):
        wall_ns = end_ns - begin_ns
        parts = {
            session: min(1.0, sum(part for start, finish, part in spans if start <= begin_ns and end_ns <= finish))
            for session, spans in pieces.items()
        }
        leading = {session_id: part for session_id, part in parts.items() if part and session_id in first}
        others = {session_id: part for session_id, part in parts.items() if part and session_id not in first}
        if not (leading and others):
            yield from shares_of(leading or others, wall_ns).items()
            continue
        # The others hold back while one of `first` is busy. So their busy time is in the remaining time, and only the
        # excess is in the time of `first`.
        idle = 1.0
        for part in leading.values():
            idle *= 1.0 - part
        others_after = {session_id: min(1.0, part / idle) if idle else 0.0 for session_id, part in others.items()}
        others_during = {
            session_id: (part - others_after[session_id] * idle) / (1.0 - idle) for session_id, part in others.items()
        }
        yield from shares_of(others_after, wall_ns * idle).items()
        together = {session_id: min(1.0, part / (1.0 - idle)) for session_id, part in leading.items()} | others_during
        yield from shares_of(together, wall_ns * (1.0 - idle)).items()


# Gauss-Legendre nodes and weights on (0, 1), of 8 points: exact for polynomials up to degree 15.
_NODES: Final = tuple(
    (0.5 + half * node, weight / 2)
    for node, weight in (
        (0.1834346424956498, 0.3626837833783620),
        (0.5255324099163290, 0.3137066458778873),
        (0.7966664774136267, 0.2223810344533745),
        (0.9602898564975363, 0.1012285362903763),
    )
    for half in (0.5, -0.5)
)


def shares_of(busy: Mapping[int, float], wall_ns: float) -> dict[int, float]:
    """Divide a stretch of time among sessions that were busy in parts of it, independently of one another.

    A session's share is p * E[1 / (1 + B)], where B is how many of the others are busy. With F(x) = product of
    (1 - p + p x) over all sessions, that is the integral of p * F(x) / (1 - p + p x) over x from 0 to 1, and the sum
    over all sessions is that of F'(x): F(1) - F(0), the probability that anyone is busy.
    """
    if len(busy) < 2 or all(part >= 1.0 for part in busy.values()):
        return {session: wall_ns * part / len(busy) for session, part in busy.items()}
    shares = dict.fromkeys(busy, 0.0)
    for node, weight in _NODES:
        product = weight * wall_ns
        for part in busy.values():
            product *= 1.0 - part + part * node
        for session, part in busy.items():
            shares[session] += product * part / (1.0 - part + part * node)
    # For more than 16 sessions the integral is an approximation, so scale the shares to the exact sum.
    all_idle = 1.0
    for part in busy.values():
        all_idle *= 1.0 - part
    total_ns = sum(shares.values())
    scale = wall_ns * (1.0 - all_idle) / total_ns if total_ns else 0.0
    return {session: share * scale for session, share in shares.items()}
