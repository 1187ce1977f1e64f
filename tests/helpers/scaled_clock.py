"""Clocks at other rates than the host's, each for all processes that one command starts (scaled_clock.c).

A daemon hands its environment on: its fleet process, zygote, workers, gate and relays have its clock, and so have those
of the next daemon with the same clock.
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
    """CLOCK_MONOTONIC and CLOCK_BOOTTIME of some processes. CLOCK_REALTIME is the host's.

    Args:
        folder: For the library, which is compiled. Skips the test if no compiler is installed.
        faster_ppm: Millionths by which they run faster than the host's.
    """

    def __init__(self, folder: Path, faster_ppm: int) -> None:
        self._library = compiled(folder)
        self._faster_ppm = faster_ppm
        self._monotonic_ns, self._boottime_ns = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def within(self) -> tuple[str, ...]:
        """The command that runs another with this clock, under the process id of its own."""
        told = f"SCALED_CLOCK={self._faster_ppm} {self._monotonic_ns} {self._boottime_ns}"
        return ("env", f"LD_PRELOAD={self._library}", told)

    def host_ns(self, boottime_ns: int) -> int:
        """The host's CLOCK_BOOTTIME when this one shows that time."""
        return self._boottime_ns + (boottime_ns - self._boottime_ns) * PPM // (PPM + self._faster_ppm)

    def is_of(self, pid: int) -> bool:
        """Whether a process has a clock of this kind."""
        return str(self._library) in Path(f"/proc/{pid}/maps").read_text()


def compiled(folder: Path) -> Path:
    """The library: made by the first call, and found again by others."""
    library = folder / "scaled_clock.so"
    if not library.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("SKIPPED FOR WANT OF cc: apt-get install gcc libc6-dev")
        words = [compiler, "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(words, check=True, timeout=60)
    return library
