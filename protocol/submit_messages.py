"""The bodies of submits; see `messages`."""

from dataclasses import dataclass

from gpulease.protocol import limits
from gpulease.protocol.primitives import TLVS, U8, U32, U64, Record, Tlv, list_of, sized_bytes, text, wire


@dataclass(frozen=True, slots=True)
class GpuSubmit:
    """Make this connection a submit on the lease whose id the header carries, a context of its own for one kernel.

    The last control request of a connection. `timeout_ms` is how long the submit may take, from the reply on.
    """

    timeout_ms: int = wire(U32)
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class SubmitArgument:
    """One argument, an `ArgumentKind`: `data` of a VALUE, INPUT or INOUT; `size_bytes` of an OUTPUT, else 0."""

    kind: int = wire(U8)
    size_bytes: int = wire(U64)
    data: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class SubmitRun:
    """Load an image, run one kernel of it and answer its outputs; once on a connection."""

    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    grid_x: int = wire(U32)
    grid_y: int = wire(U32)
    grid_z: int = wire(U32)
    block_x: int = wire(U32)
    block_y: int = wire(U32)
    block_z: int = wire(U32)
    shared_bytes: int = wire(U32)
    arguments: tuple[SubmitArgument, ...] = wire(list_of(Record(SubmitArgument), limits.MAX_SUBMIT_ARGUMENTS))
    image: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class SubmitDone:
    """What the OUTPUT and INOUT arguments held when the kernel had ended, in their order."""

    outputs: tuple[bytes, ...] = wire(list_of(sized_bytes(limits.MAX_SUBMIT_OUTPUT_BYTES), limits.MAX_SUBMIT_ARGUMENTS))
