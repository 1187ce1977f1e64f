"""Serves each request on its own lease, with one effect even if the request is sent repeatedly.

    from gpulease.client.serve.gateway import DaemonEffects, InferenceKernel, InferenceRequest
    from gpulease.client.serve.gateway import NodeAuthority, SpareConnections, SqliteStore
    from gpulease.client.serve.gateway import serve_inference_request

    effects = DaemonEffects(SqliteStore("requests.sqlite"), spare=SpareConnections())
    request = InferenceRequest("order-17", "affine", data, len(data), 64 << 20, 10, None, 0, time.time())
    response = serve_inference_request(effects, NodeAuthority(), request, ptx, InferenceKernel("affine"))

`gpulease serve gateway` does the same over HTTP (`gateway`). `postgres_store` keeps the requests of several hosts.
"""

from gpulease.client.core.spare_connections import SpareConnections
from gpulease.client.serve.gateway.attempt import (
    SUBMISSION,
    Authority,
    DaemonEffects,
    Effects,
    NodeAuthority,
    serve_inference_request,
)
from gpulease.client.serve.gateway.gateway_errors import (
    CapabilityRefused,
    GatewayError,
    OperationConflict,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
)
from gpulease.client.serve.gateway.inference import InferenceKernel, InferenceRequest, InferenceResponse
from gpulease.client.serve.gateway.sqlite_store import SqliteStore
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore

__all__ = [
    "SUBMISSION",
    "Authority",
    "CapabilityRefused",
    "DaemonEffects",
    "Effects",
    "GatewayError",
    "InferenceKernel",
    "InferenceRequest",
    "InferenceResponse",
    "NodeAuthority",
    "OperationConflict",
    "OperationFailed",
    "OperationInProgress",
    "OutcomeUnknown",
    "Overloaded",
    "ReplicatedIdempotencyStore",
    "SpareConnections",
    "SqliteStore",
    "StaleEpoch",
    "StoreUnavailable",
    "serve_inference_request",
]
