"""A gateway in the test's process that reports its steps."""

from gpulease.client.serve.gateway import (
    Authority,
    InferenceKernel,
    InferenceRequest,
    InferenceResponse,
    NodeAuthority,
    SqliteStore,
    serve_inference_request,
)
from helpers.daemon import Daemon
from helpers.gateway_steps import AFFINE, KERNEL, ToldEffects


class Gateway:
    """Serves requests to the example model, and counts the launches."""

    def __init__(self, daemon: Daemon, store: SqliteStore) -> None:
        self.daemon, self.store = daemon, store
        self.steps: list[str] = []

    def serve(
        self,
        asked: InferenceRequest,
        authority: Authority | None = None,
        image: bytes = AFFINE.read_bytes(),
        kernel: InferenceKernel = KERNEL,
        **waits: float,
    ) -> InferenceResponse:
        effects = ToldEffects(self.store, self.daemon.address, self.steps.append, **waits)
        return serve_inference_request(effects, authority or NodeAuthority(), asked, image, kernel)

    @property
    def launches(self) -> int:
        return self.steps.count("guest.launch")
