import contextlib
import tracemalloc
from typing import Any

import construct as c
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.protocol import BodyError, LocalProtocolError, codec, limits
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.primitives import NOT_PLAIN, LeaseParameter, Tlv

from . import strategies
from .encodings import BODY_CLASSES

KINDS = sorted(BODY_CLASSES)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_body_comes_back_as_it_went(name: str, data: st.DataObject) -> None:
    body = data.draw(strategies.records(BODY_CLASSES[name]))
    payload = build_body(body)
    assert parse_body(BODY_CLASSES[name], payload) == body
    assert parse_body(BODY_CLASSES[name], memoryview(payload)) == body
    # The plain form builds what the definition builds.
    schema = codec._SCHEMAS[BODY_CLASSES[name]]
    assert schema.plain.write(body) == schema.build(body)


def test_greetings_in_turn_and_repeated_are_each_their_own() -> None:
    options = (Tlv(7, b"seven"),)
    bodies = [
        m.Hello(0, "a", ()),
        m.Hello(0, "a", options),
        m.HelloReply(0, "a", 5, ()),
        m.AttachReply(9, "cpu", "u", options),
    ]
    payloads = [build_body(body) for body in bodies * 3]
    assert payloads == [codec._SCHEMAS[type(body)].build(body) for body in bodies * 3]
    assert [parse_body(type(body), payload) for body, payload in zip(bodies * 3, payloads, strict=True)] == bodies * 3
    assert parse_body(m.Hello, payloads[0]) is parse_body(m.Hello, payloads[0])
    for _ in range(2):
        with pytest.raises(BodyError, match="do not belong to it"):
            parse_body(m.Hello, payloads[0] + b"\0")


@settings(max_examples=120, deadline=None)
@given(body=strategies.BODIES, data=st.data())
def test_a_body_cut_short_or_with_a_tail_is_malformed(body: m.Body, data: st.DataObject) -> None:
    payload = build_body(body)
    with pytest.raises(BodyError, match="do not belong to it"):
        parse_body(type(body), payload + b"\0")
    if payload:
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(BodyError):
            parse_body(type(body), payload[:cut])


@settings(max_examples=600, deadline=None)
@given(body=strategies.BODIES, data=st.data())
def test_the_plain_form_reads_what_the_definition_reads_or_leaves_it(body: m.Body, data: st.DataObject) -> None:
    payload = bytearray(build_body(body))
    for _ in range(data.draw(st.integers(0, 2)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(0, 255))
    schema, flipped = codec._SCHEMAS[type(body)], bytes(payload)
    try:
        found, end = schema.plain.read(flipped, 0)
    except NOT_PLAIN:
        found, end = None, -1
    try:
        defined = schema.parse(flipped)
    except c.ConstructError:
        assert end != len(flipped)
        return
    if schema.build(defined) == flipped:
        # It ends where the payload does, and is written in one way: nothing is left for the definition to judge.
        assert (found, end) == (defined, len(flipped))


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(KINDS), payload=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_body_or_a_body_error(name: str, payload: bytes) -> None:
    try:
        body = parse_body(BODY_CLASSES[name], payload)
    except BodyError:
        return
    assert type(body) is BODY_CLASSES[name]


@settings(max_examples=200, deadline=None)
@given(body=strategies.BODIES, data=st.data())
def test_a_flipped_byte_gives_a_body_or_a_body_error(body: m.Body, data: st.DataObject) -> None:
    payload = bytearray(build_body(body))
    if payload:
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BodyError):
        assert type(parse_body(type(body), bytes(payload))) is type(body)


def test_parsing_is_exact_where_the_encoding_has_one_form() -> None:
    with pytest.raises(BodyError, match="present flag of 2"):
        parse_body(m.FenceClear, b"\x02")
    with pytest.raises(BodyError, match="not UTF-8"):
        parse_body(m.FenceClear, b"\x01\0\0\0\x01\xff")
    with pytest.raises(BodyError, match="ends too early"):
        parse_body(m.FenceClear, b"\x01\0\0\0\x02a")


REPORTS_REFUSED = {
    "nothing": b"",
    "never used byte": b"\xc1",
    "two values": b"\x01\x02",
    "cut short": b"\x92\x01",
    "text that is not UTF-8": b"\xa1\xff",
    "a map keyed by a number": b"\x81\x01\x02",
    "a map keyed by a list": b"\x81\x90\x02",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a string of four billion": b"\xdb\xff\xff\xff\xff",
    "nested too deep": b"\x91" * 5000 + b"\x01",
    "a timestamp of a wrong size": b"\xc7\x05\xff\0\0\0\0\0",
}


@pytest.mark.parametrize("packed", REPORTS_REFUSED.values(), ids=REPORTS_REFUSED)
def test_a_report_that_is_not_msgpack_is_malformed(packed: bytes) -> None:
    with pytest.raises(BodyError, match="not msgpack"):
        parse_body(m.Report, len(packed).to_bytes(4, "big") + packed)


@settings(max_examples=300, deadline=None)
@given(packed=st.binary(max_size=64))
def test_any_bytes_as_a_report_are_a_value_or_a_body_error(packed: bytes) -> None:
    try:
        parse_body(m.Report, len(packed).to_bytes(4, "big") + packed)
    except BodyError:
        with pytest.raises((ValueError, msgpack.UnpackException)):
            msgpack.unpackb(packed, strict_map_key=True)


AT_THE_LIMIT: dict[str, tuple[Any, str, Any, Any]] = {
    "error text": (m.ErrorBody("", ()), "message", "x" * limits.MAX_ERROR_TEXT_BYTES, "x"),
    "text": (m.FenceClear(None), "device", "é" * (limits.MAX_TEXT_BYTES // 2), "x"),
    "kernel name": (m.Launch(0, "", 1, 1, 1, 1, 1, 1, 0, b"", ()), "kernel", "k" * limits.MAX_KERNEL_NAME_BYTES, "k"),
    "arguments": (m.Launch(0, "", 1, 1, 1, 1, 1, 1, 0, b"", ()), "args", b"a" * limits.MAX_ARGUMENT_BYTES, b"a"),
    "sizes": (m.Launch(0, "", 1, 1, 1, 1, 1, 1, 0, b"", ()), "arg_sizes", (1,) * limits.MAX_ARGUMENTS, (1,)),
    "data": (m.MemWrite(1, 0, b""), "data", b"\xa5" * limits.MAX_DATA_BYTES, b"\xa5"),
    "data read": (m.Data(b""), "data", b"\xa5" * limits.MAX_DATA_BYTES, b"\xa5"),
    "kernels": (m.ModuleLoaded(1, ()), "kernels", (m.KernelEntry("k", 1, ()),) * limits.MAX_KERNELS, None),
    "options": (m.Attach(()), "options", (Tlv(9, b""),) * limits.MAX_TLVS, (Tlv(9, b""),)),
    "parameters": (
        m.LeaseAlloc(5, 1, 1, 0, None, ()),
        "parameters",
        (LeaseParameter(1, b""),) * limits.MAX_TLVS,
        (LeaseParameter(1, b""),),
    ),
}


@pytest.mark.parametrize("case", AT_THE_LIMIT)
def test_a_limit_itself_fits_and_one_more_does_not(case: str) -> None:
    small, name, largest, one = AT_THE_LIMIT[case]
    one = one if one is not None else largest[:1]
    values = {item: getattr(small, item) for item in small.__dataclass_fields__}
    body = type(small)(**values | {name: largest})
    assert parse_body(type(small), build_body(body)) == body
    with pytest.raises(LocalProtocolError, match="are allowed"):
        build_body(type(small)(**values | {name: largest + one}))


def test_a_length_over_its_limit_is_refused_by_the_length_alone() -> None:
    for kind, before, limit in (
        (m.MemWrite, 16, limits.MAX_DATA_BYTES),
        (m.Data, 0, limits.MAX_DATA_BYTES),
        (m.ModuleLoad, 0, limits.MAX_PAYLOAD_BYTES),
        (m.ErrorBody, 0, limits.MAX_ERROR_TEXT_BYTES),
        (m.Report, 0, limits.MAX_PAYLOAD_BYTES),
    ):
        with pytest.raises(BodyError, match=f"at most {limit} are allowed"):
            parse_body(kind, bytes(before) + (limit + 1).to_bytes(4, "big"))


WRONG_VALUES: dict[str, m.Body] = {
    "too large": m.Ping(2**64),
    "negative": m.Ping(-1),
    "id too large": m.LeaseRef(2**128),
    "negative id": m.LeaseRef(-1),
    "half a surrogate": m.FenceClear("\ud800"),
    "no number": m.Ping("7"),  # type: ignore[arg-type]
    "no text": m.FenceClear(7),  # type: ignore[arg-type]
    "no list": m.Attach(None),  # type: ignore[arg-type]
    "no item": m.Attach((1,)),  # type: ignore[arg-type]
    "long value": m.Attach((Tlv(1, bytes(0x10000)),)),
    "no msgpack": m.Report({"x": object()}),
    "number too large for msgpack": m.Report(2**64),
}


@pytest.mark.parametrize("body", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_that_does_not_fit_is_our_mistake(body: m.Body) -> None:
    with pytest.raises(LocalProtocolError, match=f"{type(body).__name__} can't be encoded"):
        build_body(body)


@pytest.mark.parametrize("length", [limits.MAX_DATA_BYTES, limits.MAX_DATA_BYTES + 1, 0xFFFF_FFFF])
def test_a_length_reserves_nothing(length: int) -> None:
    payload = bytes(16) + length.to_bytes(4, "big") + bytes(100)
    counted = b"\0\0\0\0\0\0\0\1" + b"\xff\xff" + bytes(100)
    tracemalloc.start()
    try:
        for kind, data in ((m.MemWrite, payload), (m.ModuleLoaded, counted), (m.Attach, b"\xff\xff")):
            with pytest.raises(BodyError):
                parse_body(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
