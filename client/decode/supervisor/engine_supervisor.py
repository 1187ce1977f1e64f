"""Supervises a decoder's engine: opens the first engine and its successors, moves the load, and isolates faults.

`engine_lifecycle` decides; this module carries out the effects of its decisions with the daemon, the scheduler and the
clock. Between two steps, the step loop checks whether a change is due, and reports any loss that it finds.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from gpulease.client.decode.decode_errors import CompletionReason, decoder_closed
from gpulease.client.decode.decode_log import DecodeLog, cause_of
from gpulease.client.decode.decode_reports import EngineRebuilt, PrefixChange, PrefixChanged
from gpulease.client.decode.decode_requests import SharedPrefix, TenantConfig
from gpulease.client.decode.engine.engine import BlockPool
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.supervisor import engine_lifecycle as lifecycle
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.engine_lifecycle import Effect, EngineLifecycle
from gpulease.client.decode.supervisor.request_ledger import RequestLedger
from gpulease.client.decode.supervisor.serving_engine import EngineSpec, ServingEngine
from gpulease.client.errors import Disconnected, Drained, GpuLeaseError
from gpulease.protocol.lease_ids import lease_text

ABANDON_S: Final = 2.0
"""Seconds that closing a lost engine may take before the next one is requested."""

ANSWER_S: Final = 2.0
"""Seconds in which steps of a lost engine may still end by themselves. Steps on a dead host never end."""


class SupervisedSteps(Protocol):
    """The part of the step loop that the supervisor uses."""

    @property
    def computed(self) -> int: ...

    def wake(self) -> None:
        """Wake the loop if it is idle, so that it checks again for steps to compute and changes to make."""

    def abort(self) -> None:
        """Stop waiting for the steps in flight. The pending loss is handled next."""

    def drop(self) -> Iterable[str]:
        """Forget the steps in flight. Returns the requests with rows in those steps, by their callers' ids."""

    def is_suspended(self, tenant_id: str) -> bool:
        """Return whether a tenant waits for `resume`."""

    def release_waiters(self) -> None:
        """Wake the tasks that wait for a step's answer, because no answer will come."""


class EngineSupervisor:
    """Owns the engine of one decoder. Each loss and each move replaces the engine.

    Attributes:
        scheduler: The scheduler. Each engine takes the limits of its regions from it.
        log: Logs losses and recoveries.
        reopened: Number of regions that were opened in place of regions that had ended.
    """

    _life: EngineLifecycle[ServingEngine]
    _steps: SupervisedSteps

    def __init__(
        self,
        spec: EngineSpec,
        address: str | None,
        scheduler: ContinuousBatchScheduler,
        ledger: RequestLedger,
        log: DecodeLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a supervisor without an engine; `open` opens the first one.

        Args:
            spec: The specification of each engine.
            address: The daemon's or the fleet's address.
            scheduler: The scheduler. It is notified of losses, and of the regions that tenants get.
            ledger: Passes the resulting events on to callers and observers.
            log: Logs losses and recoveries.
            clock: Monotonic seconds, those of the event loop.
        """
        self.scheduler, self.log = scheduler, log
        self.reopened = 0
        self._spec, self._address = spec, address
        self._ledger, self._clock = ledger, clock
        # For each prefix's name, the id of the region that was last reported.
        self._prefix_regions: dict[str, int] = {}
        self._hand_over: asyncio.Future[None] | None = None
        # Held while engines change: during a recovery, a move, or a departure from a node.
        self._changing = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._ended = asyncio.Event()

    async def open(self, steps: SupervisedSteps, progress: Callable[[int, int], None] | None = None) -> None:
        """Open the first engine. Raises the errors of `ServingEngine.open`."""
        self._steps = steps
        serving = await ServingEngine.open(self._spec, self, self._address, progress)
        # The lifecycle asks this object about requests (RequestsInProgress). The lifecycle never calls the engine.
        self._life = EngineLifecycle(serving, self._clock(), self)
        self._share_prefixes()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until the supervisor stops."""
        self._tasks.start(work)

    # --- queries ---

    @property
    def life(self) -> EngineLifecycle[ServingEngine]:
        return self._life

    @property
    def serving(self) -> ServingEngine:
        """The engine, with its lease and regions. After a loss it is the lost engine, until another one serves."""
        return self._life.phase.engine

    @property
    def prefixes(self) -> "list[PrefixState]":
        """The shared prefixes of the engine, including those with a region that has ended."""
        pools, scheduler = self.serving.regions.prefixes, self.scheduler
        return [
            PrefixState(
                name=prefix.name,
                tokens=prefix.blocks * PAGE,
                # While the decoder closes, the scheduler may still share prefixes without a region.
                region_bytes=pools[prefix.name][1].region.size_bytes
                if prefix.name in scheduler.prefixes.keys() & pools.keys()
                else 0,
                requests=scheduler.prefix_requests[prefix.name],
                reused_tokens=scheduler.prefix_tokens[prefix.name],
            )
            for prefix in self._spec.prefixes
        ]

    @property
    def outage(self) -> "Outage | None":
        """The current period without an engine; None while there is an engine, and once the decoder has ended."""
        loss = self._life.loss
        return None if loss is None else Outage(loss.outage_began, type(loss.error), loss.tries, loss.refusal)

    def is_in_progress(self, request_id: str) -> bool:
        """Return whether the request has not ended."""
        return self._ledger.find(request_id) is not None

    def emitted_tokens(self, request_id: str) -> int:
        """Return the number of tokens that the request has emitted; 0 if it has ended."""
        generation = self._ledger.find(request_id)
        return 0 if generation is None else len(generation.tokens)

    def is_computable(self, request_id: str) -> bool:
        """Return whether the request would get rows after its admission, so whether its tenant is not suspended."""
        generation = self._ledger.find(request_id)
        return generation is None or not self._steps.is_suspended(generation.request.tenant_id)

    # --- calls of the step loop ---

    def lose(self, error: Exception) -> None:
        """Process the loss of the engine, with the error that the step loop found or that was pending."""
        # Drop the steps in flight first: their results will never come, and their requests may be suspects.
        under_way = {name: self.emitted_tokens(name) for name in self._steps.drop()}
        self._apply(self._life.lose(error, self._clock(), steps=self._steps.computed, under_way=under_way))

    def change(self) -> None:
        """Make the change that is due: another engine takes over, or the next suspects are computed.

        No step may be in progress.
        """
        phase, now = self._life.phase, self._clock()
        # Only isolation makes a change on the same engine.
        if not isinstance(phase, lifecycle.Adopting):
            self._apply(self._life.isolate_next())
            return
        # The successor takes over. `adopt` also completes the future that `_take_over` awaits.
        self._apply(self._life.adopt(now))
        # Choose the suspects only now, because binding regions may have ended requests.
        self._apply(self._life.isolate_next())
        # Report the change: after a loss with its cause, otherwise as a planned move.
        loss = phase.before if isinstance(phase.before, lifecycle.Lost) else None
        cause = "the load was moved" if loss is None else cause_of(loss.error)
        took_s = self._clock() - (now if loss is None else loss.at)
        self.log.info(
            "engine_opened", cause=cause, without_engine_s=took_s, tries=0 if loss is None else loss.tries + 1
        )
        # In a planned move, only this change was without an engine. After a loss, the time counts from the loss.
        is_known = loss is None or engine_losses.shows_loss(loss.error)
        report = EngineRebuilt(cause, is_known, is_planned=loss is None, took_s=took_s)
        self._ledger.report(lambda observer: observer.on_engine_rebuilt(report))

    # --- calls of the engine ---

    def region_opened(self, serving: ServingEngine, tenant: TenantConfig, pool: BlockPool) -> None:
        """Process a region that replaces an ended one. Does nothing if the engine was lost or replaced by then."""
        if self._life.is_engaged(serving):
            self.reopened += 1
            self.log.info("region_reopened", tenant=tenant.id, region=lease_text(pool.region.lease_id))
            # The tenant's replays that waited for this region can now be admitted.
            self._ledger.deliver(self.scheduler.rebound(tenant.id, pool.blocks, self._clock()))
            self._steps.wake()

    def engine_failed(self, serving: ServingEngine, error: Exception) -> None:
        """Process a report from outside the step loop that a lease is lost or is about to be."""
        if not self._life.is_engaged(serving):
            return
        # A drain ends the lease only at its deadline. In a fleet, `lease_warned` moves the load before that. On a
        # single daemon only the operator can choose where to move the load.
        if isinstance(error, Drained) and serving.lease.is_alive:
            if not serving.is_of_fleet:
                self.log.warning(
                    "node_drained", cause=cause_of(error), hint="Decoder.move takes the load to another node"
                )
            return
        self._apply(self._life.report_loss(serving, error))

    def lease_warned(self, serving: ServingEngine, warning: GpuLeaseError) -> None:
        """Leave a fleet's node before the lease there ends. The engine repeats the call until the lease has ended."""
        # Ignore warnings of old leases, and while a change is in progress.
        if serving is self.serving and self._life.is_serving and not self._changing.locked():
            self.log.warning("engine_leaves", cause=cause_of(warning))
            # If this attempt fails, the next warning starts another one.
            self._tasks.start(self._leave_node(serving, warning))

    # --- effects ---

    def _apply(self, effects: Iterable[Effect[ServingEngine]]) -> None:
        """Carry out the effects in order, without waiting: effects that take time start a task."""
        for effect in effects:
            match effect:
                case lifecycle.Log():
                    self._write(effect)
                case lifecycle.EndSequences(reason, wait_s):
                    self._end_sequences(reason, wait_s)
                case lifecycle.AbortRequest(request_id):
                    self._abort_request(request_id)
                case lifecycle.RequestEngine(lost, loss_number, pause_s):
                    self._tasks.start(self._recover(lost, loss_number, pause_s))
                case lifecycle.HandOver():
                    if self._hand_over is not None and not self._hand_over.done():
                        self._hand_over.set_result(None)
                case lifecycle.BindRegions():
                    self._bind_regions()
                case lifecycle.RestartSequences():
                    if self.scheduler.live_sequences:
                        self._end_sequences(CompletionReason.PREEMPTED, engine_losses.REPLAY_WAIT_S)
                        self._bind_regions()
                case lifecycle.Isolate(group):
                    self.scheduler.isolate(group)
                case lifecycle.Wake():
                    self._steps.wake()
                case lifecycle.AwaitAnswers(engine, error):
                    self._tasks.start(self._await_answers(engine, error))
                case lifecycle.AbortSteps():
                    self._steps.abort()

    def _write(self, line: lifecycle.Log) -> None:
        if line.error is not None:
            self.log.failure(line.event, line.error, **line.fields)
        elif line.is_warning:
            self.log.warning(line.event, **line.fields)
        else:
            self.log.info(line.event, **line.fields)

    def _end_sequences(self, reason: CompletionReason, wait_s: float) -> None:
        """End every tenant's sequences, for replay on this engine or the next one. No step may be in progress."""
        self._ledger.deliver(self.scheduler.engine_lost(self._clock(), reason, wait_s), is_engine_scoped=True)

    def _bind_regions(self) -> None:
        """Share the engine's prefixes, and give every tenant its region of the engine.

        A tenant that has lost too many regions recently gets its region later.
        """
        self._share_prefixes()
        now, regions = self._clock(), self.serving.regions
        # Iterate over a copy, because replacing a region removes it from `pools`.
        for tenant_id, pool in list(regions.pools.items()):
            # The limiter outlives engines, so that a new engine does not reset a tenant's limit.
            if self.scheduler.rebind_delay_s(tenant_id, now):
                regions.replace(tenant_id)
            else:
                self._ledger.deliver(self.scheduler.rebound(tenant_id, pool.blocks, now))

    def _share_prefixes(self) -> None:
        """Let prompts use the engine's shared prefixes with a region that has not ended."""
        for name, (prefix, pool) in self.serving.regions.prefixes.items():
            self.scheduler.share(prefix)
            # Do not report a region twice: after a restart of sequences, the same engine shares its prefixes again.
            if self._prefix_regions.get(name) != pool.region.lease_id:
                self._report_prefix(prefix, pool)

    def _report_prefix(self, prefix: SharedPrefix, pool: BlockPool) -> None:
        change = PrefixChange.REBUILD if prefix.name in self._prefix_regions else PrefixChange.LOAD
        self._prefix_regions[prefix.name] = pool.region.lease_id
        self.log.info(
            "prefix_rebuilt" if change is PrefixChange.REBUILD else "prefix_loaded",
            prefix=prefix.name,
            region=lease_text(pool.region.lease_id),
            tokens=prefix.blocks * PAGE,
            bytes=pool.region.size_bytes,
        )
        self._ledger.report(lambda observer: observer.on_prefix_changed(PrefixChanged(prefix.name, change)))

    def _abort_request(self, request_id: str) -> None:
        """End a request that ended an engine while it was computed alone."""
        if generation := self._ledger.find(request_id):
            self.log.error("request_given_up", tenant=generation.request.tenant_id, request=request_id)
            self._ledger.deliver(self.scheduler.cancel(generation.request.request_id, CompletionReason.ENGINE_ERROR))

    async def _await_answers(self, serving: ServingEngine, error: Exception) -> None:
        """Give an engine's steps ANSWER_S to end, then report them overdue: steps on a dead host never end."""
        await asyncio.sleep(ANSWER_S)
        self._apply(self._life.answers_overdue(serving, error))

    # --- other engines ---

    async def _recover(self, lost: ServingEngine, loss_number: int, pause_s: float) -> None:
        """Open another engine in place of a lost one, retrying after pauses until one takes over or none is needed."""
        # First close the lost engine, because the next lease may need its memory. A daemon that does not answer must
        # not delay the next lease.
        closing = self._tasks.start(lost.abandon())
        await asyncio.wait((closing,), timeout=ABANDON_S)
        while True:
            await asyncio.sleep(pause_s)
            # A move may open an engine elsewhere during the pauses.
            async with self._changing:
                if not self._life.is_wanted(loss_number):
                    return
                try:
                    await self._take_over(await ServingEngine.open(self._spec, self, self._address))
                    return
                # Log every error, even an internal one, and try again, because callers wait for the engine.
                except Exception as error:
                    if self._life.failure is not None:
                        return
                    pause_s, effects = self._life.refuse(error, self._clock())
                    self._apply(effects)

    async def move(self, address: str | None = None, spec: EngineSpec | None = None) -> None:
        """Open an engine on another lease while this one serves, then move all sequences there between two steps.

        See `Decoder.move`. If `spec` is given, this engine and all later ones are opened with it.
        """
        # Use a separate task, so that a cancelled caller can still wait until the move is undone.
        task = self._tasks.start(self._move(address, spec))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and (failure := self._life.failure) is not None:
                raise failure from None  # The decoder was closed.
            task.cancel()
            await asyncio.wait((task,))
            raise

    async def _move(self, address: str | None, spec: EngineSpec | None) -> None:
        async with self._changing:
            self.check_alive()
            old, address, spec = self.serving, address or self._address, spec or self._spec
            # The old engine keeps computing while the model is loaded on the new lease.
            successor = await ServingEngine.open(spec, self, address)
            try:
                await self._take_over(successor)
            finally:
                # Do this even if the caller was cancelled during the hand-over, or the old lease would not be freed.
                if self.serving is successor:
                    self._address, self._spec = address, spec
                    await old.abandon()

    async def _leave_node(self, engine: ServingEngine, warning: GpuLeaseError) -> None:
        """Move the load from an engine to another node of its fleet, unless it was lost or replaced meanwhile."""
        async with self._changing:
            # While this task waited for the lock, another change may have made this one unnecessary.
            if engine is not self.serving or not self._life.is_serving:
                return
            successor = None
            try:
                successor = await ServingEngine.open(self._spec, self, self._address)
                if isinstance(warning, Disconnected):
                    # If the host is alive, its steps continue without the daemon. Otherwise they never end.
                    self._tasks.start(self._await_answers(engine, warning))
                await self._take_over(successor)
            # No other node has room now. The engine keeps serving, and the next warning tries again.
            except GpuLeaseError as error:
                self.log.warning("engine_stays", cause=cause_of(error))
                return
            finally:
                if successor is not None and self.serving is successor:
                    # Do not wait for this, because the daemon may be down.
                    self._tasks.start(engine.abandon())

    async def _take_over(self, successor: ServingEngine) -> None:
        """Offer an engine to the step loop, and wait until it is adopted. An engine that is not adopted is closed.

        Raises the error that ended the decoder, if it has ended.
        """
        try:
            effects = self._life.offer(successor)
            # Create the future before the effects wake the loop, which may adopt the engine at once.
            self._hand_over = asyncio.get_running_loop().create_future()
            self._apply(effects)
            await self._hand_over
        except BaseException:
            if self.serving is not successor:
                # The successor was not adopted, because the decoder ended or the caller was cancelled.
                self._life.withdraw(successor)
                await successor.abandon()
            raise

    # --- the end ---

    def check_alive(self) -> None:
        """Raise the error that ended the decoder, if it has ended."""
        if (error := self._life.failure) is not None:
            raise error

    async def wait_ended(self) -> None:
        """Wait until the decoder has ended, whether by `stop` or by an error. Raises nothing."""
        await self._ended.wait()

    def fail(self, error: GpuLeaseError) -> None:
        """End the decoder and every request. If the decoder has already ended, its first error remains."""
        self._life.close(error)
        failure = self._life.failure
        assert failure is not None
        self._ended.set()
        # Report the error to every caller now, because nothing will compute their requests.
        self._ledger.end_all(failure)
        self._steps.release_waiters()
        if self._hand_over is not None and not self._hand_over.done():
            self._hand_over.set_exception(failure)
            # Mark the exception as retrieved: otherwise asyncio would log it if no task awaits the future.
            self._hand_over.exception()
        self._steps.wake()

    def close(self) -> None:
        """Enter the phase Closed, so that nothing new begins. Call `stop` once the step loop has ended."""
        self._life.close(decoder_closed())

    async def stop(self) -> None:
        """Stop opening engines, and end every request. `close_engine` closes the engine."""
        await self._tasks.stop()
        self.fail(decoder_closed())

    async def close_engine(self) -> None:
        """Close the last engine and free its lease. Raises the error if either fails, unless the engine was lost."""
        phase = self._life.phase
        is_lost = isinstance(phase, lifecycle.Closed) and phase.is_lost
        await (self.serving.abandon() if is_lost else self.serving.close())


@dataclass(frozen=True, slots=True)
class PrefixState:
    """A shared prefix, as reported to the operator.

    Attributes:
        name: Its name.
        tokens: Number of tokens in its full blocks.
        region_bytes: Size of its region; 0 if the region has ended, or while no engine runs.
        requests: Number of requests whose prompts began with some of its blocks.
        reused_tokens: Number of prompt tokens that were not computed because the prefix has their blocks.
    """

    name: str
    tokens: int
    region_bytes: int
    requests: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Outage:
    """A period in which the decoder has no engine.

    Attributes:
        since: When the last engine that computed anything was lost, in monotonic seconds.
        cause: The kind of the error that ended the last engine.
        tries: How many requests for another engine were refused since then.
        refusal: The kind of the last refusal; None if there was none.
    """

    since: float
    cause: type[Exception]
    tries: int
    refusal: type[Exception] | None

    def report(self, now: float, unix_s: float) -> dict[str, Any]:
        """Return the outage for a health report. `now` (monotonic) and `unix_s` (Unix time) are the same moment.

        The report contains only the errors' classes. Their texts are only in the log, because they may contain paths
        that callers must not see.
        """
        outage_s = now - self.since
        return {
            "since": datetime.fromtimestamp(unix_s - outage_s, UTC).isoformat(timespec="seconds"),
            "seconds": round(outage_s, 1),
            "cause": self.cause.__name__,
            "tries": self.tries,
            "refusal": None if self.refusal is None else self.refusal.__name__,
        }
