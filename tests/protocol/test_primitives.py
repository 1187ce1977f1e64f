from dataclasses import dataclass
from typing import Any

import construct as c
import pytest

from gpulease.protocol import primitives as p

from .encodings import encoding_of, fields_of

ONE_FORM: dict[str, tuple[Any, Any, str]] = {
    "u8": (p.U8, 0xFE, "fe"),
    "u16": (p.U16, 0x0102, "0102"),
    "i16": (p.I16, -2, "fffe"),
    "u32": (p.U32, 0x01020304, "01020304"),
    "u64": (p.U64, 0x0102, "0000000000000102"),
    "u128": (p.U128, 0x0102, "00000000000000000000000000000102"),
    "bytes": (p.sized_bytes(9), b"\xaa\xbb", "00000002aabb"),
    "no bytes": (p.sized_bytes(9), b"", "00000000"),
    "text": (p.text(9), "é", "00000002c3a9"),
    "list": (p.list_of(p.U16, 9), (1, 2), "000200010002"),
    "empty list": (p.list_of(p.U16, 9), (), "0000"),
    "nothing": (p.optional(p.U16), None, "00"),
    "something": (p.optional(p.U16), 0, "010000"),
    "tlvs": (p.TLVS, (p.Tlv(1, b"\xaa"), p.Tlv(2, b"")), "0002010001aa020000"),
    "parameters": (p.LEASE_PARAMETERS, (p.LeaseParameter(0x0903, b"\1"),), "00010903000101"),
    "report": (p.REPORT, {"a": [1, None, True, 1.5]}, "0000001081a1619401c0c3cb3ff8000000000000"),
}


@pytest.mark.parametrize("case", ONE_FORM)
def test_an_encoding_byte_for_byte(case: str) -> None:
    subcon, value, expected = ONE_FORM[case]
    assert subcon.build(value).hex() == expected
    assert subcon.parse(bytes.fromhex(expected)) == value


REFUSED: dict[str, tuple[Any, str]] = {
    "bytes over": (p.sized_bytes(2), "00000003aabbcc"),
    "text over": (p.text(2), "00000003616263"),
    "list over": (p.list_of(p.U8, 2), "0003010203"),
    "present 2": (p.optional(p.U8), "0201"),
    "present 255": (p.optional(p.U8), "ff"),
    "not UTF-8": (p.text(9), "00000001ff"),
    "not msgpack": (p.REPORT, "00000001c1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_is_not_allowed(case: str) -> None:
    subcon, data = REFUSED[case]
    with pytest.raises(p.BadValue):
        subcon.parse(bytes.fromhex(data))


@pytest.mark.parametrize("subcon", [p.sized_bytes(2), p.list_of(p.U8, 2), p.text(2)], ids=["bytes", "list", "text"])
def test_the_limit_holds_on_the_way_out(subcon: Any) -> None:
    value: Any = "abc" if encoding_of(subcon).kind == "text" else b"abc"
    with pytest.raises(p.BadValue, match="at most 2 are allowed"):
        subcon.build(value)


@pytest.mark.parametrize("record", [p.Tlv, p.LeaseParameter])
def test_a_value_of_64_kib_does_not_fit(record: Any) -> None:
    schema = p.Record(record)
    longest = record(1, bytes(65535))
    assert schema.parse(schema.build(longest)) == longest
    with pytest.raises(c.ConstructError):
        schema.build(record(1, bytes(65536)))


def test_a_record_is_its_dataclass() -> None:
    @dataclass(frozen=True)
    class Pair:
        first: int = p.wire(p.U8)
        second: str = p.wire(p.text(9))

    schema = p.Record(Pair)
    assert schema.build(Pair(1, "x")).hex() == "010000000178"
    assert schema.parse(b"\1\0\0\0\1x") == Pair(1, "x")
    assert p.struct_of(Pair).build({"first": 1, "second": "x"}) == schema.build(Pair(1, "x"))
    assert {name: str(encoding) for name, encoding in fields_of(Pair).items()} == {"first": "u8", "second": "text"}
