"""Shared libraries compiled for one test, which behave like NVIDIA's libraries on a host with a fault."""

import shutil
import subprocess
from pathlib import Path

import pytest

NVML = "libnvidia-ml.so.1"
CUDA = "libcuda.so.1"


def make(folder: Path, name: str, source: str) -> None:
    """Compile a library. Skips the test if no compiler is installed."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    text = folder / f"{name}.c"
    text.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / name), str(text)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def make_nvml(folder: Path, number: int, *, later: int | None = None, flag: Path | None = None) -> None:
    """Make an NVML whose initialisation returns `number`, or `later` when `flag` exists. It has no cards."""
    condition = f'access("{flag}", F_OK) == 0 ? {later} : {number}' if later is not None else str(number)
    source = f"""
        #include <unistd.h>
        int nvmlInit_v2(void) {{ return {condition}; }}
        int nvmlInitWithFlags(unsigned flags) {{ return {condition}; }}
        int nvmlShutdown(void) {{ return 0; }}
        int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = 0; return 0; }}
        const char *nvmlErrorString(int number) {{ return "made for a test"; }}
    """
    make(folder, NVML, source)


def make_cuda(folder: Path, body: str) -> None:
    """Make a libcuda whose cuInit has this body."""
    make(folder, CUDA, f"#include <stdlib.h>\n#include <unistd.h>\nint cuInit(unsigned flags) {{ {body} }}\n")
