"""Where the command `gpulease` begins: nothing slow is imported before an interrupt is provided for."""

import signal


def run() -> None:
    """Run the command that the command line names."""
    interrupt_ends_it()
    from gpulease.client.cli.__main__ import PROGRAM, main

    main(prog_name=PROGRAM)


def interrupt_ends_it() -> None:
    """Until a command runs there is nothing to undo: an interrupt ends the process at once, without a word."""
    # Who started it may have it ignore interrupts, as shells do behind an `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
