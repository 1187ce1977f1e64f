"""The scheduler's knowledge of one tenant: its queue, its region's blocks, its counters, its limit of rebinds."""

from collections import deque
from dataclasses import dataclass

from gpulease.client.decode.decode_requests import PromptRequest, TenantConfig
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.scheduler.cell_rate import CellRate
from gpulease.client.decode.scheduler.step_plan import LiveSequence


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that is not admitted yet.

    Attributes:
        request: The request.
        deadline: When it has waited long enough, in monotonic seconds.
        number: Its place in the order of arrivals.
        preemptions: How often it made room for others.
        is_paid: Whether its tenant was charged for its prompt at an earlier admission.
    """

    request: PromptRequest
    deadline: float
    number: int
    preemptions: int = 0
    is_paid: bool = False


class TenantState:
    """A tenant of a scheduler; others than the scheduler only read it.

    Attributes:
        config: Its limits.
        limiter: Bounds how often its region is rebuilt: each time, its replays take rows from the others.
        waiting: Requests that wait, in their order.
        live: Live sequences by their requests' ids, in the order of their admissions.
        prefilling: Live sequences with positions of their prompts that no step has a row for, in that order.
        free_blocks: Blocks of its region that no live sequence has.
        region_blocks: Blocks of its region; 0 while it has none.
        owes_permit: Whether its next region needs a permit of the limiter.
        is_held: Whether its sequences get no rows for now.
        parked: Sequences that would decode, if it were not held.
        counter: Its weighted virtual counter: tokens of admitted prompts and emitted tokens, over its weight.
        is_contending: Whether, when it was last looked at, only the engine's lack of room kept its first request out.
        prefilled: Weighted rows that its prompts got, lifted as the counter is.
        price: What a token adds to the counters.
    """

    def __init__(self, config: TenantConfig, limiter: CellRate) -> None:
        self.config, self.limiter = config, limiter
        self.waiting: deque[WaitingRequest] = deque()
        self.live: dict[str, LiveSequence] = {}
        self.prefilling: list[LiveSequence] = []
        self.free_blocks: list[int] = []
        self.region_blocks = 0
        self.owes_permit = self.is_held = self.is_contending = False
        self.parked: list[LiveSequence] = []
        self.counter = self.prefilled = 0.0
        self.price = 1 / config.weight

    def fits(self, request: PromptRequest) -> bool:
        """Return whether its own limits and its region let the request in now."""
        return len(self.live) < self.config.max_concurrent and request.blocks <= len(self.free_blocks)

    def bind(self, blocks: int) -> None:
        """Take a region of so many blocks, all of them free."""
        self.region_blocks = blocks
        self.free_blocks = list(range(blocks - 1, -1, -1))

    def unbind(self) -> None:
        """Lose the region."""
        self.region_blocks = 0
        self.free_blocks = []

    @property
    def is_idle(self) -> bool:
        """Return whether it has nothing to compute."""
        return not self.live and not self.waiting

    @property
    def used_blocks(self) -> int:
        """Return how many blocks of its region live sequences have."""
        return self.region_blocks - len(self.free_blocks)

    @property
    def written_blocks(self) -> list[int]:
        """Return the blocks with keys and values of live sequences, while no step of it is under way."""
        live = self.live.values()
        return sorted(block for sequence in live for block in sequence.blocks[: -(-sequence.next // PAGE)])

    @property
    def prompt_rows(self) -> int:
        """Return how many rows its prompts still need."""
        return sum(sequence.prompt - sequence.next for sequence in self.prefilling)
