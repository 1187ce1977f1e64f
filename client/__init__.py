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

import gpulease.client.imported_on_access as _imported_on_access
import gpulease.client.moved_modules as _moved_modules

_moved_modules.install()

__getattr__ = _imported_on_access.imported_on_access(globals(), "gpulease.client.sync.public")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
