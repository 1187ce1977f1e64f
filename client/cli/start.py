"""Entry point of the command `gpulease`: handles interrupts before anything slow is imported."""

import signal
import sys


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


def interrupt_ends_it() -> None:
    """Make an interrupt end the process at once, silently: until a command runs, there is nothing to undo."""
    # The parent may have set interrupts to be ignored, as shells do for `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
