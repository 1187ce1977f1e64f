"""Several models on one server. Each is a separate decoder, which is opened, parked and closed as needed.

`model_residency` decides, and this module executes its effects. Each model's decoder has its own lease, step loop and
text processes, so the load of one model delays no step of another.

    async with ModelPool(specs, limits).serving() as pool:
        async with pool.use("llama", wait_s=60) as use:
            generation = use.decoder.submit(...)
            use.hold([generation])
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.checkpoint import Checkpoint, open_model
from gpulease.client.decode.decode_errors import ModelRefusal, ModelRejected, ModelUnavailable, UnknownModel
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_reports import DecoderObserver, EngineRebuilt, FinishedRequest
from gpulease.client.decode.decode_requests import SharedPrefix, TenantConfig
from gpulease.client.decode.first_ended import first_ended
from gpulease.client.decode.scheduler.model_residency import (
    Admit,
    Effect,
    Load,
    ModelResidency,
    ModelState,
    ModelTerms,
    Park,
    Refuse,
    ResidencyLimits,
    Return,
    Unload,
)
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.decode_audit import ComputedBy, DecodeAudit
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings, engine_bytes, positions_of
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.model_texts import read_model_texts
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from gpulease.client.errors import Busy, CapacityExceeded, GpuLeaseError, InvalidRequest, Unsupported

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

STREAM_WAIT_S: Final = 600.0
"""Maximum seconds that a stream waits for its model. Comments keep the connection open meanwhile."""

PARK_TRIES: Final = 50
PARK_RETRY_S: Final = 0.02
"""Number of tries to park an engine that the daemon still considers busy or returning, and the seconds between two
tries."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of the server.

    Attributes:
        path: Its files.
        tenants: The tenants that may use it. Each gets a region.
        settings: Its decoder's settings.
        wait_s: Seconds that a request may wait for its admission, once the model is on the card.
        chat_tokens: Default maximum number of tokens of a chat's answer.
        prefixes: The prefixes that all of its tenants share.
        aliases: Its additional names in requests, which no other model may have.
        is_preloaded: Whether it is loaded at the start.
    """

    path: Path
    tenants: tuple[TenantConfig, ...]
    settings: DecoderSettings = DecoderSettings()  # it can't be changed
    wait_s: float = 30.0
    chat_tokens: int = 256
    prefixes: tuple[NamedPrefix, ...] = ()
    aliases: tuple[str, ...] = ()
    is_preloaded: bool = False

    def permits(self, tenant: str) -> bool:
        """Return whether a tenant may use the model."""
        return any(tenant == permitted.id for permitted in self.tenants)


class ModelUse:
    """One request's use of a model, which is not parked or unloaded until the block and all held sequences have ended.

    Attributes:
        model: The model's name.
        tenant: The tenant of the request.
        spec: The model's settings.
        decoder: The model's decoder.
    """

    def __init__(self, model: str, tenant: str, spec: ModelSpec, decoder: Decoder) -> None:
        self.model, self.tenant, self.spec, self.decoder = model, tenant, spec, decoder
        self.held: set[str] = set()
        self.is_finished = False

    def hold(self, generations: Iterable[Generation]) -> None:
        """Keep the model on the card until these sequences have ended, however slowly their callers read."""
        self.held |= {generation.request_id for generation in generations if not generation.is_ended}


class _Opened:
    """A model's decoder, from the start of its load until its end."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.decoder: Decoder | None = None
        self.task: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self.uses: dict[int, ModelUse] = {}


class _PoolFeed(DecoderObserver):
    """Passes the reports of one model's decoder to the pool."""

    def __init__(self, pool: "ModelPool", model: str, opened: _Opened) -> None:
        self._pool, self._model, self._opened = pool, model, opened

    def on_finished(self, report: FinishedRequest) -> None:
        """Release a use of the model if this was the last sequence that the use held."""
        for ticket, use in list(self._opened.uses.items()):
            use.held.discard(report.request_id)
            if use.is_finished and not use.held:
                self._pool.release(self._model, ticket)

    def on_engine_rebuilt(self, report: EngineRebuilt) -> None:
        self._pool.engine_reopened(self._model)


class ModelPool:
    """The models of one server.

    Attributes:
        log: Logs loads, parks and failures.
        residency: Decides where each model's memory is. Only the pool changes it.
        counts: By model and event ("load", "load_failed", "return", "park" or "unload"), how often it happened.
        seconds: How many seconds each model's last load took.
    """

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        limits: ResidencyLimits,
        *,
        address: str | None = None,
        observers: Callable[[str], Sequence[DecoderObserver]] = lambda _: (),
        is_audited: bool = False,
    ) -> None:
        """Prepare; `serving` opens the pool.

        Args:
            specs: The models by their names in requests.
            limits: Limits of memory, on the card and in the host, and of times.
            address: The daemon's or the fleet's address.
            observers: Returns the observers of a model's decoder.
            is_audited: Whether each finished request becomes a record of the daemon's audit log.
        """
        self.log = DecodeLog()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, float] = {}
        self._specs, self._limits, self._address = dict(specs), limits, address
        self._observers, self._is_audited = observers, is_audited
        self._opened: dict[str, _Opened] = {}
        # By ticket: the tenant of a request that waits for its model, and the future that receives the admission or
        # refusal.
        self._waiting: dict[int, tuple[str, asyncio.Future[Refuse | None]]] = {}
        self._tickets = count(1)
        # Caches, by model or path. Each value is stored with the state of the files and settings from which it was
        # made, and is valid until they change.
        self._computed_by: dict[str, tuple[object, ComputedBy]] = {}
        self._tokenizers: dict[Path, tuple[object, Tokenizer]] = {}
        self._shared: dict[str, tuple[object, tuple[SharedPrefix, ...]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks, self._loads = BackgroundTasks(), BackgroundTasks()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ModelPool"]:
        """Measure the models and begin to load the preloaded ones. The end of the block closes all of them.

        Raises InvalidRequest for a model that is larger than the card's memory for models.
        """
        terms = await self._terms_of(self._specs)
        with _refusing_large_models():
            self.residency = ModelResidency(self._limits, terms)
        # Load the libraries now, while there are no steps to delay. Otherwise the first request with a grammar would
        # load them.
        await asyncio.to_thread(self._load_libraries)
        self._apply(self.residency.start(time.monotonic()))
        try:
            yield self
        finally:
            await self._close()

    async def _close(self) -> None:
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        # Stop parks and returns, which need open decoders, and then close all decoders at the same time.
        await self._tasks.stop()
        for opened in self._opened.values():
            opened.stopping.set()
        for opened in self._opened.values():
            if opened.decoder is None and opened.task is not None:
                # A load may take minutes, and no request waits for it now.
                opened.task.cancel()
        await self._loads.finish()

    # --- queries ---

    @property
    def specs(self) -> Mapping[str, ModelSpec]:
        """The models by their names, since the last reload."""
        return self._specs

    @property
    def decoders(self) -> dict[str, Decoder]:
        """The open decoders, by the models' names, including those of parked models."""
        return {name: opened.decoder for name, opened in self._opened.items() if opened.decoder is not None}

    def name_of(self, requested: str) -> str:
        """Return the name of the model that has this alias; the same text if no model has it."""
        if requested in self._specs:
            return requested
        return next((name for name, spec in self._specs.items() if requested in spec.aliases), requested)

    def is_permitted(self, tenant: str, model: str) -> bool:
        """Return whether a model is served, and to this tenant."""
        spec = self._specs.get(model)
        return spec is not None and spec.permits(tenant)

    def state_of(self, model: str) -> ModelState:
        """Return where a model is; UNLOADED for a model that was just removed."""
        resident = self.residency.models.get(model)
        return ModelState.UNLOADED if resident is None else resident.state

    def report(self, model: str) -> dict[str, Any]:
        """Return the public part of a model's state, as a JSON object."""
        resident, decoder = self.residency.models.get(model), self.decoders.get(model)
        if resident is None:
            return {"state": ModelState.UNLOADED}
        fields: dict[str, Any] = {"state": resident.state, "memory_bytes": resident.terms.size_bytes}
        # Report only the class of an error. Its text is in the log, because it may contain paths.
        if resident.state is ModelState.FAILED:
            fields["reason"] = resident.reason
        if decoder is not None and resident.state is ModelState.LOADED and (outage := decoder.outage):
            fields["engine_lost"] = outage.report(time.monotonic(), time.time())
        return fields

    def request_counts(self, model: str, tenant: str | None) -> dict[str, int]:
        """Return how many requests wait for a model, and how many use it: a tenant's, or for None all tenants'."""
        resident, opened = self.residency.models.get(model), self._opened.get(model)
        if resident is None:
            return {"waiting": 0, "in_use": 0}
        if tenant is None:
            return {"waiting": len(resident.waiting), "in_use": len(resident.in_use)}
        waiting = [self._waiting[waiter.ticket][0] for waiter in resident.waiting if waiter.ticket in self._waiting]
        using = [] if opened is None else [use.tenant for use in opened.uses.values()]
        return {"waiting": waiting.count(tenant), "in_use": using.count(tenant)}

    def is_ready(self, model: str) -> bool:
        """Return whether a request would be served: the model has not failed, and its engine is not lost."""
        decoder, state = self.decoders.get(model), self.state_of(model)
        is_lost = state is ModelState.LOADED and decoder is not None and not decoder.is_serving
        return state is not ModelState.FAILED and not is_lost

    # --- requests ---

    @asynccontextmanager
    async def use(
        self, model: str, *, tenant: str, wait_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> AsyncIterator[ModelUse]:
        """Wait until a model is on the card, and keep it there until the block and everything that it holds has ended.

        Args:
            model: The model's name.
            tenant: The tenant, which must be a tenant of the model.
            wait_s: Maximum number of seconds to wait.
            on_wait: Called if the request has to wait for the model.

        Raises UnknownModel, and ModelUnavailable if the model does not get onto the card in time.
        """
        if not self.is_permitted(tenant, model):
            raise unknown_model(model)
        ticket, now = next(self._tickets), time.monotonic()
        admitted: asyncio.Future[Refuse | None] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = tenant, admitted
        self._apply(self.residency.request(ticket, model, now, now + wait_s))
        try:
            if not admitted.done():
                on_wait()
            if (refusal := await admitted) is not None:
                raise _error_of(refusal)
            opened = self._opened.get(model)
            if opened is None or opened.decoder is None:
                # The decoder has ended since it admitted the request.
                raise _error_of(Refuse(ticket, ModelRefusal.LOAD_FAILED, "EngineDecodeFailed"))
            if not opened.spec.permits(tenant):
                # While the request waited, a reload has removed the tenant's right to use the model.
                raise unknown_model(model)
        except BaseException:
            self._waiting.pop(ticket, None)
            self._apply(self.residency.release(ticket, time.monotonic()))
            raise
        use = opened.uses[ticket] = ModelUse(model, tenant, opened.spec, opened.decoder)
        try:
            yield use
        finally:
            use.is_finished = True
            if not use.held:
                self.release(model, ticket)

    def release(self, model: str, ticket: int) -> None:
        if (opened := self._opened.get(model)) is not None:
            opened.uses.pop(ticket, None)
        self._apply(self.residency.release(ticket, time.monotonic()))

    def engine_reopened(self, model: str) -> None:
        """Record that a model's decoder has opened another engine, on the card even if the old one was parked."""
        self._apply(self.residency.engine_reopened(model, time.monotonic()))

    # --- the operator ---

    def drain(self) -> None:
        """Refuse the requests that wait for a model, and all later ones. Requests in progress continue."""
        self._apply(self.residency.drain(time.monotonic()))

    async def change(self, specs: Mapping[str, ModelSpec]) -> None:
        """Serve these models from now on. `ModelResidency.change` describes what happens to the current ones.

        Raises InvalidRequest, and changes nothing, if a model is larger than the card's memory for models.
        """
        terms = await self._terms_of(specs)
        with _refusing_large_models():
            effects = self.residency.change(terms, time.monotonic())
        self._specs = dict(specs)
        paths = {spec.path for spec in specs.values()}
        self._tokenizers = {path: tokenizer for path, tokenizer in self._tokenizers.items() if path in paths}
        self._apply(effects)

    async def _terms_of(self, specs: Mapping[str, ModelSpec]) -> dict[str, ModelTerms]:
        return {name: await asyncio.to_thread(self._measure, name, spec) for name, spec in specs.items()}

    def _measure(self, name: str, spec: ModelSpec) -> ModelTerms:
        size = 0
        try:
            checkpoint = open_model(spec.path)
            # Compute the size before reading the tokenizer and the prefixes, so that a mistake in them does not hide
            # the size.
            size = engine_bytes(checkpoint, spec.tenants, spec.settings)
            if prefixes := self._read_texts(name, checkpoint, spec):
                size = engine_bytes(checkpoint, spec.tenants, spec.settings, prefixes)
        except GpuLeaseError as error:
            # Serve the other models. Requests for this one get the error of its load.
            self.log.failure("model_not_measured", error, model=name)
        # Regions with a fixed life are moved even without requests, so their session could not stay parked.
        is_parkable = spec.settings.region_life_s is None
        # The order of tenants and prefixes does not matter, so a changed order must not reload the model.
        tenants_and_prefixes = frozenset(spec.tenants), frozenset(spec.prefixes)
        version = spec.path, *tenants_and_prefixes, spec.settings, spec.wait_s, spec.chat_tokens
        return ModelTerms(size, is_parkable, spec.is_preloaded, version)

    def _read_texts(self, model: str, checkpoint: Checkpoint, spec: ModelSpec) -> tuple[SharedPrefix, ...]:
        """Return the tokens of a model's shared prefixes. Reads the tokenizer only if something has changed.

        Another process reads the tokenizer, so that the steps of other models continue. Raises ModelRejected, and
        TextProcessesFailed.
        """
        state = _state_of(spec.path)
        prefixes_state = state, spec.settings.positions, spec.prefixes
        is_known = self._tokenizers.get(spec.path, (None,))[0] == state
        known_state, shared = self._shared.get(model, (None, ()))
        if is_known and not spec.prefixes:
            return ()
        if not is_known or known_state != prefixes_state:
            texts = read_model_texts(spec.path, spec.prefixes, positions_of(checkpoint, spec.settings))
            shared = texts.prefixes
            self._shared[model] = prefixes_state, shared
            if not is_known:
                self._tokenizers[spec.path] = state, texts.tokenizer
        return shared

    def _load_libraries(self) -> None:
        for _, tokenizer in self._tokenizers.values():
            # The error is reported when the model is loaded.
            with suppress(ModelRejected):
                _ = tokenizer.library

    def _tokenizer_of(self, path: Path) -> "Tokenizer | None":
        """Return a model's tokenizer; None if its files have changed since it was read."""
        state, tokenizer = self._tokenizers.get(path, (None, None))
        return tokenizer if state == _state_of(path) else None

    # --- effects ---

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Admit(ticket):
                    self._settle(ticket, None)
                case Refuse(ticket):
                    self._settle(ticket, effect)
                case Load(model):
                    opened = self._opened[model] = _Opened(self._specs[model])
                    opened.task = self._loads.start(self._serve(model, opened))
                case Unload(model):
                    self._opened[model].stopping.set()
                case Park(model):
                    self._tasks.start(self._park(model))
                case Return(model):
                    self._tasks.start(self._return(model))
        self._set_timer()

    def _settle(self, ticket: int, refusal: Refuse | None) -> None:
        _, admitted = self._waiting.pop(ticket, ("", None))
        # Without an entry, the caller has given up, and `use` has released the ticket or is about to.
        if admitted is not None and not admitted.done():
            admitted.set_result(refusal)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, at = None, self.residency.next_deadline_s(time.monotonic())
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._apply(self.residency.tick(time.monotonic()))

    async def _serve(self, model: str, opened: _Opened) -> None:
        """Open a model's decoder, and close it when the model must be unloaded or the decoder has ended."""
        began, spec, is_loaded = time.monotonic(), opened.spec, False
        try:
            async with AsyncExitStack() as stack:
                checkpoint = await asyncio.to_thread(open_model, spec.path)
                # Close the checkpoint when the model is unloaded, not when the garbage collector finds the decoder.
                stack.callback(checkpoint.close)
                prefixes = await asyncio.to_thread(self._read_texts, model, checkpoint, spec)
                size = await asyncio.to_thread(engine_bytes, checkpoint, spec.tenants, spec.settings, prefixes)
                self._check_size(model, size)
                observers = [*self._observers(model), _PoolFeed(self, model, opened)]
                audit = None
                if self._is_audited:
                    audit = DecodeAudit(await self._by(model, checkpoint, spec))
                    observers.append(audit)
                decoder = await stack.enter_async_context(
                    Decoder.open(
                        checkpoint,
                        spec.tenants,
                        spec.settings,
                        address=self._address,
                        observers=observers,
                        prefixes=prefixes,
                        is_parkable=self.residency.models[model].terms.is_parkable,
                        tokenizer=self._tokenizer_of(spec.path),
                    )
                )
                if audit is not None:
                    await stack.enter_async_context(audit.writing(lambda: decoder.engine.lease))
                # Start the text processes now, so that the first request does not wait for them.
                await decoder.prompts.start()
                opened.decoder, is_loaded = decoder, True
                self.seconds[model] = time.monotonic() - began
                self.counts[model, "load"] += 1
                self.log.info("model_loaded", model=model, took_s=self.seconds[model])
                self._apply(self.residency.loaded(model, time.monotonic()))
                await first_ended(opened.stopping.wait(), decoder.wait_ended())
                if not opened.stopping.is_set():
                    # An internal error has ended the decoder. Its requests have raised it already.
                    self._apply(self.residency.ended(model, "EngineDecodeFailed", time.monotonic()))
        except Exception as error:
            if not is_loaded:
                self.counts[model, "load_failed"] += 1
                self.log.failure("model_load_failed", error, model=model)
                self._opened.pop(model, None)
                is_for_room = isinstance(error, CapacityExceeded)
                name = type(error).__name__
                self._apply(self.residency.load_failed(model, name, time.monotonic(), is_for_room=is_for_room))
                return
            # Only log errors of closing the decoder: its lease ends in any case, at its deadline at the latest.
            self.log.failure("model_not_closed", error, model=model)
        self._opened.pop(model, None)
        self.counts[model, "unload"] += 1
        self.log.info("model_unloaded", model=model)
        self._apply(self.residency.unloaded(model, time.monotonic()))

    def _check_size(self, model: str, size: int) -> None:
        """Raise ModelRejected if a model's memory differs from the size that the pool counted."""
        counted = self.residency.models[model].terms.size_bytes
        if size > counted:
            text = f"the files of model {model} take {size:,} bytes; {counted:,} were counted when they were last read"
            raise ModelRejected(text, "Reload the server's settings: send it SIGHUP")

    async def _by(self, model: str, checkpoint: Checkpoint, spec: ModelSpec) -> ComputedBy:
        # This reads all of the model's files, so do it only if the files or the settings have changed.
        packed, kv_dtype = spec.settings.packed, spec.settings.kv_dtype
        state = spec.path, packed, kv_dtype, _state_of(spec.path, has_weights=True)
        cached = self._computed_by.get(model)
        if cached is None or cached[0] != state:
            by = await ComputedBy.of(checkpoint, packed=packed, kv_dtype=kv_dtype, name=model)
            cached = self._computed_by[model] = state, by
        return cached[1]

    async def _park(self, model: str) -> None:
        decoder = self._opened[model].decoder
        assert decoder is not None
        try:
            for tries in range(PARK_TRIES):
                try:
                    await decoder.park()
                    break
                except Busy:
                    # The daemon may not have noticed yet that the last use has ended.
                    if tries == PARK_TRIES - 1:
                        raise
                    await asyncio.sleep(PARK_RETRY_S)
        except Exception as error:
            self.log.failure("model_not_parked", error, model=model)
            is_for_good = isinstance(error, Unsupported)
            self._apply(self.residency.park_failed(model, time.monotonic(), is_for_good=is_for_good))
            return
        self.counts[model, "park"] += 1
        self.log.info("model_parked", model=model)
        self._apply(self.residency.parked(model, time.monotonic()))

    async def _return(self, model: str) -> None:
        decoder = self._opened[model].decoder
        assert decoder is not None
        try:
            await decoder.unpark()
        except Exception as error:
            self.log.failure("model_not_returned", error, model=model)
            self._apply(self.residency.return_failed(model, time.monotonic()))
            return
        self.counts[model, "return"] += 1
        self.log.info("model_returned", model=model)
        self._apply(self.residency.returned(model, time.monotonic()))


def _state_of(path: Path, *, has_weights: bool = False) -> object:
    """Return the names, times and sizes of a model's files, which change if its tokenizer (or its weights) change."""
    # A GGUF file contains the tokenizer. In a folder, all files but the weights are JSON or templates.
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if not has_weights:
        files = [file for file in files if file.suffix != ".safetensors"]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]


@contextmanager
def _refusing_large_models() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(str(error), "Raise pool.memory, or give the model smaller limits") from None


def unknown_model(model: str) -> UnknownModel:
    """Return the error for a model that is unknown or that the tenant may not use: the same error for both."""
    return UnknownModel(f"Model {model!r} is not served here; GET /v1/models lists those that are.")


def _error_of(refusal: Refuse) -> GpuLeaseError:
    match refusal.reason:
        case ModelRefusal.UNKNOWN:
            return UnknownModel("The model is no longer served here; GET /v1/models lists those that are.")
        case ModelRefusal.QUEUE_FULL:
            text = "Too many requests are already waiting for the model; send this request again later."
        case ModelRefusal.WAITED_TOO_LONG:
            text = "The model is being loaded, or waits for room on the card; send the request again."
        case ModelRefusal.LOAD_FAILED:
            text = f"The model could not be loaded ({refusal.detail}); the server's log says why."
        case ModelRefusal.STOPPING:
            text = "The server is stopping. Send the request again."
    return ModelUnavailable(text, refusal.reason, refusal.retry_after_s)
