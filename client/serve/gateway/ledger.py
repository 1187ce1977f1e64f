"""The rules of the idempotency store. Pure: they take an entry and a request, and return the next entry.

    (no entry) --reserve--> RESERVED --start--> STARTED --complete--> COMPLETED
                               |  ^                |
                        release|  |reserve         |claim expired, reserve
                               v  |                v
                             RELEASED            UNKNOWN

An entry is RESERVED while an attempt prepares: if that attempt fails, it has had no effect. The entry becomes STARTED
just before the effect may begin. If an attempt dies, its claim expires. If the entry is RESERVED at that time, the next
attempt takes it over with a higher epoch, which the store requires for every later step: if the earlier attempt was
only slow, it can no longer begin its effect. If the entry is STARTED, it is unknown whether the effect happened: the
entry becomes UNKNOWN forever, and the operation is not executed again.

Every rule is idempotent for the same claim id, because a store may repeat a transaction if its commit is in doubt.

The key of an operation is `inference:` and the request's id. A hash identifies the operation: SHA-256 (FIPS 180-4) over
five fields in this order, each preceded by its length in bytes as a big-endian u32:

    logical resource name   "gpu"
    kind                    "inference"
    verb                    "serve"
    schema id               "gpulease.inference.v1"
    payload

The payload is

    request id (UTF-8) 0x00 model id (UTF-8) 0x00 output length in bytes (u64, big-endian) input (the rest)

Neither id contains a zero byte, so no two requests have the same payload. Each field is preceded by its length, so no
two lists of fields have the same bytes. `vectors/gateway/operations.json` has examples for other languages.
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
"""Longest request or model id in UTF-8, so that stores can index keys and log lines stay readable."""

MAX_OUTPUT_WIRE: Final = 2**64 - 1

_LENGTH: Final = struct.Struct(">I")
_OUTPUT_LEN: Final = struct.Struct(">Q")


def operation_key(request_id: str) -> str:
    """Return the key under which a store reserves a request. Raises InvalidRequest for an invalid id."""
    return f"{KIND}:{checked_id(request_id, 'request id')}"


def operation_hash(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """Return the hash, 32 bytes, that identifies this operation. Raises InvalidRequest."""
    payload = operation_payload(request_id, model_id, output_len, input_bytes)
    digest = hashlib.sha256()
    # Prefix each field with its length, so that no two lists of fields give the same bytes.
    for field in (RESOURCE.encode(), KIND.encode(), VERB.encode(), SCHEMA_ID.encode(), payload):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()


def operation_payload(request_id: str, model_id: str, output_len: int, input_bytes: bytes) -> bytes:
    """Return the payload, the last of the hashed fields. Raises InvalidRequest."""
    if not 0 < output_len <= MAX_OUTPUT_WIRE:
        raise InvalidRequest(f"output_len must be at least 1 and fit a u64, not {output_len}")
    ids = (checked_id(request_id, "request id").encode(), checked_id(model_id, "model id").encode())
    return b"".join((ids[0], b"\0", ids[1], b"\0", _OUTPUT_LEN.pack(output_len), input_bytes))


def checked_id(text: str, label: str) -> str:
    """Return an id of 1 to MAX_ID_BYTES bytes of printable UTF-8. Raises InvalidRequest."""
    try:
        # Unpaired surrogates can't be encoded, and a value that is not a string has no `encode`.
        size = len(text.encode())
    except (UnicodeEncodeError, AttributeError):
        size = 0
    if not 0 < size <= MAX_ID_BYTES or not text.isprintable():
        raise InvalidRequest(
            f"a {label} must have 1 to {MAX_ID_BYTES} bytes of UTF-8, all of them printable characters"
        )
    return text


MAX_OUTCOME_BYTES: Final = 17 << 20
"""Largest outcome that is kept: an output of 16 MiB and its head."""


def checked_outcome(outcome: bytes) -> bytes:
    """Return the outcome. Raises InvalidRequest if it is too large to keep."""
    if len(outcome) > MAX_OUTCOME_BYTES:
        raise InvalidRequest(f"an outcome must have at most {MAX_OUTCOME_BYTES} bytes to be kept, not {len(outcome)}")
    return outcome


class OperationPhase(IntEnum):
    """The progress of an operation. Stores contain the numbers, so they must not change."""

    RESERVED = 1
    STARTED = 2
    RELEASED = 3
    COMPLETED = 4
    UNKNOWN = 5


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of the clock by which claims expire.

    Attributes:
        clock_id: The clock, for example a host's boot. Times of different clocks can't be compared.
        now_s: The clock's time in seconds.
    """

    clock_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of one operation.

    Attributes:
        request_hash: The hash of the first operation that used the key.
        epoch: The fencing token. It increases with each reservation, and when the entry becomes UNKNOWN.
        claim_id: 16 random bytes of the attempt that reserved it.
        phase: The operation's progress.
        clock_id: The clock of `claim_until_s`.
        claim_until_s: The time until which the attempt is presumed alive.
        outcome: The outcome, if the phase is COMPLETED.
    """

    request_hash: bytes
    epoch: int
    claim_id: bytes
    phase: OperationPhase
    clock_id: str
    claim_until_s: float
    outcome: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to make one attempt at an operation, which ends when another attempt reserves it."""

    key: str
    request_hash: bytes
    epoch: int
    claim_id: bytes


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another attempt is in progress. Its claim expires in `remaining_s`."""

    epoch: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class OperationCompleted:
    """The operation was executed, with this outcome."""

    epoch: int
    outcome: bytes


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """An attempt began the operation and died. It may have been executed, and is not executed again."""

    epoch: int


ReserveResult: TypeAlias = Reservation | InFlight | OperationCompleted | UnknownOutcome


def reserve(
    entry: Entry | None, key: str, request_hash: bytes, claim_id: bytes, at: Moment, claim_ttl_s: float
) -> tuple[Entry | None, ReserveResult]:
    """Return the entry to store and the answer. Raises OperationConflict if the key was used for another operation."""
    if entry is not None and entry.request_hash != request_hash:
        raise OperationConflict(
            f"{key} was already used for another operation, or with another model, input or output length"
        )
    # This call has reserved it already, in an earlier transaction whose commit was uncertain.
    if entry is not None and entry.claim_id == claim_id and entry.phase is OperationPhase.RESERVED:
        return entry, Reservation(key, request_hash, entry.epoch, claim_id)
    # The operation was executed before: every repetition gets the same outcome.
    if entry is not None and entry.phase is OperationPhase.COMPLETED:
        return entry, OperationCompleted(entry.epoch, entry.outcome)
    # The operation is abandoned permanently, because it may have been executed.
    if entry is not None and entry.phase is OperationPhase.UNKNOWN:
        return entry, UnknownOutcome(entry.epoch)
    if entry is not None and entry.phase is not OperationPhase.RELEASED:
        # RESERVED or STARTED. Times of another clock, such as before a reboot, count as expired.
        remaining_s = entry.claim_until_s - at.now_s if entry.clock_id == at.clock_id else 0.0
        # The other attempt counts as alive until its claim expires.
        if remaining_s > 0:
            return entry, InFlight(entry.epoch, remaining_s)
        # The operation's attempt died when the effect might have begun. If the attempt is only slow, the higher epoch
        # stops it.
        if entry.phase is OperationPhase.STARTED:
            return replace(entry, epoch=entry.epoch + 1, phase=OperationPhase.UNKNOWN), UnknownOutcome(entry.epoch + 1)
    # The operation is new, released, or abandoned before its effect, so this attempt reserves it.
    epoch = 1 if entry is None else entry.epoch + 1
    created = Entry(request_hash, epoch, claim_id, OperationPhase.RESERVED, at.clock_id, at.now_s + claim_ttl_s)
    return created, Reservation(key, request_hash, epoch, claim_id)


def start(entry: Entry | None, reservation: Reservation) -> Entry:
    """Return the entry to store before an effect begins. Raises StaleEpoch."""
    return _advanced(entry, reservation, OperationPhase.STARTED, (OperationPhase.RESERVED,))


def complete(entry: Entry | None, reservation: Reservation, outcome: bytes) -> Entry:
    """Return the entry to store after an effect ended with this outcome. Raises StaleEpoch."""
    return replace(
        _advanced(entry, reservation, OperationPhase.COMPLETED, (OperationPhase.STARTED,), outcome), outcome=outcome
    )


def release(entry: Entry | None, reservation: Reservation) -> Entry:
    """Return the entry to store after an attempt that began nothing, so that another may try. Raises StaleEpoch."""
    return _advanced(entry, reservation, OperationPhase.RELEASED, (OperationPhase.RESERVED,))


def _advanced(
    entry: Entry | None,
    reservation: Reservation,
    to: OperationPhase,
    from_phases: tuple[OperationPhase, ...],
    outcome: bytes = b"",
) -> Entry:
    # Only the attempt with the current epoch may advance the entry.
    is_held = entry is not None and (entry.epoch, entry.claim_id) == (reservation.epoch, reservation.claim_id)
    if is_held and entry is not None:
        if entry.phase in from_phases:
            return replace(entry, phase=to)
        # This transaction is a repetition: the first one has advanced the entry.
        if entry.phase is to and entry.outcome == outcome:
            return entry
    problem = "is gone" if entry is None else f"has epoch {entry.epoch} and is {entry.phase.name.lower()}"
    raise StaleEpoch(
        f"{reservation.key}: epoch {reservation.epoch} of this attempt can't become {to.name.lower()}: the entry"
        f" {problem}"
    )
