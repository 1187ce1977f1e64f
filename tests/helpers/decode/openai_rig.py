"""A decode server on the tiny model, in a thread, called over a real socket by the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import uvicorn

from gpulease.client.decode import TINY_MODEL, Decoder, DecoderObserver, DecoderSettings, TenantConfig
from gpulease.client.decode.openai.api_keys import distinct_keys, key_digest
from gpulease.client.decode.openai.completion_intake import DecoderSource
from gpulease.client.decode.openai.fronts.front_messages import Welcome
from gpulease.client.decode.openai.fronts.front_server import fronts
from gpulease.client.decode.openai.openai_server import make_openai_application, refuse
from gpulease.client.decode.openai.served_models import OneModel
from gpulease.client.http.uvicorn_server import known_hosts, listening, serve_within
from helpers.daemon import Daemon
from helpers.decode.server_thread import served_in_thread

if TYPE_CHECKING:
    import openai

MODEL: Final = "tiny"
SETTINGS: Final = DecoderSettings(max_rows=8, prefill_rows=8, max_sequences=8, positions=160)
TENANTS: Final = (TenantConfig("ann", 4, 32), TenantConfig("bob", 1, 10, max_waiting=0), TenantConfig("eve", 1, 4))
CHAT_TOKENS: Final = 40


class OpenAiRig:
    """A server that runs.

    Attributes:
        url: Where it listens.
        decoder: Its decoder; only the server's loop may touch it.
    """

    def __init__(self, url: str, decoder: Decoder, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.decoder, self._loop = url, decoder, loop

    def client(self, tenant: str = "ann", **options: Any) -> openai.OpenAI:
        """A tenant's official client, which asks once."""
        # Here: every process of a run imports this file, and the client's import takes half a second.
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key_of(tenant), max_retries=0, timeout=60, **options)

    def http(self, tenant: str = "ann") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False)

    def do(self, act: Callable[[], Any]) -> Any:
        async def done() -> Any:
            return act()

        return self.wait_for(done())

    def wait_for(self, part: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine gives in the server's loop."""
        return asyncio.run_coroutine_threadsafe(part, self._loop).result(60)


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


@contextmanager
def openai_rig(
    daemon: Daemon,
    observers: Sequence[DecoderObserver] = (),
    wait_s: float = 0.2,
    http_processes: int = 0,
    model: Path = TINY_MODEL,
    cors: Sequence[str] = (),
    aliases: Sequence[str] = (),
    stop_s: int = 5,
    settings: DecoderSettings = SETTINGS,
    tenants: Sequence[TenantConfig] = TENANTS,
) -> Iterator[OpenAiRig]:
    rigs: list[OpenAiRig] = []

    async def run(began: Callable[[uvicorn.Server], None]) -> None:
        keys = distinct_keys({tenant.id: key_digest(key_of(tenant.id)) for tenant in tenants})
        with listening("tcp:127.0.0.1:0") as (sock, url):
            async with Decoder.open(model, tenants, settings, address=daemon.address, observers=observers) as decoder:
                # A front's own browsers' checks come before what it passes on.
                app = make_openai_application(
                    decoder,
                    keys,
                    MODEL,
                    wait_s=wait_s,
                    chat_tokens=CHAT_TOKENS,
                    cors_origins=() if http_processes else cors,
                    aliases=aliases,
                )
                await decoder.prompts.start()
                rigs.append(OpenAiRig(url, decoder, asyncio.get_running_loop()))

                async with AsyncExitStack() as stack:
                    known = known_hosts(sock, (), cors)
                    if http_processes:
                        source = DecoderSource(decoder, MODEL, wait_s, CHAT_TOKENS, aliases)
                        models = OneModel(decoder, source, str(model))
                        welcome = Welcome(str(model), keys.digests, (), tuple(cors), float(stop_s))
                        sock = await stack.enter_async_context(fronts(http_processes, sock, models, welcome))
                    await serve_within(app, sock, hosts=known, stop_s=stop_s, began=began, refuse=refuse)

    with served_in_thread(run, stop_limit_s=60):
        yield rigs[0]
