"""The command `gpulease serve directory` (`python -m gpulease.daemon.fleet.directory`)."""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

import click

from gpulease.daemon.fleet.directory.directory_metrics import metrics_served
from gpulease.daemon.fleet.directory.directory_server import NO_TENANTS, CannotServe, DirectoryServer, bound_at
from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd_options import FILE, etcd_options
from gpulease.daemon.host.processes import set_name
from gpulease.daemon.host.version import AGENT
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import flush_logs, go_on_logging, log_event
from gpulease.daemon.remote.node_identity import BadIdentity, IdentityFiles
from gpulease.daemon.remote.tls_settings import parse_certificate_names
from gpulease.daemon.web.http_settings import HttpSettings, parse_http
from gpulease.imports import end_imports
from gpulease.protocol.address import Address, parse_address
from gpulease.protocol.http_origin import parse_host_names

EXIT_CANNOT_SERVE: Final = 1


@click.command("directory", context_settings={"help_option_names": ["-h", "--help"]})
@etcd_options
@click.option(
    "--listen",
    "listen",
    multiple=True,
    required=True,
    help="An address to listen on: tls:HOST:PORT, unix:PATH or, on loopback, tcp:HOST:PORT. Repeatable.",
)
@click.option(
    "--certificate",
    type=FILE,
    help="This directory's certificate for tenants, followed by the certificates of the CAs above it.",
)
@click.option("--key", type=FILE, help="Its key.")
@click.option("--client-ca", type=FILE, help="A file with the CAs that sign tenants' certificates.")
@click.option("--crl", type=FILE, help="A file with lists of revoked certificates, one for each CA in --client-ca.")
@click.option(
    "--operator",
    "operators",
    multiple=True,
    help="A tenant that may see the nodes and the names of all tenants. Repeatable.",
)
@click.option(
    "--tenant-of-certificate",
    "tenants",
    multiple=True,
    metavar="NAME=TENANT",
    help="An entry of the nodes' [tenant_of_certificate], where NAME is URI:... or DNS:... Repeatable.",
)
@click.option(
    "--placement",
    type=click.Choice([order.value for order in PlacementOrder]),
    default="pack",
    show_default=True,
    help="Which node to name first: the fullest one that has room (pack), or the emptiest (spread).",
)
@click.option("--http", "http_address", metavar="HOST:PORT", help="Serve metrics over HTTP at this loopback address.")
@click.option(
    "--http-host",
    "http_hosts",
    multiple=True,
    help="A further host name that requests may have in Host, such as a proxy's. Repeatable.",
)
def main(
    etcd: EtcdSettings,
    listen: tuple[str, ...],
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    crl: Path | None,
    operators: tuple[str, ...],
    tenants: tuple[str, ...],
    placement: str,
    http_address: str | None,
    http_hosts: tuple[str, ...],
) -> None:
    """List nodes with room for the tenants of a fleet. Run two to five directories for a fleet."""
    try:
        # Step 1: check the whole command line before anything starts. A mistake ends the command with exit status 2.
        addresses = [parse_address(text) for text in listen]
        files = None
        if certificate is not None or key is not None or client_ca is not None or crl is not None:
            if certificate is None or key is None or client_ca is None:
                raise ValueError("TLS needs all of --certificate, --key and --client-ca")
            files = IdentityFiles(certificate, key, client_ca, crl)
        of_certificate = _of_certificate(tenants, operators)
        http = None if http_address is None else HttpSettings(parse_http(http_address), parse_host_names(http_hosts))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # Step 2: become the service.
    set_name("gpul-directory")
    go_on_logging("directory")
    _raise_descriptor_limit()
    try:
        asyncio.run(
            _serve(etcd, addresses, files, frozenset(operators), of_certificate, PlacementOrder(placement), http)
        )
    except (CannotServe, BadIdentity, BadEtcdSettings) as error:
        flush_logs()
        click.echo(f"gpulease serve directory: {error}", err=True)
        sys.exit(EXIT_CANNOT_SERVE)


async def _serve(
    settings: EtcdSettings,
    addresses: list[Address],
    files: IdentityFiles | None,
    operators: frozenset[str],
    of_certificate: Mapping[str, str],
    order: PlacementOrder,
    http: HttpSettings | None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe, BadIdentity or BadEtcdSettings."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    # Open the client and all listeners first, so that a wrong address or certificate ends the process at its start.
    client = EtcdClient(settings)
    fleet = FleetWatch(client, order)
    watching: asyncio.Task[None] | None = None
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        server = DirectoryServer(fleet, files, operators, of_certificate)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(server.close)
            for address in addresses:
                server.listen(address)
            # Follow etcd from now on. Until the first read is complete, requests fail with a reason.
            watching = asyncio.ensure_future(fleet.run())
            awaited = {stopping, watching}
            if http is not None:
                listener = stack.enter_context(_bound_http(http))
                awaited.add(await stack.enter_async_context(metrics_served(server.metrics, http, listener)))
            # Run until a signal comes, or until one part fails.
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # If another task ended, it failed. Raise its error: tenants then use another directory.
                task.result()
    finally:
        stopping.cancel()
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        await client.close()


def _of_certificate(texts: tuple[str, ...], operators: tuple[str, ...]) -> Mapping[str, str]:
    """Return the tenants by names of certificates, as in the nodes' settings. Raises ValueError."""
    if not texts:
        return NO_TENANTS
    names = parse_certificate_names(dict(text.rpartition("=")[::2] for text in texts))
    # If no certificate gives a tenant this operator's name, the name is a mistake.
    for operator in operators:
        if operator not in names.values():
            raise ValueError(
                f"--operator {operator}: no --tenant-of-certificate gives a certificate this tenant's name"
            )
    return names


def _bound_http(http: HttpSettings) -> socket.socket:
    """Return a listening socket for metrics. Raises CannotServe."""
    try:
        listener, bound = bound_at(http.address)
    except OSError as error:
        bind_address = str(http.address).removeprefix("tcp:")
        raise CannotServe(f"can't serve metrics at {bind_address}: {error.strerror}") from None
    address = f"http://{str(bound).removeprefix('tcp:')}/metrics"
    log_event(LogEvent.DIRECTORY_LISTENS, address=address, version=AGENT)
    return listener


def _raise_descriptor_limit() -> None:
    # MAX_CONNECTIONS descriptors exceed the soft limit of 1,024 that most hosts set.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


if __name__ == "__main__":
    end_imports()
    main(prog_name="gpulease serve directory")
