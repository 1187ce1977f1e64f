"""`python -m gpulease.daemon.remote.pki`: the program that `gpulease pki` runs."""

import datetime
import math
import sys
from pathlib import Path
from typing import Any, Final

import click

from gpulease.daemon.remote.pki.certificates import AUTHORITY_LIFE, LEAF_LIFE, PkiAuthority, PkiError

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
EXIT_CANNOT_WRITE: Final = 74
"""EX_IOERR of sysexits(3): a file can't be read or written."""

MAX_DAYS: Final = 36_500
"""A hundred years. A larger number is a typing mistake, and could exceed the last year that a certificate can
contain."""


class _Days(click.FloatRange):
    """Days above 0, at most MAX_DAYS. FloatRange accepts nan, whatever its bounds are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        days = float(super().convert(value, param, ctx))
        if math.isnan(days):
            self.fail(f"{value} is not a number.", param, ctx)
        return days


_DAYS = _Days(min=0, min_open=True, max=MAX_DAYS)


class _PkiGroup(click.Group):
    """Shows an expected failure as a sentence, never as a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PkiError as error:
            click.echo(f"gpulease pki: {error}", err=True)
            sys.exit(1)
        except OSError as error:
            description = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            click.echo(f"gpulease pki: {description}", err=True)
            sys.exit(EXIT_CANNOT_WRITE)


@click.group(cls=_PkiGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make a test authority in the folder DIR, and its certificates for nodes and remote tenants."""


@main.command()
@_FOLDER
@click.option(
    "--days",
    type=_DAYS,
    default=AUTHORITY_LIFE.days,
    show_default=True,
    help="How long the authority's certificate is valid.",
)
def init(folder: Path, days: float) -> None:
    """Make the authority: its key, its certificate and an empty revocation list."""
    authority = PkiAuthority.create(folder, datetime.timedelta(days=days))
    click.echo(f"{authority.certificate_path}\n{authority.crl_path}")


@main.command()
@_FOLDER
@click.option(
    "--server", multiple=True, metavar="HOST", help="Issue a certificate for a node with this host name; repeatable."
)
@click.option("--tenant", metavar="NAME", help="Issue a certificate for the tenant with this name.")
@click.option(
    "--days", type=_DAYS, default=LEAF_LIFE.days, show_default=True, help="How long the certificate is valid."
)
def issue(folder: Path, server: tuple[str, ...], tenant: str | None, days: float) -> None:
    """Make a certificate and its key. Revoked and expired ones are moved away."""
    if bool(server) == bool(tenant):
        raise click.UsageError("give either --server HOST or --tenant NAME")
    authority, life = PkiAuthority.load(folder), datetime.timedelta(days=days)
    issued = authority.issue_tenant(tenant, life) if tenant else authority.issue_server(server, life)
    click.echo(f"{issued.certificate}\n{issued.key}")


@main.command()
@_FOLDER
@click.argument("certificate", type=click.Path(dir_okay=False, path_type=Path))
def revoke(folder: Path, certificate: Path) -> None:
    """Put CERTIFICATE on the authority's revocation list: a daemon with this list as `crl` no longer accepts it."""
    PkiAuthority.load(folder).revoke(certificate)
    click.echo(f"{folder / 'crl.pem'}")


if __name__ == "__main__":
    main(prog_name="gpulease pki")
