"""Cooperative launches and launches in clusters, on both APIs and over both transports."""

from typing import Any

import pytest

from gpulease.client import KernelArgs, LaunchFailed, Unsupported
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LaunchWith
from helpers.client_faces import Face, Scenario, real
from helpers.scripted_peer import GRANULE


async def they_travel_behind_the_launch(face: Face) -> None:
    lease = await face.acquire()
    session = await face.open(lease)
    module, one = await session.module_load("// ptx"), real(await lease.region(GRANULE))
    regions = await session.region_set([one])
    args = KernelArgs().push_buffer(one).push_u32(16).push_f32(2.0)
    number = await session.launch(module, "scale", [4], [32], args, cooperative=True)
    await session.launch(module, "scale", [4], [32], args, cluster=(2,), regions=regions, position=5)
    await session.sync()
    heard = [request for request in face.peer.heard if request.op is Opcode.LAUNCH_WITH]
    plain = (module.handle, "scale", 4, 1, 1, 32, 1, 1, 0, args.data, args.sizes)
    assert (heard[0].request_id, heard[0].is_quiet) == (number, True)
    assert [request.body for request in heard] == [
        LaunchWith(*plain, 0, 0, 1, 0, 0, 0),
        LaunchWith(*plain, regions.handle, 5, 0, 2, 1, 1),
    ]
    for cluster in (0, (0,), (1, 2, 3, 4), "2", (1.5,), (1 << 32,)):
        with pytest.raises(LaunchFailed, match="cluster"):
            await session.launch(module, "scale", [4], [32], args, cluster=cluster)
    with pytest.raises(LaunchFailed, match="no such kernel"):
        await session.launch(module, "nope", [4], [32], args, cooperative=True)


async def an_older_worker_is_not_asked(face: Face) -> None:
    face.peer.region_granule_bytes = 0
    session = await face.open(await face.acquire())
    with pytest.raises(Unsupported, match="too old"):
        await session.launch(await session.module_load("// ptx"), "scale", [1], [1], KernelArgs(), cooperative=True)


@pytest.mark.parametrize("scenario", [they_travel_behind_the_launch, an_older_worker_is_not_asked])
def test_scenario(run_over_both: Any, scenario: Scenario) -> None:
    run_over_both(scenario)
