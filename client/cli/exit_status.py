"""How commands end: exit statuses, and a sentence for whatever went wrong, never a traceback."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import click

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
"""What click says of a command line that makes no sense, too."""

EXIT_NO_DAEMON: Final = 69
"""EX_UNAVAILABLE of sysexits(3): nobody answers."""

EXIT_FAULT: Final = 70
"""EX_SOFTWARE: a fault of this program's own."""

EXIT_CANNOT_WRITE: Final = 74
"""EX_IOERR: a file or the output can't be read or written."""

TRACEBACK_VARIABLE: Final = "GPULEASE_TRACEBACK"
"""If set, a fault of this program's own is shown as Python shows it, for its authors."""


class CannotStart(Exception):
    """What a command needs besides the daemon it asks is not there; the message has why."""


@contextmanager
def failures_as_sentences() -> Iterator[None]:
    """Ends the process with a sentence on stderr and a status that says what kind of failure it was."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        die_by_signal(signal.SIGINT)
    except BrokenPipeError:
        die_by_signal(signal.SIGPIPE)
    except CannotStart as error:
        fail(str(error), EXIT_FAILED)
    except OSError as error:
        _drop_output()
        fail(_about(error), EXIT_CANNOT_WRITE)
    except Exception as error:
        _fail_by(error)


def _fail_by(error: Exception) -> NoReturn:
    # Only here: these take longer to import than most commands take to run.
    from gpulease.client.errors import Disconnected, GpuLeaseError

    if isinstance(error, Disconnected):
        fail(str(error), EXIT_NO_DAEMON)
    if isinstance(error, GpuLeaseError):
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    about = f"{type(error).__name__}: {error}"
    fail(f"a fault of gpulease itself: {about}. With {TRACEBACK_VARIABLE}=1 it shows where", EXIT_FAULT)


def check_words(words: Iterable[str]) -> None:
    """End, as for a command line that makes no sense, if any of them is no text: no message could carry it."""
    for word in words:
        # What the locale can't decode Python smuggles in as surrogates (PEP 383).
        if any("\ud800" <= mark <= "\udfff" for mark in word):
            fail(f"{word!r} is no text in this locale", EXIT_USAGE)


def fail(message: str, status: int) -> NoReturn:
    """Say what is wrong and end."""
    from gpulease.client.cli.tables import shown

    with suppress(OSError):
        click.echo("gpulease: " + "\n".join(map(shown, message.splitlines())), err=True)
    sys.exit(status)


def die_by_signal(number: signal.Signals) -> NoReturn:
    """End as a signal ends any program: a shell sees it, and stops its script, too."""
    if number == signal.SIGPIPE:
        _drop_output()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):  # SIGKILL has no other handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


def interrupt_unwinds() -> None:
    """From here on an interrupt is an exception again, so that a command undoes what it has begun."""
    with suppress(ValueError):  # not the main thread: then no signal is handled here
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _about(error: OSError) -> str:
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else f"can't read or write: {said}"


def _drop_output() -> None:
    """What could not be written is not tried again when the interpreter ends, which would say so in its own words."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
