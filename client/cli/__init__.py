"""The command `gpulease`."""

import signal


def interrupt_ends_it() -> None:
    """Make an interrupt end the process at once and silently: before a command runs, there is nothing to undo."""
    # Do nothing if the parent has set interrupts to be ignored, as shells do for `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
