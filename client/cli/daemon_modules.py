"""`gpulease audit` and `gpulease pki`: commands for which a module of the daemon replaces this process.

Client and daemon don't import each other, so this process is replaced by one that runs the daemon's module.
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final, NoReturn

import click

from gpulease.client.console.exit_status import MissingPrerequisite

_STARTER: Final = "from gpulease.entry_points import module_of_daemon; module_of_daemon()"

DAEMON: Final = "daemon"
FLEET: Final = "daemon,fleet"
"""Extras that install the packages that modules of the daemon need."""


def become_module(module: str, words: Sequence[str], extra: str = DAEMON) -> NoReturn:
    """Replace this process with one that runs a module of the daemon.

    Args:
        module: The module's name.
        words: The module's arguments.
        extra: The extra that installs the packages that the module needs.

    Raises MissingPrerequisite if no daemon is installed.
    """
    # The client may be installed without the daemon.
    if find_spec(module.rpartition(".")[0]) is None:
        raise MissingPrerequisite(
            f"the daemon is not installed with this client: pip install '.[{extra}]' in gpulease's repository"
        )
    # execv keeps the process id and the terminal, so a shell sees the same command.
    os.execv(sys.executable, [sys.executable, "-P", "-c", _STARTER, extra, module, *words])


# These are the settings of commands that pass on all their words, including --help.
PASSES_ON: Final[dict[str, Any]] = {"context_settings": {"ignore_unknown_options": True}, "add_help_option": False}
words_argument = click.argument("words", nargs=-1, type=click.UNPROCESSED)

RECOMPUTE: Final = "recompute"

AUDIT_MODULE: Final = "gpulease.daemon.record.audit"


@click.command("audit", **PASSES_ON)
@words_argument
def audit(words: tuple[str, ...]) -> None:
    """Read audit logs: verify, show, usage, head, recompute. See `gpulease audit -h`."""
    if words[:1] == (RECOMPUTE,):
        # The daemon's module can't decode, because the daemon imports nothing of the client.
        from gpulease.client.cli.audit_recompute import recompute

        recompute.main(list(words[1:]), f"gpulease audit {RECOMPUTE}", standalone_mode=False)
        return
    become_module(AUDIT_MODULE, words)


PKI_MODULE: Final = "gpulease.daemon.remote.pki"


@click.command("pki", **PASSES_ON)
@words_argument
def pki(words: tuple[str, ...]) -> None:
    """Make a test authority and certificates: init, issue, revoke. See `gpulease pki -h`."""
    become_module(PKI_MODULE, words)
