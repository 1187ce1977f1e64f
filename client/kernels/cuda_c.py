"""Compiles CUDA C to PTX with NVRTC, from its wheel (`pip install '.[cuda-c]'`)."""

from collections.abc import Sequence
from typing import Any, Final

from gpulease.client.code_texts import cuda_c_of
from gpulease.client.errors import InvalidRequest
from gpulease.client.kernels.toolchain import checked_arch, compile_error, missing
from gpulease.client.texts import quoted

MAX_SOURCE_BYTES: Final = 16 << 20
"""Maximum length of a source, in characters, so that the compiler never reads a file of another kind that is passed by
mistake."""

_NAME: Final = b"kernel.cu"


def ptx_of(source: str, options: Sequence[str] = (), arch: int | None = None) -> bytes:
    """Compile CUDA C.

    Args:
        source: The source text. Kernels are `extern "C" __global__`, or have C++'s mangled names.
        options: NVRTC's options, for example `--use_fast_math` or `-DN=4`, but not the architecture.
        arch: The compute capability to compile for, 90 for 9.0; DEFAULT_ARCH if None.

    Returns:
        PTX text.

    Raises:
        LoadFailed: The source does not compile; `log` is the compiler's log, `line` the line of the first error.
        InvalidRequest: An argument is invalid.
        Unsupported: NVRTC is not installed.
    """
    checked_options = _checked(source, options, arch)
    nvrtc = _nvrtc()
    # Step 1: make a program from the source. Step 2: compile it. Step 3: copy its PTX. In any case, destroy the
    # program.
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), _NAME, 0, None, None)
    _check(nvrtc, result)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(checked_options), checked_options)
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            raise InvalidRequest(f"compile: an option is unknown to NVRTC: {_log(nvrtc, program)}")
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise compile_error("the CUDA C source", _log(nvrtc, program))
        _check(nvrtc, result)
        result, size = nvrtc.nvrtcGetPTXSize(program)
        _check(nvrtc, result)
        ptx = bytearray(size)
        _check(nvrtc, *nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(ptx).rstrip(b"\0")


def _checked(source: Any, options: Any, arch: Any) -> list[bytes]:
    """Return all options for the compiler, including the architecture. Raises InvalidRequest."""
    cuda_c_of(source, "compile")
    # The compiler takes a C string, so a zero byte would cut the source silently.
    if "\0" in source:
        raise InvalidRequest(
            f"compile: the source must not contain a zero byte, but byte {source.index(chr(0))} is one"
        )
    if len(source) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"compile: the source must have at most {MAX_SOURCE_BYTES} bytes, not {len(source)}")
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise InvalidRequest(f"compile: options must be a sequence of strings, not {quoted(options)}")
    for option in options:
        # The architecture has its own parameter, which this option would contradict.
        if option.startswith(("-arch", "--gpu-architecture")):
            raise InvalidRequest(
                f"compile: the architecture can't be the option {quoted(option)}",
                "Pass it as an argument, for example arch=90",
            )
    return [f"--gpu-architecture=compute_{checked_arch(arch)}".encode(), *(option.encode() for option in options)]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise missing("cuda-bindings", "cuda-c") from None
    try:
        # The bindings can be imported without the library. The first call loads the library.
        nvrtc.nvrtcVersion()
    except RuntimeError:
        raise missing("NVRTC", "cuda-c") from None
    return nvrtc


def _log(nvrtc: Any, program: Any) -> str:
    result, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(nvrtc, result)
    log = bytearray(size)
    _check(nvrtc, *nvrtc.nvrtcGetProgramLog(program, log))
    return log.decode(errors="replace").rstrip("\0\n")


def _check(nvrtc: Any, result: Any) -> None:
    # Any other result is a failure of the compiler itself. Only the result's name says more about it.
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise compile_error("the CUDA C source", f"NVRTC reports {getattr(result, 'name', result)}")
