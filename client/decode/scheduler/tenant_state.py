"""The scheduler's state of a tenant: its queue, its live sequences, its region's blocks, and its counters."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_requests import PromptRequest, SharedPrefix, TenantConfig
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.cell_rate import CellRate
from gpulease.client.decode.scheduler.region_blocks import RegionBlocks

NO_BLOCK: Final = -1
"""Replaces the number of a block that its sequence has freed because it is before the window."""


@dataclass(slots=True, eq=False)
class UnadmittedRequest:
    """A request that is not admitted yet.

    Attributes:
        request: The request.
        deadline_s: The time until which it may wait, in monotonic seconds.
        number: Its number in the order of arrivals.
        preemptions: How often the request was preempted.
        is_paid: Whether its prompt was charged at an earlier admission.
        keys: The keys of its prompt's full blocks in its tenant's region; None until they are needed.
    """

    request: PromptRequest
    deadline_s: float
    number: int
    preemptions: int = 0
    is_paid: bool = False
    keys: list[bytes] | None = None


class SequenceColumns:
    """Values of live sequences as columns, with one entry per row of the block tables.

    A step may have a thousand rows, and numpy updates them together. `LiveSequence` has properties for a single
    sequence's entries, and describes `next_position`, `row` and `acts_at`.

    Attributes:
        planned: The columns that planning reads, as one array: the columns of a `StepPlan` in the same order, then
            `token_count` and `special_at`.
        token_count: The number of its tokens so far, including the prompt's.
        last_token: The last of these tokens.
        block: While it decodes, the block of its next row, unless that row is at `special_at` or later.
        special_at: The first position whose row is in another block, or is the sequence's last row.
    """

    def __init__(self, tables: int) -> None:
        """Begin with zeros. A sequence sets its entries when it is admitted."""
        self.planned: NDArray[np.int64] = np.zeros((7, tables), np.int64)
        self.next_position, self.last_token, self.row, self.block, own, self.token_count, self.special_at = self.planned
        own[:] = np.arange(tables)
        self.acts_at: NDArray[np.int64] = np.zeros(tables, np.int64)


class LiveSequence:
    """An admitted request.

    Attributes:
        request: The request.
        tenant: Its tenant.
        table: Its row of the block tables, which no other live sequence has.
        blocks: Its blocks so far, as indexes in the tenant's region (`RegionBlocks`), in the order of its positions.
        keys: The keys of its full blocks (`RegionBlocks`), the prompt's first; [] if nothing is reused.
        freed_blocks: How many of its first blocks it has freed because they are before its window. Their entries are
            NO_BLOCK.
        published: How many of its first blocks were published, by this sequence or by others.
        reused: Number of its first positions that were already computed. Its own rows begin after them.
        reusable: Maximum number of positions that it may reuse.
        prefix: The shared prefix that it uses; "" for none.
        is_following: Whether it waits for another sequence that is computing the next block of its prompt.
        number: Its number in the order of admissions.
        tokens: The prompt's tokens, then the emitted ones.
        prompt_length: Number of tokens of the prompt.
        last: The last position that can have a row, which yields the last token.
        filled: Number of positions of the prompt that answered steps have computed.
        preemptions: How often the request was preempted.
        is_ended: Whether it has ended. The results of its rows in unanswered steps are discarded.
        end_tokens: Tokens that end it.
        is_guided: Whether its request has a guide.
    """

    __slots__ = (
        "_columns",
        "blocks",
        "end_tokens",
        "filled",
        "freed_blocks",
        "is_ended",
        "is_following",
        "is_guided",
        "keys",
        "last",
        "number",
        "preemptions",
        "prefix",
        "prompt_length",
        "published",
        "request",
        "reusable",
        "reused",
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
        columns: SequenceColumns,
    ) -> None:
        self.request, self.tenant, self.table, self.blocks, self.number = request, tenant, table, blocks, number
        self.end_tokens, self.is_guided = end_tokens, request.guide is not None
        self.tokens = list(request.token_ids)
        self.prompt_length = len(self.tokens)
        # The row at the last position yields the last token, which itself has no row.
        self.last = request.positions - 1
        # `next_position` increases when a row is planned, and `filled` when the row's step is answered.
        self._columns = columns
        columns.token_count[table], columns.last_token[table] = self.prompt_length, self.tokens[-1]
        self.filled = self.next_position = 0
        self.row = NO_ROW
        self.keys: list[bytes] = []
        self.published = self.reused = self.reusable = self.freed_blocks = 0
        self.prefix = ""
        self.is_following = False
        self.set_acts_at()
        self.preemptions = 0
        self.is_ended = False

    @property
    def next_position(self) -> int:
        """The first position for which no step has a row yet."""
        return int(self._columns.next_position.item(self.table))

    @next_position.setter
    def next_position(self, position: int) -> None:
        self._columns.next_position[self.table] = position

    @property
    def row(self) -> int:
        """Its row in the last step that has one. The row's result is the token at `next_position`."""
        return int(self._columns.row.item(self.table))

    @row.setter
    def row(self, row: int) -> None:
        self._columns.row[self.table] = row

    @property
    def acts_at(self) -> int:
        """The first position of an emitted token at which the sequence ends or needs another block."""
        return int(self._columns.acts_at.item(self.table))

    def set_acts_at(self) -> None:
        self._columns.acts_at[self.table] = min(len(self.blocks) * PAGE - 1, self.last + 1)

    def set_block(self, position: int) -> int:
        """Set and return the block of a position, which contains the next row while the sequence decodes."""
        index = position // PAGE
        self._columns.block[self.table] = block = self.blocks[index]
        self._columns.special_at[self.table] = min((index + 1) * PAGE, self.last)
        return block

    @property
    def length(self) -> int:
        """The number of positions with keys and values that answered steps have computed."""
        # After the prompt, every known token except the last has been computed.
        return self.filled if self.filled < self.prompt_length else len(self.tokens) - 1

    @property
    def prompt_rows(self) -> int:
        """The number of its prompt's positions that can have a row now. The last one also waits for the guide."""
        if self.is_following:
            return 0
        guide = self.request.guide
        return self.prompt_length - self.next_position - (guide is not None and not guide.is_ready)


class TenantState:
    """A tenant of a scheduler. Only the scheduler changes it.

    Attributes:
        config: Its limits.
        limiter: Limits how often its region is rebuilt, because replays take rows from other tenants.
        reuses: Whether its prompts reuse blocks that are already computed.
        waiting: Requests that wait, in the order in which they are admitted.
        live: Live sequences by their requests' ids, in the order of their admissions.
        prefilling: Live sequences with prompt positions for which no step has a row, in the same order.
        blocks: The blocks of its region; none while it has no region.
        reused_tokens: Number of prompt tokens whose keys and values were in the region already.
        gpu_s: Its part of the engine's busy seconds. A step's time is divided in proportion to the tenants' rows.
        needs_permit: Whether its next region needs a permit of the limiter.
        is_held: Whether its sequences get no rows until `resume`.
        parked: While it is held, the sequences that decode when it is resumed.
        counter: Its weighted virtual counter: tokens of admitted prompts and emitted tokens, divided by its weight.
        is_contending: Whether, at the last admission, its first request waited only for a table of the engine.
        prefilled: Number of rows of its prompts, divided by its weight, and raised like `counter`.
        price: What one token adds to the counters: the reciprocal of its weight.
    """

    def __init__(self, config: TenantConfig, limiter: CellRate, *, reuses: bool = True) -> None:
        self.config, self.limiter, self.reuses = config, limiter, reuses
        # Replays are at the front of this queue.
        self.waiting: deque[UnadmittedRequest] = deque()
        self.live: dict[str, LiveSequence] = {}
        self.prefilling: list[LiveSequence] = []
        self.blocks = RegionBlocks(0)
        self.reused_tokens = 0
        self.gpu_s = 0.0
        self._evictions = 0
        self.needs_permit = self.is_held = self.is_contending = False
        self.parked: list[LiveSequence] = []
        self.counter = self.prefilled = 0.0
        # A counter grows by tokens divided by weight. So a tenant with twice the weight gets twice the tokens.
        self.price = 1 / config.weight

    def fits(self, waiting: UnadmittedRequest) -> bool:
        """Return whether the tenant's own limits and its region have room for the request now."""
        return len(self.live) < self.config.max_concurrent and self.lacking(waiting) <= 0

    def lacking(self, waiting: UnadmittedRequest) -> int:
        """Return how many blocks a request's prompt needs more than there are; 0 or less if there is room."""
        # Leave one block for each live sequence that may need another, so that an admission does not cause a
        # preemption.
        growing = sum(len(sequence.blocks) < sequence.request.blocks for sequence in self.live.values())
        request, room = waiting.request, self.blocks.available - growing
        lacking = request.prompt_blocks - room
        if lacking <= 0 or not self.region_blocks or not request.reusable_blocks:
            return lacking
        # Blocks that are already computed need no room, except cached ones, which count as available.
        keys = self.keys_of(waiting)[: request.reusable_blocks]
        _, shared = self.blocks.find_shared(keys)
        published, reusable = self.blocks.find(keys[shared:])
        return lacking - shared - published + reusable

    def keys_of(self, waiting: UnadmittedRequest) -> list[bytes]:
        """Return the keys of a waiting request's prompt in the tenant's current region."""
        if waiting.keys is None:
            waiting.keys = []
            tokens, salt = waiting.request.token_ids, waiting.request.cache_salt
            if self.reuses:
                self.blocks.extend_keys(waiting.keys, tokens, len(tokens) // PAGE, salt)
        return waiting.keys

    def bind(self, blocks: int, generation: int, prefixes: Iterable[SharedPrefix] = ()) -> None:
        """Begin to use a region of `blocks` blocks, all free. No earlier region may have had this generation."""
        self._replace(RegionBlocks(blocks, generation))
        for prefix in prefixes:
            self.blocks.attach(prefix.name, prefix.token_ids)

    def unbind(self) -> None:
        """Stop using the region. The blocks cached in it are lost."""
        self._replace(RegionBlocks(0))

    def _replace(self, blocks: RegionBlocks) -> None:
        self._evictions += self.blocks.evictions
        self.blocks = blocks
        # Keys that were computed for another region match no block.
        for waiting in self.waiting:
            waiting.keys = None

    @property
    def is_idle(self) -> bool:
        """Whether it has neither live nor waiting requests."""
        return not self.live and not self.waiting

    @property
    def region_blocks(self) -> int:
        """Number of blocks of its region; 0 while it has none."""
        return self.blocks.size

    @property
    def evictions(self) -> int:
        """Number of cached blocks that were freed to make room, in all regions of the tenant so far."""
        return self._evictions + self.blocks.evictions

    def blocks_to_save(self) -> list[int]:
        """Return the blocks of live sequences that must be saved, and forget cached blocks.

        Call this only while no unanswered step has rows of the tenant.
        """
        # To save cached blocks would take longer than their reuse saves.
        self.blocks.forget()
        # Only blocks up to the last planned position have contents. Blocks of shared prefixes are in other regions.
        live, size = self.live.values(), self.blocks.size
        blocks = {block for sequence in live for block in sequence.blocks[: -(-sequence.next_position // PAGE)]}
        return sorted(block for block in blocks if NO_BLOCK < block < size)

    @property
    def prompt_rows(self) -> int:
        """The number of positions of its prompts that can have a row now and have none yet."""
        return sum(sequence.prompt_rows for sequence in self.prefilling)
