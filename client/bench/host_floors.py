"""Floors: times of plain Python work, which depend on the host alone.

Figures that depend on Python are divided by them.

The speed of Python differs between hosts by a factor of two, and by other factors for other kinds of work: a short loop
stays in the caches, and a request that passes through several processes runs with cold caches. So each floor does one
kind of work, without any code of gpulease, and is measured in turn with the figures of the same kind:

- `call_us`: a short call that packs a frame into mapped memory and loads a word of it, repeated. For calls that the
  client makes alone.
- `parse_us`: a text parsed by the standard library's own Python, repeated. For work with much code, such as a
  request of the gateway.
- `exchange_us`: a request to another process, which does that parse in an asyncio loop, and the wait for its reply.
  For work that wakes processes.

`python -m gpulease.client.bench.host_floors FD` is the other process.
"""

import asyncio
import contextlib
import mmap
import socket
import struct
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from gpulease.client.bench.bounds import HOST
from gpulease.client.bench.figures import Figures, percentile, timed_us

CALLS: Final = 500
CALL_SAMPLES: Final = 40
CALLS_IN_TURN: Final = 50
"""Number of calls of the client, and then of the floor, if both are measured in turn."""

PARSES: Final = 60
EXCHANGE_PEERS: Final = 2
EXCHANGES: Final = 40
PAUSE_S: Final = 0.002
"""Pause before each exchange, in seconds, so that both processes sleep, and their code leaves the nearest caches."""

RING_BYTES: Final = 1 << 20
_FRAME: Final = struct.Struct("<QQIIQ")

_TEXT: Final = "".join(
    f'[lease_{number}]\nholder = "tenant-{number}"\nbytes = {number << 20}\nends = 12.{number}\nat = [0, {number}]\n'
    for number in range(6)
)
"""The source that `parse` parses, which takes a few hundred microseconds."""


def host_floors(names: Collection[str] | None = None) -> Figures:
    """Measure the named floors now, or all; microseconds. Each takes 0.1 to 0.5 s."""
    return {name: measure() for name, measure in FLOORS.items() if names is None or name in names}


def with_floors(measure: Callable[[], Mapping[str, Any]], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the result of `measure`, and under HOST the means of the floors before and after it."""
    before = host_floors(names)
    figures = dict(measure())
    after = host_floors(names)
    return figures | {HOST: {name: (before[name] + after[name]) / 2 for name in before}}


class _Frames:
    """Packs frames into mapped memory, one after another, as the client does with launches."""

    __slots__ = ("_acquire", "_data", "_end", "_release", "_tail", "_words")

    def __init__(self, memory: memoryview) -> None:
        barrier = threading.Lock()
        self._acquire, self._release = barrier.acquire, barrier.release
        self._words, self._data = memory[:64].cast("Q"), memory[64:]
        self._tail, self._end = 0, len(self._data)

    def put(self, number: int, size: int, kind: int) -> bool:
        tail = self._tail
        end = tail + _FRAME.size
        # At the memory's end, go back to its start without waiting, because nothing reads.
        if end > self._end:
            tail, end = 0, _FRAME.size
        _FRAME.pack_into(self._data, tail, number, size, kind, kind, end)
        words = self._words
        self._tail = words[0] = end
        self._acquire(False)
        self._release()
        return not words[1]

    def release(self) -> None:
        self._words.release()
        self._data.release()


class _NumberedCalls:
    """Checks and numbers a call before it is packed, in a separate method, as the client does."""

    def __init__(self, frames: _Frames) -> None:
        self._frames, self._lock, self._sent = frames, threading.RLock(), 0
        self._shape = (1, 1, 1)

    def call(self, shape: tuple[int, int, int], size: int) -> int:
        with self._lock:
            if shape is not self._shape and shape != self._shape:
                raise ValueError("another shape")
            self._sent = number = self._sent + 1
            self._frames.put(number, size, 3)
            return number


class CallFloor:
    """The floor of calls, to be measured in turn with calls of the client.

    A core's speed varies by a factor of nearly two with the load on its other hyperthread. So only a floor measured at
    the same time gives a correct ratio. Call `close` after use.
    """

    def __init__(self) -> None:
        self._mapped = mmap.mmap(-1, RING_BYTES)
        with memoryview(self._mapped) as memory:
            self._frames = _Frames(memory)
        self._caller = _NumberedCalls(self._frames)

    def burst_us(self, count: int) -> float:
        """Return the mean time of one of `count` calls, in microseconds."""
        call, shape = self._caller.call, (1, 1, 1)
        started = time.perf_counter()
        for _ in range(count):
            call(shape, 64)
        return (time.perf_counter() - started) / count * 1e6

    def beside(self, action: Callable[[], object], count: int) -> tuple[list[float], float]:
        """Time `count` calls of an action one by one, in turn with this floor's; returns both in microseconds."""
        samples: list[float] = []
        floors = []
        while len(samples) < count:
            samples += timed_us(action, min(CALLS_IN_TURN, count - len(samples)))
            floors.append(self.burst_us(CALLS_IN_TURN))
        return samples, percentile(floors, 50)

    def bursts_beside(
        self, action: Callable[[], object], fence: Callable[[], object], count: int, bursts: int
    ) -> tuple[list[float], float]:
        """Time an action in bursts of CALLS_IN_TURN, in turn with this floor's; returns both in microseconds per call.

        `fence` waits for all queued work, before each `count` calls. Bursts are short, so that most end before another
        process gets the core.
        """
        samples, floors = [], []
        for _ in range(bursts):
            fence()
            for _ in range(count // CALLS_IN_TURN):
                started = time.perf_counter()
                for _ in range(CALLS_IN_TURN):
                    action()
                samples.append((time.perf_counter() - started) / CALLS_IN_TURN * 1e6)
                floors.append(self.burst_us(CALLS_IN_TURN))
        fence()
        return samples, percentile(floors, 50)

    def close(self) -> None:
        """Release the mapped memory; the floor can't be measured afterwards."""
        self._frames.release()
        self._mapped.close()


def _call_us() -> float:
    with contextlib.closing(CallFloor()) as floor:
        return percentile([floor.burst_us(CALLS) for _ in range(CALL_SAMPLES)], 50)


def _parse() -> object:
    return tomllib.loads(_TEXT)


def _parse_us() -> float:
    return percentile(timed_us(_parse, PARSES), 50)


def parse_cpu_us() -> float:
    """Return the CPU time of one parse by this thread, in microseconds.

    It is correct even while other threads run Python.
    """
    began_s = time.thread_time()
    _parse()
    return (time.thread_time() - began_s) * 1e6


def _exchange_us() -> float:
    # Use several peers, because an exchange's time depends on the cores on which the processes happen to run.
    return percentile([taken_us for _ in range(EXCHANGE_PEERS) for taken_us in _exchanges_us()], 50)


def _exchanges_us() -> list[float]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "gpulease.client.bench.host_floors", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()

        def exchange() -> None:
            ours.sendall(b"p\n")
            if ours.recv(1) != b"p":
                raise RuntimeError("the other process of the exchanges has ended")

        # Exchange once before the clock starts, while the process starts and imports.
        exchange()
        samples = []
        for _ in range(EXCHANGES):
            time.sleep(PAUSE_S)
            samples += timed_us(exchange, 1)
        # At the stream's end the other process ends.
        ours.shutdown(socket.SHUT_WR)
        process.wait()
    return samples


async def _answer(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    while await reader.readline():
        _parse()
        writer.write(b"p")


FLOORS: Final[Mapping[str, Callable[[], float]]] = {
    "call_us": _call_us,
    "parse_us": _parse_us,
    "exchange_us": _exchange_us,
}
"""How each floor is measured, by its name."""

if __name__ == "__main__":
    asyncio.run(_answer(socket.socket(fileno=int(sys.argv[1]))))
