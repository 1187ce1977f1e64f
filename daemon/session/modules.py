"""A session's modules, and the types of their kernels' parameters.

The types come from an image's PTX text (PTX ISA sections 5.1.6 and 11.1): the drivers report only the parameters'
sizes, because machine code has no types. A client uses the types to refuse a float where an integer is expected.
Nothing else depends on them: where this module can't parse the text, the types are unknown.
"""

import re
from collections.abc import Mapping
from dataclasses import astuple
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import DriverKernel, DriverModule, ImageRejected, Poll
from gpulease.daemon.session.launches import Planner
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fastpath import HANDLE, parse_fixed
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import (
    Handle,
    KernelEntry,
    KernelFigures,
    ModuleFigures,
    ModuleLoad,
    ModuleLoaded,
    ModuleParameters,
    Variable,
    VariableName,
)
from gpulease.protocol.opcodes import Opcode, ParameterType, Status

SHOWN_NAME_CHARACTERS: Final = 200
"""Maximum number of characters of a name that an error shows. Stops a name of 4 KiB from filling the error's text."""

_COMPILING_SINCE_NS: Final = int(Counter.COMPILING_SINCE_NS)


class ModuleOperations(OperationHandler):
    def __init__(self, resources: SessionResources, planner: Planner) -> None:
        super().__init__(resources)
        self._planner = planner
        self._types: dict[int, tuple[bytes, ...]] = {}
        # The images of a parkable session's modules: another process may have to load them again.
        self._images: dict[int, bytes] = {}

    @serves(Opcode.MODULE_LOAD)
    def load(self, frame: Frame) -> bytes:
        image = parse_body(ModuleLoad, frame.payload).image
        number, module = self.load_image(image)
        try:
            # The reply may be too large, so build it before the types are kept.
            reply = done(frame, ModuleLoaded(number, _kernel_entries(module)))
            self._types[number] = parameter_types(image, module.kernels)
            return reply
        except LocalProtocolError as error:
            # The reply has no room for so many kernels, or for such long names.
            self._unload(number)
            raise ImageRejected(f"the module's kernels can't be listed: {error}") from None

    @serves(Opcode.MODULE_UNLOAD)
    def unload(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        # Drop the plans of its kernels before the module is unloaded.
        self._planner.forget()
        self._unload(number)
        return empty(frame)

    @serves(Opcode.MODULE_PARAMETERS)
    def parameters(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.module(number)
        return done(frame, ModuleParameters(self._types.get(number, ())))

    @serves(Opcode.MODULE_VARIABLE)
    def variable(self, frame: Frame) -> bytes:
        request = parse_body(VariableName, frame.payload)
        module = self._ledger.module(request.module)
        # The driver would end a name with a NUL there, and find another variable.
        address, size_bytes = (0, 0) if "\0" in request.name else module.variable(request.name)
        if not size_bytes:
            raise Refused(
                Failure(
                    Status.INVALID_HANDLE,
                    f"module {request.module} has no variable {request.name[:SHOWN_NAME_CHARACTERS]!r} with bytes in"
                    " device or constant memory",
                    hint="Use the name in the PTX: C++ mangles names in namespaces, and the compiler drops "
                    "unused variables.",
                )
            )
        self._ledger.add_variable(request.module, address, size_bytes)
        return done(frame, Variable(address, size_bytes))

    @serves(Opcode.MODULE_FIGURES)
    def figures(self, frame: Frame) -> bytes:
        (number,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        kernels = self._ledger.module(number).kernels.values()
        return done(frame, ModuleFigures(tuple(KernelFigures(*astuple(kernel.figures())) for kernel in kernels)))

    def load_image(self, image: bytes) -> tuple[int, DriverModule]:
        """Load an image; return its number in the ledger, and the module.

        The compiler's time limit ends when the compiled image has been measured, because the rest may wait for kernels.
        """
        # Step 1: check the bounds that depend only on the image's length.
        self._ledger.check_load(len(image))
        # Step 2: compile, and load after `_admit` has agreed.
        with self._resources.compiling():
            module = self._context.module_load(image, self._admit)
        self._resources.may_have_grown = True
        # Step 3: record the module in the ledger.
        number = self._ledger.add_module(module, len(image))
        if self._resources.shows_pages:
            self._images[number] = bytes(image)
        self._record_usage()
        return number, module

    def image_of(self, number: int) -> bytes:
        """Return the image from which a parkable session's module was loaded."""
        return self._images[number]

    def restore(
        self, number: int, image: bytes, place: tuple[int, ...], variables: dict[int, int], code: bytes = b""
    ) -> None:
        """Load a module that the session had in another process, and its code there. Raises ImageMismatch."""
        module = self._context.adopt_module(image, place, code)
        self._ledger.restore_module(number, module, len(image), variables)
        self._images[number] = image
        self._types[number] = parameter_types(image, module.kernels)

    def _admit(self, device_bytes: int, shared_bytes: int, kept_bytes: int) -> None:
        # Compiling is over. Stop its time limit, because the rest may wait for kernels.
        self._counters[_COMPILING_SINCE_NS] = 0
        self._ledger.check_module(device_bytes, shared_bytes, kept_bytes)

    def give_back(self, number: int, poll: Poll) -> None:
        """Unload a module once all earlier launches have ended. The plans of its kernels must have been dropped."""
        self._context.module_unload(self._ledger.module(number), poll)
        self._ledger.remove_module(number)
        self._types.pop(number, None)
        self._images.pop(number, None)

    def _unload(self, number: int) -> None:
        self.give_back(number, self._check_lease)
        self._record_usage()


def _kernel_entries(module: DriverModule) -> tuple[KernelEntry, ...]:
    return tuple(
        KernelEntry(name, kernel.max_threads_per_block, tuple(part.size for part in kernel.parameters))
        for name, kernel in module.kernels.items()
    )


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


def parameter_types(image: bytes, kernels: Mapping[str, DriverKernel]) -> tuple[bytes, ...]:
    """Return, for each kernel in order, the types of its parameters: a `ParameterType` byte for each.

    The result is b"" for a kernel that the text declares with another number of parameters. The time is proportional to
    the image's size.
    """
    declared: dict[str, bytes] = {}
    if not image.startswith(_ELF):
        # The drivers read PTX up to its first NUL. Comments could contain anything that looks like an entry.
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
    # With more than one type, a vector or an array, no single type can be reported.
    kinds = [_SCALARS[word] for word in words if word in _SCALARS]
    if len(kinds) != 1 or not _VECTORS.isdisjoint(words):
        return ParameterType.UNTOLD
    return ParameterType.POINTER if b".ptr" in words else kinds[0]
