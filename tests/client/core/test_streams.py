"""What a client says of streams: which selections it sends, and when it relies on them."""

import gc
from collections.abc import Iterator

import pytest

from gpulease.client import GpuBuilder, GpuSession, KernelArgs, LaunchFailed, Module, Stream
from gpulease.protocol import Opcode, Status
from gpulease.protocol.messages import Handle, StreamWait
from helpers.scripted_peer import ScriptedPeer

Said = tuple[str, int | tuple[int, int] | None]


@pytest.fixture(params=["socket", "ring"])
def session(
    peer: ScriptedPeer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuSession]:
    peer.gives_rings = request.param == "ring"
    monkeypatch.setattr("gpulease.client.transport.spin_policy._HAS_CORES", True)
    with GpuBuilder(peer.address).min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
        yield session


@pytest.fixture
def module(session: GpuSession) -> Module:
    return session.module_load(b"ptx")


def heard(peer: ScriptedPeer, session: GpuSession) -> list[Said]:
    """What was said since the last time, up to now; streams by their numbers."""
    session.sync()
    said: list[Said] = []
    for request in peer.heard:
        match request.body:
            case Handle(handle=number):
                said.append((request.op.name, number))
            case StreamWait(stream=stream, other=other):
                said.append((request.op.name, (stream, other)))
            case _:
                said.append((request.op.name, None))
    peer.heard.clear()
    assert said.pop() == ("SYNC", None)
    return said


def launch(session: GpuSession, module: Module, stream: Stream | None = None) -> None:
    session.launch(module, "nothing", [1], [1], KernelArgs(), stream=stream)


def test_a_selection_is_sent_when_the_stream_changes(peer: ScriptedPeer, session: GpuSession, module: Module) -> None:
    one, two, buffer = session.stream(), session.stream(), session.mem_alloc(16)
    heard(peer, session)
    launch(session, module)
    for stream in (one, one, two, one, session.default_stream, None):
        launch(session, module, stream)
    session.mem_write(buffer, 0, b"abcd", stream=two)
    session.sync()
    two.sync()
    session.mem_write(buffer, 4, b"efgh", stream=two)
    assert session.mem_read(buffer, 0, 8) == b"abcdefgh"
    two.wait_for(one)
    two.wait_for(None)
    session.mem_write(buffer, 0, b"ijkl")
    assert session.mem_read(buffer, 0, 4, stream=one) == b"ijkl"
    assert heard(peer, session) == [
        ("LAUNCH", None),
        ("STREAM_SELECT", 1),
        ("LAUNCH", None),
        ("LAUNCH", None),
        ("STREAM_SELECT", 2),
        ("LAUNCH", None),
        ("STREAM_SELECT", 1),
        ("LAUNCH", None),
        ("STREAM_SELECT", 0),
        ("LAUNCH", None),
        ("LAUNCH", None),
        ("STREAM_SELECT", 2),
        ("MEM_WRITE", None),
        ("SYNC", None),
        ("STREAM_SYNC", 2),
        ("MEM_WRITE", None),
        ("STREAM_SELECT", 0),
        ("MEM_READ", None),
        ("STREAM_WAIT", (2, 1)),
        ("STREAM_WAIT", (2, 0)),
        ("MEM_WRITE", None),
        ("STREAM_SELECT", 1),
        ("MEM_READ", None),
    ]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_selection_that_may_not_have_gone_is_sent_again(
    peer: ScriptedPeer,
    session: GpuSession,
    module: Module,
    is_interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, real = session.stream(), session._session.operations.put
    heard(peer, session)

    def fail(_: bytes) -> bool:
        monkeypatch.setattr(session._session.operations, "put", real)
        if is_interrupted:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(session._session.operations, "put", fail)
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            launch(session, module, stream)
    else:
        # No room at once: it is sent all the same, but that is not looked at again.
        launch(session, module, stream)
    launch(session, module, stream)
    launch(session, module, stream)
    both = [("STREAM_SELECT", 1), ("LAUNCH", None)]
    assert heard(peer, session) == both * (2 - is_interrupted) + [("LAUNCH", None)]


def test_a_copy_whose_selection_was_interrupted(
    peer: ScriptedPeer, session: GpuSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, buffer = session.stream(), session.mem_alloc(4)
    heard(peer, session)
    with monkeypatch.context() as patch:

        def interrupt(_: object) -> bool:
            raise KeyboardInterrupt

        patch.setattr(session._session.operations, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.mem_write(buffer, 0, b"abcd", stream=stream)
    session.mem_write(buffer, 0, b"efgh")
    assert heard(peer, session) == [("STREAM_SELECT", 0), ("MEM_WRITE", None)]


def test_a_dropped_stream_is_let_go_of_once(peer: ScriptedPeer, session: GpuSession, module: Module) -> None:
    stream = session.stream()
    launch(session, module, stream)
    heard(peer, session)
    del stream
    gc.collect()
    launch(session, module)
    assert heard(peer, session) == [("STREAM_SELECT", 0), ("LAUNCH", None), ("STREAM_DESTROY", 1)]
    with session.stream() as stream:
        pass
    stream.close()
    del stream
    assert heard(peer, session)[-1] == ("STREAM_DESTROY", 2)
    session.default_stream.sync()
    assert heard(peer, session) == [("STREAM_SYNC", 0)]


def test_a_stream_let_go_of_behind_a_failure_is_let_go_of_again(
    peer: ScriptedPeer, session: GpuSession, module: Module
) -> None:
    stream = session.stream()
    peer.fail(Opcode.LAUNCH, Status.LAUNCH_FAILED)
    launch(session, module, stream)
    del stream
    with pytest.raises(LaunchFailed):
        session.sync()
    del peer.script[Opcode.LAUNCH]
    peer.heard.clear()
    launch(session, module)
    assert heard(peer, session) == [("STREAM_SELECT", 0), ("LAUNCH", None), ("STREAM_DESTROY", 1)]
