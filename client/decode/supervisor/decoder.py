"""Serves prompts from one model on its own lease.

Callers use `Decoder`. A scheduler decides which rows are computed (`scheduler`), and an engine computes them
(`engine`). One task drives both (`step_loop`). A supervisor replaces a lost engine (`engine_supervisor`).

    async with Decoder.open("model.gguf") as decoder:
        async for piece in decoder.generate("The capital of France is", max_tokens=32):
            print(piece, end="", flush=True)

The end of a tenant's region ends only that tenant's sequences. The decoder opens a new region, and replays the prompts
with the tokens already emitted, so the next tokens are the same as without the loss.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

from gpulease.client.decode.checkpoint import Checkpoint, open_model
from gpulease.client.decode.checkpoint.stored_kv import with_kv_dtype
from gpulease.client.decode.decode_errors import GrammarRefused, RequestRejected
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_reports import DecoderObserver
from gpulease.client.decode.decode_requests import (
    MAX_WAIT_S,
    PromptRequest,
    SamplingParameters,
    SharedPrefix,
    TenantConfig,
)
from gpulease.client.decode.engine.engine import DecodeEngine, lease_bytes
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.model_config import KvDtype, ModelConfig
from gpulease.client.decode.pooling import Pooling
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.supervisor.engine_supervisor import EngineSupervisor, Outage, PrefixState
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.prompt_intake import PromptIntake
from gpulease.client.decode.supervisor.request_ledger import RequestLedger
from gpulease.client.decode.supervisor.serving_engine import EngineSpec
from gpulease.client.decode.supervisor.step_loop import StepLoop
from gpulease.client.decode.supervisor.tenant_moves import TenantMoves
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions
from gpulease.client.decode.text.grammar import GrammarMasks, Grammars
from gpulease.client.decode.token_filter import TokenFilter
from gpulease.client.decode.token_guide import TokenGuide, TokenMasks
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.settings_reader import Setting

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_POSITIONS: Final = 4096
"""Default maximum number of positions of a sequence, unless the model's context is shorter. With 131,072 positions, a
few sequences would fill a card."""

MIN_REGION_LIFE_S: Final = 0.1
"""Minimum seconds of a region's life. With fewer, moving sequences would take most of the time."""

MAX_REGION_LIFE_S: Final = 86_400.0
"""Maximum seconds of a region's life without a renewal, the same as a daemon's default limit for a lease."""

MAX_ROWS: Final = 1024
"""Maximum rows of a step in a settings file. A larger number is probably a typing error."""

MAX_SEQUENCES: Final = 4096
"""Maximum live sequences in a settings file. A larger number is probably a typing error."""

MAX_REBINDS_AT_ONCE: Final = 1000
"""Maximum of `rebinds_at_once`. A higher number would not limit the cost of replays."""

DEFAULT_TEXT_PROCESSES: Final = 2
"""Default number of processes that parse prompts. While a tenant's large texts occupy one, the other is free."""

MAX_TEXT_PROCESSES: Final = 64
"""Maximum number of processes that parse prompts. Each may use half a GiB of memory (`TextLimits`)."""

STEP_PAUSE_S: Final = 0.001
"""Seconds between two checks for the end of the last step in flight. A step takes milliseconds."""

DEFAULT_TENANT: Final = "default"

DEFAULT_SEQUENCES: Final = 4
"""Number of full-length sequences for which a decoder's only tenant has blocks."""


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Limits of a decoder, which reserves memory for them when it starts. A server's settings file has the same bounds.

    Raises:
        ValueError: `text_processes` or `region_life_s` is out of its range.
    """

    max_rows: Annotated[
        int,
        Setting(
            "Maximum number of rows of a step; each row computes one position of a sequence.", least=1, most=MAX_ROWS
        ),
    ] = 64
    prefill_rows: Annotated[
        int,
        Setting(
            "Maximum number of rows of a step that prompts may use while other sequences are decoding.",
            least=1,
            most=MAX_ROWS,
        ),
    ] = 32
    max_sequences: Annotated[
        int, Setting("Maximum number of sequences in progress at the same time.", least=1, most=MAX_SEQUENCES)
    ] = 64
    positions: Annotated[
        int | None,
        Setting(
            "Maximum number of positions of a sequence, its prompt and its answer together; at most the "
            f"model's context length. Without it, the context length, but at most {MAX_POSITIONS:,}.",
            least=1,
            most=1 << 20,
            example="256",
        ),
    ] = None
    packed: Annotated[bool, Setting("Whether quantized weights stay packed on the card.")] = True
    kv_dtype: Annotated[
        KvDtype,
        Setting(
            "The type in which attention's keys and values are stored: bf16, or fp8 (float8 e4m3), which needs about"
            " half of the memory for each position, but is less exact: the tokens differ from those with bf16."
        ),
    ] = KvDtype.BF16
    rebinds_at_once: Annotated[
        int,
        Setting(
            "How many regions in a row are opened at once for a tenant that loses its regions. After each loss, the"
            " tenant's sequences are computed again, which leaves fewer rows for the other tenants.",
            least=1,
            most=MAX_REBINDS_AT_ONCE,
        ),
    ] = 3
    rebind_interval_s: Annotated[
        float,
        Setting(
            "Seconds between two regions that are opened for such a tenant after the first `rebinds_at_once`.",
            key="rebind_interval_secs",
            least=0,
            most=MAX_WAIT_S,
        ),
    ] = 10.0
    preempts: Annotated[
        bool,
        Setting(
            "Whether a tenant that finds no free place takes that of the youngest sequence of the tenant with the"
            " lowest weight, if this weight is lower than its own. That sequence is computed again later. Use it if the"
            " first tokens of tenants with high weights matter most."
        ),
    ] = False
    reuses_prefixes: Annotated[
        bool,
        Setting(
            "Whether the first blocks of a prompt are reused if the same tenant's region has them. The first token then"
            " comes sooner; the tokens are the same."
        ),
    ] = True
    region_life_s: Annotated[
        float | None,
        Setting(
            "Seconds that a tenant's region lasts, for operators who limit the age of grants. Before its end, its"
            " sequences move to another region; the lease has room for one more region. Without this setting, regions"
            " are renewed; if the daemon refuses a renewal, the refusal is logged, and the sequences move, too.",
            key="region_life_secs",
            least=MIN_REGION_LIFE_S,
            most=MAX_REGION_LIFE_S,
            example="3600",
        ),
    ] = None
    latency: Annotated[
        bool,
        Setting(
            "Whether the engine's lease is of the latency class: the card's other sessions hold back while a step runs."
            " The daemon's operator must allow it (`may_latency`)."
        ),
    ] = False
    text_processes: Annotated[
        int,
        Setting(
            "Number of processes that parse prompts: with two, one tenant's large texts do not delay the others'.",
            least=1,
            most=MAX_TEXT_PROCESSES,
        ),
    ] = DEFAULT_TEXT_PROCESSES

    def __post_init__(self) -> None:
        if not 1 <= self.text_processes <= MAX_TEXT_PROCESSES:
            raise ValueError(f"text_processes must be from 1 to {MAX_TEXT_PROCESSES}, not {self.text_processes}")
        if self.region_life_s is not None and not self.region_life_s >= MIN_REGION_LIFE_S:
            raise ValueError(f"region_life_s must be at least {MIN_REGION_LIFE_S:g}, or None, not {self.region_life_s}")


class Decoder:
    """A model that serves prompts. `async with Decoder.open(...) as decoder:` opens it.

    Attributes:
        scheduler: Decides what steps compute; only the decoder may change it.
        log: Logs losses and recoveries.
        prompts: Parses prompts in separate processes. A process that serves several tenants must tokenize through it.
        grammars: Compiles grammars, and computes their masks during the steps.
    """

    # Returns the specification of an engine that shares these prefixes.
    _spec_with: Callable[[tuple[SharedPrefix, ...]], EngineSpec]

    def __init__(
        self,
        spec: EngineSpec,
        scheduler: ContinuousBatchScheduler,
        address: str | None,
        observers: Sequence[DecoderObserver] = (),
        text_processes: int = DEFAULT_TEXT_PROCESSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self.log = DecodeLog()
        self._checkpoint = spec.checkpoint
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        # Numbers for the ids of requests that are submitted without an id.
        self._numbers = count(1)
        self._ledger = RequestLedger(observers, self.log)
        self.prompts = PromptIntake(
            scheduler,
            self.tokenizer,
            text_processes,
            lambda report: self._ledger.report(lambda observer: observer.on_prompt_refused(report)),
            self.log,
        )
        self.grammars = Grammars(
            self.tokenizer, spec.checkpoint.config.vocabulary, scheduler.settings.end_tokens, self.log
        )
        # The supervisor owns the engine, the loop runs its steps, and the ledger has the callers' requests. They share
        # the scheduler.
        self._supervisor = EngineSupervisor(spec, address, scheduler, self._ledger, self.log, clock)
        self._steps = StepLoop(spec.limits.tables, scheduler, self._ledger, self._supervisor, self.log, clock)

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
        prefixes: Iterable[SharedPrefix] = (),
        is_parkable: bool = False,
        tokenizer: "Tokenizer | None" = None,
    ) -> AsyncIterator[Self]:
        """Acquire a lease, load the model, and open each tenant's region. The end of the block frees the lease.

        Args:
            model: A folder with safetensors, a `.gguf` file, or an open checkpoint.
            tenants: The tenants that may submit; by default one tenant, "default", that may use the whole engine.
            settings: The sizes for which memory is reserved.
            address: The daemon's or the fleet's address, as `GpuBuilder` takes it.
            progress: Called with the number of bytes loaded so far and the total number.
            observers: Receive the decoder's reports.
            prefixes: Tokens of the prefixes that all tenants share. They are computed before the decoder serves.
            is_parkable: Whether `park` works.
            tokenizer: The model's tokenizer, if it is loaded already; None: it is loaded when it is first needed.

        Raises ModelRejected, InvalidRequest for more positions than the model's context, CapacityExceeded if no card
        has room, and the errors of `GpuBuilder.acquire`.
        """
        checkpoint = open_model(model) if isinstance(model, str | Path) else model
        # Compute the layout of all tensors in a thread, so that other decoders in this process continue.
        spec = await asyncio.to_thread(
            _engine_spec, checkpoint, tuple(tenants), settings, tuple(prefixes), is_parkable=is_parkable
        )
        # Check everything that needs no daemon before the lease is acquired.
        scheduler = ContinuousBatchScheduler(
            _scheduler_settings(settings, checkpoint.config, spec.limits.positions), spec.tenants
        )
        decoder = cls(spec, scheduler, address, observers, settings.text_processes)
        if tokenizer is not None:
            decoder._tokenizer = asyncio.get_running_loop().create_future()
            decoder._tokenizer.set_result(tokenizer)
        decoder._spec_with = partial(_engine_spec, checkpoint, spec.tenants, settings, is_parkable=is_parkable)
        # From now on the lease exists, and the block's end frees it.
        try:
            async with decoder._serve(progress):
                yield decoder
        finally:
            # A checkpoint that the caller has opened stays open.
            if checkpoint is not model:
                checkpoint.close()

    @asynccontextmanager
    async def _serve(self, progress: Callable[[int, int], None] | None = None) -> AsyncIterator[None]:
        """Open the first engine and run the step loop. The end of the block stops both."""
        # Start the loop only when there is an engine. If opening it fails, there is nothing to undo.
        await self._supervisor.open(self._steps, progress)
        self._steps.start()
        self._supervisor.start(self.moves.watch())
        try:
            yield
        except BaseException:
            # An error from freeing the lease must not replace the block's own error.
            with suppress(GpuLeaseError):
                await self._stop()
            raise
        await self._stop()

    async def _stop(self) -> None:
        # Refuse new work first. Then stop the step loop, the tasks that open engines, all requests, and the processes
        # that parse prompts. Free the lease last, when the engine is not used any more.
        self._supervisor.close()
        await self._steps.stop()
        await self._supervisor.stop()
        await self.prompts.stop()
        await self.grammars.stop()
        await self._supervisor.close_engine()

    @property
    def engine(self) -> DecodeEngine:
        """The engine. After a loss, this is the lost engine until another one serves."""
        return self._supervisor.serving.engine

    @property
    def model_config(self) -> ModelConfig:
        return self._checkpoint.config

    @property
    def pooling(self) -> Pooling | None:
        """How the model turns a text into a vector; None if it can only generate text."""
        return self._checkpoint.pooling

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine: False from its loss until another serves, and once the decoder has ended."""
        return self._supervisor.life.is_serving

    @property
    def outage(self) -> Outage | None:
        """The current period without an engine; None while there is an engine, and once the decoder has ended."""
        return self._supervisor.outage

    @property
    def prefixes(self) -> list[PrefixState]:
        """The shared prefixes: how much each is used, and whether its region has ended."""
        return self._supervisor.prefixes

    @property
    def steps(self) -> int:
        return self._steps.computed

    @property
    def moves(self) -> TenantMoves:
        """The moves of tenants' sequences from region to region."""
        return self._steps.moves

    @property
    def rebinds(self) -> int:
        """Number of regions that replaced others, after their end or by a move before it."""
        return self._supervisor.reopened + self.moves.count

    @property
    def regions(self) -> TenantRegions:
        """The tenants' regions in the engine's lease."""
        return self._supervisor.serving.regions

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
        priority: int = 0,
        ranks: int = 0,
        scores_prompt: bool = False,
        masks: GrammarMasks | None = None,
        pooling: Pooling | None = None,
        cache_salt: str = "",
    ) -> Generation:
        """Submit a prompt's tokens. Returns the generation, which yields tokens as they are computed.

        Args:
            token_ids: The prompt.
            max_tokens: Maximum number of tokens to emit.
            sampling: How tokens are chosen.
            tenant_id: The request's tenant.
            wait_s: Seconds for which the request may wait for room; if 0, it is refused if there is no room at once.
            request_id: The request's id, which must not be in use; None: the decoder chooses one.
            priority: Among the tenant's waiting requests, those with a lower number are admitted first.
            ranks: How many of the likeliest tokens to report with each token, at most MAX_RANKS.
            scores_prompt: Whether `Generation.prompt_scores` reports the prompt's tokens with their probabilities.
            masks: The result of `grammars.compile` for the sampling's grammar; each request needs a separate one.
            pooling: How the prompt's rows become the vector `Generation.pooled`; None for no vector.
            cache_salt: The prompt shares computed blocks only with the tenant's requests that have the same salt. If it
                is not empty, no shared prefix is used.

        While there is no engine, the request waits for the next one. Raises RequestRejected for an invalid request,
        NoModelLoaded if the decoder is closed, EngineDecodeFailed if an internal error has ended the decoder.
        """
        self._supervisor.check_alive()
        if bool(sampling.grammar) is not (masks is not None):
            raise RequestRejected("a request with a grammar must have its masks, and no other may", "Compile it first")
        ledger, now = self._ledger, self._clock()
        if request_id is None:
            # Callers may choose ids of the same form, so skip ids that are in use.
            request_id = next(name for number in self._numbers if not ledger.find(name := f"request-{number}"))
        tokens = tuple(token_ids)
        request = PromptRequest(
            tenant_id,
            request_id,
            tokens,
            sampling,
            max_tokens,
            wait_s,
            priority=priority,
            ranks=ranks,
            scores_prompt=scores_prompt,
            pooling=pooling,
            cache_salt=cache_salt,
            guide=self._guide_of(tokens, sampling, masks),
        )
        # If the engine is parked, the request's first step brings it back.
        self.moves.is_paused = False
        # Enter the request in the ledger before the scheduler gets it, because the scheduler may end it at once.
        generation = ledger.open(request, self.cancel, now)
        if masks is not None:
            masks.on_failed = lambda error: self._fail(generation, error)
        try:
            # The events may already contain a refusal or a preemption.
            ledger.deliver(self.scheduler.submit(request, now))
        except BaseException:
            ledger.forget(generation)
            raise
        self._steps.wake()
        return generation

    def _fail(self, generation: Generation, error: GrammarRefused) -> None:
        """End a generation with this error."""
        generation.failure = error
        self.cancel(generation)

    def _guide_of(
        self, prompt: Sequence[int], sampling: SamplingParameters, masks: TokenMasks | None
    ) -> TokenGuide | None:
        vocabulary = self.scheduler.settings.vocabulary
        # Check this for all requests: a stop token outside the vocabulary would never stop a sequence.
        _check_known("stop_token_ids", sampling.stop_token_ids, vocabulary)
        if not sampling.changes_logits and masks is None:
            return None
        ends = self.end_tokens(sampling)
        for name, tokens in (
            ("stop_token_ids", tuple(ends)),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", tuple(chain(*sampling.bad_words))),
            ("prompt", prompt),
        ):
            _check_known(name, tokens, vocabulary)
        if sampling.filters_tokens:
            _check_any_is_left(vocabulary, sampling, ends)
            masks = TokenFilter(vocabulary, sampling.allowed_token_ids, sampling.bad_words)
        return TokenGuide(
            prompt,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            biases=sampling.logit_bias,
            min_tokens=sampling.min_tokens,
            end_tokens=ends,
            masks=masks,
        )

    def end_tokens(self, sampling: SamplingParameters) -> frozenset[int]:
        """Return the tokens that end a sequence with this sampling."""
        return self.scheduler.end_tokens(sampling)

    async def generate(
        self,
        text: str,
        *,
        max_tokens: int,
        sampling: SamplingParameters = SamplingParameters(),  # noqa: B008  # it can't be changed
        tenant_id: str = DEFAULT_TENANT,
    ) -> AsyncGenerator[str, None]:
        """Continue a text. Yields the continuation in pieces of whole characters, as they are computed.

        Closing the generator ends the sequence. The arguments are as for `submit`. The text is tokenized in another
        process, and meanwhile counts as a waiting request of its tenant.

        Raises ModelRejected for a model without a tokenizer, TextNotRead for a text that exceeds the limits of
        tokenization, and the errors of `submit` and of the generation's iterator.
        """
        # Load the tokenizer first, so that a model without one is refused before the text takes a place.
        tokenizer = await self.tokenizer()
        with self.prompts.place(tenant_id):
            tokens = await self.prompts.read_text(tenant_id, text)
            generation = self.submit(tokens, max_tokens=max_tokens, sampling=sampling, tenant_id=tenant_id)
        stream = tokenizer.stream()
        try:
            # A token may end inside a character, so the stream holds back bytes until the character is complete.
            async for emitted in generation:
                if piece := stream.add(emitted.token):
                    yield piece
            if last_text := stream.end():
                yield last_text
        finally:
            generation.cancel()

    async def tokenizer(self) -> "Tokenizer":
        """Return the model's tokenizer. Raises ModelRejected if the model has none, or a broken one.

        Use it to decode tokens, and to tokenize your own texts. While it tokenizes, no other Python code of this
        process runs, and no limit applies, so use `prompts` for tenants' texts. The first call loads it in a thread,
        which takes a second for a large vocabulary.
        """
        if self._tokenizer is None:
            self._tokenizer = asyncio.ensure_future(asyncio.to_thread(self._checkpoint.tokenizer))
        # All callers share one load, so a caller that is cancelled must not cancel it.
        return await asyncio.shield(self._tokenizer)

    def cancel(self, generation: Generation) -> None:
        """End a generation. Has no effect on a generation that has ended, even if a later request has the same id."""
        # A later request may have the same id, so check that this generation has not ended.
        if generation.reason is None:
            self._ledger.deliver(self.scheduler.cancel(generation.request.request_id))
            self._steps.wake()

    # --- regions that sequences leave ---

    async def suspend(self, tenant_id: str) -> None:
        """Copy a tenant's keys and values to the host's memory and close its region, which frees the region's bytes.

        The tenant's requests wait until `resume`, or until their deadlines. Other tenants continue. If the engine is
        lost during that time, the tenant's sequences are replayed after `resume`, in a region of the next engine.

        Raises RequestRejected if the tenant is suspended or has no region now, RegionFailed if the region ends before
        it is copied; the tenant's sequences are then replayed.
        """
        await self.moves.suspend(tenant_id)

    async def resume(self, tenant_id: str) -> None:
        """Open a region for a suspended tenant, and continue with the same tokens.

        Raises RequestRejected if the tenant is not suspended, CapacityExceeded while the lease has no room.
        """
        await self.moves.resume(tenant_id)

    async def move_tenant(self, tenant_id: str) -> None:
        """Move a tenant's sequences into a new region, and end the old one.

        Raises RequestRejected if the tenant is suspended or has no region now, RegionFailed if the region ends before
        it is copied; the tenant's sequences are then replayed.
        """
        await self.moves.move(tenant_id)

    async def move(self, address: str | None = None) -> None:
        """Open an engine on another lease while this one serves, then move all sequences there between two steps.

        Nothing is lost: sequences are replayed there, and continue with the same tokens. The old lease is freed.

        Args:
            address: The daemon's or the fleet's address; None: the address that this engine's lease came from. The
                daemon must then have room for both engines; a fleet finds a node with room.

        Raises the errors of `open`, EngineDecodeFailed or NoModelLoaded if the decoder has ended. After an error the
        current engine keeps serving, if it can.
        """
        await self._supervisor.move(address)

    async def share(self, prefixes: Iterable[SharedPrefix]) -> None:
        """From now on, share these prefixes with all tenants, instead of the current ones.

        Opens an engine with these prefixes, and moves all sequences there, as `move` does. Raises the errors of `move`,
        and RequestRejected for prefixes that can't be shared. After an error the current prefixes stay shared.
        """
        await self._supervisor.move(spec=self._spec_with(tuple(prefixes)))

    # --- leaving the card while it is idle ---

    async def park(self) -> int:
        """Move the engine's memory to the host's memory, which frees the card's bytes for other leases.

        No request may be in progress. The next request brings the memory back to the same addresses, and waits for it;
        the tokens are the same as without parking. Returns the number of bytes that were moved.

        Raises RequestRejected if a request is in progress, and the errors of `GpuLease.park`.
        """
        if len(self._ledger):
            raise RequestRejected("requests are in progress", "Park the decoder when none is")
        # Wait for the steps of cancelled requests, because their results, taken later, would bring the memory back.
        while self.scheduler.unanswered_steps:  # noqa: ASYNC110  # the loop has no event for it
            await asyncio.sleep(STEP_PAUSE_S)
        self.moves.is_paused = True
        try:
            return await self.engine.lease.park()
        except BaseException:
            self.moves.is_paused = False
            raise

    async def unpark(self) -> None:
        """Bring the memory back now, so that the next request need not wait for it.

        Raises Busy if the card has no room in time, and the error that ended the lease if it has ended.
        """
        await self.engine.session.sync()
        self.moves.is_paused = False

    # --- its end ---

    def check_alive(self) -> None:
        """Raise the error that ended the decoder, if it has ended."""
        self._supervisor.check_alive()

    async def wait_ended(self) -> None:
        """Wait until the decoder has ended, because it was closed or by an internal error.

        The loss of an engine does not end the decoder. Raises nothing; `check_alive` raises the error that ended it.
        """
        await self._supervisor.wait_ended()


def engine_bytes(
    checkpoint: Checkpoint,
    tenants: Iterable[TenantConfig],
    settings: DecoderSettings,
    prefixes: Iterable[SharedPrefix] = (),
) -> int:
    """Return the size of the lease that a decoder of this model acquires. Raises errors as `Decoder.open` does."""
    return _engine_spec(checkpoint, tuple(tenants), settings, tuple(prefixes)).size_bytes


def positions_of(checkpoint: Checkpoint, settings: DecoderSettings) -> int:
    """Return the maximum number of positions of a sequence: the setting, or the context up to MAX_POSITIONS."""
    return settings.positions or min(checkpoint.config.context, MAX_POSITIONS)


def _engine_spec(
    checkpoint: Checkpoint,
    tenants: tuple[TenantConfig, ...],
    settings: DecoderSettings,
    prefixes: tuple[SharedPrefix, ...] = (),
    *,
    is_parkable: bool = False,
) -> EngineSpec:
    """Return the specification of the engine, with the lease's size.

    Raises the errors of `lease_bytes`, and RequestRejected for prefixes that can't be shared.
    """
    checkpoint = with_kv_dtype(checkpoint, settings.kv_dtype)
    positions = positions_of(checkpoint, settings)
    limits = StepLimits(settings.max_rows, settings.max_sequences, positions)
    # Without tenants, make one that may have all sequences, with blocks for a few sequences of full length.
    tenants = tenants or (_only_tenant(limits),)
    pools = [tenant.max_blocks for tenant in tenants]
    if settings.region_life_s is not None:
        pools.append(max(pools))  # While a tenant's sequences move, it has two regions.
    _check_prefixes(prefixes, checkpoint.config.vocabulary, positions, reuses=settings.reuses_prefixes)
    if (regions := len(tenants) + len(prefixes)) > MAX_REGIONS:
        raise RequestRejected(
            f"tenants and shared prefixes must be at most {MAX_REGIONS} together, the regions of a session, not"
            f" {regions}"
        )
    pools += [prefix.blocks for prefix in prefixes]
    size_bytes = lease_bytes(checkpoint, limits, pools, packed=settings.packed)
    return EngineSpec(
        checkpoint,
        limits,
        settings.packed,
        size_bytes,
        tenants,
        prefixes,
        settings.region_life_s,
        is_latency=settings.latency,
        is_parkable=is_parkable,
    )


def _check_prefixes(prefixes: Sequence[SharedPrefix], vocabulary: int, positions: int, *, reuses: bool) -> None:
    names = [prefix.name for prefix in prefixes]
    if len(set(names)) < len(names):
        raise RequestRejected(f"shared prefixes must have different names, not {', '.join(names)}")
    if prefixes and not reuses:
        raise RequestRejected("shared prefixes need reuses_prefixes, which is off", "Turn it on, or share none")
    for prefix in prefixes:
        # A prompt must have at least one token more than the prefix.
        if len(prefix.token_ids) >= positions:
            raise RequestRejected(
                f"prefix {prefix.name} must have fewer tokens than the {positions} positions of a sequence, not"
                f" {len(prefix.token_ids)}"
            )
        if not 0 <= min(prefix.token_ids) <= max(prefix.token_ids) < vocabulary:
            raise RequestRejected(f"tokens of prefix {prefix.name} must be 0 to {vocabulary - 1}")


def _check_known(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise RequestRejected with the parameter's name if one of the tokens is not in the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        out_of_range = next(token for token in tokens if not 0 <= token < vocabulary)
        raise RequestRejected(f"{name}: tokens must be 0 to {vocabulary - 1}, not {out_of_range}", parameter=name)


def _check_any_is_left(vocabulary: int, sampling: SamplingParameters, ends: frozenset[int]) -> None:
    """Raise RequestRejected for lists that leave no token to choose, regardless of earlier tokens."""
    banned = {word[-1] for word in sampling.bad_words} | (ends if sampling.min_tokens else set())
    allowed = set(sampling.allowed_token_ids)
    if not (allowed - banned if allowed else len(banned) < vocabulary):
        name = "allowed_token_ids" if allowed else "bad_words"
        text = "a token must be left that no bad word ends with, and that does not end the answer before min_tokens"
        raise RequestRejected(f"{name}: {text}", parameter=name)


def _only_tenant(limits: StepLimits) -> TenantConfig:
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
        reuses_prefixes=settings.reuses_prefixes,
        guided_rows=StepLimits(settings.max_rows, settings.max_sequences, positions).guided_rows,
        rebinds_at_once=settings.rebinds_at_once,
        rebind_interval_s=settings.rebind_interval_s,
        window=_window_of(config, positions),
    )


def _window_of(config: ModelConfig, positions: int) -> int | None:
    """Return the most positions that a row attends to in any layer; None if some layer has no window."""
    windows = [config.window(layer, positions) for layer in range(config.layers)]
    return max((window for window in windows if window is not None), default=None) if all(windows) else None
