"""A process tries out whether it overwrites memory that it frees."""

import os
import subprocess
import sys

import pytest

from gpulease.daemon.host.heap_wipe import WIPING_HEAP, is_heap_wiped
from helpers.daemon import python_environment

ASK = "from gpulease.daemon.host.heap_wipe import is_heap_wiped; print(is_heap_wiped())"
TUNABLES = WIPING_HEAP["GLIBC_TUNABLES"]
NAMES = "import gpulease.daemon.host.heap_wipe as heap; heap.WIPING_HEAP = {}; print(heap.is_heap_wiped())"


def said(code: str, environment: dict[str, str]) -> str:
    others = {name: value for name, value in python_environment().items() if name not in WIPING_HEAP}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=others | environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_a_process_that_was_started_so() -> None:
    assert said(ASK, WIPING_HEAP) == "True"
    assert not is_heap_wiped() or WIPING_HEAP.items() <= os.environ.items()


STOP = """
from gpulease.daemon.host import heap_wipe
before = heap_wipe._is_left(5000)
heap_wipe.stop_wiping()
print(before, heap_wipe._is_left(5000))
"""


def test_a_process_stops_wiping_when_it_is_told() -> None:
    assert said(STOP, WIPING_HEAP) == "False True"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"GLIBC_TUNABLES": TUNABLES},
        {"PYTHONMALLOC": "malloc"},
        {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
        {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=165"},
    ],
)
def test_one_that_was_not_is_found_by_trying(environment: dict[str, str]) -> None:
    """Whatever its environment says: here it is asked to look at nothing else."""
    assert said(ASK, environment) == "False"
    assert said(NAMES, environment) == "False"


THREADS = """
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import STREAM_STACK_BYTES
from helpers.kernels import TRANSFORM

def stacks():
    spans = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return sum(int(end, 16) - int(start, 16) == STREAM_STACK_BYTES for start, end in spans)

others = stacks()  # what libraries have mapped, by chance as large
context = CpuContext(1 << 20)
address = context.mem_alloc(4096)
kernel = context.module_load(TRANSFORM).kernels["scale"]
params = address.to_bytes(8, "little") + (1).to_bytes(4, "little") + bytes(4)
context.launch(kernel, (1, 1, 1), (1, 1, 1), 0, params, 1)
context.sync()
print(stacks() - others, end=" ")
context.close()
print(stacks() - others)
"""


@pytest.mark.exhaustive
def test_no_stack_of_a_thread_that_ran_kernels_is_kept() -> None:
    assert said(THREADS, WIPING_HEAP) == "1 0"
