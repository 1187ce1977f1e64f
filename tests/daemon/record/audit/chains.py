"""Small audit logs as bytes, and what a reader returns for them."""

from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import HealthCheck, settings

from gpulease.daemon.record.audit.records import ChainEnd, Draft, RecordKind, seal
from gpulease.daemon.record.audit.verification import Verdict, Verifier

ANY_SPEED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Settings without time limits, because an example may take long on a busy host."""

BOOT = "0123456789abcdef" * 2
OTHER_BOOT = "fedcba9876543210" * 2
WALL_US = 1_790_000_000_000_000
FILE = "audit-0000000000000001.jsonl"


def draft(kind: RecordKind, mono_us: int = 1, **data: Any) -> Draft:
    return Draft(kind, data, WALL_US + mono_us, mono_us)


def sealed(drafts: Iterable[Draft], after: ChainEnd | None = None, boot: str = BOOT) -> tuple[list[bytes], ChainEnd]:
    """Return the log's lines, without newlines, and the end of the chain."""
    link, lines = after or ChainEnd(), []
    for one in drafts:
        line, link = seal(one, link, boot)
        lines.append(line)
    return lines, link


def text_of(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def verdict_of(files: Mapping[str, bytes], head: ChainEnd | None = None) -> Verdict:
    """Return the verdict on whole files, which are read line by line."""
    verifier = Verifier(head)
    for name, data in files.items():
        offset = 0
        for line in _lines(data):
            verifier.take(name, offset, line)
            offset += len(line)
    return verifier.finish()


def _lines(data: bytes) -> list[bytes]:
    """Split data at newlines. `bytes.splitlines` would also split at carriage returns."""
    parts = [part + b"\n" for part in data.split(b"\n")]
    parts[-1] = parts[-1][:-1]
    return [part for part in parts if part]


def a_life() -> list[Draft]:
    """Return the records of a lease of 1000 bytes that lives for 2 s, and of one that is denied."""
    who = {"lease": f"{7:032x}", "tenant": "uid:1000", "size_bytes": 1000}
    return [
        draft(RecordKind.START, 1_000_000, format=1, version="1.0"),
        draft(RecordKind.GRANT, 2_000_000, **who, ttl_ms=5000),
        draft(RecordKind.RENEW, 2_500_000, **who, ttl_ms=9000),
        draft(RecordKind.DENY, 3_000_000, tenant="uid:1001", operation="acquire", message='no room for "größe"\n'),
        draft(RecordKind.OVER, 4_000_000, **who, cause="freed", granted_us=2_000_000, over_us=4_000_000),
        draft(RecordKind.END, 4_100_000, **who, granted_us=2_000_000, over_us=4_000_000, latency_us=100_000),
        draft(RecordKind.STOP, 5_000_000),
    ]
