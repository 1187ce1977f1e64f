"""`gpulease pki`: test certificates, which are made by a module of the daemon in this process's place."""

import os
import sys
from importlib.util import find_spec
from typing import Final

import click

from gpulease.client.cli.endings import CannotStart

MODULE: Final = "gpulease.daemon.pki"


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def pki(words: tuple[str, ...]) -> None:
    """Make a test authority and certificates: init, issue, revoke. `gpulease pki -h` says more."""
    # The daemon need not be installed where its client is.
    if find_spec(MODULE.rpartition(".")[0]) is None:
        raise CannotStart("no daemon is installed beside this client: pip install 'gpulease[daemon]'")
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *words])
