"""A step of the engine as the scheduler plans it: columns of rows, and the live sequences they belong to."""

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from gpulease.client.decode.decode_requests import AnyEvent
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.tenant_state import LiveSequence, TenantState

_TENANT: Final = attrgetter("tenant")


@dataclass(slots=True, eq=False)
class StepPlan:
    """The rows of one step: first one for each sequence that decodes, then the chunks of prompts.

    Lists have one element per row unless stated otherwise. A chunk's rows are adjacent, at ascending positions.

    Attributes:
        number: The step's number, from 0. A step that is planned in place of a failed one has the failed one's number.
        sequences: The row's sequence.
        positions: The row's position.
        tokens: The row's token; 0 where it is not known yet.
        sources: The row of the step before that yields the row's token, or NO_ROW if the token is known.
        blocks: The index, within the tenant's region, of the block that has the position.
        tables: The sequence's row of the block tables.
        decode_rows: How many rows are of sequences that decode.
        chunks: A chunk each: its sequence, its first row, its number of rows.
        joined: Sequences with their first row in this step. Their constant fields are to be written now, and the
            entries of their block tables for the positions before that row.
        sampled: Sequences that get a token from this step.
        sampled_rows: For each of `sampled`, the row that yields that token; the results of other rows are unused.
        events: What happened while the step was planned: expired, preempted and refused requests.
        is_guided: Whether rows of it need a guided step.
        is_void: Whether the step's results are to be ignored, because it or the one before it failed.
    """

    number: int
    sequences: list[LiveSequence]
    positions: list[int]
    tokens: list[int]
    sources: list[int]
    blocks: list[int]
    tables: list[int]
    decode_rows: int
    chunks: list[tuple[LiveSequence, int, int]] = field(default_factory=list)
    joined: list[LiveSequence] = field(default_factory=list)
    sampled: list[LiveSequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    events: list[AnyEvent] = field(default_factory=list)
    is_guided: bool = False
    is_void: bool = False
    _tenant_rows: Counter[TenantState] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tenant_rows(self) -> Counter[TenantState]:
        """How many rows each tenant has. The step reads and writes these tenants' regions and no others.

        Read it once the plan is complete: it is counted once.
        """
        if not self._tenant_rows:
            self._tenant_rows.update(map(_TENANT, self.sequences))
        return self._tenant_rows

    def add_chunk(self, sequence: LiveSequence, count: int) -> None:
        """Append rows for the next `count` positions of a prompt."""
        # Rows of one prompt are contiguous and ascending, so its tokens and blocks are slices.
        first_row, begin = len(self.sequences), sequence.next
        end = begin + count
        self.sequences += [sequence] * count
        self.positions += range(begin, end)
        self.tokens += sequence.tokens[begin:end]
        self.sources += [NO_ROW] * count
        blocks = sequence.blocks
        self.blocks += [blocks[position // PAGE] for position in range(begin, end)]
        self.tables += [sequence.table] * count
        self.chunks.append((sequence, first_row, count))
        # The sequence's first rows: the harness sets up its constant fields with this step.
        if begin == sequence.reused:
            self.joined.append(sequence)
        sequence.next = end
        # The row of the prompt's last position yields the first token; results of earlier prompt rows are unused.
        if end == sequence.prompt:
            sequence.row = first_row + count - 1
            self.sampled.append(sequence)
            self.sampled_rows.append(sequence.row)
