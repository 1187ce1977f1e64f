"""The models of a server, and the search for the model that a request names. This module does not depend on HTTP.

`OneModel` is a server with one model, which is always loaded. `ManyModels` has a pool of models. The pool loads a
request's model onto the card before the request continues.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from gpulease.client.decode.decode_errors import AdmissionReason, AdmissionRefused, decoder_closed
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_requests import TenantConfig
from gpulease.client.decode.openai.api_errors import invalid
from gpulease.client.decode.openai.completion_intake import DecoderSource, SubmissionPlace, Submitted
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.model_pool import STREAM_WAIT_S, ModelPool, ModelUse, unknown_model
from gpulease.client.texts import parse_problem

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

DEFAULT_LOAD_WAIT_S: Final = 60.0
"""Default for the longest time that a request without a stream waits for its model. Many proxies close a connection
that is silent for this long."""


class RequestPlace(Protocol):
    """A tenant's place for one request, from before the request's body is read until the block of `place` ends."""

    async def source(
        self, body: bytes, on_loading: Callable[[], None] = lambda: None, route: "Route | None" = None
    ) -> DecoderSource:
        """Return the source for the model that a body names, and keep the model on the card until the block ends.

        If the model is not on the card, wait for it. `on_loading` is then called if the request is for a stream.

        Args:
            body: The body.
            on_loading: Called at most once.
            route: The result of `route_of` for the body, if another process has called it.

        Raises UnknownModel, ModelUnavailable, AdmissionRefused, or ApiError for a body that is not JSON.
        """

    def hold(self, generations: Sequence[Generation]) -> None:
        """Keep the model on the card even after the block, until these sequences have ended."""

    def path(self) -> str:
        """Return the path of the model that `source` found, as it was then, even if a reload has changed it."""


class ServedModels(Protocol):
    """The models of a server.

    Attributes:
        log: Logs requests that failed.
    """

    log: DecodeLog

    def has_tenant(self, tenant: str) -> bool: ...

    def place(self, tenant: str) -> AbstractAsyncContextManager[RequestPlace]:
        """Take a place for a request before its body is read. Raises AdmissionRefused if the tenant has none left."""

    def described(self, tenant: str) -> list[dict[str, Any]]:
        """Return a description of each model that a tenant may use: its `id`, and whatever else is known."""

    async def tokenizer(self, model: str) -> "Tokenizer":
        """Return the tokenizer of a model for which a request was submitted."""


class OneModel:
    """A server with one model.

    Args:
        decoder: The decoder, which must stay open.
        source: Computes its requests.
        path: The path of its files; "" if no front needs it.
    """

    def __init__(self, decoder: Decoder, source: DecoderSource, path: str = "") -> None:
        self.log = decoder.log
        self._decoder, self._source, self._path = decoder, source, path

    def has_tenant(self, tenant: str) -> bool:
        return self._source.has_tenant(tenant)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[RequestPlace]:
        with self._source.place(tenant):
            yield _SingleModelPlace(self._source, self._path)

    def described(self, tenant: str) -> list[dict[str, Any]]:
        return _by_names(self._source.names, {"max_model_len": self._source.room(tenant)})

    async def tokenizer(self, model: str) -> "Tokenizer":
        return await self._decoder.tokenizer()


class _SingleModelPlace:
    def __init__(self, source: DecoderSource, path: str) -> None:
        self._source, self._path = source, path

    async def source(
        self, body: bytes, on_loading: Callable[[], None] = lambda: None, route: "Route | None" = None
    ) -> DecoderSource:
        # The process that parses the body checks the model's name.
        return self._source

    def hold(self, generations: Sequence[Generation]) -> None:
        """Do nothing: the only model is loaded for as long as the server runs."""

    def path(self) -> str:
        return self._path


class ManyModels:
    """A server with a pool of models.

    Args:
        pool: The pool, which must stay open.
        tenants: All tenants with their limits. Each limit applies to each model separately, and also to all requests
            together whose model is not yet on the card.
        load_wait_s: Seconds that a request without a stream waits for its model.
    """

    def __init__(self, pool: ModelPool, tenants: Sequence[TenantConfig], load_wait_s: float) -> None:
        self.log = pool.log
        self._pool, self.load_wait_s = pool, load_wait_s
        self._tenants = {tenant.id: tenant for tenant in tenants}
        # By tenant: the number of requests that wait for the rest of their bodies, or for their models to be loaded.
        self.coming: Counter[str] = Counter()

    def has_tenant(self, tenant: str) -> bool:
        return tenant in self._tenants

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[RequestPlace]:
        async with AsyncExitStack() as stack:
            coming = stack.enter_context(self._coming(tenant))
            yield _RoutedPlace(self._pool, tenant, self.load_wait_s, stack, coming)

    @contextmanager
    def _coming(self, tenant: str) -> Iterator[Callable[[], None]]:
        """Count a request until the block ends, or until the yielded function is called, which may be called twice.

        Raises AdmissionRefused.
        """
        config, is_counted = self._tenants[tenant], True
        if self.coming[tenant] >= config.max_concurrent + config.max_waiting:
            waiting = f"{self.coming[tenant]} of its requests are already waiting"
            detail = f"tenant {tenant}: {waiting}; send this request again later"
            raise AdmissionRefused(AdmissionReason.QUOTA_EXCEEDED, detail, None)

        def release() -> None:
            nonlocal is_counted
            self.coming[tenant] -= is_counted
            is_counted = False

        self.coming[tenant] += 1
        try:
            yield release
        finally:
            release()

    def described(self, tenant: str) -> list[dict[str, Any]]:
        return [
            described
            for name, spec in self._pool.specs.items()
            if self._pool.is_permitted(tenant, name)
            for described in _by_names(
                (name, *spec.aliases),
                {"gpulease": self._pool.report(name) | self._pool.request_counts(name, tenant)}
                | self._length_of(name, tenant),
            )
        ]

    def _length_of(self, model: str, tenant: str) -> dict[str, int]:
        decoder, spec = self._pool.decoders.get(model), self._pool.specs[model]
        # The context length is unknown while the model has no open decoder, or its decoder does not have this tenant.
        if decoder is None or not DecoderSource(decoder, model, spec.wait_s, spec.chat_tokens).has_tenant(tenant):
            return {}
        return {"max_model_len": DecoderSource(decoder, model, spec.wait_s, spec.chat_tokens).room(tenant)}

    async def tokenizer(self, model: str) -> "Tokenizer":
        decoder = self._pool.decoders.get(model)
        if decoder is None:
            # An internal error ended the decoder after the request was submitted.
            raise decoder_closed()
        return await decoder.tokenizer()


class _RoutedPlace:
    def __init__(
        self, pool: ModelPool, tenant: str, wait_s: float, stack: AsyncExitStack, release: Callable[[], None]
    ) -> None:
        self._pool, self._tenant, self._wait_s = pool, tenant, wait_s
        self._stack, self._release = stack, release
        self._use: ModelUse | None = None

    async def source(
        self, body: bytes, on_loading: Callable[[], None] = lambda: None, route: "Route | None" = None
    ) -> DecoderSource:
        route = route or route_of(body)
        if not route.model:
            raise invalid("you must provide a model parameter", "model", "missing_model")
        # Before waiting, refuse a name that is unknown or that this tenant may not use.
        model = self._pool.name_of(route.model)
        if not self._pool.is_permitted(self._tenant, model):
            raise unknown_model(route.model)
        is_stream = bool(route.stream)
        using = self._pool.use(
            model,
            tenant=self._tenant,
            wait_s=STREAM_WAIT_S if is_stream else self._wait_s,
            on_wait=on_loading if is_stream else lambda: None,
        )
        use = self._use = await self._stack.enter_async_context(using)
        # Accept the name in the request, because a reload may have changed the model's names since the model was
        # loaded.
        source = DecoderSource(use.decoder, use.model, use.spec.wait_s, use.spec.chat_tokens, (route.model,))
        # From here on, the decoder counts the request.
        self._stack.enter_context(source.place(self._tenant))
        self._release()
        return source

    def hold(self, generations: Sequence[Generation]) -> None:
        if self._use is not None:
            self._use.hold(generations)

    def path(self) -> str:
        return "" if self._use is None else str(self._use.spec.path.resolve())


def _by_names(names: Sequence[str], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one description for each name of a model. For an alias, `root` is the model's own name."""
    name, *aliases = names
    return [{"id": name, **fields}, *({"id": alias, "root": name, **fields} for alias in aliases)]


class Route(msgspec.Struct):
    """The members of a body that are needed to find the model. Another process parses the rest.

    Attributes:
        model: The model's name; None if the body has none.
        stream: Whether the request is for a stream; None if the body does not say.
    """

    model: str | None = None
    stream: bool | None = None


_ROUTES: Final = msgspec.json.Decoder(Route)


def route_of(body: bytes) -> Route:
    """Return the route of a body. Raises ApiError if the body is not a JSON object with members of these types.

    This creates no objects for other members, so 4 MiB take about 10 ms. The module json would take up to 500 ms.
    """
    try:
        return _ROUTES.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(f"the body is not a request: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {parse_problem(error)}", code="invalid_json") from None


class DirectSource:
    """A CompletionSource in the decoders' process.

    Args:
        models: The server's models.
    """

    def __init__(self, models: ServedModels) -> None:
        self.log, self._models = models.log, models

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[SubmissionPlace]:
        async with self._models.place(tenant) as place:
            yield _DirectPlace(tenant, place)

    async def tokenizer(self, model: str) -> "Tokenizer":
        return await self._models.tokenizer(model)


class _DirectPlace:
    def __init__(self, tenant: str, place: RequestPlace) -> None:
        self._tenant, self._place = tenant, place

    async def begin(
        self, body: bytes, request_id: str, *, is_chat: bool, on_loading: Callable[[], None] = lambda: None
    ) -> Submitted:
        source = await self._place.source(body, on_loading)
        answer = await source.read(self._tenant, body, is_chat=is_chat)
        submitted = await source.submit(self._tenant, request_id, answer, is_chat=is_chat)
        self._place.hold(submitted.generations)
        return submitted
