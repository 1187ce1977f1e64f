"""Device arrays, and elementwise operations as users of CuPy write them."""

from typing import Any, Final

import numpy as np

from .trial import Cases, Trial

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


@case("elementwise, broadcast")
def squared_difference(t: Trial) -> Any:
    x, y = t.floats(20, 30), t.floats(30)
    with t.compiling():
        operation = t.session.elementwise(
            "float32 x, float32 y", "float32 z", "z = (x - y) * (x - y)", "squared_difference"
        )
    with t.launching():
        found = operation(t.session.array(x), t.session.array(y)).numpy()
    return [(found, (x - y) ** 2)]


@case("elementwise, any type")
def any_type(t: Trial) -> Any:
    x = t.floats(500).astype(np.float64)
    with t.compiling():
        operation = t.session.elementwise("T x", "T y", "y = x < 0 ? -x : sqrt(x)", "folded")
    with t.launching():
        found = operation(t.session.array(x)).numpy()
    return [(found, np.where(x < 0, -x, np.sqrt(abs(x))))]
