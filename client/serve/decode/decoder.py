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
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from gpulease.client.aio import GpuBuilder
from gpulease.client.errors import GpuLeaseError, RegionCancelled, RegionExpired, RegionFailed
from gpulease.client.serve.decode.checkpoint import Checkpoint, open_model, size_bytes
from gpulease.client.serve.decode.decode_errors import EngineDecodeFailed, NoModelLoaded
from gpulease.client.serve.decode.decode_reports import DecoderObserver, ForwardRevoked
from gpulease.client.serve.decode.decode_requests import (
    MAX_WAIT_S,
    CompletionReason,
    PromptRequest,
    SamplingParameters,
    TenantConfig,
)
from gpulease.client.serve.decode.engine import MAX_STEPS, BlockPool, DecodeEngine
from gpulease.client.serve.decode.forward_pass import StepLimits, block_bytes, buffer_sizes
from gpulease.client.serve.decode.generation import Generation
from gpulease.client.serve.decode.model_config import ModelConfig
from gpulease.client.serve.decode.request_ledger import RequestLedger
from gpulease.client.serve.decode.row_records import ROW, Rows
from gpulease.client.serve.decode.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.serve.decode.step_plan import StepPlan
from gpulease.client.serve.decode.tenant_regions import TenantRegions

if TYPE_CHECKING:
    from gpulease.client.serve.decode.text.tokenizer import Tokenizer

LEASE_S: Final = 120.0
"""Seconds of the lease; renewed in time for as long as the decoder is open."""

SPARE_BYTES: Final = 64 << 20
"""Memory of the lease beyond what is counted: the kernels' code, and the scratch of regions that ended."""

REGION_GRANULE_BYTES: Final = 2 << 20
"""Regions take multiples of so many bytes on a card."""

MAX_POSITIONS: Final = 4096
"""Positions of a sequence where the caller does not say: of a model's 131,072, blocks for few would fill a card."""

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
        positions: Positions of a sequence; None: the model's, 4,096 at most.
        packed: Whether quantised weights stay packed.
        rebinds_at_once: How often a tenant's region may be opened anew at once; each time, its replays take rows.
        rebind_interval_s: Seconds after which it may be opened one more time.
    """

    max_rows: int = 64
    prefill_rows: int = 32
    max_sequences: int = 64
    positions: int | None = None
    packed: bool = True
    rebinds_at_once: int = 3
    rebind_interval_s: float = 10.0


class Decoder:
    """A model that serves prompts. `async with Decoder.open(...) as decoder:` opens it.

    Attributes:
        engine: The engine.
        scheduler: Who decides; only the decoder tells it anything.
        regions: The tenants' regions.
        steps: Steps that were computed.
        rebinds: Regions that were opened in the place of others that had ended.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        scheduler: ContinuousBatchScheduler,
        checkpoint: Checkpoint,
        observers: Sequence[DecoderObserver] = (),
    ) -> None:
        """Use `open`."""
        self.engine = engine
        self.scheduler = scheduler
        self._checkpoint = checkpoint
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self.steps = self.rebinds = 0
        self.regions = TenantRegions(engine, scheduler, self._rebound, lambda error: self._fail(_lost(error)))
        self._ledger = RequestLedger(observers)
        self._constants = np.zeros(engine.limits.tables, ROW)
        self._pending: deque[StepPlan] = deque()
        self._begun_at = float("-inf")
        self._shares_clock = False
        self._wake = asyncio.Event()
        self._refusal: RegionFailed | None = None
        self._numbers = count(1)
        self._failure: GpuLeaseError | None = None

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
            address: The daemon's address, as `GpuBuilder` takes it.
            progress: Called with the bytes loaded and the bytes in all.
            observers: Who hears what the decoder does.

        Raises ModelRejected, CapacityExceeded if no card has the room, and what `GpuBuilder.acquire` raises.
        """
        checkpoint = open_model(model) if isinstance(model, str | Path) else model
        config = checkpoint.config
        positions = settings.positions or min(config.context, MAX_POSITIONS)
        limits = StepLimits(settings.max_rows, settings.max_sequences, positions)
        configs = tuple(tenants) or (_only_tenant(limits),)
        pools = (_region_bytes(tenant.max_blocks * block_bytes(config)) for tenant in configs)
        wanted = size_bytes(checkpoint, packed=settings.packed, positions=positions)
        wanted += sum(buffer_sizes(config, limits).values()) + sum(pools) + SPARE_BYTES
        scheduler = ContinuousBatchScheduler(_scheduler_settings(settings, config, positions), configs)
        async with AsyncExitStack() as stack:
            builder = GpuBuilder(address).min_vram(wanted).lease_secs(LEASE_S).regions_required()
            lease = await stack.enter_async_context(builder.acquire())
            await stack.enter_async_context(lease.keep_alive())
            engine = await DecodeEngine.open(lease, checkpoint, limits, packed=settings.packed, progress=progress)
            stack.push_async_callback(engine.close)
            decoder = cls(engine, scheduler, checkpoint, observers)
            decoder._shares_clock = lease.address.startswith("unix:")
            for tenant in configs:
                await decoder.regions.open(tenant)
            task = asyncio.create_task(decoder._run())
            try:
                yield decoder
            finally:
                await decoder._stop(task)

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
            request_id = next(name for number in self._numbers if not ledger.has(name := f"request-{number}"))
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
            self._tokenizer = asyncio.ensure_future(asyncio.to_thread(self._checkpoint.tokenizer))
        return await asyncio.shield(self._tokenizer)

    def cancel(self, generation: Generation) -> None:
        """End a generation; one that has ended stays as it is."""
        self._ledger.tell(self.scheduler.cancel(generation.request.request_id))
        self._wake.set()

    # --- the loop ---

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self._refusal is None:
                    await self._start_steps()
                if self._pending:
                    await self._finish_step()
                elif self._refusal is not None:
                    error, self._refusal = self._refusal, None
                    self._lose(error)
                else:
                    await self._sleep()
        except GpuLeaseError as error:
            self._fail(_lost(error))
        except Exception as error:
            self._fail(EngineDecodeFailed(f"The engine is lost: {type(error).__name__}: {error}"))
            raise

    async def _start_steps(self) -> None:
        """Start what there is to compute, up to two steps."""
        while self.scheduler.unanswered_steps < MAX_STEPS:
            now = time.monotonic()
            plan = self.scheduler.plan(now)
            self._ledger.tell(plan.events)
            if not plan.sequences:
                return
            pools = [self.regions.pools[tenant.config.id] for tenant in plan.tenants]
            try:
                await self.engine.start(self._rows_of(plan), pools)
            except RegionFailed as error:
                # Steps under way end first: the refusal may be one of theirs.
                self._hear(error)
                self._ledger.tell(self.scheduler.failed(plan, None, CompletionReason.REVOKED, time.monotonic()))
                return
            if not self._pending:
                self._begun_at = now
            self._pending.append(plan)

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
        if self._shares_clock and error.flipped_ns is not None:
            delay_s = (time.monotonic_ns() - error.flipped_ns) / 1e9
        report = ForwardRevoked(error.lease_id, tenant_id, error.site, error.position, delay_s)
        self._ledger.report(lambda observer: observer.on_forward_revoked(report))

    def _lose(self, error: RegionFailed) -> None:
        """Take a tenant's region as gone: the tenant's sequences end, and wait for a new region."""
        tenant_id = self.regions.tenant_of(error.lease_id)
        if tenant_id is None:
            raise error
        reason = _REASONS.get(type(error), CompletionReason.REVOKED)
        self._ledger.tell(self.scheduler.revoked(tenant_id, reason, time.monotonic()))
        self.regions.replace(tenant_id)

    def _rebound(self, tenant: TenantConfig, pool: BlockPool) -> None:
        self.rebinds += 1
        self._ledger.tell(self.scheduler.rebound(tenant.id, pool.blocks, time.monotonic()))
        self._wake.set()

    # --- ends ---

    def _fail(self, error: GpuLeaseError) -> None:
        """End every generation: the engine is lost, or closed."""
        self._failure = error
        self._ledger.end_all(error)

    async def _stop(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.regions.close()
        self._fail(NoModelLoaded("The decoder is closed", "Open one with Decoder.open"))


_REASONS: Final = {RegionExpired: CompletionReason.EXPIRED, RegionCancelled: CompletionReason.CANCELLED}


def _lost(error: GpuLeaseError) -> EngineDecodeFailed:
    return EngineDecodeFailed(f"The engine is lost: {error}", "Open a decoder anew", error.failure)


def _only_tenant(limits: StepLimits) -> TenantConfig:
    """The tenant of a decoder that serves one."""
    return TenantConfig(DEFAULT_TENANT, limits.tables, DEFAULT_SEQUENCES * limits.table_blocks)


def _region_bytes(size_bytes: int) -> int:
    return -(-size_bytes // REGION_GRANULE_BYTES) * REGION_GRANULE_BYTES


def _scheduler_settings(settings: DecoderSettings, config: ModelConfig, positions: int) -> SchedulerSettings:
    return SchedulerSettings(
        max_sequences=settings.max_sequences,
        max_rows=settings.max_rows,
        prefill_rows=min(settings.prefill_rows, settings.max_rows),
        context=positions,
        vocabulary=config.vocabulary,
        end_tokens=frozenset(config.end_tokens),
        rebinds_at_once=settings.rebinds_at_once,
        rebind_interval_s=settings.rebind_interval_s,
    )
