"""Values of a wrong type or size are refused with a clear error by the call that gets them, before anything is sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuLeaseError, InvalidRequest, KernelArgs, keep_alive
from gpulease.client.handles import Buffer
from gpulease.client.transport.arena import empty
from helpers.client_faces import Face, Scenario, real
from helpers.scripted_peer import ScriptedPeer

Run = Callable[[Scenario], None]

TOO_LONG = 10**5000
"""Python refuses to write integers of so many digits as a text."""

NO_NOTES: list[Any] = [None, True, 1.5, "x", "", b"x", {"a": 1}, {1}, object()]
NO_NOTE: list[Any] = [None, True, 1.5, "", [], (), [("a", 1)], object()]
NO_FUNCTIONS: list[Any] = [True, 0, 1.5, "x", [], object()]
NO_TIMES: list[Any] = [None, True, "1", float("nan"), float("inf"), -1, TOO_LONG, 1 + 2j, np.array([1.0, 2.0])]
NO_SIZES: list[Any] = [None, 0, -1, 1.5, float("nan"), "x", b"1", "\ud800", TOO_LONG, [], 1 << 70]


def test_calls_of_a_lease_refuse_them(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        sent = len(peer.ops())
        for call, values in (
            (lease.notes, NO_NOTES),
            (lease.note, NO_NOTE),
            (lease.renew, NO_TIMES),
            (lease.grow, NO_SIZES),
            (lease.shrink, NO_SIZES),
            (lease.region, NO_SIZES),
        ):
            for value in values:
                with pytest.raises(InvalidRequest):
                    await call(value)
        for value in NO_FUNCTIONS:
            with pytest.raises(InvalidRequest, match="on_loss must be a function, not"):
                real(lease).keep_alive(value)
            with pytest.raises(InvalidRequest, match="the callback must be a function, not"):
                real(lease).on_warning(value)
        assert len(peer.ops()) == sent
        await lease.free()

    run(scenario)


def test_calls_of_a_session_refuse_them(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            sent = len(peer.ops())
            for value in [None, True, 1.5, object()]:
                with pytest.raises(InvalidRequest, match="region_set: the argument must be several regions, not"):
                    await session.region_set(value)
            for value in (["x"], "x", [[]], [None]):
                with pytest.raises(GpuLeaseError, match="the regions must be Region objects, not"):
                    await session.region_set(value)
            for value in NO_FUNCTIONS:
                with pytest.raises(InvalidRequest, match="the callback must be a function, not"):
                    session.on_printed(value)
            for value in [None, -1, 1.5, "x", {}, TOO_LONG, [1, "x"], object()]:
                with pytest.raises(InvalidRequest, match="empty"):
                    session.empty(value, np.float32)
            assert len(peer.ops()) == sent

    run(scenario)


@pytest.mark.parametrize("value", [None, 1, "x", b"x", [], np.zeros(2), object(), len])
def test_only_leases_and_regions_are_kept_alive(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a lease or a region, not"):
        keep_alive(value)


@pytest.mark.parametrize("push", ["push_u32", "push_u64", "push_i32", "push_i64"])
def test_an_array_is_no_integer_argument(push: str) -> None:
    with pytest.raises(InvalidRequest, match=r"argument 0 must be an? ..., an integer"):
        getattr(KernelArgs(), push)(np.array([120, 2]))


@pytest.mark.parametrize("offset", [None, "", "x", 1.5, float("nan"), [], b"x", np.array([1, 2]), np.float32(1)])
def test_an_offset_in_a_buffer_is_an_integer(offset: Any) -> None:
    buffer = Buffer(None, 1, 64)
    with pytest.raises(InvalidRequest, match="argument 0 must be a buffer with an integer as its offset, not"):
        KernelArgs().push_buffer(buffer, offset)


@pytest.mark.parametrize("dtype", ["9" * 5000, "\ud800", "x", b"\xff", object()])
def test_a_dtype_is_one_of_numpys(dtype: Any) -> None:
    with pytest.raises(InvalidRequest, match="the dtype must be a numpy dtype"):
        empty(None, 1, dtype)
