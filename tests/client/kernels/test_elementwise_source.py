"""Descriptions of element-wise kernels are CuPy's, and become CUDA C for a call's types."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpulease.client import InvalidRequest
from gpulease.client.kernels.elementwise_source import ElementwiseSource, SourceParameter


def test_a_kernel_of_cupy_s_is_taken() -> None:
    # CuPy's objects have these attributes; its wheel is too large for a test.
    x = SimpleNamespace(name="x", ctype="T", raw=False, dtype=None)
    y = SimpleNamespace(name="y", ctype="float", raw=True, dtype=np.float32)
    z = SimpleNamespace(name="z", ctype="T", raw=False, dtype=None)
    given = SimpleNamespace(
        in_params=(x, y), out_params=(z,), operation="z = x - y[i]", name="less", preamble="", kwargs={}
    )
    source = ElementwiseSource(given)
    assert source.inputs == (SourceParameter("T", "x", False), SourceParameter("float32", "y", True))
    assert (source.outputs, source.name) == ((SourceParameter("T", "z", False),), "less")
    given.kwargs = {"loop_prep": "T total = 0;"}
    with pytest.raises(InvalidRequest, match="loop_prep is not taken"):
        ElementwiseSource(given)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("T x", "", "x"), "no output"),
        (("T x", "T x", "x"), "two parameters with the same name"),
        (("Tx", "T z", "z = 1"), "a type and a name, not 'Tx'"),
        (("T i", "T z", "z = i"), "can't have the name 'i'"),
        (("T _x", "T z", "z = _x"), "can't have the name '_x'"),
        (("quad x", "T z", "z = x"), "not 'quad'"),
        (("T x", "T z", "z = x", "a b"), "the name an identifier, not 'a b'"),
        ((7,), "must be an ElementwiseKernel"),
    ],
)
def test_descriptions_that_make_no_sense(parts: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        ElementwiseSource(*parts)
