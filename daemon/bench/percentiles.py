"""The percentile of samples, for the daemon's side of `gpulease bench`."""

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, as `client/bench/figures.py` does."""
    return sorted(samples)[max(1, math.ceil(len(samples) * percent / 100)) - 1]
