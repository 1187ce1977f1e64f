"""Calls of daemon/drivers/cuda/launch.ll to the driver, and what it makes of their results; checked without a card."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from gpulease.daemon.drivers.cuda.launch_code import LaunchRecord, LaunchState, launching_code

U32, POINTER = ctypes.c_uint32, ctypes.c_void_p
CU_LAUNCH_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int32, POINTER, *[U32] * 7, POINTER, POINTER, POINTER)
CU_STREAM_QUERY = ctypes.CFUNCTYPE(ctypes.c_int32, POINTER)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, POINTER, POINTER, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)


def address(function: Any) -> int:
    return ctypes.cast(function, POINTER).value or 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("result", [0, 1, 700])
@pytest.mark.parametrize("params", [b"", b"p" * 4096])
def test_a_launch_reaches_the_driver_whole(result: int, params: bytes) -> None:
    seen: list[object] = []

    def cu_launch_kernel(*arguments: Any) -> int:
        *numbers, one_by_one, extra = arguments
        words = (ctypes.c_uint64 * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(words[3]).value
        seen.extend((numbers, one_by_one, words[0], ctypes.string_at(words[1], size), words[2], words[4]))
        return result

    called = CU_LAUNCH_KERNEL(cu_launch_kernel)
    state = LaunchState(launch_kernel=address(called), stream=77, launches=4, tag=3)
    record = LaunchRecord(0xF00, (2**31 - 1, 2, 3), (4, 5, 6), 49152)
    launch = LAUNCH(launching_code().address("launch"))
    assert launch(ctypes.addressof(state), ctypes.addressof(record), params, len(params), 2**64 - 1) == result
    # CUDA driver API, cuLaunchKernel: 1 is CU_LAUNCH_PARAM_BUFFER_POINTER, 2 CU_LAUNCH_PARAM_BUFFER_SIZE, 0 the end.
    assert seen == [[0xF00, 2**31 - 1, 2, 3, 4, 5, 6, 49152, 77], None, 1, params, 2, 0]
    assert (state.launches, state.tag) == ((4, 3) if result else (5, 2**64 - 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("result", "others", "answer", "launches"),
    [(0, 0, 0, 0), (600, 0, 1, 9), (700, 0, 2, 9), (-1, 0, 2, 9), (0, 1, 2, 9)],
    ids=["ended", "busy", "fault", "nonsense", "other streams"],
)
def test_what_the_stream_says(result: int, others: int, answer: int, launches: int) -> None:
    asked: list[int] = []

    def cu_stream_query(stream: int) -> int:
        asked.append(stream)
        return result

    called = CU_STREAM_QUERY(cu_stream_query)
    state = LaunchState(stream_query=address(called), stream=77, other_streams=others, launches=9)
    query: Callable[[int], int] = CU_STREAM_QUERY(launching_code().address("query"))
    assert query(ctypes.addressof(state)) == answer
    assert (asked, state.launches) == ([] if others else [77], launches)


CU_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
CU_MEMSET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_uint64)
COPY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
ZERO = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


def test_a_copy_to_the_host_is_complete_on_return() -> None:
    calls: list[object] = []

    def cu_copy(*arguments: int) -> int:
        calls.append(arguments)
        return 0

    def cu_stream_query(stream: int) -> int:
        calls.append(stream)
        return 600 if len(calls) < 4 else 0

    copied, asked = CU_COPY(cu_copy), CU_STREAM_QUERY(cu_stream_query)
    state = LaunchState(stream_query=address(asked), stream=77, copy_in=address(copied), copy_out=address(copied))
    code = launching_code()
    assert COPY(code.address("copy_out"))(ctypes.addressof(state), 0x1000, 0x2000, 64) == 0
    assert calls == [(0x2000, 0x1000, 64, 77), 77, 77, 77]
    calls.clear()
    assert COPY(code.address("copy_in"))(ctypes.addressof(state), 0x1000, 0x2000, 64) == 0
    assert calls == [(0x1000, 0x2000, 64, 77)]


@pytest.mark.parametrize(
    ("others", "launches", "zeroed", "is_done"),
    [(0, 0, 0, True), (0, 256, 256, True), (0, 257, 256, False), (1, 0, 0, False)],
)
def test_memory_is_zeroed_in_the_only_stream(others: int, launches: int, zeroed: int, is_done: bool) -> None:
    calls: list[object] = []

    def cu_memset(*arguments: int) -> int:
        calls.append(arguments)
        return 0

    called = CU_MEMSET(cu_memset)
    state = LaunchState(stream=77, other_streams=others, launches=launches, zeroed=zeroed, memset=address(called))
    assert ZERO(launching_code().address("zero"))(ctypes.addressof(state), 0x1000, 64) == int(not is_done)
    assert calls == ([(0x1000, 0, 64, 77)] if is_done else [])
    assert state.zeroed == zeroed + is_done
