"""The scheduler against a naive model and a simulated engine, with a virtual clock, in any order of events.

The model knows the tokens that each request would emit alone. Every token of the scheduler is compared with it:
through rows that run ahead, steps that fail, blocks and tables that are used again, regions that move, and replays.
"""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, RebindLimited
from gpulease.client.decode.decode_requests import (
    AnyEvent,
    PromptRequest,
    SchedulerEvent,
    SharedPrefix,
    TenantConfig,
)
from gpulease.client.decode.scheduler.scheduler import MAX_PREEMPTIONS, ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.scheduler.step_plan import StepPlan
from gpulease.client.decode.scheduler.tenant_state import LiveSequence, UnadmittedRequest

from .simulated_engine import END_TOKEN, VOCABULARY, SimulatedEngine, check_books, continuation, prompt_request

CONFIGS = (
    TenantConfig("a", max_concurrent=2, max_blocks=6, weight=1, max_waiting=3),
    TenantConfig("b", max_concurrent=4, max_blocks=9, weight=3, max_waiting=5),
    TenantConfig("c", max_concurrent=1, max_blocks=3, weight=0.5, max_waiting=1),
)
TENANTS = st.sampled_from([config.id for config in CONFIGS])
REQUESTS = st.tuples(
    TENANTS,
    # Tokens of the prompt; equal ones that are long enough share blocks.
    st.one_of(st.integers(1, 6), st.integers(1, 60), st.sampled_from([16, 17, 31, 32, 33, 40, 48])),
    st.one_of(st.integers(1, 3), st.integers(1, 60)),  # tokens to emit
    st.sampled_from([0.0, 2.0, 50.0, 50.0]),  # seconds to wait
    st.sampled_from([1, 1, 1, 2, 5]),  # first token
)
REPLAY_WAIT_S = 4.0
AT_ONCE, INTERVAL_S = 2, 10.0
PREFIXES = [
    SharedPrefix(name, prompt_request("a", name, tokens, 1, 0, first_token).token_ids)
    for name, tokens, first_token in (("short", 17, 1), ("long", 48, 1), ("other", 32, 2))
]
"""Tokens that requests begin with; one of them begins with another."""

LOSSES = [CompletionReason.REVOKED, CompletionReason.EXPIRED, CompletionReason.ENGINE_ERROR]


@dataclass
class Known:
    """One request as the model knows it: what it emitted, and what it is to emit."""

    request: PromptRequest
    expected: list[int]
    deadline: float
    emitted: int = 0
    is_ended: bool = False
    preemptions: int = 0


@dataclass
class UnderWay:
    """A step that is not answered; its results are None if it did not begin."""

    step: StepPlan
    results: list[int] | None
    lengths: dict[str, int] = field(default_factory=dict)


class AnyOrder(RuleBasedStateMachine):
    """State machine that draws the next event."""

    @initialize(
        sequences=st.sampled_from([16, 4, 2]),
        rows=st.sampled_from([12, 5, 40, 3, 1]),
        prefill=st.sampled_from([4, 17, 1]),
        replays=st.sampled_from([True, True, False]),
        preempts=st.booleans(),
        reuses=st.sampled_from([True, True, False]),
        window=st.sampled_from([None, None, 20, 33]),
    )
    def begin(
        self,
        sequences: int,
        rows: int,
        prefill: int,
        replays: bool,
        preempts: bool,
        reuses: bool,
        window: int | None,
    ) -> None:
        limits = SchedulerSettings(
            sequences,
            rows,
            min(prefill, rows),
            context=100,
            vocabulary=VOCABULARY,
            end_tokens=frozenset({END_TOKEN}),
            replays=replays,
            replay_wait_s=REPLAY_WAIT_S,
            rebinds_at_once=AT_ONCE,
            rebind_interval_s=INTERVAL_S,
            preempts=preempts,
            reuses_prefixes=reuses,
            window=window,
        )
        self.scheduler = ContinuousBatchScheduler(limits, CONFIGS)
        self.engine, self.window = SimulatedEngine(window), window
        for config in CONFIGS:
            self.engine.open(config.id)
        self.now = 100.0
        self.names = count()
        self.known: dict[str, Known] = {}
        self.under_way: list[UnderWay] = []
        self.last_results: list[int] | None = None
        self.rebinds: dict[str, list[float]] = {config.id: [] for config in CONFIGS}
        self.with_clean_up: set[str] = set()
        self.is_losing_prefix = self.has_lost_prefix = False

    # --- what the scheduler tells, against the model ---

    def take(self, events: list[AnyEvent]) -> None:
        for event in events:
            known = self.known[event.request.request_id]
            assert event.request == known.request
            assert not known.is_ended, "a request that had ended"
            if isinstance(event, SchedulerEvent.Token):
                assert event.token == known.expected[known.emitted]
                assert event.position == len(event.request.token_ids) + known.emitted
                known.emitted += 1
                continue
            known.is_ended = True
            if isinstance(event, SchedulerEvent.AdmissionRejected):
                assert known.emitted == 0
                assert (event.retry_after_s is not None) == (event.reason is AdmissionReason.REBIND_LIMITED)
            else:
                self.take_end(event, known)

    def take_end(self, event: SchedulerEvent.Completed, known: Known) -> None:
        has_all = known.emitted == len(known.expected)
        own = (CompletionReason.END_OF_SEQUENCE, CompletionReason.MAX_TOKENS_REACHED)
        assert has_all == (event.reason in own)
        if has_all:
            is_end = known.expected[-1] == END_TOKEN
            assert event.reason is own[not is_end]
        if event.reason is CompletionReason.DEADLINE_EXCEEDED:
            assert known.emitted == 0
            assert known.deadline <= self.now
        assert bool(event.continued_by) == (event.reason in [*LOSSES, CompletionReason.PREEMPTED])
        if event.continued_by:
            self.expect_replay(event, known)

    def expect_replay(self, event: SchedulerEvent.Completed, known: Known) -> None:
        request = event.request
        done = known.expected[: known.emitted]
        first_prompt = request.token_ids[: len(request.token_ids) - request.replayed_tokens]
        emitted = [*request.token_ids[len(first_prompt) :], *done]
        if not self.scheduler.settings.replays:
            emitted = []
        most = request.max_emitted_tokens + request.replayed_tokens - len(emitted)
        tokens = (*first_prompt, *emitted)
        expected = continuation(tokens, most, window=self.window)
        if self.scheduler.settings.replays:
            assert [*done, *expected] == known.expected, "the same tokens, as if nothing had happened"
        first = request.continues or request.request_id
        replay = PromptRequest(
            request.tenant_id,
            event.continued_by,
            tokens,
            request.sampling,
            most,
            request.wait_s,
            first,
            int(event.continued_by.rpartition(".")[2]),
            len(emitted),
        )
        assert event.continued_by not in self.known
        found = self.known[event.continued_by] = Known(replay, expected, self.now + max(REPLAY_WAIT_S, request.wait_s))
        found.preemptions = known.preemptions
        if self.is_losing_prefix:
            found.deadline = float("inf")
        if event.reason is CompletionReason.PREEMPTED:
            found.deadline = float("inf")
            # For a heavier tenant's request, or, not counted, for an older sequence of its own tenant.
            tenant = self.scheduler.tenants[request.tenant_id]
            places: list[UnadmittedRequest | LiveSequence] = [*tenant.waiting, *tenant.live.values()]
            found.preemptions = next(
                place.preemptions for place in places if place.request.request_id == event.continued_by
            )
            assert known.preemptions <= found.preemptions <= known.preemptions + self.scheduler.settings.preempts
        assert found.preemptions <= MAX_PREEMPTIONS

    # --- requests ---

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def submit_some(self, requests: list[tuple[str, int, int, float, int]]) -> None:
        for values in requests:
            self.submit(*values)

    def submit(self, tenant: str, prompt: int, most: int, wait_s: float, first_token: int) -> None:
        request = prompt_request(tenant, f"r{next(self.names)}", prompt, most, wait_s, first_token)
        expected = continuation(request.token_ids, most, window=self.window)
        self.known[request.request_id] = Known(request, expected, self.now + wait_s)
        state = self.scheduler.tenants[tenant]
        could_wait = wait_s and len(state.waiting) < state.config.max_waiting
        events = self.scheduler.submit(request, self.now)
        self.take(events)
        blocks = state.region_blocks or state.config.max_blocks
        if request.blocks > blocks or request.positions > 100:
            assert isinstance(events[0], SchedulerEvent.AdmissionRejected)
            assert events[0].reason is AdmissionReason.TOO_LARGE
        elif could_wait and state.region_blocks:
            own = [event for event in events if event.request == request]
            assert all(isinstance(event, SchedulerEvent.Completed) and event.continued_by for event in own)

    @rule(data=st.data())
    def cancel_or_hold(self, data: st.DataObject) -> None:
        names = [name for name, known in self.known.items() if not known.is_ended]
        name = data.draw(st.sampled_from([*names, *(config.id for config in CONFIGS)]))
        if name not in names:
            self.hold_or_resume(name)
            return
        [event] = self.scheduler.cancel(name, CompletionReason.CANCELLED)
        self.take([event])
        assert self.scheduler.cancel(name, CompletionReason.CANCELLED) == []

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # --- steps ---

    @precondition(lambda self: len(self.under_way) < 2)
    @rule(begins=st.sampled_from([True, True, True, True, False]))
    def plan(self, begins: bool = True) -> None:
        step = self.scheduler.plan(self.now)
        lengths = self.lengths()
        self.take(step.events)
        waiting = [known for known in self.known.values() if not known.is_ended and not self.is_admitted(known)]
        assert all(known.deadline > self.now for known in waiting)
        self.check_admission()
        self.check_plan(step, lengths)
        if not step.sequences:
            return
        before = self.under_way[-1] if self.under_way else None
        begins = begins and (before is None or before.results is not None)
        results = self.engine.run(step, before.results if before else None) if begins else None
        self.under_way.append(UnderWay(step, results, lengths))

    def is_admitted(self, known: Known) -> bool:
        return known.request.request_id in self.scheduler.tenants[known.request.tenant_id].live

    def lengths(self) -> dict[str, int]:
        tenants = self.scheduler.tenants.values()
        return {name: sequence.length for tenant in tenants for name, sequence in tenant.live.items()}

    def check_admission(self) -> None:
        """No request waits while there is room for it, unless its tenant is held."""
        has_tables = self.scheduler.live_sequences < self.scheduler.settings.max_sequences
        contenders = []
        for tenant in self.scheduler.tenants.values():
            if tenant.waiting and not tenant.is_held and tenant.fits(tenant.waiting[0]):
                contenders.append(tenant)
        if contenders and self.scheduler.settings.preempts:
            turn = min(contenders, key=lambda tenant: (tenant.counter, tenant.waiting[0].number))
            lighter = [tenant for tenant in self.scheduler.tenants.values() if tenant.price > turn.price]
            names = [name for tenant in lighter for name in tenant.live]
            assert all(self.known[name].preemptions == MAX_PREEMPTIONS for name in names)
        assert not (contenders and has_tables)

    def check_plan(self, step: StepPlan, lengths: dict[str, int]) -> None:
        """Every row is one that is due, and no row that could be there is missing."""
        limits = self.scheduler.settings
        decoding, prompts = 0, 0
        due: dict[str, int] = {}
        for tenant in self.scheduler.tenants.values():
            for name, sequence in tenant.live.items():
                planned = sum(other.step.sequences.count(sequence) for other in self.under_way)
                position = due[name] = lengths.get(name, 0) + planned
                if tenant.is_held or sequence.is_following:
                    continue
                if position < sequence.prompt_length:
                    prompts += sequence.prompt_length - position
                elif position <= sequence.last:
                    decoding += 1
        seen: list[str] = []
        for row, sequence in enumerate(step.sequences):
            name = sequence.request.request_id
            assert not sequence.tenant.is_held
            assert step.positions[row] == due[name]
            assert sequence.blocks[step.positions[row] // 16] == step.blocks[row]
            due[name] += 1
            if row >= step.decode_rows:
                assert name not in seen or seen[-1] == name, "a chunk's rows lie together"
                assert due[name] <= sequence.prompt_length
            else:
                assert name not in seen, "one row for a sequence that decodes"
                assert due[name] > sequence.prompt_length
            seen.append(name)
        rows, decode_rows = len(step), step.decode_rows
        room = limits.prefill_rows if decoding else limits.max_rows
        assert rows - decode_rows <= room
        assert rows == min(limits.max_rows, decoding + min(prompts, room)), "a row that is left though there is work"

    @precondition(lambda self: self.under_way and self.under_way[0].results is not None)
    @rule()
    def complete(self) -> None:
        oldest = self.under_way.pop(0)
        before = self.lengths()
        assert oldest.results is not None
        self.take(self.scheduler.completed(oldest.step, oldest.results))
        rows = [sequence.request.request_id for sequence in oldest.step.sequences]
        for name, length in self.lengths().items():
            assert length == before[name] + rows.count(name)

    @rule(steps=st.integers(1, 12))
    def run_ahead(self, steps: int) -> None:
        """Steps as a harness takes them: the next is planned before the last is answered."""
        for _ in range(steps):
            if len(self.under_way) == 2:
                if self.under_way[0].results is None:
                    return
                self.complete()
            self.plan()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), reason=st.sampled_from(LOSSES), is_newest=st.booleans())
    def fail(self, data: st.DataObject, reason: CompletionReason, is_newest: bool) -> None:
        """A step fails, with a tenant's region or alone; those behind it did not begin."""
        place = len(self.under_way) - 1 if is_newest else 0
        failing = self.under_way[place]
        void, self.under_way = self.under_way[place:], self.under_way[:place]
        tenants = sorted(tenant.config.id for tenant in failing.step.tenant_rows)
        tenant = data.draw(st.sampled_from([None, None, *tenants]))
        before = self.lengths()
        if tenant is not None:
            self.lose(tenant)
        self.scheduler.failed(failing.step)
        if tenant is not None:
            self.take(self.scheduler.revoked(tenant, reason, self.now))
        for name, length in self.lengths().items():
            assert length == before[name], "a failed step moves nothing"
        for other in void:
            assert self.scheduler.completed(other.step, [1] * len(other.step)) == []
        if tenant is None and not self.under_way:
            self.plan_again(failing.step)

    def plan_again(self, failed: StepPlan) -> None:
        """The rows of a failed step that are still due come first, in their order."""
        live = [sequence for sequence in failed.sequences if not sequence.is_ended and not sequence.tenant.is_held]
        wanted = [
            sequence for sequence in live[: failed.decode_rows] if sequence.next_position >= sequence.prompt_length
        ]
        self.plan()
        if self.under_way:
            again = self.under_way[-1].step
            assert again.number == failed.number
            fitting = again.decode_rows
            assert again.sequences[: min(fitting, len(wanted))] == wanted[:fitting]

    # --- regions ---

    def lose(self, tenant: str) -> None:
        self.with_clean_up.add(tenant)

    @rule(tenant=TENANTS, reason=st.sampled_from([*LOSSES, None]))
    def revoke(self, tenant: str, reason: CompletionReason | None) -> None:
        """A region is gone, or with it the whole engine."""
        if reason is None:
            self.take(self.scheduler.engine_lost(self.now))
            self.under_way = []
            assert self.scheduler.live_sequences == 0
            return
        self.lose(tenant)
        self.take(self.scheduler.revoked(tenant, reason, self.now))
        assert not self.scheduler.tenants[tenant].live

    @rule(prefix=st.sampled_from(PREFIXES))
    def share_or_lose(self, prefix: SharedPrefix) -> None:
        """The operator shares a prefix, or its region is gone: those that use it end, and no others."""
        if prefix.name not in self.scheduler.prefixes:
            self.engine.share(prefix)
            self.scheduler.share(prefix)
            return
        tenants = self.scheduler.tenants.values()
        users = {name for tenant in tenants for name, its in tenant.live.items() if its.prefix == prefix.name}
        self.engine.unshare(prefix.name)
        self.is_losing_prefix = self.has_lost_prefix = True
        events = self.scheduler.prefix_lost(prefix.name, CompletionReason.REVOKED, self.now)
        ended = [event.request.request_id for event in events if isinstance(event, SchedulerEvent.Completed)]
        assert sorted(ended) == sorted(users)
        self.take(events)
        self.is_losing_prefix = False
        assert self.scheduler.prefix_lost(prefix.name, CompletionReason.REVOKED, self.now) == []

    @rule(fewer=st.sampled_from([0, 0, 2]), waits=st.booleans())
    def rebind_all(self, fewer: int, waits: bool) -> None:
        for config in CONFIGS:
            if waits:
                self.now += self.scheduler.rebind_delay_s(config.id, self.now)
            self.rebind(config.id, fewer)

    def rebind(self, tenant: str, fewer: int) -> None:
        state = self.scheduler.tenants[tenant]
        if state.region_blocks:
            return
        blocks = state.config.max_blocks - fewer
        if tenant not in self.with_clean_up:
            self.engine.open(tenant)
            self.take(self.scheduler.rebound(tenant, blocks, self.now))
            return
        delay_s = self.scheduler.rebind_delay_s(tenant, self.now)
        if delay_s:
            assert [at for at in self.rebinds[tenant] if at > self.now - INTERVAL_S * AT_ONCE]
            with pytest.raises(RebindLimited) as limited:
                self.scheduler.rebound(tenant, blocks, self.now)
            assert limited.value.retry_after_s == delay_s
            assert not state.region_blocks
            return
        events = self.scheduler.rebound(tenant, blocks, self.now)
        self.engine.open(tenant)
        self.with_clean_up.discard(tenant)
        self.rebinds[tenant].append(self.now)
        for begin in self.rebinds[tenant]:
            within = [at for at in self.rebinds[tenant] if begin <= at]
            assert len(within) <= AT_ONCE + (self.now - begin) / INTERVAL_S + 1e-6
        self.take(events)

    def hold_or_resume(self, tenant: str) -> None:
        if self.scheduler.tenants[tenant].is_held:
            self.resume(tenant)
        else:
            self.scheduler.hold(tenant)

    def resume(self, tenant: str) -> None:
        """A held tenant's region has been copied to another place; its steps were over then."""
        if self.scheduler.tenants[tenant].is_held:
            if not any(self.scheduler.tenants[tenant] in step.step.tenant_rows for step in self.under_way):
                self.engine.move(tenant, self.scheduler.tenants[tenant].blocks_to_save())
            self.scheduler.resume(tenant)

    # --- always, and in the end ---

    @invariant()
    def books(self) -> None:
        if hasattr(self, "scheduler"):
            check_books(self.scheduler)
            unended = {name for name, known in self.known.items() if not known.is_ended}
            tenants = self.scheduler.tenants.values()
            queued = [waiting.request.request_id for tenant in tenants for waiting in tenant.waiting]
            live = [name for tenant in tenants for name in tenant.live]
            assert sorted(queued + live) == sorted(unended)

    def teardown(self) -> None:
        """Left alone, every request ends, in no more steps than there are rows to compute."""
        if not hasattr(self, "scheduler"):
            return
        for config in CONFIGS:
            self.resume(config.id)
            if self.scheduler.settings.preempts or self.has_lost_prefix:
                # What was preempted, or lost its prefix, waits without a deadline, so its region has to come.
                self.now += self.scheduler.rebind_delay_s(config.id, self.now)
            self.rebind(config.id, 0)
        while self.under_way and self.under_way[0].results is not None:
            self.complete()
        if self.under_way:
            self.scheduler.failed(self.under_way[0].step)
            self.under_way = []
        queued = [waiting for tenant in self.scheduler.tenants.values() for waiting in tenant.waiting]
        unended = [known.request.positions for known in self.known.values() if not known.is_ended]
        # Preempted sequences are computed again: for heavier tenants' requests, or each time that a region is short.
        again = 1 + MAX_PREEMPTIONS * self.scheduler.settings.preempts + max(config.max_blocks for config in CONFIGS)
        for _ in range(2 * again * sum(unended)):
            before = len(self.under_way)
            self.plan()
            if len(self.under_way) in (before, 2):
                if not self.under_way:
                    break
                self.complete()
        assert self.scheduler.live_sequences == 0, "a sequence that gets no rows"
        left = [waiting for waiting in queued if not self.known[waiting.request.request_id].is_ended]
        assert all(not self.scheduler.tenants[waiting.request.tenant_id].region_blocks for waiting in left)
        self.now += 1000
        self.plan()
        assert all(known.is_ended for known in self.known.values())


FEW = settings(max_examples=50, stateful_step_count=60, deadline=None)
AnyOrder.TestCase.settings = FEW
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.exhaustive
class TestManyOrders(TestAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=60, stateful_step_count=120)
