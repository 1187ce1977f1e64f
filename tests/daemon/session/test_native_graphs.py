"""Replays of graphs by native code: the same as by Python, and only of graphs that Python has served as they are."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter, TimeLimits
from gpulease.daemon.session import connection
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    Body,
    Empty,
    GraphCreate,
    GraphLaunch,
    GraphNode,
    GraphParameter,
    GraphPlace,
    Handle,
    Launch,
    MemAlloc,
    MemWrite,
)
from gpulease.protocol.opcodes import Flag, Opcode, ParameterKind, Status
from gpulease.protocol.ring import RingLayout
from helpers.kernels import packed_scale_args
from helpers.ring_pair import Pair, pair
from helpers.session_rig import LEASE, OF_THE_MOMENT, launch_of, quiet, sync, without_addresses, write


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RING_LAYOUT", RingLayout(1 << 16, 4096))
    monkeypatch.setattr(connection, "SPIN_NS", 1000)


class Graphs:
    """A session behind a ring, with graphs of one launch and one copy."""

    def __init__(self, line: Pair) -> None:
        self.line, self.context, self.page = line, line.made.context, line.made.page
        self.number = 0

    def ask(self, op: Opcode, body: Body) -> Body:
        self.number += 1
        self.line.heard.clear()
        self.line.put(build_frame(op, build_body(body), request_id=self.number, session_id=LEASE))
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(bytes(self.line.heard))
        frame = reader.next_frame()
        assert frame is not None
        assert not frame.status
        return parse_body(reply_body(op), frame.payload)

    def make(self, *, buffer: int = 0, has_value: bool = False) -> int:
        made, where = self.line.made, buffer or self.line.made.address
        launch = Launch(made.module, "bias", 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(where, 4, 1.0))
        nodes = (
            GraphNode(Opcode.LAUNCH, build_body(launch)),
            GraphNode(Opcode.MEM_WRITE, build_body(MemWrite(where, 16, b"copy"))),
        )
        parameters = (GraphParameter("by", ParameterKind.VALUE, 4),) * has_value
        places = (GraphPlace(0, 0, 12),) * has_value
        reply = self.ask(Opcode.GRAPH_CREATE, GraphCreate(nodes, (), parameters, places))
        assert isinstance(reply, Handle)
        return reply.handle

    def frame(self, graph: int, values: bytes = b"", *, is_quiet: bool = True) -> bytes:
        self.number += 1
        body = build_body(GraphLaunch(graph, values))
        numbers = {"request_id": self.number, "session_id": LEASE}
        return build_frame(Opcode.GRAPH_LAUNCH, body, flags=Flag.QUIET * is_quiet, **numbers)

    def replay(self, graph: int, values: bytes = b"") -> None:
        self.line.put(self.frame(graph, values))

    def sync(self) -> int:
        """Wait, and return the reply's status."""
        self.number += 1
        self.line.heard.clear()
        self.line.put(sync(self.number))
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(bytes(self.line.heard))
        frame = reader.next_frame()
        assert frame is not None
        return frame.status

    @property
    def natively(self) -> int:
        return len(self.context.graphs_replayed)


@pytest.fixture(name="graphs")
def _graphs() -> Iterator[Graphs]:
    with pair(is_native=True, has_graphs=True) as line:
        yield Graphs(line)


def test_the_third_equal_launch_is_native_and_counts_like_the_others(graphs: Graphs) -> None:
    graph = graphs.make()
    shown = [Counter.OPS, Counter.LAUNCHES, Counter.COPIES, Counter.COPIED_BYTES]
    steps = []
    for _ in range(4):
        before = [graphs.page.counter(counter) for counter in shown]
        graphs.replay(graph)
        steps.append([graphs.page.counter(counter) - old for counter, old in zip(shown, before, strict=True)])
    assert steps == [[1, 1, 1, 4]] * 4
    assert graphs.natively == 2
    assert graphs.context.graphs[0].noted == 2
    assert not graphs.sync()
    assert graphs.line.made.contents[16:20] == b"copy"


def test_replays_launches_and_syncs_in_one_portion(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(2):
        graphs.replay(graph)
    launch = quiet(launch_of(graphs.line.made), 1000)
    graphs.line.put(launch)
    # A launch behind the graph is what the driver ran last.
    graphs.line.put(graphs.frame(graph) + graphs.frame(graph) + launch)
    assert graphs.natively == 2
    assert graphs.context.graphs[0].noted == 0
    graphs.line.put(launch + graphs.frame(graph))
    assert graphs.context.graphs[0].noted == 1
    assert not graphs.sync()


def test_other_values_are_bound_by_python(graphs: Graphs) -> None:
    graph = graphs.make(has_value=True)
    one, two = b"\0\0\x80\x3f", b"\0\0\0\x40"
    for values in (one, one, one, two, two, two, one):
        graphs.replay(graph, values)
    assert graphs.natively == 2
    assert not graphs.sync()
    assert graphs.line.made.contents[:4] == b"\0\0\x20\x41"  # 10.0: three times 1, three times 2, and 1


def test_a_graph_that_is_void_or_gone_is_refused(graphs: Graphs) -> None:
    reply = graphs.ask(Opcode.MEM_ALLOC, MemAlloc(64))
    assert isinstance(reply, Handle)
    graph, other = graphs.make(buffer=reply.handle), graphs.make()
    for each in (graph, other) * 3:
        graphs.replay(each)
    assert graphs.natively == 2
    graphs.ask(Opcode.MEM_FREE, Handle(reply.handle))
    graphs.replay(graph)
    assert graphs.sync() == Status.INVALID_HANDLE
    graphs.ask(Opcode.GRAPH_DESTROY, Handle(other))
    graphs.replay(other)
    assert graphs.sync() == Status.INVALID_HANDLE
    assert graphs.natively == 2


def test_more_graphs_than_places_displace_each_other(graphs: Graphs) -> None:
    made = [graphs.make() for _ in range(65)]
    for graph in (made[0], made[64]) * 3:
        graphs.replay(graph)
    assert graphs.natively == 0
    for _ in range(3):
        graphs.replay(made[0])
    assert graphs.natively == 2


def test_what_the_driver_refuses_python_replays(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(3):
        graphs.replay(graph)
    graphs.context.refuses_graphs = True
    before = graphs.page.counter(Counter.LAUNCHES)
    graphs.replay(graph)
    assert graphs.page.counter(Counter.LAUNCHES) == before + 1
    assert graphs.natively == 1


def test_no_replay_after_the_leases_end(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(3):
        graphs.replay(graph)
    graphs.page.refuse(Status.REVOKED)
    graphs.replay(graph)
    assert graphs.natively == 1
    assert graphs.sync() == Status.REVOKED


def test_under_a_limit_of_time_python_admits_replays(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(3):
        graphs.replay(graph)
    graphs.page.set_time_limits(TimeLimits(allowance_ns=1 << 62, until_ns=1 << 62))
    graphs.replay(graph)
    assert graphs.natively == 1
    graphs.page.set_time_limits(TimeLimits())
    graphs.replay(graph)
    assert graphs.natively == 2


def test_a_failed_replay_is_named_as_one(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(3):
        graphs.replay(graph)
    assert graphs.context.graphs_replayed[-1] in graphs.line.made.session._graphs.recent_replays
    assert 1 << 40 not in graphs.line.made.session._graphs.recent_replays


def test_replays_are_an_interval_of_work(graphs: Graphs) -> None:
    graph = graphs.make()
    for _ in range(3):
        graphs.replay(graph)
    assert not graphs.sync()
    claims = graphs.page.time_claims()
    graphs.replay(graph)
    assert not graphs.sync()
    after = graphs.page.time_claims()
    assert claims is not None
    assert after is not None
    assert after.busy_since_ns == 0
    assert after.busy_ns > claims.busy_ns


KINDS = (
    "graph",
    "other graph",
    "with one",
    "with two",
    "aloud",
    "launch",
    "sync",
    "write",
    "free",
    "wrong values",
    "none",
)


def frames_of(graphs: Graphs, kinds: Sequence[str], made: tuple[int, int, int]) -> bytes:
    plain, other, valued = made
    one, two = b"\0\0\x80\x3f", b"\0\0\0\x40"
    frames = []
    for kind in kinds:
        match kind:
            case "graph":
                frames.append(graphs.frame(plain))
            case "other graph":
                frames.append(graphs.frame(other))
            case "with one":
                frames.append(graphs.frame(valued, one))
            case "with two":
                frames.append(graphs.frame(valued, two))
            case "aloud":
                frames.append(graphs.frame(plain, is_quiet=False))
            case "wrong values":
                frames.append(graphs.frame(plain, one))
            case "none":
                frames.append(graphs.frame(99))
            case _:
                graphs.number += 1
                frames.append(_other_frame(graphs, kind, other))
    return b"".join(frames)


def _other_frame(graphs: Graphs, kind: str, graph: int) -> bytes:
    number = graphs.number
    match kind:
        case "launch":
            return quiet(launch_of(graphs.line.made), number)
        case "write":
            return write(graphs.line.made, number, bytes([number % 256]) * 8)
        case "free":
            return build_frame(
                Opcode.GRAPH_DESTROY, build_body(Handle(graph)), request_id=number, session_id=LEASE, flags=Flag.QUIET
            )
        case _:
            return build_frame(Opcode.SYNC, build_body(Empty()), request_id=number, session_id=LEASE)


@settings(max_examples=40, deadline=None)
@given(portions=st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), max_size=8))
def test_native_replays_do_what_python_does(portions: list[list[str]]) -> None:
    outcomes = []
    for has_graphs in (False, True):
        with pair(is_native=True, has_graphs=has_graphs) as line:
            graphs = Graphs(line)
            made = graphs.make(), graphs.make(), graphs.make(has_value=True)
            line.heard.clear()
            for kinds in portions:
                line.put(frames_of(graphs, kinds, made))
            line.put(frames_of(graphs, ["sync", "sync"], made))
            counters = {counter: graphs.page.counter(counter) for counter in set(Counter) - OF_THE_MOMENT}
            outcomes.append((without_addresses(line.heard), counters, line.made.contents))
    assert outcomes[0] == outcomes[1]
