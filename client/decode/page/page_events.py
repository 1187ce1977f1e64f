"""Events of a decode server as its page shows them: sentences, of which like ones of a few seconds are one."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MAX_EVENTS: Final = 30
"""Events that are kept and shown."""

MERGED_S: Final = 10.0
"""Seconds in which like events of a tenant are one: a flood of refusals drives out nothing else."""

MAX_DETAIL_CHARACTERS: Final = 300
"""Characters of an error that an event repeats."""


class EventKind(StrEnum):
    """Kinds of events."""

    REVOKED_HERE = "revoked_here"
    STEP_REFUSED = "step_refused"
    REPLAYED = "replayed"
    REFUSED = "refused"
    ENGINE_MOVED = "engine_moved"
    ENGINE_LOST = "engine_lost"


@dataclass(slots=True)
class PageEvent:
    """An event, or several like ones.

    Attributes:
        number: Its number, which no other event has.
        at: When the last of them happened, in the page's seconds.
        tenant_id: Its tenant; "" for the whole server.
        kind: What happened.
        count: How often.
        seconds: The longest time that it took; 0 if it has none.
        tokens: Tokens that were computed again, in all.
        detail: Why, or what was lost; of the last one.
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
        """Return it as a sentence that follows the tenant's name."""
        took, n = duration(self.seconds), self.count
        match self.kind:
            case EventKind.REVOKED_HERE:
                return "Its region was revoked on this page."
            case EventKind.STEP_REFUSED:
                behind = f", {took} after the region's end" if self.seconds else ""
                return f"Its region has ended: a step that needed it was stopped before it began{behind}."
            case EventKind.REPLAYED:
                who = "A request goes" if n == 1 else f"{n:,} requests go"
                late = f"{took} after the loss of {self.detail}{' at most' * (n > 1)}"
                return f"{who} on, {late}. Tokens computed again: {self.tokens:,}."
            case EventKind.REFUSED:
                who = "A request was refused" if n == 1 else f"{n:,} requests were refused, the last one"
                return f"{who}: {self.detail}"
            case EventKind.ENGINE_MOVED:
                return "All requests were moved to another engine, which serves now."
            case EventKind.ENGINE_LOST:
                return f"The engine was lost; another one serves after {took}. Why it was lost: {self.detail}"


class PageEvents:
    """The latest events."""

    def __init__(self) -> None:
        self._events = deque[PageEvent](maxlen=MAX_EVENTS)
        self._numbers = 0

    def add(
        self, at: float, tenant_id: str, kind: EventKind, *, seconds: float = 0.0, tokens: int = 0, detail: str = ""
    ) -> None:
        """Add an event; `at` is never less than before."""
        event = next((one for one in self._events if (one.tenant_id, one.kind) == (tenant_id, kind)), None)
        if event is not None and at - event.at < MERGED_S:
            self._events.remove(event)
        else:
            self._numbers += 1
            event = PageEvent(self._numbers, at, tenant_id, kind)
        event.at, event.count, event.detail = at, event.count + 1, detail[:MAX_DETAIL_CHARACTERS]
        event.seconds, event.tokens = max(event.seconds, seconds), event.tokens + tokens
        self._events.appendleft(event)

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return them for the page, the latest first."""
        return [
            {"number": one.number, "ago_s": round(now - one.at, 1), "tenant": one.tenant_id, "text": one.text}
            for one in self._events
        ]


def duration(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 0.001:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"
