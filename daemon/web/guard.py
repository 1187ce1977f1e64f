"""The checks of every request, the security headers of every answer, and limits on the server's log.

The server listens on loopback, where a browser on this host may be used to attack it. A foreign page may make its own
name resolve to 127.0.0.1 and send requests to that name (DNS rebinding), or it may embed this server's page. So
requests that change something must come from this server's own page, or from a program. The server sets no cookie that
a foreign page could use.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import h11

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import RateLimit
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.http_origin import READING, KnownHosts, headers_of, refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none';"
    " require-trusted-types-for 'script'"
)
"""The policy (Content Security Policy Level 3, Trusted Types) by which only this server's own scripts run, and no text
is parsed as markup.
"""

HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # No cache may store names and ids, or combine a newer daemon's page with an older daemon's script.
    (b"cache-control", b"no-store"),
)


LEASES: Final = "/api/v1/leases/"
"""The path of leases; DELETE revokes one."""

FENCES: Final = "/api/v1/fences/"
"""The path of cards with fenced memory; DELETE clears a card's fences."""

DRAIN: Final = "/api/v1/drain"
"""The path of the node's drain; PUT begins one and DELETE ends it."""

CARD_DRAINS: Final = "/api/v1/drain/"
"""The path of the drains of single cards; PUT begins one and DELETE ends it."""

REMOVING: Final = ("DELETE",)

SETTING: Final = ("PUT", "DELETE")

PAGE_PATHS: Final = ("/",)
"""The paths to which a foreign page may link. All others are for this server's own page and for programs."""


def acting_methods(path: str) -> tuple[str, ...]:
    """Return the methods that change something at a path.

    An HTML form can't send any of these methods. Another site's script may send them only with this server's
    permission, which the server never gives (Fetch Standard, CORS preflight).
    """
    if path == DRAIN or path.startswith(CARD_DRAINS):
        return SETTING
    return REMOVING if path.startswith((LEASES, FENCES)) else ()


class Guard:
    """Refuses requests that no honest reader sends, and adds the security headers to every answer.

    Args:
        app: The application behind the guard.
        hosts: The names and addresses of this server, without ports.
        others: Those of `hosts` that belong to a proxy in front of the server, which gives the server another origin.
        setting: The setting that adds names, for the text of refusals.
    """

    def __init__(
        self,
        app: App,
        hosts: frozenset[str],
        others: frozenset[str] = frozenset(),
        setting: str = "http_hosts in the daemon's settings",
    ) -> None:
        self._app = app
        self._known = KnownHosts(hosts, others, setting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        # The application gets only requests that pass every check.
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        # Refused: answer with a sentence, and close the connection, because a body may follow.
        status, text = refusal
        body = f"{text}\n".encode()
        head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        head.append((b"connection", b"close"))
        # RFC 9110, 15.5.6: a 405 lists the methods of the path.
        if status == 405:
            allowed = acting_methods(scope["path"]) or READING
            head.append((b"allow", ", ".join(allowed).encode()))
        await send_with_headers({"type": "http.response.start", "status": status, "headers": head})
        await send_with_headers({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = headers_of(scope["headers"])
        is_act = scope["method"] in acting_methods(scope["path"])
        # Check host and origin first, so that the other checks reveal nothing to a foreign page.
        refused = refusal(headers, self._known, is_act=is_act, is_linked=scope["path"] in PAGE_PATHS)
        if refused is not None:
            return refused
        if scope["method"] not in READING and not is_act:
            return 405, "This path does not serve that method: see the Allow header."
        # Actions have their parameters in the path and the query, so no body is ever read.
        if headers.get(b"content-length", [b"0"]) != [b"0"] or b"transfer-encoding" in headers:
            return 413, "A request must not have a body here."
        return None


# --- bounds on the log: a peer can cause these lines without end ---

PAUSE_S: Final = 10.0
"""Pause between two log lines in seconds."""

LOGGERS: Final = ("uvicorn.error", "asyncio")

CallLater = Callable[[float, Callable[[], None]], object]


def _call_later(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)


class ServerLogFilter(logging.Filter):
    """Admits one log line of uvicorn every PAUSE_S, and none about a peer's violation of HTTP."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = RateLimit(PAUSE_S, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        # If a peer violates HTTP, uvicorn logs an error of h11. This is not a fault of the daemon.
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, h11.ProtocolError) and self._limit.admit() is not None


def limit_server_log() -> None:
    """Apply the filter to all log lines of the server."""
    server_filter = ServerLogFilter()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.addFilter(server_filter)


class WrongTokens:
    """Logs requests with wrong tokens: the first at once, then a count every PAUSE_S while more come.

    A wrong token has no other effect. If it locked clients out, any local user could lock operators out. A token is too
    long to be guessed.
    """

    def __init__(self, call_later: CallLater = _call_later) -> None:
        self._call_later = call_later
        self._count = 0
        self._is_pausing = False

    def add(self) -> None:
        self._count += 1
        # During the pause only the count rises; it is logged when the pause is over.
        if not self._is_pausing:
            self._log()

    def _log(self) -> None:
        log_event(LogEvent.WEB_WRONG_TOKEN, count=self._count)
        self._count = 0
        self._is_pausing = True
        self._call_later(PAUSE_S, self._on_pause_over)

    def _on_pause_over(self) -> None:
        self._is_pausing = False
        # Log the count now. There may be no further wrong token with which it could be logged.
        if self._count:
            self._log()
