"""Runs whole kernels and single operations on a real card and stores the results, which the embedded driver must match.

On a GPU host without other users, from the repository's root:

    PYTHONPATH=.dev:tests python -m tests.gpu.record_workloads OUT.json
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pycuda.driver as cuda

from gpulease.daemon.drivers.cuda.context import CudaContext
from gpulease.daemon.drivers.interface import DriverError
from helpers.record.cases import packed, run
from helpers.record.ends import ENDS, outcome
from helpers.record.everything import all_cases, ptx_of

_MARK: Final = "the launch ended with: "


def record() -> dict[str, Any]:
    """Return the results of each case on this host's first card, and how each launch that fails or prints ended."""
    context = CudaContext.open()
    modules: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for case in all_cases():
        results: dict[str, list[str]] = {}
        for name in case.images:
            try:
                if name not in modules:
                    modules[name] = context.module_load(ptx_of(name))
                results[name] = packed(run(context, modules[name], case))
            except DriverError as error:
                print(f"{case.name} of {name}: {error}", file=sys.stderr)
        cases[case.name] = {"fingerprint": case.fingerprint, "results": results}
    return {"card": _card(), "cases": cases, "ends": {name: _end_apart(name) for name in ENDS}}


def _card() -> str:
    return str(cuda.Context.get_device().name())


def _end_apart(name: str) -> dict[str, str]:
    """Launch it in a separate process, because a fault ends the process's context."""
    command = [sys.executable, "-m", "tests.gpu.record_workloads", "--end", name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return {"printed": ran.stdout, "error": ran.stderr.partition(_MARK)[2].split("\n")[0]}


def _leave() -> None:
    """End the process like a worker, without a clean-up: pycuda aborts a process that ends with a context."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # Write what kernels have printed.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--end":
        print(_MARK + outcome(CudaContext.open(), ENDS[sys.argv[2]]), file=sys.stderr)
    else:
        Path(sys.argv[1]).write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n")
    _leave()
