"""The types that a checker sees of a session's methods; mypy reads this file with the tests."""

from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client import Buffer, GpuBuilder, GpuSession
from helpers.scripted_peer import ScriptedPeer


def check_types(session: GpuSession, buffer: Buffer) -> None:
    """What is true when it runs is what the checker says."""
    assert_type(session.mem_read(buffer, 0, 16), bytes)
    array = session.empty(2, np.complex64)
    assert_type(array, NDArray[np.complex64])
    assert_type(session.mem_read(buffer, 0, 16, into=array), NDArray[np.complex64])
    assert_type(session.mem_read(buffer, 0, 16, bytearray(16)), bytearray)
    assert_type(session.empty((2, 2)), NDArray[np.float64])
    assert_type(session.empty(4, np.dtype(np.int32)), NDArray[np.int32])
    assert_type(session.empty(4, "f4"), NDArray[Any])
    assert isinstance(session.mem_read(buffer, 0, 16), bytes)
    assert session.mem_read(buffer, 0, 16, into=array) is array


if TYPE_CHECKING:
    # Only for the checker, whatever the asyncio face's names are.
    from gpulease.client import aio

    async def check_asyncio_types(session: aio.GpuSession, buffer: Buffer) -> None:
        assert_type(await session.mem_read(buffer, 0, 16), bytes)
        assert_type(await session.mem_read(buffer, 0, 16, into=bytearray(16)), bytearray)
        assert_type(session.empty(4, np.uint8), NDArray[np.uint8])


def test_the_types_are_those_a_checker_sees(peer: ScriptedPeer) -> None:
    with GpuBuilder(peer.address).min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
        check_types(session, session.mem_alloc(16))


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, np.float16, "i4, f4", ">f8", "S8"])
@pytest.mark.parametrize("nbytes", [16, 1 << 16])
def test_what_can_be_written_can_be_read_into(peer: ScriptedPeer, dtype: Any, nbytes: int) -> None:
    with GpuBuilder(peer.address).min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(nbytes)
        source = np.frombuffer(bytes(range(256)) * (nbytes // 16), np.uint8)[:nbytes].view(dtype)
        session.mem_write(buffer, 0, source)
        target = np.zeros_like(source)
        session.mem_read(buffer, 0, nbytes, into=target)
        assert target.tobytes() == source.tobytes()
