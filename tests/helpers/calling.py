"""PTX with functions and calls, and a function to run it."""

import struct

from gpulease.daemon.ptx.context import CpuContext

HEAD = ".version 8.0\n.target sm_75\n.address_size 64\n"
INT = "(.param .b32 r) {}(.param .b32 a)"


def image(module: str, body: str) -> bytes:
    return f"""{HEAD}{module}
.entry k(.param .u64 out)
{{
    .shared .align 4 .b8 own[64];
    .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %d0, [out];
    mad.wide.u32 %d1, %r0, 4, %d0;
    {body}
    st.global.u32 [%d1], %r1;
    ret;
}}
""".encode()


def call(name: str, argument: str = "%r0", result: str = "%r1", behind: str = "", guard: str = "") -> str:
    return f"""{{
    .param .b32 param0; .param .b32 retval0;
    st.param.b32 [param0+0], {argument};
    {guard} call.uni (retval0), {name}, (param0){behind};
    ld.param.b32 {result}, [retval0+0];
    }}"""


def function(name: str, body: str, linkage: str = "") -> str:
    return f"""
{linkage} .func {INT.format(name)}
{{
    .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
    ld.param.u32 %r0, [a];
    {body}
    st.param.b32 [r+0], %r1;
    ret;
}}
"""


def run(context: CpuContext, module: str, body: str, threads: int = 8, shared: int = 0) -> list[int]:
    address = context.mem_alloc(4 * threads)
    loaded = context.module_load(image(module, body))
    context.launch(loaded.kernels["k"], (1, 1, 1), (threads, 1, 1), shared, address.to_bytes(8, "little"), 3)
    into = bytearray(4 * threads)
    try:
        context.mem_read(address, memoryview(into))
    finally:
        context.module_unload(loaded)
        context.mem_free(address)
    return list(struct.unpack(f"<{threads}I", into))


DOUBLE = function("double", "add.u32 %r1, %r0, %r0;")
PROTOTYPE = "proto: .callprototype (.param .b32 _) _ (.param .b32 _);"
