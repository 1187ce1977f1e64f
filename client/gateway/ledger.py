"""The rules of the idempotency store, without I/O and without a clock: one entry and a wish in, one entry out.

    (no entry) --reserve--> RESERVED --start--> STARTED --complete--> COMPLETED
                               |  ^                |
                        release|  |reserve         |claim over, reserve
                               v  |                v
                             RELEASED            UNKNOWN

An entry is RESERVED while an attempt prepares: whatever happens to that attempt, it has had no effect. It is STARTED
from just before the effect may begin. An attempt that dies leaves its claim to run out. If it was RESERVED then,
the next to reserve takes it over with a higher epoch, which the store demands for every later step, so that the
earlier attempt, should it only have been slow, can begin nothing any more. If it was STARTED, nobody can know whether
the effect was had: the entry is UNKNOWN for ever, and it is not had again.

Every rule can be applied twice with the same claim id: a store may repeat a transaction whose end it did not learn.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, TypeAlias

from gpulease.client.gateway.errors import OperationConflict, StaleEpoch


class Phase(IntEnum):
    """How far an operation has come. The numbers are what the stores keep."""

    RESERVED = 1
    STARTED = 2
    RELEASED = 3
    COMPLETED = 4
    UNKNOWN = 5


ENDED: Final = frozenset({Phase.RELEASED, Phase.COMPLETED, Phase.UNKNOWN})
"""Phases in which nobody is at work on it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of the clock by which claims run out.

    Attributes:
        clock_id: Which clock: times of different ones say nothing of each other. A host's boot, for one.
        now_s: Its seconds.
    """

    clock_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of one operation.

    Attributes:
        request_hash: Which operation the key stands for.
        epoch: The fence: goes up each time somebody reserves it, and when it becomes UNKNOWN.
        claim_id: 16 random bytes of the attempt that reserved it.
        phase: How far it has come.
        clock_id: The clock of `claim_until_s`.
        claim_until_s: Until when its attempt is thought to live.
        outcome: What came of it, once COMPLETED.
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
    """The right to make one attempt at an operation, until somebody else has reserved it."""

    key: str
    request_hash: bytes
    epoch: int
    claim_id: bytes


@dataclass(frozen=True, slots=True)
class InFlight:
    """Somebody else is at it, for `remaining_s` more at most."""

    epoch: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    """It was done; what came of it."""

    epoch: int
    outcome: bytes


@dataclass(frozen=True, slots=True)
class Unknown:
    """It was begun by an attempt that is gone: it may have been done or not, and is not done again."""

    epoch: int


Answer: TypeAlias = Reservation | InFlight | Completed | Unknown


def reserve(
    entry: Entry | None, key: str, request_hash: bytes, claim_id: bytes, at: Moment, claim_ttl_s: float
) -> tuple[Entry | None, Answer]:
    """What is to be kept, and the answer. Raises OperationConflict if the key stands for another operation."""
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
    """The effect is about to begin. Raises StaleEpoch."""
    return _moved(entry, held, Phase.STARTED, (Phase.RESERVED,))


def complete(entry: Entry | None, held: Reservation, outcome: bytes) -> Entry:
    """The effect was had, and this came of it. Raises StaleEpoch."""
    return replace(_moved(entry, held, Phase.COMPLETED, (Phase.STARTED,), outcome), outcome=outcome)


def release(entry: Entry | None, held: Reservation) -> Entry:
    """Nothing was begun, and nothing will be: who asks next may try. Raises StaleEpoch."""
    return _moved(entry, held, Phase.RELEASED, (Phase.RESERVED,))


def _moved(
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
