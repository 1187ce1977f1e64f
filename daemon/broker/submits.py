"""Submits as one control connection asks for them."""

from collections.abc import Callable

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.denials import failure_of
from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.core import Denied, Outcome, RequesterGone, SubmitReady, SubmitRequested
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import GpuSubmit
from gpulease.protocol.opcodes import Status


class SubmitDesk:
    """Takes GPU_SUBMIT; that this peer may ask was looked at before."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._open: dict[int, Request] = {}

    def ask(self, request: Request, on_ready: Callable[[SubmitReady | Failure], None]) -> None:
        """Have a submit made; told is which, or why not. Raises Refusal."""
        timeout_ms = request.body.timeout_ms if isinstance(request.body, GpuSubmit) else 0

        def on_outcome(outcome: Outcome) -> None:
            self._open.pop(number, None)
            if isinstance(outcome, SubmitReady):
                on_ready(outcome)
            elif isinstance(outcome, Denied):
                on_ready(failure_of(outcome.denial))

        if not self._runtime.headroom.is_enough():
            hint = "Leases go on, and can be renewed and freed: try again later."
            raise Refusal(Failure(Status.BUSY, "the daemon is out of memory", hint=hint))
        # Refused or not: whoever asks is alive.
        self._caller.hold(request.session_id)
        lease = self._runtime.table.get(request.session_id)
        number = self._caller.expect(on_outcome)
        self._open[number] = request
        # Whoever bears a token asks in the name of the lease's tenant.
        tenant = "" if lease is None else lease.tenant
        self._runtime.post(SubmitRequested(number, request.session_id, tenant, timeout_ms))

    def leave(self) -> None:
        """The client is gone: what it waits for is given up."""
        for number in list(self._open):
            self._runtime.post(RequesterGone(number))
            self._runtime.forget(number)
        self._open.clear()

    def give_up(self, failure: Failure) -> None:
        """What the client waits for will not come: tell it so."""
        for request in self._open.values():
            self._caller.answer(request, failure)
