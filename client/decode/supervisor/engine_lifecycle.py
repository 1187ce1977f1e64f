"""The life of a decoder's engine: its phases, and how each event changes them and what effects it has. No I/O.

    Serving --fault isolation--> Isolating --all cleared--> Serving
    Serving | Isolating --loss--> Lost
    Serving | Isolating | Lost --another engine is ready--> Adopting --no step is in progress--> Serving | Isolating
    any --close--> Closed

Each event is a method. It changes the phase and returns effects, which the supervisor carries out in their order. One
engine computes at any time. A second one, the successor, exists only in Adopting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.scheduler.scheduler import MAX_UNANSWERED_STEPS
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.fault_isolation import FaultIsolation
from gpulease.client.errors import GpuLeaseError

EngineT = TypeVar("EngineT")


# --- phases ---


@dataclass(frozen=True, slots=True)
class PendingLoss:
    """A loss that was reported outside any step. The step loop handles it between two steps.

    Attributes:
        error: What ended the engine.
        is_aborting: Whether the steps in flight were aborted, because they did not end by themselves.
    """

    error: Exception
    is_aborting: bool = False


@dataclass(frozen=True, slots=True)
class Serving(Generic[EngineT]):
    """An engine computes the requests of all tenants.

    Attributes:
        engine: The engine.
        since: When it took over, in monotonic seconds.
        pending_loss: The engine's loss, if it was reported and the step loop has not handled it yet.
    """

    engine: EngineT
    since: float
    pending_loss: PendingLoss | None = None


@dataclass(frozen=True, slots=True)
class Isolating(Generic[EngineT]):
    """An engine computes one group of suspects, `FaultIsolation.current`, alone.

    Attributes:
        engine: The engine.
        since: When it took over, in monotonic seconds.
        cleared_at: For each suspect, how many tokens it must have emitted to be cleared: as many as at the loss, plus
            one for each step that may have been in progress.
        pending_loss: The engine's loss, if it was reported and the step loop has not handled it yet.
    """

    engine: EngineT
    since: float
    cleared_at: Mapping[str, int]
    pending_loss: PendingLoss | None = None


@dataclass(frozen=True, slots=True)
class Lost(Generic[EngineT]):
    """The engine was lost, and another one has been requested.

    Attributes:
        engine: The lost engine.
        error: What ended it.
        at: When it was lost, in monotonic seconds.
        outage_began: When the last engine that computed anything was lost, in monotonic seconds.
        number: The loss's number, unique in the decoder.
        cleared_at: `Isolating.cleared_at` if the engine was computing a group of suspects, else empty.
        tries: How many requests for another engine were refused.
        refusal: The kind of the last refusal; None if there was none.
    """

    engine: EngineT
    error: Exception
    at: float
    outage_began: float
    number: int
    cleared_at: Mapping[str, int] = field(default_factory=dict)
    tries: int = 0
    refusal: type[Exception] | None = None
    pending_loss: None = None


@dataclass(frozen=True, slots=True)
class Adopting(Generic[EngineT]):
    """Another engine is ready. It takes over as soon as no step is in progress.

    Attributes:
        successor: The engine that is ready.
        before: The phase that continues until the successor takes over. Its engine may be lost before then.
    """

    successor: EngineT
    before: "Serving[EngineT] | Isolating[EngineT] | Lost[EngineT]"

    @property
    def engine(self) -> EngineT:
        """The engine that computes the steps in flight, which is not yet the successor."""
        return self.before.engine

    @property
    def pending_loss(self) -> PendingLoss | None:
        """The pending loss of the engine that computes the steps in flight."""
        return self.before.pending_loss


@dataclass(frozen=True, slots=True)
class Closed(Generic[EngineT]):
    """The decoder has ended. No other phase follows.

    Attributes:
        engine: The last engine.
        error: Why it ended: because it was closed, or through an internal error.
        is_lost: Whether the engine had been lost before.
    """

    engine: EngineT
    error: GpuLeaseError
    is_lost: bool
    pending_loss: None = None


Phase = Serving[EngineT] | Isolating[EngineT] | Lost[EngineT] | Adopting[EngineT] | Closed[EngineT]


# --- effects ---


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the step loop, which may be idle, so that it handles the change."""


@dataclass(frozen=True, slots=True)
class AwaitAnswers(Generic[EngineT]):
    """Give the steps in flight time to end by themselves, then call `answers_overdue`."""

    engine: EngineT
    error: Exception


@dataclass(frozen=True, slots=True)
class AbortSteps:
    """Stop waiting for the steps in flight: the engine's host does not respond."""


@dataclass(frozen=True, slots=True)
class EndSequences:
    """End every tenant's sequences. Their replays may wait for at least `wait_s` seconds."""

    reason: CompletionReason
    wait_s: float


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request that ended an engine while it was computed alone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEngine(Generic[EngineT]):
    """Abandon a lost engine and, after a pause, request others until one is available or `is_wanted` is False."""

    lost: EngineT
    loss_number: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """Notify the task that offered the successor that it has taken over."""


@dataclass(frozen=True, slots=True)
class BindRegions:
    """Give every tenant its region of the engine."""


@dataclass(frozen=True, slots=True)
class RestartSequences:
    """End the live sequences, if there are any, and give every tenant its region again."""


@dataclass(frozen=True, slots=True)
class Isolate:
    """Let the scheduler admit only these requests. None ends the isolation: all requests are admitted."""

    group: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Log:
    """Write a log line: about `error` if there is one, otherwise a warning or a notice."""

    event: str
    fields: Mapping[str, Any]
    error: Exception | None = None
    is_warning: bool = False


Effect = (
    Wake
    | AwaitAnswers[EngineT]
    | AbortSteps
    | EndSequences
    | AbortRequest
    | RequestEngine[EngineT]
    | HandOver
    | BindRegions
    | RestartSequences
    | Isolate
    | Log
)


class RequestsInProgress(Protocol):
    """The facts about requests that fault isolation needs. Requests have their callers' ids."""

    def is_in_progress(self, request_id: str) -> bool:
        """Return whether the request has not ended."""

    def emitted_tokens(self, request_id: str) -> int:
        """Return the number of tokens that the request has emitted; 0 if it has ended."""

    def is_computable(self, request_id: str) -> bool:
        """Return whether a request would get rows after its admission.

        A suspended tenant's request would not, and a group that waited for it would delay all others.
        """


# --- events ---


class EngineLifecycle(Generic[EngineT]):
    """The phase of one decoder's engine, and the history of losses, which decides pauses and suspects.

    Attributes:
        phase: The phase.
        isolation: The requests that may have caused losses of engines.
    """

    def __init__(self, engine: EngineT, now: float, requests: RequestsInProgress) -> None:
        self.phase: Phase[EngineT] = Serving(engine, now)
        self.isolation = FaultIsolation()
        self._requests = requests
        # This history outlives a phase. It decides pauses, deadlines and the numbers of losses.
        self._losses_in_a_row = self._losses = 0
        self._steps_at_loss = 0
        self._outage_began = now

    # --- queries ---

    @property
    def failure(self) -> GpuLeaseError | None:
        """The error that ended the decoder; None while it is open."""
        return self.phase.error if isinstance(self.phase, Closed) else None

    @property
    def loss(self) -> Lost[EngineT] | None:
        """The loss, if no engine serves yet; None while there is an engine, and once the decoder has ended."""
        phase = self._serving_phase
        return phase if isinstance(phase, Lost) else None

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine. A loss counts only once the step loop has processed it."""
        return isinstance(self._serving_phase, Serving | Isolating)

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine whose loss was not reported."""
        return self.has_engine and self.phase.pending_loss is None

    def is_engaged(self, engine: EngineT) -> bool:
        """Return whether this engine is the one that computes, rather than a lost one or a successor."""
        return self.has_engine and self.phase.engine is engine

    def is_wanted(self, loss_number: int) -> bool:
        """Return whether the loss with this number still needs an engine. A move may have provided one."""
        return self.loss is not None and self.loss.number == loss_number

    def is_change_due(self) -> bool:
        """Return whether the steps in flight must end before the next one starts, so that the phase can change."""
        phase = self.phase
        if type(phase) is Serving:
            # Suspects that could not be computed while their tenant was suspended may be computable now.
            isolation = self.isolation
            return bool(isolation) and isolation.has_next(self._requests.is_computable)
        if type(phase) is Isolating:
            # The group is done when each member has passed the position of the loss, has ended, or can't be computed
            # now.
            is_computable = self._requests.is_computable
            return not any(self._is_in_doubt(name) and is_computable(name) for name in self.isolation.current)
        return type(phase) is Adopting

    @property
    def _serving_phase(self) -> "Serving[EngineT] | Isolating[EngineT] | Lost[EngineT] | Closed[EngineT]":
        """The phase; during Adopting, the one that continues until the successor takes over."""
        return self.phase.before if isinstance(self.phase, Adopting) else self.phase

    def _is_in_doubt(self, request_id: str) -> bool:
        """Return whether a member of the current group has not yet passed the position of the loss."""
        assert isinstance(self.phase, Isolating)
        requests = self._requests
        return (
            requests.is_in_progress(request_id)
            and requests.emitted_tokens(request_id) < self.phase.cleared_at[request_id]
        )

    # --- an engine is lost ---

    def report_loss(self, engine: EngineT, error: Exception) -> list[Effect[EngineT]]:
        """Process a report of an engine's loss from outside the step loop. Ignores reports on other engines."""
        # Ignore a late report on an engine that was lost or replaced before.
        if not self.is_engaged(engine):
            return []
        pending = self.phase.pending_loss
        self._set_pending_loss(PendingLoss(error, is_aborting=pending is not None and pending.is_aborting))
        return [Wake(), AwaitAnswers(engine, error)]

    def answers_overdue(self, engine: EngineT, error: Exception) -> list[Effect[EngineT]]:
        """Abort an engine's steps if they have not ended: only their silence shows that its host is dead."""
        pending = self.phase.pending_loss
        if not self.is_engaged(engine) or (pending is not None and pending.is_aborting):
            return []
        # The step loop is cancelled while it waits, and handles this loss instead of the step's results.
        self._set_pending_loss(PendingLoss(error, is_aborting=True))
        return [AbortSteps()]

    def _set_pending_loss(self, pending: PendingLoss) -> None:
        phase = self.phase
        if isinstance(phase, Adopting):
            assert isinstance(phase.before, Serving | Isolating)
            self.phase = replace(phase, before=replace(phase.before, pending_loss=pending))
        else:
            assert isinstance(phase, Serving | Isolating)
            self.phase = replace(phase, pending_loss=pending)

    def lose(self, error: Exception, now: float, *, steps: int, under_way: Mapping[str, int]) -> list[Effect[EngineT]]:
        """Process the loss of the engine: all sequences end, and wait for another engine.

        Args:
            error: What ended it.
            now: The monotonic clock.
            steps: Number of steps that the decoder has computed, on all engines.
            under_way: The requests with rows in the steps in flight, each with the number of tokens that it has
                emitted.
        """
        # Step 1: count losses in a row, which decide the pause. Losses without a computed step in between are one
        # outage, unless the engine had served for a long time.
        before = self._serving_phase
        assert isinstance(before, Serving | Isolating)
        if steps != self._steps_at_loss:
            self._losses_in_a_row = 0
        if not self._losses_in_a_row or now - before.since >= engine_losses.LASTED_S:
            self._losses_in_a_row, self._outage_began = 0, now
        self._losses_in_a_row += 1
        self._steps_at_loss = steps
        fields = {
            "known": engine_losses.shows_loss(error),
            "losses": self._losses_in_a_row,
            "under_way": len(under_way),
        }
        # Step 2: end all sequences. The deadline of their replays counts from the first loss of the outage, so that
        # further losses do not extend it.
        wait_s = max(0.0, self._outage_began + engine_losses.REPLAY_WAIT_S - now)
        effects: list[Effect[EngineT]] = [
            Log("engine_lost", fields, error),
            EndSequences(CompletionReason.ENGINE_ERROR, wait_s),
        ]
        # Step 3: if the computation may be the cause, the requests with rows are suspects. A request that was computed
        # alone is given up. The next engine does not compute it, so open that engine without a pause.
        suspected = list(under_way) if engine_losses.is_fault(error) else []
        if engine_losses.is_kill(error):
            suspected = self.isolation.killed(under_way, MAX_UNANSWERED_STEPS)
        if suspected and (guilty := self.isolation.fault(suspected)):
            self._losses_in_a_row = 0
            effects.append(AbortRequest(guilty))
        # Step 4: request another engine. A group that was being isolated stays isolated on it.
        self._losses += 1
        cleared_at = before.cleared_at if isinstance(before, Isolating) else {}
        lost = Lost(before.engine, error, now, self._outage_began, self._losses, cleared_at)
        self.phase = replace(self.phase, before=lost) if isinstance(self.phase, Adopting) else lost
        pause_s = engine_losses.pause_before_engine_s(self._losses_in_a_row)
        effects.append(RequestEngine(lost.engine, lost.number, pause_s))
        return effects

    def refuse(self, error: Exception, now: float) -> tuple[float, list[Effect[EngineT]]]:
        """Process the refusal of another engine.

        Returns the pause in seconds before the next attempt, and the effects.
        """
        loss = self.phase
        assert isinstance(loss, Lost)
        pause_s, tries = engine_losses.pause_s(loss.tries), loss.tries + 1
        self.phase = replace(loss, tries=tries, refusal=type(error))
        if not engine_losses.is_logged(tries):
            return pause_s, []
        fields = {"tries": tries, "next_try_s": pause_s, "without_engine_s": now - loss.outage_began}
        return pause_s, [Log("engine_refused", fields, error)]

    # --- another engine takes over ---

    def offer(self, engine: EngineT) -> list[Effect[EngineT]]:
        """Let an engine take over once no step is in progress. Raises the error that ended the decoder, if any."""
        phase = self.phase
        if isinstance(phase, Closed):
            raise phase.error
        assert not isinstance(phase, Adopting)
        # The current phase continues inside Adopting, so that a loss can still be reported until the hand-over.
        self.phase = Adopting(engine, phase)
        return [Wake()]

    def withdraw(self, engine: EngineT) -> None:
        """Withdraw an offer that was not yet adopted."""
        if isinstance(self.phase, Adopting) and self.phase.successor is engine:
            self.phase = self.phase.before

    def adopt(self, now: float) -> list[Effect[EngineT]]:
        """Let the successor take over. No step may be in progress. The caller then calls `isolate_next`."""
        phase = self.phase
        assert isinstance(phase, Adopting)
        before, engine = phase.before, phase.successor
        effects: list[Effect[EngineT]] = []
        # The sequences of a lost engine have ended already.
        if not isinstance(before, Lost):
            effects.append(EndSequences(CompletionReason.PREEMPTED, engine_losses.REPLAY_WAIT_S))
        # A successor continues the isolation that a move or a loss interrupted, with the same `cleared_at`.
        if isinstance(before, Serving) or not before.cleared_at:
            self.phase = Serving(engine, now)
        else:
            self.phase = Isolating(engine, now, before.cleared_at)
        return [*effects, HandOver(), BindRegions()]

    # --- suspects ---

    def isolate_next(self) -> list[Effect[EngineT]]:
        """Compute the next group of suspects alone, from their prompts; without suspects, compute all requests.

        No step may be in progress.
        """
        phase, isolation, requests = self.phase, self.isolation, self._requests
        assert isinstance(phase, Serving | Isolating)
        # Step 1: defer members of the current group that are still in doubt, because they can't be computed now. All
        # other members are cleared.
        isolation.defer(name for name in isolation.current if self._is_in_doubt(name))
        # Step 2: find the next group with a request that has not ended.
        group = isolation.next(requests.is_computable)
        while group and not any(map(requests.is_in_progress, group)):
            group = isolation.next(requests.is_computable)
        effects: list[Effect[EngineT]] = []
        if group:
            # Step 3: each step in progress may have computed one more token. A suspect is cleared only once it has
            # emitted that many more tokens.
            cleared_at = {name: requests.emitted_tokens(name) + MAX_UNANSWERED_STEPS for name in group}
            self.phase = Isolating(phase.engine, phase.since, cleared_at, phase.pending_loss)
            fields = {"group": len(group), "suspects": isolation.count}
            effects += [Log("suspects_isolated", fields, is_warning=True), RestartSequences()]
        else:
            self.phase = Serving(phase.engine, phase.since, phase.pending_loss)
            if isinstance(phase, Isolating):
                effects.append(Log("suspects_cleared", {"suspects": isolation.count}))
        return [*effects, Isolate(frozenset(group) or None)]

    # --- the end ---

    def close(self, error: GpuLeaseError) -> None:
        """Enter the phase Closed. If the decoder has already ended, its first error remains."""
        before, pending = self._serving_phase, self.phase.pending_loss
        if not isinstance(before, Closed):
            is_lost = isinstance(before, Lost) or (pending is not None and pending.is_aborting)
            self.phase = Closed(before.engine, error, is_lost)
