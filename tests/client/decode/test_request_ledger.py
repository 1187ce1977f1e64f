"""The ledger of requests against a naive model, in any order of events.

The model keeps what happened to each request as a list, and derives every report from the whole list, when it is due.
"""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    CompletionReason,
    EngineDecodeFailed,
    NoModelLoaded,
    RequestBreaksEngine,
    RequestRejected,
)
from gpulease.client.decode.decode_reports import DecoderObserver, FinishedRequest, RebindReport, StepReport
from gpulease.client.decode.decode_requests import (
    AnyEvent,
    PromptRequest,
    SamplingParameters,
    SchedulerEvent,
    StepOutcome,
    StepTokens,
    TenantConfig,
)
from gpulease.client.decode.row_records import RESULT
from gpulease.client.decode.scheduler.cell_rate import CellRate
from gpulease.client.decode.scheduler.step_plan import DecodeRoster, StepPlan
from gpulease.client.decode.scheduler.tenant_state import LiveSequence, SequenceColumns, TenantState
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.decode.supervisor.request_ledger import RequestLedger, error_of
from gpulease.client.errors import GpuLeaseError

TENANT = TenantState(TenantConfig("ann", max_concurrent=4, max_blocks=9), CellRate(1, 1.0))
OWN_ENDS = sorted(set(CompletionReason) - {CompletionReason.ENGINE_ERROR})
LOSSES = st.tuples(
    st.sampled_from([CompletionReason.REVOKED, CompletionReason.EXPIRED, CompletionReason.PREEMPTED]), st.booleans()
)


def emitted(generation: Generation) -> tuple[list[Emitted], GpuLeaseError | None]:
    """What the iterator of a generation that has ended yields, and the error that it ends with."""

    async def read() -> tuple[list[Emitted], GpuLeaseError | None]:
        found = []
        try:
            async for token in generation:
                found.append(token)
        except GpuLeaseError as error:
            return found, error
        return found, None

    return asyncio.run(read())


@dataclass
class Token:
    at: float
    token: int
    position: int
    log_probability: float


@dataclass
class Loss:
    at: float
    request_id: str
    reason: CompletionReason
    is_engine_scoped: bool


@dataclass
class Known:
    """A caller's request as the model knows it: the scheduler's request that it is now, and all that happened."""

    generation: Generation
    current: PromptRequest
    submitted_at: float
    history: list[Token | Loss] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    gpu_s: float = 0.0
    regions: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return [happened for happened in self.history if isinstance(happened, Token)]

    @property
    def losses(self) -> list[Loss]:
        return [happened for happened in self.history if isinstance(happened, Loss)]

    @property
    def open_losses(self) -> list[Loss]:
        """The losses since its last token."""
        last = max((place for place, one in enumerate(self.history) if isinstance(one, Token)), default=-1)
        return [happened for happened in self.history[last + 1 :] if isinstance(happened, Loss)]

    def sequence(self) -> LiveSequence:
        """The request as it is admitted, without any position computed."""
        return LiveSequence(self.current, TENANT, 0, [0] * self.current.blocks, 0, frozenset(), SequenceColumns(1))

    def yielded(self) -> list[Emitted]:
        """All tokens, each with the number of losses before it."""
        return [
            Emitted(
                one.token, one.position, one.log_probability, sum(isinstance(x, Loss) for x in self.history[:place])
            )
            for place, one in enumerate(self.history)
            if isinstance(one, Token)
        ]

    def rebind(self) -> RebindReport | None:
        """The report that the last token is due, if losses came right before it."""
        last, losses = self.history[-1], []
        for happened in reversed(self.history[:-1]):
            if isinstance(happened, Token):
                break
            losses.append(happened)
        if not losses:
            return None
        first, request = losses[-1], self.current
        is_engine_scoped, prompt = any(loss.is_engine_scoped for loss in losses), len(request.token_ids)
        return RebindReport(
            "ann", first.request_id, request.request_id, prompt, first.reason, is_engine_scoped, last.at - first.at
        )

    def finished(self, reason: CompletionReason | AdmissionReason, detail: str, now: float) -> FinishedRequest:
        request, tokens = self.generation.request, self.tokens
        return FinishedRequest(
            "ann",
            self.generation.request_id,
            (1, 2),
            tuple(token.token for token in tokens),
            request.sampling,
            reason,
            detail,
            self.submitted_at,
            tokens[0].at if tokens else None,
            now,
            sum(self.steps_s),
            self.gpu_s,
            len(self.losses),
            self.regions[-1] if self.regions else None,
        )


class Recorder(DecoderObserver):
    """Observer that keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[StepReport | RebindReport | FinishedRequest] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_rebind(self, report: RebindReport) -> None:
        self.reports.append(report)

    def on_finished(self, report: FinishedRequest) -> None:
        self.reports.append(report)


class Broken(DecoderObserver):
    """An observer that raises on every report."""

    def on_step(self, report: StepReport) -> None:
        raise OSError(report)

    def on_rebind(self, report: RebindReport) -> None:
        raise OSError(report)

    def on_finished(self, report: FinishedRequest) -> None:
        raise OSError(report)


class AnyOrder(RuleBasedStateMachine):
    """A state machine that draws the next event of the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.clock = patch(
            "gpulease.client.decode.supervisor.request_ledger.time", SimpleNamespace(monotonic=lambda: self.now)
        )
        self.clock.start()
        self.recorder = Recorder()
        self.ledger = RequestLedger([Broken(), self.recorder])
        self.known: list[Known] = []
        self.expected: list[StepReport | RebindReport | FinishedRequest] = []
        self.numbers = count(1)

    def teardown(self) -> None:
        """At the end the engine is closed, which ends every request in progress."""
        try:
            self.end_all()
        finally:
            self.clock.stop()

    def some(self, data: st.DataObject) -> list[Known]:
        """Some requests that go on."""
        places = data.draw(st.lists(st.sampled_from(range(len(self.known))), min_size=1, unique=True))
        return [self.known[place] for place in places]

    # --- requests come ---

    @initialize(requests=st.integers(1, 4))
    def begin(self, requests: int) -> None:
        for _ in range(requests):
            self.open()

    @rule()
    def open(self) -> None:
        self.now += 1
        request = PromptRequest("ann", f"r{next(self.numbers)}", (1, 2), SamplingParameters(), 8)
        generation = self.ledger.open(request, lambda _: None, self.now)
        self.known.append(Known(generation, request, self.now))

    @rule()
    def open_and_forget(self) -> None:
        """The scheduler refuses a request by an exception: its id is free again, and no observer is notified."""
        request = PromptRequest("ann", "refused", (1, 2), SamplingParameters(), 8)
        self.ledger.forget(self.ledger.open(request, lambda _: None, self.now))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        """Neither a caller's id nor that of its replay can be entered twice."""
        for known in self.some(data):
            for request in (known.current, known.generation.request):
                with pytest.raises(RequestRejected, match="is already in progress"):
                    self.ledger.open(replace(request, continues=""), lambda _: None, self.now)

    # --- steps ---

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ends=st.sampled_from([False, False, True]), took_s=st.integers(1, 9))
    def compute(self, data: st.DataObject, ends: bool, took_s: int) -> None:
        """A step is computed: some requests have a chunk of their prompts in it, others get a token."""
        self.now += 1
        chosen = self.some(data)
        parts = data.draw(st.integers(0, len(chosen)))
        filling, emitting = chosen[:parts], chosen[parts:]
        step = StepPlan(0, DecodeRoster([]), np.zeros((5, 0), np.int64))
        for known in chosen:
            sequence = known.sequence()
            # Only the chunk that ends a prompt has a token; a replay's prompt has all that was emitted.
            step.add_chunk(sequence, 1 if known in filling else sequence.prompt_length)
            sequence.filled = sequence.next_position
            known.steps_s.append(took_s)
        for (_, _, rows), known in zip(step.chunks, chosen, strict=True):
            # The row that yields a token is counted with the token.
            parts_rows = [rows - 1, 1] if known in emitting else [rows]
            for part_rows in parts_rows:
                known.gpu_s += took_s / len(step) * part_rows
        results = np.zeros(len(step), RESULT)
        results["total"] = np.arange(len(step)) + 1
        tokens = StepTokens([], [], [], [])
        for (_, first, rows), known in zip(step.chunks, chosen, strict=True):
            if known in emitting:
                row, position, token = first + rows - 1, 2 + len(known.tokens), next(self.numbers)
                tokens = StepTokens(
                    [*tokens.requests, known.current],
                    [*tokens.tokens, token],
                    [*tokens.positions, position],
                    [*tokens.rows, row],
                )
                known.history.append(Token(self.now, token, position, float(-np.log(row + 1.0))))
        rebinds = [known.rebind() for known in emitting]
        self.expected += [report for report in rebinds if report is not None]
        self.expected.append(StepReport(len(step), 0, tokens, took_s))
        outcome = StepOutcome(tokens, (), ())
        if ends and emitting:
            end = SchedulerEvent.Completed(emitting[0].current, CompletionReason.MAX_TOKENS_REACHED)
            outcome = StepOutcome(tokens, [end], [0])
            self.expected.append(emitting[0].finished(CompletionReason.MAX_TOKENS_REACHED, "", self.now))
        self.ledger.computed(step, outcome, results, took_s)
        if ends and emitting:
            self.has_ended(emitting[0], CompletionReason.MAX_TOKENS_REACHED, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), region=st.integers(1, 9))
    def admit(self, data: st.DataObject, region: int) -> None:
        for known in self.some(data):
            known.regions.append(region)
            self.ledger.admitted(known.sequence(), region)

    # --- losses and ends ---

    @precondition(lambda self: self.known)
    @rule(data=st.data(), losses=st.lists(LOSSES, min_size=1, max_size=2))
    def lose(self, data: st.DataObject, losses: list[tuple[CompletionReason, bool]]) -> None:
        """Some requests end, once or twice, and are continued by others."""
        chosen = self.some(data)
        for reason, is_engine_scoped in losses:
            self.now += 1
            events: list[AnyEvent] = [self.lost(known, reason, is_engine_scoped) for known in chosen]
            self.ledger.deliver(events, is_engine_scoped=is_engine_scoped)
        for known in chosen:
            assert known.generation.request.request_id == known.current.request_id, "what cancel names"

    def lost(self, known: Known, reason: CompletionReason, is_engine_scoped: bool) -> SchedulerEvent.Completed:
        old, tokens = known.current, tuple(token.token for token in known.tokens)
        first_id = known.generation.request_id
        name = f"{first_id}.{len(known.losses) + 1}"
        known.current = replace(old, request_id=name, token_ids=(1, 2, *tokens), continues=first_id)
        known.history.append(Loss(self.now, old.request_id, reason, is_engine_scoped))
        return SchedulerEvent.Completed(old, reason, name)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """A request is lost, and its replay refused at once."""
        self.now += 1
        known = self.some(data)[0]
        loss = self.lost(known, CompletionReason.REVOKED, False)
        refusal = SchedulerEvent.AdmissionRejected(known.current, AdmissionReason.REBIND_LIMITED, "wait", 7.0)
        self.expected.append(known.finished(AdmissionReason.REBIND_LIMITED, "wait", self.now))
        self.ledger.deliver([loss, refusal])
        error = self.has_ended(known, CompletionReason.CANCELLED, AdmissionRefused)
        assert isinstance(error, AdmissionRefused)
        assert (error.reason, error.retry_after_s) == (AdmissionReason.REBIND_LIMITED, 7.0)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reason=st.sampled_from(OWN_ENDS))
    def complete(self, data: st.DataObject, reason: CompletionReason) -> None:
        self.now += 1
        known = self.some(data)[0]
        end = SchedulerEvent.Completed(known.current, reason)
        if reason is CompletionReason.DEADLINE_EXCEEDED and any(loss.is_engine_scoped for loss in known.open_losses):
            # It waited for an engine, and none came.
            self.ledger.deliver([end] * 2)
            error = self.has_ended(known, CompletionReason.ENGINE_ERROR, EngineDecodeFailed)
            waited_s = self.now - known.open_losses[0].at
            assert f"none took its place within {waited_s:.0f} s" in str(error)
            self.expected.append(known.finished(CompletionReason.ENGINE_ERROR, str(error), self.now))
            return
        ended = error_of(end)
        self.expected.append(known.finished(reason, str(ended or ""), self.now))
        self.ledger.deliver([end] * 2)
        self.has_ended(known, reason, type(ended) if ended else None)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A request ended an engine alone: it is not replayed, and its caller gets the error."""
        self.now += 1
        known = self.some(data)[0]
        self.ledger.deliver([SchedulerEvent.Completed(known.current, CompletionReason.ENGINE_ERROR)])
        name = known.generation.request_id
        error = self.has_ended(known, CompletionReason.ENGINE_ERROR, RequestBreaksEngine)
        assert f"request {name} alone" in str(error)
        self.expected.append(known.finished(CompletionReason.ENGINE_ERROR, str(error), self.now))

    def end_all(self) -> None:
        self.now += 1
        error = NoModelLoaded("closed")
        reason = CompletionReason.ENGINE_ERROR
        reports = [known.finished(reason, str(error), self.now) for known in self.known]
        told = len(self.recorder.reports)
        self.ledger.end_all(error)
        finished = [report for report in self.recorder.reports[told:] if isinstance(report, FinishedRequest)]
        assert sorted(finished, key=repr) == sorted(reports, key=repr), "in any order"
        self.expected += finished
        for known in self.known.copy():
            self.has_ended(known, reason, NoModelLoaded)
        self.every_report_was_made_once()

    def has_ended(
        self, known: Known, reason: CompletionReason, kind: type[GpuLeaseError] | None
    ) -> GpuLeaseError | None:
        """Check what a request's caller gets in the end; nothing that comes later changes it. Return the error."""
        self.known.remove(known)
        tokens, error = emitted(known.generation)
        assert (tokens, type(error) if error else None) == (known.yielded(), kind)
        assert [token.attempt for token in tokens] == [token.attempt for token in known.yielded()]
        assert known.generation.reason is reason
        self.ledger.deliver([SchedulerEvent.Completed(known.current, CompletionReason.CANCELLED)])
        assert known.generation.reason is reason
        return error

    # --- always ---

    @invariant()
    def every_report_was_made_once(self) -> None:
        assert self.recorder.reports == self.expected

    @invariant()
    def generations_are_found_by_their_callers_ids(self) -> None:
        for known in self.known:
            assert self.ledger.find(known.generation.request_id) is known.generation
            assert known.generation.reason is None
            assert known.generation.tokens == [token.token for token in known.tokens]
        assert self.ledger.find("refused") is None


AnyOrder.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_losses_before_a_token_are_one_rebind_and_of_the_engine_if_any_was() -> None:
    recorder = Recorder()
    ledger = RequestLedger([recorder])
    request = PromptRequest("ann", "r", (1, 2), SamplingParameters(), 8)
    first, second = replace(request, request_id="r.1", continues="r"), replace(request, request_id="r.2", continues="r")
    ledger.open(request, lambda _: None, 0.0)
    ledger.deliver([SchedulerEvent.Completed(request, CompletionReason.REVOKED, "r.1")])
    ledger.deliver([SchedulerEvent.Completed(first, CompletionReason.ENGINE_ERROR, "r.2")], is_engine_scoped=True)
    results = np.ones(1, RESULT)
    for position in (2, 3):
        step = StepPlan(0, DecodeRoster([]), np.zeros((5, 0), np.int64))
        outcome = StepOutcome(StepTokens([second], [5], [position], [0]), (), ())
        ledger.computed(step, outcome, results, 1.0)
    rebinds = [replace(report, latency_s=0.0) for report in recorder.reports if isinstance(report, RebindReport)]
    assert rebinds == [RebindReport("ann", "r", "r.2", 2, CompletionReason.REVOKED, True, 0.0)]
