"""Reads and writes the audit log's canonical values, records and head. The package's docstring describes the format."""

import hashlib
import json
import re
from enum import IntEnum, StrEnum
from functools import lru_cache
from types import NoneType
from typing import Any, Final, NamedTuple, Self

from gpulease.daemon.host.compact_json import compact_encoder
from gpulease.daemon.host.utc_time import utc_bytes
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import printable, shortened

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer (RFC 8785, section 3.2.2.3). Readers that store numbers as doubles would change a larger one."""

MAX_DEPTH: Final = 8
"""Maximum nesting of objects and arrays, so that a forged record can't exhaust its reader's stack."""

_KEY: Final = re.compile(r"[A-Za-z0-9_]+")
_encode: Final = compact_encoder(sorts_keys=True)


class NotCanonical(ValueError):
    """The value has no canonical bytes, or the bytes are not canonical; the message contains the reason."""


def canonical_bytes(value: Any, depth: int = 0) -> bytes:
    """Encode a value that has `depth` objects around it. Equal values have equal bytes. Raises NotCanonical."""
    _check(value, MAX_DEPTH - depth)
    try:
        return _encode(value)
    except UnicodeEncodeError:
        raise NotCanonical("a text holds half of a surrogate pair") from None


def value_of(data: bytes, depth: int = 0) -> Any:
    """Decode canonical bytes of a value with `depth` objects around it. Raises NotCanonical for other bytes."""
    try:
        # Parse any JSON without floats, then encode it again. The result differs if the bytes were not canonical.
        value = json.loads(data, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as error:
        raise NotCanonical(f"it is not JSON: {error}" if not isinstance(error, NotCanonical) else str(error)) from None
    if canonical_bytes(value, depth) != data:
        raise NotCanonical("it is not in canonical form")
    return value


def _no_float(text: str) -> Any:
    raise NotCanonical(f"{text[:32]} is not an integer")


def _check(value: Any, depth: int) -> None:
    """Raise NotCanonical for a value without canonical form."""
    kind = type(value)
    if kind is dict:
        # Records of one kind have the same keys, so the results of checks are cached. A tenant's note may have any
        # keys.
        if len(value) <= MAX_CHECKED_KEYS:
            _check_keys(tuple(value))
        else:
            for key in value:
                _check_key(key)
        items = value.values()
    elif kind in (list, tuple):
        items = value
    else:
        # Handle a scalar at the top as if it were in a list, without counting the list's depth.
        items, depth = (value,), depth + 1
    if depth == 0:
        raise NotCanonical(f"objects and arrays are more than {MAX_DEPTH} deep")
    for item in items:
        kind = type(item)
        if kind is str:
            continue
        if kind is int:
            if not -MAX_INTEGER <= item <= MAX_INTEGER:
                raise NotCanonical("an integer is beyond 2^53 - 1")
        elif kind in (dict, list, tuple):
            _check(item, depth - 1)
        elif kind is not bool and kind is not NoneType:
            raise NotCanonical(f"a {kind.__name__} has no canonical form")


MAX_CHECKED_KEYS: Final = 32
"""Maximum number of an object's keys for which the result of the check is cached."""


@lru_cache(maxsize=256)
def _check_keys(keys: tuple[object, ...]) -> None:
    for key in keys:
        _check_key(key)


@lru_cache(maxsize=1024)
def _check_key(key: object) -> None:
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise NotCanonical("a key is not made of ASCII letters, digits and underscores")


FORMAT: Final = 1
"""The format's number, in every `start` record."""

MAX_RECORD_BYTES: Final = 32 << 10
"""Maximum number of bytes of one line, so that a reader of a forged log needs little memory. A record normally has a
few hundred bytes.
"""

MAX_TEXT_CHARS: Final = 512
"""Maximum number of characters of a text from a tenant, a kernel or a driver, so that it can't fill a record."""

HEAD_BYTES: Final = 256
"""The size of the head's file. It is written with one write of less than a sector, so a crash leaves the old head or
the new one."""

HEAD_BEGIN: Final = b'{"alive_us":'
"""The first bytes of every head."""

NO_HASH: Final = "0" * 64

_HASH: Final = re.compile("[0-9a-f]{64}")
_BOOT: Final = re.compile("[0-9a-f]{32}")
_AT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
_MEMBERS: Final = {"at", "boot", "data", "kind", "mono_us", "prev", "seq"}


class LeaseStage(IntEnum):
    """How far a lease's life has got at a record. A lease never returns to an earlier stage."""

    LIVE = 0
    FENCED = 1
    ENDED = 2


class RecordKind(StrEnum):
    """The kinds of records.

    Attributes:
        is_minor: Whether a tenant can cause any number of such records. They are limited for each tenant, and dropped
            first.
        stage: The stage of the lease after the record; None if the record does not show it.
    """

    is_minor: bool
    stage: LeaseStage | None

    def __new__(cls, value: str, is_minor: bool, stage: LeaseStage | None) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.is_minor, member.stage = is_minor, stage
        return member

    # The daemon.
    START = "start", False, None
    STOP = "stop", False, None
    # Leases, regions and submits. Events that a tenant can repeat at will are minor.
    GRANT = "grant", False, LeaseStage.LIVE
    ADOPT = "adopt", False, LeaseStage.LIVE
    RENEW = "renew", True, LeaseStage.LIVE
    RESIZE = "resize", True, LeaseStage.LIVE
    PARK = "park", True, LeaseStage.LIVE
    RETURN = "return", True, LeaseStage.LIVE
    COLD = "cold", True, LeaseStage.LIVE
    MOVE = "move", False, LeaseStage.LIVE
    UPGRADE = "upgrade", False, LeaseStage.LIVE
    DENY = "deny", True, None
    ATTACH = "attach", True, LeaseStage.LIVE
    SUBMIT = "submit", True, None
    ISSUE = "issue", True, None
    WITHDRAW = "withdraw", True, None
    FAULT = "fault", False, LeaseStage.LIVE
    USE = "use", False, LeaseStage.LIVE
    OVER = "over", False, LeaseStage.LIVE
    END = "end", False, LeaseStage.ENDED
    FENCE = "fence", False, LeaseStage.FENCED
    CLEAR = "clear", False, None
    # Warm contexts, operators, and notes of tenants.
    POOL = "pool", False, None
    OPERATOR = "operator", False, None
    NOTE = "note", True, None
    # The log itself.
    GAP = "gap", False, None
    RESUME = "resume", False, None
    PRUNE = "prune", False, None


ENDS: Final = frozenset({RecordKind.OVER, RecordKind.END, RecordKind.FENCE})
"""Kinds that report that a lease is over."""


class NotARecord(ValueError):
    """The line is not a record; the message contains the reason."""


class NotAHead(ValueError):
    """The bytes are not a head; the message contains the reason."""


class Draft(NamedTuple):
    """A record before it has a sequence number. `wall_us` counts from 1970."""

    kind: RecordKind
    data: dict[str, Any]
    wall_us: int
    mono_us: int


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A line that was read. The package's docstring explains the members."""

    seq: int
    prev: str
    at: str
    boot: str
    mono_us: int
    kind: str
    data: dict[str, Any]


class ChainEnd(NamedTuple):
    """An end of a chain: the last record's number and the hash of its line."""

    seq: int = 0
    hash: str = NO_HASH


@dataclass(frozen=True, slots=True)
class Head:
    """The head: the log's end, and the last monotonic time at which the daemon was known to run."""

    end: ChainEnd
    boot: str
    alive_us: int


def hash_of(line: bytes) -> str:
    """Return the SHA-256 of a line without its newline, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def seal(draft: Draft, after: ChainEnd, boot: str) -> tuple[bytes, ChainEnd]:
    """Return a record's line, without its newline, and the chain's new end.

    If a bug in the daemon made a draft that can't be a record, the line is a record of the same kind with the problem
    as its particulars.
    """
    try:
        # Try the record as it is. If it does not fit, a second line has the problem instead of the particulars.
        line = _line(draft, canonical_bytes(draft.data, depth=1), after, boot)
        problem = "" if len(line) <= MAX_RECORD_BYTES else f"it has {len(line)} bytes"
    except NotCanonical as error:
        line, problem = b"", str(error)
    if problem:
        line = _line(draft, canonical_bytes({"unrecordable": problem}, depth=1), after, boot)
    return line, ChainEnd(after.seq + 1, hash_of(line))


def _line(draft: Draft, data: bytes, after: ChainEnd, boot: str) -> bytes:
    """Write the members in canonical form, sorted by name. Only `data` may need escapes."""
    return b'{"at":"%b","boot":"%b","data":%b,"kind":"%b","mono_us":%d,"prev":"%b","seq":%d}' % (
        utc_bytes(draft.wall_us),
        boot.encode(),
        data,
        draft.kind.value.encode(),
        draft.mono_us,
        after.hash.encode(),
        after.seq + 1,
    )


def read_record(line: bytes) -> AuditRecord:
    """Read a line without its newline. Raises NotARecord."""
    # The cheapest checks come first: size, JSON, members, types, forms.
    if len(line) > MAX_RECORD_BYTES:
        raise NotARecord(f"it has more than {MAX_RECORD_BYTES} bytes")
    try:
        members = value_of(line)
    except NotCanonical as error:
        raise NotARecord(str(error)) from None
    if not isinstance(members, dict) or members.keys() != _MEMBERS:
        raise NotARecord("its members are not those of a record")
    # Check the members' types one by one, because JSON allows any.
    record = AuditRecord(**members)
    if not (_is_count(record.seq) and record.seq > 0 and _is_count(record.mono_us)):
        raise NotARecord("seq or mono_us is not a count")
    if not (_is(_HASH, record.prev) and _is(_BOOT, record.boot) and _is(_AT, record.at)):
        raise NotARecord("prev, boot or at is invalid")
    if not isinstance(record.kind, str) or not isinstance(record.data, dict):
        raise NotARecord("kind or data is invalid")
    return record


def head_bytes(head: Head) -> bytes:
    """Encode a head. The result is always `HEAD_BYTES` long."""
    members = {"alive_us": head.alive_us, "boot": head.boot, "hash": head.end.hash, "seq": head.end.seq}
    return canonical_bytes(members).ljust(HEAD_BYTES - 1) + b"\n"


def read_head(data: bytes) -> Head:
    # Every head has this size.
    if len(data) != HEAD_BYTES or not data.endswith(b"\n"):
        raise NotAHead(f"it is not {HEAD_BYTES} bytes that end with a newline")
    try:
        members = value_of(data.rstrip(b" \n"))
    except NotCanonical as error:
        raise NotAHead(str(error)) from None
    if not isinstance(members, dict) or members.keys() != {"alive_us", "boot", "hash", "seq"}:
        raise NotAHead("its members are not those of a head")
    if not (_is_count(members["seq"]) and _is_count(members["alive_us"])):
        raise NotAHead("seq or alive_us is not a count")
    if not (_is(_HASH, members["hash"]) and _is(_BOOT, members["boot"])):
        raise NotAHead("hash or boot is invalid")
    return Head(ChainEnd(members["seq"], members["hash"]), members["boot"], members["alive_us"])


def clean_text(text: str, most_chars: int = MAX_TEXT_CHARS) -> str:
    """Shorten a text, and replace characters that move a terminal's cursor or change the text's direction."""
    return printable(shortened(text, most_chars), instead="\N{REPLACEMENT CHARACTER}")


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
