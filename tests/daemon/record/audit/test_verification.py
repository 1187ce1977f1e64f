"""Every change of a log shows, and where it is; none of its bytes can harm who reads it."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpulease.daemon.record.audit.records import MAX_RECORD_BYTES, ChainEnd, RecordKind
from gpulease.daemon.record.audit.verification import MAX_FINDINGS, Finding, Verifier

from .chains import ANY_SPEED, FILE, a_life, draft, sealed, text_of, verdict_of

LINES, END = sealed(a_life())
TEXT = text_of(LINES)
STARTS = [len(text_of(LINES[:index])) for index in range(len(LINES) + 1)]


def first_of(data: bytes, head: ChainEnd | None = END) -> Finding:
    return verdict_of({FILE: data}, head).findings[0]


def test_a_whole_log() -> None:
    verdict = verdict_of({FILE: TEXT}, END)
    assert verdict.is_whole
    assert (verdict.records, verdict.end, verdict.notes) == (7, END, [])


@ANY_SPEED
@given(st.data())
def test_any_changed_byte_shows_in_its_line_or_the_next(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != TEXT[at]))
    found = first_of(TEXT[:at] + bytes([byte]) + TEXT[at + 1 :])
    line = max(index for index, start in enumerate(STARTS) if start <= at)
    # The last line's own change shows in the head.
    assert found.offset_bytes in (STARTS[line], STARTS[min(line + 1, 6)])


@ANY_SPEED
@given(st.integers(0, len(TEXT) - 1))
def test_any_cut_shows(size: int) -> None:
    verdict = verdict_of({FILE: TEXT[:size]}, END)
    whole = sum(start <= size for start in STARTS) - 1
    cut = f"it ends with record {whole}, but its head is 7: records at the end were removed"
    assert any(found.problem == cut for found in verdict.findings)


@ANY_SPEED
@given(st.permutations(range(7)))
def test_any_other_order_shows(order: list[int]) -> None:
    assume(order != sorted(order))
    found = first_of(text_of(LINES[index] for index in order))
    wrong = next(at for at in range(1, 7) if order[at] != order[at - 1] + 1)
    assert found.offset_bytes == len(text_of(LINES[index] for index in order[:wrong]))
    assert found.seq == order[wrong] + 1


@pytest.mark.parametrize("index", range(1, 7))
def test_a_record_that_is_taken_out(index: int) -> None:
    found = first_of(text_of(LINES[:index] + LINES[index + 1 :]))
    if index < 6:
        assert (found.offset_bytes, found.seq) == (STARTS[index], index + 2)
        assert found.problem == f"records {index + 1} to {index + 1} are missing before it"
    else:
        assert "records at the end were removed" in found.problem


@pytest.mark.parametrize("index", range(7))
def test_a_record_that_is_repeated(index: int) -> None:
    found = first_of(text_of([*LINES[: index + 1], *LINES[index:]]))
    assert (found.offset_bytes, found.seq) == (STARTS[index + 1], index + 1)
    assert "moved or repeated" in found.problem


def test_an_edit_that_is_canonical() -> None:
    forged = json.loads(LINES[1]) | {"data": {"lease": f"{7:032x}", "tenant": "uid:1000", "size_bytes": 1}}
    lines = [LINES[0], json.dumps(forged, sort_keys=True, separators=(",", ":")).encode(), *LINES[2:]]
    found = first_of(text_of(lines))
    assert (found.seq, found.problem) == (3, "it does not have the hash of record 2: one of the two was edited")


def test_a_rest_that_was_sealed_anew_shows_in_the_head_alone() -> None:
    forged, end = sealed([draft(RecordKind.STOP)], ChainEnd(1, hashlib.sha256(LINES[0]).hexdigest()))
    data = text_of([LINES[0], *forged])
    assert verdict_of({FILE: data}).is_whole
    assert not verdict_of({FILE: data}, END).is_whole
    assert verdict_of({FILE: data}, end).is_whole
    last, _ = sealed([draft(RecordKind.STOP, 9)], ChainEnd(6, hashlib.sha256(LINES[5]).hexdigest()))
    found = first_of(text_of([*LINES[:6], *last]))
    assert (found.seq, found.problem) == (7, "it is not the record that the head refers to")


def test_what_follows_the_head_is_told() -> None:
    verdict = verdict_of({FILE: TEXT}, ChainEnd(5, hashlib.sha256(LINES[4]).hexdigest()))
    assert verdict.is_whole
    assert verdict.notes == ["2 records follow the head"]


# --- torn lines ---


def torn(piece: bytes, **told: Any) -> tuple[bytes, ChainEnd]:
    about = {"offset": len(TEXT), "size_bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()} | told
    (line,), end = sealed([draft(RecordKind.START, 6_000_000, format=1, torn=about)], END)
    return TEXT + piece + b"\n" + line + b"\n", end


@ANY_SPEED
@given(st.binary(min_size=1, max_size=50))
def test_a_torn_line_that_is_told_of(piece: bytes) -> None:
    data, end = torn(piece)
    verdict = verdict_of({FILE: data}, end)
    assert verdict.is_whole, verdict.findings
    assert "as recorded" in verdict.notes[0]


@pytest.mark.parametrize("told", [{"offset": 1}, {"size_bytes": 1}, {"sha256": "0" * 64}, {"more": 1}])
def test_one_that_is_told_of_wrongly(told: dict[str, Any]) -> None:
    data, end = torn(b"piece", **told)
    (found,) = verdict_of({FILE: data}, end).findings
    assert (found.offset_bytes, found.seq) == (len(TEXT), 8)


def test_one_that_is_not_there() -> None:
    data, end = torn(b"piece")
    (found,) = verdict_of({FILE: data.replace(b"piece\n", b"")}, end).findings
    assert found.problem == "it refers to a torn line that does not exist"


def test_a_piece_at_the_end() -> None:
    verdict = verdict_of({FILE: TEXT + LINES[1][:20]}, END)
    assert verdict.is_whole
    assert "in the middle of a line" in verdict.notes[0]
    assert not verdict_of({FILE: TEXT + LINES[1][:20] + b"\n"}, END).is_whole
    assert not verdict_of({FILE: TEXT[:-1]}, END).is_whole


# --- files ---


def test_a_log_in_several_files() -> None:
    files = {"a": text_of(LINES[:3]), "b": b"", "c": text_of(LINES[3:])}
    assert verdict_of(files, END).is_whole
    found = verdict_of({name: files[name] for name in ("c", "a")}, END).findings[0]
    assert (found.file, found.offset_bytes) == ("a", 0)
    assert "records 4 to 4 are missing" not in str(verdict_of({"a": files["a"], "c": files["c"]}, END).findings)


def test_files_that_were_removed() -> None:
    prune = draft(RecordKind.PRUNE, file="a", last=3, hash=hashlib.sha256(LINES[2]).hexdigest())
    lines, end = sealed([prune], END)
    assert verdict_of({"c": text_of([*LINES[3:], *lines])}, end).is_whole
    (found,) = verdict_of({"c": text_of(LINES[3:])}, END).findings
    assert found.problem == "it begins with record 4, and no record reports the removal of earlier ones"
    (found,) = verdict_of({"c": text_of([*LINES[4:], *lines])}, end).findings
    assert "begins with record 5" in found.problem


def test_no_log_at_all() -> None:
    assert verdict_of({}).is_whole
    assert not verdict_of({}, END).is_whole


def test_another_format() -> None:
    lines, end = sealed([draft(RecordKind.START, format=2)])
    assert "its format must be" in verdict_of({FILE: text_of(lines)}, end).findings[0].problem


# --- hostile bytes ---


@ANY_SPEED
@given(st.lists(st.binary(max_size=80) | st.sampled_from([line + b"\n" for line in LINES]), max_size=12))
def test_no_lines_do_harm(lines: list[bytes]) -> None:
    verifier = Verifier(END)
    for line in lines:
        verifier.take(FILE, 0, line)
    verdict = verifier.finish()
    assert verdict.is_whole == (lines == [line + b"\n" for line in LINES])


@pytest.mark.parametrize("data", [{"last": {}, "hash": []}, {"torn": [1]}, {"torn": {"offset": {}}}, {"format": {}}])
def test_no_particulars_do_harm(data: dict[str, Any]) -> None:
    lines, end = sealed([draft(RecordKind.PRUNE, **data), draft(RecordKind.START, **data)])
    assert verdict_of({FILE: text_of(lines)}, end).records == 2


def test_findings_are_bounded() -> None:
    verdict = verdict_of({FILE: (b"x" * MAX_RECORD_BYTES + b"\n" + LINES[0] + b"\n") * (MAX_FINDINGS + 5)})
    assert len(verdict.findings) == MAX_FINDINGS
    assert verdict.omitted > 5
