"""A model with a kernel that obeys commands in its input, served in the test's own event loop."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from gpulease.client.serve.models import ModelHost, ModelServerMetrics, ModelSettings
from gpulease.client.serve.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode
from helpers.daemon import Daemon

KERNELS: Final = (Path(__file__).parents[1] / "client" / "serve" / "models" / "kernels.ptx").read_bytes()
FACTOR: Final = 3

STRAY, ENDLESS, SLOW = 1, 2, 3
"""Commands in an input, in addition to the computation."""

SLOW_STEPS: Final = 40_000_000
"""Iterations of the command SLOW. They take at least some hundredths of a second on the embedded driver."""

PATIENCE_S: Final = 120.0


def obey(name: str = "obey", **changes: Any) -> ModelSettings:
    """Return the model's settings with the test's changes."""
    usual: dict[str, Any] = {
        "method_id": 1,
        "module": KERNELS,
        "kernel": "obey",
        "weights": struct.pack("<I", FACTOR),
        "input_bytes": 8,
        "output_bytes": 4,
        "min_vram_bytes": 1 << 20,
        "threads_per_block": 1,
        "max_batch": 8,
        "deadline_ms": PATIENCE_S * 1000,
    }
    return ModelSettings(name=name, **usual | changes)


def item(value: int, what: int = 0) -> bytes:
    return struct.pack("<II", what, value)


def right(*values: int, method_id: int = 1) -> Answer:
    """Return the correct answer for these values."""
    return Answer(method_id, struct.pack(f"<{len(values)}I", *(value * FACTOR + 1 for value in values)))


def code_of(outcome: Outcome) -> CallErrorCode:
    """Return the code of an outcome that must be an error with a text."""
    assert isinstance(outcome, CallError), outcome
    assert outcome.text
    return outcome.code


class ModelRig:
    def __init__(self, address: str, *models: ModelSettings) -> None:
        self.metrics = ModelServerMetrics()
        self.host = ModelHost({model.name: model for model in models}, address, self.metrics)

    async def ask(self, payload: bytes, name: str = "obey", deadline_s: float | None = None) -> Outcome:
        return await asyncio.wait_for(self.host.submit(name, payload, deadline_s), PATIENCE_S)

    def lease_id(self, name: str = "obey") -> int:
        """Return the model's lease; 0 if it has none."""
        return int(str(self.host.state()[name]["lease_id"]) or "0", 16)

    async def leased(self, name: str = "obey") -> int:
        """Wait until the model has a lease, and return its id."""
        await until(lambda: self.lease_id(name))
        return self.lease_id(name)

    def counted(self, metric: str, name: str = "obey", **labels: str) -> float:
        self.host.count_lease_time()
        found = self.metrics.registry.get_sample_value(metric, {"model": name} | labels)
        return 0.0 if found is None else found


async def until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in another process
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(daemon: Daemon, *models: ModelSettings) -> AsyncIterator[ModelRig]:
    rig = ModelRig(daemon.address, *models)
    async with rig.host:
        yield rig
