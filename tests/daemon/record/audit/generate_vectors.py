"""Writes `vectors/audit/`: `PYTHONPATH=.dev:tests python -m tests.daemon.record.audit.generate_vectors`.

A test generates them again and compares. A changed file is another format, and needs another format number.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from gpulease.daemon.record.audit.records import Draft, Head, RecordKind, head_bytes

from .chains import BOOT, FILE, a_life, draft, sealed, text_of

FOLDER = Path(__file__).parents[4] / "vectors" / "audit"
PIECE = b'{"at":"2026-'


def documents() -> dict[str, bytes]:
    """Every file's bytes, by its path inside `vectors/audit/`."""
    first, link = sealed(a_life())
    torn = {"offset": len(text_of(first)), "size_bytes": len(PIECE), "sha256": hashlib.sha256(PIECE).hexdigest()}
    crash = {"format": 1, "torn": torn, "previous": {"boot": BOOT, "alive_us": 9_000_000}}
    second, link = sealed([draft(RecordKind.START, 10_000_000, **crash)], link)
    third, link = sealed(another_life(), link)
    whole = text_of(first) + PIECE + b"\n" + text_of(second)
    name = f"audit-{len(first) + len(second) + 1:016d}.jsonl"
    head = head_bytes(Head(link, BOOT, 21_000_000))
    return {
        f"whole/{FILE}": whole,
        f"whole/{name}": text_of(third),
        "whole/head.json": head,
        "broken.json": broken(first, whole, text_of(third), name),
    }


def another_life() -> list[Draft]:
    who = {"lease": f"{8:032x}", "tenant": "uid:1001", "size_bytes": 1 << 20}
    previous = {"boot": BOOT, "alive_us": 20_000_000}
    said = {"lease": f"{8:032x}", "tenant": "uid:1001", "note": {"reason": "é", "sampling": {"top_p": "0.95"}}}
    return [
        draft(RecordKind.GRANT, 11_000_000, **who, note='"\\\b\f\n\r\t\x00\x1f\x7f/ é 日本 😀'),
        draft(RecordKind.NOTE, 12_000_000, **said),
        draft(RecordKind.START, 30_000_000, format=1, previous=previous),
    ]


def broken(first: list[bytes], whole: bytes, third: bytes, name: str) -> bytes:
    """What was done to one of the files, and where it must show first."""

    def case(what: str, file: str, data: bytes, at: tuple[str, int, int]) -> dict[str, Any]:
        found = dict(zip(("file", "offset_bytes", "seq"), at, strict=True))
        return {"what": what, "file": file, "hex": data.hex(), "found": found}

    ends = [len(text_of(first[:count])) for count in range(len(first) + 1)]
    edited = whole.replace(b'"size_bytes":1000', b'"size_bytes":1001', 1)
    swapped = text_of([first[0], first[2], first[1], *first[3:]]) + whole[ends[-1] :]
    cases = [
        case("a record is edited", FILE, edited, (FILE, ends[2], 3)),
        case("a record is no longer canonical", FILE, whole.replace(b",", b", ", 1), (FILE, 0, 1)),
        case("a record is taken out", FILE, whole[: ends[3]] + whole[ends[4] :], (FILE, ends[3], 5)),
        case("two records change places", FILE, swapped, (FILE, ends[1], 3)),
        case(
            "the torn piece is changed",
            FILE,
            whole.replace(PIECE + b"\n", PIECE[:-1] + b"x\n"),
            (FILE, ends[7], 8),
        ),
        case("the end is cut off", name, text_of(third.splitlines()[:1]), ("", 0, 0)),
        case("a whole file is empty", FILE, b"", ("", 0, 0)),
    ]
    return json.dumps(cases, indent=1).encode() + b"\n"


def main() -> None:
    for path, data in documents().items():
        target = FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


if __name__ == "__main__":
    main()
