import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuModule

IN_WORDS, OUT_WORDS, AREA_BYTES = 8, 4, 4096
THREADS = 1024

# The area has a few bytes more than a whole number of granules, so that its last granule is used only in part.
SIZES = (8 * IN_WORDS * THREADS, 8 * OUT_WORDS * THREADS, AREA_BYTES + 4)


def block_ptx(body: str) -> str:
    """Return a kernel in which each thread has words %a0 to %a7, and stores %o0 to %o3.

    The kernel loads and stores only the words that the body names, because the compiler takes twice as long for all of
    them. All threads share `sh` and [%area].
    """
    named = set(re.findall(r"%([abo]\d)", body))
    loads = "".join(
        f"ld.global.u64 %a{n}, [%p+{8 * n}]; cvt.u32.u64 %b{n}, %a{n};\n"
        for n in range(IN_WORDS)
        if named & {f"a{n}", f"b{n}"}
    )
    stores = "".join(f"st.global.u64 [%q+{8 * n}], %o{n};\n" for n in range(OUT_WORDS) if f"o{n}" in named)
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out, .param .u64 area)
{{
    .shared .align 16 .b8 sh[{AREA_BYTES}];
    .reg .b64 %a<{IN_WORDS}>, %o<{OUT_WORDS}>, %p, %q, %area, %d<8>;
    .reg .b32 %b<{IN_WORDS}>, %r<16>, %i, %n;
    .reg .b16 %h<8>; .reg .f32 %f<8>; .reg .f64 %g<8>; .reg .pred %x<8>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ntid.x; mad.lo.u32 %i, %r1, %r2, %r0;
    mov.u32 %r1, %tid.z; mov.u32 %n, %ntid.y; mul.lo.u32 %r1, %r1, %r2; mad.lo.u32 %i, %r1, %n, %i;
    mov.u32 %r0, 0; mov.u32 %r1, 0; mov.u32 %r2, 0;
    ld.param.u64 %p, [in]; ld.param.u64 %q, [out]; ld.param.u64 %area, [area];
    mad.wide.u32 %p, %i, {8 * IN_WORDS}, %p;
    mad.wide.u32 %q, %i, {8 * OUT_WORDS}, %q;
    {loads}
    {body}
    KEEP: {stores}
    ret;
}}
"""


@pytest.fixture
def kernel_of() -> Callable[[str], str]:
    return block_ptx


RunBlock = Callable[..., list[list[int]]]


@pytest.fixture
def run_block(resting: CpuContext) -> Iterator[RunBlock]:
    """Return a function that runs a body on rows of words, one for each thread, and returns what each thread stores.

    `area` is shared by all threads, and read back.
    """
    modules: dict[str, CpuModule] = {}
    addresses = [resting.mem_alloc(size) for size in SIZES]

    def run(
        body: str,
        rows: Sequence[Sequence[int]],
        *,
        block: tuple[int, int, int] | None = None,
        grid: int = 1,
        area: bytearray | None = None,
    ) -> list[list[int]]:
        text = block_ptx(body)
        if text not in modules:
            modules[text] = resting.module_load(text.encode())
        words = np.zeros((len(rows), IN_WORDS), "u8")
        for row, given in zip(words, rows, strict=True):
            row[: len(given)] = np.array([value % 2**64 for value in given], "u8")
        kept = np.zeros((len(rows), OUT_WORDS), "u8")
        held = area if area is not None else bytearray(AREA_BYTES)
        for address, data in zip(addresses, (words.tobytes(), kept.tobytes(), held), strict=True):
            resting.mem_write(address, memoryview(bytes(data)))
        pointers = b"".join(address.to_bytes(8, "little") for address in addresses)
        resting.launch(modules[text].kernels["k"], (grid, 1, 1), block or (len(rows), 1, 1), 0, pointers, 7)
        resting.mem_read(addresses[1], kept.data.cast("B"))
        if area is not None:
            resting.mem_read(addresses[2], memoryview(area))
        return [[int(value) for value in row] for row in kept]

    yield run
    for item in modules.values():
        resting.module_unload(item)
    for address in addresses:
        resting.mem_free(address)
