"""Inputs and outputs as JSON numbers: the kernel gets what was sent, or the request is refused with a reason."""

import json
import math
import struct
import tracemalloc
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.serve.models.json_numbers import (
    FORMATS,
    MAX_NUMBER_CHARS,
    MAX_NUMBERS,
    NumbersRefused,
    pack,
    parsed_input,
    size_of,
    unpack,
)

DTYPES = {kind: np.dtype(f"<{kind[0]}{size_of(kind)}") for kind in FORMATS}


def asked(value: object) -> bytes:
    return json.dumps({"input": value}).encode()


def taken(body: bytes, kind: str = "f32", numbers: int = 2, items: int = 3) -> bytes:
    return pack(parsed_input(body, items, numbers), kind, numbers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
def test_the_numbers_are_the_kernels(kind: str, data: st.DataObject) -> None:
    dtype = DTYPES[kind]
    if dtype.kind == "f":
        widths: dict[int, Literal[16, 32, 64]] = {2: 16, 4: 32, 8: 64}
        number = st.floats(width=widths[dtype.itemsize], allow_nan=False, allow_infinity=False)
    else:
        bounds = np.iinfo(dtype)
        number = st.integers(int(bounds.min), int(bounds.max))
    items = data.draw(st.lists(st.lists(number, min_size=2, max_size=2), min_size=1, max_size=3))
    payload = taken(asked(items), kind)
    assert payload == np.array(items, dtype).tobytes()
    assert unpack(payload, kind, 2, is_several=True) == items
    assert taken(asked(items[0]), kind) == payload[: 2 * dtype.itemsize]
    assert unpack(payload[: 2 * dtype.itemsize], kind, 2, is_several=False) == items[0]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b'{"input": [NaN, 1]}', "f32", "NaN is not a JSON number."),
        (b'{"input": [-Infinity, 1]}', "f32", "-Infinity is not a JSON number."),
        (b'{"input": [1, 1e999]}', "f64", "The input: value 1 must be f64, not Infinity."),
        (b'{"input": [1, 1e39]}', "f32", ": value 1 must be f32, not 1e+39."),
        (b'{"input": [[1, 2], [1, 70000]]}', "f16", "Item 1: value 1 must be f16, not 70000."),
        (asked([1, 10**400]), "f64", ": value 1 must be f64"),
        (b'{"input": [1, %s]}' % (b"9" * 5000), "f64", "It must be JSON: "),
        (b'{"input": [1, 256]}', "u8", "The input: value 1 must be u8, not 256."),
        (b'{"input": [-1, 1]}', "u64", ": value 0 must be u64, not -1."),
        (b'{"input": [1.0, 1]}', "i32", ": value 0 must be i32, not 1.0."),
        (b'{"input": [true, 1]}', "f32", ": value 0 must be f32, not true."),
        (b'{"input": [null, 1]}', "f32", "not null."),
        (b'{"input": ["1", 1]}', "f32", 'not "1".'),
        (asked(["x" * 900, 1]), "f32", "xxx…"),
        (b'{"input": []}', "f32", "The input must have 2 numbers, not 0."),
        (b'{"input": [1]}', "f32", "The input must have 2 numbers, not 1."),
        (b'{"input": [[1, 2], [1]]}', "f32", "Item 1 must have 2 numbers, not 1."),
        (b'{"input": [[1, 2], 1]}', "f32", "Item 1 must be an array like the others."),
        (b'{"input": [[1, [2]], [3, 4]]}', "f32", "value 1 must be f32, not [2]"),
        (b'{"input": [1, [2]]}', "f32", "value 1 must be f32, not [2]"),
        (b'{"input": [1, 2, 3, 4, 5, 6, 7]}', "f32", "It has more than 6 numbers"),
        (asked([[1, 2]] * 4), "f32", "It has more than 6 numbers"),
        (b'{"input": [{}, 1]}', "f32", "It has more than 6 numbers, or arrays"),
        (b'{"input": 5}', "f32", 'an object with one array, "input"'),
        (b'{"input": [1, 2], "more": 1}', "f32", "an object with one array"),
        (b'[1, 2]', "f32", "an object with one array"),
        (b'"', "f32", "It must be JSON: "),
        (b"\xff\xfe\xff", "f32", "It must be JSON: "),
        (b"", "f32", "It must be JSON: "),
    ],
)  # fmt: skip
def test_what_is_refused(body: bytes, kind: str, said: str) -> None:
    with pytest.raises(NumbersRefused) as raised:
        taken(body, kind)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 300


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789.eE+-input ntrufals', max_size=80).map(str.encode))
def test_any_body_is_taken_or_refused(body: bytes) -> None:
    try:
        payload = taken(body)
    except NumbersRefused:
        return
    assert len(payload) in (8, 16, 24)


JSON_NUMBER = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@given(st.recursive(JSON_NUMBER, lambda inner: st.lists(inner, max_size=4), max_leaves=12), st.sampled_from([*FORMATS]))
def test_any_value_is_taken_or_refused(value: Any, kind: str) -> None:
    try:
        payload = taken(asked(value), kind)
    except NumbersRefused:
        return
    assert all(map(math.isfinite, struct.unpack(f"<{len(payload) // size_of(kind)}{FORMATS[kind]}", payload)))


@pytest.mark.parametrize("part", [b"[],", b"{},", b"0,", b'"",', b"[", b'{"":'])
def test_no_body_takes_much_more_memory_than_its_own(part: bytes) -> None:
    body = b'{"input": [' + part * (64 * MAX_NUMBER_CHARS * 1024 // len(part))
    tracemalloc.start()
    try:
        with pytest.raises(NumbersRefused):
            parsed_input(body, 1, 64 * 1024)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 * len(body)


def test_as_many_as_there_may_be() -> None:
    items = [[0] * 1024 for _ in range(MAX_NUMBERS // 1024)]
    assert taken(asked(items), "u8", 1024, 4096) == bytes(MAX_NUMBERS)
    with pytest.raises(NumbersRefused, match=f"more than {MAX_NUMBERS} numbers"):
        taken(asked([*items, items[0]]), "u8", 1024, 4096)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_an_output_that_json_can_not_say(number: float) -> None:
    with pytest.raises(NumbersRefused, match="use base64"):
        unpack(struct.pack("<2f", 1, number), "f32", 2, is_several=False)
