"""A card in virtual time: sessions with kernels of known length, the driver's equal shares, obedient workers."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from random import Random

from gpulease.daemon.contract.control_page import TimeClaims, TimeLimits
from gpulease.daemon.leases.time_account import RoundTimes, TimeAccount
from gpulease.daemon.leases.time_shares import FINE_NS, SharedSession, TimeShares
from gpulease.daemon.leases.time_turns import ROUND_NS

US = 1000
MS = 1000 * US
S = 1000 * MS
TICK = 100 * US

WORK_NS = attrgetter("work_ns")

SLICE_NS = 1400 * US
"""How long a real card works for one session while others wait."""


@dataclass(slots=True)
class SimulatedSession:
    """A session that runs kernels of one length, one after the other, with a pause after each, or in batches.

    Attributes:
        kernel_ns: GPU time of a kernel.
        pause_ns: Time from a kernel's end to the next launch; 0: there is always a next one in the queue.
        batch_ns: Its client launches so much work at once, all of which is queued while nothing is limited, waits for
            it, and launches more after the pause; 0: one kernel at a time.
        lateness: How often its worker wakes up to 4 ms late for a turn.
        done_ns: GPU time that it really got.
        lie: Changes what its worker claims.
        seen: Its claims at the last sample, if it was idle then.
    """

    tenant: str = "ann"
    weight: int = 1
    kernel_ns: int = 20 * US
    pause_ns: int = 0
    latency_word: int | None = None
    starts_ns: int = 0
    stops_ns: int = 1 << 62
    lie: Callable[[TimeClaims], TimeClaims] | None = None
    batch_ns: int = 0
    lateness: float = 0.0
    random: Random = field(default_factory=partial(Random, 1))
    left_ns: float = 0.0
    asleep_until_ns: int = 0
    done_ns: float = 0.0
    work_ns: float = 0.0
    next_ns: int = 0
    claims: TimeClaims = TimeClaims(0, 0, 0, 0)
    seen: TimeClaims | None = None
    limits: TimeLimits = TimeLimits()

    def begin(self, now_ns: int, words: int) -> None:
        """Launch what may be launched in the tick that begins."""
        wants = self.starts_ns <= now_ns < self.stops_ns and now_ns >= self.next_ns
        held = False
        if self.batch_ns:
            wants = wants and self._has_batch()
        if wants and self.work_ns < (TICK if self.batch_ns or not self.pause_ns else 1):
            held = self._is_held(now_ns, words)
            if not held:
                # As many as fill the tick at once; with pauses, one after the other.
                kernels = math.ceil((TICK - self.work_ns) / self.kernel_ns)
                if self.batch_ns:
                    kernels = math.ceil(self.left_ns / self.kernel_ns) if self.limits == TimeLimits() else kernels
                    self.left_ns -= kernels * self.kernel_ns
                elif self.pause_ns:
                    kernels = 1
                self.work_ns += kernels * self.kernel_ns
        claims = self.claims
        # Nothing changes in most ticks.
        if (self.work_ns > 0) != (claims.busy_since_ns > 0) or held != (claims.held_back_since_ns > 0):
            self._note(now_ns, self.work_ns > 0, held)

    def _has_batch(self) -> bool:
        """Return whether work of a batch is to be launched; the next batch follows once all of one has ended."""
        if self.left_ns < 1 and not self.work_ns:
            self.left_ns = self.batch_ns
        return self.left_ns >= 1

    def run(self, gpu_ns: float, end_ns: int, tick_end_ns: int) -> None:
        """Get so much of the card in a tick; if it has nothing more to do, it ends at `end_ns`."""
        self.work_ns -= gpu_ns
        self.done_ns += gpu_ns
        if self.work_ns < 1:
            self.work_ns = 0.0
            # Between the kernels of a batch there is no pause.
            self.next_ns = end_ns + self.pause_ns if self.left_ns < 1 else end_ns
            # At the end of the tick it may begin more without a pause.
            if end_ns < tick_end_ns:
                self._note(end_ns, False, bool(self.claims.held_back_since_ns))

    def _is_held(self, now_ns: int, words: int) -> bool:
        limits = self.limits
        if now_ns >= limits.until_ns:
            return False
        if limits.latency_mask & words:
            return True
        if limits.turn_ns:
            phase_ns = (now_ns - limits.turn_begin_ns) % limits.turn_period_ns
            # A turn that is shorter than a tick could last one here.
            if phase_ns >= limits.turn_ns or limits.turn_ns < TICK:
                to_turn_ns = limits.turn_period_ns - phase_ns
                # It wakes up for its turn at some time, of which it can see nothing before.
                if self.lateness and self.asleep_until_ns < now_ns:
                    is_late = self.random.random() < self.lateness
                    self.asleep_until_ns = now_ns + to_turn_ns + int(self.random.random() * 4 * MS * is_late)
                return True
            if now_ns < self.asleep_until_ns:
                return True
            # The middle of a short kernel is to be within the turn.
            half_ns = self.kernel_ns // 2 if self.kernel_ns <= 500 * US else 0
            if self.work_ns + half_ns >= limits.turn_ns - phase_ns:
                return True
        # A bound of less than a tick can't be seen here.
        if limits.queue_bound_ns and self.work_ns > max(limits.queue_bound_ns, TICK):
            return True
        return bool(limits.allowance_ns) and self.claims.busy_until(now_ns) + self.work_ns >= limits.allowance_ns

    def _note(self, now_ns: int, is_busy: bool, is_held: bool) -> None:
        claims = self.claims
        if is_busy and not claims.busy_since_ns:
            claims = claims._replace(busy_since_ns=now_ns)
        elif not is_busy and claims.busy_since_ns:
            since_ns = claims.busy_since_ns
            claims = claims._replace(
                busy_ns=claims.busy_until(now_ns),
                busy_since_ns=0,
                last_busy_from_ns=since_ns,
                last_busy_until_ns=now_ns,
            )
        if is_held and not claims.held_back_since_ns:
            claims = claims._replace(held_back_since_ns=now_ns)
        elif not is_held and claims.held_back_since_ns:
            claims = claims._replace(held_back_ns=claims.held_back_until(now_ns), held_back_since_ns=0)
        self.claims = claims

    @property
    def shown(self) -> TimeClaims:
        return self.claims if self.lie is None else self.lie(self.claims)


class Relay:
    """Sessions of one tenant that work one after the other: one begins a piece of work when another has ended its own.

    None of them is busy for long, although one always is: so they look as if they left the card to others in between.
    """

    def __init__(self, *sessions: SimulatedSession) -> None:
        self._sessions = sessions
        self._runner = 0
        self._done_ns = 0.0

    def pass_on(self, now_ns: int) -> None:
        """Let another session begin if the one whose turn it is has ended a piece of its work."""
        runner = self._sessions[self._runner]
        if not runner.work_ns and runner.done_ns > self._done_ns:
            self._runner = (self._runner + 1) % len(self._sessions)
            runner = self._sessions[self._runner]
            self._done_ns = runner.done_ns
        for one in self._sessions:
            one.next_ns = now_ns if one is runner else 1 << 62


class SimulatedCard:
    """Sessions on one card, sampled and limited in rounds of about 10 ms.

    Busy sessions get the same at any time; with `is_sliced`, as on a real card, one works at a time until its slice is
    over or it has no work, and the change to the next takes a tick.

    Attributes:
        used_ns: Time in which the card computed.
    """

    def __init__(
        self,
        *sessions: SimulatedSession,
        caps: Mapping[str, float] | None = None,
        seed: int = 1,
        is_sliced: bool = False,
        relay: Relay | None = None,
        by_weights: bool = True,
    ) -> None:
        self.sessions = list(sessions)
        self._latency_sessions = [one for one in sessions if one.latency_word is not None]
        self.account, self.shares = TimeAccount(), TimeShares()
        self.caps = caps or {}
        self.now_ns = S
        self.used_ns = 0.0
        self._round_ns = self._sample_ns = self.now_ns
        self._round_times, self._is_fine = RoundTimes(), False
        self._random = Random(seed)
        self._is_sliced, self._relay, self._by_weights = is_sliced, relay, by_weights
        self._owner, self._slice_ns = 0, 0

    def run(self, seconds: float, *, limits: bool = True, every_ns: int = ROUND_NS) -> list[float]:
        """Let time pass, and return the GPU time that each session really got."""
        before = [one.done_ns for one in self.sessions]
        end_ns = self.now_ns + int(seconds * S)
        while self.now_ns < end_ns:
            if self.now_ns >= self._round_ns:
                self._round(limits)
                # The broker's loop is never exactly on time.
                due_ns = self.shares.next_round_ns(self.now_ns) if every_ns == ROUND_NS else self.now_ns + every_ns
                self._round_ns = due_ns + self._random.randrange(every_ns // 10)
            elif self._is_fine and self.now_ns >= self._sample_ns:
                self._sample()
            self._tick()
        return [one.done_ns - earlier for one, earlier in zip(self.sessions, before, strict=True)]

    def _tick(self) -> None:
        if self._relay is not None:
            self._relay.pass_on(self.now_ns)
        words = 0
        for one in self._latency_sessions:
            words |= (one.work_ns > 0) << (one.latency_word or 0)
        for one in self.sessions:
            one.begin(self.now_ns, words)
        self.now_ns += TICK
        if self._is_sliced:
            self._run_owner()
            return
        # The driver gives everyone who has work the same.
        left = float(TICK)
        busy = [one for one in self.sessions if one.work_ns]
        if len(busy) > 1:
            busy.sort(key=WORK_NS)
        before = 0.0
        for number, one in enumerate(busy):
            got = min(one.work_ns, left / (len(busy) - number))
            left -= got
            # It ends when everyone with more work has had as much as it.
            before += got
            ran_ns = before + got * (len(busy) - number - 1)
            one.run(got, self.now_ns - TICK + math.ceil(ran_ns), self.now_ns)
        self.used_ns += TICK - left

    def _run_owner(self) -> None:
        owner = self.sessions[self._owner]
        if not owner.work_ns or self._slice_ns >= SLICE_NS:
            order = [(self._owner + step) % len(self.sessions) for step in range(1, len(self.sessions) + 1)]
            busy = [number for number in order if self.sessions[number].work_ns]
            if not busy:
                return
            self._slice_ns = 0
            if busy[0] != self._owner:
                self._owner = busy[0]
                return
        got = min(owner.work_ns, TICK)
        owner.run(got, self.now_ns - TICK + math.ceil(got), self.now_ns)
        self._slice_ns += TICK
        self.used_ns += got

    def _sample(self) -> None:
        self._sample_ns = self.now_ns + int(FINE_NS * self._random.uniform(0.5, 1.5))
        first = {
            number
            for number, one in enumerate(self.sessions)
            if one.latency_word is not None and one.tenant in self.shares.obeyed
        }
        self.account.sample(self.now_ns, dict(self._new_claims()), first)
        self._round_times.add(self.account)

    def _new_claims(self) -> Iterator[tuple[int, TimeClaims]]:
        """Yield the claims of sessions that are not idle, and of those that have become idle since the last sample."""
        for number, one in enumerate(self.sessions):
            claims = one.shown
            if one.seen != claims or one.latency_word is not None:
                one.seen = None if claims.busy_since_ns or claims.held_back_since_ns else claims
                yield number, claims

    def _round(self, limits: bool) -> None:
        self._sample()
        times, self._round_times = self._round_times, RoundTimes()
        if not limits:
            return
        self._is_fine = times.may_hide({number: one.tenant for number, one in enumerate(self.sessions)})
        in_debt = [number for number, one in enumerate(self.sessions) if one.tenant in self.shares.debtors]
        times.add_idle(self.account, in_debt)
        shared = [
            SharedSession(number, one.tenant, one.weight, one.latency_word, times.sessions[number])
            for number, one in enumerate(self.sessions)
            if number in times.sessions
        ]
        sessions = self.sessions
        weights = {
            one.tenant: max(other.weight for other in sessions if other.tenant == one.tenant) for one in sessions
        }
        found = self.shares.limits(
            self.now_ns, times.more_ns, shared, weights, self.caps, times.more_busy_ns, shares=self._by_weights
        )
        for number, one in enumerate(self.sessions):
            one.limits = found.get(number) or self.shares.idle_limits(self.now_ns)
