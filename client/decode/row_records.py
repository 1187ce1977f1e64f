"""Records that a step's kernels read and write: 64 bytes for each row, 16 bytes for each result."""

from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

PAGE: Final = 16
"""Positions in one block of keys and values."""

NO_ROW: Final = -1
"""Position of a padded row, and source of a row with a known token."""

SHARED_ALIGNMENT: Final = 2 << 20
"""Regions begin at multiples of this on every driver (CUDA driver API, cuMemGetAllocationGranularity)."""

ROW: Final = np.dtype(
    [
        ("token", "<i4"),  # the row's token, if `source` is NO_ROW
        ("source", "<i4"),  # row of the step before that yields this row's token, or NO_ROW
        ("position", "<i4"),  # in the sequence; NO_ROW for a padded row
        ("table", "<i4"),  # row of the block tables
        ("block", "<i4"),  # block of this position, an index within the region
        ("blocks", "<i4"),  # blocks of the region
        ("base", "<u8"),  # address of the region
        ("seed", "<u8"),
        ("top_k", "<i4"),  # 0: all tokens
        ("inverse_temperature", "<f4"),  # 0: the highest logit
        ("top_p", "<f4"),
        ("depth", "<f4"),  # how far below the highest logit a token may lie; 0: any
        ("shared", "<i4"),  # address of the region that it shares, in units of SHARED_ALIGNMENT
        ("shared_blocks", "<i4"),  # blocks of that region; 0: it shares none
    ]
)
"""A row of a step. The kernels have the fields' offsets as constants (kernels/triton_source.py)."""

NO_MASK: Final = -1
NO_TARGET: Final = -1

MAX_RANKS: Final = 20
"""Maximum number of likeliest tokens that a row can report, the limit of OpenAI's API. The kernel `rank` has it as a
constant."""

GUIDE: Final = np.dtype(
    [
        ("first", "<i4"),  # its first entry
        ("count", "<i4"),  # its entries
        ("mask", "<i4"),  # its mask, or NO_MASK
        ("ranks", "<i4"),  # how many of the likeliest tokens it reports
        ("target", "<i4"),  # the token whose logit it reports instead of the chosen one's, or NO_TARGET
        ("padding", "<i4", (3,)),
    ]
)
"""The fields of a row of a guided step, in addition to its ROW."""

ENTRY: Final = np.dtype([("token", "<i4"), ("addend", "<f4"), ("divisor", "<f4"), ("subtrahend", "<f4")])
"""A change of one token's logit: the addend is added; a sum above 0 is divided by the divisor, and any other sum is
multiplied by it; then the subtrahend is subtracted."""

RANKED: Final = np.dtype([("token", "<i4"), ("logit", "<f4")])
"""One of a row's likeliest tokens, and its logit."""

# The result that a step returns for each row: enough to report log-probabilities without the logits.
RESULT: Final = np.dtype([("token", "<i4"), ("logit", "<f4"), ("top_logit", "<f4"), ("total", "<f4")])
"""A row's token, its logit, the highest logit, and the sum of e^(logit - highest) over all tokens."""


def mask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words in a mask, which has a bit for each token."""
    return -(-vocabulary // 32)


Rows: TypeAlias = NDArray[np.void]
Results: TypeAlias = NDArray[np.void]


def bytes_of(records: Rows) -> Rows:
    """Return a view of records as bytes without fields.

    numpy copies records field by field, but such a view as a whole: 1,024 rows in 2 us instead of 35.
    """
    return records.view(_bytes(records.itemsize))


@cache
def _bytes(count: int) -> "np.dtype[np.void]":
    return np.dtype((np.void, count))


@dataclass(frozen=True, slots=True)
class StepGuidance:
    """A guided step's data, in addition to its rows.

    Attributes:
        guides: GUIDE records, one for each row.
        entries: ENTRY records, to which the guides refer. No row has a token twice.
        masks: [masks, mask_words] u32: bit t % 32 of word t // 32 allows token t.
    """

    guides: Rows
    entries: Rows
    masks: NDArray[np.uint32]


def log_probabilities(results: Results, logits: "NDArray[np.float32] | None" = None) -> "NDArray[np.float64]":
    """Return the natural logarithm of each result's probability, at temperature 1.

    If other logits of the same rows are given as `logits` [results, n], theirs are returned, in the same shape.
    """
    if logits is not None:
        tops, totals = results["top_logit"][:, None], results["total"][:, None]
        others: NDArray[np.float64] = logits.astype(np.float64) - tops - np.log(totals.astype(np.float64))
        return others
    # log(e^(logit - top) / total). Computed in f64, because f32 would lose digits where the difference is large.
    log_probs: NDArray[np.float64] = (
        results["logit"].astype(np.float64) - results["top_logit"] - np.log(results["total"].astype(np.float64))
    )
    return log_probs
