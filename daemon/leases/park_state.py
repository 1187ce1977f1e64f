"""The state of a parkable lease's session (where its bytes are), which `Parking` keeps with the lease."""

from dataclasses import field
from enum import Enum
from typing import NamedTuple

from gpulease.protocol.fast_dataclass import dataclass


class ParkPhase(Enum):
    """Where the bytes of a parkable lease's session are. The values are in reports, the audit log and metrics.

    RESIDENT: on the card. PARKING: the worker copies them to the host. PROVING: the card does not show them free yet.
    PARKED: in the host. RETURNING: the card is charged for them again, and the session is not complete yet.
    """

    __hash__ = object.__hash__

    RESIDENT = "resident"
    PARKING = "parking"
    PROVING = "proving"
    PARKED = "parked"
    RETURNING = "returning"


class ParkDepth(Enum):
    """How much of a parked session has left its card. The values are in reports.

    WARM: its worker keeps its context. Sessions that are not parked are WARM too. LEAVING: its worker is sending the
    image. COLD: it has no worker, and no bytes on any card. ARRIVING: a new worker starts for it. ADOPTING: the new
    worker is restoring it.
    """

    __hash__ = object.__hash__

    WARM = "warm"
    LEAVING = "leaving"
    COLD = "cold"
    ARRIVING = "arriving"
    ADOPTING = "adopting"


class SessionMove(NamedTuple):
    """A request to move a session to another card, out of its process, or to a worker of this version.

    Attributes:
        request: The request to answer; None if it moves because another lease needs its room.
        card_uuid: The card to which the session is to return; "" if it is to stay cold.
        from_uuid: The card that it was on.
        since_ns: When it was requested.
        from_version: The version of its worker, if the worker will be replaced on the same card; else "".
        was_parked: Whether it was parked before, so that it is parked again afterwards.
        why_through_host: Why its bytes do not go directly to the other card; "" if they do.
        by_ring: Whether they pass through a ring of buffers in the host's memory, while its former worker keeps them.
    """

    request: int | None
    card_uuid: str
    from_uuid: str
    since_ns: int
    from_version: str = ""
    was_parked: bool = False
    why_through_host: str = ""
    by_ring: bool = False

    @property
    def keeps_pages(self) -> bool:
        """Return whether the bytes stay on the former card until they are on the other one."""
        return bool(self.card_uuid) and not self.from_version and (self.by_ring or not self.why_through_host)


class ParkCause(Enum):
    """Why a session is parked. The values are in the audit log and metrics, so they never change."""

    __hash__ = object.__hash__

    TENANT = "tenant"
    OPERATOR = "operator"
    IDLE = "idle"
    NEED = "need"
    ADOPTED = "adopted"


class ParkFailure(Enum):
    """What failed about a session that is parked, returns or moves. The values are labels of a metric.

    Attributes:
        PARK: Its worker could not park it, so that it stayed on its card.
        LEAVE: It could not leave its process, and stayed parked warm.
        RETURN: It could not return to its card, and stayed parked.
        NO_ROOM: Its card had no room for its return in time.
        WORKER: The worker that was to adopt it ended before, or was not ready in time.
        MISFIT: A worker could not adopt it exactly, for example because a variable would be at another address.
        MISMATCH: The same, and no other worker was left to try, so that its lease ended.
        DIRECT_MOVE: Its direct move failed, so that its former worker continued it.
    """

    __hash__ = object.__hash__

    PARK = "park"
    LEAVE = "leave"
    RETURN = "return"
    NO_ROOM = "no_room"
    WORKER = "worker"
    MISFIT = "misfit"
    MISMATCH = "mismatch"
    DIRECT_MOVE = "direct_move"


class ParkSnapshot(NamedTuple):
    """The parking state of one lease at one moment. Times are monotonic nanoseconds.

    Attributes:
        parked_ns: Time since which its bytes are off the card; 0 while they are on it.
        off_bytes: Bytes of its charge that are released to the card.
        host_bytes: Host memory that is held for it.
        moved_bytes: Bytes that the last park copied to the host.
        is_awaited: Whether an operation of its tenant waits for its return.
        parks: Number of times that it was parked under this daemon.
        idle_ms: Time without use after which it is parked; 0 if idleness does not park it.
        stays_here: Why it kept its process in its last park; "" if it left the process, or did not try to.
        is_moving: Whether it is being moved to another card.
        last_move: Why the bytes of its last move went through the host's memory; "" if they went directly to the other
            card; None before its first move under this daemon.
        warm_only: Why it can only be parked warm, also while it is on its card; "" if it can be parked cold.
    """

    phase: ParkPhase
    cause: ParkCause | None
    parked_ns: int
    off_bytes: int
    host_bytes: int
    moved_bytes: int
    is_awaited: bool
    parks: int
    idle_ms: int
    depth: ParkDepth = ParkDepth.WARM
    stays_here: str = ""
    is_moving: bool = False
    last_move: str | None = None
    warm_only: str = ""


@dataclass(slots=True)
class ParkState:
    """The parking state of a live parkable lease. Only `Parking` changes it. Times are monotonic nanoseconds.

    Attributes:
        number: Number of the last order to the worker. Answers to earlier orders are ignored.
        ordered_ns: Time of that order.
        due_ns: When the current step must be complete: a park, the export of the session, or the start of a new worker.
            For a session that is parked warm, when it must leave its process. None without a time limit.
        used_ns: Time at which it was last seen in use. To make room, the least recently used session is parked first.
        idle_retry_ns: Time before which idleness does not park it, because its last park was refused.
        stays_until_ns: Time before which it is not parked for others' need, because it has just come to its card or
            refused a park.
        off_bytes: Bytes of the lease's charge that are released to the card; the whole charge if COLD. It is more than
            0 only while PARKED, or while RETURNING with a `refusal`.
        kept_bytes: Bytes of the slice that stayed on the card in the last park.
        ahead_bytes: Bytes of the last park that were copied ahead of it.
        requests: Park requests to answer once it is parked.
        is_repeated: Whether it is being parked again for requests whose first park ended early because an operation
            needed the session.
        depth: How much of it has left the card.
        stays_here: Why it can't leave its process in this park; "" if it can, or before the first attempt.
        move: The move that is in progress; None without one.
        need_move_ns: Time before which it is not moved again for others' need.
        is_on_warm: Whether the last worker that was ordered for its return is a warm context.
        misfits: Number of workers that failed to adopt it during the present return.
        misfit_reason: Why the last of them could not adopt it.
        held_id: The id of its former worker, which is set aside as a warm context while the session may return to it; 0
            without one.
        code_bytes: Bytes of the slice that its last worker kept on the card while it was parked, such as code.
        is_in_place: Whether it is parked for a direct move, with its bytes in its worker, or in the one set aside.
        direct_failure: Why its last direct move failed; "" if none has failed, or if it has moved since then.
        misfit: Why other workers could not continue it, so that its former one took it back; "" if another one has
            continued it since then.
        claimed_stay: Why it can't leave its process, according to its worker; "" if it can.
        last_move: As in ParkSnapshot.
        refusal: The reason if its next worker adopts it only to refuse the waiting operations; "" if it returns.
    """

    phase: ParkPhase = ParkPhase.RESIDENT
    cause: ParkCause | None = None
    number: int = 0
    ordered_ns: int = 0
    due_ns: int | None = None
    used_ns: int = 0
    idle_retry_ns: int = 0
    stays_until_ns: int = 0
    parked_ns: int = 0
    off_bytes: int = 0
    kept_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0
    ahead_bytes: int = 0
    is_awaited: bool = False
    parks: int = 0
    requests: list[int] = field(default_factory=list)
    is_repeated: bool = False
    depth: ParkDepth = ParkDepth.WARM
    stays_here: str = ""
    move: SessionMove | None = None
    need_move_ns: int = 0
    is_on_warm: bool = False
    misfits: int = 0
    misfit_reason: str = ""
    held_id: int = 0
    code_bytes: int = 0
    refusal: str = ""
    is_in_place: bool = False
    direct_failure: str = ""
    misfit: str = ""
    claimed_stay: str = ""
    last_move: str | None = None

    @property
    def is_off(self) -> bool:
        """Return whether the session's bytes are, or may be, in the host's memory."""
        return self.phase is not ParkPhase.RESIDENT

    @property
    def is_shown_off(self) -> bool:
        """Return whether the card has shown that it holds only the part of the slice that the worker keeps."""
        return self.phase is ParkPhase.PARKED and not self.is_in_place

    @property
    def is_cold(self) -> bool:
        """Return whether the session has no worker, or one that may not have restored it completely yet.

        A former worker that is set aside counts as its worker. A restarted daemon finds out whether the next worker has
        restored it.
        """
        if self.held_id:
            return False
        return self.depth in (ParkDepth.COLD, ParkDepth.ARRIVING, ParkDepth.ADOPTING)

    def recorded_card(self, card_uuid: str) -> str:
        """Return the card for the record of a lease that is on `card_uuid`.

        While a session is being moved and its next worker has not been ordered, this is the former card: the former
        worker may still be ending there, and a restarted daemon ends the lease. In a direct move the former worker
        continues the session until another one adopts its image.
        """
        if self.move is None or not self.move.card_uuid:
            return card_uuid
        is_in_former = self.held_id != 0 and self.depth is not ParkDepth.ADOPTING
        return self.move.from_uuid if is_in_former or self.depth is ParkDepth.COLD else card_uuid

    @property
    def is_leaving(self) -> bool:
        """Return whether the session's bytes will soon be released to the card."""
        return self.phase in (ParkPhase.PARKING, ParkPhase.PROVING)

    def snapshot(self, idle_ms: int) -> ParkSnapshot:
        return ParkSnapshot(
            self.phase,
            self.cause,
            self.parked_ns,
            self.off_bytes,
            self.host_bytes,
            self.moved_bytes,
            self.is_awaited,
            self.parks,
            idle_ms,
            self.depth,
            self.stays_here,
            self.move is not None and bool(self.move.card_uuid) and not self.move.from_version,
            self.last_move,
            self.misfit or (self.stays_here if self.is_off else "") or self.claimed_stay,
        )
