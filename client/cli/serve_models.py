"""`gpulease serve models`: a model server."""

import contextlib
from pathlib import Path

import click

from gpulease.client.cli.private_daemon import private_daemon, running_address
from gpulease.client.errors import InvalidRequest, Unsupported


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--listen", default="tcp:127.0.0.1:8081", show_default=True, help="HTTP: tcp:127.0.0.1:PORT or unix:PATH."
)
@click.option(
    "--host-name", "host_names", multiple=True, help="A further name in Host and Origin: a proxy's. Repeatable."
)
@click.option("--rpc", default="", help="Also calls through shared memory: unix:PATH.")
@click.option("--demo", is_flag=True, help="The example's models, and a daemon if none runs.")
def models(config: Path | None, listen: str, host_names: tuple[str, ...], rpc: str, demo: bool) -> None:
    """Serve the models of a TOML file, each on a lease that is kept.

    See the README and client/serve/models/model_settings.py for what the file says.
    """
    try:
        from gpulease.client.serve.http.uvicorn_server import known_hosts, listening, serve
        from gpulease.client.serve.models.model_server import ModelServer
    except ImportError as error:
        raise Unsupported(
            f"no model server: {error}", "Install it: pip install '.[serve]' in gpulease's repository"
        ) from None
    from gpulease.client.serve.models.host import STOP_LIMIT_S
    from gpulease.client.serve.models.model_settings import EXAMPLE, load_settings

    if config is None and not demo:
        raise click.UsageError("say which models with CONFIG, or try --demo")
    if rpc and not rpc.startswith("unix:"):
        raise InvalidRequest(f"--rpc {rpc}: memory is shared on one host alone", "Say unix:PATH")
    served = load_settings(config or EXAMPLE)
    with contextlib.ExitStack() as stack:
        address = running_address()
        if demo and address is None:
            click.echo("No daemon runs here: starting a private one on the embedded driver (no GPU needed).")
            address = stack.enter_context(private_daemon("cpu"))
        sock, url = stack.enter_context(listening(listen))
        known = known_hosts(sock, host_names)
        callers = stack.enter_context(listening(rpc))[0] if rpc else None
        app = ModelServer(served, address, callers).app()
        click.echo(f"models listen on {url}{f' and {rpc}' if rpc else ''}, serve {', '.join(served)}")
        serve(app, sock, known=known, stop_s=STOP_LIMIT_S)
    click.echo("models have stopped")
