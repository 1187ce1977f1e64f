"""The requests of a decoder's callers, from `submit` until they end, and the reports about them.

To the scheduler each replay is a new request. Here a request and all of its replays are one generation.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    CompletionReason,
    DecodeError,
    EngineDecodeFailed,
    RequestBreaksEngine,
    RequestIdInUse,
    SequenceEnded,
    WaitedTooLong,
)
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_reports import DecoderObserver, FinishedRequest, RebindReport, StepReport
from gpulease.client.decode.decode_requests import AnyEvent, PromptRequest, SchedulerEvent, StepOutcome
from gpulease.client.decode.row_records import Results, Rows, log_probabilities
from gpulease.client.decode.scheduler.step_plan import StepPlan
from gpulease.client.decode.scheduler.tenant_state import LiveSequence
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.errors import GpuLeaseError


@dataclass(slots=True)
class _Loss:
    """The end of a request that is being replayed. Kept until the replay's first token.

    Attributes:
        request_id: The scheduler's id of the request that ended.
        reason: Why it ended.
        is_engine_scoped: Whether the whole engine was lost, at this end or at another end before the next token.
        at: The time of the end, in monotonic seconds.
    """

    request_id: str
    reason: CompletionReason
    is_engine_scoped: bool
    at: float


class _Entry:
    """A caller's request in progress, with the figures for its report. Times are monotonic seconds."""

    __slots__ = ("compute_s", "first_token_at", "generation", "gpu_s", "loss", "prompt", "region_id", "submitted_at")

    def __init__(self, generation: Generation, submitted_at: float) -> None:
        self.generation = generation
        self.prompt = generation.request.token_ids
        self.submitted_at = submitted_at
        self.first_token_at: float | None = None
        self.compute_s = self.gpu_s = 0.0
        self.region_id: int | None = None
        self.loss: _Loss | None = None


class _Ranks:
    """A guided step's likeliest tokens, with the logarithms of their probabilities."""

    def __init__(self, results: Results, ranked: Rows) -> None:
        self._tokens = ranked["token"].tolist()
        self._logs = log_probabilities(results, ranked["logit"]).tolist()

    def of(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """Return the `count` likeliest tokens of a row, or fewer if the vocabulary has fewer."""
        pairs = zip(self._tokens[row][:count], self._logs[row][:count], strict=True)
        return tuple((token, log) for token, log in pairs if log > -math.inf)


class RequestLedger:
    """Requests in progress. Passes the scheduler's events on to generations and observers, each end exactly once.

    Also logs recoveries after the loss of a region or engine, and replays that are given up.
    """

    def __init__(self, observers: Sequence[DecoderObserver] = (), log: DecodeLog | None = None) -> None:
        self.observers = tuple(observers)
        self._log = log or DecodeLog()
        # Keyed by the scheduler's id, which changes with each replay. `_generations` is keyed by the caller's id, which
        # does not change.
        self._entries: dict[str, _Entry] = {}
        self._generations: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: str) -> Generation | None:
        """Return the generation in progress with this id, the caller's; None if there is none."""
        return self._generations.get(request_id)

    def open(self, request: PromptRequest, cancel: Callable[[Generation], None], now: float) -> Generation:
        """Add a request that is about to be submitted. Raises RequestIdInUse."""
        if request.request_id in self._generations or request.request_id in self._entries:
            raise RequestIdInUse(f"request {request.request_id!r} is already in progress", "Use another id")
        generation = Generation(request, cancel)
        self._entries[request.request_id] = _Entry(generation, now)
        self._generations[request.request_id] = generation
        return generation

    def forget(self, generation: Generation) -> None:
        """Remove a request that the scheduler did not accept."""
        self._entries.pop(generation.request_id, None)
        self._generations.pop(generation.request_id, None)

    def admitted(self, sequence: LiveSequence, region_id: int) -> None:
        """Record the region of a sequence before its first rows are computed."""
        if entry := self._entries.get(sequence.request.request_id):
            entry.region_id = region_id
            # Only the attempt that yields the first token counts.
            if not entry.generation.tokens:
                entry.generation.reused_tokens = sequence.reused

    def report(self, call: Callable[[DecoderObserver], None]) -> None:
        """Call every observer. An observer's error is logged, and does not affect requests."""
        for observer in self.observers:
            try:
                call(observer)
            except Exception as error:
                self._log.failure("observer_failed", error, observer=type(observer).__name__)

    # --- events ---

    def computed(
        self,
        step: StepPlan,
        outcome: StepOutcome,
        results: Results,
        took_s: float,
        ranked: Rows | None = None,
        normed: NDArray[np.float32] | None = None,
    ) -> None:
        """Pass a computed step's tokens and ends on, and report the step.

        `ranked` and `normed` are what `DecodeEngine` returned, if the step was guided or pooled.
        """
        # Count the time of prompts' rows. The last row of a complete prompt is counted below, with its token.
        row_s = took_s / max(1, len(step))
        for sequence, _, count in step.chunks:
            if (entry := self._entries.get(sequence.request.request_id)) is None:
                continue
            if sequence.filled < sequence.prompt_length:
                entry.compute_s += took_s
                entry.gpu_s += row_s * count
            else:
                entry.gpu_s += row_s * (count - 1)
        # Compute the logarithms for all rows at once, because a numpy call per token would be slow.
        logs = log_probabilities(results).tolist()
        entries, now = self._entries, time.monotonic()
        ranks = None if ranked is None else _Ranks(results, ranked)
        if ranks is not None:
            self._score(step, logs, ranks)
        if normed is not None:
            for sequence, first_row, count in step.chunks:
                entry = self._entries.get(sequence.request.request_id) if sequence.request.pooling else None
                if entry is not None:
                    rows = normed[first_row : first_row + count]
                    entry.generation.pool(int(step.positions[first_row]), rows)
        tokens = outcome.tokens
        token_logs = map(logs.__getitem__, tokens.rows)
        for request, token, position, row, log in zip(
            tokens.requests, tokens.tokens, tokens.positions, tokens.rows, token_logs, strict=True
        ):
            if (entry := entries.get(request.request_id)) is None:
                continue
            entry.compute_s += took_s
            entry.gpu_s += row_s
            entry.generation.emit(token, position, log, () if ranks is None else ranks.of(row, request.ranks))
            if entry.first_token_at is None:
                entry.first_token_at = now
            # The first token after a loss completes the recovery.
            if entry.loss is not None:
                self._report_rebind(entry, entry.loss, request, now)
        if self.observers:
            report = StepReport(len(step), step.decode_rows, tokens, took_s)
            self.report(lambda observer: observer.on_step(report))
        # Ends come after the report of the step that has their last tokens.
        self.deliver(outcome.ends)

    def _score(self, step: StepPlan, logs: Sequence[float], ranks: "_Ranks") -> None:
        """Pass on the scores of prompts' tokens. Each row scores the token at the next position."""
        for sequence, first_row, count in step.chunks:
            request = sequence.request
            entry = self._entries.get(request.request_id) if request.scores_prompt else None
            if entry is None:
                continue
            begin = int(step.positions[first_row])
            # Stop at the end of the caller's prompt. A replay's prompt continues with tokens that the caller already
            # has.
            for place in range(begin + 1, min(begin + count + 1, len(entry.prompt))):
                row = first_row + place - begin - 1
                scores = ranks.of(row, request.ranks)
                entry.generation.score(Emitted(entry.prompt[place], place, logs[row], 0, scores))

    def deliver(self, events: Iterable[AnyEvent], *, is_engine_scoped: bool = False) -> None:
        """Deliver events other than tokens to their generations and to observers.

        Args:
            events: The events.
            is_engine_scoped: Whether the loss of the whole engine caused the ends among the events.
        """
        now = time.monotonic()
        for event in events:
            entry = self._entries.pop(event.request.request_id, None)
            assert not isinstance(event, SchedulerEvent.Token)
            # The generation has ended already, so the caller has received the outcome.
            if entry is None:
                continue
            if isinstance(event, SchedulerEvent.AdmissionRejected):
                # The request or its replay was refused. The generation's iterator raises the refusal.
                refusal = AdmissionRefused(event.reason, event.detail, event.retry_after_s)
                self._log_lost(entry, event.reason)
                self._end(entry, CompletionReason.CANCELLED, refusal, event.reason, event.detail, now)
            # The request is replayed: its entry and generation continue under the scheduler's new id. If several losses
            # happen before the next token, the latency counts from the first.
            elif event.continued_by:
                self._entries[event.continued_by] = entry
                entry.generation.replay(event.continued_by)
                if entry.loss is None:
                    entry.loss = _Loss(event.request.request_id, event.reason, is_engine_scoped, now)
                entry.loss.is_engine_scoped |= is_engine_scoped
            else:
                # The request ended permanently. If a replay found no engine in time, the cause is the loss, not a lack
                # of room.
                reason, failure = event.reason, entry.generation.failure or error_of(event)
                if entry.loss is not None and reason is CompletionReason.DEADLINE_EXCEEDED:
                    self._log_lost(entry, reason)
                    if entry.loss.is_engine_scoped:
                        reason, failure = CompletionReason.ENGINE_ERROR, _unserved(entry, now - entry.loss.at)
                self._end(entry, reason, failure, reason, str(failure or ""), now)

    def end_all(self, error: GpuLeaseError) -> None:
        """End every request, because the decoder has ended."""
        now = time.monotonic()
        # Detach the entries first, so that a callback can't end an entry twice.
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            self._end(entry, CompletionReason.ENGINE_ERROR, error, CompletionReason.ENGINE_ERROR, str(error), now)

    def _end(
        self,
        entry: _Entry,
        reason: CompletionReason,
        error: GpuLeaseError | None,
        reported: CompletionReason | AdmissionReason,
        detail: str,
        now: float,
    ) -> None:
        generation = entry.generation
        self._generations.pop(generation.request_id, None)
        # End the generation before observers are called, so that no observer can prevent it.
        generation.end(reason, error)
        if not self.observers:
            return
        report = FinishedRequest(
            tenant_id=generation.request.tenant_id,
            request_id=generation.request_id,
            prompt=entry.prompt,
            emitted=tuple(generation.tokens),
            sampling=generation.request.sampling,
            reason=reported,
            detail=detail,
            submitted_at=entry.submitted_at,
            first_token_at=entry.first_token_at,
            ended_at=now,
            compute_s=entry.compute_s,
            gpu_s=entry.gpu_s,
            replays=generation.replays,
            region_id=entry.region_id,
        )
        self.report(lambda observer: observer.on_finished(report))

    def _report_rebind(self, entry: _Entry, loss: _Loss, request: PromptRequest, now: float) -> None:
        entry.loss = None
        report = RebindReport(
            tenant_id=request.tenant_id,
            old_request_id=loss.request_id,
            new_request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            reason=loss.reason,
            is_engine_scoped=loss.is_engine_scoped,
            latency_s=now - loss.at,
        )
        self._log.info(
            "rebound",
            tenant=report.tenant_id,
            old_request=report.old_request_id,
            new_request=report.new_request_id,
            prompt_tokens=report.prompt_tokens,
            latency_s=report.latency_s,
            reason=report.reason,
            lost="engine" if report.is_engine_scoped else "region",
        )
        self.report(lambda observer: observer.on_rebind(report))

    def _log_lost(self, entry: _Entry, reason: CompletionReason | AdmissionReason) -> None:
        """Log that a replay was given up, if the request has not recovered from a loss."""
        if entry.loss is not None:
            request = entry.generation.request
            lost = "engine" if entry.loss.is_engine_scoped else "region"
            name = entry.generation.request_id
            self._log.warning("replay_given_up", tenant=request.tenant_id, request=name, reason=reason, lost=lost)


def _unserved(entry: _Entry, waited_s: float) -> EngineDecodeFailed:
    """Return the error of a request that lost its engine and waited too long for another."""
    name = entry.generation.request_id
    text = f"The engine that computed request {name} is gone, and none took its place within {waited_s:.0f} s"
    return EngineDecodeFailed(text, "Send it again; the server keeps requesting an engine")


def error_of(end: SchedulerEvent.Completed) -> DecodeError | None:
    """Return the error that a generation raises when it ends without a replay; None if it ends without an error."""
    match end.reason:
        case CompletionReason.END_OF_SEQUENCE | CompletionReason.MAX_TOKENS_REACHED:
            return None
        case CompletionReason.CANCELLED:
            return None  # Its caller closed it.
        case CompletionReason.DEADLINE_EXCEEDED:
            reason = end.kept_out_by or AdmissionReason.POOL_EXHAUSTED
            return WaitedTooLong(reason, end.detail or "its maximum waiting time has passed", None)
        case CompletionReason.ENGINE_ERROR:
            name = end.request.continues or end.request.request_id
            text = f"The engine failed while it computed request {name} alone"
            return RequestBreaksEngine(text, "Do not send it again")
        case CompletionReason.REVOKED | CompletionReason.EXPIRED | CompletionReason.PREEMPTED:
            return SequenceEnded(end.reason)
