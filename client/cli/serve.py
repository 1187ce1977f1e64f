"""`gpulease serve`: servers that acquire leases for requests of others: a gateway, a model server, a decode server."""

import contextlib
import tempfile
from pathlib import Path

import click
from click.core import ParameterSource

from gpulease.client.cli.daemon_modules import FLEET, PASSES_ON, become_module, words_argument
from gpulease.client.cli.serve_decode import host_name_option, serve_decode
from gpulease.client.console.exit_status import needing
from gpulease.client.console.number_range import NumberRange
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.core.lease_request import MAX_WIRE_MS
from gpulease.client.errors import InvalidRequest

STOP_MARGIN_S = 10.0
"""How long a gateway may take to finish requests, in addition to the longest wait and the longest lease, in seconds."""

MAX_KEEP_HOURS = 24 * 366 * 100
"""A century. A larger number is a typing mistake."""

_POSITIVE = click.IntRange(min=1)
_SECONDS = NumberRange(min=0, max=MAX_WIRE_MS // 1000)


@click.group()
def serve() -> None:
    """Run servers on leases: a gateway, a model server, a decode server; a fleet's directory."""


serve.add_command(serve_decode)

DIRECTORY_MODULE = "gpulease.daemon.fleet.directory"


@serve.command("directory", short_help="Run a fleet's directory, which lists nodes with room for tenants.", **PASSES_ON)
@words_argument
def directory(words: tuple[str, ...]) -> None:
    """Run a fleet's directory, which lists nodes with room for tenants. See `gpulease serve directory -h`."""
    become_module(DIRECTORY_MODULE, words, FLEET)


@serve.command(help="Serve each HTTP request on a lease of its own; a repeated request runs once.")
@click.option(
    "--models", type=click.Path(path_type=Path), help="A TOML file of models; client/serve/README.md describes it."
)
@click.option(
    "--listen",
    default="tcp:127.0.0.1:8080",
    show_default=True,
    help="The address to listen on: tcp:127.0.0.1:PORT or unix:PATH.",
)
@host_name_option
@click.option(
    "--store",
    "store_url",
    default="sqlite:gateway.sqlite",
    show_default=True,
    help="Where requests and outcomes are stored: sqlite:PATH or postgresql://...",
)
@click.option(
    "--max-in-flight",
    type=_POSITIVE,
    default=4,
    show_default=True,
    help="Maximum number of requests that are served at the same time.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Maximum number of further requests that wait.",
)
@click.option(
    "--queue-secs", type=_SECONDS, default=10, show_default=True, help="How long a request may wait for its lease."
)
@click.option(
    "--join-secs",
    type=_SECONDS,
    default=5,
    show_default=True,
    help="How long a repeated request waits for the outcome of the first attempt.",
)
@click.option(
    "--body-secs",
    type=_SECONDS,
    default=10,
    show_default=True,
    help="How long the body of a request may take to arrive.",
)
@click.option(
    "--keep-hours",
    type=NumberRange(min=2, max=MAX_KEEP_HOURS),
    default=24,
    show_default=True,
    help="How long the outcomes of requests are kept.",
)
@click.option(
    "--attach-by-token",
    is_flag=True,
    help='Open sessions with a token, for a daemon with require_token = ["attach"].',
)
@click.option(
    "--demo", is_flag=True, help="Use the example model and a private store, and start a daemon if none is running."
)
@click.pass_context
def gateway(
    ctx: click.Context,
    models: Path | None,
    listen: str,
    host_names: tuple[str, ...],
    store_url: str,
    max_in_flight: int,
    max_queue: int,
    queue_secs: float,
    join_secs: float,
    body_secs: float,
    keep_hours: float,
    attach_by_token: bool,
    demo: bool,
) -> None:
    """Serve each request on a separate lease, and only once, even if it is repeated."""
    # First import the modules that need the extra, so that the error names the extra if it is missing.
    with needing("serve"):
        from gpulease.client.http.uvicorn_server import known_hosts, listening, serve
        from gpulease.client.serve.gateway.admission import GatewayBounds
        from gpulease.client.serve.gateway.gateway import Gateway
    from gpulease.client.core.spare_connections import SpareConnections
    from gpulease.client.serve.gateway.attempt import DaemonEffects, NodeAuthority
    from gpulease.client.serve.gateway.settings import EXAMPLE, load_models
    from gpulease.client.serve.gateway.store import open_store

    if models is None and not demo:
        raise click.UsageError("give the models with --models FILE, or use --demo")
    if demo and ctx.get_parameter_source("store_url") is ParameterSource.COMMANDLINE:
        raise click.UsageError("leave out --store: --demo uses a private store, and deletes it at the end")
    served = load_models(models or EXAMPLE)
    bounds = GatewayBounds(max_in_flight, max_queue, queue_secs, body_secs, join_secs, keep_hours * 3600)
    with contextlib.ExitStack() as stack:
        address = _daemon_address(stack, is_demo=demo)
        # Do not keep a demonstration's outcomes.
        if demo:
            store_url = f"sqlite:{stack.enter_context(tempfile.TemporaryDirectory())}/gateway.sqlite"
        # Listen before the store is opened, because a port that is taken is the most common mistake.
        sock, url = stack.enter_context(listening(listen))
        hosts = known_hosts(sock, host_names)
        store = stack.enter_context(contextlib.closing(open_store(store_url)))
        spare = stack.enter_context(contextlib.closing(SpareConnections()))
        app = Gateway(
            served,
            lambda wait_s, join_s: DaemonEffects(
                store, address, wait_s=wait_s, join_s=join_s, by_token=attach_by_token, spare=spare
            ),
            NodeAuthority(),
            store,
            bounds,
        ).app()
        click.echo(f"gateway listens on {url}, serves {', '.join(served)}")
        # A stop waits for the admitted requests: the longest queue, retry, and lease.
        longest_s = max(model.lease_s for model in served.values())
        serve(app, sock, hosts=hosts, stop_s=queue_secs + join_secs + longest_s + STOP_MARGIN_S)
    click.echo("gateway has stopped")


@serve.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--listen",
    default="tcp:127.0.0.1:8081",
    show_default=True,
    help="The address to listen on: tcp:127.0.0.1:PORT or unix:PATH.",
)
@host_name_option
@click.option("--rpc", default="", help="Also serve calls through shared memory at this address: unix:PATH.")
@click.option("--demo", is_flag=True, help="Use the example's models, and start a daemon if none is running.")
def models(config: Path | None, listen: str, host_names: tuple[str, ...], rpc: str, demo: bool) -> None:
    """Serve the models of a TOML file, each on a permanent lease.

    client/serve/README.md describes the file.
    """
    with needing("serve"):
        from gpulease.client.http.uvicorn_server import known_hosts, listening, serve
        from gpulease.client.serve.models.model_server import ModelServer
    from gpulease.client.serve.models.host import STOP_LIMIT_S
    from gpulease.client.serve.models.model_settings import EXAMPLE, load_settings

    if config is None and not demo:
        raise click.UsageError("give the models with CONFIG, or use --demo")
    if rpc and not rpc.startswith("unix:"):
        raise InvalidRequest(
            f"--rpc must be unix:PATH, not {rpc}: memory can only be shared on one host", "Use unix:PATH"
        )
    served = load_settings(config or EXAMPLE)
    with contextlib.ExitStack() as stack:
        address = _daemon_address(stack, is_demo=demo)
        # Open one listener for HTTP, and one for calls through shared memory.
        sock, url = stack.enter_context(listening(listen))
        hosts = known_hosts(sock, host_names)
        callers = stack.enter_context(listening(rpc))[0] if rpc else None
        app = ModelServer(served, address, callers).app()
        click.echo(f"models listen on {url}{f' and {rpc}' if rpc else ''}, serve {', '.join(served)}")
        serve(app, sock, hosts=hosts, stop_s=STOP_LIMIT_S)
    click.echo("models have stopped")


def _daemon_address(stack: contextlib.ExitStack, *, is_demo: bool) -> str | None:
    """The running daemon's address. If none runs: a private daemon's for a demonstration, otherwise None."""
    address = running_address()
    if address is None and is_demo:
        click.echo("No daemon runs here: starting a private one on the embedded driver (no GPU needed).")
        address = stack.enter_context(private_daemon("cpu"))
    return address
