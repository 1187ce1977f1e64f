"""Kernels for `gpulease verify`, most of them faulty, and helpers that launch two of them."""

from importlib.resources import files
from typing import Final

from gpulease.client import Buffer, GpuSession, KernelArgs, Module, RegionSet

ONE: Final = (1, 1, 1)
WARP: Final = (32, 1, 1)
BLOCK: Final = (256, 1, 1)
GRID: Final = (1024, 1, 1)
"""Number of blocks that, with BLOCK, gives more threads than most cards run at a time."""

_LINE: Final = b"a line that is not read\n\0"

LONG_LINES: Final = 200
"""Number of instructions of each kernel in a module that takes long to compile."""


def rule_breakers() -> bytes:
    """Return the PTX of all kernels that run on any driver."""
    return files(__package__).joinpath("kernels.ptx").read_bytes()


def memory_hungry_kernels() -> bytes:
    """Return the PTX of kernels for which a card's driver allocates additional memory."""
    return files(__package__).joinpath("hungry.ptx").read_bytes()


def compiling_long(kernels: int) -> bytes:
    """Return PTX with `kernels` useless kernels of LONG_LINES instructions each; some take a compiler seconds."""
    parts = [".version 7.0\n.target sm_75\n.address_size 64\n"]
    # Each instruction depends on the one before, and no two kernels are the same, so nothing can be optimised away.
    for kernel in range(kernels):
        body = "".join(f"mad.lo.u32 %r1, %r1, {7 * line + 3}, {line + kernel};\n" for line in range(LONG_LINES))
        parts.append(
            f".visible .entry k{kernel}(.param .u64 p)\n{{\n.reg .b32 %r<2>;\n.reg .b64 %rd<2>;\n"
            f"ld.param.u64 %rd1, [p];\nld.global.u32 %r1, [%rd1];\n{body}st.global.u32 [%rd1], %r1;\nret;\n}}\n"
        )
    return "".join(parts).encode()


def with_variable(size_bytes: int) -> bytes:
    """Return the PTX of a variable of `size_bytes`, and of a kernel that uses it, so that a compiler keeps it."""
    head = f".version 7.0\n.target sm_75\n.address_size 64\n.global .align 8 .b8 big[{size_bytes}];\n"
    body = ".reg .b32 %r<2>;\n.reg .b64 %rd<2>;\nmov.u64 %rd1, big;\nld.global.u32 %r1, [%rd1];\n"
    return f"{head}.visible .entry touch()\n{{\n{body}st.global.u32 [%rd1], %r1;\nret;\n}}\n".encode()


def with_managed_variable() -> bytes:
    """Return PTX with a managed variable, which a driver must refuse: CUDA keeps its memory until all contexts end."""
    head = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .attribute(.managed) .align 4 .u32 word;\n"
    body = ".reg .b32 %r<2>;\nld.global.u32 %r1, [word];\nst.global.u32 [word], %r1;\nret;\n"
    return f"{head}.visible .entry touch()\n{{\n{body}}}\n".encode()


def launching_kernels() -> bytes:
    """Return the PTX of a kernel that launches kernels. It needs CUDA's device runtime, which no session links."""
    head = (
        ".version 7.0\n.target sm_75\n.address_size 64\n"
        ".extern .func (.param .b32 status) cudaLaunchDeviceV2(.param .b64 buffer, .param .b64 stream);\n"
    )
    body = (
        ".reg .b64 %rd<2>;\nmov.u64 %rd1, 0;\n{\n.param .b64 buffer;\nst.param.b64 [buffer], %rd1;\n"
        ".param .b64 stream;\nst.param.b64 [stream], %rd1;\n.param .b32 status;\n"
        "call.uni (status), cudaLaunchDeviceV2, (buffer, stream);\n}\nret;\n"
    )
    return f"{head}.visible .entry parent()\n{{\n{body}}}\n".encode()


def printing() -> bytes:
    """Return the PTX of a kernel in which every thread prints one line."""
    head = (
        ".version 7.0\n.target sm_75\n.address_size 64\n"
        ".extern .func (.param .b32 count) vprintf(.param .b64 format, .param .b64 arguments);\n"
        f".global .align 1 .b8 line[{len(_LINE)}] = {{{', '.join(map(str, _LINE))}}};\n"
    )
    body = (
        ".reg .b64 %rd<3>;\nmov.u64 %rd1, line;\ncvta.global.u64 %rd1, %rd1;\nmov.u64 %rd2, 0;\n"
        "{\n.param .b64 format;\nst.param.b64 [format], %rd1;\n.param .b64 arguments;\n"
        "st.param.b64 [arguments], %rd2;\n.param .b32 count;\n"
        "call.uni (count), vprintf, (format, arguments);\n}\nret;\n"
    )
    return f"{head}.visible .entry print_a_line()\n{{\n{body}}}\n".encode()


def fill(
    session: GpuSession,
    module: Module,
    place: Buffer | int,
    words: int,
    value: int,
    regions: RegionSet | None = None,
) -> None:
    """Set the first words of a buffer, or the words at a device address, to a value."""
    args = _at(place).push_u64(words).push_u32(value)
    session.launch(module, "fill", GRID, BLOCK, args, regions=regions)


def count_set(
    session: GpuSession, module: Module, place: Buffer | int, words: int, regions: RegionSet | None = None
) -> int:
    """Count the words that are not 0 among the first `words` of a buffer, or of the memory at a device address."""
    # The kernel adds to this word, which is 0 at first.
    count = session.mem_alloc(4)
    args = _at(place).push_u64(words).push_buffer(count)
    session.launch(module, "count_set", GRID, BLOCK, args, regions=regions)
    nonzero_words = int.from_bytes(session.mem_read(count, 0, 4), "little")
    session.mem_free(count)
    return nonzero_words


def _at(place: Buffer | int) -> KernelArgs:
    return KernelArgs().push_u64(place) if isinstance(place, int) else KernelArgs().push_buffer(place)
