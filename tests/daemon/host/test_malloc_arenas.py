import subprocess
import sys

import pytest

from helpers.daemon import python_environment

_COUNT = """
import ctypes, os, sys, threading
from gpulease.daemon.host.malloc_arenas import use_one_arena
from helpers.arenas import arenas_of
if sys.argv[1] == "one":
    use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
begun, done = threading.Barrier(4), threading.Event()
def allocate():
    libc.malloc(1000)
    begun.wait()
    done.wait()
threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
begun.wait()
print(len(arenas_of(os.getpid())))
done.set()
"""


@pytest.mark.parametrize(("arenas", "expected"), [("one", 0), ("many", 3)])
def test_threads_share_the_first_arena_or_have_their_own(arenas: str, expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, arenas], env=python_environment(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == expected
