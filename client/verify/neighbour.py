"""The neighbour: a tenant in a process of its own, which works all the time and checks every result.

`python -m gpulease.client.verify.neighbour ADDRESS`: for each line that it reads, it writes one JSON object about its
rounds since the line before; it exits at the end of its input.
"""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpulease.client import GpuBuilder, GpuLeaseError, GpuSession, KernelArgs
from gpulease.client.bench.figures import percentile
from gpulease.client.cli.exit_status import CannotStart
from gpulease.client.verify.faulty_kernels import BLOCK, ONE, rule_breakers

SLICE_BYTES: Final = 64 << 20
VALUES: Final = 256
LEASE_S: Final = 3600.0
ANSWER_S: Final = 30.0
"""Seconds for a line to be answered: a round takes milliseconds, even beside an endless kernel."""


@dataclass(frozen=True, slots=True)
class Window:
    """The neighbour's rounds between two lines.

    Attributes:
        error: "" if every round was right.
    """

    rounds: int
    p50_us: float
    p99_us: float
    error: str


class Neighbour:
    """The parent's end of a neighbour's process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def window(self) -> Window:
        """Return the rounds since the last call."""
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("the neighbour has no pipes")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            return Window(0, 0.0, 0.0, f"it did not answer for {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        return Window(**json.loads(line)) if line else Window(0, 0.0, 0.0, "its process ended")


@contextlib.contextmanager
def neighbour(address: str) -> Iterator[Neighbour]:
    """Run a neighbour during the block. Raises CannotStart if it can't begin."""
    command = [sys.executable, "-P", "-m", "gpulease.client.verify.neighbour", address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        beside = Neighbour(process)
        if error := beside.window().error:
            raise CannotStart(f"the neighbour can't work: {error}")
        yield beside
    finally:
        process.kill()
        process.communicate()


def _work(address: str) -> None:
    with GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(LEASE_S).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(rule_breakers())
        buffer = session.mem_alloc(4 * VALUES)
        args = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(3.0)
        taken_us: list[float] = []
        error = ""
        while True:
            values = np.arange(VALUES, dtype=np.float32) + len(taken_us) % 1000
            try:
                session.mem_write(buffer, 0, values)
                started = time.perf_counter()
                session.launch(module, "scale", ONE, BLOCK, args)
                session.sync()
                taken_us.append((time.perf_counter() - started) * 1e6)
                if session.mem_read(buffer, 0, values.nbytes) != (values * 3).tobytes():
                    error = error or "a result is wrong"
            except GpuLeaseError as failure:
                error = error or f"{type(failure).__name__}: {failure}"
            if select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps(_window(taken_us, error)), flush=True)
                taken_us, error = [], ""


def _window(taken_us: list[float], error: str) -> dict[str, Any]:
    p50_us, p99_us = (percentile(taken_us, part) for part in (50, 99)) if taken_us else (0.0, 0.0)
    return {"rounds": len(taken_us), "p50_us": round(p50_us, 1), "p99_us": round(p99_us, 1), "error": error}


if __name__ == "__main__":
    _work(sys.argv[1])
