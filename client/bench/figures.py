"""Figures from samples and from processes: percentiles, rates, medians of rounds, and the trend of a series."""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite

PROCESS_TIMEOUT_S: Final = 300.0
"""Longest time for one round of direct calls, in seconds. Stops a hung driver from hanging the benchmark."""

Figures = dict[str, float]
LogLine = Callable[[str], object]
"""Receives the name of each measurement before it starts."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of the samples."""
    # This is the smallest sample that at least `percent` % of all samples do not exceed: of 100, p99 is the second
    # largest.
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def print_figures(figures: Mapping[str, object]) -> None:
    """Print figures as one JSON object on a line, numbers to four decimal places, and flush."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def timed_us(action: Callable[[], object], count: int) -> list[float]:
    """The microseconds of each of `count` calls, timed one by one."""
    samples = []
    # A local variable is faster to read, so a sample contains little besides the call.
    clock = time.perf_counter
    for _ in range(count):
        started = clock()
        action()
        samples.append((clock() - started) * 1e6)
    return samples


def per_call_us(action: Callable[[], object], fence: Callable[[], object], count: int) -> float:
    """Microseconds per call if `count` calls are issued back to back and then waited for by `fence`."""
    # Wait before the clock starts and before it stops, so that only these calls are timed.
    fence()
    started = time.perf_counter()
    for _ in range(count):
        action()
    fence()
    return (time.perf_counter() - started) / count * 1e6


def gigabytes_per_s(action: Callable[[], object], size_bytes: int, count: int) -> float:
    """Median throughput of `count` copies of `size_bytes`, in 1e9 bytes per second."""
    return size_bytes / percentile(timed_us(action, count), 50) / 1e3


def load_figures(ask: Callable[[], float], at_a_time: int, seconds: float) -> Figures:
    """Keep `at_a_time` calls of `ask` in progress for `seconds`, each in a thread.

    Returns:
        The rate, and percentiles of the seconds that `ask` returns.

    Raises the error of the first failing call.
    """
    # Appending to a list is atomic, so threads need no lock.
    took_s: list[float] = []
    errors: list[BaseException] = []
    started = time.perf_counter()

    def repeat() -> None:
        try:
            while time.perf_counter() - started < seconds and not errors:
                took_s.append(ask())
        # One failure ends all threads, because the rate would be meaningless.
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(at_a_time)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {"per_s": len(took_s) / (time.perf_counter() - started)} | percentiles_ms(took_s)


def percentiles_ms(took_s: Sequence[float]) -> Figures:
    """Median and 99th percentile of times in seconds, in milliseconds."""
    return {f"p{part}_ms": percentile(took_s, part) * 1e3 for part in (50, 99)}


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over rounds, to three decimal places."""
    return {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in rounds[0]}


def in_a_process(
    module: str, *arguments: str, standard_input: bytes = b"", timeout_s: float = PROCESS_TIMEOUT_S
) -> Figures:
    """Run a measurement module of the daemon in a separate process; return its figures.

    Raises MissingPrerequisite.
    """
    command = [sys.executable, "-P", "-m", f"gpulease.daemon.bench.{module}", *arguments]
    return figures_of(command, standard_input=standard_input, timeout_s=timeout_s)


def figures_of(
    command: Sequence[str],
    *,
    standard_input: bytes = b"",
    timeout_s: float = PROCESS_TIMEOUT_S,
    variables: Mapping[str, str] | None = None,
) -> Figures:
    """Run a command that prints its figures as JSON on its first line; returns them.

    Args:
        command: The command.
        standard_input: Its input.
        timeout_s: Longest time for it, in seconds.
        variables: Environment variables to add.

    Raises MissingPrerequisite, with the last line that the command wrote to stderr.
    """
    # Pass on the whole environment of this process, because libraries may need it.
    environment = os.environ | (variables or {})
    try:
        result = subprocess.run(
            command, input=standard_input, capture_output=True, timeout=timeout_s, check=False, env=environment
        )
        # Read only the first line, because a library may print more at exit.
        figures: Figures = json.loads(result.stdout.splitlines()[0])
    except (IndexError, ValueError):
        last_line = (result.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise MissingPrerequisite(f"the direct calls failed: {last_line}") from None
    except subprocess.TimeoutExpired:
        raise MissingPrerequisite(f"the direct calls have not ended within {timeout_s:.0f} s") from None
    return figures
