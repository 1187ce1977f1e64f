"""Values of a wrong type or size are refused with a clear error by the call that gets them, before anything is sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuBuilder, GpuLeaseError, InvalidRequest, KernelArgs, keep_alive
from gpulease.client.array_layout import ArrayLayout, checked_shape
from gpulease.client.core.copies import check_range
from gpulease.client.core.launch import dimensions
from gpulease.client.core.submits import SubmissionBase
from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.handles import Buffer
from gpulease.client.kernel_args import pack_listed
from gpulease.client.serve.rpc.client import RpcClient
from gpulease.client.texts import quoted
from gpulease.client.transport.arena import empty
from gpulease.protocol.opcodes import ParameterType
from helpers.client_faces import Face, Scenario, real
from helpers.scripted_peer import ScriptedPeer

Run = Callable[[Scenario], None]

TOO_LONG = 10**5000
"""Python refuses to write integers of so many digits as a text."""

NO_NOTES: list[Any] = [None, True, 1.5, "x", "", b"x", {"a": 1}, {1}, object()]
NO_NOTE: list[Any] = [None, True, 1.5, "", [], (), [("a", 1)], object()]
NO_FUNCTIONS: list[Any] = [True, 0, 1.5, "x", [], object()]
NO_TIMES: list[Any] = [None, True, False, "1", float("nan"), float("inf"), -1, TOO_LONG, 1 + 2j, np.array([1.0, 2.0])]
NO_SIZES: list[Any] = [None, True, np.True_, 0, -1, 1.5, float("nan"), "x", b"1", "\ud800", TOO_LONG, [], 1 << 70]


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


@pytest.mark.parametrize("value", [True, False, np.True_, TOO_LONG, -TOO_LONG, None, "1"], ids=quoted)
def test_builders_refuse_them(value: Any) -> None:
    builder, job = GpuBuilder(), SubmissionBase("kernel", b"x")
    sizes_and_counts = (builder.min_vram, builder.submits, builder.weight, job.shared_bytes, job.out)
    times = (builder.lease_secs, builder.max_kernel_secs, builder.orphan_secs, builder.timeout, job.timeout_secs)
    choices = (builder.exclusivity, builder.waiting)
    for call in (*sizes_and_counts, *times, builder.parkable, *choices) if value != "1" else times:
        with pytest.raises(InvalidRequest, match=r"must be|must have"):
            call(value)


@pytest.mark.parametrize("value", [True, TOO_LONG, -TOO_LONG, 1.5, "x"], ids=quoted)
def test_places_and_shapes_are_integers_that_fit(value: Any) -> None:
    layout, buffer = ArrayLayout.contiguous((4, 4), 4), Buffer(None, 1, 64)
    for call in (
        lambda: layout.at(value),
        lambda: layout.at((0, value)),
        lambda: checked_shape(value, 4, "zeros"),
        lambda: checked_shape((2, value), 4, "zeros"),
        lambda: dimensions("kernel", "grid", [1, value]),
        lambda: dimensions("kernel", "block", value),
        lambda: check_range(buffer, value, 1, "mem_read"),
        lambda: check_range(buffer, 0, value, "mem_read"),
    ):
        with pytest.raises(GpuLeaseError) as caught:
            call()
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [TOO_LONG, -TOO_LONG], ids=quoted)
@pytest.mark.parametrize("declared", [ParameterType.UNTOLD, ParameterType.U32, ParameterType.F32, ParameterType.F64])
def test_a_listed_argument_of_thousands_of_digits_does_not_fit(value: int, declared: ParameterType) -> None:
    with pytest.raises(InvalidRequest, match="a value that can't be shown"):
        pack_listed([value], [declared])


@pytest.mark.parametrize("value", [True, TOO_LONG, -TOO_LONG, float("nan"), "1", [1]], ids=quoted)
def test_times_of_rpc_calls_are_numbers_of_seconds(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="a timeout must be a number of seconds, not"):
        RpcClient("unix:/none", value)
    client = RpcClient("unix:/none")
    with pytest.raises(InvalidRequest, match="a timeout must be a number of seconds, not"):
        client.call(1, b"", value)
    with pytest.raises(InvalidRequest, match="a deadline must be a number of seconds above 0, not"):
        client.call(1, b"", deadline_s=value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [True, TOO_LONG, -TOO_LONG, "1"], ids=quoted)
def test_parameters_of_decode_requests_are_numbers(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"{name} must be"):
        SamplingParameters(**{name: value})


@pytest.mark.parametrize("value", [None, 1, "x", b"x", [], np.zeros(2), object(), len])
def test_only_leases_and_regions_are_kept_alive(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a lease or a region, not"):
        keep_alive(value)


@pytest.mark.parametrize("push", ["push_u32", "push_u64", "push_i32", "push_i64"])
def test_an_array_is_no_integer_argument(push: str) -> None:
    with pytest.raises(InvalidRequest, match=r"argument 0 must be an? ..., an integer"):
        getattr(KernelArgs(), push)(np.array([120, 2]))


@pytest.mark.parametrize("offset", [None, True, "", "x", 1.5, float("nan"), [], b"x", np.array([1, 2]), np.float32(1)])
def test_an_offset_in_a_buffer_is_an_integer(offset: Any) -> None:
    buffer = Buffer(None, 1, 64)
    with pytest.raises(InvalidRequest, match="argument 0 must be a buffer with an integer as its offset, not"):
        KernelArgs().push_buffer(buffer, offset)


@pytest.mark.parametrize("dtype", ["9" * 5000, "\ud800", "x", b"\xff", object()])
def test_a_dtype_is_one_of_numpys(dtype: Any) -> None:
    with pytest.raises(InvalidRequest, match="the dtype must be a numpy dtype"):
        empty(None, 1, dtype)
