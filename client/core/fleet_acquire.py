"""A lease of a fleet: a directory names nodes, and each is asked in turn until one grants.

Theory of operation. A directory's answer may be seconds old, so a node that it named may refuse. Then the next is
asked. All tries of one acquire have one request id. If a connection ends before the node's answer came, the lease may
be there already. So the same node is asked again, by the same id, before another is. A node looks for the id before it
refuses anything. So its answer is final, also where it is no grant; a connection that is refused says nothing. Who
waits for a name need not stay with such a node: a name is granted once, and a later round asks the node again.

A node that hangs, or whose host is gone, is left after seconds: it answers no PING beside the request. A lease without
a name that it grants all the same, once it goes on, is an orphan, for nobody is connected to it.
Afterwards the fleet plays no part: all requests about the lease go to its own node.

The request id is one call's. A program that dies in `acquire()` and calls it anew asks for another lease; the first
one, if it was granted, ends with its time, or as an orphan. A name prevents two leases over all calls.
"""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from gpulease.client.core.exchange import (
    Clock,
    TimeLimit,
    Undo,
    ask_once,
    dial,
    disconnected,
    doing_of,
    give_up,
    receive_from_living,
    send,
)
from gpulease.client.core.waits import Procedure, Sleep
from gpulease.client.errors import (
    Busy,
    CapacityExceeded,
    Disconnected,
    GpuLeaseError,
    InvalidRequest,
    NotFound,
    error_of,
)
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.credentials import TlsFiles, with_files
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Exclusivity, Failure, Opcode, Status
from gpulease.protocol.address import Address, FleetAddress, parse_address
from gpulease.protocol.counts import counted
from gpulease.protocol.limits import MAX_LABELS, MAX_TRIED
from gpulease.protocol.messages import (
    Body,
    Candidate,
    HelloReply,
    LeaseAlloc,
    LeaseGrant,
    Place,
    Placement,
)
from gpulease.protocol.opcodes import EXCLUSIVITY_TAG, LABELS_TAG, NAME_TAG, REQUEST_ID_TAG
from gpulease.protocol.primitives import LeaseParameter

T = TypeVar("T")

DIRECTORY_LIMIT_S: Final = 4.0
"""Longest time for a directory to be reached, and then to answer. It answers from memory, within milliseconds; another
one is asked instead."""

NODE_LIMIT_S: Final = 4.0
"""Longest time for a node to be reached, and to answer PING while it works on the request. Both take it milliseconds;
another one is asked instead. A grant itself may take longer."""

PLACEMENTS_PER_ROUND: Final = 3
"""Times that a directory is asked for further nodes in a row: of 24 nodes drawn at random one has room, or few have."""

GRANT_LIMIT_S: Final = 90.0
"""Longest a grant may take at a node that lives, beside the wait for room: that of an acquire at one host."""

LOST_ANSWER_S: Final = 15.0
"""Time in which a node is asked again after an answer was lost. A broker that restarts is back by then: on a host with
few cores, all of them busy, that took 3 s. A daemon that was killed costs an acquire this long, if it went while it was
asked, and no name can be waited for elsewhere."""

LOST_PAUSE_S: Final = 0.1
"""Pause between two such tries."""

WAIT_SLICE_S: Final = 2.0
"""Longest wait in one node's line, before others are asked again: room or the name may be free elsewhere by then."""

ROUND_PAUSE_S: Final = 0.25
"""Pause between two rounds where no node has a line to wait in, or none for this wait."""

NAME_TRIES: Final = 3
"""Nodes of a round that may say BUSY to a name. Who serves another tenant's name is not told, and each node that is
asked asks the fleet's store. A node that is cut off says BUSY, too, so the first is not the last."""

MAX_TOLD: Final = 8
"""Most nodes whose refusals an error tells in words."""

REQUEST_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as a tenant reaches it.

    Attributes:
        address: Its address.
        directories: The addresses of its directories, with the files that they take.
        files: The tenant's files, for the nodes.
    """

    address: FleetAddress
    directories: tuple[Address, ...]
    files: TlsFiles

    @classmethod
    def of(cls, address: FleetAddress, files: TlsFiles) -> "Fleet":
        """Join a fleet's address and its files. Raises InvalidRequest if a file is missing."""
        return cls(address, tuple(with_files(one, files) for one in address.directories), files)

    def __str__(self) -> str:
        return str(self.address)


Make: TypeAlias = Callable[[Channel, HelloReply, LeaseGrant], T]
"""Makes a lease of a grant, and of the connection to its node that it came on."""


def ask_directories(fleet: Fleet, op: Opcode, body: Body) -> Procedure[Any]:
    """Ask the directories, one after the other, until one answers; returns the reply's body.

    Raises InvalidRequest if the request makes no sense, Disconnected or another error if none answered.
    """
    directories = list(fleet.directories)
    random.shuffle(directories)
    errors: list[tuple[Address, GpuLeaseError]] = []
    for directory in directories:
        try:
            return (yield from ask_once(directory, op, body, DIRECTORY_LIMIT_S, DIRECTORY_LIMIT_S))
        except InvalidRequest:
            raise
        except GpuLeaseError as error:
            errors.append((directory, error))
    if len(errors) == 1:
        raise errors[0][1].with_traceback(None)
    told = "; ".join(f"{directory}: {error.message}" for directory, error in errors)
    kinds = {type(error) for _, error in errors}
    status = errors[-1][1].status if len(kinds) == 1 else Status.DISCONNECTED
    message = f"none of the fleet's {len(errors)} directories can answer: {told}"
    raise error_of(Failure(status, message, errors[-1][1].hint), doing_of(op)) from None


def acquire_in(
    fleet: Fleet, wanted: LeaseAlloc, make: Make[T], undo: Undo, clock: Clock = time.monotonic
) -> Procedure[T]:
    """Ask a fleet for a lease, and make it of the grant.

    If this is interrupted, `undo` gives back what a node has granted. Raises CapacityExceeded, Drained, Disconnected
    and their like, or InvalidRequest; the error says how many nodes were asked, and why each refused.
    """
    return (yield from _Search(fleet, wanted, make, undo, clock).run())


class _Refusal(NamedTuple):
    """A node that refused, and why; `holds_name`: it serves the name, as the directory has it."""

    candidate: Candidate
    error: GpuLeaseError
    holds_name: bool


class _Search(Generic[T]):
    """An acquire in a fleet, until a node grants."""

    def __init__(self, fleet: Fleet, wanted: LeaseAlloc, make: Make[T], undo: Undo, clock: Clock) -> None:
        self._fleet = fleet
        self._make = make
        self._undo = undo
        self._clock = clock
        request_id = LeaseParameter(REQUEST_ID_TAG, secrets.token_bytes(REQUEST_ID_BYTES))
        self._wanted = replace(wanted, parameters=(*wanted.parameters, request_id))
        self._place = _place_of(wanted)
        self._end = clock() + wanted.wait_ms / 1000
        self._refusals: dict[str, _Refusal] = {}
        self._last = Placement((), None, 0, "")

    def run(self) -> Procedure[T]:
        """Ask until a node grants or the time is over."""
        while True:
            granted = yield from self._round()
            left_s = self._end - self._clock()
            if granted is None and left_s > 0:
                granted = yield from self._wait(left_s)
            if granted is not None:
                return granted
            if self._clock() >= self._end:
                raise self._error()

    def _round(self) -> Procedure[T | None]:
        """Ask each node that a directory names, without waiting for room."""
        self._refusals = {}
        for _ in range(PLACEMENTS_PER_ROUND):
            place = replace(self._place, tried=tuple(self._refusals)[-MAX_TRIED:])
            self._last = yield from ask_directories(self._fleet, Opcode.PLACE, place)
            for candidate in self._last.candidates:
                granted = yield from self._ask(candidate, 0)
                if granted is not None or self._is_taken(candidate):
                    return granted
            if not self._last.candidates:
                return None
        return None

    def _wait(self, left_s: float) -> Procedure[T | None]:
        """Wait a slice where that helps: for a name at a node that said it is taken, else for room in one node's line.

        A node that refuses before the slice is over has no line for this wait: a pause follows, so that nobody is asked
        again at once.
        """
        slice_s = min(left_s, WAIT_SLICE_S)
        slice_end = self._clock() + slice_s
        waits = sorted(self._refusals.values(), key=lambda refusal: not refusal.holds_name)
        named = [refusal for refusal in waits if self._place.name and type(refusal.error) is Busy]
        full = [refusal for refusal in waits if type(refusal.error) is CapacityExceeded]
        for refusal in (named or full)[:1]:
            granted = yield from self._ask(refusal.candidate, slice_s)
            if granted is None and named and refusal.holds_name and (left_s := self._end - self._clock()) > 0:
                granted = yield from self._ask_another(refusal.candidate, min(left_s, WAIT_SLICE_S))
            if granted is not None:
                return granted
        if (pause_s := min(slice_end - self._clock(), ROUND_PAUSE_S)) > 0:
            yield Sleep(pause_s)
        return None

    def _ask_another(self, holder: Candidate, wait_s: float) -> Procedure[T | None]:
        """Wait for a name at another node than the one that serves it.

        A node that is cut off from its fleet keeps who waits there waiting. Only another node can fence it.
        """
        place = replace(self._place, tried=(holder.node_id,))
        self._last = yield from ask_directories(self._fleet, Opcode.PLACE, place)
        for candidate in self._last.candidates[:1]:
            return (yield from self._ask(candidate, wait_s))
        return None

    def _is_taken(self, candidate: Candidate) -> bool:
        """Return whether it is vain to ask others for the name: the node that serves it keeps it, or several say so."""
        refusal = self._refusals[candidate.node_id]
        if not self._place.name or type(refusal.error) is not Busy:
            return False
        busy = sum(type(one.error) is Busy for one in self._refusals.values())
        return refusal.holds_name or busy >= NAME_TRIES

    def _ask(self, candidate: Candidate, wait_s: float) -> Procedure[T | None]:
        """Ask one node; None if it refuses in a way by which another may grant. Raises what no other would grant."""
        try:
            return (yield from self._ask_surely(candidate, wait_s))
        except GpuLeaseError as error:
            if isinstance(error, InvalidRequest) and not isinstance(error, NotFound):
                raise
            holds_name = candidate.node_id == self._last.holder
            self._refusals[candidate.node_id] = _Refusal(candidate, error.with_traceback(None), holds_name)
            return None

    def _ask_surely(self, candidate: Candidate, wait_s: float) -> Procedure[T]:
        """Ask one node, and ask it again for a while if its answer is lost."""
        wait_until, left_s = self._clock() + wait_s, wait_s
        again_until: float | None = None
        while True:
            channel: Channel | None = None
            number = 0
            try:
                channel, hello = yield from self._dial(candidate)
                wanted = replace(self._wanted, wait_ms=int(left_s * 1000))
                number, frame = channel.link.request(Opcode.LEASE_ALLOC, wanted, makes=True)
                answer = yield from _answer(channel, number, frame, GRANT_LIMIT_S + left_s, self._clock)
                if isinstance(answer, LeaseGrant):
                    lease = self._make(channel, hello, answer)
                    channel.link.claim(number)
                    return lease
            except GpuLeaseError as error:
                is_lost = _is_lost(error, channel)
                if channel is not None:
                    channel.close()
                if again_until is None and (not is_lost or self._waits_for_name()):
                    raise
                if again_until is not None and self._clock() >= again_until:
                    raise error from None
            except GeneratorExit:
                raise
            except BaseException:
                if channel is not None and number:
                    yield from give_up(channel, number, self._undo)
                raise
            else:
                channel.close()
                raise error_of(answer, doing_of(Opcode.LEASE_ALLOC))
            again_until = again_until or self._clock() + LOST_ANSWER_S
            yield Sleep(LOST_PAUSE_S)
            left_s = max(0.0, wait_until - self._clock())

    def _waits_for_name(self) -> bool:
        """Return whether a name is asked for, with time left for rounds that ask this node again beside others."""
        return bool(self._place.name) and self._end - self._clock() > LOST_ANSWER_S

    def _dial(self, candidate: Candidate) -> Procedure[tuple[Channel, HelloReply]]:
        """Connect to a node, at the first of its addresses that answers."""
        error: GpuLeaseError = Disconnected(f"node {candidate.node_id} has no address that can be used")
        for text in candidate.addresses:
            try:
                address = with_files(parse_address(text), self._fleet.files)
            except ValueError:
                continue
            try:
                return (yield from dial(address, TimeLimit(NODE_LIMIT_S, "connect", address, self._clock)))
            except Disconnected as unreached:
                error = unreached
        raise error.with_traceback(None)

    def _error(self) -> GpuLeaseError:
        refused = self._refusals
        told = [f"{node_id}: {_short(refusal.error)}" for node_id, refusal in list(refused.items())[:MAX_TOLD]]
        if len(refused) > MAX_TOLD:
            told.append(f"and {len(refused) - MAX_TOLD} more")
        nodes = counted(self._last.nodes, "node was", "nodes were")
        parts = [f"{len(refused)} of the fleet's {nodes} asked, and none granted the lease"]
        parts += ["; ".join(told)] if told else []
        if self._last.why and len(refused) < self._last.nodes:
            parts.append(f"a directory reports about the nodes: {self._last.why}")
        if self._place.name and self._last.holder is not None:
            parts.append(f"the name {self._place.name!r} is served by node {self._last.holder}")
        errors = [refusal.error for refusal in refused.values()]
        chosen = next((error for error in errors if type(error) is CapacityExceeded), errors[0] if errors else None)
        message = ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])
        status = Status.CAPACITY_EXCEEDED if chosen is None else chosen.status
        # A full node's own hint names other nodes, which were asked.
        is_full = status is Status.CAPACITY_EXCEEDED
        hint = CapacityExceeded.default_hint if chosen is None or is_full else chosen.hint
        return error_of(Failure(status, message, hint), "acquire")


def _is_lost(error: GpuLeaseError, channel: Channel | None) -> bool:
    """Return whether a first try was asked and its answer was lost with the connection, so that it may come once more.

    A node that says goodbye has granted nothing; one that hangs has not ended the connection.
    """
    if channel is None or not isinstance(error, Disconnected):
        return False
    return channel.link.end is not None and not channel.link.said_goodbye


def _answer(
    channel: Channel, number: int, frame: bytes, limit_s: float, clock: Clock
) -> Procedure[LeaseGrant | Failure]:
    doing = doing_of(Opcode.LEASE_ALLOC)
    limit = TimeLimit(limit_s, doing, channel.address, clock)
    try:
        yield from send(channel, (frame,), limit)
        answer: Any = yield from receive_from_living(channel, number, limit, pong_limit_s=NODE_LIMIT_S, clock=clock)
    except LinkEnded as ended:
        raise disconnected(ended, channel, doing) from None
    return cast("LeaseGrant | Failure", answer)


def _short(error: GpuLeaseError) -> str:
    return error.message.removeprefix(f"{doing_of(Opcode.LEASE_ALLOC)}: ").rstrip(".")


def _place_of(wanted: LeaseAlloc) -> Place:
    """Return the request for a place of a request for a lease. Raises InvalidRequest."""
    parameters = {parameter.tag: parameter.value for parameter in wanted.parameters}
    exclusivity = parameters.get(EXCLUSIVITY_TAG, bytes([Exclusivity.SESSION_EXCLUSIVE]))[0]
    name = parameters.get(NAME_TAG, b"").decode()
    labels = tuple(parameters[LABELS_TAG].decode().split(",")) if LABELS_TAG in parameters else ()
    if len(labels) > MAX_LABELS:
        raise InvalidRequest(f"acquire: {len(labels)} labels; {MAX_LABELS} are the most")
    return Place(wanted.size_bytes, exclusivity, name, labels, wanted.device, ())
