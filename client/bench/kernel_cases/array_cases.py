"""Arrays on the card, with no kernel of the tenant's."""

from typing import Any, Final

import numpy as np

from gpulease.client.bench.kernel_cases.trial import Cases, Trial

CASES: Final = Cases("arrays")
case = CASES.add


@case("slices")
def slices(t: Trial) -> Any:
    x = t.floats(20, 30, 4)
    with t.launching():
        array = t.session.array(x)
        found = array[3:15:2, ::-4, 1].numpy()
    return [(found, x[3:15:2, ::-4, 1])]


@case("slices, broadcast")
def assignment(t: Trial) -> Any:
    x, y = t.integers(100, 16, 16), t.integers(100, 16)
    with t.launching():
        array = t.session.array(x)
        array[::2] = t.session.array(y)
        array[1, 3:5] = 7
        found = array.numpy()
    x[::2], x[1, 3:5] = y, 7
    return [(found, x)]


@case("fill, copies")
def fill_and_copy(t: Trial) -> Any:
    with t.launching():
        array = t.session.zeros((10, 10), np.float64)
        array[:, 2].fill(3.5)
        found = array.copy().numpy()
    wanted = np.zeros((10, 10))
    wanted[:, 2] = 3.5
    return [(found, wanted)]
