"""The neighbour: a tenant in a separate process that works constantly and checks every result.

`python -m gpulease.client.verify.neighbour ADDRESS CARD` reads lines. For each line it writes one JSON object about its
rounds since the previous line. At the end of its input it frees its lease and exits.
"""

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import numpy as np

from gpulease.client import GpuBuilder, GpuLeaseError, GpuSession, KernelArgs
from gpulease.client.bench.figures import percentile
from gpulease.client.console.exit_status import MissingPrerequisite, die_by_signal
from gpulease.client.verify.faulty_kernels import BLOCK, ONE, rule_breakers
from gpulease.imports import end_imports

SLICE_BYTES: Final = 64 << 20
VALUES: Final = 256
LEASE_S: Final = 3600.0
ORPHAN_S: Final = 5.0
"""Seconds for which the lease outlives a neighbour that was killed."""

ANSWER_S: Final = 30.0
"""Longest time for the answer to a line, in seconds. A round takes milliseconds, even during an endless kernel."""


@dataclass(frozen=True, slots=True)
class Window:
    """The neighbour's rounds between two lines.

    Attributes:
        rounds: Number of rounds. Each launches a kernel, waits for it, and compares its complete result.
        p50_us: Median time of a kernel, in microseconds.
        p99_us: 99th percentile of that time.
        error: The first error; "" if every round was right.
        errors: Number of rounds that failed or were wrong.
    """

    rounds: int
    p50_us: float
    p99_us: float
    error: str
    errors: int = 0


class Neighbour:
    """The parent's view of a neighbour's process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def window(self) -> Window:
        """Return the rounds since the last call. A process that does not answer counts as an error."""
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("the neighbour has no pipes")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            return Window(0, 0.0, 0.0, f"it did not answer for {ANSWER_S:g} s", 1)
        line = self._process.stdout.readline()
        return Window(**json.loads(line)) if line else Window(0, 0.0, 0.0, "its process ended", 1)


@contextlib.contextmanager
def neighbour(address: str, card_uuid: str) -> Iterator[Neighbour]:
    """Run a neighbour on a card during the block. Raises MissingPrerequisite if it can't start."""
    command = [sys.executable, "-P", "-m", "gpulease.client.verify.neighbour", address, card_uuid]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        # The first window shows that the neighbour has begun to work.
        started = Neighbour(process)
        if error := started.window().error:
            raise MissingPrerequisite(f"the neighbour can't work: {error}")
        yield started
    finally:
        # The neighbour frees its lease at the end of its input. Kill one that hangs.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ANSWER_S)
        process.kill()
        process.communicate()


def _work(address: str, card_uuid: str) -> None:
    # Choose a short orphan time, so that a neighbour that was killed does not keep its slice.
    builder = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(LEASE_S).device(card_uuid)
    with builder.orphan_secs(ORPHAN_S).acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(rule_breakers())
        buffer = session.mem_alloc(4 * VALUES)
        args = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(3.0)
        taken_us: list[float] = []
        error, errors = "", 0
        while True:
            # Use different values in each round, so that an old result can't pass for a new one.
            values = np.arange(VALUES, dtype=np.float32) + len(taken_us) % 1000
            try:
                session.mem_write(buffer, 0, values)
                started = time.perf_counter()
                session.launch(module, "scale", ONE, BLOCK, args)
                session.sync()
                taken_us.append((time.perf_counter() - started) * 1e6)
                if session.mem_read(buffer, 0, values.nbytes) != (values * 3).tobytes():
                    error, errors = error or "a result is wrong", errors + 1
            except GpuLeaseError as failure:
                error, errors = error or f"{type(failure).__name__}: {failure}", errors + 1
            # Answer only between two rounds, so that a round that has begun is always finished and compared.
            if select.select([sys.stdin], [], [], 0)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps(_window(taken_us, error, errors)), flush=True)
                taken_us, error, errors = [], "", 0


def _window(taken_us: list[float], error: str, errors: int) -> dict[str, Any]:
    p50_us, p99_us = (percentile(taken_us, part) for part in (50, 99)) if taken_us else (0.0, 0.0)
    return {
        "rounds": len(taken_us),
        "p50_us": round(p50_us, 1),
        "p99_us": round(p99_us, 1),
        "error": error,
        "errors": errors,
    }


if __name__ == "__main__":
    end_imports()
    # A terminal's interrupt is meant for the parent, which then ends the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _work(*sys.argv[1:3])
    except GpuLeaseError as failure:
        # The parent reads the reason when it asks for a window.
        print(json.dumps(_window([], f"{type(failure).__name__}: {failure}", 1)), flush=True)
    except BrokenPipeError:
        # The parent was killed, and nobody reads the answer. The lease has been freed.
        die_by_signal(signal.SIGPIPE)
