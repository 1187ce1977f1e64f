"""Ways in which a secret can get into a session's worker. Tests search for the secret after the session."""

import struct
from collections.abc import Callable
from typing import Final

import pytest

from gpulease.client import GpuLeaseError, GpuSession, KernelArgs, Module

# Each thread stores four parameters in shared and local memory, and copies them from there to global memory.
SPREAD = """.version 7.0
.target sm_75
.address_size 64
// COMMENT
CONSTANT
.visible .entry NAME(.param .u64 p, .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {
 .reg .u64 %r<12>;
 .shared .align 8 .b8 s[4096];
 .local .align 8 .b8 l[512];
 ld.param.u64 %r1, [p]; ld.param.u64 %r2, [a]; ld.param.u64 %r3, [b]; ld.param.u64 %r4, [c]; ld.param.u64 %r5, [d];
 cvta.to.global.u64 %r1, %r1;
 st.shared.u64 [s+64], %r2; st.shared.u64 [s+72], %r3; st.shared.u64 [s+80], %r4; st.shared.u64 [s+88], %r5;
 st.local.u64 [l+128], %r2; st.local.u64 [l+136], %r3; st.local.u64 [l+144], %r4; st.local.u64 [l+152], %r5;
 bar.sync 0;
 ld.shared.u64 %r6, [s+64]; ld.local.u64 %r7, [l+136]; ld.shared.u64 %r8, [s+80]; ld.local.u64 %r9, [l+152];
 st.global.u64 [%r1], %r6; st.global.u64 [%r1+8], %r7; st.global.u64 [%r1+16], %r8; st.global.u64 [%r1+24], %r9;
 END
}
"""


# `count` threads combine four parameters with a fifth by XOR, and store the results in global memory.
KEY = 0xA5C396F01E2D4B78
MAKE = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry make(.param .u64 p, .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 key,
                     .param .u64 count) {
 .reg .u64 %r<12>;
 .reg .u32 %t<5>;
 .reg .pred %q;
 ld.param.u64 %r1, [p]; ld.param.u64 %r2, [a]; ld.param.u64 %r3, [b]; ld.param.u64 %r4, [c]; ld.param.u64 %r5, [d];
 ld.param.u64 %r6, [key]; ld.param.u64 %r7, [count];
 mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mov.u32 %t3, %tid.x; mad.lo.u32 %t4, %t1, %t2, %t3;
 cvt.u64.u32 %r8, %t4;
 setp.ge.u64 %q, %r8, %r7;
 @%q bra END;
 xor.b64 %r2, %r2, %r6; xor.b64 %r3, %r3, %r6; xor.b64 %r4, %r4, %r6; xor.b64 %r5, %r5, %r6;
 cvta.to.global.u64 %r1, %r1; mad.lo.u64 %r9, %r8, 32, %r1;
 st.global.u64 [%r9], %r2; st.global.u64 [%r9+8], %r3; st.global.u64 [%r9+16], %r4; st.global.u64 [%r9+24], %r5;
END:
 ret;
}
"""


def spread(name: str = "spread", comment: str = "", constant: str = "", end: str = "ret;") -> bytes:
    named = SPREAD.replace("NAME", name).replace("COMMENT", comment)
    return named.replace("CONSTANT", constant).replace("END", end).encode()


def launch(session: GpuSession, module: Module, secret: bytes, name: str = "spread") -> None:
    out = session.mem_alloc(32)
    args = KernelArgs().push_buffer(out)
    for word in struct.unpack("<4Q", secret):
        args.push_u64(word)
    session.launch(module, name, [8], [64], args)
    session.sync()
    assert bytes(session.mem_read(out, 0, 32)) == secret


def as_arguments(session: GpuSession, secret: bytes) -> bytes:
    launch(session, session.module_load(spread()), secret)
    return secret


def in_small_copies(session: GpuSession, secret: bytes) -> bytes:
    buffer = session.mem_alloc(1 << 16)
    for at in range(0, 1 << 12, 32):
        session.mem_write(buffer, at, secret)
        assert bytes(session.mem_read(buffer, at, 32)) == secret
    return secret


def as_a_constant(session: GpuSession, secret: bytes) -> bytes:
    values = ",".join(map(str, secret))
    session.module_load(spread(constant=f".const .align 8 .b8 c[32] = {{{values}}};"))
    return secret


def as_numbers_in_code(session: GpuSession, secret: bytes) -> bytes:
    words = struct.unpack("<4Q", secret)
    moves = "".join(f"mov.u64 %r6, {word}; st.global.u64 [%r1+{8 * at}], %r6;\n " for at, word in enumerate(words))
    module = session.module_load(spread(end=f"{moves}ret;"))
    out = session.mem_alloc(32)
    args = KernelArgs().push_buffer(out).push_u64(0).push_u64(0).push_u64(0).push_u64(0)
    session.launch(module, "spread", [1], [1], args)
    session.sync()
    assert bytes(session.mem_read(out, 0, 32)) == secret
    # In code the words are not adjacent, so search for the first one only.
    return secret[:8]


def in_the_stacks_of_threads(session: GpuSession, secret: bytes) -> bytes:
    """Give the secret to kernels only: each thread computes it from two halves."""
    module = session.module_load(MAKE)
    for count in (1, 3, 2047):
        out = session.mem_alloc(32 * count)
        args = KernelArgs().push_buffer(out)
        for word in struct.unpack("<4Q", secret):
            args.push_u64(word ^ KEY)
        args.push_u64(KEY).push_u64(count)
        session.launch(module, "make", [-(-count // 256)], [256], args)
        session.sync()
        assert bytes(session.mem_read(out, 32 * (count - 1), 32)) == secret
    # In registers the words are not adjacent, so search for the first one only.
    return secret[:8]


def in_a_comment(session: GpuSession, secret: bytes) -> bytes:
    launch(session, session.module_load(spread(comment=secret.hex())), bytes(32))
    return secret.hex().encode()


def as_a_name(session: GpuSession, secret: bytes) -> bytes:
    name = f"k{secret.hex()}"
    launch(session, session.module_load(spread(name)), bytes(32), name)
    return secret.hex().encode()


def in_code_that_is_wrong(session: GpuSession, secret: bytes) -> bytes:
    with pytest.raises(GpuLeaseError):
        session.module_load(spread(end=f"x{secret.hex()};"))
    return secret.hex().encode()


WAYS: Final[dict[str, Callable[[GpuSession, bytes], bytes]]] = {
    "as a kernel's arguments, through shared and local memory": as_arguments,
    "in small copies": in_small_copies,
    "as a constant": as_a_constant,
    "as numbers in code": as_numbers_in_code,
    "in the stacks of threads": in_the_stacks_of_threads,
    "in a comment": in_a_comment,
    "as a kernel's name": as_a_name,
    "in code that is wrong, and in what is said of it": in_code_that_is_wrong,
}
"""Each function takes 32 random bytes, brings them into a worker, and returns the bytes to search for."""
