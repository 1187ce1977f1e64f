"""Each event and each reason of the scheduler, by example."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason, RebindLimited, RequestRejected
from gpulease.client.decode.decode_requests import (
    AnyEvent,
    PromptRequest,
    SamplingParameters,
    SchedulerEvent,
    TenantConfig,
)
from gpulease.client.decode.row_records import NO_ROW
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.scheduler.step_plan import StepPlan

from .simulated_engine import END_TOKEN, VOCABULARY, SimulatedEngine, continuation, prompt_request

TOKEN = 5
LIMITS = SchedulerSettings(
    max_sequences=8, max_rows=16, prefill_rows=8, context=200, vocabulary=VOCABULARY, end_tokens=frozenset({END_TOKEN})
)
TENANTS = (TenantConfig("a", 2, 4, max_waiting=2), TenantConfig("b", 2, 4, max_waiting=2))


@pytest.fixture
def scheduler() -> ContinuousBatchScheduler:
    return ContinuousBatchScheduler(LIMITS, TENANTS)


def results(step: StepPlan, token: int = TOKEN) -> list[int]:
    return [token] * len(step)


def token_events(events: list[AnyEvent]) -> list[SchedulerEvent.Token]:
    return [event for event in events if isinstance(event, SchedulerEvent.Token)]


def ends(events: list[AnyEvent]) -> list[tuple[str, str]]:
    """What ended, each as its id and its reason."""
    return [
        (event.request.request_id, str(event.reason)) for event in events if not isinstance(event, SchedulerEvent.Token)
    ]


def run_out(scheduler: ContinuousBatchScheduler, token: int = TOKEN, now: float = 0.0) -> list[AnyEvent]:
    """Step until nothing lives."""
    events: list[AnyEvent] = []
    while scheduler.live_sequences:
        events += scheduler.step(lambda step: results(step, token), now)
    return events


def test_a_request_emits_its_tokens_and_ends(scheduler: ContinuousBatchScheduler) -> None:
    request = prompt_request("a", "r", prompt=3, most=4)
    assert scheduler.submit(request, 0.0) == []
    events = run_out(scheduler)
    assert events == [
        *(SchedulerEvent.Token(request, TOKEN, position, row) for position, row in [(3, 2), (4, 0), (5, 0), (6, 0)]),
        SchedulerEvent.Completed(request, CompletionReason.MAX_TOKENS_REACHED),
    ]


def test_the_token_that_ends_a_sequence_is_told_before_the_end(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", prompt=1, most=9), 0.0)
    events = run_out(scheduler, END_TOKEN)
    assert [event.token for event in token_events(events)] == [END_TOKEN]
    assert ends(events) == [("r", "EndOfSequence")]


# --- refusals ---


def fill(scheduler: ContinuousBatchScheduler, *, live: int = 0, waiting: int = 0, blocks: int = 1) -> None:
    for number in range(live):
        assert scheduler.submit(prompt_request("a", f"live{number}", 16 * blocks - 15, 16), 0.0) == []
    for number in range(waiting):
        assert scheduler.submit(prompt_request("a", f"waiting{number}", 1, 1, wait_s=9), 0.0) == []


def use_all_tables(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.add_tenant(TenantConfig("crowd", LIMITS.max_sequences, LIMITS.max_sequences))
    for number in range(LIMITS.max_sequences):
        assert scheduler.submit(prompt_request("crowd", f"c{number}", 1, 1), 0.0) == []


def revoke(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)


def revoke_too_often(scheduler: ContinuousBatchScheduler) -> None:
    for _ in range(LIMITS.rebinds_at_once):
        revoke(scheduler)
        scheduler.rebound("a", 4, 0.0)
    revoke(scheduler)


REFUSALS: list[tuple[Callable[[ContinuousBatchScheduler], Any], dict[str, Any], AdmissionReason, str]] = [
    (lambda s: None, {"prompt": 64, "most": 2}, AdmissionReason.TOO_LARGE, "5 blocks, but tenant a has only 4"),
    (lambda s: None, {"prompt": 200, "most": 2, "wait_s": 9}, AdmissionReason.TOO_LARGE, "201 positions.* 200"),
    (lambda s: fill(s, live=2), {}, AdmissionReason.QUOTA_EXCEEDED, "2 of its sequences are already in progress"),
    (
        lambda s: fill(s, live=2, waiting=2),
        {"wait_s": 9},
        AdmissionReason.QUOTA_EXCEEDED,
        "2 of its requests are already waiting",
    ),
    (
        lambda s: fill(s, live=1, blocks=3),
        {"prompt": 16, "most": 17},
        AdmissionReason.POOL_EXHAUSTED,
        "needs 2 blocks, but only 1 are free for it",
    ),
    (use_all_tables, {}, AdmissionReason.POOL_EXHAUSTED, "wait for the engine"),
    (revoke, {}, AdmissionReason.POOL_EXHAUSTED, "being rebuilt"),
    (revoke_too_often, {"wait_s": 9}, AdmissionReason.REBIND_LIMITED, r"in 10\.000 s"),
]


@pytest.mark.parametrize(("prepare", "values", "reason", "detail"), REFUSALS)
def test_a_request_that_finds_no_room_is_refused_with_its_reason(
    scheduler: ContinuousBatchScheduler,
    prepare: Callable[[ContinuousBatchScheduler], Any],
    values: dict[str, Any],
    reason: AdmissionReason,
    detail: str,
) -> None:
    prepare(scheduler)
    before = (scheduler.live_sequences, scheduler.waiting_requests)
    request = prompt_request("a", "r", **{"prompt": 1, "most": 1, **values})
    [event] = scheduler.submit(request, 0.0)
    assert isinstance(event, SchedulerEvent.AdmissionRejected)
    assert (event.request, event.reason) == (request, reason)
    assert event.retry_after_s == (10.0 if reason is AdmissionReason.REBIND_LIMITED else None)
    with pytest.raises(AssertionError, match=detail):
        raise AssertionError(event.detail)
    assert (scheduler.live_sequences, scheduler.waiting_requests) == before


def test_a_refused_request_leaves_no_trace_in_what_others_get(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2)
    scheduler.submit(prompt_request("a", "r", 1, 1), 0.0)
    scheduler.cancel("live0")
    assert scheduler.submit(prompt_request("a", "r", 1, 1), 0.0) == []
    assert scheduler.live_sequences == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tenant_id": "nobody"}, "no tenant 'nobody'"),
        ({"request_id": "live0"}, "'live0' is already waiting or in progress"),
        ({"request_id": "waiting0"}, "'waiting0' is already waiting or in progress"),
        ({"token_ids": (1, VOCABULARY)}, "tokens must be 0 to 23"),
        ({"token_ids": (-1, 1)}, "tokens must be 0 to 23"),
    ],
)
def test_a_request_that_is_wrong_is_an_error(
    scheduler: ContinuousBatchScheduler, change: dict[str, Any], told: str
) -> None:
    fill(scheduler, live=2, waiting=1)
    with pytest.raises(RequestRejected, match=told):
        scheduler.submit(replace(prompt_request("a", "r", 2, 1), **change), 0.0)
    assert (scheduler.live_sequences, scheduler.waiting_requests) == (2, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"max_sequences": 0},
        {"max_rows": 0},
        {"prefill_rows": 0},
        {"prefill_rows": 17},
        {"context": 0},
        {"vocabulary": 0},
        {"rebinds_at_once": 0},
        {"replay_wait_s": -1.0},
        {"rebind_interval_s": -1.0},
    ],
)
def test_limits_that_make_no_engine_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(LIMITS, **change)


def test_a_tenant_is_added_once(scheduler: ContinuousBatchScheduler) -> None:
    with pytest.raises(ValueError, match="already has a tenant"):
        scheduler.add_tenant(TENANTS[0])
    with pytest.raises(ValueError, match="a region must have 1 to 4 blocks, not 5"):
        scheduler.add_tenant(TenantConfig("c", 1, 4), blocks=5)
    assert set(scheduler.tenants) == {"a", "b"}


# --- waiting ---


def test_a_request_that_waits_is_admitted_when_there_is_room(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=1)
    assert scheduler.next_deadline_s == 9.0
    scheduler.cancel("live1")
    scheduler.plan(1.0)
    assert set(scheduler.tenants["a"].live) == {"live0", "waiting0"}
    assert scheduler.next_deadline_s is None


def test_a_request_that_waited_long_enough_ends(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=1)
    assert scheduler.plan(8.9).events == []
    plan = scheduler.plan(9.0)
    assert ends(plan.events) == [("waiting0", "DeadlineExceeded")]
    assert scheduler.waiting_requests == 0


def test_a_request_that_waited_too_long_says_what_kept_it_out(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=1)
    (ended,) = scheduler.plan(9.0).events
    assert isinstance(ended, SchedulerEvent.Completed)
    assert ended.kept_out_by is AdmissionReason.QUOTA_EXCEEDED
    assert "2 of its sequences are already in progress; the maximum waiting time has passed" in ended.detail
    scheduler.submit(prompt_request("a", "late", 3, 20, wait_s=9.0), 10.0)
    scheduler.revoked("a", CompletionReason.REVOKED, 10.0)
    late = [event for event in scheduler.plan(19.0).events if event.request.request_id == "late"]
    assert isinstance(late[0], SchedulerEvent.Completed)
    assert late[0].kept_out_by is AdmissionReason.POOL_EXHAUSTED
    assert "its region is being rebuilt" in late[0].detail


def test_room_that_comes_at_the_deadline_comes_too_late(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=1)
    scheduler.cancel("live0")
    assert ends(scheduler.plan(9.0).events) == [("waiting0", "DeadlineExceeded")]
    assert set(scheduler.tenants["a"].live) == {"live1"}


def test_a_large_request_is_not_overtaken_by_small_ones_of_its_tenant(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=1, blocks=2)
    scheduler.submit(prompt_request("a", "large", 49, 16, wait_s=9), 0.0)
    scheduler.submit(prompt_request("a", "small", 1, 1, wait_s=9), 0.0)
    assert set(scheduler.tenants["a"].live) == {"live0"}
    scheduler.cancel("live0")
    scheduler.plan(1.0)
    assert set(scheduler.tenants["a"].live) == {"large"}


@pytest.mark.parametrize("leave", ["cancelled", "late"])
def test_what_waited_behind_a_request_that_gave_up_is_admitted(scheduler: ContinuousBatchScheduler, leave: str) -> None:
    fill(scheduler, live=1, blocks=2)
    scheduler.submit(prompt_request("a", "large", 49, 16, wait_s=5), 0.0)
    scheduler.submit(prompt_request("a", "small", 1, 1, wait_s=9), 0.0)
    scheduler.plan(0.0)
    if leave == "cancelled":
        scheduler.cancel("large")
    scheduler.plan(5.0)
    assert set(scheduler.tenants["a"].live) == {"live0", "small"}


def test_the_next_deadline_is_that_of_what_waits_still(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2)
    scheduler.submit(prompt_request("a", "first", 1, 1, wait_s=5), 0.0)
    scheduler.submit(prompt_request("a", "second", 1, 1, wait_s=7), 0.0)
    assert scheduler.next_deadline_s == 5.0
    scheduler.plan(5.0)
    assert scheduler.next_deadline_s == 7.0


# --- cancel ---


def test_a_waiting_request_can_be_cancelled(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=2)
    assert ends(scheduler.cancel("waiting0")) == [("waiting0", "Cancelled")]
    assert scheduler.waiting_requests == 1


def test_a_request_cancelled_while_its_row_is_under_way_tells_no_more(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 1, 9), 0.0)
    step = scheduler.plan(0.0)
    assert ends(scheduler.cancel("r", CompletionReason.PREEMPTED)) == [("r", "Preempted")]
    assert scheduler.tenants["a"].blocks.used == 0
    assert scheduler.completed(step, results(step)) == []
    assert not scheduler.plan(0.0).sequences


def test_a_request_cancelled_in_its_prompt_gets_no_more_rows(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 40, 9), 0.0)
    step = scheduler.plan(0.0)
    assert step.chunks == [(scheduler.tenants["a"].live["r"], 0, 16)]
    scheduler.cancel("r")
    scheduler.completed(step, results(step))
    assert not scheduler.plan(0.0).sequences


# --- rows ---


def test_decode_rows_come_first_and_chunks_up_to_their_bound_behind(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "old", 2, 20), 0.0)
    scheduler.step(results, 0.0)
    scheduler.submit(prompt_request("b", "new", 20, 5), 0.0)
    old, new = scheduler.tenants["a"].live["old"], scheduler.tenants["b"].live["new"]
    step = scheduler.plan(0.0)
    assert step.sequences == [old] + [new] * 8
    assert step.positions.tolist() == [2, *range(8)]
    assert step.tokens.tolist() == [TOKEN, *new.request.token_ids[:8]]
    assert step.sources.tolist() == [NO_ROW] * 9
    assert step.tables.tolist() == [old.table] + [new.table] * 8
    assert (step.decode_rows, step.chunks) == (1, [(new, 1, 8)])
    assert (step.joined, step.sampled, step.sampled_rows.tolist()) == ([new], [old], [0])
    assert {tenant.config.id: rows for tenant, rows in step.tenant_rows.items()} == {"a": 1, "b": 8}


def test_tenants_share_the_time_of_each_step_by_their_rows(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "old", 2, 20), 0.0)
    first = scheduler.plan(0.0)
    scheduler.completed(first, results(first), 0.25)
    scheduler.submit(prompt_request("b", "new", 20, 5), 0.0)
    second = scheduler.plan(0.0)
    third = scheduler.plan(0.0)
    # A sequence that ends leaves a row in the step behind it, which is its tenant's as well.
    scheduler.completed(second, results(second, END_TOKEN), 0.9)
    scheduler.completed(third, results(third), 1.8)
    assert [dict(step.tenant_rows)[scheduler.tenants["a"]] for step in (second, third)] == [1, 1]
    assert scheduler.tenants["a"].gpu_s == pytest.approx(0.25 + 0.1 + 0.2)
    assert scheduler.tenants["b"].gpu_s == pytest.approx(0.8 + 1.6)
    # A void step was not computed.
    lost = scheduler.plan(0.0)
    scheduler.failed(lost)
    assert scheduler.completed(lost, results(lost), 5.0) == []
    assert sum(tenant.gpu_s for tenant in scheduler.tenants.values()) == pytest.approx(0.25 + 0.9 + 1.8)


def test_prompts_have_all_rows_when_nothing_decodes(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 40, 5), 0.0)
    steps = [scheduler.plan(0.0) for _ in range(2)]
    assert [step.positions.tolist() for step in steps] == [list(range(16)), list(range(16, 32))]
    assert [len(step.joined) for step in steps] == [1, 0]


def row_of(step: StepPlan) -> tuple[int, int, int]:
    """Position, token and source of a step's only row."""
    assert len(step) == 1
    return int(step.positions[0]), int(step.tokens[0]), int(step.sources[0])


def test_a_row_that_runs_ahead_names_the_row_its_token_comes_from(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 4), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert row_of(second) == (3, 0, 2)
    scheduler.completed(first, results(first))
    third = scheduler.plan(0.0)
    assert row_of(third) == (4, 0, 0)
    scheduler.completed(second, results(second, 7))
    scheduler.completed(third, results(third, 8))
    fourth = scheduler.plan(0.0)
    assert row_of(fourth) == (5, 8, NO_ROW)


def test_nothing_runs_ahead_of_the_last_token(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 1), 0.0)
    step = scheduler.plan(0.0)
    assert not scheduler.plan(0.0).sequences
    assert ends(scheduler.completed(step, results(step))) == [("r", "MaxTokensReached")]


def test_a_row_that_ran_ahead_of_an_end_counts_for_nothing(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 9), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert ends(scheduler.completed(first, results(first, END_TOKEN))) == [("r", "EndOfSequence")]
    assert scheduler.completed(second, results(second)) == []


def test_a_plan_without_rows_is_no_step(scheduler: ContinuousBatchScheduler) -> None:
    for _ in range(5):
        step = scheduler.plan(0.0)
        assert (len(step), scheduler.unanswered_steps) == (0, 0)
    scheduler.submit(prompt_request("a", "r", 3, 9), 0.0)
    assert scheduler.plan(0.0).number == 0
    assert scheduler.plan(0.0).number == 1


def test_a_third_step_is_not_planned_before_the_first_is_answered(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 9), 0.0)
    scheduler.plan(0.0)
    scheduler.plan(0.0)
    with pytest.raises(ValueError, match="step 0 is to be answered first"):
        scheduler.plan(0.0)


def test_steps_are_answered_in_their_order_each_once_and_wholly(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 9), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    with pytest.raises(ValueError, match="step 1 is not the one"):
        scheduler.completed(second, results(second))
    with pytest.raises(ValueError, match="3 rows and 2 results"):
        scheduler.completed(first, [TOKEN] * 2)
    assert len(scheduler.completed(first, results(first))) == 1
    with pytest.raises(ValueError, match="step 0 is not the one"):
        scheduler.completed(first, results(first))
    with pytest.raises(ValueError, match="step 0 was answered already"):
        scheduler.failed(first)


# --- failures and rebinds ---


def rows_of(step: StepPlan) -> list[tuple[str, int, int, int, int]]:
    names = [sequence.request.request_id for sequence in step.sequences]
    columns = (column.tolist() for column in (step.positions, step.tokens, step.sources, step.blocks))
    return list(zip(names, *columns, strict=True))


def test_a_step_that_failed_is_planned_again_unchanged(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    scheduler.submit(prompt_request("b", "s", 30, 20), 0.0)
    scheduler.step(results, 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.failed(first)
    assert first.is_void
    assert second.is_void
    again = [scheduler.plan(0.0), scheduler.plan(0.0)]
    assert [rows_of(step) for step in again] == [rows_of(first), rows_of(second)]
    assert [step.number for step in again] == [first.number, second.number]


def test_a_failed_step_does_not_undo_the_one_before_it(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.failed(second)
    again = scheduler.plan(0.0)
    assert rows_of(again) == rows_of(second)
    assert again.sources.tolist() == [2]
    assert len(scheduler.completed(first, results(first))) == 1


def test_the_turns_of_a_failed_step_come_first() -> None:
    scheduler = ContinuousBatchScheduler(replace(LIMITS, max_rows=2, prefill_rows=2), TENANTS)
    for name in ("a1", "a2", "b1", "b2"):
        scheduler.submit(prompt_request(name[0], name, 1, 20), 0.0)
    while not all(sequence.filled for tenant in scheduler.tenants.values() for sequence in tenant.live.values()):
        scheduler.step(results, 0.0)
    step = scheduler.plan(0.0)
    assert len(step) == 2
    scheduler.failed(step)
    assert rows_of(scheduler.plan(0.0)) == rows_of(step)


def test_a_prompt_of_a_failed_step_stays_before_those_admitted_later(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "first", 10, 3), 0.0)
    scheduler.submit(prompt_request("a", "second", 20, 3), 0.0)
    step = scheduler.plan(0.0)
    assert [count for _, _, count in step.chunks] == [10, 6]
    scheduler.failed(step)
    assert rows_of(scheduler.plan(0.0)) == rows_of(step)


def test_a_tenant_s_failure_ends_its_sequences_and_no_others(scheduler: ContinuousBatchScheduler) -> None:
    for tenant in ("a", "b"):
        scheduler.submit(prompt_request(tenant, f"{tenant}1", 3, 20), 0.0)
        scheduler.submit(prompt_request(tenant, f"{tenant}2", 3, 20), 0.0)
    scheduler.step(results, 0.0)
    step = scheduler.plan(0.0)
    scheduler.failed(step)
    assert ends(scheduler.revoked("a", CompletionReason.REVOKED, 0.0)) == [("a1", "Revoked"), ("a2", "Revoked")]
    again = scheduler.plan(0.0)
    assert rows_of(again) == [row for row in rows_of(step) if row[0].startswith("b")]
    assert [event.request.request_id for event in token_events(scheduler.completed(again, results(again)))] == [
        "b1",
        "b2",
    ]


def test_a_revoked_tenant_s_rows_under_way_count_for_nothing_and_the_others_do(
    scheduler: ContinuousBatchScheduler,
) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    scheduler.submit(prompt_request("b", "s", 3, 20), 0.0)
    step = scheduler.plan(0.0)
    scheduler.revoked("a", CompletionReason.EXPIRED, 0.0)
    assert [event.request.request_id for event in token_events(scheduler.completed(step, results(step)))] == ["s"]


@pytest.mark.parametrize("at_step", range(1, 23))
def test_a_rebound_request_goes_on_with_the_token_that_would_have_come(at_step: int) -> None:
    scheduler = ContinuousBatchScheduler(replace(LIMITS, end_tokens=frozenset()), TENANTS)
    engine = SimulatedEngine()
    for tenant in TENANTS:
        engine.open(tenant.id)
    requests = [prompt_request("a", "r", 20, 20), prompt_request("b", "s", 20, 20)]
    emitted: dict[str, list[int]] = {"a": [], "b": []}
    events: list[AnyEvent] = []
    for request in requests:
        scheduler.submit(request, 0.0)
    for number in range(1, 80):
        if number == at_step:
            events += scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
        if number == at_step + 3:
            engine.open("a")
            events += scheduler.rebound("a", 4, 0.0)
        events += scheduler.step(lambda step: engine.run(step, None), 0.0)
    for event in token_events(events):
        emitted[event.request.tenant_id].append(event.token)
        assert event.position == 19 + len(emitted[event.request.tenant_id])
    wanted = continuation(requests[0].token_ids, 20, frozenset())
    assert emitted == {"a": wanted, "b": wanted}
    assert sorted(ends(events)) == [("r", "Revoked"), ("r.1", "MaxTokensReached"), ("s", "MaxTokensReached")]


@pytest.mark.parametrize(("window", "used", "is_short"), [(None, 7, True), (20, 3, False)])
def test_a_sequence_frees_the_blocks_behind_its_window(window: int | None, used: int, is_short: bool) -> None:
    """Two of 7 blocks each at their longest, in a region of 7: with the window both live to their end."""
    limits = replace(LIMITS, end_tokens=frozenset(), window=window, reuses_prefixes=False)
    scheduler = ContinuousBatchScheduler(limits, [TenantConfig("a", 2, 7)])
    engine, events, most = SimulatedEngine(window), list[AnyEvent](), 0
    engine.open("a")
    alone = prompt_request("a", "alone", 10, 100)
    wanted = continuation(alone.token_ids, 100, frozenset(), window)
    for requests in ([alone], [prompt_request("a", name, 10, 100) for name in ("r", "s")]):
        for request in requests:
            scheduler.submit(request, 0.0)
        while scheduler.live_sequences or scheduler.waiting_requests:
            events += scheduler.step(lambda step: engine.run(step, None), 0.0)
            most = max(most, scheduler.tenants["a"].blocks.used) if len(requests) == 1 else most
    assert most == used
    assert ("Preempted" in [reason for _, reason in ends(events)]) is is_short
    emitted: dict[str, list[int]] = {"alone": [], "r": [], "s": []}
    for event in token_events(events):
        emitted[event.request.continues or event.request.request_id].append(event.token)
    assert list(emitted.values()) == [wanted] * 3


def test_a_replay_names_what_it_continues_and_what_was_emitted(scheduler: ContinuousBatchScheduler) -> None:
    request = prompt_request("a", "r", 3, 20)
    scheduler.submit(request, 0.0)
    for _ in range(4):
        scheduler.step(results, 0.0)
    [event] = scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    assert event == SchedulerEvent.Completed(request, CompletionReason.REVOKED, "r.1")
    scheduler.rebound("a", 4, 0.0)
    scheduler.step(results, 0.0)
    replay = scheduler.tenants["a"].live["r.1"].request
    tokens = (*request.token_ids, TOKEN, TOKEN, TOKEN, TOKEN)
    assert replay == PromptRequest("a", "r.1", tokens, request.sampling, 16, 0.0, "r", 1, 4)
    [event] = scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    scheduler.rebound("a", 4, 0.0)
    scheduler.plan(0.0)
    again = scheduler.tenants["a"].live["r.2"].request
    assert (again.continues, again.attempt, again.replayed_tokens, again.max_emitted_tokens) == ("r", 2, 5, 15)


def test_without_replays_a_request_starts_anew() -> None:
    scheduler = ContinuousBatchScheduler(replace(LIMITS, replays=False), TENANTS)
    request = prompt_request("a", "r", 3, 20)
    scheduler.submit(request, 0.0)
    for _ in range(4):
        scheduler.step(results, 0.0)
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    scheduler.rebound("a", 4, 0.0)
    scheduler.plan(0.0)
    replay = scheduler.tenants["a"].live["r.1"].request
    assert (replay.token_ids, replay.max_emitted_tokens, replay.replayed_tokens) == (request.token_ids, 20, 0)


def test_a_replay_s_id_is_of_nobody_else(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    scheduler.submit(prompt_request("a", "r.1", 3, 20), 0.0)
    scheduler.submit(prompt_request("b", "r.2", 3, 20), 0.0)
    events = scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    assert [event.continued_by for event in events if isinstance(event, SchedulerEvent.Completed)] == ["r.3", "r.1.1"]


def test_replays_of_one_id_used_twice_get_two_ids(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    revoke(scheduler)
    scheduler.rebound("a", 4, 0.0)
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    assert set(scheduler.tenants["a"].live) == {"r.1", "r"}
    events = scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    assert [event.continued_by for event in events if isinstance(event, SchedulerEvent.Completed)] == ["r.2", "r.3"]


def test_replays_come_before_what_waited_in_their_order(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=2)
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    queue = [waiting.request.request_id for waiting in scheduler.tenants["a"].waiting]
    assert queue == ["live0.1", "live1.1", "waiting0", "waiting1"]


def test_a_rebound_tenant_has_no_more_sequences_than_before(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=2, waiting=2)
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    scheduler.rebound("a", 4, 0.0)
    scheduler.plan(0.0)
    assert set(scheduler.tenants["a"].live) == {"live0.1", "live1.1"}


def test_a_replay_waits_for_its_region_no_longer_than_it_may(scheduler: ContinuousBatchScheduler) -> None:
    fill(scheduler, live=1)
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    assert scheduler.plan(LIMITS.replay_wait_s - 0.1).events == []
    assert ends(scheduler.plan(LIMITS.replay_wait_s).events) == [("live0.1", "DeadlineExceeded")]


def test_a_tenant_that_is_rebound_too_often_is_refused_with_the_time_to_come_again(
    scheduler: ContinuousBatchScheduler,
) -> None:
    for _ in range(LIMITS.rebinds_at_once):
        revoke(scheduler)
        scheduler.rebound("a", 4, 0.0)
    fill(scheduler, live=1)
    events = scheduler.revoked("a", CompletionReason.REVOKED, 2.0)
    assert ends(events) == [("live0", "Revoked"), ("live0.1", "RebindLimited")]
    assert isinstance(events[1], SchedulerEvent.AdmissionRejected)
    assert events[1].retry_after_s == scheduler.rebind_delay_s("a", 2.0) == 8.0
    with pytest.raises(RebindLimited):
        scheduler.rebound("a", 4, 2.0)
    assert scheduler.rebind_delay_s("b", 2.0) == 0
    scheduler.rebound("a", 4, 10.0)
    assert scheduler.submit(prompt_request("a", "r", 1, 1), 10.0) == []


def test_a_smaller_region_refuses_what_no_longer_fits(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "large", 30, 20), 0.0)
    scheduler.submit(prompt_request("a", "small", 1, 1, wait_s=9), 0.0)
    revoke(scheduler)
    assert ends(scheduler.rebound("a", 3, 0.0)) == [("large.1", "TooLarge")]
    [event] = scheduler.submit(prompt_request("a", "large", 30, 20), 0.0)
    assert isinstance(event, SchedulerEvent.AdmissionRejected)
    assert event.reason is AdmissionReason.TOO_LARGE


@pytest.mark.parametrize("blocks", [0, 5])
def test_a_region_is_within_the_tenant_s_limits(scheduler: ContinuousBatchScheduler, blocks: int) -> None:
    with pytest.raises(ValueError, match="has a region"):
        scheduler.rebound("a", 4, 0.0)
    revoke(scheduler)
    with pytest.raises(ValueError, match="a region must have 1 to 4 blocks"):
        scheduler.rebound("a", blocks, 0.0)
    assert scheduler.rebound("a", 4, 0.0) == []


def test_a_lost_engine_ends_everything_and_costs_no_permit(scheduler: ContinuousBatchScheduler) -> None:
    for number in range(9):
        scheduler.submit(prompt_request("a", f"a{number}", 3, 20), 0.0)
        scheduler.submit(prompt_request("b", f"b{number}", 3, 20), 0.0)
        step = scheduler.plan(0.0)
        events = scheduler.engine_lost(0.0)
        assert {reason for _, reason in ends(events)} == {"EngineError"}
        assert scheduler.live_sequences == scheduler.unanswered_steps == 0
        assert scheduler.completed(step, results(step)) == []
        for tenant in ("a", "b"):
            scheduler.rebound(tenant, 4, 0.0)
        scheduler.plan(0.0)
        for name in [name for tenant in scheduler.tenants.values() for name in tenant.live]:
            scheduler.cancel(name)


def test_a_tenant_without_a_region_yet_waits_for_its_first(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.add_tenant(TenantConfig("c", 1, 4), blocks=0)
    scheduler.submit(prompt_request("c", "r", 1, 1, wait_s=9), 0.0)
    assert not scheduler.plan(0.0).sequences
    for _ in range(LIMITS.rebinds_at_once + 1):
        scheduler.engine_lost(0.0)
        scheduler.rebound("c", 4, 0.0)
    assert [sequence.request.request_id for sequence in scheduler.plan(0.0).sequences] == ["r"]


def test_replays_wait_as_long_as_an_engine_may_be_away(scheduler: ContinuousBatchScheduler) -> None:
    """The replay of a loss before it, too; not so a request that waits for its first admission."""
    for name in ("r1", "r2"):
        scheduler.submit(prompt_request("a", name, 3, 20), 0.0)
    scheduler.submit(prompt_request("a", "late", 3, 20, wait_s=9.0), 0.0)
    scheduler.revoked("a", CompletionReason.REVOKED, 0.0)
    scheduler.submit(prompt_request("b", "r3", 3, 20), 0.0)
    events = scheduler.engine_lost(1.0, CompletionReason.PREEMPTED, wait_s=60.0)
    assert ends(events) == [("r3", "Preempted")]
    assert ends(scheduler.plan(60.9).events) == [("late", "DeadlineExceeded")]
    for tenant in ("a", "b"):
        scheduler.rebound(tenant, 4, 60.9)
    scheduler.plan(60.9)
    assert [*scheduler.tenants["a"].live, *scheduler.tenants["b"].live] == ["r1.1", "r2.1", "r3.1"]


def test_isolated_requests_are_admitted_alone_and_before_their_tenants_others(
    scheduler: ContinuousBatchScheduler,
) -> None:
    for tenant, name in [("a", "r1"), ("a", "r2"), ("b", "r3"), ("b", "r4")]:
        scheduler.submit(prompt_request(tenant, name, 3, 20), 0.0)
    scheduler.step(results, 0.0)
    scheduler.engine_lost(0.0)
    for tenant in ("a", "b"):
        scheduler.rebound(tenant, 4, 0.0)
    scheduler.isolate({"r2", "r4"})
    assert scheduler.submit(prompt_request("b", "late", 3, 20, wait_s=9.0), 0.0) == []
    assert {sequence.request.request_id for sequence in scheduler.plan(0.0).sequences} == {"r2.1", "r4.1"}
    assert [waiting.request.request_id for waiting in scheduler.tenants["b"].waiting] == ["r3.1", "late"]
    scheduler.isolate(None)
    scheduler.plan(0.0)
    assert scheduler.live_sequences + scheduler.waiting_requests == 5
    assert scheduler.live_sequences > 2


# --- held tenants ---


def test_a_held_tenant_has_no_rows_until_it_is_resumed(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "decoding", 3, 20), 0.0)
    scheduler.submit(prompt_request("b", "other", 3, 20), 0.0)
    scheduler.step(results, 0.0)
    assert scheduler.submit(prompt_request("a", "prompt", 20, 5), 0.0) == []
    scheduler.hold("a")
    scheduler.hold("a")
    for _ in range(3):
        step = scheduler.plan(0.0)
        assert [sequence.request.request_id for sequence in step.sequences] == ["other"]
        scheduler.completed(step, results(step))
    scheduler.resume("a")
    scheduler.resume("a")
    names = [sequence.request.request_id for sequence in scheduler.plan(0.0).sequences]
    assert names == ["other", "decoding"] + ["prompt"] * 8


def test_a_held_tenant_s_requests_take_no_places_and_end_in_time(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.hold("a")
    assert scheduler.submit(prompt_request("a", "late", 3, 20, wait_s=5.0), 0.0) == []
    assert scheduler.submit(prompt_request("a", "patient", 3, 20, wait_s=9.0), 0.0) == []
    assert (scheduler.waiting_requests, scheduler.next_deadline_s) == (2, 5.0)
    [refused] = scheduler.submit(prompt_request("a", "at once", 3, 20, wait_s=0.0), 0.0)
    assert isinstance(refused, SchedulerEvent.AdmissionRejected)
    assert "it is suspended" in refused.detail
    [ended] = scheduler.plan(5.0).events
    assert isinstance(ended, SchedulerEvent.Completed)
    assert (ended.request.request_id, ended.reason) == ("late", CompletionReason.DEADLINE_EXCEEDED)
    scheduler.resume("a")
    assert [sequence.request.request_id for sequence in scheduler.plan(6.0).sequences] == ["patient"] * 3


def test_a_request_of_a_held_tenant_can_be_cancelled(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    scheduler.step(results, 0.0)
    scheduler.hold("a")
    assert ends(scheduler.cancel("r")) == [("r", "Cancelled")]
    assert not scheduler.plan(0.0).sequences
    scheduler.resume("a")
    assert not scheduler.plan(0.0).sequences


@pytest.mark.parametrize("prompt", [3, 30])
def test_rows_that_failed_of_a_tenant_held_since_wait_until_it_is_resumed(
    scheduler: ContinuousBatchScheduler, prompt: int
) -> None:
    scheduler.submit(prompt_request("a", "r", prompt, 20), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.hold("a")
    scheduler.failed(second)
    assert not scheduler.plan(0.0).sequences
    scheduler.completed(first, results(first))
    assert not scheduler.plan(0.0).sequences
    scheduler.resume("a")
    again = scheduler.plan(0.0)
    assert again.positions.tolist() == second.positions.tolist()
    assert len(scheduler.completed(again, results(again))) == 1


def test_a_prompt_that_failed_of_a_tenant_held_since_is_a_prompt_again(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    step = scheduler.plan(0.0)
    scheduler.hold("a")
    scheduler.failed(step)
    scheduler.resume("a")
    assert rows_of(scheduler.plan(0.0)) == rows_of(step)


def test_a_tenant_s_steps_are_under_way_until_they_are_answered(scheduler: ContinuousBatchScheduler) -> None:
    scheduler.submit(prompt_request("a", "r", 3, 20), 0.0)
    step = scheduler.plan(0.0)
    scheduler.hold("a")
    assert scheduler.is_under_way("a")
    assert not scheduler.is_under_way("b")
    scheduler.completed(step, results(step))
    assert not scheduler.is_under_way("a")


@pytest.mark.parametrize(("computed", "written"), [(0, 0), (16, 1), (17, 2)])
def test_the_blocks_that_steps_wrote_are_those_of_a_sequence_s_positions(
    scheduler: ContinuousBatchScheduler, computed: int, written: int
) -> None:
    scheduler.submit(prompt_request("a", "r", prompt=1, most=40), 0.0)
    for _ in range(computed):
        scheduler.step(results, 0.0)
    tenant = scheduler.tenants["a"]
    assert tenant.blocks_to_save() == sorted(tenant.live["r"].blocks[:written])


# --- Preemption. ---


def crowded(weight: float, *, preempts: bool = True) -> ContinuousBatchScheduler:
    """Two tables, both of them "a"'s, of weight 1; tenant "b" has another weight."""
    tenants = TenantConfig("a", 2, 4), TenantConfig("b", 2, 4, weight=weight)
    scheduler = ContinuousBatchScheduler(replace(LIMITS, max_sequences=2, preempts=preempts), tenants)
    for name in ("old", "young"):
        scheduler.submit(prompt_request("a", name, 3, 6), 0.0)
        scheduler.step(results, 0.0)
    return scheduler


def test_the_lightest_tenant_s_youngest_sequence_makes_room_and_goes_on_later() -> None:
    scheduler = crowded(weight=2)
    [event] = scheduler.submit(prompt_request("b", "heavy", 3, 6), 0.0)
    assert ends([event]) == [("young", "Preempted")]
    assert isinstance(event, SchedulerEvent.Completed)
    assert event.continued_by == "young.1"
    assert set(scheduler.tenants["b"].live) == {"heavy"}
    events = run_out(scheduler, now=1e6)
    positions = [event.position for event in token_events(events) if event.request.request_id == "young.1"]
    assert positions == [4, 5, 6, 7, 8]
    assert ends(events)[-1] == ("young.1", "MaxTokensReached")


def test_what_was_preempted_is_charged_once() -> None:
    scheduler = crowded(weight=2)
    scheduler.submit(prompt_request("b", "heavy", 3, 1), 0.0)
    run_out(scheduler)
    assert scheduler.tenants["a"].counter == 2 * (3 + 6)


@pytest.mark.parametrize(("weight", "preempts"), [(1.0, True), (0.5, True), (2.0, False)])
def test_nobody_makes_room_for_a_tenant_that_is_no_heavier_or_where_preemption_is_off(
    weight: float, preempts: bool
) -> None:
    scheduler = crowded(weight, preempts=preempts)
    assert ends(scheduler.submit(prompt_request("b", "r", 3, 6), 0.0)) == [("r", "PoolExhausted")]
    assert set(scheduler.tenants["a"].live) == {"old", "young"}


def test_tokens_that_end_requests_are_compared_only_while_one_of_them_lives() -> None:
    scheduler = ContinuousBatchScheduler(LIMITS, [TenantConfig("a", 4, 64)])
    model = scheduler._may_end.tolist()
    for name in ("first", "second"):
        sampling = SamplingParameters(stop_token_ids=(3, 3, 5, VOCABULARY))
        scheduler.submit(PromptRequest("a", name, (1, 1), sampling, 2), 0.0)
    scheduler.cancel("first")
    assert scheduler._may_end[[3, 5]].all()
    scheduler.cancel("second")
    assert scheduler._may_end.tolist() == model
