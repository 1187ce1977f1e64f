"""Loads PTX and cubins as modules with kernels that are known by name and parameters.

PTX is compiled once: as a whole program (whole_program.py), or else by the driver's linker. The kernels are listed from
the machine code loaded as a library, which takes nothing of the card (cuLibraryEnumerateKernels, cuKernelGetParamInfo:
CUDA driver API 12.4). Then the same code is loaded as a module. All calls go through cuda-bindings, because pycuda
hides the handles with which native code launches.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.cubin_footprint import Weight, weigh
from gpulease.daemon.drivers.cuda.dependent_kernels import waiting_kernels
from gpulease.daemon.drivers.cuda.jit_cache import CACHE_VARIABLE, Compiled
from gpulease.daemon.drivers.cuda.launch_code import DynamicSharedMemory
from gpulease.daemon.drivers.cuda.memory import LocalMemory
from gpulease.daemon.drivers.cuda.whole_program import compile_whole
from gpulease.daemon.drivers.interface import (
    AdmitModule,
    DriverError,
    Figures,
    ImageRejected,
    Parameter,
    refuse_managed_text,
    text_of,
)
from gpulease.daemon.ptx.translate.cooperative import confirm_by_text

LOG_BYTES: Final = 64 << 10
"""Maximum number of bytes kept of the compiler's log, which may have a line for every line of a hostile image."""

_ELF: Final = b"\x7fELF"
_FATBINS: Final = (b"\x50\xed\x55\xba", b"\xb1\x43\x62\x46")
"""First bytes of a fatbin, and of the wrapper that nvcc puts around one. Such images are refused, because their size on
the card can't be determined."""

_LINE: Final = re.compile(r"\bline (\d+)")


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel of a module.

    Attributes:
        function: Its CUfunction.
        shared: What its launches may request.
        is_cooperative: Whether only a cooperative launch can run it; see `cooperative_refused`.
        waits: Whether its blocks first wait for the launch before them; see `waiting_kernels`.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    kept_bytes: int
    function: int
    shared: DynamicSharedMemory
    is_cooperative: bool = False
    waits: bool = False
    # The whole image is compiled, with all optimisations, when it is loaded.
    is_due: bool = False

    def figures(self) -> Figures:
        kinds = api.CUfunction_attribute
        shared_bytes = self.attribute(kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        return Figures(
            shared_bytes,
            self.shared.most_dynamic_bytes,
            self.attribute(kinds.CU_FUNC_ATTRIBUTE_NUM_REGS),
            self.attribute(kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
            self.attribute(kinds.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES),
        )

    def attribute(self, attribute: Any) -> int:
        """Return one of the driver's figures. Raises DriverError."""
        error, value = api.cuFuncGetAttribute(attribute, api.CUfunction(self.function))
        if error:
            raise DriverError(f"the driver does not report an attribute of kernel {self.name}: {_words(error)}")
        return int(value)


@dataclass(frozen=True, slots=True, eq=False)
class CudaModule:
    """A loaded module.

    Attributes:
        loaded: Its CUmodule.
        names: Its variables, each with whether kernels can write it.
        calls_driver: Whether it calls functions of the driver's own.
        code: The machine code that was compiled from its PTX, if it is kept.
    """

    kernels: Mapping[str, CudaKernel]
    device_bytes: int
    shared_bytes: int
    kept_bytes: int
    loaded: Any
    names: tuple[tuple[str, bool], ...] = ()
    calls_driver: bool = False
    code: bytes = b""

    def variables(self) -> list[tuple[int, int]]:
        """Return address and size of each variable. Raises DriverError for one that the driver does not name."""
        places: list[tuple[int, int]] = []
        for name, is_writable in self.names:
            address, size_bytes = self.variable(name)
            if size_bytes:
                places.append((address, size_bytes))
            # Memory that kernels can't write has the same contents as the image.
            elif is_writable:
                raise DriverError(f"the driver does not report where the variable {name!r} is")
        return places

    def variable(self, name: str) -> tuple[int, int]:
        error, address, size_bytes = api.cuModuleGetGlobal(self.loaded, name.encode())
        if error == api.CUresult.CUDA_ERROR_NOT_FOUND:
            return 0, 0
        if error:
            raise DriverError(f"the driver does not report the address of variable {name!r}: {_words(error)}")
        return int(address), int(size_bytes)


def load_image(
    image: bytes,
    admit: AdmitModule,
    local: LocalMemory,
    compiled: Compiled,
    on_weighed: Callable[[Weight], None],
    code: bytes = b"",
    *,
    keeps_code: bool = False,
) -> CudaModule:
    """Load PTX text or a cubin into the current context.

    Args:
        image: The image.
        admit: Admits the module by its size on the card.
        local: What kernels' local memory takes.
        compiled: The cache of compiled code.
        on_weighed: Called before the driver gets any of the image, because the driver may keep something of an image
            that it refuses.
        code: Machine code that another process has compiled from the PTX; b"" to compile it here.
        keeps_code: Whether the module keeps the code that was compiled from PTX.

    Raises:
        ImageRejected: With the compiler's log.
    """
    # Step 1: get the machine code, from the cache or the compiler. Step 2: measure it, and have the session admit it.
    # Only then does the driver get it.
    cubin = machine_code(image, compiled, code)
    weight = weigh(cubin)
    on_weighed(weight)
    kept_bytes = local.kept_by_system_calls if weight.needs_driver_memory else 0
    admit(weight.device_bytes, weight.shared_bytes, kept_bytes)
    # For compiled PTX, the text can show that a kernel needs no cooperative launch although its machine code suggests
    # it.
    cooperative = weight.cooperative if image.startswith(_ELF) else confirm_by_text(text_of(image), weight.cooperative)
    waiting = frozenset[str]() if image.startswith(_ELF) else waiting_kernels(text_of(image))
    listed = _list_kernels(cubin)
    # A module takes memory, so it is loaded last; a failure below unloads it.
    error, loaded = api.cuModuleLoadData(cubin)
    _check(error)
    try:
        kernels = {
            name: _kernel(loaded, name, parameters, local, is_cooperative=name in cooperative, waits=name in waiting)
            for name, parameters in listed.items()
        }
    except ImageRejected:
        unload(loaded)
        raise
    return CudaModule(
        kernels,
        weight.device_bytes,
        weight.shared_bytes,
        kept_bytes,
        loaded,
        weight.variables,
        weight.calls_driver,
        cubin if keeps_code and not image.startswith(_ELF) else b"",
    )


def machine_code(image: bytes, compiled: Compiled, code: bytes = b"") -> bytes:
    """Return an image as a cubin, not measured yet. Raises ImageRejected. `code`: as for `load_image`."""
    if image.startswith(_ELF):
        return image
    if image.startswith(_FATBINS):
        raise ImageRejected(
            "this image is a fatbin, which is not supported", hint="Load one of its images: nvcc -cubin or nvcc -ptx."
        )
    text = text_of(image)
    refuse_managed_text(text)
    # Code that another process has compiled is not put into the cache, which a later lease may use.
    return code or compiled.of(text, _compile)


def unload(loaded: Any) -> None:
    """Unload a CUmodule. A context that is lost keeps it until the process ends."""
    api.cuModuleUnload(loaded)


def _kernel(
    loaded: Any, name: str, parameters: tuple[Parameter, ...], local: LocalMemory, *, is_cooperative: bool, waits: bool
) -> CudaKernel:
    error, function = api.cuModuleGetFunction(loaded, name.encode())
    _check(error)
    attribute = api.CUfunction_attribute
    # The buffer ends with the last parameter.
    last = parameters[-1] if parameters else Parameter(0, 0)
    return CudaKernel(
        name,
        parameters,
        last.offset + last.size,
        _attribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        local.kept_by(_attribute(function, attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)),
        int(function),
        DynamicSharedMemory(
            _attribute(function, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            _most_shared_bytes(),
            partial(_opt_in, function),
        ),
        is_cooperative,
        waits,
    )


def _attribute(function: Any, attribute: Any) -> int:
    error, value = api.cuFuncGetAttribute(attribute, function)
    _check(error)
    return int(value)


def _most_shared_bytes() -> int:
    return _card_attribute(api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def _card_attribute(attribute: Any) -> int:
    error, device = api.cuCtxGetDevice()
    _check(error)
    error, value = api.cuDeviceGetAttribute(attribute, device)
    _check(error)
    return int(value)


def _opt_in(function: Any, size_bytes: int) -> bool:
    # Above the default, a function must opt in to dynamic shared memory.
    attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = api.cuFuncSetAttribute(function, attribute, size_bytes)
    return not error


def _compile(ptx: bytes) -> bytes:
    # If the operator lets workers share the driver's cache, the linker compiles: only it uses the cache.
    if os.environ.get(CACHE_VARIABLE):
        return _link(ptx)
    attribute = api.CUdevice_attribute
    capability = (
        _card_attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        _card_attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
    error, driver_version = api.cuDriverGetVersion()
    _check(error)
    return compile_whole(ptx, capability, int(driver_version)) or _link(ptx)


def _link(ptx: bytes) -> bytes:
    option = api.CUjit_option
    log = bytearray(LOG_BYTES)
    # The log is only for errors; the driver cuts it at the buffer's size.
    keys = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    error, link = api.cuLinkCreate(len(keys), keys, [log, LOG_BYTES])
    _check(error, log)
    # The linker compiles PTX when it is added, and makes a cubin when it is completed. Its memory goes with it.
    try:
        # The driver reads PTX up to its NUL, whatever length it is given.
        text = ptx + b"\0"
        kind = api.CUjitInputType.CU_JIT_INPUT_PTX
        (error,) = api.cuLinkAddData(link, kind, text, len(text), b"module", 0, [], [])
        _check(error, log)
        error, address, size_bytes = api.cuLinkComplete(link)
        _check(error, log)
        return ctypes.string_at(address, size_bytes)
    finally:
        api.cuLinkDestroy(link)


def _list_kernels(cubin: bytes) -> dict[str, tuple[Parameter, ...]]:
    # Loaded as a library, the code takes nothing of the card: with lazy loading, only names and parameters are read.
    error, library = api.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    _check(error)
    try:
        error, count = api.cuLibraryGetKernelCount(library)
        _check(error)
        if not count:
            return {}
        error, kernels = api.cuLibraryEnumerateKernels(count, library)
        _check(error)
        return {_name(kernel): _parameters(kernel) for kernel in kernels}
    finally:
        api.cuLibraryUnload(library)


def _name(kernel: Any) -> str:
    error, name = api.cuKernelGetName(kernel)
    _check(error)
    return str(name.decode())


def _parameters(kernel: Any) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    while True:
        error, offset, size = api.cuKernelGetParamInfo(kernel, len(parameters))
        # Only the error for the index after the last parameter shows how many there are.
        if error == api.CUresult.CUDA_ERROR_INVALID_VALUE:
            return tuple(parameters)
        _check(error)
        parameters.append(Parameter(int(offset), int(size)))


def _words(error: Any) -> str:
    _, text = api.cuGetErrorString(error)
    return str(text.decode())


def _check(error: Any, log: bytearray | None = None) -> None:
    if error == api.CUresult.CUDA_SUCCESS:
        return
    # The compiler's first line is usually the reason; a line number in it is the PTX's.
    message = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip() if log else ""
    first = message.splitlines()[0] if message else ""
    line_match = _LINE.search(message)
    raise ImageRejected(
        f"the image can't be loaded: {_words(error)}{': ' + first if first else ''}",
        log=message,
        line=int(line_match[1]) if line_match else 0,
        hint="Compile it for this card's architecture or an earlier one, with a toolkit that is not newer "
        "than the driver.",
    )
