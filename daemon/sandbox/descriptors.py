"""Closing what a worker inherits and has no use for."""

import os
from collections.abc import Iterable

STANDARD = (0, 1, 2)
"""Nothing to read, and a pipe to the daemon's log."""


def keep_only(kept: Iterable[int]) -> None:
    """Close every descriptor of this process but these and the standard ones."""
    spared = {*STANDARD, *kept}
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in spared:
            try:
                os.close(int(entry))
            except OSError:
                # The one that the folder was read by.
                continue
