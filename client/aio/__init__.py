"""The asyncio API: the names of `gpulease.client`, with coroutines, on asyncio's or uvloop's event loop.

    from gpulease.client.aio import GpuBuilder, GpuSession

    async with GpuBuilder().min_vram(64 << 20).acquire() as lease, GpuSession(lease) as session:
        buffer = await session.mem_alloc(4096)

`acquire`, `GpuSession(lease)`, `GpuSession.attach`, `region` and `stream` open something: use `async with` or `await`.

Cancelling an operation that has started ends only the wait. The operation continues in the background until its reply,
so that requests and replies on the connection stay in step, and the next operation waits for it. A cancelled mem_read
may still write to `into`, and a cancelled mem_write still reads its data. Cancelling `acquire` or the opening of a
session closes their connection.

A host name in a TCP address is resolved by the system's resolver, which blocks the event loop. To avoid that, use an IP
address.
"""

from gpulease.client.aio.arrays import Array
from gpulease.client.aio.events import KeepAlive, keep_alive
from gpulease.client.aio.graphs import Graph
from gpulease.client.aio.lease import GpuBuilder, GpuLease, inspect_token, my_audience
from gpulease.client.aio.modules import Module
from gpulease.client.aio.regions import Region
from gpulease.client.aio.session import GpuSession
from gpulease.client.aio.streams import Event, Stream
from gpulease.client.aio.submits import Submission, submit_by
from gpulease.client.core.events import ForwardRevoked, LeaseEvent
from gpulease.client.core.lease import LeaseReport, LeaseUse, SubmitReport
from gpulease.client.core.region_sets import RegionSet
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
    OperationFailed,
    RegionCancelled,
    RegionExpired,
    RegionFailed,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
    Revoked,
    SyncFailed,
    TimedOut,
    Unsupported,
    Untrusted,
)
from gpulease.client.handles import Buffer, Variable
from gpulease.client.kernel_args import KernelArgs
from gpulease.protocol import Exclusivity as GpuExclusivityClass
from gpulease.protocol import Phase
from gpulease.protocol import Waiting as GpuWaiting
from gpulease.protocol.capabilities import Permission

__all__ = [
    "AllocFailed",
    "Array",
    "Buffer",
    "Busy",
    "CapacityExceeded",
    "Denied",
    "Disconnected",
    "Drained",
    "Event",
    "Fenced",
    "ForwardRevoked",
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
    "LeaseReport",
    "LeaseUse",
    "LoadFailed",
    "Module",
    "NotFound",
    "OperationFailed",
    "Permission",
    "Phase",
    "Region",
    "RegionCancelled",
    "RegionExpired",
    "RegionFailed",
    "RegionFenced",
    "RegionFreed",
    "RegionRevoked",
    "RegionSet",
    "Revoked",
    "Stream",
    "Submission",
    "SubmitReport",
    "SyncFailed",
    "TimedOut",
    "Unsupported",
    "Untrusted",
    "Variable",
    "inspect_token",
    "keep_alive",
    "my_audience",
    "submit_by",
]
