"""The tenant's library: lease a slice of a GPU, compute in it, free it. It needs no CUDA in this process.

    from gpulease.client import GpuBuilder, GpuSession, KernelArgs

    with GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(4 * n)
        session.mem_write(buffer, 0, array)
        module = session.module_load(ptx)
        args = KernelArgs().push_buffer(buffer).push_u32(n).push_f32(2.0)
        session.launch(module, "scale", [(n + 255) // 256], [256], args)
        session.sync()
        session.mem_read(buffer, 0, 4 * n, into=array)

`gpulease.client.aio` has the same names with coroutines; `gpulease.client.errors` shows the errors as a tree.
"""

from importlib import import_module
from typing import Any

import gpulease.client.moved_modules as _moved_modules

_moved_modules.install()


def __getattr__(name: str) -> Any:
    """Import all exported names when the first is accessed, because most commands of `gpulease` need none."""
    if name == "__all__" or not name.startswith("__"):
        public = import_module("gpulease.client.sync.public")
        globals().update({exported: getattr(public, exported) for exported in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
