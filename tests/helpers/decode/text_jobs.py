"""Jobs for text processes, which exist only for tests."""

import os
import signal
from typing import Any


def crash(_: Any) -> dict[str, Any]:
    """End the process as a crash of a library would."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def fail(_: Any) -> dict[str, Any]:
    raise ZeroDivisionError("a fault")
