"""Serves prompts from one model on a lease of its own: a scheduler decides, an engine computes, one task drives both.

    async with Decoder.open("model.gguf") as decoder:
        async for piece in decoder.generate("The capital of France is", max_tokens=32):
            print(piece, end="", flush=True)

A tenant's region that ends takes the tenant's sequences with it, and nobody else's. The decoder opens a new one, and
replays the prompts and what was emitted: their next tokens are those that would have come.
"""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from gpulease.client.engine.lease_request import fleet_of
from gpulease.client.errors import Disconnected, Drained, GpuLeaseError, RegionCancelled, RegionExpired, RegionFailed
from gpulease.client.serve.decode import engine_losses
from gpulease.client.serve.decode.background_tasks import BackgroundTasks
from gpulease.client.serve.decode.checkpoint import Checkpoint, open_model
from gpulease.client.serve.decode.decode_errors import EngineDecodeFailed, NoModelLoaded
from gpulease.client.serve.decode.decode_reports import DecoderObserver, EngineRebuilt, ForwardRevoked
from gpulease.client.serve.decode.decode_requests import (
    MAX_WAIT_S,
    CompletionReason,
    PromptRequest,
    SamplingParameters,
    TenantConfig,
)
from gpulease.client.serve.decode.engine import MAX_STEPS, BlockPool, DecodeEngine, lease_bytes
from gpulease.client.serve.decode.engine_losses import Suspects
from gpulease.client.serve.decode.forward_pass import StepLimits
from gpulease.client.serve.decode.generation import Generation
from gpulease.client.serve.decode.model_config import ModelConfig
from gpulease.client.serve.decode.request_ledger import LOG, RequestLedger
from gpulease.client.serve.decode.row_records import ROW, Rows
from gpulease.client.serve.decode.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.serve.decode.serving_engine import EngineSpec, ServingEngine
from gpulease.client.serve.decode.step_plan import StepPlan
from gpulease.client.serve.decode.tenant_moves import TenantMoves
from gpulease.client.serve.decode.tenant_regions import TenantRegions

if TYPE_CHECKING:
    from gpulease.client.serve.decode.text.tokenizer import Tokenizer

ABANDON_S: Final = 2.0
"""Seconds for which the remains of a lost engine may take to close before the next one is asked for."""

ANSWER_S: Final = 2.0
"""Seconds for which steps of an engine that is given up may still end by themselves; those of a dead host never do."""

MAX_POSITIONS: Final = 4096
"""Positions of a sequence where the caller does not say: of a model's 131,072, blocks for few would fill a card."""

MIN_REGION_LIFE_S: Final = 0.1
"""Shortest life of a region: in less, moves would take the time of steps."""

DEFAULT_TENANT: Final = "default"

DEFAULT_SEQUENCES: Final = 4
"""Sequences of full length that the blocks of a decoder's only tenant are enough for."""


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Limits of a decoder, which makes room for them at its start.

    Attributes:
        max_rows: Rows of a step.
        prefill_rows: Rows of prompts beside decoding sequences.
        max_sequences: Live sequences.
        positions: Positions of a sequence, the model's context at most; None: that, 4,096 at most.
        packed: Whether quantised weights stay packed.
        rebinds_at_once: How often a tenant's region may be opened anew at once; each time, its replays take rows.
        rebind_interval_s: Seconds after which it may be opened one more time.
        preempts: Whether tenants of a higher weight get the room of those of a lower one (SchedulerSettings).
        region_life_s: Seconds of a tenant's region, for operators who let no grant get older: the tenant's sequences
            move into a fresh one before. The lease has room for one region more. None: regions are renewed.
    """

    max_rows: int = 64
    prefill_rows: int = 32
    max_sequences: int = 64
    positions: int | None = None
    packed: bool = True
    rebinds_at_once: int = 3
    rebind_interval_s: float = 10.0
    preempts: bool = False
    region_life_s: float | None = None

    def __post_init__(self) -> None:
        if self.region_life_s is not None and not self.region_life_s >= MIN_REGION_LIFE_S:
            raise ValueError(f"region_life_s is {self.region_life_s}; give {MIN_REGION_LIFE_S:g} or more, or None")


class Decoder:
    """A model that serves prompts. `async with Decoder.open(...) as decoder:` opens it.

    Attributes:
        scheduler: Who decides; only the decoder tells it anything.
        steps: Steps that were computed.
        rebinds: Regions that were opened in the place of others that had ended.
        moves: The moves of tenants' sequences from region to region.
    """

    def __init__(
        self,
        spec: EngineSpec,
        scheduler: ContinuousBatchScheduler,
        address: str | None,
        observers: Sequence[DecoderObserver] = (),
    ) -> None:
        """Use `open`."""
        self.scheduler = scheduler
        self.steps = self.rebinds = 0
        self._spec, self._address = spec, address
        self._serving: ServingEngine
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._ledger = RequestLedger(observers)
        self._constants = np.zeros(spec.limits.tables, ROW)
        self._pending: deque[StepPlan] = deque()
        self._begun_at = float("-inf")
        self._wake = asyncio.Event()
        self._refusal: RegionFailed | None = None
        self._numbers = count(1)
        self._failure: GpuLeaseError | None = None
        # What becomes of whole engines.
        self._loss: _Loss | None = None
        self._told_loss: Exception | None = None
        self._loop: asyncio.Task[None]
        self._is_broken_off = False
        self._starting: StepPlan | None = None
        self._losses = 0
        self._suspects = Suspects()
        self._successor: ServingEngine | None = None
        self._adopted: asyncio.Future[None] | None = None
        self._changing = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self.moves = TenantMoves(self)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: str | Path | Checkpoint,
        tenants: Iterable[TenantConfig] = (),
        settings: DecoderSettings = DecoderSettings(),  # it can't be changed
        *,
        address: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        observers: Sequence[DecoderObserver] = (),
    ) -> AsyncIterator[Self]:
        """Acquire a lease, load the model, open each tenant's region; end all of it with the block.

        Args:
            model: A folder with safetensors, a `.gguf` file, or an opened checkpoint.
            tenants: Who may submit; without any, one tenant, "default", with the engine's whole room.
            settings: What to make room for.
            address: The daemon's or the fleet's address, as `GpuBuilder` takes it.
            progress: Called with the bytes loaded and the bytes in all.
            observers: Who hears what the decoder does.

        Raises ModelRejected, InvalidRequest for more positions than the model's context, CapacityExceeded if no card
        has the room, and what `GpuBuilder.acquire` raises.
        """
        checkpoint = open_model(model) if isinstance(model, str | Path) else model
        spec = _engine_spec(checkpoint, tuple(tenants), settings)
        scheduler = ContinuousBatchScheduler(
            _scheduler_settings(settings, checkpoint.config, spec.limits.positions), spec.tenants
        )
        decoder = cls(spec, scheduler, address, observers)
        decoder._serving = await ServingEngine.open(spec, decoder, address, progress)
        decoder._loop = asyncio.create_task(decoder._run())
        decoder._tasks.start(decoder.moves.watch())
        try:
            yield decoder
        except BaseException:
            with suppress(GpuLeaseError):
                await decoder._stop()
            raise
        await decoder._stop()

    @property
    def engine(self) -> DecodeEngine:
        """The engine; while it is lost, and another is opened, the lost one."""
        return self._serving.engine

    @property
    def is_serving(self) -> bool:
        """Return whether there is an engine: False from its loss until another serves, and once the decoder ended."""
        return self._failure is None and self._loss is None and self._told_loss is None

    @property
    def regions(self) -> TenantRegions:
        """The tenants' regions in the engine's lease."""
        return self._serving.regions

    # --- requests ---

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParameters = SamplingParameters(),  # noqa: B008  # it can't be changed
        tenant_id: str = DEFAULT_TENANT,
        wait_s: float = MAX_WAIT_S,
        request_id: str | None = None,
    ) -> Generation:
        """Submit a prompt's tokens. Returns the generation, whose tokens come as they are computed.

        Args:
            token_ids: The prompt.
            max_tokens: Tokens to emit at most.
            sampling: How they are chosen.
            tenant_id: Whose it is.
            wait_s: Seconds for which it may wait for room; 0 refuses it at once.
            request_id: Its id, of no other request that goes on; without one it gets one.

        Raises RequestRejected for what can't be taken, NoModelLoaded or EngineDecodeFailed if the engine is gone.
        """
        if self._failure is not None:
            raise self._failure
        ledger, now = self._ledger, time.monotonic()
        if request_id is None:
            request_id = next(name for number in self._numbers if not ledger.find(name := f"request-{number}"))
        request = PromptRequest(tenant_id, request_id, tuple(token_ids), sampling, max_tokens, wait_s)
        generation = ledger.open(request, self.cancel, now)
        try:
            ledger.tell(self.scheduler.submit(request, now))
        except BaseException:
            ledger.forget(generation)
            raise
        self._wake.set()
        return generation

    async def generate(
        self,
        text: str,
        *,
        max_tokens: int,
        sampling: SamplingParameters = SamplingParameters(),  # noqa: B008  # it can't be changed
        tenant_id: str = DEFAULT_TENANT,
    ) -> AsyncGenerator[str, None]:
        """Continue a text. Yields what comes behind it, in pieces of whole characters, as they are computed.

        Closing the generator ends the sequence. Arguments are those of `submit`.

        Raises ModelRejected for a model without a tokenizer, and what `submit` and the generation's iterator raise.
        """
        tokenizer = await self.tokenizer()
        generation = self.submit(tokenizer.encode(text), max_tokens=max_tokens, sampling=sampling, tenant_id=tenant_id)
        stream = tokenizer.stream()
        try:
            async for emitted in generation:
                if piece := stream.add(emitted.token):
                    yield piece
            if rest := stream.end():
                yield rest
        finally:
            generation.cancel()

    async def tokenizer(self) -> "Tokenizer":
        """Return the model's tokenizer. Raises ModelRejected where it has none, or a broken one.

        The first call makes it, in a thread: that of a large vocabulary takes a second.
        """
        if self._tokenizer is None:
            self._tokenizer = asyncio.ensure_future(asyncio.to_thread(self._spec.checkpoint.tokenizer))
        return await asyncio.shield(self._tokenizer)

    def cancel(self, generation: Generation) -> None:
        """End a generation; one that has ended stays as it is, though another may have its id now."""
        if generation.reason is None:
            self._ledger.tell(self.scheduler.cancel(generation.request.request_id))
            self._wake.set()

    # --- the loop ---

    async def _run(self) -> None:
        try:
            while self._failure is None:
                self._wake.clear()
                try:
                    await self._go_on()
                except asyncio.CancelledError:
                    if not self._is_broken_off or self._told_loss is None:
                        raise
                    self._is_broken_off = False
                    self._loop.uncancel()
                    self._lose_engine(self._told_loss)
                except Exception as error:
                    self._lose_engine(error)
                self.moves.step_answered()
        except Exception as error:
            LOG.error("the decoder failed: %s", _told(error))
            self._fail(_lost(error))

    async def _go_on(self) -> None:
        """Start and finish steps; between two steps, take what ended a region, or another engine."""
        if self._told_loss is not None:
            raise self._told_loss
        if self._refusal is None and not self._is_break_due:
            await self._start_steps()
        if self._pending:
            await self._finish_step()
        elif self._refusal is not None:
            error, self._refusal = self._refusal, None
            self._lose(error)
        elif self._successor is not None:
            self._adopt(self._successor)
        elif self._is_suspect_due:
            self._compute_next_suspect()
        else:
            await self._sleep()

    async def _start_steps(self) -> None:
        """Start what there is to compute, up to two steps."""
        while self.scheduler.unanswered_steps < self.engine.max_steps:
            now = time.monotonic()
            plan = self.scheduler.plan(now)
            self._ledger.tell(plan.events)
            if not plan.sequences:
                return
            self._starting = plan
            pools = [self.regions.pools[tenant.config.id] for tenant in plan.tenants]
            try:
                await self.engine.start(self._rows_of(plan), pools)
            except RegionFailed as error:
                # Steps under way end first: the refusal may be one of theirs.
                self._starting = None
                self._hear(error)
                self._ledger.tell(self.scheduler.failed(plan, None, CompletionReason.REVOKED, time.monotonic()))
                return
            if not self._pending:
                self._begun_at = now
            self._pending.append(plan)
            self._starting = None

    async def _finish_step(self) -> None:
        plan = self._pending[0]
        try:
            results = await self.engine.finish()
        except RegionFailed as error:
            self._pending.clear()
            self._hear(error)
            self._refusal = None
            self._ledger.tell(self.scheduler.failed(plan, None, CompletionReason.REVOKED, time.monotonic()))
            self._lose(error)
            return
        self._pending.popleft()
        self.steps += 1
        self._losses = 0
        begun_at, self._begun_at = self._begun_at, time.monotonic()
        events = self.scheduler.completed(plan, results["token"].tolist())
        self._ledger.computed(plan, events, results, self._begun_at - begun_at)

    async def _sleep(self) -> None:
        deadline = self.scheduler.next_deadline
        delay_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()

    def _rows_of(self, plan: StepPlan) -> Rows:
        """Write down a plan's rows: what is constant of a sequence, and what is the step's."""
        for sequence in plan.joined:
            pool, sampling = self.regions.pools[sequence.tenant.config.id], sequence.request.sampling
            self._ledger.admitted(sequence, pool.region.lease_id)
            constants = self._constants[sequence.table]
            constants["base"], constants["blocks"] = pool.region.address, pool.blocks
            constants["seed"], constants["top_k"], constants["top_p"] = sampling.seed, sampling.top_k, sampling.top_p
            constants["inverse_temperature"] = sampling.inverse_temperature
        rows: Rows = self._constants[plan.tables]
        rows["token"], rows["source"], rows["position"] = plan.tokens, plan.sources, plan.positions
        rows["table"], rows["block"] = plan.tables, plan.blocks
        return rows

    # --- regions that end ---

    def _hear(self, error: RegionFailed) -> None:
        """Take a refusal of a step, and report it unless it was heard before."""
        known, self._refusal = self._refusal, error
        tenant_id = self.regions.tenant_of(error.lease_id)
        if tenant_id is None or (known is not None and known.lease_id == error.lease_id):
            return
        delay_s = None
        if self._serving.shares_clock and error.flipped_ns is not None:
            delay_s = (time.monotonic_ns() - error.flipped_ns) / 1e9
        report = ForwardRevoked(error.lease_id, tenant_id, error.site, error.position, delay_s)
        self._ledger.report(lambda observer: observer.on_forward_revoked(report))

    def _lose(self, error: RegionFailed) -> None:
        """Take a tenant's region as gone: the tenant's sequences end, and wait for a new region."""
        tenant_id = self.regions.tenant_of(error.lease_id)
        if tenant_id is None:
            raise error
        self.region_lost(tenant_id, error)

    def region_lost(self, tenant_id: str, error: BaseException) -> None:
        """Have a tenant's sequences replayed in another region; its moves call this, too."""
        reason = _REASONS.get(type(error), CompletionReason.REVOKED)
        self._ledger.tell(self.scheduler.revoked(tenant_id, reason, time.monotonic()))
        self.regions.replace(tenant_id)
        self.wake()

    # --- regions that sequences leave ---

    async def suspend(self, tenant_id: str) -> None:
        """Copy a tenant's keys and values to the host's memory and close its region: its bytes are free for others.

        Its requests wait until `resume`, as long as they may. Other tenants go on. If the engine is lost meanwhile,
        the tenant's sequences are replayed behind `resume`, in a region of the next engine.

        Raises RequestRejected if it is suspended or has no region now, RegionFailed if that ends before it is copied:
        its sequences are replayed then.
        """
        await self.moves.suspend(tenant_id)

    async def resume(self, tenant_id: str) -> None:
        """Open a region for a suspended tenant, and go on with the very same tokens.

        Raises RequestRejected if it is not suspended, CapacityExceeded while the lease has no room: try again then.
        """
        await self.moves.resume(tenant_id)

    async def move_tenant(self, tenant_id: str) -> None:
        """Move a tenant's sequences into a new region, whose time begins now, and end the old one.

        Raises RequestRejected if it is suspended or has no region now, RegionFailed if that ends before it is copied:
        its sequences are replayed then.
        """
        await self.moves.move(tenant_id)

    def check_alive(self) -> None:
        """Raise what ended the decoder, if it ended; its moves call this."""
        if self._failure is not None:
            raise self._failure

    def moved(self, tenant_id: str, pool: BlockPool) -> None:
        """Compute the tenant's sequences in this pool from now on; its moves call this."""
        for sequence in self.scheduler.tenants[tenant_id].live.values():
            constants = self._constants[sequence.table]
            constants["base"], constants["blocks"] = pool.region.address, pool.blocks
            self._ledger.admitted(sequence, pool.region.lease_id)

    def wake(self) -> None:
        """Look for what there is to compute; its moves call this."""
        self._wake.set()

    def region_opened(self, serving: ServingEngine, tenant: TenantConfig, pool: BlockPool) -> None:
        """Take a region in the place of one that ended; the engine's regions call this."""
        if serving is self._serving and self._loss is None:
            self.rebinds += 1
            self._ledger.tell(self.scheduler.rebound(tenant.id, pool.blocks, time.monotonic()))
            self._wake.set()

    # --- engines that end ---

    def engine_failed(self, serving: ServingEngine, error: Exception) -> None:
        """Hear of a lease that is lost, outside of any step; the lease's renewals and the regions call this."""
        if serving is not self._serving or self._loss is not None:
            return
        if isinstance(error, Drained) and serving.lease.is_alive:
            if not serving.is_of_fleet:
                LOG.warning("the decoder's node is drained; `move` takes its load to another: %s", _told(error))
            return
        self._told_loss = error
        self._wake.set()
        self._tasks.start(self._break_off(serving, error))

    async def _break_off(self, serving: ServingEngine, error: Exception) -> None:
        """Take an engine as gone whose steps do not end: nothing else tells that its host is dead."""
        await asyncio.sleep(ANSWER_S)
        if serving is self._serving and self._loss is None and self._failure is None:
            self._told_loss, self._is_broken_off = error, True
            self._loop.cancel()

    def lease_warned(self, serving: ServingEngine, warning: GpuLeaseError) -> None:
        """Leave a fleet's node before the lease there ends; the engine calls this, again and again."""
        if serving is self._serving and self.is_serving and not self._changing.locked():
            LOG.warning("the decoder leaves its node for another of the fleet: %s", _told(warning))
            self._tasks.start(self._leave(serving, warning))

    def _lose_engine(self, error: Exception) -> None:
        """Take the engine as gone: all sequences end, and wait for another engine."""
        now = time.monotonic()
        is_fault = engine_losses.is_fault(error)
        log = LOG.warning if engine_losses.is_known(error) else LOG.error
        log("the decoder's engine is lost, another is opened: %s", _told(error))
        under_way = self._callers_under_way()
        self._pending.clear()
        self._refusal = self._told_loss = self._starting = None
        self._losses += 1
        events = self.scheduler.engine_lost(now, wait_s=engine_losses.GIVE_UP_S)
        self._ledger.tell(events, is_engine_scoped=True)
        if is_fault and self._suspects.current in under_way:
            self._losses = 0
            self._give_up_request(self._suspects.current)
        elif is_fault:
            self._suspects.add(under_way)
        if self._losses > engine_losses.MAX_LOSSES_IN_A_ROW:
            self._fail(_lost(error))
        elif self._loss is None:
            self._loss = _Loss(error, now)
            self._tasks.start(self._recover(self._serving))

    def _callers_under_way(self) -> list[str]:
        """Return the callers' ids of the requests that have rows in steps under way."""
        plans = [*self._pending, *([self._starting] if self._starting is not None else [])]
        sequences = dict.fromkeys(sequence for plan in plans for sequence in plan.sequences if not sequence.is_ended)
        return [sequence.request.continues or sequence.request.request_id for sequence in sequences]

    def _give_up_request(self, request_id: str) -> None:
        """End a request that ended an engine while nobody else was computed."""
        if generation := self._ledger.find(request_id):
            LOG.error("request %s ended the engine while it was computed alone; it is not tried again", request_id)
            self._ledger.tell(self.scheduler.cancel(generation.request.request_id, CompletionReason.ENGINE_ERROR))

    async def _recover(self, lost: ServingEngine) -> None:
        """Open another engine in the place of one that is lost."""
        async with self._changing:
            if self._loss is None:
                return  # A move had another engine ready.
            closing = self._tasks.start(lost.abandon())
            await asyncio.wait((closing,), timeout=ABANDON_S)
            try:
                await self._take_over(await self._next_engine(self._loss))
            except GpuLeaseError as error:
                self._fail(_lost(error))
            except Exception as error:
                LOG.error("no engine can be opened: %s", _told(error))
                self._fail(_lost(error))

    async def _next_engine(self, loss: "_Loss") -> ServingEngine:
        """Open an engine, with pauses, for as long as it takes. Raises the last error if that is too long."""
        is_of_fleet = fleet_of(self._address) is not None
        final = engine_losses.FINAL_FLEET_REFUSALS if is_of_fleet else engine_losses.FINAL_REFUSALS
        for attempt in count():
            try:
                return await ServingEngine.open(self._spec, self, self._address)
            except final:
                raise
            except GpuLeaseError as error:
                pause_s = engine_losses.pause_s(attempt)
                if time.monotonic() + pause_s > loss.at + engine_losses.GIVE_UP_S:
                    raise
                LOG.warning("no engine yet, the next try is in %.1f s: %s", pause_s, _told(error))
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def move(self, address: str | None = None) -> None:
        """Open an engine on another lease while this one serves; then move the whole load there between two steps.

        Nothing is lost: sequences are replayed there, and go on with the same tokens. The old lease is given back.

        Args:
            address: The daemon's or the fleet's address; None: the one that this engine was asked of. A daemon then
                has room for both; a fleet finds a node that has.

        Raises what `open` raises, EngineDecodeFailed or NoModelLoaded if the decoder has ended. This engine serves on
        then, if it can.
        """
        task = self._tasks.start(self._move(address))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._failure is not None:
                raise self._failure from None  # the decoder is closed
            task.cancel()
            await asyncio.wait((task,))
            raise

    async def _move(self, address: str | None) -> None:
        async with self._changing:
            if self._failure is not None:
                raise self._failure
            old, address = self._serving, address or self._address
            await self._take_over(await ServingEngine.open(self._spec, self, address))
            self._address = address
            await old.abandon()

    async def _leave(self, left: ServingEngine, warning: GpuLeaseError) -> None:
        """Move the load away from an engine to another of its fleet, if it is still there."""
        async with self._changing:
            if left is not self._serving or not self.is_serving:
                return
            try:
                successor = await ServingEngine.open(self._spec, self, self._address)
                if isinstance(warning, Disconnected):
                    # Its steps go on without the daemon, if the host does.
                    self._tasks.start(self._break_off(left, warning))
                await self._take_over(successor)
            except GpuLeaseError as error:
                LOG.warning("no node of the fleet takes the decoder's load yet: %s", _told(error))
                return
        # The new engine does not wait for a daemon that is away.
        await left.abandon()

    async def _take_over(self, serving: ServingEngine) -> None:
        """Let the loop adopt an engine; it is closed if the loop ends before."""
        self._successor, self._adopted = serving, asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            if self._failure is not None:
                raise self._failure
            await self._adopted
        except BaseException:
            if self._serving is not serving:
                self._successor = None
                await serving.abandon()
            raise

    def _adopt(self, serving: ServingEngine) -> None:
        """Go on with another engine; no step is under way."""
        now, loss = time.monotonic(), self._loss
        if loss is None:
            events = self.scheduler.engine_lost(now, CompletionReason.PREEMPTED, engine_losses.GIVE_UP_S)
            self._ledger.tell(events, is_engine_scoped=True)
        self._serving, self._successor, self._loss, self._told_loss = serving, None, None, None
        self._rebind_all(now)
        self._compute_next_suspect()
        if self._adopted is not None and not self._adopted.done():
            self._adopted.set_result(None)
        cause = "the load was moved" if loss is None else f"{type(loss.error).__name__}: {loss.error}"
        is_known = loss is None or engine_losses.is_known(loss.error)
        took_s = time.monotonic() - (now if loss is None else loss.at)
        LOG.info("another engine took over after %.3f s: %s", took_s, cause)
        report = EngineRebuilt(cause, is_known, is_planned=loss is None, took_s=took_s)
        self._ledger.report(lambda observer: observer.on_engine_rebuilt(report))

    def _rebind_all(self, now: float) -> None:
        """Give every tenant its region of the engine; one that lost too many of late gets it later."""
        for tenant_id, pool in list(self.regions.pools.items()):
            if self.scheduler.rebind_delay_s(tenant_id, now):
                self.regions.replace(tenant_id)
            else:
                self._ledger.tell(self.scheduler.rebound(tenant_id, pool.blocks, now))

    # --- suspects ---

    @property
    def _is_suspect_due(self) -> bool:
        """Return whether somebody else is to be computed than now: the next suspect, or everybody."""
        suspects = self._suspects
        if self._loss is not None or not suspects:
            return False
        if not suspects.current:
            return suspects.has_next(self._is_ready)
        generation = self._ledger.find(suspects.current)
        # It has got past where the engine was lost, or has ended, or can't go on.
        return (
            generation is None
            or len(generation.tokens) >= suspects.tokens + MAX_STEPS
            or not self._is_ready(suspects.current)
        )

    def _is_ready(self, request_id: str) -> bool:
        """Return whether a suspect can be computed: a suspended tenant's would keep everybody waiting."""
        generation = self._ledger.find(request_id)
        return generation is None or not self.moves.is_suspended(generation.request.tenant_id)

    @property
    def _is_break_due(self) -> bool:
        """Return whether steps under way are to end before the next one starts."""
        return self._successor is not None or self._is_suspect_due

    def _compute_next_suspect(self) -> None:
        """Compute the next suspect alone, from its prompt on; without any, compute everybody. No step is under way."""
        now, suspects = time.monotonic(), self._suspects
        if suspects.current and not self._is_ready(suspects.current):
            suspects.put_off()
        request_id = suspects.next(self._is_ready)
        while request_id and not (generation := self._ledger.find(request_id)):
            request_id = suspects.next(self._is_ready)
        if request_id and generation:
            suspects.tokens = len(generation.tokens)
            if self.scheduler.live_sequences:
                events = self.scheduler.engine_lost(now, CompletionReason.PREEMPTED, engine_losses.GIVE_UP_S)
                self._ledger.tell(events, is_engine_scoped=True)
                self._rebind_all(now)
        self.scheduler.isolate(request_id or None)

    # --- ends ---

    def _fail(self, error: GpuLeaseError) -> None:
        """End every generation: the engine is lost for good, or closed."""
        self._failure = error
        self._ledger.end_all(error)
        self.moves.step_answered()
        if self._adopted is not None and not self._adopted.done():
            self._adopted.set_exception(error)
        self._wake.set()

    async def _stop(self) -> None:
        self._failure = self._failure or NoModelLoaded("The decoder is closed", "Open one with Decoder.open")
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._tasks.stop()
        self._fail(self._failure)
        await (self._serving.close() if self._loss is None else self._serving.abandon())


@dataclass(frozen=True, slots=True)
class _Loss:
    """A lost engine, until another takes its place."""

    error: Exception
    at: float


_REASONS: Final[dict[type[BaseException], CompletionReason]] = {
    RegionExpired: CompletionReason.EXPIRED,
    RegionCancelled: CompletionReason.CANCELLED,
}


def _told(error: Exception) -> str:
    """An error for the log, as a text: a record that keeps the error would keep the lost engine with it."""
    if isinstance(error, GpuLeaseError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))


def _lost(error: Exception) -> EngineDecodeFailed:
    failure = error.failure if isinstance(error, GpuLeaseError) else None
    return EngineDecodeFailed(f"The engine is lost: {type(error).__name__}: {error}", "Open a decoder anew", failure)


def _engine_spec(checkpoint: Checkpoint, tenants: tuple[TenantConfig, ...], settings: DecoderSettings) -> EngineSpec:
    """Sum up what an engine of these settings needs."""
    positions = settings.positions or min(checkpoint.config.context, MAX_POSITIONS)
    limits = StepLimits(settings.max_rows, settings.max_sequences, positions)
    tenants = tenants or (_only_tenant(limits),)
    pools = [tenant.max_blocks for tenant in tenants]
    if settings.region_life_s is not None:
        pools.append(max(pools))  # A tenant has two of them for as long as its sequences move.
    wanted = lease_bytes(checkpoint, limits, pools, packed=settings.packed)
    return EngineSpec(checkpoint, limits, settings.packed, wanted, tenants, settings.region_life_s)


def _only_tenant(limits: StepLimits) -> TenantConfig:
    """The tenant of a decoder that serves one."""
    return TenantConfig(DEFAULT_TENANT, limits.tables, DEFAULT_SEQUENCES * limits.table_blocks)


def _scheduler_settings(settings: DecoderSettings, config: ModelConfig, positions: int) -> SchedulerSettings:
    return SchedulerSettings(
        max_sequences=settings.max_sequences,
        max_rows=settings.max_rows,
        prefill_rows=min(settings.prefill_rows, settings.max_rows),
        context=positions,
        vocabulary=config.vocabulary,
        end_tokens=frozenset(config.end_tokens),
        preempts=settings.preempts,
        rebinds_at_once=settings.rebinds_at_once,
        rebind_interval_s=settings.rebind_interval_s,
    )
