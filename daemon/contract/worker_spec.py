"""The description of a worker, which the broker sends to the zygote, and the exit statuses of workers."""

from enum import IntEnum
from typing import Annotated, ClassVar

from gpulease.daemon.contract.message_fields import (
    FLAG,
    LEASE_NUMBER,
    TEXT,
    U64,
    U64_MAX,
    LeaseNumber,
    Message,
)
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import WorkerOptions


@dataclass(frozen=True, slots=True)
class WorkerSpec(WorkerOptions, Message):
    """A worker. It orders the zygote to fork this worker, or a warm worker to take this lease or submit.

    The spec also has the options of the lease that the worker applies.

    Attributes:
        lease_id: For a session's worker, the id of its lease and session. For a worker made ahead of its lease, the
          number of its warm context. For a submit's worker, the submit's number.
        card_uuid: The only card that the worker may see.
        size_bytes: Size of the lease's slice; 0 for a worker made ahead of its lease, which takes a lease later.
        is_shared: Whether several connections may be attached at a time.
        allowance_bytes: Bytes of the card that the worker may take in addition to its slice, charged to the node.
        submit_of: The lease for which the worker runs one kernel; 0 if it is not a submit's worker. Zygotes older than
            submits do not send it.
        timeout_ms: How long the submit may take. The zygote keeps it for the next broker.
        is_parkable: Whether the session's bytes may leave the card while it is idle (messages.py, "parking").
        opened_bytes: Size of the slice with which the session was opened; 0 if that is `size_bytes`. A resize does not
          change the addresses that a session has, so a worker that continues a resized session needs the first size.
    """

    OP: ClassVar[str] = "spawn"
    ORDER: ClassVar[tuple[str, ...]] = (
        *("lease_id", "card_uuid", "size_bytes", "is_shared", "allowance_bytes"),
        *("max_kernel_ms", "waiting", "submit_of", "timeout_ms"),
    )
    lease_id: LeaseNumber
    card_uuid: Annotated[str, TEXT.named("card")]
    size_bytes: Annotated[int, U64.named("size")]
    is_shared: Annotated[bool, FLAG.named("shared")]
    allowance_bytes: Annotated[int, U64.named("allowance")] = 0
    submit_of: Annotated[int, LEASE_NUMBER] = 0
    timeout_ms: Annotated[int, U64] = 0
    is_parkable: Annotated[bool, FLAG.named("parkable")] = False
    opened_bytes: Annotated[int, U64.named("opened")] = 0

    @property
    def is_warm(self) -> bool:
        """Whether the worker has no lease yet. Every lease has a slice, so a slice of 0 bytes means no lease."""
        return self.size_bytes == 0

    @property
    def context_bytes(self) -> int:
        """The size of the slice for which the session's context is opened."""
        return self.opened_bytes or self.size_bytes

    @property
    def of_lease(self) -> int:
        """The lease for which the worker, or its submit, runs; 0 if it has none yet."""
        # A submit's worker names its lease in `submit_of`; a session's worker has it in `lease_id`.
        return 0 if self.is_warm else self.submit_of or self.lease_id

    @property
    def submit_number(self) -> int:
        """The number of the submit in reports to the tenant."""
        return self.lease_id & U64_MAX


class WorkerExit(IntEnum):
    """Exit statuses of a worker that ends on its own. Any other status comes from the operating system or a bug."""

    OK = 0
    NO_CONTEXT = 3
    BUG = 4
    NO_MEMORY = 5
