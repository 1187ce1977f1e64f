"""Entry point of the command `gpulease`: handles interrupts before anything slow is imported."""

import signal
import sys

from gpulease.client.cli import interrupt_ends_it


def run() -> None:
    """Run the command that the command line names."""
    # Before the imports: an interrupt during them would print a traceback.
    interrupt_ends_it()
    from gpulease.client.cli.__main__ import PROGRAM, main

    main(prog_name=PROGRAM)


def run_module_instead() -> None:
    """Run the module that the second argument names; the first names the extras that it needs.

    The process ends as every command does.
    """
    interrupt_ends_it()
    # A closed pipe ends the process silently, as it ends any program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from runpy import run_module

    from gpulease.client.console.exit_status import failures_as_sentences, needing

    # The daemon's package is installed with the client; the packages that it needs may not be.
    with failures_as_sentences(), needing(sys.argv.pop(1)):
        run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
