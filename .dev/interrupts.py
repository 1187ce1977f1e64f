"""What an interrupt (Ctrl-C) does to a command. Imports nothing slow: a command calls it before its other imports."""

import signal


def interrupt_ends_it() -> None:
    """Make an interrupt end the process at once and silently: before a command runs, there is nothing to undo."""
    # Do nothing if the parent has set interrupts to be ignored, as shells do for `&`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_unwinds() -> None:
    """Make interrupts raise KeyboardInterrupt again, so that a command can undo the steps that it has begun."""
    from contextlib import suppress

    with suppress(ValueError):  # not the main thread, which alone can handle signals
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
