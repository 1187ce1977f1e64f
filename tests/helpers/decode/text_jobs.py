"""Jobs for processes that read texts, which exist only for tests."""

import os
import signal
from typing import Any


def crash(_: Any) -> dict[str, Any]:
    """End the process as a fault in a library does."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def fail(_: Any) -> dict[str, Any]:
    raise ZeroDivisionError("a fault")
