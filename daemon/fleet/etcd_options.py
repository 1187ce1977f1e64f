"""Command-line options for reaching a fleet's etcd, and the transactions of operators' commands."""

import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings, parse_endpoints
from gpulease.daemon.fleet.etcd.transactions import Transaction, TransactionAnswer, TransactionRejected, Unknown

FILE: Final = click.Path(path_type=Path, dir_okay=False)
EXIT_FAILED: Final = 1


class NotDone(Exception):
    """etcd refused a command's transaction, or did not answer it. The text contains advice."""


async def done(client: EtcdClient, transaction: Transaction) -> TransactionAnswer:
    """Execute a transaction and return etcd's answer. Raises NotDone if etcd refuses or does not answer."""
    match await client.do(transaction):
        case TransactionAnswer() as answer:
            return answer
        case TransactionRejected(reason):
            raise NotDone(f"etcd refused the request: {reason}")
        case Unknown(reason):
            raise NotDone(f"etcd did not answer, so the outcome is unknown: {reason}. Run this command again")


def etcd_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options `--etcd`, `--etcd-ca`, `--etcd-certificate` and `--etcd-key`.

    The command gets them as one argument `etcd`, an EtcdSettings.
    """

    @wraps(command)
    def with_settings(
        etcd: str, etcd_ca: Path | None, etcd_certificate: Path | None, etcd_key: Path | None, **others: Any
    ) -> Any:
        # The command line sets SIGPIPE to end the process. Ignore it, because a peer may close its connection.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            settings = EtcdSettings(parse_endpoints(etcd), etcd_ca, etcd_certificate, etcd_key)
        except BadEtcdSettings as error:
            raise click.UsageError(str(error)) from None
        return command(etcd=settings, **others)

    for option in (
        click.option("--etcd-key", type=FILE, help="The private key of that certificate."),
        click.option(
            "--etcd-certificate",
            type=FILE,
            help="A certificate for connections to etcd; its common name is the name of the user in etcd.",
        ),
        click.option(
            "--etcd-ca",
            type=FILE,
            help="A file with the CA of etcd's certificates; without it, connections are not encrypted.",
        ),
        click.option(
            "--etcd", required=True, help="The addresses of etcd's members: etcd://HOST[:PORT][,HOST[:PORT]...]."
        ),
    ):
        with_settings = option(with_settings)
    return with_settings
