import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.record.audit.records import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARS,
    NO_HASH,
    ChainEnd,
    Draft,
    Head,
    NotAHead,
    NotARecord,
    RecordKind,
    clean_text,
    head_bytes,
    read_head,
    read_record,
    seal,
)

from .chains import ANY_SPEED, BOOT, a_life, draft, sealed
from .test_records_canonical import keys, values


@ANY_SPEED
@given(
    st.sampled_from(RecordKind),
    st.dictionaries(keys, values, max_size=4),
    st.integers(0, 2**51),
    st.integers(0, 2**53 - 1),
)
def test_what_was_sealed_is_read(kind: RecordKind, data: dict[str, Any], wall_us: int, mono_us: int) -> None:
    line, link = seal(Draft(kind, data, wall_us, mono_us), ChainEnd(4, "ab" * 32), BOOT)
    if len(line) > MAX_RECORD_BYTES or "unrecordable" in data:
        return
    record = read_record(line)
    assert (record.seq, record.prev, record.kind, record.boot) == (5, "ab" * 32, kind, BOOT)
    if "unrecordable" not in record.data:
        assert (record.data, record.mono_us) == (data, mono_us)
    assert link == ChainEnd(5, hashlib.sha256(line).hexdigest())


def test_each_tells_the_hash_of_the_one_before() -> None:
    lines, _ = sealed(a_life())
    told = [json.loads(line) for line in lines]
    assert [record["seq"] for record in told] == [1, 2, 3, 4, 5, 6, 7]
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    assert [record["prev"] for record in told] == [NO_HASH, *hashes[:-1]]
    assert told[0]["at"] == "2026-09-21T14:13:21.000000Z"


@pytest.mark.parametrize(
    ("data", "why"),
    [({"x": 1.5}, "a float"), ({"x": "\ud800"}, "surrogate"), ({"x": "y" * MAX_RECORD_BYTES}, "bytes")],
)
def test_what_can_be_no_record_is_told_of_in_its_place(data: dict[str, Any], why: str) -> None:
    line, link = seal(draft(RecordKind.FAULT, **data), ChainEnd(), BOOT)
    assert why in read_record(line).data["unrecordable"]
    assert link.seq == 1


def changed(**members: Any) -> bytes:
    (line, *_), _ = sealed(a_life())
    told = {key: value for key, value in (json.loads(line) | members).items() if value is not None}
    return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "line",
    [
        changed(seq=0),
        changed(seq=True),
        changed(seq="1"),
        changed(seq=None),
        changed(more=1),
        changed(prev="0" * 63),
        changed(prev="A" * 64),
        changed(prev=["0"]),
        changed(boot="x"),
        changed(at="yesterday"),
        changed(mono_us=-1),
        changed(kind=5),
        changed(data=[1]),
        b"[]",
        b"null",
        b"x" * (MAX_RECORD_BYTES + 1),
        b"",
    ],
)
def test_what_is_no_record(line: bytes) -> None:
    with pytest.raises(NotARecord):
        read_record(line)


def test_the_unchanged_one_is_a_record() -> None:
    assert read_record(changed()).kind == RecordKind.START


@ANY_SPEED
@given(st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1))
def test_a_head_has_one_size(seq: int, alive_us: int) -> None:
    head = Head(ChainEnd(seq, "cd" * 32), BOOT, alive_us)
    data = head_bytes(head)
    assert len(data) == HEAD_BYTES
    assert read_head(data) == head


@ANY_SPEED
@given(st.binary(max_size=300) | st.just(b"{}".ljust(HEAD_BYTES - 1) + b"\n") | st.just(b"[1]".ljust(255) + b"\n"))
def test_what_is_no_head(data: bytes) -> None:
    with pytest.raises(NotAHead):
        read_head(data)


def test_other_peoples_text() -> None:
    assert clean_text("a plain größe, 日本") == "a plain größe, 日本"
    assert clean_text('x\n{"seq":1}') == 'x\N{REPLACEMENT CHARACTER}{"seq":1}'
    for hostile in ("\x1b[2J", "\x9b2J", "\u202e", "\u2028", "\ud800", "\x00", "\x7f"):
        assert clean_text(f"a{hostile}").isprintable()
    assert len(clean_text("y" * 10_000)) == MAX_TEXT_CHARS
