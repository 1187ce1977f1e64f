"""`gpulease audit`: reading audit logs, which is done by a module of the daemon in this process's place."""

from typing import Final

import click

from gpulease.client.cli.handing_on import hand_on

MODULE: Final = "gpulease.daemon.audit"


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def audit(words: tuple[str, ...]) -> None:
    """Read audit logs: verify, show, usage, head. `gpulease audit -h` says more."""
    hand_on(MODULE, words)
