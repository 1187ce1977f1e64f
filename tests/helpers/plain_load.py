"""`python -m helpers.plain_load`: a program outside gpulease that loads PTX from stdin with cuModuleLoadData.

It prints each kernel's registers and bytes of local memory per thread, as JSON.
"""

import json
import subprocess
import sys
from typing import Any, Final

from helpers.daemon import python_environment

LIMIT_S: Final = 60


def plain_figures(ptx: bytes) -> dict[str, tuple[int, int]]:
    """Return each kernel's registers and local bytes if a plain CUDA program loads the PTX."""
    command = [sys.executable, "-P", "-m", "helpers.plain_load"]
    program = subprocess.run(
        command, input=ptx, stdout=subprocess.PIPE, env=python_environment(), check=True, timeout=LIMIT_S
    )
    return {name: (registers, local_bytes) for name, (registers, local_bytes) in json.loads(program.stdout).items()}


def _load(ptx: bytes) -> None:
    from cuda.bindings import driver as api  # Imported here, because only this process may create a context.

    def call(function: Any, *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if error:
            raise SystemExit(f"{function.__name__}: {error.name}")
        return results[0] if results else None

    call(api.cuInit, 0)
    call(api.cuCtxSetCurrent, call(api.cuDevicePrimaryCtxRetain, call(api.cuDeviceGet, 0)))
    module = call(api.cuModuleLoadData, ptx + b"\0")
    kinds = api.CUfunction_attribute
    wanted = (kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    figures: dict[str, list[int]] = {}
    for function in call(api.cuModuleEnumerateFunctions, call(api.cuModuleGetFunctionCount, module), module):
        name = call(api.cuFuncGetName, function).decode()
        figures[name] = [int(call(api.cuFuncGetAttribute, kind, function)) for kind in wanted]
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    _load(sys.stdin.buffer.read())
