"""The runtime forgets the requests of clients that left, and keeps fenced workers apart from other programs."""

import asyncio
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.runtime import FAULT, PendingRequests, Result, Runtime, withheld_lease
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.contract.message_fields import U64_MAX
from gpulease.daemon.contract.messages import ReturnedReport, ReturnWantedReport, Scrubbed
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.emulated_cards import CONTEXT_BYTES, EmbeddedCards
from gpulease.daemon.gpus.source import CardReading
from gpulease.daemon.host.ipc import send_message
from gpulease.daemon.leases.denials import not_found
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Effect,
    Event,
    FenceClearRequested,
    FreeDone,
    FreeRequested,
    Granted,
    MoveRequested,
    ParkRequested,
    PoolTimerFired,
    ReclaimFailed,
    ReclaimProved,
    RegionProved,
    Renewed,
    RequestDenied,
    ResizeRequested,
    ResizeSlice,
    RevokeRequested,
    SessionCondemned,
    SessionImaged,
    SessionParked,
    SessionParkRefused,
    SliceResized,
    WaitTimerFired,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import (
    FIRST_SUBMIT_ID,
    FIRST_WARM_ID,
    Cause,
    LeaseState,
    LeaseTerms,
    Recycling,
    SubmitRequested,
)
from gpulease.daemon.leases.park_state import ParkPhase
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.teardown import SCRUB_TIMEOUT_MS
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.workers.monitors import CardWatch
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status, Waiting

LEAVING = 20
"""Clients, one after the other: far more than may wait at a time."""


@pytest.mark.parametrize("what", ["an acquire", "a submit"])
def test_nothing_is_left_of_a_client_that_waited_and_left(what: str) -> None:
    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)

        def expect() -> int:
            return runtime.expect(lambda _: None)

        runtime.post(AcquireRequested(expect(), "ann", 5, LeaseTerms(900, 60_000, submit_bytes=100)))
        runtime.post(WorkerReady(5))
        runtime.post(SubmitRequested(expect(), 5, "ann", 1000))
        for number in range(LEAVING):
            request = expect()
            if what == "an acquire":
                runtime.post(AcquireRequested(request, "ann", 10 + number, LeaseTerms(900, 60_000), wait_ms=30_000))
            else:
                runtime.post(SubmitRequested(request, 5, "ann", 1000))
            assert (WaitTimerFired, request) in runtime.timers
            runtime.abandon(request)
            assert (WaitTimerFired, request) not in runtime.timers
        await runtime.stop()

    asyncio.run(story())


def test_a_fault_of_an_event_that_an_effect_posted_is_answered_at_once_and_stops_no_other() -> None:
    class FaultyTable(LeaseTable):
        def handle(self, event: Event, now_ns: int) -> list[Effect]:
            if isinstance(event, RevokeRequested):
                raise ZeroDivisionError
            return super().handle(event, now_ns)

    async def story() -> None:
        table = FaultyTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        revoked: list[Result] = []
        granted: list[Result] = []

        def post_more(result: Result) -> None:
            granted.append(result)
            runtime.post(RevokeRequested(runtime.expect(revoked.append), 5, "because"))
            runtime.post(FreeRequested(runtime.expect(lambda _: None), 5, "ann"))

        runtime.post(AcquireRequested(runtime.expect(post_more), "ann", 5, LeaseTerms(900, 60_000)))
        runtime.post(WorkerReady(5))
        assert len(granted) == 1
        assert [isinstance(result, Failure) and result.status for result in revoked] == [Status.INTERNAL]
        lease = table.get(5)
        assert lease is not None
        assert lease.state is LeaseState.DRAINING, "the event behind the fault is handled"
        # One that no effect posted is raised, for the caller to answer.
        with pytest.raises(ZeroDivisionError):
            runtime.post(RevokeRequested(runtime.expect(revoked.append), 5, "because"))
        await runtime.stop()

    asyncio.run(story())


@pytest.mark.parametrize("what", ["a resize", "an acquire", "a submit"])
def test_a_fault_of_a_request_that_had_waited_answers_it_and_leaves_its_cause_alone(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(park_memory_bytes=16 << 20))
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        results: list[Result] = []
        cause: list[Result] = []
        terms = LeaseTerms(900, 60_000, submit_bytes=100)
        if what == "a resize":
            terms = LeaseTerms(900, 60_000, park_idle_ms=0)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, terms))
        runtime.post(WorkerReady(5))
        number = runtime.expect(results.append)

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        match what:
            case "a resize":
                runtime.post(ParkRequested(runtime.expect(cause.append), 5, "ann"))
                state = table._store.parkable[5].park
                assert state is not None
                runtime.post(ResizeRequested(number, 5, "ann", 800))
                monkeypatch.setitem(table._handlers, ResizeRequested, fail)
                # The park is refused, so the session is on its card.
                runtime.post(SessionParkRefused(5, state.number, "it runs"))
            case "an acquire":
                runtime.post(AcquireRequested(number, "bob", 6, LeaseTerms(900, 60_000), wait_ms=30_000))
                monkeypatch.setattr(table._admission, "_place", fail)
                runtime.post(FreeRequested(runtime.expect(cause.append), 5, "ann"))
                runtime.post(WorkerExited(5, "signal 9"))
                runtime.post(ReclaimProved(5))
            case _:
                runtime.post(SubmitRequested(first := runtime.expect(cause.append), 5, "ann", 1000))
                runtime.post(SubmitRequested(number, 5, "ann", 1000))
                (submit,) = table._store.submits.values()
                monkeypatch.setattr(table.submits, "_start", fail)
                runtime.abandon(first)
                runtime.post(WorkerExited(submit.submit_id, "signal 9"))
                runtime.post(ReclaimProved(submit.submit_id))
                cause.append(FAULT)
        assert results == [FAULT]
        assert (WaitTimerFired, number) not in runtime.timers
        assert len(cause) == 1
        await runtime.stop()

    asyncio.run(story())


def test_a_fault_of_a_wait_timer_answers_its_request() -> None:
    class FaultyTable(LeaseTable):
        def handle(self, event: Event, now_ns: int) -> list[Effect]:
            if isinstance(event, WaitTimerFired):
                raise ZeroDivisionError
            return super().handle(event, now_ns)

    async def story() -> None:
        table = FaultyTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, LeaseTerms(900, 60_000)))
        answered = asyncio.get_running_loop().create_future()
        waiting = runtime.expect(answered.set_result)
        runtime.post(AcquireRequested(waiting, "bob", 6, LeaseTerms(900, 60_000), wait_ms=1))
        assert await answered is FAULT
        await runtime.stop()

    asyncio.run(story())


def test_a_worker_can_not_choose_a_number_after_which_no_park_can_be_ordered() -> None:
    """It may name a park that an earlier daemon has ordered: numbers of parks are times, in 64 bits."""

    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(park_memory_bytes=16 << 20))
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), SimulatedWorkers(), tokens, FactRecorder(), 1)
        terms = LeaseTerms(900, 60_000, park_idle_ms=0)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, terms))
        runtime.post(WorkerReady(5))
        runtime.post(ParkRequested(runtime.expect(lambda _: None), 5, "ann"))
        state = table._store.parkable[5].park
        assert state is not None
        number = state.number
        runtime.post(SessionParked(5, number, 900))
        runtime.post(RegionProved(5))
        runtime._parks.on_message(5, ReturnWantedReport(number))
        assert state.phase is ParkPhase.RETURNING
        runtime._parks.on_message(5, ReturnWantedReport(U64_MAX))
        assert state.number == number
        runtime._parks.on_message(5, ReturnedReport(number, 900, 0, 0))
        assert not state.is_off, "the session is on its card"
        await runtime.stop()

    asyncio.run(story())


def test_the_worker_that_a_session_has_left_is_killed_once_a_record_says_so() -> None:
    """With an earlier record, the next broker continues the session in that worker: the image dies with this broker."""
    waiting: list[Callable[[str], None]] = []
    killed: list[int] = []

    class SlowJournal(Journal):
        def once_decided(self, do: Callable[[str], None]) -> None:
            waiting.append(do)

    class Listening(SimulatedWorkers):
        def kill(self, lease_id: int) -> None:
            killed.append(lease_id)

    async def story() -> None:
        limits = CoreLimits(park_memory_bytes=16 << 20)
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], limits)
        tokens = TokenService(table, frozenset(), None, None, {})
        source = EmbeddedCards([1000])
        runtime = Runtime(table, source, Listening(), tokens, FactRecorder(), 1, SlowJournal())
        terms = LeaseTerms(900, 60_000, park_idle_ms=0)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, terms))
        runtime.post(WorkerReady(5))
        runtime.post(MoveRequested(runtime.expect(lambda _: None), 5, "ann", None))
        state = table._store.parkable[5].park
        assert state is not None
        runtime.post(SessionParked(5, state.number, 900))
        runtime.post(RegionProved(5))
        runtime.post(SessionImaged(5, state.number, 1000))
        ((left,),) = [[one.warm_id for one in table.warming()]]
        assert killed == []
        settled = asyncio.create_task(runtime.settled())
        await asyncio.sleep(0)
        assert not settled.done(), "a daemon that stops waits for the kill: the next one would find two workers"
        (kill,) = waiting
        kill("")
        await settled
        assert killed == [left]
        # A lease that ends has no use for its worker.
        runtime.post(WorkerExited(left, "killed", is_by_daemon=True))
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 6, LeaseTerms(90, 60_000)))
        runtime.post(WorkerReady(6))
        runtime.post(SessionCondemned(6, Cause.KERNEL_TIMEOUT, "a kernel ran for more than 0.3 s"))
        assert (killed, len(waiting)) == ([left, 6], 1)
        runtime.workers.images.close()
        await runtime.stop()
        kill("")
        assert killed == [left, 6], "what the last commit releases is the next daemon's"

    asyncio.run(story())


@pytest.mark.parametrize("problem", ["", "No space left on device"])
def test_a_worker_grows_once_the_charge_is_recorded_and_not_without(problem: str) -> None:
    """With an earlier record, the next broker would grant the bytes that the worker has grown by."""
    waiting: list[Callable[[str], None]] = []
    ordered: list[ResizeSlice] = []

    class SlowJournal(Journal):
        def once_decided(self, do: Callable[[str], None]) -> None:
            waiting.append(do)

    class OneWorker(SimulatedWorkers):
        def worker(self, lease_id: int) -> Worker | None:
            return cast(Worker, SimpleNamespace(spec=WorkerSpec(lease_id, "GPU-a", 300, is_shared=False)))

    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), OneWorker(), tokens, FactRecorder(), 1, SlowJournal())
        runtime._regions.resize = ordered.append  # type: ignore[assignment, method-assign]
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, LeaseTerms(400, 60_000)))
        runtime.post(WorkerReady(5))
        runtime.post(ResizeRequested(runtime.expect(lambda _: None), 5, "ann", 300))
        assert ordered.pop() == ResizeSlice(5, 300, after_record=False), "a table of an earlier record charges more"
        runtime.post(SliceResized(5, 300))
        runtime.post(RegionProved(5))
        results: list[Result] = []
        runtime.post(ResizeRequested(runtime.expect(results.append), 5, "ann", 500))
        assert not ordered
        (decided,) = waiting
        decided(problem)
        if problem:
            assert not ordered
            runtime.post(RegionProved(5))
            (refused,) = results
            assert isinstance(refused, RequestDenied)
            assert problem in refused.denial.message
            lease = table.get(5)
            assert lease is not None
            assert lease.size_bytes == 300
        else:
            assert ordered.pop() == ResizeSlice(5, 500, after_record=True)
            runtime.post(RevokeRequested(runtime.expect(lambda _: None), 5, "because"))
            decided("")
            assert not ordered, "the lease has ended"
        await runtime.stop()

    asyncio.run(story())


def test_a_session_shows_the_reason_of_every_end() -> None:
    shown: list[tuple[Status, str, str]] = []

    class Listening(SimulatedWorkers):
        def refuse(self, lease_id: int, status: Status, reason: str = "", cause: str = "") -> None:
            shown.append((status, reason, cause))

    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), Listening(), tokens, FactRecorder(), 1)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, LeaseTerms(900, 60_000)))
        runtime.post(WorkerReady(5))
        runtime.post(SessionCondemned(5, Cause.KERNEL_TIMEOUT, "a kernel ran for more than 0.3 s"))
        await runtime.stop()

    asyncio.run(story())
    assert shown == [(Status.SESSION_FAILED, "a kernel ran for more than 0.3 s", "kernel_timeout")]


GONE_PID = 1 << 30
"""No process has it: it is above any pid_max."""


class SharedCards(EmbeddedCards):
    """Cards that list processes."""

    listed: dict[int, int]
    has_others = True

    def read(self, card_uuid: str) -> CardReading:
        return CardReading(0, self.listed)


def fence_lease(runtime: Runtime) -> None:
    runtime.workers.remember_ended(5, GONE_PID)
    runtime.post(WorkerExited(5, "it died"))
    runtime.post(ReclaimFailed(5, "the card lists it"))


def fence_warm_context(runtime: Runtime) -> None:
    runtime.workers.remember_ended(FIRST_WARM_ID, GONE_PID)
    runtime.post(WorkerExited(FIRST_WARM_ID, "it died"))
    runtime.post(ReclaimFailed(FIRST_WARM_ID, "the card lists it"))


def fence_submit(runtime: Runtime) -> None:
    runtime.post(SubmitRequested(runtime.expect(lambda _: None), 5, "ann", 1000))
    runtime.workers.remember_ended(FIRST_SUBMIT_ID, GONE_PID)
    runtime.post(WorkerExited(FIRST_SUBMIT_ID, "it died"))
    runtime.post(ReclaimFailed(FIRST_SUBMIT_ID, "the card lists it"))
    runtime.post(RevokeRequested(runtime.expect(lambda _: None), 5, "because"))
    runtime.post(WorkerExited(5, "it was killed"))
    runtime.post(ReclaimProved(5))


@pytest.mark.parametrize("fence", [fence_lease, fence_warm_context, fence_submit])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_fenced_workers_bytes_are_off_the_card_once(fence: Callable[[Runtime], None], is_cleared: bool) -> None:
    """The card goes on listing the process; the fence holds its bytes until an operator clears it."""

    async def story() -> None:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], warm_contexts=1)
        tokens = TokenService(table, frozenset(), None, None, {})
        source = SharedCards([1000])
        source.listed = {GONE_PID: 7}
        runtime = Runtime(table, source, SimulatedWorkers(), tokens, FactRecorder(), 1)

        async def outside_bytes() -> int:
            watch = CardWatch(source, ["GPU-a"], runtime.workers, runtime.post)
            await watch.start()
            await watch.stop()
            return table.cards()[0].outside_bytes

        runtime.post(
            AcquireRequested(runtime.expect(lambda _: None), "ann", 5, LeaseTerms(900, 60_000, submit_bytes=100))
        )
        runtime.post(WorkerReady(5))
        runtime.post(PoolTimerFired())
        fence(runtime)
        assert table.cards()[0].fenced_bytes > 0
        assert await outside_bytes() == 0
        if is_cleared:
            runtime.post(FenceClearRequested(runtime.expect(lambda _: None), None))
        else:
            source.listed = {}
            assert await outside_bytes() == 0
            source.listed = {GONE_PID: 7}
        assert await outside_bytes() == 7, "it is not the daemon's any more"
        await runtime.stop()

    asyncio.run(story())


def snapshot(outcome: type[Granted] | type[Renewed] | type[FreeDone]) -> Granted | Renewed | FreeDone:
    table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
    table.handle(AcquireRequested(1, "ann", 5, LeaseTerms(900, 60_000)), 0)
    lease = table.get(5)
    assert lease is not None
    return outcome(1, lease)


@pytest.mark.parametrize(
    ("outcome", "operation"), [(Granted, "LEASE_ALLOC"), (Renewed, "LEASE_RENEW"), (FreeDone, None)], ids=str
)
def test_only_a_withheld_grant_or_renewal_counts_as_refused(
    outcome: type[Granted] | type[Renewed] | type[FreeDone], operation: str | None
) -> None:
    withheld = withheld_lease(snapshot(outcome))
    assert (None if withheld is None else withheld[0]) == operation
    assert withheld is None or withheld[1].lease_id == 5


def test_an_outcome_of_a_dropped_request_goes_nowhere() -> None:
    answered: list[Result] = []
    pending = PendingRequests(Journal(), FactRecorder(), lambda *_: None, lambda: None)
    kept, dropped = pending.add(answered.append), pending.add(answered.append)
    pending.remove(dropped)
    for number in (dropped, kept, kept):
        pending.resolve(RequestDenied(number, not_found(5)))
    assert answered == [RequestDenied(kept, not_found(5))]
    assert pending.unanswered == 0


def test_the_loop_stays_awake_while_a_warm_context_becomes_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[str]:
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)])
        workers = SimulatedWorkers()
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), workers, tokens, FactRecorder(), 1)
        seen: list[str] = []
        monkeypatch.setattr(
            runtime._polling, "stay_awake", lambda waiting, periods: seen.append(f"awake {periods}, {waiting}")
        )
        monkeypatch.setattr(workers, "spawn", lambda spec: seen.append("spawned"))
        for lease_id, pid, waiting in ((5, 0, None), (6, 7, None), (7, 8, Waiting.BLOCK)):
            # Only a worker that has its context, a warm one, has this process id.
            monkeypatch.setattr(workers, "context_pid", lambda _, pid=pid: pid)
            request = runtime.expect(lambda _: seen.append("granted"))
            runtime.post(AcquireRequested(request, "ann", lease_id, LeaseTerms(100, 60_000, waiting=waiting)))
            runtime.post(WorkerReady(lease_id))
        await runtime.stop()
        return seen

    # A new worker takes too long to poll for it.
    awake = [f"awake 2, {waiting}" for waiting in (None, Waiting.BLOCK)]
    assert asyncio.run(story()) == [
        *("spawned", "granted"),
        *(awake[0], "spawned", "granted"),
        *(awake[1], "spawned", "granted"),
    ]


class LocalWorkers(SimulatedWorkers):
    """Workers whose messages the test sends by itself. It records the workers that were killed and recycled."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[socket.socket] = []
        self.killed: list[int] = []
        self.recycled: list[int] = []
        self.is_over = asyncio.Event()

    def spawn(self, spec: WorkerSpec) -> None:
        if (warm := self._workers.get(spec.lease_id)) is None:
            warm, end = Worker.create(spec, self._zygotes.current)
            warm.own_bytes = CONTEXT_BYTES
            self._workers[spec.lease_id] = warm
            self.ends.append(end)
            asyncio.get_running_loop().add_reader(warm.channel, self._on_worker_message, warm)
        super().spawn(spec)

    def kill(self, lease_id: int) -> None:
        self.killed.append(lease_id)
        self.is_over.set()

    def recycle(self, lease_id: int, warm_id: int) -> None:
        self.recycled.append(lease_id)
        self.is_over.set()

    def close(self) -> None:
        for worker, end in zip(self._workers.values(), self.ends, strict=True):
            worker.close()
            end.close()


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_scrub_that_was_answered_in_time_counts_although_the_broker_is_late(has_answered: bool) -> None:
    async def story() -> None:
        recycling = Recycling(idle_s=60, max_leases=9, max_idle=9)
        table = LeaseTable([Card("GPU-a", 0, "a", 1000, 10)], CoreLimits(), 1, recycling=recycling)
        workers = LocalWorkers()
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([1000]), workers, tokens, FactRecorder(), 1)
        runtime.post(PoolTimerFired())
        await asyncio.sleep(0)
        runtime.post(AcquireRequested(runtime.expect(lambda _: None), "ann", 5, LeaseTerms(100, 60_000)))
        runtime.post(WorkerReady(5))
        runtime.post(FreeRequested(runtime.expect(lambda _: None), 5, "ann"))
        # The worker answers at once, but this process does not run for longer than the answer may take.
        if has_answered:
            send_message(workers.ends[0], Scrubbed("", 0).to_map())
        time.sleep(SCRUB_TIMEOUT_MS / 1000 + 0.1)  # noqa: ASYNC251  # the whole process is late
        await workers.is_over.wait()
        assert (workers.killed, workers.recycled) == (([], [5]) if has_answered else ([5], []))
        await runtime.stop()
        workers.close()

    asyncio.run(story())
