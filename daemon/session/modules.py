"""The types of kernels' parameters, as an image's PTX text declares them (PTX ISA sections 5.1.6 and 11.1).

The drivers know the sizes of parameters, not their types: machine code has none. A client uses the types to refuse a
float where an integer is wanted. They decide nothing here: text that can't be followed has untold types.

A session's modules: loading, telling what is in them, unloading.
"""

import re
import time
from collections.abc import Mapping
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import ImageRejected, Kernel, Module
from gpulease.daemon.session.launches import Planner
from gpulease.daemon.session.ledger import Operations, SessionResources
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.fastpath import HANDLE, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import Handle, KernelEntry, ModuleLoad, ModuleLoaded, ModuleParameters
from gpulease.protocol.opcodes import ParameterType

_ELF: Final = b"\x7fELF"
_COMMENT: Final = re.compile(rb"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_ENTRY: Final = re.compile(rb"\.entry\s+([\w$%]+)\s*\(([^()]*)\)")
_WORD: Final = re.compile(rb"\.\w+|\[")
_SCALARS: Final = {
    f".{kind.name.lower()}".encode(): kind
    for kind in ParameterType
    if kind not in (ParameterType.UNTOLD, ParameterType.POINTER)
}
_VECTORS: Final = frozenset({b".v2", b".v4", b"["})


def parameter_types(image: bytes, kernels: Mapping[str, Kernel]) -> tuple[bytes, ...]:
    """By kernel, in their order, one `ParameterType` a parameter; nothing of a kernel whose text says something else.

    Takes time in proportion to the image.
    """
    declared: dict[str, bytes] = {}
    if not image.startswith(_ELF):
        # The drivers read PTX to its NUL.
        text = _COMMENT.sub(b" ", image.partition(b"\0")[0])
        declared = {match[1].decode(): _types_of(match[2]) for match in _ENTRY.finditer(text)}
    return tuple(
        types if len(types := declared.get(name, b"")) == len(kernel.parameters) else b""
        for name, kernel in kernels.items()
    )


def _types_of(parameters: bytes) -> bytes:
    return bytes(map(_type_of, parameters.split(b","))) if parameters.strip() else b""


def _type_of(parameter: bytes) -> ParameterType:
    words = _WORD.findall(parameter)
    kinds = [_SCALARS[word] for word in words if word in _SCALARS]
    if len(kinds) != 1 or not _VECTORS.isdisjoint(words):
        return ParameterType.UNTOLD
    return ParameterType.POINTER if b".ptr" in words else kinds[0]


_COMPILING_SINCE_NS: Final = int(Counter.COMPILING_SINCE_NS)


class ModuleOperations(Operations):
    """See Operations."""

    def __init__(self, holdings: SessionResources, planner: Planner, counters: memoryview) -> None:
        super().__init__(holdings)
        self._planner = planner
        self._counters = counters
        self._types: dict[int, tuple[bytes, ...]] = {}

    def load(self, frame: Frame) -> bytes:
        """MODULE_LOAD."""
        image = parse_body(ModuleLoad, frame.payload).image
        number, module = self.take(image)
        try:
            reply = done(frame, ModuleLoaded(number, _entries(module)))
            self._types[number] = parameter_types(image, module.kernels)
            return reply
        except LocalProtocolError as error:
            # Too many kernels, or names too long to be told.
            self._give_back(number)
            raise ImageRejected(f"the module's kernels can't be listed: {error}") from None

    def parameters(self, frame: Frame) -> bytes:
        """MODULE_PARAMETERS."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        return done(frame, ModuleParameters(self._types.get(number, ())))

    def take(self, image: bytes) -> tuple[int, Module]:
        """Load an image: the number it is known by, and the module.

        The compiler can't be asked to stop, so its time is told on the page for the broker to look at. It is over when
        the compiled image is weighed: what comes then may wait for kernels.
        """
        self._ledger.check_load(len(image))
        self._counters[_COMPILING_SINCE_NS] = time.monotonic_ns()
        try:
            module = self._context.module_load(image, self._admit)
        finally:
            self._counters[_COMPILING_SINCE_NS] = 0
        self._holdings.may_have_grown = True
        number = self._ledger.add_module(module, len(image))
        self._count()
        return number, module

    def _admit(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        self._counters[_COMPILING_SINCE_NS] = 0
        self._ledger.check_module(device_bytes, shared_bytes, kept_bytes)

    def unload(self, frame: Frame) -> bytes:
        """MODULE_UNLOAD."""
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        self._planner.forget()
        self._give_back(number)
        return empty(frame)

    def _give_back(self, number: int) -> None:
        self._context.module_unload(self._ledger.module(number), self._check_lease)
        self._ledger.remove_module(number)
        self._types.pop(number, None)
        self._count()


def _entries(module: Module) -> tuple[KernelEntry, ...]:
    return tuple(
        KernelEntry(name, kernel.max_threads_per_block, tuple(part.size for part in kernel.parameters))
        for name, kernel in module.kernels.items()
    )
