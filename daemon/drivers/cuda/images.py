"""Machine code that the driver made of PTX, for who comes with the same PTX again: making it takes tens of ms.

It is kept by one context, of one card, in its own process, and goes with it: whoever took that process over could
change it for nobody but those who are served by it anyway. Where a context is used again its tenant's next lease finds
it, though nothing of an earlier lease may be found there. So what is kept is masked with a key made of the PTX, and
named by another hash of it: of use to whoever has the PTX, to the byte, and noise to all others.

PTX and cubins to modules whose kernels are known by name and parameters.

PTX is compiled once, by the driver's linker. The listing is read from the result as a library, which takes nothing
of the card (cuLibraryEnumerateKernels, cuKernelGetParamInfo: CUDA driver API 12.4); then the same machine code is
loaded as a module. cuda-bindings does it all: pycuda keeps the handles to itself that native code launches by.

Events behind what is put in streams: how much has ended, told without a wait (CUDA driver API, cuEventQuery).

There are fewer of them than the driver lets launches wait, so a launch never blocks inside the driver, where nobody
could see how long the kernel before it has been running. Copies and waits for other streams are marked too: the time
that a stream takes for them is no kernel's.
"""

import ctypes
import hashlib
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver as api

from gpulease.daemon.drivers.cuda.elf import Weight, weigh
from gpulease.daemon.drivers.cuda.memory import LocalMemory
from gpulease.daemon.drivers.interface import Admit, ImageRejected, Parameter, Poll, refuse_managed_text, text_of
from gpulease.daemon.drivers.ptx.translate.cooperative import confirm_by_text

MAX_IMAGES: Final = 16
"""Kept at a time, the latest."""

MAX_KEPT_BYTES: Final = 8 << 20
"""Of machine code. Stops a tenant from filling its worker's memory with images."""

_NAME: Final = b"gpulease: the name of an image\0"
_KEY: Final = b"gpulease: the key of an image\0"


class Compiled:
    """What was made of the latest images."""

    def __init__(self) -> None:
        self._masked: OrderedDict[bytes, bytearray] = OrderedDict()
        self._kept_bytes = 0
        self._most_bytes = MAX_KEPT_BYTES

    def of(self, ptx: bytes, compile_anew: Callable[[bytes], bytes]) -> bytes:
        """The machine code of an image; raises what `compile_anew` raises, of which nothing is kept."""
        # Both are made of a hash, so that an image of many megabytes is read once.
        digest = hashlib.sha256(ptx).digest()
        name = name_of(digest)
        masked = self._masked.get(name)
        if masked is not None:
            self._masked.move_to_end(name)
            return bytes(_mask(masked, digest))
        code = compile_anew(ptx)
        if len(code) <= self._most_bytes:
            self._keep(name, _mask(code, digest))
        return code

    def close(self) -> None:
        """Let go of all, and keep nothing more."""
        self._masked.clear()
        self._most_bytes = self._kept_bytes = 0

    def _keep(self, name: bytes, masked: bytearray) -> None:
        self._masked[name] = masked
        self._kept_bytes += len(masked)
        while self._kept_bytes > self._most_bytes or len(self._masked) > MAX_IMAGES:
            _, oldest = self._masked.popitem(last=False)
            self._kept_bytes -= len(oldest)


def name_of(digest: bytes) -> bytes:
    """What the code is known by of an image with that SHA-256."""
    return hashlib.sha256(_NAME + digest).digest()


def _mask(data: bytes | bytearray, digest: bytes) -> bytearray:
    """The same bytes twice masked are themselves. SHAKE256 (FIPS 202) of an image's hash masks its one code alone."""
    stream = bytearray(hashlib.shake_256(_KEY + digest).digest(len(data)))
    # In its place: arrays of numpy's own are in memory that it keeps as it is.
    masked = np.frombuffer(stream, np.uint8)
    np.bitwise_xor(masked, np.frombuffer(data, np.uint8), out=masked)
    return stream


LOG_BYTES: Final = 64 << 10
"""Of the compiler's log that are kept: it may have a line for every line of a hostile image."""

_ELF: Final = b"\x7fELF"
_FATBINS: Final = (b"\x50\xed\x55\xba", b"\xb1\x43\x62\x46")
"""How a fatbin and the wrapper that nvcc puts around one begin. They hold images that nothing here looks into."""

_LINE: Final = re.compile(r"\bline (\d+)")


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One entry of a module.

    Attributes:
        function: Its CUfunction.
        is_cooperative: Whether only a cooperative launch could run it; see `cooperative_refused`.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    kept_bytes: int
    function: int
    is_cooperative: bool = False


@dataclass(frozen=True, slots=True)
class CudaModule:
    """A loaded module; `loaded` is its CUmodule."""

    kernels: Mapping[str, CudaKernel]
    device_bytes: int
    shared_bytes: int
    kept_bytes: int
    loaded: Any


def load_image(
    image: bytes, admit: Admit, local: LocalMemory, compiled: Compiled, on_weighed: Callable[[Weight], None]
) -> CudaModule:
    """Load PTX text or a cubin into the current context. Raises ImageRejected with the compiler's log.

    `on_weighed` is told what it is before the driver has any of it, which may keep it though it refuses it.
    """
    cubin = machine_code(image, compiled)
    weight = weigh(cubin)
    on_weighed(weight)
    kept_bytes = local.kept_by_system_calls if weight.has_system_calls else 0
    admit(weight.device_bytes, weight.shared_bytes, kept_bytes)
    cooperative = weight.cooperative if image.startswith(_ELF) else confirm_by_text(text_of(image), weight.cooperative)
    listed = _list_kernels(cubin)
    error, loaded = api.cuModuleLoadData(cubin)
    _check(error)
    try:
        kernels = {
            name: _kernel(loaded, name, parameters, local, is_cooperative=name in cooperative)
            for name, parameters in listed.items()
        }
    except ImageRejected:
        unload(loaded)
        raise
    return CudaModule(kernels, weight.device_bytes, weight.shared_bytes, kept_bytes, loaded)


def machine_code(image: bytes, compiled: Compiled) -> bytes:
    """An image as a cubin, which `weigh` has yet to look at. Raises ImageRejected."""
    if image.startswith(_ELF):
        return image
    if image.startswith(_FATBINS):
        raise ImageRejected(
            "this image is a fatbin, which is not supported", hint="Load one of its images: nvcc -cubin or nvcc -ptx."
        )
    text = text_of(image)
    refuse_managed_text(text)
    return compiled.of(text, _compile)


def unload(loaded: Any) -> None:
    """Unload a CUmodule. A context that is lost keeps it until the process ends."""
    api.cuModuleUnload(loaded)


def _kernel(
    loaded: Any, name: str, parameters: tuple[Parameter, ...], local: LocalMemory, *, is_cooperative: bool
) -> CudaKernel:
    error, function = api.cuModuleGetFunction(loaded, name.encode())
    _check(error)
    attribute = api.CUfunction_attribute
    last = parameters[-1] if parameters else Parameter(0, 0)
    return CudaKernel(
        name,
        parameters,
        last.offset + last.size,
        _attribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        local.kept_by(_attribute(function, attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)),
        int(function),
        is_cooperative,
    )


def _attribute(function: Any, attribute: Any) -> int:
    error, value = api.cuFuncGetAttribute(attribute, function)
    _check(error)
    return int(value)


def _compile(ptx: bytes) -> bytes:
    option = api.CUjit_option
    log = bytearray(LOG_BYTES)
    keys = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    error, link = api.cuLinkCreate(len(keys), keys, [log, LOG_BYTES])
    _check(error, log)
    try:
        # The driver reads PTX to its NUL, whatever length is given.
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
        # The index one past the last parameter is the one way to learn their number.
        if error == api.CUresult.CUDA_ERROR_INVALID_VALUE:
            return tuple(parameters)
        _check(error)
        parameters.append(Parameter(int(offset), int(size)))


def _check(error: Any, log: bytearray | None = None) -> None:
    if error == api.CUresult.CUDA_SUCCESS:
        return
    _, text = api.cuGetErrorString(error)
    said = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip() if log else ""
    first = said.splitlines()[0] if said else ""
    found = _LINE.search(said)
    raise ImageRejected(
        f"the image can't be loaded: {text.decode()}{': ' + first if first else ''}",
        log=said,
        line=int(found[1]) if found else 0,
        hint="Compile it for this card's architecture or an earlier one, with a toolkit no newer than the driver.",
    )


MAX_WAITING: Final = 512
"""Launches, copies and waits in flight, in all streams together. The driver blocks at about 1024."""

_SLEEP_S: Final = 2e-4


class _Marked:
    """What one stream holds: an event behind each thing that is not known to have ended, and whether it is a kernel."""

    __slots__ = ("ended", "waiting")

    def __init__(self) -> None:
        self.ended = 0
        self.waiting: deque[tuple[Any, bool]] = deque()


class Markers:
    """One event behind everything in any stream that is not known to have ended."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._marked: dict[int, _Marked] = {}
        self._spare: list[Any] = []
        self._count = 0

    def make_room(self) -> None:
        """Wait until one more may be put in a stream."""
        self._poll()
        while self._count >= MAX_WAITING and self._collect() >= MAX_WAITING:
            time.sleep(_SLEEP_S)
            self._poll()

    def add_kernel(self, number: int, stream: Any) -> None:
        """A launch was put in a stream. Raises cuda.Error."""
        self._add(number, stream, is_kernel=True)

    def add_other(self, number: int, stream: Any) -> None:
        """A copy or a wait was. Raises cuda.Error."""
        self._add(number, stream, is_kernel=False)

    def _add(self, number: int, stream: Any, *, is_kernel: bool) -> None:
        event = self._spare.pop() if self._spare else cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        self._count += 1
        marked = self._marked.get(number)
        if marked is None:
            marked = self._marked[number] = _Marked()
        marked.waiting.append((event, is_kernel))

    def running(self) -> dict[int, int]:
        """See `Context.running`."""
        self._collect()
        return {
            number: marked.ended for number, marked in self._marked.items() if marked.waiting and marked.waiting[0][1]
        }

    def _collect(self) -> int:
        """Take back the events that were reached; how many were not."""
        try:
            for marked in self._marked.values():
                waiting = marked.waiting
                while waiting and waiting[0][0].query():
                    self._spare.append(waiting.popleft()[0])
                    marked.ended += 1
                    self._count -= 1
        except cuda.Error:
            # The context is lost, and its kernels with it; the next real call says so.
            self._marked.clear()
            self._count = 0
        return self._count
