"""`gpulease serve decode`: serve a language model to many tenants, with OpenAI's API."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpulease.client.cli.decode import EMBEDDED_DRIVER, model_at_hand
from gpulease.client.cli.serve_models import serve_models
from gpulease.client.cli.settings_reload import SettingsReload, check_kind, log
from gpulease.client.console.exit_status import needing
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import (
    Decoder,
    DecoderObserver,
    DecoderSettings,
    TenantConfig,
    open_model,
)
from gpulease.client.decode.page.demo_traffic import DemoTraffic
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    # These imports need the extra `serve`. If it is missing, the command's error names the extra to install.
    from gpulease.client.decode.openai.decode_settings import DecodeSettings
    from gpulease.protocol.http_origin import KnownHosts

STOP_LIMIT_S: Final = 30.0
"""Longest time for a stopping server to finish the answers that it has started, in seconds."""

DEMO_TENANTS: Final = ("ann", "bob", "cem", "dee")
DEMO_POSITIONS: Final = 512
"""Maximum number of positions of a demonstration's sequence: a region for a few such sequences fits any card."""

DEMO_SEQUENCES: Final = 4
"""Maximum number of live sequences of a demonstration's tenant."""

DEMO_ROWS: Final = 16
"""Number of rows in a demonstration's step: more would need kernels that the embedded driver compiles for seconds."""


host_name_option = click.option(
    "--host-name",
    "host_names",
    multiple=True,
    help="A further host name that requests may have in Host and Origin, such as a proxy's. Repeatable.",
)


@click.command("decode", short_help="Serve a language model to many tenants, with OpenAI's API.")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--listen",
    help="The address to listen on: tcp:127.0.0.1:PORT or unix:PATH. By default, the address in CONFIG, or port 8082.",
)
@host_name_option
@click.option(
    "--demo",
    is_flag=True,
    help="Use an installed model and four example tenants, and start a daemon if none is running.",
)
def serve_decode(config: Path | None, listen: str | None, host_names: tuple[str, ...], demo: bool) -> None:
    """Serve the language models of a TOML file to the tenants that it lists, with OpenAI's API.

    See client/decode/openai/example/decode.toml for the file's settings.
    """
    # First import the modules that need the extras, so that an error names the extras if they are missing.
    with needing("serve,decode"):
        from gpulease.client.decode.openai.decode_settings import DEFAULT_LISTEN, load_decode_settings
        from gpulease.client.http.uvicorn_server import known_hosts, listening, log_to_stderr
    if (config is None) is not demo:
        raise click.UsageError("give CONFIG, or use --demo")
    # Loading a model writes log lines, too.
    log_to_stderr()
    # Open the socket before the model is loaded, so that a taken port is reported at once.
    with contextlib.ExitStack() as stack:
        settings = None if config is None else load_decode_settings(config)
        sock, url = stack.enter_context(listening(listen or (settings.listen if settings else DEFAULT_LISTEN)))
        hosts = known_hosts(sock, host_names, settings.cors_origins if settings else ())
        demo_keys = None
        if settings is None:
            settings, demo_keys = _demo_settings(stack)
        if settings.models and config is not None:
            asyncio.run(serve_models(settings, config, sock, url, hosts, host_names, STOP_LIMIT_S))
        else:
            asyncio.run(_serve(settings, sock, url, hosts, demo_keys, host_names=host_names, path=config))
    click.echo("decode has stopped")


@dataclass(frozen=True, slots=True)
class _DemoKeys:
    """Keys that a demonstration prints: the first tenant's and the operator's."""

    tenant: str
    operator: str


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run some work concurrently with the block, and cancel it when the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _serve(
    settings: "DecodeSettings",
    sock: socket.socket,
    url: str,
    hosts: "KnownHosts",
    demo: "_DemoKeys | None",
    observers: Sequence[DecoderObserver] = (),
    host_names: Sequence[str] = (),
    path: Path | None = None,
) -> None:
    """Open the decoder, and serve until a signal; the lease ends with this call. `path` is the settings' file."""
    from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
    from gpulease.client.decode.openai.openai_server import make_openai_application, refuse
    from gpulease.client.decode.page.decode_page import DecodePage
    from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
    from gpulease.client.decode.supervisor.decode_audit import DecodeAudit
    from gpulease.client.decode.supervisor.decoder import positions_of
    from gpulease.client.decode.text.named_prefixes import shared_prefixes
    from gpulease.client.http.uvicorn_server import serve_within

    serving: list[Decoder] = []
    traffic: list[DemoTraffic] = []
    names = [tenant.id for tenant in settings.tenants]

    # Page and metrics exist before the decoder, so they call this when they need it.
    def decoder_now() -> Decoder | None:
        return next(iter(serving), None)

    # Collect the observers of every step: the metrics, the page if an operator has a key, the audit records.
    if settings.operator_digest is None:
        metrics, routes = DecodeMetrics(names, decoder_now), []
        observers = [*observers, metrics]
    else:
        digest, keys = settings.operator_digest, settings.keys
        page = DecodePage(decoder_now, digest, settings.name, keys, lambda: next(iter(traffic), None))
        metrics, routes = DecodeMetrics(names, decoder_now, on_gap=page.observer.on_gap), page.routes()
        observers = [*observers, metrics, page.observer]
    # Handle signals to reload before the model is loaded, which takes minutes.
    tasks = BackgroundTasks()
    reloading = None if path is None else SettingsReload(path, tasks)
    checkpoint = open_model(settings.model)
    click.echo(f"The model is {checkpoint.name}. Loading it ...")
    # Read the prefixes before the engine opens, because the lease must have room for them.
    tokenizer = checkpoint.tokenizer() if settings.prefixes else None
    positions = positions_of(checkpoint, settings.decoder)
    prefixes = () if tokenizer is None else shared_prefixes(settings.prefixes, tokenizer, positions)
    audit = None
    if settings.audit:
        audit = await DecodeAudit.of(checkpoint, packed=settings.decoder.packed, kv_dtype=settings.decoder.kv_dtype)
    if audit is not None:
        observers = [*observers, audit]
    opened = Decoder.open(
        checkpoint,
        settings.tenants,
        settings.decoder,
        address=settings.address,
        observers=observers,
        prefixes=prefixes,
        tokenizer=tokenizer,
    )
    async with opened as decoder, contextlib.AsyncExitStack() as stack:
        serving.append(decoder)
        if audit is not None:
            await stack.enter_async_context(audit.writing(lambda: decoder.engine.lease))
        app = make_openai_application(
            decoder,
            settings.keys,
            settings.name,
            wait_s=settings.wait_s,
            chat_tokens=settings.chat_tokens,
            routes=routes,
            # Fronts answer browsers themselves, so requests that they pass on need no origins here.
            cors_origins=() if settings.http_processes else settings.cors_origins,
            aliases=settings.aliases,
            metrics=metrics.text,
            health=lambda: {"steps": decoder.steps, "rebinds": decoder.rebinds, "moves": decoder.moves.count},
        )
        # Start the processes that read prompts now, so that the first request need not wait for them.
        await decoder.prompts.start()
        if settings.http_processes:
            # Fronts accept the connections. This process serves the requests that they pass on, at a separate socket.
            sock = await stack.enter_async_context(_fronted(settings, decoder, sock, host_names))
        click.echo(f"decode listens on {url}, serves {settings.name} to {', '.join(names)}")
        # A demonstration prints what to try, and sends requests by itself.
        if demo is not None:
            click.echo(_hint(url, demo.tenant))
            click.echo(f"Watch: {url}/#key={demo.operator}")
            traffic.append(DemoTraffic(decoder, names))
            await stack.enter_async_context(_in_background(traffic[0].run()))
        if reloading is not None and path is not None:
            stack.push_async_callback(tasks.stop)
            stack.callback(reloading.close)
            reloading.begin(prefixes_reload(decoder, positions, path, settings))
        servers: list[Any] = []

        # If the decoder ends, stop the server, which could only refuse requests.
        async def stop_with_decoder() -> None:
            await decoder.wait_ended()
            servers[0].should_exit = True

        async with _in_background(stop_with_decoder()):
            await serve_within(app, sock, hosts=hosts, stop_s=STOP_LIMIT_S, began=servers.append, refuse=refuse)
        # If the decoder ended on its own, this raises the reason, and the service's unit restarts the process.
        decoder.check_alive()


def prefixes_reload(
    decoder: Decoder, positions: int, path: Path, settings: "DecodeSettings"
) -> "Callable[[DecodeSettings], Awaitable[str]]":
    """Return the function with which `SettingsReload` applies a settings file's shared prefixes to a decoder.

    `positions` is the decoder's number of positions per sequence.
    """
    from gpulease.client.decode.supervisor.model_texts import read_model_texts

    shared = settings.prefixes

    async def apply(reloaded: "DecodeSettings") -> str:
        nonlocal shared
        check_kind(path, reloaded, settings)
        # Compare the keys by their digests, because keys define no comparison.
        others = replace(reloaded, prefixes=settings.prefixes, keys=settings.keys)
        if others != settings or reloaded.keys.digests != settings.keys.digests:
            log.warning(
                "%s: for a server with one model, only [prefixes] is read again; all other settings need a restart",
                path,
            )
        if reloaded.prefixes != shared:
            texts = await asyncio.to_thread(read_model_texts, settings.model, reloaded.prefixes, positions)
            await decoder.share(texts.prefixes)
            shared = reloaded.prefixes
        return f"prefixes {', '.join(prefix.name for prefix in shared)}" if shared else "no prefixes"

    return apply


def _fronted(
    settings: "DecodeSettings", decoder: Decoder, sock: socket.socket, host_names: Sequence[str]
) -> contextlib.AbstractAsyncContextManager[socket.socket]:
    """Let front processes serve HTTP until the block ends. Yields the socket to which they pass requests."""
    from gpulease.client.decode.openai.completion_intake import DecoderSource
    from gpulease.client.decode.openai.fronts.front_messages import Welcome
    from gpulease.client.decode.openai.fronts.front_server import fronts
    from gpulease.client.decode.openai.served_models import OneModel

    source = DecoderSource(decoder, settings.name, settings.wait_s, settings.chat_tokens, settings.aliases)
    path = str(settings.model.resolve())
    welcome = Welcome(
        model_path=path,
        tenant_keys=settings.keys.digests,
        host_names=tuple(host_names),
        cors_origins=settings.cors_origins,
        stop_s=STOP_LIMIT_S,
    )
    return fronts(settings.http_processes, sock, OneModel(decoder, source, path), welcome)


def _demo_settings(stack: contextlib.ExitStack) -> "tuple[DecodeSettings, _DemoKeys]":
    """A demonstration's settings and keys; starts a private daemon if none is running."""
    from gpulease.client.decode.openai.api_keys import distinct_keys, key_digest
    from gpulease.client.decode.openai.decode_settings import (
        DEFAULT_CHAT_TOKENS,
        DEFAULT_LISTEN,
        DEFAULT_WAIT_S,
        DecodeSettings,
    )
    from gpulease.client.decode.row_records import PAGE

    address = running_address()
    if address is None:
        click.echo("No daemon runs here: starting a private one on the embedded driver (no GPU needed).")
        address = stack.enter_context(private_daemon(EMBEDDED_DRIVER))
    model, reason = model_at_hand(address)
    click.echo(f"The demonstration's model is {model.stem}: {reason.partition('. ')[0]}.")
    # As many positions as a small region holds.
    positions = min(open_model(model).config.context, DEMO_POSITIONS)
    blocks = DEMO_SEQUENCES * -(-positions // PAGE)
    # Make keys for this run only; they are printed once and stored nowhere.
    keys = {tenant: secrets.token_hex(16) for tenant in DEMO_TENANTS}
    for tenant, key in keys.items():
        click.echo(f"Key of {tenant}: {key}")
    operator = secrets.token_hex(16)
    decoder = replace(DecoderSettings(DEMO_ROWS, DEMO_ROWS, DEMO_ROWS), positions=positions)
    settings = DecodeSettings(
        model=model,
        name=model.stem,
        listen=DEFAULT_LISTEN,
        address=address,
        cors_origins=(),
        audit=False,
        decoder=decoder,
        wait_s=DEFAULT_WAIT_S,
        chat_tokens=DEFAULT_CHAT_TOKENS,
        tenants=tuple(TenantConfig(tenant, DEMO_SEQUENCES, blocks) for tenant in DEMO_TENANTS),
        keys=distinct_keys({tenant: key_digest(key) for tenant, key in keys.items()}),
        operator_digest=key_digest(operator),
    )
    return settings, _DemoKeys(keys[DEMO_TENANTS[0]], operator)


def _hint(url: str, key: str) -> str:
    """Return a command, ready to paste, that sends a request to the server."""
    target = f"{url}/v1/completions"
    # For a Unix socket, curl needs an option, and a host name, which may be any.
    if url.startswith("http+unix://"):
        target = f"--unix-socket {url.removeprefix('http+unix://')} http://localhost/v1/completions"
    request_json = '{"prompt": "Changed in version", "max_tokens": 24, "temperature": 0, "stream": true}'
    return f"Try: curl -N {target} -H 'Authorization: Bearer {key}' -d '{request_json}'"
