"""Entry point of the command `gpulease`. It handles interrupts before it imports anything slow."""

import signal
import sys

from gpulease.client.cli import interrupt_ends_it


def run() -> None:
    """Run the command that the command line names."""
    # Do this before the imports, because an interrupt during them would print a traceback.
    interrupt_ends_it()
    from gpulease.client.cli.__main__ import PROGRAM, main

    main(prog_name=PROGRAM)


def run_module_instead() -> None:
    """Run the module that the second argument names. The first argument names the extras that the module needs.

    The process ends as every command does.
    """
    interrupt_ends_it()
    # Let a closed pipe end the process silently, as it ends most programs.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from runpy import run_module

    from gpulease.client.console.exit_status import failures_as_sentences, needing

    # The daemon is installed with the client, but the packages that it needs may not be.
    with failures_as_sentences(), needing(sys.argv.pop(1)):
        run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
