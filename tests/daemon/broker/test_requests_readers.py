"""A peer that may only look changes nothing, whatever it requests with an operator's rights."""

import asyncio
import os
from collections.abc import Callable

import pytest

from fuzz.control import REQUESTS, Build
from fuzz.draws import Draws
from fuzz.tenants import Peer, Scene
from fuzz.virtual import READY_S, VirtualLoop, virtual_time
from gpulease.daemon.broker.caller import Step
from gpulease.daemon.broker.handlers.attach_requests import AttachHandler
from gpulease.daemon.broker.handlers.requests import HANDLERS, RequestDispatcher
from gpulease.daemon.broker.peer import Peer as ControlPeer
from gpulease.daemon.broker.web_frontend import READER
from gpulease.daemon.leases.model import LeaseState
from gpulease.protocol import Opcode, Status
from gpulease.protocol.connection import Request, request_trigger
from gpulease.protocol.connection_states import State, WireTrigger
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.messages import Attach, Body, Hello, LeaseAlloc, LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.operations import SPECS, Trait, having


class Reader:
    """A connection that keeps the answers."""

    peer = READER
    is_open = True

    def __init__(self) -> None:
        self.answers: list[Body | Failure] = []

    def answer(self, request: Request, result: Body | Failure) -> None:
        self.answers.append(result)

    is_lost = False

    def resume_reading(self) -> None:
        raise NotImplementedError

    def when_written(self, action: Callable[[], None]) -> None:
        raise NotImplementedError

    def hand_over(self, pass_on: Callable[[int, bytes], bool]) -> bool:
        raise NotImplementedError

    def serve_in_steps(self, request: Request, step: Step) -> None:
        raise NotImplementedError

    def serve_next(self) -> None:
        raise NotImplementedError

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        return True


Play = Callable[[Scene, RequestDispatcher, Reader], None]


def in_a_broker(play: Play) -> None:
    """With a lease of Ann's."""

    async def run() -> None:
        scene, reader = Scene(Draws(b"")), Reader()
        try:
            ann = Peer(scene, "ann")
            ann.ask(Opcode.HELLO, Hello(0, "ann", ()))
            ann.ask(Opcode.LEASE_ALLOC, LeaseAlloc(GPU_RESOURCE_TYPE, 100, 8000, 0, None, ()))
            await asyncio.sleep(READY_S * 3)
            play(scene, RequestDispatcher(scene.runtime, reader, "cpu"), reader)
            await asyncio.sleep(0.1)
            (lease,) = scene.table.snapshots()
            assert (lease.tenant, lease.state, lease.generation) == ("ann", LeaseState.ACTIVE, 1)
        finally:
            await scene.runtime.stop()
            for fd in scene.places.values():
                os.close(fd)

    loop = VirtualLoop()
    try:
        with virtual_time(loop):
            loop.run_until_complete(run())
            assert not loop.wrong, loop.wrong[0]
    finally:
        loop.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("op", "build"), REQUESTS, ids=[op.name for op, _ in REQUESTS])
def test_a_reader_is_served_only_what_changes_nothing(op: Opcode, build: Build) -> None:
    def play(scene: Scene, dispatcher: RequestDispatcher, reader: Reader) -> None:
        dispatcher.dispatch(Request(op, 1, 0, False, build(scene, Draws(b""))))
        is_denied = [isinstance(said, Failure) and said.status is Status.DENIED for said in reader.answers]
        # Metrics are told later.
        assert (True not in is_denied) if op in having(Trait.READ_ONLY) else is_denied == [True], reader.answers
        dispatcher.leave()

    in_a_broker(play)


def test_a_reader_enters_no_session() -> None:
    def play(scene: Scene, dispatcher: RequestDispatcher, reader: Reader) -> None:
        (lease_id,) = scene.known.owner
        with pytest.raises(Refused) as caught:
            dispatcher.handler(AttachHandler).check(Request(Opcode.ATTACH, 1, lease_id, False, Attach(())))
        assert caught.value.failure.status is Status.DENIED

    in_a_broker(play)


def test_no_operation_is_forgotten() -> None:
    asked = {op for op, _ in REQUESTS}
    control = {op for op in Opcode if request_trigger(op) in (WireTrigger.CONTROL_REQUEST, WireTrigger.PING)}
    assert asked >= control - having(Trait.READ_ONLY)


def test_each_control_operation_has_a_handler() -> None:
    assert HANDLERS.keys() == {op for op, spec in SPECS.items() if State.CONTROL in spec.states}


def test_what_is_for_operators_is_refused_to_a_tenant_before_its_handler() -> None:
    class Tenant(Reader):
        peer = ControlPeer("ann", is_operator=False, is_known=True)

    def play(scene: Scene, dispatcher: RequestDispatcher, reader: Reader) -> None:
        tenant = Tenant()
        asking = RequestDispatcher(scene.runtime, tenant, "cpu")
        built = {op: build(scene, Draws(b"")) for op, build in REQUESTS if Trait.OPERATORS in SPECS[op].traits}
        assert built.keys() == having(Trait.OPERATORS)
        for op, body in built.items():
            asking.dispatch(Request(op, 1, 0, False, body))
            (said,) = tenant.answers
            assert isinstance(said, Failure)
            assert (said.status, f"{op.name} is only for operators" in said.message) == (Status.DENIED, True)
            tenant.answers.clear()
        asking.leave()

    in_a_broker(play)
