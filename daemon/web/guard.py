"""What is logged of the server's own troubles, and of wrong tokens, within bounds: a peer may cause them for ever.

What every request passes before it is looked at, and what every answer says to the browser.

The attacks are those on servers that listen on loopback: a page of somebody else's, in a browser of this host, that
asks by a name of its own which it has made resolve to 127.0.0.1 (DNS rebinding), or that embeds what is served here.
Nothing here is told to a browser by a cookie, so no other page can act as an operator; and what changes something is
taken from this server's own page only, or from a program.
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
from gpulease.protocol.origin import READING, KnownHosts, headers_of, refusal

PAUSE_S: Final = 10.0
"""Between two lines."""

LOGGERS: Final = ("uvicorn.error", "asyncio")

CallLater = Callable[[float, Callable[[], None]], object]


def _call_later(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)


class Sparing(logging.Filter):
    """Lets a line through now and then, and none of what is only a peer's breach of the protocol.

    Of that uvicorn tells what h11 says of an answer for which it came too late.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = RateLimit(PAUSE_S, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, h11.ProtocolError) and self._limit.admit() is not None


def spare_the_log() -> None:
    """From now on, for all that the server logs."""
    sparing = Sparing()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.addFilter(sparing)


class WrongTokens:
    """Tells the log that somebody comes with wrong tokens, at once and then every PAUSE_S, with how many came.

    None is refused unseen for that: whoever may connect could then keep operators out, and a token can't be guessed.
    """

    def __init__(self, call_later: CallLater = _call_later) -> None:
        self._call_later = call_later
        self._count = 0
        self._is_pausing = False

    def one_more(self) -> None:
        """One came."""
        self._count += 1
        if not self._is_pausing:
            self._tell()

    def _tell(self) -> None:
        log_event(LogEvent.WEB_WRONG_TOKEN, count=self._count)
        self._count = 0
        self._is_pausing = True
        self._call_later(PAUSE_S, self._pause_over)

    def _pause_over(self) -> None:
        self._is_pausing = False
        # Not with the next that comes: who guesses for a few seconds and is gone would have come once.
        if self._count:
            self._tell()


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none';"
    " require-trusted-types-for 'script'"
)
"""Content Security Policy Level 3, and Trusted Types: what is not this server's own script does not run, and nothing
that is text becomes markup."""

HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Names and ids stay in no cache; and a newer daemon's page is not mixed with an older one's script.
    (b"cache-control", b"no-store"),
)


LEASES: Final = "/api/v1/leases/"
"""Below it is what can be revoked."""

FENCES: Final = "/api/v1/fences/"
"""Below it are cards whose fenced memory can be let go."""

DRAIN: Final = "/api/v1/drain"
"""What begins and ends a drain."""

REMOVING: Final = ("DELETE",)

SETTING: Final = ("PUT", "DELETE")

PAGE_PATHS: Final = ("/",)
"""What a link on somebody else's page may lead to; all else is for this server's own page, and for programs."""


def acting_methods(path: str) -> tuple[str, ...]:
    """The methods that change something there.

    No form sends any of them, and no other site's script before this server allows it, which it never does (Fetch
    Standard, CORS preflight).
    """
    if path == DRAIN:
        return SETTING
    return REMOVING if path.startswith((LEASES, FENCES)) else ()


class Guard:
    """Turns away what no honest reader sends, and says the rest to the browser.

    Args:
        hosts: The names and addresses that it may be asked by, without ports.
        others: Those of them that are not its own: a proxy's, behind which it has another origin.
    """

    def __init__(self, app: App, hosts: frozenset[str], others: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._known = KnownHosts(hosts, others, "http_hosts in the daemon's settings")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, say)
            return
        status, text = refusal
        body = f"{text}\n".encode()
        head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        head.append((b"connection", b"close"))
        if status == 405:
            allowed = acting_methods(scope["path"]) or READING
            head.append((b"allow", ", ".join(allowed).encode()))
        await say({"type": "http.response.start", "status": status, "headers": head})
        await say({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = headers_of(scope["headers"])
        is_act = scope["method"] in acting_methods(scope["path"])
        refused = refusal(headers, self._known, is_act=is_act, is_linked=scope["path"] in PAGE_PATHS)
        if refused is not None:
            return refused
        if scope["method"] not in READING and not is_act:
            return 405, "Here is nothing but to be read."
        if headers.get(b"content-length", [b"0"]) != [b"0"] or b"transfer-encoding" in headers:
            return 413, "A request has no body here."
        return None
