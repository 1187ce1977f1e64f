"""Compiles PTX as a whole program, as cuModuleLoadData does, but returns the machine code instead of loading it.

The driver API returns machine code only from its linker, which treats PTX as relocatable (CUDA driver API,
cuLinkCreate). Such code is slower: a division or a square root is a call with all the registers that a foreign function
may use, setmaxnreg is ignored, and wgmma is serialised (ptxas C7504, C7509). cuModuleLoadData compiles a whole program,
but it takes memory of the card before the code can be measured.

Both use the compiler in the driver's LIBRARY. It exports the functions of NVIDIA's PTX Compiler API (nvPTXCompiler.h),
although that API is documented only for the toolkit's static library (seen in drivers 535 and 550). So nothing depends
on them: if they fail for any reason, the linker compiles the PTX or reports why it can't. If they are missing, the
worker's standard error, which goes to the daemon's log, has the reason.
"""

import ctypes
import re
import sys
from functools import cache
from typing import Any, Final

LIBRARY: Final = "libnvidia-ptxjitcompiler.so.1"
"""The name by which libcuda loads it."""

_FUNCTIONS: Final = (
    "nvPTXCompilerGetVersion",
    "nvPTXCompilerCreate",
    "nvPTXCompilerCompile",
    "nvPTXCompilerGetCompiledProgramSize",
    "nvPTXCompilerGetCompiledProgram",
    "nvPTXCompilerDestroy",
)

_TARGET: Final = re.compile(rb"^[ \t]*\.target\s+sm_\d+(?P<variant>[af]?)\b(?P<options>[^\n]*)", re.MULTILINE)

_FOREIGN_VARIABLE: Final = re.compile(rb"\.extern\s+\.(?:global|const)\b")
"""A variable of another module. The linker reports that it is undefined; a whole program would define it."""


def compile_whole(ptx: bytes, capability: tuple[int, int], driver_version: int) -> bytes | None:
    """Compile PTX for a card.

    Args:
        ptx: The text, without a NUL.
        capability: The card's compute capability, major and minor.
        driver_version: What cuDriverGetVersion returns. A library of another version would be another driver's.

    Returns:
        A cubin; None if the linker has to compile the PTX.
    """
    if (architecture := architecture_of(ptx, capability)) is None:
        return None
    if (library := _library(driver_version)) is None:
        return None
    compiler = ctypes.c_void_p()
    if library.nvPTXCompilerCreate(ctypes.byref(compiler), ctypes.c_size_t(len(ptx)), ptx):
        return None
    try:
        options = (ctypes.c_char_p * 1)(b"--gpu-name=" + architecture)
        if library.nvPTXCompilerCompile(compiler, len(options), options):
            return None
        size_bytes = ctypes.c_size_t()
        if library.nvPTXCompilerGetCompiledProgramSize(compiler, ctypes.byref(size_bytes)):
            return None
        cubin = ctypes.create_string_buffer(size_bytes.value)
        return None if library.nvPTXCompilerGetCompiledProgram(compiler, cubin) else cubin.raw
    finally:
        library.nvPTXCompilerDestroy(ctypes.byref(compiler))


def architecture_of(ptx: bytes, capability: tuple[int, int]) -> bytes | None:
    """Return the architecture for which a card's whole program is compiled; None for PTX that the linker compiles."""
    if _FOREIGN_VARIABLE.search(ptx):
        return None
    target = _TARGET.search(ptx)
    # Code for a debugger is not optimised, so it would not be faster as a whole program.
    if target is None or b"debug" in target["options"]:
        return None
    # PTX for the features of one architecture or family can't be compiled for the plain architecture.
    return b"sm_%d%d%b" % (*capability, target["variant"])


@cache
def _library(driver_version: int) -> Any | None:
    try:
        return _open_library(driver_version)
    except OSError as error:
        # Once a process: the result is cached.
        sys.stderr.write(f"PTX is compiled as relocatable code, which can be slower: {error}\n")
        return None


def _open_library(driver_version: int) -> Any:
    """Load the compiler. Raises OSError if it is not the driver's, or can't be called."""
    library = ctypes.CDLL(LIBRARY)
    if missing := [name for name in _FUNCTIONS if not hasattr(library, name)]:
        raise OSError(f"{LIBRARY} has no functions {', '.join(missing)}")
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    if library.nvPTXCompilerGetVersion(ctypes.byref(major), ctypes.byref(minor)):
        raise OSError(f"{LIBRARY} does not report its version")
    # The driver's version is 1000 * major + 10 * minor.
    if (major.value, minor.value) != (expected := (driver_version // 1000, driver_version % 1000 // 10)):
        raise OSError(f"{LIBRARY} has version {major.value}.{minor.value}, and the driver {expected[0]}.{expected[1]}")
    return library
