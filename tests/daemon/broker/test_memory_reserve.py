"""The memory reserve; most of it in a process of its own whose limit is lowered and raised."""

import subprocess
import sys

import pytest

from gpulease.daemon.broker import memory_reserve
from gpulease.daemon.broker.memory_reserve import MemoryReserve
from helpers.daemon import python_environment

SCRIPT = """
import asyncio, resource
from gpulease.daemon.broker import memory_reserve
from gpulease.daemon.broker.memory_reserve import RESERVE_BYTES, ROOM_BYTES, MemoryReserve

def leave(room_bytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room_bytes, resource.RLIM_INFINITY))

def fail(kind):
    raise kind("nothing to do with the reserve")

room = MemoryReserve()
memory_reserve.CHECK_NS = 0
assert room.is_enough() and not room.is_short
leave(ROOM_BYTES + (1 << 20))
room.secure()
assert not room.is_short, "there is room for an event"
leave(0)
room.secure()
assert room.is_short
bytearray(RESERVE_BYTES - (1 << 20))
assert not room.is_enough(), "what is there is what was kept back"
leave(RESERVE_BYTES + 2 * ROOM_BYTES)
assert room.is_enough() and not room.is_short

async def meet_the_end():
    loop = asyncio.get_running_loop()
    room.release_on_memory_error(loop)
    loop.call_soon(fail, OSError)
    await asyncio.sleep(0)
    assert not room.is_short
    loop.call_soon(fail, MemoryError)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert room.is_short

asyncio.run(meet_the_end())
room.close()
"""


def test_the_event_of_a_checked_request_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    now_ns = 10**12

    def has_room(size_bytes: int) -> bool:
        checks.append(size_bytes)
        return True

    monkeypatch.setattr(memory_reserve, "_has_room", has_room)
    monkeypatch.setattr(memory_reserve, "_is_limited", lambda: True)
    monkeypatch.setattr("gpulease.daemon.broker.memory_reserve.time.monotonic_ns", lambda: now_ns)
    room = MemoryReserve()
    assert room.is_enough()
    room.secure()
    assert len(checks) == 1
    now_ns += memory_reserve.CHECK_NS
    room.secure()
    assert len(checks) == 2
    room.close()


def test_the_reserve_is_given_up_and_kept_back_again() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], env=python_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing to do with the reserve") == 1, done.stderr
