"""The names that `gpulease.client` exports. The package imports this module when one of them is first accessed."""

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
from gpulease.client.sync.arrays import Array
from gpulease.client.sync.events import KeepAlive, keep_alive
from gpulease.client.sync.graphs import Graph
from gpulease.client.sync.lease import GpuBuilder, GpuLease, inspect_token, my_audience
from gpulease.client.sync.modules import Module
from gpulease.client.sync.regions import Region
from gpulease.client.sync.session import GpuSession
from gpulease.client.sync.streams import Event, Stream
from gpulease.client.sync.submits import Submission, submit_by
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
