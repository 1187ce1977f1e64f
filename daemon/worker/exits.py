"""How a worker's process ends when it ends by itself; anything else is the kernel's doing or a bug."""

from enum import IntEnum


class WorkerExit(IntEnum):
    """Exit statuses of a worker."""

    OK = 0
    NO_CONTEXT = 3
    BUG = 4
    NO_MEMORY = 5
