"""Shares of the engine: weighted service and its bound, turns of rows, and concurrent prompts."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_requests import AnyEvent, SchedulerEvent, TenantConfig
from gpulease.client.decode.scheduler.scheduler import MAX_PREEMPTIONS, ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.scheduler.step_plan import StepPlan

from .simulated_engine import prompt_request

ENDLESS = 100_000


def scheduler_of(
    *tenants: TenantConfig, sequences: int = 4, rows: int = 8, prefill_rows: int = 4, preempts: bool = False
) -> ContinuousBatchScheduler:
    limits = SchedulerSettings(sequences, rows, prefill_rows, context=2 * ENDLESS, vocabulary=100, preempts=preempts)
    return ContinuousBatchScheduler(limits, tenants)


def ones(step: StepPlan) -> list[int]:
    return [1] * len(step)


class Service:
    """What each tenant was served, counted from outside: prompts' tokens when admitted, and emitted tokens."""

    def __init__(self, scheduler: ContinuousBatchScheduler) -> None:
        self.scheduler = scheduler
        self.tokens = dict.fromkeys(scheduler.tenants, 0)
        self._admitted: set[str] = set()
        self._numbers = count()

    def backlog(self, tenant: str, prompt: int, most: int) -> list[AnyEvent]:
        request = prompt_request(tenant, f"r{next(self._numbers)}", prompt, most, wait_s=3600)
        return self.scheduler.submit(request, 0.0)

    def step(self) -> None:
        step = self.scheduler.plan(0.0)
        for tenant in self.scheduler.tenants.values():
            for name, sequence in tenant.live.items():
                first = sequence.request.continues or name
                if first not in self._admitted:
                    self._admitted.add(first)
                    self.tokens[tenant.config.id] += sequence.prompt_length - sequence.request.replayed_tokens
        for event in self.scheduler.completed(step, ones(step)):
            if isinstance(event, SchedulerEvent.Token):
                self.tokens[event.request.tenant_id] += 1

    def weighted(self, tenant: str) -> float:
        return self.tokens[tenant] / self.scheduler.tenants[tenant].config.weight


def test_backlogged_tenants_of_weights_1_and_3_are_served_1_to_3() -> None:
    tenants = [TenantConfig("light", 9, 64, weight=1), TenantConfig("heavy", 9, 64, weight=3)]
    service = Service(scheduler_of(*tenants, sequences=8, rows=12))
    numbers = random.Random(1)
    for _ in range(8_000):
        for tenant in service.scheduler.tenants.values():
            while len(tenant.waiting) < 8:
                service.backlog(tenant.config.id, numbers.randint(1, 40), numbers.randint(1, 40))
        service.step()
    assert service.tokens["heavy"] / service.tokens["light"] == pytest.approx(3, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=4),
    sequences=st.integers(1, 6),
    late=st.integers(0, 150),
    preempts=st.booleans(),
)
def test_no_two_contending_tenants_differ_by_more_than_the_service_bound(
    weights: list[float], sizes: list[tuple[int, int]], sequences: int, late: int, preempts: bool
) -> None:
    # Their own limits let in more than there are tables, and more wait than a step can admit: all contend, always.
    tenants = [TenantConfig(str(i), sequences + 1, 5 * (sequences + 1), weight) for i, weight in enumerate(weights)]
    service = Service(scheduler_of(*tenants, sequences=sequences, preempts=preempts))
    spreads: dict[tuple[str, str], list[float]] = {}
    for step in range(400):
        present = tenants[: 1 if step < late else len(tenants)]
        for number, tenant in enumerate(present):
            while len(service.scheduler.tenants[tenant.id].waiting) < sequences + 2:
                service.backlog(tenant.id, *sizes[number % len(sizes)])
        service.step()
        for one in present:
            for other in present:
                if step >= late:
                    ahead = service.weighted(one.id) - service.weighted(other.id)
                    spreads.setdefault((one.id, other.id), []).append(ahead)
    bound = {tenant.id: (16 * tenant.max_blocks + tenant.max_concurrent) / tenant.weight for tenant in tenants}
    for pair, spread in spreads.items():
        assert max(spread) - min(spread) <= bound[pair[0]] + bound[pair[1]]


def test_a_tenant_that_was_idle_has_earned_nothing() -> None:
    service = Service(scheduler_of(TenantConfig("busy", 4, 64), TenantConfig("idle", 4, 64), sequences=1))
    for _ in range(2000):
        if not service.scheduler.waiting_requests:
            service.backlog("busy", 3, 5)
        service.step()
    before = dict(service.tokens)
    for _ in range(2000):
        for name, tenant in service.scheduler.tenants.items():
            if not tenant.waiting:
                service.backlog(name, 3, 5)
        service.step()
    served = {name: service.tokens[name] - before[name] for name in before}
    assert served["idle"] == pytest.approx(served["busy"], rel=0.02)


def test_a_tenant_that_its_own_limit_held_back_has_earned_nothing() -> None:
    service = Service(scheduler_of(TenantConfig("held", 1, 64), TenantConfig("other", 8, 640), sequences=2))
    service.backlog("held", 1, 900)
    for _ in range(850):
        for name, tenant in service.scheduler.tenants.items():
            while len(tenant.waiting) < 2:
                service.backlog(name, 8, 8)
        service.step()
    counters = {name: tenant.counter for name, tenant in service.scheduler.tenants.items()}
    assert counters["held"] < counters["other"]
    while "r0" in service.scheduler.tenants["held"].live:
        service.step()
    service.step()
    assert abs(service.scheduler.tenants["held"].counter - service.scheduler.tenants["other"].counter) <= 100


@pytest.mark.parametrize(
    ("live", "prompts", "rows"),
    [(5, 0, 4), (9, 0, 4), (8, 0, 8), (15, 1, 8), (8, 1, 8), (1, 1, 1), (3, 5, 2), (20, 7, 6)],
)
def test_each_live_sequence_has_a_row_every_so_many_steps(live: int, prompts: int, rows: int) -> None:
    tenant = TenantConfig("a", live + prompts, 1_000_000)
    scheduler = scheduler_of(tenant, sequences=live + prompts, rows=rows, prefill_rows=rows)
    for number in range(live):
        scheduler.submit(prompt_request("a", f"d{number}", 1, ENDLESS // 10), 0.0)
    while any(not sequence.filled for sequence in scheduler.tenants["a"].live.values()):
        scheduler.step(ones, 0.0)
    for number in range(prompts):
        scheduler.submit(prompt_request("a", f"p{number}", ENDLESS // 10, 1), 0.0)
    bound = -(-(live + prompts) // rows)
    last = {f"d{number}": 0 for number in range(live)}
    last |= {"prompts": 0} if prompts else {}
    for step in range(1, 200):
        plan = scheduler.plan(0.0)
        assert len(plan) == rows
        for sequence in plan.sequences:
            name = sequence.request.request_id
            name = "prompts" if name.startswith("p") else name
            assert step - last[name] <= bound
            last[name] = step
        scheduler.completed(plan, ones(plan))
    assert all(200 - at <= bound for at in last.values())


def test_a_short_prompt_does_not_wait_for_another_tenant_s_long_ones() -> None:
    scheduler = scheduler_of(
        TenantConfig("long", 8, 10_000), TenantConfig("short", 8, 100), sequences=9, prefill_rows=8
    )
    for number in range(8):
        scheduler.submit(prompt_request("long", f"l{number}", 2000, 1), 0.0)
    for _ in range(20):
        scheduler.step(ones, 0.0)
    scheduler.submit(prompt_request("short", "s", 40, 1), 0.0)
    steps = next(step for step in count(1) if scheduler.step(ones, 0.0))
    assert steps <= 40 / (8 / 2) + 2


def test_prompts_rows_are_shared_by_weight() -> None:
    tenants = [TenantConfig("light", 1, 100_000, weight=1), TenantConfig("heavy", 1, 100_000, weight=3)]
    scheduler = scheduler_of(*tenants)
    for tenant in tenants:
        scheduler.submit(prompt_request(tenant.id, tenant.id, ENDLESS, 1), 0.0)
    for _ in range(1000):
        scheduler.step(ones, 0.0)
    filled = {name: tenant.live[name].filled for name, tenant in scheduler.tenants.items()}
    assert filled["heavy"] / filled["light"] == pytest.approx(3, rel=0.02)


def test_a_tenant_whose_prompts_were_many_is_not_behind_one_that_comes_later() -> None:
    scheduler = scheduler_of(TenantConfig("old", 9, 100_000), TenantConfig("new", 9, 100_000))
    scheduler.submit(prompt_request("old", "first", 4000, 1), 0.0)
    while scheduler.live_sequences:
        scheduler.step(ones, 0.0)
    scheduler.submit(prompt_request("new", "second", 4000, 1), 0.0)
    scheduler.submit(prompt_request("old", "third", 4000, 1, first_token=7), 0.0)
    for _ in range(100):
        scheduler.step(ones, 0.0)
    third, second = scheduler.tenants["old"].live["third"], scheduler.tenants["new"].live["second"]
    assert third.filled == pytest.approx(second.filled, abs=16)


def test_a_light_tenant_s_requests_end_however_many_heavy_ones_come() -> None:
    light, heavy = TenantConfig("light", 4, 64, weight=1), TenantConfig("heavy", 4, 64, weight=5)
    service = Service(scheduler_of(light, heavy, sequences=2, preempts=True))
    events: list[AnyEvent] = []
    for _ in range(3):
        service.backlog("light", 10, 30)
    for _ in range(1_000):
        while len(service.scheduler.tenants["heavy"].waiting) < 3:
            events += service.backlog("heavy", 2, 3)
        plan = service.scheduler.plan(0.0)
        events += [*plan.events, *service.scheduler.completed(plan, ones(plan))]
    ends = [event for event in events if isinstance(event, SchedulerEvent.Completed)]
    reasons = [event.reason for event in ends if event.request.tenant_id == "light"]
    assert reasons.count(CompletionReason.MAX_TOKENS_REACHED) == 3
    assert 0 < reasons.count(CompletionReason.PREEMPTED) <= 3 * MAX_PREEMPTIONS
