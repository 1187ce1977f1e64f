"""`python -m gpulease.daemon.fleet.directory`: what `gpulease serve directory` runs."""

import asyncio
import contextlib
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import click

from gpulease.daemon.fleet.directory.directory_server import CannotServe, DirectoryServer
from gpulease.daemon.fleet.directory.fleet_placement import Order
from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd_options import etcd_options
from gpulease.daemon.host.processes import set_name
from gpulease.daemon.log.writer import flush_logs, go_on_logging
from gpulease.daemon.remote.node_identity import BadIdentity, IdentityFiles
from gpulease.protocol.address import Address, parse_address

EXIT_CANNOT_SERVE: Final = 1

_FILE: Final = click.Path(path_type=Path, dir_okay=False)


@click.command("directory", context_settings={"help_option_names": ["-h", "--help"]})
@etcd_options
@click.option("--listen", "listen", multiple=True, required=True, help="tls:HOST:PORT, unix:PATH, or tcp: of loopback.")
@click.option("--certificate", type=_FILE, help="This directory's certificate for tenants, with those up to its CA.")
@click.option("--key", type=_FILE, help="Its key.")
@click.option("--client-ca", type=_FILE, help="The CAs that tenants' certificates come from.")
@click.option("--crl", type=_FILE, help="Lists of revoked certificates, one for each of those CAs.")
@click.option("--operator", "operators", multiple=True, help="A tenant who sees everybody's names. Repeatable.")
@click.option(
    "--placement",
    type=click.Choice([order.value for order in Order]),
    default="pack",
    show_default=True,
    help="The fullest node that fits first, or the emptiest.",
)
@click.option(
    "--horizon-secs", type=click.FloatRange(min=1), default=30.0, show_default=True, help="The nodes' horizon_s."
)
def main(
    etcd: EtcdSettings,
    listen: tuple[str, ...],
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    crl: Path | None,
    operators: tuple[str, ...],
    placement: str,
    horizon_secs: float,
) -> None:
    """Tell the tenants of a fleet which nodes to ask. Two to five such processes serve a fleet."""
    try:
        addresses = [parse_address(text) for text in listen]
        files = None
        if certificate is not None or key is not None or client_ca is not None or crl is not None:
            if certificate is None or key is None or client_ca is None:
                raise ValueError("TLS needs all of --certificate, --key and --client-ca")
            files = IdentityFiles(certificate, key, client_ca, crl)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    set_name("gpul-directory")
    go_on_logging("directory")
    _raise_descriptor_limit()
    try:
        asyncio.run(_serve(etcd, addresses, files, frozenset(operators), Order(placement), horizon_secs))
    except (CannotServe, BadIdentity, BadEtcdSettings) as error:
        flush_logs()
        click.echo(f"gpulease serve directory: {error}", err=True)
        sys.exit(EXIT_CANNOT_SERVE)


async def _serve(
    settings: EtcdSettings,
    addresses: list[Address],
    files: IdentityFiles | None,
    operators: frozenset[str],
    order: Order,
    horizon_s: float,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe, BadIdentity or BadEtcdSettings."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = EtcdClient(settings)
    fleet = FleetWatch(client, order, horizon_s)
    watching: asyncio.Task[None] | None = None
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        server = DirectoryServer(fleet, files, operators)
        try:
            for address in addresses:
                server.listen(address)
            watching = asyncio.ensure_future(fleet.run())
            await asyncio.wait((stopping, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                # It never ends by itself, so it failed: better no directory than one that knows nothing more.
                watching.result()
        finally:
            await server.close()
    finally:
        stopping.cancel()
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        await client.close()


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
