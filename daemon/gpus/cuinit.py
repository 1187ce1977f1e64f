"""`python -m gpulease.daemon.gpus.cuinit`: calls cuInit and prints its result as JSON.

The daemon runs this only if no worker can create a context. The result shows whether the driver or the sandbox is at
fault. The call needs a separate process, because an initialised driver does not survive a fork and a broken driver may
hang.
"""

import ctypes
import json
import subprocess
import sys
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass

LIBRARY: Final = "libcuda.so.1"

TIMEOUT_S: Final = 60.0
"""Maximum time of cuInit in seconds. It takes some seconds for each card that must wake up, and a host may have eight.
"""


@dataclass(frozen=True, slots=True)
class CuInitResult:
    """The result of cuInit.

    Attributes:
        number: The CUresult, 0 for success; None if there is no result.
        reason: Why there is no result; "" if the library is missing.
    """

    number: int | None
    reason: str = ""


def ask() -> CuInitResult:
    """Call cuInit in a child process, and wait for it."""
    command = [sys.executable, "-P", "-m", "gpulease.daemon.gpus.cuinit"]
    try:
        # With -P, the daemon's working folder is not on the child's import path.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return CuInitResult(None, f"it did not return within {TIMEOUT_S:g} s")
    except OSError as error:
        return CuInitResult(None, f"no process can be started: {error.strerror}")
    # The driver may crash. Then report the signal.
    if done.returncode < 0:
        return CuInitResult(None, f"it died of signal {-done.returncode}")
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        return CuInitResult(None, f"it exited with status {done.returncode}, without output")
    return CuInitResult(reply["number"], reply["reason"])


def _call() -> CuInitResult:
    try:
        library = ctypes.CDLL(LIBRARY)
        function = library.cuInit
    except (OSError, AttributeError) as error:
        # If the library exists but can't be loaded, report the loader's message. A missing library is reported as "".
        text = str(error)
        return CuInitResult(None, "" if f"{LIBRARY}: cannot open shared object file: No such file" in text else text)
    function.argtypes, function.restype = [ctypes.c_uint], ctypes.c_int
    return CuInitResult(int(function(0)))


if __name__ == "__main__":
    answer = _call()
    print(json.dumps({"number": answer.number, "reason": answer.reason}), flush=True)
