"""Views of memory: numpy's types without a buffer format are copied, and references to Python objects are refused."""

import ctypes
from typing import Any

import numpy as np
import pytest

from gpulease.client import InvalidRequest
from gpulease.client.memory_views import readable_bytes, view_of, writable_bytes

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is not tried: pip install '.[ml-dtypes]'")

WITHOUT_FORMAT = (
    np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
    np.arange(6).astype("M8[s]")[::-2],
    np.array(3, ml_dtypes.float8_e5m2),
    np.zeros(0, ml_dtypes.bfloat16),
    np.zeros(2, [("when", "M8[s]"), ("x", "f4")]),
    ml_dtypes.bfloat16(2),
)


@pytest.mark.parametrize("array", WITHOUT_FORMAT, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_types_without_a_buffer_format_are_read_as_their_bytes(array: Any) -> None:
    assert bytes(readable_bytes(array, "mem_write")) == array.tobytes()
    assert view_of(array).shape == array.shape


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "M8[s]"])
def test_and_written_in_place(dtype: Any) -> None:
    wanted = np.arange(6).astype(dtype)
    array = np.zeros((2, 3), dtype)
    writable_bytes(array, array.nbytes, "mem_read")[:] = wanted.tobytes()
    assert array.tobytes() == wanted.tobytes()
    with pytest.raises(InvalidRequest, match="must be C-contiguous"):
        writable_bytes(array.T, array.nbytes, "mem_read")


class Pair(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("value", ctypes.py_object))


@pytest.mark.parametrize(
    "references",
    [
        np.zeros(2, object),
        np.zeros(2, [("x", "i4"), ("y", object)]),
        np.zeros(2, [("x", [("y", object, (2,))])]),
        np.zeros(2, [("x", "M8[s]"), ("y", object)]),
        (ctypes.py_object * 2)(),
        (Pair * 2)(),
    ],
    ids=["objects", "a field", "a field of a field", "next to a date", "ctypes", "a structure of ctypes"],
)
def test_references_to_objects_are_never_copied(references: Any) -> None:
    with pytest.raises(InvalidRequest, match="mem_write: the data must be a buffer of bytes"):
        readable_bytes(references, "mem_write")
    with pytest.raises(InvalidRequest, match="mem_read: `into` must be a buffer of bytes"):
        writable_bytes(references, 8, "mem_read")


def test_a_field_named_like_the_format_of_objects_is_copied() -> None:
    records = np.ones(2, [("O", "i4"), ("TO", "f4")])
    assert bytes(readable_bytes(records, "mem_write")) == records.tobytes()
