"""The page of a decode server: each tenant's rate, blocks and losses, and a button that ends its region.

    GET    /                                  the page, which contains no secret
    GET    /page/NAME                         its style and scripts
    GET    /page/events                       its state, several times a second (server-sent events)
    GET    /page/history                      the last hour
    DELETE /page/tenants/TENANT/region        ends a tenant's region, as the lease's tenant

State and actions require a key, as `Authorization: Bearer KEY`. The operator's key shows everything and may revoke; a
tenant's key shows that tenant alone, as if it were the server's only one. The page takes the key from its URL, after
`#key=`, a part that browsers never send. Texts are shown only for the demonstration's own requests; other requests are
only counted.
"""

import asyncio
import hmac
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gpulease.client import decode
from gpulease.client.decode.decode_errors import AdmissionReason, CompletionReason
from gpulease.client.decode.decode_reports import (
    DecoderObserver,
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    PrefixChange,
    PrefixChanged,
    PromptRefused,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.openai.api_keys import ApiKeys, bearer_digest
from gpulease.client.decode.page.demo_traffic import DemoTraffic
from gpulease.client.decode.page.page_events import EventKind, PageEvents
from gpulease.client.decode.page.page_history import PageHistory, TimeCounts, percentiles_of
from gpulease.client.decode.scheduler.tenant_state import TenantState
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.model_pool import ModelPool
from gpulease.client.errors import GpuLeaseError
from gpulease.client.http.event_stream import MEDIA_TYPE as EVENT_STREAM
from gpulease.client.http.event_stream import json_event

FILES: Final = {
    "page.css": "text/css; charset=utf-8",
    "history.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "tenants.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
}

POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'; require-trusted-types-for 'script'"
)
"""Content Security Policy Level 3 and Trusted Types: only the server's own scripts run, and texts never become
markup."""

HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

MAX_STREAMS: Final = 16
"""Maximum number of simultaneous streams of the operator, and as many again of all tenants together; one more is
refused. Each stream receives the state several times a second.
"""

MAX_TENANT_STREAMS: Final = 2
"""Maximum number of streams of one tenant at the same time."""

SNAPSHOT_S: Final = 0.25
"""Seconds between two states. All streams share one encoding, so a further stream costs only the sending."""

STREAM_S: Final = 10.0
"""Duration of one stream in seconds, after which its page opens another one. Short streams delay a server's stop only
briefly.
"""

RATE_S: Final = 2.0
"""Seconds over which rates are averaged."""

LATEST_REQUESTS: Final = 100
"""Number of a tenant's latest requests for which the page shows the times to the first token."""

LATEST_GAPS: Final = 200
"""Number of a tenant's latest steps for which the page shows the times between tokens."""

MAX_PREFIXES: Final = 64
"""Maximum number of shared prefixes that are shown. A prefix of several models counts once for each."""

MAX_TENANTS: Final = 64
"""Maximum number of tenants that are shown to the operator, in the order of the settings. Each one makes the state and
the page larger."""

MAX_HISTORIES: Final = 256
"""Maximum number of tenants with a separate history of the last hour, about 100 kB each. Other tenants see only their
present figures.
"""

REVOKED_BY: Final = "revoked on the decode server's page"
"""The reason for a revocation, as it appears in the audit log and in the tenant's error."""

RETRY_S: Final = 5


class PageFeed(DecoderObserver):
    """The state that the page shows, collected from a decoder's reports.

    Args:
        decoder: Returns the decoder; None while there is none.
        model: The model's name in requests.
        demo: Returns the demonstration's traffic; None if there is none.
        clock: Monotonic seconds.
        pool: On a server with several models, returns their pool instead of a decoder.
    """

    def __init__(
        self,
        decoder: Callable[[], Decoder | None],
        model: str,
        demo: Callable[[], DemoTraffic | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        pool: Callable[[], ModelPool | None] = lambda: None,
    ) -> None:
        self._decoder, self._demo, self._clock, self._pool = decoder, demo, clock, pool
        self._model, self._host = model, socket.gethostname()
        self._steps = 0
        self._tokens = Counter[str]()
        self._rebinds = Counter[str]()
        self._latency_s: dict[str, float] = {}
        self._refused = dict[str, Counter[str]]()
        self._first_tokens = dict[str, TimeCounts]()
        self._gaps = dict[str, TimeCounts]()
        self._events = PageEvents()
        self._began_at = clock()
        self._history = PageHistory(self._began_at)
        self._histories = dict[str, PageHistory]()
        # Token counts at the last polls, from which rates are computed.
        self._samples = deque[tuple[float, Counter[str]]]()

    def on_step(self, report: StepReport) -> None:
        self._steps += 1
        tokens, now = Counter([request.tenant_id for request in report.tokens.requests]), self._clock()
        self._tokens.update(tokens)
        self._history.add_tokens(now, len(report.tokens))
        for tenant_id, count in tokens.items():
            if (history := self._history_of(tenant_id)) is not None:
                history.add_tokens(now, count)

    def on_gap(self, tenant_id: str, seconds: float, count: int) -> None:
        """Note `count` times of `seconds` between two tokens of a tenant's sequences. The metrics measure these."""
        now = self._clock()
        _counts_of(self._gaps, tenant_id, LATEST_GAPS).add(seconds, count)
        for history in self._histories_with(tenant_id):
            history.add_gaps(now, seconds, count)

    def on_forward_revoked(self, report: ForwardRevoked) -> None:
        """Add the event of a step that did not begin."""
        seconds = report.flip_to_report_s or 0.0
        self._events.add(self._clock(), report.tenant_id, EventKind.STEP_REFUSED, seconds=seconds)

    def on_rebind(self, report: RebindReport) -> None:
        """Add the event of a request that continues after a loss."""
        tenant_id, latency_s = report.tenant_id, report.latency_s
        self._rebinds[tenant_id] += 1
        self._latency_s[tenant_id] = latency_s
        lost = "the engine" if report.is_engine_scoped else "its region"
        kind, tokens = EventKind.REPLAYED, report.prompt_tokens
        self._events.add(self._clock(), tenant_id, kind, seconds=latency_s, tokens=tokens, detail=lost)

    def on_finished(self, report: FinishedRequest) -> None:
        """Count a refusal, and note the time to the first token."""
        now, tenant_id = self._clock(), report.tenant_id
        if report.first_token_at is not None:
            seconds = report.first_token_at - report.submitted_at
            _counts_of(self._first_tokens, tenant_id, LATEST_REQUESTS).add(seconds)
            for history in self._histories_with(tenant_id):
                history.add_first_token(now, seconds)
        # A request that waited too long counts as refused, as it does if the queue is full.
        if isinstance(report.reason, AdmissionReason) or report.reason is CompletionReason.DEADLINE_EXCEEDED:
            self._add_refusal(tenant_id, report.reason.value, report.detail)

    def on_prompt_refused(self, report: PromptRefused) -> None:
        """Count a request that was refused before it had tokens."""
        # All other errors concern the request's texts, which the page does not show.
        is_of_limits = report.reason in {reason.value for reason in AdmissionReason}
        self._add_refusal(report.tenant_id, report.reason, report.detail if is_of_limits else "")

    def _add_refusal(self, tenant_id: str, kind: str, detail: str) -> None:
        """Show a refusal as a count, in the chart, and as an event with the reason."""
        now = self._clock()
        self._refused.setdefault(tenant_id, Counter())[kind] += 1
        for history in self._histories_with(tenant_id):
            history.add_refusal(now, kind)
        self._events.add(now, tenant_id, EventKind.REFUSED, detail=detail or kind)

    def _histories_with(self, tenant_id: str) -> list[PageHistory]:
        """Return the server's history, and the tenant's if it has one."""
        own = self._history_of(tenant_id)
        return [self._history] if own is None else [self._history, own]

    def _history_of(self, tenant_id: str) -> PageHistory | None:
        history = self._histories.get(tenant_id)
        if history is None and len(self._histories) < MAX_HISTORIES:
            history = self._histories[tenant_id] = PageHistory(self._began_at)
        return history

    def on_engine_rebuilt(self, report: EngineRebuilt) -> None:
        """Add an event: the move to another engine, or the loss of an engine and its end."""
        kind = EventKind.ENGINE_MOVED if report.is_planned else EventKind.ENGINE_LOST
        self._events.add(self._clock(), "", kind, seconds=report.took_s, detail=report.cause)

    def on_prefix_changed(self, report: PrefixChanged) -> None:
        """Add an event: the end of a shared prefix, or its return.

        The first load of a prefix adds no event, because every prefix has one.
        """
        kinds = {PrefixChange.REBUILD: EventKind.PREFIX_REBUILT, PrefixChange.END: EventKind.PREFIX_ENDED}
        if kind := kinds.get(report.change):
            self._events.add(self._clock(), report.name, kind, detail=report.detail)

    def revoked_here(self, tenant_id: str) -> None:
        """Add the event of a revocation by the page's button."""
        self._events.add(self._clock(), tenant_id, EventKind.REVOKED_HERE)

    def history(self, viewer: str | None = None) -> dict[str, Any]:
        """Return the last hour, which the page draws, as a JSON object: the server's, or a tenant's own."""
        history = self._history if viewer is None else self._history_of(viewer)
        # A tenant without a history gets an empty one.
        return (history or PageHistory(self._clock())).shown(self._clock())

    def state(self, viewer: str | None = None) -> dict[str, Any]:
        """Return the state that the page draws, as a JSON object: all of it, or the part that a tenant may see."""
        demo, pool, now = self._demo(), self._pool(), self._clock()
        # Until a decoder has opened, the page shows no tenants. With many models, it shows each tenant's sums.
        decoders = self.decoders()
        tenants: dict[str, list[TenantState]] = {}
        for decoder in decoders:
            for tenant_id, state in decoder.scheduler.tenants.items():
                tenants.setdefault(tenant_id, []).append(state)
        rates = self._rates(now)
        texts = {} if demo is None else demo.texts
        shown = []
        visible = list(tenants)[:MAX_TENANTS] if viewer is None else [viewer] if viewer in tenants else []
        for tenant_id in visible:
            text = texts.get(tenant_id)
            # Show only the demonstration's texts: the texts of other requests belong to their callers.
            counters = {"text": None} if text is None else {"text": text.text, "replays": text.replays}
            shown.append(self._tenant(tenant_id, tenants[tenant_id], rates.get(tenant_id, 0.0)) | counters)
        served = {} if pool is None else pool.specs
        is_seen = viewer is None
        counted = self._refused.values() if is_seen else [self._refused.get(viewer or "", Counter())]
        refused = sum(counted, Counter[str]())
        return {
            "viewer": viewer,
            "model": self._model,
            "host": self._host if is_seen else "",
            "serving": pool is not None or any(decoder.is_serving for decoder in decoders),
            "models": [
                {"id": name, **({} if pool is None else pool.report(name) | pool.request_counts(name, viewer))}
                for name, spec in served.items()
                if viewer is None or spec.permits(viewer)
            ],
            # How much a prefix is used would reveal the work of other tenants.
            "prefixes": self._prefixes() if is_seen else [],
            "steps": self._steps if is_seen else None,
            "tokens_s": round(sum(rates.values()) if is_seen else rates.get(viewer or "", 0.0), 1),
            "waiting": sum(tenant["waiting"] for tenant in shown),
            "live": sum(tenant["live"] for tenant in shown),
            "refused": refused.total(),
            "tenants": shown,
            "events": self._events.shown(now, viewer),
        }

    def decoders(self) -> list[Decoder]:
        """Return the open decoders: the only model's, or the pool's."""
        return list(self._decoders_by_model().values())

    def _decoders_by_model(self) -> dict[str, Decoder]:
        if (pool := self._pool()) is not None:
            return pool.decoders
        decoder = self._decoder()
        return {} if decoder is None else {self._model: decoder}

    def _prefixes(self) -> list[dict[str, Any]]:
        """Return the shared prefixes of all models that are open."""
        prefixes = [
            {"model": model, **asdict(prefix)}
            for model, decoder in self._decoders_by_model().items()
            for prefix in decoder.prefixes
        ]
        return prefixes[:MAX_PREFIXES]

    def _tenant(self, tenant_id: str, states: Sequence[TenantState], rate: float) -> dict[str, Any]:
        latency_s = self._latency_s.get(tenant_id)
        return {
            "id": tenant_id,
            "tokens": self._tokens[tenant_id],
            "tokens_s": round(rate, 1),
            "gpu_s": round(sum(state.gpu_s for state in states), 1),
            "live": sum(len(state.live) for state in states),
            "waiting": sum(len(state.waiting) for state in states),
            "blocks": sum(state.region_blocks for state in states),
            "blocks_used": sum(state.blocks.used for state in states),
            "blocks_at_most": sum(state.config.max_blocks for state in states),
            "first_token_ms": percentiles_of(self._first_tokens.get(tenant_id, TimeCounts())),
            "gap_ms": percentiles_of(self._gaps.get(tenant_id, TimeCounts())),
            "refused": dict(self._refused.get(tenant_id, Counter()).most_common()),
            "rebinds": self._rebinds[tenant_id],
            "rebind_ms": None if latency_s is None else round(latency_s * 1e3, 1),
        }

    def _rates(self, now: float) -> dict[str, float]:
        """Return each tenant's tokens per second over the last RATE_S, or since the page was first polled."""
        samples = self._samples
        # A sample per poll, not per step: without an open page, rates cost nothing.
        samples.append((now, Counter(self._tokens)))
        while now - samples[0][0] > RATE_S + SNAPSHOT_S:
            samples.popleft()
        before, counts = samples[0]
        return {
            name: (count - counts[name]) / (now - before) if now > before else 0.0
            for name, count in self._tokens.items()
        }


def _counts_of(counts: dict[str, TimeCounts], tenant_id: str, latest: int) -> TimeCounts:
    """Return a tenant's latest times. Creates them only if they are missing, because every step calls this."""
    times = counts.get(tenant_id)
    if times is None:
        times = counts[tenant_id] = TimeCounts(latest)
    return times


class _PageStream(StreamingResponse):
    """A streamed answer that calls `on_end` when it is over, even before its first bytes."""

    def __init__(self, content: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(content, headers=HEADERS, media_type=EVENT_STREAM)
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class DecodePage:
    """The page's answers. The decoder must have `observer` as an observer.

    Args:
        decoder: Returns the decoder; None while there is none.
        operator_digest: The sha256 of the operator's key.
        model: The model's name in requests; for many, any text.
        keys: The keys of tenants, each of which may see its own part.
        demo: Returns the demonstration's traffic; None if there is none.
        pool: On a server with several models, returns their pool instead of a decoder.

    Attributes:
        observer: The observer that the decoder must call; `on_gap` receives the times that the metrics measure.
    """

    def __init__(
        self,
        decoder: Callable[[], Decoder | None],
        operator_digest: bytes,
        model: str,
        keys: ApiKeys,
        demo: Callable[[], DemoTraffic | None] = lambda: None,
        pool: Callable[[], ModelPool | None] = lambda: None,
    ) -> None:
        self.observer = PageFeed(decoder, model, demo, pool=pool)
        self._digest, self._keys = operator_digest, keys
        # By tenant, with None for the operator: the number of open streams, and the latest state as an event with its
        # time.
        self._streams = Counter[str | None]()
        self._encoded: dict[str | None, tuple[float, bytes]] = {}
        folder = files(decode).joinpath("page")
        # Read once: the files are part of the package, and only these names are ever served.
        self._index = folder.joinpath("index.html").read_bytes()
        self._files = {name: folder.joinpath(name).read_bytes() for name in FILES}

    def routes(self) -> list[Route]:
        """Return the routes, for the server's application behind its guard."""
        return [
            Route("/", self._show, methods=["GET"]),
            Route("/page/events", self._events, methods=["GET"]),
            Route("/page/history", self._history, methods=["GET"]),
            Route("/page/tenants/{tenant}/region", self._revoke, methods=["DELETE"]),
            Route("/page/{name}", self._file, methods=["GET"]),
        ]

    async def _show(self, _: Request) -> Response:
        return Response(self._index, headers=HEADERS, media_type="text/html; charset=utf-8")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], headers=HEADERS, media_type=FILES[name])

    async def _events(self, request: Request) -> Response:
        if isinstance(viewer := self._viewer(request), Response):
            return viewer
        if self._is_full(viewer):
            text = f"{self._streams[viewer]} of these pages are open, the maximum."
            return _problem(503, text, {"Retry-After": str(RETRY_S)})
        if request.method == "HEAD":
            return Response(headers=HEADERS, media_type=EVENT_STREAM)
        # Count the stream here, not at its first bytes: several requests may arrive before the first stream runs.
        self._streams[viewer] += 1
        return _PageStream(self._stream(viewer), lambda: self._on_stream_end(viewer))

    def _is_full(self, viewer: str | None) -> bool:
        if viewer is None:
            return self._streams[None] >= MAX_STREAMS
        # Tenants can't use up the operator's streams, and one tenant can't use up the streams of all tenants.
        of_tenants = self._streams.total() - self._streams[None]
        return self._streams[viewer] >= MAX_TENANT_STREAMS or of_tenants >= MAX_STREAMS

    async def _history(self, request: Request) -> Response:
        if isinstance(viewer := self._viewer(request), Response):
            return viewer
        return JSONResponse(self.observer.history(viewer), headers=HEADERS)

    def _on_stream_end(self, viewer: str | None) -> None:
        self._streams[viewer] -= 1
        if not self._streams[viewer]:
            del self._streams[viewer]
            self._encoded.pop(viewer, None)

    async def _stream(self, viewer: str | None) -> AsyncIterator[bytes]:
        """Yield states as events (HTML, 9.2).

        A slow reader gets fewer states, because each waits until the previous one was sent.
        """
        deadline_s = time.monotonic() + STREAM_S
        while time.monotonic() < deadline_s:
            yield self._event(viewer)
            await asyncio.sleep(SNAPSHOT_S)

    def _event(self, viewer: str | None) -> bytes:
        at, encoded = self._encoded.get(viewer, (float("-inf"), b""))
        now = time.monotonic()
        # Encode once for all streams of a viewer that poll in the same interval.
        if now - at >= SNAPSHOT_S / 2:
            encoded = json_event(self.observer.state(viewer))
            self._encoded[viewer] = now, encoded
        return encoded

    async def _revoke(self, request: Request) -> Response:
        if isinstance(viewer := self._viewer(request), Response):
            return viewer
        if viewer is not None:
            return _problem(403, "Only the operator may revoke a region.")
        tenant_id = request.path_params["tenant"]
        decoders = [decoder for decoder in self.observer.decoders() if tenant_id in decoder.scheduler.tenants]
        if not decoders:
            return _problem(404, "This tenant does not exist.")
        # With many models, each model has a region of the tenant. Between two regions there is nothing to revoke.
        pools = [pool for decoder in decoders if (pool := decoder.regions.pools.get(tenant_id)) is not None]
        if not pools:
            return _problem(409, "The tenant has no region now, because another one is being opened.")
        try:
            for pool in pools:
                await pool.region.revoke(REVOKED_BY)
        except GpuLeaseError as error:
            return _problem(409, f"Not revoked: {error}")
        self.observer.revoked_here(tenant_id)
        lease_ids = ", ".join(f"{pool.region.lease_id:032x}" for pool in pools)
        return JSONResponse({"tenant": tenant_id, "region": lease_ids}, headers=HEADERS)

    def _viewer(self, request: Request) -> str | Response | None:
        """Return the tenant of the request's key, None for the operator's key, or the refusal of any other."""
        authorization = request.headers.get("authorization", "")
        digest = bearer_digest(authorization)
        # Digests are compared in constant time, like tenants' keys.
        if digest is not None and hmac.compare_digest(digest, self._digest):
            return None
        tenant_id = self._keys.tenant(authorization)
        if tenant_id is not None:
            return tenant_id
        return _problem(401, "This requires the operator's key, or a tenant's.", {"WWW-Authenticate": "Bearer"})


def _problem(status: int, text: str, headers: MutableMapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": text}, status, HEADERS | dict(headers or {}))
