"""What recording a launch graph checks, refuses, sends and lets go of; both APIs."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    Unsupported,
    aio,
)
from gpulease.client.core import recorder as recording
from gpulease.protocol import Opcode, Status
from gpulease.protocol.codec import parse_body
from gpulease.protocol.messages import Empty, GraphCreate, GraphLaunch, GraphParameter, GraphPlace, Handle, MemWrite
from gpulease.protocol.opcodes import ParameterKind
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import ScriptedPeer

GRAPH = 7

RECORDED = {"launch", "mem_write", "mem_read"}
REFUSED = {"mem_alloc", "mem_free", "module_load", "module_unload", "sync", "stream", "region_set", "printed"}
REFUSED |= {"keep", "kept", "kept_names", "take", "reset"}


class Awaitable:
    """A blocking graph whose methods are to be awaited."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    async def launch(self, **values: Any) -> int:
        return int(self.graph.launch(**values))

    async def close(self) -> None:
        self.graph.close()


@asynccontextmanager
async def record(face: Face, session: Any) -> AsyncIterator[Any]:
    """A recording block of either face."""
    if face.name == "blocking":
        with session.record() as graph:
            yield Awaitable(graph)
    else:
        async with session.record() as graph:
            yield graph


def graphs_heard(face: Face) -> list[GraphCreate]:
    return [request.body for request in face.peer.heard if isinstance(request.body, GraphCreate)]


async def opened(face: Face, session: Any) -> tuple[Any, Any]:
    face.peer.on(Opcode.GRAPH_CREATE, Handle(GRAPH))
    face.peer.on(Opcode.GRAPH_LAUNCH, Empty())
    face.peer.on(Opcode.GRAPH_DESTROY, Empty())
    return await session.module_load("// ptx"), await session.mem_alloc(64)


async def what_is_sent(face: Face) -> None:
    async with face.session() as session:
        module, buffer = await opened(face, session)
        other = await session.mem_alloc(32)
        before = len(face.peer.heard)
        args = KernelArgs().push_parameter("x", "buffer", (buffer, 16)).push_parameter("n", "u32", 3)
        args.push_parameter("factor", "f32", 0.5)
        async with record(face, session) as graph:
            await session.mem_write(buffer, 8, b"abcd")
            await session.launch(module, "scale", [4], [256], args)
            await session.launch(module, "scale", [4], [256], KernelArgs().push_buffer(other).push_u32(1).push_f32(1))
            await session.launch(module, "small", [1], [1], KernelArgs().push_parameter("n", "u32", 3))
            assert len(face.peer.heard) == before, "nothing is sent yet"
        (body,) = graphs_heard(face)
        assert [Opcode(node.op).name for node in body.nodes] == ["MEM_WRITE", "LAUNCH", "LAUNCH", "LAUNCH"]
        assert parse_body(MemWrite, body.nodes[0].body) == MemWrite(buffer.handle, 8, b"abcd")
        assert body.buffers == (other.handle,), "what is a parameter need not be there"
        assert body.parameters == (
            GraphParameter("x", ParameterKind.BUFFER, 8),
            GraphParameter("n", ParameterKind.VALUE, 4),
            GraphParameter("factor", ParameterKind.VALUE, 4),
        )
        assert body.places == (GraphPlace(0, 1, 0), GraphPlace(1, 1, 8), GraphPlace(2, 1, 12), GraphPlace(1, 3, 0))
        numbers = [await graph.launch(), await graph.launch(n=np.uint32(9), x=other), await graph.launch()]
        await session.sync()
        heard = [request for request in face.peer.heard if request.op is Opcode.GRAPH_LAUNCH]
        assert [request.request_id for request in heard] == numbers
        assert all(request.is_quiet for request in heard)
        plain = GraphLaunch(GRAPH, pointer(buffer, 16) + bytes.fromhex("030000000000003f"))
        bound = GraphLaunch(GRAPH, pointer(other, 0) + bytes.fromhex("090000000000003f"))
        assert [request.body for request in heard] == [plain, bound, plain]
        await graph.close()
        assert face.peer.ops()[-1] == "GRAPH_DESTROY"


def pointer(buffer: Any, offset: int) -> bytes:
    return bytes(buffer.handle.to_bytes(8, "little") + offset.to_bytes(8, "little"))


def refused_calls(session: Any, module: Any, buffer: Any) -> dict[str, Callable[[], Any]]:
    """Calls of the methods that can't be recorded, by their names."""
    return {
        "mem_alloc": lambda: session.mem_alloc(4),
        "region_set": lambda: session.region_set([]),
        "module_load": lambda: session.module_load("x"),
        "sync": lambda: session.sync(),
        "stream": lambda: session.stream(),
        "printed": lambda: session.printed(),
        "keep": lambda: session.keep(buffer, "it"),
        "kept": lambda: session.kept("it"),
        "kept_names": lambda: session.kept_names(),
        "take": lambda: session.take("it"),
        "reset": lambda: session.reset(),
        "mem_free": lambda: session.mem_free(buffer),
        "module_unload": lambda: session.module_unload(module),
    }


async def an_old_worker_is_asked_for_nothing_that_it_does_not_announce(face: Face) -> None:
    face.peer.region_granule_bytes = 0
    async with face.session() as session:
        module, buffer = await opened(face, session)
        unsupported = set()
        for name, call in refused_calls(session, module, buffer).items():
            try:
                # The peer fails the test at an operation that it has not announced.
                await call()
            except Unsupported:
                unsupported.add(name)
        assert unsupported == {"region_set", "printed", "keep", "kept", "kept_names", "take", "reset"}


async def what_is_refused_while_it_records(face: Face) -> None:
    async with face.session() as session:
        module, buffer = await opened(face, session)
        stream = await session.stream()
        array, large = np.zeros(4, np.uint8), await session.mem_alloc(1 << 20)
        async with record(face, session) as other:
            await session.mem_write(buffer, 0, b"x")
        async with record(face, session) as graph:
            refusals = refused_calls(session, module, buffer)
            assert refusals.keys() == REFUSED
            others: tuple[Callable[[], Any], ...] = (
                lambda: stream.sync(),
                lambda: stream.wait_for(None),
                lambda: other.launch(),
            )
            for refused in (*refusals.values(), *others):
                with pytest.raises(InvalidRequest, match="recording"):
                    await refused()
            with pytest.raises(InvalidHandle, match="is being recorded"):
                await graph.launch()
            with pytest.raises(InvalidRequest, match="already recording"):
                async with record(face, session):
                    pass
            wrong: tuple[tuple[Callable[[], Any], str], ...] = (
                (lambda: session.mem_write(buffer, 0, b"x", stream=stream), "mem_write: .* can't choose a stream"),
                (
                    lambda: session.mem_read(buffer, 0, 4, into=array, stream=stream),
                    "mem_read: .* can't choose a stream",
                ),
                (
                    lambda: session.launch(module, "small", [1], [1], b"", stream=stream),
                    "launch: .* can't choose a stream",
                ),
                (lambda: session.launch(module, "small", [1], [1], b"", cooperative=True), "can't be recorded"),
                (lambda: session.mem_write(buffer, 0, array), "not shared"),
                (lambda: session.mem_read(buffer, 0, 4, into=array), "not shared"),
                (lambda: session.mem_read(buffer, 0, 4), "needs an array|not shared"),
                (lambda: session.mem_write(buffer, 60, b"12345"), "outside buffer"),
                (lambda: session.mem_write(buffer, 0, np.broadcast_to(np.uint8(1), 1 << 50)), "outside buffer"),
                (lambda: session.mem_write(large, 0, bytes(recording.MAX_WRITE_BYTES + 1)), "bytes can be recorded"),
            )
            for operation, match in wrong:
                with pytest.raises((InvalidRequest, InvalidHandle), match=match):
                    await operation()
            with pytest.raises(LaunchFailed, match="no such kernel"):
                await session.launch(module, "none", [1], [1], KernelArgs())
            await session.launch(module, "small", [1], [1], KernelArgs().push_parameter("n", "u32", 1))
            with pytest.raises(InvalidRequest, match=r"parameter 'n' is f32 .*, but u32 .* in an earlier launch"):
                await session.launch(module, "small", [1], [1], KernelArgs().push_parameter("n", "f32", 1))
        (_, body) = graphs_heard(face)
        assert [Opcode(node.op).name for node in body.nodes] == ["LAUNCH"], "what was refused is not in it"
        await session.sync()


async def write_and_fail(face: Face, session: Any, buffer: Any, kept: list[Any]) -> None:
    async with record(face, session) as graph:
        kept.append(graph)
        await session.mem_write(buffer, 0, b"x")
        raise ZeroDivisionError


async def record_one(face: Face, session: Any, module: Any, kept: list[Any], launches: int = 1) -> None:
    async with record(face, session) as graph:
        kept.append(graph)
        for number in range(launches):
            args = KernelArgs().push_parameter(f"n{number}", "u32", number)
            await session.launch(module, "small", [1], [1], args)


async def in_a_stream(face: Face) -> None:
    async with face.session() as session:
        _, buffer = await opened(face, session)
        one, two = await session.stream(), await session.stream()
        async with record(face, session) as graph:
            await session.mem_write(buffer, 0, b"x")
        face.peer.heard.clear()
        for stream in (None, one, one, two, None):
            await graph.launch(stream=stream)
        with pytest.raises(InvalidHandle, match="must be a StreamHandle, not"):
            await graph.launch(stream=buffer)
        await session.sync()
        said = [(request.op.name, getattr(request.body, "handle", None)) for request in face.peer.heard]
        launched, [synced] = ("GRAPH_LAUNCH", None), said[-1:]
        assert synced == ("SYNC", None)
        first, second, default = [("STREAM_SELECT", number) for number in (1, 2, 0)]
        assert said[:-1] == [launched, first, launched, launched, second, launched, default, launched]


async def discarded(face: Face) -> None:
    async with face.session() as session:
        module, buffer = await opened(face, session)
        graphs: list[Any] = []
        with pytest.raises(ZeroDivisionError):
            await write_and_fail(face, session, buffer, graphs)
        with pytest.raises(InvalidRequest, match="nothing was recorded"):
            await record_one(face, session, module, graphs, launches=0)
        assert graphs_heard(face) == []
        face.peer.fail(Opcode.GRAPH_CREATE, Status.ALLOC_FAILED)
        with pytest.raises(AllocFailed, match="graph_create: made up"):
            await record_one(face, session, module, graphs)
        for graph in graphs:
            with pytest.raises(InvalidHandle, match="was discarded"):
                await graph.launch()
        await session.sync()


async def a_dropped_graph_is_freed_with_what_it_held(face: Face) -> None:
    async with face.session() as session:
        module, buffer = await opened(face, session)
        async with record(face, session) as graph:
            await session.launch(module, "scale", [1], [1], KernelArgs().push_buffer(buffer).push_u32(1).push_f32(1))
        await graph.launch()
        del module, buffer
        await session.sync()
        assert "MEM_FREE" not in face.peer.ops()
        del graph
        gc.collect()
        await session.sync()
        await session.sync()
        assert {"GRAPH_DESTROY", "MEM_FREE", "MODULE_UNLOAD"} <= set(face.peer.ops())


async def bounds(face: Face) -> None:
    async with face.session() as session:
        module, _ = await opened(face, session)
        for name, most in (("MAX_GRAPH_NODES", 2), ("MAX_GRAPH_PARAMETERS", 2), ("MAX_GRAPH_PLACES", 2)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(recording, name, most)
                with pytest.raises(InvalidRequest, match="a graph has at most"):
                    await record_one(face, session, module, [], launches=3)


SCENARIOS: list[Scenario] = [
    what_is_sent,
    an_old_worker_is_asked_for_nothing_that_it_does_not_announce,
    what_is_refused_while_it_records,
    discarded,
    in_a_stream,
    a_dropped_graph_is_freed_with_what_it_held,
    bounds,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_scenario(run_over_both: Any, scenario: Scenario) -> None:
    run_over_both(scenario)


def test_every_operation_of_a_session_is_recorded_or_refused() -> None:
    # Those that compile go on to `module_load` and `launch`.
    asked = {"record", "close", "open", "empty", "compile", "kernel", "elementwise"}
    asked |= {"array", "zeros", "empty_device"}  # made of mem_alloc
    for kind in (GpuSession, aio.GpuSession):
        operations = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        assert operations - asked == RECORDED | REFUSED, "a session that records would do it"


def test_other_threads_are_refused(peer: ScriptedPeer) -> None:
    face = Face("blocking", peer)
    errors: list[str] = []

    def launch(session: Any, module: Any) -> None:
        for operation in (lambda: session.launch(module, "nothing", [1], [1], KernelArgs()), session.sync):
            try:
                operation()
            except InvalidRequest as error:
                errors.append(str(error))

    async def main() -> None:
        async with face.session() as session:
            module, _ = await opened(face, session)
            with session.record():
                session.target.launch(module, "nothing", [1], [1], KernelArgs())
                thread = threading.Thread(target=launch, args=(session.target, module))
                thread.start()
                thread.join()
            assert len(graphs_heard(face)[0].nodes) == 1

    asyncio.run(main())
    assert ["another thread" in error for error in errors] == [True, True]


@pytest.mark.parametrize(
    ("kind", "value", "data"),
    [
        ("u32", 5, "05000000"),
        ("u64", np.uint64(5), "0500000000000000"),
        ("i32", -1, "ffffffff"),
        ("i64", -1, "ff" * 8),
        ("f32", np.float32(1), "0000803f"),
        ("f64", 1, "000000000000f03f"),
        ("raw", b"abc", "616263"),
    ],
)
def test_parameters_are_arguments_like_others(kind: Any, value: Any, data: str) -> None:
    args = KernelArgs().push_u32(1).push_parameter("p", kind, value)
    assert args.data.hex() == "01000000" + data
    assert args.sizes == (4, len(data) // 2)
    ((name, index, bound),) = args.parameters
    assert (name, index, bound.kind, bound.value.hex(), bound.argument_bytes) == ("p", 1, kind, data, len(data) // 2)


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("p", "u8", 1),
        ("p", "u32", -1),
        ("p", "u32", "x"),
        ("p", "buffer", 5),
        ("p", "raw", b""),
        ("a b", "u32", 1),
        (5, "u32", 1),
        ("stream", "u32", 1),
    ],
)
def test_parameters_that_are_none(name: Any, kind: Any, value: Any) -> None:
    args = KernelArgs().push_u32(1)
    with pytest.raises(InvalidRequest, match="argument 1"):
        args.push_parameter(name, kind, value)
    assert (len(args), args.parameters) == (1, ())
