"""The web process's responses: the page, its state and event stream, health, metrics, and an operator's actions."""

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gpulease.daemon import web
from gpulease.daemon.web.broker_link import ActionNotDone, BrokerChannel, BrokerSilent
from gpulease.daemon.web.guard import (
    CARD_DRAINS,
    DRAIN,
    FENCES,
    LEASES,
    REMOVING,
    SETTING,
    App,
    Guard,
    Receive,
    Scope,
    Send,
    WrongTokens,
)
from gpulease.daemon.web.load_samples import Loads
from gpulease.daemon.web.page_state import Feed
from gpulease.daemon.web.view import Pseudonyms, Snapshot, view_of
from gpulease.daemon.web.web_messages import MAX_REASON_CHARS, WebRefusal
from gpulease.protocol.messages import Empty, Ping
from gpulease.protocol.opcodes import Opcode, RevokeOutcome
from gpulease.protocol.time_units import MS_PER_S

SCRIPTS: Final = (
    "page.js",
    "format.js",
    "elements.js",
    "colours.js",
    "cards.js",
    "plots.js",
    "events.js",
    "fleet.js",
    "stream.js",
    "actions.js",
)

FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
} | {f"/{name}": (name, "text/javascript; charset=utf-8") for name in SCRIPTS}

MAX_STREAMS: Final = 24
"""Maximum number of open event streams. Each receives the whole state every second."""

OPERATORS_STREAMS: Final = 8
"""Number of additional streams that need the operator's token, so that other local users can't lock operators out."""

STATE_FRESH_S: Final = 0.1
"""Seconds for which an encoded state is reused. The ages in it are wrong by at most this time."""

HISTORY_FRESH_S: Final = 1.0
"""Seconds for which the encoded history of the cards is reused. A sample is added to it every ten seconds."""

STREAM_S: Final = 600.0
"""Maximum duration of a stream in seconds. The page then opens another one. So a stream whose reader has disappeared
ends.
"""

QUIET_S: Final = 3.0
"""Seconds after which a stream without a snapshot sends a comment, to show the page that the stream is alive."""

RETRY_S: Final = 5

REASON: Final = "revoked by the operator"
"""The reason that the tenant receives if the operator gave none."""

OUTCOMES: Final = {
    RevokeOutcome.TORN_DOWN: "torndown",
    RevokeOutcome.FENCED: "fenced",
    RevokeOutcome.NOT_FOUND: "notfound",
}
"""The outcomes of a revocation, in the words of `gpulease revoke --json`."""

STATUS_OF: Final = {
    WebRefusal.WRONG_TOKEN: 401,
    WebRefusal.TOO_MANY: 429,
    WebRefusal.DENIED: 409,
    WebRefusal.FAILED: 500,
}

MAX_WITHIN_S: Final = 4_294_967
"""Maximum time of a drain in seconds: 49 days, the most that the protocol's DRAIN can express."""

_LEASE_ID: Final = re.compile("[0-9a-f]{32}")
_CARD: Final = re.compile("[A-Za-z0-9-]{1,64}")
_SECONDS: Final = re.compile(r"[0-9]{1,7}(\.[0-9]{1,3})?")


class PageAccess:
    """Checks the operator's token. Only requests with the token get tenants' names and may act.

    For actions, the broker checks the token again.

    Args:
        token_digest: The SHA-256 of the operator's token; b"" if there is none.

    Attributes:
        changes: Number of times that the token has changed.
    """

    def __init__(self, token_digest: bytes) -> None:
        self.changes = 0
        self._token_digest = token_digest
        self._wrong_tokens = WrongTokens()

    def change(self, token_digest: bytes) -> None:
        """Accept another token from now on, and end the streams that were opened with the old token."""
        self.changes += 1
        self._token_digest = token_digest

    def is_operator(self, request: Request) -> bool:
        """Return whether the request has the token. Raises HTTPException, 401, for a wrong token."""
        return "authorization" in request.headers and bool(self.token_of(request))

    def token_of(self, request: Request) -> bytes:
        """Return the operator's token. Raises HTTPException, 401, if the request has none or a wrong one."""
        # RFC 6750, 2.1: `Authorization: Bearer TOKEN`. Compare digests in constant time, so that the time of a response
        # does not show how much of a token was right.
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        token = text.strip().encode("latin-1")
        digest = hashlib.sha256(token).digest()
        if self._token_digest and scheme.lower() == "bearer" and hmac.compare_digest(digest, self._token_digest):
            return token
        # A request without a token is not an attempt.
        if scheme and self._token_digest:
            self._wrong_tokens.add()
        reason = "This is not the operator's token." if scheme else "This request needs the operator's token."
        reason = reason if self._token_digest else "This daemon has no http_token_file."
        raise HTTPException(401, reason, {"WWW-Authenticate": "Bearer"})


class _Stream(StreamingResponse):
    """A streamed response that calls `on_end` when it ends, even if it ends before its first bytes."""

    def __init__(self, content: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


Page = Mapping[str, tuple[bytes, str]]
"""Content and media type, by path."""


def load_page() -> Page:
    """Read the page's files now, because the sandbox will hide them."""
    folder = files(web).joinpath("page")
    return {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}


class Site:
    """The handlers of all paths that the web process serves."""

    def __init__(
        self,
        feed: Feed,
        access: PageAccess,
        pseudonyms: Pseudonyms,
        page: Page,
        broker: BrokerChannel,
        loads: Loads,
    ) -> None:
        self._feed = feed
        self._access = access
        self._broker = broker
        self._loads = loads
        self._history: tuple[float, bytes] = 0.0, b""
        self._pseudonyms = pseudonyms
        self._health = HealthPage(feed.ask)
        self._metrics = MetricsPage(feed.ask, pseudonyms)
        self._streams = 0
        self._encodings: dict[bool, tuple[Snapshot, float, bytes]] = {}
        self._page = page

    def app(self, hosts: frozenset[str], others: frozenset[str] = frozenset()) -> App:
        """Return the ASGI application behind its `Guard`.

        Args:
            hosts: The host names by which clients may address the site.
            others: The names among `hosts` that belong to a proxy.
        """
        routes = [Route(path, self._file) for path in self._page]
        routes += [
            Route("/api/v1/state", self._state),
            Route("/api/v1/events", self._events),
            Route("/api/v1/history", self._cards_history),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._exposition),
            Route(LEASES + "{lease_id}", self._revoke, methods=REMOVING),
            Route(FENCES + "{card}", self._clear_fences, methods=REMOVING),
            Route(DRAIN, self._drain, methods=SETTING),
            Route(CARD_DRAINS + "{card}", self._drain, methods=SETTING),
        ]
        handlers: Mapping[Any, Any] = {BrokerSilent: _on_broker_silent, ActionNotDone: _on_not_done}
        app = Starlette(routes=routes, exception_handlers=handlers)
        # A path with a trailing slash is a different path: it is not found, rather than redirected.
        app.router.redirect_slashes = False
        return Guard(app, hosts, others)

    async def _file(self, request: Request) -> Response:
        file = self._page.get(request.scope["path"])
        if file is None:
            # Starlette's routes also match a path that is followed by a line feed.
            raise HTTPException(404)
        content, kind = file
        return Response(content, media_type=kind)

    async def _state(self, request: Request) -> Response:
        is_named = self._access.is_operator(request)
        return Response(self._encode(await self._feed.latest(), is_named=is_named), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        is_named = self._access.is_operator(request)
        if self._streams >= MAX_STREAMS + OPERATORS_STREAMS * is_named:
            raise HTTPException(
                503, f"{self._streams} pages are open, the maximum for this daemon.", {"Retry-After": str(RETRY_S)}
            )
        # The answer to HEAD has the headers of the stream, and does not count as a stream.
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        # Count the stream now, because more requests may come before the loop runs this stream.
        self._streams += 1
        return _Stream(self._stream(self._access.changes, is_named=is_named), self._on_stream_end)

    def _on_stream_end(self) -> None:
        self._streams -= 1

    async def _stream(self, changes: int, *, is_named: bool) -> AsyncIterator[bytes]:
        """Yield server-sent events (HTML, 9.2): `state` with each snapshot, and comments between snapshots.

        Args:
            changes: `PageAccess.changes` when the request came. The stream ends when it changes.
            is_named: Whether the request carried the operator's token.
        """
        until_s = time.monotonic() + STREAM_S
        # The response's headers are sent with its first bytes, so send a comment before the broker answers.
        yield b": gpulease\n\n"
        # After QUIET_S without a snapshot, send a comment, so that a proxy keeps the connection open and a lost reader
        # is noticed.
        async for snapshot in self._feed.watch(QUIET_S):
            # A changed token ends the stream before the next name is sent.
            if is_named and changes != self._access.changes:
                return
            if snapshot is None:
                yield b": nothing new\n\n"
            else:
                yield b"event: state\ndata: " + self._encode(snapshot, is_named=is_named) + b"\n\n"
            # The browser connects again (HTML, 9.2.3), perhaps with a newer page.
            if time.monotonic() > until_s:
                return

    def _encode(self, snapshot: Snapshot, *, is_named: bool) -> bytes:
        now_s = time.monotonic()
        # All readers share the encodings of a snapshot: one with names, one with pseudonyms.
        if is_named in self._encodings:
            encoded_snapshot, at_s, encoded = self._encodings[is_named]
            if encoded_snapshot is snapshot and now_s - at_s < STATE_FRESH_S:
                return encoded
        view = view_of(snapshot, self._pseudonyms, now_s, is_named=is_named)
        # JSON escapes the line breaks of ASCII, so no text can end an event's line.
        encoded = json.dumps(view, separators=(",", ":")).encode("ascii")
        self._encodings[is_named] = snapshot, now_s, encoded
        return encoded

    async def _revoke(self, request: Request) -> Response:
        # Step 1: check the token, so that the other checks reveal nothing to a reader without it.
        token = self._access.token_of(request)
        # Step 2: check the broker's bounds here too, to respond with a sentence for people.
        lease_id = request.path_params["lease_id"]
        if _LEASE_ID.fullmatch(lease_id) is None:
            raise HTTPException(400, "A lease's id must have 32 hexadecimal digits.")
        reason = request.query_params.get("reason", "").strip() or REASON
        if len(reason) > MAX_REASON_CHARS:
            raise HTTPException(400, f"A reason must have at most {MAX_REASON_CHARS} characters, not {len(reason)}.")
        # Step 3: the broker checks the token again, and answers once the lease's memory is proved free.
        outcome = await self._broker.revoke(lease_id, reason, token)
        status = 404 if outcome is RevokeOutcome.NOT_FOUND else 200
        return JSONResponse({"lease_id": lease_id, "outcome": OUTCOMES[outcome]}, status)

    async def _drain(self, request: Request) -> Response:
        token = self._access.token_of(request)
        card = _card_of(request) if "card" in request.path_params else ""
        # PUT begins a drain, and DELETE ends it. The message to the broker expresses the end as a drain without a time.
        within_ms = None
        if request.method == "PUT":
            text = request.query_params.get("within_s", "")
            if _SECONDS.fullmatch(text) is None or float(text) > MAX_WITHIN_S:
                raise HTTPException(400, f"within_s must be a number of seconds, at most {MAX_WITHIN_S}.")
            within_ms = round(float(text) * MS_PER_S)
        left_ms, leases = await self._broker.drain(within_ms, token, card)
        left_s = None if left_ms is None else left_ms / MS_PER_S
        return JSONResponse({"draining": left_s is not None, "left_s": left_s, "leases": leases})

    async def _clear_fences(self, request: Request) -> Response:
        token = self._access.token_of(request)
        card = _card_of(request)
        return JSONResponse({"card": card, "cleared": await self._broker.clear_fences(card, token)})

    async def _cards_history(self, request: Request) -> Response:
        # The history names no tenant and needs no token. A wrong token still fails, so that the mistake is noticed.
        self._access.is_operator(request)
        now_s = time.monotonic()
        at_s, encoded = self._history
        if not encoded or now_s - at_s >= HISTORY_FRESH_S:
            encoded = json.dumps(self._loads.view(now_s), separators=(",", ":")).encode("ascii")
            self._history = now_s, encoded
        return Response(encoded, media_type="application/json")

    async def _healthz(self, request: Request) -> Response:
        await self._health.check_alive()
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        report = await self._health.report()
        return JSONResponse(report, status_code=200 if report["ready"] else 503)

    async def _exposition(self, request: Request) -> Response:
        content_type, text = await self._metrics.exposition(is_named=self._access.is_operator(request))
        return Response(text, headers={"content-type": content_type})


def _card_of(request: Request) -> str:
    """Return the card's UUID in the path. Raises HTTPException if it can't be one."""
    card: str = request.path_params["card"]
    if _CARD.fullmatch(card) is None:
        raise HTTPException(400, "A card's UUID must have at most 64 letters, digits and dashes.")
    return card


async def _on_broker_silent(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=503, headers={"Retry-After": str(RETRY_S)})


async def _on_not_done(request: Request, refusal: ActionNotDone) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.why is WebRefusal.WRONG_TOKEN else {}
    return PlainTextResponse(str(refusal), status_code=STATUS_OF[refusal.why], headers=headers)


async def rehearse(app: App, host: str) -> None:
    """Request every path once, without a broker, so that all late imports are done before the sandbox hides files."""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    # Request unknown paths and all methods too, because error responses import further modules.
    answers = ("/api/v1/state", "/api/v1/events", "/api/v1/history", "/healthz", "/readyz", "/metrics", "/nothing")
    actions = (("DELETE", f"{LEASES}{0:032x}"), ("DELETE", f"{FENCES}0"), ("PUT", DRAIN), ("PUT", f"{CARD_DRAINS}0"))
    for method, path in (*(("GET", path) for path in (*FILES, *answers)), *actions):
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": [(b"host", host.encode())], "http_version": "1.1", "scheme": "http"}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "", "state": {}}
        # No broker answers here, so a request that waits for one ends with a 503.
        async with asyncio.timeout(QUIET_S):
            await app(scope, receive, send)


# --- health and metrics: the broker's answers, cached ---

Ask = Callable[[Opcode, Any], Awaitable[Any]]

HEALTH_FRESH_S: Final = 0.5
"""Maximum age of a health report in seconds. Probes request one every few seconds."""


class Cached:
    """The broker's latest answer or failure to answer, which callers share for `fresh_s` seconds.

    `fetch` requests the answer, and raises BrokerSilent. `clock` returns seconds of a monotonic clock.
    """

    def __init__(
        self, fetch: Callable[[], Awaitable[Any]], fresh_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = fetch
        self._clock = clock
        self._fresh_s = fresh_s
        self._answer: Any = None
        self._silence: BrokerSilent | None = None
        self._until_s = clock()
        self._lock = asyncio.Lock()

    async def get(self) -> Any:
        """Return the answer, at most `fresh_s` old. Raises BrokerSilent."""
        # One caller fetches the answer. The others wait for the lock, and then find a fresh answer.
        async with self._lock:
            if self._clock() >= self._until_s:
                await self._renew()
        if self._silence is not None:
            raise BrokerSilent(str(self._silence))
        return self._answer

    async def _renew(self) -> None:
        try:
            self._answer, self._silence = await self._ask(), None
        # Keep a failure for this time too, so that not every caller requests an answer from a broker that hangs.
        except BrokerSilent as error:
            self._silence = error
        self._until_s = self._clock() + self._fresh_s


class HealthPage:
    """The broker's health: whether it answers a ping, and the report that it gives."""

    def __init__(self, fetch: Ask) -> None:
        self._ping = Cached(lambda: fetch(Opcode.PING, Ping(0)), HEALTH_FRESH_S)
        self._report = Cached(lambda: fetch(Opcode.HEALTH, Empty()), HEALTH_FRESH_S)

    async def check_alive(self) -> None:
        """Raise BrokerSilent if the broker does not answer a ping."""
        await self._ping.get()

    async def report(self) -> dict[str, Any]:
        """Return HEALTH's map with `ready` and `checks`. Raises BrokerSilent."""
        return dict((await self._report.get()).report)


METRICS_FRESH_S: Final = 1.0
"""Maximum age of an exposition in seconds. Each takes the broker milliseconds, and any local user may request one."""

NO_VISITOR: Final = ("", "other")
"""Values of the label that name no tenant."""

_TENANT: Final = re.compile(r'(?<=[{,])tenant="((?:[^"\\\n]|\\.)*)"')
"""The label `tenant` in Prometheus's text format, where a backslash escapes a quote, a backslash and a line feed."""


class MetricsPage:
    """The broker's metrics, with tenants' names for operators and with pseudonyms for others."""

    def __init__(self, fetch: Ask, pseudonyms: Pseudonyms) -> None:
        async def scrape() -> tuple[str, str, str]:
            metrics = await fetch(Opcode.METRICS, Empty())
            # Replace the names once for all callers, because that takes a tenth of a second for many series.
            return metrics.content_type, metrics.exposition, without_names(metrics.exposition, pseudonyms)

        self._cached = Cached(scrape, METRICS_FRESH_S)

    async def exposition(self, *, is_named: bool) -> tuple[str, str]:
        """Return media type and text. Raises BrokerSilent."""
        content_type, named, hidden = await self._cached.get()
        return content_type, named if is_named else hidden


def without_names(text: str, pseudonyms: Pseudonyms) -> str:
    """Return the exposition with pseudonyms in place of tenants' names."""

    def hide(match: re.Match[str]) -> str:
        name = match[1]
        return match[0] if name in NO_VISITOR else f'tenant="{pseudonyms.of_tenant(name)}"'

    lines = (line if line.startswith("#") else _TENANT.sub(hide, line) for line in text.split("\n"))
    return "\n".join(lines)
