"""The code of serve.ll, compiled once per process: the zygote does it for all workers."""

import ctypes
import importlib.util
import platform
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from gpulease.daemon.worker import native


class ServingCode:
    """The functions of serve.ll; both let other Python threads run meanwhile."""

    def __init__(self) -> None:
        from gpulease.daemon.native.kept_code import load_ir

        self._code = load_ir(files(native).joinpath("serve.ll").read_text("ascii"))
        self.take_launches: Callable[[int], int] = self._bind("gpulease_take_launches", 1)
        self.serve_ring: Callable[[int, int], int] = self._bind("gpulease_serve_ring", 2)

    def _bind(self, name: str, arguments: int) -> Callable[..., int]:
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * arguments)(self._code.address(name))
        return function


@cache
def serving_code() -> ServingCode | None:
    """Compile; starts no thread. None where it can't be done: Python does the same then."""
    if platform.machine() != "x86_64" or importlib.util.find_spec("llvmlite") is None:
        return None
    return ServingCode()
