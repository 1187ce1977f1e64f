"""The tenant's library: lease a slice of a GPU, compute in it, give it back. No CUDA on this side.

    from gpulease.client import GpuBuilder, GpuSession, KernelArgs

    with GpuBuilder().min_vram(64 << 20).lease_secs(120).acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(4 * n)
        session.mem_write(buffer, 0, array)
        module = session.module_load(ptx)
        args = KernelArgs().push_buffer(buffer).push_u32(n).push_f32(2.0)
        session.launch(module, "scale", [(n + 255) // 256], [256], args)
        session.sync()
        session.mem_read(buffer, 0, 4 * n, into=array)

`gpulease.client.aio` has the same with coroutines; `gpulease.client.errors` draws the errors as a tree.
"""

from gpulease.client.blocking import GpuBuilder, GpuLease, GpuSession, inspect_token, my_audience
from gpulease.client.core.events import LeaseEvent
from gpulease.client.core.tokens import Grant, HeldToken
from gpulease.client.errors import (
    AllocFailed,
    Busy,
    CapacityExceeded,
    Denied,
    Disconnected,
    Drained,
    Fenced,
    GpuLeaseError,
    GpuSessionFailed,
    InvalidHandle,
    InvalidRequest,
    LaunchFailed,
    LeaseExpired,
    LeaseFreed,
    LoadFailed,
    NotFound,
    Revoked,
    SyncFailed,
    Unsupported,
    Untrusted,
)
from gpulease.client.graphs import Graph
from gpulease.client.handles import Buffer, Module
from gpulease.client.keeping import KeepAlive, keep_alive
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.streams import Stream
from gpulease.protocol import Exclusivity as GpuExclusivityClass
from gpulease.protocol import Phase
from gpulease.protocol import Waiting as GpuWaiting
from gpulease.protocol.capabilities import Permission

__all__ = [
    "AllocFailed",
    "Buffer",
    "Busy",
    "CapacityExceeded",
    "Denied",
    "Disconnected",
    "Drained",
    "Fenced",
    "GpuBuilder",
    "GpuExclusivityClass",
    "GpuLease",
    "GpuLeaseError",
    "GpuSession",
    "GpuSessionFailed",
    "GpuWaiting",
    "Grant",
    "Graph",
    "HeldToken",
    "InvalidHandle",
    "InvalidRequest",
    "KeepAlive",
    "KernelArgs",
    "LaunchFailed",
    "LeaseEvent",
    "LeaseExpired",
    "LeaseFreed",
    "LoadFailed",
    "Module",
    "NotFound",
    "Permission",
    "Phase",
    "Revoked",
    "Stream",
    "SyncFailed",
    "Unsupported",
    "Untrusted",
    "inspect_token",
    "keep_alive",
    "my_audience",
]
