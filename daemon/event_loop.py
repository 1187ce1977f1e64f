"""Which event loop the broker runs on."""

from typing import Any


def loop_factory() -> Any:
    """uvloop's, for `asyncio.Runner`; None, for asyncio's own, which does the same, slower, where it is missing."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
