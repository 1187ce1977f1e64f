"""Computes a text's vector from its rows after the model's last norm.

Rows come in ascending order, however the prompt was divided into steps, and each is added separately. So a text's
vector, like its tokens, has the same bits whatever else is in the batch.
"""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Pooling(StrEnum):
    """How the hidden states of a text's tokens become one vector: their mean, or the last one."""

    MEAN = "mean"
    LAST = "last"


class PooledRows:
    """Collects the rows of one text.

    Attributes:
        pooling: How the rows become one vector.
        count: Number of rows that were added.
    """

    def __init__(self, pooling: Pooling, width: int) -> None:
        self.pooling, self.count = pooling, 0
        self._total = np.zeros(width)

    def add(self, position: int, rows: NDArray[np.float32]) -> None:
        """Add the rows from `position` on, except rows that an earlier attempt has added."""
        for row in rows[max(0, self.count - position) :]:
            if self.pooling is Pooling.MEAN:
                self._total += row
            else:
                self._total[:] = row
        self.count = max(self.count, position + len(rows))

    def vector(self) -> NDArray[np.float32]:
        """Return the vector, scaled to a length of 1, so a mean need not be divided by the count. Zeros stay zeros."""
        length = np.sqrt(np.square(self._total).sum())
        return (self._total / length if length else self._total).astype(np.float32)


def f32_of_bf16(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bf16 values as f32, because numpy has no bf16."""
    return (values.astype(np.uint32) << 16).view(np.float32)
