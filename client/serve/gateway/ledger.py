"""The rules of the idempotency store, without I/O and without a clock: one entry and one request in, one entry out.

    (no entry) --reserve--> RESERVED --start--> STARTED --complete--> COMPLETED
                               |  ^                |
                        release|  |reserve         |claim over, reserve
                               v  |                v
                             RELEASED            UNKNOWN

An entry is RESERVED while an attempt prepares: whatever happens to that attempt, it has had no effect. It is STARTED
from just before the effect may begin. The claim of an attempt that dies expires. If the entry was RESERVED then, the
next attempt to reserve takes it over with a higher epoch, which the store requires for every later step. The earlier
attempt, if it was only slow, can begin nothing after that. If the entry was STARTED, it can't be known whether the
effect happened: the entry stays UNKNOWN forever, and the operation is not done again.

Every rule can be applied twice with the same claim id: a store may repeat a transaction if its end was not reported.

The key of an operation is `inference:` and the request's id. Its hash identifies it: SHA-256 (FIPS 180-4) over
five fields in this order, each preceded by its length in bytes as a big-endian u32:

    logical resource name   "gpu"
    kind                    "inference"
    verb                    "serve"
    schema id               "gpulease.inference.v1"
    payload

and the payload is

    request id (UTF-8) 0x00 model id (UTF-8) 0x00 output length in bytes (u64, big-endian) input (all that is left)

Neither id holds a zero byte, so no two requests have the same payload. Each field says how long it is, so no two lists
of fields have the same bytes. `vectors/gateway/operations.json` has examples for other languages.
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, TypeAlias

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.gateway_errors import OperationConflict, StaleEpoch

RESOURCE: Final = "gpu"
KIND: Final = "inference"
VERB: Final = "serve"
SCHEMA_ID: Final = "gpulease.inference.v1"

MAX_ID_BYTES: Final = 200
"""Longest request or model id in UTF-8. Stops keys that no store can index, and unreadable log lines."""

MAX_OUTPUT_WIRE: Final = 2**64 - 1

_LENGTH: Final = struct.Struct(">I")
_OUTPUT_LEN: Final = struct.Struct(">Q")


def operation_key(request_id: str) -> str:
    """Return the key that reserves a request. Raises InvalidRequest for a bad id."""
    return f"{KIND}:{checked_id(request_id, 'request id')}"


def operation_hash(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """Return the 32 bytes that identify this operation. Raises InvalidRequest."""
    payload = operation_payload(request_id, model_id, output_len, input_bytes)
    digest = hashlib.sha256()
    for field in (RESOURCE.encode(), KIND.encode(), VERB.encode(), SCHEMA_ID.encode(), payload):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()


def operation_payload(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """Return the last of the hashed fields. Raises InvalidRequest."""
    if not 0 < output_len <= MAX_OUTPUT_WIRE:
        raise InvalidRequest(f"output_len must be at least 1 and fit a u64, not {output_len}")
    ids = (checked_id(request_id, "request id").encode(), checked_id(model_id, "model id").encode())
    return b"".join((ids[0], b"\0", ids[1], b"\0", _OUTPUT_LEN.pack(output_len), input_bytes))


def checked_id(text: str, what: str) -> str:
    """Return an id of 1 to MAX_ID_BYTES bytes of printable UTF-8. Raises InvalidRequest."""
    try:
        size = len(text.encode())
    except (UnicodeEncodeError, AttributeError):
        size = 0
    if not 0 < size <= MAX_ID_BYTES or not text.isprintable():
        raise InvalidRequest(f"a {what} has 1 to {MAX_ID_BYTES} bytes of UTF-8, all of them printable characters")
    return text


MAX_OUTCOME_BYTES: Final = 17 << 20
"""Largest outcome kept: an output of 16 MiB and its head. Stops a model whose outputs fill the store."""


def checked_outcome(outcome: bytes) -> bytes:
    """Return the outcome. Raises InvalidRequest if it is too large to keep."""
    if len(outcome) > MAX_OUTCOME_BYTES:
        raise InvalidRequest(f"an outcome of {len(outcome)} bytes; at most {MAX_OUTCOME_BYTES} are kept")
    return outcome


class Phase(IntEnum):
    """The progress of an operation. Stores keep the numbers."""

    RESERVED = 1
    STARTED = 2
    RELEASED = 3
    COMPLETED = 4
    UNKNOWN = 5


ENDED: Final = frozenset({Phase.RELEASED, Phase.COMPLETED, Phase.UNKNOWN})
"""Phases in which no attempt is under way."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of the clock by which claims run out.

    Attributes:
        clock_id: The clock, for example a host's boot. Times of different clocks can't be compared.
        now_s: Its seconds.
    """

    clock_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of one operation.

    Attributes:
        request_hash: The operation that the key stands for.
        epoch: The fence: goes up with each reservation, and when the entry becomes UNKNOWN.
        claim_id: 16 random bytes of the attempt that reserved it.
        phase: Its progress.
        clock_id: The clock of `claim_until_s`.
        claim_until_s: The time until which its attempt is presumed alive.
        outcome: The outcome, once COMPLETED.
    """

    request_hash: bytes
    epoch: int
    claim_id: bytes
    phase: Phase
    clock_id: str
    claim_until_s: float
    outcome: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to make one attempt at an operation, until another attempt reserves it."""

    key: str
    request_hash: bytes
    epoch: int
    claim_id: bytes


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another attempt is under way, for `remaining_s` more at most."""

    epoch: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The operation was done, with this outcome."""

    epoch: int
    outcome: bytes


@dataclass(frozen=True, slots=True)
class Unknown:
    """An attempt began the operation and is gone: it may have been done, and is not done again."""

    epoch: int


ReserveResult: TypeAlias = Reservation | InFlight | Completed | Unknown


def reserve(
    entry: Entry | None, key: str, request_hash: bytes, claim_id: bytes, at: Moment, claim_ttl_s: float
) -> tuple[Entry | None, ReserveResult]:
    """Return the entry to keep and the answer. Raises OperationConflict if the key stands for another operation."""
    if entry is not None and entry.request_hash != request_hash:
        raise OperationConflict(f"{key} was used for another operation: its model, input or output length was another")
    if entry is not None and entry.claim_id == claim_id and entry.phase is Phase.RESERVED:
        return entry, Reservation(key, request_hash, entry.epoch, claim_id)
    if entry is not None and entry.phase is Phase.COMPLETED:
        return entry, Completed(entry.epoch, entry.outcome)
    if entry is not None and entry.phase is Phase.UNKNOWN:
        return entry, Unknown(entry.epoch)
    if entry is not None and entry.phase is not Phase.RELEASED:
        remaining_s = entry.claim_until_s - at.now_s if entry.clock_id == at.clock_id else 0.0
        if remaining_s > 0:
            return entry, InFlight(entry.epoch, remaining_s)
        if entry.phase is Phase.STARTED:
            return replace(entry, epoch=entry.epoch + 1, phase=Phase.UNKNOWN), Unknown(entry.epoch + 1)
    epoch = 1 if entry is None else entry.epoch + 1
    made = Entry(request_hash, epoch, claim_id, Phase.RESERVED, at.clock_id, at.now_s + claim_ttl_s)
    return made, Reservation(key, request_hash, epoch, claim_id)


def start(entry: Entry | None, held: Reservation) -> Entry:
    """Return the entry of an effect that is about to begin. Raises StaleEpoch."""
    return _advanced(entry, held, Phase.STARTED, (Phase.RESERVED,))


def complete(entry: Entry | None, held: Reservation, outcome: bytes) -> Entry:
    """Return the entry of an effect that ended with this outcome. Raises StaleEpoch."""
    return replace(_advanced(entry, held, Phase.COMPLETED, (Phase.STARTED,), outcome), outcome=outcome)


def release(entry: Entry | None, held: Reservation) -> Entry:
    """Return the entry of an attempt that began nothing, so that another may try. Raises StaleEpoch."""
    return _advanced(entry, held, Phase.RELEASED, (Phase.RESERVED,))


def _advanced(
    entry: Entry | None, held: Reservation, to: Phase, from_phases: tuple[Phase, ...], outcome: bytes = b""
) -> Entry:
    is_held = entry is not None and (entry.epoch, entry.claim_id) == (held.epoch, held.claim_id)
    if is_held and entry is not None:
        if entry.phase in from_phases:
            return replace(entry, phase=to)
        if entry.phase is to and entry.outcome == outcome:
            return entry
    why = "is gone" if entry is None else f"has epoch {entry.epoch} and is {entry.phase.name.lower()}"
    raise StaleEpoch(f"{held.key}: epoch {held.epoch} of this attempt can't become {to.name.lower()}: the entry {why}")
