"""The command `gpulease`: everything that a person types."""

import signal


def interrupt_ends_it() -> None:
    """Make an interrupt end the process at once, silently: until a command runs, there is nothing to undo."""
    # The parent may have set interrupts to be ignored, as shells do for `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
