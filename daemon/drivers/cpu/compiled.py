"""What an image becomes: native code, and what must be known beside it to place and launch its kernels.

Nothing in here depends on the process it was made in: code names what it calls, and addresses of variables come from a
table that each launch names. So it can be kept and used again (cache.py).
"""

from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from gpulease.daemon.drivers.cpu.architecture import SM_90, Architecture
from gpulease.daemon.drivers.cpu.areas import Needs
from gpulease.daemon.drivers.cpu.limits import MAX_IMAGE_BYTES, MAX_THREADS_PER_BLOCK
from gpulease.daemon.drivers.cpu.ptx.parser import parse
from gpulease.daemon.drivers.cpu.ptx.syntax import Function, Image, Relocation
from gpulease.daemon.drivers.cpu.rejection import rejected
from gpulease.daemon.drivers.cpu.translate.cooperative import cooperative_kernels
from gpulease.daemon.drivers.cpu.translate.linking import link
from gpulease.daemon.drivers.cpu.translate.module import Part, translate
from gpulease.daemon.drivers.interface import Dim3, ImageRejected, Parameter
from gpulease.daemon.drivers.unsupported import refuse_managed_text, text_of
from gpulease.daemon.native.compiler import BadIr, emit_object

_BINARY_MAGICS = {b"\x7fELF": "a cubin", b"\x50\xed\x55\xba": "a fatbin"}


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One entry point.

    Attributes:
        required_block: The block its .reqntid demands, or None.
        static_shared_bytes: Shared memory its variables take.
        dynamic_shared_offset: Where shared memory asked for at launch begins.
        part: Which of the image's objects it is in.
        symbol: Its name there.
        is_cooperative: Whether only a cooperative launch could run it; see `cooperative_refused`.
        needs: What a block of it takes beside.
    """

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    max_threads_per_block: int
    required_block: Dim3 | None
    static_shared_bytes: int
    dynamic_shared_offset: int
    part: int
    symbol: str
    is_cooperative: bool
    needs: Needs


@dataclass(frozen=True, slots=True)
class ModuleVariable:
    """A variable of the module: what it starts with, and what of that is known at load only."""

    name: str
    size: int
    initial: bytes
    relocations: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class CompiledImage:
    """A whole image.

    Attributes:
        addressed: The functions whose addresses kernels take.
        objects: Object code, one for each part.
    """

    kernels: tuple[KernelFacts, ...]
    variables: tuple[ModuleVariable, ...]
    addressed: tuple[str, ...]
    objects: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """As it is kept. Raises OverflowError for a number of over 64 bits."""
        data: bytes = msgpack.packb(astuple(self))
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "CompiledImage":
        """As it was kept by the same version. Raises ValueError or TypeError for what was not."""
        kernels, variables, addressed, objects = msgpack.unpackb(data, use_list=False)
        return cls(
            tuple(map(_kernel_from, kernels)),
            tuple(
                ModuleVariable(name, size, initial, tuple(Relocation(*found) for found in relocations))
                for name, size, initial, relocations in variables
            ),
            addressed,
            objects,
        )


def _kernel_from(fields: Any) -> KernelFacts:
    name, parameters, *rest, needs = fields
    values = [name, tuple(Parameter(*p) for p in parameters), *rest, Needs(*needs)]
    return KernelFacts(*values)


def compile_image(image: bytes, *, slice_bytes: int, architecture: Architecture = SM_90) -> CompiledImage:
    """Parse, translate and compile. Raises ImageRejected."""
    tree = link(parse(_decode(image), architecture))
    variables = tuple(ModuleVariable(v.name, v.size, v.initial, v.relocations) for v in tree.variables)
    check_size(variables, slice_bytes)
    parts = translate(tree)
    try:
        objects = tuple(emit_object(part.text, part.effort) for part in parts)
    except BadIr as error:
        raise ImageRejected("the embedded driver failed to translate this image", log=str(error)) from None
    return CompiledImage(_kernels(tree, parts), variables, tuple(tree.addressed or ()), objects)


def check_size(variables: tuple[ModuleVariable, ...], slice_bytes: int) -> None:
    """Refuse a module whose variables can't all fit a slice."""
    wanted = sum(variable.size for variable in variables)
    if wanted > slice_bytes:
        raise ImageRejected(f"the module's variables take {wanted} bytes, the slice has {slice_bytes}")


def _decode(image: bytes) -> str:
    """The PTX text, or a refusal of what is none."""
    kind = _BINARY_MAGICS.get(image[:4])
    if kind is not None:
        raise ImageRejected(
            f"this image is {kind}: the embedded driver takes PTX text only",
            hint="Compile with nvcc -ptx.",
        )
    if len(image) > MAX_IMAGE_BYTES:
        raise ImageRejected(f"{len(image)} bytes of PTX are more than {MAX_IMAGE_BYTES}")
    text = text_of(image)
    refuse_managed_text(text)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise rejected("this is no text", line=line) from None


def _kernels(tree: Image, parts: list[Part]) -> tuple[KernelFacts, ...]:
    places = {name: (n, symbol) for n, part in enumerate(parts) for name, symbol in part.runners.items()}
    needs = {name: found for part in parts for name, found in part.needs.items()}
    cooperative = cooperative_kernels(tree)
    return tuple(
        _facts(function, needs[function.name], *places[function.name], is_cooperative=function.name in cooperative)
        for function in tree.functions
    )


def _facts(function: Function, needs: Needs, part: int, symbol: str, *, is_cooperative: bool) -> KernelFacts:
    threads = min(function.bounds.max_threads or MAX_THREADS_PER_BLOCK, MAX_THREADS_PER_BLOCK)
    if not needs.fit(threads):
        raise rejected(f"a block of {threads} threads keeps more than there is room for", line=function.line)
    return KernelFacts(
        name=function.name,
        parameters=tuple(Parameter(p.offset, p.size) for p in function.parameters),
        parameter_bytes=function.parameter_bytes,
        max_threads_per_block=threads,
        required_block=function.bounds.required,
        static_shared_bytes=function.shared_bytes,
        dynamic_shared_offset=function.dynamic_shared_offset,
        part=part,
        symbol=symbol,
        is_cooperative=is_cooperative,
        needs=needs,
    )
