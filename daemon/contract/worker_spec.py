"""What the broker asks the zygote to make: one worker, described in one message.

How a worker's process ends when it ends by itself; anything else is the kernel's doing or a bug.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from gpulease.protocol.opcodes import Waiting

_U64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to be.

    Attributes:
        lease_id: The lease, and the session's id; a number of the pool's for one made ahead.
        card_uuid: The only card it may see.
        size_bytes: Its slice; 0 for one made ahead, which is told of its lease later.
        allowance_bytes: What it may take of the card besides, on the node's account.
        max_kernel_ms: How long one kernel may run, 0 for no bound.
        waiting: How its session's ends wait, None for as this host allows.
        is_shared: Whether several connections may be attached at a time.
        submit_of: The lease that it runs one kernel for, 0 if it is no submit; `lease_id` is the submit's then.
        timeout_ms: How long that may take, kept here for the next broker.
    """

    lease_id: int
    card_uuid: str
    size_bytes: int
    is_shared: bool
    allowance_bytes: int = 0
    max_kernel_ms: int = 0
    waiting: Waiting | None = None
    submit_of: int = 0
    timeout_ms: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether it has no lease yet: every lease has a slice."""
        return self.size_bytes == 0

    @property
    def of_lease(self) -> int:
        """The lease that it is there for, its submit's worker too; 0 if it has none yet."""
        return 0 if self.is_warm else self.submit_of or self.lease_id

    @property
    def submit_number(self) -> int:
        """What its tenant knows a submit by."""
        return self.lease_id & _U64

    def to_message(self) -> dict[str, Any]:
        """As it travels to the zygote, or to a worker that was made ahead."""
        return {
            "op": "spawn",
            "lease": f"{self.lease_id:032x}",
            "card": self.card_uuid,
            "size": self.size_bytes,
            "shared": self.is_shared,
            "allowance": self.allowance_bytes,
            "max_kernel_ms": self.max_kernel_ms,
            "waiting": self.waiting,
            "submit_of": f"{self.submit_of:032x}",
            "timeout_ms": self.timeout_ms,
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "WorkerSpec":
        """As it arrived."""
        return cls(
            int(message["lease"], 16),
            message["card"],
            message["size"],
            message["shared"],
            message["allowance"],
            message["max_kernel_ms"],
            None if message["waiting"] is None else Waiting(message["waiting"]),
            # Zygotes of before there were submits say nothing of them.
            int(message.get("submit_of", "0"), 16),
            message.get("timeout_ms", 0),
        )


class WorkerExit(IntEnum):
    """Exit statuses of a worker."""

    OK = 0
    NO_CONTEXT = 3
    BUG = 4
    NO_MEMORY = 5
