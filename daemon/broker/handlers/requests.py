"""What each control operation means: a request in, an event for the lease table or a report out."""

import time
from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.broker.caller import Answerer, Caller
from gpulease.daemon.broker.handlers.admin_requests import AdminHandler
from gpulease.daemon.broker.handlers.lease_requests import LeaseHandler, SubmitHandler, token_of
from gpulease.daemon.broker.handlers.query_requests import NodeHandler, QueryHandler
from gpulease.daemon.broker.handlers.token_requests import TokenHandler
from gpulease.daemon.broker.refusal import Refusal, failure_of
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.leases import DrainCancelled, DrainRequested, GuestAttached, SessionOpened, SubmitState
from gpulease.daemon.leases.denials import not_found, stuck
from gpulease.protocol import messages
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import (
    Opcode,
    Status,
)

BEGINS_SOMETHING: Final = frozenset({Opcode.LEASE_ALLOC, Opcode.LEASE_SUBSCRIBE})
"""What the broker does not take on when it is out of memory: something that it has to keep, and that can wait."""

LOOKS: Final = frozenset(
    {
        Opcode.PING,
        Opcode.GET_INVENTORY,
        Opcode.LEASE_QUERY,
        Opcode.LEASE_LIST_ACTIVE,
        Opcode.LEASE_SUBSCRIBE,
        Opcode.LEASE_UNSUBSCRIBE,
        Opcode.METRICS,
        Opcode.HEALTH,
    }
)
"""What a peer may ask that may look and do nothing else."""


class RequestDispatcher:
    """Takes the control requests of one connection, and hands each to the desk that it is for.

    Attributes:
        submits: Asks for submits.
    """

    def __init__(self, runtime: Runtime, answerer: Answerer, driver: str) -> None:
        self._runtime = runtime
        self._answerer = answerer
        self._peer = answerer.peer
        self._tokens = tokens = TokenHandler(runtime.tokens, self._peer)
        self._caller = caller = Caller(runtime, answerer, tokens, set())
        self._leases = leases = LeaseHandler(caller)
        self.submits = SubmitHandler(caller)
        self._view = view = QueryHandler(caller, driver)
        self._node = node = NodeHandler(self._peer, runtime.metrics, runtime.health)
        revoking = AdminHandler(caller)
        self._operations: dict[Opcode, Callable[[Request, Any], None]] = {
            Opcode.PING: lambda request, body: answerer.answer(request, body),
            Opcode.GET_INVENTORY: view.get_inventory,
            Opcode.LEASE_ALLOC: leases.alloc,
            Opcode.LEASE_RENEW: leases.renew,
            Opcode.LEASE_FREE: leases.free,
            Opcode.LEASE_QUERY: view.lease_query,
            Opcode.LEASE_LIST_ACTIVE: view.lease_list_active,
            Opcode.LEASE_SUBSCRIBE: view.lease_subscribe,
            Opcode.LEASE_UNSUBSCRIBE: view.lease_unsubscribe,
            Opcode.LEASE_REVOKE: revoking.lease_revoke,
            Opcode.FENCE_CLEAR: revoking.fence_clear,
            Opcode.DRAIN: lambda request, body: revoking.drain(
                request, lambda number: DrainRequested(number, body.within_ms)
            ),
            Opcode.DRAIN_CANCEL: lambda request, _: revoking.drain(request, DrainCancelled),
            Opcode.METRICS: self._scrape,
            Opcode.HEALTH: lambda request, _: answerer.answer(request, node.health()),
            Opcode.CAPABILITY_ISSUE: lambda request, body: answerer.answer(
                request, tokens.issue(body, runtime.recorder)
            ),
            Opcode.CAPABILITY_PRESENT: lambda request, body: answerer.answer(request, tokens.present(body)),
            Opcode.CAPABILITY_REVOKE: revoking.capability_revoke,
            Opcode.CAPABILITY_AUDIENCE: lambda request, body: answerer.answer(request, tokens.audience()),
        }

    def take(self, request: Request) -> None:
        """Serve one request, now or when the table has an outcome."""
        try:
            self._check_reader(request.op)
            self._check_memory(request.op)
            self._operations[request.op](request, request.body)
        except Refusal as refusal:
            lease_id = getattr(request.body, "lease_id", 0)
            self._runtime.recorder.refused(request.op.name, self._peer.tenant, lease_id, refusal.failure.message)
            self._runtime.metrics.refused(request.op.name, refusal.failure.status)
            self._answerer.answer(request, refusal.failure)

    def _check_memory(self, op: Opcode) -> None:
        if op in BEGINS_SOMETHING and not self._runtime.headroom.is_enough():
            hint = "Leases go on, and can be renewed and freed: try again later."
            raise Refusal(Failure(Status.BUSY, "the daemon is out of memory", hint=hint))

    def _check_reader(self, op: Opcode) -> None:
        if self._peer.is_reader and op not in LOOKS:
            raise Refusal(Failure(Status.DENIED, f"{op.name} is not for {self._peer}, which may look and no more"))

    def leave(self) -> None:
        """The client is gone: what it waits for is given up."""
        self._leases.leave()
        self.submits.leave()
        self._view.leave()

    def close(self) -> None:
        """Leave for good: nothing more is taken here."""
        self.leave()
        self._runtime.presence.leave(self._answerer)
        # They hold this desk, and so its connection and the 64 KiB that it reads into, until the collector's next full
        # round: which may be thousands of connections later.
        self._operations.clear()

    def give_up(self, failure: Failure) -> None:
        """What the client waits for will not come: tell it so."""
        self._leases.give_up(failure)
        self.submits.give_up(failure)
        self.leave()

    def check_attach(self, request: Request) -> Guest | None:
        """Raises Refusal unless this peer may attach to that lease's session now; what its connection is bound to."""
        self._check_reader(request.op)
        body = request.body
        token = token_of(body.options) if isinstance(body, messages.Attach | messages.GpuSubmit) else None
        if token is None:
            self._check_own(request.session_id)
            return None
        needed = Permission.TASKLET_SUBMIT if isinstance(body, messages.GpuSubmit) else SESSION_PERMISSIONS
        return self._tokens.guest(request.session_id, token, needed)

    def open_session(self, lease_id: int) -> bool:
        """Whether the session may be opened now; False while the submit that ran in its place is not proved gone.

        Raises Refusal if that can't be proved.
        """
        self._runtime.post(SessionOpened(lease_id))
        submit = self._runtime.table.submits.in_place_of_session(lease_id)
        if submit is not None and submit.state is SubmitState.FENCED:
            raise Refusal(failure_of(stuck(lease_id)))
        return submit is None

    def spend_token(self, on_done: Callable[[bool], None]) -> None:
        """Use up the token that the peer attaches with, if any; told is whether that is written down."""
        self._tokens.spend(self._runtime.journal, on_done)

    def attached(self, lease_id: int, *, is_submit: bool = False) -> None:
        """The connection was handed over; that a submit's was is told by the lease table."""
        self._tokens.attached(is_submit=is_submit)
        if is_submit:
            return
        self._runtime.recorder.attached(lease_id, self._peer.tenant)
        if self._is_stranger(lease_id):
            self._runtime.post(GuestAttached(lease_id))

    def announce(self, number: int) -> None:
        """The connection is about to be handed over: its worker is told whose it is."""
        worker = self._runtime.workers.worker(number)
        if worker is not None:
            worker.is_stranger = self._is_stranger(number)

    def _is_stranger(self, lease_id: int) -> bool:
        lease = self._runtime.table.get(lease_id)
        return lease is None or self._peer.is_stranger_to(lease.tenant)

    def not_attached(self, lease_id: int, *, is_submit: bool = False) -> Failure:
        """The connection could not be handed over: what to say."""
        self._tokens.not_attached(self._runtime.journal)
        denial = self._runtime.table.denial_for(lease_id, time.monotonic_ns())
        if denial is not None:
            return failure_of(denial)
        if is_submit:
            return Failure(Status.BUSY, "the submit's process did not take it over; nothing was run", hint="Try again.")
        return Failure(Status.BUSY, "the session can't take another connection now", hint="Try again.")

    def _check_own(self, lease_id: int) -> None:
        lease = self._runtime.table.get(lease_id)
        if lease is not None and lease.tenant != self._peer.tenant:
            raise Refusal(failure_of(not_found(lease_id)))
        denial = self._runtime.table.denial_for(lease_id, time.monotonic_ns())
        if denial is not None:
            raise Refusal(failure_of(denial))
        self._tokens.check_attach_demand()

    def _scrape(self, request: Request, body: messages.Empty) -> None:
        self._caller.need_operator("METRICS")
        self._node.scrape(lambda result: self._answerer.answer(request, result))
