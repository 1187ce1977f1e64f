"""A server of several tiny models, on a daemon that parks leases."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn

from gpulease.client.decode import TINY_MODEL, DecoderSettings, TenantConfig, open_model
from gpulease.client.decode.openai.api_keys import distinct_keys, key_digest
from gpulease.client.decode.openai.fronts.front_messages import Welcome
from gpulease.client.decode.openai.fronts.front_server import fronts
from gpulease.client.decode.openai.openai_server import make_pool_application, refuse
from gpulease.client.decode.openai.pool_metrics import PoolMetrics
from gpulease.client.decode.openai.served_models import ManyModels
from gpulease.client.decode.page.decode_page import DecodePage
from gpulease.client.decode.scheduler.model_residency import ResidencyLimits
from gpulease.client.decode.supervisor.decoder import engine_bytes
from gpulease.client.decode.supervisor.model_pool import ModelPool, ModelSpec
from gpulease.client.http.uvicorn_server import known_hosts, listening, serve_within
from helpers.decode.server_thread import served_in_thread

PARKING: Final = """
[limits]
park_memory = "2GiB"
overcommit = 16.0
park_stay_ms = 0
parks_per_minute = 10000
"""
"""Settings of a daemon that parks leases as often as a test needs."""

SETTINGS: Final = DecoderSettings(max_rows=8, prefill_rows=8, max_sequences=4, positions=96, text_processes=1)
ANN, BOB = TenantConfig("ann", 2, 12), TenantConfig("bob", 2, 12)


def model_bytes(path: Path = TINY_MODEL, tenants: Sequence[TenantConfig] = (ANN, BOB)) -> int:
    """Return the bytes of a model's lease."""
    return engine_bytes(open_model(path), tenants, SETTINGS)


def spec(path: Path, tenants: Sequence[TenantConfig] = (ANN, BOB), **options: Any) -> ModelSpec:
    return ModelSpec(path, tuple(tenants), SETTINGS, **options)


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


class PoolRig:
    """A running server.

    Attributes:
        url: The server's URL.
        pool: Its pool. Only the server's event loop may access it.
    """

    def __init__(self, url: str, pool: ModelPool, models: ManyModels, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.pool, self.models, self._loop = url, pool, models, loop

    def http(self, tenant: str = "ann") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=600, verify=False)

    def complete(self, model: str, tenant: str = "ann", **body: Any) -> dict[str, Any]:
        """Return a completion's reply. Fails if the request fails."""
        with self.http(tenant) as http:
            reply = http.post("/v1/completions", json=asked(model, **body))
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

    def text(self, model: str, tenant: str = "ann", **body: Any) -> str:
        return str(self.complete(model, tenant, **body)["choices"][0]["text"])

    def do(self, act: Callable[[], Any]) -> Any:
        async def done() -> Any:
            return act()

        return self.wait_for(done())

    def wait_for(self, part: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(part, self._loop).result(60)

    def state(self, model: str) -> str:
        return str(self.do(lambda: self.pool.state_of(model)))


def asked(model: str, **body: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "Changed in version", "max_tokens": 12, "temperature": 0.7, "seed": 3} | body


@contextmanager
def pool_rig(
    address: str,
    specs: Mapping[str, ModelSpec],
    limits: ResidencyLimits,
    load_wait_s: float = 500.0,
    http_processes: int = 0,
    *,
    tenants: Sequence[TenantConfig] = (ANN, BOB),
    is_audited: bool = False,
) -> Iterator[PoolRig]:
    rigs: list[PoolRig] = []

    async def run(began: Callable[[uvicorn.Server], None]) -> None:
        keys = distinct_keys({tenant.id: key_digest(key_of(tenant.id)) for tenant in tenants})
        serving: list[ModelPool] = []
        operator = key_digest(key_of("operator"))
        page = DecodePage(lambda: None, operator, "many models", keys, pool=lambda: next(iter(serving), None))
        names = [tenant.id for tenant in tenants]
        metrics = PoolMetrics(names, lambda: next(iter(serving), None), page.observer.on_gap)
        pool = ModelPool(
            specs,
            limits,
            address=address,
            observers=lambda model: [metrics.observer(model), page.observer],
            is_audited=is_audited,
        )
        with listening("tcp:127.0.0.1:0") as (sock, url):
            async with pool.serving(), AsyncExitStack() as stack:
                serving.append(pool)
                models = ManyModels(pool, tenants, load_wait_s)
                app = make_pool_application(pool, models, keys, routes=page.routes(), metrics=metrics.text)
                rigs.append(PoolRig(url, pool, models, asyncio.get_running_loop()))

                known = known_hosts(sock, ())
                if http_processes:
                    welcome = Welcome("", keys.digests, (), (), 5.0)
                    sock = await stack.enter_async_context(fronts(http_processes, sock, models, welcome))
                await serve_within(app, sock, hosts=known, stop_s=5, began=began, refuse=refuse)

    with served_in_thread(run, stop_limit_s=100):
        yield rigs[0]


def events_of(lines: Iterator[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a stream's objects, and its comments."""
    objects, comments = [], []
    for line in lines:
        if line.startswith(":"):
            comments.append(line)
        elif line.startswith("data: ") and line != "data: [DONE]":
            objects.append(json.loads(line.removeprefix("data: ")))
    return objects, comments
