"""Server-sent events (HTML Living Standard, 9.2), in the form that all streams of the servers use."""

import json
from typing import Any, Final

MEDIA_TYPE: Final = "text/event-stream"

COMMENT: Final = b": waiting\n\n"
"""A line that readers ignore (9.2.6). It keeps proxies from closing a stream that is silent for a long time."""


def event(text: str) -> bytes:
    """Return an event with `text` as its data, which must be a single line."""
    return b"data: " + text.encode() + b"\n\n"


def json_event(body: dict[str, Any]) -> bytes:
    """Return an event with a JSON object as its data."""
    # json.dumps escapes line breaks, so the data stays one line.
    return event(json.dumps(body, ensure_ascii=False, separators=(",", ":")))


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """Return an event of the type `name`, with a JSON object as its data."""
    return b"event: " + name.encode() + b"\n" + json_event(body)
