"""ATTACH and GPU_SUBMIT: requests after which the connection belongs to a worker.

The broker checks that the peer may attach, and waits until the peer has read every earlier reply. It then passes the
socket to the worker, together with the bytes that the peer sent after its request. If any step fails, the connection
stays with the broker, which answers the request and continues.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.runtime import Result
from gpulease.daemon.contract import messages
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.leases.denials import not_found, stuck
from gpulease.daemon.leases.events import GuestAttached, RequestDenied, SessionOpened, SubmitAbandoned, SubmitReady
from gpulease.daemon.leases.model import LeaseSnapshot, SubmitRequested, SubmitState
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.messages import Attach, Body, GpuSubmit
from gpulease.protocol.opcodes import Status
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import SharedMemoryRequest

SUBMIT_WAIT_S: Final = 10.0
"""Seconds that an ATTACH waits until the worker of a submit in the session's place has exited; then it is refused. A
submit that has answered exits in a moment. The wait is shorter than a client's, so that the client gets the reason."""

SUBMIT_POLL_S: Final = 0.1
"""Seconds between two checks for that worker's exit."""

_SUBMIT_RUNS: Final = Failure(
    Status.BUSY,
    "a submit is using the lease's memory, so its session can't be opened now",
    hint="Wait for the submit's reply. To use a session and submits at the same time, acquire with "
    "GpuBuilder().submits(bytes).",
)


@dataclass(slots=True)
class _Attempt:
    """A request that is being served.

    Attributes:
        submit: The submit that waits for the connection; None for an ATTACH.
        guest: The limits of a connection that attaches with a token.
        second: The limits of its second token, if it has one.
        is_stranger: Whether the peer may be someone other than the lease's tenant. Set before the hand-over.
        wait_until_s: When an ATTACH stops waiting for a submit, on the loop's clock; 0.0 before the wait begins.
    """

    request: Request
    submit: SubmitReady | None = None
    guest: Guest | None = None
    second: Guest | None = None
    is_stranger: bool = True
    wait_until_s: float = 0.0

    @property
    def number(self) -> int:
        """The number of the worker that gets the connection."""
        return self.request.session_id if self.submit is None else self.submit.submit_id


class AttachHandler:
    """Serves the requests of one caller that pass the caller's connection to a worker."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens
        self._connection = caller.connection
        self._open_submits: dict[int, Request] = {}

    def leave(self) -> None:
        """Abandon the submits that wait, because the client has disconnected."""
        open_submits, self._open_submits = self._open_submits, {}
        for number in open_submits:
            self._runtime.abandon(number)

    def give_up(self, failure: Failure) -> None:
        for request in self._open_submits.values():
            self._caller.answer(request, failure)

    def attach(self, request: Request, body: Body) -> None:
        self._attach(_Attempt(request))

    def gpu_submit(self, request: Request, body: Body) -> None:
        """Serve GPU_SUBMIT. The token is used up only once the submit's worker is ready."""
        if not self._connection.is_open:
            return
        # Read on: while the submit waits for its worker, a disconnect of the peer must be noticed.
        self._connection.resume_reading()

        def on_ready(outcome: SubmitReady | Failure) -> None:
            if isinstance(outcome, Failure):
                # The lease table denied it, and has logged and counted it.
                self._answer(request, outcome)
            else:
                self._attach(_Attempt(request, outcome))

        try:
            self.check(request)
            self._request_submit(request, on_ready)
        except Refused as refused:
            self._refuse(request, refused.failure)

    def check(self, request: Request) -> tuple[Guest | None, Guest | None]:
        """Return the limits of a connection's token and of its second token, if it has them.

        Raises Refused unless the peer may attach.
        """
        # Begin with the checks that cost and reveal least: the peer's rights, then the lease, then the token.
        self._caller.check_peer(request.op)
        lease = self._runtime.table.get(request.session_id)
        if lease is not None and lease.parent_id:
            # A region has no session of its own.
            raise Refused(not_found(request.session_id).failure)
        body = request.body
        token = token_of(body.options) if isinstance(body, Attach | GpuSubmit) else None
        second_token = token_of(body.options, AttachOption.SECOND_TOKEN) if isinstance(body, Attach) else None
        # A second token does not replace the first: without a token, the peer must be the lease's own tenant.
        if token is None:
            self._check_own(request.session_id, lease)
        tokens = [value for value in (token, second_token) if value is not None]
        guests = self._tokens.guests(request.session_id, tokens, SPECS[request.op].needs.permissions)
        guest = None if token is None else guests.pop(0)
        return guest, guests[0] if guests else None

    def _check_own(self, lease_id: int, lease: LeaseSnapshot | None) -> None:
        # Answer for another tenant's lease as for an unknown one.
        if lease is not None and lease.tenant != self._peer.tenant:
            raise Refused(not_found(lease_id).failure)
        denial = self._runtime.table.denial_for(lease_id, time.monotonic_ns())
        if denial is not None:
            raise Refused(denial.failure)
        # Operators may require that even the tenant itself presents a token.
        self._tokens.check_attach_demand()

    def _request_submit(self, request: Request, on_ready: Callable[[SubmitReady | Failure], None]) -> None:
        def on_outcome(outcome: Result) -> None:
            self._open_submits.pop(number, None)
            if isinstance(outcome, SubmitReady | Failure):
                on_ready(outcome)
            elif isinstance(outcome, RequestDenied):
                on_ready(outcome.denial.failure)

        self._caller.need_memory()
        # Even a submit that is refused shows that its lease's tenant is connected.
        self._caller.hold(request.session_id)
        lease = self._runtime.table.get(request.session_id)
        number = self._caller.expect(on_outcome)
        self._open_submits[number] = request
        timeout_ms = request.body.timeout_ms if isinstance(request.body, GpuSubmit) else 0
        # The bearer of a token acts in the name of the lease's tenant.
        tenant = "" if lease is None else lease.tenant
        self._runtime.post(SubmitRequested(number, request.session_id, tenant, timeout_ms))

    # --- hand-over ---

    def _attach(self, attempt: _Attempt) -> None:
        # First wait until every earlier reply is written. The worker then reads what the peer sent after its request,
        # from the kernel or from our buffer.
        self._connection.when_written(lambda: self._attach_written(attempt))

    def _attach_written(self, attempt: _Attempt) -> None:
        # The peer disconnected while its replies were being written.
        if not self._connection.is_open:
            self._abandon(attempt)
            return
        try:
            # Check again: the lease may have ended, or the token been used, while the replies were being written.
            attempt.guest, attempt.second = self.check(attempt.request)
            if attempt.submit is None and not self._open_session(attempt.request.session_id):
                self._wait_for_submit(attempt)
                return
        except Refused as refused:
            self._abandon(attempt)
            self._refuse(attempt.request, refused.failure)
            return
        # Record the tokens as used before the hand-over: if the daemon is killed in between, neither may be used again.
        self._tokens.spend(self._runtime.journal, lambda is_durable: self._attach_spent(attempt, is_durable))

    def _open_session(self, lease_id: int) -> bool:
        """Open the session. Returns False until it is proved that the submit that ran in its place has ended.

        Raises Refused if that can't be proved.
        """
        # Post this before the check, so that the table starts no other submit in the session's place.
        self._runtime.post(SessionOpened(lease_id))
        submit = self._runtime.table.submits.in_place_of_session(lease_id)
        if submit is not None and submit.state is SubmitState.FENCED:
            raise Refused(stuck(lease_id).failure)
        return submit is None

    def _wait_for_submit(self, attempt: _Attempt) -> None:
        loop = asyncio.get_running_loop()
        attempt.wait_until_s = attempt.wait_until_s or loop.time() + SUBMIT_WAIT_S
        if loop.time() >= attempt.wait_until_s:
            raise Refused(_SUBMIT_RUNS)
        # After the wait, begin again: the lease may have ended by then, or the peer may have disconnected.
        loop.call_later(SUBMIT_POLL_S, self._attach, attempt)

    def _attach_spent(self, attempt: _Attempt, is_durable: bool) -> None:
        """Hand the connection over. If that fails, its tokens may be used again."""
        # The order says whether this client may be someone other than the lease's tenant.
        attempt.is_stranger = self._is_stranger(attempt.number)
        worker = self._runtime.workers.worker(attempt.number)
        if worker is not None:
            worker.is_stranger = attempt.is_stranger
        if is_durable and self._connection.is_open and self._hand_over(attempt):
            self._on_attached(attempt)
            return
        self._abandon(attempt)
        self._tokens.not_attached(self._runtime.journal)
        failure = self._not_attached(attempt)
        if not is_durable:
            failure = Failure(Status.BUSY, "the use of the token can't be recorded now", hint="Try again.")
        self._refuse(attempt.request, failure)

    def _hand_over(self, attempt: _Attempt) -> bool:
        request, memory_request = attempt.request, SharedMemoryRequest()
        options = request.body.options if isinstance(request.body, Attach) else ()
        # A relay's socket is local, like that of a client on this host, but shared memory would reach only the relay.
        if not self._peer.is_relayed:
            memory_request = SharedMemoryRequest.from_options(options)

        def pass_on(fd: int, rest: bytes) -> bool:
            # The order has everything that the worker needs to continue as if it had read the request itself.
            message = messages.AttachOrder(
                request.request_id,
                rest,
                memory_request.ring,
                memory_request.arena_bytes,
                guest=attempt.guest,
                owns=any(option.type == AttachOption.OWN_MEMORY for option in options),
                client_pid=self._peer.pid,
                words=memory_request.words,
                second=attempt.second,
            )
            return self._runtime.workers.attach(attempt.number, fd, message)

        return self._connection.hand_over(pass_on)

    def _on_attached(self, attempt: _Attempt) -> None:
        is_submit = attempt.submit is not None
        self._tokens.attached(is_submit=is_submit)
        if is_submit:
            return  # The lease table reports it.
        lease_id = attempt.request.session_id
        self._runtime.recorder.attached(lease_id, self._peer.tenant)
        if attempt.is_stranger:
            self._runtime.post(GuestAttached(lease_id))

    def _is_stranger(self, number: int) -> bool:
        lease = self._runtime.table.get(number)
        return lease is None or self._peer.is_stranger_to(lease.tenant)

    # --- refusals ---

    def _not_attached(self, attempt: _Attempt) -> Failure:
        # If the lease has ended during the attempt, report that: it is the more helpful reason.
        denial = self._runtime.table.denial_for(attempt.request.session_id, time.monotonic_ns())
        if denial is not None:
            return denial.failure
        if attempt.submit is not None:
            return Failure(
                Status.BUSY, "the submit's process did not take over the connection; nothing was run", hint="Try again."
            )
        return Failure(Status.BUSY, "the session can't take another connection now", hint="Try again.")

    def _abandon(self, attempt: _Attempt) -> None:
        if attempt.submit is not None:
            self._runtime.post(SubmitAbandoned(attempt.submit.submit_id))

    def _refuse(self, request: Request, failure: Failure) -> None:
        if self._connection.is_lost:
            return
        self._runtime.note_refusal(request.op.name, self._peer.tenant, request.session_id, failure)
        self._answer(request, failure)

    def _answer(self, request: Request, failure: Failure) -> None:
        if not self._connection.is_lost:
            self._caller.answer(request, failure)
            self._connection.serve_next()


def token_of(options: tuple[Tlv, ...], kind: AttachOption = AttachOption.TOKEN) -> bytes | None:
    """Return the token of a kind among the options of ATTACH or GPU_SUBMIT. Raises Refused if there are several."""
    values = [option.value for option in options if option.type == kind]
    if len(values) > 1:
        raise Refused(Failure(Status.INVALID_REQUEST, "the request must carry at most one token of a kind"))
    return values[0] if values else None
