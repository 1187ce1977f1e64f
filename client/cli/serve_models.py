"""`gpulease serve decode` with many models: opens their pool, serves, and applies changed settings on SIGHUP."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpulease.client.cli.settings_reload import SettingsReload, check_kind, log
from gpulease.client.decode import DecoderObserver

if TYPE_CHECKING:
    # These imports need the extra `serve`. If it is missing, the command's error names the extra to install.
    from gpulease.client.decode.openai.decode_settings import DecodeSettings
    from gpulease.client.decode.supervisor.model_pool import ModelPool
    from gpulease.protocol.http_origin import KnownHosts

STOP_POLL_S: Final = 0.2
"""Seconds between two checks for a stop of the server. Once it stops, requests that wait for a model are refused."""


async def serve_models(
    settings: "DecodeSettings",
    path: Path,
    sock: socket.socket,
    url: str,
    hosts: "KnownHosts",
    host_names: Sequence[str] = (),
    stop_s: float = 30.0,
) -> None:
    """Open the pool, and serve until a signal. The leases end with this call.

    Args:
        settings: The settings.
        path: The settings file, which is read again on SIGHUP.
        sock: The listening socket.
        url: The socket's URL.
        hosts: The host names that the server answers to.
        host_names: Further names of the server.
        stop_s: Seconds for a stopping server to finish the answers that it has started.
    """
    from gpulease.client.decode.openai.fronts.front_messages import Welcome
    from gpulease.client.decode.openai.fronts.front_server import fronts
    from gpulease.client.decode.openai.openai_server import make_pool_application, refuse
    from gpulease.client.decode.openai.pool_metrics import PoolMetrics
    from gpulease.client.decode.openai.served_models import ManyModels
    from gpulease.client.decode.page.decode_page import DecodePage
    from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
    from gpulease.client.decode.supervisor.model_pool import ModelPool
    from gpulease.client.http.uvicorn_server import serve_within

    assert settings.pool is not None
    serving: list[ModelPool] = []
    tenants = [tenant.id for tenant in settings.tenants]

    def pool_now() -> ModelPool | None:
        return next(iter(serving), None)

    if settings.operator_digest is None:
        metrics, page = PoolMetrics(tenants, pool_now), None
    else:
        page = DecodePage(lambda: None, settings.operator_digest, "many models", settings.keys, pool=pool_now)
        metrics = PoolMetrics(tenants, pool_now, page.observer.on_gap)

    def observers(model: str) -> list[DecoderObserver]:
        return [metrics.observer(model), *([] if page is None else [page.observer])]

    pool = ModelPool(
        settings.models,
        settings.pool.limits(),
        address=settings.address,
        observers=observers,
        is_audited=settings.audit,
    )
    # Handle SIGHUP before the models are read, which takes seconds for each.
    tasks = BackgroundTasks()
    reloading = SettingsReload(path, tasks)
    async with pool.serving(), contextlib.AsyncExitStack() as stack:
        # From here on, page and metrics have a pool.
        serving.append(pool)
        models = ManyModels(pool, settings.tenants, settings.pool.load_wait_s)
        app = make_pool_application(
            pool,
            models,
            settings.keys,
            routes=[] if page is None else page.routes(),
            metrics=metrics.text,
            # Fronts answer browsers themselves, so requests that they pass on need no origins here.
            cors_origins=() if settings.http_processes else settings.cors_origins,
        )
        if settings.http_processes:
            # Fronts accept the connections. This process serves the requests that they pass on, at a separate socket.
            welcome = Welcome("", settings.keys.digests, tuple(host_names), settings.cors_origins, stop_s)
            sock = await stack.enter_async_context(fronts(settings.http_processes, sock, models, welcome))
        click.echo(f"decode listens on {url}, serves {', '.join(settings.models)} to {', '.join(tenants)}")
        servers: list[Any] = []

        async def drain_with_server() -> None:
            while not (servers and servers[0].should_exit):  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(STOP_POLL_S)
            pool.drain()

        stack.push_async_callback(tasks.stop)
        tasks.start(drain_with_server())
        stack.callback(reloading.close)
        reloading.begin(pool_reload(pool, path, settings))
        await serve_within(app, sock, hosts=hosts, stop_s=stop_s, began=servers.append, refuse=refuse)
        # Drain here, too: streams that fronts have open would otherwise wait for models until their own limit.
        pool.drain()


def pool_reload(
    pool: "ModelPool", path: Path, settings: "DecodeSettings"
) -> "Callable[[DecodeSettings], Awaitable[str]]":
    """Return a function that applies the models of a settings file to a pool, for `SettingsReload`."""

    async def apply(reloaded: "DecodeSettings") -> str:
        check_kind(path, reloaded, settings)
        if reloaded.keys.digests != settings.keys.digests or reloaded.pool != settings.pool:
            log.warning("%s: changes of [pool] and of the tenants' keys need a restart", path)
        await pool.change(reloaded.models)
        return ", ".join(reloaded.models)

    return apply
