"""Clocks that run faster or slower than the host's, each for all processes that one command starts (scaled_clock.c).

A daemon passes its environment on. So its fleet process, zygote, workers, gate and relays have the same clock, and so
do the processes of the next daemon that is started with this clock.
"""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

PPM: Final = 1_000_000
SOURCE: Final = Path(__file__).with_suffix(".c")


class ScaledClock:
    """CLOCK_MONOTONIC and CLOCK_BOOTTIME of some processes. Their CLOCK_REALTIME is the host's.

    Args:
        folder: The folder for the library, which is compiled there. Skips the test if no compiler is installed.
        faster_ppm: By how many millionths the clocks are faster than the host's.
    """

    def __init__(self, folder: Path, faster_ppm: int) -> None:
        self._library = compiled(folder)
        self._faster_ppm = faster_ppm
        self._monotonic_ns, self._boottime_ns = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def within(self) -> tuple[str, ...]:
        """Return a command that runs another command with this clock. Both have the same process id."""
        told = f"SCALED_CLOCK={self._faster_ppm} {self._monotonic_ns} {self._boottime_ns}"
        return ("env", f"LD_PRELOAD={self._library}", told)

    def host_ns(self, boottime_ns: int) -> int:
        """Return the host's CLOCK_BOOTTIME at the moment when this clock shows `boottime_ns`."""
        return self._boottime_ns + (boottime_ns - self._boottime_ns) * PPM // (PPM + self._faster_ppm)

    def is_of(self, pid: int) -> bool:
        """Return whether a process has a scaled clock."""
        return str(self._library) in Path(f"/proc/{pid}/maps").read_text()


def compiled(folder: Path) -> Path:
    """Return the path of the library. The first call compiles it."""
    library = folder / "scaled_clock.so"
    if not library.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("SKIPPED FOR WANT OF cc: apt-get install gcc libc6-dev")
        words = [compiler, "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(words, check=True, timeout=60)
    return library
