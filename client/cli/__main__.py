"""`gpulease`: the group of commands, and how their errors look."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import click

from gpulease.client.cli.audit import audit
from gpulease.client.cli.bench import bench
from gpulease.client.cli.demo import demo
from gpulease.client.cli.drain import drain, events
from gpulease.client.cli.metrics import health, metrics
from gpulease.client.cli.node import fence, info, leases, revoke
from gpulease.client.cli.pki import pki
from gpulease.client.cli.private_daemon import CannotStart
from gpulease.client.cli.serve import serve
from gpulease.client.cli.serve_models import models
from gpulease.client.cli.verify import verify
from gpulease.client.errors import Disconnected, GpuLeaseError

EXIT_FAILED: Final = 1
EXIT_NO_DAEMON: Final = 69
"""EX_UNAVAILABLE of sysexits(3): nobody answers."""


class _Group(click.Group):
    """Shows an expected failure as a sentence, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Disconnected as error:
            _fail(str(error), EXIT_NO_DAEMON)
        except (GpuLeaseError, CannotStart) as error:
            _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


def _fail(message: str, status: int) -> None:
    click.echo(f"gpulease: {message}", err=True)
    sys.exit(status)


def _version() -> str:
    try:
        return version("gpulease")
    except PackageNotFoundError:
        return "0+unknown"  # run from a checkout that was not installed


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="gpulease")
def main() -> None:
    """Lease slices of a GPU. The daemon is found by GPULEASE_ADDRESS, else at its default socket."""


for _command in (demo, info, leases, revoke, drain, events, fence, health, metrics, audit, pki, bench, verify, serve):
    main.add_command(_command)
serve.add_command(models)


if __name__ == "__main__":
    main()
