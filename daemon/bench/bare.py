"""`python -m gpulease.daemon.bench.bare DRIVER CARD COUNT`, PTX on its input: times processes without a lease, as JSON.

`gpulease bench` compares the start and the end of leases with these times. A process is forked, opens a context, and
launches a kernel `spin` that never ends. Then it is killed and reaped; it ends when the driver has released its memory.
"""

import json
import os
import signal
import sys
import time
import traceback
from typing import Final, NoReturn

from gpulease.daemon.bench.percentiles import percentile
from gpulease.daemon.drivers.interface import Dim3, Driver
from gpulease.daemon.host.processes import die_with_parent
from gpulease.daemon.zygote.driver_registry import driver_named

SLICE_BYTES: Final = 1 << 20
ONE: Final[Dim3] = (1, 1, 1)

SPINNING_S: Final = 0.05
"""Time for which the kernel runs before its process is killed."""


def measure(driver_name: str, card: str, ptx: bytes, count: int) -> dict[str, float]:
    """Return p50 and p99 of opening and of reaping, in milliseconds. Raises RuntimeError if a process can't start."""
    driver = driver_named(driver_name)
    driver.preload()
    rounds = [_round(driver, card, ptx) for _ in range(count)]
    figures: dict[str, float] = {}
    for name, samples in zip(("open", "reap"), zip(*rounds, strict=True), strict=True):
        figures |= {f"{name}_p{part}_ms": percentile(samples, part) for part in (50, 99)}
    return figures


def _round(driver: Driver, card: str, ptx: bytes) -> tuple[float, float]:
    """Return the milliseconds from fork to a context that answers, and from SIGKILL to the process reaped."""
    read_end, write_end = os.pipe()
    parent_pid = os.getpid()
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent_pid)
        _spin(driver, card, ptx, write_end)
    os.close(write_end)
    try:
        # The first byte means that the context answers, the second that the kernel runs.
        _await_byte(read_end)
        open_ms = (time.perf_counter() - started) * 1e3
        _await_byte(read_end)
        # Kill it while the kernel runs, as a revoked worker is killed.
        time.sleep(SPINNING_S)
        started = time.perf_counter()
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return open_ms, (time.perf_counter() - started) * 1e3


def _await_byte(pipe: int) -> None:
    if not os.read(pipe, 1):
        raise RuntimeError("a process could not open its context and launch a kernel in it")


def _spin(driver: Driver, card: str, ptx: bytes, pipe: int) -> NoReturn:
    """Open a context and run the kernel `spin` until SIGKILL. After each of these two steps, write a byte to `pipe`."""
    try:
        context = driver.open_context(card, SLICE_BYTES)
        context.sync()
        os.write(pipe, b"o")
        flag = context.mem_alloc(4)
        module = context.module_load(ptx)
        context.launch(module.kernels["spin"], ONE, ONE, 0, flag.to_bytes(8, "little"), 1)
        os.write(pipe, b"s")
        while True:
            signal.pause()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.stdin.buffer.read(), int(sys.argv[3]))))
