"""Events of a decode server as its page shows them: sentences, with similar events of a few seconds merged into one."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MAX_EVENTS: Final = 30
"""Maximum number of events that are kept and shown."""

MERGED_S: Final = 10.0
"""Seconds within which similar events of a tenant are merged, so that a flood of refusals can't push out other
events."""

MAX_DETAIL_CHARACTERS: Final = 300
"""Maximum number of characters of an error that an event repeats."""


class EventKind(StrEnum):
    """The kinds of events, which are merged separately."""

    REVOKED_HERE = "revoked_here"
    STEP_REFUSED = "step_refused"
    REPLAYED = "replayed"
    REFUSED = "refused"
    ENGINE_MOVED = "engine_moved"
    ENGINE_LOST = "engine_lost"
    PREFIX_REBUILT = "prefix_rebuilt"
    PREFIX_ENDED = "prefix_ended"


_OF_PREFIXES: Final = frozenset({EventKind.PREFIX_REBUILT, EventKind.PREFIX_ENDED})
"""Kinds of events of a shared prefix."""


@dataclass(slots=True)
class PageEvent:
    """An event, or several similar ones that were merged.

    Attributes:
        number: Its unique number.
        at: When the last one happened, in the page's seconds.
        tenant_id: Its tenant; "" for the whole server. The name of a shared prefix.
        kind: What happened.
        count: How often.
        seconds: The longest time that one took; 0 if the kind has no time.
        tokens: The total number of tokens that were computed again.
        detail: The cause of the last one, or the thing that was lost.
    """

    number: int
    at: float
    tenant_id: str
    kind: EventKind
    count: int = 0
    seconds: float = 0.0
    tokens: int = 0
    detail: str = ""

    @property
    def text(self) -> str:
        """The sentence for the page, which follows the tenant's name."""
        elapsed, n = duration(self.seconds), self.count
        times = "" if n == 1 else f" {n:,} times"
        match self.kind:
            case EventKind.REVOKED_HERE:
                return "Its region was revoked on this page."
            case EventKind.STEP_REFUSED:
                delay = f", {elapsed} after the region's end" if self.seconds else ""
                return f"Its region has ended: a step that needed it was stopped before it began{delay}."
            case EventKind.REPLAYED:
                subject = "A request continues" if n == 1 else f"{n:,} requests continue"
                late = f"{elapsed} after the loss of {self.detail}{' at most' * (n > 1)}"
                return f"{subject}, {late}. Tokens computed again: {self.tokens:,}."
            case EventKind.REFUSED:
                subject = "A request was refused" if n == 1 else f"{n:,} requests were refused, the last one"
                return f"{subject}: {self.detail}"
            case EventKind.ENGINE_MOVED:
                return "All requests were moved to another engine, which serves now."
            case EventKind.ENGINE_LOST:
                return f"The engine was lost; another one serves after {elapsed}. Why it was lost: {self.detail}"
            case EventKind.PREFIX_REBUILT:
                return f"This shared prefix was computed again{times}, for another engine."
            case EventKind.PREFIX_ENDED:
                text = "This prefix is not shared until another engine is opened. Why its region ended:"
                return f"{text} {self.detail}"


class PageEvents:
    """The latest events of a server; similar ones are merged."""

    def __init__(self) -> None:
        self._events = deque[PageEvent](maxlen=MAX_EVENTS)
        self._numbers = 0

    def add(
        self, at: float, tenant_id: str, kind: EventKind, *, seconds: float = 0.0, tokens: int = 0, detail: str = ""
    ) -> None:
        """Add an event, or merge it with a recent similar one. `at` must not decrease."""
        # The latest event of the same tenant and kind; only that one can still be recent enough.
        event = next((one for one in self._events if (one.tenant_id, one.kind) == (tenant_id, kind)), None)
        if event is not None and at - event.at < MERGED_S:
            # A merged event moves to the front with its new time.
            self._events.remove(event)
        else:
            self._numbers += 1
            event = PageEvent(self._numbers, at, tenant_id, kind)
        event.at, event.count, event.detail = at, event.count + 1, detail[:MAX_DETAIL_CHARACTERS]
        event.seconds, event.tokens = max(event.seconds, seconds), event.tokens + tokens
        self._events.appendleft(event)

    def shown(self, now: float, tenant_id: str | None = None) -> list[dict[str, Any]]:
        """Return the events for the page, latest first: all, or those of one tenant."""
        return [
            {"number": one.number, "ago_s": round(now - one.at, 1), "tenant": one.tenant_id, "text": one.text}
            for one in self._events
            # A shared prefix's event has the prefix's name as its tenant, and a tenant may have the same name.
            if tenant_id is None or (one.tenant_id == tenant_id and one.kind not in _OF_PREFIXES)
        ]


def duration(seconds: float) -> str:
    """Return a duration with a suitable unit, for people."""
    if seconds < 0.001:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"
