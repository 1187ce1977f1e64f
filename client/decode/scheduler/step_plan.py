"""A step as the scheduler plans it: columns of rows, and the live sequences of the rows."""

from collections import Counter
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_requests import AnyEvent, PromptRequest
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.tenant_state import LiveSequence, TenantState

_TENANT: Final = attrgetter("tenant")
_REQUEST: Final = attrgetter("request")
_TABLE: Final = attrgetter("table")

_POSITIONS, _TOKENS, _SOURCES, _BLOCKS, _TABLES = range(5)
"""The index of each column in a plan's arrays."""


class DecodeRoster:
    """Sequences that decode, and values derived from them. Steps with the same sequences share a roster.

    Attributes:
        sequences: The sequences, in the order of their rows. The list is never changed.
        rows: The row of each: 0, 1, and so on.
        tables: Each sequence's row of the block tables.
        requests: Their requests.
        tenant_rows: How many of the sequences each tenant has.
    """

    __slots__ = ("requests", "rows", "sequences", "tables", "tenant_rows")

    def __init__(self, sequences: list[LiveSequence]) -> None:
        self.sequences = sequences
        self.rows: NDArray[np.int64] = np.arange(len(sequences))
        self.tables: NDArray[np.int64] = np.fromiter(map(_TABLE, sequences), np.int64, len(sequences))
        self.requests: list[PromptRequest] = list(map(_REQUEST, sequences))
        self.tenant_rows: Counter[TenantState] = Counter(map(_TENANT, sequences))


class StepPlan:
    """The rows of one step: one row for each sequence that decodes, then chunks of prompts.

    A chunk has adjacent rows, at ascending positions of one prompt. Columns are arrays, because a step can have a
    thousand rows.

    Attributes:
        number: The step's number, from 0. A step planned in place of a failed step has the failed step's number.
        sequences: The sequence of each row.
        decode_rows: Number of rows of sequences that decode.
        chunks: For each chunk, its sequence, its first row, and its number of rows.
        joined: Sequences that have their first row in this step. For these, the harness writes the constant fields, and
            the entries of the block tables for positions before that row.
        sampled: Sequences that get a token from this step: those that decode, then those whose prompts end in this
            step.
        events: What happened while the step was planned: expired, preempted and refused requests.
        is_guided: Whether any of its rows needs a guided step.
        is_void: Whether the step's results are ignored, because this step or the previous one failed.
        has_ended: Whether any of its sequences may have ended since the step was planned.
    """

    __slots__ = (
        "_columns",
        "_last_rows",
        "_prompts",
        "_roster",
        "_tenant_rows",
        "chunks",
        "decode_rows",
        "events",
        "has_ended",
        "is_guided",
        "is_void",
        "joined",
        "number",
        "sampled",
        "sequences",
    )

    def __init__(self, number: int, decoding: DecodeRoster, columns: NDArray[np.int64]) -> None:
        """Begin with a row for each decoding sequence, from these columns [5, rows]."""
        self.number, self._roster = number, decoding
        # Both lists are the roster's own until a prompt gets rows.
        self.sampled = self.sequences = decoding.sequences
        self.decode_rows = len(decoding.sequences)
        self.chunks: list[tuple[LiveSequence, int, int]] = []
        self.joined: list[LiveSequence] = []
        self.events: list[AnyEvent] = []
        self.is_guided = self.is_void = self.has_ended = False
        self._columns = columns
        # Columns of prompts' rows, which are appended to `_columns` at the next read.
        self._prompts: tuple[list[int], ...] = ()
        # The rows that yield the first tokens of prompts.
        self._last_rows: list[int] = []
        self._tenant_rows = decoding.tenant_rows

    def __len__(self) -> int:
        return len(self.sequences)

    def _column(self, index: int) -> NDArray[np.int64]:
        if self._prompts:
            self._columns = np.hstack((self._columns, np.array(self._prompts)))
            self._prompts = ()
        column: NDArray[np.int64] = self._columns[index]
        return column

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row."""
        return self._column(_POSITIONS)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token of each row; 0 where it is not known yet."""
        return self._column(_TOKENS)

    @property
    def sources(self) -> NDArray[np.int64]:
        """For each row, the row of the previous step that yields its token, or NO_ROW if the token is known."""
        return self._column(_SOURCES)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The index, within the tenant's region, of the block that has the row's position."""
        return self._column(_BLOCKS)

    @property
    def tables(self) -> NDArray[np.int64]:
        """For each row, its sequence's row of the block tables."""
        return self._column(_TABLES)

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """For each of `sampled`, the row that yields its token; the results of other rows are unused."""
        rows = self._roster.rows
        return np.append(rows, self._last_rows) if self._last_rows else rows

    @property
    def sampled_tables(self) -> NDArray[np.int64]:
        """For each of `sampled`, its row of the block tables."""
        return self.tables[self.sampled_rows] if self._last_rows else self._roster.tables

    @property
    def sampled_requests(self) -> list[PromptRequest]:
        """The request of each of `sampled`."""
        return list(map(_REQUEST, self.sampled)) if self._last_rows else self._roster.requests

    @property
    def tenant_rows(self) -> Counter[TenantState]:
        """The number of rows of each tenant. The step reads and writes only these tenants' regions.

        Read this only when the plan is complete, because the rows are counted once.
        """
        if self.chunks and self._tenant_rows is self._roster.tenant_rows:
            self._tenant_rows = Counter(map(_TENANT, self.sequences))
        return self._tenant_rows

    def count_tenants(self, sequences: list[LiveSequence]) -> Counter[TenantState]:
        """Return each tenant's number of `sequences`, which are some or all of the step's."""
        # Usually `sequences` are all sequences of the step, with one row each.
        return self.tenant_rows if len(sequences) == len(self) else Counter(map(_TENANT, sequences))

    def add_chunk(self, sequence: LiveSequence, count: int) -> None:
        """Append rows for the next `count` positions of a prompt."""
        # A chunk's positions are consecutive, so its tokens and blocks are slices.
        first_row, begin = len(self.sequences), sequence.next_position
        end = begin + count
        if not self.chunks:
            # Copy the roster's lists, which other steps share, before changing them.
            self.sequences, self.sampled = self.sequences.copy(), self.sampled.copy()
        self.sequences += [sequence] * count
        if not self._prompts:
            self._prompts = [], [], [], [], []
        positions, tokens, sources, blocks, tables = self._prompts
        positions += range(begin, end)
        tokens += sequence.tokens[begin:end]
        sources += [NO_ROW] * count
        blocks += [sequence.blocks[position // PAGE] for position in range(begin, end)]
        tables += [sequence.table] * count
        self.chunks.append((sequence, first_row, count))
        # These are the sequence's first rows.
        if begin == sequence.reused:
            self.joined.append(sequence)
        sequence.next_position = end
        # The row of the prompt's last position yields the first token; results of earlier prompt rows are unused.
        if end == sequence.prompt_length:
            sequence.row = first_row + count - 1
            self.sampled.append(sequence)
            self._last_rows.append(first_row + count - 1)
