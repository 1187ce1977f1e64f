"""The scheduler's state of one tenant: its queue, its live sequences, its region's blocks, counters and rebinds."""

from collections import deque
from dataclasses import dataclass

from gpulease.client.decode.decode_requests import PromptRequest, TenantConfig
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.cell_rate import CellRate


@dataclass(slots=True, eq=False)
class UnadmittedRequest:
    """A request that is not admitted yet.

    Attributes:
        request: The request.
        deadline: Until when it may wait, in monotonic seconds.
        number: Its place in the order of arrivals.
        preemptions: How often the request was preempted.
        is_paid: Whether its tenant was charged for its prompt at an earlier admission.
    """

    request: PromptRequest
    deadline: float
    number: int
    preemptions: int = 0
    is_paid: bool = False


class LiveSequence:
    """An admitted request.

    Attributes:
        request: The request.
        tenant: Its tenant.
        table: Its row of the block tables, which no other live sequence has.
        blocks: Its blocks, as indexes within the tenant's region, in the order of its positions.
        number: Its place in the order of admissions.
        tokens: The prompt's tokens, then the emitted ones.
        prompt: Tokens of the prompt.
        last: The last position that can have a row: the token that it yields is the last one to be emitted.
        filled: Positions of the prompt that answered steps have computed.
        next: The first position that no step has a row for yet.
        row: Its row in the last step that has one: that row's result is the token at `next`.
        preemptions: How often the request was preempted.
        is_ended: Whether the request ended; the results of its rows under way are discarded.
        end_tokens: Tokens that end it.
        is_guided: Whether its request has a guide.
    """

    __slots__ = (
        "blocks",
        "end_tokens",
        "filled",
        "is_ended",
        "is_guided",
        "last",
        "next",
        "number",
        "preemptions",
        "prompt",
        "request",
        "row",
        "table",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        request: PromptRequest,
        tenant: "TenantState",
        table: int,
        blocks: list[int],
        number: int,
        end_tokens: frozenset[int],
    ) -> None:
        self.request, self.tenant, self.table, self.blocks, self.number = request, tenant, table, blocks, number
        self.end_tokens, self.is_guided = end_tokens, request.guide is not None
        self.tokens = list(request.token_ids)
        self.prompt = len(self.tokens)
        # The row at the last position yields the last token to emit, which itself is never computed.
        self.last = request.positions - 1
        # `next` moves when a row is planned, `filled` when its step is answered: the two differ by what is under way.
        self.filled = self.next = 0
        self.row = NO_ROW
        self.preemptions = 0
        self.is_ended = False

    @property
    def length(self) -> int:
        """The number of positions with keys and values that answered steps have computed."""
        # Once the prompt is filled, every known token but the newest has been computed.
        return self.filled if self.filled < self.prompt else len(self.tokens) - 1

    @property
    def prompt_rows(self) -> int:
        """The number of positions of its prompt that can have a row now. The last one also waits for its guide."""
        guide = self.request.guide
        return self.prompt - self.next - (guide is not None and not guide.is_ready)


class TenantState:
    """A tenant of a scheduler. Only the scheduler changes it.

    Attributes:
        config: Its limits.
        limiter: Bounds how often its region is rebuilt: each time, its replays take rows from the others.
        waiting: Requests that wait, in their order.
        live: Live sequences by their requests' ids, in the order of their admissions.
        prefilling: Live sequences with positions of their prompts that no step has a row for, in that order.
        free_blocks: Blocks of its region that no live sequence has.
        region_blocks: Blocks of its region; 0 while it has none.
        owes_permit: Whether its next region needs a permit of the limiter.
        is_held: Whether its sequences get no rows until `resume`.
        parked: While it is held, the sequences that decode when it is resumed.
        counter: Its weighted virtual counter: tokens of admitted prompts and emitted tokens, over its weight.
        is_contending: Whether, at the last admission, its first request waited only for a table of the engine.
        prefilled: Weighted rows that its prompts got, lifted like the counter.
        price: What one token adds to the counters: the reciprocal of its weight.
    """

    def __init__(self, config: TenantConfig, limiter: CellRate) -> None:
        self.config, self.limiter = config, limiter
        # Replays are at the front of this queue, in their order; new requests join at its end.
        self.waiting: deque[UnadmittedRequest] = deque()
        self.live: dict[str, LiveSequence] = {}
        self.prefilling: list[LiveSequence] = []
        self.free_blocks: list[int] = []
        self.region_blocks = 0
        self.owes_permit = self.is_held = self.is_contending = False
        self.parked: list[LiveSequence] = []
        self.counter = self.prefilled = 0.0
        # Counters grow by tokens over weight: of two tenants, the one with twice the weight gets twice the tokens.
        self.price = 1 / config.weight

    def fits(self, request: PromptRequest) -> bool:
        """Return whether its own limits and its region have room for the request now."""
        # All blocks that the request can need must be free now, because they are reserved at once.
        return len(self.live) < self.config.max_concurrent and request.blocks <= len(self.free_blocks)

    def bind(self, blocks: int) -> None:
        """Take a region of `blocks` blocks, all of them free."""
        self.region_blocks = blocks
        # Descending, so that `pop` gives the lowest block first.
        self.free_blocks = list(range(blocks - 1, -1, -1))

    def unbind(self) -> None:
        self.region_blocks = 0
        self.free_blocks = []

    @property
    def is_idle(self) -> bool:
        """Whether it has neither live nor waiting requests."""
        return not self.live and not self.waiting

    @property
    def used_blocks(self) -> int:
        """The number of blocks of its region that live sequences have reserved."""
        return self.region_blocks - len(self.free_blocks)

    @property
    def written_blocks(self) -> list[int]:
        """The blocks with keys and values of live sequences. Valid only while no step with its rows is under way."""
        # Only blocks up to the last planned position have contents; reserved ones after it are empty.
        live = self.live.values()
        return sorted(block for sequence in live for block in sequence.blocks[: -(-sequence.next // PAGE)])

    @property
    def prompt_rows(self) -> int:
        """The number of positions of its prompts that can have a row now, and have none yet."""
        return sum(sequence.prompt_rows for sequence in self.prefilling)
