"""`gpulease pki`: test certificates, which are made by a module of the daemon in this process's place."""

from typing import Final

import click

from gpulease.client.cli.handing_on import hand_on

MODULE: Final = "gpulease.daemon.pki"


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def pki(words: tuple[str, ...]) -> None:
    """Make a test authority and certificates: init, issue, revoke. `gpulease pki -h` says more."""
    hand_on(MODULE, words)
