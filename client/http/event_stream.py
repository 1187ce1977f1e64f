"""Server-sent events (HTML Living Standard, 9.2), as every stream of this server sends them."""

import json
from typing import Any, Final

MEDIA_TYPE: Final = "text/event-stream"

COMMENT: Final = b": waiting\n\n"
"""A line that readers ignore (9.2.6). It keeps proxies from closing a stream that is silent for long."""


def event(text: str) -> bytes:
    """Return an event with a text of one line."""
    return b"data: " + text.encode() + b"\n\n"


def json_event(body: dict[str, Any]) -> bytes:
    """Return an event with a JSON object."""
    return event(json.dumps(body, ensure_ascii=False, separators=(",", ":")))
