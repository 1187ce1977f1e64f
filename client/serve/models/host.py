"""Several models in one process: routes each request to a model, and ends all models together."""

import asyncio
import json
import logging
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from gpulease.client.serve.models.instance import Instance
from gpulease.client.serve.models.model_metrics import ModelMetrics, ModelServerMetrics
from gpulease.client.serve.models.model_settings import ModelSettings
from gpulease.client.serve.models.request_queue import WaitingRequest
from gpulease.client.serve.rpc import Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode

STOP_LIMIT_S: Final = 20.0
"""Longest time in seconds for all models to compute waiting requests and to free their leases. After that they are
cancelled."""

_log: Final = logging.getLogger("gpulease.models")


class ModelHost:
    """Serves models while its `async with` block lasts. At the end of the block, waiting requests are computed first.

    Args:
        models: The models, keyed by name.
        address: The daemon's address; None for the default one.
        metrics: The server's metrics.
    """

    def __init__(self, models: Mapping[str, ModelSettings], address: str | None, metrics: ModelServerMetrics) -> None:
        self.models, self._address, self._metrics = models, address, metrics
        # Callers through shared memory name models by number.
        self._names = {model.method_id: name for name, model in models.items()}
        self._instances: dict[str, Instance] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for name, model in self.models.items():
            # If a model has no room, it passes its requests to the smaller variant, which may pass them on.
            pass_on = partial(self._pass_on, model.smaller) if model.smaller else None
            self._instances[name] = Instance(model, self._address, ModelMetrics(self._metrics, name), pass_on)
        # Each model has a separate task, so that a model that waits for a lease does not delay other models.
        self._tasks = [asyncio.create_task(self._run(instance)) for instance in self._instances.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for instance in self._instances.values():
            # Ask all models to stop before waiting for any, so that they stop in parallel.
            instance.stop()
        # Let the models end by themselves, then cancel those that did not.
        await asyncio.wait(self._tasks, timeout=STOP_LIMIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def submit(self, name: str, payload: bytes, deadline_s: float | None = None) -> "asyncio.Future[Outcome]":
        """Submit items to a model, or to its smaller variant while the model has no room. See Instance.submit."""
        return self._instances[self._with_room(name)].submit(payload, deadline_s)

    def call(self, method_id: int, payload: bytes, deadline_s: float | None = None) -> "asyncio.Future[Outcome]":
        """Submit items to the model with this number, as the handler of an RpcServer."""
        name = self._names.get(method_id)
        if name is not None:
            return self.submit(name, payload, deadline_s)
        # The handler of an RpcServer must always return a future, even for an error.
        refused: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        refused.set_result(CallError(CallErrorCode.NO_SUCH_METHOD, f"no model has number {method_id}"))
        return refused

    def name_of(self, method_id: int) -> str:
        """Return the name of the model with this number. Raises KeyError."""
        return self._names[method_id]

    def description(self) -> dict[str, Any]:
        """Return a description of each model, by name, for callers."""
        return {name: _described(model) for name, model in self.models.items()}

    def describe(self) -> bytes:
        """Return the description of the models as JSON, the answer to DESCRIBE."""
        return json.dumps(self.description()).encode()

    def state(self) -> dict[str, Any]:
        """Return each model's lease, its queue, and the error that keeps it from having a lease."""
        return {
            name: {
                "lease_id": instance.lease_id_text,
                "waiting_items": instance.waiting_items,
                "trouble": str(instance.trouble or ""),
            }
            for name, instance in self._instances.items()
        }

    def count_lease_time(self) -> None:
        """Add to the metrics how long leases were held since the last call."""
        for instance in self._instances.values():
            instance.count_lease_time()

    def _with_room(self, name: str) -> str:
        # Follow the chain of smaller variants to the first one with room, or to its end.
        while self._instances[name].lacks_room and (smaller := self.models[name].smaller):
            name = smaller
        return name

    def _pass_on(self, smaller: str, requests: list[WaitingRequest]) -> None:
        # The smaller variant may lack room as well; then the next smaller one gets the requests.
        self._instances[self._with_room(smaller)].adopt(requests)

    async def _run(self, instance: Instance) -> None:
        while True:
            try:
                return await instance.run()
            except Exception:
                # A bug here must interrupt the model only briefly, not end it.
                _log.exception("%s: failed, and is restarted", instance.settings.name)
                await asyncio.sleep(1.0)


def _described(model: ModelSettings) -> dict[str, Any]:
    return {
        "method_id": model.method_id,
        "input_bytes": model.input_bytes,
        "output_bytes": model.output_bytes,
        "input_type": model.input_type,
        "output_type": model.output_type,
        "max_items": model.max_batch,
        "smaller": model.smaller,
    }
