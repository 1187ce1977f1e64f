"""Records that a step's kernels read and write: one of 64 bytes for each row, one of 16 bytes for each result."""

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

PAGE: Final = 16
"""Positions in one block of keys and values."""

NO_ROW: Final = -1
"""Position of a padded row, and source of a row with a known token."""

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
        ("padding", "<i4", (3,)),
    ]
)
"""A row of a step. The kernels have the fields' offsets as constants (kernels/triton_source.py)."""

# What a step sends back for each row: enough to report log-probabilities without the logits.
RESULT: Final = np.dtype([("token", "<i4"), ("logit", "<f4"), ("top_logit", "<f4"), ("total", "<f4")])
"""A row's token, its logit, the highest logit, and the sum of e^(logit - highest) over all tokens."""

Rows: TypeAlias = NDArray[np.void]
Results: TypeAlias = NDArray[np.void]


def log_probabilities(results: Results) -> "NDArray[np.float64]":
    """Return the natural logarithm of each result's probability, at temperature 1."""
    # log(e^(logit - top) / total). In f64, as f32 would lose digits where the difference is large.
    found: NDArray[np.float64] = (
        results["logit"].astype(np.float64) - results["top_logit"] - np.log(results["total"].astype(np.float64))
    )
    return found
