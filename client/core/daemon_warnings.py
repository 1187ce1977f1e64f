"""Warnings that a daemon sends to tenants with a lease (HelloOption.WARNING). Each is logged once per process."""

import logging
from typing import Final

from gpulease.protocol.foreign_text import printable

MAX_WARNINGS: Final = 16
"""Maximum number of different warnings that a process logs. Bounds the log if a daemon sends a new one with each
connection."""

_log: Final = logging.getLogger("gpulease")
_logged: Final = set[str]()


def log_warning(text: str) -> None:
    """Log a daemon's text as a warning, unless it was logged before."""
    # A daemon sends its warning with each connection, but a program should see it only once.
    if text not in _logged and len(_logged) < MAX_WARNINGS:
        _logged.add(text)
        # Escape control characters, which a terminal would interpret.
        _log.warning("the daemon warns: %s", printable(text))
