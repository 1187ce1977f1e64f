"""Where the command `gpulease` begins: nothing slow is imported before an interrupt is provided for."""

import signal
import sys


def run() -> None:
    """Run the command that the command line names."""
    interrupt_ends_it()
    from gpulease.client.cli.__main__ import PROGRAM, main

    main(prog_name=PROGRAM)


def run_module_instead() -> None:
    """Be the module that the first word names, of a part that is not imported here; it ends as every command does."""
    interrupt_ends_it()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from runpy import run_module

    from gpulease.client.cli.exit_status import CannotStart, failures_as_sentences

    with failures_as_sentences():
        try:
            run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        except ModuleNotFoundError as error:
            # The daemon's package is there wherever its client is; what it needs may not be.
            raise CannotStart(
                f"{error.name} is not installed: pip install '.[daemon]' in gpulease's repository"
            ) from None


def interrupt_ends_it() -> None:
    """Until a command runs there is nothing to undo: an interrupt ends the process at once, without a word."""
    # Who started it may have it ignore interrupts, as shells do behind an `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
