"""One lease per request: a request is done once, on a lease of its own, however often it is asked.

    from gpulease.client.gateway import DaemonEffects, InferenceKernel, InferenceRequest, NodeAuthority, SqliteStore
    from gpulease.client.gateway import serve_inference_request

    effects = DaemonEffects(SqliteStore("requests.sqlite"))
    request = InferenceRequest("order-17", "affine", data, len(data), 64 << 20, 10, None, 0, time.time())
    response = serve_inference_request(effects, NodeAuthority(), request, ptx, InferenceKernel("affine"))

`gpulease serve gateway` does the same over HTTP (`asgi`). `postgres_store` keeps the requests of several hosts.
"""

from gpulease.client.gateway.authority import SUBMISSION, Authority, NodeAuthority
from gpulease.client.gateway.effects import DaemonEffects, Effects
from gpulease.client.gateway.errors import (
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
from gpulease.client.gateway.inference import InferenceKernel, InferenceRequest, InferenceResponse
from gpulease.client.gateway.serve import serve_inference_request
from gpulease.client.gateway.sqlite_store import SqliteStore
from gpulease.client.gateway.store import ReplicatedIdempotencyStore

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
    "SqliteStore",
    "StaleEpoch",
    "StoreUnavailable",
    "serve_inference_request",
]
