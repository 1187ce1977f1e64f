"""Reports every effect of serving a request before it happens, so that a test can pause, fail or kill it then.

As a program, `python -P -m helpers.gateway_steps`, it serves the requests that it reads from stdin. Each runs in a
separate process, which writes its steps to stdout, and waits for a line on stdin after each step.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpulease.client import GpuLease, GpuLeaseError, GpuSession
from gpulease.client.core.tokens import Grant
from gpulease.client.serve.gateway import (
    DaemonEffects,
    InferenceKernel,
    InferenceRequest,
    InferenceResponse,
    NodeAuthority,
    ReplicatedIdempotencyStore,
    SqliteStore,
    serve_inference_request,
)
from gpulease.client.serve.gateway.ledger import Moment
from gpulease.client.serve.gateway.sqlite_store import host_clock

Hook = Callable[[str], None]

AFFINE: Final = Path(__file__).parents[2] / "client" / "serve" / "gateway" / "example" / "affine.ptx"
INPUT: Final = np.arange(256, dtype=np.float32)
OUTPUT: Final = (2 * INPUT + 1).tobytes()
KERNEL: Final = InferenceKernel("affine")


def request(request_id: str, **others: Any) -> InferenceRequest:
    """Return a request to the example model, with the fields in `others` changed."""
    usual: dict[str, Any] = {
        "model_id": "affine",
        "input": INPUT.tobytes(),
        "output_len": INPUT.nbytes,
        "min_vram": 1 << 20,
        "lease_ttl_secs": 20,
        "audience": None,
        "token_nonce": 0,
        "now_secs": time.time(),
    }
    return InferenceRequest(request_id, **(usual | others))


class Told:
    """Wraps an object. Before each call of a method in `only`, it calls the hook with `name` and the method's name."""

    def __init__(self, inner: Any, name: str, hook: Hook, only: frozenset[str]) -> None:
        self._told = inner, name, hook, only

    def __getattr__(self, name: str) -> Any:
        inner, prefix, hook, only = self._told
        found = getattr(inner, name)
        if name not in only:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            hook(f"{prefix}.{name}")
            return found(*args, **kwargs)

        return call

    def _renamed(self, name: str) -> "Told":
        inner, _, hook, only = self._told
        return Told(inner, name, hook, only)

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *error: object) -> None:
        inner, prefix, hook, only = self._told
        if "free" in only:
            hook(f"{prefix}.free")
        inner.__exit__(*error)


_STORE: Final = frozenset({"reserve", "start", "complete", "release"})
_SESSION: Final = frozenset(
    {"mem_alloc", "mem_write", "sync", "module_load", "launch", "mem_read", "module_unload", "mem_free"}
)


class ToldEffects(DaemonEffects):
    def __init__(
        self, store: ReplicatedIdempotencyStore, address: str, hook: Hook, wait_s: float = 0.0, join_s: float = 0.0
    ) -> None:
        super().__init__(Told(store, "store", hook, _STORE), address, wait_s=wait_s, join_s=join_s)
        self._hook = hook

    def acquire(self, min_vram_bytes: int, ttl_s: float) -> GpuLease:
        self._hook("acquire")
        return Told(super().acquire(min_vram_bytes, ttl_s), "lease", self._hook, frozenset({"free"}))  # type: ignore[return-value]

    def open(self, lease: GpuLease, grant: Grant | None = None) -> GpuSession:
        self._hook("open")
        return Told(super().open(lease, grant), "owner", self._hook, _SESSION)  # type: ignore[return-value]

    def use_grant(self, owner: GpuSession) -> GpuSession | None:
        self._hook("use_grant")
        guest = super().use_grant(owner)
        return None if guest is None else owner._renamed("guest")  # type: ignore[attr-defined]

    def use_own(self, owner: GpuSession) -> None:
        self._hook("use_own")
        super().use_own(owner)

    def attach(self, grant: Grant, lease: GpuLease) -> GpuSession:
        self._hook("attach")
        return Told(super().attach(grant, lease), "guest", self._hook, _SESSION)  # type: ignore[return-value]


class ToldAuthority(NodeAuthority):
    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        self._hook("issue")
        return super().issue(lease, audience, ttl_s, nonce)

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        self._hook("check")
        super().check(grant, lease, now_unix_s)


def serve_told(
    store: ReplicatedIdempotencyStore, address: str, request: InferenceRequest, hook: Hook
) -> InferenceResponse:
    """Serve a request to the example model, and call the hook before every step."""
    effects = ToldEffects(store, address, hook)
    return serve_inference_request(effects, ToldAuthority(hook), request, AFFINE.read_bytes(), KERNEL)


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _step(name: str) -> None:
    _tell(f"step {name}")
    while os.read(0, 1) != b"\n":
        pass


def _serve(job: dict[str, Any]) -> None:
    def clock() -> Moment:
        now = host_clock()
        return Moment(now.clock_id, now.now_s + job["later_s"])

    store = SqliteStore(job["store"], clock=clock)
    try:
        wanted = request(job["request_id"], lease_ttl_secs=job["lease_s"])
        response = serve_told(store, job["address"], wanted, _step)
        _step("end")
        _tell(json.dumps({"output": response.output.hex(), "is_replayed": response.is_replayed}))
    except GpuLeaseError as error:
        _tell(json.dumps({"error": type(error).__name__, "message": str(error)}))
    store.close()


def main() -> None:
    while line := b"".join(iter(lambda: os.read(0, 1).replace(b"\n", b""), b"")):
        pid = os.fork()
        if pid == 0:
            _tell(f"pid {os.getpid()}")
            _serve(json.loads(line))
            os._exit(0)
        os.waitpid(pid, 0)
        _tell("ended")


if __name__ == "__main__":
    main()
