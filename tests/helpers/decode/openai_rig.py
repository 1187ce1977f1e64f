"""A decode server with the tiny model, in a thread. Tests call it over a real socket, with OpenAI's client."""

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
    """A running server.

    Attributes:
        url: The server's URL.
        decoder: Its decoder. Only the server's event loop may access it.
    """

    def __init__(self, url: str, decoder: Decoder, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.decoder, self._loop = url, decoder, loop

    def client(self, tenant: str = "ann", **options: Any) -> openai.OpenAI:
        """Return a tenant's OpenAI client, which does not retry failed requests."""
        # Import it here: every test process imports this file, and the client's import takes half a second.
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
        """Run a coroutine in the server's event loop, and return its result."""
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
                # The checks for browsers come before the requests that a front passes on.
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
