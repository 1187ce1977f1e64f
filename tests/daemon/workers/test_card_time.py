"""The broker's samples of claims, on real pages: accounts, limits, latency words, another broker's start."""

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gpulease.daemon.contract.control_page import (
    BrokerPage,
    Counter,
    TimeAccounted,
    TimeLimits,
    WorkerPage,
)
from gpulease.daemon.contract.message_fields import parse_message
from gpulease.daemon.contract.messages import TO_WORKER, LatencyWord
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import channel_pair, close_all, receive_message
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import AcquireRequested, TenantRulesChanged, WorkerReady
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.time_shares import LAPSE_NS, LATENCY_QUEUE_NS
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.workers.card_time import CardTimes
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol.opcodes import Exclusivity

MS = 1_000_000
S = 1_000_000_000
CARD = "GPU-a"


class Node:
    """A table with leases, and their workers as the broker sees them: pages and channels."""

    def __init__(self, **tenants: TenantLimits) -> None:
        limits = CoreLimits(tenants=TenantRules(by_name=tenants))
        self.table = LeaseTable((Card(CARD, 0, "Test Card", 1 << 30, 10, False),), limits)
        self.workers: list[Worker] = []
        self.pages: list[WorkerPage] = []
        self.channels: list[socket.socket] = []
        self.times = self.keeper()
        self.now_ns = 100 * S

    def keeper(self) -> CardTimes:
        """A new broker's view of the same workers."""
        registry = type("Registry", (), {"serving": lambda _: self.workers})()
        times = CardTimes(self.table, cast(Workers, registry))
        times._arm = lambda due_ns: None  # type: ignore[method-assign]
        return times

    def open(self, tenant: str, *, is_older: bool = False, **options: Any) -> int:
        """Grant a lease, and return the number of its worker in `pages`."""
        lease_id = len(self.workers) + 1
        terms = LeaseTerms(20, 10_000, exclusivity=Exclusivity.SHARED, **options)
        self.table.handle(AcquireRequested(lease_id, tenant, lease_id, terms, None, 0), 0)
        self.table.handle(WorkerReady(lease_id), 0)
        page = BrokerPage()
        ours, theirs = channel_pair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.pages.append(WorkerPage(page.fds))
        page.close_fds()
        if not is_older:
            self.pages[-1].keep_time()
        spec = WorkerSpec(lease_id, CARD, 20, is_shared=False)
        self.workers.append(Worker(spec, page, ours, cast(Any, None), is_ready=True))
        self.channels.append(theirs)
        self.times.members_changed()
        return lease_id - 1

    def close(self) -> None:
        self.times.stop()
        for page in self.pages:
            page.close()
        for worker in self.workers:
            worker.channel.close()
            worker.page.close()
        for channel in self.channels:
            channel.close()

    def end(self, number: int) -> None:
        """End a worker, after its last sample."""
        worker = self.workers.pop(number)
        self.times.on_worker_end(worker)
        worker.page.close()
        worker.channel.close()

    def busy(self, number: int, since_ns: int | None = None) -> None:
        """Claim to be busy from now on, or since then."""
        self.pages[number].counters[Counter.BUSY_SINCE_NS] = self.now_ns if since_ns is None else since_ns

    def idle(self, number: int) -> None:
        counters = self.pages[number].counters
        counters[Counter.BUSY_NS] += self.now_ns - counters[Counter.BUSY_SINCE_NS]
        counters[Counter.BUSY_SINCE_NS] = 0

    def sample(self, after_ns: int = 0) -> None:
        self.now_ns += after_ns
        self.times.sample(self.now_ns)

    def gpu_s(self, number: int) -> float:
        use = self.times.known_use(number + 1)
        return 0.0 if use is None else use.gpu_ns / S

    def limits(self, number: int) -> TimeLimits:
        return self.pages[number].time_limits

    def words(self, number: int) -> list[LatencyWord]:
        """The words that the worker was sent."""
        found: list[LatencyWord] = []
        while True:
            try:
                message, fds = receive_message(self.channels[number])
            except BlockingIOError:
                return found
            assert len(fds) == 1
            close_all(fds)
            parsed = parse_message(TO_WORKER, message)
            assert isinstance(parsed, LatencyWord)
            found.append(parsed)


@pytest.fixture
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    # On a slow host samples take so long that they would become rarer.
    monkeypatch.setattr("gpulease.daemon.workers.card_time.LOOP_PART", 0)
    made = Node(**getattr(request, "param", {}))
    yield made
    made.close()


def test_two_busy_sessions_get_half_of_the_time_each_and_nothing_is_limited(node: Node) -> None:
    first, second, older = node.open("ann"), node.open("bob"), node.open("bob", is_older=True)
    node.sample()
    node.busy(first)
    node.sample(1 * S)
    node.busy(second)
    node.sample(1 * S)
    assert node.gpu_s(first) == pytest.approx(1.5)
    assert node.gpu_s(second) == pytest.approx(0.5)
    assert node.gpu_s(older) == 0
    assert node.times.busy_ratios() == {CARD: pytest.approx(1.0)}
    uses = node.times.take_uncounted()
    assert uses[CARD, "ann"].gpu_ns == pytest.approx(1.5 * S)
    assert uses[CARD, "bob"].busy_ns == 1 * S
    assert node.times.take_uncounted() == {}
    assert node.limits(first) == node.limits(second) == TimeLimits()


def test_a_card_is_sampled_as_often_as_it_must_be(node: Node) -> None:
    node.open("ann")
    node.open("bob")
    node.sample()
    rounds = node.times.rounds
    for _ in range(10):
        node.sample(100 * MS)
    assert node.times.rounds - rounds == 1
    # Two that are busy in parts of the time overlap in a way that only shorter samples show.
    for number in (0, 1):
        node.busy(number)
    node.sample(500 * MS)
    for number in (0, 1):
        node.idle(number)
    node.sample(600 * MS)
    rounds = node.times.rounds
    for number in (0, 1):
        node.busy(number)
    node.now_ns += 20 * MS
    for number in (0, 1):
        node.idle(number)
    node.sample(50 * MS)
    assert node.times.rounds - rounds == 1


@pytest.mark.parametrize("node", [{"bob": TenantLimits(max_weight=3)}], indirect=True)
def test_a_shared_card_is_sampled_more_often_while_a_tenant_may_hide_how_its_sessions_overlap(node: Node) -> None:
    first, second, bobs = node.open("ann"), node.open("ann"), node.open("bob", weight=3)

    def samples(numbers: tuple[int, ...], rounds: int = 10) -> float:
        """Let these sessions work in a half of each round, and return the samples of a round."""
        before = node.times.rounds
        for _ in range(rounds):
            for number in numbers:
                node.busy(number)
            for _ in range(10):
                node.sample(500_000)
            for number in numbers:
                node.idle(number)
            for _ in range(10):
                node.sample(500_000)
        return (node.times.rounds - before) / rounds

    node.busy(bobs)
    node.sample()
    assert samples(()) == pytest.approx(1, abs=0.2)
    assert samples((first,)) == pytest.approx(1, abs=0.2)
    samples((first, second), 2)
    assert 3 <= samples((first, second)) <= 11
    samples((first,), 2)
    assert samples((first,)) == pytest.approx(1, abs=0.2)
    # All that is used counts, however often it is sampled.
    total_s = sum(node.gpu_s(number) for number in (first, second, bobs))
    assert total_s == pytest.approx((node.now_ns - 100 * S) / S, abs=0.02)


@pytest.mark.parametrize("node", [{"bob": TenantLimits(max_weight=3)}], indirect=True)
def test_weights_are_on_the_pages_while_both_want_the_card(node: Node) -> None:
    first, second = node.open("ann"), node.open("bob", weight=3)
    node.sample()
    node.busy(first)
    node.busy(second)
    for _ in range(3):
        node.sample(10 * MS)
    # They take turns. Those of the second one are three times as long, and more after what the first one got before.
    limits, other = node.limits(first), node.limits(second)
    assert other.turn_ns >= 2.8 * limits.turn_ns
    assert limits.turn_ns + other.turn_ns == limits.turn_period_ns
    # A round ends with each period, so they come every 8 to 15 ms.
    assert node.now_ns + LAPSE_NS - 15 * MS <= limits.until_ns <= node.now_ns + LAPSE_NS
    # Alone, the first one is not limited any more.
    node.idle(second)
    for _ in range(3):
        node.sample(10 * MS)
    assert node.limits(first) == TimeLimits()


@pytest.mark.parametrize("node", [{"eve": TenantLimits(max_share=30)}], indirect=True)
def test_a_pause_does_not_end_the_debt_of_a_long_kernel(node: Node) -> None:
    eve = node.open("eve")
    node.sample()
    node.busy(eve)
    for _ in range(90):
        node.sample(10 * MS)
    node.idle(eve)
    used_ns = node.pages[eve].counters[Counter.BUSY_NS]
    for _ in range(50):
        node.sample(10 * MS)
        # It has 30 % of 1.4 s at most, and used 0.9 s.
        assert 0 < node.limits(eve).allowance_ns <= used_ns
    for _ in range(200):
        node.sample(10 * MS)
    # It has paid all of it, and is idle.
    assert node.limits(eve) == TimeLimits()


@pytest.mark.parametrize("node", [{"eve": TenantLimits(max_share=30)}], indirect=True)
@pytest.mark.parametrize("is_alone", [True, False])
def test_the_end_of_a_lease_does_not_end_its_tenant_s_debt(
    node: Node, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: node.now_ns)
    if not is_alone:
        node.open("bob")
    eve = node.open("eve")
    node.sample()
    node.busy(eve)
    for _ in range(90):
        node.sample(10 * MS)
    node.idle(eve)
    node.end(eve)
    for _ in range(20):
        node.sample(10 * MS)
    node.open("eve")
    # Its first launch has to wait: for its allowance, and for a turn, because it has never been busy.
    node.sample()
    assert node.limits(-1).allowance_ns == node.limits(-1).turn_ns == 1
    for _ in range(250):
        node.sample(10 * MS)
    assert node.limits(-1) == TimeLimits()


@pytest.mark.parametrize("node", [{"eve": TenantLimits(max_share=30)}], indirect=True)
def test_a_card_without_sessions_is_forgotten_when_its_debts_are_paid(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: node.now_ns)
    eve = node.open("eve")
    node.sample()
    node.busy(eve)
    for _ in range(90):
        node.sample(10 * MS)
    node.idle(eve)
    node.end(eve)
    node.sample(10 * MS)
    assert CARD in node.times.busy_ratios()
    for _ in range(300):
        node.sample(10 * MS)
    assert node.times.busy_ratios() == {}


@pytest.mark.parametrize("node", [{"bob": TenantLimits(max_weight=3)}], indirect=True)
def test_the_log_says_why_a_session_lost_its_turns(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = node.open("ann"), node.open("bob", weight=3)
    node.sample()
    node.busy(first)
    node.busy(second)
    for _ in range(3):
        node.sample(10 * MS)
    assert node.limits(second).turn_ns
    # From now on it only waits, and leaves turns of some 15 ms unused.
    node.idle(second)
    node.pages[second].counters[Counter.HELD_BACK_SINCE_NS] = node.now_ns
    while node.limits(first).turn_ns:
        node.sample(10 * MS)
    records = [getattr(record, ATTRIBUTE) for record in caplog.records]
    (found,) = [fields for name, fields in records if name == LogEvent.TURNS_LOST.kind.name]
    assert int(found["lease_id"], 16) == second + 1
    assert found["for_ms"] == 200
    assert found["due_ms"] > 10
    assert not found["busy_ms"]
    assert found["held_ms"] > found["due_ms"]


@pytest.mark.parametrize("node", [{"ann": TenantLimits(max_weight=3)}], indirect=True)
def test_rules_that_change_apply_at_once(node: Node) -> None:
    first, second = node.open("ann", weight=3), node.open("bob")
    node.sample()
    node.busy(first)
    node.busy(second)
    node.sample(20 * MS)
    assert node.limits(second).turn_ns
    rules = TenantRules(by_name={"bob": TenantLimits(max_share=10)})
    node.table.handle(TenantRulesChanged(rules), 0)
    node.times.members_changed()
    # Ann's weight counts as 1 now, and bob has a cap: what his turns leave is hers.
    for _ in range(3):
        node.sample(10 * MS)
    rest, capped = node.limits(first), node.limits(second)
    assert 0 < capped.turn_ns <= 0.105 * capped.turn_period_ns
    assert capped.turn_ns + rest.turn_ns == capped.turn_period_ns
    node.table.handle(TenantRulesChanged(TenantRules()), 0)
    node.times.members_changed()
    node.sample(10 * MS)
    assert node.limits(second) == TimeLimits()


@pytest.mark.parametrize("node", [{"ann": TenantLimits(may_latency=True)}], indirect=True)
def test_a_latency_session_has_a_word_that_all_others_get(node: Node) -> None:
    latency, other = node.open("ann", latency=True), node.open("bob")
    node.sample()
    node.sample(10 * MS)
    node.sample(10 * MS)
    assert node.words(latency) == [LatencyWord(0, is_own=True)]
    assert node.words(other) == [LatencyWord(0, is_own=False)]
    assert (node.limits(other).latency_mask, node.limits(other).queue_bound_ns) == (1, LATENCY_QUEUE_NS)
    assert node.limits(latency) == TimeLimits()
    # One that comes later gets it, too.
    third = node.open("eve")
    node.sample(10 * MS)
    node.sample(10 * MS)
    assert node.words(third) == [LatencyWord(0, is_own=False)]
    assert node.words(other) == []
    # When the session has ended, nobody holds back for its word.
    ended = node.workers.pop(latency)
    node.times.on_worker_end(ended)
    node.sample(10 * MS)
    assert node.limits(other) == TimeLimits()
    ended.channel.close()
    ended.page.close()


@pytest.mark.parametrize("node", [{"ann": TenantLimits(may_latency=True)}], indirect=True)
def test_a_tenant_that_may_no_longer_have_the_latency_class_loses_it(node: Node) -> None:
    node.open("ann", latency=True)
    other = node.open("bob")
    for _ in range(3):
        node.sample(10 * MS)
    assert node.limits(other).latency_mask == 1
    node.table.handle(TenantRulesChanged(TenantRules()), 0)
    node.times.members_changed()
    node.sample(10 * MS)
    assert node.limits(other) == TimeLimits()


def test_another_broker_continues_the_account(node: Node) -> None:
    number = node.open("ann")
    node.sample()
    node.busy(number)
    node.sample(2 * S)
    assert node.workers[number].page.time_account() == TimeAccounted(2 * S, 2 * S, 0, node.now_ns)
    # No broker runs for a second, in which the session stays busy.
    node.times = node.keeper()
    node.sample(1 * S)
    assert node.gpu_s(number) == pytest.approx(3.0)


def test_another_broker_continues_with_the_latest_account_of_a_lease_and_its_submit(node: Node) -> None:
    submit, session = node.open("ann"), node.open("ann")
    node.workers[submit].spec = replace(node.workers[submit].spec, submit_of=session + 1)
    node.sample()
    node.busy(submit)
    node.sample(1 * S)
    node.idle(submit)
    node.busy(session)
    node.sample(2 * S)
    # The page of the submit's worker is as it was at its last busy sample.
    node.times = node.keeper()
    node.sample()
    assert node.gpu_s(session) == pytest.approx(3.0)


def test_the_last_sample_of_a_worker_is_taken_at_its_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    number = node.open("ann")
    node.sample()
    node.busy(number)
    node.now_ns += 300 * MS
    monkeypatch.setattr("gpulease.daemon.workers.card_time.time.monotonic_ns", lambda: node.now_ns)
    node.times.on_worker_end(node.workers[number])
    assert node.gpu_s(number) == pytest.approx(0.3)
    node.times.forget(number + 1)
    assert node.times.known_use(number + 1) is None


def test_a_query_sees_the_present_account(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    number = node.open("ann")
    node.sample()
    node.busy(number)
    node.now_ns += 200 * MS
    monkeypatch.setattr("gpulease.daemon.workers.card_time.time.monotonic_ns", lambda: node.now_ns)
    use = node.times.use_of(number + 1, CARD)
    assert use is not None
    assert use.gpu_ns == pytest.approx(200 * MS)


@pytest.mark.parametrize("node", [{"ann": TenantLimits(max_weight=3, may_latency=True)}], indirect=True)
def test_any_claims_of_one_worker_leave_the_others_accounted(node: Node) -> None:
    liar, honest = node.open("ann", weight=3, latency=True), node.open("bob")
    node.sample()
    node.busy(honest)
    counters = node.pages[liar].counters
    for busy_ns, since_ns in ((0, 1), (2**64 - 1, 1), (2**63, 2**63), (1, 2**64 - 1), (2**64 - 1, 1)):
        for counter in (Counter.BUSY_NS, Counter.HELD_BACK_NS, Counter.LAST_BUSY_UNTIL_NS):
            counters[counter] = busy_ns
        for counter in (Counter.BUSY_SINCE_NS, Counter.HELD_BACK_SINCE_NS, Counter.LAST_BUSY_FROM_NS):
            counters[counter] = since_ns
        node.sample(20 * MS)
    assert 0.04 <= node.gpu_s(honest) <= 0.1
    assert node.gpu_s(liar) <= 0.1


def test_a_submit_s_time_is_its_lease_s(node: Node) -> None:
    number = node.open("ann")
    submit = node.open("bob")
    spec = replace(node.workers[submit].spec, lease_id=(1 << 129) + 1, submit_of=number + 1)
    node.workers[submit].spec = spec
    node.sample()
    node.busy(submit)
    node.sample(1 * S)
    assert node.gpu_s(number) == pytest.approx(1.0)
