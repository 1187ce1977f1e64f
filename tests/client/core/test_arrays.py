"""Arrays on the card do what numpy's do, on both APIs; nothing is converted or copied unasked."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.client import AllocFailed, Array, GpuSession, InvalidHandle, InvalidRequest, KernelArgs, Unsupported, aio
from gpulease.client.core import arrays
from gpulease.client.kernels.cuda_c import ptx_of
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM
from helpers.nvrtc import needs_nvrtc


@pytest.fixture(scope="module")
def session(shared_daemon: Daemon) -> Iterator[GpuSession]:
    with shared_daemon.builder(32 << 20, seconds=600).acquire() as lease, GpuSession(lease) as session:
        yield session


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "f2", "f4", "i8", "f8", "c8", "c16"])
def test_what_goes_up_comes_back(session: GpuSession, dtype: str) -> None:
    given = np.arange(24).reshape(2, 3, 4).astype(dtype)
    array = session.array(given[:, ::-1])
    assert (array.shape, array.dtype, array.size_bytes) == ((2, 3, 4), given.dtype, given.nbytes)
    assert np.array_equal(np.asarray(array), given[:, ::-1])


def test_a_new_array_is_zero(session: GpuSession) -> None:
    for make in (session.zeros, session.empty_device):
        assert make((2, 3), "f4").numpy().tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "key", [np.s_[1], np.s_[..., 2], np.s_[::-2, 1:], np.s_[:, None, ::3], np.s_[5:5], np.s_[1, 2]]
)
def test_a_slice_is_read_filled_and_written_in_place(session: GpuSession, key: Any) -> None:
    given = np.arange(48, dtype="i4").reshape(6, 8)
    array = session.array(given)
    assert np.array_equal(array[key].numpy(), given[key])
    array[key] = 7
    given[key] = 7
    assert np.array_equal(array.numpy(), given)
    fresh = np.arange(given[key].size, dtype="i4").reshape(given[key].shape)
    array[key] = given[key] = fresh
    assert np.array_equal(array.numpy(), given)
    made = array[key].copy()
    assert made.is_contiguous
    assert np.array_equal(made.numpy(), given[key])


def test_arrays_are_copied_on_the_card_with_numpy_s_shapes(session: GpuSession) -> None:
    to, row = session.zeros((3, 4), "f8"), session.array([1.0, 2, 3, 4])
    to[...] = row
    to[:, 1] = row[1::2][0]
    assert to.numpy().tolist() == [[1, 2, 3, 4]] * 3
    to[1:] = [[9.0], [8]]
    assert to.numpy().tolist() == [[1, 2, 3, 4], [9] * 4, [8] * 4]


def test_a_copy_to_overlapping_elements_is_as_if_read_first(session: GpuSession) -> None:
    given = np.arange(4000, dtype="i4")
    array = session.array(given)
    array[1:] = array[:-1]
    array[...] = array[::-1]
    given[1:] = given[:-1].copy()
    assert np.array_equal(array.numpy(), given[::-1])


def test_a_launch_takes_an_array_and_a_slice(session: GpuSession) -> None:
    module, array = session.module_load(TRANSFORM), session.array(np.ones(8, "f4"))
    session.launch(module, "scale", [1], [32], [array, 2, 3.0])
    session.launch(module, "scale", [1], [32], [array[4:], 2, 5.0])
    session.launch(module, "scale", [1], [32], KernelArgs().push_buffer(array[6:]).push_u32(1).push_f32(7.0))
    assert array.numpy().tolist() == [3, 3, 1, 1, 5, 5, 7, 1]


def test_a_stream_and_a_graph_take_it(shared_daemon: Daemon) -> None:
    with shared_daemon.builder(4 << 20).acquire() as lease, GpuSession(lease) as session:
        array, other, shared = session.zeros(4, "f4"), session.zeros(2, "f4"), session.empty(4, np.float32)
        with session.record() as graph:  # loads the kernel, which no array has used yet
            array[...] = shared
            array[1] = 5
            other[...] = array[::2]
        for number in (1, 2):
            shared[:] = number
            graph.launch()
            session.sync()
            assert array.numpy().tolist() == [number, 5, number, number]
            assert other.numpy().tolist() == [number] * 2
        with session.stream() as stream:
            array.fill(3, stream=stream)
            assert array[::2].numpy(stream=stream).tolist() == [3, 3]


def test_memory_is_freed_with_the_last_view(shared_daemon: Daemon) -> None:
    with shared_daemon.builder(4 << 20).acquire() as lease, GpuSession(lease) as session:
        for _ in range(8):
            view = session.zeros(3 << 20, "u1")[7:9]
            gc.collect()
            assert view.numpy().tolist() == [0, 0]
            del view


def test_an_array_whose_buffer_is_freed_is_refused(session: GpuSession) -> None:
    array = session.zeros(4, "f4")
    session.mem_free(array.buffer)
    for use in (array.numpy, array.copy, lambda: array.fill(1)):
        with pytest.raises(InvalidHandle, match="freed"):
            use()
    assert "gone" in repr(array)


def test_an_array_of_another_session_is_refused(session: GpuSession, shared_daemon: Daemon) -> None:
    with shared_daemon.builder(1 << 20).acquire() as lease, GpuSession(lease) as other:
        array = other.zeros(4, "f4")
        with pytest.raises(InvalidHandle, match="another session"):
            session.zeros(4, "f4")[...] = array


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("u1", 256, "fit"),
        ("u1", -1, "fit"),
        ("u1", [1, 300], "fit"),
        ("i4", 1.5, "a number that fits an array of int32"),
        ("f4", 1j, "must be a number"),
        ("f2", 1e6, "does not fit"),
        ("f4", "text", "must be a number"),
        ("f4", None, "must be a number"),
        ("f4", np.zeros(4), "an array of float32 can't .* elements of float64"),
        ("f4", np.zeros(3, "f4"), "does not fit one of shape"),
        ("f4", np.broadcast_to(np.float32(1), 1 << 50), "does not fit one of shape"),
        ("f4", [[1], [1, 2]], "must be a number"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    session: GpuSession, dtype: str, value: Any, said: str
) -> None:
    array = session.zeros(4, dtype)
    with pytest.raises(InvalidRequest, match=said):
        array[...] = value
    assert not array.numpy().any()


def test_values_for_which_the_card_has_no_room_are_not_copied(session: GpuSession) -> None:
    with pytest.raises(AllocFailed):
        session.array(np.broadcast_to(np.float32(1), 1 << 45))


@pytest.mark.parametrize("dtype", ["O", "S4", "M8[s]", ">f4", "f4,i4", "nothing", None, np.longdouble])
def test_a_type_that_kernels_have_not_is_refused_before_memory_is_taken(session: GpuSession, dtype: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must be a numpy dtype|don't support elements"):
        session.zeros((1 << 45,), dtype)


def test_no_element_is_converted_between_arrays(session: GpuSession) -> None:
    with pytest.raises(InvalidRequest, match=r"an array of float32 can't .* elements of float64"):
        session.zeros(4, "f4")[...] = session.zeros(4, "f8")


def test_numpy_computes_nothing_with_it(session: GpuSession) -> None:
    array = session.zeros(4, "f4")
    for compute in (lambda: np.ones(4) + array, lambda: np.add(array, 1)):
        with pytest.raises(TypeError):
            compute()
    with pytest.raises(InvalidRequest, match="neither true nor false"):
        bool(array)
    with pytest.raises(InvalidRequest, match="share"):
        np.array(array, copy=False)
    with pytest.raises(InvalidRequest, match="already on the card"):
        session.array(array)


@pytest.mark.parametrize("name", sorted(arrays.NARROW_TYPES))
def test_narrow_types_of_ml_dtypes(session: GpuSession, name: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 are not tried: pip install '.[ml-dtypes]'")
    array = session.array([1.0, 2.0, 4.0], name)
    array[1] = 8
    assert str(array.dtype) == name
    assert array.numpy().astype("f4").tolist() == [1, 8, 4]
    with pytest.raises(InvalidRequest, match="fit"):
        array.fill(1e300)


def test_a_missing_ml_dtypes_is_told_with_its_extra(session: GpuSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(Unsupported, match=r"\.\[ml-dtypes\]"):
        session.zeros(4, "bfloat16")


def test_the_asyncio_face(shared_daemon: Daemon) -> None:
    async def main() -> None:
        async with (
            await aio.GpuBuilder(shared_daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            array, other = await session.array(np.arange(6, dtype="f4")), await session.zeros(3, "f4")
            async with session.record() as graph:
                await other.assign(array[::2])
            await graph.launch()
            await session.sync()
            assert (await other.numpy()).tolist() == [0, 2, 4]
            await array[1:].fill(5)
            assert (await (await array[::-2].copy()).numpy()).tolist() == [5, 5, 5]
            assert (await (await session.empty_device((), "i4")).numpy()) == 0
            with pytest.raises(InvalidRequest, match="assign"):
                array[0] = 1
            with pytest.raises(InvalidRequest, match="await"):
                np.asarray(array)

    asyncio.run(main())


@needs_nvrtc
def test_the_kernel_is_compiled_from_the_source_beside_it() -> None:
    folder = Path(arrays.__file__).parent
    made = ptx_of((folder / "array_kernels.cu").read_text(), arch=75).decode()
    code = made.partition(".version 9.0\n")[2]
    assert code.strip()
    assert (folder / "array_kernels.ptx").read_text().partition(".version 6.4\n")[2] == code


def test_an_array_is_of_its_face(session: GpuSession) -> None:
    assert isinstance(session.zeros(2, "f4")[1:], Array)
    assert [int(part.numpy()) for part in session.array([1, 2])] == [1, 2]
