"""A first launch compiles its kernel: the broker sees since when, and a lease that ended meanwhile launches nothing."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import DriverKernel, LaunchRejected
from gpulease.daemon.ptx.image import CpuKernel
from gpulease.daemon.session.operations import LeaseOver
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import Frame, FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import GraphCreate, GraphLaunch, GraphNode, Launch
from gpulease.protocol.opcodes import Opcode, Status
from helpers.session_rig import LEASE, Rig, launch_of, rig


def send(made: Rig, op: Opcode, body: Any) -> Frame:
    reply = made.session.handle(Frame(op, 0, 0, 1, LEASE, memoryview(build_body(body))))
    assert reply is not None
    reader = FrameReader(MAX_PAYLOAD_BYTES)
    reader.receive_data(reply)
    frame = reader.next_frame()
    assert frame is not None
    return frame


def graph_of(launch: Launch) -> GraphCreate:
    return GraphCreate((GraphNode(Opcode.LAUNCH, build_body(launch)),), (), (), ())


WAYS = pytest.mark.parametrize(
    ("op", "of"), [(Opcode.LAUNCH, lambda launch: launch), (Opcode.GRAPH_CREATE, graph_of)], ids=["launch", "graph"]
)


@WAYS
def test_the_broker_sees_since_when_it_compiles(op: Opcode, of: Callable[[Launch], Any]) -> None:
    since: list[int] = []
    with rig() as made:

        def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
            since.append(made.page.counter(Counter.COMPILING_SINCE_NS))
            return True

        made.context.compile_kernel = compile_kernel  # type: ignore[attr-defined]
        before = time.monotonic_ns()
        send(made, op, of(launch_of(made)))
        assert before <= since[0] <= time.monotonic_ns()
        assert made.page.counter(Counter.COMPILING_SINCE_NS) == 0
        send(made, op, of(launch_of(made)))
        assert len(since) == 1


def test_a_kernel_that_is_due_is_compiled_again_before_its_launch() -> None:
    calls: list[tuple[int, int]] = []
    with rig() as made:

        def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
            calls.append((threads, len(made.context.launches)))
            return True

        made.context.compile_kernel = compile_kernel  # type: ignore[attr-defined]
        launch = launch_of(made)
        threads = launch.grid_x * launch.block_x
        kernel = made.session._resources.ledger.module(launch.module).kernels[launch.kernel]
        assert isinstance(kernel, CpuKernel)
        for is_due in (False, False, True, False):
            kernel.running.first_code_ns = -1 if is_due else 0
            send(made, Opcode.LAUNCH, launch)
        assert calls == [(threads, 0), (threads, 2)]
        assert len(made.context.launches) == 4


@pytest.mark.parametrize("is_launched_before", [False, True])
def test_a_graph_s_kernel_is_compiled_like_a_launch_s_and_again_before_the_replay_for_which_it_is_due(
    is_launched_before: bool,
) -> None:
    since: list[int] = []
    with rig() as made:
        launch = launch_of(made)
        kernel = made.session._resources.ledger.module(launch.module).kernels[launch.kernel]
        assert isinstance(kernel, CpuKernel)
        if is_launched_before:
            send(made, Opcode.LAUNCH, launch)
        compile_kernel: Any = made.context.compile_kernel

        def noted(kernel: DriverKernel, threads: int) -> bool:
            since.append(made.page.counter(Counter.COMPILING_SINCE_NS))
            return bool(compile_kernel(kernel, threads))

        made.context.compile_kernel = noted  # type: ignore[attr-defined]
        send(made, Opcode.GRAPH_CREATE, graph_of(launch))
        assert len(since) == (not is_launched_before)
        since.clear()
        for left_ns, compilations in ((1 << 60, 0), (-1, 1), (0, 1)):
            # No launch may count its time meanwhile.
            made.context.context.sync()
            kernel.running.first_code_ns = left_ns
            assert send(made, Opcode.GRAPH_LAUNCH, GraphLaunch(1, b"")).status == Status.OK
            assert len(since) == compilations
        assert all(since)


def test_a_graph_is_not_replayed_if_the_lease_ended_while_its_kernel_was_optimised() -> None:
    with rig() as made:
        launch = launch_of(made)
        kernel = made.session._resources.ledger.module(launch.module).kernels[launch.kernel]
        assert isinstance(kernel, CpuKernel)
        send(made, Opcode.GRAPH_CREATE, graph_of(launch))

        def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
            made.page.refuse(Status.REVOKED)
            return True

        made.context.compile_kernel = compile_kernel  # type: ignore[attr-defined]
        kernel.running.first_code_ns = -1
        launched = made.page.counter(Counter.LAUNCHES)
        assert send(made, Opcode.GRAPH_LAUNCH, GraphLaunch(1, b"")).status == Status.REVOKED
        assert made.page.counter(Counter.LAUNCHES) == launched


@WAYS
def test_a_lease_that_ended_meanwhile_launches_nothing(op: Opcode, of: Callable[[Launch], Any]) -> None:
    with rig() as made:

        def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
            made.page.refuse(Status.REVOKED)
            return True

        made.context.compile_kernel = compile_kernel  # type: ignore[attr-defined]
        reply = send(made, op, of(launch_of(made)))
        assert reply.status == Status.REVOKED
        assert made.context.launches == []


def test_a_kernel_that_can_not_be_compiled_is_a_launch_that_failed_and_charges_nothing() -> None:
    with rig() as made:

        def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
            raise LaunchRejected("no way")

        made.context.compile_kernel = compile_kernel  # type: ignore[attr-defined]
        reply = send(made, Opcode.LAUNCH, launch_of(made))
        assert reply.status == Status.LAUNCH_FAILED
        assert b"scale: no way" in bytes(reply.payload)
        assert made.page.counter(Counter.COMPILING_SINCE_NS) == 0


def test_lease_over_is_what_a_compilation_raises_behind_the_end() -> None:
    with rig() as made:
        made.page.refuse(Status.REVOKED)
        made.context.compile_kernel = lambda kernel, threads: True  # type: ignore[attr-defined]
        with pytest.raises(LeaseOver):
            made.session._resources.compile_kernel(None, 1)  # type: ignore[arg-type]
        made.context.compile_kernel = lambda kernel, threads: False  # type: ignore[attr-defined]
        made.session._resources.compile_kernel(None, 1)  # type: ignore[arg-type]
