"""Serves prompts from one model on a lease of its own: a scheduler decides, an engine computes, one task drives both.

    async with Decoder.open("model.gguf") as decoder:
        async for piece in decoder.generate("The capital of France is", max_tokens=32):
            print(piece, end="", flush=True)

A tenant's region that ends takes the tenant's sequences with it, and nobody else's. The decoder opens a new one, and
replays the prompts and what was emitted: their next tokens are those that would have come.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from gpulease.client.decode.checkpoint import Checkpoint, open_model
from gpulease.client.decode.decode_errors import EngineDecodeFailed, decoder_closed
from gpulease.client.decode.decode_log import DecodeLog, cause_of
from gpulease.client.decode.decode_reports import DecoderObserver, EngineRebuilt, ForwardRevoked
from gpulease.client.decode.decode_requests import (
    MAX_WAIT_S,
    CompletionReason,
    PromptRequest,
    SamplingParameters,
    TenantConfig,
)
from gpulease.client.decode.engine.engine import MAX_STEPS, BlockPool, DecodeEngine, lease_bytes
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.model_config import ModelConfig
from gpulease.client.decode.row_records import ROW, Rows
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.scheduler.step_plan import StepPlan
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.engine_losses import Suspects
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.prompt_intake import PromptIntake
from gpulease.client.decode.supervisor.request_ledger import RequestLedger
from gpulease.client.decode.supervisor.serving_engine import EngineSpec, ServingEngine
from gpulease.client.decode.supervisor.tenant_moves import TenantMoves
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions
from gpulease.client.errors import Disconnected, Drained, GpuLeaseError, RegionCancelled, RegionExpired, RegionFailed
from gpulease.protocol.lease_ids import lease_text

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

ABANDON_S: Final = 2.0
"""Seconds for which the remains of a lost engine may take to close before the next one is asked for."""

ANSWER_S: Final = 2.0
"""Seconds for which steps of an engine that is given up may still end by themselves; those of a dead host never do."""

MAX_POSITIONS: Final = 4096
"""Positions of a sequence where the caller does not say: of a model's 131,072, blocks for few would fill a card."""

MIN_REGION_LIFE_S: Final = 0.1
"""Shortest life of a region: in less, moves would take the time of steps."""

DEFAULT_TEXT_PROCESSES: Final = 2
"""Processes that read prompts' texts: one for whom a tenant's large texts keep the other one busy."""

MAX_TEXT_PROCESSES: Final = 64
"""Most processes that read texts: each may take the memory of TextLimits, half a GiB."""

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
        text_processes: Processes that read prompts' texts, 1 to 64. With one, every text waits for those before it.
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
    text_processes: int = DEFAULT_TEXT_PROCESSES

    def __post_init__(self) -> None:
        if not 1 <= self.text_processes <= MAX_TEXT_PROCESSES:
            raise ValueError(f"text_processes is {self.text_processes}; give 1 to {MAX_TEXT_PROCESSES}")
        if self.region_life_s is not None and not self.region_life_s >= MIN_REGION_LIFE_S:
            raise ValueError(f"region_life_s is {self.region_life_s}; give {MIN_REGION_LIFE_S:g} or more, or None")


class Decoder:
    """A model that serves prompts. `async with Decoder.open(...) as decoder:` opens it.

    Attributes:
        scheduler: Who decides; only the decoder tells it anything.
        log: Where it writes what it loses and gets back.
        steps: Steps that were computed.
        moves: The moves of tenants' sequences from region to region.
        prompts: Who reads prompts, in processes of its own: texts of several tenants are to be cut into tokens there.
    """

    def __init__(
        self,
        spec: EngineSpec,
        scheduler: ContinuousBatchScheduler,
        address: str | None,
        observers: Sequence[DecoderObserver] = (),
        text_processes: int = DEFAULT_TEXT_PROCESSES,
    ) -> None:
        """Use `open`."""
        self.scheduler = scheduler
        self.log = DecodeLog()
        self.steps = self._reopened = 0
        self._spec, self._address = spec, address
        self._serving: ServingEngine
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._ledger = RequestLedger(observers, self.log)
        self.prompts = PromptIntake(
            scheduler,
            self.tokenizer,
            text_processes,
            lambda report: self._ledger.report(lambda observer: observer.on_prompt_refused(report)),
            self.log,
        )
        self._constants = np.zeros(spec.limits.tables, ROW)
        self._pending: deque[StepPlan] = deque()
        self._begun_at = float("-inf")
        self._wake = asyncio.Event()
        self._refusal: RegionFailed | None = None
        self._numbers = count(1)
        self._failure: GpuLeaseError | None = None
        self._ended = asyncio.Event()
        # What becomes of whole engines.
        self._loss: _Loss | None = None
        self._told_loss: Exception | None = None
        self._loop: asyncio.Task[None]
        self._is_broken_off = False
        self._starting: StepPlan | None = None
        self._losses = 0
        self._outage_began = self._adopted_at = 0.0
        self._suspects = Suspects()
        self._cleared_at: dict[str, int] = {}
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
        decoder = cls(spec, scheduler, address, observers, settings.text_processes)
        decoder._serving = await ServingEngine.open(spec, decoder, address, progress)
        decoder._adopted_at = time.monotonic()
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
    def outage(self) -> "Outage | None":
        """What is known of the time without an engine; None while there is one, and once the decoder ended."""
        loss = self._loss
        if loss is None or self._failure is not None:
            return None
        return Outage(self._outage_began, type(loss.error), loss.tries, loss.refusal)

    @property
    def rebinds(self) -> int:
        """Regions that were opened in the place of others: of those that had ended, and of those left in time."""
        return self._reopened + self.moves.count

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

        Without an engine it waits for the next one. Raises RequestRejected for what can't be taken, NoModelLoaded if
        the decoder is closed, EngineDecodeFailed if a fault of its own ended it.
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

        Closing the generator ends the sequence. Arguments are those of `submit`. The text is read in another process,
        and counts meanwhile as a request of its tenant's that waits.

        Raises ModelRejected for a model without a tokenizer, TextNotRead for a text that takes more than a text may,
        and what `submit` and the generation's iterator raise.
        """
        tokenizer = await self.tokenizer()
        with self.prompts.place(tenant_id):
            tokens = await self.prompts.read_text(tenant_id, text)
            generation = self.submit(tokens, max_tokens=max_tokens, sampling=sampling, tenant_id=tenant_id)
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

        It turns tokens into text, and cuts texts of your own. While it cuts one, nothing else of this process runs,
        and nothing bounds what that takes: `prompts` cuts those of tenants. The first call makes it, in a thread: that
        of a large vocabulary takes a second.
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
                    if self._loss is not None:
                        raise  # There is no engine that could be the cause.
                    self._lose_engine(error)
                self.moves.step_answered()
        except Exception as error:
            self.log.failure("decoder_failed", error)
            text = f"The decoder failed by a fault of its own, {type(error).__name__}"
            self._fail(EngineDecodeFailed(text, "See its log, and open another decoder"))

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
            self._compute_next_suspects()
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
        pool = self.regions.pools.get(tenant_id)
        region = 0 if pool is None else pool.region.lease_id
        sequences = len(self.scheduler.tenants[tenant_id].live)
        self.log.info(
            "region_lost",
            tenant=tenant_id,
            region=lease_text(region),
            reason=reason,
            cause=cause_of(error),
            sequences=sequences,
        )
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
        """Raise what ended the decoder, if it ended."""
        if self._failure is not None:
            raise self._failure

    def moved(self, tenant_id: str, pool: BlockPool) -> None:
        """Compute the tenant's sequences in this pool from now on; its moves call this."""
        for sequence in self.scheduler.tenants[tenant_id].live.values():
            constants = self._constants[sequence.table]
            constants["base"], constants["blocks"] = pool.region.address, pool.blocks
            self._ledger.admitted(sequence, pool.region.lease_id)
        self.log.info("region_moved", tenant=tenant_id, region=lease_text(pool.region.lease_id))

    def wake(self) -> None:
        """Look for what there is to compute; its moves call this."""
        self._wake.set()

    def region_opened(self, serving: ServingEngine, tenant: TenantConfig, pool: BlockPool) -> None:
        """Take a region in the place of one that ended; the engine's regions call this."""
        if serving is self._serving and self._loss is None:
            self._reopened += 1
            self.log.info("region_reopened", tenant=tenant.id, region=lease_text(pool.region.lease_id))
            self._ledger.tell(self.scheduler.rebound(tenant.id, pool.blocks, time.monotonic()))
            self._wake.set()

    # --- engines that end ---

    def engine_failed(self, serving: ServingEngine, error: Exception) -> None:
        """Hear of a lease that is lost, outside of any step; the lease's renewals and the regions call this."""
        if serving is not self._serving or self._loss is not None or self._failure is not None:
            return
        if isinstance(error, Drained) and serving.lease.is_alive:
            if not serving.is_of_fleet:
                self.log.warning(
                    "node_drained", cause=cause_of(error), hint="Decoder.move takes the load to another node"
                )
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
            self.log.warning("engine_leaves", cause=cause_of(warning))
            self._tasks.start(self._leave(serving, warning))

    def _lose_engine(self, error: Exception) -> None:
        """Take the engine as gone: all sequences end, and wait for another engine."""
        now = time.monotonic()
        under_way = self._tokens_under_way()
        self._pending.clear()
        self._refusal = self._told_loss = self._starting = None
        if not self._losses or now - self._adopted_at >= engine_losses.LASTED_S:
            self._losses, self._outage_began = 0, now
        self._losses += 1
        is_known = engine_losses.is_known(error)
        self.log.failure("engine_lost", error, known=is_known, losses=self._losses, under_way=len(under_way))
        # Losses in a row do not put off the end of what has waited since the first of them.
        wait_s = max(0.0, self._outage_began + engine_losses.REPLAY_WAIT_S - now)
        self._ledger.tell(self.scheduler.engine_lost(now, wait_s=wait_s), is_engine_scoped=True)
        suspected = list(under_way) if engine_losses.is_fault(error) else []
        if engine_losses.is_kill(error):
            suspected = self._suspects.killed(under_way, MAX_STEPS)
        if suspected and (guilty := self._suspects.fault(suspected)):
            self._losses = 0
            self._give_up_request(guilty)
        self._loss = _Loss(error, now)
        self._tasks.start(self._recover(self._serving, self._loss))

    def _tokens_under_way(self) -> dict[str, int]:
        """Return how many tokens the requests have emitted that have rows in steps under way, by their callers' ids."""
        plans = [*self._pending, *([self._starting] if self._starting is not None else [])]
        sequences = dict.fromkeys(sequence for plan in plans for sequence in plan.sequences if not sequence.is_ended)
        names = [sequence.request.continues or sequence.request.request_id for sequence in sequences]
        return {name: self._tokens_of(name) for name in names}

    def _tokens_of(self, request_id: str) -> int:
        generation = self._ledger.find(request_id)
        return 0 if generation is None else len(generation.tokens)

    def _give_up_request(self, request_id: str) -> None:
        """End a request that ended an engine while nobody else was computed."""
        if generation := self._ledger.find(request_id):
            self.log.error("request_given_up", tenant=generation.request.tenant_id, request=request_id)
            self._ledger.tell(self.scheduler.cancel(generation.request.request_id, CompletionReason.ENGINE_ERROR))

    async def _recover(self, lost: ServingEngine, loss: "_Loss") -> None:
        """Open another engine in the place of one that is lost, with pauses, for as long as it takes."""
        closing = self._tasks.start(lost.abandon())
        await asyncio.wait((closing,), timeout=ABANDON_S)
        await asyncio.sleep(engine_losses.pause_before_engine_s(self._losses))
        while True:
            # A move may open an engine elsewhere during the pauses.
            async with self._changing:
                if self._loss is not loss:
                    return
                try:
                    await self._take_over(await ServingEngine.open(self._spec, self, self._address))
                    return
                except Exception as error:
                    if self._failure is not None:
                        return
                    pause_s = engine_losses.pause_s(loss.tries)
                    loss.tries += 1
                    loss.refusal = type(error)
                    if engine_losses.is_logged(loss.tries):
                        away_s = time.monotonic() - self._outage_began
                        self.log.failure(
                            "engine_refused", error, tries=loss.tries, next_try_s=pause_s, without_engine_s=away_s
                        )
            await asyncio.sleep(pause_s)

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
                self.log.warning("engine_stays", cause=cause_of(error))
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
            self._preempt_all(now)
        self._serving, self._successor, self._loss, self._told_loss = serving, None, None, None
        self._adopted_at = now
        if self._adopted is not None and not self._adopted.done():
            self._adopted.set_result(None)
        self._rebind_all(now)
        self._compute_next_suspects()
        cause = "the load was moved" if loss is None else cause_of(loss.error)
        is_known = loss is None or engine_losses.is_known(loss.error)
        took_s = time.monotonic() - (now if loss is None else loss.at)
        self.log.info(
            "engine_opened", cause=cause, without_engine_s=took_s, tries=0 if loss is None else loss.tries + 1
        )
        report = EngineRebuilt(cause, is_known, is_planned=loss is None, took_s=took_s)
        self._ledger.report(lambda observer: observer.on_engine_rebuilt(report))

    def _preempt_all(self, now: float) -> None:
        """End all sequences, which are replayed on this engine or the next one. No step is under way."""
        events = self.scheduler.engine_lost(now, CompletionReason.PREEMPTED, engine_losses.REPLAY_WAIT_S)
        self._ledger.tell(events, is_engine_scoped=True)

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
        """Return whether others are to be computed than now: the next group of suspects, or everybody."""
        suspects = self._suspects
        if self._loss is not None or not suspects:
            return False
        if not suspects.current:
            return suspects.has_next(self._is_ready)
        return not any(self._is_in_doubt(name) and self._is_ready(name) for name in suspects.current)

    def _is_in_doubt(self, request_id: str) -> bool:
        """Return whether one of the current group has not got past where the engine was lost."""
        return bool(self._ledger.find(request_id)) and self._tokens_of(request_id) < self._cleared_at[request_id]

    def _is_ready(self, request_id: str) -> bool:
        """Return whether a suspect can be computed: a suspended tenant's would keep everybody waiting."""
        generation = self._ledger.find(request_id)
        return generation is None or not self.moves.is_suspended(generation.request.tenant_id)

    @property
    def _is_break_due(self) -> bool:
        """Return whether steps under way are to end before the next one starts."""
        return self._successor is not None or self._is_suspect_due

    def _compute_next_suspects(self) -> None:
        """Compute the next group of suspects alone, from their prompts on; without any, compute everybody.

        No step is under way.
        """
        now, suspects = time.monotonic(), self._suspects
        suspects.put_off(name for name in suspects.current if self._is_in_doubt(name))
        was_isolated = bool(self._cleared_at)
        group = suspects.next(self._is_ready)
        while group and not any(map(self._ledger.find, group)):
            group = suspects.next(self._is_ready)
        self._cleared_at = {name: self._tokens_of(name) + MAX_STEPS for name in group}
        if group:
            self.log.warning("suspects_isolated", group=len(group), suspects=suspects.count)
            if self.scheduler.live_sequences:
                self._preempt_all(now)
                self._rebind_all(now)
        elif was_isolated:
            self.log.info("suspects_cleared", suspects=suspects.count)
        self.scheduler.isolate(frozenset(group) or None)

    # --- ends ---

    def _fail(self, error: GpuLeaseError) -> None:
        """End every generation: the decoder is closed, or broken."""
        self._failure = error
        self._ended.set()
        self._ledger.end_all(error)
        self.moves.step_answered()
        if self._adopted is not None and not self._adopted.done():
            self._adopted.set_exception(error)
            # Nobody may wait for it: asyncio would log it, and keep all that its frames have.
            self._adopted.exception()
        self._wake.set()

    async def wait_ended(self) -> None:
        """Wait until the decoder serves nobody any more: it is closed, or a fault of its own ended it.

        A lost engine does not end it. Raises nothing; `check_alive` raises what ended it.
        """
        await self._ended.wait()

    async def _stop(self) -> None:
        self._failure = self._failure or decoder_closed()
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._tasks.stop()
        self._fail(self._failure)
        await self.prompts.stop()
        await (self._serving.close() if self._loss is None else self._serving.abandon())


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without an engine.

    Attributes:
        since: When the last engine that computed anything was lost, in monotonic seconds.
        cause: The kind of what ended the last engine.
        tries: How often another one was refused since then.
        refusal: The kind of the last refusal; None if there was none.
    """

    since: float
    cause: type[Exception]
    tries: int
    refusal: type[Exception] | None

    def report(self, now: float, unix_s: float) -> dict[str, Any]:
        """Return it for a health report, by the monotonic clock and the calendar's.

        It has kinds of errors alone: their words are in the log, and may name paths that are not everybody's to know.
        """
        away_s = now - self.since
        return {
            "since": datetime.fromtimestamp(unix_s - away_s, UTC).isoformat(timespec="seconds"),
            "seconds": round(away_s, 1),
            "cause": self.cause.__name__,
            "tries": self.tries,
            "refusal": None if self.refusal is None else self.refusal.__name__,
        }


@dataclass(slots=True, eq=False)
class _Loss:
    """A lost engine, until another takes its place."""

    error: Exception
    at: float
    tries: int = 0
    refusal: type[Exception] | None = None


_REASONS: Final[dict[type[BaseException], CompletionReason]] = {
    RegionExpired: CompletionReason.EXPIRED,
    RegionCancelled: CompletionReason.CANCELLED,
}


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
