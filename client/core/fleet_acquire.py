"""Acquires a lease in a fleet: a directory names nodes, and the client asks them in turn until one grants it.

Theory of operation. A directory's answer may be seconds old, so a node that it named may refuse. Then the client asks
the next one. All tries of one acquire have the same request id. If a connection ends before the node's answer came, the
lease may exist already. So the client asks the same node again, with the same id, before it asks another. A node looks
up the id before it refuses a request, so its answer is final even if it is a refusal. A refused connection proves
nothing. A client that waits for a name need not keep asking such a node: a name is granted only once, and a later round
asks the node again.

If a node hangs, or its host is down, it answers no PING during the request, and the client gives up on it after
seconds. If it resumes later and grants a lease without a name, that lease is an orphan: no program is connected to it.
After the grant, the fleet is no longer involved: all requests about the lease go to its node.

The request id belongs to one call. If a program dies in `acquire()`, is restarted and calls it again, it asks for
another lease. The first lease, if it was granted, ends at its deadline or as an orphan. A name prevents two leases
across all calls.
"""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from gpulease.client.core.exchange import (
    FixedDeadline,
    GrantCleanUp,
    ask_once,
    dial,
    disconnected,
    operation_of,
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
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.address import Address, FleetAddress, parse_address
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_options import EXCLUSIVITY, LABELS, LEASE_NAME, REQUEST_ID, REQUEST_ID_BYTES
from gpulease.protocol.limits import MAX_TRIED
from gpulease.protocol.messages import (
    Body,
    Candidate,
    HelloReply,
    LeaseAlloc,
    LeaseGrant,
    Place,
    Placement,
)

T = TypeVar("T")

DIRECTORY_LIMIT_S: Final = 4.0
"""Longest time to reach a directory, and again for its answer, in seconds. It answers from memory within milliseconds.
After this time the client asks another one."""

NODE_LIMIT_S: Final = 4.0
"""Longest time to reach a node, and again for its answer to a PING while it serves the request, in seconds. Both take
milliseconds. After this time the client asks another one. The grant itself may take longer."""

PLACEMENTS_PER_ROUND: Final = 3
"""Number of times that a round asks a directory for nodes. If none of 24 random nodes has room, few other nodes have
room."""

GRANT_LIMIT_S: Final = 90.0
"""Longest time for a grant at a node that answers PING, in addition to the wait for room, in seconds. It is the same as
for an acquire at a single host."""

LOST_ANSWER_S: Final = 15.0
"""How long the client keeps asking a node whose answer was lost, in seconds. A restarting broker is back by then: on a
host with few cores, all of them busy, it took 3 s. If a daemon was killed during the request, and the client can't wait
for a name elsewhere, the acquire takes this much longer."""

LOST_PAUSE_S: Final = 0.1
"""Pause, in seconds, before a node is asked again after an answer was lost."""

WAIT_SLICE_S: Final = 2.0
"""Longest wait in one node's queue, in seconds. Then the client asks others again, where room or the name may be free.
"""

ROUND_PAUSE_S: Final = 0.25
"""Pause between two rounds if no node has a queue for this request, in seconds."""

NAME_TRIES: Final = 3
"""Number of nodes in a round that must answer BUSY before the name counts as taken. One is not enough, because a node
that is cut off from its fleet also answers BUSY. More would load the fleet's store, which each node queries. (A
directory does not disclose which node serves another tenant's name.)"""

MAX_LISTED: Final = 8
"""Maximum number of refusing nodes that an error message lists."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The addresses and files by which a tenant reaches a fleet.

    Attributes:
        address: Its address.
        directories: The addresses of its directories, with the files that they need.
        files: The tenant's files, for the nodes.
    """

    address: FleetAddress
    directories: tuple[Address, ...]
    files: TlsFiles

    @classmethod
    def of(cls, address: FleetAddress, files: TlsFiles) -> "Fleet":
        """Combine a fleet's address and its files. Raises InvalidRequest if a file is missing."""
        return cls(address, tuple(with_files(directory, files) for directory in address.directories), files)

    def __str__(self) -> str:
        return str(self.address)


Make: TypeAlias = Callable[[Channel, HelloReply, LeaseGrant], T]
"""Makes a lease from a grant, and from the connection to its node on which it came."""


def ask_directories(fleet: Fleet, op: Opcode, body: Body) -> Procedure[Any]:
    """Ask the directories in random order until one answers; returns the reply's body.

    Raises InvalidRequest if the request is invalid. If no directory answers, raises the only directory's error, or an
    error that lists the directories' errors.
    """
    directories = list(fleet.directories)
    # A random order spreads the load. An invalid request is invalid everywhere; any other error may concern only one
    # directory.
    random.shuffle(directories)
    errors: list[tuple[Address, GpuLeaseError]] = []
    for directory in directories:
        try:
            return (yield from ask_once(directory, op, body, DIRECTORY_LIMIT_S, DIRECTORY_LIMIT_S))
        except InvalidRequest:
            raise
        except GpuLeaseError as error:
            errors.append((directory, error))
    # If there is only one directory, its own error is more helpful than a summary.
    if len(errors) == 1:
        raise errors[0][1].with_traceback(None)
    reasons = "; ".join(f"{directory}: {error.message}" for directory, error in errors)
    # If all failed in the same way, keep that error's status, so that the caller can react to it.
    kinds = {type(error) for _, error in errors}
    status = errors[-1][1].status if len(kinds) == 1 else Status.DISCONNECTED
    message = f"none of the fleet's {len(errors)} directories can answer: {reasons}"
    raise error_of(Failure(status, message, errors[-1][1].hint), operation_of(op)) from None


def acquire_in(fleet: Fleet, request: LeaseAlloc, make: Make[T], clean_up: GrantCleanUp) -> Procedure[T]:
    """Ask a fleet for a lease, and make it from the grant.

    Args:
        fleet: The fleet.
        request: The request, with the time that it may wait for room.
        make: Makes the lease.
        clean_up: Records what a node may have granted.

    Raises CapacityExceeded, Drained, Disconnected or a similar error, or InvalidRequest. The error states how many
    nodes were asked, and why each refused.
    """
    return (yield from _Search(fleet, request, make, clean_up).run())


class _Refusal(NamedTuple):
    """A node's refusal. `holds_name`: according to the directory, the node serves the requested name."""

    candidate: Candidate
    error: GpuLeaseError
    holds_name: bool


class _Search(Generic[T]):
    """One acquire in a fleet, until a node grants."""

    def __init__(self, fleet: Fleet, request: LeaseAlloc, make: Make[T], clean_up: GrantCleanUp) -> None:
        self._fleet = fleet
        self._make = make
        self._clean_up = clean_up
        # Use one id for all attempts of this call. A node that has granted the request answers with the same lease.
        request_id = REQUEST_ID.parameter(secrets.token_hex(REQUEST_ID_BYTES))
        self._request = replace(request, parameters=(*request.parameters, request_id))
        self._place = _place_of(request)
        # The time to wait for room is for the whole acquire. Each node gets a part of it.
        self._end = time.monotonic() + request.wait_ms / 1000
        self._refusals: dict[str, _Refusal] = {}
        self._last = Placement((), None, 0, "")

    def run(self) -> Procedure[T]:
        """Ask until a node grants or the time is over."""
        while True:
            # Each round asks the nodes to grant immediately. If none does, wait for a slice of the time, and begin
            # again: by then any node may have room.
            granted = yield from self._round()
            left_s = self._end - time.monotonic()
            if granted is None and left_s > 0:
                granted = yield from self._wait(left_s)
            if granted is not None:
                return granted
            if time.monotonic() >= self._end:
                raise self._error()

    def _round(self) -> Procedure[T | None]:
        """Ask each node that a directory names, without waiting for room."""
        self._refusals = {}
        for _ in range(PLACEMENTS_PER_ROUND):
            # The directory leaves out nodes that have refused in this round.
            place = replace(self._place, tried=tuple(self._refusals)[-MAX_TRIED:])
            self._last = yield from ask_directories(self._fleet, Opcode.PLACE, place)
            # Ask without waiting. Stop as soon as a node grants, or as soon as it is clear that the name is taken.
            for candidate in self._last.candidates:
                granted = yield from self._ask(candidate, 0)
                if granted is not None or self._is_taken(candidate):
                    return granted
            if not self._last.candidates:
                return None
        return None

    def _wait(self, left_s: float) -> Procedure[T | None]:
        """Wait at one node for a slice of the time: for the name if a node refused it as taken, otherwise for room.

        If the node refuses before the slice is over, it has no queue for this request. Then pause, so that no node is
        asked again at once.
        """
        # The node that serves the name comes first: only the end of its lease frees the name.
        slice_s = min(left_s, WAIT_SLICE_S)
        slice_end = time.monotonic() + slice_s
        refusals = sorted(self._refusals.values(), key=lambda refusal: not refusal.holds_name)
        busy = [refusal for refusal in refusals if self._place.name and type(refusal.error) is Busy]
        # A node without room lets the request wait for room; one that is BUSY with the name lets it wait for the name.
        full = [refusal for refusal in refusals if type(refusal.error) is CapacityExceeded]
        for refusal in (busy or full)[:1]:
            granted = yield from self._ask(refusal.candidate, slice_s)
            # That node may be cut off from its fleet. Ask another node as well, because that one could fence it.
            if granted is None and busy and refusal.holds_name and (left_s := self._end - time.monotonic()) > 0:
                granted = yield from self._ask_another(refusal.candidate, min(left_s, WAIT_SLICE_S))
            if granted is not None:
                return granted
        # The node refused before the slice was over, because it has no queue for this request.
        if (pause_s := min(slice_end - time.monotonic(), ROUND_PAUSE_S)) > 0:
            yield Sleep(pause_s)
        return None

    def _ask_another(self, holder: Candidate, wait_s: float) -> Procedure[T | None]:
        """Wait for a name at a node other than the one that serves it.

        If the serving node is cut off from its fleet, it lets requests wait in vain. Only another node can fence it.
        """
        place = replace(self._place, tried=(holder.node_id,))
        # The directory leaves out the serving node, so its first candidate is another one.
        self._last = yield from ask_directories(self._fleet, Opcode.PLACE, place)
        for candidate in self._last.candidates[:1]:
            return (yield from self._ask(candidate, wait_s))
        return None

    def _is_taken(self, candidate: Candidate) -> bool:
        """Return whether the name counts as taken, so that no other node need be asked.

        This is so if the node that serves the name refused, or if NAME_TRIES nodes are BUSY.
        """
        # The node's own refusal decides, not the directory's answer, which may be old.
        refusal = self._refusals[candidate.node_id]
        if not self._place.name or type(refusal.error) is not Busy:
            return False
        busy = sum(type(tried.error) is Busy for tried in self._refusals.values())
        return refusal.holds_name or busy >= NAME_TRIES

    def _ask(self, candidate: Candidate, wait_s: float) -> Procedure[T | None]:
        """Ask one node. Returns None if it refuses but another node may grant.

        Raises errors that every node would report.
        """
        try:
            return (yield from self._ask_until_answered(candidate, wait_s))
        except GpuLeaseError as error:
            # An invalid request is refused everywhere. NotFound, which is an InvalidRequest too, concerns only this
            # node.
            if isinstance(error, InvalidRequest) and not isinstance(error, NotFound):
                raise
            holds_name = candidate.node_id == self._last.holder
            self._refusals[candidate.node_id] = _Refusal(candidate, error.with_traceback(None), holds_name)
            return None

    def _ask_until_answered(self, candidate: Candidate, wait_s: float) -> Procedure[T]:
        """Ask one node, and ask it again for a while if its answer is lost."""
        wait_until, left_s = time.monotonic() + wait_s, wait_s
        again_until: float | None = None
        while True:
            channel: Channel | None = None
            number = 0
            try:
                channel, hello = yield from self._dial(candidate)
                # Each try waits only for the rest of its slice.
                request = replace(self._request, wait_ms=int(left_s * 1000))
                number, frame = channel.link.request(Opcode.LEASE_ALLOC, request, creates=True)
                self._clean_up.channel, self._clean_up.number = channel, number
                answer = yield from _answer(channel, number, frame, GRANT_LIMIT_S + left_s)
                if isinstance(answer, LeaseGrant):
                    self._clean_up.made = answer
                    channel.link.claim(number)
                    return self._make(channel, hello, answer)
            except GpuLeaseError as error:
                # Raise the error if the answer to the first try was not lost, or if later rounds will ask this node for
                # the name anyway. After a lost answer, try again on every error, including a refused connection, until
                # the time is over: only the node's own answer shows whether it has granted the lease.
                is_lost = _is_lost(error, channel)
                if channel is not None:
                    channel.close()
                if again_until is None and (not is_lost or self._waits_for_name()):
                    raise
                if again_until is not None and time.monotonic() >= again_until:
                    raise error from None
            else:
                channel.close()
                raise error_of(answer, operation_of(Opcode.LEASE_ALLOC))
            # The time runs from the first lost answer; later failures do not extend it.
            again_until = again_until or time.monotonic() + LOST_ANSWER_S
            yield Sleep(LOST_PAUSE_S)
            left_s = max(0.0, wait_until - time.monotonic())

    def _waits_for_name(self) -> bool:
        """Return whether the request has a name, and there is time for further rounds, which ask this node again."""
        return bool(self._place.name) and self._end - time.monotonic() > LOST_ANSWER_S

    def _dial(self, candidate: Candidate) -> Procedure[tuple[Channel, HelloReply]]:
        """Connect to a node at the first of its addresses that answers."""
        error: GpuLeaseError = Disconnected(f"node {candidate.node_id} has no usable address")
        # An address that this client can't parse belongs to a newer fleet: skip it.
        for text in candidate.addresses:
            try:
                address = with_files(parse_address(text), self._fleet.files)
            except ValueError:
                continue
            try:
                return (yield from dial(address, FixedDeadline(NODE_LIMIT_S, "connect", address)))
            except Disconnected as unreached:
                error = unreached
        raise error.with_traceback(None)

    def _error(self) -> GpuLeaseError:
        # Name the nodes and their reasons, up to a number that a person can read.
        refused = self._refusals
        reasons = [f"{node_id}: {_short(refusal.error)}" for node_id, refusal in list(refused.items())[:MAX_LISTED]]
        if len(refused) > MAX_LISTED:
            reasons.append(f"and {len(refused) - MAX_LISTED} more")
        nodes = counted(self._last.nodes, "node was", "nodes were")
        parts = [f"{len(refused)} of the fleet's {nodes} asked, and none of them granted the lease"]
        parts += ["; ".join(reasons)] if reasons else []
        if self._last.why and len(refused) < self._last.nodes:
            parts.append(f"a directory reports about the nodes: {self._last.why}")
        if self._place.name and self._last.holder is not None:
            parts.append(f"the name {self._place.name!r} is served by node {self._last.holder}")
        # If one of several errors is a lack of room, report that: the caller can ask for less, or wait.
        errors = [refusal.error for refusal in refused.values()]
        chosen = next((error for error in errors if type(error) is CapacityExceeded), errors[0] if errors else None)
        message = ": ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:])
        status = Status.CAPACITY_EXCEEDED if chosen is None else chosen.status
        # Replace a full node's hint, which recommends other nodes: these were asked.
        is_full = status is Status.CAPACITY_EXCEEDED
        hint = CapacityExceeded.default_hint if chosen is None or is_full else chosen.hint
        return error_of(Failure(status, message, hint), "acquire")


def _is_lost(error: GpuLeaseError, channel: Channel | None) -> bool:
    """Return whether the node's answer was lost with the connection, so that it may have granted the lease.

    A node that sent a goodbye has granted nothing; one that hangs has not ended the connection.
    """
    if channel is None or not isinstance(error, Disconnected):
        return False
    return channel.link.end is not None and not channel.link.received_goodbye


def _answer(channel: Channel, number: int, frame: bytes, limit_s: float) -> Procedure[LeaseGrant | Failure]:
    operation = operation_of(Opcode.LEASE_ALLOC)
    deadline = FixedDeadline(limit_s, operation, channel.address)
    try:
        yield from send(channel, (frame,), deadline)
        answer: Any = yield from receive_from_living(channel, number, deadline, pong_limit_s=NODE_LIMIT_S)
    except LinkEnded as ended:
        raise disconnected(ended, channel, operation) from None
    return cast("LeaseGrant | Failure", answer)


def _short(error: GpuLeaseError) -> str:
    return error.message.removeprefix(f"{operation_of(Opcode.LEASE_ALLOC)}: ").rstrip(".")


def _place_of(request: LeaseAlloc) -> Place:
    """Return the request to a directory that corresponds to a request for a lease."""
    exclusivity, name = EXCLUSIVITY.read(request.parameters), LEASE_NAME.read(request.parameters)
    labels = tuple(f"{key}={value}" for key, value in LABELS.read(request.parameters).items())
    # `tried` is filled in by each round.
    return Place(request.size_bytes, exclusivity, name, labels, request.device, ())
