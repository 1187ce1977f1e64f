import ctypes
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client import Buffer, InvalidHandle, InvalidRequest, KernelArgs
from gpulease.client.handles import HandleOwner
from gpulease.client.kernel_args import mismatch, pack_listed
from gpulease.protocol.opcodes import ParameterType as T


class StandIn:
    """What a buffer needs of a session."""

    def __init__(self) -> None:
        self.dropped: list[Any] = []
        self.is_alive = True


def buffer_of(handle: int, size_bytes: int) -> Buffer:
    return Buffer(cast("HandleOwner", StandIn()), handle, size_bytes)


NUMBERS = {
    "u32": ("<I", st.integers(0, 2**32 - 1)),
    "u64": ("<Q", st.integers(0, 2**64 - 1)),
    "i32": ("<i", st.integers(-(2**31), 2**31 - 1)),
    "i64": ("<q", st.integers(-(2**63), 2**63 - 1)),
    "f32": ("<f", st.floats(width=32)),
    "f64": ("<d", st.floats()),
}


@pytest.mark.exhaustive
@given(st.lists(st.sampled_from(sorted(NUMBERS)).flatmap(lambda kind: st.tuples(st.just(kind), NUMBERS[kind][1]))))
def test_packs_little_endian_without_gaps(values: list[tuple[str, Any]]) -> None:
    args = KernelArgs()
    for kind, value in values:
        assert getattr(args, f"push_{kind}")(value) is args
    assert args.data == b"".join(struct.pack(NUMBERS[kind][0], value) for kind, value in values)
    assert args.sizes == tuple(struct.calcsize(NUMBERS[kind][0]) for kind, _ in values)
    assert len(args) == len(values)


@pytest.mark.parametrize(
    ("push", "value"),
    [
        (KernelArgs.push_u32, -1),
        (KernelArgs.push_u32, 2**32),
        (KernelArgs.push_u32, 1.0),
        (KernelArgs.push_u64, 2**64),
        (KernelArgs.push_i32, 2**31),
        (KernelArgs.push_i64, -(2**63) - 1),
        (KernelArgs.push_f32, 1e39),
        (KernelArgs.push_f32, "1"),
        (KernelArgs.push_f64, 10**400),
        (KernelArgs.push_f64, None),
        (KernelArgs.push_buffer, 0x7000),
        (KernelArgs.push_raw, 5),
        (KernelArgs.push_raw, b""),
    ],
)
def test_what_does_not_fit_is_refused_by_its_index(push: Callable[..., Any], value: Any) -> None:
    args = KernelArgs().push_u32(1).push_f32(2.0)
    with pytest.raises(InvalidRequest, match="argument 2 must be "):
        push(args, value)
    assert (len(args), len(args.data)) == (2, 8), "a refused argument leaves nothing behind"


def test_numpy_scalars_are_numbers() -> None:
    args = KernelArgs().push_u32(cast("int", np.uint32(7))).push_f32(cast("float", np.float32(0.5)))
    assert args.data == struct.pack("<If", 7, 0.5)


def test_a_buffer_is_its_pointer_and_is_held() -> None:
    buffer = buffer_of(0x1000, 16)
    args = KernelArgs().push_buffer(buffer).push_buffer(buffer, 16).push_raw(b"xyz")
    assert args.data == struct.pack("<QQ", 0x1000, 0x1010) + b"xyz"
    assert args.sizes == (8, 8, 3)
    assert args.buffers == (buffer, buffer)
    for offset in (17, -1):
        with pytest.raises(InvalidHandle, match=r"argument 3: .* outside buffer"):
            args.push_buffer(buffer, offset)


def test_what_it_shows() -> None:
    assert repr(KernelArgs().push_u32(1)) == "<KernelArgs sizes=(4,) data=01000000>"


def test_a_list_packs_as_the_methods_do() -> None:
    buffer = buffer_of(0x1000, 64)
    listed = pack_listed(
        [
            buffer,
            (buffer, 8),
            np.uint32(7),
            np.int64(-1),
            np.float32(2),
            np.float64(0.5),
            np.int8(-2),
            np.bool_(True),
            b"abc",
        ]
    )
    pushed = KernelArgs().push_buffer(buffer).push_buffer(buffer, 8).push_u32(7).push_i64(-1).push_f32(2).push_f64(0.5)
    assert listed.data == pushed.data + b"\xfe\x01abc"
    assert listed.kinds == (*pushed.kinds, "i8", "u8", 3)
    assert listed.sizes == (8, 8, 4, 8, 4, 8, 1, 1, 3)
    assert listed.buffers == (buffer, buffer)


def test_a_number_of_python_s_takes_the_type_that_is_told() -> None:
    told = [T.U32, T.S64, T.F32, T.F64, T.POINTER, T.U8, T.F32]
    args = pack_listed([7, -1, 2.5, 0.5, 0x1000, True, 3], told)
    assert args.kinds == ("u32", "i64", "f32", "f64", "u64", "u8", "f32")
    assert args.data == struct.pack("<IqfdQBf", 7, -1, 2.5, 0.5, 0x1000, 1, 3.0)


@pytest.mark.parametrize(
    ("told", "value", "packed"),
    [(T.U8, -3, "<b"), (T.U16, -3, "<h"), (T.U32, -1, "<i"), (T.U32, -(2**31), "<i"), (T.U64, -5, "<q")],
)
def test_a_negative_number_fits_what_a_c_compiler_declares_for_a_signed_integer(
    told: T, value: int, packed: str
) -> None:
    assert pack_listed([value], [told]).data == struct.pack(packed, value)


@pytest.mark.parametrize("value", [np.array(None), ctypes.py_object("text")], ids=["numpy", "ctypes"])
def test_a_reference_to_a_python_object_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="a kernel can't take"):
        pack_listed([value])
    with pytest.raises(InvalidRequest, match="bytes"):
        KernelArgs().push_raw(value)


@pytest.mark.parametrize(
    ("value", "told", "words"),
    [
        (7, T.UNTOLD, r"7 has no size.*np\.uint32\(7\)"),
        (7, T.B32, r"7 has no size, and the parameter, \.b32, has no single type"),
        (2.5, T.UNTOLD, r"np\.float32\(2\.5\)"),
        (-(2**31) - 1, T.U32, r"-2147483649 does not fit the parameter, \.u32"),
        (-1, T.POINTER, r"-1 does not fit the parameter"),
        (1e300, T.F32, r"does not fit the parameter, \.f32"),
        ("text", T.U32, r"a kernel can't take 'text'"),
        (None, T.UNTOLD, r"a kernel can't take None"),
        (np.zeros(4, np.float32), T.POINTER, r"an array in the host's memory.*Write it to a buffer"),
    ],
)
def test_a_list_s_misfits_are_refused(value: Any, told: T, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)argument 0: .*{words}"):
        pack_listed([value], [told])


@pytest.mark.parametrize(
    ("kind", "told", "is_refused"),
    [
        ("u32", T.F32, True),
        ("f32", T.U32, True),
        ("f64", T.POINTER, True),
        ("buffer", T.F64, True),
        ("u32", T.S32, False),
        ("i64", T.POINTER, False),
        ("buffer", T.U64, False),
        ("f32", T.B32, False),
        ("u32", T.UNTOLD, False),
        (4, T.F32, False),
        ("f16", T.F16, False),
        ("f32", T.F16X2, False),
    ],
)
def test_a_float_and_an_integer_are_no_match(kind: str | int, told: T, is_refused: bool) -> None:
    assert mismatch(kind, told) is is_refused
