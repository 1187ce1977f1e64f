"""The scheduler of continuous batches. It decides from events and the time. No I/O, no clock, no randomness.

The caller, here called the harness, computes the steps: `plan` returns the rows of the next step, and the harness
answers the step with `completed` or `failed`. A step may be planned before the previous one is answered. Times are
monotonic seconds.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    CompletionReason,
    RebindLimited,
    RequestIdInUse,
    RequestRejected,
)
from gpulease.client.decode.decode_requests import (
    AnyEvent,
    PromptRequest,
    SamplingParameters,
    SchedulerEvent,
    SharedPrefix,
    StepOutcome,
    StepTokens,
    TenantConfig,
)
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.cell_rate import CellRate
from gpulease.client.decode.scheduler.step_plan import DecodeRoster, StepPlan
from gpulease.client.decode.scheduler.tenant_state import (
    NO_BLOCK,
    LiveSequence,
    SequenceColumns,
    TenantState,
    UnadmittedRequest,
)

MAX_UNANSWERED_STEPS: Final = 2
"""Maximum number of planned steps without an answer. A third one would need tokens of a step that has not begun."""

PREFILL_GRAIN: Final = PAGE
"""Number of rows of prompts that one tenant gets before the next tenant's turn."""

MAX_PREEMPTIONS: Final = 2
"""Maximum number of times that one request may be preempted. Without a limit, requests of tenants with higher weights
could prevent its end."""

_ONE: Final = np.array(1)
"""An array, because numpy adds an array in half the time of a Python number."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The engine's limits and the scheduler's options. Raises ValueError for limits that no engine can have.

    Attributes:
        max_sequences: Maximum number of live sequences. Each has one row of the block tables.
        max_rows: Maximum number of rows of a step. With `max_sequences + prefill_rows`, prompts do not become slower
            when every sequence decodes.
        prefill_rows: Maximum number of rows of prompts in a step that also has rows of decoding sequences.
        context: Maximum number of positions of a sequence.
        vocabulary: Number of tokens in the vocabulary.
        end_tokens: Tokens that end a sequence.
        replays: Whether the replay of a request continues after the tokens that the request has emitted. Otherwise it
            starts again.
        replay_wait_s: Minimum seconds for which a replay may wait for its region and its admission.
        rebinds_at_once: Number of times in a row that a tenant's region may be rebuilt without a pause.
        rebind_interval_s: Seconds before each further rebuild.
        reuses_prefixes: Whether a prompt reuses blocks that the tenant's earlier sequences computed for the same
            tokens. It does not change the emitted tokens.
        window: Maximum number of positions that a row attends to in any layer, its own included; None for all earlier
            positions.
        guided_rows: Maximum number of rows in a step for which a guide restricts the token (`PromptRequest.guide`).
        preempts: Whether a tenant with a higher weight may take a table from one with a lower weight. This makes the
            first token of heavier tenants faster, but a preempted sequence is computed again.
    """

    max_sequences: int
    max_rows: int
    prefill_rows: int
    context: int
    vocabulary: int
    end_tokens: frozenset[int] = frozenset()
    replays: bool = True
    replay_wait_s: float = 5.0
    rebinds_at_once: int = 3
    rebind_interval_s: float = 10.0
    preempts: bool = False
    guided_rows: int = 64
    reuses_prefixes: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_rows", "context", "vocabulary", "rebinds_at_once", "guided_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 1 <= self.prefill_rows <= self.max_rows:
            raise ValueError(f"prefill_rows must be 1 to max_rows, {self.max_rows}, not {self.prefill_rows}")
        if self.replay_wait_s < 0 or self.rebind_interval_s < 0:
            raise ValueError("replay_wait_s and rebind_interval_s must be at least 0")


class ContinuousBatchScheduler:
    """Decides which requests are admitted and which rows a step has.

    **Admission.** Each live sequence has one row of the block tables, its *table*. A request is admitted if its tenant
    is below `max_concurrent`, its region has enough free blocks for the prompt, and a table is free. A tenant's
    requests are admitted in order. A tenant *contends* while its first request waits only for a table.

    Among contending tenants, the one with the lowest weighted virtual counter is next (VTC, arXiv 2401.00588). A
    counter grows by the tokens of each admitted prompt and by each emitted token, divided by the tenant's weight. When
    a tenant begins to contend, its counter is raised to the lowest counter of the contending tenants or, if there are
    none, to the counter at the last admission. So a tenant gains nothing from time in which it was idle or at its own
    limits.

    **Service bound.** Let S be the tokens charged to a tenant so far, and w its weight. While tenants f and g both
    contend, |S_f / w_f - S_g / w_g| grows by at most U_f + U_g, where U = (PAGE * max_blocks + max_concurrent) / w is
    the most that a tenant is charged from one admission to the next.

    **Blocks.** A region serves only its tenant (`RegionBlocks`). A prompt reuses blocks that the tenant's earlier
    sequences have computed for the same tokens, if their steps were answered. If another sequence is computing the next
    block, the prompt waits for it. The charge for a prompt does not depend on the reuse.

    A sequence that needs another block first frees its blocks before its `window`, if the model has one. If the region
    has no block left, the tenant's youngest sequence ends, and its replay goes to the front of the queue. So the oldest
    sequence can always continue, because alone it fits into the region. No other tenant is affected.

    **Shared prefixes.** The operator may share the blocks of some tokens with all tenants (`share`). These blocks are
    in separate regions. A prompt that begins with these tokens needs no blocks of its tenant's region for them. When
    such a region ends (`prefix_lost`), the sequences that use it are replayed without it. So a request must fit into
    its tenant's region without the prefix.

    **Rows.** Each decoding sequence has a row in every step. If there are more live sequences than rows, they take
    turns: while no sequence joins or leaves, each has a row at least every ceil(live / max_rows) steps. Prompts
    together then get as many rows as the same number of decoding sequences. Rows that decoding leaves free go to
    prompts, up to `prefill_rows`. The tenant with the fewest weighted prompt rows is first, and of its prompts the one
    that was admitted first.

    **Guides.** A sequence with a guide gets its next row when the guide is ready. If the guide depends on the previous
    token (`is_stepwise`), the row also waits for that token. Other sequences do not wait. At most `guided_rows` guided
    sequences have a row in one step. The others come first in the next step.

    **Priorities.** Of a tenant's waiting requests, the one with the lowest priority number is first, and of equal ones
    the one that came first. Replays come before all others. Other tenants are not affected.

    **Steps.** A step is a transaction: lengths change when `completed` reports it. If a sequence has then ended, its
    row in the next step, which is already planned, is discarded. Steps run one after another. So the sequence's blocks
    and table can be reused at once, because the discarded row is computed before the next owner's rows.

    **Preemption**, if `settings.preempts`. If no table is free for the next tenant, the youngest sequence of the tenant
    with the lowest weight ends, if this weight is lower than the next tenant's. The sequence's replay goes to the front
    of its tenant's queue, without a deadline, and is not charged again. The order of admissions does not change, so the
    service bound holds. A request loses its table at most MAX_PREEMPTIONS times, so every request ends.

    **Rebinds.** When a tenant's region is revoked, its sequences end. For each, a new request, the *replay*, waits at
    the front of the tenant's queue for the new region.

    Attributes:
        settings: The engine's limits.
        tenants: Tenants by their ids. Only the scheduler may change this.
        prefixes: The shared prefixes that prompts may use, by their names. Only the scheduler may change this.
        prefix_requests: Number of requests that began with blocks of a shared prefix, by the prefix's name.
        prefix_tokens: Number of prompt tokens that were not computed, because they are in a shared prefix, by the
            prefix's name.
    """

    def __init__(self, settings: SchedulerSettings, tenants: Iterable[TenantConfig] = ()) -> None:
        self.settings = settings
        self.tenants: dict[str, TenantState] = {}
        self.prefixes: dict[str, SharedPrefix] = {}
        # `engine_lost` does not reset these counts.
        self.prefix_requests, self.prefix_tokens = Counter[str](), Counter[str]()
        self._live: dict[str, LiveSequence] = {}
        self._waiting: dict[str, UnadmittedRequest] = {}
        self._decoding: list[LiveSequence] = []
        # The sequences that decode in the step that was planned last.
        self._roster = DecodeRoster([])
        self._columns = SequenceColumns(settings.max_sequences)
        # For each token, the number of live requests that have it as a stop token, plus one if it is an end token of
        # the model. `_may_end` is true for tokens with a count above 0. Only these are compared with a sequence's end
        # tokens.
        self._stop_token_uses = Counter[int]()
        self._may_end = np.zeros(settings.vocabulary, bool)
        self._count_stop_tokens(settings.end_tokens, 1)
        # Tenants with prompts to compute, as an ordered set.
        self._prefilling: dict[TenantState, None] = {}
        # Free rows of the block tables, the highest first, so that `pop` returns the lowest.
        self._tables = list(range(settings.max_sequences - 1, -1, -1))
        self._unanswered: list[StepPlan] = []
        # Number of live sequences that need guided steps.
        self._guided = 0
        self._step_number = self._admissions = self._arrivals = self._regions = 0
        # Decoding sequences that need a block while their region has none left.
        self._short: list[LiveSequence] = []
        self._prompt_turns = 0
        self._virtual_counter = self._virtual_prefilled = 0.0
        self._next_deadline_s = float("inf")
        # `_has_room`: whether something has changed since the last admission that may make room for another request.
        # `_has_ended`: whether `_decoding` contains sequences that have ended.
        self._has_room = self._has_ended = False
        self._isolated: Set[str] | None = None
        for tenant in tenants:
            self.add_tenant(tenant)

    # --- queries ---

    @property
    def live_sequences(self) -> int:
        return len(self._live)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def unanswered_steps(self) -> int:
        """The number of planned steps without an answer. Another step can be planned if it is at most 1."""
        return len(self._unanswered)

    @property
    def next_deadline_s(self) -> float | None:
        """When `plan` may have to end a waiting request, in monotonic seconds; None if no request has a deadline."""
        return self._next_deadline_s if self._waiting and self._next_deadline_s < float("inf") else None

    def is_under_way(self, tenant_id: str) -> bool:
        """Return whether an unanswered step has rows of the tenant."""
        tenant = self.tenants[tenant_id]
        return any(tenant in step.tenant_rows for step in self._unanswered)

    def rebind_delay_s(self, tenant_id: str, now: float) -> float:
        """Return the seconds until the tenant may get a region; 0 if it may now."""
        tenant = self.tenants[tenant_id]
        return tenant.limiter.delay_s(now) if tenant.needs_permit else 0.0

    def end_tokens(self, sampling: SamplingParameters) -> frozenset[int]:
        """Return the tokens that end a sequence with this sampling."""
        ends = frozenset() if sampling.ignores_end else self.settings.end_tokens
        return ends.union(sampling.stop_token_ids) if sampling.stop_token_ids else ends

    def _count_stop_tokens(self, tokens: Iterable[int], change: int) -> None:
        for token in tokens:
            if token < self.settings.vocabulary:
                self._stop_token_uses[token] += change
                self._may_end[token] = self._stop_token_uses[token]
                if not self._stop_token_uses[token]:
                    del self._stop_token_uses[token]

    # --- Tenants and requests come and go. ---

    def add_tenant(self, config: TenantConfig, blocks: int | None = None) -> None:
        """Add a tenant with a region of `blocks` blocks.

        `blocks` is None for `max_blocks`, and 0 for a tenant without a region until `rebound`.
        """
        if config.id in self.tenants:
            raise ValueError(f"the decoder already has a tenant {config.id}")
        # The loss of an engine does not reset a tenant's limiter.
        limiter = CellRate(self.settings.rebinds_at_once, self.settings.rebind_interval_s)
        tenant = TenantState(config, limiter, reuses=self.settings.reuses_prefixes)
        if blocks != 0:
            self._bind(tenant, config.max_blocks if blocks is None else blocks)
        self.tenants[config.id] = tenant

    def submit(self, request: PromptRequest, now: float) -> list[AnyEvent]:
        """Admit a request, let it wait, or refuse it.

        Raises:
            RequestRejected: The tenant does not exist, the id is in use, or a token is not in the vocabulary.

        Returns:
            One AdmissionRejected, or nothing.
        """
        tenant = self.tenants.get(request.tenant_id)
        if tenant is None:
            raise RequestRejected(f"the decoder has no tenant {request.tenant_id!r}")
        if request.request_id in self._live or request.request_id in self._waiting:
            raise RequestIdInUse(f"request {request.request_id!r} is already waiting or in progress", "Use another id")
        # Refuse at once if the request is too large for the region or the context, or if its region would come too
        # late.
        if detail := self._excess(tenant, request):
            return [SchedulerEvent.AdmissionRejected(request, AdmissionReason.TOO_LARGE, detail)]
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self.settings.vocabulary:
            raise RequestRejected(
                f"tokens must be 0 to {self.settings.vocabulary - 1}, as the vocabulary has no others",
                parameter="prompt",
            )
        if limited := self._limited(tenant, request, request.wait_s, now):
            return [limited]
        # Enqueue the request, and admit in the usual order, so that it does not overtake requests that waited longer.
        was_queue_full = len(tenant.waiting) >= tenant.config.max_waiting
        self._enqueue(tenant, request, now + request.wait_s)
        self._has_room = True
        events = self._admit()
        if request.request_id not in self._waiting:
            return events  # The request was admitted, perhaps with others.
        # The admission may have preempted a sequence. Its replay is in the queue now, but does not count against the
        # queue's limit.
        is_queue_full = was_queue_full and len(tenant.waiting) > tenant.config.max_waiting
        if request.wait_s and not is_queue_full:
            self._next_deadline_s = min(self._next_deadline_s, now + request.wait_s)
            return events
        # The request was not admitted and may not wait. Remove it from the queue, and return the reason.
        self._dequeue(tenant, self._waiting[request.request_id])
        return [*events, self._refusal(tenant, request, is_queue_full and request.wait_s > 0)]

    def cancel(self, request_id: str, reason: CompletionReason = CompletionReason.CANCELLED) -> list[AnyEvent]:
        """End a request for the harness's reason. Does nothing if no live or waiting request has the id.

        Returns:
            One Completed, or nothing.
        """
        # The rows of a live request in unanswered steps are discarded later.
        if sequence := self._live.get(request_id):
            return [self._finish(sequence, reason)]
        if waiting := self._waiting.get(request_id):
            self._dequeue(self.tenants[waiting.request.tenant_id], waiting)
            return [SchedulerEvent.Completed(waiting.request, reason)]
        return []

    # --- Steps. ---

    def plan(self, now: float) -> StepPlan:
        """Plan the next step. A plan without rows means that there is nothing to do, and must not be answered.

        Raises ValueError if MAX_UNANSWERED_STEPS are not answered.
        """
        if len(self._unanswered) >= MAX_UNANSWERED_STEPS:
            raise ValueError(f"step {self._unanswered[0].number} is to be answered first")
        # Step 1: end requests that are past their deadline, and admit new ones.
        events = self._expire(now) if now >= self._next_deadline_s else []
        # Emitted tokens change counters, and so which tenant may preempt.
        self._has_room |= self.settings.preempts
        # Live sequences come before waiting requests. So find blocks for sequences that grow first.
        if self._short:
            events += self._supply_blocks()
        # Since its admission, blocks may have been computed that a prompt without rows can reuse. This frees the
        # prompt's own blocks.
        for tenant in self._prefilling:
            for sequence in tenant.prefilling:
                if sequence.next_position == sequence.reused and sequence.keys:
                    self._reuse(sequence)
        events += self._admit()
        # Step 2: remove the sequences that have ended since the last plan.
        if self._has_ended:
            self._has_ended = False
            self._decoding = [sequence for sequence in self._decoding if not sequence.is_ended]
        # Step 3: divide the rows between prompts and decoding sequences. Decode rows come first in the step.
        chunks = self._deal_prompt_rows() if self._prefilling else []
        # Prompt rows are decided first, because with too many sequences they take rows from decoding sequences.
        guided = sum(
            sequence.is_guided and sequence.next_position + count == sequence.prompt_length
            for sequence, count in chunks
        )
        step = self._plan_decode(self.settings.max_rows - sum(count for _, count in chunks), guided)
        for sequence, count in chunks:
            step.add_chunk(sequence, count)
            # The whole prompt has rows now. Its last row yields the first token, so the sequence decodes from the next
            # step on, unless it ends with that token.
            if sequence.next_position == sequence.prompt_length:
                self._leave_prefill(sequence)
                if sequence.next_position <= sequence.last:
                    sequence.set_block(sequence.next_position)
                    self._decoding.append(sequence)
        step.events = events
        if self._guided:
            step.is_guided = any(sequence.request.has_guidance for sequence in step.sequences)
        if step.sequences:
            # A plan without rows gets no number and is not answered.
            self._step_number += 1
            self._unanswered.append(step)
        return step

    def completed(self, step: StepPlan, results: ArrayLike, took_s: float = 0.0) -> list[AnyEvent]:
        """Process a step's results with `take_results`. Returns the events in the order in which they happened."""
        return self.take_results(step, results, took_s).events

    def take_results(self, step: StepPlan, results: ArrayLike, took_s: float = 0.0) -> StepOutcome:
        """Take a step's results, one token per row, and update lengths. Results of a void step are ignored.

        Args:
            step: The oldest step without an answer.
            results: The token of each of its rows.
            took_s: Seconds that the engine was busy with the step. They are divided among its tenants in proportion to
                their rows.

        Raises ValueError if an earlier step is not answered, or a row has no result.
        """
        if step.is_void:
            return StepOutcome(StepTokens((), (), (), ()), (), ())
        values = np.asarray(results, np.int64)
        if not self._unanswered or self._unanswered[0] is not step:
            raise ValueError(f"step {step.number} is not the one to be answered")
        if len(values) < len(step):
            raise ValueError(f"step {step.number} has {len(step)} rows and {len(values)} results")
        # The keys and values of the step's rows are now computed.
        del self._unanswered[0]
        row_s = took_s / len(step)
        for tenant, count in step.tenant_rows.items():
            tenant.gpu_s += row_s * count
        for sequence, _, count in step.chunks:
            sequence.filled += count
            if sequence.keys and not sequence.is_ended:
                self._publish(sequence, sequence.filled // PAGE)
        sampled, rows, tables, requests = step.sampled, step.sampled_rows, step.sampled_tables, step.sampled_requests
        if step.has_ended:
            # Discard the tokens of sequences that have ended since the step was planned.
            is_live = [not sequence.is_ended for sequence in sampled]
            sampled, requests = list(compress(sampled, is_live)), list(compress(requests, is_live))
            rows, tables = rows[is_live], tables[is_live]
        # Append the tokens of all sequences together. Then handle the sequences that end or need a block one by one.
        columns, new = self._columns, values[rows]
        places = columns.token_count[tables]
        columns.token_count[tables] = places + _ONE
        columns.last_token[tables] = new
        tokens: list[int] = new.tolist()
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.tokens.append(token)
        # A tenant is charged for tokens when they are emitted.
        for tenant, count in step.count_tenants(sampled).items():
            counter, price = tenant.counter, tenant.price
            # Add token by token: the product `count * price` would round differently.
            for _ in range(count):
                counter += price
            tenant.counter = counter
        ends: list[SchedulerEvent.Completed] = []
        last_tokens: list[int] = []
        may_act = (places >= columns.acts_at[tables]) | self._may_end.take(new, mode="clip")
        for index in may_act.nonzero()[0].tolist():
            sequence, position = sampled[index], int(places[index])
            if tokens[index] in sequence.end_tokens:
                reason = CompletionReason.END_OF_SEQUENCE
            elif position > sequence.last:
                reason = CompletionReason.MAX_TOKENS_REACHED
            else:
                # A row at `position` may already be planned, but none after it. `plan` finds a block for that first.
                if sequence.acts_at <= position < sequence.last and not self._grow(sequence):
                    self._short.append(sequence)
                continue
            ends.append(self._finish(sequence, reason))
            last_tokens.append(index)
        return StepOutcome(StepTokens(requests, tokens, places.tolist(), rows.tolist()), ends, last_tokens)

    def failed(self, step: StepPlan) -> None:
        """Process a step's failure.

        The rows of this step and of the one after it are planned again. If a tenant's region failed, call `revoked`
        too. If the engine is lost, call `engine_lost` instead. Raises ValueError if the step was answered.
        """
        if not step.is_void:
            if step not in self._unanswered:
                raise ValueError(f"step {step.number} was answered already")
            # The next step takes tokens from the failed step, so it is void too.
            self._void(self._unanswered.index(step))

    def step(self, compute: Callable[[StepPlan], Sequence[int]], now: float) -> list[AnyEvent]:
        """Plan a step, compute it and take its results. For harnesses without run-ahead."""
        step = self.plan(now)
        return step.events + (self.completed(step, compute(step)) if step.sequences else [])

    # --- Regions come and go. ---

    def revoked(self, tenant_id: str, reason: CompletionReason, now: float) -> list[AnyEvent]:
        """Process the loss of a tenant's region: its sequences end, and their replays wait for `rebound`.

        Waiting requests continue to wait. Unanswered steps remain valid for other tenants. A replay that would have to
        wait too long for the limiter is refused with AdmissionReason.REBIND_LIMITED.
        """
        tenant = self.tenants[tenant_id]
        tenant.needs_permit = True
        return self._unbind(tenant, reason, now)

    def engine_lost(
        self, now: float, reason: CompletionReason = CompletionReason.ENGINE_ERROR, wait_s: float = 0.0
    ) -> list[AnyEvent]:
        """Process the loss of the engine: unanswered steps are void, and every tenant's sequences end and are replayed.

        Limiters do not count this loss. All replays, those of earlier losses included, may wait at least `wait_s`
        seconds.
        """
        self._void(0)
        # The next engine has its own shared prefixes.
        self.prefixes.clear()
        for waiting in self._waiting.values():
            # Replays of an earlier loss wait for the same new engine.
            if waiting.request.attempt:
                waiting.deadline_s = max(waiting.deadline_s, now + wait_s)
        events: list[AnyEvent] = []
        for tenant in self.tenants.values():
            events += self._unbind(tenant, reason, now, wait_s)
        return events

    def share(self, prefix: SharedPrefix) -> None:
        """Let prompts begin with the computed blocks of a prefix. Raises ValueError if the prefix is already shared."""
        if prefix.name in self.prefixes:
            raise ValueError(f"prefix {prefix.name} is already shared")
        self.prefixes[prefix.name] = prefix
        for tenant in self.tenants.values():
            if tenant.region_blocks:
                tenant.blocks.attach(prefix.name, prefix.token_ids)
        # Waiting requests may need fewer blocks now.
        self._has_room = True

    def prefix_lost(self, name: str, reason: CompletionReason, now: float) -> list[AnyEvent]:
        """Process the loss of a shared prefix's region: the sequences that use it end, and are replayed without it.

        Tenants' regions and all other sequences continue. Does nothing for an unknown prefix.
        """
        if self.prefixes.pop(name, None) is None:
            return []
        events: list[AnyEvent] = []
        for tenant in self.tenants.values():
            tenant.blocks.detach(name)
            users = [sequence for sequence in tenant.live.values() if sequence.prefix == name]
            # The replays have no deadline, because their requests were already admitted once.
            events += self._replay(tenant, users, reason, now, float("inf"))
        return events

    def isolate(self, request_ids: Set[str] | None) -> None:
        """Admit only requests with these ids, and their replays, until `isolate(None)`. Live sequences continue."""
        self._isolated = request_ids
        self._has_room = True
        for tenant in self.tenants.values():
            # Move admissible requests to the front. The sort is stable, so both groups keep their order.
            tenant.waiting = deque(sorted(tenant.waiting, key=lambda waiting: not self._is_admissible(waiting.request)))

    def rebound(self, tenant_id: str, blocks: int, now: float) -> list[AnyEvent]:
        """Give a tenant a new region of `blocks` blocks. Its replays are admitted like any request.

        Raises:
            RebindLimited: Its region was rebuilt too often recently. Nothing changed.
            ValueError: It has a region, or `blocks` is not within its limits.

        Returns:
            An AdmissionRejected for each waiting request for which this region has too few blocks.
        """
        tenant = self.tenants[tenant_id]
        if tenant.region_blocks:
            raise ValueError(f"tenant {tenant_id} already has a region")
        _check_blocks(tenant.config, blocks)
        if tenant.needs_permit:
            if delay_s := tenant.limiter.take(now):
                raise RebindLimited(f"the next region may be opened in {delay_s:.3f} s", delay_s)
            tenant.needs_permit = False
        self._bind(tenant, blocks)
        self._has_room = True
        events: list[AnyEvent] = []
        # The new region may be smaller than the lost one. Refuse requests that no longer fit.
        for waiting in list(tenant.waiting):
            if detail := self._excess(tenant, waiting.request):
                self._dequeue(tenant, waiting)
                events.append(SchedulerEvent.AdmissionRejected(waiting.request, AdmissionReason.TOO_LARGE, detail))
        return events

    def hold(self, tenant_id: str) -> None:
        """Give a tenant's sequences no rows until `resume`, while its blocks are moved or it is suspended.

        Its waiting requests are not admitted, and end at their deadlines.
        """
        tenant = self.tenants[tenant_id]
        # Its sequences leave the list of decoding sequences. They keep their blocks and tables, and stay in `live`.
        if not tenant.is_held:
            tenant.is_held = True
            tenant.parked = [sequence for sequence in self._decoding if sequence.tenant is tenant]
            self._decoding = [sequence for sequence in self._decoding if sequence.tenant is not tenant]
            self._prefilling.pop(tenant, None)

    def resume(self, tenant_id: str) -> None:
        """Let a held tenant's sequences have rows again. Does nothing for a tenant that is not held."""
        tenant = self.tenants[tenant_id]
        if tenant.is_held:
            tenant.is_held = False
            # Some may have been cancelled while the tenant was held.
            self._decoding += [sequence for sequence in tenant.parked if not sequence.is_ended]
            tenant.parked = []
            self._enter_prefill(tenant)
            self._has_room = True

    def _bind(self, tenant: TenantState, blocks: int) -> None:
        _check_blocks(tenant.config, blocks)
        self._regions += 1
        tenant.bind(blocks, self._regions, self.prefixes.values())

    # --- Admission. ---

    def _excess(self, tenant: TenantState, request: PromptRequest) -> str:
        """Return why a request can never be admitted; "" if it can."""
        if request.positions > self.settings.context:
            return (
                f"it can have {request.positions} positions, but the model's context has only {self.settings.context}"
            )
        # If the tenant has no region, use the largest that it may get. `rebound` checks again.
        blocks = tenant.region_blocks or tenant.config.max_blocks
        if request.blocks > blocks:
            return f"it can need {request.blocks} blocks, but tenant {tenant.config.id} has only {blocks}"
        return ""

    def _limited(
        self, tenant: TenantState, request: PromptRequest, wait_s: float, now: float
    ) -> SchedulerEvent.AdmissionRejected | None:
        """Return a refusal if the tenant may get no region within `wait_s`, otherwise None."""
        delay_s = self.rebind_delay_s(tenant.config.id, now)
        if delay_s <= wait_s:
            return None
        detail = f"tenant {tenant.config.id} lost its region too often; another one can be opened in {delay_s:.3f} s"
        return SchedulerEvent.AdmissionRejected(request, AdmissionReason.REBIND_LIMITED, detail, delay_s)

    def _refusal(
        self, tenant: TenantState, request: PromptRequest, is_queue_full: bool
    ) -> SchedulerEvent.AdmissionRejected:
        """Return the refusal of a request that may not wait."""
        config = tenant.config
        if is_queue_full:
            reason, detail = AdmissionReason.QUOTA_EXCEEDED, f"{config.max_waiting} of its requests are already waiting"
        else:
            reason, detail = self._obstacle(tenant, UnadmittedRequest(request, 0.0, 0))
        detail = f"tenant {config.id}: {detail}; send this request again later, or let it wait"
        return SchedulerEvent.AdmissionRejected(request, reason, detail)

    def _obstacle(self, tenant: TenantState, waiting: UnadmittedRequest) -> tuple[AdmissionReason, str]:
        """Return why a waiting request can't be admitted now: the reason, and a sentence for the caller."""
        # Check the tenant's own limit first. Only for this reason does the caller get 429 instead of 503.
        if len(tenant.live) >= tenant.config.max_concurrent:
            return (
                AdmissionReason.QUOTA_EXCEEDED,
                f"{tenant.config.max_concurrent} of its sequences are already in progress",
            )
        if not tenant.region_blocks:
            return AdmissionReason.POOL_EXHAUSTED, "its region is being rebuilt"
        if tenant.is_held:
            return AdmissionReason.POOL_EXHAUSTED, "its region is being moved, or it is suspended"
        if (lacking := tenant.lacking(waiting)) > 0:
            needed = waiting.request.prompt_blocks
            detail = f"its prompt needs {needed} blocks, but only {max(0, needed - lacking)} are free for it"
            return AdmissionReason.POOL_EXHAUSTED, detail
        return AdmissionReason.POOL_EXHAUSTED, "requests before it wait for the engine"

    def _enqueue(self, tenant: TenantState, request: PromptRequest, deadline_s: float) -> UnadmittedRequest:
        waiting = UnadmittedRequest(request, deadline_s, self._arrivals)
        self._arrivals += 1
        self._waiting[request.request_id] = waiting
        if request.attempt:
            # A replay is the tenant's first request, because it was already admitted once.
            tenant.waiting.appendleft(waiting)
            return waiting
        # Put the request after all requests of the same priority and after all replays.
        queue, place = tenant.waiting, len(tenant.waiting)
        while place and queue[place - 1].request.priority > request.priority and not queue[place - 1].request.attempt:
            place -= 1
        queue.insert(place, waiting)
        return waiting

    def _enqueue_replay(self, replay: PromptRequest, deadline_s: float, preemptions: int) -> UnadmittedRequest:
        waiting = self._enqueue(self.tenants[replay.tenant_id], replay, deadline_s)
        waiting.preemptions = preemptions
        return waiting

    def _dequeue(self, tenant: TenantState, waiting: UnadmittedRequest) -> None:
        tenant.waiting.remove(waiting)
        del self._waiting[waiting.request.request_id]
        self._has_room = True

    def _expire(self, now: float) -> list[AnyEvent]:
        late = [waiting for waiting in self._waiting.values() if waiting.deadline_s <= now]
        events: list[AnyEvent] = []
        for waiting in late:
            tenant = self.tenants[waiting.request.tenant_id]
            # Give as the reason what the request waits for now.
            kept_out_by, detail = self._obstacle(tenant, waiting)
            detail = f"tenant {tenant.config.id}: {detail}; the maximum waiting time has passed; send it again later"
            reason = CompletionReason.DEADLINE_EXCEEDED
            events.append(SchedulerEvent.Completed(waiting.request, reason, kept_out_by=kept_out_by, detail=detail))
            self._dequeue(tenant, waiting)
        self._next_deadline_s = min((waiting.deadline_s for waiting in self._waiting.values()), default=float("inf"))
        return events

    def _admit(self) -> list[AnyEvent]:
        """Admit requests in the order of their tenants' counters, until no table is free or no tenant contends.

        Does nothing unless `_has_room`.
        """
        events: list[AnyEvent] = []
        while self._has_room:
            contenders = self._contenders()
            # The tenant with the lowest counter is next, and of equal ones the tenant with the earliest request.
            tenant = min(contenders, key=lambda tenant: (tenant.counter, tenant.waiting[0].number), default=None)
            if tenant is not None and not self._tables:
                events += self._preempt(tenant)
            if tenant is None or not self._tables:
                self._has_room = False
                break
            # Counters of tenants that begin to contend later are raised to this counter.
            self._virtual_counter = tenant.counter
            waiting = tenant.waiting.popleft()
            request = waiting.request
            del self._waiting[request.request_id]
            prefix, shared, blocks, reused = _allocate_blocks(tenant, waiting)
            sequence = LiveSequence(
                request,
                tenant,
                self._tables.pop(),
                blocks,
                self._admissions,
                self.end_tokens(request.sampling),
                self._columns,
            )
            self._count_stop_tokens(request.sampling.stop_token_ids, 1)
            sequence.prefix = prefix
            if prefix:
                # A replay is not another request, but its tokens count again.
                self.prefix_requests[prefix] += request.attempt == 0
                self.prefix_tokens[prefix] += shared * PAGE
            sequence.keys = tenant.keys_of(waiting)
            sequence.reusable = min(request.reusable_blocks, len(sequence.keys)) * PAGE
            sequence.reused = reused * PAGE
            self._reuse(sequence)
            self._guided += request.has_guidance
            sequence.preemptions = waiting.preemptions
            self._admissions += 1
            self._live[request.request_id] = tenant.live[request.request_id] = sequence
            # The replay of a preempted sequence was already charged at its first admission.
            if not waiting.is_paid:
                tenant.counter += len(request.token_ids) * tenant.price
            tenant.prefilling.append(sequence)
            self._enter_prefill(tenant)
        return events

    def _preempt(self, heavier: TenantState) -> list[AnyEvent]:
        """For a heavier tenant, end the youngest sequence of the tenant with the lowest weight, and enqueue its replay.

        Returns:
            One Completed, or nothing if preemption is off or no sequence may be preempted.
        """
        weight = heavier.config.weight
        # Only sequences of tenants with a lower weight are preempted.
        victims = [
            sequence
            for sequence in self._live.values()
            if sequence.tenant.config.weight < weight and sequence.preemptions < MAX_PREEMPTIONS
        ]
        if not self.settings.preempts or not victims:
            return []
        # The youngest sequence has the least to compute again.
        victim = min(victims, key=lambda sequence: (sequence.tenant.config.weight, -sequence.number))
        victim.preemptions += 1
        return [self._preempted(victim)]

    def _preempted(self, victim: LiveSequence) -> SchedulerEvent.Completed:
        """End a sequence, and enqueue its replay, which is not charged again."""
        # The replay has no deadline, because its request was already admitted once.
        replay = self._replay_of(victim, self._live.keys() | self._waiting.keys())
        self._enqueue_replay(replay, float("inf"), victim.preemptions).is_paid = True
        return self._finish(victim, CompletionReason.PREEMPTED, replay.request_id)

    def _supply_blocks(self) -> list[AnyEvent]:
        """Find blocks for the sequences that need one, and end their tenants' youngest sequences if necessary."""
        events: list[AnyEvent] = []
        # Begin with the oldest sequence, so that the youngest are preempted.
        short, self._short = sorted(self._short, key=lambda sequence: sequence.number), []
        for sequence in short:
            tenant = sequence.tenant
            if tenant.is_held:
                # A held tenant's sequence has no rows until `resume`.
                self._short += [] if sequence.is_ended else [sequence]
                continue
            # In the worst case, the loop preempts all sequences of the region, and this one last.
            while not sequence.is_ended and not self._grow(sequence):
                events.append(self._preempted(max(tenant.live.values(), key=lambda live: live.number)))
        return events

    def _contenders(self) -> list[TenantState]:
        """Return the tenants that wait only for a table, and raise the counters of tenants that have just begun to."""
        old: list[TenantState] = []
        new: list[TenantState] = []
        for tenant in self.tenants.values():
            if tenant.waiting and self._may_enter(tenant, tenant.waiting[0]):
                # `old` are the tenants that have contended since the last admission.
                (old if tenant.is_contending else new).append(tenant)
            else:
                tenant.is_contending = False
        # A tenant that was idle or at its own limits does not make up for that time. Raise its counter to the lowest
        # counter of the old tenants or, if there are none, to the counter at the last admission.
        least = min((tenant.counter for tenant in old), default=self._virtual_counter)
        for tenant in new:
            tenant.counter = max(tenant.counter, least)
            tenant.is_contending = True
        return old + new

    def _may_enter(self, tenant: TenantState, waiting: UnadmittedRequest) -> bool:
        return not tenant.is_held and self._is_admissible(waiting.request) and tenant.fits(waiting)

    def _is_admissible(self, request: PromptRequest) -> bool:
        return self._isolated is None or (request.continues or request.request_id) in self._isolated

    # --- Prefixes. ---

    def _reuse(self, sequence: LiveSequence) -> None:
        """Let a prompt without rows begin after computed blocks, and decide whether it waits for more."""
        region, keys, index = sequence.tenant.blocks, sequence.keys, sequence.reused // PAGE
        # Blocks that were published after its admission replace its own blocks, which are still empty.
        while sequence.reused < sequence.reusable and (block := region.share(keys[index])) is not None:
            region.release((sequence.blocks[index],))
            self._has_room = True
            sequence.blocks[index] = block
            index += 1
            sequence.reused += PAGE
        sequence.tenant.reused_tokens += sequence.reused - sequence.next_position
        sequence.next_position = sequence.filled = sequence.reused
        sequence.published = index
        # Unless another sequence is computing the next block, this one computes it.
        is_claimed = not region.claim(sequence, keys[index:])
        sequence.is_following = is_claimed and sequence.reused < sequence.reusable

    def _publish(self, sequence: LiveSequence, blocks: int) -> None:
        """Let other prompts reuse the first `blocks` blocks of a sequence, which answered steps must have computed."""
        region, blocks = sequence.tenant.blocks, min(blocks, len(sequence.keys))
        for index in range(sequence.published, blocks):
            region.publish(sequence.blocks[index], sequence.keys[index])
        # Waiting requests may need fewer blocks now.
        self._has_room |= bool(self._waiting) and blocks > sequence.published
        sequence.published = max(blocks, sequence.published)

    # --- Blocks. ---

    def _grow(self, sequence: LiveSequence) -> bool:
        """Give a sequence one more block. Returns False if its region has none."""
        self._release_behind_window(sequence)
        block = sequence.tenant.blocks.take()
        if block is None:
            return False
        sequence.blocks.append(block)
        sequence.set_acts_at()
        return True

    def _release_behind_window(self, sequence: LiveSequence) -> None:
        """Free the blocks of a sequence before its window, except those that unanswered steps read."""
        if self.settings.window is None:
            return
        region, first_in_window = sequence.tenant.blocks, (sequence.length - self.settings.window + 1) // PAGE
        if first_in_window <= sequence.freed_blocks:
            return
        # Publish the blocks first, so that other prompts can reuse them while they are cached.
        if sequence.tenant.reuses:
            region.extend_keys(sequence.keys, sequence.tokens, first_in_window, sequence.request.cache_salt)
            self._publish(sequence, first_in_window)
        region.release(reversed(sequence.blocks[sequence.freed_blocks : first_in_window]))
        sequence.blocks[sequence.freed_blocks : first_in_window] = [NO_BLOCK] * (
            first_in_window - sequence.freed_blocks
        )
        sequence.freed_blocks = first_in_window
        self._has_room = True

    # --- Rows. ---

    def _enter_prefill(self, tenant: TenantState) -> None:
        if tenant.prefilling and not tenant.is_held and tenant not in self._prefilling:
            # Raise the count, as `_contenders` raises counters, so that a tenant gains nothing from time without
            # prompts.
            least = min((other.prefilled for other in self._prefilling), default=self._virtual_prefilled)
            tenant.prefilled = max(tenant.prefilled, least)
            self._prefilling[tenant] = None

    def _leave_prefill(self, sequence: LiveSequence) -> None:
        tenant = sequence.tenant
        tenant.prefilling.remove(sequence)
        if not tenant.prefilling:
            self._prefilling.pop(tenant, None)

    def _deal_prompt_rows(self) -> list[tuple[LiveSequence, int]]:
        """Return the prompts with rows in the next step, each with its number of rows."""
        # Prompts get the rows that decoding leaves free, but at least as many as the same number of decoding sequences.
        max_rows, decoding = self.settings.max_rows, len(self._decoding)
        prompts = sum(len(tenant.prefilling) for tenant in self._prefilling)
        free_rows = max_rows - decoding
        if prompts > free_rows:
            # Keep the remainder for the next step, so that the average is exact.
            turns, self._prompt_turns = divmod(self._prompt_turns + max_rows * prompts, decoding + prompts)
            free_rows = max(free_rows, turns)
        # Each prompt row delays the decoding sequences' next tokens, so limit prompt rows while sequences decode.
        free_rows = min(free_rows, self.settings.prefill_rows if decoding else max_rows)
        # Divide the rows among tenants: PREFILL_GRAIN rows at a time go to the tenant with the fewest weighted prompt
        # rows.
        needed = {tenant: rows for tenant in self._prefilling if (rows := tenant.prompt_rows)}
        shares = dict.fromkeys(needed, 0)
        while free_rows and needed:
            tenant = min(needed, key=lambda tenant: tenant.prefilled)
            self._virtual_prefilled = tenant.prefilled
            count = min(PREFILL_GRAIN, free_rows, needed[tenant])
            free_rows -= count
            shares[tenant] += count
            tenant.prefilled += count * tenant.price
            needed[tenant] -= count
            if not needed[tenant]:
                del needed[tenant]
        # Within a tenant, the oldest prompt gets all rows that it can use before the next prompt gets any.
        chunks = []
        guided = self.settings.guided_rows
        for tenant, rows in shares.items():
            for sequence in tenant.prefilling:
                if not rows:
                    break
                count = min(rows, sequence.prompt_rows)
                # The last row of a prompt chooses a token. If a guide restricts the token and the step has no guided
                # row left, the row waits.
                if sequence.is_guided and count and sequence.next_position + count == sequence.prompt_length:
                    count -= not guided
                    guided -= bool(guided)
                rows -= count
                if count:
                    chunks.append((sequence, count))
        return chunks

    def _pick_ready(self, max_rows: int, guided: int) -> list[LiveSequence]:
        """Choose up to `max_rows` decoding sequences that can have a row now, and move them to the end of the list.

        `guided` is the number of guided rows that the step already has.
        """
        chosen: list[LiveSequence] = []
        waiting: list[LiveSequence] = []
        for sequence in self._decoding:
            guide = sequence.request.guide
            is_ready = guide is None or (
                guided < self.settings.guided_rows
                and guide.is_ready
                and (not guide.is_stepwise or sequence.next_position < len(sequence.tokens))
            )
            if is_ready and len(chosen) < max_rows:
                chosen.append(sequence)
                guided += guide is not None
            else:
                waiting.append(sequence)
        self._decoding = waiting + chosen
        return chosen

    def _plan_decode(self, max_rows: int, guided: int) -> StepPlan:
        """Return a step with one row for each decoding sequence that is ready.

        If there are more than `max_rows`, they take turns. `guided` is the number of guided rows of prompts in the
        step.
        """
        chosen = self._decoding
        if self._guided:
            chosen = self._pick_ready(max_rows, guided)
        elif len(chosen) > max_rows:
            chosen = chosen[:max_rows]
            # Sequences that get a row now go to the end of the list.
            self._decoding = self._decoding[max_rows:] + chosen
        # Usually the sequences are those of the previous step.
        roster = self._roster
        if chosen != roster.sequences:
            roster = self._roster = DecodeRoster(chosen.copy())
        # Copy the step's columns from the sequences' columns with one call of numpy. With few sequences, calls take
        # most of the time. So `any`, which runs Python code, is avoided too.
        columns = self._columns
        copied = columns.planned.take(roster.tables, axis=1)
        positions, tokens, sources, blocks, tables, known_tokens, special_at = copied
        # A row that is computed again after a failed step has a known token. For other rows, the kernel takes the token
        # from the previous step's result on the card.
        is_known = positions < known_tokens
        if np.count_nonzero(is_known):
            tokens *= is_known
            sources[is_known] = NO_ROW
        else:
            tokens.fill(0)
        columns.row[tables], columns.next_position[tables] = roster.rows, positions + _ONE
        is_any_last = False
        for row in (positions >= special_at).nonzero()[0].tolist():
            sequence, position = chosen[row], int(positions[row])
            blocks[row] = sequence.set_block(position)
            is_any_last |= position == sequence.last
        # Remove sequences that have just got their last possible row. `take_results` ends others earlier.
        if is_any_last:
            self._decoding = [sequence for sequence in self._decoding if sequence.next_position <= sequence.last]
        return StepPlan(self._step_number, roster, copied[:5])

    # --- Ends. ---

    def _finish(
        self, sequence: LiveSequence, reason: CompletionReason, continued_by: str = ""
    ) -> SchedulerEvent.Completed:
        """End a live sequence, and free its blocks and its table for the next admission."""
        request, tenant = sequence.request, sequence.tenant
        # The next `plan` removes ended sequences from the list of decoding sequences.
        sequence.is_ended = self._has_ended = self._has_room = True
        for step in self._unanswered:
            step.has_ended = True
        del self._live[request.request_id], tenant.live[request.request_id]
        self._guided -= request.has_guidance
        self._count_stop_tokens(request.sampling.stop_token_ids, -1)
        # A region that was lost has size 0, and its blocks are not released.
        if (region := tenant.blocks).size:
            if tenant.reuses:
                # Publish the full blocks, because a later prompt may continue this sequence.
                full = sequence.length // PAGE
                region.withdraw(sequence, sequence.keys[full:])
                region.extend_keys(sequence.keys, sequence.tokens, full, request.cache_salt)
                self._publish(sequence, full)
            # Release the last block first, so that the end of a prefix is evicted before its beginning.
            region.release(reversed(sequence.blocks[sequence.freed_blocks :]))
        self._tables.append(sequence.table)
        if sequence.next_position < sequence.prompt_length:
            self._leave_prefill(sequence)
        return SchedulerEvent.Completed(request, reason, continued_by)

    def _void(self, first: int) -> None:
        """Undo the plans of unanswered steps from index `first` on. Their rows are then planned before all others."""
        voided = self._unanswered[first:]
        del self._unanswered[first:]
        if not voided:
            return
        # Step 1: restore `next_position` and `row` of each sequence, from the last step and row to the first, so that
        # the oldest values remain.
        self._step_number = voided[0].number
        for step in reversed(voided):
            step.is_void = True
            for row in range(len(step) - 1, -1, -1):
                sequence = step.sequences[row]
                # The table of an ended sequence may be another sequence's.
                if not sequence.is_ended:
                    sequence.next_position, sequence.row = int(step.positions[row]), int(step.sources[row])
        # Step 2: put the sequences back into their lists: decoding sequences, prompts, or a held tenant's `parked`.
        sequences = dict.fromkeys(sequence for step in voided for sequence in step.sequences if not sequence.is_ended)
        decoding = [sequence for sequence in sequences if sequence.next_position >= sequence.prompt_length]
        for sequence in decoding:
            sequence.set_block(sequence.next_position)
        self._decoding = [sequence for sequence in self._decoding if sequence not in sequences]
        for sequence in sequences:
            tenant = sequence.tenant
            if tenant.is_held:
                tenant.parked = [parked for parked in tenant.parked if parked is not sequence]
                tenant.parked += [sequence] * (sequence.next_position >= sequence.prompt_length)
            if sequence.next_position < sequence.prompt_length and sequence not in tenant.prefilling:
                tenant.prefilling.append(sequence)
                tenant.prefilling.sort(key=lambda sequence: sequence.number)
            self._enter_prefill(tenant)
        # Step 3: put the sequences of voided rows first, in their old order.
        self._decoding = [sequence for sequence in decoding if not sequence.tenant.is_held] + self._decoding

    def _unbind(self, tenant: TenantState, reason: CompletionReason, now: float, wait_s: float = 0.0) -> list[AnyEvent]:
        """End a tenant's sequences and its region, and enqueue their replays in the order of their admissions."""
        tenant.unbind()
        return self._replay(tenant, list(tenant.live.values()), reason, now, max(wait_s, self.settings.replay_wait_s))

    def _replay(
        self,
        tenant: TenantState,
        sequences: Sequence[LiveSequence],
        reason: CompletionReason,
        now: float,
        least_s: float,
    ) -> list[AnyEvent]:
        """End some of a tenant's sequences, and enqueue their replays, which may wait at least `least_s` seconds."""
        events: list[AnyEvent] = []
        replays: list[tuple[PromptRequest, int]] = []
        used_ids = self._live.keys() | self._waiting.keys()
        for sequence in sequences:
            replay = self._replay_of(sequence, used_ids)
            used_ids.add(replay.request_id)
            events.append(self._finish(sequence, reason, replay.request_id))
            limited = self._limited(tenant, replay, max(replay.wait_s, least_s), now)
            if limited:
                events.append(limited)
            else:
                replays.append((replay, sequence.preemptions))
        # Each replay goes to the front of the queue, so enqueue the last first.
        for replay, preemptions in reversed(replays):
            deadline_s = now + max(replay.wait_s, least_s)
            self._enqueue_replay(replay, deadline_s, preemptions)
            self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        return events

    def _replay_of(self, sequence: LiveSequence, used_ids: Set[str]) -> PromptRequest:
        """Return the request that continues where a sequence ended, or starts again if `settings.replays` is off.

        Its id is the first request's id, a dot and the attempt's number, and is not in `used_ids`.
        """
        request = sequence.request
        # The replay's prompt is the caller's prompt and all emitted tokens, which count against the maximum number of
        # tokens.
        own_prompt = len(request.token_ids) - request.replayed_tokens
        kept_tokens = len(sequence.tokens) if self.settings.replays else own_prompt
        # Skip ids that a caller uses for another request.
        first_id, attempt = request.continues or request.request_id, request.attempt + 1
        while f"{first_id}.{attempt}" in used_ids:
            attempt += 1
        return replace(
            request,
            request_id=f"{first_id}.{attempt}",
            token_ids=tuple(sequence.tokens[:kept_tokens]),
            max_emitted_tokens=request.max_emitted_tokens + len(request.token_ids) - kept_tokens,
            continues=first_id,
            attempt=attempt,
            replayed_tokens=kept_tokens - own_prompt,
        )


def _allocate_blocks(tenant: TenantState, waiting: UnadmittedRequest) -> tuple[str, int, list[int], int]:
    """Allocate the blocks of a request that fits.

    Returns:
        The shared prefix with which it begins, or ""; the number of this prefix's blocks that it uses; all of its
        blocks; and the number of these, from the first on, that are already computed.
    """
    region, request, keys = tenant.blocks, waiting.request, tenant.keys_of(waiting)[: waiting.request.reusable_blocks]
    prefix, shared = region.find_shared(keys)
    blocks = list(range(region.size, region.size + shared))
    # Share computed blocks first, so that `take` does not evict one of them.
    for key in keys[shared:]:
        if (block := region.share(key)) is None:
            break
        blocks.append(block)
    reused = len(blocks)
    for _ in range(reused, request.prompt_blocks):
        block = region.take()
        assert block is not None, "`TenantState.fits` has counted them"
        blocks.append(block)
    return prefix, shared, blocks, reused


def _check_blocks(config: TenantConfig, blocks: int) -> None:
    if not 1 <= blocks <= config.max_blocks:
        raise ValueError(f"tenant {config.id}: a region must have 1 to {config.max_blocks} blocks, not {blocks}")
