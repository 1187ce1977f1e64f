"""The bodies of a submit's runs: see `submits`."""

from typing import Final

from gpulease.protocol import messages as m
from gpulease.protocol.opcodes import ArgumentKind, Opcode

from .draws import Draws
from .session_requests import ALL, DIMS, IMAGES, KERNELS

SLICE: Final = 1 << 16
"""So small that all outputs of a run fit into a socket's buffer: the tenant reads only when the worker waits."""

ALLOWANCE: Final = 1 << 16
RUN_OPS: Final = (Opcode.MEM_ALLOC, Opcode.MODULE_LOAD, Opcode.SYNC, Opcode.HELLO, Opcode.GPU_SUBMIT, Opcode.GOODBYE)
"""Operations that a submit's connection refuses."""

SIZES: Final = (64, 4, 4096, 1, SLICE // 2, SLICE, SLICE + 1, 0, ALL)
LENGTHS: Final = (64, 4, 4096, 1, 0, SLICE // 4)
SHARED: Final = (0, 0, 1024, 1 << 20, (1 << 32) - 1)


def run_body(draws: Draws) -> m.SubmitRun:
    """Return a run, mostly of a kernel with the arguments that it takes."""
    kernel, image = draws.pick(KERNELS), draws.pick(IMAGES)
    x, y, z = draws.pick(DIMS[:6]), 1, draws.pick(DIMS) if draws.chance(4) else 1
    block, shared = draws.pick(DIMS), draws.pick(SHARED) if draws.chance(4) else 0
    shape = draws.byte() % 8
    if shape < 2:
        arguments = [_inout(draws), _word(draws), _word(draws)]
    elif shape < 4:
        arguments = [_output(draws), _word(draws), _word(draws)]
    elif shape == 4:
        arguments = [_output(draws), _value(draws.take(8).ljust(8, b"\0"))]
    else:
        arguments = [_any(draws) for _ in range(draws.below(6))]
    return m.SubmitRun(kernel, x, y, z, block, 1, 1, shared, tuple(arguments), image)


def _value(data: bytes) -> m.SubmitArgument:
    return m.SubmitArgument(ArgumentKind.VALUE, 0, data)


def _word(draws: Draws) -> m.SubmitArgument:
    return _value(bytes([draws.byte() % 70, 0, 0, 0]) if draws.chance(2) else draws.take(4).ljust(4, b"\0"))


def _inout(draws: Draws) -> m.SubmitArgument:
    return m.SubmitArgument(ArgumentKind.INOUT, 0, bytes([draws.byte()]) * draws.pick(LENGTHS))


def _output(draws: Draws) -> m.SubmitArgument:
    return m.SubmitArgument(ArgumentKind.OUTPUT, draws.pick(SIZES), b"")


def _any(draws: Draws) -> m.SubmitArgument:
    kind, size_bytes = draws.byte() % 6, draws.pick(SIZES) if draws.chance(2) else 0
    return m.SubmitArgument(kind, size_bytes, b"\1" * draws.pick(LENGTHS) if draws.chance(2) else b"")
