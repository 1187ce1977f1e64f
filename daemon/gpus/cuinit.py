"""`python -m gpulease.daemon.gpus.cuinit`: calls cuInit and prints what came of it, as JSON.

In a process of its own, because a driver that was initialised does not survive a fork, and one that is broken may
hang. It is asked only where no worker can make a context, to tell the driver's faults from the sandbox's.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

LIBRARY: Final = "libcuda.so.1"

TIMEOUT_S: Final = 60.0
"""For cuInit to return: a card that is waked takes seconds, each of eight."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What cuInit said.

    Attributes:
        number: Its CUresult, 0 for success; None if there was no answer.
        reason: Why there was none; "" if there is no such library at all.
    """

    number: int | None
    reason: str = ""


def ask() -> Answer:
    """Ask it, from a process that must not call it itself. It blocks."""
    command = [sys.executable, "-P", "-m", "gpulease.daemon.gpus.cuinit"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Answer(None, f"it did not return within {TIMEOUT_S:g} s")
    except OSError as error:
        return Answer(None, f"no process can be started: {error.strerror}")
    if done.returncode < 0:
        return Answer(None, f"it died of signal {-done.returncode}")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return Answer(None, f"it exited with status {done.returncode}, and said nothing")
    return Answer(found["number"], found["reason"])


def _call() -> Answer:
    try:
        library = ctypes.CDLL(LIBRARY)
        function = library.cuInit
    except (OSError, AttributeError) as error:
        text = str(error)
        return Answer(None, "" if f"{LIBRARY}: cannot open shared object file: No such file" in text else text)
    function.argtypes, function.restype = [ctypes.c_uint], ctypes.c_int
    return Answer(int(function(0)))


if __name__ == "__main__":
    answer = _call()
    print(json.dumps({"number": answer.number, "reason": answer.reason}), flush=True)
