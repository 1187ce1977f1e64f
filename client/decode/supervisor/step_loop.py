"""Drives the engine: plans steps, starts them, processes their results, and reacts when tenants' regions end.

One task runs the loop. Up to two steps are in progress, so that the loop plans the next step while the card computes
one. A change of engines waits until no step is in progress.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import CompletionReason, EngineDecodeFailed
from gpulease.client.decode.decode_log import DecodeLog, cause_of
from gpulease.client.decode.decode_reports import ForwardRevoked, PrefixChange, PrefixChanged
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.row_records import (
    ENTRY,
    GUIDE,
    NO_MASK,
    NO_TARGET,
    PAGE,
    ROW,
    SHARED_ALIGNMENT,
    Rows,
    StepGuidance,
    mask_words,
)
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.scheduler.step_plan import StepPlan
from gpulease.client.decode.scheduler.tenant_state import LiveSequence
from gpulease.client.decode.supervisor.engine_lifecycle import Closed, EngineLifecycle
from gpulease.client.decode.supervisor.engine_supervisor import EngineSupervisor
from gpulease.client.decode.supervisor.request_ledger import RequestLedger
from gpulease.client.decode.supervisor.serving_engine import ServingEngine
from gpulease.client.decode.supervisor.tenant_moves import TenantMoves
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions
from gpulease.client.errors import RegionCancelled, RegionExpired, RegionFailed
from gpulease.protocol.lease_ids import lease_text

_REASONS: Final[dict[type[BaseException], CompletionReason]] = {
    RegionExpired: CompletionReason.EXPIRED,
    RegionCancelled: CompletionReason.CANCELLED,
}


class StepLoop:
    """The steps of one decoder. `start` runs the loop; `stop` ends it.

    Attributes:
        scheduler: Decides which rows a step has.
        log: Logs regions that end or move.
        computed: Number of steps that were computed.
        moves: The moves of tenants' sequences from region to region.
    """

    _task: asyncio.Task[None]
    _life: EngineLifecycle[ServingEngine]

    def __init__(
        self,
        tables: int,
        scheduler: ContinuousBatchScheduler,
        ledger: RequestLedger,
        supervisor: EngineSupervisor,
        log: DecodeLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare without running. `start` runs the loop.

        Args:
            tables: Number of sequences that the engine has room for.
            scheduler: Decides which rows a step has.
            ledger: Passes tokens and ends on to callers.
            supervisor: Owns the engine.
            log: Logs regions that end or move.
            clock: Monotonic seconds, those of the event loop.
        """
        self.scheduler, self.log = scheduler, log
        self.computed = 0
        self._ledger, self._supervisor, self._clock = ledger, supervisor, clock
        # For each row of the block tables, the fields that are equal in all rows of its sequence.
        self._constants = np.zeros(tables, ROW)
        self._pending: deque[StepPlan] = deque()
        self._starting: StepPlan | None = None
        self._step_started_at = float("-inf")
        self._refusal: RegionFailed | None = None
        self._wake = asyncio.Event()
        self.moves = TenantMoves(self)

    def start(self) -> None:
        """Run the loop in a task. The supervisor's engine must be open."""
        self._life = self._supervisor.life
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Cancel the loop, and wait until it has ended. Does not wait for steps in flight."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def engine(self) -> DecodeEngine:
        """The engine. From its loss until another engine takes over, this is the lost engine."""
        return self._life.phase.engine.engine

    @property
    def regions(self) -> TenantRegions:
        """The tenants' regions in the engine's lease."""
        return self._life.phase.engine.regions

    def wake(self) -> None:
        """Wake the loop if it is idle, so that it checks again for steps to compute and changes to make."""
        self._wake.set()

    def check_alive(self) -> None:
        """Raise the error that ended the decoder, if it has ended."""
        self._supervisor.check_alive()

    # --- the loop ---

    async def _run(self) -> None:
        supervisor, life = self._supervisor, self._life
        try:
            while type(life.phase) is not Closed:
                # Clear this before the work, so that a request that arrives during it wakes the next turn.
                self._wake.clear()
                try:
                    await self._advance()
                except asyncio.CancelledError:
                    # Either the decoder is being closed, or the supervisor has aborted steps that do not end (`abort`).
                    pending = life.phase.pending_loss
                    if pending is None or not pending.is_aborting:
                        raise
                    # The cancellation was meant only to interrupt the wait for the steps, so undo it.
                    self._task.uncancel()
                    supervisor.lose(pending.error)
                except Exception as error:
                    if isinstance(life.phase, Closed):
                        return  # The decoder was closed during a step.
                    if not life.has_engine:
                        raise  # There is no engine, so the error is internal.
                    supervisor.lose(error)
                self.moves.step_answered()
        except Exception as error:
            self.log.failure("decoder_failed", error)
            text = f"The decoder failed because of an internal error, {type(error).__name__}"
            supervisor.fail(EngineDecodeFailed(text, "See its log, and open another decoder"))

    async def _advance(self) -> None:
        """Start steps and finish one. If none is in flight, handle a region's end or change engines."""
        life = self._life
        if (pending := life.phase.pending_loss) is not None:
            raise pending.error
        # A region's end and a change of engines are handled when no step is in flight, so start none before that.
        if self._refusal is None and not life.is_change_due():
            await self._start_steps()
        if self._pending:
            await self._finish_step()
        elif self._refusal is not None:
            error, self._refusal = self._refusal, None
            self._abort_region(error)
        elif life.is_change_due():
            self._supervisor.change()
        else:
            await self._sleep()

    async def _start_steps(self) -> None:
        """Start steps while the scheduler has rows and the engine takes another step."""
        serving = self._life.phase.engine
        engine = serving.engine
        # Run ahead by one step: while the card computes it, the host plans the next.
        while self.scheduler.unanswered_steps < engine.max_steps:
            now = self._clock()
            plan = self.scheduler.plan(now)
            # Deliver the ends of requests that expired or were preempted during the planning.
            self._ledger.deliver(plan.events)
            if not plan.sequences:
                return
            # From here on `drop` reports the plan's requests, even if the step's start has not returned.
            self._starting = plan
            # The step names these regions. If one has ended, the whole step is refused.
            pools = [serving.regions.pools[tenant.config.id] for tenant in plan.tenant_rows]
            if self.scheduler.prefixes:
                names = {sequence.prefix for sequence in plan.sequences if sequence.prefix}
                pools += [serving.regions.prefixes[name][1] for name in names]
            try:
                guidance = _guidance_of(plan, engine.vocabulary) if plan.is_guided else None
                # If a prompt begins after computed blocks, no row writes the table entries of those blocks.
                prefixes = [
                    (joined.table, joined.blocks[: joined.reused // PAGE]) for joined in plan.joined if joined.reused
                ]
                is_pooled = any(sequence.request.pooling for sequence, _, _ in plan.chunks)
                # Only the last row of each prompt yields a token.
                rows, chosen = self._rows_of(plan), plan.sampled_rows if plan.chunks else None
                await engine.start(rows, pools, guidance, prefixes, chosen=chosen, is_pooled=is_pooled)
            except RegionFailed as error:
                # Undo the plan. The sequences end only when the steps in flight have ended, because the refusal may be
                # about one of those steps.
                self._starting = None
                self._on_region_lost(error)
                self.scheduler.failed(plan)
                return
            # If the card was idle, this step's time counts from its start; otherwise from the end of the previous step.
            if not self._pending:
                self._step_started_at = now
            self._pending.append(plan)
            self._starting = None

    async def _finish_step(self) -> None:
        """Wait for the oldest step in flight, and pass its tokens on to the scheduler and the callers."""
        plan = self._pending[0]
        engine = self._life.phase.engine.engine
        try:
            results = await engine.finish()
        except RegionFailed as error:
            # A region that the step names has ended, so neither this step nor the next one began. Plan both again,
            # without the tenant.
            self._pending.clear()
            self._on_region_lost(error)
            self._refusal = None
            self.scheduler.failed(plan)
            self._abort_region(error)
            return
        self._pending.popleft()
        self.computed += 1
        started_at, self._step_started_at = self._step_started_at, self._clock()
        took_s = self._step_started_at - started_at
        # The scheduler decides which results are tokens of sequences, and which sequences end.
        outcome = self.scheduler.take_results(plan, results["token"], took_s)
        if plan.is_guided:
            # Do this before the next plan, because a guided row waits until the guide has its sequence's last token.
            ended_ids = {end.request.request_id for end in outcome.ends}
            for event in outcome.tokens:
                guide = event.request.guide
                if guide is not None and event.request.request_id not in ended_ids:
                    guide.accept(event.token, self.wake)
        self._ledger.computed(plan, outcome, results, took_s, engine.ranked, engine.normed)

    async def _sleep(self) -> None:
        """Wait until `wake` is called, or until the first deadline of a waiting request."""
        # Only waiting requests have deadlines. If none waits, sleep until something wakes the loop.
        deadline = self.scheduler.next_deadline_s
        delay_s = None if deadline is None else max(0.0, deadline - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()

    def _use_pool(self, sequence: LiveSequence, pool: BlockPool) -> Any:
        """Compute a sequence in this pool from its next row on. Returns the fields that are constant in its rows."""
        constants = self._constants[sequence.table]
        constants["base"], constants["blocks"] = pool.region.address, pool.blocks
        self._ledger.admitted(sequence, pool.region.lease_id)
        return constants

    def _rows_of(self, plan: StepPlan) -> Rows:
        """Return a plan's rows as the engine's records."""
        # For a sequence's first row, write the fields that stay the same until the sequence ends or moves to another
        # region.
        for sequence in plan.joined:
            sampling = sequence.request.sampling
            constants = self._use_pool(sequence, self.regions.pools[sequence.tenant.config.id])
            constants["seed"], constants["top_k"], constants["top_p"] = sampling.seed, sampling.top_k, sampling.top_p
            constants["inverse_temperature"], constants["depth"] = sampling.inverse_temperature, sampling.depth
            constants["shared"] = constants["shared_blocks"] = 0
            if sequence.prefix:
                _, shared = self.regions.prefixes[sequence.prefix]
                constants["shared"] = shared.region.address // SHARED_ALIGNMENT
                constants["shared_blocks"] = shared.blocks
        # Copy into each row the constant fields of its sequence, then set the other fields. `take` copies whole
        # records; indexing with an array would copy them field by field, which takes twenty times as long.
        rows: Rows = self._constants.take(plan.tables)
        rows["token"], rows["source"], rows["position"] = plan.tokens, plan.sources, plan.positions
        rows["table"], rows["block"] = plan.tables, plan.blocks
        return rows

    # --- regions that end or move ---

    def _on_region_lost(self, error: RegionFailed) -> None:
        """Keep a step's refusal until no step is in progress, and report it to observers once per region."""
        # The same region may refuse two steps in a row.
        refusal, self._refusal = self._refusal, error
        tenant_id = self.regions.tenant_of(error.lease_id)
        if tenant_id is None or (refusal is not None and refusal.lease_id == error.lease_id):
            return
        # The daemon's clock is comparable only on the same host.
        delay_s = None
        if self._life.phase.engine.shares_clock and error.flipped_ns is not None:
            delay_s = (time.monotonic_ns() - error.flipped_ns) / 1e9
        report = ForwardRevoked(error.lease_id, tenant_id, error.site, error.position, delay_s)
        self._ledger.report(lambda observer: observer.on_forward_revoked(report))

    def _abort_region(self, error: RegionFailed) -> None:
        """End the sequences that use the ended region, which belongs to a tenant or a shared prefix.

        Raises the error if the region belongs to no tenant and no prefix.
        """
        if (name := self.regions.prefix_of(error.lease_id)) is not None:
            self.abort_prefix(name, error)
            return
        tenant_id = self.regions.tenant_of(error.lease_id)
        if tenant_id is None:
            raise error
        self.abort_tenant(tenant_id, error)

    def abort_prefix(self, name: str, error: BaseException) -> None:
        """Stop sharing a prefix after the loss of its region. Sequences that use it are replayed without it."""
        reason = _REASONS.get(type(error), CompletionReason.REVOKED)
        region = lease_text(self.regions.prefixes[name][1].region.lease_id)
        self.log.info("prefix_lost", prefix=name, region=region, reason=reason, cause=cause_of(error))
        self.regions.drop_prefix(name)
        report = PrefixChanged(name, PrefixChange.END, cause_of(error))
        self._ledger.report(lambda observer: observer.on_prefix_changed(report))
        self._ledger.deliver(self.scheduler.prefix_lost(name, reason, self._clock()))
        self.wake()

    def abort_tenant(self, tenant_id: str, error: BaseException) -> None:
        """End a tenant's sequences after the loss of their region. Their replays wait for a new region."""
        # The reason appears in the log and in the report of the rebind. The caller's request continues.
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
        self._ledger.deliver(self.scheduler.revoked(tenant_id, reason, self._clock()))
        # Start opening the next region in the background; `region_opened` brings the replays in.
        self.regions.replace(tenant_id)
        self.wake()

    def moved(self, tenant_id: str, pool: BlockPool) -> None:
        """Use this pool in the rows of the tenant's sequences from now on."""
        # The tenant is held and no step has its rows, so all later rows will use the new addresses.
        for sequence in self.scheduler.tenants[tenant_id].live.values():
            self._use_pool(sequence, pool)
        self.log.info("region_moved", tenant=tenant_id, region=lease_text(pool.region.lease_id))

    # --- calls of the supervisor ---

    def abort(self) -> None:
        """Stop waiting for the steps in flight; the pending loss is handled next."""
        self._task.cancel()

    def drop(self) -> Iterable[str]:
        """Forget the steps in flight. Returns the requests with rows in them, by their callers' ids."""
        plans = [*self._pending, *([self._starting] if self._starting is not None else [])]
        self._pending.clear()
        # `ContinuousBatchScheduler.engine_lost` will void the plans of these steps.
        self._starting = self._refusal = None
        sequences = dict.fromkeys(sequence for plan in plans for sequence in plan.sequences if not sequence.is_ended)
        return [sequence.request.continues or sequence.request.request_id for sequence in sequences]

    def release_waiters(self) -> None:
        """Wake the tasks that wait for a step's answer, because no answer will come."""
        self.moves.step_answered()

    def is_suspended(self, tenant_id: str) -> bool:
        """Return whether a tenant waits for `resume`."""
        return self.moves.is_suspended(tenant_id)


def _guidance_of(plan: StepPlan, vocabulary: int) -> StepGuidance:
    guides: Rows = np.zeros(len(plan), GUIDE)
    guides["mask"], guides["target"] = NO_MASK, NO_TARGET
    entries: list[Rows] = []
    masks: list[NDArray[np.uint32]] = []
    first = 0
    # For rows that choose a token: the guide's changes, and how many of the likeliest tokens to report.
    for sequence, row in zip(plan.sampled, plan.sampled_rows.tolist(), strict=True):
        request, record = sequence.request, guides[row]
        record["ranks"] = request.ranks
        if (guide := request.guide) is None:
            continue
        changes = guide.entries
        record["first"], record["count"] = first, len(changes)
        entries.append(changes)
        first += len(changes)
        if guide.masks is not None:
            record["mask"] = len(masks)
            masks.append(guide.masks.mask)
    # Each row of a scored prompt scores the prompt's next token. The prompt's last row has none: it chooses a token.
    for sequence, first_row, count in plan.chunks:
        request = sequence.request
        if request.scores_prompt:
            begin = int(plan.positions[first_row])
            scored = min(begin + count + 1, sequence.prompt_length) - begin - 1
            guides["target"][first_row : first_row + scored] = sequence.tokens[begin + 1 : begin + 1 + scored]
            guides["ranks"][first_row : first_row + count] = request.ranks
    return StepGuidance(
        guides,
        np.concatenate(entries) if entries else np.zeros(0, ENTRY),
        np.stack(masks) if masks else np.zeros((0, mask_words(vocabulary)), np.uint32),
    )
