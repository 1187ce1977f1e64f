"""Region sets and the launches that name them, on both APIs and over both transports."""

from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    RegionRevoked,
    Unsupported,
)
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.messages import GraphLaunchIn, LaunchIn, RegionRef, RegionSet
from helpers.client_faces import Face, Scenario, real
from helpers.scripted_peer import GRANULE, LEASE_ID, Refusal, ScriptedPeer

GRAPH = 7


def heard(face: Face, op: Opcode) -> list[Any]:
    return [request.body for request in face.peer.heard if request.op is op]


async def opened(face: Face, count: int = 2) -> tuple[Any, Any, list[Any]]:
    """A lease, its session and so many regions."""
    lease = await face.acquire()
    session = await face.open(lease)
    return lease, session, [real(await lease.region(GRANULE)) for _ in range(count)]


async def a_set_names_each_region_once(face: Face) -> None:
    _, session, (one, other) = await opened(face)
    made = await session.region_set([one, other, one])
    assert made.regions == (one, other)
    again = await session.region_set([other])
    assert heard(face, Opcode.REGION_SET) == [
        RegionSet((RegionRef(1, 7), RegionRef(2, 7))),
        RegionSet((RegionRef(2, 7),)),
    ]
    del made, again
    await session.sync()
    await session.sync()
    assert {body.handle for body in heard(face, Opcode.REGION_SET_FREE)} == {1, 2}


async def what_a_launch_in_regions_sends(face: Face) -> None:
    _, session, (one, other) = await opened(face)
    module, regions = await session.module_load("// ptx"), await session.region_set([one, other])
    args = KernelArgs().push_buffer(one).push_u32(16).push_f32(2.0)
    stream = real(await session.stream())
    for position, wish in ((0, {}), (4096, {"position": 4096}), ((1 << 64) - 1, {"position": (1 << 64) - 1})):
        number = await session.launch(module, "scale", [2], [32], args, regions=regions, **wish)
        await session.launch(module, "scale", [2], [32], args)
        await session.sync()
        asked = [request for request in face.peer.heard if request.op is Opcode.LAUNCH_IN][-1]
        plain = heard(face, Opcode.LAUNCH)[-1]
        same = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        assert asked.body == LaunchIn(**same, region_set=regions.handle, position=position)
        assert (asked.request_id, asked.is_quiet, asked.session_id) == (number, True, LEASE_ID)
    await session.launch(module, "scale", [2], [32], args.data, args.sizes, stream=stream, regions=regions)
    await session.launch(module, "scale", [2], [32], [one, np.uint32(1), np.float32(1)], regions=regions)
    await session.sync()
    assert face.peer.ops().count("STREAM_SELECT") == 2


async def what_changed_since_the_last_launch_is_seen(face: Face) -> None:
    _, session, (one, other) = await opened(face)
    module, regions = await session.module_load("// ptx"), await session.region_set([one])
    others = await session.region_set([other])
    args = KernelArgs().push_buffer(one).push_u32(16).push_f32(2.0)
    grid = [1]
    wishes = [(regions, 1), (others, 2), (regions, 3)]
    for named, position in wishes:
        for blocks in (1, 2):
            grid[0] = blocks
            await session.launch(module, "scale", grid, (32,), args, regions=named, position=position)
    await session.sync()
    told = [(body.region_set, body.position, body.grid_x) for body in heard(face, Opcode.LAUNCH_IN)]
    assert told == [(named.handle, position, blocks) for named, position in wishes for blocks in (1, 2)]
    numbers = [request.request_id for request in face.peer.heard if request.op is Opcode.LAUNCH_IN]
    assert numbers == sorted(set(numbers))
    await session.module_unload(module)
    with pytest.raises(LaunchFailed, match="is unloaded"):
        await session.launch(module, "scale", grid, (32,), args, regions=regions)


async def what_is_wrong_is_not_sent(face: Face) -> None:
    lease, session, (one, _) = await opened(face)
    module, regions = await session.module_load("// ptx"), await session.region_set([one])
    args = KernelArgs().push_buffer(one).push_u32(16).push_f32(2.0)

    async def launch(kernel: str = "scale", named: Any = regions, **wish: Any) -> None:
        await session.launch(module, kernel, [1], [1], args, regions=named, **wish)

    for position in (-1, 1 << 64, 1.5, None):
        with pytest.raises(InvalidRequest, match="position"):
            await launch(position=position)
    for named in ([one], one, 1):
        with pytest.raises(InvalidHandle, match="must be a RegionSet, not"):
            await launch(named=named)
    with pytest.raises(LaunchFailed, match="no such kernel"):
        await launch("nope")
    with pytest.raises(InvalidHandle, match="must be Region objects, not"):
        await session.region_set([await session.mem_alloc(4)])
    with pytest.raises(InvalidRequest, match=f"a set must have 1 to {MAX_REGIONS} regions, not 0"):
        await session.region_set([])
    with pytest.raises(InvalidRequest, match=f"a set must have 1 to {MAX_REGIONS}"):
        await session.region_set([real(await lease.region(GRANULE)) for _ in range(MAX_REGIONS + 1)])
    assert "LAUNCH_IN" not in face.peer.ops()
    await launch()
    with pytest.raises(InvalidRequest, match="position"):
        await launch(position=1 << 64)
    await session.sync()
    assert face.peer.ops().count("LAUNCH_IN") == 1


async def a_quiet_refusal_is_told_once_with_its_details(face: Face) -> None:
    lease, session, (one, other) = await opened(face)
    module, regions = await session.module_load("// ptx"), await session.region_set([one])
    details: dict[str, Any] = {"region": int(one.lease_id), "site": 2, "flipped_ns": 5, "position": 9}
    face.peer.on(Opcode.LAUNCH_IN, Refusal(Failure(Status.REVOKED, "quota", **details)))
    number = await session.launch(module, "nothing", [1], [1], KernelArgs(), regions=regions, position=9)
    with pytest.raises(RegionRevoked, match=rf"sync: earlier launch {number} of kernel 'nothing' failed") as caught:
        await session.sync()
    assert (caught.value.lease_id, caught.value.kernel, caught.value.position) == (one.lease_id, "nothing", 9)
    await session.sync()
    assert (one.is_alive, other.is_alive, lease.is_alive, session.is_alive) == (False, True, True, True)


async def an_old_session_says_what_it_lacks(face: Face) -> None:
    face.peer.region_granule_bytes = 0
    _, session, regions = await opened(face)
    assert session.region_granule_bytes == 0
    with pytest.raises(Unsupported, match="this session can't have regions"):
        await session.region_set(regions)
    assert "REGION_SET" not in face.peer.ops()


async def the_granule_is_told(face: Face) -> None:
    _, session, _ = await opened(face)
    assert session.region_granule_bytes == GRANULE


async def a_graph_names_regions_at_its_launch(face: Face) -> None:
    _, session, (one, _) = await opened(face)
    face.peer.script[Opcode.GRAPH_CREATE] = lambda _: _handle()
    face.peer.script[Opcode.GRAPH_LAUNCH] = face.peer.script[Opcode.GRAPH_LAUNCH_IN] = face.peer._empty
    face.peer.script[Opcode.GRAPH_DESTROY] = face.peer._empty
    module, regions = await session.module_load("// ptx"), await session.region_set([one])
    args = KernelArgs().push_buffer(one).push_parameter("n", "u32", 16).push_f32(2.0)
    recorder = real(session).record()
    if face.name == "blocking":
        with recorder as graph:
            await _recorded(session, module, args, regions)
        graph.launch(regions=regions, position=12, n=3)
        graph.launch(n=3)
    else:
        async with recorder as graph:
            await _recorded(session, module, args, regions)
        await graph.launch(regions=regions, position=12, n=3)
        await graph.launch(n=3)
    await session.sync()
    assert heard(face, Opcode.GRAPH_LAUNCH_IN) == [GraphLaunchIn(GRAPH, b"\3\0\0\0", regions.handle, 12)]
    assert [body.args for body in heard(face, Opcode.GRAPH_LAUNCH)] == [b"\3\0\0\0"]


async def _recorded(session: Any, module: Any, args: KernelArgs, regions: Any) -> None:
    await session.launch(module, "scale", [1], [1], args)
    with pytest.raises(InvalidRequest, match="can't have its own regions"):
        await session.launch(module, "scale", [1], [1], args, regions=regions)


def _handle() -> Any:
    from gpulease.protocol.messages import Handle

    return Handle(GRAPH)


SCENARIOS: list[Scenario] = [
    a_set_names_each_region_once,
    what_a_launch_in_regions_sends,
    what_changed_since_the_last_launch_is_seen,
    what_is_wrong_is_not_sent,
    a_quiet_refusal_is_told_once_with_its_details,
    an_old_session_says_what_it_lacks,
    the_granule_is_told,
    a_graph_names_regions_at_its_launch,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_scenario(run_over_both: Any, scenario: Scenario) -> None:
    run_over_both(scenario)


@pytest.mark.parametrize("name", ["stream", "regions", "position"])
def test_a_graphs_own_keywords_are_no_parameters(name: str) -> None:
    with pytest.raises(InvalidRequest, match="a parameter's name must be"):
        KernelArgs().push_parameter(name, "u32", 1)


@pytest.mark.parametrize("value", [b"", b"\0\0\0", bytes(5), bytes(4)])
def test_an_option_of_another_length_is_no_ability(peer: ScriptedPeer, value: bytes) -> None:
    import asyncio

    from gpulease.protocol.messages import AttachReply
    from gpulease.protocol.opcodes import SessionOption
    from gpulease.protocol.primitives import Tlv

    face = Face("asyncio", peer)
    peer.on(Opcode.ATTACH, AttachReply(1 << 30, "made-up", "GPU-1", (Tlv(SessionOption.REGIONS, value),)))

    async def scenario() -> None:
        async with face.session() as session:
            assert session.region_granule_bytes == 0

    asyncio.run(scenario())
